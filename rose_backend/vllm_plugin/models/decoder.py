"""Llama, MiMo, Mistral, Qwen2 and Qwen3 for vLLM with Rose's layers: the standalone engine's loop on vLLM's weights.

Modules, parameters and weight loading are vLLM's own. Only ``forward`` is Rose's: it calls none of vLLM's layers, so
nothing of them is compiled. Decodes and mixed steps are captured in vLLM's full CUDA graphs, longer steps are launched.

Weights stay where vLLM has put them, so that each is in memory once and captured graphs keep its address. Where layers
are packed, the rows of the two parts of a gated MLP take turns. What is loaded first is rearranged when everything is
loaded. Whatever is loaded later, by whichever of vLLM's entrances, goes through the parameters' weight loaders, which
write it where its rows belong: no update needs a further call or extra memory. Float8 weights are not rearranged; see
``float8_weights.py``. Of int4 weights see ``int4_method.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any, TypeAlias

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.model_manager import DEFAULT_LANGUAGE_WRAPPER_KEY
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mimo import MiMoForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.parameter import BasevLLMParameter
from vllm.sequence import IntermediateTensors

from rose_backend.errors import IntegrityError, ModelError
from rose_backend.kernels import (
    AdapterRows,
    Adapters,
    HeadRotation,
    PackedLinear,
    PackedNorm,
    adapter_rows,
    embed_tokens,
    empty_rows,
)
from rose_backend.layers.decoder import Decoder, run_layers
from rose_backend.layers.linear import (
    DecoderLayer,
    Linear,
    Mlp,
    Norm,
    ResidualStream,
    packs_layers,
)
from rose_backend.vllm_plugin.models.float8_weights import LoadedFloat8, float8_scales, max_float8_rows
from rose_backend.vllm_plugin.models.int4_method import RoseInt4Method, added_bias
from rose_backend.vllm_plugin.models.int4_weights import int4_scheme, max_int4_rows
from rose_backend.vllm_plugin.models.model_choice import KEEP_OPTION
from rose_backend.vllm_plugin.options import rose_options
from rose_backend.vllm_plugin.pending_kernels import wait_for_kernels
from rose_backend.vllm_plugin.plugin_logger import logger

Keep = Callable[[str, torch.Tensor], None]
Product: TypeAlias = "RoseLinearMethod | LoadedFloat8 | RoseInt4Method"
Use = Callable[..., Product]


class LoadedLayer:
    """The weights of a decoder layer that vLLM loads and shards, as Rose's loop over layers takes them.

    Args:
        layer: vLLM's ``LlamaDecoderLayer`` or one like it.
        use_quantized: of modules that are quantized, given as ``RoseLinearMethod`` is.
        packs: prepare it for small batches; see ``layers.linear.pack_layer``.
        keep: registers a tensor that no checkpoint has, by its name; see ``RoseConstants``.
    """

    def __init__(self, layer: Any, use_quantized: Use, *, packs: bool, keep: Keep) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._attention, self._mlp = attention, mlp
        self.products: list[Product] = []
        for module in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
            is_dense = isinstance(module.quant_method, UnquantizedLinearMethod)
            use = RoseLinearMethod if is_dense else use_quantized
            self.products.append(use(module, packs=packs, gated=module is mlp.gate_up_proj))
        norms = {"attn": layer.input_layernorm, "mlp": layer.post_attention_layernorm}
        self._norms = [
            LoadedNorm(norm, packs=packs, keep=partial(keep, f"{name}_norm_scale"))
            for name, norm in norms.items()
        ]

    def read(self) -> DecoderLayer:
        """Return the layer. Later updates write to its tensors."""
        attention, mlp = self._attention, self._mlp
        modules = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        qkv, attn_out, gate_up, down = [
            replace(product.read(), adapters=_adapters_of(module))
            for product, module in zip(self.products, modules, strict=True)
        ]
        attn_norm, mlp_norm = [norm.read() for norm in self._norms]
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


def _adapters_of(module: Any) -> Adapters | None:
    """Return the adapters of a linear module that vLLM has wrapped, which it fills in place; None of another one."""
    if not isinstance(module, BaseLinearLayerWithLoRA):
        return None
    stacked = (module.lora_a_stacked, module.lora_b_stacked)
    return Adapters(*(tuple(each[:, 0] for each in slices) for slices in stacked))


class LoadedNorm:
    """An RMSNorm module, with what packed layers need of it."""

    def __init__(self, module: Any, *, packs: bool, keep: Callable[[torch.Tensor], None]) -> None:
        self._module, self._packs = module, packs
        self._scale: torch.Tensor | None = None  # As PackedNorm's.
        if packs and module.weight.dtype is torch.float16:
            self._scale = torch.ones(1, dtype=torch.float32, device=module.weight.device)
            keep(self._scale)
        if packs:
            module.rose_scale = self._scale
            _load_by(module, _load_norm, _load_norm)

    def read(self) -> Norm:
        """Return the norm as it is loaded now."""
        norm = norm_of(self._module)
        if not self._packs:
            return norm
        packed = PackedNorm(norm.weight, norm.eps, self._scale)
        packed.update_scale()
        return replace(norm, packed=packed)


def _load_norm(module: Any, param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Load the weight of an RMSNorm, and let the scale follow. vLLM may load another tensor first, and copy that."""
    default_weight_loader(param, loaded_weight)
    if not param.is_meta:
        PackedNorm(param.data, module.variance_epsilon, module.rose_scale).update_scale()


def _load_by(module: Any, load: Any, copy: Any) -> None:
    """Make ``load`` the weight loader of a module's parameters; ``copy`` takes this rank's weights as they are.

    As a method of the module: what vLLM keeps of parameters for reloads must not keep the module.
    """
    get_parameter = module.get_parameter
    for parameter in module.parameters(recurse=False):
        parameter.weight_loader = MethodType(load, module)

    def parameter_for_copy(name: str) -> torch.nn.Parameter:
        """Return what vLLM copies a weight into that is not in a checkpoint's format, past its loader."""
        parameter = torch.nn.Parameter(get_parameter(name).data, requires_grad=False)
        parameter.copy_ = partial(copy, module, parameter)  # type: ignore[method-assign]
        return parameter

    module.get_parameter = parameter_for_copy


class RoseLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """One linear module, as vLLM's method of it.

    It leaves a loaded weight as it is, also on a CPU, where vLLM would repack it and drop the original. Packed, only
    the rows of a gate and its factor change places: of what is loaded first when everything is loaded, of all that is
    loaded later on the way.
    """

    supports_pre_processed_weights = False

    def __init__(self, module: Any, *, packs: bool, gated: bool) -> None:
        super().__init__()
        self._module, self._packs, self._gated = module, packs, gated
        self.packed_address: int | None = None
        """Of the weight, once its rows and the bias's alternate."""
        module.quant_method = self
        if packs and gated:
            _load_by(module, _load_gate_up, _copy_gate_up)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Let rows alternate, in place, if they do not yet."""
        if self._packs and self._gated and self.packed_address is None:
            for parameter in self._module.parameters(recurse=False):
                parameter.data.copy_(parameter.data.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1))
            self.packed_address = self._module.weight.data_ptr()

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Refuse: the module is never called, as its weight may be packed."""
        raise IntegrityError(f"{layer.prefix}: a linear module of Rose's layers was called")

    def read(self) -> Linear:
        """Return the product as it is loaded now."""
        module = self._module
        if self.packed_address not in (None, module.weight.data_ptr()):
            raise ModelError(
                f"{module.prefix}: another tensor is in the place of a packed weight, and nothing tells "
                "whether its rows are packed, too: load it by the model's load_weights, vLLM's reload_weights or a "
                f"weight update; {KEEP_OPTION} keeps vLLM's layers"
            )
        weight, bias = module.weight.data, added_bias(module)
        packed = PackedLinear(weight, bias, None, is_gated=self._gated) if self._packs else None
        return Linear(weight.t(), bias, packed)


def _load_gate_up(
    module: Any,
    param: torch.Tensor,  # [2 * I, E] or [2 * I]
    loaded_weight: torch.Tensor,  # of one part, or of several one after the other, of all ranks
    loaded_shard_id: tuple[int, ...] | int | None = None,
) -> None:
    """Load into alternate rows what vLLM's ``MergedColumnParallelLinear`` loads into halves, and refuse as it does."""
    if module.quant_method.packed_address is None:
        load = module.weight_loader_v2 if isinstance(param, BasevLLMParameter) else module.weight_loader
        load(param, loaded_weight, loaded_shard_id)
        return
    module.validate_shard_id(loaded_shard_id)
    rows = param.data.unflatten(0, (-1, 2))
    size, rank = len(rows), module.tp_rank
    parts = (loaded_shard_id,) if isinstance(loaded_shard_id, int) else loaded_shard_id or (0, 1)
    loaded = [
        loaded_weight.narrow(0, (index * module.tp_size + rank) * size, size) for index in range(len(parts))
    ]
    # As vLLM's, before anything is written.
    assert all(each.shape == rows[:, part].shape for each, part in zip(loaded, parts, strict=True))
    for each, part in zip(loaded, parts, strict=True):
        rows[:, part].copy_(each)


def _copy_gate_up(
    module: Any,
    param: torch.Tensor,  # [2 * I, E] or [2 * I]
    loaded_weight: torch.Tensor,  # the same, one part after the other, of this rank
) -> None:
    if loaded_weight.shape != param.shape:
        raise ModelError(
            f"{module.prefix}: a weight has shape {tuple(loaded_weight.shape)}, expected {tuple(param.shape)}"
        )
    if module.quant_method.packed_address is not None:
        loaded_weight = loaded_weight.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
    param.data.copy_(loaded_weight)


def norm_of(module: Any) -> Norm:
    """Return vLLM's ``RMSNorm``."""
    return Norm(module.weight.data, None, module.variance_epsilon)


_PROFILED_KERNELS = (
    *("_embed_tokens_kernel", "_norm_kernel", "_rotate_kernel", "_silu_mul_kernel"),
    "_dequantize_int4_kernel",
)
"""Launched in vLLM's profiling run, when most others are still being compiled."""


class RoseConstants(torch.nn.Module):
    """Tensors that no checkpoint has. As buffers they are restored when vLLM wakes up from a deep sleep."""

    rotary_table: torch.Tensor
    """[P, D] float32, of vLLM's module, whose own is in the model's dtype."""
    mrope_axes: torch.Tensor
    """[D] int64, with M-RoPE: which of a token's three positions each number of a row of the table is of."""

    def __init__(self, rotary: torch.nn.Module, device: torch.device) -> None:
        super().__init__()
        # On the CPU, as transformers computes it: a GPU's cosines differ in the last bits.
        with torch.device("cpu"):
            table = rotary._compute_cos_sin_cache().to(device)  # type: ignore[operator]
        self.register_buffer("rotary_table", table, persistent=False)
        if (section := getattr(rotary, "mrope_section", None)) is not None:
            axes = mrope_axes(section, is_interleaved=bool(rotary.mrope_interleaved))
            # Cosines, then sines.
            self.register_buffer("mrope_axes", torch.tensor(2 * axes, device=device), persistent=False)

    def angles_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Return cosines and sines of tokens with M-RoPE positions [3, T] int64, [T, D] as rows of the table."""
        return self.rotary_table.gather(0, positions.index_select(0, self.mrope_axes).t())

    def keep(self, layer: int, name: str, tensor: torch.Tensor) -> None:
        """Register what is made of a layer's weights, under a name that each layer has once."""
        self.register_buffer(f"{name}_{layer}", tensor, persistent=False)


def mrope_axes(section: Sequence[int], *, is_interleaved: bool) -> list[int]:
    """Return which of three positions (time, height, width) each pair of a head's numbers turns by.

    Args:
        section: how many pairs turn by each; in vLLM ``mrope_section``.
        is_interleaved: they take turns, and what is left of time comes last.
    """
    if not is_interleaved:
        return [axis for axis, size in enumerate(section) for _ in range(size)]
    pairs = range(sum(section))
    return [pair % 3 if pair < 3 * section[pair % 3] else 0 for pair in pairs]


class ModuleAttention:
    """Attention of one step by vLLM's attention modules; a ``StepAttention``."""

    __slots__ = ("_names", "_out", "appends", "decodes_only", "last_tokens", "rotates")

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
        self.rotates = self.decodes_only and self.appends and metadata.max_decode_query_len == 1
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
    """vLLM's module with the decoder layers, such as ``LlamaModel``."""

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
        scheme = int4_scheme(vllm_config.quant_config)
        use_quantized: Use = LoadedFloat8
        if scheme is not None:
            max_rows = max_int4_rows(self.rose_switches)
            use_quantized = partial(RoseInt4Method, scheme=scheme, max_rows=max_rows)
        self._loaded = [
            LoadedLayer(layer, use_quantized, packs=packs, keep=partial(self.rose_constants.keep, index))
            for index, layer in enumerate(layers)
        ]
        if packs:
            self.register_state_dict_pre_hook(_refuse_to_save)  # type: ignore[attr-defined]
        self._layers: list[DecoderLayer | None] = [None] * len(layers)
        self._float8 = [
            product for each in self._loaded for product in each.products if isinstance(product, LoadedFloat8)
        ]
        scales = float8_scales(vllm_config.quant_config)
        self._max_float8_rows = (
            0
            if scales is None
            else max_float8_rows(self.rose_switches, scales, vllm_config.model_config.dtype)
        )
        self._max_packed_rows = None if scheme is None else max_int4_rows(self.rose_switches)
        self._lora_manager: Any = None
        self._rotations: list[HeadRotation | None] = [None] * len(layers)
        for index, attention in enumerate(self._attention):
            attention.impl.after_loading = partial(self._update_layer, index)

    def _update_layer(self, index: int) -> None:
        layer = self._layers[index] = self._loaded[index].read()
        self._rotations[index] = HeadRotation(
            self.rose_constants.rotary_table, layer.query_norm, layer.key_norm, layer.attn_norm.eps
        )
        if index + 1 == len(self._loaded) and self._float8:
            self._choose_packed_rows()

    def _choose_packed_rows(self) -> None:
        """Choose how many decodes multiply float8 weights by Rose's kernel: none if it cannot read one of them.

        Raises:
            ModelError: it cannot after a reload; captured graphs hold it.
        """
        reason = next((product.unread for product in self._float8 if product.unread), None)
        found = [product.has_nan for product in self._float8 if product.has_nan is not None]
        for product in self._float8:
            product.has_nan = None  # No graph holds it.
        if reason is None and found and torch.stack(found).any():
            reason = "a weight that is not a number"
        if reason is not None:
            if self._max_packed_rows:
                raise ModelError(
                    f"reloaded float8 weights cannot be read by Rose's kernels: {reason}; {KEEP_OPTION} "
                    "keeps vLLM's layers"
                )
            logger.warning("All products with float8 weights are vLLM's: %s", reason)
        self._max_packed_rows = 0 if reason is not None else self._max_float8_rows

    def take_moved_weights(self) -> None:
        """Use tensors that have been put in the place of weights.

        Raises:
            ModelError: one is in the place of a weight whose rows are packed.
        """
        for index in range(len(self._loaded)):
            self._update_layer(index)

    @property
    def lora_manager(self) -> Any:
        """vLLM's ``LoRAModelManager``; None without LoRA."""
        return self._lora_manager

    @lora_manager.setter
    def lora_manager(self, manager: Any) -> None:
        self._lora_manager = manager
        # vLLM has wrapped the linear modules of the loaded model then.
        self.take_moved_weights()

    def _adapter_rows(self, num_tokens: int) -> AdapterRows | None:
        """Return which adapter each token of the step has; None if none has one."""
        if self._lora_manager is None:
            return None
        mapping = self._lora_manager.punica_wrapper_mapping[DEFAULT_LANGUAGE_WRAPPER_KEY]
        kernel_meta = getattr(mapping, "token_mapping_meta", None)
        # On a GPU; vLLM captures graphs of steps without adapters so, too.
        if kernel_meta is not None and kernel_meta.no_lora_flag_cpu:
            return None
        # Rows of padding have what was there before.
        return adapter_rows(mapping._token_lora_indices[:num_tokens])

    def forward(
        self,
        input_ids: torch.Tensor | None,  # [T] int32 or int64
        positions: torch.Tensor,  # [T] int64, or [3, T] with M-RoPE
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,  # [T, E]
        deepstack: Sequence[torch.Tensor] = (),  # [T, E] each
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the hidden states after the final norm, [T, E]. ``deepstack`` is as a ``Decoder``'s.

        Where a drafter has asked for auxiliary hidden states, return them, too, in the order of layers, [T, E] each:
        the sums that enter these layers, as vLLM's models do.
        """
        model, norm_input, num_tokens = self.model, None, positions.shape[-1]
        wait_for_kernels(*_PROFILED_KERNELS)
        rows = self._adapter_rows(num_tokens)
        impl = self._attention[0].impl
        num_heads, num_kv_heads, head_size = impl.num_heads, impl.num_kv_heads, impl.head_size
        # Before the embedding, which overlaps nothing.
        attention = ModuleAttention(
            self._attention, empty_rows(model.norm.weight.data, num_tokens, num_heads, head_size)
        )
        rotations, tokens = self._rotations, positions
        if positions.ndim == 2 or inputs_embeds is not None:
            tokens = torch.arange(num_tokens, device=positions.device)
        if positions.ndim == 2:
            # For all layers at once. Even a decode's positions are not the number of tokens before it.
            angles, positions = self.rose_constants.angles_of(positions), tokens
            rotations = [
                replace(each, cos_sin=angles, by_token=True) for each in rotations if each is not None
            ]
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
            rotations=rotations,
            all_reduce=self._all_reduce,
            adapter_rows=rows,
            max_packed_rows=self._max_packed_rows,
            deepstack=deepstack,
            held_layers=model.aux_hidden_state_layers,
        )
        first_norm = decoder.first_norm(num_tokens, attention)
        if inputs_embeds is not None:
            # Copied, as they are the runner's own and small batches write theirs.
            hidden, norm_input = embed_tokens(tokens, tokens, inputs_embeds, next_norm=first_norm)
        elif self._all_reduce is not None or rows is not None:
            hidden = model.embed_input_ids(input_ids)
        else:
            assert input_ids is not None, "the first stage has token ids or embeddings"
            hidden, norm_input = embed_tokens(
                input_ids, positions, model.embed_tokens.weight.data, next_norm=first_norm
            )
        auxiliary: list[torch.Tensor] = []
        with impl.workspace:
            normed = run_layers(decoder, hidden, norm_input, positions, attention, auxiliary)
        return (normed, auxiliary) if auxiliary else normed


class RoseLlamaForCausalLM(RoseDecoder, LlamaForCausalLM):  # type: ignore[misc]
    """Llama."""


class RoseMistralForCausalLM(RoseDecoder, MistralForCausalLM):  # type: ignore[misc]
    """Mistral."""


class RoseQwen2ForCausalLM(RoseDecoder, Qwen2ForCausalLM):  # type: ignore[misc]
    """Qwen2."""


class RoseMiMoForCausalLM(RoseDecoder, MiMoForCausalLM):  # type: ignore[misc]
    """MiMo: Qwen2, but for its last norm, which vLLM applies where logits are computed; MTP modules read the sum."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # What leaves the last layer.
        self.model.aux_hidden_state_layers = (len(self.model.layers),)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the hidden states before the final norm, [T, E]; see ``RoseDecoder.forward``."""
        _, (hidden,) = super().forward(*args, **kwargs)
        return hidden


class RoseQwen3ForCausalLM(RoseDecoder, Qwen3ForCausalLM):  # type: ignore[misc]
    """Qwen3."""
