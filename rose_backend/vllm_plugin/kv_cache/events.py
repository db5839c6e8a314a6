"""The block manager's events as vLLM's KV cache events, for routers that track which prefixes a server holds.

A block has the same hash here as under vLLM's own manager, so subscribers see no difference: digests of the
block manager are translated to the hashes that vLLM keeps with each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind
from vllm.v1.request import Request

from rose_backend.block_manager import BlockManager, prefix_cache
from rose_backend.errors import IntegrityError

_GROUP = 0


class KVEventLog:
    """Events since the last ``take``. Memory: the pending events and one hash per cached full block.

    Args:
        manager: records its events.
        kv_cache_spec: of the only group; its kind is part of an event.
    """

    def __init__(self, manager: BlockManager, kv_cache_spec: Any) -> None:
        self._manager = manager
        self._spec_kind = get_kv_cache_spec_kind(kv_cache_spec).value
        self._pending: list[KVCacheEvent] = []
        self._hash_of: dict[bytes, bytes | int] = {}
        """Digest -> vLLM's hash, of every announced block."""

    def collect(self, rows: Sequence[tuple[int, Request]] = (), starts: Sequence[int] = ()) -> None:
        """Translate what the block manager has recorded.

        Args:
            rows: rows that were just committed, with their requests; no other row can have stored blocks.
            starts: tokens that each of them had computed before.
        """
        events = self._manager.take_events()
        stores = any(isinstance(event, prefix_cache.BlockStored) for event in events)
        owners = self._owners_of_new_blocks(rows, starts) if stores else {}
        for event in events:
            if isinstance(event, prefix_cache.BlockStored):
                self._add_stored(event, owners)
            elif isinstance(event, prefix_cache.BlockRemoved):
                removed = [self._hash_of.pop(event.block_hash)]
                self._pending.append(BlockRemoved(block_hashes=removed, medium=MEDIUM_GPU, group_idx=_GROUP))
            else:
                self._hash_of.clear()
                self._pending.append(AllBlocksCleared())

    def report_reuse(self, request: Request, num_blocks: int) -> None:
        """Report the cached blocks of a request again, if it asks for it (``kv_cache_report_mode`` full)."""
        if num_blocks and getattr(request, "kv_cache_report_mode", "incremental") == "full":
            self._pending.append(self._stored(request, 0, num_blocks))

    def take(self) -> list[KVCacheEvent]:
        """Return the pending events, oldest first, and forget them."""
        self.collect()
        events, self._pending = self._pending, []
        return events

    def _owners_of_new_blocks(
        self, rows: Sequence[tuple[int, Request]], starts: Sequence[int]
    ) -> dict[int, tuple[Request, int]]:
        """Return block id -> (request, place in its table) for the blocks that the rows' new tokens filled."""
        size, table = self._manager.block_size, self._manager.block_table
        owners = {}
        for (row, request), start in zip(rows, starts, strict=True):
            end = int(self._manager.num_computed_tokens[row])
            for column in range(start // size, end // size):
                owners[int(table[row, column])] = request, column
        return owners

    def _add_stored(self, event: prefix_cache.BlockStored, owners: dict[int, tuple[Request, int]]) -> None:
        if event.block_id not in owners:
            raise IntegrityError(f"KV events: block {event.block_id} was stored by no committed row")
        request, column = owners[event.block_id]
        stored = self._stored(request, column, 1)
        self._hash_of[event.block_hash] = stored.block_hashes[0]
        last = self._pending[-1] if self._pending else None
        # As vLLM does: consecutive blocks of a request share one event.
        if (
            isinstance(last, BlockStored)
            and column
            and last.block_hashes[-1] == stored.parent_block_hash
            and last.session_id == stored.session_id
        ):
            last.block_hashes += stored.block_hashes
            last.token_ids += stored.token_ids
            if last.extra_keys is not None and stored.extra_keys is not None:
                last.extra_keys += stored.extra_keys
        else:
            self._pending.append(stored)

    def _stored(self, request: Request, first: int, count: int) -> BlockStored:
        """Build the event of ``count`` full blocks of a request, from place ``first`` of its table on."""
        size = self._manager.block_size
        hashes = request.block_hashes
        keys = [
            generate_block_hash_extra_keys(request, column * size, (column + 1) * size, 0)[0]
            for column in range(first, first + count)
        ]
        adapter = request.lora_request
        return BlockStored(
            block_hashes=list(map(maybe_convert_block_hash, hashes[first : first + count])),
            parent_block_hash=maybe_convert_block_hash(hashes[first - 1]) if first else None,
            token_ids=list(request._all_token_ids[first * size : (first + count) * size]),
            block_size=size,
            lora_id=adapter.adapter_id if adapter else None,
            medium=MEDIUM_GPU,
            lora_name=adapter.name if adapter else None,
            extra_keys=to_event_extra_keys(keys),
            group_idx=_GROUP,
            kv_cache_spec_kind=self._spec_kind,
            session_id=request.session_id,
        )
