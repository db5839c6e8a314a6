"""How many KV blocks there are, and the tensor that holds them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from rose_backend.config import EngineConfig
from rose_backend.engine.drafts import MAX_VERIFIED_TOKENS
from rose_backend.engine.prompt_logprobs import LOGITS_BYTES
from rose_backend.errors import ConfigError
from rose_backend.kernels.tuning.measured import constants
from rose_backend.models.config import ModelConfig
from rose_backend.models.eagle3 import Eagle3Head

_GIB = 1 << 30
_GPU_SLACK_BYTES = 256 << 20
"""Library workspaces, kernels, graphs themselves, and what the caching allocator cannot reuse."""
_HEAD_WIDTH = 16
"""In hidden sizes: three hidden states alone and side by side, what is combined of them, the embedding, both normed
alone and side by side, queries, keys and values."""
_PROCESSOR_BYTES = 26 << 10
"""Of a request slot; see ``ProcessorTables``."""


def cached_sizes(model: ModelConfig, head: Eagle3Head | None) -> ModelConfig:
    """Return the sizes of what the pool holds: the model's layers, and one of a head that makes drafts."""
    return model if head is None else replace(model, num_layers=model.num_layers + 1)


def block_bytes(model: ModelConfig, block_size: int) -> int:
    """Return the bytes of one block over all layers, keys and values."""
    return model.num_layers * 2 * block_size * model.num_kv_heads * model.head_size * model.dtype.itemsize


def choose_max_model_len(config: EngineConfig, window: int) -> int:
    """Return prompt plus output of the longest request, in tokens.

    Raises:
        ConfigError: more than the model's ``window`` was asked for.
    """
    max_model_len = window if config.max_model_len is None else config.max_model_len
    if max_model_len > window:
        raise ConfigError(
            f"max_model_len: got {max_model_len}, allowed are at most {window}, the model's window"
        )
    return max_model_len


def choose_num_blocks(
    config: EngineConfig, model: ModelConfig, *, max_model_len: int, device: torch.device
) -> int:
    """Return the number of KV blocks, the null block included.

    ``config.num_blocks`` decides when given. Otherwise as many as memory allows, but never more than ``max_num_seqs``
    sequences of full length can use: on a CPU ``cpu_kvcache_space_gib`` is the limit, on a GPU what
    ``gpu_memory_utilization`` leaves after the weights and ``gpu_reserve_bytes``.

    Args:
        max_model_len: prompt plus output, in tokens.

    Raises:
        ConfigError: the pool cannot hold one sequence of ``max_model_len``.
    """
    blocks_per_sequence = -(-max_model_len // config.block_size)
    num_needed = blocks_per_sequence + 1
    if config.num_blocks is not None:
        num_blocks, origin = config.num_blocks, "num_blocks"
        remedy = f"raise num_blocks to at least {num_needed} or lower max_model_len"
    else:
        budget, origin = _memory_budget(config, model, device)
        num_blocks = budget // block_bytes(model, config.block_size)
        remedy = f"raise {origin} or lower max_model_len"
    if num_blocks < num_needed:
        raise ConfigError(
            f"{origin}: a pool of {num_blocks} blocks of {config.block_size} tokens can never hold one sequence of "
            f"max_model_len {max_model_len}, which needs num_blocks {num_needed} (the null block included); {remedy}"
        )
    if config.num_blocks is not None:
        return num_blocks
    return min(num_blocks, config.max_num_seqs * blocks_per_sequence + 1)


def gpu_reserve_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Return an upper bound of what the largest step takes in addition to weights and KV pool.

    Activations of ``max_num_batched_tokens`` tokens twice, because captured passes keep their own. Logits, 24 bytes
    each: float32 raw, scaled, sorted and of captured steps, and int64 indices; at least those of two parts of a
    prompt whose log-probabilities are asked for. Prompt masks and output counts for
    penalties, 5 bytes per request slot and token of the vocabulary, and as much again for one step. With quantized
    weights, the part of one that is written in half precision, and another for prompts beside decodes. Of each request
    slot bitmasks of a grammar and of logits processors, and their tables; with drafts, its tokens, too. For a head that
    makes them ``_HEAD_WIDTH`` more activations of each token, and a hidden state of each request slot. Plus 256 MiB.
    """
    hidden = 2 * config.token_budget * model.activation_width * model.dtype.itemsize
    if config.drafts is not None and config.drafts.has_head:
        num_states = 2 * config.token_budget * _HEAD_WIDTH + config.max_num_seqs + 1
        hidden += num_states * model.hidden_size * model.dtype.itemsize
    num_rows, tokens = min(config.max_num_seqs, config.token_budget), 0
    if (drafts := config.drafts) is not None:
        num_verified = min(num_rows * (drafts.num_speculative_tokens + 1), MAX_VERIFIED_TOKENS)
        num_rows = max(num_rows, num_verified)
        tokens = (config.max_num_seqs + 1) * (config.max_model_len or model.max_position_embeddings) * 4
    of_prompts = min(config.token_budget * model.vocab_size * 4, LOGITS_BYTES)
    logits = max(num_rows * model.vocab_size * 24, 2 * of_prompts)
    penalties = (config.max_num_seqs + num_rows) * model.vocab_size * 5
    quantized = 2 * constants("quantized products")["bytes"] if model.quantization is not None else 0
    processors = config.max_num_seqs * (_PROCESSOR_BYTES + model.vocab_size // 4)
    return hidden + logits + penalties + quantized + processors + tokens + _GPU_SLACK_BYTES


def allocate_kv_cache(
    num_blocks: int, block_size: int, model: ModelConfig, device: torch.device
) -> torch.Tensor:
    """Return the zeroed pool ``[L, 2, NB, BS, HKV, D]``.

    Zeroed because attention multiplies masked positions by zero, and uninitialized memory may hold NaN.
    """
    size = (model.num_layers, 2, num_blocks, block_size, model.num_kv_heads, model.head_size)
    if device.type != "cpu":
        return torch.zeros(size, dtype=model.dtype, device=device)
    # NumPy's zeros are pages that the system provides on first use; torch.zeros would touch the whole pool now.
    raw = np.zeros(num_blocks * block_bytes(model, block_size), np.uint8)
    return torch.from_numpy(raw).view(model.dtype).view(size)


def _memory_budget(config: EngineConfig, model: ModelConfig, device: torch.device) -> tuple[int, str]:
    if device.type == "cpu":
        return int(config.cpu_kvcache_space_gib * _GIB), "cpu_kvcache_space_gib"
    # Memory that torch has cached after an earlier engine of this process is free.
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    reserve = gpu_reserve_bytes(config, model)
    return max(int(total * config.gpu_memory_utilization) - used - reserve, 0), "gpu_memory_utilization"
