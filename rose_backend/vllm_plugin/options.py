"""What a vLLM configuration says about Rose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rose_backend.config import PluginConfig
from rose_backend.errors import ConfigError
from rose_backend.vllm_plugin.backend_name import is_rose

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTIONS_KEY = "rose"
HAND_BACK_OPTION = '--additional-config \'{"rose": {"block_manager": false}}\''
"""Gives block management back to vLLM."""

FLOAT8_DTYPES = ("fp8", "fp8_e4m3")
"""vLLM's names of caches in ``torch.float8_e4m3fn``."""

CACHE_DTYPES = ("auto", "float16", "bfloat16", *FLOAT8_DTYPES)
"""Values of ``--kv-cache-dtype`` that attention serves."""

SCHEDULER_CLASS = "rose_backend.vllm_plugin.scheduler.RoseScheduler"
ASYNC_SCHEDULER_CLASS = "rose_backend.vllm_plugin.scheduler.RoseAsyncScheduler"


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


def uses_rose_manager(vllm_config: VllmConfig) -> bool:
    """Whether Rose's block manager keeps the block tables of this engine."""
    return vllm_config.scheduler_config.scheduler_cls in (SCHEDULER_CLASS, ASYNC_SCHEDULER_CLASS)


def appends_in_attention(vllm_config: VllmConfig, options: PluginConfig) -> bool:
    """Whether attention stores the new K/V itself instead of a separate write before it.

    vLLM's own manager lets a request of the same step read blocks that are being written; only a separate write of all
    tokens before all reads is right then. A drafter with a cache of its own passes tokens that must not be stored
    (slot -1), which only the separate write leaves out.
    """
    return (
        options.fused_kv_append and uses_rose_manager(vllm_config) and vllm_config.num_lookahead_tokens == 0
    )


def batches_decode_steps(vllm_config: VllmConfig) -> bool:
    """Whether requests that only decode are scheduled at once, and their tokens taken over at once.

    Drafts, pipeline stages and per-request masks make every request a case of its own.
    """
    model_config = vllm_config.model_config
    return (
        rose_options(vllm_config).batched_scheduling
        and uses_rose_manager(vllm_config)
        and vllm_config.speculative_config is None
        and vllm_config.parallel_config.pipeline_parallel_size == 1
        and model_config is not None
        and model_config.runner_type == "generate"
        and not model_config.return_sampling_mask
        and not vllm_config.aux_output_config.enabled
        and vllm_config.ec_transfer_config is None
    )


def splits_steps(vllm_config: VllmConfig) -> bool:
    """Whether a step may be scheduled in two parts: requests that decode at once, and the rest behind them by vLLM.

    Not where vLLM looks at all running requests together to decide about one: to preempt by priority, to hold blocks
    back while others run, to count adapters, or to cut prompts shorter when there are several requests. And the one
    limit on tokens that the first part is taken off must be the one that binds.
    """
    scheduler_config = vllm_config.scheduler_config
    return (
        (scheduler_config.max_num_scheduled_tokens or 0) <= scheduler_config.max_num_batched_tokens
        and scheduler_config.policy == "fcfs"
        and scheduler_config.watermark == 0.0
        and scheduler_config.long_prefill_token_threshold == 0
        and vllm_config.lora_config is None
    )
