"""Forward passes over prompts as CUDA graphs, one per number of tokens, padded up to it.

Launching a pass over a few thousand tokens one kernel at a time takes the host longer than the GPU needs to compute it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from rose_backend.engine.row_state import Int32Array
from rose_backend.models.attention_metadata import AttentionMetadata

MAX_CAPTURED_TOKENS = 4096
"""Larger passes keep the GPU busy without a graph."""
_TOKENS_PER_ROW = 32
"""Passes over rows that are shorter than this on average run without a graph."""

Forward = Callable[[torch.Tensor, torch.Tensor, AttentionMetadata], torch.Tensor]


def prompt_widths(max_tokens: int) -> tuple[int, ...]:
    """Return the numbers of tokens that graphs are captured for, rising, up to ``max_tokens`` if that is small."""
    limit = min(max_tokens, MAX_CAPTURED_TOKENS)
    widths = [64, 128, *range(256, MAX_CAPTURED_TOKENS, 256)]
    return (*(width for width in widths if width < limit), limit)


@dataclass(frozen=True, slots=True)
class _Pass:
    """One captured pass."""

    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor  # [width, E], overwritten by every replay of any pass


class PromptGraphs:
    """Captured forward passes and the fixed inputs that they share.

    Args:
        forward: given token ids, positions and metadata of a pass without decodes, returns hidden states ``[T, E]`` and
            waits for nothing.
        max_tokens: of a pass.
        table_width: blocks per sequence (MB).
    """

    def __init__(self, forward: Forward, max_tokens: int, table_width: int, device: torch.device) -> None:
        self._forward = forward
        self._widths = prompt_widths(max_tokens)
        self._passes: dict[int, _Pass] = {}
        num_tokens, num_rows = self._widths[-1], _num_rows(self._widths[-1])
        # One buffer for all of them, so that one copy brings a pass's inputs.
        sizes = {
            "input_ids": (np.int64, (num_tokens,)),
            "positions": (np.int64, (num_tokens,)),
            "query_start_loc": (np.int32, (num_rows + 1,)),
            "num_computed_tokens": (np.int32, (num_rows,)),
            "block_table": (np.int32, (num_rows, table_width)),
        }
        self._layout = np.dtype([(name, *kind_and_shape) for name, kind_and_shape in sizes.items()])
        self._inputs = torch.zeros(self._layout.itemsize, dtype=torch.uint8, device=device)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture a pass for each width, the widest first: the others fit into its memory."""
        pool = torch.cuda.graph_pool_handle()
        for width in reversed(self._widths):
            # Outside first: kernels are compiled there. All rows are padding: nothing is read or written for them.
            self._fill(
                np.empty(0, np.int64), np.empty(0, np.int64), np.zeros(1), np.empty(0), np.empty((0, 0))
            )
            self._run(width)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                hidden = self._run(width)
            self._passes[width] = _Pass(graph, hidden)
        torch.cuda.synchronize()

    def run(
        self,
        input_ids: np.ndarray,  # [T] int64
        positions: np.ndarray,  # [T] int64
        query_start_loc: Int32Array,  # [R + 1]
        num_computed_tokens: Int32Array,  # [R]
        block_table: Int32Array,  # [R, at most MB]
    ) -> torch.Tensor | None:
        """Replay the pass that fits; None where none does.

        Returns:
            Hidden states ``[width, E]``, the first ``T`` of which count, until the next call.
        """
        num_tokens, num_rows = len(input_ids), len(num_computed_tokens)
        width = next((width for width in sorted(self._passes) if width >= num_tokens), None)
        if width is None or num_rows > _num_rows(width):
            return None
        self._fill(input_ids, positions, query_start_loc, num_computed_tokens, block_table)
        self._passes[width].graph.replay()
        return self._passes[width].hidden

    def _fill(
        self,
        input_ids: np.ndarray,
        positions: np.ndarray,
        query_start_loc: np.ndarray,
        num_computed_tokens: np.ndarray,
        block_table: np.ndarray,
    ) -> None:
        pinned = torch.empty(self._layout.itemsize, dtype=torch.uint8, pin_memory=True)
        fields = pinned.numpy().view(self._layout)[0]
        num_tokens, num_rows = len(input_ids), len(num_computed_tokens)
        for name, values in (("input_ids", input_ids), ("positions", positions)):
            fields[name][:num_tokens] = values
            fields[name][num_tokens:] = 0
        fields["query_start_loc"][: num_rows + 1] = query_start_loc
        fields["query_start_loc"][num_rows + 1 :] = num_tokens
        fields["num_computed_tokens"][:num_rows] = num_computed_tokens
        fields["num_computed_tokens"][num_rows:] = -1
        fields["block_table"][:num_rows, : block_table.shape[1]] = block_table
        self._inputs.copy_(pinned, non_blocking=True)

    def _run(self, width: int) -> torch.Tensor:
        num_rows = _num_rows(width)
        metadata = AttentionMetadata(
            query_start_loc=self._view("query_start_loc")[: num_rows + 1],
            num_computed_tokens=self._view("num_computed_tokens")[:num_rows],
            block_table=self._view("block_table")[:num_rows],
            slot_mapping=None,
            num_decodes=0,
        )
        return self._forward(self._view("input_ids")[:width], self._view("positions")[:width], metadata)

    def _view(self, name: str) -> torch.Tensor:
        kind, start = self._layout.fields[name][:2]  # type: ignore[index]
        dtype = torch.int64 if kind.base == np.int64 else torch.int32
        return self._inputs[start : start + kind.itemsize].view(dtype).view(kind.shape)


def _num_rows(width: int) -> int:
    return max(width // _TOKENS_PER_ROW, 4)
