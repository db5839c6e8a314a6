"""Watch Triton compile, and give kernels the same cache key in every process.

The first launch of a kernel takes milliseconds, if it is in Triton's cache on disk, or seconds.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import rose_backend.kernels


@dataclass(slots=True)
class Compilations:
    """Kernels that were compiled, or loaded from Triton's cache on disk."""

    names: list[str] = field(default_factory=list)
    """In order; a kernel is listed again for other constants or argument types."""
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


def settle_cache_keys() -> None:
    """Give each of this package's kernels the key in Triton's cache that it has in every other process.

    Triton 3.6 (``DependenciesFinder._update_hash``) puts the constants of a called function into the caller's key only
    if the key of the called function was computed before. So keys depend on the order of first launches, and what one
    process has compiled another one does not find. Here each function's key is computed after those of all it calls.
    """
    settled: set[int] = set()
    for name in kernel_modules():
        for value in vars(importlib.import_module(name)).values():
            _settle(value, settled)


def kernel_modules() -> list[str]:
    """Return the names of all modules that may define ``triton.jit`` functions."""
    room = rose_backend.kernels
    return [info.name for info in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")]


def called_functions(function: Any) -> list[Any]:
    """Return the ``triton.jit`` functions that another one's source names, each once, Triton's own included."""
    from triton.runtime.jit import JITCallable

    named = (_resolve(node, function.__globals__) for node in ast.walk(function.parse()))
    return list({id(each): each for each in named if isinstance(each, JITCallable)}.values())


def _settle(value: Any, settled: set[int]) -> None:
    from triton.runtime.jit import JITCallable

    # By id: the hash of such a function is its key.
    if isinstance(value, JITCallable) and id(value) not in settled:
        settled.add(id(value))
        for called in called_functions(value):
            _settle(called, settled)
        _ = value.cache_key


def _resolve(node: ast.AST, variables: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return variables.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_resolve(node.value, variables), node.attr, None)
    return None
