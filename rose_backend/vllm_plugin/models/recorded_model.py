"""What an engine's steps launch, on tensors without memory: ``pending_kernels.py`` records their kernels.

Attention of every size of step that vLLM captures or runs, with the layers around it where they are Rose's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.block_table import get_block_table_width

from rose_backend.kernels import (
    AdapterRows,
    Adapters,
    Float8Weight,
    HeadRotation,
    adapter_rows,
    embed_tokens,
)
from rose_backend.kernels.arguments import SCALED_BLOCK, WEIGHT_DTYPE
from rose_backend.kernels.gpu_properties import gpu_properties
from rose_backend.kernels.pointwise import ops
from rose_backend.kernels.tuning.choices import decode_kind, int4_kind, row_counts
from rose_backend.layers.decoder import Decoder, run_layers
from rose_backend.layers.linear import (
    DecoderLayer,
    Linear,
    Mlp,
    Norm,
    ResidualStream,
    fewest_halved_rows,
    int4_product,
    pack_layer,
    packs_layers,
)
from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadata, RoseAttentionMetadataBuilder
from rose_backend.vllm_plugin.models.float8_weights import (
    BLOCKS,
    MATRICES,
    expected_quantization,
    float8_scales,
    max_float8_rows,
)
from rose_backend.vllm_plugin.models.int4_weights import int4_scheme, max_int4_rows
from rose_backend.vllm_plugin.models.model_choice import DECODERS, GPT2, QWEN2_5_VL, QWEN3_VL
from rose_backend.vllm_plugin.options import rose_options

_NUM_BLOCKS = 1024
"""No kernel depends on how many there are."""
_META = torch.device("meta")


def launch_model(vllm_config: VllmConfig, layer: Any) -> None:
    """Launch attention of each size of step, with the layers around it where they are Rose's.

    Args:
        layer: a ``RoseAttentionImpl`` of the model or, with other kernels, of a drafter.
    """
    architectures = set(vllm_config.model_config.hf_config.architectures or ())
    is_decoder = not layer.is_drafter and bool(architectures & set(DECODERS.values()))
    recorded = (RecordedDecoder if is_decoder else RecordedAttention)(vllm_config, layer)
    for metadata in recorded_steps(vllm_config, layer):
        recorded.run(metadata)
    if GPT2 in architectures:
        _launch_gpt2(vllm_config)


def _launch_gpt2(vllm_config: VllmConfig) -> None:
    """Launch the operations of ``gpt2.py``, whose kernels do not depend on the number of tokens."""
    model = vllm_config.model_config
    width = model.get_hidden_size()
    inner_size = (model.hf_config.n_inner or 4 * width) // vllm_config.parallel_config.tensor_parallel_size
    hidden, inner = (torch.empty((2, size), dtype=model.dtype, device=_META) for size in (width, inner_size))
    ops.layer_norm(hidden, hidden[0], hidden[0], 1e-5)
    ops.add_layer_norm(hidden, hidden, hidden[0], hidden[0], 1e-5)
    ops.bias_gelu(inner, inner[0])
    ops.bias_residual(hidden, hidden[0], hidden)


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
    """Yield decode-only and mixed steps, of each number of rows and of tokens that kernels are compiled apart for."""
    builder = RoseAttentionMetadataBuilder(None, ["layer"], vllm_config, _META)
    query_len = builder.reorder_batch_threshold
    for num_tokens in row_counts(query_len):
        # Also a single request with fewer drafts than configured.
        yield builder.build(0, recorded_step(vllm_config, [num_tokens]))
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
    if _has_int4_products(vllm_config, layer):
        most = max_int4_rows(rose_options(vllm_config))
        limit = min(most, vllm_config.scheduler_config.max_num_batched_tokens)
        for num_tokens in row_counts(limit, int4_kind):
            # Rose's kernel multiplies prompts of few tokens, too.
            yield builder.build(0, recorded_step(vllm_config, [num_tokens]))


def _has_int4_products(vllm_config: VllmConfig, layer: Any) -> bool:
    """Whether Rose's layers multiply by int4 weights around ``layer``."""
    architectures = vllm_config.model_config.hf_config.architectures or ()
    is_roses = not set(DECODERS.values()).isdisjoint(architectures) and not layer.is_drafter
    return is_roses and int4_scheme(vllm_config.quant_config) is not None


def _row_counts(vllm_config: VllmConfig, layer: Any, query_len: int) -> list[int]:
    """Return numbers of rows, one for each group that kernels of ``layer`` and around it are compiled apart for.

    Args:
        query_len: tokens of a row that decodes with all drafts.
    """
    dtype = vllm_config.model_config.dtype
    sizes = {
        "num_heads": layer.num_heads,
        "num_kv_heads": layer.num_kv_heads,
        "head_size": layer.head_size,
        "dtype": dtype,
        "num_processors": _num_processors(),
        "cache_dtype": torch.float8_e4m3fn if layer.has_float8_cache else dtype,
    }
    is_int4 = _has_int4_products(vllm_config, layer)
    return row_counts(
        vllm_config.scheduler_config.max_num_seqs,
        lambda num_rows: (
            (num_rows * query_len - 1).bit_length(),
            *(decode_kind(num_rows, max_query_len=each, **sizes) for each in (1, query_len)),
            *(int4_kind(num_rows * each) for each in (1, query_len) if is_int4),
        ),
    )


def _num_processors() -> int:
    return gpu_properties(_META).num_processors


class RecordedAttention:
    """Attention over a cache without memory, the same in all layers; a ``StepAttention``.

    Attributes:
        metadata: of the step that is launched.
    """

    metadata: RoseAttentionMetadata
    last_tokens = None

    def __init__(self, vllm_config: VllmConfig, layer: Any) -> None:
        self._vllm_config, self._layer = vllm_config, copy.copy(layer)
        if layer.sinks is not None:
            self._layer.sinks = torch.empty(layer.sinks.shape, dtype=layer.sinks.dtype, device=_META)
        dtype = torch.uint8 if layer.has_float8_cache else vllm_config.model_config.dtype
        shape = (_NUM_BLOCKS, layer.num_kv_heads, vllm_config.cache_config.block_size, 2 * layer.head_size)
        self._cache = torch.empty(shape, dtype=dtype, device=_META)
        scale = torch.empty((), dtype=torch.float32, device=_META)
        self._module = SimpleNamespace(_k_scale=scale, _v_scale=scale)
        self.appends = layer.appends_in_attention and not layer.has_connector_in_layers

    @property
    def decodes_only(self) -> bool:
        """Whether all rows of the step decode."""
        return self.metadata.decodes_only

    @property
    def rotates(self) -> bool:
        """Whether attention may rotate in the step."""
        return self.appends and self.decodes_only and self.metadata.max_decode_query_len == 1

    def run(self, metadata: RoseAttentionMetadata) -> None:
        """Launch a step of one layer, of each layout of its queries, keys and values."""
        self.metadata = metadata
        for query, key, value in projections(self._vllm_config, self._layer, metadata.num_actual_tokens):
            self(0, query, key, value)

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,  # [T, HQ, D]
        key: torch.Tensor,  # [T, HKV, D]
        value: torch.Tensor,  # [T, HKV, D]
        *,
        overlap: bool = False,
        rotation: HeadRotation | None = None,
    ) -> torch.Tensor:
        """Launch what ``RoseAttentionImpl.forward`` launches."""
        out = torch.empty(query.shape, dtype=query.dtype, device=_META)
        impl, metadata = self._layer, self.metadata
        impl.plan_decode(self._module, self._cache, metadata)
        impl.forward(
            self._module, query, key, value, self._cache, metadata, out, overlap=overlap, rotation=rotation
        )
        return out.flatten(1)


def recorded_step(vllm_config: VllmConfig, query_lens: Sequence[int]) -> CommonAttentionMetadata:
    """Return a step of requests with these numbers of tokens as vLLM describes it, on tensors without memory."""
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


class RecordedDecoder:
    """A decoder without memory, of which one layer or two run: what the second gets is what all later ones get."""

    def __init__(self, vllm_config: VllmConfig, layer: Any) -> None:
        model, self._switches = vllm_config.model_config, rose_options(vllm_config)
        self._has_ranks = vllm_config.parallel_config.tensor_parallel_size > 1
        self._has_adapters = vllm_config.lora_config is not None
        decoder = recorded_layer(vllm_config, layer)
        self._final_norm = decoder.attn_norm
        if _packs(vllm_config):
            decoder = pack_layer(decoder)
        table = torch.empty((model.max_model_len, layer.head_size), dtype=torch.float32, device=_META)
        self._decoder, self._layer = decoder, layer
        scales = float8_scales(vllm_config.quant_config)
        self._max_packed_rows = None
        if scales is not None:
            self._max_packed_rows = max_float8_rows(self._switches, scales, model.dtype)
        elif int4_scheme(vllm_config.quant_config) is not None:
            self._max_packed_rows = max_int4_rows(self._switches)
        # With M-RoPE angles are a step's, and all models that have it take embeddings.
        self._has_mrope = model.uses_mrope
        self._rotation = HeadRotation(
            table, decoder.query_norm, decoder.key_norm, 1e-6, by_token=self._has_mrope
        )
        self._embedding = torch.empty(
            (model.get_vocab_size(), model.get_hidden_size()), dtype=model.dtype, device=_META
        )
        self._attention = RecordedAttention(vllm_config, layer)

    def run(self, metadata: RoseAttentionMetadata) -> None:
        """Launch a step; of decodes, whose layers pass on what norms need, two layers."""
        slots = torch.empty(metadata.num_actual_tokens, dtype=torch.int64, device=_META)
        for rows in (None, adapter_rows(slots)) if self._has_adapters else (None,):
            self._run(metadata, rows)

    def _run(self, metadata: RoseAttentionMetadata, rows: AdapterRows | None) -> None:
        num_tokens, layer = metadata.num_actual_tokens, self._layer
        layers = [self._decoder] * (2 if metadata.decodes_only else 1)
        positions = torch.empty(num_tokens, dtype=torch.int64, device=_META)
        input_ids = positions if self._has_mrope else positions.int()
        decoder = Decoder(
            layers=layers,
            final_norm=self._final_norm,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            switches=self._switches,
            mlp=ResidualStream.silu_mlp,
            rotations=[self._rotation] * len(layers),
            all_reduce=(lambda partial_sum: partial_sum) if self._has_ranks else None,
            adapter_rows=rows,
            max_packed_rows=self._max_packed_rows,
        )
        self._attention.metadata = metadata
        first_norm = decoder.first_norm(num_tokens, self._attention)
        embedded = embed_tokens(input_ids, positions, self._embedding, next_norm=first_norm)
        run_layers(decoder, *embedded, positions, self._attention)


def recorded_layer(vllm_config: VllmConfig, layer: Any) -> DecoderLayer:
    """Return a decoder layer of a rank without memory, as ``LoadedLayer`` makes it of vLLM's modules."""
    model = vllm_config.model_config
    fields, width = model.hf_text_config, model.get_hidden_size()
    inner = fields.intermediate_size // vllm_config.parallel_config.tensor_parallel_size
    heads, kv_heads, size = layer.num_heads, layer.num_kv_heads, layer.head_size
    is_llama = model.architecture in ("LlamaForCausalLM", "MistralForCausalLM")
    has_bias = bool(getattr(fields, "attention_bias", False) or (is_llama and getattr(fields, "bias", False)))
    has_qkv_bias = bool(getattr(fields, "qkv_bias", has_bias)) if is_llama else has_bias
    has_qkv_bias = has_qkv_bias or model.architecture in ("Qwen2ForCausalLM", "MiMoForCausalLM", QWEN2_5_VL)
    has_mlp_bias = is_llama and bool(getattr(fields, "mlp_bias", False))

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=model.dtype, device=_META)

    lora, scales = vllm_config.lora_config, float8_scales(vllm_config.quant_config)
    scheme, options = int4_scheme(vllm_config.quant_config), rose_options(vllm_config)

    def linear(fan_in: int, bias: bool, *widths: int) -> Linear:
        adapters, fan_out = None, sum(widths)
        if lora is not None:
            slots, rank = lora.max_loras, lora.max_lora_rank
            adapters = Adapters(
                tuple(empty(slots, rank, fan_in) for _ in widths),
                tuple(empty(slots, width, rank) for width in widths),
            )
        given_bias = empty(fan_out) if bias else None
        if scales is not None:
            return Linear(
                _float8_weight(fan_out, fan_in, scales),
                given_bias,
                adapters=adapters,
                # Launches none of Rose's kernels.
                many_rows=lambda x: empty(len(x if isinstance(x, torch.Tensor) else x.values), fan_out),
                quantization=expected_quantization(scales, fan_in),
            )
        if scheme is not None:
            weight = scheme.empty(fan_out, fan_in, model.dtype, _META)
            alone = int4_product(weight, given_bias, max_int4_rows(options))
            return Linear(weight, given_bias, adapters=adapters, many_rows=alone)
        return Linear(empty(fan_out, fan_in).t(), given_bias, adapters=adapters)

    norm = Norm(empty(width), None, 1e-6)
    head_norm = empty(size) if model.architecture in ("Qwen3ForCausalLM", QWEN3_VL) else None
    return DecoderLayer(
        norm,
        linear(width, has_qkv_bias, heads * size, kv_heads * size, kv_heads * size),
        linear(heads * size, has_bias and is_llama, width),
        norm,
        Mlp(linear(width, has_mlp_bias, inner, inner), linear(inner, has_mlp_bias, width)),
        head_norm,
        head_norm,
    )


def _packs(vllm_config: VllmConfig) -> bool:
    """Whether ``RoseDecoder`` packs its layers."""
    has_ranks = vllm_config.parallel_config.tensor_parallel_size > 1
    return not has_ranks and packs_layers(rose_options(vllm_config), _META)


def _float8_weight(fan_out: int, fan_in: int, scales: str) -> Float8Weight:
    """Return a weight without memory, with scales as ``LoadedFloat8`` has them."""
    values = torch.empty((fan_out, fan_in), dtype=WEIGHT_DTYPE, device=_META)
    shapes = {BLOCKS: (-(-fan_out // SCALED_BLOCK), -(-fan_in // SCALED_BLOCK)), MATRICES: (1, 1)}
    given = torch.empty(shapes.get(scales, (fan_out, 1)), dtype=torch.float32, device=_META)
    return Float8Weight(values, given.expand(fan_out, 1) if scales == MATRICES else given)
