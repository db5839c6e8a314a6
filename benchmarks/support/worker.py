"""One engine in a process of its own: takes commands from a connection, and gives an answer to each.

    python -m benchmarks.support.worker DESCRIPTOR

    ("start", kind of ``ENGINES``, EngineOptions)       -> the engine's facts
    ("run", Requests, sampling)                         -> figures
    ("hold", HeldStreams, sampling)                     -> figures
    ("close",)                                          -> None

Answers are (answer, ""), failures (None, "what went wrong").
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.support.engines import ENGINES


def serve_commands(connection: Connection) -> None:
    """Carry out what comes, until "close" or the end of the other process."""
    engine: Any = None
    op = ""
    while op != "close":
        try:
            op, *arguments = connection.recv()
        except EOFError:
            return
        try:
            if op == "start":
                kind, options = arguments
                engine = ENGINES[kind][options.backend](options)
                answer = engine.facts
                # What is there stays: collections that look at all of it would hit some engine's run at random.
                gc.collect()
                gc.freeze()
            else:
                answer = getattr(engine, op)(*arguments)
            connection.send((answer, ""))
        except Exception as error:
            traceback.print_exc()
            connection.send((None, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    serve_commands(Connection(descriptor))
