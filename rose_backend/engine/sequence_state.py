"""Everything a step needs to know about the running completions, as arrays indexed by request slot.

``DeferredCommits`` keeps the computed tokens that are not committed to the block manager yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose_backend.block_manager import BlockManager
from rose_backend.block_manager.block_pool import IntArray
from rose_backend.block_manager.sequence_table import concatenate_ranges
from rose_backend.engine.request import Completion

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

INVALID_TOKEN_ID = -1
"""What a step draws where the logits allow no token: the completion ends with an error when the host reads it."""

SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""Fields of ``SamplingParams`` and of ``SamplingTensors``, of four bytes a request slot in ``SequenceState``."""

_SLOT_PADDING = 16
"""Tokens between slots: with a stride of a power of two, all slots would share a few lines of the processor's cache."""


class SequenceState:
    """Persistent buffers; a completion's entries are written when it gets its request slot and stay until it leaves.

    Request slots are the block manager's rows. Entries of slots without a completion mean nothing.

    Args:
        max_num_seqs: request slots.
        max_model_len: tokens per slot.
        eos_token_ids: tokens that end a completion unless it ignores them.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.eos_token_ids = eos_token_ids
        # np.empty touches no memory, so a window of a million tokens costs nothing until it is used.
        self._stride = max_model_len + _SLOT_PADDING
        padded: Int32Array = np.empty((max_num_seqs, self._stride), np.int32)
        self.token_ids: Int32Array = padded[:, :max_model_len]
        """Prompt and output."""
        # One index is cheaper than two.
        self._flat_token_ids = padded.reshape(-1)
        self.version = 0
        """Changes with whatever ends a batch's steadiness; see ``Batch.is_steady``."""
        self.num_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        """Known tokens; the last of them may not be computed yet."""
        self.num_prompt_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.max_num_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        """A slot with this many tokens has reached its length."""
        self.min_num_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        """No stop token is drawn while the slot has fewer."""
        self.num_unread_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        """Tokens drawn, or to be drawn, by steps whose outcome the host has not read; one of each step."""
        self.num_uncommitted_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        """Tokens computed, or to be computed, by decode steps whose outcome the host has not read; without drafts."""
        self.num_drafts_ahead: Int32Array = np.zeros(max_num_seqs, np.int32)
        """Drafts in those steps: as many more tokens may be computed."""
        self.num_held_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        """Tokens whose computing step was read, held back until no stop string was found before them."""
        self.is_on_device = np.zeros(max_num_seqs, np.bool_)
        """The newest token is in the decode step's device buffers, read by the host or not."""
        self.num_computed_before: Int32Array = np.zeros(max_num_seqs, np.int32)
        """Tokens that were computed before the last preemption."""
        self.num_known_before: Int32Array = np.zeros(max_num_seqs, np.int32)
        """Tokens of the prompt, or ``num_computed_before`` if that is more."""
        self.num_siblings_to_fork: Int32Array = np.zeros(max_num_seqs, np.int32)

        self.sampling_words: Int32Array = np.zeros((max_num_seqs, len(SAMPLING_FIELDS)), np.int32)
        """``SAMPLING_FIELDS`` of each slot side by side, as they travel to the device."""
        self._sampling: dict[str, NDArray[Any]] = dict(
            zip(SAMPLING_FIELDS, self.sampling_words.view(np.float32).T, strict=True)
        )
        self._sampling["top_k"] = self._sampling["top_k"].view(np.int32)
        self.seed = np.zeros(max_num_seqs, np.int64)
        self.lora_slot: Int64Array = np.full(max_num_seqs, -1, np.int64)
        """Of each slot's adapter; -1 for none."""
        self.uses_penalties = np.zeros(max_num_seqs, np.bool_)
        self.uses_processors = np.zeros(max_num_seqs, np.bool_)
        self.has_processor_entry = np.zeros(max_num_seqs, np.bool_)
        """Slots with ``uses_processors`` or ``min_tokens``: see ``ProcessorTables``."""
        self.needs_sampling_extras = np.zeros(max_num_seqs, np.bool_)
        """Slots with a processor's entry, penalties or logprobs: see ``SamplingExtras``."""

        self.has_grammar = np.zeros(max_num_seqs, np.bool_)
        """Slots whose draws are masked."""
        self.stops_at_eos = np.zeros(max_num_seqs, np.bool_)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.num_prompt_logprobs: Int32Array = np.full(max_num_seqs, -1, np.int32)
        """Of slots whose prompt is computed for its log-probabilities, too; others have -1."""
        self.needs_each_token = np.zeros(max_num_seqs, np.bool_)
        """Slots whose tokens go to the output thread step by step: streams, stop strings, logprobs."""
        self.has_stop_tokens = np.zeros(max_num_seqs, np.bool_)
        self.needs_token_check = np.zeros(max_num_seqs, np.bool_)
        """Slots with ``needs_each_token`` or stop tokens."""
        self.has_stop_strings = np.zeros(max_num_seqs, np.bool_)
        """Slots whose drawn tokens are committed when the output thread has found no stop string in them."""
        self.completions: list[Completion | None] = [None] * max_num_seqs
        self.generation = np.zeros(max_num_seqs, np.int64)
        """Grows whenever a slot is filled or cleared: what was made for an earlier holder is recognized."""
        self.num_cleared = 0
        """Slots cleared so far; while it is unchanged, only slots that were filled have a new generation."""

    def fill(self, slot: int, completion: Completion) -> None:
        """Write everything known about ``completion`` into ``slot``."""
        request, params = completion.request, completion.request.params
        num_tokens, num_prompt_tokens = len(completion.token_ids), len(request.prompt_token_ids)
        self.token_ids[slot, :num_tokens] = completion.token_ids
        self.num_tokens[slot] = num_tokens
        self.num_prompt_tokens[slot] = num_prompt_tokens
        self.max_num_tokens[slot] = num_prompt_tokens + request.max_tokens
        self.min_num_tokens[slot] = num_prompt_tokens + params.min_tokens
        self.num_computed_before[slot] = completion.num_computed_before
        self.num_known_before[slot] = max(num_prompt_tokens, completion.num_computed_before)
        self.num_siblings_to_fork[slot] = completion.num_siblings_to_fork
        for name, values in self._sampling.items():
            values[slot] = getattr(params, name)
        if params.is_greedy:
            self._sampling["temperature"][slot] = 0.0
        if params.top_k < 0:
            self._sampling["top_k"][slot] = 0
        self.seed[slot] = completion.seed
        self.lora_slot[slot] = request.lora_slot
        self.uses_penalties[slot] = params.has_penalties
        self.uses_processors[slot] = params.has_processors
        has_entry = params.has_processors or bool(self.stops_before_min_tokens(completion))
        self.has_processor_entry[slot] = has_entry
        self.needs_sampling_extras[slot] = has_entry or params.has_penalties or params.logprobs is not None
        self.has_grammar[slot] = completion.grammar is not None
        self.stops_at_eos[slot] = not params.ignore_eos
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.num_prompt_logprobs[slot] = (params.prompt_logprobs or 0) if request.reports_prompt else -1
        self.needs_each_token[slot] = completion.needs_each_token
        self.has_stop_tokens[slot] = bool(params.stop_token_ids)
        self.needs_token_check[slot] = self.needs_each_token[slot] or self.has_stop_tokens[slot]
        self.has_stop_strings[slot] = bool(params.stop_strings)
        self.completions[slot] = completion
        completion.slot = slot
        self.generation[slot] += 1
        self.version += 1

    def stops_before_min_tokens(self, completion: Completion) -> list[int]:
        """Return the tokens that would end a completion and are not drawn before its ``min_tokens``.

        None with a grammar: its masks leave them out, unless the text can only end.
        """
        params = completion.request.params
        if not params.min_tokens or completion.grammar is not None:
            return []
        return [*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.eos_token_ids)]

    def clear(self, slots: Int32Array) -> list[Completion]:
        """Take the completions out of ``slots``, ``[N]``, each with the tokens it has so far. Many may end at once."""
        cleared = []
        for slot, num_tokens in zip(slots.tolist(), self.num_tokens[slots].tolist(), strict=True):
            completion = self.completion(slot)
            completion.token_ids = self.token_ids[slot, :num_tokens].copy()
            completion.slot = -1
            self.completions[slot] = None
            cleared.append(completion)
        for counts in (
            self.num_unread_tokens,
            self.num_uncommitted_tokens,
            self.num_drafts_ahead,
            self.num_held_tokens,
        ):
            counts[slots] = 0
        self.is_on_device[slots] = False
        self.generation[slots] += 1
        self.num_cleared += len(slots)
        return cleared

    def append(self, batch: Batch, token_ids: Int64Array) -> NDArray[np.bool_]:
        """Append one token, ``token_ids[i]``, to each slot of ``batch``.

        Returns:
            ``[N]``, which of the slots have reached their length.
        """
        if not batch.is_steady:
            self.version += 1
            batch.version = self.version
            batch.lengths = lengths = self.num_tokens[batch.slots]
            batch.places = batch.slots * self._stride + lengths
            batch.limits = self.max_num_tokens[batch.slots]
        self._flat_token_ids[batch.places] = token_ids
        batch.places += 1
        batch.lengths += 1
        self.num_tokens[batch.slots] = batch.lengths
        is_full: NDArray[np.bool_] = batch.lengths >= batch.limits
        return is_full

    def take_back(self, slots: NDArray[np.int64]) -> None:
        """Remove the newest token of each of ``slots``, which leave."""
        self.num_tokens[slots] -= 1
        self.version += 1

    def tokens_at(self, slots: IntArray, starts: IntArray, counts: IntArray) -> Int32Array:
        """Return ``counts[i]`` tokens of each of ``slots`` from position ``starts[i]`` on, ``[sum(counts)]``."""
        first = slots.astype(np.int64) * self._stride + starts
        tokens: Int32Array = self._flat_token_ids[concatenate_ranges(first, counts)]
        return tokens

    def completion(self, slot: int) -> Completion:
        """Return the completion that holds ``slot``."""
        completion = self.completions[slot]
        assert completion is not None, f"request slot {slot} holds no completion"
        return completion

    def have_adapters(self, slots: IntArray) -> bool:
        """Whether any of ``slots`` has a LoRA adapter."""
        return bool(np.count_nonzero(self.lora_slot[slots] >= 0))

    def needs_extras_now(self, slots: IntArray) -> bool:
        """Whether a decode step over ``slots`` has to draw again, see ``SamplingExtras``."""
        may_need = self.needs_sampling_extras[slots]
        if not np.count_nonzero(may_need):
            return False
        is_short = self.num_planned_tokens(slots) < self.min_num_tokens[slots]
        needs = is_short | self.uses_penalties[slots] | (self.num_logprobs[slots] >= 0)
        needs |= self.uses_processors[slots]
        return bool(np.count_nonzero(needs & may_need))

    def num_planned_tokens(self, slots: IntArray) -> Int32Array:
        """Return how many tokens ``slots`` have, at least, when every step in flight is over."""
        planned: Int32Array = self.num_tokens[slots] + self.num_unread_tokens[slots]
        return planned


@dataclass(slots=True, eq=False)
class Batch:
    """The request slots that a step draws for, each with the completion it had when the step was started.

    Steps that repeat a step share its batch, so that what is kept of the slots is read once in steady-state decode.
    """

    state: SequenceState
    slots: Int64Array  # [S + D], those that draw after their prompt, and those that decode
    decode_slots: Int64Array  # [D], the last of them
    generations: Int64Array  # [S + D], when the step was started
    num_cleared: int  # then
    version: int = -1
    """``SequenceState.version`` when the batch last took tokens."""
    places: Int64Array = field(init=False)  # [S + D], where the next tokens go
    lengths: Int32Array = field(init=False)  # [S + D], known tokens
    limits: Int32Array = field(init=False)  # [S + D]
    completions: list[Completion] | None = None
    """Of slots with ``needs_each_token``, once somebody has asked."""
    only_lengths_matter: bool = False
    """Known: no token can end any of the slots, and none is sent to the output thread in its own step."""

    @classmethod
    def of(cls, state: SequenceState, slots: Int64Array, num_decodes: int) -> Batch:
        """Return a batch of ``slots`` as they are now; the last ``num_decodes`` of them decode."""
        return cls(
            state, slots, slots[len(slots) - num_decodes :], state.generation[slots], state.num_cleared
        )

    @property
    def is_steady(self) -> bool:
        """Whether this batch was the last to take tokens, and no slot was filled and no prompt computed since."""
        return self.version == self.state.version

    def live(self) -> NDArray[np.bool_] | None:
        """Return which of ``slots`` still have the completion that they had, ``[S + D]``; None for all."""
        if self.num_cleared == self.state.num_cleared:
            return None
        return self.state.generation[self.slots] == self.generations

    def only(self, is_live: NDArray[np.bool_]) -> Batch:
        """Return a batch of those of ``slots`` that are live."""
        num_decodes = int(np.count_nonzero(is_live[len(self.slots) - len(self.decode_slots) :]))
        return Batch.of(self.state, self.slots[is_live], num_decodes)


CommitHandler = Callable[[IntArray, IntArray, Int32Array, Int32Array], None]
"""Gets request slots, the position of the first committed token of each, their numbers, all ``[N]``, and the tokens."""

_TOKENS_PER_COMMIT = 32
"""A request slot's decoded tokens are committed when there are this many."""

_MAX_PIECES, _MIN_SLOTS_PER_PIECE, _MAX_TOKENS_PER_PIECE = 3, 16, 3072
"""Committing 32 tokens of a slot takes the host about 6 microseconds, and a call as long as some 20 slots. A piece fits
beside one step; all of 256 slots at once would take longer than the device has work for."""


class DeferredCommits:
    """Commits many tokens of a request slot at once, and the slots in several pieces.

    Committing would be a third of the host's work while many prompts are admitted and the host limits the speed, so it
    is deferred to steps in which the host only waits. This never delays a prefix hit: ``flush_for`` is called before
    each lookup, ``flush`` before slots are freed. Until they are committed, tokens count as those of steps in flight.

    Args:
        on_commit: receives tokens of slots that go on, as ``IncrementalDetokenization.put``.
    """

    def __init__(self, manager: BlockManager, state: SequenceState, on_commit: CommitHandler) -> None:
        self._manager = manager
        self._state = state
        self._on_commit = on_commit
        # Pending tokens of each slot, at most _max_pending, except _num_repeats more of each of _last_slots.
        self._pending_counts: Int32Array = np.zeros(len(state.num_held_tokens), np.int32)
        self._last_slots: IntArray = np.empty(0, np.int64)
        self._num_repeats = 0
        self._max_pending = 0
        self._num_steps = 0
        self._confirmed: dict[int, int] = {}
        self._frontier: tuple[IntArray, IntArray, IntArray] | None = None

    def add(self, slots: IntArray, num_tokens: IntArray | None = None) -> None:
        """Note that each of ``slots`` has computed ``num_tokens`` more, and that these are known.

        Args:
            slots: ``[N]``, not changed afterwards.
            num_tokens: ``[N]``; None: one each.
        """
        self._frontier = None
        num_pending = self._pending()
        num_pending[slots] += 1 if num_tokens is None else num_tokens
        self._max_pending = int(num_pending.max())
        self._last_slots = slots

    def add_again(self) -> None:
        """Note that each slot of the last call of ``add`` has computed one more token: in steady-state decode."""
        self._frontier = None
        self._num_repeats += 1

    def commit_some(self) -> bool:
        """Commit the next piece, if there is enough for one. Call it in every step, right before the host waits.

        Returns:
            Whether the host has time for something else: it has committed nothing, or a few slots.
        """
        self._num_steps += 1
        num_committed = 0
        if self._max_pending + self._num_repeats >= _TOKENS_PER_COMMIT:
            num_committed = self._commit_piece()
        if self._confirmed and self._num_steps % _TOKENS_PER_COMMIT == 0:
            self._flush_confirmed()
        return num_committed <= _MIN_SLOTS_PER_PIECE

    def count(self, num_tokens: Int32Array) -> None:
        """Add to ``num_tokens``, of all slots, what was noted and not committed."""
        num_tokens += self._pending()

    def confirm(self, slot: int, end: int) -> None:
        """Note that all tokens before position ``end`` belong to the text of a slot with stop strings."""
        self._confirmed[slot] = end

    def flush(self, slots: IntArray | None = None) -> None:
        """Commit what was noted of ``slots`` (None: all); of slots with stop strings, what is confirmed.

        ``on_commit`` gets none of it: these slots leave, or scheduling waits for the commit.
        """
        num_pending = self._pending()
        pending = np.flatnonzero(num_pending) if slots is None else slots[num_pending[slots] > 0]
        if len(pending):
            self._commit(pending)
        if self._confirmed:
            self._flush_confirmed()

    def flush_for(self, prompt: Int32Array, namespace: bytes) -> None:
        """Commit all that a lookup of ``prompt`` in ``namespace`` could find if nothing were deferred.

        A pending token can be found only if the prompt equals the slot's tokens from the start to that token.
        """
        if self._confirmed:
            self._flush_confirmed()
        # Many prompts are admitted at once: no token becomes pending between them.
        if self._frontier is None:
            self._frontier = self._find_frontier()
        pending, first_pending, tokens = self._frontier
        if not len(pending):
            return
        # The last token of a prompt is always computed.
        last = len(prompt) - 1
        matches = np.flatnonzero((prompt[np.minimum(first_pending, last)] == tokens) & (first_pending < last))
        if not len(matches):
            return
        token_ids, namespaces = self._state.token_ids, self._manager.table.namespaces
        matching_slots = [
            slot
            for slot, end in zip(pending[matches].tolist(), first_pending[matches].tolist(), strict=True)
            if namespaces[slot] == namespace and np.array_equal(token_ids[slot, :end], prompt[:end])
        ]
        if matching_slots:
            self._on_commit(*self._commit(np.array(matching_slots, np.int64)))

    def _pending(self) -> Int32Array:
        """Return how many tokens of each slot were added and not committed."""
        if self._num_repeats:
            self._pending_counts[self._last_slots] += self._num_repeats
            self._max_pending += self._num_repeats
            self._num_repeats = 0
        return self._pending_counts

    def _commit_piece(self) -> int:
        """Commit the tokens of some slots that have enough of them; return how many slots."""
        num_pending = self._pending()
        due_slots = np.flatnonzero(num_pending >= _TOKENS_PER_COMMIT)
        if len(due_slots):
            num_slots = max(_MIN_SLOTS_PER_PIECE, -(-np.count_nonzero(num_pending) // _MAX_PIECES))
            fits = np.cumsum(num_pending[due_slots]) <= _MAX_TOKENS_PER_PIECE
            due_slots = due_slots[: min(num_slots, max(1, np.count_nonzero(fits)))]
            self._on_commit(*self._commit(due_slots))
        self._max_pending = int(num_pending.max())
        return len(due_slots)

    def _find_frontier(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return slots with pending tokens, the position of the first one in each, and that token."""
        pending = np.flatnonzero(self._pending())
        first_pending = self._manager.num_computed_tokens[pending]
        return pending, first_pending, self._state.token_ids[pending, first_pending]

    def _commit(self, slots: IntArray) -> tuple[IntArray, IntArray, Int32Array, Int32Array]:
        """Commit what was noted of ``slots``.

        Returns:
            Of ``N`` slots that were not held back: the slots, where the tokens of each start, how many they are, all
            ``[N]``, and the tokens themselves.
        """
        state = self._state
        self._frontier = None
        num_pending = self._pending()
        counts = num_pending[slots]
        num_pending[slots] = 0
        is_held = state.has_stop_strings[slots]
        if np.count_nonzero(is_held):
            state.num_held_tokens[slots[is_held]] += counts[is_held]
            slots, counts = slots[~is_held], counts[~is_held]
        # A step that is being planned has counted them among these.
        state.num_uncommitted_tokens[slots] -= counts
        starts = self._manager.num_computed_tokens[slots]
        token_ids = state.tokens_at(slots, starts, counts)
        self._manager.commit(slots, counts, token_ids)
        return slots, starts, counts, token_ids

    def _flush_confirmed(self) -> None:
        state, computed = self._state, self._manager.num_computed_tokens
        slots, ends = (np.fromiter(each, np.int64) for each in (self._confirmed, self._confirmed.values()))
        self._confirmed.clear()
        if len(pending := slots[self._pending()[slots] > 0]):
            self._commit(pending)
        is_due = ends > computed[slots]
        if np.count_nonzero(is_due):
            slots, starts = slots[is_due], computed[slots[is_due]]
            counts = ends[is_due] - starts
            self._manager.commit(slots, counts, state.tokens_at(slots, starts, counts))
            self._frontier = None
            state.num_held_tokens[slots] -= counts
            state.num_uncommitted_tokens[slots] -= counts
