"""Refuses, before anything is loaded, configurations that ROSE does not support, and names each feature."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rose_backend.errors import ConfigError
from rose_backend.vllm_plugin.options import (
    ASYNC_SCHEDULER_CLASS,
    BLOCK_SIZE_UNIT,
    CACHE_DTYPES,
    HAND_BACK_OPTION,
    SCHEDULER_CLASS,
    check_retention_interval,
    has_kv_connector,
    has_sliding_windows,
    has_states,
    why_windows_are_kept,
)

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

    from rose_backend.config import PluginConfig

Check = Callable[["VllmConfig"], bool]

# Drafters without a KV cache, and drafters whose cache has the same positions as the target's.
SPECULATIVE_METHODS = (
    *("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"),
    *("draft_model", "eagle", "eagle3", "mtp"),
)


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
            f"ROSE does not support {' and '.join(found)}; choose another --attention-backend for this configuration"
        )
    if not options.block_manager:
        return
    found = [name for name, is_used in _MANAGER_CHECKS if is_used(vllm_config)]
    if found:
        raise ConfigError(
            f"Rose's block manager does not support {' and '.join(found)}; "
            f"{HAND_BACK_OPTION} gives block management back to vLLM"
        )
    check_retention_interval(cache_config.prefix_cache_retention_interval)


def _model(attribute: str) -> Check:
    return lambda c: c.model_config is not None and bool(getattr(c.model_config, attribute))


def _with_states(check: Check) -> Check:
    return lambda c: has_states(c) and check(c)


def _speculation(holds: Callable[[SpeculativeConfig], bool]) -> Check:
    return lambda c: c.speculative_config is not None and holds(c.speculative_config)


def _has_events_of_lookahead_hashes(vllm_config: VllmConfig) -> bool:
    # From vLLM 0.33 on such drafters make a block's published hash depend on tokens after it, which may not be there
    # when the block is full.
    return _has_events(vllm_config) and getattr(vllm_config, "num_hash_lookahead_tokens", 0) > 0


def _has_events(vllm_config: VllmConfig) -> bool:
    config = vllm_config.kv_events_config
    return config is not None and config.enable_kv_cache_events


def _shares_kv_between_layers_of_several_shapes(vllm_config: VllmConfig) -> bool:
    # vLLM looks a layer that shares K/V up in its group's specifications, where those of several shapes are by layer
    # and only layers with their own cache are there.
    model = vllm_config.model_config
    config = None if model is None else model.hf_text_config
    if not getattr(config, "num_kv_shared_layers", 0):
        return False
    layers = getattr(config, "per_layer_config", None) or ()
    return len({(layer.head_dim, layer.num_key_value_heads) for layer in layers}) > 1


def _has_foreign_scheduler(vllm_config: VllmConfig) -> bool:
    known = (None, SCHEDULER_CLASS, ASYNC_SCHEDULER_CLASS)
    # vLLM brings one for diffusion models, which are refused as such.
    return vllm_config.diffusion_config is None and vllm_config.scheduler_config.scheduler_cls not in known


KV_CONNECTORS = (
    *("ExampleConnector", "OffloadingConnector", "LMCacheMPConnector"),
    # The first is vLLM's other name for the second.
    *("NixlConnector", "NixlPullConnector"),
)
"""Those that neither touch the block pool nor need what was not tried."""


def _has_connector_option(option: str) -> Check:
    return lambda c: has_kv_connector(c) and bool(c.kv_transfer_config.get_from_extra_config(option, False))


_ATTENTION_CHECKS: tuple[tuple[str, Check], ...] = (
    ("multi-head latent attention (MLA)", _model("use_mla")),
    ("encoder-decoder models", _model("is_encoder_decoder")),
    # vLLM's selector asks again for each layer. With that option no image can arrive, and the property is false.
    (
        "attention in both directions within an image (models such as Gemma 3 and PaliGemma without "
        "--language-model-only)",
        _model("is_mm_prefix_lm"),
    ),
    ("decode context parallelism", lambda c: c.parallel_config.decode_context_parallel_size > 1),
    ("prefill context parallelism", lambda c: c.parallel_config.prefill_context_parallel_size > 1),
    ("non-causal attention (use_non_causal)", lambda c: c.attention_config.use_non_causal),
    (
        "KV sharing's fast prefill (--kv-sharing-fast-prefill)",
        lambda c: c.cache_config.kv_sharing_fast_prefill,
    ),
    ("chunked local attention", _model("attention_chunk_size")),
    # vLLM's selector asks again for each layer, but says no more than "kv_cache_dtype not supported".
    (
        f"this K/V cache type (--kv-cache-dtype other than {', '.join(CACHE_DTYPES)})",
        lambda c: c.cache_config.cache_dtype not in CACHE_DTYPES,
    ),
)
_MANAGER_CHECKS: tuple[tuple[str, Check], ...] = (
    ("Mamba models", lambda c: _model("has_inner_state")(c) and not has_states(c)),
    # It leaves no groups for states.
    (
        "hybrid models beside --disable-hybrid-kv-cache-manager",
        _with_states(lambda c: bool(c.scheduler_config.disable_hybrid_kv_cache_manager)),
    ),
    (
        "hybrid models without prefix caching (--enable-prefix-caching, --mamba-cache-mode align)",
        _with_states(lambda c: c.cache_config.mamba_cache_mode != "align"),
    ),
    ("hybrid models beside speculative decoding", _with_states(lambda c: c.speculative_config is not None)),
    ("hybrid models beside a KV connector", _with_states(has_kv_connector)),
    ("hybrid models beside KV cache events", _with_states(_has_events)),
    (
        "hybrid models beside pipeline parallelism",
        _with_states(lambda c: c.parallel_config.pipeline_parallel_size > 1),
    ),
    ("hybrid models beside sliding windows", _with_states(has_sliding_windows)),
    ("models without attention", _model("is_attention_free")),
    # Rose's hook has set it to True where the user left it open.
    (
        "separate KV cache groups for these sliding windows (--no-disable-hybrid-kv-cache-manager)",
        lambda c: (
            has_sliding_windows(c)
            and c.scheduler_config.disable_hybrid_kv_cache_manager is False
            and why_windows_are_kept(c) is not None
        ),
    ),
    (
        "layers that share K/V beside layers of other shapes (num_kv_shared_layers)",
        _shares_kv_between_layers_of_several_shapes,
    ),
    # An event names its group's window, and Rose's group has layers of several.
    ("KV cache events of sliding windows", lambda c: _has_events(c) and has_sliding_windows(c)),
    ("diffusion models (--diffusion-config)", lambda c: c.diffusion_config is not None),
    (
        f"this KV connector (--kv-transfer-config with another one than {', '.join(KV_CONNECTORS)})",
        lambda c: has_kv_connector(c) and c.kv_transfer_config.kv_connector not in KV_CONNECTORS,
    ),
    # A class of any other behaviour, under one of these names.
    (
        "a KV connector of your own (kv_connector_module_path)",
        lambda c: has_kv_connector(c) and bool(c.kv_transfer_config.kv_connector_module_path),
    ),
    # It looks into the block pool for what is about to be evicted.
    ("LMCache's lazy offload (lmcache.mp.lazy_offload)", _has_connector_option("lmcache.mp.lazy_offload")),
    (
        "NIXL's transfers back to the prefill engine (bidirectional_kv_xfer)",
        _has_connector_option("bidirectional_kv_xfer"),
    ),
    (
        "a KV connector beside speculative decoding",
        lambda c: has_kv_connector(c) and c.speculative_config is not None,
    ),
    # vLLM stores the experts of full blocks, under its own hashes; a hit that ends inside a block has none.
    ("routed experts (--enable-return-routed-experts)", lambda c: c.aux_output_config.enabled),
    (
        "KV cache residency metrics (--kv-cache-metrics)",
        lambda c: c.observability_config.kv_cache_metrics,
    ),
    (
        "this kind of speculative decoding (--speculative-config with a method other than "
        f"{', '.join(SPECULATIVE_METHODS)})",
        _speculation(lambda config: config.method not in SPECULATIVE_METHODS),
    ),
    (
        "reuse of what a drafter read ahead for (disable_eagle_block_drop)",
        _speculation(lambda config: config.disable_eagle_block_drop),
    ),
    ("KV cache events beside a drafter that reads ahead", _has_events_of_lookahead_hashes),
    ("a scheduler of your own (--scheduler-cls)", _has_foreign_scheduler),
)
