"""Processes that are paused stand still, all of them, and nothing stays stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.support.turns import family, paused, resume
from tests.benchmarks.sleepers import is_stopped, sleepers, wait_until_asleep
from tests.conftest import ROOT
from tests.support.patience import HANG_S

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
