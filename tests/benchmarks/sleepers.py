"""Processes that stand in for engines where all that matters is which of them are stopped."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from tests.support.patience import HANG_S


class Sleeper(SimpleNamespace):
    """A process that does nothing. It has the attributes that it is made with, and counts how often it was woken."""

    def __init__(self, name: str, **attributes: object) -> None:
        super().__init__(name=name, woken=0, ended=False, **attributes)
        self.popen = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        self.pid = self.popen.pid
        wait_until_asleep(self.pid)

    def wake(self) -> None:
        self.woken += 1

    def ask_to_end(self) -> None:
        pass

    def wait_for_end(self) -> None:
        pass

    def kill(self) -> None:
        self.ended = True
        self.popen.kill()
        self.popen.wait()


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal."""
    return _state(pid) == "T"


def wait_until_asleep(pid: int) -> None:
    """Return when ``sleep`` has started up in a process.

    A program that is still being read from the disk does not stop before that has ended, and has no name yet.

    Raises:
        TimeoutError: it does not sleep after ``HANG_S``.
    """
    deadline = time.monotonic() + HANG_S
    while _state(pid) != "S":
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} does not sleep, it is in state {_state(pid)}")
        time.sleep(0.001)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextlib.contextmanager
def sleepers(*names: str) -> Iterator[dict[str, Sleeper]]:
    """Start one for each name; end them."""
    started: dict[str, Sleeper] = {}
    try:
        for name in names:
            started[name] = Sleeper(name)
        yield started
    finally:
        for sleeper in started.values():
            sleeper.kill()
