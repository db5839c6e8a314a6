"""Decode steps over fixed buffers: one function, replayed from a CUDA graph where there is one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.block_manager import BlockManager
from rose_backend.engine.execution.decode_slots import (
    HISTORY_STEPS,
    NO_SLOT,
    DecodeBuffers,
    DecodeSlots,
    Int64Array,
)
from rose_backend.engine.execution.sampling_extras import SamplingExtras
from rose_backend.engine.progress import show_progress
from rose_backend.engine.sequence_state import Int32Array, SequenceState
from rose_backend.kernels.captured_graphs import CapturedGraphs, size_for

MAX_CAPTURED_ROWS = 512
"""Larger steps keep the GPU busy without a graph."""


def graph_widths(max_rows: int) -> tuple[int, ...]:
    """Return the numbers of slots that graphs are captured for, rising; the last one is ``max_rows`` if that is small.

    They are about an eighth apart, which wastes little work; each costs a fraction of a second at start-up.
    """
    limit = min(max_rows, MAX_CAPTURED_ROWS)
    widths = [1, 2, 4, 8, 16, 32, 48, 64, *range(96, 257, 32), *range(320, MAX_CAPTURED_ROWS + 1, 64)]
    return (*(width for width in widths if width < limit), limit)


def launched_widths(max_rows: int) -> tuple[int, ...]:
    """Return numbers of slots above those of graphs, rising: the least for each power of two kernels round up to."""
    powers = (MAX_CAPTURED_ROWS << doubling for doubling in range(max_rows.bit_length()))
    return tuple(power + 1 for power in powers if power < max_rows)


class DecodeRunner:
    """Runs decode steps without waiting for them, and without waiting for their tokens to start the next one.

    Args:
        compute: given the buffers and a number of slots, computes one step over the first so many slots and returns the
            token that each draws, int64 ``[width]``, and the logits. It must not wait for the device.
        extras: draws again for rows with sampling extras.
        widths: numbers of slots that a step may be rounded up to, rising; a larger step is as wide as it must be.
    """

    def __init__(
        self,
        compute: Callable[[DecodeBuffers, int], tuple[torch.Tensor, torch.Tensor]],
        extras: SamplingExtras,
        manager: BlockManager,
        state: SequenceState,
        device: torch.device,
        widths: tuple[int, ...] = (),
    ) -> None:
        self.num_slots, table_width = manager.block_table.shape
        """Rows that can be in a step."""
        self.buffers = DecodeBuffers(self.num_slots, table_width, device)
        self.widths = widths
        self._compute = compute
        self._extras = extras
        self._manager = manager
        self._state = state
        self._slots = DecodeSlots(state)
        self._first_token_of_row: Int64Array = np.full(self.num_slots, NO_SLOT, np.int64)
        # The second part, for sampling extras, is a graph of its own and reads the logits of the first.
        self._graphs = CapturedGraphs[int](self._step, self._redraw)
        self.needs_sampling_extras = False
        """Whether the last step drew again for some rows."""
        self._num_steps = 0
        self._width = 0
        self._history = self.buffers.history.numpy()

    @torch.inference_mode()
    def warm_up(self, widths: tuple[int, ...]) -> None:
        """Compute a step of each of ``widths``, rising, without rows: kernels of steps without a graph are compiled."""
        for width in show_progress("preparing decode steps", widths[::-1]):
            self._graphs.run(width, num_parts=2)
        self.buffers.reset()

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture a step of each of ``widths``."""
        self._graphs.capture(show_progress("capturing decode steps", self.widths[::-1]))
        self.buffers.capture()
        self.buffers.reset()

    @torch.inference_mode()
    def enqueue(self, rows: Int32Array) -> tuple[int, Int64Array]:
        """Start a step in which every one of ``rows`` computes its newest token and draws the next.

        Each row's blocks are reserved, and its newest token is known or on the device (``is_on_device``).

        Returns:
            What ``tokens`` asks for: the step's number, and the slot of each row.
        """
        self._width = size_for(self.widths, len(rows)) or len(rows)
        needs_sampling_extras = self._state.needs_sampling_extras[rows]
        self.needs_sampling_extras = bool(np.count_nonzero(needs_sampling_extras)) and self._extras.is_needed(
            rows
        )
        slots = self._place(rows)
        step = self.enqueue_again()
        self.forget_first_tokens()
        return step, slots

    def enqueue_again(self) -> int:
        """Start a step that repeats the one before: no row joined or left, and no block table has changed.

        Returns:
            The step's number.
        """
        self._graphs.run(self._width, 2 if self.needs_sampling_extras else 1)
        step, self._num_steps = self._num_steps, self._num_steps + 1
        if self.needs_sampling_extras:
            self._extras.collect(self.buffers, step, self._width)
        return step

    def tokens(self, step: int, slots: Int64Array) -> Int64Array:
        """Return what a step drew, ``[len(slots)]``. It is over, and at most ``HISTORY_STEPS`` steps old."""
        drawn: Int64Array = self._history[step % HISTORY_STEPS][slots]
        return drawn

    def report(self, step: int, slots: Int64Array) -> NDArray[np.float32]:
        """Return the log-probabilities of a step with sampling extras; see ``SamplingExtras.report``."""
        return self._extras.report(step, slots)

    def take_first_tokens(self, rows: Int32Array) -> torch.Tensor:
        """Expect the tokens that a step over prompts draws for ``rows``, so that the next step can take them as input.

        Returns:
            int64 ``[len(rows)]`` on the device, where they are to be put.
        """
        # Those of an earlier step over prompts are overwritten, if no decodes have taken them in between.
        self.forget_first_tokens()
        self._first_token_of_row[rows] = np.arange(len(rows))
        self._state.is_on_device[rows] = True
        return self.buffers.first_tokens[: len(rows)]

    def forget_first_tokens(self) -> None:
        """Drop what ``take_first_tokens`` noted: rows that are in no slot by now wait until the host has read it."""
        self._first_token_of_row[:] = NO_SLOT
        self._state.is_on_device[:] = False
        self._state.is_on_device[self._slots.rows()] = True

    def _place(self, rows: Int32Array) -> Int64Array:
        """Give every row a slot and send the changes to the device; return the slots."""
        slots, change = self._slots.assign(rows, self._width)
        tables = self._slots.slots_of(self._manager.take_changed_rows())
        tables = tables[tables >= 0]
        if change is not None:
            sources = np.full(len(change.slots) + len(change.emptied), NO_SLOT, np.int64)
            # A token that the host has not read is taken from where the row stood, or from the step over its prompt.
            first = self._first_token_of_row[change.rows]
            sources[: len(change.rows)] = np.where(
                self._state.num_unread_tokens[change.rows] == 0,
                NO_SLOT,
                np.where(change.old_slots >= 0, change.old_slots, self.num_slots + first),
            )
            written = np.concatenate([change.slots, change.emptied])
            self.buffers.write_rows(written, self._state, change.rows, sources)
            if self._extras.is_in_use or np.count_nonzero(self._state.needs_sampling_extras[change.rows]):
                self._extras.write_rows(written, change.rows)
            is_written = np.zeros(self.num_slots, np.bool_)
            is_written[tables] = is_written[change.slots] = True
            tables = np.flatnonzero(is_written)
        if len(tables):
            table_rows = self._slots.row_of_slot[tables]
            self.buffers.write_block_tables(tables, self._manager.block_table[table_rows])
        return slots

    def _step(self, width: int, _: None = None) -> torch.Tensor:
        """Compute a step; return its logits."""
        token_ids, logits = self._compute(self.buffers, width)
        self.buffers.advance(token_ids)
        return logits

    def _redraw(self, width: int, logits: torch.Tensor) -> None:
        self._extras.redraw(self.buffers, logits)
