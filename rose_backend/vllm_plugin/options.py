"""Rose's settings in a vLLM configuration, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm import envs
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform

from rose_backend.config import PluginConfig
from rose_backend.draft_depth import draft_depths
from rose_backend.errors import ConfigError
from rose_backend.vllm_plugin.registration import is_rose

OPTIONS_KEY = "rose"
HAND_BACK_OPTION = '--additional-config \'{"rose": {"block_manager": false}}\''
"""Makes vLLM's own block manager the one in use."""

NEEDS_MANAGER = "only with Rose's block manager"
"""Reason why a part is inactive under vLLM's own block manager."""

FLOAT8_DTYPES = ("fp8", "fp8_e4m3")
"""vLLM's names of caches in ``torch.float8_e4m3fn``."""

CACHE_DTYPES = ("auto", "float16", "bfloat16", *FLOAT8_DTYPES)
"""Values of ``--kv-cache-dtype`` that ROSE supports."""

NGRAM_METHODS = ("ngram", "ngram_gpu")
LOOKUP_METHODS = (*NGRAM_METHODS, "suffix")
"""Methods of speculative decoding that look drafts up in earlier tokens."""

EAGLE_METHODS = ("eagle", "eagle3")
"""Methods whose drafter is a few layers that read the model's hidden states; their K/V is in the same blocks."""

DRAFT_MODEL = "draft_model"
"""Method whose drafter is a separate, smaller model."""

OTHER_DRAFTER = "a drafter with a model other than an EAGLE head or an MTP module"
"""Reason why a part is inactive beside other methods."""

BLOCK_SIZE_UNIT = 16
"""Block sizes are multiples of this number of tokens."""

SCHEDULER_CLASS = "rose_backend.vllm_plugin.scheduler.scheduler.RoseScheduler"
ASYNC_SCHEDULER_CLASS = "rose_backend.vllm_plugin.scheduler.scheduler.RoseAsyncScheduler"


def is_rose_selected(vllm_config: VllmConfig | None) -> bool:
    """Whether ROSE was chosen, for all layers or for one kind of layer."""
    if vllm_config is None:
        return False
    attention = vllm_config.attention_config
    return is_rose(attention.backend) or any(map(is_rose, attention.backend_per_kind.values()))


def rose_options(vllm_config: VllmConfig) -> PluginConfig:
    """Return the options under the key ``rose`` of ``--additional-config``, defaults filled in.

    Raises:
        ConfigError: unknown option, wrong type, or not a mapping.
    """
    additional = vllm_config.additional_config
    options = additional.get(OPTIONS_KEY, {}) if isinstance(additional, Mapping) else {}
    if not isinstance(options, Mapping):
        raise ConfigError(f"additional_config key {OPTIONS_KEY!r}: got {options!r}, a JSON object is needed")
    return PluginConfig.from_mapping(options, source=f"additional_config key {OPTIONS_KEY!r}")


def first_reason(reasons: Mapping[str, Any]) -> str | None:
    """Return the first reason whose value is true; None if there is none."""
    return next((reason for reason, holds in reasons.items() if holds), None)


def uses_rose_manager(vllm_config: VllmConfig) -> bool:
    """Whether Rose's block manager keeps the block tables of this engine."""
    return vllm_config.scheduler_config.scheduler_cls in (SCHEDULER_CLASS, ASYNC_SCHEDULER_CLASS)


def has_kv_connector(vllm_config: VllmConfig) -> bool:
    """Whether K/V is also kept elsewhere, by a KV connector of vLLM."""
    config = vllm_config.kv_transfer_config
    return config is not None and config.kv_connector is not None


CONNECTORS_OUTSIDE_OF_LAYERS = (
    *("OffloadingConnector", "LMCacheMPConnector"),
    # The first is vLLM's other name for the second.
    *("NixlConnector", "NixlPullConnector"),
)
"""KV connectors that do nothing when a layer calls them: they load and store before and after a step's layers."""


def has_connector_in_layers(vllm_config: VllmConfig) -> bool:
    """Whether a KV connector may do something when a layer calls it, as one of the user's own may."""
    config = vllm_config.kv_transfer_config
    if not has_kv_connector(vllm_config):
        return False
    return (
        config.kv_connector not in CONNECTORS_OUTSIDE_OF_LAYERS
        or bool(config.kv_connector_module_path)
        # LMCache's, of queries.
        or bool(config.get_from_extra_config("lmcache.mp.transfer_intermediate_tensors", False))
    )


def offloads_whole_blocks(vllm_config: VllmConfig) -> bool:
    """Whether the KV connector is vLLM's offloading: of decodes it stores each block once it is full."""
    config = vllm_config.kv_transfer_config
    return (
        config is not None
        and config.kv_connector == "OffloadingConnector"
        and not config.kv_connector_module_path
    )


def has_kv_events(vllm_config: VllmConfig) -> bool:
    """Whether vLLM publishes KV cache events."""
    config = vllm_config.kv_events_config
    return config is not None and config.enable_kv_cache_events


def has_head(vllm_config: VllmConfig) -> bool:
    """Whether drafts come from a head: an EAGLE head, or one MTP module that runs as an EAGLE head does.

    Several modules do not run so, as each makes another draft; Gemma 4's module stores no K/V.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in EAGLE_METHODS:
        return speculative is not None
    is_one_module = not (speculative.use_multi_module_mtp() or speculative.use_gemma4_mtp())
    return speculative.method == "mtp" and is_one_module


def has_other_drafter(vllm_config: VllmConfig) -> bool:
    """Whether drafts come from a model, or from layers, that are no head; see ``has_head``."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method not in LOOKUP_METHODS and not has_head(vllm_config)


def has_sliding_windows(vllm_config: VllmConfig) -> bool:
    """Whether layers of the model or of its drafter have sliding windows, by their configurations."""
    speculative = vllm_config.speculative_config
    models = (vllm_config.model_config, None if speculative is None else speculative.draft_model_config)
    for model in models:
        if model is None or model.get_sliding_window() is None:
            continue
        layer_types = getattr(model.hf_text_config, "layer_types", None)
        if layer_types is None or "sliding_attention" in layer_types:
            return True
    return False


def has_states(vllm_config: VllmConfig) -> bool:
    """Whether some layers of the model keep a state instead of K/V, and others K/V (vLLM's "hybrid" models)."""
    return vllm_config.model_config is not None and bool(vllm_config.model_config.is_hybrid)


def why_windows_are_kept(vllm_config: VllmConfig) -> str | None:
    """Return what in the configuration makes the K/V of sliding windows be kept whole; None if nothing does.

    These features were tried with one KV cache group of all layers only.
    """
    model = vllm_config.model_config
    config = None if model is None else model.hf_text_config
    layer_types = set(getattr(config, "layer_types", None) or ())
    reasons = {
        "drafts": vllm_config.speculative_config is not None,
        "a KV connector": has_kv_connector(vllm_config),
        "KV cache events": has_kv_events(vllm_config),
        "pipeline parallelism": vllm_config.parallel_config.pipeline_parallel_size > 1,
        "no layers without a window": not {"sliding_attention", "full_attention"} <= layer_types,
        "layers that share K/V": bool(getattr(config, "num_kv_shared_layers", 0)),
    }
    return first_reason(reasons)


def appends_in_attention(vllm_config: VllmConfig) -> bool:
    """Whether attention of the model's layers stores the new K/V itself instead of a separate write before it."""
    return rose_options(vllm_config).fused_kv_append and why_kv_is_written_first(vllm_config) is None


def why_kv_is_written_first(vllm_config: VllmConfig) -> str | None:
    """Return why attention cannot store the new K/V itself; None if it can.

    vLLM's own manager lets a request of the same step read blocks that are being written; only a separate write of all
    tokens before all reads is right then.
    """
    return None if uses_rose_manager(vllm_config) else NEEDS_MANAGER


def batches_decode_steps(vllm_config: VllmConfig) -> bool:
    """Whether decoding requests are scheduled all at once, and their tokens processed all at once."""
    return rose_options(vllm_config).batched_scheduling and why_decodes_go_one_by_one(vllm_config) is None


def why_decodes_go_one_by_one(vllm_config: VllmConfig) -> str | None:
    """Return why decoding requests cannot be scheduled all at once; None if they can.

    Some drafts, pipeline stages and per-request masks need a decision per request.
    """
    model_config, parallel_config = vllm_config.model_config, vllm_config.parallel_config
    reasons = {
        NEEDS_MANAGER: not uses_rose_manager(vllm_config),
        "pipeline stages": parallel_config.pipeline_parallel_size > 1,
        "a model that does not generate": model_config is None or model_config.runner_type != "generate",
        "sampling masks": model_config is not None and model_config.return_sampling_mask,
        "encoder caches elsewhere": vllm_config.ec_transfer_config is not None,
        "utilization metrics": vllm_config.observability_config.enable_mfu_metrics,
        # From vLLM 0.33 on each engine counts steps between prefills; engines of a mixture of experts do it together.
        "a prefill interval": vllm_config.scheduler_config.prefill_schedule_interval > 1
        and not (parallel_config.data_parallel_size > 1 and parallel_config.is_moe_model),
    }
    return first_reason(reasons) or _why_drafts_go_one_by_one(vllm_config)


def _why_drafts_go_one_by_one(vllm_config: VllmConfig) -> str | None:
    """Return why requests with drafts cannot be scheduled all at once; None if they can, and without drafts.

    All requests of a step must have the same number of drafts, which stay with the workers.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    is_served = speculative.method in (*NGRAM_METHODS, DRAFT_MODEL) or has_head(vllm_config)
    reasons = {
        # Not tried.
        "drafts other than n-grams, a model's or a head's": not is_served,
        # It drops drafts from a step, in the scheduler's own output.
        "drafts with model runner V1": not vllm_config.use_v2_model_runner,
        "drafts without asynchronous scheduling": not vllm_config.scheduler_config.async_scheduling,
        "num_speculative_tokens_per_batch_size": bool(speculative.num_speculative_tokens_per_batch_size),
        # A decode gets one more block at most.
        "more than 15 drafts": 1 + vllm_config.num_speculative_tokens > BLOCK_SIZE_UNIT,
    }
    return first_reason(reasons)


def adapts_drafts(vllm_config: VllmConfig) -> bool:
    """Whether Rose's scheduler chooses, step by step, how many of the drafts that are asked for are made."""
    has_drafts = vllm_config.speculative_config is not None
    return (
        has_drafts and rose_options(vllm_config).adaptive_drafts and why_drafts_are_fixed(vllm_config) is None
    )


def depths_of(vllm_config: VllmConfig) -> tuple[int, ...]:
    """Return the numbers of drafts that a request may have in a step, rising; 0 alone without drafts."""
    num_drafts = vllm_config.num_speculative_tokens
    return draft_depths(num_drafts) if adapts_drafts(vllm_config) else (num_drafts,)


def why_drafts_are_fixed(vllm_config: VllmConfig) -> str | None:
    """Return why every step has as many drafts as are asked for; None if they may be left out, or none are."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    reasons = {
        "batched_scheduling off": not rose_options(vllm_config).batched_scheduling,
        # Ranks would choose apart.
        "drafts with data parallelism": vllm_config.parallel_config.data_parallel_size > 1,
        "enable_adaptive_verification": speculative.enable_adaptive_verification,
        # Whatever is asked for, it makes all drafts in each step.
        "a draft model": speculative.method == DRAFT_MODEL,
    }
    return why_decodes_go_one_by_one(vllm_config) or first_reason(reasons)


def why_steps_are_not_split(vllm_config: VllmConfig) -> str | None:
    """Return why a step cannot be scheduled in two parts, decoding requests at once and the rest after them by vLLM.

    Not where vLLM needs all running requests to decide about one: to preempt by priority, to keep a watermark of free
    blocks, to count adapters, or to limit long prefills. And ``max_num_scheduled_tokens``, which is reduced by the
    first part, must be the binding limit.

    Returns:
        The reason; None if steps may be split.
    """
    scheduler_config = vllm_config.scheduler_config
    num_tokens = scheduler_config.max_num_scheduled_tokens or 0
    reasons = {
        "max_num_scheduled_tokens": num_tokens > scheduler_config.max_num_batched_tokens,
        "priorities": scheduler_config.policy != "fcfs",
        "--watermark": scheduler_config.watermark != 0.0,
        "--long-prefill-token-threshold": scheduler_config.long_prefill_token_threshold != 0
        or scheduler_config.long_prefill_token_threshold_adaptive,
        "LoRA": vllm_config.lora_config is not None,
    }
    return first_reason(reasons)


def why_steps_have_no_budget(vllm_config: VllmConfig) -> str | None:
    """Return why the prompt tokens of a step are not limited by the time it takes; None if they may be."""
    scheduler_config = vllm_config.scheduler_config
    reasons = {
        "batched_scheduling off": not rose_options(vllm_config).batched_scheduling,
        "no chunked prefill": not scheduler_config.enable_chunked_prefill,
        "--disable-chunked-mm-input": scheduler_config.disable_chunked_mm_input,
    }
    why_not_split = why_decodes_go_one_by_one(vllm_config) or why_steps_are_not_split(vllm_config)
    return why_not_split or first_reason(reasons)


def replays_steps(vllm_config: VllmConfig) -> bool:
    """Whether steps may be replayed whole."""
    return rose_options(vllm_config).step_graph and why_steps_are_not_replayed(vllm_config) is None


def why_steps_are_not_replayed(vllm_config: VllmConfig) -> str | None:
    """Return what in its configuration keeps this engine from replaying steps whole; None if nothing does."""
    model_config, mode = vllm_config.model_config, vllm_config.compilation_config.cudagraph_mode
    reasons = {
        "no full CUDA graphs": mode is None or mode.decode_mode() != CUDAGraphMode.FULL,
        "a model that does not generate": model_config is None or model_config.runner_type != "generate",
        "model runner V1": not vllm_config.use_v2_model_runner,
        OTHER_DRAFTER: has_other_drafter(vllm_config),
        "pipeline parallelism": vllm_config.parallel_config.pipeline_parallel_size > 1,
    }
    return (
        why_no_graphs(vllm_config)
        or first_reason(reasons)
        or why_ranks_do_not_replay_together(vllm_config)
        or why_adapters_need_vllms_steps(vllm_config)
    )


def why_ranks_do_not_replay_together(vllm_config: VllmConfig) -> str | None:
    """Return why data-parallel ranks of a mixture of experts, which run each step together, do not replay steps.

    None if they may, or if this engine's steps are its own.
    """
    parallel_config = vllm_config.parallel_config
    if parallel_config.data_parallel_size == 1 or parallel_config.is_moe_model is False:
        return None
    backend = parallel_config.all2all_backend
    reasons = {
        # Ranks come and go, and capture again in between.
        "elastic expert parallelism": parallel_config.enable_elastic_ep,
        # None of these has been tried.
        f"--all2all-backend {backend}": backend != "allgather_reducescatter",
        "states with data parallelism": has_states(vllm_config),
    }
    return first_reason(reasons)


def why_adapters_need_vllms_steps(vllm_config: VllmConfig) -> str | None:
    """Return why graphs of whole steps, or of steps with prompts, cannot hold LoRA adapters; None if they can.

    None, likewise, without LoRA.
    """
    lora, model = vllm_config.lora_config, vllm_config.model_config
    if lora is None:
        return None
    reasons = {
        # vLLM's graphs then have room for the adapters of a step, and none for rows without one.
        "--specialize-active-lora": lora.specialize_active_lora,
        # None of these has been tried.
        "LoRA of experts": model is not None and model.is_moe,
        "LoRA of a multimodal model": model is not None and model.is_multimodal_model,
        "LoRA of a model with states": has_states(vllm_config),
        # Ranks may evict adapters in different orders, and all must replay the same steps.
        "LoRA with tensor parallelism": vllm_config.parallel_config.tensor_parallel_size > 1,
    }
    return first_reason(reasons)


def why_no_graphs(vllm_config: VllmConfig) -> str | None:
    """Return why this engine has no CUDA graphs; None if it may have some."""
    model_config = vllm_config.model_config
    reasons = {
        "no CUDA device": not current_platform.is_cuda(),
        "--enforce-eager": model_config is not None and model_config.enforce_eager,
        "cudagraph_mode NONE": vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE,
    }
    return first_reason(reasons)


def has_rust_front_end(vllm_config: VllmConfig) -> bool:
    """Whether ``vllm serve`` starts vLLM's Rust API server, ``vllm-rs``, in place of a Python one.

    Only the process that starts engines and API server together knows; the engines are the same with both.
    """
    is_launcher = vllm_config.parallel_config._api_process_rank == -1
    return is_launcher and bool(envs.VLLM_USE_RUST_FRONTEND)


def check_retention_interval(interval: int | None) -> None:
    """Refuse an interval that has no effect: Rose's block manager drops what was used least recently, of windows, too.

    Raises:
        ConfigError: names what is allowed.
    """
    if interval:
        raise ConfigError(
            f"prefix_cache_retention_interval: got {interval}, which is for block managers that drop what sliding "
            "windows have passed; allowed with Rose's, which drops what was used least recently, are 0 and none"
        )
