"""The part of vLLM's ``KVCacheManager`` interface that allocates nothing: readouts, statistics, unused methods."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.metrics.stats import PrefixCacheStats

from rose_backend.block_manager import BlockManager, PrefixMatch, reporting_unit
from rose_backend.errors import IntegrityError
from rose_backend.vllm_plugin.kv_cache.blocks import HeldBlocks, RoseBlocks
from rose_backend.vllm_plugin.plugin_logger import logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from vllm.v1.request import Request

    from rose_backend.vllm_plugin.kv_cache.groups import RoseGroups
    from rose_backend.vllm_plugin.kv_cache.running_requests import RunningRequests

_LOG_INTERVAL_S = 10.0


class KVCacheFacade:
    """Base of ``RoseKVCacheManager``.

    Args:
        manager: keeps the blocks.
        groups: of the model, in vLLM's order.
        enable_caching: whether requests may use each other's blocks.
        log_stats: whether vLLM will ask for prefix cache statistics.
        exact_cached_tokens: report every cached token; otherwise multiples of ``reporting_unit``.
    """

    mamba_shared_prefix_checkpoint = False
    running: RunningRequests

    def __init__(
        self,
        manager: BlockManager,
        groups: RoseGroups,
        enable_caching: bool,
        log_stats: bool,
        exact_cached_tokens: bool,
    ) -> None:
        self._manager = manager
        self._ended: list[tuple[int, Request, int, bool]] = []
        """Rows of requests that have ended, with the tokens that they had computed, and whether their states are kept:
        released all at once, soon."""
        self.block_size = manager.block_size
        self.enable_caching = enable_caching
        self.log_stats = log_stats
        self._hit_unit = 1 if exact_cached_tokens else reporting_unit(manager.block_size)
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self.empty_kv_cache_blocks = KVCacheBlocks(((),) * len(groups))
        self._row_of: dict[str, int] = {}
        self._last_log = float("-inf")

    # Read

    @property
    def manager(self) -> BlockManager:
        """Rose's block manager, without the requests that have ended."""
        if self._ended:
            self._release_ended()
        return self._manager

    def _release_ended(self) -> None:
        raise NotImplementedError

    @property
    def num_kv_cache_groups(self) -> int:
        """Groups of the model."""
        return len(self.running.groups)

    @property
    def has_states(self) -> bool:
        """Whether layers of the model keep states."""
        return self.running.groups.has_states

    @property
    def usage(self) -> float:
        """Share of the pool in use, 0 to 1."""
        return self.manager.usage

    def get_blocks(self, request_id: str) -> Any:
        """Return all blocks of a request, without those allocated ahead: ``allocate_slots`` will return them as new."""
        row = self._row_of.get(request_id)
        if row is None:
            return self.empty_kv_cache_blocks
        manager = self.manager
        num_cached = int(manager.num_computed_tokens[row]) // self.block_size
        num_reported = self.running.num_reported[row]
        return RoseBlocks(self.running.groups.blocks_of(manager, row, 0, num_reported), num_cached=num_cached)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the ids of all blocks of a request, of each group."""
        ids: tuple[list[int], ...] = self.get_blocks(request_id).get_block_ids()
        return ids

    def get_decode_rows(self, requests: Sequence[Request]) -> NDArray[Any]:
        """Return the row of each running request, int64 ``[N]``, for ``running``."""
        return np.array([self._row_of[request.request_id] for request in requests], np.int64)

    def truncate_computed_blocks(self, blocks: Any, num_computed_tokens: int) -> Any:
        """Return the first blocks of a hit, up to ``num_computed_tokens``, a multiple of the block size.

        A connector is asked for what lies behind full blocks; if it has more than the last, partial one holds, that one
        is not used.
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

    def get_block_ids_for_computed_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[list[int], ...]:
        """Return the ids of the blocks that hold the first ``num_computed_tokens``."""
        num_blocks = -(-num_computed_tokens // self.block_size)
        return tuple(block_ids[:num_blocks] for block_ids in self.get_block_ids(request_id))

    def estimate_cached_tokens(self, request: Request) -> int:
        """Return how many of a request's tokens later requests can reuse."""
        return min(request.num_computed_tokens, request.num_tokens) if self.enable_caching else 0

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Forget blocks of requests whose load failed: lookups no longer find them."""
        self.manager.uncache(np.array(sorted(block_ids), np.int64))

    def _num_blocks_to_grow(self, request_id: str, num_tokens: int) -> int:
        return self.manager.blocks_to_grow(self._row_of.get(request_id), num_tokens, self.running.num_at_once)

    def create_kv_cache_blocks(self, blocks: Any) -> Any:
        """Return vLLM's own container for blocks, the shared empty one for none."""
        return KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks

    # Prefix cache statistics

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

    # Copy-on-write

    def take_kv_cache_block_copies(self) -> tuple[list[KVCacheBlockCopy], list[Any]]:
        """Return the copies that must run before this step's forward pass, and what to free after them."""
        plan = self.manager.take_clone_plan()
        if plan is None:
            return [], []
        self._log_counters()
        pairs = zip(plan.src_block_ids.tolist(), plan.dst_block_ids.tolist(), strict=True)
        held = HeldBlocks(functools.partial(self.manager.finish_clone_plan, plan))
        return [KVCacheBlockCopy(src, dst) for src, dst in pairs], [held]

    def _log_counters(self) -> None:
        now = time.monotonic()
        if now - self._last_log >= _LOG_INTERVAL_S:
            self._last_log = now
            counters = ", ".join(f"{name} {count}" for name, count in self.manager.stats.as_dict().items())
            logger.info("Rose block manager since start-up: %s", counters)

    # Called every step

    def take_new_block_ids(self) -> list[int]:
        """Return the blocks to zero: with states, all that were allocated for K/V; none otherwise.

        What a state has left in a block may read as NaN, and attention multiplies what it masks by 0.
        """
        return self.manager.pool.take_new_kv_blocks().tolist() if self.has_states else []

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """Return no Mamba states."""
        return {}

    def finalize_partial_tail_offloads(self, request: Request) -> list[tuple[int, int, int]]:
        """Return no Mamba states."""
        return []

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Return zeros, as vLLM itself does since cascade attention is gone."""
        return [0] * len(self.running.groups)

    def remove_skipped_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: what windows have passed is released before more is allocated."""

    def record_blocks_for_zeroing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: attention never reads what was not written."""
