"""Watch Triton compile: each kernel's first launch in a process takes milliseconds to seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Compilations:
    """Kernels that were compiled, or loaded from Triton's cache on disk."""

    names: list[str] = field(default_factory=list)
    """In order; a kernel that is compiled for other constants or argument types comes again."""
    compiled: list[str] = field(default_factory=list)
    """Those of them that were not on disk."""
    seconds: float = 0.0


@contextlib.contextmanager
def watch_compilations() -> Iterator[Compilations]:
    """Collect what Triton compiles or loads inside the block, in this process."""
    from triton import knobs

    seen = Compilations()
    listener = knobs.compilation.listener

    def listen(*, src: Any, times: Any, cache_hit: bool, **details: Any) -> None:
        seen.names.append(src.name)
        if not cache_hit:
            seen.compiled.append(src.name)
        seen.seconds += times.total * 1e-6
        if listener is not None:
            listener(src=src, times=times, cache_hit=cache_hit, **details)

    knobs.compilation.listener = listen
    try:
        yield seen
    finally:
        knobs.compilation.listener = listener
