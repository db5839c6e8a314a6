"""vLLM's ``KVCacheManager`` interface over Rose's block manager.

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
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request, RequestStatus

from rose_backend.block_manager import BlockManager, PrefixMatch, reporting_unit
from rose_backend.errors import IntegrityError
from rose_backend.scheduling import InFlightPrefixes
from rose_backend.vllm_plugin.kv_cache.checkpoints import DueCheckpoints, junction_of
from rose_backend.vllm_plugin.kv_cache.events import KVEventLog
from rose_backend.vllm_plugin.kv_cache.groups import BlockPoolShim, HeldBlocks, RoseBlocks, RoseGroups
from rose_backend.vllm_plugin.kv_cache.prompt_hashes import HashedPrompt, PromptHashes
from rose_backend.vllm_plugin.kv_cache.running_requests import (
    DeferredRequests,
    ExternalLoads,
    RunningRequests,
)
from rose_backend.vllm_plugin.options import check_retention_interval
from rose_backend.vllm_plugin.patch_ledger import apply_patch
from rose_backend.vllm_plugin.plugin_logger import LogInterval, logger

MIN_TOKENS_WORTH_COPYING = 4
"""Shorter hits are ignored: copying a block costs the CPU more than recomputing these tokens costs a GPU.
Otherwise every prompt would copy a block for the token or two that all prompts of a model begin with."""


class RoseKVCacheManager:
    """One row of the block manager per request that holds blocks; ``running`` keeps what a decode asks for.

    Invariants: a request's table is only ever appended to between admission and ``free`` (vLLM's runners rely on it),
    and ``allocate_slots`` that returns None has changed nothing.

    Args:
        max_num_seqs: requests that may hold blocks at once.
        max_in_flight_tokens: of a request at most, scheduled and not yet processed; None: no limit.
        num_prefill_lookahead: following tokens that a drafter's cache entry at a position depends on.
        enable_kv_cache_events: whether vLLM publishes KV cache events.
        full_blocks_only: let prefix hits end at block boundaries only.
        exact_cached_tokens: report every cached token; otherwise multiples of ``reporting_unit``.
        enable_caching: whether requests may use each other's blocks.
        log_stats: whether vLLM will ask for prefix cache statistics.
        kv_cache_config, max_model_len, watermark: as vLLM's scheduler passes them.
        unused: arguments of features that are refused at start-up.

    Raises:
        ConfigError: the model has KV cache groups that Rose's block manager does not serve, the pool is too small, or
            prefix_cache_retention_interval is set.
    """

    mamba_shared_prefix_checkpoint = False

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
        groups = RoseGroups.of(kv_cache_config)
        check_retention_interval(kv_cache_config.prefix_cache_retention_interval)
        num_at_once = max_model_len if max_in_flight_tokens is None else max_in_flight_tokens
        groups.check_pool_size(kv_cache_config.num_blocks, max_model_len, num_at_once)
        manager = BlockManager(
            num_blocks=kv_cache_config.num_blocks,
            block_size=groups.block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            group_types=groups.group_types,
            prefix_cache=enable_caching,
            full_blocks_only=full_blocks_only,
            bytes_per_block=groups.block_bytes,
            record_events=enable_kv_cache_events,
        )
        self._manager = manager
        self._ended: list[tuple[int, Request, int, bool]] = []
        """Rows of requests that have ended, with the tokens that they had computed, and whether their states are kept:
        released all at once, soon."""
        self.running = RunningRequests(manager, groups, num_at_once, self._commit)
        self.empty_kv_cache_blocks = KVCacheBlocks(((),) * len(groups))
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.block_size = groups.block_size
        self.num_kv_cache_groups = len(groups)
        self.has_states = groups.has_states
        """Whether layers of the model keep states."""
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.block_pool = BlockPoolShim()
        self.coordinator = groups.coordinator(self.block_pool, self._num_blocks_to_grow)
        self._loads = ExternalLoads()
        self._deferred = DeferredRequests(manager)
        self._prompts = PromptHashes(manager)
        self._in_flight_prefixes = InFlightPrefixes(manager)
        self._last_lookup: tuple[str, PrefixMatch] | None = None
        self._full_blocks_only = full_blocks_only
        self._num_prefill_lookahead = num_prefill_lookahead
        self._is_flushed = False
        self.enable_caching = enable_caching
        self.checkpoints: DueCheckpoints | None = None
        """Where states are copied into the prefix cache; None without states."""
        if self.has_states and enable_caching:
            num_groups = groups.group_types[-1].num_groups
            self.checkpoints = DueCheckpoints(self.block_size, num_groups, full_blocks_only)
        self.log_stats = log_stats
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self._hit_unit = 1 if exact_cached_tokens else reporting_unit(self.block_size)
        self._log_interval = LogInterval()
        self._events = KVEventLog(manager, groups.specs[0]) if enable_kv_cache_events else None
        self.reads_block_hashes = enable_kv_cache_events
        """Whether vLLM has to hash blocks of requests: only for its events; lookups have their own digests."""
        if not self.reads_block_hashes:
            apply_patch("request_block_hashes")

    @property
    def manager(self) -> BlockManager:
        """Rose's block manager, up to date: what requests that have ended held is released first."""
        if self._ended:
            self._release_ended()
        return self._manager

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
        prompt are kept for it meanwhile. If there are none, ``allocate_slots`` blocks it and all requests after it.
        """
        may_wait = (
            self._in_flight_prefixes or self.checkpoints
        ) and request.request_id not in self.running.row_of
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
        running = self.running
        row = running.row_of.get(request.request_id)
        if row is not None:
            target = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
            if target <= running.capacity[row]:
                return self.empty_kv_cache_blocks
            return running.extend(row, target, reserved_blocks)
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
            # Others compute enough of it, past its match, for it to wait for them.
            is_coming = (
                self.checkpoints is not None and self.checkpoints.coming_for(prompt, match) is not None
            )
            if is_coming or self._in_flight_prefixes.cover(prompt.token_ids, match):
                return None
            self._in_flight_prefixes.add(prompt.token_ids, match, num_new_tokens)
        blocks = self._admit(request, prompt, match, num_tokens)
        if is_loaded and blocks is not None:
            self._loads.add(running.row_of[request.request_id], num_computed, is_async=delay_cache_blocks)
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
        rows = [row for row in rows if not self._loads.is_pending(row, self.running.requests[row])]
        if not rows or not (self.enable_caching or len(self.running.groups.group_types) > 1):
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
        # Called for each decode of each step, nearly always without a load.
        if self._loads.of_row and (row := self.running.row_of.get(request.request_id)) is not None:
            self._loads.arrive(row)

    def take_events(self) -> list[Any]:
        """Return the events of the prefix cache since the last call, as vLLM's."""
        if self._events is None:
            return []
        # Without events commits can wait for the next lookup; with them, subscribers wait for the blocks.
        computed, size = self.manager.num_computed_tokens, self.block_size
        grown = [
            row
            for row, request in self.running.requests.items()
            if _num_certain_tokens(request) // size > computed[row] // size
        ]
        self._commit(grown)
        return self._events.take()

    def free(self, request: Request) -> None:
        """Release the blocks of a finished, aborted or preempted request; committed tokens stay in the prefix cache.

        Several requests of one step are released together, before anything else is asked of the block manager.
        """
        if (ended := self._detach(request)) is not None:
            self._ended.append(ended)

    def _release_ended(self) -> None:
        ended, self._ended = self._ended, []
        rows, requests, ends, keep_state = map(list, zip(*ended, strict=True))
        if self.enable_caching:
            self._commit_up_to(rows, requests, ends)
        self.manager.free(np.array(rows), states_are_known=np.array(keep_state))

    def pop_blocks_for_free(self, request: Request) -> list[Any]:
        """As ``free``, but the blocks are released only when ``block_pool.free_blocks`` gets the returned list."""
        if (ended := self._detach(request)) is None:
            return []
        row, _, num_certain, keeps_state = ended
        if self.enable_caching:
            self._commit_up_to([row], [request], [num_certain])
        return [HeldBlocks(functools.partial(self._free_row, row, keeps_state=keeps_state))]

    def _detach(self, request: Request) -> tuple[int, Request, int, bool] | None:
        """Take the row of a request that ends away from it, if it has one.

        Returns:
            The row, the request, how many of its tokens may be committed, and whether its state is of just these and
            worth keeping.
            vLLM sets a preempted request back after this call.
        """
        self._prompts.drop(request.request_id)
        row = self.running.remove(request)
        if row is None:
            return None
        num_certain = 0 if self._loads.is_pending(row, request) else _num_certain_tokens(request)
        self._loads.end(row)
        # A state cannot be cut to the tokens that are known.
        keeps_state = self.checkpoints is not None and self.checkpoints.remove(row, num_certain)
        return row, request, num_certain, keeps_state and num_certain == request.num_computed_tokens

    def _free_row(self, row: int, *, keeps_state: bool = False) -> None:
        self.manager.free(np.array([row]), states_are_known=np.array([keeps_state]))

    # What a request holds

    @property
    def usage(self) -> float:
        """Share of the pool in use, 0 to 1."""
        return self.manager.usage

    def get_blocks(self, request_id: str) -> Any:
        """Return all blocks of a request, without those allocated ahead: ``allocate_slots`` will return them as new."""
        row = self.running.row_of.get(request_id)
        if row is None:
            return self.empty_kv_cache_blocks
        manager = self.manager
        num_cached = int(manager.num_computed_tokens[row]) // self.block_size
        num_reported = self.running.num_reported[row]
        return RoseBlocks(self.running.groups.blocks_of(manager, row, 0, num_reported), num_cached=num_cached)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the ids of all blocks of a request, of each group."""
        return tuple(self.get_blocks(request_id).get_block_ids())

    def get_block_ids_for_computed_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[list[int], ...]:
        """Return the ids of the blocks that hold the first ``num_computed_tokens``."""
        num_blocks = -(-num_computed_tokens // self.block_size)
        return tuple(block_ids[:num_blocks] for block_ids in self.get_block_ids(request_id))

    def truncate_computed_blocks(self, blocks: Any, num_computed_tokens: int) -> Any:
        """Return the first blocks of a hit, up to ``num_computed_tokens``, a multiple of the block size.

        A connector is queried after the last full block; if it has more than the partial block that follows, that
        block is not used.
        """
        match: PrefixMatch = blocks.match
        num_full_tokens = match.num_tokens - match.num_tokens % self.block_size
        if num_computed_tokens != num_full_tokens:
            raise IntegrityError(
                f"truncate_computed_blocks: got {num_computed_tokens} tokens of a hit of {match.num_tokens}, expected "
                f"those of its full blocks, {num_full_tokens}"
            )
        block_ids = match.block_ids[: num_full_tokens // self.block_size]
        return RoseBlocks(
            (block_ids,), PrefixMatch(block_ids, num_full_tokens, match.chain_digest, match.epoch)
        )

    def estimate_cached_tokens(self, request: Request) -> int:
        """Return how many of a request's tokens later requests can reuse."""
        return min(request.num_computed_tokens, request.num_tokens) if self.enable_caching else 0

    def create_kv_cache_blocks(self, blocks: Any) -> Any:
        """Return vLLM's own container for blocks, the shared empty one for none."""
        return KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks

    def _num_blocks_to_grow(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        return self.manager.blocks_to_grow(
            self.running.row_of.get(request_id), num_tokens, self.running.num_at_once
        )

    # Prefix cache

    def prefix_cache_lookup_enabled(self, request: Request) -> bool:
        """Whether this request may use cached blocks."""
        return self.enable_caching and not request.skip_reading_prefix_cache

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        """Count the lookup of an admitted request, and set how many cached tokens are reported to its client."""
        num_hits -= num_hits % self._hit_unit
        stats = request.prefill_stats
        # After a preemption the first counts stay; they are None once the client has got them.
        if stats is not None and request.num_preemptions == 0:
            stats.set(request.num_prompt_tokens, num_hits, stats.num_external_cached_tokens)
        if self.prefix_cache_stats is not None and self.prefix_cache_lookup_enabled(request):
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens, num_hits=num_hits, preempted=request.num_preemptions > 0
            )

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Return the counts since the last call."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False, and nothing is done, while requests hold blocks."""
        if not self.manager.reset_prefix_cache():
            return False
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Forget blocks of requests whose load failed: lookups no longer find them."""
        self.manager.uncache(np.array(sorted(block_ids), np.int64))

    # Before a step runs

    def take_kv_cache_block_copies(self) -> tuple[list[KVCacheBlockCopy], list[Any]]:
        """Return the copies that must run before this step's forward pass, and what to free after them."""
        plan = self.manager.take_clone_plan()
        if plan is None:
            return [], []
        if self._log_interval.is_over():
            counters = ", ".join(f"{name} {count}" for name, count in self._manager.stats.as_dict().items())
            logger.info("Rose block manager since start-up: %s", counters)
        pairs = zip(plan.src_block_ids.tolist(), plan.dst_block_ids.tolist(), strict=True)
        held = HeldBlocks(functools.partial(self.manager.finish_clone_plan, plan))
        return [KVCacheBlockCopy(src, dst) for src, dst in pairs], [held]

    def take_new_block_ids(self) -> list[int]:
        """Return the blocks to zero: with states, all that were allocated for K/V; none otherwise.

        What a state has left in a block may read as NaN, and attention multiplies what it masks by 0.
        """
        return self.manager.pool.take_new_kv_blocks().tolist() if self.has_states else []

    # Features that Rose's manager does not need

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """Return no Mamba states."""
        return {}

    def finalize_partial_tail_offloads(self, request: Request) -> list[tuple[int, int, int]]:
        """Return no Mamba states."""
        return []

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Return zeros, as vLLM itself does since cascade attention is gone."""
        return [0] * self.num_kv_cache_groups

    def remove_skipped_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: what windows have passed is released before more is allocated."""

    def record_blocks_for_zeroing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: attention never reads what was not written."""


def _num_certain_tokens(request: Request) -> int:
    """Return how many tokens of a request are computed and known: vLLM counts drafts and placeholders as computed."""
    return min(request.num_computed_tokens, len(request._all_token_ids))
