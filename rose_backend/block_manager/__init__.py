"""KV block bookkeeping in arrays: which row holds and writes which block, and what the prefix cache finds.

Start reading at ``README.md`` in this folder. Imports NumPy only, no torch, Triton or vLLM.
"""

from rose_backend.block_manager.block_manager import AddedSequence, BlockManager
from rose_backend.block_manager.block_pool import NULL_BLOCK, ClonePlan
from rose_backend.block_manager.prefix_cache import (
    BlockRemoved,
    BlockStored,
    CacheCleared,
    CacheEvent,
    CacheStats,
    PrefixMatch,
    reporting_unit,
)
from rose_backend.block_manager.reservation import Reservation
from rose_backend.block_manager.sequence_table import GroupType

__all__ = [
    "NULL_BLOCK",
    "AddedSequence",
    "BlockManager",
    "BlockRemoved",
    "BlockStored",
    "CacheCleared",
    "CacheEvent",
    "CacheStats",
    "ClonePlan",
    "GroupType",
    "PrefixMatch",
    "Reservation",
    "reporting_unit",
]
