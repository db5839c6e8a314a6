"""Small objects of vLLM's block manager interface, backed by arrays of block ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rose_backend.block_manager import PrefixMatch
from rose_backend.errors import IntegrityError

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class BlockHandle:
    """The attributes of one block that vLLM's code reads."""

    block_id: int
    block_hash: bytes | None = None
    """Not None for a full block whose K/V was there before: connectors load the others only."""
    ref_cnt: int = 1

    @property
    def is_null(self) -> bool:
        """Whether this is the null block, which is never allocated."""
        return self.block_id == 0


@dataclass(slots=True, eq=False)
class RoseBlocks:
    """Replaces vLLM's ``KVCacheBlocks`` with one group: block ids as an array, handle objects only on request."""

    block_ids: NDArray[Any]
    """int32 ``[N]``, owned by this object."""
    match: PrefixMatch | None = None
    """The lookup that returned these blocks, if any."""
    num_cached: int = 0
    """Full blocks at the beginning whose K/V is committed."""

    @property
    def blocks(self) -> tuple[list[BlockHandle]]:
        """One list of handles, as vLLM's own class has them."""
        ids = enumerate(self.block_ids.tolist())
        return ([BlockHandle(each, b"cached" if index < self.num_cached else None) for index, each in ids],)

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Return one list of ids per group; None for no blocks if ``allow_none``."""
        if allow_none and not len(self.block_ids):
            return None
        return (self.block_ids.tolist(),) * (1 if group_ids is None else len(group_ids))

    def get_unhashed_block_ids(self) -> list[int]:
        """Return the ids of the blocks behind the full, committed ones."""
        ids: list[int] = self.block_ids[self.num_cached :].tolist()
        return ids

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Return ``get_unhashed_block_ids`` of the only group."""
        return [self.get_unhashed_block_ids()]

    def new_empty(self) -> RoseBlocks:
        """Return an empty object of this kind."""
        return RoseBlocks(self.block_ids[:0])


@dataclass(frozen=True, slots=True, eq=False)
class HeldBlocks:
    """Blocks that stay referenced until vLLM returns this object to ``BlockPoolShim.free_blocks``."""

    release: Callable[[], None]


class BlockPoolShim:
    """``manager.block_pool`` as far as the scheduler uses it."""

    def free_blocks(self, ordered_blocks: Any) -> None:
        """Release objects returned by ``take_kv_cache_block_copies`` or ``pop_blocks_for_free``."""
        for held in ordered_blocks:
            if not isinstance(held, HeldBlocks):
                raise IntegrityError(
                    f"free_blocks: got {type(held).__name__}, which Rose's manager never gave out"
                )
            held.release()


@dataclass(frozen=True, slots=True)
class GroupShim:
    """``coordinator.single_type_managers[0]``: what the scheduler and the engine core read at start-up."""

    block_size: int
    kv_cache_spec: Any
    block_pool: BlockPoolShim
    kv_cache_group_id: int = 0


class CoordinatorShim:
    """``manager.coordinator``: one group of full attention."""

    enable_partial_hash_hits = False
    """vLLM's name for hits below its hash granularity in hybrid models; Rose's hits need no finer hashes."""
    full_attention_group_id = 0
    eagle_group_ids: frozenset[int] = frozenset()

    def __init__(self, group: GroupShim, num_row_blocks: Callable[[str], int]) -> None:
        self.single_type_managers = (group,)
        self.block_pool = group.block_pool
        self._num_row_blocks = num_row_blocks

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        """Return how many more blocks a request needs to hold ``num_tokens``."""
        wanted = -(-num_tokens // self.single_type_managers[0].block_size)
        return max(wanted - self._num_row_blocks(request_id), 0)
