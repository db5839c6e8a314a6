"""Scratch memory and counters that kernels of a GPU use from launch to launch: each engine has its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import torch


class Workspace:
    """Tensors that launches use in turn. All launches in one workspace must follow one another, on one stream.

    ``with workspace:`` lets this thread's launches use it. The tensors stay where they are for as long as it lives,
    because captured graphs hold their addresses: it has to live as long as the graphs that were captured in it.
    """

    __slots__ = ("__weakref__", "_tensors")

    def __init__(self) -> None:
        self._tensors: dict[Hashable, tuple[torch.Tensor, ...]] = {}

    def tensors(
        self,
        operation: str,
        device: torch.device,
        sizes: Hashable,
        make: Callable[[], tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor, ...]:
        """Return what ``make`` has made for this operation, device and sizes; at their first use it is called.

        Raises:
            RuntimeError: as ``refuse_first_use_in_capture``.
        """
        key = operation, device, sizes
        found = self._tensors.get(key)
        if found is None:
            refuse_first_use_in_capture(operation, device)
            found = self._tensors[key] = make()
        return found

    def __enter__(self) -> None:
        _entered.stack.append(self)

    def __exit__(self, *error: object) -> None:
        _entered.stack.pop()


class _Entered(threading.local):
    """Workspaces that this thread has entered, the innermost last."""

    def __init__(self) -> None:
        self.stack = [_shared]


_shared = Workspace()
"""Of callers outside any engine."""
_entered = _Entered()


def current_workspace() -> Workspace:
    """Return what this thread's launches use: one that all threads share, where it has entered none."""
    return _entered.stack[-1]


def refuse_first_use_in_capture(operation: str, device: torch.device) -> None:
    """Refuse to make what outlives a CUDA graph while one is captured: memory would be the graph's own.

    Raises:
        RuntimeError: the current stream is captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{operation}: call it once with these shapes before capturing it in a CUDA graph")
