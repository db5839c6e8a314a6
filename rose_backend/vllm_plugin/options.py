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
