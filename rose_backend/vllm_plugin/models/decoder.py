"""Llama, Mistral, Qwen2 and Qwen3 for vLLM with Rose's layers: the standalone engine's loop on vLLM's weights.

Modules, parameters and weight loading are vLLM's own. Only ``forward`` is Rose's: it calls none of vLLM's layers, so
nothing of them is compiled. Decodes and mixed steps are captured in vLLM's full CUDA graphs, longer steps are launched.

Weights stay where vLLM has put them, so that each is in memory once and captured graphs keep its address. Where layers
are packed, the two parts of a gated MLP are overwritten by their packed form when everything is loaded: the first time,
and again in each reload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.sequence import IntermediateTensors

from rose_backend.errors import IntegrityError, ModelError
from rose_backend.kernels import HeadRotation, PackedNorm, embed_tokens, empty_rows
from rose_backend.layers.decoder import Decoder, run_layers
from rose_backend.layers.linear import (
    DecoderLayer,
    Linear,
    Mlp,
    Norm,
    ResidualStream,
    pack,
    packs_layers,
)
from rose_backend.vllm_plugin.models.model_choice import KEEP_OPTION
from rose_backend.vllm_plugin.options import rose_options
from rose_backend.vllm_plugin.pending_kernels import wait_for_kernels

Keep = Callable[[str, torch.Tensor], None]


class LoadedLayer:
    """The weights of a decoder layer that vLLM loads and shards, as Rose's loop over layers takes them.

    Args:
        layer: vLLM's ``LlamaDecoderLayer`` or one like it.
        packs: prepare it for small batches; see ``layers.linear.pack_layer``.
        keep: registers a tensor that no checkpoint has, by its name; see ``RoseConstants``.
    """

    def __init__(self, layer: Any, *, packs: bool, keep: Keep) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._attention = attention
        self._products = [
            RoseLinearMethod(module, packs=packs, gated=module is mlp.gate_up_proj, keep=keep)
            for module in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        ]
        norms = {"attn": layer.input_layernorm, "mlp": layer.post_attention_layernorm}
        self._norms = [
            LoadedNorm(norm, packs=packs, keep=partial(keep, f"{name}_norm_scale"))
            for name, norm in norms.items()
        ]

    def update(self) -> DecoderLayer:
        """Return the layer as it is loaded now; what an earlier call returned is up to date, too."""
        qkv, attn_out, gate_up, down = [product.update() for product in self._products]
        attn_norm, mlp_norm = [norm.update() for norm in self._norms]
        query_norm, key_norm = (getattr(self._attention, name, None) for name in ("q_norm", "k_norm"))
        return DecoderLayer(
            attn_norm,
            qkv,
            attn_out,
            mlp_norm,
            Mlp(gate_up, down),
            None if query_norm is None else query_norm.weight.data,
            None if key_norm is None else key_norm.weight.data,
        )


class LoadedNorm:
    """An RMSNorm module, with what packed layers need of it."""

    def __init__(self, module: Any, *, packs: bool, keep: Callable[[torch.Tensor], None]) -> None:
        self._module, self._packs = module, packs
        self._norm: Norm | None = None
        self._addresses: list[int] = []
        self._scale: torch.Tensor | None = None  # As PackedNorm's.
        if packs and module.weight.dtype is torch.float16:
            self._scale = torch.ones(1, dtype=torch.float32, device=module.weight.device)
            keep(self._scale)

    def update(self) -> Norm:
        """Return the norm as it is loaded now."""
        if self._norm is None or _addresses_of(self._module) != self._addresses:
            self._norm, self._addresses = norm_of(self._module), _addresses_of(self._module)
            if self._packs:
                packed = PackedNorm(self._norm.weight, self._norm.eps, self._scale)
                self._norm = replace(self._norm, packed=packed)
                self._module.get_parameter = self._parameter
        if self._norm.packed is not None:
            self._norm.packed.update_scale()
        return self._norm

    def _parameter(self, name: str) -> torch.nn.Parameter:
        """Return what vLLM copies a weight into that is not in a checkpoint's format: nothing else tells of it."""
        weight, update = (
            torch.nn.Parameter(getattr(self._module, name).data, requires_grad=False),
            self.update,
        )

        def copy(loaded: torch.Tensor) -> None:
            weight.data.copy_(loaded)
            update()

        weight.copy_ = copy  # type: ignore[assignment, method-assign]
        return weight


class RoseLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """One linear module, as vLLM's method of it.

    It leaves a loaded weight as it is, also on a CPU, where vLLM would repack it and drop the original. Packed, only
    the rows of a gate and its factor change places.
    """

    supports_pre_processed_weights = False

    def __init__(self, module: Any, *, packs: bool, gated: bool, keep: Keep) -> None:
        super().__init__()
        self._module = module
        self._packs, self._gated = packs, gated
        module.quant_method = self
        self._is_new = True  # The weight is as vLLM loads it.
        self._linear: Linear | None = None
        self._addresses: list[int] = []
        self._bias: torch.Tensor | None = None  # With rows as in the packed weight.
        if packs and gated and module.bias is not None:
            self._bias = torch.empty_like(module.bias.data)
            keep("gate_up_bias", self._bias)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Note that the weight was loaded."""
        self._is_new = True

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Refuse: the module is never called, as its weight may be packed."""
        raise IntegrityError(f"{layer.prefix}: a linear module of Rose's layers was called")

    def update(self) -> Linear:
        """Return the product as it is loaded now."""
        is_new, self._is_new = self._is_new, False
        if (addresses := _addresses_of(self._module)) != self._addresses:
            if self._linear is not None and self._packs and self._gated and not is_new:
                raise ModelError(
                    f"{self._module.prefix}: another tensor is in the place of a packed weight, and nothing tells "
                    "whether its rows are packed, too: reload it by vLLM's reload_weights or a weight update; "
                    f"{KEEP_OPTION} keeps vLLM's layers"
                )
            # The first tensors, or others that have been put in their place.
            self._linear, self._addresses = None, addresses
        if self._linear is None:
            self._linear = self._packed() if self._packs else self._loaded()
        elif is_new and self._packs and self._gated:
            # In place, as graphs hold the addresses. What is not rearranged is in its place already.
            self._packed()
        return self._linear

    def _packed(self) -> Linear:
        linear = pack(self._loaded(), gated=self._gated, in_place=self._gated)
        if self._gated:
            self._module.get_parameter = self._refuse
        if self._bias is None or linear.bias is None or linear.packed is None:
            return linear
        self._bias.copy_(linear.bias)
        return replace(linear, bias=self._bias, packed=replace(linear.packed, bias=self._bias))

    def _loaded(self) -> Linear:
        module = self._module
        # Rank 0 adds the bias that all ranks' sum needs once, as vLLM's module does.
        is_added = module.bias is not None and not (
            isinstance(module, RowParallelLinear) and module.tp_rank > 0
        )
        return Linear(module.weight.data.t(), module.bias.data if is_added else None)

    def _refuse(self, name: str) -> torch.nn.Parameter:
        raise ModelError(
            f"{self._module.prefix}.{name}: Rose's packed weights are reloaded in a checkpoint's format only, not with "
            f"is_checkpoint_format=False; {KEEP_OPTION} keeps vLLM's layers"
        )


def _addresses_of(module: Any) -> list[int]:
    return [parameter.data_ptr() for parameter in module.parameters(recurse=False)]


def norm_of(module: Any) -> Norm:
    """Return vLLM's ``RMSNorm``."""
    return Norm(module.weight.data, None, module.variance_epsilon)


_PROFILED_KERNELS = ("_embed_tokens_kernel", "_norm_kernel", "_rotate_kernel", "_silu_mul_kernel")
"""Launched in vLLM's profiling run, when most others are still being compiled."""


class RoseConstants(torch.nn.Module):
    """Tensors that no checkpoint has. As buffers they are restored when vLLM wakes up from a deep sleep."""

    rotary_table: torch.Tensor
    """[P, D] float32, of vLLM's module, whose own is in the model's dtype."""

    def __init__(self, rotary: torch.nn.Module, device: torch.device) -> None:
        super().__init__()
        # On the CPU, as transformers computes it: a GPU's cosines differ in the last bits.
        with torch.device("cpu"):
            table = rotary._compute_cos_sin_cache().to(device)  # type: ignore[operator]
        self.register_buffer("rotary_table", table, persistent=False)

    def keep(self, layer: int, name: str, tensor: torch.Tensor) -> None:
        """Register what is made of a layer's weights, under a name that each layer has once."""
        self.register_buffer(f"{name}_{layer}", tensor, persistent=False)


class ModuleAttention:
    """Attention of one step by vLLM's attention modules; a ``StepAttention``."""

    __slots__ = ("_names", "_out", "appends", "decodes_only", "last_tokens")

    def __init__(self, modules: Sequence[Any], out: torch.Tensor) -> None:
        """``out`` [T, HQ, D] is written by each layer. What layers share is launched here, if anything is."""
        metadata, _, _, _ = get_attention_context(modules[0].layer_name)
        self._names = [module.layer_name for module in modules]
        self._out = out
        # A profiling run has no metadata.
        self.decodes_only = metadata is not None and metadata.decodes_only
        layer = modules[0].impl
        # A KV connector may have its own work before a layer's attention.
        self.appends = layer.appends_in_attention and not layer.has_connector_in_layers
        self.last_tokens = None
        if self.decodes_only and self.appends:
            # Layers of one group and window share a plan.
            contexts = map(get_attention_context, self._names)
            planned = {
                (id(metadata), module.impl.sliding_window): (module, kv_cache, metadata)
                for metadata, module, kv_cache, _ in contexts
            }
            for module, kv_cache, metadata in planned.values():
                module.impl.plan_decode(module, kv_cache, metadata)

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
        """Attend; see ``StepAttention``."""
        _attend(self._names[layer], query, key, value, self._out, overlap=overlap, rotation=rotation)
        return self._out.flatten(1)


@maybe_transfer_kv_layer  # type: ignore[untyped-decorator]
def _attend(layer_name: str, *tensors: torch.Tensor, **options: Any) -> None:
    metadata, module, kv_cache, _ = get_attention_context(layer_name)
    query, key, value, out = tensors
    module.impl.forward(module, query, key, value, kv_cache, metadata, out, **options)


def _refuse_to_save(model: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    raise ModelError(
        "Rose's packed weights cannot be saved (save_sharded_state): nothing could tell them from plain ones; "
        f"{KEEP_OPTION} keeps vLLM's layers"
    )


class RoseDecoder:
    """Mixed into vLLM's class of a model, as its first base."""

    model: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self.rose_switches = rose_options(vllm_config)
        has_ranks = get_tensor_model_parallel_world_size() > 1
        self._all_reduce = tensor_model_parallel_all_reduce if has_ranks else None
        layers, device = self.model.layers, self.model.norm.weight.device
        # A rank's product is a part of what is added: the residual cannot be added in the same kernel.
        packs = not has_ranks and packs_layers(self.rose_switches, device)
        self.rose_constants = RoseConstants(layers[0].self_attn.rotary_emb, device)
        self._attention = [layer.self_attn.attn for layer in layers]
        self._loaded = [
            LoadedLayer(layer, packs=packs, keep=partial(self.rose_constants.keep, index))
            for index, layer in enumerate(layers)
        ]
        if packs:
            self.register_state_dict_pre_hook(_refuse_to_save)  # type: ignore[attr-defined]
        self._layers: list[DecoderLayer | None] = [None] * len(layers)
        self._rotations: list[HeadRotation | None] = [None] * len(layers)
        for index, attention in enumerate(self._attention):
            attention.impl.after_loading = partial(self._update_layer, index)

    def _update_layer(self, index: int) -> None:
        layer = self._layers[index] = self._loaded[index].update()
        self._rotations[index] = HeadRotation(
            self.rose_constants.rotary_table, layer.query_norm, layer.key_norm, layer.attn_norm.eps
        )

    def take_moved_weights(self) -> None:
        """Use tensors that have been put in the place of weights.

        Raises:
            ModelError: one is in the place of a weight whose rows are packed.
        """
        for index in range(len(self._loaded)):
            self._update_layer(index)

    def forward(
        self,
        input_ids: torch.Tensor | None,  # [T] int32 or int64
        positions: torch.Tensor,  # [T] int64
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,  # [T, E]
    ) -> torch.Tensor:
        """Return the hidden states after the final norm, [T, E]."""
        model, norm_input = self.model, None
        wait_for_kernels(*_PROFILED_KERNELS)
        impl = self._attention[0].impl
        num_heads, num_kv_heads, head_size = impl.num_heads, impl.num_kv_heads, impl.head_size
        # Before the embedding, which overlaps nothing.
        attention = ModuleAttention(
            self._attention, empty_rows(model.norm.weight.data, len(positions), num_heads, head_size)
        )
        layers = [layer for layer in self._layers if layer is not None]
        assert len(layers) == len(self._layers), "vLLM has not finished loading"
        decoder = Decoder(
            layers=layers,
            final_norm=norm_of(model.norm),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            switches=self.rose_switches,
            mlp=ResidualStream.silu_mlp,
            rotations=self._rotations,
            all_reduce=self._all_reduce,
        )
        if inputs_embeds is not None:
            hidden = inputs_embeds.clone()  # The runner's own; small batches write theirs.
        elif self._all_reduce is not None:
            hidden = model.embed_input_ids(input_ids)
        else:
            assert input_ids is not None, "the first stage has token ids or embeddings"
            first_norm = decoder.first_norm(len(positions), attention)
            hidden, norm_input = embed_tokens(
                input_ids, positions, model.embed_tokens.weight.data, next_norm=first_norm
            )
        with impl.workspace:
            return run_layers(decoder, hidden, norm_input, positions, attention)


class RoseLlamaForCausalLM(RoseDecoder, LlamaForCausalLM):  # type: ignore[misc]
    """Llama."""


class RoseMistralForCausalLM(RoseDecoder, MistralForCausalLM):  # type: ignore[misc]
    """Mistral."""


class RoseQwen2ForCausalLM(RoseDecoder, Qwen2ForCausalLM):  # type: ignore[misc]
    """Qwen2."""


class RoseQwen3ForCausalLM(RoseDecoder, Qwen3ForCausalLM):  # type: ignore[misc]
    """Qwen3."""
