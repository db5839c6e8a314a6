"""FlashAttention 3, which vLLM bundles, for prefill rows that it attends faster than Rose's kernel.

Only for compute capability 9.0, half precision and head size 128, in layers with plain causal attention, and outside
full CUDA graphs, whose kernels are chosen before the rows are known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.platforms import current_platform

from rose_backend.kernels import write_kv
from rose_backend.kernels.tuning.measured import Table, constants
from rose_backend.vllm_plugin.options import FLOAT8_DTYPES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

HEAD_SIZE = 128

_KEY_TILE = 128
"""Keys that FlashAttention 3 attends at once for this head size.

It loads blocks of a multiple of it whole (with the tensor memory accelerator), including what follows a request's last
token: a NaN there, which another request may have left, gets into the output (flash-attention issues 1745 and 2374).
Smaller blocks are loaded token by token, and tokens after the last one become zeros.
"""


class Threshold(NamedTuple):
    """FlashAttention 3 is faster from these numbers of tokens of a row on."""

    num_computed_tokens: int
    query_len: int


FASTER_FROM = tuple(Table("flash attention", Threshold).all())
"""Which rows FlashAttention 3 attends: those that reach any of these, the store of K/V counted on both sides."""

LAUNCHED_FROM = constants("launched prefill")["query_len"]
"""Tokens of a row, on average over a step, from which on the step takes no full graph but is launched kernel by kernel,
so that FlashAttention 3 can be chosen: launching takes the CPU as long as the device computes these tokens."""


@dataclass(slots=True)
class FlashRows:
    """The prefill rows of one step, as FlashAttention 3 takes them."""

    tokens: slice
    """Their tokens within the step."""
    block_table: torch.Tensor  # [R, MB] int32
    query_start_loc: torch.Tensor  # [R + 1] int32, counted from the first of ``tokens``
    seq_lens: torch.Tensor  # [R] int32, the new tokens included
    slot_mapping: torch.Tensor  # [T] int64, of ``tokens``
    max_query_len: int
    max_seq_len: int
    """Of all rows of the step: an upper bound."""
    schedules: dict[int, torch.Tensor] = field(default_factory=dict)
    """By number of query heads: made by the first layer that needs one, shared by the others."""


def uses_flash_attention(vllm_config: VllmConfig) -> bool:
    """Whether long prefill rows of this engine's plain layers may be FlashAttention 3's."""
    model_config, cache_config = vllm_config.model_config, vllm_config.cache_config
    if (
        model_config is None
        or not current_platform.is_cuda()
        or not current_platform.is_device_capability_family(90)
        or model_config.dtype not in (torch.float16, torch.bfloat16)
        or model_config.get_head_size() != HEAD_SIZE
        or cache_config.cache_dtype in FLOAT8_DTYPES
        or cache_config.sliding_window is not None  # vLLM sets it where all layers slide
        or not takes_blocks_of(cache_config.block_size)
    ):
        return False
    try:
        from vllm.v1.attention.backends.fa_utils import is_fa_version_supported
    except ImportError:
        # A build of vLLM without FlashAttention's extensions; other backends run with it.
        return False
    return bool(is_fa_version_supported(3))


def takes_blocks_of(block_size: int) -> bool:
    """Whether blocks of this size are loaded without what follows a request's last token."""
    return block_size % _KEY_TILE != 0


def describe_thresholds() -> str:
    """Return which rows are FlashAttention 3's, for the start-up line."""
    rows = [f"{query_len:,} after {computed:,}" for computed, query_len in FASTER_FROM]
    return f"prefill rows from {', '.join(rows)} tokens on"


def choose_rows(
    common: CommonAttentionMetadata,
    first_row: int,
    first_token: int,
    query_start_loc: torch.Tensor,  # [R + 1] int32, counted from ``first_token``
) -> FlashRows | None:
    """Return a step's prefill rows, which begin with ``first_row`` and ``first_token``, or None if Rose attends them.

    All of them take one kernel: what decides is the row that a new token is in, on average over the tokens.
    """
    if common.max_query_len < min(threshold.query_len for threshold in FASTER_FROM):
        return None
    starts = common.query_start_loc_cpu[first_row:].numpy()
    query_lens = starts[1:] - starts[:-1]
    num_tokens = max(int(query_lens.sum()), 1)
    query_len = float(query_lens @ query_lens.astype("float64")) / num_tokens
    num_computed = 0.0
    if (bound := common.seq_lens_cpu_upper_bound) is not None:
        computed = bound[first_row : first_row + len(query_lens)].numpy() - query_lens
        num_computed = float(query_lens @ computed.astype("float64")) / num_tokens
    if not is_faster(query_len, num_computed):
        return None
    tokens = slice(first_token, common.num_actual_tokens)
    return FlashRows(
        tokens,
        common.block_table_tensor[first_row:],
        query_start_loc,
        common.seq_lens[first_row:],
        common.slot_mapping[tokens],
        common.max_query_len,
        common.max_seq_len,
    )


def is_faster(query_len: float, num_computed_tokens: float) -> bool:
    """Whether FlashAttention 3 attends this many new tokens, after this many cached ones, faster than Rose's kernel."""
    return any(
        num_computed_tokens >= threshold.num_computed_tokens and query_len >= threshold.query_len
        for threshold in FASTER_FROM
    )


def flash_prefill(
    query: torch.Tensor,  # [T, HQ, 128] float16 or bfloat16
    key: torch.Tensor | None,  # [T, HKV, 128]
    value: torch.Tensor | None,  # [T, HKV, 128]
    key_cache: torch.Tensor,  # [NB, BS, HKV, 128]  written
    value_cache: torch.Tensor,  # [NB, BS, HKV, 128]  written
    rows: FlashRows,
    scale: float,
    out: torch.Tensor,  # [T, HQ, 128]  written
) -> None:
    """Store the rows' keys and values, and attend causally over each row's whole history in the cache.

    FlashAttention reads the new tokens back from the cache. They are there: the store is an earlier kernel of the same
    stream. Tokens of other rows, and of none, stay as they are in ``out``.

    Args:
        key, value: None where they are stored already.
        key_cache, value_cache: views with any strides that are multiples of 8 elements, the innermost one 1.
    """
    from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    tokens = rows.tokens
    if key is not None and value is not None:
        write_kv(key[tokens], value[tokens], key_cache, value_cache, rows.slot_mapping)
    flash_attn_varlen_func(
        q=query[tokens],
        # One KV head: its stride says nothing, but has to be a multiple of 16 bytes.
        k=canonicalize_singleton_dim_strides(key_cache),
        v=canonicalize_singleton_dim_strides(value_cache),
        out=out[tokens],
        cu_seqlens_q=rows.query_start_loc,
        max_seqlen_q=rows.max_query_len,
        seqused_k=rows.seq_lens,
        max_seqlen_k=rows.max_seq_len,
        block_table=rows.block_table,
        softmax_scale=scale,
        causal=True,
        scheduler_metadata=_schedule(rows, query, key_cache),
        num_splits=_NUM_SPLITS,
        fa_version=3,
    )


_NUM_SPLITS = 1
"""Long rows fill the device without splitting their context, which would take memory that vLLM has not measured."""


def _schedule(rows: FlashRows, query: torch.Tensor, key_cache: torch.Tensor) -> Any:
    num_heads = query.shape[1]
    if num_heads not in rows.schedules:
        from vllm.vllm_flash_attn import get_scheduler_metadata

        rows.schedules[num_heads] = get_scheduler_metadata(
            batch_size=rows.seq_lens.shape[0],
            max_seqlen_q=rows.max_query_len,
            max_seqlen_k=rows.max_seq_len,
            num_heads_q=num_heads,
            num_heads_kv=key_cache.shape[2],
            headdim=query.shape[2],
            cache_seqlens=rows.seq_lens,
            qkv_dtype=query.dtype,
            cu_seqlens_q=rows.query_start_loc,
            page_size=key_cache.shape[1],
            causal=True,
            num_splits=_NUM_SPLITS,
        )
    return rows.schedules[num_heads]
