"""Attention of every size of step that vLLM captures or runs, on tensors without memory: its kernels are recorded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadata, RoseAttentionMetadataBuilder

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_NUM_BLOCKS = 1024
"""No kernel depends on how many there are."""
_META = torch.device("meta")


def launch_steps(vllm_config: VllmConfig, layer: Any) -> None:
    """Launch attention of ``layer``, a ``RoseAttentionImpl``, for decodes and for mixed steps of each size."""
    attend = RecordedAttention(vllm_config, layer)
    heads, kv_heads, head_size = layer.num_heads, layer.num_kv_heads, layer.head_size
    for metadata in recorded_steps(vllm_config):
        projected = torch.empty(
            (metadata.num_actual_tokens, heads + 2 * kv_heads, head_size),
            dtype=vllm_config.model_config.dtype,
            device=_META,
        )
        query, key, value = projected.split((heads, kv_heads, kv_heads), dim=1)
        attend(metadata, query, key, value, torch.empty_like(query))


def recorded_steps(vllm_config: VllmConfig) -> Iterator[RoseAttentionMetadata]:
    """Yield decode-only and mixed steps of each size."""
    scheduler = vllm_config.scheduler_config
    builder = RoseAttentionMetadataBuilder(None, ["layer"], vllm_config, _META)
    for num_tokens in step_sizes(
        vllm_config.compilation_config.cudagraph_capture_sizes, scheduler.max_num_seqs
    ):
        num_rows = min(num_tokens, scheduler.max_num_seqs)
        if num_tokens <= scheduler.max_num_seqs:
            yield _recorded_step(vllm_config, builder, num_rows, num_rows, 1)
        query_len = builder.reorder_batch_threshold
        if query_len > 1 and num_tokens % query_len == 0 and num_tokens // query_len <= num_rows:
            yield _recorded_step(vllm_config, builder, num_tokens // query_len, num_tokens, query_len)
        if num_tokens > query_len:
            yield _recorded_step(vllm_config, builder, num_rows, num_tokens, num_tokens)


class RecordedAttention:
    """A layer's attention over a cache without memory."""

    def __init__(self, vllm_config: VllmConfig, layer: Any) -> None:
        self._layer = layer = copy.copy(layer)
        if layer.sinks is not None:
            layer._sinks = torch.empty(layer.sinks.shape, dtype=torch.float32, device=_META)
        dtype = torch.uint8 if layer.has_float8_cache else vllm_config.model_config.dtype
        shape = (_NUM_BLOCKS, layer.num_kv_heads, vllm_config.cache_config.block_size, 2 * layer.head_size)
        self._cache = torch.empty(shape, dtype=dtype, device=_META)
        scale = torch.empty((), dtype=torch.float32, device=_META)
        self._module = SimpleNamespace(_k_scale=scale, _v_scale=scale)

    def __call__(
        self,
        metadata: RoseAttentionMetadata,
        query: torch.Tensor,  # [T, HQ, D]
        key: torch.Tensor,  # [T, HKV, D]
        value: torch.Tensor,  # [T, HKV, D]
        out: torch.Tensor,  # [T, HQ, D]
        **options: Any,
    ) -> None:
        """Launch what ``RoseAttentionImpl.forward`` launches; ``options`` are its."""
        self._layer.plan_decode(self._module, self._cache, metadata)
        self._layer.forward(self._module, query, key, value, self._cache, metadata, out, **options)


def step_sizes(captured: list[int] | None, max_num_seqs: int) -> list[int]:
    """Return numbers of tokens: those of captured graphs, and of batches that kernels are compiled apart for."""
    powers = [1 << exponent for exponent in range((max_num_seqs - 1).bit_length() + 1)]
    others = [each + 1 for each in powers]  # no multiples of 16, which Triton compiles apart
    return sorted({*(captured or ()), *powers, *others, max_num_seqs}, reverse=True)


def _recorded_step(
    vllm_config: VllmConfig,
    builder: RoseAttentionMetadataBuilder,
    num_rows: int,
    num_tokens: int,
    max_query_len: int,
) -> RoseAttentionMetadata:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.worker.block_table import get_block_table_width

    max_model_len, block_size = vllm_config.model_config.max_model_len, vllm_config.cache_config.block_size
    starts = torch.arange(num_rows + 1, dtype=torch.int32)
    starts[-1] = num_tokens
    common = CommonAttentionMetadata(
        query_start_loc=starts.to(_META),
        query_start_loc_cpu=starts,
        seq_lens=torch.empty(num_rows, dtype=torch.int32, device=_META),
        num_reqs=num_rows,
        num_actual_tokens=num_tokens,
        max_query_len=max_query_len,
        max_seq_len=max_model_len,
        block_table_tensor=torch.empty(
            (num_rows, get_block_table_width(-(-max_model_len // block_size), block_size)),
            dtype=torch.int32,
            device=_META,
        ),
        slot_mapping=torch.empty(num_tokens, dtype=torch.int64, device=_META),
    )
    return builder.build_for_cudagraph_capture(common)
