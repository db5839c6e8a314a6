"""Run Triton kernels on the CPU, in Triton's interpreter, beside tests that compile kernels.

Triton decides when it is imported whether kernels are compiled or interpreted. So a worker process of its own
interprets, one per test session, and everything else in the session compiles.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from tests.support.patience import HANG_S


def run_interpreted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module-level ``function`` where Triton interprets, and return what it returns.

    Tensors travel through shared memory: what the function writes to an argument is seen here, and views of one
    storage stay views of one storage. ``function`` imports kernels itself, or its module does.
    """
    return _interpreter().submit(function, *args, **kwargs).result(timeout=HANG_S)


_executor: ProcessPoolExecutor | None = None


def _interpreter() -> ProcessPoolExecutor:
    global _executor
    if _executor is None:
        _executor = ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))
        atexit.register(_executor.shutdown)
        before = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            # Started here, while the environment says so.
            assert _executor.submit(_is_interpreting).result(timeout=HANG_S)
        finally:
            if before is None:
                del os.environ["TRITON_INTERPRET"]
            else:
                os.environ["TRITON_INTERPRET"] = before
    return _executor


def _is_interpreting() -> bool:
    import triton

    torch.set_num_threads(1)
    return bool(triton.knobs.runtime.interpret)
