"""Everything a step needs to know about the running completions, as arrays indexed by request slot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose_backend.block_manager.block_pool import IntArray
from rose_backend.block_manager.sequence_table import concatenate_ranges
from rose_backend.config import MAX_STOP_TOKEN_IDS
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
        """Tokens drawn, or to be drawn, by steps whose outcome the host has not read."""
        self.num_uncommitted_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        """Tokens computed, or to be computed, by decode steps whose outcome the host has not read."""
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
        self.uses_penalties = np.zeros(max_num_seqs, np.bool_)
        self.banned_token_ids = np.full((max_num_seqs, MAX_STOP_TOKEN_IDS + len(eos_token_ids)), -1, np.int32)
        """Tokens that may not be drawn while the slot has fewer than ``min_num_tokens``; -1 after the last one."""
        self.needs_sampling_extras = np.zeros(max_num_seqs, np.bool_)
        """Slots with penalties, logprobs or ``min_tokens``: see ``SamplingExtras``."""

        self.stops_at_eos = np.zeros(max_num_seqs, np.bool_)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int32)
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
        self.uses_penalties[slot] = params.has_penalties
        banned: list[int] = []
        if params.min_tokens:
            banned = [*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.eos_token_ids)]
        self.banned_token_ids[slot] = -1
        self.banned_token_ids[slot, : len(banned)] = banned
        self.needs_sampling_extras[slot] = params.has_penalties or params.logprobs is not None or bool(banned)
        self.stops_at_eos[slot] = not params.ignore_eos
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.needs_each_token[slot] = completion.needs_each_token
        self.has_stop_tokens[slot] = bool(params.stop_token_ids)
        self.needs_token_check[slot] = self.needs_each_token[slot] or self.has_stop_tokens[slot]
        self.has_stop_strings[slot] = bool(params.stop_strings)
        self.completions[slot] = completion
        completion.slot = slot
        self.generation[slot] += 1
        self.version += 1

    def clear(self, slots: Int32Array) -> list[Completion]:
        """Take the completions out of ``slots``, ``[N]``, each with the tokens it has so far. Many may end at once."""
        cleared = []
        for slot, num_tokens in zip(slots.tolist(), self.num_tokens[slots].tolist(), strict=True):
            completion = self.completion(slot)
            completion.token_ids = self.token_ids[slot, :num_tokens].copy()
            completion.slot = -1
            self.completions[slot] = None
            cleared.append(completion)
        for counts in (self.num_unread_tokens, self.num_uncommitted_tokens, self.num_held_tokens):
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

    def num_planned_tokens(self, slots: Int32Array) -> Int32Array:
        """Return how many tokens ``slots`` have when every step in flight is over."""
        planned: Int32Array = self.num_tokens[slots] + self.num_unread_tokens[slots]
        return planned

    def output_token_ids(self, slot: int) -> list[int]:
        """Return the tokens generated so far."""
        ids: list[int] = self.token_ids[slot, self.num_prompt_tokens[slot] : self.num_tokens[slot]].tolist()
        return ids


@dataclass(slots=True, eq=False)
class Batch:
    """The request slots that a step draws for, each with the completion it had when the step was started.

    Steps that repeat a step share its batch, so that what is kept of the slots is read once in steady-state decode.
    """

    state: SequenceState
    slots: Int64Array  # [S + D], those that draw after their prompt, and the decode slots
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
        slots = self.slots[is_live]
        decode_slots = slots[len(slots) - num_decodes :]
        return Batch(self.state, slots, decode_slots, self.generations[is_live], self.state.num_cleared)
