"""KV block bookkeeping in arrays: who holds which block, who may write it, what can be shared.

Start reading at ``README.md`` in this folder. Knows nothing of torch, Triton or vLLM.
"""

from rose_backend.block_manager.admission import Admission
from rose_backend.block_manager.block_manager import BlockManager
from rose_backend.block_manager.block_pool import NULL_BLOCK, BlockPool
from rose_backend.block_manager.cache_events import BlockRemoved, BlockStored, CacheCleared, CacheEvent
from rose_backend.block_manager.cache_stats import CacheStats, reporting_unit
from rose_backend.block_manager.clone_queue import ClonePlan
from rose_backend.block_manager.prefix_cache import PrefixCache, PrefixMatch
from rose_backend.block_manager.prefixes_under_way import PrefixesUnderWay
from rose_backend.block_manager.reservation import Reservation

__all__ = [
    "NULL_BLOCK",
    "Admission",
    "BlockManager",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "CacheCleared",
    "CacheEvent",
    "CacheStats",
    "ClonePlan",
    "PrefixCache",
    "PrefixMatch",
    "PrefixesUnderWay",
    "Reservation",
    "reporting_unit",
]
