"""Small objects of vLLM's block manager interface, backed by arrays of block ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rose_backend.block_manager import PrefixMatch
from rose_backend.errors import IntegrityError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rose_backend.vllm_plugin.kv_cache.groups import RoseGroups


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
    """Replaces vLLM's ``KVCacheBlocks``: block ids as arrays, handle objects only on request."""

    group_block_ids: tuple[NDArray[Any], ...]
    """int32 ``[N]`` of each group, owned by this object; the null block where a window has passed."""
    match: PrefixMatch | None = None
    """The lookup that returned these blocks, if any."""
    num_cached: int = 0
    """Full blocks at the beginning whose K/V is committed."""

    @property
    def block_ids(self) -> NDArray[Any]:
        """Those of the first group."""
        return self.group_block_ids[0]

    @property
    def blocks(self) -> tuple[list[BlockHandle], ...]:
        """One list of handles per group, as vLLM's own class has them."""
        return tuple(
            [
                BlockHandle(block_id, b"cached" if index < self.num_cached else None)
                for index, block_id in enumerate(block_ids.tolist())
            ]
            for block_ids in self.group_block_ids
        )

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Return one list of ids per group; None for no blocks if ``allow_none``."""
        if allow_none and not len(self.block_ids):
            return None
        groups = self.group_block_ids
        if group_ids is not None:
            groups = tuple(groups[group] for group in group_ids)
        return tuple(block_ids.tolist() for block_ids in groups)

    def get_unhashed_block_ids(self) -> list[int]:
        """Return the ids of the first group's blocks after the full, committed ones."""
        return self.get_unhashed_block_ids_all_groups()[0]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Return the ids of the blocks after the full, committed ones, of each group."""
        return [block_ids[self.num_cached :].tolist() for block_ids in self.group_block_ids]

    def new_empty(self) -> RoseBlocks:
        """Return an empty object of this kind."""
        return RoseBlocks(tuple(block_ids[:0] for block_ids in self.group_block_ids))


@dataclass(frozen=True, slots=True, eq=False)
class HeldBlocks:
    """Blocks that stay referenced until vLLM returns this object to ``BlockPoolShim.free_blocks``."""

    release: Callable[[], None]


class BlockPoolShim:
    """The part of ``manager.block_pool`` that the scheduler uses."""

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
    """One of ``coordinator.single_type_managers``: what the scheduler and the engine core read at start-up."""

    block_size: int
    kv_cache_spec: Any
    block_pool: BlockPoolShim
    kv_cache_group_id: int = 0


class CoordinatorShim:
    """``manager.coordinator``.

    Args:
        groups: of the model.
        block_pool: of all groups.
        num_blocks_to_grow: returns how many more blocks a request takes to hold a number of tokens.
    """

    enable_partial_hash_hits = False
    """vLLM's name for hits below its hash granularity in hybrid models; Rose's hits need no finer hashes."""
    eagle_group_ids: frozenset[int] = frozenset()

    def __init__(
        self,
        groups: RoseGroups,
        block_pool: BlockPoolShim,
        num_blocks_to_grow: Callable[[str, int], int],
    ) -> None:
        self.block_pool = block_pool
        self.single_type_managers = tuple(
            GroupShim(groups.block_size, spec, block_pool, index) for index, spec in enumerate(groups.specs)
        )
        self.full_attention_group_id = groups.first_full
        self._num_blocks_to_grow = num_blocks_to_grow

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        """Return how many more blocks a request needs to hold ``num_tokens``."""
        return self._num_blocks_to_grow(request_id, num_tokens)
