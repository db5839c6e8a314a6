"""Running requests that decode one token each, side by side as lists and arrays instead of one object after the other.

What vLLM keeps on a request stays there and is always up to date; this only saves reading all of it again each step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.core.sched.output import CachedRequestData

from rose_backend.vllm_plugin.plain_rows import KnownFacts, PlainRows, RequestFacts

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from rose_backend.vllm_plugin.kv_cache_manager import RoseKVCacheManager

NewBlockIds = list[tuple[list[int], ...] | None]


class DecodeBatch:
    """The first of the running requests, as far as they only decode. Steps share it as long as these stay the same.

    Args:
        running: the requests it stands for, in vLLM's order.
        requests: those of them that get a token.
        facts: of each of these.
        kv_cache_manager: holds their blocks.
    """

    def __init__(
        self,
        running: list[Request],
        requests: list[Request],
        facts: list[RequestFacts],
        kv_cache_manager: RoseKVCacheManager,
    ) -> None:
        self.running = running
        self.request_ids = [request.request_id for request in requests]
        self.plain_rows = PlainRows(requests, facts)
        self._requests = requests
        self._grammar_requests = [r for r, fact in zip(requests, facts, strict=True) if fact.has_grammar]
        self._kv_cache_manager = kv_cache_manager
        self._rows = kv_cache_manager.get_decode_rows(requests)
        self._capacity = kv_cache_manager.get_decode_capacity(self._rows)
        self._num_computed_tokens = np.array([r.num_computed_tokens for r in requests], np.int64)
        self._num_prompt_tokens = np.array([r.num_prompt_tokens for r in requests], np.int64)
        last_steps = np.array([fact.last_step for fact in facts], np.int64)
        # A request that is passed over now may be gone at the next step.
        is_complete = len(requests) == len(running)
        self._num_steps_left = int((last_steps - self._num_computed_tokens).min()) if is_complete else 0

    @classmethod
    def at_head_of(
        cls,
        running: list[Request],
        known_facts: KnownFacts,
        kv_cache_manager: RoseKVCacheManager,
        max_model_len: int,
    ) -> DecodeBatch | None:
        """Return the batch of all running requests before the first that needs more than one plain token, if any."""
        requests: list[Request] = []
        facts: list[RequestFacts] = []
        num_seen = 0
        for request, fact in zip(running, known_facts.of(running), strict=True):
            computed = request.num_computed_tokens
            is_next = len(fact.all_token_ids) + request.num_output_placeholders - computed == 1
            if not (is_next and computed < fact.last_step and not request.is_prefill_chunk):
                num_new_tokens = _num_new_tokens(request, max_model_len)
                if num_new_tokens not in (0, 1) or request.is_prefill_chunk:
                    break
                is_next = num_new_tokens == 1
            num_seen += 1
            if is_next:
                requests.append(request)
                facts.append(fact)
        return cls(running[:num_seen], requests, facts, kv_cache_manager) if requests else None

    def is_at_head_of(self, running: list[Request]) -> bool:
        """Whether it still stands for the first requests, all of them get a token again, and no other would join."""
        num_requests = len(self.running)
        if self._num_steps_left <= 0 or running[:num_requests] != self.running:
            return False
        return len(running) == num_requests or running[num_requests].is_prefill_chunk

    def allocate_slots(self) -> NewBlockIds | None:
        """Make room for one token of each request.

        Returns:
            ``new_block_ids`` of vLLM's ``CachedRequestData``, or None when blocks are short; then nothing has changed.
        """
        new_block_ids: NewBlockIds = [None] * len(self._requests)
        full = np.flatnonzero(self._num_computed_tokens >= self._capacity)
        if len(full):
            full_rows = self._rows[full]
            blocks = self._kv_cache_manager.roll_over(full_rows)
            if blocks is None:
                return None
            self._capacity[full] = self._kv_cache_manager.get_decode_capacity(full_rows)
            for position, new in zip(full.tolist(), blocks, strict=True):
                new_block_ids[position] = new.get_block_ids(allow_none=True)
        return new_block_ids

    @property
    def has_grammar(self) -> bool:
        """Whether a request's tokens must follow a grammar."""
        return bool(self._grammar_requests)

    @property
    def lacks_grammar_tokens(self) -> bool:
        """Whether tokens are on their way that a grammar has to see before it can say what may follow."""
        return any(request.num_output_placeholders for request in self._grammar_requests)

    def advance(self, new_block_ids: NewBlockIds, num_placeholders: int) -> CachedRequestData:
        """Count the next token of every request as scheduled.

        Args:
            new_block_ids: from ``allocate_slots``.
            num_placeholders: that the step adds to a request: 1 when the next step is scheduled before its end, else 0.

        Returns:
            What the workers are told.
        """
        data = CachedRequestData(
            req_ids=self.request_ids.copy(),
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=new_block_ids,
            num_computed_tokens=self._num_computed_tokens.tolist(),
            # All tokens but the one that this step computes are computed, placeholders included.
            num_output_tokens=(self._num_computed_tokens - self._num_prompt_tokens + 1).tolist(),
        )
        for request in self._requests:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += num_placeholders
        self._num_computed_tokens += 1
        self._num_steps_left -= 1
        return data


def _num_new_tokens(request: Request, max_model_len: int) -> int:
    """Return how many tokens vLLM would schedule of a running request, were there no other limits."""
    computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
    if placeholders and computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens:
        # Its last token is on its way.
        return 0
    return min(request.num_tokens_with_spec + placeholders, max_model_len - 1) - computed
