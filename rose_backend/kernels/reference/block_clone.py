"""Copy KV blocks inside one cache tensor, in plain torch."""

from __future__ import annotations

import torch


def block_clone(
    kv_cache: torch.Tensor,
    src_block_ids: torch.Tensor,  # [N]
    dst_block_ids: torch.Tensor,  # [N]
    *,
    block_dim: int = 0,
) -> None:
    """Twin of ``rose_backend.kernels.block_clone``."""
    if src_block_ids.numel() == 0:
        return
    # The gather is complete before the first store, so a destination may be another pair's source.
    sources = kv_cache.index_select(block_dim, src_block_ids)
    kv_cache.index_copy_(block_dim, dst_block_ids.to(torch.int64), sources)
