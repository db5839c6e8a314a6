"""What vLLM runs for attention on a GPU: FlashAttention 3 or its own Triton kernel, each after a separate cache write.

Both get the arguments that vLLM's backends ``FLASH_ATTN`` and ``TRITON_ATTN`` pass within a full CUDA graph. What a
backend prepares once per step for all layers is prepared outside the timed part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.kernel_cases import peers
from benchmarks.kernel_cases.case import Launches
from benchmarks.kernel_cases.paged_step import PagedStep

FLASH = "FlashAttention 3"
TRITON = "vLLM Triton"

# vLLM's default sizes of captured batches; AttentionConfig.flash_attn_max_num_splits_for_cuda_graph.
_CAPTURE_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
_FLASH_GRAPH_SPLITS = 32
# MIN_LAUNCH_GRID_SIZE_2D and NUM_PAR_SOFTMAX_SEGMENTS of vLLM's triton_attn.
_TRITON_MIN_GRID, _TRITON_SEGMENTS = 128, 16


def attention_peers(steps: Sequence[PagedStep]) -> dict[str, Launches]:
    """Return the launches of every peer that is installed."""
    sides: dict[str, Launches] = {}
    for name, make in ((FLASH, flash_attention), (TRITON, triton_attention)):
        launches = make(name, steps)
        if launches is not None:
            sides[name] = launches
    return sides


def flash_attention(name: str, steps: Sequence[PagedStep]) -> Launches | None:
    """FlashAttention 3 with a block table and a schedule made ahead, after ``reshape_and_cache_flash``."""
    modules = peers.load(name, "vllm.vllm_flash_attn", "vllm._custom_ops")
    if modules is None:
        return None
    flash, operations = modules
    heads, step = steps[0].heads, steps[0]
    num_tokens = step.num_rows * step.query_len
    shared: dict[str, Any] = {
        "cu_seqlens_q": step.query_start_loc(),
        "seqused_k": step.per_row(step.seq_len),
        "max_seqlen_q": step.query_len,
        "max_seqlen_k": step.seq_len,
        "num_splits": _FLASH_GRAPH_SPLITS if num_tokens <= _CAPTURE_SIZES[-1] else 0,
    }
    shared["scheduler_metadata"] = flash.get_scheduler_metadata(
        batch_size=step.num_rows,
        max_seqlen_q=step.query_len,
        max_seqlen_k=step.seq_len,
        num_heads_q=heads.num_query_heads,
        num_heads_kv=heads.num_kv_heads,
        headdim=heads.head_size,
        cache_seqlens=shared["seqused_k"],
        qkv_dtype=heads.dtype,
        cu_seqlens_q=shared["cu_seqlens_q"],
        page_size=step.storage.shape[1],
        causal=True,
        window_size=(-1, -1),
        num_splits=shared["num_splits"],
    )
    one = torch.ones((), dtype=torch.float32, device="cuda")

    def launch(step: PagedStep) -> Callable[[], torch.Tensor]:
        key_cache, value_cache, slots = step.key_cache, step.value_cache, step.slot_mapping()
        out = torch.empty(step.query.shape, dtype=heads.dtype, device="cuda")

        def run() -> torch.Tensor:
            operations.reshape_and_cache_flash(
                step.key, step.value, key_cache, value_cache, slots, "auto", one, one
            )
            flash.flash_attn_varlen_func(
                q=step.query,
                k=key_cache,
                v=value_cache,
                out=out,
                softmax_scale=heads.scale,
                causal=True,
                window_size=[-1, -1],
                block_table=step.block_table,
                fa_version=3,
                **shared,
            )
            return out

        return run

    return [launch(step) for step in steps]


def triton_attention(name: str, steps: Sequence[PagedStep]) -> Launches | None:
    """vLLM's ``unified_attention`` after its Triton cache write; few rows split their context over programs."""
    modules = peers.load(
        name,
        "vllm.v1.attention.ops.triton_unified_attention",
        "vllm.v1.attention.ops.triton_reshape_and_cache_flash",
    )
    if modules is None:
        return None
    attention, cache_write = modules
    heads, step = steps[0].heads, steps[0]
    wanted = _TRITON_MIN_GRID // heads.num_kv_heads
    max_split_rows = min(_CAPTURE_SIZES, key=lambda size: abs(size - wanted))
    scratch = (max_split_rows, heads.num_query_heads, _TRITON_SEGMENTS)
    one = torch.ones((), dtype=torch.float32, device="cuda")
    descale = one.expand(step.num_rows, heads.num_kv_heads)
    shared: dict[str, Any] = {
        "cu_seqlens_q": step.query_start_loc(),
        "seqused_k": step.per_row(step.seq_len),
        "max_seqlen_q": step.query_len,
        "max_seqlen_k": step.seq_len,
        "seq_threshold_3D": max_split_rows,
        "num_par_softmax_segments": _TRITON_SEGMENTS,
        "softmax_segm_output": torch.empty((*scratch, heads.head_size), device="cuda"),
        "softmax_segm_max": torch.empty(scratch, device="cuda"),
        "softmax_segm_expsum": torch.empty(scratch, device="cuda"),
        "k_descale": descale,
        "v_descale": descale,
    }

    def launch(step: PagedStep) -> Callable[[], torch.Tensor]:
        key_cache, value_cache, slots = step.key_cache, step.value_cache, step.slot_mapping()
        out = torch.empty(step.query.shape, dtype=heads.dtype, device="cuda")

        def run() -> torch.Tensor:
            cache_write.triton_reshape_and_cache_flash(
                step.key, step.value, key_cache, value_cache, slots, "auto", one, one
            )
            attention.unified_attention(
                q=step.query,
                k=key_cache,
                v=value_cache,
                out=out,
                softmax_scale=heads.scale,
                causal=True,
                window_size=(-1, -1),
                block_table=step.block_table,
                softcap=0,
                q_descale=None,
                **shared,
            )
            return out

        return run

    return [launch(step) for step in steps]
