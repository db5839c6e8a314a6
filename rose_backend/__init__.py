"""rose_backend: faster LLM serving inside vLLM, and a standalone engine.

Public names are resolved on first use, so that ``import rose_backend`` loads neither torch nor a model library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rose_backend.config import EngineConfig
    from rose_backend.engine.async_engine import AsyncEngine
    from rose_backend.engine.llm import LLM
    from rose_backend.engine.outputs import CompletionOutput, RequestOutput
    from rose_backend.engine.request import LoRARequest
    from rose_backend.engine.sampling_params import SamplingParams
    from rose_backend.engine.structured_outputs import StructuredOutputsParams

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EngineConfig",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_HOME_OF = {
    "AsyncEngine": "rose_backend.engine.async_engine",
    "CompletionOutput": "rose_backend.engine.outputs",
    "EngineConfig": "rose_backend.config",
    "LLM": "rose_backend.engine.llm",
    "LoRARequest": "rose_backend.engine.request",
    "RequestOutput": "rose_backend.engine.outputs",
    "SamplingParams": "rose_backend.engine.sampling_params",
    "StructuredOutputsParams": "rose_backend.engine.structured_outputs",
}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
