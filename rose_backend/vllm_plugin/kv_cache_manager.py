"""Rose's block manager behind the interface of vLLM's ``KVCacheManager``.

vLLM counts a token as computed when it schedules it; Rose publishes it only when the step that writes it is behind us.
So this adapter commits late: when somebody looks something up, for those running requests that have computed their
prompt or filled a block since the last time, and for one when it leaves.
Between two lookups a decoding request costs one comparison per step.

Steps that were scheduled but are not over count as behind us, or prompts that come in together would wait two steps for
each other where the next step is scheduled while one runs. That is safe, whatever becomes of the steps in flight:

- Every worker runs steps, and the copies before them, in the order in which they were scheduled, on one stream; so does
  each stage of a pipeline, for the layers it has. Whoever finds a token belongs to a later step than the one that
  writes it.
- A step that was handed out runs. When its request is aborted, preempted or stopped meanwhile, only what it samples is
  dropped; what it reads in was known. If a step fails, vLLM's engine ends, and the cache with it.
- Only tokens with an id are published. What a step in flight samples has none, and neither has a draft, so one that is
  rejected is never found. The one token with an id that is ever taken back is the last of a session's turn, and vLLM
  counts it as not computed in the same call that stops the turn.
- A reset forgets what was published and lets go of all rows. What comes later is written by later steps.

vLLM does the same when it schedules a running request: ``allocate_slots`` publishes all tokens with an id, those of the
step in flight included, in 0.33 as in 0.32. ``cache_blocks`` after a step, from 0.33 on, leaves out tokens in flight;
here it has nothing to do.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.request import Request, RequestStatus

from rose_backend.block_manager import BlockManager, PrefixesUnderWay, PrefixMatch
from rose_backend.errors import IntegrityError
from rose_backend.vllm_plugin.kv_cache_blocks import (
    BlockPoolShim,
    CoordinatorShim,
    GroupShim,
    HeldRow,
    RoseBlocks,
)
from rose_backend.vllm_plugin.kv_cache_facade import KVCacheFacade
from rose_backend.vllm_plugin.kv_cache_spec import block_bytes, the_rose_group
from rose_backend.vllm_plugin.kv_events import KVEventLog
from rose_backend.vllm_plugin.prompt_hashes import HashedPrompt, PromptHashes
from rose_backend.vllm_plugin.refusals import check_pool_size, check_retention_interval
from rose_backend.vllm_plugin.running_rows import RunningRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from vllm.v1.kv_cache_interface import KVCacheConfig


class RoseKVCacheManager(KVCacheFacade):
    """One row of the block manager per request that holds blocks.

    Invariants: a request's table is only ever appended to between admission and ``free`` (vLLM's runners rely on it),
    and ``allocate_slots`` that returns None has changed nothing.

    Args:
        max_num_seqs: requests that may hold blocks at once.
        num_prefill_lookahead: tokens behind a position that a drafter's cache entry there depends on.
        enable_kv_cache_events: whether vLLM publishes KV cache events.
        full_blocks_only: let prefix hits end at block borders only.
        exact_cached_tokens: report every cached token, see ``KVCacheFacade``.
        kv_cache_config, max_model_len, enable_caching, log_stats, watermark: as vLLM's scheduler passes them.
        unused: what only features need that are refused at start-up.

    Raises:
        ConfigError: the model has KV cache groups that are not plain ROSE attention, the pool is too small, or
            prefix_cache_retention_interval is set.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        *,
        max_num_seqs: int,
        enable_caching: bool = True,
        log_stats: bool = False,
        watermark: float = 0.0,
        num_prefill_lookahead: int = 0,
        enable_kv_cache_events: bool = False,
        full_blocks_only: bool = False,
        exact_cached_tokens: bool = False,
        **unused: Any,
    ) -> None:
        cache_group = the_rose_group(kv_cache_config)
        check_retention_interval(kv_cache_config.prefix_cache_retention_interval)
        spec = cache_group.kv_cache_spec
        check_pool_size(kv_cache_config.num_blocks, spec.block_size, max_model_len)
        manager = BlockManager(
            num_blocks=kv_cache_config.num_blocks,
            block_size=spec.block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            prefix_cache=enable_caching,
            full_blocks_only=full_blocks_only,
            bytes_per_block=block_bytes(cache_group),
            record_events=enable_kv_cache_events,
        )
        super().__init__(
            manager,
            enable_caching=enable_caching,
            log_stats=log_stats,
            exact_cached_tokens=exact_cached_tokens,
        )
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.block_pool = BlockPoolShim(manager.finish_clone_plan, self._free_row)
        group = GroupShim(self.block_size, spec, self.block_pool)
        self.coordinator = CoordinatorShim(group, self._num_row_blocks)
        self._rows = RunningRows(manager, max_num_seqs)
        self._is_flushed = False
        self._prompts = PromptHashes(manager)
        self._under_way = PrefixesUnderWay(manager)
        # For requests that were passed over in this step.
        self._num_kept_rows = self._num_kept_blocks = 0
        self._last_lookup: tuple[str, PrefixMatch] | None = None
        self._full_blocks_only = full_blocks_only
        self._num_prefill_lookahead = num_prefill_lookahead
        self._events = KVEventLog(manager, spec) if enable_kv_cache_events else None

    # Lookup and admission

    def new_step_starts(self) -> None:
        """Note that what was scheduled before now belongs to earlier steps."""
        self._is_flushed = False
        self._under_way.new_step_starts()
        self._num_kept_rows = self._num_kept_blocks = 0
        self._last_lookup = None
        self._rows.new_step_starts()

    def passes_over(self, request: Request) -> bool:
        """Whether a waiting request sits out this step while those behind it may come in.

        It would compute what another request computes in this step, and finds that in the next one. A row and blocks
        are kept for it meanwhile: for its whole prompt, of which it will share the beginning. Where there are none, the
        answer is no, and ``allocate_slots`` holds all of them up.
        """
        if not self._under_way.has_begun or not self.prefix_cache_lookup_enabled(request):
            return False
        if request.request_id in self._row_of:
            return False
        prompt, match = self._look_up(request, None)
        self._last_lookup = (request.request_id, match)
        num_blocks = self.manager.blocks_needed(match, min(request.num_tokens, self.max_model_len))
        if (
            self.manager.num_free_rows <= self._num_kept_rows
            or num_blocks > self.manager.num_free_blocks - self._num_kept_blocks
            or not self._under_way.is_under_way(prompt.token_ids, match)
        ):
            return False
        self._num_kept_rows += 1
        self._num_kept_blocks += num_blocks
        return True

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[Any, int, int]:
        """Return the longest cached prefix: blocks, number of tokens, and 0 (no sparse groups)."""
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        _, match = self._look_up(request, max_cache_hit_length)
        if match.num_tokens == 0:
            return self.empty_kv_cache_blocks, 0, 0
        if self._events is not None:
            self._events.report_reuse(request, match.num_tokens // self.block_size)
        return RoseBlocks(match.block_ids, match), match.num_tokens, 0

    def _look_up(self, request: Request, max_tokens: int | None) -> tuple[HashedPrompt, PrefixMatch]:
        prompt = self._prompts.get(request)
        if (
            max_tokens is None
            and self._last_lookup is not None
            and self._last_lookup[0] == request.request_id
        ):
            return prompt, self._last_lookup[1]
        self._flush()
        match = prompt.match(self.manager, max_tokens)
        if self._num_prefill_lookahead:
            # The drafter's entries at the last positions were made from tokens that did not match.
            num_tokens = match.num_tokens - self._num_prefill_lookahead
            if self._full_blocks_only:
                num_tokens -= num_tokens % self.block_size
            match = prompt.shorten(match, num_tokens, self.block_size)
        return prompt, match

    def get_computed_blocks_for_connector(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[Any, int, int, bool]:
        """Return ``get_computed_blocks`` and that no group's hit differs: there is one group."""
        return *self.get_computed_blocks(request, max_cache_hit_length), False

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        **unused: Any,
    ) -> Any:
        """Make room for a request's next tokens.

        Returns:
            The blocks that are new to vLLM (a running request's appended ones), or None when they are short, or it
            is better off in the next step; then nothing has changed.
        """
        row = self._row_of.get(request.request_id)
        if row is not None:
            target = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
            if target <= self._rows.capacity[row]:
                return self.empty_kv_cache_blocks
            return self._rows.extend(row, target, reserved_blocks)
        if num_external_computed_tokens or num_encoder_tokens:
            raise IntegrityError("allocate_slots: a feature that is refused at start-up asks for blocks")
        if self._num_kept_rows and num_new_computed_tokens + num_new_tokens < request.num_tokens:
            # Nobody overtakes those who wait with half a prompt: vLLM would compute the rest of it before theirs.
            return None
        prompt = self._prompts.get(request)
        match = getattr(new_computed_blocks, "match", None)
        if match is None or match.num_tokens != num_new_computed_tokens:
            match = prompt.match(self.manager, num_new_computed_tokens)
        num_tokens = min(num_new_computed_tokens + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        watermark = self.watermark_blocks if has_scheduled_reqs and _is_waiting(request) else 0
        num_full = min(request.num_tokens, self.max_model_len) if full_sequence_must_fit else num_tokens
        if not self._fits(match, num_tokens, num_full, watermark, reserved_blocks):
            return None
        if self.prefix_cache_lookup_enabled(request):
            if self._under_way.is_under_way(prompt.token_ids, match):
                return None
            self._under_way.begin(prompt.token_ids, match, num_new_tokens)
        return self._admit(request, prompt, match, num_tokens)

    def _fits(
        self, match: PrefixMatch, num_tokens: int, num_full_tokens: int, watermark: int, reserved_blocks: int
    ) -> bool:
        free = self.manager.num_free_blocks - self._num_kept_blocks - watermark
        if self.manager.num_free_rows <= self._num_kept_rows:
            return False
        if self.manager.blocks_needed(match, num_tokens) > free - reserved_blocks:
            return False
        return num_full_tokens <= num_tokens or self.manager.blocks_needed(match, num_full_tokens) <= free

    def _admit(self, request: Request, prompt: HashedPrompt, match: PrefixMatch, num_tokens: int) -> Any:
        admission = self.manager.add(prompt.token_ids, namespace=prompt.namespace, match=match)
        if admission is None:
            return None
        row = admission.row
        # Had the cache changed since the lookup, vLLM would have been told another length: try again next step.
        if admission.num_cached_tokens != match.num_tokens or not self._rows.reserve([row], num_tokens):
            self._free_row(row)
            return None
        self._row_of[request.request_id] = row
        self._rows.add(row, request, match.num_tokens)
        self._prompts.drop(request.request_id)
        return self._rows.report(row)

    # Decode steps of all running requests at once

    def get_decode_rows(self, requests: Sequence[Request]) -> NDArray[Any]:
        """Return the row of each running request, int64 ``[N]``."""
        return np.array([self._row_of[request.request_id] for request in requests], np.int64)

    def get_decode_capacity(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return how many tokens each row can hold as it is, int64 ``[N]``."""
        return np.array([self._rows.capacity[row] for row in rows.tolist()], np.int64)

    def roll_over(self, rows: NDArray[Any]) -> list[RoseBlocks] | None:
        """Give each of ``rows``, which are all full, its next block: ``allocate_slots`` for one more token of each.

        Returns:
            The blocks that are new to vLLM, row by row, or None when they are short; then nothing has changed.
        """
        return self._rows.roll_over(rows.tolist())

    # Publishing and freeing

    def _flush(self) -> None:
        """Commit what earlier steps have written, once per step, where that is worth a commit."""
        if not self._is_flushed:
            self._is_flushed = True
            if self.enable_caching:
                self._commit(self._rows.worth_publishing())

    def _commit(self, rows: list[int]) -> None:
        if not rows or not self.enable_caching:
            return
        row_array = np.array(rows)
        starts = self.manager.num_computed_tokens[row_array]
        requests = [self._rows.requests[row] for row in rows]
        # Drafts and placeholders are computed tokens to vLLM, too, but only tokens with an id are certain.
        ends = np.minimum(
            [request.num_computed_tokens for request in requests],
            [len(request._all_token_ids) for request in requests],
        )
        counts = np.maximum(ends - starts, 0)
        spans = zip(requests, starts.tolist(), ends.tolist(), strict=True)
        token_ids = chain.from_iterable([request._all_token_ids[start:end] for request, start, end in spans])
        self.manager.commit(row_array, counts, np.fromiter(token_ids, np.int32, int(counts.sum())))
        self._rows.note_published(rows, (starts + counts).tolist())
        if self._events is not None:
            self._events.collect(list(zip(rows, requests, strict=True)), starts.tolist())

    def take_events(self) -> list[Any]:
        """Return what became findable and what went since the last call, as vLLM's events."""
        if self._events is None:
            return []
        # Without events nobody knows of a block before the next lookup; with them subscribers wait for it.
        computed, size = self.manager.num_computed_tokens, self.block_size
        self._commit(
            [
                row
                for row, request in self._rows.requests.items()
                if min(request.num_computed_tokens, request.num_tokens) // size > computed[row] // size
            ]
        )
        return self._events.take()

    def free(self, request: Request) -> None:
        """Let go of a finished, aborted or preempted request's blocks; what it computed stays findable."""
        row = self._detach(request)
        if row is not None:
            self._free_row(row)

    def pop_blocks_for_free(self, request: Request) -> list[Any]:
        """As ``free``, but the blocks return only when ``block_pool.free_blocks`` gets the answer."""
        row = self._detach(request)
        return [] if row is None else [HeldRow(row)]

    def _detach(self, request: Request) -> int | None:
        self._prompts.drop(request.request_id)
        row = self._row_of.pop(request.request_id, None)
        if row is not None:
            self._commit([row])
            self._rows.remove(row)
        return row

    def _free_row(self, row: int) -> None:
        self.manager.free(np.array([row]))

    def _num_row_blocks(self, request_id: str) -> int:
        return int(self.manager.num_row_blocks[self._row_of[request_id]]) if request_id in self._row_of else 0


def _is_waiting(request: Request) -> bool:
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
