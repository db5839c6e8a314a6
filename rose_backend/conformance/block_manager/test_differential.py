"""The manager under test and vLLM's serve the same random traffic; the outcomes are compared.

Every slot that a request reads is checked after every step (see ``host``), so equal outcomes are not two equal errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from rose_backend.conformance.block_manager.drive import Arrival, Record, drive, make_traffic
from rose_backend.conformance.block_manager.host import Host
from rose_backend.conformance.block_manager.managers import MANAGERS, find_manager

SEEDS = range(4)


class Records(NamedTuple):
    """What came of the same traffic."""

    tested: Record
    stock: Record


@pytest.fixture
def name(pytestconfig: pytest.Config) -> str:
    """Return the manager under test; without the option it is Rose's."""
    return str(pytestconfig.getoption("conformance_block_manager", None) or "rose")


def drive_both(
    name: str, traffic: list[Arrival], num_blocks: int, token_budget: int, **options: Any
) -> Records:
    """Serve the same traffic with each manager; everybody must get exactly what a run without cache generates."""
    records = []
    for each in (name, "stock"):
        host = Host(find_manager(each), num_blocks, **options)
        records.append(drive(host, traffic, token_budget=token_budget))
        host.check_no_leak()
        assert records[-1].outputs == {arrival.name: arrival.expected for arrival in traffic}, each
    return Records(*records)


def compare_hits(
    name: str, tested: Record, stock: Record, record_property: Callable[[str, object], None]
) -> None:
    """Rose's manager must find no less; with another order of eviction some traffic finds less, which is reported."""
    found, found_by_stock = tested.hit_tokens, stock.hit_tokens
    assert found_by_stock > 0
    if found < found_by_stock:
        assert find_manager(name) is not MANAGERS["rose"], f"{found} tokens found, by vLLM's {found_by_stock}"
        record_property(
            "differs", "finds less than vLLM's manager in some traffic for which blocks are short"
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_without_caching_as_many_blocks_are_held_at_every_step_as_by_vllms(name: str, seed: int) -> None:
    traffic = make_traffic(seed, num_requests=60, one_per_step=False)
    tested, stock = drive_both(name, traffic, 18, 48, enable_caching=False)
    assert tested.used_blocks == stock.used_blocks
    assert tested.num_preemptions == stock.num_preemptions > 0
    assert tested.hit_tokens == stock.hit_tokens == 0


@pytest.mark.parametrize("has_items", [False, True], ids=["text", "images"])
@pytest.mark.parametrize("seed", SEEDS)
def test_with_room_for_all_no_request_finds_less_than_with_vllms(
    name: str, seed: int, has_items: bool
) -> None:
    # One newcomer per step, its prompt computed at once, no eviction: when a step starts, both have seen the same.
    traffic = make_traffic(seed, num_requests=60, one_per_step=True, has_items=has_items)
    tested, stock = drive_both(name, traffic, 800, 10_000)
    assert tested.hits.keys() == stock.hits.keys()
    assert {each: hit for each, hit in tested.hits.items() if hit < stock.hits[each]} == {}
    assert stock.hit_tokens > 0


@pytest.mark.parametrize("windows", [(20,), (40, 7), (2, 33, 33)], ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_with_windows_everybody_is_served_and_no_less_is_found(
    name: str, seed: int, windows: tuple[int, ...], record_property: Callable[[str, object], None]
) -> None:
    traffic = make_traffic(seed, num_requests=60, one_per_step=False)
    # As few blocks as one sequence needs, and half as many again.
    num_blocks = 1 + 8 * (1 + len(windows)) * 3 // 2
    tested, stock = drive_both(name, traffic, num_blocks, 48, windows=windows)
    assert tested.num_preemptions > 0 and stock.num_preemptions > 0
    compare_hits(name, tested, stock, record_property)


@pytest.mark.parametrize("has_items", [False, True], ids=["text", "images"])
@pytest.mark.parametrize("seed", SEEDS)
def test_under_pressure_everybody_is_served_and_no_less_is_found(
    name: str, seed: int, has_items: bool, record_property: Callable[[str, object], None]
) -> None:
    traffic = make_traffic(seed, num_requests=60, one_per_step=False, has_items=has_items)
    tested, stock = drive_both(name, traffic, 18, 48)
    assert tested.num_preemptions > 0 and stock.num_preemptions > 0
    compare_hits(name, tested, stock, record_property)
