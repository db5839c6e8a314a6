"""The device that stands in for a model: a token for each request that has computed all it has, and the step's time."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.worker.cpu_worker", reason="vLLM's CPU build is not installed")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.v1.worker.cpu_worker import CPUWorker

    # The import replaces it for good; other tests in this process want a model.
    monkeypatch.setattr(CPUWorker, "execute_model", CPUWorker.execute_model)
    from benchmarks.online.host_only_server import ConstantDevice

    return ConstantDevice(0.02)


def step(
    counts: dict[str, int],
    *,
    new: dict[str, tuple[int, int]] | None = None,
    running: dict[str, int] | None = None,
    finished: tuple[str, ...] = (),
) -> Any:
    """Return what a scheduler plans; new requests have the length of their prompt and what of it is in the cache."""
    return SimpleNamespace(
        finished_req_ids=set(finished),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, prompt_token_ids=[0] * length, num_computed_tokens=cached)
            for name, (length, cached) in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(running or {}), num_computed_tokens=list((running or {}).values())
        ),
        num_scheduled_tokens=counts,
    )


def test_a_token_comes_with_the_last_chunk_and_with_each_step_behind(device: Any) -> None:
    start = time.perf_counter()
    first = device.run(step({"a": 4, "b": 2}, new={"a": (10, 0), "b": (7, 5)}))
    assert time.perf_counter() - start >= 0.02
    assert first.req_ids == ["a", "b"] and first.req_id_to_index == {"a": 0, "b": 1}
    assert [len(tokens) for tokens in first.sampled_token_ids] == [0, 1]
    second = device.run(step({"a": 6, "b": 1}, running={"a": 4, "b": 7}))
    assert [len(tokens) for tokens in second.sampled_token_ids] == [1, 1]
    # Computed again behind a preemption: what it has drawn is no news.
    again = device.run(step({"b": 8}, running={"b": 0}, finished=("a",)))
    assert [len(tokens) for tokens in again.sampled_token_ids] == [0]
    assert [len(tokens) for tokens in device.run(step({"b": 1}, running={"b": 8})).sampled_token_ids] == [1]


def test_a_step_of_nothing_takes_no_time(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"it sleeps for {seconds} s"))
    assert device.run(step({})).req_ids == []
