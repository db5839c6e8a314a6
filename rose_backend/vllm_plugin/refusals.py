"""What ROSE does not serve yet, refused by name before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rose_backend.errors import ConfigError
from rose_backend.vllm_plugin.options import (
    ASYNC_SCHEDULER_CLASS,
    BLOCK_SIZE_UNIT,
    CACHE_DTYPES,
    HAND_BACK_OPTION,
    SCHEDULER_CLASS,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from rose_backend.config import PluginConfig

Check = Callable[["VllmConfig"], bool]

# Drafts that need no cache, and drafters whose cache follows the target's position by position.
SPECULATIVE_METHODS = (
    *("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"),
    *("draft_model", "eagle", "eagle3", "mtp"),
)
# vLLM's selector asks again for each layer, but says no more than "kv_cache_dtype not supported".
_CACHE_DTYPES_HINT = f"--kv-cache-dtype other than {', '.join(CACHE_DTYPES)}"
_METHODS_HINT = f"--speculative-config with a method other than {', '.join(SPECULATIVE_METHODS)}"


def check_supported(vllm_config: VllmConfig, options: PluginConfig) -> None:
    """Refuse a configuration that ROSE cannot run.

    Raises:
        ConfigError: names every unsupported feature found, and the option that helps where one does.
    """
    cache_config = vllm_config.cache_config
    if cache_config.user_specified_block_size and cache_config.block_size % BLOCK_SIZE_UNIT:
        raise ConfigError(
            f"--block-size: got {cache_config.block_size}, ROSE needs a multiple of {BLOCK_SIZE_UNIT}"
        )
    found = [name for name, is_used in _ATTENTION_CHECKS if is_used(vllm_config)]
    if found:
        raise ConfigError(
            f"ROSE does not support {_join(found)}; choose another --attention-backend for this configuration"
        )
    if not options.block_manager:
        return
    found = [name for name, is_used in _MANAGER_CHECKS if is_used(vllm_config)]
    if found:
        raise ConfigError(
            f"Rose's block manager does not support {_join(found)}; "
            f"{HAND_BACK_OPTION} gives block management back to vLLM"
        )
    check_retention_interval(cache_config.prefix_cache_retention_interval)


def check_retention_interval(interval: int | None) -> None:
    """Refuse an interval that has no effect, as vLLM's own manager does: full attention keeps every block anyway.

    Raises:
        ConfigError: names what is allowed.
    """
    if interval:
        raise ConfigError(
            f"prefix_cache_retention_interval: got {interval}, which is for sliding-window and Mamba layers; "
            "allowed with full attention alone are 0 and none"
        )


def check_pool_size(num_blocks: int, block_size: int, max_model_len: int) -> None:
    """Refuse a pool that can never hold one sequence of the longest length.

    Raises:
        ConfigError: names both numbers.
    """
    # Block 0 is the null block.
    usable, needed = num_blocks - 1, -(-max_model_len // block_size)
    if usable < needed:
        raise ConfigError(
            f"KV cache pool: {usable} usable blocks of {block_size} tokens cannot hold one sequence of max_model_len "
            f"{max_model_len} ({needed} blocks); give it more memory or blocks, or lower --max-model-len"
        )


def _attention_checks() -> Iterator[tuple[str, Check]]:
    yield "multi-head latent attention (MLA)", lambda c: _model(c, "use_mla")
    yield "encoder-decoder models", lambda c: _model(c, "is_encoder_decoder")
    yield "decode context parallelism", lambda c: c.parallel_config.decode_context_parallel_size > 1
    yield "prefill context parallelism", lambda c: c.parallel_config.prefill_context_parallel_size > 1
    yield "non-causal attention (use_non_causal)", lambda c: c.attention_config.use_non_causal
    yield "KV sharing's fast prefill (--kv-sharing-fast-prefill)", _shares_kv_fast
    yield "chunked local attention", lambda c: _model(c, "attention_chunk_size")
    yield "this K/V cache type (" + _CACHE_DTYPES_HINT + ")", _has_other_cache_dtype


def _manager_checks() -> Iterator[tuple[str, Check]]:
    yield "hybrid and Mamba models", lambda c: _model(c, "is_hybrid") or _model(c, "has_inner_state")
    yield "models without attention", lambda c: _model(c, "is_attention_free")
    yield "sliding-window models", _has_sliding_window
    yield "multimodal models", lambda c: _model(c, "is_multimodal_model")
    yield "prompt embeddings (--enable-prompt-embeds)", lambda c: _model(c, "enable_prompt_embeds")
    yield "diffusion models (--diffusion-config)", lambda c: c.diffusion_config is not None
    yield "KV connectors (--kv-transfer-config, --kv-offloading-size)", _has_kv_connector
    # vLLM keeps the experts of whole blocks, under its own hashes; a hit that ends inside a block has none.
    yield "routed experts (--enable-return-routed-experts)", lambda c: c.aux_output_config.enabled
    yield "KV cache residency metrics (--kv-cache-metrics)", lambda c: c.observability_config.kv_cache_metrics
    yield "this kind of speculative decoding (" + _METHODS_HINT + ")", _has_other_drafts
    yield "reuse of what a drafter read ahead for (disable_eagle_block_drop)", _keeps_eagle_blocks
    yield "KV cache events beside a drafter that reads ahead", _has_events_of_lookahead_hashes
    yield "a scheduler of your own (--scheduler-cls)", _has_foreign_scheduler


def _model(vllm_config: VllmConfig, attribute: str) -> bool:
    return vllm_config.model_config is not None and bool(getattr(vllm_config.model_config, attribute))


def _has_other_cache_dtype(vllm_config: VllmConfig) -> bool:
    return vllm_config.cache_config.cache_dtype not in CACHE_DTYPES


def _has_sliding_window(vllm_config: VllmConfig) -> bool:
    model_config = vllm_config.model_config
    return model_config is not None and model_config.get_sliding_window() is not None


def _shares_kv_fast(vllm_config: VllmConfig) -> bool:
    return vllm_config.cache_config.kv_sharing_fast_prefill


def _has_kv_connector(vllm_config: VllmConfig) -> bool:
    config = vllm_config.kv_transfer_config
    return config is not None and config.kv_connector is not None


def _has_other_drafts(vllm_config: VllmConfig) -> bool:
    config = vllm_config.speculative_config
    return config is not None and config.method not in SPECULATIVE_METHODS


def _keeps_eagle_blocks(vllm_config: VllmConfig) -> bool:
    config = vllm_config.speculative_config
    return config is not None and config.disable_eagle_block_drop


def _has_events_of_lookahead_hashes(vllm_config: VllmConfig) -> bool:
    # From vLLM 0.33 on such drafters make a block's published hash depend on tokens behind it, which may not be there
    # when the block is full.
    config = vllm_config.kv_events_config
    has_events = config is not None and config.enable_kv_cache_events
    return has_events and getattr(vllm_config, "num_hash_lookahead_tokens", 0) > 0


def _has_foreign_scheduler(vllm_config: VllmConfig) -> bool:
    known = (None, SCHEDULER_CLASS, ASYNC_SCHEDULER_CLASS)
    # vLLM brings one for diffusion models, which are refused as such.
    return vllm_config.diffusion_config is None and vllm_config.scheduler_config.scheduler_cls not in known


def _join(names: list[str]) -> str:
    return " and ".join(names)


_ATTENTION_CHECKS = tuple(_attention_checks())
_MANAGER_CHECKS = tuple(_manager_checks())
