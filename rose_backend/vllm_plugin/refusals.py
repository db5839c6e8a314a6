"""Refuses, before anything is loaded, configurations that ROSE does not support, and names each feature."""

from __future__ import annotations

import sys

from vllm.config import KVTransferConfig, VllmConfig

from rose_backend.config import PluginConfig
from rose_backend.errors import ConfigError
from rose_backend.vllm_plugin import options

# Drafters without a KV cache, and drafters whose cache has the same positions as the target's.
SPECULATIVE_METHODS = (
    *("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"),
    *("draft_model", "eagle", "eagle3", "mtp"),
)

_SNAPSHOT_SERVER = "vllm.snapshot.server"  # what vllm snapshot create starts, and its restore finds again

KV_CONNECTORS = ("ExampleConnector", *options.CONNECTORS_OUTSIDE_OF_LAYERS)
"""Those that neither touch the block pool nor need what was not tried."""


def check_supported(vllm_config: VllmConfig, switches: PluginConfig) -> None:
    """Refuse a configuration that ROSE cannot run.

    Raises:
        ConfigError: names every unsupported feature found, and the option that helps where one does.
    """
    cache_config = vllm_config.cache_config
    if cache_config.user_specified_block_size and cache_config.block_size % options.BLOCK_SIZE_UNIT:
        raise ConfigError(
            f"--block-size: got {cache_config.block_size}, ROSE needs a multiple of {options.BLOCK_SIZE_UNIT}"
        )
    found = [name for name, is_used in _unsupported_by_attention(vllm_config).items() if is_used]
    if found:
        raise ConfigError(
            f"ROSE does not support {' and '.join(found)}; choose another --attention-backend for this configuration"
        )
    if switches.kv_canary != "off":
        _check_canary(vllm_config, switches)
    if not switches.block_manager:
        return
    features = _unsupported_beside_states(vllm_config) if options.has_states(vllm_config) else {}
    features |= _unsupported_by_manager(vllm_config)
    found = [name for name, is_used in features.items() if is_used]
    if found:
        raise ConfigError(
            f"Rose's block manager does not support {' and '.join(found)}; "
            f"{options.HAND_BACK_OPTION} gives block management back to vLLM"
        )
    options.check_retention_interval(cache_config.prefix_cache_retention_interval)


def _check_canary(c: VllmConfig, switches: PluginConfig) -> None:
    """Refuse ``kv_canary`` where others write K/V, or where it does not know what is written."""
    drafts = c.speculative_config
    features = {
        "vLLM's own block manager": not switches.block_manager,
        "models with states": options.has_states(c),
        "float8 K/V": c.cache_config.cache_dtype in options.FLOAT8_DTYPES,
        "a KV connector": options.has_kv_connector(c),
        "sleep mode": c.model_config is not None and c.model_config.enable_sleep_mode,
        "drafters with K/V": drafts is not None and drafts.method not in options.LOOKUP_METHODS,
    }
    found = [name for name, is_used in features.items() if is_used]
    if found:
        raise ConfigError(f"kv_canary: got {switches.kv_canary!r}, allowed is off with {' and '.join(found)}")


def _model_has(vllm_config: VllmConfig, attribute: str) -> bool:
    return vllm_config.model_config is not None and bool(getattr(vllm_config.model_config, attribute))


def _unsupported_by_attention(c: VllmConfig) -> dict[str, bool]:
    """Return features that no ROSE layer has, and whether this engine uses them."""
    return {
        "multi-head latent attention (MLA)": _model_has(c, "use_mla"),
        "encoder-decoder models": _model_has(c, "is_encoder_decoder"),
        # vLLM's selector asks again for each layer. With that option no image can arrive, and the property is false.
        "attention in both directions within an image (models such as Gemma 3 and PaliGemma without "
        "--language-model-only)": _model_has(c, "is_mm_prefix_lm"),
        "decode context parallelism": c.parallel_config.decode_context_parallel_size > 1,
        "prefill context parallelism": c.parallel_config.prefill_context_parallel_size > 1,
        "non-causal attention (use_non_causal)": c.attention_config.use_non_causal,
        "KV sharing's fast prefill (--kv-sharing-fast-prefill)": c.cache_config.kv_sharing_fast_prefill,
        "chunked local attention": _model_has(c, "attention_chunk_size"),
        # vLLM's selector asks again for each layer, but says no more than "kv_cache_dtype not supported".
        f"this K/V cache type (--kv-cache-dtype other than {', '.join(options.CACHE_DTYPES)})": (
            c.cache_config.cache_dtype not in options.CACHE_DTYPES
        ),
        # Its process is frozen with its CUDA graphs, and goes on in another one's place: not tried with Rose's.
        "snapshots of a server (vllm snapshot create)": _is_snapshot_server(),
    }


def _is_snapshot_server() -> bool:
    module = getattr(sys.modules["__main__"], "__spec__", None)
    return module is not None and module.name == _SNAPSHOT_SERVER


def _unsupported_beside_states(c: VllmConfig) -> dict[str, bool]:
    """Return features that Rose's block manager does not serve for models with states."""
    has_one_group = bool(c.scheduler_config.disable_hybrid_kv_cache_manager)
    return {
        # It leaves no groups for states.
        "hybrid models beside --disable-hybrid-kv-cache-manager": has_one_group,
        "hybrid models without prefix caching (--enable-prefix-caching, --mamba-cache-mode align)": (
            c.cache_config.mamba_cache_mode != "align"
        ),
        "hybrid models beside speculative decoding": c.speculative_config is not None,
        "hybrid models beside a KV connector": options.has_kv_connector(c),
        "hybrid models beside KV cache events": options.has_kv_events(c),
        "hybrid models beside pipeline parallelism": c.parallel_config.pipeline_parallel_size > 1,
        "hybrid models beside sliding windows": options.has_sliding_windows(c),
    }


def _unsupported_by_manager(c: VllmConfig) -> dict[str, bool]:
    """Return features that Rose's block manager does not serve, and whether this engine uses them."""
    drafts, has_windows, has_events = (
        c.speculative_config,
        options.has_sliding_windows(c),
        options.has_kv_events(c),
    )
    connector = c.kv_transfer_config if options.has_kv_connector(c) else None
    wants_groups = c.scheduler_config.disable_hybrid_kv_cache_manager is False
    is_bidirectional = _has_option(connector, "bidirectional_kv_xfer")
    return {
        "Mamba models": _model_has(c, "has_inner_state") and not options.has_states(c),
        "models without attention": _model_has(c, "is_attention_free"),
        # Rose's hook has set it to True where the user left it open.
        "separate KV cache groups for these sliding windows (--no-disable-hybrid-kv-cache-manager)": (
            has_windows and wants_groups and options.why_windows_are_kept(c) is not None
        ),
        "layers that share K/V beside layers of other shapes (num_kv_shared_layers)": (
            _shares_kv_between_layers_of_several_shapes(c)
        ),
        # An event names its group's window, and Rose's group has layers of several.
        "KV cache events of sliding windows": has_events and has_windows,
        "diffusion models (--diffusion-config)": c.diffusion_config is not None,
        f"this KV connector (--kv-transfer-config with another one than {', '.join(KV_CONNECTORS)})": (
            connector is not None and connector.kv_connector not in KV_CONNECTORS
        ),
        # A class of any other behaviour, under one of these names.
        "a KV connector of your own (kv_connector_module_path)": (
            connector is not None and bool(connector.kv_connector_module_path)
        ),
        # It looks into the block pool for what is about to be evicted.
        "LMCache's lazy offload (lmcache.mp.lazy_offload)": _has_option(connector, "lmcache.mp.lazy_offload"),
        "NIXL's transfers back to the prefill engine (bidirectional_kv_xfer)": is_bidirectional,
        "a KV connector beside speculative decoding": connector is not None and drafts is not None,
        # vLLM stores the experts of full blocks, under its own hashes; a hit that ends inside a block has none.
        "routed experts (--enable-return-routed-experts)": c.aux_output_config.enabled,
        "KV cache residency metrics (--kv-cache-metrics)": c.observability_config.kv_cache_metrics,
        "this kind of speculative decoding (--speculative-config with a method other than "
        f"{', '.join(SPECULATIVE_METHODS)})": drafts is not None and drafts.method not in SPECULATIVE_METHODS,
        "reuse of what a drafter read ahead for (disable_eagle_block_drop)": (
            drafts is not None and drafts.disable_eagle_block_drop
        ),
        # From vLLM 0.33 on such drafters make a block's published hash depend on tokens after it, which may not be
        # there when the block is full.
        "KV cache events beside a drafter that reads ahead": (
            has_events and getattr(c, "num_hash_lookahead_tokens", 0) > 0
        ),
        # vLLM brings one for diffusion models, which are refused as such.
        "a scheduler of your own (--scheduler-cls)": c.diffusion_config is None
        and c.scheduler_config.scheduler_cls
        not in (None, options.SCHEDULER_CLASS, options.ASYNC_SCHEDULER_CLASS),
    }


def _has_option(connector: KVTransferConfig | None, option: str) -> bool:
    return connector is not None and bool(connector.get_from_extra_config(option, False))


def _shares_kv_between_layers_of_several_shapes(vllm_config: VllmConfig) -> bool:
    # vLLM looks a layer that shares K/V up in its group's specifications, where those of several shapes are by layer
    # and only layers with their own cache are there.
    model = vllm_config.model_config
    config = None if model is None else model.hf_text_config
    if not getattr(config, "num_kv_shared_layers", 0):
        return False
    layers = getattr(config, "per_layer_config", None) or ()
    return len({(layer.head_dim, layer.num_key_value_heads) for layer in layers}) > 1
