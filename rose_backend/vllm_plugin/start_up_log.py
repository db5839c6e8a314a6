"""The line at start-up that lists which parts of Rose are active."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rose_backend.config import SWITCH_NAMES
from rose_backend.vllm_plugin.attention.flash_attention import describe_thresholds, uses_flash_attention
from rose_backend.vllm_plugin.attention.mixed_graphs import (
    why_mixed_steps_are_not_captured,
    why_prompts_need_python,
)
from rose_backend.vllm_plugin.models.model_choice import GPT2, ModelChoice
from rose_backend.vllm_plugin.options import (
    NEEDS_MANAGER,
    appends_in_attention,
    batches_decode_steps,
    has_rust_front_end,
    uses_rose_manager,
    why_decodes_go_one_by_one,
    why_kv_is_written_first,
    why_steps_are_not_replayed,
)
from rose_backend.vllm_plugin.patch_ledger import is_applied
from rose_backend.vllm_plugin.sampler import is_sampler_chosen, is_watermarked, why_vllm_draws

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from rose_backend.config import PluginConfig


def describe_parts(vllm_config: VllmConfig, options: PluginConfig, choice: ModelChoice) -> str:
    """Return the line.

    Args:
        vllm_config: finished; Rose's scheduler and model class are already chosen.
        options: the user's switches.
        choice: Rose's model class, or why vLLM's own stays.
    """
    fused = appends_in_attention(vllm_config, options)
    manager = "RoseKVCacheManager" if uses_rose_manager(vllm_config) else "vLLM's own"
    switches = (*SWITCH_NAMES, "block_manager", "batched_scheduling", "step_graph", "joined_outputs")
    off = [name for name in switches if not getattr(options, name)]
    parts = (
        f"attention ROSE ({'stores K/V itself' if fused else 'separate K/V write'}{_describe_flash(vllm_config)}"
        f"{_describe_graphs(vllm_config)})",
        f"block manager {manager} ({_describe_hits(vllm_config, options)})",
        f"decodes scheduled {'at once' if batches_decode_steps(vllm_config) else 'one by one'}",
        f"model {_describe_model(vllm_config, options, choice)}",
        f"sampler {_describe_sampler(vllm_config)}",
        f"disabled: {', '.join(off) or 'none'}",
        f"unavailable: {_describe_idle_parts(vllm_config, options, choice) or 'none'}",
    )
    return f"Rose is active: {'; '.join(parts)}"


def _describe_flash(vllm_config: VllmConfig) -> str:
    if not uses_flash_attention(vllm_config):
        return ""
    return f", FlashAttention 3 for {describe_thresholds()}, outside full CUDA graphs"


def _describe_graphs(vllm_config: VllmConfig) -> str:
    """Return why steps with prompts are not replayed from full graphs, where steps that only decode are."""
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    mode = vllm_config.compilation_config.cudagraph_mode
    if not current_platform.is_cuda() or mode is None or mode.decode_mode() != CUDAGraphMode.FULL:
        return ""
    if mode.mixed_mode() == CUDAGraphMode.FULL and why_prompts_need_python(vllm_config) is None:
        return ""
    reason = why_mixed_steps_are_not_captured(vllm_config) or "CUDA graph options of your own"
    return f", full CUDA graphs of decodes only ({reason})"


def _describe_idle_parts(vllm_config: VllmConfig, options: PluginConfig, choice: ModelChoice) -> str:
    """Return the switches that are on without effect, with the reason: ``a and b (reason), c (another)``."""
    why_idle = {
        "fused_kv_append": why_kv_is_written_first(vllm_config),
        "batched_scheduling": why_decodes_go_one_by_one(vllm_config),
        "token_granular_hits": None if uses_rose_manager(vllm_config) else NEEDS_MANAGER,
        "fused_mlp": choice.reason,
        "fused_add_layernorm": choice.reason,
        "fused_sampler": _why_no_draws(vllm_config),
        "cuda_graph": _why_no_graphs(vllm_config),
        "step_graph": why_steps_are_not_replayed(vllm_config),
        "chunked_prefill": None if vllm_config.scheduler_config.enable_chunked_prefill else "off in vLLM",
        "prefix_cache": None if vllm_config.cache_config.enable_prefix_caching else "off in vLLM",
        "exact_cached_tokens": None if uses_rose_manager(vllm_config) else NEEDS_MANAGER,
        "joined_outputs": "vLLM's Rust front end" if has_rust_front_end(vllm_config) else None,
    }
    names_of: dict[str, list[str]] = {}
    for name, reason in why_idle.items():
        if reason is not None and getattr(options, name):
            names_of.setdefault(reason, []).append(name)
    return ", ".join(f"{' and '.join(names)} ({reason})" for reason, names in names_of.items())


def _why_no_graphs(vllm_config: VllmConfig) -> str | None:
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return "no CUDA device"
    model_config = vllm_config.model_config
    if model_config is not None and model_config.enforce_eager:
        return "--enforce-eager"
    is_off = vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    return "cudagraph_mode NONE" if is_off else None


def _why_no_draws(vllm_config: VllmConfig) -> str | None:
    """Return why this engine never samples with Rose although its sampler is switched on; None if it does."""
    if not is_applied("sampler_v2" if vllm_config.use_v2_model_runner else "sampler_v1"):
        return "this vLLM's sampler could not be replaced"
    return why_vllm_draws(vllm_config)


def _describe_hits(vllm_config: VllmConfig, options: PluginConfig) -> str:
    if not vllm_config.cache_config.enable_prefix_caching:
        return "no prefix cache"
    if not uses_rose_manager(vllm_config):
        return "prefix hits at block borders"
    hits = f"prefix hits {'to the token' if options.token_granular_hits else 'at block borders'}"
    return f"{hits}, reported exactly" if options.exact_cached_tokens else hits


def _describe_model(vllm_config: VllmConfig, options: PluginConfig, choice: ModelChoice) -> str:
    chosen = choice.architecture
    if chosen is None:
        model_config = vllm_config.model_config
        return f"vLLM's own {model_config.architecture if model_config is not None else ''}".rstrip()
    norm = "LayerNorm" if chosen == GPT2 else "RMSNorm"
    fused = {"fused MLP": options.fused_mlp, f"fused add + {norm}": options.fused_add_layernorm}
    return f"{chosen} ({', '.join(name for name, is_on in fused.items() if is_on)})"


def _describe_sampler(vllm_config: VllmConfig) -> str:
    if not is_sampler_chosen(vllm_config):
        return "vLLM's own"
    reason = _why_no_draws(vllm_config)
    if reason is not None:
        return f"vLLM's own ({reason})"
    left = ["drafts and seeds"] if vllm_config.speculative_config is not None else []
    if is_watermarked(vllm_config):
        left.append("watermarks")
    return f"Rose ({' and '.join(left)} by vLLM's own)" if left else "Rose"
