"""Decode steps over fixed buffers: one function, replayed from a CUDA graph where there is one.

``DecodeRows`` says which request slot is in which row of the decode batch, ``DecodeBuffers`` holds what all rows need
on the device, and ``DecodeRunner`` starts steps over them. ``SamplingExtras`` is for draws that need more than logits
and a few numbers of their request: logits processors, penalties, log-probabilities. A decode step draws for every row
without any of these. Where a request needs one, another part draws again from the same logits and replaces the tokens
of such requests. Other steps pay nothing, and run-ahead is the same for all.

For requests with a grammar, another part runs before that one and masks their logits. It needs the tokens of the
steps before on the CPU: the host waits for them, and fills the masks, while the device computes the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.block_manager import BlockManager
from rose_backend.config import MAX_LOGPROBS
from rose_backend.engine.drafts import DraftedInputs, Drafts, max_drafted_rows
from rose_backend.engine.grammars import GrammarMasks
from rose_backend.engine.logits_processors import ProcessorTables
from rose_backend.engine.progress import show_progress
from rose_backend.engine.sequence_state import INVALID_TOKEN_ID, SAMPLING_FIELDS, Int32Array, SequenceState
from rose_backend.errors import IntegrityError
from rose_backend.kernels import SampleOutput, SamplingTensors
from rose_backend.kernels.captured_graphs import CapturedGraphs, Fields, Inputs, SizedGraphs, size_for, upload
from rose_backend.kernels.decode_step.ops import advance_rows
from rose_backend.kernels.gpu_properties import is_recording
from rose_backend.kernels.sampling.ops import mask_logits

Int64Array = NDArray[np.int64]
NO_ROW = -1


@dataclass(frozen=True, slots=True)
class RowChange:
    """What has to be written to the device before the next step."""

    rows: Int64Array  # [N]
    slots: Int32Array  # [N], the new slot of each row
    old_rows: Int64Array  # [N], the slot's row until now, or NO_ROW
    emptied: Int64Array  # [P], rows without a slot that the device still computes


class DecodeRows:
    """Keeps the request slots of a decode step in the first few rows of its batch.

    A step runs over as many rows as a captured graph has: a slot moves only when its row is beyond a smaller graph's.

    Args:
        state: completion of each slot.
    """

    def __init__(self, state: SequenceState) -> None:
        num_slots = len(state.num_tokens)
        self._state = state
        self.slot_of_row: Int64Array = np.full(num_slots, NO_ROW, np.int64)
        self._row_of_slot: Int64Array = np.full(num_slots, NO_ROW, np.int64)
        self._generation_of_row: Int64Array = np.zeros(num_slots, np.int64)
        self._is_active: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)  # as the device sees it
        self._num_held = 0

    def slots(self) -> Int64Array:
        """Return the slots that are in a row and have not left since."""
        rows = np.flatnonzero(self.slot_of_row >= 0)
        slots: Int64Array = self.slot_of_row[rows]
        return slots[self._generation_of_row[rows] == self._state.generation[slots]]

    def rows_of(self, slots: NDArray[np.signedinteger]) -> Int64Array:
        """Return each slot's row, ``NO_ROW`` for a slot that has none."""
        rows = self._row_of_slot[slots]
        is_stale = self._generation_of_row[rows] != self._state.generation[slots]
        rows[is_stale] = NO_ROW
        return rows

    def assign(self, slots: Int32Array, width: int) -> tuple[Int64Array, RowChange | None]:
        """Put exactly ``slots`` into rows below ``width``.

        Returns:
            ``[N]`` the row of each slot, and what has changed; None where nothing has.
        """
        old_rows = self.rows_of(slots)
        stays = (old_rows >= 0) & (old_rows < width)
        if len(slots) == self._num_held and stays.all():
            return old_rows, None
        slot_of_row = np.full_like(self.slot_of_row, NO_ROW)
        slot_of_row[old_rows[stays]] = slots[stays]
        comes = np.flatnonzero(~stays)
        rows = old_rows.copy()
        rows[comes] = np.flatnonzero(slot_of_row[:width] < 0)[: len(comes)]
        slot_of_row[rows[comes]] = slots[comes]
        self.slot_of_row = slot_of_row
        self._row_of_slot[:] = NO_ROW
        self._row_of_slot[slots] = rows
        self._generation_of_row[rows] = self._state.generation[slots]
        self._num_held = len(slots)
        emptied = np.flatnonzero(self._is_active & (slot_of_row < 0))
        self._is_active[emptied] = False
        self._is_active[rows] = True
        return rows, RowChange(rows[comes], slots[comes], old_rows[comes], emptied)


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


def sampling_tensors(seed: torch.Tensor, position: torch.Tensor, by_name: dict[str, Any]) -> SamplingTensors:
    """Return the parameters of draws without log-probabilities."""
    return SamplingTensors(
        seed=seed, position=position, num_logprobs=-1, invalid_token_id=INVALID_TOKEN_ID, **by_name
    )


def _rows_of_draws(num_rows: int, query_len: int) -> NDArray[np.int64]:
    """Return the row of each of ``query_len`` draws of ``num_rows`` rows, and of some more up to a multiple of 4."""
    num_draws = -(-num_rows * query_len // 4) * 4
    return np.minimum(np.arange(num_draws) // query_len, num_rows - 1)


class DecodeBuffers:
    """What a decode step reads and writes, one entry per row.

    A row without a slot has ``num_computed_tokens`` -1: nothing is read or written for it, and its draw is ignored.

    Args:
        num_rows: S.
        table_width: blocks per sequence (MB).
        depths: numbers of drafts that rows of a step may have, rising.
        spare_columns: of block tables, for drafts past a sequence's greatest length: the null block.
    """

    def __init__(
        self,
        num_rows: int,
        table_width: int,
        device: torch.device,
        depths: tuple[int, ...] = (0,),
        spare_columns: int = 0,
    ) -> None:
        num_drafts = depths[-1]
        self.tokens = torch.zeros((2, num_rows), dtype=torch.int64, device=device)
        self.input_ids, self.first_tokens = self.tokens.unbind(0)
        """The next step's input; and the tokens drawn last by a step over prompts, in that step's order."""
        self._longs = torch.zeros((4, num_rows), dtype=torch.int64, device=device)
        self.positions, self.draw_positions, self.seeds, self._lora_slots = self._longs.unbind(0)
        self._words = torch.zeros((1 + len(SAMPLING_FIELDS), num_rows), dtype=torch.int32, device=device)
        self.num_computed_tokens = self._words[0]
        self._sampling = sampling_by_name(self._words[1:])
        columns = table_width + spare_columns
        self.block_table = torch.zeros((num_rows, columns), dtype=torch.int32, device=device)
        self._given_table = self.block_table[:, :table_width]
        self.history = torch.zeros(
            (HISTORY_STEPS, num_drafts + 1, num_rows), dtype=torch.int64, pin_memory=device.type != "cpu"
        )
        """``[HISTORY_STEPS, num_drafts + 1, S]`` in host memory: the tokens of step ``n`` are at
        ``n % HISTORY_STEPS``, ``NOT_DRAWN`` after a row's last one."""
        query_lens = [depth + 1 for depth in depths]
        self._offsets, *rows_of_draws = upload(
            device, np.arange(num_drafts + 1), *(_rows_of_draws(num_rows, each) for each in query_lens)
        )
        self._rows_of_draws = dict(zip(query_lens, rows_of_draws, strict=True))
        self.step_index = torch.zeros(1, dtype=torch.int64, device=device)
        self.reset()
        sizes = (*(size for size in _CHANGE_SIZES if size < num_rows), num_rows)
        row_fields: Fields = {
            "rows": (np.int64, ()),
            "sources": (np.int64, ()),
            "longs": (np.int64, (5,)),
            "words": (np.int32, (len(self._words),)),
        }
        table_fields: Fields = {"rows": (np.int64, ()), "tables": (np.int32, (table_width,))}
        self._row_changes = SizedGraphs(self._change_rows, row_fields, sizes, device)
        self._table_changes = SizedGraphs(self._change_tables, table_fields, sizes, device)

    def capture(self, stream: torch.cuda.Stream | None) -> None:
        """Capture what ``write_rows`` and ``write_block_tables`` do. The buffers must be reset afterwards."""
        self._row_changes.capture(stream)
        self._table_changes.capture(stream)

    def reset(self) -> None:
        """Empty all rows and count steps from 0."""
        self.tokens.zero_()
        self._longs.zero_()
        self._lora_slots.fill_(-1)
        self._words.zero_()
        self.num_computed_tokens.fill_(-1)
        self.step_index.zero_()

    def sampling(self, width: int) -> SamplingTensors:
        """Return the parameters of the first ``width`` rows' draws."""
        by_name = {name: values[:width] for name, values in self._sampling.items()}
        return sampling_tensors(self.seeds[:width], self.draw_positions[:width], by_name)

    def sampling_after_drafts(self, width: int, query_len: int) -> SamplingTensors:
        """Return the parameters of ``query_len`` draws of each of the first ``width`` rows, row by row."""
        num_draws = width * query_len
        # Each starts at a multiple of 16 bytes, see ``sampling_of_rows``.
        rows = self._rows_of_draws[query_len][: -(-num_draws // 4) * 4]
        by_name = sampling_by_name(self._words[1:].index_select(1, rows)[:, :num_draws])
        positions = self.draw_positions[:width, None] + self._offsets[:query_len]
        return sampling_tensors(self.seeds.index_select(0, rows)[:num_draws], positions.flatten(), by_name)

    def lora_slots(self, width: int, query_len: int) -> torch.Tensor:
        """Return the slot of the adapter of each of ``query_len`` tokens of the first ``width`` rows, row by row."""
        if query_len == 1:
            return self._lora_slots[:width]
        return self._lora_slots.index_select(0, self._rows_of_draws[query_len][: width * query_len])

    def advance(self, token_ids: torch.Tensor) -> None:
        """End a step that drew ``token_ids``, int64 ``[width]``."""
        width = len(token_ids)
        advance_rows(
            token_ids,
            self.input_ids[:width],
            self.num_computed_tokens[:width],
            self.positions[:width],
            self.draw_positions[:width],
            self.history[:, 0],
            self.step_index,
        )

    def write_rows(
        self,
        rows: NDArray[np.int64],
        state: SequenceState,
        slots: NDArray[np.signedinteger[Any]],
        sources: NDArray[np.int64],
    ) -> None:
        """Put ``slots`` into ``rows``; entries past ``len(slots)`` of ``rows`` become empty.

        Args:
            rows: ``[N]``.
            slots: ``[n]``, at most N.
            sources: ``[N]``: where in ``tokens``, read as one list, the slot's newest token is; negative where the
                host knows it.
        """
        num_slots, num_rows = len(slots), len(rows)
        words = np.zeros((num_rows, 1 + len(SAMPLING_FIELDS)), np.int32)
        words[:, 0] = -1
        longs = np.zeros((num_rows, 5), np.int64)
        position = state.num_planned_tokens(slots) - 1
        words[:num_slots, 0] = position
        words[:num_slots, 1:] = state.sampling_words[slots]
        longs[:num_slots, 0] = state.token_ids[slots, state.num_tokens[slots] - 1]
        longs[:num_slots, 1] = position
        longs[:num_slots, 2] = position + 1
        longs[:num_slots, 3] = state.seed[slots]
        longs[:num_slots, 4], longs[num_slots:, 4] = state.lora_slot[slots], -1
        self._row_changes.run(rows=rows, sources=sources, longs=longs, words=words)

    def write_block_tables(self, rows: NDArray[np.int64], block_tables: NDArray[np.int32]) -> None:
        """Write the block tables ``[N, MB]`` of ``rows``, ``[N]``."""
        self._table_changes.run(rows=rows, tables=block_tables)

    def _change_rows(self, inputs: Inputs) -> None:
        rows, sources, longs = inputs["rows"], inputs["sources"], inputs["longs"].t()
        words, num_rows = inputs["words"].t(), len(self.input_ids)
        known = self.tokens.view(-1)[sources.clamp(min=0)]
        self.input_ids.index_copy_(0, rows, torch.where(sources >= 0, known, longs[0]))
        if len(self._offsets) > 1:
            # Where a row moves with drafts in flight, only the device knows how far it is.
            here, old_rows = (sources >= 0).where(sources < num_rows, False), sources.clamp(0, num_rows - 1)
            lengths = torch.where(here, self._longs[:2].index_select(1, old_rows), longs[1:3])
            computed = torch.where(here, self.num_computed_tokens.index_select(0, old_rows), words[0])
            longs, words = torch.cat([longs[:1], lengths, longs[3:]]), torch.cat([computed[None], words[1:]])
        self._longs.index_copy_(1, rows, longs[1:])
        self._words.index_copy_(1, rows, words)

    def _change_tables(self, inputs: Inputs) -> None:
        self._given_table.index_copy_(0, inputs["rows"], inputs["tables"])


Sample = Callable[[torch.Tensor, SamplingTensors], SampleOutput]
Slots = NDArray[np.signedinteger[Any]]


class SamplingExtras:
    """What slots with sampling extras need on the device, in fixed tensors: captured graphs hold their addresses.

    Args:
        sample: chooses tokens, as ``rose_backend.kernels.sample``.
        vocab_size: V.
    """

    def __init__(self, state: SequenceState, sample: Sample, vocab_size: int, device: torch.device) -> None:
        num_slots = len(state.num_tokens)
        self._state = state
        self._processors = ProcessorTables(state, vocab_size, device)
        self._sample = sample
        self._device = device
        # With penalties: 5 bytes per request slot and token of the vocabulary. The host writes a slot's entry before
        # its first draw; then the device counts what it draws, without the host.
        self._admitted_generation: NDArray[np.int64] = np.full(num_slots, -1, np.int64)
        self._prompt_mask = torch.zeros((num_slots, vocab_size), dtype=torch.bool, device=device)
        self._output_counts = torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device)
        self._num_logprobs = min(MAX_LOGPROBS, vocab_size)
        self._words = torch.zeros((4, num_slots), dtype=torch.int32, device=device)
        self._slots, self._entries, self._needs_extras, self._uses_penalties = self._words.unbind(0)
        self._entries.fill_(-1)
        width = 2 + 2 * self._num_logprobs  # see LogprobWords
        self._report = torch.zeros((num_slots, width), device=device)
        self._reports = torch.zeros((HISTORY_STEPS, num_slots, width), pin_memory=device.type != "cpu")
        self._reports_read = self._reports.numpy()
        self.is_in_use = False
        """Whether some row has a slot with sampling extras; if not, ``write_rows`` is needed for such slots only."""
        self._row_needs_extras: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self.masks = GrammarMasks(vocab_size)
        """Of slots with a grammar."""
        self.tokens_ahead: Callable[[Slots], list[list[int]]] = lambda slots: [[] for _ in slots]
        """Waits for the steps in flight that draw for some slots, and returns what each has drawn there, in order."""
        self._bitmask = torch.zeros((num_slots, self.masks.num_words), dtype=torch.int32, device=device)
        self._mask_rows = torch.full((num_slots,), -1, dtype=torch.int32, device=device)

    def write_rows(self, rows: NDArray[np.int64], slots: Slots) -> None:
        """Write what ``slots`` need into ``rows``, int64 ``[N]``; rows past ``len(slots)`` become empty."""
        state, num_slots = self._state, len(slots)
        needs_sampling_extras = state.needs_sampling_extras[slots]
        self._admit(slots)
        self._row_needs_extras[rows] = False
        self._row_needs_extras[rows[:num_slots]] = needs_sampling_extras
        self.is_in_use = bool(np.count_nonzero(self._row_needs_extras))
        words = np.zeros((4, len(rows)), np.int32)
        words[1] = -1
        words[:, :num_slots] = (
            slots,
            self._entries_of(slots),
            needs_sampling_extras,
            state.uses_penalties[slots],
        )
        to, new_words = upload(self._device, rows, words)
        self._words.index_copy_(1, to, new_words)

    def upload_masks(self, slots: Int32Array, rows: NDArray[np.int64]) -> None:
        """Fill the masks of ``slots``, ``[N]``, which are in ``rows`` of the next ``redraw_masked``."""
        mask_rows = np.full(len(self._mask_rows), -1, np.int32)
        mask_rows[rows] = np.arange(len(rows))
        bitmask, to = upload(self._device, self._fill_masks(slots), mask_rows)
        self._bitmask[: len(bitmask)].copy_(bitmask)
        self._mask_rows.copy_(to)

    def redraw_masked(self, buffers: DecodeBuffers, logits: torch.Tensor) -> torch.Tensor:
        """Mask ``logits``, float32 ``[width, V]``, and draw again, rows without a mask the same; return them."""
        width = len(logits)
        mask_logits(logits, self._bitmask, self._mask_rows[:width])
        params = buffers.sampling(width)
        drawn = self._sample(logits, replace(params, position=params.position - 1))
        buffers.input_ids[:width].copy_(drawn.token_ids)
        return logits

    def mask_first(self, logits: torch.Tensor, slots: Int32Array) -> None:
        """Mask ``logits``, float32 ``[S, V]``, from which the next token of each of ``slots`` is drawn, in place."""
        masked = np.flatnonzero(self._state.has_grammar[slots])
        mask_rows = np.full(len(slots), -1, np.int32)
        mask_rows[masked] = np.arange(len(masked))
        mask_logits(logits, *upload(self._device, self._fill_masks(slots[masked]), mask_rows))

    def _fill_masks(self, slots: Int32Array) -> NDArray[np.int32]:
        state, grammars, news = self._state, [], []
        for slot, drawn in zip(slots.tolist(), self.tokens_ahead(slots), strict=True):
            grammar = state.completion(slot).grammar
            assert grammar is not None, f"request slot {slot} has no grammar"
            first, num_known = state.num_prompt_tokens[slot] + grammar.num_tokens, state.num_tokens[slot]
            known = state.token_ids[slot, first:num_known].tolist()
            grammars.append(grammar)
            news.append(known + drawn[max(first - num_known, 0) :])
        return self.masks.fill(grammars, news)

    def redraw(self, buffers: DecodeBuffers, logits: torch.Tensor) -> None:
        """Draw again from ``logits``, float32 ``[width, V]``, after a step that has drawn from them and advanced."""
        width = len(logits)
        slots, entries = self._slots[:width].to(torch.int64), self._entries[:width]
        params = replace(buffers.sampling(width), position=buffers.draw_positions[:width] - 1)
        drawn = self._draw(logits, params, slots, entries)
        token_ids = drawn.token_ids.where(self._needs_extras[:width] != 0, buffers.input_ids[:width])
        buffers.input_ids[:width].copy_(token_ids)
        self._note(slots, entries, params.position, token_ids, self._uses_penalties[:width])
        self._report[:width].copy_(pack_logprobs(logits, drawn))

    def collect(self, buffers: DecodeBuffers, step: int, width: int, *, has_report: bool) -> None:
        """Send what was drawn again to the host; it is there when what was enqueued so far has run."""
        where = step % HISTORY_STEPS
        buffers.history[where, 0, :width].copy_(buffers.input_ids[:width], non_blocking=True)
        if has_report:
            self._reports[where, :width].copy_(self._report[:width], non_blocking=True)

    def report(self, step: int, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return what a step reported, see ``LogprobWords``. The caller has waited."""
        report: NDArray[np.float32] = self._reports_read[step % HISTORY_STEPS][rows]
        return report

    def draw(self, logits: torch.Tensor, params: SamplingTensors, slots: Int32Array) -> SampleOutput:
        """Draw the next token of each of ``slots`` from ``logits``, float32 ``[S, V]``, outside a decode step."""
        state = self._state
        self._admit(slots)
        weights = state.uses_penalties[slots].astype(np.int32)
        to, entries, counted = upload(self._device, slots.astype(np.int64), self._entries_of(slots), weights)
        drawn = self._draw(logits, params, to, entries)
        self._note(to, entries, params.position, drawn.token_ids, counted)
        return drawn

    def _draw(
        self,
        logits: torch.Tensor,
        params: SamplingTensors,
        slots: torch.Tensor,
        entries: torch.Tensor,
    ) -> SampleOutput:
        extras: dict[str, Any] = {
            "processors": self._processors.prepare(entries, params.position),
            "prompt_mask": self._prompt_mask.index_select(0, slots),  # [S, V]
            "output_counts": self._output_counts.index_select(0, slots),  # [S, V]
        }
        return self._sample(logits, replace(params, num_logprobs=self._num_logprobs, **extras))

    def _entries_of(self, slots: Slots) -> Int32Array:
        """Return the processors' entry of each of ``slots``; -1 for none."""
        return np.where(self._state.has_processor_entry[slots], slots, -1).astype(np.int32)

    def _admit(self, slots: Slots) -> None:
        """Write the entries of those of ``slots`` that have any and have drawn nothing since they were filled."""
        state = self._state
        is_new = self._admitted_generation[slots] != state.generation[slots]
        limited = slots[is_new & state.has_processor_entry[slots]].astype(np.int64)
        if len(limited):
            self._processors.admit(limited)
        for slot in slots[is_new & state.uses_penalties[slots]].tolist():
            known = state.token_ids[slot, : state.num_tokens[slot]].astype(np.int64)
            (tokens,) = upload(self._device, known)
            prompt, output = tokens.tensor_split([int(state.num_prompt_tokens[slot])])
            self._prompt_mask[slot].zero_().index_fill_(0, prompt, True)
            self._output_counts[slot].zero_().index_add_(
                0, output, torch.ones_like(output, dtype=torch.int32)
            )
        self._admitted_generation[slots] = state.generation[slots]

    def _note(
        self,
        slots: torch.Tensor,
        entries: torch.Tensor,
        position: torch.Tensor,
        token_ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Keep ``token_ids`` (int64 ``[S]``), and add ``weights`` (int32 ``[S]``, 0 or 1) to their output counts.

        ``INVALID_TOKEN_ID`` counts as token 0: such a request ends.
        """
        counts, known = self._output_counts, token_ids.clamp(min=0)
        counts.view(-1).scatter_add_(0, slots * counts.shape[1] + known, weights)
        self._processors.note(entries, position, known)


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
    return pack_words(drawn.logprob, rank, drawn.top_logprobs, drawn.top_token_ids)


def pack_words(
    logprob: torch.Tensor,  # [S] float32
    rank: torch.Tensor,  # [S]
    top_logprobs: torch.Tensor,  # [S, K] float32
    top_token_ids: torch.Tensor,  # [S, K]
) -> torch.Tensor:
    """Return ``LogprobWords`` of their parts, on their device."""
    rank_bits, token_bits = (
        each.to(torch.int32).view(torch.float32) for each in (rank[:, None], top_token_ids)
    )
    return torch.cat([logprob[:, None], rank_bits, top_logprobs, token_bits], dim=1)


_HIGH_PRIORITY = -1
"""Of a CUDA stream; streams have 0 unless told otherwise."""


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that decode steps of all engines are captured on: cuBLAS keeps scratch memory for each stream.

    Engines of one process replay them on one stream, in turn. A graph's kernels keep the priority of the stream it was
    captured on: decode steps come before a side pass.
    """
    return torch.cuda.Stream(device, priority=_HIGH_PRIORITY)


class Computed(NamedTuple):
    """What a step computes."""

    token_ids: torch.Tensor
    """int64, drawn after each of its tokens, row by row."""
    logits: torch.Tensor
    features: torch.Tensor | None
    """[T, E] of each of its tokens, see ``HeadDrafts``; None: no head reads them."""


Compute = Callable[[DecodeBuffers, int, DraftedInputs | None, bool], Computed]

MAX_CAPTURED_ROWS = 512
"""Larger steps keep the GPU busy without a graph."""


def graph_widths(max_rows: int) -> tuple[int, ...]:
    """Return the numbers of rows that graphs are captured for, rising; the last one is ``max_rows`` if that is small.

    They are about an eighth apart, which wastes little work; each costs a fraction of a second at start-up.
    """
    limit = min(max_rows, MAX_CAPTURED_ROWS)
    widths = [1, 2, 4, 8, 16, 32, 48, 64, *range(96, 257, 32), *range(320, MAX_CAPTURED_ROWS + 1, 64)]
    return (*(width for width in widths if width < limit), limit)


def launched_widths(max_rows: int) -> tuple[int, ...]:
    """Return numbers of rows above those of graphs, rising: the least for each power of two kernels round up to."""
    powers = (MAX_CAPTURED_ROWS << doubling for doubling in range(max_rows.bit_length()))
    return tuple(power + 1 for power in powers if power < max_rows)


class DraftedStep(NamedTuple):
    """A kind of steps with drafts."""

    width: int
    """Rows."""
    depth: int
    """Drafts of each."""


class DecodeRunner:
    """Runs decode steps without waiting for them, and without waiting for their tokens to start the next one.

    Args:
        compute: given the buffers, a number of rows, inputs if these have drafts, and whether some may have adapters,
            computes one step over that many first rows. It must not wait for the device.
        extras: draws again for slots with sampling extras.
        widths: numbers of rows that a step may be rounded up to, rising; a larger step is as wide as it must be.
        drafts: None: no step has any.
    """

    def __init__(
        self,
        compute: Compute,
        extras: SamplingExtras,
        manager: BlockManager,
        state: SequenceState,
        device: torch.device,
        widths: tuple[int, ...] = (),
        drafts: Drafts | None = None,
    ) -> None:
        self.num_rows, table_width = manager.block_table.shape
        """Of the widest step: as many as there are request slots."""
        self._depths = () if drafts is None else drafts.depths
        spare_columns = -(-max(self._depths, default=0) // manager.block_size)
        self.buffers = DecodeBuffers(self.num_rows, table_width, device, (0, *self._depths), spare_columns)
        self.widths = widths
        self.drafts = drafts
        self._compute = compute
        self._device = device
        self.extras = extras
        self._manager = manager
        self._state = state
        self._rows = DecodeRows(state)
        self._first_token_of_slot: Int64Array = np.full(self.num_rows, NO_ROW, np.int64)
        # The other parts, for masks and for sampling extras, are separate graphs and read the logits of the first.
        self._graphs = CapturedGraphs[int](self._step, self._redraw_masked, self._redraw)
        self._draft_graphs = CapturedGraphs[DraftedStep](self._step_with_drafts)
        adapted, drafted = (partial(step, has_adapters=True) for step in (self._step, self._step_with_drafts))
        self._adapted_graphs = CapturedGraphs[int](adapted, self._redraw_masked, self._redraw)
        self._adapted_draft_graphs = CapturedGraphs[DraftedStep](drafted)
        self.takes_adapters = False
        """Whether requests may have LoRA adapters. Steps without one have graphs without their products."""
        self.needs_sampling_extras = False
        """Whether the last step drew again for some slots with sampling extras."""
        self._masked: tuple[Int32Array, Int64Array] = (np.empty(0, np.int32), np.empty(0, np.int64))
        # Slots with a grammar in the last step, and their rows.
        self._num_steps = 0
        self._width = self._num_drafts = 0
        self._has_adapters = False
        self._history = self.buffers.history.numpy()

    @torch.inference_mode()
    def warm_up(self, widths: tuple[int, ...]) -> None:
        """Compute an empty step of each of ``widths``, rising: kernels of steps without a graph are compiled."""
        for graphs, draft_graphs in self._families():
            for width in show_progress("preparing decode steps", widths[::-1]):
                graphs.run(width, num_parts=3)
            for step in self._drafted_steps(widths):
                draft_graphs.run(step)
        self.buffers.reset()

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture a step of each of ``widths``."""
        stream = None if is_recording() else _capture_stream(self._device)
        pool = None if is_recording() else torch.cuda.graph_pool_handle()
        drafted = self._drafted_steps(self.widths)
        for graphs, draft_graphs in self._families():
            if drafted:
                progress = show_progress("capturing decode steps with drafts", drafted)
                draft_graphs.capture(progress, pool, stream)
            graphs.capture(show_progress("capturing decode steps", self.widths[::-1]), pool, stream)
        self.buffers.capture(stream)
        self.buffers.reset()

    def _families(self) -> list[tuple[CapturedGraphs[int], CapturedGraphs[DraftedStep]]]:
        """Return the graphs of all kinds of steps, those with drafts second."""
        adapted = [(self._adapted_graphs, self._adapted_draft_graphs)] if self.takes_adapters else []
        return [(self._graphs, self._draft_graphs), *adapted]

    def _drafted_steps(self, widths: tuple[int, ...]) -> list[DraftedStep]:
        """Return the steps with drafts of such ``widths``, those with the most tokens first."""
        steps = [
            DraftedStep(width, depth)
            for depth in self._depths
            for width in self._widths_with_drafts(widths, depth)
        ]
        return sorted(steps, key=lambda step: (step.width * (step.depth + 1), step.width), reverse=True)

    def _widths_with_drafts(self, widths: tuple[int, ...], depth: int) -> tuple[int, ...]:
        """Return those of ``widths``, rising, that steps with ``depth`` drafts are rounded up to; the widest last."""
        most = min(max_drafted_rows(depth), self.num_rows)
        return (*(width for width in widths if width < most), most)

    @torch.inference_mode()
    def enqueue(self, slots: Int32Array, num_drafts: int = 0) -> tuple[int, Int64Array]:
        """Start a step in which every one of ``slots`` computes its newest token and draws the next.

        Each slot's blocks are reserved, and its newest token is known or on the device (``is_on_device``).

        Args:
            num_drafts: that each slot has: none, where any needs to be drawn for again, or one of ``Drafts.depths``.

        Returns:
            What ``tokens`` asks for: the step's number, and the row of each slot.
        """
        widths = self.widths
        if num_drafts and widths:
            widths = self._widths_with_drafts(widths, num_drafts)
        self._width = size_for(widths, len(slots)) or len(slots)
        self._num_drafts = num_drafts
        self._has_adapters = self.takes_adapters and self._state.have_adapters(slots)
        self.needs_sampling_extras = self._state.needs_extras_now(slots)
        rows = self._place(slots)
        masked = np.flatnonzero(self._state.has_grammar[slots])
        self._masked = slots[masked], rows[masked]
        if num_drafts and (self.needs_sampling_extras or len(masked)):
            raise IntegrityError("a step has drafts and a request that it cannot make any for")
        step = self.enqueue_again()
        self.forget_first_tokens()
        return step, rows

    def enqueue_again(self) -> int:
        """Start a step that repeats the one before: no request joined or left, and no block table has changed.

        Returns:
            The step's number.
        """
        step, self._num_steps = self._num_steps, self._num_steps + 1
        if self._num_drafts:
            draft_graphs = self._adapted_draft_graphs if self._has_adapters else self._draft_graphs
            draft_graphs.run(DraftedStep(self._width, self._num_drafts))
            return step
        has_masks, has_report = len(self._masked[0]) > 0, self.needs_sampling_extras
        parts = (0, *((1,) if has_masks else ()), *((2,) if has_report else ()))
        graphs = self._adapted_graphs if self._has_adapters else self._graphs
        graphs.run_parts(self._width, parts, self._upload_masks if has_masks else None)
        if len(parts) > 1:
            self.extras.collect(self.buffers, step, self._width, has_report=has_report)
        return step

    def tokens(self, step: int, rows: Int64Array) -> Int64Array:
        """Return what a step drew, ``[len(rows)]``. It is over, and at most ``HISTORY_STEPS`` steps old."""
        drawn: Int64Array = self._history[step % HISTORY_STEPS, 0, rows]
        return drawn

    def tokens_after_drafts(self, step: int, rows: Int64Array, num_drafts: int) -> Int64Array:
        """Return what a step drew after the first of its drafts, the second, and so on, ``[num_drafts, len(rows)]``.

        It is ``NOT_DRAWN`` after a draft that was not accepted. The step is as for ``tokens``.
        """
        drawn: Int64Array = self._history[step % HISTORY_STEPS, 1 : num_drafts + 1, rows].T
        return drawn

    def take_first_tokens(self, slots: Int32Array) -> torch.Tensor:
        """Expect the tokens that a step over prompts draws for ``slots``, so that the next step can take them as input.

        Returns:
            int64 ``[len(slots)]`` on the device, where they are to be put.
        """
        # Those of an earlier step over prompts are overwritten, if no decodes have taken them in between.
        self.forget_first_tokens()
        self._first_token_of_slot[slots] = np.arange(len(slots))
        self._state.is_on_device[slots] = True
        return self.buffers.first_tokens[: len(slots)]

    def forget_first_tokens(self) -> None:
        """Drop what ``take_first_tokens`` noted: slots that are in no row by now wait until the host has read it."""
        self._first_token_of_slot[:] = NO_ROW
        self._state.is_on_device[:] = False
        self._state.is_on_device[self._rows.slots()] = True

    def _place(self, slots: Int32Array) -> Int64Array:
        """Give every slot a row and send the changes to the device; return the rows."""
        rows, change = self._rows.assign(slots, self._width)
        tables = self._rows.rows_of(self._manager.take_changed_rows())
        tables = tables[tables >= 0]
        if change is not None:
            sources = np.full(len(change.rows) + len(change.emptied), NO_ROW, np.int64)
            # A token that the host has not read is taken from where the slot stood, or from the step over its prompt.
            first = self._first_token_of_slot[change.slots]
            sources[: len(change.slots)] = np.where(
                self._state.num_unread_tokens[change.slots] == 0,
                NO_ROW,
                np.where(change.old_rows >= 0, change.old_rows, self.num_rows + first),
            )
            written = np.concatenate([change.rows, change.emptied])
            self.buffers.write_rows(written, self._state, change.slots, sources)
            if self.drafts is not None:
                self.drafts.write_rows(written, change.slots)
            if self.extras.is_in_use or np.count_nonzero(self._state.needs_sampling_extras[change.slots]):
                self.extras.write_rows(written, change.slots)
            is_written = np.zeros(self.num_rows, np.bool_)
            is_written[tables] = is_written[change.rows] = True
            tables = np.flatnonzero(is_written)
        if len(tables):
            table_slots = self._rows.slot_of_row[tables]
            self.buffers.write_block_tables(tables, self._manager.block_table[table_slots])
        return rows

    def _step(self, width: int, _: None = None, *, has_adapters: bool = False) -> torch.Tensor:
        """Compute a step without drafts; return its logits."""
        buffers, drafts = self.buffers, self.drafts
        if drafts is None:
            computed = self._compute(buffers, width, None, has_adapters)
            buffers.advance(computed.token_ids)
            return computed.logits
        rows = drafts.rows_of(buffers, width)
        proposed = drafts.propose_none(rows)
        computed = self._compute(buffers, width, None, has_adapters)
        drafts.accept(computed.token_ids, proposed, rows, buffers, computed.features)
        return computed.logits

    def _step_with_drafts(self, step: DraftedStep, _: None = None, *, has_adapters: bool = False) -> None:
        assert self.drafts is not None, "no drafts were asked for"
        rows = self.drafts.rows_of(self.buffers, step.width)
        proposed = self.drafts.propose(rows, step.depth)
        computed = self._compute(self.buffers, step.width, self.drafts.inputs(rows, proposed), has_adapters)
        self.drafts.accept(computed.token_ids, proposed, rows, self.buffers, computed.features)

    @torch.inference_mode()
    def _upload_masks(self) -> None:
        self.extras.upload_masks(*self._masked)

    def _redraw_masked(self, width: int, logits: torch.Tensor) -> torch.Tensor:
        return self.extras.redraw_masked(self.buffers, logits)

    def _redraw(self, width: int, logits: torch.Tensor) -> None:
        self.extras.redraw(self.buffers, logits)
