"""ROSE as a vLLM attention backend: paged attention from ``rose_backend.kernels`` over vLLM's KV cache views."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionType,
    MultipleOf,
)

from rose_backend.errors import ConfigError
from rose_backend.kernels import (
    paged_decode,
    paged_prefill,
    plan_paged_decode,
    plan_paged_prefill,
    write_kv,
)
from rose_backend.vllm_plugin.attention_metadata import RoseAttentionMetadata, RoseAttentionMetadataBuilder
from rose_backend.vllm_plugin.backend_name import BACKEND_NAME
from rose_backend.vllm_plugin.kv_cache_spec import as_rose_spec
from rose_backend.vllm_plugin.options import appends_in_attention, rose_options

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec

MAX_HEAD_SIZE = 256


class RoseAttentionBackend(AttentionBackend):
    """What vLLM asks before it builds anything. Any KV cache layout: the kernels trust strides, not shapes."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        """Return the enum member's name; vLLM looks the backend up under it."""
        return BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type[RoseAttentionImpl]:
        """Return the class that runs a layer."""
        return RoseAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[RoseAttentionMetadataBuilder]:
        """Return the class that prepares a step."""
        return RoseAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        """Blocks are never split: any multiple of 16 tokens."""
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Multiples of 8 up to ``MAX_HEAD_SIZE``."""
        return head_size % 8 == 0 and 0 < head_size <= MAX_HEAD_SIZE

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """The kernels mask it; the block manager has to be vLLM's then."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Causal attention over a KV cache only."""
        return attn_type == AttentionType.DECODER

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Mark full-attention layers as Rose's; the engine core reads it from the specification."""
        return as_rose_spec(spec)


class RoseAttentionImpl(AttentionImpl[RoseAttentionMetadata]):
    """One layer's attention.

    New K/V of decodes is stored by decode attention, that of prefills by prefill attention. So a request may not read
    blocks that another one writes in the same step; Rose's block manager guarantees that. Under vLLM's own manager all
    new K/V is stored by a separate write before anything is read.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **unsupported: Any,
    ) -> None:
        extra = sorted(name for name, value in unsupported.items() if value is not None)
        if extra or attn_type != AttentionType.DECODER:
            what = ", ".join(extra) or f"attention type {attn_type}"
            raise ConfigError(
                f"ROSE does not support this model's {what}; choose another --attention-backend"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or None
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        vllm_config = get_current_vllm_config()
        self.appends_in_attention = appends_in_attention(vllm_config, rose_options(vllm_config))

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,  # [T, HQ, D]
        key: torch.Tensor | None,  # [T, HKV, D]
        value: torch.Tensor | None,  # [T, HKV, D]
        kv_cache: torch.Tensor,  # [NB, HKV, BS, 2 * D], any strides  written
        attn_metadata: RoseAttentionMetadata | None,
        output: torch.Tensor,  # [T, HQ, D]  written
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the step's K/V and attend. Tokens past ``num_actual_tokens`` are padding and stay as they are."""
        if output_scale is not None or output_block_scale is not None:
            raise ConfigError(
                "ROSE does not quantize its output; switch the attention-quantization fusion pass off"
            )
        if attn_metadata is None:
            # A profiling run: there is no cache yet.
            return output.fill_(0)
        key_cache, value_cache = _split_cache(kv_cache, self.head_size)
        if self.kv_sharing_target_layer_name is not None:
            key = value = None
        if not self.appends_in_attention and key is not None and value is not None:
            count = attn_metadata.num_actual_tokens
            write_kv(key[:count], value[:count], key_cache, value_cache, attn_metadata.slot_mapping[:count])
            key = value = None
        if attn_metadata.num_decodes:
            self._decode(query, key, value, key_cache, value_cache, attn_metadata, output)
        if attn_metadata.num_prefill_tokens:
            self._prefill(query, key, value, key_cache, value_cache, attn_metadata, output)
        return output

    def _decode(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: RoseAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        rows = slice(0, metadata.num_decodes)
        block_table, num_computed_tokens = metadata.block_table[rows], metadata.num_computed_tokens[rows]
        # ALiBi slopes differ between models, not between layers that share a step's metadata.
        plan = metadata.decode_plans.get(self.sliding_window)
        if plan is None:
            plan = metadata.decode_plans[self.sliding_window] = plan_paged_decode(
                block_table,
                num_computed_tokens,
                key_cache,
                sliding_window=self.sliding_window,
                alibi_slopes=self._slopes_on(query.device),
            )
        paged_decode(
            query[rows],
            None if key is None else key[rows],
            None if value is None else value[rows],
            key_cache,
            value_cache,
            block_table,
            num_computed_tokens,
            scale=self.scale,
            out=output[rows],
            sliding_window=self.sliding_window,
            alibi_slopes=self._slopes_on(query.device),
            logits_soft_cap=self.logits_soft_cap,
            plan=plan,
        )

    def _prefill(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: RoseAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        rows = slice(metadata.first_prefill_row, None)
        first = metadata.num_actual_tokens - metadata.num_prefill_tokens
        tokens = slice(first, metadata.num_actual_tokens)
        block_table, num_computed_tokens = metadata.block_table[rows], metadata.num_computed_tokens[rows]
        plan = metadata.prefill_plans.get(self.sliding_window)
        if plan is None:
            plan = metadata.prefill_plans[self.sliding_window] = plan_paged_prefill(
                block_table,
                metadata.prefill_start_loc,
                num_computed_tokens,
                key_cache,
                num_step_tokens=metadata.num_prefill_tokens,
                sliding_window=self.sliding_window,
            )
        paged_prefill(
            query[tokens],
            None if key is None else key[tokens],
            None if value is None else value[tokens],
            key_cache,
            value_cache,
            block_table,
            metadata.prefill_start_loc,
            num_computed_tokens,
            scale=self.scale,
            out=output[tokens],
            sliding_window=self.sliding_window,
            alibi_slopes=self._slopes_on(query.device),
            logits_soft_cap=self.logits_soft_cap,
            plan=plan,
        )

    def _slopes_on(self, device: torch.device) -> torch.Tensor | None:
        if self.alibi_slopes is not None and self.alibi_slopes.device != device:
            self.alibi_slopes = self.alibi_slopes.to(device)
        return self.alibi_slopes


def _split_cache(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V as [NB, BS, HKV, D] views of vLLM's [NB, HKV, BS, 2 * D] view."""
    by_token = kv_cache.transpose(1, 2)
    return by_token[..., :head_size], by_token[..., head_size:]
