"""Decode steps over fixed buffers: one function, replayed from a CUDA graph where there is one.

``DecodeSlots`` says which row is in which slot, ``DecodeBuffers`` holds what all slots need on the device, and
``DecodeRunner`` starts steps over them. ``SamplingExtras`` is for draws that need more than logits and a few numbers of
their row: penalties, ``min_tokens``, log-probabilities. A decode step draws for every slot without any of these. Where
a row needs one, a second part draws again from the same logits and replaces the tokens of such rows. Other steps pay
nothing, and run-ahead is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.block_manager import BlockManager
from rose_backend.config import MAX_LOGPROBS
from rose_backend.engine.progress import show_progress
from rose_backend.engine.sequence_state import INVALID_TOKEN_ID, SAMPLING_FIELDS, Int32Array, SequenceState
from rose_backend.kernels import SampleOutput, SamplingTensors
from rose_backend.kernels.captured_graphs import CapturedGraphs, Fields, Inputs, SizedGraphs, size_for, upload
from rose_backend.kernels.decode_step.ops import advance_rows

Int64Array = NDArray[np.int64]
NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class SlotChange:
    """What has to be written to the device before the next step."""

    slots: Int64Array  # [N]
    rows: Int32Array  # [N], the new row of each slot
    old_slots: Int64Array  # [N], the row's slot until now, or NO_SLOT
    emptied: Int64Array  # [P], slots without a row that the device still computes


class DecodeSlots:
    """Keeps the rows of a decode step in the first few slots.

    A step runs over as many slots as a captured graph has: a row moves only when its slot is beyond a smaller graph's.

    Args:
        state: completion of each row.
    """

    def __init__(self, state: SequenceState) -> None:
        num_rows = len(state.num_tokens)
        self._state = state
        self.row_of_slot: Int64Array = np.full(num_rows, NO_SLOT, np.int64)
        self._slot_of_row: Int64Array = np.full(num_rows, NO_SLOT, np.int64)
        self._generation_of_slot: Int64Array = np.zeros(num_rows, np.int64)
        self._is_active: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)  # as the device sees it
        self._num_held = 0

    def rows(self) -> Int64Array:
        """Return the rows that are in a slot and have not left since."""
        slots = np.flatnonzero(self.row_of_slot >= 0)
        rows: Int64Array = self.row_of_slot[slots]
        return rows[self._generation_of_slot[slots] == self._state.generation[rows]]

    def slots_of(self, rows: NDArray[np.signedinteger]) -> Int64Array:
        """Return each row's slot, ``NO_SLOT`` for a row that has none."""
        slots = self._slot_of_row[rows]
        is_stale = self._generation_of_slot[slots] != self._state.generation[rows]
        slots[is_stale] = NO_SLOT
        return slots

    def assign(self, rows: Int32Array, width: int) -> tuple[Int64Array, SlotChange | None]:
        """Put exactly ``rows`` into slots below ``width``.

        Returns:
            ``[N]`` the slot of each row, and what has changed; None where nothing has.
        """
        old_slots = self.slots_of(rows)
        stays = (old_slots >= 0) & (old_slots < width)
        if len(rows) == self._num_held and stays.all():
            return old_slots, None
        row_of_slot = np.full_like(self.row_of_slot, NO_SLOT)
        row_of_slot[old_slots[stays]] = rows[stays]
        comes = np.flatnonzero(~stays)
        slots = old_slots.copy()
        slots[comes] = np.flatnonzero(row_of_slot[:width] < 0)[: len(comes)]
        row_of_slot[slots[comes]] = rows[comes]
        self.row_of_slot = row_of_slot
        self._slot_of_row[:] = NO_SLOT
        self._slot_of_row[rows] = slots
        self._generation_of_slot[slots] = self._state.generation[rows]
        self._num_held = len(rows)
        emptied = np.flatnonzero(self._is_active & (row_of_slot < 0))
        self._is_active[emptied] = False
        self._is_active[slots] = True
        return slots, SlotChange(slots[comes], rows[comes], old_slots[comes], emptied)


HISTORY_STEPS = 8
"""Steps whose tokens are kept for the host; more than can be in flight."""

_CHANGE_SIZES = (8, 32, 128)


def sampling_by_name(words: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the rows of ``words``, int32 ``[len(SAMPLING_FIELDS), R]``, as fields of ``SamplingTensors``."""
    rows = zip(SAMPLING_FIELDS, words.unbind(0), strict=True)
    return {name: row if name == "top_k" else row.view(torch.float32) for name, row in rows}


def sampling_of_rows(words: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return ``words``, int32 ``[R, len(SAMPLING_FIELDS)]``, as fields of ``SamplingTensors``.

    Each starts at a multiple of 16 bytes, whatever R is: Triton compiles a kernel once for pointers that do, and once
    more for every other pattern among its arguments.
    """
    num_rows, num_fields = words.shape
    columns = words.new_empty((num_fields, -(-num_rows // 4) * 4))[:, :num_rows]
    return sampling_by_name(columns.copy_(words.t()))


def sampling_tensors(
    seed: torch.Tensor, position: torch.Tensor, by_name: dict[str, torch.Tensor]
) -> SamplingTensors:
    """Return the parameters of draws without log-probabilities."""
    return SamplingTensors(
        seed=seed, position=position, num_logprobs=-1, invalid_token_id=INVALID_TOKEN_ID, **by_name
    )


class DecodeBuffers:
    """What a decode step reads and writes, one entry per slot.

    A slot without a row has ``num_computed_tokens`` -1: nothing is read or written for it, and its draw is ignored.

    Args:
        num_slots: S.
        table_width: blocks per sequence (MB).
    """

    def __init__(self, num_slots: int, table_width: int, device: torch.device) -> None:
        self.device = device
        self.tokens = torch.zeros((2, num_slots), dtype=torch.int64, device=device)
        self.input_ids, self.first_tokens = self.tokens.unbind(0)
        """The next step's input; and the tokens drawn last by a step over prompts, in that step's order."""
        self._longs = torch.zeros((3, num_slots), dtype=torch.int64, device=device)
        self.positions, self.draw_positions, self.seeds = self._longs.unbind(0)
        self._words = torch.zeros((1 + len(SAMPLING_FIELDS), num_slots), dtype=torch.int32, device=device)
        self.num_computed_tokens = self._words[0]
        self._sampling = sampling_by_name(self._words[1:])
        self.block_table = torch.zeros((num_slots, table_width), dtype=torch.int32, device=device)
        self.history = torch.zeros(
            (HISTORY_STEPS, num_slots), dtype=torch.int64, pin_memory=device.type != "cpu"
        )
        """``[HISTORY_STEPS, S]`` in host memory: the tokens of step ``n`` are in row ``n % HISTORY_STEPS``."""
        self.step_index = torch.zeros(1, dtype=torch.int64, device=device)
        self.reset()
        sizes = (*(size for size in _CHANGE_SIZES if size < num_slots), num_slots)
        row_fields: Fields = {
            "slots": (np.int64, ()),
            "sources": (np.int64, ()),
            "longs": (np.int64, (4,)),
            "words": (np.int32, (len(self._words),)),
        }
        table_fields: Fields = {"slots": (np.int64, ()), "tables": (np.int32, (table_width,))}
        self._row_changes = SizedGraphs(self._change_rows, row_fields, sizes, device)
        self._table_changes = SizedGraphs(self._change_tables, table_fields, sizes, device)

    def capture(self) -> None:
        """Capture what ``write_rows`` and ``write_block_tables`` do. The buffers must be reset afterwards."""
        self._row_changes.capture()
        self._table_changes.capture()

    def reset(self) -> None:
        """Empty all slots and count steps from 0."""
        self.tokens.zero_()
        self._longs.zero_()
        self._words.zero_()
        self.num_computed_tokens.fill_(-1)
        self.step_index.zero_()

    def sampling(self, width: int) -> SamplingTensors:
        """Return the parameters of the first ``width`` slots' draws."""
        by_name = {name: values[:width] for name, values in self._sampling.items()}
        return sampling_tensors(self.seeds[:width], self.draw_positions[:width], by_name)

    def advance(self, token_ids: torch.Tensor) -> None:
        """End a step that drew ``token_ids``, int64 ``[width]``."""
        width = len(token_ids)
        advance_rows(
            token_ids,
            self.input_ids[:width],
            self.num_computed_tokens[:width],
            self.positions[:width],
            self.draw_positions[:width],
            self.history,
            self.step_index,
        )

    def write_rows(
        self,
        slots: NDArray[np.int64],
        state: SequenceState,
        rows: NDArray[np.signedinteger[Any]],
        sources: NDArray[np.int64],
    ) -> None:
        """Put ``rows`` into ``slots``; entries past ``len(rows)`` of ``slots`` become empty.

        Args:
            slots: ``[N]``.
            rows: ``[n]``, at most N.
            sources: ``[N]``: where in ``tokens``, read as one list, the row's newest token is; negative where the
                host knows it.
        """
        num_rows, num_slots = len(rows), len(slots)
        words = np.zeros((num_slots, 1 + len(SAMPLING_FIELDS)), np.int32)
        words[:, 0] = -1
        longs = np.zeros((num_slots, 4), np.int64)
        position = state.num_planned_tokens(rows) - 1
        words[:num_rows, 0] = position
        words[:num_rows, 1:] = state.sampling_words[rows]
        longs[:num_rows, 0] = state.token_ids[rows, state.num_tokens[rows] - 1]
        longs[:num_rows, 1] = position
        longs[:num_rows, 2] = position + 1
        longs[:num_rows, 3] = state.seed[rows]
        self._row_changes.run(slots=slots, sources=sources, longs=longs, words=words)

    def write_block_tables(self, slots: NDArray[np.int64], block_tables: NDArray[np.int32]) -> None:
        """Write the block tables ``[N, MB]`` of ``slots``, ``[N]``."""
        self._table_changes.run(slots=slots, tables=block_tables)

    def _change_rows(self, inputs: Inputs) -> None:
        slots, sources, longs = inputs["slots"], inputs["sources"], inputs["longs"].t()
        known = self.tokens.view(-1)[sources.clamp(min=0)]
        self.input_ids.index_copy_(0, slots, torch.where(sources >= 0, known, longs[0]))
        self._longs.index_copy_(1, slots, longs[1:])
        self._words.index_copy_(1, slots, inputs["words"].t())

    def _change_tables(self, inputs: Inputs) -> None:
        self.block_table.index_copy_(0, inputs["slots"], inputs["tables"])


Sample = Callable[[torch.Tensor, SamplingTensors], SampleOutput]
Rows = NDArray[np.signedinteger[Any]]


class SamplingExtras:
    """What rows with sampling extras need on the device, in fixed tensors: captured graphs hold their addresses.

    Args:
        sample: chooses tokens, as ``rose_backend.kernels.sample``.
        vocab_size: V.
    """

    def __init__(self, state: SequenceState, sample: Sample, vocab_size: int, device: torch.device) -> None:
        num_slots, num_banned = state.banned_token_ids.shape
        self._state = state
        self._sample = sample
        self._device = device
        # Of rows with penalties: 5 bytes per row and token of the vocabulary. The host writes a row's entry before its
        # first draw; then the device counts what it draws, without the host.
        self._counted_generation: NDArray[np.int64] = np.full(num_slots, -1, np.int64)
        self._prompt_mask = torch.zeros((num_slots, vocab_size), dtype=torch.bool, device=device)
        self._output_counts = torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device)
        self._num_logprobs = min(MAX_LOGPROBS, vocab_size)
        self._words = torch.zeros((4, num_slots), dtype=torch.int32, device=device)
        self._rows, self._min_num_tokens, self._needs_extras, self._uses_penalties = self._words.unbind(0)
        self._banned_token_ids = torch.full((num_slots, num_banned), -1, dtype=torch.int32, device=device)
        self._minus_infinity = torch.full((num_slots, num_banned), float("-inf"), device=device)
        width = 2 + 2 * self._num_logprobs  # see LogprobWords
        self._report = torch.zeros((num_slots, width), device=device)
        self._reports = torch.zeros((HISTORY_STEPS, num_slots, width), pin_memory=device.type != "cpu")
        self._reports_read = self._reports.numpy()
        self.is_in_use = False
        """Whether some slot has a row with sampling extras; if not, ``write_rows`` is needed for such rows only."""
        self._slot_needs_extras: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)

    def is_needed(self, rows: Rows) -> bool:
        """Whether a step over ``rows``, some of which may need it (``needs_sampling_extras``), has to draw again."""
        state = self._state
        is_short = state.num_planned_tokens(rows) < state.min_num_tokens[rows]
        needs = is_short | state.uses_penalties[rows] | (state.num_logprobs[rows] >= 0)
        return bool(np.count_nonzero(needs & state.needs_sampling_extras[rows]))

    def write_rows(self, slots: NDArray[np.int64], rows: Rows) -> None:
        """Write what ``rows`` need into ``slots``, int64 ``[N]``; slots past ``len(rows)`` become empty."""
        state, num_rows = self._state, len(rows)
        needs_sampling_extras = state.needs_sampling_extras[rows]
        self._admit(rows)
        self._slot_needs_extras[slots] = False
        self._slot_needs_extras[slots[:num_rows]] = needs_sampling_extras
        self.is_in_use = bool(np.count_nonzero(self._slot_needs_extras))
        words = np.zeros((4, len(slots)), np.int32)
        words[:, :num_rows] = (
            rows,
            state.min_num_tokens[rows],
            needs_sampling_extras,
            state.uses_penalties[rows],
        )
        banned = np.full((len(slots), state.banned_token_ids.shape[1]), -1, np.int32)
        banned[:num_rows] = state.banned_token_ids[rows]
        to, new_words, new_banned = upload(self._device, slots, words, banned)
        self._words.index_copy_(1, to, new_words)
        self._banned_token_ids.index_copy_(0, to, new_banned)

    def redraw(self, buffers: DecodeBuffers, logits: torch.Tensor) -> None:
        """Draw again from ``logits``, float32 ``[width, V]``, after a step that has drawn from them and advanced."""
        width = len(logits)
        rows = self._rows[:width].to(torch.int64)
        position = buffers.draw_positions[:width] - 1
        is_short = position < self._min_num_tokens[:width]
        banned = self._banned_token_ids[:width].where(is_short[:, None], -1)
        params = buffers.sampling(width)
        drawn = self._draw(logits, params, position, rows, banned)
        token_ids = drawn.token_ids.where(self._needs_extras[:width] != 0, buffers.input_ids[:width])
        buffers.input_ids[:width].copy_(token_ids)
        self._count(rows, token_ids, self._uses_penalties[:width])
        self._report[:width].copy_(pack_logprobs(logits, drawn))

    def collect(self, buffers: DecodeBuffers, step: int, width: int) -> None:
        """Send the outcome of ``redraw`` to the host; it is there when what was enqueued so far has run."""
        where = step % HISTORY_STEPS
        buffers.history[where, :width].copy_(buffers.input_ids[:width], non_blocking=True)
        self._reports[where, :width].copy_(self._report[:width], non_blocking=True)

    def report(self, step: int, slots: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return what a step reported, see ``LogprobWords``. The caller has waited."""
        report: NDArray[np.float32] = self._reports_read[step % HISTORY_STEPS][slots]
        return report

    def draw(self, logits: torch.Tensor, params: SamplingTensors, rows: Int32Array) -> SampleOutput:
        """Draw the next token of each of ``rows`` from ``logits``, float32 ``[S, V]``, outside a decode step."""
        state = self._state
        self._admit(rows)
        is_short = state.num_tokens[rows] < state.min_num_tokens[rows]
        banned = np.where(is_short[:, None], state.banned_token_ids[rows], np.int32(-1))
        weights = state.uses_penalties[rows].astype(np.int32)
        to, ids, counted = upload(self._device, rows.astype(np.int64), banned, weights)
        drawn = self._draw(logits, params, params.position, to, ids)
        self._count(to, drawn.token_ids, counted)
        return drawn

    def _draw(
        self,
        logits: torch.Tensor,
        params: SamplingTensors,
        position: torch.Tensor,
        rows: torch.Tensor,
        banned: torch.Tensor,
    ) -> SampleOutput:
        extras: dict[str, Any] = {
            "prompt_mask": self._prompt_mask.index_select(0, rows),  # [S, V]
            "output_counts": self._output_counts.index_select(0, rows),  # [S, V]
            "bias_token_ids": banned,
        }
        bias = self._minus_infinity[: len(logits)]
        return self._sample(
            logits,
            replace(params, position=position, bias=bias, num_logprobs=self._num_logprobs, **extras),
        )

    def _admit(self, rows: NDArray[np.signedinteger]) -> None:
        """Write the entries of those of ``rows`` that use penalties and have drawn nothing since they were filled."""
        state = self._state
        is_new = state.uses_penalties[rows] & (self._counted_generation[rows] != state.generation[rows])
        for row in rows[is_new].tolist():
            known = state.token_ids[row, : state.num_tokens[row]].astype(np.int64)
            (tokens,) = upload(self._device, known)
            prompt, output = tokens.tensor_split([int(state.num_prompt_tokens[row])])
            self._prompt_mask[row].zero_().index_fill_(0, prompt, True)
            self._output_counts[row].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
            self._counted_generation[row] = state.generation[row]

    def _count(self, rows: torch.Tensor, token_ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Add ``weights`` (int32 ``[S]``, 0 or 1) to the output counts of ``token_ids`` (int64 ``[S]``).

        ``INVALID_TOKEN_ID`` counts as token 0: such a row ends.
        """
        counts = self._output_counts
        counts.view(-1).scatter_add_(0, rows * counts.shape[1] + token_ids.clamp(min=0), weights)


def pack_logprobs(logits: torch.Tensor, drawn: SampleOutput) -> torch.Tensor:
    """Return ``LogprobWords`` of a draw with log-probabilities, on its device, without waiting for it.

    They are those of the model's own distribution, before anything a request asked for changed it.

    Args:
        logits: float32 ``[S, V]``, which was drawn from.
    """
    assert drawn.logprob is not None and drawn.top_logprobs is not None and drawn.top_token_ids is not None
    # A row without a token to choose has a negative one. It ends there, and reports nothing.
    token_ids = drawn.token_ids.clamp(min=0)
    rank = (logits > logits.gather(1, token_ids[:, None])).sum(-1) + 1
    numbers = [rank[:, None], drawn.top_token_ids]
    rank_bits, token_bits = (each.to(torch.int32).view(torch.float32) for each in numbers)
    return torch.cat([drawn.logprob[:, None], rank_bits, drawn.top_logprobs, token_bits], dim=1)


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
        compute: given the buffers and a number of slots, computes one step over that many first slots and returns the
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
        # The second part, for sampling extras, is a separate graph and reads the logits of the first.
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
