"""What a server asks of the Python interpreter that all its threads share, as long as it runs."""

from __future__ import annotations

import gc
import sys
import threading

_SWITCH_INTERVAL_S = 200e-6
"""How long a thread that wants the interpreter's lock waits before it asks for it. At Python's own 5 ms the step loop,
which gives the lock away several times in a step, would wait for texts and readers longer than a step takes."""

_lock = threading.Lock()
_num_servers = 0
_interval_before = 0.0


def begin_serving() -> None:
    """Keep what lives now out of collections, and let threads that wait for the lock have their turn soon.

    A full collection looks at each of the half a million objects that PyTorch and a loaded model consist of, and holds
    up every thread meanwhile: 60 to 90 ms were measured in an engine whose steps take one. What requests leave behind
    is little, and is still collected. Both settings hold for the whole process, until ``end_serving``.
    """
    global _num_servers, _interval_before
    with _lock:
        gc.collect()
        gc.freeze()
        if not _num_servers:
            _interval_before = sys.getswitchinterval()
            sys.setswitchinterval(min(_interval_before, _SWITCH_INTERVAL_S))
        _num_servers += 1


def end_serving() -> None:
    """Take back what ``begin_serving`` did, when the last server has ended."""
    global _num_servers
    with _lock:
        _num_servers -= 1
        if not _num_servers:
            gc.unfreeze()
            sys.setswitchinterval(_interval_before)
