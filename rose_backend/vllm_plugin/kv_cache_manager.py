"""Rose's block manager behind the interface of vLLM's ``KVCacheManager``.

vLLM counts a token as computed when it schedules it; Rose publishes it only when the step that writes it is behind us.
So this adapter commits late: nothing per step, and the frontier of all running requests at once when somebody looks
something up, or a request's own when it leaves. Between two lookups a decoding request costs one comparison per step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.request import Request, RequestStatus

from rose_backend.block_manager import BlockManager, PrefixMatch
from rose_backend.errors import ConfigError, IntegrityError
from rose_backend.vllm_plugin.kv_cache_blocks import (
    BlockPoolShim,
    CoordinatorShim,
    GroupShim,
    HeldRow,
    RoseBlocks,
)
from rose_backend.vllm_plugin.kv_cache_facade import KVCacheFacade
from rose_backend.vllm_plugin.kv_cache_spec import is_rose_group
from rose_backend.vllm_plugin.options import HAND_BACK_OPTION
from rose_backend.vllm_plugin.refusals import check_pool_size

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class RoseKVCacheManager(KVCacheFacade):
    """One row of the block manager per request that holds blocks.

    Invariants: a request's table is only ever appended to between admission and ``free`` (vLLM's runners rely on it),
    and ``allocate_slots`` that returns None has changed nothing.

    Args:
        max_num_seqs: requests that may hold blocks at once.
        kv_cache_config, max_model_len, enable_caching, log_stats, watermark: as vLLM's scheduler passes them.
        unused: what only features need that are refused at start-up.

    Raises:
        ConfigError: the model has KV cache groups that are not plain ROSE attention, or the pool is too small.
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
        **unused: Any,
    ) -> None:
        _check_groups(kv_cache_config)
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        check_pool_size(kv_cache_config.num_blocks, spec.block_size, max_model_len)
        manager = BlockManager(
            num_blocks=kv_cache_config.num_blocks,
            block_size=spec.block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            prefix_cache=enable_caching,
        )
        super().__init__(manager, enable_caching=enable_caching, log_stats=log_stats)
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.block_pool = BlockPoolShim(manager.finish_clone_plan, self._free_row)
        group = GroupShim(self.block_size, spec, self.block_pool)
        self.coordinator = CoordinatorShim(group, self._num_row_blocks)
        self._requests: dict[int, Request] = {}
        # Tokens each row can hold as it is. A plain list: one lookup per request and step is all that a decode costs.
        self._capacity = [0] * max_num_seqs
        self._is_flushed = False

    # Lookup and admission

    def new_step_starts(self) -> None:
        """Note that what was scheduled before now belongs to earlier steps."""
        self._is_flushed = False

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[Any, int, int]:
        """Return the longest cached prefix, to the token: blocks, number of tokens, and 0 (no sparse groups)."""
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        self._flush()
        token_ids = np.array(request._all_token_ids, np.int32)
        match = self.manager.match(token_ids, namespace=_namespace(request), max_tokens=max_cache_hit_length)
        if match.num_tokens == 0:
            return self.empty_kv_cache_blocks, 0, 0
        return RoseBlocks(match.block_ids, match), match.num_tokens, 0

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
            The blocks that are new to vLLM (a running request's appended ones), or None when they are short; then
            nothing has changed.
        """
        row = self._row_of.get(request.request_id)
        if row is not None:
            target = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
            if target <= self._capacity[row]:
                return self.empty_kv_cache_blocks
            return self._extend(row, target, reserved_blocks)
        if num_external_computed_tokens or num_encoder_tokens or num_lookahead_tokens:
            raise IntegrityError("allocate_slots: a feature that is refused at start-up asks for blocks")
        token_ids = np.array(request._all_token_ids, np.int32)
        match = getattr(new_computed_blocks, "match", None)
        if match is None or match.num_tokens != num_new_computed_tokens:
            match = self.manager.match(
                token_ids, namespace=_namespace(request), max_tokens=num_new_computed_tokens
            )
        num_tokens = num_new_computed_tokens + num_new_tokens
        watermark = self.watermark_blocks if has_scheduled_reqs and _is_waiting(request) else 0
        num_full = min(request.num_tokens, self.max_model_len) if full_sequence_must_fit else num_tokens
        if not self._fits(match, num_tokens, num_full, watermark, reserved_blocks):
            return None
        return self._admit(request, token_ids, match, num_tokens)

    def _fits(
        self, match: PrefixMatch, num_tokens: int, num_full_tokens: int, watermark: int, reserved_blocks: int
    ) -> bool:
        free = self.manager.num_free_blocks - watermark
        if self.manager.blocks_needed(match, num_tokens) > free - reserved_blocks:
            return False
        return num_full_tokens <= num_tokens or self.manager.blocks_needed(match, num_full_tokens) <= free

    def _admit(self, request: Request, token_ids: Any, match: PrefixMatch, num_tokens: int) -> Any:
        admission = self.manager.add(token_ids, namespace=_namespace(request), match=match)
        if admission is None:
            return None
        row = admission.row
        # Had the cache changed since the lookup, vLLM would have been told another length: try again next step.
        if admission.num_cached_tokens != match.num_tokens or not self._reserve(row, num_tokens):
            self._free_row(row)
            return None
        self._row_of[request.request_id] = row
        self._requests[row] = request
        return self.get_blocks(request.request_id)

    def _extend(self, row: int, target: int, reserved_blocks: int) -> Any:
        target = min(target, self.max_model_len)
        old_count = int(self.manager.num_row_blocks[row])
        needed = -(-target // self.block_size) - old_count
        if needed > self.manager.num_free_blocks - reserved_blocks:
            return None
        if not self._reserve(row, target):
            return None
        new_count = int(self.manager.num_row_blocks[row])
        return RoseBlocks(self.manager.block_table[row, old_count:new_count].copy())

    def _reserve(self, row: int, target: int) -> bool:
        # To the end of the last block: the same blocks, and the steps inside it need no further call.
        target = min(-(-target // self.block_size) * self.block_size, self.max_model_len)
        num_tokens = target - int(self.manager.num_computed_tokens[row])
        if not self.manager.reserve(np.array([row]), num_tokens).ok:
            return False
        self._capacity[row] = target
        return True

    # Publishing and freeing

    def _flush(self) -> None:
        """Commit what earlier steps have written for all running requests, once per step."""
        if not self._is_flushed:
            self._is_flushed = True
            self._commit(list(self._requests))

    def _commit(self, rows: list[int]) -> None:
        if not rows or not self.enable_caching:
            return
        row_array = np.array(rows)
        starts = self.manager.num_computed_tokens[row_array].tolist()
        counts: list[int] = []
        token_ids: list[int] = []
        for row, start in zip(rows, starts, strict=True):
            request = self._requests[row]
            # Tokens that are still placeholders (asynchronous scheduling) have no id yet.
            end = min(request.num_computed_tokens, request.num_tokens)
            counts.append(max(end - start, 0))
            token_ids.extend(request._all_token_ids[start:end])
        self.manager.commit(row_array, np.array(counts), np.array(token_ids, np.int32))

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
        row = self._row_of.pop(request.request_id, None)
        if row is not None:
            self._commit([row])
            del self._requests[row]
            self._capacity[row] = 0
        return row

    def _free_row(self, row: int) -> None:
        self.manager.free(np.array([row]))

    def _num_row_blocks(self, request_id: str) -> int:
        row = self._row_of.get(request_id)
        return 0 if row is None else int(self.manager.num_row_blocks[row])


def _namespace(request: Request) -> bytes:
    """Return what keeps tenants and adapters apart in the prefix cache."""
    adapter = request.lora_request.lora_name if request.lora_request is not None else None
    if adapter is None and request.cache_salt is None:
        return b""
    return repr((adapter, request.cache_salt)).encode()


def _is_waiting(request: Request) -> bool:
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def _check_groups(kv_cache_config: KVCacheConfig) -> None:
    groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(groups) != 1 or not is_rose_group(groups[0]):
        kinds = ", ".join(type(spec).__name__ for spec in groups) or "none"
        raise ConfigError(
            f"Rose's block manager serves one KV cache group of full ROSE attention, this model has {kinds}; "
            f"{HAND_BACK_OPTION} gives block management back to vLLM"
        )
