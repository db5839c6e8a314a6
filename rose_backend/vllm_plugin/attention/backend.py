"""ROSE as a vLLM attention backend: paged attention from ``rose_backend.kernels`` over vLLM's KV cache views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from vllm.compilation import backends
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec

from rose_backend.errors import ConfigError
from rose_backend.kernels import AttentionOptions, HeadRotation, NewTokens, write_kv
from rose_backend.kernels.gpu_properties import Workspace
from rose_backend.layers.attention import AttentionStep, attend, plan_decode
from rose_backend.vllm_plugin import options
from rose_backend.vllm_plugin.attention import flash_attention
from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadata, RoseAttentionMetadataBuilder
from rose_backend.vllm_plugin.kv_cache.spec import as_rose_spec
from rose_backend.vllm_plugin.patch_ledger import apply_patch
from rose_backend.vllm_plugin.pending_kernels import begin as begin_to_compile
from rose_backend.vllm_plugin.registration import BACKEND_NAME

MAX_HEAD_SIZE = 512
_DRAFTER_TAGS = {
    "eagle_head",
    "draft_model",
    "dflash_head",
    "dspark_head",
    "medusa_head",
    "extract_hidden_states",
}
"""What ``model_tag`` is while vLLM builds a drafter. It is set for parts of some models, too."""
_workspaces: WeakValueDictionary[int, Workspace] = WeakValueDictionary()
"""Of each engine in this process, by the ``id`` of its configuration: vLLM copies that field by field, and fails on an
attribute that is none. An engine's layers keep both."""


class RoseAttentionBackend(AttentionBackend):
    """What vLLM asks before it builds layers. Any layout of the KV cache will do: the kernels use its strides."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(options.CACHE_DTYPES)
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
        return [MultipleOf(options.BLOCK_SIZE_UNIT)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Multiples of 8 up to ``MAX_HEAD_SIZE``."""
        return head_size % 8 == 0 and 0 < head_size <= MAX_HEAD_SIZE

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """The kernels mask it, whether blocks before it are kept or not."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """One logit per query head that takes part in the softmax and attends to nothing."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Causal attention over a KV cache only."""
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Refuse a cache of another 16-bit type than the model's, and float8 where the GPU cannot convert it."""
        if kv_cache_dtype in ("float16", "bfloat16") and getattr(torch, kv_cache_dtype) != dtype:
            return f"kv_cache_dtype {kv_cache_dtype} with a model in {str(dtype).removeprefix('torch.')} not supported"
        if (
            kv_cache_dtype in options.FLOAT8_DTYPES
            and device_capability is not None
            and device_capability < (8, 9)
        ):
            return f"kv_cache_dtype {kv_cache_dtype} needs compute capability 8.9, this GPU has " + (
                device_capability.as_version_str()
            )
        return None

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Mark full-attention layers as Rose's; the engine core reads it from the specification."""
        return as_rose_spec(spec)


class RoseAttentionImpl(AttentionImpl[RoseAttentionMetadata]):
    """One layer's attention.

    New K/V of decodes is stored by decode attention, that of prefills by prefill attention, or by a write before
    FlashAttention 3. So a request may not read blocks that another one writes in the same step; Rose's block manager
    guarantees that. Under vLLM's own manager, and in a drafter's layers, all new K/V is stored by a separate write
    before anything is read.
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
        sinks: torch.Tensor | None = None,  # [HQ]
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
        self.sinks = sinks
        self.kv_cache_dtype = kv_cache_dtype
        self.has_float8_cache = kv_cache_dtype in options.FLOAT8_DTYPES
        self.logits_soft_cap = logits_soft_cap or None
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.after_loading: Callable[[], None] | None = None
        """Of the model: called when all weights are loaded, and again when some or all have been reloaded."""
        vllm_config = get_current_vllm_config()
        self.workspace = _workspaces.setdefault(id(vllm_config), Workspace())
        """Of the engine: all its layers launch on one stream, in turn."""
        self.is_drafter = backends.model_tag in _DRAFTER_TAGS
        # A drafter passes tokens that must not be stored (slot -1), which only the separate write leaves out.
        self.appends_in_attention = not self.is_drafter and options.appends_in_attention(vllm_config)
        self.has_connector_in_layers = options.has_connector_in_layers(vllm_config)
        if options.uses_rose_manager(vllm_config):
            # Here because layers are built before anybody asks them, or a drafter's, what they keep.
            apply_patch("windowed_layer_spec")
            if options.has_states(vllm_config):
                apply_patch("mamba2_state_spec")
                apply_patch(f"block_copies_v{1 + vllm_config.use_v2_model_runner}")
        special = (alibi_slopes, sliding_window, self.logits_soft_cap, sinks)
        self.may_use_flash = (
            head_size == flash_attention.HEAD_SIZE
            and not self.has_float8_cache  # A checkpoint may ask for it, layer by layer.
            and all(option is None for option in special)
            and flash_attention.uses_flash_attention(vllm_config)
        )
        kind = (
            (num_heads, self.num_kv_heads, head_size, self.scale > 0, sliding_window, kv_cache_dtype),
            (alibi_slopes is None, self.logits_soft_cap, sinks is None, kv_sharing_target_layer_name is None),
            self.appends_in_attention,
            self.is_drafter,
        )
        begin_to_compile(vllm_config, self, kind)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Tell the model. vLLM calls this after loading all other modules, the first time and in each reload."""
        if self.after_loading is not None:
            self.after_loading()

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
        *,
        overlap: bool = False,
        rotation: HeadRotation | None = None,
    ) -> torch.Tensor:
        """Store the step's K/V and attend. Tokens past ``num_actual_tokens`` are padding and stay as they are.

        Args:
            overlap, rotation: see ``layers.attention.attend``; vLLM's own layers ask for neither.
        """
        if output_scale is not None or output_block_scale is not None:
            raise ConfigError(
                "ROSE does not quantize its output; switch the attention-quantization fusion pass off"
            )
        if attn_metadata is None:
            # A profiling run: there is no cache yet.
            return output.fill_(0)
        step = attn_metadata.for_layers(appends=self.appends_in_attention)
        if self.kv_sharing_target_layer_name is not None:
            key = value = None
        caches = self._caches(kv_cache)
        rows = None
        if self.may_use_flash and flash_attention.takes_blocks_of(caches[0].shape[1]):
            rows = attn_metadata.flash_rows
            if key is not None and value is not None and attn_metadata.is_first_run:
                # Compiles the write that precedes FlashAttention. Attention stores the same again.
                slots = attn_metadata.slot_mapping[: attn_metadata.num_actual_tokens]
                write_kv(key[: len(slots)], value[: len(slots)], *caches, slots)
        if rows is not None:
            step = AttentionStep(step.decode, None, step.slot_mapping)
        elif step.prefill is not None:
            step.prefill.mean_query_lens = attn_metadata.prefill_lens_to_tune_for()
        with self.workspace:
            attend(
                query,
                None if key is None or value is None else NewTokens(key, value),
                caches,
                step,
                self._options(layer, query.device),
                output,
                overlap=overlap,
                rotation=rotation,
            )
        if rows is not None:
            if not self.appends_in_attention:
                key = value = None
            flash_attention.flash_prefill(query, key, value, *caches, rows, self.scale, output)
        return output

    def store(
        self,
        layer: Any,
        key: torch.Tensor,  # [T, HKV, D]
        value: torch.Tensor,  # [T, HKV, D]
        kv_cache: torch.Tensor,  # as of ``forward``  written
        slot_mapping: torch.Tensor,  # [T] int64; -1 for padding
    ) -> None:
        """Store K/V without attention."""
        options = self._options(layer, key.device)
        caches = self._caches(kv_cache)
        write_kv(
            key, value, *caches, slot_mapping, key_scale=options.key_scale, value_scale=options.value_scale
        )

    def plan_decode(self, layer: Any, kv_cache: torch.Tensor, attn_metadata: RoseAttentionMetadata) -> None:
        """Work out what layers share of a step in which decode attention shall overlap the kernel before it.

        Arguments are those of ``forward``.
        """
        if (decode := attn_metadata.for_layers(appends=self.appends_in_attention).decode) is not None:
            kv = decode.kv(*self._caches(kv_cache))
            plan_decode(decode, kv, self._options(layer, kv_cache.device))

    def _caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V as [NB, BS, HKV, D] views of vLLM's [NB, HKV, BS, 2 * D] view."""
        # vLLM hands float8 numbers over as bytes.
        by_token = (kv_cache.view(torch.float8_e4m3fn) if self.has_float8_cache else kv_cache).transpose(1, 2)
        return by_token[..., : self.head_size], by_token[..., self.head_size :]

    def _options(self, layer: Any, device: torch.device) -> AttentionOptions:
        if self.alibi_slopes is not None and self.alibi_slopes.device != device:
            self.alibi_slopes = self.alibi_slopes.to(device)
        return AttentionOptions(
            self.scale,
            self.sliding_window,
            self.alibi_slopes,
            self.logits_soft_cap,
            None if self.sinks is None else self.sinks.detach(),
            layer._k_scale if self.has_float8_cache else None,
            layer._v_scale if self.has_float8_cache else None,
        )
