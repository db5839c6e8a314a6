"""How many KV blocks there are, and the tensor that holds them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rose_backend.config import EngineConfig
from rose_backend.errors import ConfigError

_GIB = 1 << 30
_GPU_SLACK_BYTES = 256 << 20
"""Library workspaces, kernels, graphs themselves, and what the caching allocator cannot reuse."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token's K/V takes, and the shape of the pool around it."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers, keys and values."""
        return self.num_layers * 2 * block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize


def choose_num_blocks(
    config: EngineConfig,
    shape: KVShape,
    *,
    max_model_len: int,
    vocab_size: int,
    width: int,
    device: torch.device,
) -> int:
    """Return the number of KV blocks, the null block included.

    ``config.num_blocks`` decides when given. Otherwise as many as memory allows, but never more than ``max_num_seqs``
    sequences of full length can use: on a CPU ``cpu_kvcache_space_gib`` is the limit, on a GPU what
    ``gpu_memory_utilization`` leaves after the weights and ``gpu_reserve_bytes``.

    Args:
        max_model_len: prompt plus output, in tokens.
        width: of the hidden state (E).

    Raises:
        ConfigError: the pool cannot hold one sequence of ``max_model_len``.
    """
    blocks_per_sequence = -(-max_model_len // config.block_size)
    num_needed = blocks_per_sequence + 1
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
        origin = "num_blocks"
        remedy = f"raise num_blocks to at least {num_needed} or lower max_model_len"
    else:
        budget, origin = _memory_budget(
            config, vocab_size=vocab_size, width=width, shape=shape, device=device
        )
        num_blocks = budget // shape.block_bytes(config.block_size)
        remedy = f"raise {origin} or lower max_model_len"
    if num_blocks < num_needed:
        raise ConfigError(
            f"{origin}: a pool of {num_blocks} blocks of {config.block_size} tokens can never hold one sequence of "
            f"max_model_len {max_model_len}, which needs num_blocks {num_needed} (the null block included); {remedy}"
        )
    if config.num_blocks is not None:
        return num_blocks
    return min(num_blocks, config.max_num_seqs * blocks_per_sequence + 1)


def gpu_reserve_bytes(config: EngineConfig, *, vocab_size: int, width: int, shape: KVShape) -> int:
    """Return an upper estimate of what the largest step takes beside weights and KV pool.

    Hidden states of ``max_num_batched_tokens`` tokens: residual, normed, QKV (3E), attention out, MLP (4E), one spare;
    twice, because captured passes keep their own. Logits of ``max_num_seqs`` rows, 24 bytes each: float32 raw, scaled
    and sorted, and int64 indices; and float32 once more for captured steps. Prompt masks and output counts for
    penalties, 5 bytes per row and token of the vocabulary, and as much again for those of one step. Plus 256 MiB.
    """
    hidden = 2 * config.token_budget * width * 11 * shape.dtype.itemsize
    num_rows = min(config.max_num_seqs, config.token_budget)
    logits = num_rows * vocab_size * 24
    penalties = (config.max_num_seqs + num_rows) * vocab_size * 5
    return hidden + logits + penalties + _GPU_SLACK_BYTES


def allocate_kv_cache(num_blocks: int, block_size: int, shape: KVShape, device: torch.device) -> torch.Tensor:
    """Return the zeroed pool ``[L, 2, NB, BS, H, D]``.

    Zeroed because attention multiplies masked positions by zero, and uninitialised memory may hold NaN.
    """
    size = (shape.num_layers, 2, num_blocks, block_size, shape.num_kv_heads, shape.head_size)
    if device.type != "cpu":
        return torch.zeros(size, dtype=shape.dtype, device=device)
    # NumPy's zeros are pages that the system provides on first use; torch.zeros would touch the whole pool now.
    raw = np.zeros(num_blocks * shape.block_bytes(block_size), np.uint8)
    return torch.from_numpy(raw).view(shape.dtype).view(size)


def _memory_budget(
    config: EngineConfig, *, vocab_size: int, width: int, shape: KVShape, device: torch.device
) -> tuple[int, str]:
    if device.type == "cpu":
        return int(config.cpu_kvcache_space_gib * _GIB), "cpu_kvcache_space_gib"
    # What an earlier engine of this process has left behind is free.
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    reserve = gpu_reserve_bytes(config, vocab_size=vocab_size, width=width, shape=shape)
    return max(int(total * config.gpu_memory_utilization) - used - reserve, 0), "gpu_memory_utilization"
