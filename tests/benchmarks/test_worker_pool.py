"""Engines in other processes: what they answer, print, lack and do wrong reaches the benchmark."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.support import worker_pool
from benchmarks.support.engines import EngineOptions
from benchmarks.support.turns import EngineError, paused
from benchmarks.support.worker_pool import WorkerPool, worker_environment
from benchmarks.support.workload import RandomRequests
from tests.benchmarks.fake_engine import write_fake_sglang
from tests.support.patience import HANG_S

OPTIONS = EngineOptions("some model", "float32", "cpu", 4, kv_cache_tokens=64, kv_cache_bytes=4096)
WORKLOAD = RandomRequests(3, (2, 5), (4, 4), "greedy", seed=1).as_json()

Started = Callable[..., WorkerPool]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """Return a function that starts the fake engine with environment variables."""
    pools: list[WorkerPool] = []
    path = write_fake_sglang(tmp_path / "site")

    def start(python_path: str | None = path, **environment: str) -> WorkerPool:
        pool = WorkerPool("offline", tmp_path / "logs", vocab_size=9)
        pools.append(pool)
        pool.add("sglang", "sglang", OPTIONS, worker_environment("sglang", python_path, environment))
        pool.wait_until_started()
        return pool

    yield start
    for pool in pools:
        pool.__exit__(None, None, None)


def test_an_engine_that_prints_is_understood(started: Started) -> None:
    pool = started()
    assert pool.facts["sglang"]["version"] == "0.fake"
    answer = pool.running["sglang"].ask("generate", workload=WORKLOAD)
    assert answer["output_tokens"] == 12
    assert 6 <= answer["input_tokens"] <= 15
    assert 0 < answer["seconds"] < HANG_S
    assert "generating for 3" in pool.running["sglang"].log.read_text()
    with pytest.raises(EngineError, match=r"no answer within 0 s\n(.*\n)*.*generating for 3"):
        pool.running["sglang"].receive(timeout_s=0.01)


def test_an_engine_that_is_not_installed_is_named(started: Started) -> None:
    pool = started(python_path=None)
    assert pool.missing == {"sglang": "No module named 'sglang'"}
    assert pool.running == pool.failed == {}


def test_an_engine_that_stops_early_is_no_fast_engine(started: Started) -> None:
    pool = started(FAKE_LOST_TOKENS="1")
    with pytest.raises(EngineError, match="got 9 new tokens, 12 were asked for"):
        pool.running["sglang"].ask("generate", workload=WORKLOAD)


def test_the_last_words_of_a_dead_engine_are_passed_on(started: Started) -> None:
    pool = started(FAKE_CALLS="0")
    worker = pool.running["sglang"]
    with pytest.raises(EngineError, match=r"the process ended\n(.*\n)*.*something terrible") as death:
        worker.ask("generate", workload=WORKLOAD)
    pool.drop("sglang", death.value)
    assert pool.running == {}
    assert "something terrible" in pool.failed["sglang"]


def test_a_paused_engine_ends_at_once_and_in_order(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "MAX_STOP_S", HANG_S)
    worker = started().running["sglang"]
    with paused([worker.pid]):
        worker.stop()
    assert "goodbye" in worker.log.read_text()


def test_an_interrupt_while_closing_leaves_no_engine_and_loses_no_report(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = started()
    path = pool.running["sglang"].log.parents[1] / "site"
    pool.add("other", "sglang", OPTIONS, worker_environment("sglang", str(path)))
    processes = [worker._process for worker in pool.running.values()]

    def interrupted(root: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(worker_pool, "resume", interrupted)
    pool.__exit__(None, None, None)
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2
    pool.running.clear()


def test_an_engine_is_woken_by_a_token(started: Started) -> None:
    worker = started().running["sglang"]
    worker.wake()
    assert worker.log.read_text().count("generating for 1\n") == 1


def test_all_are_asked_and_those_that_fail_are_dropped(started: Started, tmp_path: Path) -> None:
    pool = started(FAKE_CALLS="1")
    pool.add("other", "sglang", OPTIONS, worker_environment("sglang", str(tmp_path / "site")))
    pool.running["other"].receive()
    pool.ask_all("generate", workload=WORKLOAD)
    assert set(pool.running) == {"sglang", "other"}
    pool.ask_all("wake")
    assert set(pool.running) == {"other"}
    assert "something terrible" in pool.failed["sglang"]


def test_a_broken_installation_is_a_failure_and_not_missing(started: Started, tmp_path: Path) -> None:
    (tmp_path / "site" / "sglang" / "srt" / "entrypoints" / "engine.py").write_text("import not_there\n")
    pool = started()
    assert pool.missing == {}
    assert "No module named 'not_there'" in pool.failed["sglang"]
