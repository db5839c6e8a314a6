"""Checks and completes vLLM's configuration when ROSE is selected, and describes which parts of Rose are active.

It does nothing with any other backend. Also makes vLLM's CPU platform use ROSE when it is selected, as the CUDA
platform does.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from vllm import envs
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform

from rose_backend.config import SWITCH_NAMES, PluginConfig
from rose_backend.errors import ConfigError
from rose_backend.vllm_plugin import options
from rose_backend.vllm_plugin.attention.flash_attention import describe_thresholds, uses_flash_attention
from rose_backend.vllm_plugin.attention.mixed_graphs import (
    choose_mixed_graphs,
    has_default_graph_options,
    why_mixed_steps_are_not_captured,
    why_prompts_need_python,
)
from rose_backend.vllm_plugin.models.float8_weights import float8_scales
from rose_backend.vllm_plugin.models.int4_weights import int4_scheme
from rose_backend.vllm_plugin.models.model_choice import (
    GPT2,
    ModelChoice,
    choose_model_class,
    forget_compilation_mode,
)
from rose_backend.vllm_plugin.patch_ledger import apply_patch, is_applied
from rose_backend.vllm_plugin.plugin_logger import log_once, logger
from rose_backend.vllm_plugin.refusals import check_supported
from rose_backend.vllm_plugin.registration import is_rose
from rose_backend.vllm_plugin.sampler import is_sampler_chosen, is_watermarked, why_vllm_draws


def wrap_post_init(original: Callable[..., None]) -> Callable[..., None]:
    """Build the replacement of ``VllmConfig.__post_init__``; see the patch ledger."""

    def __post_init__(self: VllmConfig, *args: Any, **kwargs: Any) -> None:
        model_config = self.model_config
        if not options.is_rose_selected(self) or (
            model_config is not None and model_config.is_submodel_config
        ):
            return original(self, *args, **kwargs)
        try:
            switches = options.rose_options(self)
            _switch_off_vllm_parts(self, switches)
            is_open = switches.block_manager and self.scheduler_config.disable_hybrid_kv_cache_manager is None
            if is_open and not options.has_states(self) and options.why_windows_are_kept(self) is not None:
                # One group of blocks for all layers. A copy that is finished again finds it, or what the user has set.
                self.scheduler_config.disable_hybrid_kv_cache_manager = True
            has_default_graphs = has_default_graph_options(self)
            forget_compilation_mode(self)
            is_renamed = _rename_ngram(self)
            original(self, *args, **kwargs)
            if is_renamed and self.scheduler_config.async_scheduling:
                log_once(
                    "Rose runs drafts of method ngram as ngram_gpu: the same lookup, with asynchronous scheduling"
                )
            check_supported(self, switches)
            if has_default_graphs:
                choose_mixed_graphs(self)
            choice = choose_model_class(self, switches, has_default_graphs=has_default_graphs)
        except ConfigError as error:
            # vLLM wraps the error in several lines; this one is complete.
            logger.error("Cannot start with --attention-backend rose: %s", error)
            raise
        if switches.block_manager:
            _choose_scheduler(self)
        if not options.has_rust_front_end(self):
            # The process that makes the configuration is the one that receives the engines' outputs.
            apply_patch("output_statistics")
            if switches.joined_outputs:
                apply_patch("merged_outputs")
        keep_compiled_kernels()
        # Engine core and workers finish copies of the same configuration.
        if multiprocessing.parent_process() is None:
            log_once(describe_parts(self, switches, choice))
        return None

    return __post_init__


def keep_compiled_kernels() -> None:
    """Give Triton one cache for all starts, unless the user has chosen one.

    vLLM's compiler sets it in the middle of a start: to one folder where it compiles the model, to another where it
    finds the model compiled. Rose's kernels, which are compiled later, would be compiled again in the second start.
    """
    if current_platform.is_cuda():
        # Engine core and workers inherit it.
        os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(envs.VLLM_CACHE_ROOT, "rose_triton_cache"))


def _switch_off_vllm_parts(vllm_config: VllmConfig, switches: PluginConfig) -> None:
    if not switches.prefix_cache:
        vllm_config.cache_config.enable_prefix_caching = False
    if not switches.cuda_graph:
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    if not switches.chunked_prefill:
        scheduler_config = vllm_config.scheduler_config
        scheduler_config.enable_chunked_prefill = False
        model_config = vllm_config.model_config
        if model_config is not None and scheduler_config.max_num_batched_tokens < model_config.max_model_len:
            raise ConfigError(
                f"chunked_prefill: false needs --max-num-batched-tokens of at least max_model_len "
                f"{model_config.max_model_len}, got {scheduler_config.max_num_batched_tokens}"
            )


def _rename_ngram(vllm_config: VllmConfig) -> bool:
    """Rename method ``ngram`` to ``ngram_gpu``, and return whether it was: vLLM 0.32 schedules asynchronously only with
    the latter.

    Model runner V2 has one lookup for both names; V1 has one for each.
    """
    speculative = vllm_config.speculative_config
    is_renamed = (
        speculative is not None
        and speculative.method == "ngram"
        and vllm_config.scheduler_config.async_scheduling is not False
        and bool(vllm_config.use_v2_model_runner)
    )
    if is_renamed:
        speculative.method = speculative.model = "ngram_gpu"
    return is_renamed


def _choose_scheduler(vllm_config: VllmConfig) -> None:
    # The class must match the mode: only a subclass of AsyncScheduler overlaps steps.
    is_async = vllm_config.scheduler_config.async_scheduling
    vllm_config.scheduler_config.scheduler_cls = (
        options.ASYNC_SCHEDULER_CLASS if is_async else options.SCHEDULER_CLASS
    )


def wrap_get_attn_backend_cls(original: Callable[..., str]) -> Callable[..., str]:
    """Build the replacement of ``CpuPlatform.get_attn_backend_cls``; see the patch ledger."""

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> str:
        if not is_rose(selected_backend):
            return original(cls, selected_backend, attn_selector_config, *args, **kwargs)
        reasons = selected_backend.get_class().validate_configuration(
            device_capability=None, **attn_selector_config._asdict()
        )
        if reasons:
            raise ConfigError(
                f"--attention-backend {selected_backend.name} does not support this model or setting: "
                f"{', '.join(reasons)}; choose another attention backend"
            )
        return str(selected_backend.get_path())

    return get_attn_backend_cls


# The line at start-up


def describe_parts(vllm_config: VllmConfig, switches: PluginConfig, choice: ModelChoice) -> str:
    """Return the line that lists which parts of Rose are active.

    Args:
        vllm_config: finished; Rose's scheduler and model class are already chosen.
        switches: of the user.
        choice: Rose's model class, or why vLLM's own stays.
    """
    attention = "separate K/V write"
    if options.appends_in_attention(vllm_config):
        attention = "stores K/V itself"
        drafts = vllm_config.speculative_config
        if vllm_config.num_lookahead_tokens and (
            drafts.attention_backend is None or is_rose(drafts.attention_backend)
        ):
            attention += ", separate K/V write in the drafter's layers"
    if uses_flash_attention(vllm_config):
        attention += f", FlashAttention 3 for {describe_thresholds()}, outside full CUDA graphs"
    manager = "RoseKVCacheManager" if options.uses_rose_manager(vllm_config) else "vLLM's own"
    names = (
        *SWITCH_NAMES,
        "block_manager",
        "batched_scheduling",
        "step_graph",
        "adaptive_drafts",
        "joined_outputs",
        "quantized_layers",
    )
    off = [name for name in names if not getattr(switches, name)]
    parts = (
        f"attention ROSE ({attention}{_describe_graphs(vllm_config)})",
        f"block manager {manager} ({_describe_hits(vllm_config, switches)})",
        f"decodes scheduled {'at once' if options.batches_decode_steps(vllm_config) else 'one by one'}",
        f"model {_describe_model(vllm_config, switches, choice)}",
        f"sampler {_describe_sampler(vllm_config)}",
        f"disabled: {', '.join(off) or 'none'}",
        f"unavailable: {_describe_idle_parts(vllm_config, switches, choice) or 'none'}",
    )
    return f"Rose is active: {'; '.join(parts)}"


def _describe_graphs(vllm_config: VllmConfig) -> str:
    """Return why steps with prompts are not replayed from full graphs, where steps that only decode are."""
    mode = vllm_config.compilation_config.cudagraph_mode
    if not current_platform.is_cuda() or mode is None or mode.decode_mode() != CUDAGraphMode.FULL:
        return ""
    if mode.mixed_mode() == CUDAGraphMode.FULL and why_prompts_need_python(vllm_config) is None:
        return ""
    reason = why_mixed_steps_are_not_captured(vllm_config) or "CUDA graph options of your own"
    return f", full CUDA graphs of decodes only ({reason})"


def _describe_idle_parts(vllm_config: VllmConfig, switches: PluginConfig, choice: ModelChoice) -> str:
    """Return the switches that are on without effect, with the reason: ``a and b (reason), c (another)``."""
    why_idle = {
        "fused_kv_append": options.why_kv_is_written_first(vllm_config),
        "batched_scheduling": options.why_decodes_go_one_by_one(vllm_config),
        "token_granular_hits": None if options.uses_rose_manager(vllm_config) else options.NEEDS_MANAGER,
        "fused_mlp": choice.reason,
        "fused_add_layernorm": choice.reason,
        "fused_sampler": _why_no_draws(vllm_config),
        "cuda_graph": options.why_no_graphs(vllm_config),
        "step_graph": options.why_steps_are_not_replayed(vllm_config),
        "chunked_prefill": None if vllm_config.scheduler_config.enable_chunked_prefill else "off in vLLM",
        "prefix_cache": None if vllm_config.cache_config.enable_prefix_caching else "off in vLLM",
        "exact_cached_tokens": None if options.uses_rose_manager(vllm_config) else options.NEEDS_MANAGER,
        "joined_outputs": "vLLM's Rust front end" if options.has_rust_front_end(vllm_config) else None,
        "step_budget": options.why_steps_have_no_budget(vllm_config),
        "adaptive_drafts": options.why_drafts_are_fixed(vllm_config),
    }
    names_of: dict[str, list[str]] = {}
    for name, reason in why_idle.items():
        if reason is not None and getattr(switches, name) not in (False, "off"):
            names_of.setdefault(reason, []).append(name)
    return ", ".join(f"{' and '.join(names)} ({reason})" for reason, names in names_of.items())


def _why_no_draws(vllm_config: VllmConfig) -> str | None:
    """Return why this engine never samples with Rose although its sampler is switched on; None if it does."""
    if not is_applied("sampler_v2" if vllm_config.use_v2_model_runner else "sampler_v1"):
        return "this vLLM's sampler could not be replaced"
    return why_vllm_draws(vllm_config)


def _describe_hits(vllm_config: VllmConfig, switches: PluginConfig) -> str:
    if not vllm_config.cache_config.enable_prefix_caching:
        return "no prefix cache"
    if not options.uses_rose_manager(vllm_config):
        return "prefix hits at block borders"
    hits = f"prefix hits {'to the token' if switches.token_granular_hits else 'at block borders'}"
    return f"{hits}, reported exactly" if switches.exact_cached_tokens else hits


def _describe_model(vllm_config: VllmConfig, switches: PluginConfig, choice: ModelChoice) -> str:
    chosen = choice.architecture
    if chosen is None:
        model_config = vllm_config.model_config
        return f"vLLM's own {model_config.architecture if model_config is not None else ''}".rstrip()
    norm = "LayerNorm" if chosen == GPT2 else "RMSNorm"
    fused = {
        "fused MLP": switches.fused_mlp,
        f"fused add + {norm}": switches.fused_add_layernorm,
    }
    if chosen != GPT2 and vllm_config.quant_config is not None:
        scheme = int4_scheme(vllm_config.quant_config)
        float8 = f"float8 weights with scales of {float8_scales(vllm_config.quant_config)}"
        fused[float8 if scheme is None else scheme.describe()] = True
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
