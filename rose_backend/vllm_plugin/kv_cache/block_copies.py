"""Copies of whole blocks in models whose layers keep states of another size than K/V."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def wrap_copy_kv_cache_blocks(original: Callable[..., None]) -> Callable[..., None]:
    """Build the replacement of ``copy_kv_cache_blocks_inplace``; see the patch ledger.

    Groups share blocks, so layers of several groups begin at one address, and vLLM copies each address once.
    """

    @functools.wraps(original)
    def copy_kv_cache_blocks_inplace(
        kv_caches: Iterable[torch.Tensor], num_blocks: int, kv_cache_block_copies: Sequence[Any]
    ) -> None:
        widest_first = sorted(kv_caches, key=lambda cache: cache.nbytes, reverse=True)
        original(widest_first, num_blocks, kv_cache_block_copies)

    return copy_kv_cache_blocks_inplace
