"""vLLM's KV cache groups as the group types of Rose's block manager, and its blocks as objects of vLLM's interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from rose_backend.block_manager import NULL_BLOCK, BlockManager, GroupType, PrefixMatch
from rose_backend.errors import ConfigError, IntegrityError
from rose_backend.vllm_plugin.kv_cache.spec import is_rose_group
from rose_backend.vllm_plugin.options import HAND_BACK_OPTION


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
        """Return an empty object of this class."""
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
class RoseGroups:
    """The KV cache groups of a model that Rose's block manager serves."""

    specs: tuple[Any, ...]
    """Of each group, in vLLM's order."""
    group_types: tuple[GroupType, ...]
    places: tuple[tuple[int, int], ...]
    """Of each group its type, and its place among the groups of this type."""
    block_size: int
    block_bytes: int
    """Of one block over all layers of its group, keys and values, on one worker; the same for all groups."""

    @classmethod
    def of(cls, kv_cache_config: KVCacheConfig) -> RoseGroups:
        """Return the KV cache groups of a model that Rose's block manager supports.

        Raises:
            ConfigError: names what the model has instead.
        """
        groups = kv_cache_config.kv_cache_groups
        specs = tuple(group.kv_cache_spec for group in groups)
        types = [each for each in map(_group_type_of, specs) if each is not None]
        block_sizes = {spec.block_size for spec in specs}
        if GroupType() not in types or len(types) < len(specs) or len(block_sizes) > 1:
            described = ", ".join(map(_describe, specs)) or "none"
            raise ConfigError(
                "Rose's block manager serves KV cache groups of full ROSE attention, and beside them, with the same "
                "block size, groups of sliding windows and of states that workers neither speculate on nor keep "
                f"themselves (mamba_cache_mode align); this model has {described} with block sizes "
                f"{sorted(block_sizes)}; {HAND_BACK_OPTION} gives block management back to vLLM"
            )
        # The type that keeps everything comes first, states last.
        distinct = sorted(set(types), key=lambda each: (each.is_state, each.window or 0))
        return cls(
            specs=specs,
            group_types=tuple(replace(each, num_groups=types.count(each)) for each in distinct),
            places=tuple(
                (distinct.index(each), types[:index].count(each)) for index, each in enumerate(types)
            ),
            block_size=specs[0].block_size,
            block_bytes=block_bytes(groups[0]),
        )

    def __len__(self) -> int:
        return len(self.places)

    def coordinator(
        self, block_pool: BlockPoolShim, num_blocks_to_grow: Callable[..., int]
    ) -> SimpleNamespace:
        """Return what the scheduler and the engine core read of ``manager.coordinator``.

        Args:
            block_pool: of all groups.
            num_blocks_to_grow: returns how many more blocks a request takes to hold a number of tokens.
        """
        return SimpleNamespace(
            block_pool=block_pool,
            single_type_managers=tuple(
                SimpleNamespace(
                    block_size=self.block_size,
                    kv_cache_spec=spec,
                    block_pool=block_pool,
                    kv_cache_group_id=index,
                )
                for index, spec in enumerate(self.specs)
            ),
            # The first one, in vLLM's order, of layers that keep everything.
            full_attention_group_id=[group_type for group_type, _ in self.places].index(0),
            get_num_blocks_to_allocate=num_blocks_to_grow,
            # vLLM's name for hits below its hash granularity in hybrid models; Rose's hits need no finer hashes.
            enable_partial_hash_hits=False,
            eagle_group_ids=frozenset(),
        )

    @property
    def has_windows(self) -> bool:
        """Whether there are groups with sliding windows."""
        return any(each.window is not None for each in self.group_types)

    @property
    def has_states(self) -> bool:
        """Whether there are groups of layers that keep a state, the last group type."""
        return self.group_types[-1].is_state

    def check_pool_size(self, num_blocks: int, max_model_len: int, num_at_once: int) -> None:
        """Refuse a pool that can never hold one sequence of the longest length.

        Args:
            num_at_once: tokens of a request in flight at most; windows hold them beside those that they reach.

        Raises:
            ConfigError: names both numbers.
        """
        # Block 0 is the null block.
        usable, num_columns = num_blocks - 1, -(-max_model_len // self.block_size)
        needed = sum(
            # Of states a running one, and the checkpoint that it is copied from.
            each.num_groups
            * (2 if each.is_state else min(each.most_columns(num_at_once, self.block_size), num_columns))
            for each in self.group_types
        )
        if usable < needed:
            raise ConfigError(
                f"KV cache pool: {usable} usable blocks of {self.block_size} tokens cannot hold one sequence of "
                f"max_model_len {max_model_len} ({needed} blocks); give it more memory or blocks, or lower "
                "--max-model-len"
            )

    def in_order(self, by_type: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], ...]:
        """Return one array per group, in vLLM's order, of ``[groups of the type, N]`` per group type."""
        return tuple(by_type[group_type][place] for group_type, place in self.places)

    def blocks_of(self, manager: BlockManager, row: int, start: int, stop: int) -> tuple[NDArray[Any], ...]:
        """Return the blocks of a row in columns ``start`` to ``stop``, int32 ``[N]`` for each group.

        Of a group with states it is the running state's block in every column: vLLM's workers take the state from one
        column and write it to another as a row grows, and both are then the same.
        """
        if len(self.places) == 1:
            return (manager.block_table[row, start:stop].copy(),)
        by_type = manager.group_block_ids(row, slice(start, stop))
        if manager.states is not None:
            by_type.append(np.repeat(manager.states.blocks_of(np.array([row])), stop - start, axis=1))
        return self.in_order(by_type)

    def blocks_at(self, manager: BlockManager, rows: NDArray[Any], columns: NDArray[Any]) -> tuple[Any, ...]:
        """Return the blocks of rows in one column each, int32 ``[N]`` for each group."""
        by_type = manager.group_block_ids(rows, columns)
        if manager.states is not None:
            by_type.append(manager.states.blocks_of(rows))
        return self.in_order(by_type)

    def blocks_of_match(self, manager: BlockManager, match: PrefixMatch) -> tuple[NDArray[Any], ...]:
        """Return the blocks of a match, int32 ``[N]`` for each group; the null block where its window has passed.

        Of a group with states it is the null block: a checkpoint is nobody's block, a row gets a copy.
        """
        if len(self.places) == 1:
            return (match.block_ids,)
        by_type = []
        blocks = match.blocks_of_group_types(len(self.group_types) - 1 - self.has_states)
        if self.has_states:
            blocks.append(match.block_ids[:0])
        for group_type, block_ids in zip(self.group_types, blocks, strict=True):
            passed = np.full(len(match.block_ids) - len(block_ids), NULL_BLOCK, np.int32)
            with_passed = np.concatenate((passed, block_ids))
            by_type.append(manager.pool.blocks_of_groups(with_passed, group_type.num_groups))
        return self.in_order(by_type)


def _group_type_of(spec: Any) -> GroupType | None:
    """Return the group type of one group, or None if Rose's block manager does not serve it."""
    if type(spec) is SlidingWindowSpec and not spec.extra_retained_tokens:
        return GroupType(int(spec.sliding_window))
    if isinstance(spec, MambaSpec):
        # A worker that keeps states inside a prompt itself writes them to columns that it expects to be others.
        is_served = spec.mamba_cache_mode == "align" and not spec.num_speculative_blocks
        return GroupType(is_state=True) if is_served and not spec.num_prefill_checkpoint_blocks else None
    return GroupType() if is_rose_group(spec) else None


def _describe(spec: Any) -> str:
    name = type(spec).__name__
    if not isinstance(spec, MambaSpec):
        return name
    return (
        f"{name} ({spec.mamba_type.name}, {spec.mamba_cache_mode}, {spec.num_speculative_blocks} speculative and "
        f"{spec.num_prefill_checkpoint_blocks} checkpoint blocks)"
    )


def block_bytes(group: KVCacheGroupSpec) -> int:
    """Return the bytes of one block over all layers of a group, keys and values, on one worker."""
    spec = group.kv_cache_spec
    num_layers = 1 if isinstance(spec, UniformTypeKVCacheSpecs) else len(group.layer_names)
    return num_layers * int(spec.page_size_bytes)
