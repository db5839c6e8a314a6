"""Work on fixed buffers, captured as one CUDA graph per size and replayed: one launch instead of one per kernel.

Also the copies between CPU and device that such graphs need, none of which waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.kernels.gpu_properties import is_recording

Size = TypeVar("Size", bound=Hashable)
_ALIGNMENT = 16


class CapturedGraphs(Generic[Size]):
    """Work that is replayed from CUDA graphs for the sizes that were captured, and computed directly for others.

    Args:
        parts: what a size computes, in order; each is a separate graph, and all but the first may be left out. A part
            is given the size and what the part before returned (None for the first); one that may be left out between
            others returns what it was given. It reads and writes fixed tensors, because graphs hold their addresses,
            and never waits for the device.
        capture_error_mode: of ``torch.cuda.graph``; "thread_local" where other threads may use the device meanwhile.
    """

    def __init__(self, *parts: Callable[[Size, Any], Any], capture_error_mode: str = "global") -> None:
        self._parts = parts
        self._capture_error_mode = capture_error_mode
        self._graphs: dict[Size, tuple[torch.cuda.CUDAGraph, ...]] = {}

    @torch.inference_mode()
    def capture(
        self, sizes: Iterable[Size], pool: Any = None, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Capture each of ``sizes``, which start with the largest: the others fit into its memory.

        Args:
            pool: of memory, shared with other graphs that never run at the same time; None takes a new one.
            stream: to capture on, whose priority the kernels get; None takes torch's own.
        """
        if is_recording():
            for size in sizes:
                self._compute(size, range(len(self._parts)))
            return
        pool = torch.cuda.graph_pool_handle() if pool is None else pool
        for size in sizes:
            # Outside of a graph first: kernels are compiled and their scratch memory is allocated there.
            self._compute(size, range(len(self._parts)))
            torch.cuda.synchronize()
            self._graphs[size] = self._capture(size, pool, stream)
        torch.cuda.synchronize()

    def release(self) -> None:
        """Give all graphs back: what is run from now on is computed directly."""
        self._graphs.clear()

    def run(self, size: Size, num_parts: int = 1) -> None:
        """Do the first ``num_parts`` parts of the work for ``size``."""
        self.run_parts(size, range(num_parts))

    def run_parts(
        self, size: Size, parts: Sequence[int], after_first: Callable[[], None] | None = None
    ) -> None:
        """Do some parts of the work for ``size``.

        Args:
            parts: rising, from 0 on.
            after_first: called when the first one has been enqueued.
        """
        graphs = self._graphs.get(size)
        if graphs is None:
            self._compute(size, parts, after_first)
            return
        for part in parts:
            graphs[part].replay()
            if part == 0 and after_first is not None:
                after_first()

    @torch.inference_mode()
    def _compute(
        self, size: Size, parts: Sequence[int], after_first: Callable[[], None] | None = None
    ) -> None:
        result = None
        for part in parts:
            result = self._parts[part](size, result)
            if part == 0 and after_first is not None:
                after_first()

    def _capture(
        self, size: Size, pool: Any, stream: torch.cuda.Stream | None
    ) -> tuple[torch.cuda.CUDAGraph, ...]:
        graphs, result = [], None
        mode = self._capture_error_mode
        for part in self._parts:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
                result = part(size, result)
            graphs.append(graph)
        return tuple(graphs)


def size_for(sizes: Sequence[int], number: int) -> int | None:
    """Return the least of ``sizes``, rising, that is at least ``number``; None where all are smaller."""
    for size in sizes:
        if size >= number:
            return size
    return None


Fields = Mapping[str, tuple[type[np.generic], tuple[int, ...]]]
"""Name -> NumPy's type, and the shape of one entry."""
Inputs = Mapping[str, torch.Tensor]


class SizedGraphs:
    """A function over fixed inputs, replayed from a CUDA graph where one was captured.

    Its operations, launched one by one, would take the host ten times as long. Numbers of entries are rounded up to a
    few sizes by repeating the last entry: ``compute`` must allow entries that are there twice.

    Args:
        compute: given one tensor for each of ``fields``, ``[size, ...]``; must not wait for the device.
        fields: what an entry consists of.
        sizes: numbers of entries that a call is rounded up to, rising.
    """

    def __init__(
        self,
        compute: Callable[[Inputs], None],
        fields: Fields,
        sizes: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self._sizes = sizes
        self._inputs = {
            size: FixedInputs(
                {name: (kind, (size, *shape)) for name, (kind, shape) in fields.items()}, device
            )
            for size in sizes
        }
        self._graphs = CapturedGraphs[int](lambda size, _: compute(self._inputs[size].tensors))

    def capture(self, stream: torch.cuda.Stream | None = None) -> None:
        """Capture a call of each size; ``stream`` as in ``CapturedGraphs.capture``."""
        self._graphs.capture(reversed(self._sizes), stream=stream)

    @torch.inference_mode()
    def run(self, **values: NDArray[Any]) -> bool:
        """Compute for these entries, ``[N, ...]`` each, N at least 1; returns False if there are too many."""
        num_entries = len(next(iter(values.values())))
        size = size_for(self._sizes, num_entries)
        if size is None:
            return False
        inputs = self._inputs[size]
        host_bytes, record = inputs.begin()
        for name, entries in values.items():
            field = record[name]
            field[:num_entries] = entries
            field[num_entries:] = field[num_entries - 1]
        inputs.send(host_bytes)
        self._graphs.run(size)
        return True


class FixedInputs:
    """Tensors that stay where they are, in one buffer, so that one copy fills them all.

    Args:
        fields: name -> NumPy's type, and the shape of the tensor.
    """

    def __init__(self, fields: Fields, device: torch.device) -> None:
        self._layout = np.dtype(
            [(name, *kind_and_shape) for name, kind_and_shape in fields.items()], align=True
        )
        self._bytes = torch.zeros(self._layout.itemsize, dtype=torch.uint8, device=device)
        self.tensors = {name: self._view(name) for name in fields}

    def begin(self) -> tuple[torch.Tensor, np.void]:
        """Return host memory for the next inputs, whose content is undefined, and the same memory by field."""
        # torch keeps pinned memory until the copy has run.
        is_pinned = self._bytes.device.type == "cuda"
        host_bytes = torch.empty(self._layout.itemsize, dtype=torch.uint8, pin_memory=is_pinned)
        return host_bytes, host_bytes.numpy().view(self._layout)[0]

    def send(self, host_bytes: torch.Tensor) -> None:
        """Copy what ``begin`` has returned to the device."""
        self._bytes.copy_(host_bytes, non_blocking=True)

    def _view(self, name: str) -> torch.Tensor:
        assert self._layout.fields is not None
        kind, start = self._layout.fields[name][:2]
        return self._bytes[start : start + kind.itemsize].view(torch_dtype(kind.base)).view(kind.shape)


def upload(device: torch.device, *arrays: NDArray[Any]) -> list[torch.Tensor]:
    """Return a tensor of each array on ``device``; on a GPU all of them travel in one asynchronous copy.

    The copy starts from pinned memory, which torch keeps until the copy has run. A copy from ordinary memory could wait
    for everything that was enqueued before.

    Args:
        arrays: contiguous. On a CPU the tensors share their memory, so they must not be persistent buffers.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = []
    num_bytes = 0
    for array in arrays:
        starts.append(num_bytes)
        num_bytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    raw = pinned.numpy()
    for start, array in zip(starts, arrays, strict=True):
        raw[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    arrived = pinned.to(device, non_blocking=True)
    return [
        arrived[start : start + array.nbytes].view(torch_dtype(array.dtype)).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def download(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, which is complete when what was enqueued so far has run."""
    if tensor.device.type == "cpu":
        return tensor
    arrived = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return arrived.copy_(tensor, non_blocking=True)


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Return torch's name for one of the types that travel."""
    return _TORCH_DTYPES[dtype.char]


_TORCH_DTYPES = {
    np.dtype(kind).char: torch.from_numpy(np.zeros(0, kind)).dtype
    for kind in (np.bool_, np.int32, np.int64, np.float32)
}
