"""Engines in other processes: what they say and do wrong is known, they take turns, and none stays stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support import worker_pool
from benchmarks.support.engines import EngineOptions
from benchmarks.support.turns import Turn, family, paused, resume
from benchmarks.support.worker_pool import EngineError, Engines, Worker
from benchmarks.support.workload import MODES, RandomRequests
from tests.benchmarks.fake_engine import write_fake_sglang
from tests.benchmarks.sleepers import Sleeper, is_stopped, sleepers, wait_until_asleep
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


TURNS = [Turn(f"turn {number}", {"number": number}, first=number, seed=number) for number in range(3)]


def engines_of(folder: Path, running: dict[str, Any]) -> Engines:
    """Return engines that have started already."""
    engines = Engines(lambda options, log: pytest.fail("nothing is to start"), folder)
    engines.running = running
    return engines


@pytest.mark.parametrize("pause", [True, False])
def test_an_interrupt_keeps_the_turns_that_were_whole(tmp_path: Path, pause: bool) -> None:
    calls: list[str] = []
    stopped: list[list[str]] = []

    def take(engine: Sleeper, name: str, turn: Turn) -> dict[str, Any]:
        calls.append(name)
        stopped.append([name for name, other in running.items() if is_stopped(other.pid)])
        assert engine is running[name] and engine.woken == calls.count(name)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return {"calls": len(calls)}

    rows: list[dict[str, Any]] = []
    with sleepers("rose", "vllm") as running:
        engines = engines_of(tmp_path, running)
        left_out = engines.take_turns(TURNS, take, rows, pause=pause, deadline=float("inf"))
        assert not any(is_stopped(engine.pid) for engine in running.values())
    assert calls == ["rose", "vllm", "vllm", "rose"]
    assert stopped == ([["vllm"], ["rose"], ["rose"], ["vllm"]] if pause else [[]] * 4)
    assert rows == [
        {"backend": "rose", "number": 0, "calls": 1},
        {"backend": "vllm", "number": 0, "calls": 2},
    ]
    assert left_out == 2


def test_an_engine_that_fails_is_dropped_and_the_others_go_on(tmp_path: Path) -> None:
    def take(engine: Sleeper, name: str, turn: Turn) -> dict[str, Any]:
        if name == "vllm" and turn.seed:
            raise EngineError("it died")
        return {}

    rows: list[dict[str, Any]] = []
    with sleepers("rose", "vllm") as running:
        engines = engines_of(tmp_path, dict(running))
        assert engines.take_turns(TURNS, take, rows, pause=True, deadline=float("inf")) == 0
        assert not is_stopped(running["rose"].pid)
    assert engines.failed == {"vllm": "it died"}
    assert [(row["backend"], row["number"]) for row in rows] == [
        ("rose", 0),
        ("vllm", 0),
        ("rose", 1),
        ("rose", 2),
    ]


def test_one_that_does_not_wake_leaves_nothing_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(sleeper: Sleeper) -> None:
        raise TimeoutError

    monkeypatch.setattr(Sleeper, "wake", fail)
    with sleepers("rose", "vllm") as running:
        engines = engines_of(tmp_path, running)
        with pytest.raises(TimeoutError):
            engines.take_turns(TURNS, fail, [], pause=True, deadline=float("inf"))  # type: ignore[arg-type]
        assert not any(is_stopped(engine.pid) for engine in running.values())


def test_turns_without_time_or_engines_are_counted(tmp_path: Path) -> None:
    def take(engine: Any, name: str, turn: Turn) -> dict[str, Any]:
        pytest.fail("there is no time")

    rows: list[dict[str, Any]] = []
    late = engines_of(tmp_path, {"rose": None})
    assert late.take_turns(TURNS, take, rows, pause=False, deadline=0.0) == 3
    nobody = engines_of(tmp_path, {})
    assert nobody.take_turns(TURNS, take, rows, pause=False, deadline=float("inf")) == 3
    assert rows == []


# Counts in a file. Starts a child in a session of its own, which starts another one and ends when it is told to.
TREE = """
import os, subprocess, sys, threading, time
folder, depth = sys.argv[1], int(sys.argv[2])
if depth < 2:
    arguments = [sys.executable, "-c", sys.argv[3], folder, str(depth + 1), sys.argv[3]]
    subprocess.Popen(arguments, start_new_session=depth == 0)
with open(f"{folder}/{depth}", "ab", buffering=0) as file:
    while True:
        file.write(b".")
        time.sleep(0.002)
"""

Counts = Callable[[], list[int]]


def grows(counts: Counts) -> list[bool]:
    """Return of each process whether it counts."""
    before = counts()
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline and not all(
        new > old for new, old in zip(counts(), before, strict=True)
    ):
        time.sleep(0.01)
    return [new > old for new, old in zip(counts(), before, strict=True)]


def stands_still(root: int, counts: Counts) -> bool:
    """Return whether nothing is counted in the time of about a hundred turns of the loop.

    One that waits for the disk, in a write, stops when that has been carried out.
    """
    deadline = time.monotonic() + HANG_S
    while set(family({root}).values()) != {"T"} and time.monotonic() < deadline:
        time.sleep(0.001)
    before = counts()
    time.sleep(0.25)
    return set(family({root}).values()) == {"T"} and counts() == before


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[tuple[int, Counts]]:
    """Start three generations that count; yield the first one's number and a function that reads the counts."""
    root = subprocess.Popen([sys.executable, "-c", TREE, str(tmp_path), "0", TREE], start_new_session=True)
    files = [tmp_path / str(depth) for depth in range(3)]

    def counts() -> list[int]:
        return [file.stat().st_size for file in files]

    try:
        deadline = time.monotonic() + HANG_S
        while not all(file.exists() for file in files) and time.monotonic() < deadline:
            time.sleep(0.01)
        yield root.pid, counts
    finally:
        for pid in family({root.pid}):
            os.kill(pid, signal.SIGKILL)
        root.wait()


def test_all_generations_stand_still_and_go_on(tree: tuple[int, Counts]) -> None:
    root, counts = tree
    assert all(grows(counts))
    for _ in range(2):
        with paused([root]):
            assert stands_still(root, counts)
        assert grows(counts) == [True] * 3


def test_a_family_keeps_those_whose_parents_are_gone(tmp_path: Path) -> None:
    script = "import subprocess, os; subprocess.Popen(['sleep', '3600']); os._exit(0)"
    wait = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {script!r}]); print(flush=True); input()"
    root = subprocess.Popen(
        [sys.executable, "-c", wait], start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert root.stdout is not None
    root.stdout.readline()
    (orphan,) = family({root.pid}).keys() - {root.pid}
    wait_until_asleep(orphan)
    with paused([root.pid]):
        assert is_stopped(orphan)
    assert not is_stopped(orphan)
    os.killpg(root.pid, signal.SIGKILL)
    root.communicate()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_nothing_stopped(tree: tuple[int, Counts], error: type[BaseException]) -> None:
    root, counts = tree
    with pytest.raises(error), paused([root]):
        assert stands_still(root, counts)
        raise error
    assert grows(counts) == [True] * 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_benchmark_leaves_nothing_stopped(
    tree: tuple[int, Counts], number: signal.Signals
) -> None:
    root, counts = tree
    script = (
        "import signal, time; from benchmarks.support.turns import paused\n"
        # Where tests run in the background, an interrupt is ignored unless one asks for it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"with paused([{root}]): print(flush=True); time.sleep(3600)"
    )
    benchmark = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert benchmark.stdout is not None
    benchmark.stdout.readline()
    assert stands_still(root, counts)
    # As a terminal and `timeout` do it: to all that the benchmark has started in its own group, too.
    os.killpg(benchmark.pid, number)
    benchmark.communicate()
    assert grows(counts) == [True] * 3


def test_one_that_ended_in_a_pause_does_not_keep_the_others(tree: tuple[int, Counts]) -> None:
    root, counts = tree
    with sleepers("first") as ended, paused([ended["first"].pid, root]):
        ended["first"].kill()
        assert stands_still(root, counts)
    assert grows(counts) == [True] * 3


def test_resume_continues_all_generations(tree: tuple[int, Counts]) -> None:
    root, counts = tree
    with paused([root]):
        assert stands_still(root, counts)
        resume(root)
        assert grows(counts) == [True] * 3
