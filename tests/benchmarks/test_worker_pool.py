"""Engines in other processes: what they answer, print, lack and do wrong reaches the benchmark."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks.support import worker_pool
from benchmarks.support.engines import EngineOptions
from benchmarks.support.turns import paused
from benchmarks.support.worker_pool import EngineError, Engines, Worker
from benchmarks.support.workload import MODES, RandomRequests
from tests.benchmarks.fake_engine import write_fake_sglang
from tests.conftest import ROOT
from tests.support.patience import HANG_S

WORK = (RandomRequests(3, (2, 5), (4, 4), seed=1).requests(vocab_size=9), MODES["greedy"])

Started = Callable[..., Engines]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """Return a function that starts fake engines, each named after its environment variables."""
    pools: list[Engines] = []
    write_fake_sglang(tmp_path / "site")

    def start(*environments: str, site: str = "site") -> Engines:
        pool = Engines(partial(Worker, "offline"), tmp_path / "logs")
        pools.append(pool)
        path = os.pathsep.join((str(tmp_path / site), str(ROOT)))
        wanted = {}
        for text in environments or ("",):
            name, _, value = text.partition("=")
            variables = {**os.environ, "PYTHONPATH": path} | ({name: value} if name else {})
            options = EngineOptions("sglang", "some model", "float32", "cpu", 4, 64, 4096, variables)
            wanted[text or "sglang"] = options
        assert list(pool.start(wanted)) == list(pool.running) == list(pool.facts)
        return pool

    yield start
    for pool in pools:
        pool.__exit__(None, None, None)


def test_an_engine_that_prints_is_understood(started: Started) -> None:
    pool = started()
    assert pool.facts["sglang"]["version"] == "0.fake"
    answer = pool.running["sglang"].run(*WORK)
    assert answer["output_tokens"] == 12
    assert 0 < answer["seconds"] < HANG_S
    assert "generating for 3" in pool.running["sglang"].log.read_text()
    with pytest.raises(EngineError, match=r"no answer within 0 s\n(.*\n)*.*generating for 3"):
        pool.running["sglang"].receive(timeout_s=0.01)


def test_an_engine_that_is_not_installed_is_named(started: Started) -> None:
    pool = started(site="nowhere")
    assert pool.missing == {"sglang": "no module named sglang"}
    assert pool.running == pool.failed == {}


def test_an_engine_that_stops_early_is_no_fast_engine(started: Started) -> None:
    (worker,) = started("FAKE_LOST_TOKENS=1").running.values()
    with pytest.raises(EngineError, match="got 9 new tokens, 12 were asked for"):
        worker.run(*WORK)


def test_the_last_words_of_a_dead_engine_are_passed_on(started: Started) -> None:
    pool = started("FAKE_CALLS=0")
    with pytest.raises(EngineError, match=r"the process ended\n(.*\n)*.*something terrible") as death:
        pool.running["FAKE_CALLS=0"].run(*WORK)
    pool.drop("FAKE_CALLS=0", death.value)
    assert pool.running == {}
    assert "something terrible" in pool.failed["FAKE_CALLS=0"]


def test_a_paused_engine_ends_at_once_and_in_order(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "MAX_STOP_S", HANG_S)
    pool = started()
    worker = pool.running["sglang"]
    with paused([worker.pid]):
        pool.drop("sglang", EngineError("it is tired"))
    assert "goodbye" in worker.log.read_text()
    assert worker.popen.returncode == 0


def test_an_interrupt_while_closing_leaves_no_engine_and_loses_no_report(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = started("", "OTHER=1")
    processes = [worker.popen for worker in pool.running.values()]

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


def test_all_are_asked_and_those_that_fail_are_dropped(started: Started) -> None:
    pool = started("FAKE_CALLS=1", "OTHER=1")
    pool.run_all(*WORK)
    assert set(pool.running) == {"FAKE_CALLS=1", "OTHER=1"}
    pool.run_all(*WORK)
    assert set(pool.running) == {"OTHER=1"}
    assert "something terrible" in pool.failed["FAKE_CALLS=1"]


def test_a_broken_installation_is_a_failure_and_not_missing(started: Started, tmp_path: Path) -> None:
    (tmp_path / "site" / "sglang" / "srt" / "entrypoints" / "engine.py").write_text("import not_there\n")
    pool = started()
    assert pool.missing == {}
    assert "No module named 'not_there'" in pool.failed["sglang"]
