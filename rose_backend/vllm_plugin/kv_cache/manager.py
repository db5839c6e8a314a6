"""Rose's block manager behind the interface of vLLM's ``KVCacheManager``.

vLLM counts a token as computed when it schedules it; Rose commits it to the prefix cache as late as possible: before a
lookup, for those running requests that have finished their prompt or filled a block since their last commit, and for a
single request when it is freed. Between two lookups a decoding request costs one comparison per step.

Tokens of steps in flight are committed, too, as vLLM's own ``allocate_slots`` does; otherwise a prompt that shares a
prefix with one in flight would wait two steps where the next step is scheduled while one runs. That is safe:

- Every worker, and every pipeline stage for its layers, runs steps and the block copies before them on one stream, in
  the order in which they were scheduled. A request that finds a token belongs to a later step than the one writing it.
- A step that the workers got runs. If its request is aborted, preempted or stopped meanwhile, only the sampled tokens
  are dropped; the tokens it computes were known. If a step fails, vLLM's engine ends, and the cache with it.
- Only tokens with an id are committed, so a rejected draft is never found. The only token with an id that is ever taken
  back is the last one of a session's turn, and vLLM counts it as not computed in the same call that ends the turn.
- A reset empties the cache and frees all rows. Everything committed later is written by later steps.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.request import Request, RequestStatus

from rose_backend.block_manager import BlockManager, PrefixMatch
from rose_backend.errors import IntegrityError
from rose_backend.scheduling.in_flight_prefixes import InFlightPrefixes
from rose_backend.vllm_plugin.kv_cache.blocks import BlockPoolShim, CoordinatorShim, HeldBlocks, RoseBlocks
from rose_backend.vllm_plugin.kv_cache.checkpoints import DueCheckpoints, junction_of
from rose_backend.vllm_plugin.kv_cache.events import KVEventLog
from rose_backend.vllm_plugin.kv_cache.facade import KVCacheFacade
from rose_backend.vllm_plugin.kv_cache.groups import check_pool_size, the_rose_groups
from rose_backend.vllm_plugin.kv_cache.prompt_hashes import HashedPrompt, ItemIds, PromptHashes
from rose_backend.vllm_plugin.kv_cache.running_requests import (
    DeferredRequests,
    ExternalLoads,
    RunningRequests,
)
from rose_backend.vllm_plugin.options import check_retention_interval
from rose_backend.vllm_plugin.patch_ledger import apply_patch

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

MIN_TOKENS_WORTH_COPYING = 4
"""A shorter hit is none: using it means to copy a block, which costs the host more than these tokens cost a GPU.
Without this, every prompt would copy a block for the token or two that all prompts of a model begin with."""


class RoseKVCacheManager(KVCacheFacade):
    """One row of the block manager per request that holds blocks.

    Invariants: a request's table is only ever appended to between admission and ``free`` (vLLM's runners rely on it),
    and ``allocate_slots`` that returns None has changed nothing.

    Args:
        max_num_seqs: requests that may hold blocks at once.
        max_in_flight_tokens: of a request at most, scheduled and not yet processed; None: no limit.
        num_prefill_lookahead: following tokens that a drafter's cache entry at a position depends on.
        enable_kv_cache_events: whether vLLM publishes KV cache events.
        full_blocks_only: let prefix hits end at block boundaries only.
        exact_cached_tokens, enable_caching, log_stats: see ``KVCacheFacade``.
        kv_cache_config, max_model_len, watermark: as vLLM's scheduler passes them.
        unused: arguments of features that are refused at start-up.

    Raises:
        ConfigError: the model has KV cache groups that Rose's block manager does not serve, the pool is too small, or
            prefix_cache_retention_interval is set.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        *,
        max_num_seqs: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        log_stats: bool = False,
        watermark: float = 0.0,
        num_prefill_lookahead: int = 0,
        enable_kv_cache_events: bool = False,
        full_blocks_only: bool = False,
        exact_cached_tokens: bool = False,
        **unused: Any,
    ) -> None:
        groups = the_rose_groups(kv_cache_config)
        check_retention_interval(kv_cache_config.prefix_cache_retention_interval)
        num_at_once = max_model_len if max_in_flight_tokens is None else max_in_flight_tokens
        check_pool_size(kv_cache_config.num_blocks, groups, max_model_len, num_at_once)
        manager = BlockManager(
            num_blocks=kv_cache_config.num_blocks,
            block_size=groups.block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            kinds=groups.kinds,
            prefix_cache=enable_caching,
            full_blocks_only=full_blocks_only,
            bytes_per_block=groups.block_bytes,
            record_events=enable_kv_cache_events,
        )
        super().__init__(manager, groups, enable_caching, log_stats, exact_cached_tokens)
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.block_pool = BlockPoolShim()
        self.coordinator = CoordinatorShim(groups, self.block_pool, self._num_blocks_to_grow)
        # Groups and limits are its attributes: with more than 30, Python reads each of an object more slowly.
        self.running = RunningRequests(manager, groups, max_num_seqs, num_at_once, self._commit)
        self._loads = ExternalLoads()
        self.checkpoints: DueCheckpoints | None = None
        """Where states are copied into the prefix cache; None without states."""
        if groups.has_states and enable_caching:
            self.checkpoints = DueCheckpoints(self.block_size, groups.kinds[-1].num_groups, full_blocks_only)
        self._is_flushed = False
        self._item_ids = ItemIds(self.block_size)
        self._prompts = PromptHashes(manager, self._item_ids)
        self._in_flight_prefixes = InFlightPrefixes(manager)
        self._deferred = DeferredRequests(manager)
        self._last_lookup: tuple[str, PrefixMatch] | None = None
        self._full_blocks_only = full_blocks_only
        self._num_prefill_lookahead = num_prefill_lookahead
        self._events = KVEventLog(manager, groups.specs[0]) if enable_kv_cache_events else None
        if not self.reads_block_hashes:
            apply_patch("request_block_hashes")

    @property
    def reads_block_hashes(self) -> bool:
        """Whether vLLM has to hash blocks of requests: for its events only, lookups have digests of their own."""
        return self._events is not None

    # Lookup and admission

    def new_step_starts(self) -> None:
        """Note that everything scheduled so far belongs to earlier steps."""
        if self._ended:
            self._release_ended()
        self._is_flushed = False
        self._in_flight_prefixes.new_step_starts()
        self._deferred.new_step_starts()
        self._last_lookup = None
        self.running.new_step_starts()
        if self.checkpoints is not None and (rows := self.checkpoints.take_due()):
            # Before the step that overwrites their states.
            self._commit(rows)
            self.manager.checkpoint(np.array(rows))

    def defers(self, request: Request) -> bool:
        """Whether a waiting request is deferred to the next step while later ones may be admitted.

        Another request computes its prefix, which a later step finds in the cache. A row and blocks for its whole
        prompt are kept for it meanwhile. If there are none, ``allocate_slots`` blocks it and all requests behind it.
        """
        may_wait = (self._in_flight_prefixes or self.checkpoints) and request.request_id not in self._row_of
        if not may_wait or not self.prefix_cache_lookup_enabled(request):
            return False
        num_kept = None if self.checkpoints is None else self.checkpoints.blocks_kept_for(request.request_id)
        if num_kept is not None:
            return self._deferred.keep(num_kept)
        prompt, match = self._look_up(request, None)
        self._last_lookup = (request.request_id, match)
        num_tokens = min(request.num_tokens, self.max_model_len)
        num_blocks = self.manager.blocks_needed(match, num_tokens, self.running.num_at_once)
        if self.checkpoints is not None and self.checkpoints.wait(
            request.request_id, prompt, match, num_blocks
        ):
            return self._deferred.keep(num_blocks)
        is_covered = self._in_flight_prefixes.cover(prompt.token_ids, match)
        return is_covered and self._deferred.keep(num_blocks, until_next_step=True)

    def _finds_more_later(self, prompt: HashedPrompt, match: PrefixMatch) -> bool:
        """Whether others compute so much of a prompt, behind its match, that it is to wait for them."""
        is_coming = self.checkpoints is not None and self.checkpoints.are_coming_for(prompt, match)
        return is_coming or self._in_flight_prefixes.cover(prompt.token_ids, match)

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[Any, int, int]:
        """Return the longest cached prefix: blocks, number of tokens, and where a checkpoint is missing, see there."""
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        _, match = self._look_up(request, max_cache_hit_length)
        if self._events is not None and match.num_tokens:
            self._events.report_reuse(request, match.num_tokens // self.block_size)
        return (
            RoseBlocks(self.running.groups.blocks_of_match(self.manager, match), match),
            match.num_tokens,
            junction_of(match) if self.checkpoints is not None else 0,
        )

    def _look_up(self, request: Request, max_tokens: int | None) -> tuple[HashedPrompt, PrefixMatch]:
        prompt = self._prompts.get(request)
        last = self._last_lookup
        if max_tokens is None and last is not None and last[0] == request.request_id:
            return prompt, last[1]
        self._flush()
        match = prompt.match(self.manager, max_tokens)
        # The drafter's cache entries at the last positions depend on tokens that did not match.
        num_tokens = max(match.num_tokens - self._num_prefill_lookahead, 0)
        if num_tokens < MIN_TOKENS_WORTH_COPYING:
            num_tokens = 0
        if self._full_blocks_only:
            num_tokens -= num_tokens % self.block_size
        if num_tokens != match.num_tokens:
            match = prompt.shorten(match, num_tokens, self.block_size)
        return prompt, match

    def get_computed_blocks_for_connector(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[Any, int, int, bool]:
        """Return ``get_computed_blocks`` and False: no hit differs between groups."""
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
        """Allocate blocks for a request's next tokens.

        Returns:
            The blocks that are new to vLLM (a running request's appended ones), or None when blocks are short or the
            request is deferred to the next step; then nothing has changed.
        """
        if self._ended:
            self._release_ended()
        row = self._row_of.get(request.request_id)
        if row is not None:
            target = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
            if target <= self.running.capacity[row]:
                return self.empty_kv_cache_blocks
            return self.running.extend(row, target, reserved_blocks)
        if num_encoder_tokens:
            raise IntegrityError("allocate_slots: a feature that is refused at start-up asks for blocks")
        num_computed = num_new_computed_tokens + num_external_computed_tokens
        if self._deferred.until_next_step and num_computed + num_new_tokens < request.num_tokens:
            # A partial prompt may not overtake requests that are deferred to the next step: vLLM would compute the rest
            # of it before theirs.
            return None
        prompt = self._prompts.get(request)
        match = getattr(new_computed_blocks, "match", None)
        if match is None or match.num_tokens != num_new_computed_tokens:
            match = prompt.match(self.manager, num_new_computed_tokens)
        num_tokens = min(num_computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        is_waiting = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        watermark = self.watermark_blocks if has_scheduled_reqs and is_waiting else 0
        num_full = min(request.num_tokens, self.max_model_len) if full_sequence_must_fit else num_tokens
        if not self._fits(match, num_tokens, num_full, watermark, reserved_blocks):
            return None
        is_loaded = num_external_computed_tokens > 0 or delay_cache_blocks
        if not is_loaded and self.prefix_cache_lookup_enabled(request):
            if self._finds_more_later(prompt, match):
                return None
            self._in_flight_prefixes.add(prompt.token_ids, match, num_new_tokens)
        blocks = self._admit(request, prompt, match, num_tokens)
        if is_loaded and blocks is not None:
            self._loads.add(self._row_of[request.request_id], num_computed, is_async=delay_cache_blocks)
        return blocks

    def _fits(
        self, match: PrefixMatch, num_tokens: int, num_full_tokens: int, watermark: int, reserved_blocks: int
    ) -> bool:
        free = self.manager.num_free_blocks - self._deferred.num_blocks - watermark
        if self.manager.num_free_rows <= self._deferred.num_rows:
            return False
        if self.manager.blocks_needed(match, num_tokens) > free - reserved_blocks:
            return False
        if num_full_tokens <= num_tokens:
            return True
        return self.manager.blocks_needed(match, num_full_tokens, self.running.num_at_once) <= free

    def _admit(self, request: Request, prompt: HashedPrompt, match: PrefixMatch, num_tokens: int) -> Any:
        added = self.manager.add(prompt.token_ids, namespace=prompt.namespace, match=match)
        if added is None:
            return None
        row = added.row
        # If the cache has changed since the lookup, vLLM was told another length: try again in the next step.
        if added.num_cached_tokens != match.num_tokens or not self.running.reserve([row], num_tokens):
            self._free_row(row)
            return None
        self._row_of[request.request_id] = row
        self.running.add(row, request, match.num_tokens)
        if self.checkpoints is not None:
            self.checkpoints.add(row, request, prompt, match)
        self._prompts.admit(request, prompt)
        return self.running.report(row)

    # Committing and freeing

    def _flush(self) -> None:
        """Commit the tokens of earlier steps, once per step, of the rows in which lookups then find more."""
        if not self._is_flushed:
            self._is_flushed = True
            if self.enable_caching:
                self._commit(self.running.worth_publishing())

    def _commit(self, rows: list[int]) -> None:
        rows = [row for row in rows if not self._loads.cover(row, self.running.requests[row])]
        if not rows or not (self.enable_caching or len(self.running.groups.kinds) > 1):
            return
        requests = [self.running.requests[row] for row in rows]
        ends = self._commit_up_to(rows, requests, [_num_certain_tokens(request) for request in requests])
        self.running.note_published(rows, ends)

    def _commit_up_to(self, rows: list[int], requests: list[Request], ends: list[int]) -> list[int]:
        """Commit the first ``ends`` tokens of requests, or what is committed already if that is more; return which."""
        row_array = np.array(rows)
        starts = self.manager.num_computed_tokens[row_array]
        counts = np.maximum(np.array(ends) - starts, 0)
        token_ids = self._prompts.tokens_to_commit(requests, starts.tolist(), ends)
        self.manager.commit(row_array, counts, token_ids)
        if self._events is not None:
            self._events.collect(list(zip(rows, requests, strict=True)), starts.tolist())
        committed: list[int] = (starts + counts).tolist()
        return committed

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Note that what a connector loads meanwhile has arrived; tokens are committed before the next lookup."""
        row = self._row_of.get(request.request_id)
        if row is not None:
            self._loads.arrive(row)

    def take_events(self) -> list[Any]:
        """Return the events of the prefix cache since the last call, as vLLM's."""
        if self._events is None:
            return []
        # Without events commits can wait for the next lookup; with them, subscribers wait for the blocks.
        computed, size, requests = (
            self.manager.num_computed_tokens,
            self.block_size,
            self.running.requests.items(),
        )
        ends = {row: min(request.num_computed_tokens, request.num_tokens) for row, request in requests}
        self._commit([row for row, end in ends.items() if end // size > computed[row] // size])
        return self._events.take()

    def free(self, request: Request) -> None:
        """Release the blocks of a finished, aborted or preempted request; committed tokens stay in the prefix cache.

        Several requests of one step are released together, before anything else is asked of the block manager.
        """
        if (detached := self._detach(request)) is not None:
            row, *known = detached
            self._ended.append((row, request, *known))

    def _release_ended(self) -> None:
        ended, self._ended = self._ended, []
        rows, requests, ends, keep_state = map(list, zip(*ended, strict=True))
        if self.enable_caching:
            self._commit_up_to(rows, requests, ends)
        self.manager.free(np.array(rows), states_are_known=np.array(keep_state))

    def pop_blocks_for_free(self, request: Request) -> list[Any]:
        """As ``free``, but the blocks are released only when ``block_pool.free_blocks`` gets the returned list."""
        if (detached := self._detach(request)) is None:
            return []
        row, num_certain, keeps_state = detached
        if self.enable_caching:
            self._commit_up_to([row], [request], [num_certain])
        return [HeldBlocks(functools.partial(self._free_row, row, keeps_state=keeps_state))]

    def _detach(self, request: Request) -> tuple[int, int, bool] | None:
        """Take the row of a request that ends away from it, if it has one.

        Returns:
            The row, how many of its tokens may be committed, and whether its state is of just these and worth keeping.
            vLLM sets a preempted request back behind this call.
        """
        self._prompts.drop(request.request_id)
        row = self._row_of.pop(request.request_id, None)
        if row is None:
            return None
        num_certain = 0 if self._loads.cover(row, request) else _num_certain_tokens(request)
        self.running.remove(row)
        self._loads.end(row)
        # A state cannot be cut to the tokens that are known.
        keeps_state = self.checkpoints is not None and self.checkpoints.remove(row, num_certain)
        return row, num_certain, keeps_state and num_certain == request.num_computed_tokens

    def _free_row(self, row: int, *, keeps_state: bool = False) -> None:
        self.manager.free(np.array([row]), states_are_known=np.array([keeps_state]))


def _num_certain_tokens(request: Request) -> int:
    """Return how many tokens of a request are computed and known: vLLM counts drafts and placeholders as computed."""
    return min(request.num_computed_tokens, len(request._all_token_ids))
