"""Stands for a benchmark: python -m tests.benchmarks.fake_step good|bad|long|stubborn --json FILE."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from benchmarks.support.checkpoint import KEPT_IN

if __name__ == "__main__":
    kind, result = sys.argv[1], Path(sys.argv[-1])
    print("checkpoints in", os.environ[KEPT_IN], flush=True)
    # Where tests run in the background, an interrupt is ignored unless one asks for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN if kind == "stubborn" else signal.default_int_handler)
    if kind in ("long", "stubborn"):
        try:
            print("at it", flush=True)
            time.sleep(3600.0)
        except KeyboardInterrupt:
            pass
    if kind != "bad":
        result.write_text("{}")
    sys.exit(kind == "bad")
