"""The properties of a GPU by which kernels are chosen, and each engine's scratch memory (``Workspace``).

Tensors on ``meta`` represent those of a GPU that kernels are compiled for without launching them
(``compile_ahead/recorded_launches.py``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class GpuProperties:
    """Of one GPU."""

    capability: tuple[int, int]
    num_processors: int

    @property
    def has_large_tma_tiles(self) -> bool:
        """Whether the tensor memory accelerator copies tiles into 227 KB of shared memory; capability 12 has 99 KB."""
        return 9 <= self.capability[0] < 12

    @property
    def has_tensor_memory(self) -> bool:
        """Whether tensor cores take their left factor from dedicated memory, at most 512 elements deep."""
        return 10 <= self.capability[0] < 12


class _Recording(threading.local):
    """What ``meta`` represents in this thread."""

    gpu: GpuProperties | None = None


_recording = _Recording()


def gpu_properties(device: torch.device) -> GpuProperties:
    """Return the properties of a CUDA device, or of the GPU that device ``meta`` represents."""
    if device.type == "meta":
        assert _recording.gpu is not None, "meta represents a GPU inside meta_stands_for only"
        return _recording.gpu
    return _cuda_properties(device)


@cache
def _cuda_properties(device: torch.device) -> GpuProperties:
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    return GpuProperties(torch.cuda.get_device_capability(device), num_processors)


@contextlib.contextmanager
def meta_stands_for(properties: GpuProperties) -> Iterator[None]:
    """Let device ``meta`` have ``properties`` inside the block, for this thread."""
    outer, _recording.gpu = _recording.gpu, properties
    try:
        yield
    finally:
        _recording.gpu = outer


def is_recording() -> bool:
    """Whether this thread only records kernels: device ``meta`` represents a GPU."""
    return _recording.gpu is not None


def has_dependent_launch(device: torch.device) -> bool:
    """Whether kernels on ``device`` may start before the previous one has ended (compute capability 9.0 and later)."""
    return device.type != "cpu" and gpu_properties(device).capability >= (9, 0)


def has_float8_tensor_cores(device: torch.device) -> bool:
    """Whether tensor cores of ``device`` multiply float8 numbers where they are in shared memory (capability 9.0 and
    later, without 12)."""
    return device.type != "cpu" and 9 <= gpu_properties(device).capability[0] < 12


def is_aligned(matrix: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator could copy tiles of ``matrix``."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0


def can_use_tma(*matrices: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can copy tiles of ``matrices``, large ones too."""
    device = matrices[0].device
    if device.type == "cpu" or not gpu_properties(device).has_large_tma_tiles:
        return False
    return all(map(is_aligned, matrices))


class Workspace:
    """Tensors that launches use in turn. All launches in one workspace must follow one another.

    They do on one stream; on several, events have to see to it.

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
