"""A worker that computes no attention but remembers exactly what each cache slot would hold.

A slot's content depends on all tokens up to its position, as a real K/V entry's does from the second layer on, so it is
represented by a chained hash of them. Before a step writes anything, every position that its requests would read is
compared with what it must be: a block that was shared too early, copied too late or overwritten shows at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

VOCAB_SIZE = 97
_MODULUS = (1 << 61) - 1


def chain(state: int, token: int) -> int:
    """Return the content of the next position."""
    return (state * 1_000_003 + token * 7919 + 12345) % _MODULUS


def next_token(state: int) -> int:
    """Return what the pretended model generates greedily."""
    return state % VOCAB_SIZE


def expected_output(prompt: list[int], num_tokens: int) -> list[int]:
    """Generate without any cache."""
    state = 0
    for token in prompt:
        state = chain(state, token)
    output = []
    for _ in range(num_tokens):
        output.append(next_token(state))
        state = chain(state, output[-1])
    return output


@dataclass
class _Sequence:
    tokens: list[int]
    states: list[int]  # states[p] = content of position p
    table: list[int]

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self.states.append(chain(self.states[-1] if self.states else 0, token))


class FakeWorker:
    """Follows scheduler outputs as model runner V1 does: block ids are appended; resumed requests get a new table."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.memory = np.full((num_blocks, block_size), -1, np.int64)
        self.num_copies = 0
        self._sequences: dict[str, _Sequence] = {}

    def run(self, output: Any, requests: dict[str, Any]) -> Any:
        """Execute one step; return its ``ModelRunnerOutput``. Raises AssertionError where a read would be wrong."""
        from vllm.v1.outputs import ModelRunnerOutput

        for request_id in output.finished_req_ids:
            self._sequences.pop(request_id, None)
        if output.kv_cache_block_copies:
            self._copy(output.kv_cache_block_copies)
        starts = self._update(output, requests)
        for request_id, start in starts.items():
            self._check_reads(request_id, start)
        sampled = {}
        for request_id, start in starts.items():
            sampled[request_id] = self._write(request_id, start, output.num_scheduled_tokens[request_id])
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={request_id: index for index, request_id in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
        )

    def _copy(self, pairs: list[Any]) -> None:
        sources = [pair.src_block_id for pair in pairs]
        destinations = [pair.dst_block_id for pair in pairs]
        assert len(set(destinations)) == len(destinations), "two copies into one block"
        self.memory[destinations] = self.memory[sources]
        self.num_copies += len(pairs)

    def _update(self, output: Any, requests: dict[str, Any]) -> dict[str, int]:
        starts = {}
        for new in output.scheduled_new_reqs:
            sequence = _Sequence([], [], list(new.block_ids[0]))
            sequence.extend(new.prompt_token_ids)
            self._sequences[new.req_id] = sequence
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            sequence = self._sequences[request_id]
            new_ids = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                sequence.table = list(new_ids[0])
                # Tokens whose delivery was still under way when the request was preempted count from now on.
                sequence.tokens, sequence.states = [], []
                sequence.extend(list(requests[request_id].all_token_ids))
            elif new_ids is not None:
                sequence.table.extend(new_ids[0])
            starts[request_id] = cached.num_computed_tokens[index]
        return starts

    def _check_reads(self, request_id: str, num_computed: int) -> None:
        sequence = self._sequences[request_id]
        positions = np.arange(num_computed)
        blocks = np.array(sequence.table, np.int64)[positions // self.block_size]
        got = self.memory[blocks, positions % self.block_size]
        wrong = np.flatnonzero(got != np.array(sequence.states[:num_computed], np.int64))
        assert not len(wrong), (
            f"{request_id}: positions {wrong.tolist()} of {num_computed} hold something else"
        )

    def _write(self, request_id: str, start: int, count: int) -> list[int]:
        sequence = self._sequences[request_id]
        end = start + count
        assert end <= len(sequence.tokens), f"{request_id}: token {end - 1} is not known"
        for position in range(start, end):
            block = sequence.table[position // self.block_size]
            assert block != 0, f"{request_id}: position {position} would be written to the null block"
            self.memory[block, position % self.block_size] = sequence.states[position]
        if end < len(sequence.tokens):
            return []
        token = next_token(sequence.states[-1])
        sequence.extend([token])
        return [token]
