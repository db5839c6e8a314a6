"""Attention of every size of step that vLLM captures or runs, on tensors without memory: its kernels are recorded."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rose_backend.kernels.gpu_properties import gpu_properties
from rose_backend.kernels.tuning.attention_decode import decode_kind, row_counts
from rose_backend.layers.linear import fewest_halved_rows
from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadata, RoseAttentionMetadataBuilder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

_NUM_BLOCKS = 1024
"""No kernel depends on how many there are."""
_META = torch.device("meta")


def launch_steps(vllm_config: VllmConfig, layer: Any) -> None:
    """Launch attention of ``layer``, a ``RoseAttentionImpl``, for decodes and for mixed steps of each size."""
    attend = RecordedAttention(vllm_config, layer)
    for metadata in recorded_steps(vllm_config, layer):
        for query, key, value in projections(vllm_config, layer, metadata.num_actual_tokens):
            attend(metadata, query, key, value, torch.empty_like(query))


def projections(vllm_config: VllmConfig, layer: Any, num_tokens: int) -> Iterator[list[torch.Tensor]]:
    """Yield queries, keys and values [T, HQ or HKV, D] as models lay them out: parts of one product, or tensors.

    Their strides are multiples of 16 either way, if those of heads are; else Triton compiles apart for them.
    """
    heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    options = {"dtype": vllm_config.model_config.dtype, "device": _META}
    parts = list(torch.empty((num_tokens, sum(heads), layer.head_size), **options).split(heads, dim=1))
    yield parts
    if layer.head_size % 16:
        apart = [torch.empty((num_tokens, each, layer.head_size), **options) for each in heads]
        yield [*apart[:2], parts[2]]  # rotated, not in place
        yield apart


def recorded_steps(vllm_config: VllmConfig, layer: Any) -> Iterator[RoseAttentionMetadata]:
    """Yield decode-only and mixed steps, of each number of rows that kernels are compiled apart for."""
    builder = RoseAttentionMetadataBuilder(None, ["layer"], vllm_config, _META)
    query_len = builder.reorder_batch_threshold
    for num_rows in reversed(_row_counts(vllm_config, layer, query_len)):
        for each in sorted({1, query_len}):
            yield builder.build(0, recorded_step(vllm_config, [each] * num_rows))
        # In a captured step all rows go through both kernels. One that is launched takes the same kernels, for as many
        # decodes as it has.
        yield builder.build_for_cudagraph_capture(
            recorded_step(vllm_config, [1] * (num_rows - 1) + [query_len + 1])
        )
    halved = fewest_halved_rows(vllm_config.model_config.get_hidden_size(), _num_processors())
    if query_len < halved <= vllm_config.scheduler_config.max_num_batched_tokens:
        yield builder.build_for_cudagraph_capture(recorded_step(vllm_config, [halved]))


def _row_counts(vllm_config: VllmConfig, layer: Any, query_len: int) -> list[int]:
    """Return numbers of rows, one for each group that kernels of ``layer`` and around it are compiled apart for."""
    dtype = vllm_config.model_config.dtype
    sizes = {
        "num_heads": layer.num_heads,
        "num_kv_heads": layer.num_kv_heads,
        "head_size": layer.head_size,
        "dtype": dtype,
        "num_processors": _num_processors(),
        "cache_dtype": torch.float8_e4m3fn if layer.has_float8_cache else dtype,
    }
    return row_counts(
        vllm_config.scheduler_config.max_num_seqs,
        lambda num_rows: tuple(decode_kind(num_rows, max_query_len=each, **sizes) for each in (1, query_len)),
    )


def _num_processors() -> int:
    return gpu_properties(_META).num_processors


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


def recorded_step(vllm_config: VllmConfig, query_lens: Sequence[int]) -> CommonAttentionMetadata:
    """Return a step of requests with so many tokens each as vLLM describes it, on tensors without memory."""
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.worker.block_table import get_block_table_width

    max_model_len, block_size = vllm_config.model_config.max_model_len, vllm_config.cache_config.block_size
    starts = torch.from_numpy(np.cumsum([0, *query_lens], dtype=np.int32))
    num_rows, num_tokens = len(query_lens), int(starts[-1])
    return CommonAttentionMetadata(
        query_start_loc=starts.to(_META),
        query_start_loc_cpu=starts,
        seq_lens=torch.empty(num_rows, dtype=torch.int32, device=_META),
        num_reqs=num_rows,
        num_actual_tokens=num_tokens,
        max_query_len=max(query_lens),
        max_seq_len=max_model_len,
        block_table_tensor=torch.empty(
            (num_rows, get_block_table_width(-(-max_model_len // block_size), block_size)),
            dtype=torch.int32,
            device=_META,
        ),
        slot_mapping=torch.empty(num_tokens, dtype=torch.int64, device=_META),
    )
