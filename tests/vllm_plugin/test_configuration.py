"""What ROSE makes of a vLLM configuration, what the start-up line says of it, and that other backends see nothing."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import AttentionConfig, CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from rose_backend.config import PluginConfig
from rose_backend.errors import ConfigError
from rose_backend.vllm_plugin import options
from rose_backend.vllm_plugin.config_hook import _choose_scheduler, describe_parts, keep_compiled_kernels
from rose_backend.vllm_plugin.models.model_choice import ModelChoice
from rose_backend.vllm_plugin.options import (
    ASYNC_SCHEDULER_CLASS,
    SCHEDULER_CLASS,
    adapts_drafts,
    appends_in_attention,
    batches_decode_steps,
    has_sliding_windows,
    is_rose_selected,
    rose_options,
    why_drafts_are_fixed,
    why_steps_have_no_budget,
)
from tests.support.vllm_plugin.configs import (
    MIXED_WINDOWS,
    WINDOWS,
    MakeConfig,
    connector,
    idle_parts,
    n_grams,
    rose,
)

ROSE_MANAGER_ONLY = "only with Rose's block manager"
AUTO_BUDGET = rose(step_budget="auto")
LINES: dict[str, tuple[dict[str, Any], str]] = {
    "all on": (
        {},
        "attention ROSE|RoseKVCacheManager (prefix hits to the token);|decodes scheduled at once;|fused MLP"
        "|sampler Rose|; disabled: none; ",
    ),
    "vLLM's own settings": (
        rose(prefix_cache=False, cuda_graph=False, chunked_prefill=False),
        "; disabled: cuda_graph, chunked_prefill, prefix_cache; |(no prefix cache);",
    ),
    "hits at borders": (
        rose(token_granular_hits=False),
        "(prefix hits at block borders);|; disabled: token_granular_hits; ",
    ),
    "exact hits": (
        rose(exact_cached_tokens=True),
        "(prefix hits to the token, reported exactly);|; disabled: none; ",
    ),
    "no hits": (rose(prefix_cache=False, token_granular_hits=False), "(no prefix cache);"),
    "no batches": (
        rose(batched_scheduling=False, step_budget="auto"),
        "decodes scheduled one by one;|; disabled: batched_scheduling; |step_budget (batched_scheduling off)",
    ),
    "no budget": (
        rose(step_budget="off", batched_scheduling=False),
        "; disabled: batched_scheduling; unavailable: cuda_graph ",
    ),
    "outputs apart": (rose(joined_outputs=False), "; disabled: joined_outputs; "),
    "vLLM's layers and sampler": (
        rose(fused_mlp=False, fused_add_layernorm=False, fused_sampler=False, fused_kv_append=False),
        "separate K/V write|model vLLM's own GPT2LMHeadModel|sampler vLLM's own",
    ),
    "vLLM's block manager": (
        rose(block_manager=False, step_budget=12),
        "separate K/V write|block manager vLLM's own (prefix hits at block borders)|decodes scheduled one by one"
        "|unavailable: fused_kv_append and batched_scheduling and token_granular_hits and step_budget "
        f"({ROSE_MANAGER_ONLY})|cuda_graph and step_graph (|; disabled: block_manager; ",
    ),
    "off, and so not said to be unavailable": (
        rose(block_manager=False, fused_kv_append=False, prefix_cache=False),
        "block manager vLLM's own (no prefix cache)"
        "|unavailable: batched_scheduling and token_granular_hits (|"
        "; disabled: fused_kv_append, prefix_cache, block_manager; ",
    ),
    "drafts": ({"speculative_config": n_grams()}, "ROSE (stores K/V itself|sampler vLLM's own"),
}
"""Engine arguments, and parts of the start-up line."""


@pytest.mark.parametrize("case", LINES)
def test_the_start_up_line_says_what_is_in_force(
    make_config: MakeConfig, rose_log: list[str], case: str
) -> None:
    arguments, parts = LINES[case]
    config = make_config(**arguments)
    (line,) = rose_log
    assert all(part in line for part in parts.split("|")), line
    switches = rose_options(config)
    is_roses = switches.block_manager
    # The CPU platform switches asynchronous scheduling off.
    assert config.scheduler_config.scheduler_cls == (SCHEDULER_CLASS if is_roses else None)
    # vLLM's manager shares blocks in the step that writes them, so the write must come first.
    assert appends_in_attention(config) == (is_roses and switches.fused_kv_append)
    assert batches_decode_steps(config) == (is_roses and switches.batched_scheduling and case != "drafts")
    assert config.cache_config.enable_prefix_caching is switches.prefix_cache
    assert config.scheduler_config.enable_chunked_prefill is switches.chunked_prefill
    assert switches.cuda_graph or config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    name = "RoseGPT2LMHeadModel" if switches.fused_mlp else "GPT2LMHeadModel"
    assert config.model_config.hf_config.architectures == [name]
    # The engine core finishes its copy again.
    config.__post_init__()
    assert config.scheduler_config.scheduler_cls == (SCHEDULER_CLASS if is_roses else None)
    assert config.model_config.hf_config.architectures == [name]
    assert len(rose_log) == 1


def test_a_drafter_with_a_cache_writes_its_own_kv_first(
    make_config: MakeConfig, rose_log: list[str], tiny_model_path: Path
) -> None:
    # Its batch holds tokens that must not be stored; only the separate write is told which. The model's has none.
    draft = {"method": "draft_model", "model": str(tiny_model_path), "num_speculative_tokens": 2}
    config = make_config(speculative_config=draft)
    assert appends_in_attention(config)
    said = "attention ROSE (stores K/V itself, separate K/V write in the drafter's layers)"
    assert said in rose_log[0] and "sampler vLLM's own" in rose_log[0]
    # Windows of its layers are windows.
    assert not has_sliding_windows(make_config()) and not has_sliding_windows(config)
    drafter = config.speculative_config.draft_model_config.hf_text_config
    drafter.sliding_window = 64
    assert has_sliding_windows(config)
    types = ["full_attention", "sliding_attention"]
    for layer_types, has_windows in ((types, True), (types[:1], False)):
        drafter.layer_types = layer_types
        assert has_sliding_windows(config) is has_windows


def test_asynchronous_scheduling_keeps_an_asynchronous_scheduler(make_config: MakeConfig) -> None:
    config = make_config()
    config.scheduler_config.async_scheduling = True
    _choose_scheduler(config)
    assert config.scheduler_config.scheduler_cls == ASYNC_SCHEDULER_CLASS
    assert issubclass(config.scheduler_config.get_scheduler_cls(), AsyncScheduler)


@pytest.mark.parametrize(
    ("backend", "is_v2", "asked"),
    # Asked for with the name ngram, vLLM 0.32 refuses it.
    [*itertools.product(["rose", None], [False, True], [None, False]), ("rose", True, True)],
)
def test_n_grams_keep_scheduling_asynchronous(
    make_config: MakeConfig,
    rose_log: list[str],
    monkeypatch: pytest.MonkeyPatch,
    backend: str | None,
    is_v2: bool,
    asked: bool | None,
) -> None:
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", is_v2)
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    # A CPU switches asynchronous scheduling off.
    monkeypatch.setattr(type(current_platform), "check_and_update_config", lambda self, config: None)
    config = make_config(
        speculative_config=n_grams(), async_scheduling=asked, attention_backend=backend, enforce_eager=True
    )
    is_renamed = is_v2 and backend == "rose" and asked is not False
    assert config.speculative_config.method == ("ngram_gpu" if is_renamed else "ngram")
    assert any("as ngram_gpu" in line for line in rose_log) == is_renamed
    assert config.scheduler_config.async_scheduling or not is_renamed


def test_n_grams_that_vllm_does_not_schedule_asynchronously_are_not_said_to_be(
    make_config: MakeConfig, rose_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    drafts = n_grams() | {"disable_padded_drafter_batch": True}
    config = make_config(speculative_config=drafts, enforce_eager=True)
    assert not config.scheduler_config.async_scheduling
    assert not any("as ngram_gpu" in line for line in rose_log)
    assert idle_parts(rose_log[-1])["batched_scheduling"] == "drafts without asynchronous scheduling"


@pytest.mark.parametrize(
    ("switches", "speculative", "ranks", "reason"),
    [
        ({}, {}, 1, None),
        ({"adaptive_drafts": False}, {}, 1, None),
        ({"batched_scheduling": False}, {}, 1, "batched_scheduling off"),
        ({"block_manager": False}, {}, 1, "only with Rose's block manager"),
        ({}, {}, 2, "drafts with data parallelism"),
        ({}, {"enable_adaptive_verification": True}, 1, "enable_adaptive_verification"),
    ],
)
def test_drafts_may_be_left_out(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    switches: dict[str, Any],
    speculative: dict[str, Any],
    ranks: int,
    reason: str | None,
) -> None:
    config = make_config(speculative_config=n_grams(method="ngram_gpu"), **rose(**switches))
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    config.scheduler_config.async_scheduling = True
    config.parallel_config.data_parallel_size = ranks
    for name, value in speculative.items():
        monkeypatch.setattr(config.speculative_config, name, value)
    assert adapts_drafts(config) == (reason is None and switches.get("adaptive_drafts", True))
    assert why_drafts_are_fixed(config) == reason
    config.speculative_config = None
    assert not adapts_drafts(config) and why_drafts_are_fixed(config) in (None, reason)


OTHER_DRAFTS = "drafts other than n-grams, a model's or a head's"
DRAFTS_AT_ONCE: dict[str, tuple[dict[str, Any], bool, bool, str | None]] = {
    "n-grams": ({}, True, True, None),
    "model runner V1": ({}, False, True, "drafts with model runner V1"),
    "one step after the other": ({}, True, False, "drafts without asynchronous scheduling"),
    "15": ({"num_speculative_tokens": 15}, True, True, None),
    "16": ({"num_speculative_tokens": 16}, True, True, "more than 15 drafts"),
    "by number of requests": (
        {"num_speculative_tokens_per_batch_size": [[1, 8, 2], [9, 256, 1]]},
        True,
        True,
        "num_speculative_tokens_per_batch_size",
    ),
    "a model's": ({"method": "draft_model"}, True, True, None),
    "an MTP module's": ({"method": "mtp"}, True, True, None),
    "of two MTP modules": ({"method": "mtp", "num_modules": 2}, True, True, OTHER_DRAFTS),
    "of Gemma 4's MTP module": ({"method": "mtp", "model_type": "gemma4_mtp"}, True, True, OTHER_DRAFTS),
    "suffixes": ({"method": "suffix"}, True, True, OTHER_DRAFTS),
}
"""Options of drafts, whether the model runner is V2, whether steps overlap, and why decodes go one by one."""


@pytest.mark.parametrize("case", DRAFTS_AT_ONCE)
def test_which_drafts_are_scheduled_at_once(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tiny_model_path: Path, case: str
) -> None:
    options, is_v2, is_async, reason = DRAFTS_AT_ONCE[case]
    method = options.get("method", "ngram_gpu")
    drafts = n_grams(method="ngram_gpu") | {
        name: options[name] for name in options if name.startswith("num_spec")
    }
    if method == "draft_model":
        drafts = {"method": method, "model": str(tiny_model_path), "num_speculative_tokens": 2}
    config = make_config(speculative_config=drafts, **AUTO_BUDGET)
    monkeypatch.setattr(type(config), "use_v2_model_runner", is_v2)
    config.scheduler_config.async_scheduling = is_async
    speculative = config.speculative_config
    drafter = speculative.draft_model_config.hf_config
    for owner, name, value in (
        (speculative, "method", method),
        (drafter, "num_nextn_predict_layers", options.get("num_modules", 1)),
        (drafter, "model_type", options.get("model_type", drafter.model_type)),
    ):
        monkeypatch.setattr(owner, name, value, raising=False)
    line = describe_parts(config, rose_options(config), ModelChoice("RoseGPT2LMHeadModel"))
    assert f"decodes scheduled {'one by one' if reason else 'at once'};" in line
    # A draft model makes all drafts in each step.
    why_fixed = reason or ("a draft model" if method == "draft_model" else None)
    idle = idle_parts(line)
    assert [idle.get(name) for name in ("batched_scheduling", "step_budget")] == [reason] * 2
    assert idle.get("adaptive_drafts") == why_fixed == why_drafts_are_fixed(config)
    assert batches_decode_steps(config) is (reason is None)
    assert adapts_drafts(config) is (why_fixed is None)
    for method in ("eagle", "eagle3"):
        monkeypatch.setattr(speculative, "method", method)
        of_heads = None if reason == OTHER_DRAFTS else reason
        assert batches_decode_steps(config) is adapts_drafts(config) is (of_heads is None)


@pytest.mark.parametrize(
    ("arguments", "name", "reason"),
    [
        (rose(block_manager=False), "fused_kv_append", ROSE_MANAGER_ONLY),
        (rose(block_manager=False), "batched_scheduling", ROSE_MANAGER_ONLY),
        ({"pipeline_parallel_size": 2}, "batched_scheduling", "pipeline stages"),
        ({"enable_mfu_metrics": True}, "batched_scheduling", "utilization metrics"),
        ({"prefill_schedule_interval": 4}, "batched_scheduling", "a prefill interval"),
        ({"runner": "pooling"}, "batched_scheduling", "a model that does not generate"),
        ({"runner": "pooling"}, "fused_mlp", "no layers of Rose's for this model"),
        ({"runner": "pooling"}, "fused_add_layernorm", "no layers of Rose's for this model"),
        ({"use_fp64_gumbel": True}, "fused_sampler", "float64 noise"),
        ({"enable_prefix_caching": False}, "prefix_cache", "off in vLLM"),
        ({"scheduling_policy": "priority"} | AUTO_BUDGET, "step_budget", "priorities"),
        ({"watermark": 0.1} | AUTO_BUDGET, "step_budget", "--watermark"),
        ({"long_prefill_token_threshold": 64} | AUTO_BUDGET, "step_budget", "--long-prefill-token-threshold"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048} | AUTO_BUDGET,
            "step_budget",
            "no chunked prefill",
        ),
        (
            {"long_prefill_token_threshold_adaptive": True} | AUTO_BUDGET,
            "step_budget",
            "--long-prefill-token-threshold",
        ),
        ({"disable_chunked_mm_input": True} | AUTO_BUDGET, "step_budget", "--disable-chunked-mm-input"),
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
    has_budget = rose_options(config).step_budget != "off"
    assert ("step_budget" in idle) is (has_budget and why_steps_have_no_budget(config) is not None)


@pytest.mark.parametrize(
    ("value", "read"), [("auto", "auto"), ("off", "off"), (12, 12.0), ("2.5", 2.5), (0.5, 0.5)]
)
def test_a_step_budget_is_a_word_or_milliseconds(
    make_config: MakeConfig, value: object, read: object
) -> None:
    assert rose_options(make_config(**rose(step_budget=value))).step_budget == read


@pytest.mark.parametrize("value", [0, -1, "0", "nan", "inf", "fast", "", True, None, [12], {"ms": 12}])
def test_other_step_budgets_are_refused(value: object) -> None:
    message = re.escape(
        f"step_budget: got {value!r}, allowed are auto, off and a number of milliseconds above 0"
    )
    with pytest.raises(ConfigError, match=f"^{message}$"):
        PluginConfig(step_budget=value)  # type: ignore[arg-type]


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


def test_with_graphs_and_everything_else_in_force_nothing_is_named(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(enforce_eager=False)
    monkeypatch.setattr(config, "compilation_config", SimpleNamespace())
    monkeypatch.setattr(type(config), "use_v2_model_runner", property(lambda self: True))
    for is_cuda, mode, is_eager, idle in (
        (True, CUDAGraphMode.FULL, False, "none"),
        (False, CUDAGraphMode.FULL, False, "cuda_graph and step_graph (no CUDA device)"),
        (True, CUDAGraphMode.NONE, False, "cuda_graph and step_graph (cudagraph_mode NONE)"),
        (True, CUDAGraphMode.NONE, True, "cuda_graph and step_graph (--enforce-eager)"),
    ):
        monkeypatch.setattr(type(current_platform), "is_cuda", lambda self, answer=is_cuda: answer)
        config.compilation_config.cudagraph_mode, config.model_config.enforce_eager = mode, is_eager
        line = describe_parts(config, rose_options(config), ModelChoice("RoseGPT2LMHeadModel"))
        assert line.endswith(f"; disabled: none; unavailable: {idle}")


@pytest.mark.parametrize(
    ("changes", "is_hybrid", "reason"),
    [
        ({}, False, None),
        ({"all2all_backend": "deepep_low_latency"}, False, "--all2all-backend deepep_low_latency"),
        ({"enable_elastic_ep": True}, False, "elastic expert parallelism"),
        ({}, True, "states with data parallelism"),
        # Engines of a dense model are independent.
        ({"is_moe_model": False, "all2all_backend": "deepep_low_latency"}, True, None),
        ({"data_parallel_size": 1, "all2all_backend": "deepep_low_latency"}, True, None),
    ],
)
def test_why_data_parallel_ranks_do_not_replay_steps_is_said_at_start_up(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    is_hybrid: bool,
    reason: str | None,
) -> None:
    config = make_config(enforce_eager=False)
    monkeypatch.setattr(config, "compilation_config", SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL))
    monkeypatch.setattr(type(config), "use_v2_model_runner", property(lambda self: True))
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(type(config.model_config), "is_hybrid", property(lambda self: is_hybrid))
    for name, value in ({"data_parallel_size": 2, "is_moe_model": True} | changes).items():
        monkeypatch.setattr(config.parallel_config, name, value)
    line = describe_parts(config, rose_options(config), ModelChoice("RoseGPT2LMHeadModel"))
    assert idle_parts(line).get("step_graph") == reason


def test_another_backend_sees_nothing(make_config: MakeConfig, rose_log: list[str]) -> None:
    # Options under our key are not even read.
    for backend in (None, "CPU_ATTN"):
        config = make_config(attention_backend=backend, **rose(no_such_option=1, prefix_cache=False))
        assert config.scheduler_config.scheduler_cls is None
        assert config.model_config.hf_config.architectures == ["GPT2LMHeadModel"]
        assert config.cache_config.enable_prefix_caching
    assert rose_log == []


def test_any_spelling_of_the_name_and_one_kind_of_layer_select_rose(make_config: MakeConfig) -> None:
    for spelling in ("rose", "ROSE", "Rose"):
        assert is_rose_selected(make_config(attention_backend=spelling))
    attention = AttentionConfig(backend_per_kind={"full_attention": "rose"})
    assert is_rose_selected(make_config(attention_backend=None, attention_config=attention))


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
    assert is_asked(speculative_config=n_grams(), **MIXED_WINDOWS)
    assert is_asked(pipeline_parallel_size=2, **MIXED_WINDOWS)
    assert is_asked(**connector("ExampleConnector"), **MIXED_WINDOWS)
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
    assert keeps_one_group(**WINDOWS) and keeps_one_group(speculative_config=n_grams(), **MIXED_WINDOWS)


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
