"""That every option of this vLLM is in the list, and that each refusal is one, by the option's name."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.config import KVEventsConfig, KVTransferConfig, OffloadConfig, VllmConfig
from vllm.config.offload import PrefetchOffloadConfig, UVAOffloadConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

from rose_backend.errors import ConfigError
from rose_backend.vllm_plugin.options import (
    HAND_BACK_OPTION,
    check_retention_interval,
    rose_options,
    uses_rose_manager,
)
from rose_backend.vllm_plugin.refusals import check_supported
from rose_backend.vllm_plugin.registration import installed_vllm_version
from tests.vllm_plugin.conftest import MakeConfig
from tests.vllm_plugin.vllm_engine_arguments import ENGINE_ARGUMENTS
from tests.vllm_plugin.vllm_options import CONFIGURATION, ONLY_IN, Options

OPTIONS: dict[str, Options] = {**ENGINE_ARGUMENTS, **CONFIGURATION}
RELEASE = ".".join(installed_vllm_version().split(".")[:2])


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
        for name in OPTIONS
        if all(f"{name}.{option}" in only_in_others() for option in OPTIONS[name].names())
    }
    assert set(CLASSES) == set(OPTIONS) - absent


def only_in_others() -> set[str]:
    """Return the options that the installed release lacks, ``Class.option``."""
    return {
        option for release, options in ONLY_IN.items() if release != RELEASE for option in options.split()
    }


@pytest.mark.parametrize("name", CLASSES)
def test_the_list_has_the_options_of_this_vllm(name: str) -> None:
    here = {one.name for one in dataclasses.fields(CLASSES[name])}
    if name == "AsyncEngineArgs":
        here -= {one.name for one in dataclasses.fields(EngineArgs)}
    names = OPTIONS[name].names() if name in OPTIONS else []
    assert len(names) == len(set(names)), f"an option of {name} is listed twice"
    listed = {option for option in names if f"{name}.{option}" not in only_in_others()}
    assert not here - listed, f"new in {name}: pass on, serve or refuse {sorted(here - listed)}, and list it"
    assert not listed - here, f"vLLM {RELEASE} has no {sorted(listed - here)} in {name}"


@dataclass(frozen=True)
class Refusal:
    """A configuration that is refused.

    Args:
        names: options, as ``Class.option``, whose refusal this shows.
        arguments: engine arguments with the refused value.
        change: what a machine without a GPU cannot be told by arguments, done to a finished configuration instead.
        hands_back: whether vLLM's own block manager serves it.
    """

    names: str
    arguments: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Any], None] | None = None
    hands_back: bool = True


def change(part: str, name: str, value: Any) -> Callable[[Any], None]:
    """Return a function that sets one value in a part of a configuration."""
    return lambda config: setattr(getattr(config, part), name, value)


def read_ahead(config: Any) -> None:
    # A drafter that reads ahead is another model, on a GPU.
    type(config).num_hash_lookahead_tokens = 1


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
CUSTOM = {"method": "custom_class", "model": "a_module.AProposer", "num_speculative_tokens": 2}
EVENTS = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
CONNECTOR = KVTransferConfig(kv_connector="SimpleCPUOffloadConnector", kv_role="kv_both")
OWN_CONNECTOR = KVTransferConfig(
    kv_connector="ExampleConnector",
    kv_role="kv_both",
    kv_connector_module_path="vllm.distributed.kv_transfer.kv_connector.v1.example_connector",
)
# Not by its name, for which vLLM looks for LMCache's package.
LAZY_CONNECTOR = KVTransferConfig(
    kv_connector="ExampleConnector",
    kv_role="kv_both",
    kv_connector_extra_config={"lmcache.mp.lazy_offload": True},
)

REFUSALS = {
    "routed experts": Refusal(
        "EngineArgs.enable_return_routed_experts EngineArgs.aux_output_config "
        "AuxOutputConfig.enable_return_routed_experts",
        change=change("aux_output_config", "enable_return_routed_experts", True),
    ),
    "cache type": Refusal(
        "EngineArgs.kv_cache_dtype CacheConfig.cache_dtype", {"kv_cache_dtype": "fp8_e5m2"}, hands_back=False
    ),
    "prefill context": Refusal(
        "EngineArgs.prefill_context_parallel_size ParallelConfig.prefill_context_parallel_size",
        change=change("parallel_config", "prefill_context_parallel_size", 2),
        hands_back=False,
    ),
    "decode context": Refusal(
        "EngineArgs.decode_context_parallel_size ParallelConfig.decode_context_parallel_size",
        change=change("parallel_config", "decode_context_parallel_size", 2),
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
        {"disable_hybrid_kv_cache_manager": False, "hf_overrides": {"sliding_window": 64}},
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
    "residency metrics": Refusal(
        "EngineArgs.kv_cache_metrics ObservabilityConfig.kv_cache_metrics", {"kv_cache_metrics": True}
    ),
    "connectors": Refusal(
        "EngineArgs.kv_transfer_config KVTransferConfig.kv_connector", {"kv_transfer_config": CONNECTOR}
    ),
    "own connector": Refusal(
        "KVTransferConfig.kv_connector_module_path", {"kv_transfer_config": OWN_CONNECTOR}
    ),
    "lazy connector": Refusal(
        "KVTransferConfig.kv_connector_extra_config", {"kv_transfer_config": LAZY_CONNECTOR}
    ),
    "scheduler": Refusal(
        "EngineArgs.scheduler_cls SchedulerConfig.scheduler_cls",
        {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
    ),
    "speculation": Refusal(
        "EngineArgs.speculative_config EngineArgs.spec_method SpeculativeConfig.method",
        {"speculative_config": CUSTOM},
    ),
    "what was read ahead for": Refusal(
        "SpeculativeConfig.disable_eagle_block_drop",
        {"speculative_config": {**NGRAM, "disable_eagle_block_drop": True}},
    ),
    "events beside a drafter": Refusal(
        "EngineArgs.kv_events_config KVEventsConfig.enable_kv_cache_events",
        {"kv_events_config": EVENTS},
        change=read_ahead,
    ),
    "diffusion": Refusal(
        "EngineArgs.diffusion_config VllmConfig.diffusion_config",
        {"diffusion_config": {"canvas_length": 4}},
    ),
    "prompts in one step": Refusal(
        "EngineArgs.max_num_batched_tokens SchedulerConfig.max_num_batched_tokens",
        {"max_num_batched_tokens": 512, "additional_config": {"rose": {"chunked_prefill": False}}},
        hands_back=False,
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
}


def test_every_refusal_is_shown() -> None:
    listed = [f"{name}.{option}" for name, options in OPTIONS.items() for option in options.refused]
    shown = [name for refusal in REFUSALS.values() for name in refusal.names.split()]
    assert sorted(listed) == sorted(shown)


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_refused_is_named(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    rose_log: list[str],
    case: str,
) -> None:
    refusal = REFUSALS[case]
    monkeypatch.setattr("vllm.utils.platform_utils.is_uva_available", lambda: False)
    monkeypatch.setattr(VllmConfig, "num_hash_lookahead_tokens", 0, raising=False)
    with pytest.raises(ValueError) as caught:
        config = make_config(**refusal.arguments)
        if refusal.change is not None:
            refusal.change(config)
            check_supported(config, rose_options(config))
    message = str(caught.value)
    for name in refusal.names.split():
        owner, _, option = name.partition(".")
        assert OPTIONS[owner].refused[option] in message
    assert (HAND_BACK_OPTION in message) is refusal.hands_back
    if refusal.change is None:
        (line,) = rose_log
        assert (
            "\n" not in line and line.removeprefix("Cannot start with --attention-backend rose: ") in message
        )


@pytest.mark.parametrize("case", [case for case, refusal in REFUSALS.items() if refusal.hands_back])
def test_what_only_the_block_manager_refuses_is_taken_without_it(make_config: MakeConfig, case: str) -> None:
    config = make_config(**REFUSALS[case].arguments, additional_config={"rose": {"block_manager": False}})
    assert not uses_rose_manager(config)


def test_a_retention_interval_is_refused_as_stock_refuses_it(make_config: MakeConfig) -> None:
    for interval in (0, None):
        config = make_config(prefix_cache_retention_interval=interval)
        assert uses_rose_manager(config)
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
    from rose_backend.vllm_plugin.models.model_choice import choose_model_class

    plain = {"fused_mlp": False, "fused_add_layernorm": False}
    monkeypatch.setattr("vllm.utils.platform_utils.is_uva_available", lambda: case.get("is_uva", True))
    monkeypatch.setenv("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA", case.get("is_disabled", "0"))
    config = make_config(additional_config={"rose": plain})
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


def test_a_model_class_of_the_users_own_is_kept(make_config: MakeConfig, rose_log: list[str]) -> None:
    own = {"GPT2LMHeadModel": "vllm.model_executor.models.gpt2:GPT2LMHeadModel"}
    config = make_config(model_class_overrides=own)
    assert config.model_config.hf_config.architectures == ["GPT2LMHeadModel"]
    assert "fused_mlp and fused_add_layernorm (no layers of Rose's for this model)" in rose_log[0]
