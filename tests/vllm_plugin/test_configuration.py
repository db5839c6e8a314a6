"""What ROSE makes of a vLLM configuration, what it refuses, and that other backends see nothing of it."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode, KVEventsConfig, KVTransferConfig
from vllm.platforms import current_platform

from rose_backend.block_manager import GroupType
from rose_backend.errors import ConfigError
from rose_backend.vllm_plugin import options
from rose_backend.vllm_plugin.config_hook import describe_parts, keep_compiled_kernels
from rose_backend.vllm_plugin.kv_cache.groups import RoseGroups
from rose_backend.vllm_plugin.models.model_choice import ModelChoice
from rose_backend.vllm_plugin.options import (
    ASYNC_SCHEDULER_CLASS,
    HAND_BACK_OPTION,
    SCHEDULER_CLASS,
    appends_in_attention,
    batches_decode_steps,
    has_sliding_windows,
    is_rose_selected,
    rose_options,
)
from rose_backend.vllm_plugin.refusals import KV_CONNECTORS
from tests.vllm_plugin.conftest import MakeConfig

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


def rose(**options: Any) -> dict[str, Any]:
    return {"additional_config": {"rose": options}}


def test_everything_on(make_config: MakeConfig, rose_log: list[str]) -> None:
    config = make_config()
    assert is_rose_selected(config) and appends_in_attention(config)
    # The CPU platform switches asynchronous scheduling off.
    assert config.scheduler_config.scheduler_cls == SCHEDULER_CLASS
    assert config.model_config.hf_config.architectures == ["RoseGPT2LMHeadModel"]
    (line,) = rose_log
    for part in (
        "attention ROSE",
        "RoseKVCacheManager (prefix hits to the token);",
        "fused MLP",
        "sampler Rose",
        "; disabled: none; ",
    ):
        assert part in line, line


def test_finishing_the_configuration_again_changes_nothing(
    make_config: MakeConfig, rose_log: list[str]
) -> None:
    config = make_config()
    # The engine core does this to its copy.
    config.__post_init__()
    assert config.scheduler_config.scheduler_cls == SCHEDULER_CLASS
    assert config.model_config.hf_config.architectures == ["RoseGPT2LMHeadModel"]
    assert len(rose_log) == 1


def test_asynchronous_scheduling_keeps_an_asynchronous_scheduler(make_config: MakeConfig) -> None:
    from rose_backend.vllm_plugin.config_hook import _choose_scheduler

    config = make_config()
    config.scheduler_config.async_scheduling = True
    _choose_scheduler(config)
    assert config.scheduler_config.scheduler_cls == ASYNC_SCHEDULER_CLASS
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    assert issubclass(config.scheduler_config.get_scheduler_cls(), AsyncScheduler)


def test_switches_reach_vllms_own_settings(make_config: MakeConfig, rose_log: list[str]) -> None:
    config = make_config(**rose(prefix_cache=False, cuda_graph=False, chunked_prefill=False))
    assert config.cache_config.enable_prefix_caching is False
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    assert config.scheduler_config.enable_chunked_prefill is False
    (line,) = rose_log
    assert "; disabled: cuda_graph, chunked_prefill, prefix_cache; " in line and "no prefix cache" in line


def test_where_prefix_hits_end_and_what_is_told_of_them(make_config: MakeConfig, rose_log: list[str]) -> None:
    make_config(**rose(token_granular_hits=False))
    make_config(**rose(exact_cached_tokens=True))
    make_config(**rose(prefix_cache=False, token_granular_hits=False))
    at_borders, exact, uncached = rose_log
    assert "(prefix hits at block borders);" in at_borders
    assert "; disabled: token_granular_hits; " in at_borders
    assert "(prefix hits to the token, reported exactly);" in exact and "; disabled: none; " in exact
    assert "(no prefix cache);" in uncached


def test_fused_parts_can_be_switched_off_alone(make_config: MakeConfig, rose_log: list[str]) -> None:
    config = make_config(
        **rose(fused_mlp=False, fused_add_layernorm=False, fused_sampler=False, fused_kv_append=False)
    )
    assert config.model_config.hf_config.architectures == ["GPT2LMHeadModel"]
    assert not appends_in_attention(config)
    (line,) = rose_log
    for part in ("separate K/V write", "model vLLM's own GPT2LMHeadModel", "sampler vLLM's own"):
        assert part in line, line


def test_block_management_can_be_handed_back(make_config: MakeConfig, rose_log: list[str]) -> None:
    config = make_config(**rose(block_manager=False))
    assert config.scheduler_config.scheduler_cls is None
    # vLLM's manager shares blocks in the step that writes them, so the write must come first.
    assert not appends_in_attention(config)
    (line,) = rose_log
    for part in (
        "separate K/V write",
        "block manager vLLM's own (prefix hits at block borders)",
        "decodes scheduled one by one",
        "unavailable: fused_kv_append and batched_scheduling and token_granular_hits (only with Rose's block manager)",
        "cuda_graph and step_graph (",
        "; disabled: block_manager; ",
    ):
        assert part in line, line


@pytest.mark.parametrize(
    ("arguments", "name", "reason"),
    [
        (rose(block_manager=False), "fused_kv_append", "only with Rose's block manager"),
        (rose(block_manager=False), "batched_scheduling", "only with Rose's block manager"),
        ({"speculative_config": NGRAM}, "batched_scheduling", "drafts"),
        ({"pipeline_parallel_size": 2}, "batched_scheduling", "pipeline stages"),
        ({"enable_mfu_metrics": True}, "batched_scheduling", "utilization metrics"),
        ({"prefill_schedule_interval": 4}, "batched_scheduling", "a prefill interval"),
        ({"runner": "pooling"}, "batched_scheduling", "a model that does not generate"),
        ({"runner": "pooling"}, "fused_mlp", "no layers of Rose's for this model"),
        ({"runner": "pooling"}, "fused_add_layernorm", "no layers of Rose's for this model"),
        ({"use_fp64_gumbel": True}, "fused_sampler", "float64 noise"),
        ({"enable_prefix_caching": False}, "prefix_cache", "off in vLLM"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 2048}, "chunked_prefill", "off in vLLM"),
    ],
)
def test_what_is_not_in_force_is_named_with_its_reason(
    make_config: MakeConfig, rose_log: list[str], arguments: dict[str, Any], name: str, reason: str
) -> None:
    config = make_config(**arguments)
    (line,) = rose_log
    idle = idle_parts(line)
    assert idle[name] == reason
    # What the line says is what holds.
    assert ("batched_scheduling" in idle) is not batches_decode_steps(config)
    assert ("fused_kv_append" in idle) is not appends_in_attention(config)
    assert ("prefix_cache" in idle) is not config.cache_config.enable_prefix_caching


@pytest.mark.parametrize(
    ("use_rust", "rank", "is_idle"),
    # Rank -1: this process starts engines and API servers, but is no API server.
    [("1", -1, True), ("0", -1, False), ("1", 0, False)],
)
def test_the_rust_front_end_is_named_where_it_answers_for_this_server(
    make_config: MakeConfig,
    rose_log: list[str],
    monkeypatch: pytest.MonkeyPatch,
    use_rust: str,
    rank: int,
    is_idle: bool,
) -> None:
    applied: list[str] = []
    monkeypatch.setattr("rose_backend.vllm_plugin.config_hook.apply_patch", applied.append)
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", use_rust)
    make_config(_api_process_rank=rank)
    (line,) = rose_log
    assert idle_parts(line).get("joined_outputs") == ("vLLM's Rust front end" if is_idle else None)
    for name in ("merged_outputs", "output_statistics"):
        assert (name in applied) is not is_idle
    applied.clear()
    make_config(_api_process_rank=rank, **rose(joined_outputs=False))
    assert "merged_outputs" not in applied and ("output_statistics" in applied) is not is_idle


def test_what_is_switched_off_is_not_said_to_be_idle_too(
    make_config: MakeConfig, rose_log: list[str]
) -> None:
    make_config(**rose(block_manager=False, fused_kv_append=False, prefix_cache=False))
    (line,) = rose_log
    assert idle_parts(line).keys() == {
        "batched_scheduling",
        "token_granular_hits",
        "cuda_graph",
        "step_graph",
    }
    assert "block manager vLLM's own (no prefix cache)" in line
    assert "; disabled: fused_kv_append, prefix_cache, block_manager; " in line


def idle_parts(line: str) -> dict[str, str]:
    """Return the switches that a start-up line says are unavailable, with the reasons."""
    said = line.partition("; unavailable: ")[2]
    groups = re.findall(r"([a-z0-9_ ]+) \(([^)]*)\)", said)
    return {name: reason for names, reason in groups for name in names.strip().split(" and ")}


def test_with_graphs_and_everything_else_in_force_nothing_is_named(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(enforce_eager=False)
    monkeypatch.setattr(config, "compilation_config", SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL))
    runner_v2 = property(lambda self: True)
    monkeypatch.setattr(type(config), "use_v2_model_runner", runner_v2)
    for is_cuda, idle in ((True, "none"), (False, "cuda_graph and step_graph (no CUDA device)")):
        monkeypatch.setattr(type(current_platform), "is_cuda", lambda self, answer=is_cuda: answer)
        line = describe_parts(config, rose_options(config), ModelChoice("RoseGPT2LMHeadModel"))
        assert line.endswith(f"; disabled: none; unavailable: {idle}")
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    assert "cuda_graph and step_graph (cudagraph_mode NONE)" in describe_parts(
        config, rose_options(config), ModelChoice("Rose")
    )
    config.model_config.enforce_eager = True
    assert "cuda_graph and step_graph (--enforce-eager)" in describe_parts(
        config, rose_options(config), ModelChoice("Rose")
    )


def test_another_backend_sees_nothing(make_config: MakeConfig, rose_log: list[str]) -> None:
    # Options under our key are not even read.
    for backend in (None, "CPU_ATTN"):
        config = make_config(attention_backend=backend, **rose(no_such_option=1, prefix_cache=False))
        assert config.scheduler_config.scheduler_cls is None
        assert config.model_config.hf_config.architectures == ["GPT2LMHeadModel"]
        assert config.cache_config.enable_prefix_caching
    assert rose_log == []


@pytest.mark.parametrize("spelling", ["rose", "ROSE", "Rose"])
def test_any_spelling_of_the_name(make_config: MakeConfig, spelling: str) -> None:
    assert is_rose_selected(make_config(attention_backend=spelling))


def test_rose_for_one_kind_of_layer_counts(make_config: MakeConfig) -> None:
    from vllm.config import AttentionConfig

    attention = AttentionConfig(backend_per_kind={"full_attention": "rose"})
    assert is_rose_selected(make_config(attention_backend=None, attention_config=attention))


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


def test_prompts_that_no_step_could_hold_are_refused_at_start_up(make_config: MakeConfig) -> None:
    with pytest.raises(
        ValueError, match="needs --max-num-batched-tokens of at least max_model_len 1024, got 512"
    ):
        make_config(max_num_batched_tokens=512, **rose(chunked_prefill=False))


EVENTS = {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}
WINDOWS = {"hf_overrides": {"sliding_window": 64}}
MIXED_WINDOWS = {
    "hf_overrides": {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
}


def connector(name: str, extra: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return {
        "kv_transfer_config": KVTransferConfig(
            kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra or {}, **options
        )
    }


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "this KV connector": connector("SimpleCPUOffloadConnector"),
    "a KV connector of your own": connector(
        "ExampleConnector",
        kv_connector_module_path="vllm.distributed.kv_transfer.kv_connector.v1.example_connector",
    ),
    # vLLM looks for LMCache's package if its connector is named.
    "LMCache's lazy offload": connector("ExampleConnector", {"lmcache.mp.lazy_offload": True}),
    "NIXL's transfers back": connector("NixlConnector", {"bidirectional_kv_xfer": True}),
    "a KV connector beside speculative decoding": {
        **connector("ExampleConnector"),
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
    },
    "this kind of speculative decoding": {
        "speculative_config": {
            "method": "custom_class",
            "model": "a_module.AProposer",
            "num_speculative_tokens": 2,
        }
    },
    "KV cache residency metrics": {"kv_cache_metrics": True},
    "a scheduler of your own": {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
    "separate KV cache groups for these sliding windows (--no-disable-hybrid-kv-cache-manager)": {
        "disable_hybrid_kv_cache_manager": False,
        **WINDOWS,
    },
    "KV cache events of sliding windows": {**EVENTS, **WINDOWS},
}


SERVED: dict[str, dict[str, Any]] = {
    "float8 K/V": {"kv_cache_dtype": "fp8"},
    "KV cache events": EVENTS,
    "sliding windows": WINDOWS,
    "sliding windows in some layers": MIXED_WINDOWS,
    "sliding windows in groups of their own": {"disable_hybrid_kv_cache_manager": False, **MIXED_WINDOWS},
    "windows of no layer beside events": {
        **EVENTS,
        "hf_overrides": {"sliding_window": 64, "layer_types": ["full_attention"] * 4},
    },
    "vLLM's hybrid KV cache manager without windows": {"disable_hybrid_kv_cache_manager": False},
    "n-gram speculation": {"speculative_config": NGRAM},
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
}


@pytest.mark.parametrize("feature", SERVED)
def test_what_the_block_manager_serves_keeps_it(make_config: MakeConfig, feature: str) -> None:
    assert make_config(**SERVED[feature]).scheduler_config.scheduler_cls == SCHEDULER_CLASS


def test_other_quantized_caches_are_refused_by_name(make_config: MakeConfig, rose_log: list[str]) -> None:
    with pytest.raises(ValueError, match="this K/V cache type"):
        make_config(kv_cache_dtype="fp8_e5m2")
    (line,) = rose_log
    assert "--kv-cache-dtype other than auto, float16, bfloat16, fp8, fp8_e4m3" in line


@pytest.mark.parametrize("feature", UNSUPPORTED)
def test_what_the_block_manager_does_not_serve_is_refused_by_name(
    make_config: MakeConfig, rose_log: list[str], feature: str
) -> None:
    with pytest.raises(ValueError) as caught:
        make_config(**UNSUPPORTED[feature])
    assert feature in str(caught.value) and HAND_BACK_OPTION in str(caught.value)
    (line,) = rose_log
    assert feature in line
    # The option named in the message works, and another backend needs none.
    make_config(**UNSUPPORTED[feature], **rose(block_manager=False))
    make_config(**UNSUPPORTED[feature], attention_backend="CPU_ATTN")


@pytest.mark.parametrize(
    ("attribute", "feature"),
    [
        ("is_hybrid", "hybrid models without prefix caching"),
        ("has_inner_state", "Mamba models"),
        ("is_attention_free", "models without attention"),
        ("is_mm_prefix_lm", "attention in both directions within an image"),
    ],
)
def test_model_kinds_are_refused_by_name(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, attribute: str, feature: str
) -> None:
    from rose_backend.vllm_plugin.refusals import check_supported

    config = make_config()
    monkeypatch.setattr(type(config.model_config), attribute, property(lambda self: True))
    with pytest.raises(ConfigError, match=feature):
        check_supported(config, rose_options(config))


def test_layers_of_one_group_are_asked_of_vllm_too(make_config: MakeConfig) -> None:
    """What Rose sets is not taken for what a user has set."""

    def is_asked(**options: Any) -> bool | None:
        config = make_config(**options)
        # vLLM finishes copies.
        copy = replace(config)
        asked: bool | None = config.scheduler_config.disable_hybrid_kv_cache_manager
        assert copy.scheduler_config.disable_hybrid_kv_cache_manager == asked
        return asked

    assert is_asked() and is_asked(**WINDOWS) and is_asked(disable_hybrid_kv_cache_manager=True, **WINDOWS)
    assert not is_asked(disable_hybrid_kv_cache_manager=False)
    assert not is_asked(**MIXED_WINDOWS) and is_asked(disable_hybrid_kv_cache_manager=True, **MIXED_WINDOWS)
    assert is_asked(speculative_config=NGRAM, **MIXED_WINDOWS)
    assert is_asked(pipeline_parallel_size=2, **MIXED_WINDOWS)
    connector = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    assert is_asked(kv_transfer_config=connector, **MIXED_WINDOWS)
    assert not is_asked(**WINDOWS, **rose(block_manager=False))
    assert not is_asked(**WINDOWS, attention_backend="CPU_ATTN")


@pytest.mark.parametrize("is_replayed", [True, False])
def test_windows_have_groups_of_their_own_on_gpus_too(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, is_replayed: bool
) -> None:
    def keeps_one_group(**asked: Any) -> bool | None:
        is_one: bool | None = make_config(**asked).scheduler_config.disable_hybrid_kv_cache_manager
        return is_one

    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(options, "replays_steps", lambda config: is_replayed)
    assert not keeps_one_group(**MIXED_WINDOWS)
    assert not keeps_one_group(disable_hybrid_kv_cache_manager=False, **MIXED_WINDOWS)
    # What the user has asked for, and what groups are not for.
    assert keeps_one_group(disable_hybrid_kv_cache_manager=True, **MIXED_WINDOWS)
    assert keeps_one_group(**WINDOWS) and keeps_one_group(speculative_config=NGRAM, **MIXED_WINDOWS)


def test_windows_of_a_drafter_are_windows(make_config: MakeConfig, tiny_model_path: Path) -> None:
    config = make_config()
    assert not has_sliding_windows(config)
    draft = {"method": "draft_model", "model": str(tiny_model_path), "num_speculative_tokens": 2}
    config = make_config(speculative_config=draft)
    assert not has_sliding_windows(config)
    config.speculative_config.draft_model_config.hf_text_config.sliding_window = 64
    assert has_sliding_windows(config)
    types = ["full_attention", "sliding_attention"]
    for layer_types, has_windows in ((types, True), (types[:1], False)):
        config.speculative_config.draft_model_config.hf_text_config.layer_types = layer_types
        assert has_sliding_windows(config) is has_windows


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_events_of_hashes_that_read_ahead_are_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    from rose_backend.vllm_plugin.refusals import check_supported

    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with_events, without = make_config(kv_events_config=events, **rose()), make_config(**rose())
    monkeypatch.setattr(type(without), "num_hash_lookahead_tokens", num_tokens, raising=False)
    check_supported(without, rose_options(without))
    with contextlib.nullcontext() if num_tokens == 0 else pytest.raises(ConfigError, match="reads ahead"):
        check_supported(with_events, rose_options(with_events))


@pytest.mark.parametrize(
    ("attribute", "feature"),
    [
        ("use_mla", "latent attention"),
        ("is_encoder_decoder", "encoder-decoder models"),
        ("attention_chunk_size", "chunked local attention"),
    ],
)
def test_models_that_attention_does_not_serve_are_refused_without_a_way_round(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, attribute: str, feature: str
) -> None:
    from rose_backend.vllm_plugin.refusals import check_supported

    config = make_config(**rose(block_manager=False))
    monkeypatch.setattr(type(config.model_config), attribute, property(lambda self: True), raising=False)
    with pytest.raises(ConfigError, match=feature):
        check_supported(config, rose_options(config))


@pytest.mark.parametrize(
    ("attribute", "feature"),
    [
        ("decode_context_parallel_size", "decode context parallelism"),
        ("prefill_context_parallel_size", "prefill context parallelism"),
    ],
)
def test_context_parallelism_is_refused_by_name(
    make_config: MakeConfig, attribute: str, feature: str
) -> None:
    from rose_backend.vllm_plugin.refusals import check_supported

    config = make_config()
    setattr(config.parallel_config, attribute, 2)
    with pytest.raises(ConfigError, match=feature):
        check_supported(config, rose_options(config))


def test_a_pool_that_can_never_hold_one_sequence_is_refused() -> None:
    one = RoseGroups((None,), (GroupType(),), ((0, 0),), 16, 0)
    one.check_pool_size(65, 1024, 32)
    with pytest.raises(
        ConfigError, match=r"63 usable blocks of 16 tokens .* max_model_len 1024 \(64 blocks\)"
    ):
        one.check_pool_size(64, 1024, 32)
    # Three groups of 39 tokens before 32 new ones: they may begin inside a block.
    more = RoseGroups((None,) * 4, (GroupType(), GroupType(40, 3)), ((0, 0), (1, 0), (1, 1), (1, 2)), 16, 0)
    more.check_pool_size(1 + 64 + 3 * 6, 1024, 32)
    more.check_pool_size(1 + 4 * 2, 32, 32)
    with pytest.raises(ConfigError, match=r"\(82 blocks\)"):
        more.check_pool_size(64 + 3 * 6, 1024, 32)


def test_compiled_kernels_are_kept_in_one_place(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "set so that it is unset again")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/some/cache")
    make_config()
    assert "TRITON_CACHE_DIR" not in os.environ  # no kernels on a CPU
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    make_config(attention_backend="CPU_ATTN")
    assert "TRITON_CACHE_DIR" not in os.environ
    keep_compiled_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == "/some/cache/rose_triton_cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    keep_compiled_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == "/mine"
