"""Small jobs on the device, one copy and one launch each: a graph for every one of a few sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.engine.staging import torch_dtype

Fields = Mapping[str, tuple[type[np.generic], tuple[int, ...]]]
"""Name -> NumPy's type, and the shape of one entry."""
Inputs = Mapping[str, torch.Tensor]


class SizedGraphs:
    """A function over fixed inputs, replayed from a CUDA graph where one was captured.

    Its operations, launched one by one, would take the host ten times as long. Numbers of entries are rounded up to a
    few sizes by repeating the last entry: ``compute`` must not mind entries that are there twice.

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
        self._compute = compute
        self._inputs = {size: _FixedInputs(fields, size, device) for size in sizes}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture a call of each size, the largest first: the others fit into its memory."""
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._inputs):
            # Outside first: kernels are compiled there.
            self._compute(self._inputs[size].tensors)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._compute(self._inputs[size].tensors)
            self._graphs[size] = graph
        torch.cuda.synchronize()

    @torch.inference_mode()
    def run(self, **values: NDArray[Any]) -> bool:
        """Compute for these entries, ``[N, ...]`` each, N at least 1; returns False if there are too many."""
        num_entries = len(next(iter(values.values())))
        size = next((size for size in self._inputs if size >= num_entries), None)
        if size is None:
            return False
        inputs = self._inputs[size]
        inputs.write(values, num_entries)
        graph = self._graphs.get(size)
        if graph is None:
            self._compute(inputs.tensors)
        else:
            graph.replay()
        return True


class _FixedInputs:
    """Tensors in one buffer, so that one copy fills them all."""

    def __init__(self, fields: Fields, size: int, device: torch.device) -> None:
        kinds = [(name, kind, (size, *shape)) for name, (kind, shape) in fields.items()]
        self._layout = np.dtype(kinds, align=True)
        self._bytes = torch.zeros(self._layout.itemsize, dtype=torch.uint8, device=device)
        self.tensors = {name: self._view(name) for name in fields}

    def write(self, values: Mapping[str, NDArray[Any]], num_entries: int) -> None:
        # torch keeps pinned memory until the copy has run.
        is_pinned = self._bytes.device.type != "cpu"
        pinned = torch.empty(self._layout.itemsize, dtype=torch.uint8, pin_memory=is_pinned)
        record = pinned.numpy().view(self._layout)[0]
        for name, entries in values.items():
            field = record[name]
            field[:num_entries] = entries
            field[num_entries:] = field[num_entries - 1]
        self._bytes.copy_(pinned, non_blocking=True)

    def _view(self, name: str) -> torch.Tensor:
        assert self._layout.fields is not None
        kind, start = self._layout.fields[name][:2]
        return self._bytes[start : start + kind.itemsize].view(torch_dtype(kind.base)).view(kind.shape)
