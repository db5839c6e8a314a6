"""The scheduler and the worker around a manager, at the pace of a test, with every cache slot remembered.

A slot's content stands for a real K/V entry, which depends on all tokens before it: a chained hash of them, seeded by
whatever must keep requests apart (salt, adapter). After each step every position of every request that holds blocks is
compared with what it must be. A block that was shared too early, copied too late, found under another tenant's name or
handed out twice shows at once, whichever manager answered.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request, RequestStatus

from rose_backend.conformance.block_manager.managers import BLOCK_SIZE, STATE, MakeManager, check_books
from rose_backend.conformance.block_manager.pretended_model import chain, next_token, with_contents

init_none_hash(sha256)
_BLOCK_HASHER = get_request_block_hasher(BLOCK_SIZE, sha256)


class Host:
    """Drives one manager as vLLM's scheduler does.

    As there, tokens count as computed and blocks retained for copies go back once the step is scheduled.

    Args:
        make: builds the manager.
        num_blocks: of the pool, the null block included.
        windows: of further KV cache groups, or ``STATE``. Where windows have passed, a request may have no block.
        max_num_seqs, max_model_len: limits; the pool must hold one sequence of ``max_model_len``.
        options: further keywords of the manager.
    """

    def __init__(
        self,
        make: MakeManager,
        num_blocks: int = 13,
        *,
        windows: Sequence[int] = (),
        max_num_seqs: int = 8,
        max_model_len: int = 128,
        **options: Any,
    ) -> None:
        self.manager: Any = make(
            num_blocks, windows=windows, max_num_seqs=max_num_seqs, max_model_len=max_model_len, **options
        )
        self._windows = (max_model_len, *windows)
        self.num_usable_blocks = num_blocks - 1
        self._memory = np.full((num_blocks, BLOCK_SIZE), -1, np.int64)
        self._holders: dict[str, Request] = {}
        self._states: dict[str, list[int]] = {}
        self._drafts: dict[str, Sequence[int]] = {}  # of the step
        self._state_columns: dict[str, int] = {}  # of the tables: where a request's last step left its states
        self._planned: list[tuple[Request, int, int]] = []  # request, first and last position + 1 to compute

    @staticmethod
    def new_request(
        name: str,
        prompt: list[int],
        *,
        salt: str | None = None,
        adapter: str | None = None,
        adapter_path: str = "first",
        skip_reading: bool = False,
        items: Sequence[MultiModalFeatureSpec] = (),
    ) -> Request:
        """Return a waiting request as the engine core builds it."""
        request = Request(
            name,
            prompt,
            SamplingParams(max_tokens=1000),
            None,
            cache_salt=salt,
            lora_request=LoRARequest(adapter, 1, adapter_path) if adapter else None,
            block_hasher=_BLOCK_HASHER,
            mm_features=list(items),
        )
        request.skip_reading_prefix_cache = skip_reading
        return request

    # One step

    def start_step(self) -> None:
        """Begin to schedule."""
        self.manager.new_step_starts()

    def hits(self, request: Request) -> int:
        """Return what ``lookup`` does, in a new step if none has started."""
        if not self._planned:
            self.start_step()
        return self.lookup(request)

    def lookup(self, request: Request) -> int:
        """Return how many of a waiting request's tokens the manager finds."""
        return int(self.manager.get_computed_blocks(request)[1])

    def admit(self, request: Request, num_tokens: int | None = None, **options: Any) -> Any:
        """Look a waiting request up and allocate its next ``num_tokens`` (default: all that is left).

        Returns: the manager's answer; None if it refused, and then the request waits on.
        """
        blocks, num_hits, _ = self.manager.get_computed_blocks(request)
        num_tokens = request.num_tokens - num_hits if num_tokens is None else num_tokens
        allocated = self.manager.allocate_slots(
            request,
            num_tokens,
            num_new_computed_tokens=num_hits,
            new_computed_blocks=blocks,
            **options,
        )
        if allocated is not None:
            self.manager.record_prefix_cache_stats(request, num_hits)
            request.status = RequestStatus.RUNNING
            self._holders[request.request_id] = request
            self._planned.append((request, num_hits, num_hits + num_tokens))
        return allocated

    def append(
        self, request: Request, num_tokens: int = 1, *, drafts: Sequence[int] = (), **options: Any
    ) -> Any:
        """Allocate a running request's next tokens and their drafts; None if the manager refused."""
        num_tokens += len(drafts)
        allocated = self.manager.allocate_slots(request, num_tokens, **options)
        if allocated is not None:
            start = request.num_computed_tokens
            self._drafts[request.request_id] = drafts
            self._planned.append((request, start, start + num_tokens))
        return allocated

    def finish_step(self) -> list[tuple[int, int]]:
        """Run what was scheduled: copies, then writes; check all slots; generate. Returns the copies."""
        copies, retained = self.manager.take_kv_cache_block_copies()
        pairs = [(copy.src_block_id, copy.dst_block_id) for copy in copies]
        self.manager.block_pool.free_blocks(retained)
        for request, _, num_computed in self._planned:
            request.num_computed_tokens = num_computed
        if pairs:
            sources, destinations = np.array(pairs).T
            self._memory[destinations] = self._memory[sources]
        for request, start, end in self._planned:
            for group, window in enumerate(self._windows):
                content = self._content(request, group)
                if window == STATE:
                    self._advance_state(request, group, start, end)
                else:
                    self._memory.reshape(-1)[self._slots(request, group, start, end)] = content[start:end]
            self._state_columns[request.request_id] = (end - 1) // BLOCK_SIZE
            # What the step's tokens attend to.
            self._check_slots(request, start, end)
        self.check_slots()
        for request, _, num_computed in self._planned:
            drafts = self._drafts.pop(request.request_id, ())
            request.num_computed_tokens = num_computed - len(drafts)
            if request.num_computed_tokens == request.num_tokens:
                self._generate(request, drafts)
            self.manager.cache_blocks(request, request.num_computed_tokens)
        self._planned.clear()
        return pairs

    def _generate(self, request: Request, drafts: Sequence[int]) -> None:
        """Append the next token, and one more for each draft that was right; what is computed of others is void."""
        for draft in (*drafts, None):
            request.append_output_token_ids(next_token(self._states_of(request)[-1]))
            if request.all_token_ids[-1] != draft:
                return
            request.num_computed_tokens += 1

    # Whole steps

    def run(self, request: Request, **options: Any) -> Any:
        """Admit a request in a separate step; the manager's answer."""
        self.start_step()
        allocated = self.admit(request, **options)
        self.finish_step()
        return allocated

    def started(self, name: str, prompt: list[int], **options: Any) -> Request:
        """Return a new request (see ``new_request``) that has run its first step."""
        request = self.new_request(name, prompt, **options)
        self.run(request)
        return request

    def decode(self, *requests: Request, steps: int = 1) -> None:
        """Generate ``steps`` tokens for requests, which the manager must not refuse."""
        for _ in range(steps):
            self.start_step()
            for request in requests:
                assert self.append(request) is not None, f"{request.request_id} was refused"
            self.finish_step()

    def free(self, *requests: Request) -> None:
        """Finish requests."""
        for request in requests:
            self._forget(request)
            self.manager.free(request)

    def preempt(self, request: Request) -> None:
        """Send a running request back to the queue as the scheduler does."""
        self.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED

    def pop_for_later_free(self, request: Request) -> list[Any]:
        """Finish a request whose blocks are to return later."""
        self._forget(request)
        blocks: list[Any] = self.manager.pop_blocks_for_free(request)
        return blocks

    # Read

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests hold, from the manager's usage figure."""
        return round(self.manager.usage * self.num_usable_blocks)

    def block_ids(self, request: Request, group: int = 0) -> list[int]:
        """Return a request's block table, with 0 where a window has passed."""
        return list(self.manager.get_block_ids(request.request_id)[group])

    def snapshot(self, *probes: Request) -> Any:
        """Return all that the interface shows: usage, tables, and what ``probes`` would find."""
        check_books(self.manager)
        tables = {name: self.manager.get_block_ids(name) for name in self._holders}
        return self.manager.usage, tables, [self.hits(probe) for probe in probes]

    def check_slots(self) -> None:
        """Compare every position that the next token of every request attends to with what it must hold."""
        for request in self._holders.values():
            self._check_slots(request, request.num_computed_tokens, request.num_computed_tokens)

    def _check_slots(self, request: Request, next_token: int, end: int) -> None:
        """Check the positions up to ``end`` that the token at ``next_token`` and later ones attend to."""
        for group, window in enumerate(self._windows):
            if window == STATE:
                continue
            start = max(next_token - window + 1, 0)
            got = self._memory.reshape(-1)[self._slots(request, group, start, end)]
            wrong = np.flatnonzero(got != self._content(request, group)[start:end])
            where = f"{request.request_id}, group {group}"
            assert not len(wrong), f"{where}: position {start + wrong[0]} holds another content"

    def _advance_state(self, request: Request, group: int, start: int, end: int) -> None:
        """Read the state of ``start`` tokens where the last step left it, or a hit ends, and write that of ``end``."""
        content, table = self._content(request, group), self.block_ids(request, group)
        if start:
            column = self._state_columns.get(request.request_id, (start - 1) // BLOCK_SIZE)
            state = self._memory[table[column], 0]
            assert state == content[start - 1], (
                f"{request.request_id}, group {group}: not the state of {start}"
            )
        block = table[(end - 1) // BLOCK_SIZE]
        assert block, f"{request.request_id}, group {group}: no block for the state of {end}"
        self._memory[block] = content[end - 1]

    def check_no_leak(self) -> None:
        """Finish everybody; then no block is held and the whole pool can be handed out."""
        check_books(self.manager)
        self.free(*list(self._holders.values()))
        assert self.manager.usage == 0.0
        check_books(self.manager)

    def _slots(self, request: Request, group: int, start: int, end: int) -> Any:
        positions = np.arange(start, end)
        blocks = np.array(self.block_ids(request, group))
        where = f"{request.request_id}, group {group}: {blocks}"
        held = blocks[blocks != 0]
        assert len(np.unique(held)) == len(held), where
        assert len(blocks) * BLOCK_SIZE >= end and 0 not in blocks[start // BLOCK_SIZE :], where
        return blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE

    def _content(self, request: Request, group: int) -> Any:
        """Return what the positions of a request hold in one group: layers of another would read something else."""
        states = list(self._states_of(request))
        for draft in self._drafts.get(request.request_id, ()):
            states.append(chain(states[-1], draft))
        return np.array(states, dtype=np.int64) ^ group

    def continuation(self, request: Request, num_tokens: int) -> list[int]:
        """Return what a request will generate next: right drafts are these, after the first."""
        state, tokens = self._states_of(request)[-1], []
        for _ in range(num_tokens):
            tokens.append(next_token(state))
            state = chain(state, tokens[-1])
        return tokens

    def _states_of(self, request: Request) -> list[int]:
        states = self._states.setdefault(request.request_id, [])
        tokens = with_contents(request._all_token_ids, request.mm_features)
        for token in tokens[len(states) :]:
            states.append(chain(states[-1] if states else _seed(request), token))
        return states

    def _forget(self, request: Request) -> None:
        self._holders.pop(request.request_id, None)
        self._state_columns.pop(request.request_id, None)
        self._planned = [entry for entry in self._planned if entry[0] is not request]


def _seed(request: Request) -> int:
    adapter, salt = request.lora_request, request.cache_salt
    if adapter is None and salt is None:
        return 0
    return zlib.crc32(repr((salt, adapter and (adapter.lora_name, adapter.lora_path))).encode())
