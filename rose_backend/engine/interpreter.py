"""What an engine asks of the Python interpreter that all threads share, as long as it works."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator

_SWITCH_INTERVAL_S = 200e-6
"""How long a thread that wants the interpreter's lock waits before it asks for it. At Python's own 5 ms the step loop,
which gives the lock away several times in a step, would wait for texts and readers longer than a step takes."""

_lock = threading.Lock()
_num_servers = 0
_num_hurried = 0
_interval_before = 0.0


def begin_serving() -> None:
    """Keep what lives now out of collections, and let threads that wait for the lock have their turn soon.

    A full collection looks at each of the half a million objects that PyTorch and a loaded model consist of, and holds
    up every thread meanwhile: 60 to 90 ms were measured in an engine whose steps take one. What requests leave behind
    is little, and is still collected. Both settings hold for the whole process, until ``end_serving``.
    """
    global _num_servers
    gc.collect()
    with _lock:
        gc.freeze()
        _num_servers += 1
    _hurry()


def end_serving() -> None:
    """Take back what ``begin_serving`` did, when the last server has ended."""
    global _num_servers
    _hurry_no_more()
    with _lock:
        _num_servers -= 1
        if not _num_servers:
            gc.unfreeze()


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Let threads that wait for the lock have their turn soon, in the whole process."""
    _hurry()
    try:
        yield
    finally:
        _hurry_no_more()


def _hurry() -> None:
    global _num_hurried, _interval_before
    with _lock:
        if not _num_hurried:
            _interval_before = sys.getswitchinterval()
            sys.setswitchinterval(min(_interval_before, _SWITCH_INTERVAL_S))
        _num_hurried += 1


def _hurry_no_more() -> None:
    global _num_hurried
    with _lock:
        _num_hurried -= 1
        if not _num_hurried:
            sys.setswitchinterval(_interval_before)
