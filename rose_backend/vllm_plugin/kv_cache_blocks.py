"""The small objects that vLLM's scheduler passes through, backed by arrays of block ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rose_backend.block_manager import ClonePlan, PrefixMatch
from rose_backend.errors import IntegrityError

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class BlockHandle:
    """What vLLM code may ask about one block."""

    block_id: int
    block_hash: None = None
    ref_cnt: int = 1

    @property
    def is_null(self) -> bool:
        """Whether this is the block that is never handed out."""
        return self.block_id == 0


class RoseBlocks:
    """Stands for vLLM's ``KVCacheBlocks`` with one group: block ids as an array, objects only for who asks.

    Args:
        block_ids: int32 ``[N]``, owned by this object.
        match: the lookup these blocks are the answer of, if they are one.
    """

    __slots__ = ("block_ids", "match")

    def __init__(self, block_ids: NDArray[Any], match: PrefixMatch | None = None) -> None:
        self.block_ids = block_ids
        self.match = match

    @property
    def blocks(self) -> tuple[list[BlockHandle]]:
        """One list of handles, as vLLM's own class has them."""
        return ([BlockHandle(block_id) for block_id in self.block_ids.tolist()],)

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Return one list of ids per group; None for no blocks if ``allow_none``."""
        if allow_none and not len(self.block_ids):
            return None
        return (self.block_ids.tolist(),) * (1 if group_ids is None else len(group_ids))

    def new_empty(self) -> RoseBlocks:
        """Return blocks of none."""
        return RoseBlocks(self.block_ids[:0])


@dataclass(frozen=True, slots=True, eq=False)
class HeldClonePlan:
    """Sources of copies. vLLM hands it back once the step that copies is on its way."""

    plan: ClonePlan


@dataclass(frozen=True, slots=True, eq=False)
class HeldRow:
    """A finished request's row that vLLM wants freed later."""

    row: int


class BlockPoolShim:
    """``manager.block_pool`` as far as the scheduler uses it.

    Args:
        finish_clone_plan: lets go of a plan's sources.
        free_row: frees a row.
    """

    def __init__(
        self, finish_clone_plan: Callable[[ClonePlan], None], free_row: Callable[[int], None]
    ) -> None:
        self._finish_clone_plan = finish_clone_plan
        self._free_row = free_row

    def free_blocks(self, ordered_blocks: Any) -> None:
        """Take back what ``take_kv_cache_block_copies`` or ``pop_blocks_for_free`` gave out."""
        for held in ordered_blocks:
            if isinstance(held, HeldClonePlan):
                self._finish_clone_plan(held.plan)
            elif isinstance(held, HeldRow):
                self._free_row(held.row)
            else:
                raise IntegrityError(
                    f"free_blocks: got {type(held).__name__}, which Rose's manager never gave out"
                )


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
