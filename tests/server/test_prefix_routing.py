"""Prompts go to the replica that has had their beginning, unless it has much more to do than another."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from rose_backend.engine.request import ProcessedInput
from rose_backend.engine.sampling_params import SamplingParams

pytest.importorskip("ray", reason="Ray is not installed")

from rose_backend.server.prefix_routing import PrefixMap, PrefixRouter, _prefix_digests

IDLE = {"a": 0, "b": 0, "c": 0}


def prompt(first: int, length: int = 100, *, namespace: bytes = b"", lora_id: int = 0) -> ProcessedInput:
    """Return a prompt whose tokens are consecutive numbers."""
    ids = np.arange(first, first + length, dtype=np.int32)
    return ProcessedInput(0, None, ids, SamplingParams(), namespace, [], b"", lora_id)


def test_the_same_beginning_goes_to_the_same_replica() -> None:
    prefixes: PrefixMap[str] = PrefixMap()
    homes = [prefixes.choose(prompt(1000 * each), IDLE) for each in range(30)]
    # New ones go to all in turns.
    assert set(Counter(homes).values()) == {10}
    for length in (64, 100, 500):
        assert [prefixes.choose(prompt(1000 * each, length), IDLE) for each in range(30)] == homes


def test_the_longest_beginning_counts() -> None:
    prefixes: PrefixMap[str] = PrefixMap()
    assert prefixes.choose(prompt(0, 64), {"a": 0}) == "a"
    assert prefixes.choose(prompt(0, 96), {"b": 0}) == "b"
    assert prefixes.choose(prompt(0, 128), IDLE) == "b"
    # Fewer tokens than a block say nothing.
    short = [prefixes.choose(prompt(0, 31), IDLE) for _ in range(30)]
    assert Counter(short) == {"a": 10, "b": 9, "c": 11}


def test_namespaces_and_adapters_share_no_beginnings() -> None:
    prefixes: PrefixMap[str] = PrefixMap()
    same = [
        prompt(0),
        prompt(0, namespace=b"key"),
        prompt(0, namespace=b"key1", lora_id=2),
        prompt(0, namespace=b"key", lora_id=12),
        prompt(0, lora_id=1),
    ]
    homes = {prefixes.choose(each, {name: 0}) for each, name in zip(same, "abcde", strict=True)}
    assert homes == set("abcde")
    idle = dict.fromkeys("abcde", 0)
    assert [prefixes.choose(each, idle) for each in reversed(same)] == list("edcba")


def test_long_prompts_are_compared_at_few_places() -> None:
    """All of them by the same ones, whatever comes after."""
    keys = _prefix_digests(prompt(0, 131_072))
    assert 50 < len(keys) < 70
    for length in (31, 32, 600, 5000, 131_000):
        shorter = _prefix_digests(prompt(0, length))
        assert shorter == keys[: len(shorter)]
    # At least seven eighths of a prompt count.
    prefixes: PrefixMap[str] = PrefixMap()
    for length in (5000, 100_000):
        prefixes.choose(prompt(length, length), {"a": 0})
        changed = prompt(length, length)
        changed.token_ids[length * 7 // 8 :] += 1
        assert prefixes.choose(changed, IDLE) == "a"
        assert len(_prefix_digests(changed)) == len(_prefix_digests(prompt(length, length)))


def test_requests_of_a_forgotten_replica_end_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("on_send_request", "on_request_completed", "on_replica_actor_died"):
        monkeypatch.setattr(PrefixRouter.__base__, name, lambda *_: None)
    router: Any = object.__new__(PrefixRouter)
    router.initialize_state()
    router.on_send_request("a")
    router.on_send_request("a")
    router.on_request_completed("a", "one")
    assert router._loads == {"a": 1}
    router.on_replica_actor_died("a")
    router.on_request_completed("a", "two")
    assert router._loads == {}


@pytest.mark.parametrize(("others", "limit"), [(0, 8), (10, 18), (64, 102)])
def test_a_busy_replica_loses_a_prompt_to_the_least_busy_one(others: int, limit: int) -> None:
    for load, expected in ((limit, "a"), (limit + 1, "c")):
        prefixes: PrefixMap[str] = PrefixMap()
        prefixes.choose(prompt(0), {"a": 0})
        assert prefixes.choose(prompt(0), {"a": load, "b": others + 1, "c": others}) == expected
        # From then on both have it.
        assert prefixes.choose(prompt(0), {"a": 5, "b": 0, "c": 6}) == "a"
        assert prefixes.choose(prompt(0), {"a": 6, "b": 0, "c": 5}) == ("c" if expected == "c" else "a")


def test_unknown_prompts_go_to_the_least_busy_replica() -> None:
    prefixes: PrefixMap[str] = PrefixMap()
    for number in range(20):
        assert prefixes.choose(prompt(1000 * number), {"a": 2, "b": 1, "c": 2}) == "b"


def test_a_replica_that_has_ended_is_forgotten() -> None:
    prefixes: PrefixMap[str] = PrefixMap()
    prefixes.choose(prompt(0), {"a": 0})
    prefixes.choose(prompt(0), {"b": 0})
    prefixes.forget("a")
    assert prefixes.choose(prompt(0), IDLE) == "b"
    prefixes.forget("b")
    assert not prefixes._owners
    assert prefixes.choose(prompt(0), {"a": 1, "b": 1, "c": 0}) == "c"


def test_what_was_used_last_is_remembered() -> None:
    prefixes: PrefixMap[str] = PrefixMap(max_prefixes=6)
    prefixes.choose(prompt(0, 96), {"a": 0})
    prefixes.choose(prompt(1000, 96), {"b": 0})
    prefixes.choose(prompt(0, 96), IDLE)
    prefixes.choose(prompt(2000, 96), {"c": 0})
    assert len(prefixes._owners) == 6
    assert prefixes.choose(prompt(0, 96), IDLE) == "a"
    assert prefixes.choose(prompt(1000, 96), {"a": 0, "b": 1, "c": 0}) != "b"
