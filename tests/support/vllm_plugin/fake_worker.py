"""A worker that computes no attention but remembers exactly what each cache slot would hold.

A slot's content depends on all tokens up to its position, as a real K/V entry's does from the second layer on, so it is
represented by a chained hash of them. Before a step writes anything, every position that its requests would read is
compared with what it must be: a block that was shared too early, copied too late or overwritten shows at once.

It speculates, too: drafts of a pretended drafter, some right and some wrong, are written like any token, then kept or
rejected. The drafter has a cache of its own in the same blocks; an entry there may depend on the token behind it, too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rose_backend.conformance.block_manager.pretended_model import (
    VOCAB_SIZE,
    chain,
    next_token,
    with_contents,
)

STATE = -1
"""In place of a window: the group's layers keep a state, see ``FakeWorker``."""


def drafter_entry(state: int, following_token: int) -> int:
    """Return the content of a position in the drafter's cache."""
    return chain(state, following_token + VOCAB_SIZE)


@dataclass
class _Sequence:
    tokens: list[int]
    states: list[int]  # states[p] = content of position p
    tables: list[list[int]]
    """Block ids, of each KV cache group."""
    state_column: int | None = None
    """The column that the last step has left the states in."""
    drafts: list[int] = field(default_factory=list)
    features: list[Any] = field(default_factory=list)

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self.states.append(chain(self.states[-1] if self.states else 0, token))


class FakeWorker:
    """Follows scheduler outputs as model runner V1 does: block ids are appended; resumed requests get a new table.

    A state is that of all tokens before a step, in the block of the column that the step before ended in, or of the
    last computed token where there was none; the step leaves it in the column that it ends in itself. That is what
    vLLM's workers do where ``mamba_cache_mode`` is ``align``.

    Args:
        num_blocks, block_size: of the cache.
        windows: of each KV cache group, None for one that keeps everything, ``STATE`` for one with states.
        num_drafts: drafted per request and step.
        share_right: of the drafts.
        num_lookahead: positions behind a step's tokens that the drafter writes, too; None for one without a cache.
        drafter_reads_ahead: whether the drafter's entry at a position depends on the token behind it (EAGLE).
        max_model_len: the drafter stops there.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        windows: Sequence[int | None] = (None,),
        num_drafts: int = 0,
        share_right: float = 0.7,
        num_lookahead: int | None = None,
        drafter_reads_ahead: bool = False,
        max_model_len: int = 0,
    ) -> None:
        self.block_size = block_size
        self._windows = tuple(windows)
        self.memory = np.full((num_blocks, block_size), -1, np.int64)
        self.drafter_memory = np.full((num_blocks, block_size), -1, np.int64)
        self.num_copies = 0
        self.num_zeroed = 0
        self.num_accepted = 0
        self.num_rejected = 0
        self._num_drafts, self._share_right = num_drafts, share_right
        self._num_lookahead = num_lookahead
        self._reads_ahead = drafter_reads_ahead
        self._max_model_len = max_model_len
        self._random = random.Random(5)
        self._sequences: dict[str, _Sequence] = {}
        self.broken: set[str] = set()
        """Requests into whose blocks a load has failed: nothing is checked of them any more."""
        self.connector: Any = None
        self._encoded: set[str] = set()
        self.num_encoded = 0

    def run(self, output: Any, requests: dict[str, Any]) -> Any:
        """Execute one step; return its ``ModelRunnerOutput``. Raises AssertionError where a read would be wrong."""
        from vllm.v1.outputs import ModelRunnerOutput

        for request_id in output.finished_req_ids:
            self._sequences.pop(request_id, None)
        # A connector may have to read blocks before they are written.
        transferred = self.connector and self.connector.load(output.kv_connector_metadata)
        if output.new_block_ids_to_zero:
            self.memory[output.new_block_ids_to_zero] = 0
            self.num_zeroed += len(output.new_block_ids_to_zero)
        if output.kv_cache_block_copies:
            self._copy(output.kv_cache_block_copies)
        self._encoded.difference_update(output.free_encoder_mm_hashes)
        starts = self._update(output, requests)
        for request_id, indices in output.scheduled_encoder_inputs.items():
            features = self._sequences[request_id].features
            self._encoded.update(features[index].identifier for index in indices)
            self.num_encoded += len(indices)
        for request_id, start in starts.items():
            if request_id not in self.broken:
                self._check_reads(request_id, start)
        sampled = {}
        for request_id, start in starts.items():
            drafts = self._drafts_to_verify(
                request_id, output.scheduled_spec_decode_tokens.get(request_id, [])
            )
            count = output.num_scheduled_tokens[request_id] - len(drafts)
            sampled[request_id] = self._write(request_id, start, count, drafts)
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={request_id: index for index, request_id in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=transferred,
        )

    def _copy(self, pairs: list[Any]) -> None:
        sources = [pair.src_block_id for pair in pairs]
        destinations = [pair.dst_block_id for pair in pairs]
        assert len(set(destinations)) == len(destinations), "two copies into one block"
        self.memory[destinations] = self.memory[sources]
        self.drafter_memory[destinations] = self.drafter_memory[sources]
        self.num_copies += len(pairs)

    def _update(self, output: Any, requests: dict[str, Any]) -> dict[str, int]:
        starts = {}
        for new in output.scheduled_new_reqs:
            sequence = _Sequence([], [], [list(ids) for ids in new.block_ids], features=new.mm_features)
            # Model runner V2 gets resumed requests as new ones, with all their tokens.
            sequence.extend(with_contents(new.prefill_token_ids or new.prompt_token_ids, new.mm_features))
            if self._reads_ahead and new.req_id in self._sequences:
                self._follow_turn(self._sequences[new.req_id], sequence, new.num_computed_tokens)
            self._sequences[new.req_id] = sequence
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            sequence = self._sequences[request_id]
            new_ids = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                sequence.tables = [list(ids) for ids in new_ids]
                sequence.state_column = None
                # Tokens whose delivery was outstanding when the request was preempted count from now on.
                sequence.tokens, sequence.states = [], []
                sequence.extend(with_contents(list(requests[request_id].all_token_ids), sequence.features))
            elif new_ids is not None:
                for table, ids in zip(sequence.tables, new_ids, strict=True):
                    table.extend(ids)
            num_known = requests[request_id].num_prompt_tokens + cached.num_output_tokens[index]
            if request_id in self.broken and num_known < len(sequence.tokens):
                # What was sampled behind a load that failed was dropped, and is computed again.
                del sequence.tokens[num_known:], sequence.states[num_known:]
                self.broken.discard(request_id)
            # The scheduler counts drafts that may have been rejected meanwhile (asynchronous scheduling).
            starts[request_id] = min(cached.num_computed_tokens[index], len(sequence.tokens) - 1)
        return starts

    def _follow_turn(self, last: _Sequence, sequence: _Sequence, start: int) -> None:
        """Let a session go on: another token than in its last turn may follow what it has computed.

        vLLM leaves what the drafter has made of the one before: it may be wrong, its drafts are verified.
        """
        if not start or last.tokens[start : start + 1] == sequence.tokens[start : start + 1]:
            return
        blocks, offsets = self._slots(sequence, start - 1, start)
        self.drafter_memory[blocks, offsets] = self._drafter_entries(sequence, start - 1, start)

    def _drafts_to_verify(self, request_id: str, scheduled: list[int]) -> list[int]:
        # Placeholders stand for the worker's own drafts; where it has none, for tokens that are always rejected.
        own = self._sequences[request_id].drafts
        return [
            (own[index] if index < len(own) else -1) if draft == -1 else draft
            for index, draft in enumerate(scheduled)
        ]

    def draft_token_ids(self) -> dict[str, list[int]]:
        """Return what to speculate on next, by request."""
        return {request_id: sequence.drafts for request_id, sequence in self._sequences.items()}

    def _check_reads(self, request_id: str, num_computed: int) -> None:
        sequence = self._sequences[request_id]
        for group, window in enumerate(self._windows):
            if window == STATE:
                self._check_state(request_id, num_computed, group)
                continue
            first = 0 if window is None else max(num_computed - window + 1, 0)
            blocks, offsets = self._slots(sequence, first, num_computed, group)
            states = self._contents(sequence.states[first:num_computed], group)
            wrong = first + np.flatnonzero(self.memory[blocks, offsets] != states)
            assert not len(wrong), (
                f"{request_id}: positions {wrong.tolist()} of {num_computed} in group {group} hold something else"
            )
        if self._num_lookahead is not None:
            blocks, offsets = self._slots(sequence, 0, num_computed)
            entries = np.array(self._drafter_entries(sequence, 0, num_computed), np.int64)
            differs = self.drafter_memory[blocks, offsets] != entries
            if self._reads_ahead:
                # Blocks are shared whatever follows them, so the last entry of one may be made for another token.
                # vLLM's own manager has the same; a drafter may be wrong, its drafts are verified.
                differs &= offsets != self.block_size - 1
            wrong = np.flatnonzero(differs)
            assert not len(wrong), (
                f"{request_id}: the drafter's positions {wrong.tolist()} hold something else"
            )

    def _check_state(self, request_id: str, num_computed: int, group: int) -> None:
        sequence = self._sequences[request_id]
        if num_computed:
            last = (num_computed - 1) // self.block_size
            column = last if sequence.state_column is None else sequence.state_column
            block = sequence.tables[group][column]
            wanted = self._contents(sequence.states[num_computed - 1 : num_computed], group)
            assert block and self.memory[block, 0] == wanted, (
                f"{request_id}: the state of {num_computed} tokens in group {group} is something else"
            )

    def _write(self, request_id: str, start: int, count: int, drafts: list[int]) -> list[int]:
        sequence = self._sequences[request_id]
        end = start + count
        assert end <= len(sequence.tokens), f"{request_id}: token {end - 1} is not known"
        for feature in sequence.features:
            first, length = feature.mm_position.offset, feature.mm_position.length
            if first < end and first + length > start:
                assert feature.identifier in self._encoded, f"{request_id}: item at {first} is not encoded"
        states = sequence.states[start:end]
        for draft in drafts:
            states.append(chain(states[-1], draft))
        for group in range(len(self._windows)):
            if self._windows[group] == STATE:
                block = sequence.tables[group][-(-end // self.block_size) - 1]
                assert block and not drafts, f"{request_id}: a state would be written to the null block"
                self.memory[block] = -1
                self.memory[block, 0] = self._contents(states[-1:], group)[0]
                continue
            blocks, offsets = self._slots(sequence, start, end + len(drafts), group)
            assert blocks.all(), f"{request_id}: a position would be written to the null block"
            self.memory[blocks, offsets] = self._contents(states, group)
        sequence.state_column = -(-end // self.block_size) - 1
        sampled: list[int] = []
        if end == len(sequence.tokens):
            sampled = self._sample(sequence, drafts)
        else:
            assert not drafts, f"{request_id}: drafts inside a prompt"
        self._run_drafter(sequence, start, end + len(drafts))
        return sampled

    def _sample(self, sequence: _Sequence, drafts: list[int]) -> list[int]:
        first = len(sequence.tokens)
        for draft in [*drafts, None]:
            token = next_token(sequence.states[-1])
            sequence.extend([token])
            if draft != token:
                break
        num_accepted = len(sequence.tokens) - first - 1
        self.num_accepted += num_accepted
        self.num_rejected += len(drafts) - num_accepted
        return sequence.tokens[first:]

    def _run_drafter(self, sequence: _Sequence, start: int, end: int) -> None:
        if self._num_lookahead is not None:
            # All positions that it may write hold garbage first; those whose following token is known are right then.
            blocks, offsets = self._slots(
                sequence, start, min(end + self._num_lookahead, self._max_model_len)
            )
            assert blocks.all(), "the drafter has no block for its look-ahead"
            self.drafter_memory[blocks, offsets] = -7
            known = min(end, len(sequence.tokens) - 1)
            blocks, offsets = self._slots(sequence, start, known)
            self.drafter_memory[blocks, offsets] = self._drafter_entries(sequence, start, known)
        sequence.drafts = []
        state = sequence.states[-1]
        for _ in range(self._num_drafts):
            token = next_token(state)
            if self._random.random() >= self._share_right:
                # Not by chance the right one.
                token = (token + self._random.randrange(1, VOCAB_SIZE)) % VOCAB_SIZE
            sequence.drafts.append(token)
            state = chain(state, token)

    def _drafter_entries(self, sequence: _Sequence, start: int, end: int) -> list[int]:
        following = sequence.tokens[start + 1 : end + 1] if self._reads_ahead else [0] * (end - start)
        return list(map(drafter_entry, sequence.states[start:end], following))

    def _contents(self, states: list[int], group: int) -> Any:
        """Return what a group holds for positions: no two groups hold the same."""
        return np.array(states, np.int64) ^ group

    def _slots(self, sequence: _Sequence, start: int, end: int, group: int = 0) -> tuple[Any, Any]:
        positions = np.arange(start, end)
        table = np.array(sequence.tables[group], np.int64)
        return table[positions // self.block_size], positions % self.block_size
