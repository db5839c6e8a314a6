"""Forward passes over prompts as CUDA graphs, padded up to the next shape that was captured.

Launching a pass over a few thousand tokens one kernel at a time takes the host longer than the GPU needs to compute it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from rose_backend.engine.progress import show_progress
from rose_backend.engine.sequence_state import Int32Array
from rose_backend.kernels.captured_graphs import CapturedGraphs, FixedInputs
from rose_backend.layers.attention import AttentionMetadata

MAX_CAPTURED_TOKENS = 16_384
"""Larger passes keep the GPU busy without a graph."""
_MIN_ROWS = 4
# Tokens per row that bound the rows of a pass. Unused rows cost the attention kernel empty programs, so there are
# passes for long chunks, and further ones for short chunks.
_LONG_CHUNK, _SHORT_CHUNK = 128, 16
_MAX_SHORT_CHUNK_TOKENS = 4096

Forward = Callable[[torch.Tensor, torch.Tensor, AttentionMetadata], torch.Tensor]


class PassShape(NamedTuple):
    """The size of a captured pass, and what attention is tuned for in it."""

    num_tokens: int
    num_rows: int
    mean_query_len: float


def pass_shapes(max_tokens: int) -> tuple[PassShape, ...]:
    """Return what graphs are captured for, in the order in which a pass tries them: fewest tokens, then fewest rows.

    Steps of a quarter of the next power of two, from 256 tokens on: padding is at most a fifth, a tenth on average.
    """
    limit = min(max_tokens, MAX_CAPTURED_TOKENS)
    widths = [64, 128]
    while widths[-1] < limit:
        widths.append(widths[-1] + max(1 << (widths[-1].bit_length() - 1) >> 2, 128))
    shapes = []
    for width in (*(width for width in widths if width < limit), limit):
        shapes.append(PassShape(width, max(width // _LONG_CHUNK, _MIN_ROWS), _LONG_CHUNK))
        if width <= _MAX_SHORT_CHUNK_TOKENS and width // _SHORT_CHUNK > shapes[-1].num_rows:
            shapes.append(PassShape(width, width // _SHORT_CHUNK, 2 * _SHORT_CHUNK))
    return tuple(shapes)


class PromptGraphs:
    """Captured forward passes and the fixed inputs and outputs that they share.

    Args:
        forward: given token ids, positions and metadata of a pass without decodes, returns the hidden states of its
            requests' last tokens, ``[R, E]``, and waits for nothing.
        max_tokens: of a pass.
        table_width: blocks per sequence (MB).
    """

    def __init__(self, forward: Forward, max_tokens: int, table_width: int, device: torch.device) -> None:
        self._forward = forward
        self._shapes = pass_shapes(max_tokens)
        self._graphs = CapturedGraphs[PassShape](self._compute)
        self.hidden = torch.empty(0)
        """Where every pass leaves the hidden states of its rows' last tokens, ``[max_rows, E]``."""
        num_tokens = max(shape.num_tokens for shape in self._shapes)
        num_rows = max(shape.num_rows for shape in self._shapes)
        self._inputs = FixedInputs(
            {
                "input_ids": (np.int64, (num_tokens,)),
                "positions": (np.int64, (num_tokens,)),
                "query_start_loc": (np.int32, (num_rows + 1,)),
                "num_computed_tokens": (np.int32, (num_rows,)),
                "block_table": (np.int32, (num_rows, table_width)),
            },
            device,
        )

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture a pass of each shape."""
        # All rows are padding: nothing is read or written for them.
        nothing = np.empty(0, np.int64)
        self._fill(self._shapes[-1].num_tokens, nothing, nothing, np.zeros(1), nothing, np.empty((0, 0)))
        self._graphs.capture(show_progress("capturing prompt passes", self._shapes[::-1]))

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
            Hidden states of each row's last token, ``[R, E]``, until the next call.
        """
        num_tokens, num_rows = len(input_ids), len(num_computed_tokens)
        fitting = (
            shape for shape in self._shapes if shape.num_tokens >= num_tokens and shape.num_rows >= num_rows
        )
        shape = next(fitting, None)
        if shape is None:
            return None
        self._fill(shape.num_tokens, input_ids, positions, query_start_loc, num_computed_tokens, block_table)
        self._graphs.run(shape)
        return self.hidden[:num_rows]

    def _fill(
        self,
        width: int,
        input_ids: np.ndarray,
        positions: np.ndarray,
        query_start_loc: np.ndarray,
        num_computed_tokens: np.ndarray,
        block_table: np.ndarray,
    ) -> None:
        host_bytes, fields = self._inputs.begin()
        num_tokens, num_rows = len(input_ids), len(num_computed_tokens)
        for name, values in (("input_ids", input_ids), ("positions", positions)):
            fields[name][:num_tokens] = values
            fields[name][num_tokens:width] = 0
        fields["query_start_loc"][: num_rows + 1] = query_start_loc
        fields["query_start_loc"][num_rows + 1 :] = num_tokens
        fields["num_computed_tokens"][:num_rows] = num_computed_tokens
        fields["num_computed_tokens"][num_rows:] = -1
        fields["block_table"][:num_rows, : block_table.shape[1]] = block_table
        self._inputs.send(host_bytes)

    def _compute(self, shape: PassShape, _: None = None) -> None:
        num_tokens, num_rows, mean_query_len = shape
        inputs = self._inputs.tensors
        metadata = AttentionMetadata(
            query_start_loc=inputs["query_start_loc"][: num_rows + 1],
            num_computed_tokens=inputs["num_computed_tokens"][:num_rows],
            block_table=inputs["block_table"][:num_rows],
            slot_mapping=None,
            num_decodes=0,
            mean_query_len=mean_query_len,
            last_tokens_only=True,
        )
        hidden = self._forward(inputs["input_ids"][:num_tokens], inputs["positions"][:num_tokens], metadata)
        if not len(self.hidden):  # in the first pass, which is not captured
            max_rows = max(each.num_rows for each in self._shapes)
            self.hidden = hidden.new_empty((max_rows, hidden.shape[1]))
        self.hidden[:num_rows].copy_(hidden)
