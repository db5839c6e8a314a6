"""Which models run with Rose's layers, and the names they have in vLLM's model registry.

The names are new ones: vLLM's own classes stay in the registry untouched, also for engines of the same process that do
not use ROSE. The different architecture name also keeps compiled graphs apart in vLLM's compile cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from vllm import envs
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform

from rose_backend.config import PluginConfig
from rose_backend.errors import ConfigError
from rose_backend.vllm_plugin.attention.audited_models import class_of
from rose_backend.vllm_plugin.models.float8_weights import float8_scales, why_float8_stays
from rose_backend.vllm_plugin.models.int4_weights import int4_scheme, why_int4_stays
from rose_backend.vllm_plugin.options import (
    OTHER_DRAFTER,
    first_reason,
    has_head,
    has_other_drafter,
    is_rose,
)
from rose_backend.vllm_plugin.plugin_logger import log_once

_PACKAGE = "rose_backend.vllm_plugin.models"
GPT2 = "RoseGPT2LMHeadModel"
EAGLE3_HEAD = "RoseEagle3LlamaForCausalLM"
QWEN2_5_VL, QWEN3_VL = "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"
_TAKE_IMAGES = (QWEN2_5_VL, QWEN3_VL)
DECODERS = {
    **{
        f"{family}ForCausalLM": f"Rose{family}ForCausalLM"
        for family in ("Llama", "MiMo", "Mistral", "Qwen2", "Qwen3")
    },
    **{name: f"Rose{name}" for name in _TAKE_IMAGES},
}
"""vLLM's names, and Rose's for the same models with the standalone engine's layers."""
MODEL_CLASSES = {
    GPT2: f"{_PACKAGE}.gpt2:{GPT2}",
    EAGLE3_HEAD: f"{_PACKAGE}.eagle3:{EAGLE3_HEAD}",
    **{
        name: f"{_PACKAGE}.{'vision_decoder' if vllms in _TAKE_IMAGES else 'decoder'}:{name}"
        for vllms, name in DECODERS.items()
    },
}
_VLLMS_HEAD = "vllm.model_executor.models.llama_eagle3:Eagle3LlamaForCausalLM"
_ROSE_ARCHITECTURES = {"GPT2LMHeadModel": GPT2, **DECODERS}
_TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_MROPE_TYPES = ("default", "yarn")
_ROPE_FIELDS = ("use_fope", "rope_dim")
"""Fields that change the rotation whatever ``rope_type`` says."""
_LOAD_FORMATS = (
    *("auto", "hf", "safetensors", "pt", "npcache", "dummy", "mistral"),
    *("fastsafetensors", "instanttensor", "runai_streamer"),
)
"""Load formats that read weights in a checkpoint's layout, or make random ones. Others deliver them in the layout of
vLLM's layers."""
_WEIGHT_TRANSFERS = ("nccl", "ipc")
"""Weight transfer backends that use weight loaders. Others write into parameters directly, and those of Rose's layers
are packed."""
KEEP_OPTION = '--additional-config \'{"rose": {"fused_mlp": false, "fused_add_layernorm": false}}\''
"""Keeps vLLM's layers."""
NO_LAYERS = "no layers of Rose's for this model"


class ModelChoice(NamedTuple):
    """The class that runs a model."""

    architecture: str | None
    """Name of Rose's class; None: vLLM's own class stays."""
    reason: str | None = None
    """Why vLLM's class stays although ``fused_mlp`` or ``fused_add_layernorm`` is on."""


def choose_model_class(
    vllm_config: VllmConfig, options: PluginConfig, *, has_default_graphs: bool = False
) -> ModelChoice:
    """Make the configuration name Rose's class for its model, if there is one and it is switched on.

    Call it when the rest of the configuration is final, CUDA graphs included.

    Args:
        has_default_graphs: the user has set no CUDA graph option, so Rose may choose which steps are captured.

    Raises:
        ConfigError: weights are offloaded in a way that Rose's GPT-2 cannot wait for.
    """
    model_config = vllm_config.model_config
    if model_config is None or not (options.fused_mlp or options.fused_add_layernorm):
        return ModelChoice(None)
    architectures = getattr(model_config.hf_config, "architectures", None) or []
    chosen = str(architectures[0]) if len(architectures) == 1 else ""
    if chosen not in MODEL_CLASSES:
        # The architecture that vLLM has resolved: with --model-impl transformers its name is not in the table.
        chosen = _ROSE_ARCHITECTURES.get(model_config.architecture, "")
        # vLLM's class clears image features in Python after a step with prompts, so only decodes are captured.
        may_drop_piecewise = (
            has_default_graphs and model_config.architecture == QWEN3_VL and vllm_config.use_v2_model_runner
        )
        reason = _why_class_stays(vllm_config, chosen, options, may_drop_piecewise=may_drop_piecewise)
        if reason is not None:
            return ModelChoice(None, reason)
        compilation = vllm_config.compilation_config
        if may_drop_piecewise and compilation.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE:
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    model_config.hf_config.architectures = [chosen]
    if chosen == GPT2:
        return ModelChoice(chosen)
    if has_head(vllm_config):
        _choose_head_class(vllm_config)
        _fuse_without_compiler(vllm_config)
    # Nothing is compiled by torch: the loop over layers launches Rose's kernels.
    vllm_config.compilation_config.mode = CompilationMode.NONE
    custom_ops = vllm_config.compilation_config.custom_ops
    is_float8 = float8_scales(vllm_config.quant_config) is not None
    if is_float8 and not {"+quant_fp8", "-quant_fp8"} & set(custom_ops):
        # vLLM's products quantize their input: by one kernel with this op, by several torch operations without, as
        # nothing is compiled.
        custom_ops.append("+quant_fp8")
    return ModelChoice(chosen)


def _choose_head_class(vllm_config: VllmConfig) -> None:
    """Make the configuration name Rose's class for its EAGLE head, if there is one.

    Greedy drafts are then chosen from the head's own, smaller vocabulary; vLLM would first scatter the head's logits to
    the model's.
    """
    speculative = vllm_config.speculative_config
    draft_config = speculative.draft_model_config
    if EAGLE3_HEAD in (draft_config.hf_config.architectures or ()):
        return
    reason = _why_head_stays(vllm_config)
    if reason is not None:
        log_once(f"The layers of the head that drafts are vLLM's: {reason}")
        return
    draft_config.hf_config.architectures = [EAGLE3_HEAD]
    if speculative.draft_sample_method == "greedy" and not speculative.enable_adaptive_verification:
        speculative.use_local_argmax_reduction = True


def _why_head_stays(vllm_config: VllmConfig) -> str | None:
    """Return why vLLM's own class runs the EAGLE head; None if Rose's can."""
    speculative = vllm_config.speculative_config
    draft_config = speculative.draft_model_config
    fields, architecture, backend = (
        draft_config.hf_config,
        draft_config.architecture,
        speculative.attention_backend,
    )
    if class_of(architecture) != _VLLMS_HEAD or architecture in draft_config.model_class_overrides:
        return f"{architecture} is no EAGLE-3 head of a Llama's layer"
    # Model runner V1 lets vLLM choose the head's backend.
    has_rose = vllm_config.use_v2_model_runner if backend is None else is_rose(backend)
    reasons = {
        "another attention backend for the drafter": not has_rose,
        "more than one layer": fields.num_hidden_layers != 1,
        "parallel drafting": speculative.parallel_drafting,
        "quantized weights": draft_config.quantization is not None,
        "tensor parallelism": vllm_config.parallel_config.tensor_parallel_size > 1,
        "another output": bool(getattr(fields, "norm_output", False)),
        "another activation than SiLU": fields.hidden_act != "silu",
    }
    return first_reason(reasons) or _why_config_differs(fields, takes_images=False)


def _fuse_without_compiler(vllm_config: VllmConfig) -> None:
    """Let a drafter's layers, which are vLLM's, use vLLM's fused operations, as vLLM does with compilation off."""
    compilation, priority = vllm_config.compilation_config, vllm_config.kernel_config.ir_op_priority
    compiled = asdict(current_platform.get_default_ir_op_priority(vllm_config))
    compilation.mode = CompilationMode.NONE
    launched = asdict(current_platform.get_default_ir_op_priority(vllm_config))
    # Only priorities that still have their default; the user has set the others.
    defaults = {name: launched[name] for name in launched if getattr(priority, name) == compiled[name]}
    vllm_config.kernel_config.ir_op_priority = replace(priority, **defaults)
    compilation.custom_ops[:] = ["all" if name == "none" else name for name in compilation.custom_ops]


def forget_compilation_mode(vllm_config: VllmConfig) -> None:
    """Unset the compilation mode that ``choose_model_class`` has set, before vLLM finishes a copy of a configuration.

    The copy then gets the same defaults as the original.
    """
    model_config = vllm_config.model_config
    if model_config is not None and set(DECODERS.values()) & set(model_config.hf_config.architectures or ()):
        vllm_config.compilation_config.mode = None


def _why_class_stays(
    vllm_config: VllmConfig, chosen: str, options: PluginConfig, *, may_drop_piecewise: bool
) -> str | None:
    """Return why vLLM's own class runs the model instead of ``chosen``; None if ``chosen`` can.

    Args:
        may_drop_piecewise: whether the model may do without vLLM's piecewise CUDA graphs.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    model_config = vllm_config.model_config
    if (
        chosen not in ModelRegistry.models
        # The user has registered another class.
        or model_config.architecture in model_config.model_class_overrides
        or model_config.runner_type != "generate"
        or model_config.convert_type != "none"
    ):
        return NO_LAYERS
    if chosen != GPT2:
        return (
            _why_decoder_stays(vllm_config)
            or _why_steps_are_compiled(vllm_config, may_drop_piecewise)
            or _why_weights_differ(vllm_config, options)
        )
    if vllm_config.quant_config is not None:
        # Rose adds biases itself, and a quantization method (Marlin's) may have rearranged them for its kernel.
        return "quantized weights"
    activation = getattr(model_config.hf_config, "activation_function", None)
    if activation not in _TANH_GELUS:
        return "another activation than GELU in its tanh form"
    if _hooks_blocks(vllm_config):
        raise ConfigError(
            "weight offloading (--offload-group-size, --cpu-offload-gb without UVA): Rose's GPT-2 layers run parts of "
            f"blocks, and offloaded weights arrive with whole ones; {KEEP_OPTION} keeps vLLM's layers"
        )
    return None


def _why_decoder_stays(vllm_config: VllmConfig) -> str | None:
    """Return why vLLM's layers run a model of ``DECODERS``; None if Rose's can."""
    model_config, parallel_config = vllm_config.model_config, vllm_config.parallel_config
    offload, load_format = vllm_config.offload_config, vllm_config.load_config.load_format
    transfer = getattr(vllm_config.weight_transfer_config, "backend", None)
    reasons = {
        "pipeline parallelism": parallel_config.pipeline_parallel_size > 1,
        "dual batch overlap": parallel_config.enable_dbo,
        # Not tried.
        OTHER_DRAFTER: has_other_drafter(vllm_config),
        "weight offloading": offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0,
        "this load format": load_format not in _LOAD_FORMATS,
        "this weight transfer backend": transfer not in (None, *_WEIGHT_TRANSFERS),
        "another attention backend for some layers": bool(vllm_config.attention_config.backend_per_kind),
        "this linear backend": vllm_config.kernel_config.linear_backend != "auto",
        "batch invariance": bool(envs.VLLM_BATCH_INVARIANT),
    }
    return (
        first_reason(reasons)
        or _why_adapters_differ(vllm_config)
        or _why_images_differ(vllm_config)
        or _why_config_differs(model_config.hf_text_config, model_config.architecture in _TAKE_IMAGES)
    )


def _why_weights_differ(vllm_config: VllmConfig, options: PluginConfig) -> str | None:
    """Return why Rose's layers cannot use the model's quantized weights; None if they can, or nothing is quantized."""
    quant_config = vllm_config.quant_config
    if quant_config is None and vllm_config.model_config.quantization is None:
        return None
    scales, scheme = float8_scales(quant_config), int4_scheme(quant_config)
    reasons = {
        "quantized weights other than float8 and int4": scales is None and scheme is None,
        "quantized_layers off": not options.quantized_layers,
        "this linear backend": bool(vllm_config.kernel_config.linear_backend_per_quant),
    }
    reason = first_reason(reasons)
    if reason is not None or scales is None:
        return reason or why_int4_stays(vllm_config, options)
    return why_float8_stays(vllm_config, options, scales)


def _why_images_differ(vllm_config: VllmConfig) -> str | None:
    """Return what Rose's layers do not support in a model that takes images; None if nothing, or for other models."""
    if vllm_config.model_config.architecture not in _TAKE_IMAGES:
        return None
    reasons = {
        # Not tried.
        "quantized weights beside an encoder of images": vllm_config.model_config.quantization is not None,
        "a head beside images": has_head(vllm_config),
        "--mm-encoder-only": vllm_config.is_mm_encoder_only,
        # Nothing of the model is compiled with Rose's class.
        "compile_mm_encoder": vllm_config.compilation_config.compile_mm_encoder,
    }
    return first_reason(reasons)


def _why_adapters_differ(vllm_config: VllmConfig) -> str | None:
    """Return what Rose's layers do not support in the LoRA options; None if nothing, or without LoRA."""
    lora, dtype = vllm_config.lora_config, str(vllm_config.model_config.dtype).removeprefix("torch.")
    if lora is None:
        return None
    reasons = {
        "LoRA in another dtype": str(lora.lora_dtype).removeprefix("torch.") not in ("None", "auto", dtype),
        "--fully-sharded-loras": lora.fully_sharded_loras,
        # Not tried.
        "LoRA of more than 8 adapters at once": lora.max_loras > 8,
        "LoRA of ranks above 64": lora.max_lora_rank > 64,
        "LoRA with tensor parallelism": vllm_config.parallel_config.tensor_parallel_size > 1,
    }
    return first_reason(reasons)


def _why_config_differs(fields: Any, takes_images: bool) -> str | None:
    """Return what Rose's layers do not support in a config.json; None if nothing."""
    rope: Mapping[str, Any] = getattr(fields, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if (
        rope_type not in (_MROPE_TYPES if takes_images else _ROPE_TYPES)
        or bool(rope.get("mrope_section")) != takes_images
        or any(isinstance(value, Mapping) for value in rope.values())
        or rope.get("partial_rotary_factor") not in (None, 1.0)
        or any(rope.get(field) for field in _ROPE_FIELDS)
    ):
        return "rotary positions of another kind"
    others = {
        "attention in both directions": getattr(fields, "is_causal", True) is False,
        "dual chunk attention": getattr(fields, "dual_chunk_attention_config", None) is not None,
        "scaled queries": getattr(fields, "llama_4_scaling", None) is not None,
        "adaptive norms": bool(getattr(fields, "ada_rms_norm_t_cond", False)),
    }
    return first_reason(others)


def _why_steps_are_compiled(vllm_config: VllmConfig, may_drop_piecewise: bool) -> str | None:
    """Return why vLLM's compiled layers are needed; None if all steps run from full CUDA graphs, or without graphs.

    Args:
        may_drop_piecewise: whether the model may do without vLLM's piecewise CUDA graphs.
    """
    if not current_platform.is_cuda():
        return None
    compilation = vllm_config.compilation_config
    if compilation.mode not in (CompilationMode.NONE, CompilationMode.VLLM_COMPILE):
        return "this compilation mode"
    # Piecewise graphs are captured from compiled code only, so Rose's layers would be launched kernel by kernel.
    has_pieces = not may_drop_piecewise and compilation.cudagraph_mode.requires_piecewise_compilation()
    return "piecewise CUDA graphs" if has_pieces else None


def _hooks_blocks(vllm_config: VllmConfig) -> bool:
    """Whether offloaded weights are fetched by a hook on calls of whole layers, which Rose's model never makes.

    Weights that the GPU reads from CPU memory (UVA) need no hook.
    """
    offload = vllm_config.offload_config
    backend = offload.offload_backend
    if backend == "prefetch" or (backend == "auto" and offload.prefetch.offload_group_size > 0):
        return True
    if offload.uva.cpu_offload_gb == 0:
        return False
    from vllm.utils.platform_utils import is_uva_available

    return envs.VLLM_WEIGHT_OFFLOADING_DISABLE_UVA or not is_uva_available()
