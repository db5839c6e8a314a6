"""Decode steps over fixed buffers: one function, replayed from a CUDA graph where there is one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.block_manager import BlockManager
from rose_backend.engine.decode_buffers import HISTORY_STEPS, DecodeBuffers
from rose_backend.engine.decode_slots import NO_SLOT, DecodeSlots, Int64Array
from rose_backend.engine.progress import Track, no_progress
from rose_backend.engine.row_state import Int32Array, RowState
from rose_backend.engine.special_draws import SpecialDraws

MAX_CAPTURED_ROWS = 512
"""Larger steps keep the GPU busy without a graph."""


def graph_widths(max_rows: int) -> tuple[int, ...]:
    """Return the numbers of slots that graphs are captured for, rising; the last one is ``max_rows`` if that is small.

    Steps of one eighth waste little work; a width costs a fraction of a second at the start.
    """
    limit = min(max_rows, MAX_CAPTURED_ROWS)
    widths = [1, 2, 4, 8, 16, 32, 48, 64, *range(96, 257, 32), *range(320, MAX_CAPTURED_ROWS + 1, 64)]
    return (*(width for width in widths if width < limit), limit)


class DecodeRunner:
    """Runs decode steps without waiting for them, and without waiting for their tokens to start the next one.

    Args:
        compute: given the buffers and a number of slots, computes one step over the first so many slots and returns the
            token that each draws, int64 ``[width]``, and the logits. It must not wait for the device.
        special: draws again for rows that ask for more.
        widths: numbers of slots that a step may be rounded up to, rising; a larger step is as wide as it must be.
    """

    def __init__(
        self,
        compute: Callable[[DecodeBuffers, int], tuple[torch.Tensor, torch.Tensor]],
        special: SpecialDraws,
        manager: BlockManager,
        state: RowState,
        device: torch.device,
        widths: tuple[int, ...] = (),
    ) -> None:
        num_slots, table_width = manager.block_table.shape
        self.buffers = DecodeBuffers(num_slots, table_width, device)
        self.widths = widths
        self._compute = compute
        self._special = special
        self._manager = manager
        self._state = state
        self._slots = DecodeSlots(state)
        self._first_token_of_row: Int64Array = np.full(num_slots, NO_SLOT, np.int64)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]] = {}
        self.is_special = False
        """Whether the last step drew again for some rows."""
        self._num_steps = 0
        self._width = 0
        self._history = self.buffers.history.numpy()

    @property
    def num_slots(self) -> int:
        """Rows that can be in a step."""
        return len(self.buffers.input_ids)

    @torch.inference_mode()
    def warm_up(self, track: Track = no_progress) -> None:
        """Compute a step of each of ``widths`` without rows, for a runner that captures none: kernels are compiled."""
        for width in track("preparing decode steps", self.widths[::-1]):
            self._special.redraw(self.buffers, self._step(width))
        self.buffers.reset()

    @torch.inference_mode()
    def capture(self, track: Track = no_progress) -> None:
        """Capture a step of each of ``widths``, the widest first: the others fit into its memory.

        What follows in a step with special rows is a graph of its own, which reads the logits of the first one.
        """
        pool = torch.cuda.graph_pool_handle()
        for width in track("capturing decode steps", self.widths[::-1]):
            # Outside first: kernels are compiled and their scratch memory is allocated there.
            self._special.redraw(self.buffers, self._step(width))
            torch.cuda.synchronize()
            step, redraw = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(step, pool=pool):
                logits = self._step(width)
            with torch.cuda.graph(redraw, pool=pool):
                self._special.redraw(self.buffers, logits)
            self._graphs[width] = step, redraw
            del logits
        self.buffers.capture()
        torch.cuda.synchronize()
        self.buffers.reset()

    @torch.inference_mode()
    def enqueue(self, rows: Int32Array) -> tuple[int, Int64Array]:
        """Start a step in which every one of ``rows`` computes its newest token and draws the next.

        Each row's blocks are reserved, and its newest token is known or stands on the device (``is_on_device``).

        Returns:
            What ``tokens`` asks for: the step's number, and the slot of each row.
        """
        self._width = self._width_for(len(rows))
        self.is_special = self._special.is_needed(rows)
        slots = self._place(rows)
        step = self.enqueue_again()
        self.forget_first_tokens()
        return step, slots

    def enqueue_again(self) -> int:
        """Start a step like the one before: nobody has come or gone, and no block table has changed.

        Returns:
            The step's number.
        """
        self._run(self._width)
        step, self._num_steps = self._num_steps, self._num_steps + 1
        if self.is_special:
            self._special.collect(self.buffers, step, self._width)
        return step

    def tokens(self, step: int, slots: Int64Array) -> Int64Array:
        """Return what a step drew, ``[len(slots)]``. The caller has waited for it, and not too long."""
        drawn: Int64Array = self._history[step % HISTORY_STEPS][slots]
        return drawn

    def report(self, step: int, slots: Int64Array) -> NDArray[np.float32]:
        """Return what a special step reported; see ``SpecialDraws.report``."""
        return self._special.report(step, slots)

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

    def _width_for(self, num_rows: int) -> int:
        return next((width for width in self.widths if width >= num_rows), num_rows)

    def _place(self, rows: Int32Array) -> Int64Array:
        """Give every row a slot and tell the device what has changed; return the slots."""
        slots, change = self._slots.assign(rows, self._width)
        tables = self._changed_tables()
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
            self._special.write_rows(written, change.rows)
            is_written = np.zeros(self.num_slots, np.bool_)
            is_written[tables] = is_written[change.slots] = True
            tables = np.flatnonzero(is_written)
        if len(tables):
            table_rows = self._slots.row_of_slot(tables)
            self.buffers.write_block_tables(tables, self._manager.block_table[table_rows])
        return slots

    def _changed_tables(self) -> Int64Array:
        slots = self._slots.slots_of(self._manager.take_changed_rows())
        return slots[slots >= 0]

    def _run(self, width: int) -> None:
        graphs = self._graphs.get(width)
        if graphs is None:
            self._run_uncaptured(width)
            return
        step, redraw = graphs
        step.replay()
        if self.is_special:
            redraw.replay()

    @torch.inference_mode()
    def _run_uncaptured(self, width: int) -> None:
        logits = self._step(width)
        if self.is_special:
            self._special.redraw(self.buffers, logits)

    def _step(self, width: int) -> torch.Tensor:
        """Compute a step; return its logits."""
        token_ids, logits = self._compute(self.buffers, width)
        self.buffers.advance(token_ids)
        return logits
