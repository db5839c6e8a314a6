"""Runs cases: both sides of several at once, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.gpu_matrix.cases import CASES, Case
from tests.gpu_matrix.verdict import judge

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("rose", "stock")
HANG_S = 900
"""A side that takes longer hangs."""
CORES_PER_ENGINE = 4
"""That an engine's pools of compilers spread over; it shares them with others, as most of a start is one thread's."""


def engine_cores() -> list[set[int]]:
    """Return the cores of each engine that may run side by side with others: three engines for four cores."""
    cores = sorted(os.sched_getaffinity(0))
    count = max(1, len(cores) * 3 // 4)
    firsts = [index * len(cores) // count for index in range(count)]
    return [{cores[(first + step) % len(cores)] for step in range(CORES_PER_ENGINE)} for first in firsts]


class Run:
    """Cases that run, or wait for their turn, until ``close``.

    Args:
        folder: gets the log and the report of each side.
        checkpoints: folder that gets those, some 10 MB each.
    """

    def __init__(self, names: Iterable[str], folder: Path, checkpoints: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._places: SimpleQueue[set[int]] = SimpleQueue()
        for cores in engine_cores():
            self._places.put(cores)
        self._pool = ThreadPoolExecutor(self._places.qsize())
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sides: dict[tuple[str, str], Future[None]] = {}
        for name in names:
            case = CASES[name]
            checkpoint = checkpoints / file_name(case)
            if not case.lacking:
                case.write(checkpoint)
            for side in SIDES:
                self._sides[name, side] = self._pool.submit(self._run, case, side, checkpoint)

    def verdict(self, name: str) -> dict[str, Any]:
        """Wait for both sides of a case and compare them.

        Raises:
            RuntimeError: a side ended without a report; the message ends with the tail of its log.
        """
        for side in SIDES:
            self._sides[name, side].result()
        return judged(self._folder, CASES[name])

    def close(self) -> None:
        """End what is still running."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        self._pool.shutdown()

    def _run(self, case: Case, side: str, checkpoint: Path) -> None:
        report = report_path(self._folder, case, side)
        report.unlink(missing_ok=True)
        log_path = report.with_suffix(".log")
        command = [
            sys.executable,
            "-m",
            "tests.gpu_matrix.side",
            case.name,
            side,
            str(checkpoint),
            str(report),
        ]
        cores = self._places.get()
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        # Before it has threads or children: they inherit it.
        os.sched_setaffinity(process.pid, cores)
        self._processes.append(process)
        try:
            status: int | str = process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            status = f"nothing for {HANG_S} s"
        finally:
            # Its pools of compilers, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self._places.put(cores)
        if not report.is_file():
            tail = log_path.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"{case.name}, {side}: ended with {status}\n{tail}")


def file_name(case: Case) -> str:
    """Return the case's name as part of a path."""
    return case.name.replace(" ", "-").replace("/", "-")


def report_path(folder: Path, case: Case, side: str) -> Path:
    """Return where a side's report is."""
    return folder / f"{file_name(case)}.{side}.json"


def judged(folder: Path, case: Case) -> dict[str, Any]:
    """Return the verdict on a case that both sides have reported on."""
    rose, stock = (json.loads(report_path(folder, case, side).read_text()) for side in SIDES)
    return judge(rose, stock).as_json()


def judge_folder(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the verdicts on all cases that a folder has both reports of."""
    return {
        case.name: judged(folder, case)
        for case in CASES.values()
        if all(report_path(folder, case, side).is_file() for side in SIDES)
    }
