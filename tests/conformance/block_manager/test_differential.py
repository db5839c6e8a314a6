"""Both managers serve the same random traffic; the outcomes are compared.

Every slot that a request reads is checked after every step (see ``host``), so equal outcomes are not two equal errors.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.conformance.block_manager.drive import Arrival, Record, drive, make_traffic
from tests.conformance.block_manager.host import Host
from tests.conformance.block_manager.managers import MANAGERS

SEEDS = range(4)


def drive_all(
    traffic: list[Arrival], num_blocks: int, token_budget: int, **options: Any
) -> dict[str, Record]:
    """Serve the same traffic with each manager; everybody must get exactly what a run without cache generates."""
    records = {}
    for name, entry in MANAGERS.items():
        host = Host(entry, num_blocks, **options)
        records[name] = drive(host, traffic, token_budget=token_budget)
        host.check_no_leak()
        assert records[name].outputs == {arrival.name: arrival.expected for arrival in traffic}, name
    return records


@cache
def under_pressure(seed: int, has_items: bool) -> dict[str, Record]:
    traffic = make_traffic(seed, num_requests=60, one_per_step=False, has_items=has_items)
    return drive_all(traffic, 18, 48)


@pytest.mark.parametrize("seed", SEEDS)
def test_without_caching_both_hold_the_same_number_of_blocks_at_every_step(seed: int) -> None:
    traffic = make_traffic(seed, num_requests=60, one_per_step=False)
    records = drive_all(traffic, 18, 48, enable_caching=False)
    rose, stock = records["rose"], records["stock"]
    assert rose.used_blocks == stock.used_blocks
    assert rose.num_preemptions == stock.num_preemptions > 0
    assert rose.hit_tokens == stock.hit_tokens == 0


@pytest.mark.parametrize("has_items", [False, True], ids=["text", "images"])
@pytest.mark.parametrize("seed", SEEDS)
def test_with_room_for_all_rose_finds_at_least_as_much_for_every_single_request(
    seed: int, has_items: bool
) -> None:
    # One newcomer per step, its prompt computed at once, no eviction: when a step starts, both have seen the same.
    traffic = make_traffic(seed, num_requests=60, one_per_step=True, has_items=has_items)
    records = drive_all(traffic, 800, 10_000)
    rose, stock = records["rose"], records["stock"]
    assert rose.hits.keys() == stock.hits.keys()
    assert {name: hit for name, hit in rose.hits.items() if hit < stock.hits[name]} == {}
    assert rose.hit_tokens > stock.hit_tokens > 0


@pytest.mark.parametrize("windows", [(20,), (40, 7), (2, 33, 33)], ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_with_windows_both_serve_everybody_and_rose_finds_no_less(
    seed: int, windows: tuple[int, ...]
) -> None:
    traffic = make_traffic(seed, num_requests=60, one_per_step=False)
    # As few blocks as one sequence needs, and half as many again.
    num_blocks = 1 + 8 * (1 + len(windows)) * 3 // 2
    records = drive_all(traffic, num_blocks, 48, windows=windows)
    rose, stock = records["rose"], records["stock"]
    assert rose.num_preemptions > 0 and stock.num_preemptions > 0
    assert rose.hit_tokens >= stock.hit_tokens > 0


@pytest.mark.parametrize("has_items", [False, True], ids=["text", "images"])
@pytest.mark.parametrize("seed", SEEDS)
def test_under_pressure_both_serve_everybody_and_rose_finds_no_less(seed: int, has_items: bool) -> None:
    records = under_pressure(seed, has_items)
    rose, stock = records["rose"], records["stock"]
    assert rose.num_preemptions > 0 and stock.num_preemptions > 0
    assert rose.hit_tokens >= stock.hit_tokens > 0
