"""What ROSE refuses, and what it serves: every option of this vLLM is in the list, and each refusal is one."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

import pytest
from vllm.config import OffloadConfig, VllmConfig
from vllm.config.offload import PrefetchOffloadConfig, UVAOffloadConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.snapshot.runtime import LocalSnapshotTools

from rose_backend.errors import ConfigError
from rose_backend.vllm_plugin.models.model_choice import choose_model_class
from rose_backend.vllm_plugin.options import (
    HAND_BACK_OPTION,
    SCHEDULER_CLASS,
    check_retention_interval,
    rose_options,
    uses_rose_manager,
)
from rose_backend.vllm_plugin.refusals import KV_CONNECTORS, check_supported
from rose_backend.vllm_plugin.registration import installed_vllm_version
from tests.support.vllm_plugin.configs import (
    EVENTS,
    MIXED_WINDOWS,
    WINDOWS,
    MakeConfig,
    connector,
    n_grams,
    rose,
)
from tests.support.vllm_plugin.vllm_options import ONLY_IN, OPTIONS

RELEASE = ".".join(installed_vllm_version().split(".")[:2])
ONLY_IN_OTHERS = {option for release, names in ONLY_IN.items() if release != RELEASE for option in names}


def config_classes(owner: Any, known: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration class and all that its fields hold, by name."""
    if owner.__name__ not in known:
        known[owner.__name__] = owner
        hints = typing.get_type_hints(owner)
        pending = [hints[name] for name in (one.name for one in dataclasses.fields(owner)) if name in hints]
        while pending:
            hint = pending.pop()
            pending += typing.get_args(hint)
            if dataclasses.is_dataclass(hint) and getattr(hint, "__module__", "").startswith("vllm.config"):
                config_classes(hint, known)
    return known


CLASSES = config_classes(VllmConfig, {"EngineArgs": EngineArgs, "AsyncEngineArgs": AsyncEngineArgs})


def test_the_list_has_the_classes_of_this_vllm() -> None:
    absent = {
        name
        for name, options in OPTIONS.items()
        if all(f"{name}.{option}" in ONLY_IN_OTHERS for option in options.names())
    }
    assert set(CLASSES) == set(OPTIONS) - absent


@pytest.mark.parametrize("name", CLASSES)
def test_the_list_has_the_options_of_this_vllm(name: str) -> None:
    here = {one.name for one in dataclasses.fields(CLASSES[name])}
    if name == "AsyncEngineArgs":
        here -= {one.name for one in dataclasses.fields(EngineArgs)}
    names = OPTIONS[name].names() if name in OPTIONS else []
    assert len(names) == len(set(names)), f"an option of {name} is listed twice"
    listed = {option for option in names if f"{name}.{option}" not in ONLY_IN_OTHERS}
    assert not here - listed, f"new in {name}: pass on, serve or refuse {sorted(here - listed)}, and list it"
    assert not listed - here, f"vLLM {RELEASE} has no {sorted(listed - here)} in {name}"


Change = Callable[[Any, pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Refusal:
    """A configuration that is refused.

    Args:
        names: options, as ``Class.option``, whose refusal this shows; the list has words of the error.
        arguments: engine arguments with the refused value.
        change: what a machine without a GPU cannot be told by arguments, done to a finished configuration instead.
        hands_back: whether vLLM's own block manager serves it.
        words: further words of the error.
    """

    names: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    change: Change | None = None
    hands_back: bool = True
    words: str = ""


def change(path: str, value: Any) -> Change:
    """Return a function that sets one value in a part of a configuration, for all of its class."""
    part, _, name = path.partition(".")

    def set_value(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        if name:
            setattr(getattr(config, part), name, value)
        else:
            monkeypatch.setattr(type(config), part, value, raising=False)

    return set_value


def model(attribute: str) -> Change:
    """Return a function that gives the model a property."""
    return lambda config, monkeypatch: monkeypatch.setattr(
        type(config.model_config), attribute, property(lambda self: True), raising=False
    )


REFUSALS = {
    "routed experts": Refusal(
        "EngineArgs.enable_return_routed_experts EngineArgs.aux_output_config "
        "AuxOutputConfig.enable_return_routed_experts",
        change=change("aux_output_config.enable_return_routed_experts", True),
    ),
    "cache type": Refusal(
        "EngineArgs.kv_cache_dtype CacheConfig.cache_dtype",
        {"kv_cache_dtype": "fp8_e5m2"},
        hands_back=False,
        words="--kv-cache-dtype other than auto, float16, bfloat16, fp8, fp8_e4m3",
    ),
    "prefill context": Refusal(
        "EngineArgs.prefill_context_parallel_size ParallelConfig.prefill_context_parallel_size",
        change=change("parallel_config.prefill_context_parallel_size", 2),
        words="prefill context parallelism",
        hands_back=False,
    ),
    "decode context": Refusal(
        "EngineArgs.decode_context_parallel_size ParallelConfig.decode_context_parallel_size",
        change=change("parallel_config.decode_context_parallel_size", 2),
        words="decode context parallelism",
        hands_back=False,
    ),
    "block size": Refusal(
        "EngineArgs.block_size CacheConfig.block_size", {"block_size": 24}, hands_back=False
    ),
    "retention interval": Refusal(
        "EngineArgs.prefix_cache_retention_interval CacheConfig.prefix_cache_retention_interval",
        {"prefix_cache_retention_interval": 64},
        hands_back=False,
    ),
    "hybrid manager": Refusal(
        "EngineArgs.disable_hybrid_kv_cache_manager SchedulerConfig.disable_hybrid_kv_cache_manager",
        {"disable_hybrid_kv_cache_manager": False, **WINDOWS},
        words="separate KV cache groups for these sliding windows (--no-disable-hybrid-kv-cache-manager)",
    ),
    "fast prefill": Refusal(
        "EngineArgs.kv_sharing_fast_prefill CacheConfig.kv_sharing_fast_prefill",
        {"kv_sharing_fast_prefill": True},
        hands_back=False,
    ),
    "non-causal attention": Refusal(
        "EngineArgs.attention_config AttentionConfig.use_non_causal",
        {"attention_backend": None, "attention_config": {"backend": "rose", "use_non_causal": True}},
        hands_back=False,
    ),
    # What vLLM starts to make a snapshot of is the main module of its process.
    "snapshots": Refusal(
        change=lambda config, monkeypatch: monkeypatch.setattr(
            sys.modules["__main__"], "__spec__", ModuleSpec("vllm.snapshot.server", None)
        ),
        words="snapshots of a server",
        hands_back=False,
    ),
    "residency metrics": Refusal(
        "EngineArgs.kv_cache_metrics ObservabilityConfig.kv_cache_metrics", {"kv_cache_metrics": True}
    ),
    "connectors": Refusal(
        "EngineArgs.kv_transfer_config KVTransferConfig.kv_connector", connector("SimpleCPUOffloadConnector")
    ),
    "own connector": Refusal(
        "KVTransferConfig.kv_connector_module_path",
        connector(
            "ExampleConnector",
            kv_connector_module_path="vllm.distributed.kv_transfer.kv_connector.v1.example_connector",
        ),
    ),
    # Not by its name, for which vLLM looks for LMCache's package.
    "lazy connector": Refusal(
        "KVTransferConfig.kv_connector_extra_config",
        connector("ExampleConnector", {"lmcache.mp.lazy_offload": True}),
    ),
    "NIXL back": Refusal(
        arguments=connector("NixlConnector", {"bidirectional_kv_xfer": True}), words="NIXL's transfers back"
    ),
    "connector beside drafts": Refusal(
        arguments={**connector("ExampleConnector"), "speculative_config": n_grams()},
        words="a KV connector beside speculative decoding",
    ),
    "scheduler": Refusal(
        "EngineArgs.scheduler_cls SchedulerConfig.scheduler_cls",
        {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
    ),
    "speculation": Refusal(
        "EngineArgs.speculative_config EngineArgs.spec_method SpeculativeConfig.method",
        {
            "speculative_config": {
                "method": "custom_class",
                "model": "a_module.AProposer",
                "num_speculative_tokens": 2,
            }
        },
    ),
    "what was read ahead for": Refusal(
        "SpeculativeConfig.disable_eagle_block_drop",
        {"speculative_config": {**n_grams(), "disable_eagle_block_drop": True}},
    ),
    # A drafter that reads ahead is another model, on a GPU.
    "events beside a drafter": Refusal(
        "EngineArgs.kv_events_config KVEventsConfig.enable_kv_cache_events",
        {"kv_events_config": EVENTS},
        change=change("num_hash_lookahead_tokens", 1),
    ),
    "events of windows": Refusal(
        arguments={"kv_events_config": EVENTS, **WINDOWS}, words="KV cache events of sliding windows"
    ),
    "diffusion": Refusal(
        "EngineArgs.diffusion_config VllmConfig.diffusion_config",
        {"diffusion_config": {"canvas_length": 4}},
    ),
    "prompts in one step": Refusal(
        "EngineArgs.max_num_batched_tokens SchedulerConfig.max_num_batched_tokens",
        {"max_num_batched_tokens": 512, **rose(chunked_prefill=False)},
        hands_back=False,
        words="of at least max_model_len 1024, got 512",
    ),
    "prefetched weights": Refusal(
        "EngineArgs.offload_group_size PrefetchOffloadConfig.offload_group_size",
        {"offload_group_size": 2},
        hands_back=False,
    ),
    "weights without UVA": Refusal(
        "EngineArgs.cpu_offload_gb UVAOffloadConfig.cpu_offload_gb", {"cpu_offload_gb": 1}, hands_back=False
    ),
    "prefetching backend": Refusal(
        "EngineArgs.offload_backend OffloadConfig.offload_backend",
        {"offload_backend": "prefetch", "offload_group_size": 2},
        hands_back=False,
    ),
    **{
        words: Refusal(change=model(attribute), words=words, hands_back=hands_back)
        for attribute, words, hands_back in (
            ("is_hybrid", "hybrid models without prefix caching", True),
            ("has_inner_state", "Mamba models", True),
            ("is_attention_free", "models without attention", True),
            ("is_mm_prefix_lm", "attention in both directions within an image", False),
            ("use_mla", "latent attention", False),
            ("is_encoder_decoder", "encoder-decoder models", False),
            ("attention_chunk_size", "chunked local attention", False),
        )
    },
}


def test_snapshots_are_of_the_process_that_is_refused() -> None:
    source = inspect.getsource(LocalSnapshotTools.launch_child)
    assert re.search(r'"-m",\s+"vllm\.snapshot\.server"', source) and find_spec("vllm.snapshot.server")


def test_every_refusal_is_shown() -> None:
    listed = [f"{name}.{option}" for name, options in OPTIONS.items() for option in options.refuses]
    shown = [name for refusal in REFUSALS.values() for name in refusal.names.split()]
    assert sorted(listed) == sorted(shown)


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_refused_is_named(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, rose_log: list[str], case: str
) -> None:
    refusal = REFUSALS[case]
    monkeypatch.setattr("vllm.utils.platform_utils.is_uva_available", lambda: False)

    def start(**more: Any) -> None:
        config = make_config(**{**refusal.arguments, **more})
        if refusal.change is not None:
            refusal.change(config, monkeypatch)
            check_supported(config, rose_options(config))

    with pytest.raises(ValueError) as caught:
        start()
    message = str(caught.value)
    for name in refusal.names.split():
        owner, _, option = name.partition(".")
        assert OPTIONS[owner].refuses[option] in message
    assert refusal.words in message and (HAND_BACK_OPTION in message) is refusal.hands_back
    if refusal.change is None:
        (line,) = rose_log
        assert "\n" not in line and refusal.words in line
        assert line.removeprefix("Cannot start with --attention-backend rose: ") in message
    monkeypatch.undo()
    if refusal.hands_back:
        # The option named in the message works, and another backend needs none.
        start(**rose(block_manager=False))
        make_config(**{**refusal.arguments, "attention_backend": "CPU_ATTN"})
    elif not refusal.arguments:
        with pytest.raises(ConfigError, match=refusal.words):
            start(**rose(block_manager=False))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (rose(kv_canary="log", block_manager=False), "vLLM's own block manager"),
        ({"kv_cache_dtype": "fp8", **rose(kv_canary="log")}, "float8 K/V"),
        ({**connector("ExampleConnector"), **rose(kv_canary="log")}, "a KV connector"),
    ],
)
def test_what_the_canary_does_not_know_is_refused(
    make_config: MakeConfig, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=f"kv_canary: got 'log', allowed is off with {words}"):
        make_config(**arguments)


SERVED: dict[str, dict[str, Any]] = {
    "float8 K/V": {"kv_cache_dtype": "fp8"},
    "KV cache events": {"kv_events_config": EVENTS},
    "sliding windows": WINDOWS,
    "sliding windows in some layers": MIXED_WINDOWS,
    "sliding windows in groups of their own": {"disable_hybrid_kv_cache_manager": False, **MIXED_WINDOWS},
    "windows of no layer beside events": {
        "kv_events_config": EVENTS,
        "hf_overrides": {"sliding_window": 64, "layer_types": ["full_attention"] * 4},
    },
    "vLLM's hybrid KV cache manager without windows": {"disable_hybrid_kv_cache_manager": False},
    "n-gram speculation": {"speculative_config": n_grams()},
    "LoRA": {"enable_lora": True},
    "priorities": {"scheduling_policy": "priority"},
    "prompt embeddings": {"enable_prompt_embeds": True},
    **{
        name: connector(name)
        for name in KV_CONNECTORS
        if name != "LMCacheMPConnector" or find_spec("lmcache")
    },
    "pipeline parallelism": {"pipeline_parallel_size": 2},
    "tensor parallelism": {"tensor_parallel_size": 2},
    "no retention": {"prefix_cache_retention_interval": 0},
    "retention to the end": {"prefix_cache_retention_interval": None},
}


@pytest.mark.parametrize("feature", SERVED)
def test_what_the_block_manager_serves_keeps_it(make_config: MakeConfig, feature: str) -> None:
    config = make_config(**SERVED[feature])
    assert config.scheduler_config.scheduler_cls == SCHEDULER_CLASS and uses_rose_manager(config)


def test_without_events_hashes_may_read_ahead(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    monkeypatch.setattr(VllmConfig, "num_hash_lookahead_tokens", 1, raising=False)
    check_supported(config, rose_options(config))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fused_mpl": False}, "unknown option 'fused_mpl'; did you mean 'fused_mlp'?"),
        ({"exact_cached_tokens": 1}, "exact_cached_tokens: got 1, allowed are true and false"),
        ({"prefix_cache": "no"}, "prefix_cache: got 'no', allowed are true and false"),
        (3, "got 3, a JSON object is needed"),
    ],
)
def test_bad_options_are_named(
    make_config: MakeConfig, rose_log: list[str], options: Any, message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        make_config(additional_config={"rose": options})
    assert message in str(caught.value)
    (line,) = rose_log
    assert message in line and "\n" not in line


def test_a_retention_interval_is_refused_as_stock_refuses_it() -> None:
    for interval in (0, None):
        check_retention_interval(interval)
    with pytest.raises(
        ConfigError, match=r"prefix_cache_retention_interval: got 64.* allowed .* are 0 and none"
    ):
        check_retention_interval(64)


OFFLOADED = [
    (OffloadConfig(prefetch=PrefetchOffloadConfig(offload_group_size=2)), {"is_uva": True}),
    (OffloadConfig(offload_backend="prefetch", prefetch=PrefetchOffloadConfig(offload_group_size=2)), {}),
    (OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1)), {"is_uva": False}),
    (OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=1)), {"is_disabled": "1"}),
]


@pytest.mark.parametrize(("offload", "case"), OFFLOADED)
def test_offloaded_weights_that_arrive_with_whole_blocks_need_vllms_layers(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, offload: Any, case: dict[str, Any]
) -> None:
    monkeypatch.setattr("vllm.utils.platform_utils.is_uva_available", lambda: case.get("is_uva", True))
    monkeypatch.setenv("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA", case.get("is_disabled", "0"))
    config = make_config(**rose(fused_mlp=False, fused_add_layernorm=False))
    config.offload_config = offload
    assert choose_model_class(config, rose_options(config)) == (None, None)
    config.additional_config = {}
    with pytest.raises(ConfigError, match=r'"fused_mlp": false, "fused_add_layernorm": false'):
        choose_model_class(config, rose_options(config))


def test_weights_that_the_gpu_reads_where_they_are_stay_with_roses_layers(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.utils.platform_utils.is_uva_available", lambda: True)
    config = make_config(cpu_offload_gb=1)
    assert config.model_config.hf_config.architectures == ["RoseGPT2LMHeadModel"]
