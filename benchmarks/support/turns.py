"""Turns of engines: one runs while the others are stopped, and a turn counts once every engine has had it.

Idle schedulers poll, SGLang's all the time; what that costs the engine whose turn it is depends on the host. What a
pause means to the engines (vLLM 0.32, SGLang 0.5.15): neither has a heartbeat between its processes, and none takes a
stopped child for a dead one. Clocks run on, but SGLang's watchdog (300 s) counts only while a batch is being computed,
and NCCL's asks for a sign of life every 480 s; a pause is as long as the others' single turn, then all run again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Continues what it was told of as soon as its input ends: after a turn, and also if this process is killed meanwhile.
_GUARD = """
while read -r pid; do pids="$pids $pid"; done
test -z "$pids" || kill -s CONT $pids 2>/dev/null
true
"""
# Others are stopped or ended, or wait in the kernel (D), from where they do not come back before they are continued.
_MOVING = {"R", "S"}

Row = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """The same work for every engine."""

    label: str
    columns: Row
    """What its rows have besides the backend and figures."""
    first: int
    """Place of the engine that begins, counted on from the last one."""
    seed: int
    """Of prompts that no other turn has."""


@contextlib.contextmanager
def paused(roots: Iterable[int]) -> Iterator[None]:
    """Let these processes and all below them stand still; continue them in the end, whatever happens.

    Args:
        roots: numbers of processes that lead a session each.
    """
    roots = set(roots)
    if not roots:
        yield
        return
    # A session of its own: an interrupt from the keyboard is not for it.
    with subprocess.Popen(["sh", "-c", _GUARD], stdin=subprocess.PIPE, start_new_session=True) as guard:
        assert guard.stdin is not None
        told: set[int] = set()
        members = family(roots)
        # A signal takes effect when its process is scheduled; until then it may start others.
        while members.keys() - told or _MOVING & set(members.values()):
            for pid in members.keys() - told:
                guard.stdin.write(f"{pid}\n".encode())
                guard.stdin.flush()
                _send(pid, signal.SIGSTOP)
            told |= members.keys()
            time.sleep(0.001)
            members = family(roots)
        yield


def resume(root: int) -> None:
    """Continue a process and all below it; running ones are not affected."""
    for pid in family({root}):
        _send(pid, signal.SIGCONT)


def family(roots: set[int]) -> dict[int, str]:
    """Return what is there of ``roots``, their sessions and all below, which may have sessions of their own.

    Returns:
        Numbers of processes, each with its state as /proc has it: R runs, S sleeps, T is stopped.
    """
    states: dict[int, str] = {}
    parents_and_sessions: dict[int, set[int]] = {}
    for folder in Path("/proc").iterdir():
        # The name of the program may have blanks and brackets.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, NotADirectoryError):
            if folder.name.isdigit():
                state, parent, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                states[int(folder.name)] = state
                parents_and_sessions[int(folder.name)] = {int(parent), int(session)}
    found = set(roots)
    while new := {pid for pid, above in parents_and_sessions.items() if above & found} - found:
        found |= new
    return {pid: states[pid] for pid in found & states.keys()}


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
