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
    if kv_cache.device.type == "cpu":
        sources, destinations = src_block_ids.tolist(), dst_block_ids.tolist()
        if set(sources).isdisjoint(destinations):
            # On a CPU torch's index operations move memory at a tenth of the speed of plain copies.
            for source, destination in zip(sources, destinations, strict=True):
                kv_cache.select(block_dim, destination).copy_(kv_cache.select(block_dim, source))
            return
    # The gather is complete before the first store, so a destination may be another pair's source.
    content = kv_cache.index_select(block_dim, src_block_ids)
    kv_cache.index_copy_(block_dim, dst_block_ids.to(torch.int64), content)
