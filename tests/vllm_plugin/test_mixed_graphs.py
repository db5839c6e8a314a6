"""Full CUDA graphs: of any mix of decodes and prompts, of audited models only, and of a prompt's last token.

``state_of_forward.txt`` lists what ``tests.support.forward_state`` finds in vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import random
import re
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from transformers.utils import is_torchvision_available
from vllm.config import CUDAGraphMode
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
    SpeculatorBatchDescriptor,
    SpeculatorCudaGraphManager,
)
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

import rose_backend
from rose_backend.draft_depth import draft_depths
from rose_backend.vllm_plugin.attention.audited_models import (
    AUDITED_CLASSES,
    AUDITED_FOR_DECODES,
    class_of,
    find_unaudited,
    wrap_determine_batch_execution,
    wrap_gather_batch_req_state,
)
from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadataBuilder
from rose_backend.vllm_plugin.attention.mixed_graphs import (
    choose_mixed_graphs,
    graph_sizes,
    has_default_graph_options,
    why_drafter_needs_vllms_graphs,
)
from rose_backend.vllm_plugin.config_hook import describe_parts
from rose_backend.vllm_plugin.models.model_choice import ModelChoice
from rose_backend.vllm_plugin.options import OTHER_DRAFTER, rose_options
from rose_backend.vllm_plugin.patch_ledger import LEDGER, is_applied, resolve_owner
from tests.support.forward_state import ModelClass, find_state, read_classes
from tests.support.vllm_plugin.attention_steps import (
    STEPS,
    Buffers,
    Manager,
    Step,
    make_builder,
    make_layer,
)
from tests.support.vllm_plugin.configs import VLLM_SIZES, MakeConfig, OnGpu, connector, n_grams

LAYER_BY_LAYER = connector("ExampleConnector", {"shared_storage_path": "unused"})
N_GRAM = {"speculative_config": n_grams(3)}


@pytest.mark.parametrize(
    ("max_tokens", "hidden_size", "largest"),
    [
        (8192, 768, 8192),
        (16384, 768, 16384),
        (1000, 768, 1000),
        (512, 768, 512),
        (8192, 2048, 4100),
        (16384, 1024, 16384),
    ],
)
def test_vllms_sizes_go_on_up_to_what_a_step_may_have(
    max_tokens: int, hidden_size: int, largest: int
) -> None:
    sizes = graph_sizes(VLLM_SIZES, max_tokens, hidden_size)
    assert sizes[: len(VLLM_SIZES)] == VLLM_SIZES and sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    assert graph_sizes(VLLM_SIZES, max_tokens, 8192) == VLLM_SIZES, (
        "a step of a wide model keeps the device busy"
    )
    assert all(after - before <= max(before // 8, 16) for before, after in pairwise(sizes))
    assert len(sizes) <= len(VLLM_SIZES) + 8 * 5


@pytest.mark.parametrize("switches", [{}, {"block_manager": False}, {"fused_kv_append": False}], ids=str)
@pytest.mark.parametrize("enable_lora", [False, True])
def test_full_graphs_take_the_place_of_pieces(
    on_gpu: OnGpu, switches: dict[str, bool], enable_lora: bool
) -> None:
    options = {"additional_config": {"rose": switches}, "enable_lora": enable_lora}
    config = on_gpu(max_num_batched_tokens=1000, max_model_len=256, **options)
    compilation = config.compilation_config
    for _ in range(2):
        choose_mixed_graphs(config)
        assert compilation.cudagraph_mode == CUDAGraphMode.FULL
        assert compilation.cudagraph_capture_sizes == graph_sizes(VLLM_SIZES, 1000, 64)
        assert compilation.max_cudagraph_capture_size == 1000
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    choose_mixed_graphs(config)
    assert compilation.cudagraph_mode == CUDAGraphMode.NONE, "eager stays eager"


@pytest.mark.parametrize(
    "options",
    [
        {"attention_backend": None},
        {"additional_config": {"rose": {"cuda_graph": False}}},
        LAYER_BY_LAYER,
    ],
    ids=str,
)
def test_other_engines_keep_vllms_choice(on_gpu: OnGpu, options: dict[str, Any]) -> None:
    config = on_gpu(**options)
    choose_mixed_graphs(config)
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE
    assert config.compilation_config.cudagraph_capture_sizes == VLLM_SIZES


def test_a_model_that_nobody_read_keeps_vllms_graphs_and_the_log_says_why(
    on_gpu: OnGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on_gpu()
    monkeypatch.setattr(config.model_config, "_architecture", "Qwen3VLForConditionalGeneration")
    for asked in (CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL):
        # FULL: the user's own choice, which vLLM lowers by what attention says that it supports.
        config.compilation_config.cudagraph_mode = asked
        choose_mixed_graphs(config)
        assert config.compilation_config.cudagraph_mode == asked
        assert config.compilation_config.cudagraph_capture_sizes == VLLM_SIZES
        support = RoseAttentionMetadataBuilder.get_cudagraph_support(config, None)
        assert support is AttentionCGSupport.UNIFORM_BATCH
        reason = "Qwen3VLForConditionalGeneration is not among the audited models"
        assert graphs_told_of(config) == f" graphs of decodes only ({reason})"


def graphs_told_of(config: Any) -> str:
    """Return what the start-up line says about graphs."""
    line = describe_parts(config, rose_options(config), ModelChoice(None))
    return line.partition("attention ROSE (")[2].partition("); block manager")[0].partition("full CUDA")[2]


def test_the_log_is_silent_about_full_graphs_of_all_steps_and_about_none(on_gpu: OnGpu) -> None:
    config = on_gpu()
    assert RoseAttentionMetadataBuilder.get_cudagraph_support(config, None) is AttentionCGSupport.ALWAYS
    assert graphs_told_of(config) == " graphs of decodes only (CUDA graph options of your own)"
    choose_mixed_graphs(config)
    assert graphs_told_of(config) == ""
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    assert graphs_told_of(config) == ""


def test_the_log_says_why_prompts_have_no_full_graphs(on_gpu: OnGpu) -> None:
    config = on_gpu(**LAYER_BY_LAYER)
    assert graphs_told_of(config) == " graphs of decodes only (a KV connector that works layer by layer)"
    support = RoseAttentionMetadataBuilder.get_cudagraph_support(config, None)
    assert support is AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize("num_drafts", [1, 7, 8])
@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix", "draft_model", "mtp", "eagle", "eagle3"])
def test_full_graphs_beside_drafts(on_gpu: OnGpu, method: str, num_drafts: int) -> None:
    config = on_gpu(speculative_config=n_grams(num_drafts))
    config.speculative_config.method = method
    choose_mixed_graphs(config)
    compilation = config.compilation_config
    support = RoseAttentionMetadataBuilder.get_cudagraph_support(config, None)
    if method == "draft_model":
        assert compilation.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE
        assert graphs_told_of(config) == f" graphs of decodes only ({OTHER_DRAFTER})"
        # Eight tokens are as many as decode attention takes.
        assert (
            support
            is AttentionCGSupport["UNIFORM_BATCH" if num_drafts < 8 else "UNIFORM_SINGLE_TOKEN_DECODE"]
        )
    else:
        assert compilation.cudagraph_mode == CUDAGraphMode.FULL and graphs_told_of(config) == ""
        assert support is AttentionCGSupport.ALWAYS


def of_mtp(architecture: str, num_modules: int = 1) -> Any:
    """Return what is read of a drafter's configuration."""
    fields = SimpleNamespace(num_nextn_predict_layers=num_modules, model_type="some")
    return SimpleNamespace(architecture=architecture, hf_config=fields)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attention_backend": AttentionBackendEnum.FLASH_ATTN}, "another attention backend for the drafter"),
        ({"attention_backend": AttentionBackendEnum.CUSTOM}, "another attention backend for the drafter"),
        ({"enable_adaptive_verification": True}, "enable_adaptive_verification"),
        (
            {"num_speculative_tokens_per_batch_size": [[1, 8, 2], [9, 256, 1]]},
            "num_speculative_tokens_per_batch_size",
        ),
        ({"draft_model_config": SimpleNamespace(architecture="Eagle3LlamaForCausalLM")}, None),
        ({"method": "mtp", "draft_model_config": of_mtp("MiMoMTPModel")}, None),
        (
            {"method": "mtp", "draft_model_config": of_mtp("ErnieMTPModel")},
            "ErnieMTPModel is not among the audited models",
        ),
        ({"method": "mtp", "draft_model_config": of_mtp("MiMoMTPModel", 2)}, OTHER_DRAFTER),
        (
            {"draft_model_config": SimpleNamespace(architecture="EagleMistralLarge3ForCausalLM")},
            "EagleMistralLarge3ForCausalLM is not among the audited models",
        ),
    ],
    ids=str,
)
def test_heads_that_keep_vllms_graphs(
    on_gpu: OnGpu, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], reason: str | None
) -> None:
    config = on_gpu(**N_GRAM)
    config.speculative_config.method = "eagle3"
    for name, value in change.items():
        monkeypatch.setattr(config.speculative_config, name, value)
    choose_mixed_graphs(config)
    mode = config.compilation_config.cudagraph_mode
    support = RoseAttentionMetadataBuilder.get_cudagraph_support(config, None)
    if reason is None:
        assert mode == CUDAGraphMode.FULL and support is AttentionCGSupport.ALWAYS
        assert make_builder(config).supports_draft_decode_metadata_update
        monkeypatch.setattr(config.speculative_config, "attention_backend", config.attention_config.backend)
        assert why_drafter_needs_vllms_graphs(config) is None
        monkeypatch.setattr(type(config.model_config), "is_multimodal_model", True)
        assert why_drafter_needs_vllms_graphs(config) == "a head beside images"
    else:
        assert mode == CUDAGraphMode.FULL_AND_PIECEWISE and support is AttentionCGSupport.UNIFORM_BATCH
        assert graphs_told_of(config) == f" graphs of decodes only ({reason})"


def test_graphs_for_a_number_of_adapters_stay_vllms_choice(on_gpu: OnGpu) -> None:
    config = on_gpu(enable_lora=True, specialize_active_lora=True)
    assert graphs_told_of(config) == " graphs of decodes only (--specialize-active-lora)"


@pytest.mark.parametrize(
    "said",
    [
        {"cudagraph_mode": "FULL_AND_PIECEWISE"},
        {"cudagraph_capture_sizes": [1, 2]},
        {"max_cudagraph_capture_size": 8},
    ],
    ids=str,
)
def test_what_the_user_says_of_graphs_stays(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any]
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(
        "rose_backend.vllm_plugin.config_hook.choose_mixed_graphs", lambda config: asked.append(True)
    )
    # A finished configuration counts as set by the user.
    assert not has_default_graph_options(make_config()) and asked
    asked.clear()
    make_config(compilation_config=said)
    assert not asked


def test_steps_with_and_without_adapters_have_graphs_of_their_own(on_gpu: OnGpu) -> None:
    config = on_gpu([1, 2, 4, 8], max_num_seqs=4, enable_lora=True, max_loras=3)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    manager = Manager(config, CUDAGraphMode.FULL, 4)
    captured = manager._capture_descs[CUDAGraphMode.FULL]
    assert len(captured) == len(set(captured)) == 2 * (4 + 3)
    for num_tokens in range(1, 9):
        for num_adapters in range(4):
            decode = manager.dispatch(num_tokens, num_tokens, 1, num_adapters, 1)
            mixed = manager.dispatch(2, num_tokens, None, num_adapters, None)
            assert {decode.num_active_loras, mixed.num_active_loras} == {4 if num_adapters else 0}
            assert {decode, mixed} <= {*captured} or num_tokens == 1 or num_tokens > 4
            assert decode.uniform_token_count == (1 if num_tokens <= 4 else None)
            assert mixed.uniform_token_count is None


def test_steps_that_only_decode_have_graphs_of_their_own(on_gpu: OnGpu) -> None:
    sizes = [1, 2, 4, 8, 16, 20, 32, 64]
    config = on_gpu(sizes, max_num_seqs=20)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    manager = Manager(config, CUDAGraphMode.FULL, 20)
    captured = manager._capture_descs[CUDAGraphMode.FULL]
    assert [desc.num_tokens for desc in captured] == sorted([*sizes, *sizes[:-2]], reverse=True)
    assert len(set(captured)) == len(captured)
    for num_tokens in range(1, 65):
        mixed = manager.dispatch(min(num_tokens, 3), num_tokens, None, 0, None)
        assert mixed in captured and mixed.uniform_token_count is None
        assert mixed.num_tokens == min(size for size in sizes if size >= num_tokens)
        assert mixed.num_reqs == min(mixed.num_tokens, 20)
        if num_tokens <= 20:
            decode = manager.dispatch(num_tokens, num_tokens, 1, 0, 1)
            assert decode in captured and decode.uniform_token_count == 1
            assert decode.num_tokens == decode.num_reqs == mixed.num_tokens
    # Rows that all have two tokens are not decodes.
    assert manager.dispatch(8, 16, 2, 0, None).uniform_token_count is None
    assert manager.dispatch(3, 65, None, 0, None).cg_mode == CUDAGraphMode.NONE


@pytest.mark.parametrize("query_len", [2, 3, 8])
@pytest.mark.parametrize("enable_lora", [False, True])
@pytest.mark.parametrize("is_adaptive", [False, True])
def test_rows_with_all_their_drafts_have_graphs_of_their_own(
    on_gpu: OnGpu, monkeypatch: pytest.MonkeyPatch, query_len: int, enable_lora: bool, is_adaptive: bool
) -> None:
    depths = draft_depths(query_len - 1) if is_adaptive else (query_len - 1,)
    monkeypatch.setattr("rose_backend.vllm_plugin.attention.mixed_graphs.depths_of", lambda config: depths)
    sizes, num_adapters = [1, 2, 4, 8, 16, 20, 32, 65], int(enable_lora)
    config = on_gpu(
        sizes, max_num_seqs=20, enable_lora=enable_lora, speculative_config=n_grams(query_len - 1)
    )
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    manager = Manager(config, CUDAGraphMode.FULL, 20, query_len)
    captured = manager._capture_descs[CUDAGraphMode.FULL]
    assert len(set(captured)) == len(captured) and captured[0].num_tokens == 65
    most = max(desc.num_reqs for desc in captured if desc.uniform_token_count == query_len)
    # As many rows as there are requests, or tokens for.
    assert most == {2: 20, 3: 20, 8: 8}[query_len]
    for num_rows in range(1, 65 // query_len + 1):
        num_tokens = num_rows * query_len
        for uniform in (query_len, None):
            found = manager.dispatch(min(num_rows, 20), num_tokens, uniform, num_adapters, None)
            assert found in captured and found.num_tokens >= num_tokens
            assert found.uniform_token_count == (uniform if num_rows <= most else None)
            if found.uniform_token_count is not None:
                assert found.num_reqs * query_len == found.num_tokens
                assert found.num_tokens < min(size for size in sizes if size >= num_tokens) + query_len
    # With fewer drafts, or none, a step is a mixed one, unless some may be left out.
    for fewer in range(1, query_len):
        most = max((desc.num_reqs for desc in captured if desc.uniform_token_count == fewer), default=0)
        assert (most > 7) == (is_adaptive and fewer in (1, 2, 4))
        for num_rows in range(1, min(20, 64 // fewer) + 1):
            found = manager.dispatch(num_rows, num_rows * fewer, fewer, num_adapters, fewer)
            assert found.uniform_token_count == (fewer if num_rows <= most else None)
            assert num_rows > most or found.num_reqs * fewer == found.num_tokens >= num_rows * fewer


class PassesManager(Manager, SpeculatorCudaGraphManager):
    """vLLM's choice of graphs of a head's passes after its first one."""


def test_passes_of_a_head_have_graphs_for_each_number_of_drafts(
    on_gpu: OnGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM has them where drafts depend on the size of the batch."""
    config = on_gpu([1, 2, 4], max_num_seqs=4, speculative_config=n_grams(7))
    config.speculative_config.method = "eagle3"
    found = {}
    for depths in ((7,), (0, 1, 3, 7)):
        monkeypatch.setattr(
            "rose_backend.vllm_plugin.attention.mixed_graphs.depths_of", lambda _, of=depths: of
        )
        manager = PassesManager(config, CUDAGraphMode.FULL_DECODE_ONLY, 4)
        found[depths] = manager._capture_descs[CUDAGraphMode.FULL]
    plain, special = found.values()
    assert [desc.num_tokens for desc in plain] == [4, 2, 1]
    assert not any(isinstance(desc, SpeculatorBatchDescriptor) for desc in plain)
    assert [(desc.num_tokens, desc.num_speculative_tokens) for desc in special] == [
        (size, depth) for size in (4, 2, 1) for depth in (7, 3)
    ]
    manager.graphs = dict.fromkeys(special)
    for depth in (3, 7):
        desc = manager.specialize_spec_tokens(manager.dispatch(3, 3, 1, 0), depth)
        assert desc in special and desc.num_speculative_tokens == depth and desc.num_tokens == 4


def test_rows_with_more_drafts_than_decode_attention_takes_have_no_graphs_of_their_own(on_gpu: OnGpu) -> None:
    config = on_gpu([1, 2, 4, 8, 16, 32], max_num_seqs=20, speculative_config=n_grams(8))
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    captured = Manager(config, CUDAGraphMode.FULL, 20, 9)._capture_descs[CUDAGraphMode.FULL]
    assert len(captured) == 6 and {desc.uniform_token_count for desc in captured} == {None}


def test_graphs_in_pieces_are_left_alone(on_gpu: OnGpu) -> None:
    manager = Manager(on_gpu(max_num_seqs=20), CUDAGraphMode.FULL_AND_PIECEWISE, 20)
    assert {desc.uniform_token_count for desc in manager._capture_descs[CUDAGraphMode.FULL]} == {1}
    assert {desc.uniform_token_count for desc in manager._capture_descs[CUDAGraphMode.PIECEWISE]} == {None}


def test_graphs_are_patched_where_rose_attends_to_mixed_steps_only(
    make_config: MakeConfig, on_gpu: OnGpu
) -> None:
    drafting, config = make_config(**N_GRAM), on_gpu()
    drafting.speculative_config.method = "draft_model"
    with pytest.MonkeyPatch.context() as patch:
        # As in a process in which it is not applied yet.
        method = CudaGraphManager._init_candidates
        patch.setattr(CudaGraphManager, "_init_candidates", getattr(method, "__wrapped__", method))
        assert not make_builder(drafting).supports_draft_decode_metadata_update
        assert not is_applied("decode_graphs")
        make_builder(config)
        assert is_applied("decode_graphs")


def random_step(rng: random.Random, query_len: int = 1) -> Step:
    """Return up to 6 requests of up to 60 tokens, decodes first, as vLLM sorts them; some steps have one kind only."""
    decodes = [(rng.randrange(60 - query_len), rng.randint(1, query_len)) for _ in range(rng.randrange(0, 4))]
    prefills = [
        (rng.choice([0, 0, rng.randrange(30)]), rng.randrange(query_len + 1, 30))
        for _ in range(rng.randrange(0, 4))
    ]
    return Step([*decodes, *prefills] or [(3, 1)])


def test_each_row_is_one_attentions_and_the_other_skips_it(make_config: MakeConfig) -> None:
    builder = make_builder(make_config())
    buffers = Buffers(8, 96, "cpu")
    buffers.starts_cpu.copy_(torch.arange(9) * 12)
    captured = builder.build_for_cudagraph_capture(buffers.common_metadata())
    assert (captured.num_decodes, captured.first_prefill_row, captured.num_prefill_tokens) == (8, 0, 96)
    assert captured.prefill_start_loc.data_ptr() == buffers.starts.data_ptr()
    for name, decodes, prefills in (
        ("mixed", [0, 37, 16, -1, -1, -1, -1, -1], [-1, -1, -1, 0, 5]),
        ("decodes", [0, 15, 16, 40, -1, -1, -1, -1], [-1] * 8),
        ("prefills", [-1] * 8, [0, 31, 3]),
    ):
        buffers.fill(Step(STEPS[name]))
        builder.build(0, buffers.common_metadata())
        assert captured.decode_computed_tokens.tolist() == decodes
        # Rows of padding have no tokens: prefill attention looks no further.
        assert captured.prefill_computed_tokens.tolist()[: len(prefills)] == prefills


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
@pytest.mark.parametrize("num_drafts", [0, 1, 7])
def test_what_is_captured_describes_any_step(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, fused: bool, num_drafts: int
) -> None:
    """As a graph reads it, with the torch kernels."""
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    drafts = {"speculative_config": n_grams(num_drafts)} if num_drafts else {}
    config = make_config(additional_config={"rose": {"fused_kv_append": fused}}, **drafts)
    impl, builder = make_layer(config), make_builder(config)
    buffers = Buffers(8, 150, "cpu")
    buffers.fill(Step(STEPS["mixed"]))
    captured = builder.build_for_cudagraph_capture(buffers.common_metadata())
    rng = random.Random(5)
    steps = [*map(Step, STEPS.values()), *(random_step(rng, 1 + num_drafts) for _ in range(40))]
    assert any(step.num_tokens > len(step.rows) for step in steps)
    for step in steps:
        buffers.fill(step)
        builder.build(0, buffers.common_metadata())
        # What the torch kernels plan depends on the step.
        captured.steps.clear()
        tensors = (buffers.query, buffers.key, buffers.value, buffers.cache)
        impl.forward(None, *tensors, captured, buffers.output)
        torch.testing.assert_close(buffers.output[: step.num_tokens], step.expected(), rtol=1e-4, atol=1e-5)
        assert (buffers.output[step.num_tokens :] == 7.0).all(), "padding was written"
        assert torch.equal(buffers.cache.nan_to_num(nan=-1e9), step.expected_cache())


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
@pytest.mark.parametrize(("num_rows", "num_drafts"), [(6, 0), (40, 0), (6, 3), (40, 7)])
def test_one_graph_serves_any_step(
    make_config: MakeConfig, fused: bool, num_rows: int, num_drafts: int
) -> None:
    drafts = {"speculative_config": n_grams(num_drafts)} if num_drafts else {}
    config = make_config(additional_config={"rose": {"fused_kv_append": fused}}, **drafts)
    impl, builder = make_layer(config), make_builder(config, "cuda")
    buffers = Buffers(num_rows, 150, "cuda")

    def forward(metadata: Any) -> None:
        impl.forward(None, buffers.query, buffers.key, buffers.value, buffers.cache, metadata, buffers.output)

    buffers.fill(Step(STEPS["mixed"]))
    buffers.max_query_len = 150
    forward(builder.build_for_cudagraph_capture(buffers.common_metadata()))
    metadata = builder.build_for_cudagraph_capture(buffers.common_metadata())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(metadata)
    rng = random.Random(3)
    steps = (random_step(rng, 1 + num_drafts) for _ in range(40))
    for step in (*map(Step, STEPS.values()), *steps):
        buffers.fill(step)
        builder.build(0, buffers.common_metadata())
        graph.replay()
        output = buffers.output.cpu()
        torch.testing.assert_close(output[: step.num_tokens], step.expected(), rtol=1e-4, atol=1e-5)
        assert (output[step.num_tokens :] == 7.0).all(), "padding was written"
        assert torch.equal(buffers.cache.cpu().nan_to_num(nan=-1e9), step.expected_cache())


# Only models whose Python keeps nothing between steps get full graphs of steps with prompts.
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
LISTED = dict(
    line.split(" ", 1) for line in Path(__file__).with_name("state_of_forward.txt").read_text().splitlines()
)
HARMLESS = {
    "vllm.model_executor.layers.fused_moe.runner.shared_experts:SharedExperts": "taken again by the same step",
    "vllm.model_executor.models.gemma4:Gemma4Model": "by fast prefill alone, which is refused",
    "vllm.model_executor.models.qwen2_5_vl:Qwen2_5_VisionTransformer": "an encoder, outside of the graphs",
    "vllm.model_executor.models.qwen3_vl:Qwen3_VisionTransformer": "an encoder, outside of the graphs",
}
"""What audited models reach of the listed classes, and why a replay may leave it out."""


@pytest.fixture(scope="module")
def classes() -> dict[str, ModelClass]:
    rose = read_classes(Path(rose_backend.__file__).parent, "rose_backend", ("vllm_plugin/models", "layers"))
    return read_classes(Path(vllm.__file__).parent, "vllm") | rose


@pytest.fixture(scope="module")
def state(classes: dict[str, ModelClass]) -> dict[str, set[str]]:
    return find_state(classes)


def test_every_class_that_keeps_something_is_listed(state: dict[str, set[str]]) -> None:
    # A new one: read it, look at what is built of it, and add the line.
    new = {
        name: changed for name, changed in state.items() if not changed <= set(LISTED.get(name, "").split())
    }
    assert not new


@pytest.mark.parametrize("name", AUDITED_CLASSES)
def test_what_an_audited_model_is_made_of_keeps_nothing(
    name: str, classes: dict[str, ModelClass], state: dict[str, set[str]]
) -> None:
    reached = {each.name for each in classes[name].reached()}
    assert len(reached) > 1 and not (reached & state.keys()) - HARMLESS.keys()


@pytest.mark.parametrize("name", AUDITED_FOR_DECODES)
def test_what_is_audited_for_decodes_keeps_features_alone(
    name: str, classes: dict[str, ModelClass], state: dict[str, set[str]]
) -> None:
    kept = {each.name: state.get(each.name, set()) for each in classes[name].reached()}
    changed = set().union(*(names for each, names in kept.items() if each not in HARMLESS))
    features = {"deepstack_input_embeds", "deepstack_input_embeds_num_tokens"}
    assert len(kept) > 1 and changed <= features
    assert changed == features or "qwen3_5" in name


@pytest.mark.skipif(not is_torchvision_available(), reason="torchvision is not installed")
@pytest.mark.parametrize("name", ["qwen3_vl:Qwen3VL", "qwen3_vl_moe:Qwen3VLMoe"])
def test_ids_without_pictures_leave_features_alone_and_forward_clears_them(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A replayed step that only decodes embeds its ids, and its layers add what an earlier step has left: zeros."""
    module = import_module(f"vllm.model_executor.models.{name.partition(':')[0]}")
    model = object.__new__(getattr(module, f"{name.partition(':')[2]}ForConditionalGeneration"))
    torch.nn.Module.__init__(model)
    added: list[torch.Tensor] = []

    def forward(*, inputs_embeds: torch.Tensor, deepstack_input_embeds: Any, **_: Any) -> torch.Tensor:
        added.extend(each.clone() for each in deepstack_input_embeds.tensors.values())
        return inputs_embeds

    table = torch.randn(10, 4)
    model.language_model = SimpleNamespace(embed_input_ids=lambda ids: table[ids], model=forward)
    model.use_deepstack, model.deepstack_num_level, model.visual_dim, model.multiscale_dim = True, 2, 4, 8
    model.deepstack_input_embeds = [torch.zeros(6, 4) for _ in range(2)]
    first_rank = SimpleNamespace(is_first_rank=True)
    monkeypatch.setattr("vllm.model_executor.models.qwen3_vl.get_pp_group", lambda: first_rank)
    ids, is_picture = torch.tensor([3, 1, 4, 1]), torch.tensor([False, True, True, False])
    embeds = model.embed_input_ids(ids, [torch.ones(2, 12)], is_multimodal=is_picture)
    features = [each.clone() for each in model.deepstack_input_embeds]
    assert all(each[1:3].all() for each in features)
    assert torch.equal(model.embed_input_ids(ids), table[ids])
    assert all(map(torch.equal, model.deepstack_input_embeds, features))
    # vLLM's step, with padding behind.
    model.forward(None, ids, inputs_embeds=torch.cat((embeds, embeds[:1])))
    assert all(torch.equal(got, wanted[:5]) for got, wanted in zip(added, features, strict=True))
    assert not any(each.any() for each in model.deepstack_input_embeds)


def test_the_scan_finds_what_forward_clears_sets_and_inherits(state: dict[str, set[str]]) -> None:
    models = "vllm.model_executor.models."
    features = {"deepstack_input_embeds", "deepstack_input_embeds_num_tokens"}
    for name in ("qwen3_vl:Qwen3VL", "qwen3_vl_moe:Qwen3VLMoe"):
        assert state[f"{models}{name}ForConditionalGeneration"] == features
    assert state[f"{models}ernie45_vl:Ernie4_5_VLMoeForConditionalGeneration"] == {"visual_token_mask"}
    # Written in front of forward, under another name than the attribute's.
    assert "_ds_buffers" in state[f"{models}granite4_vision:Granite4VisionForConditionalGeneration"]


def model(architecture: str, **text: Any) -> Any:
    text_config = SimpleNamespace(**{"architectures": None, "model_type": "", **text})
    return SimpleNamespace(architecture=architecture, hf_text_config=text_config)


@pytest.mark.parametrize(
    ("config", "unaudited"),
    [
        (model("Qwen3ForCausalLM"), None),
        (model("TeleChat3ForCausalLM"), None),
        (model("Qwen2_5_VLForConditionalGeneration"), None),
        (model("Mistral3ForConditionalGeneration", model_type="mistral"), None),
        (model("Mistral3ForConditionalGeneration", architectures=["Ministral3ForCausalLM"]), None),
        (model("Mistral3ForConditionalGeneration", model_type="falcon_h1"), "FalconH1ForCausalLM"),
        (model("Mistral3ForConditionalGeneration", model_type="nobody"), "nobody"),
        (model("Qwen3VLForConditionalGeneration"), "Qwen3VLForConditionalGeneration"),
        (model("SmolVLMForConditionalGeneration"), "SmolVLMForConditionalGeneration"),
        (model("TransformersForCausalLM"), "TransformersForCausalLM"),
        (model("NobodysForCausalLM"), "NobodysForCausalLM"),
    ],
    ids=str,
)
def test_the_class_that_runs_counts(config: Any, unaudited: str | None) -> None:
    assert find_unaudited(config) == unaudited
    is_for_decodes = config.architecture.startswith("Qwen3VL")
    assert find_unaudited(config, only_decodes=True) == (None if is_for_decodes else unaudited)


class OwnQwen3(Qwen3ForCausalLM):  # type: ignore[misc]
    pass


@pytest.mark.parametrize("by_name", [False, True])
def test_a_class_of_the_users_own_is_not_audited(monkeypatch: pytest.MonkeyPatch, by_name: bool) -> None:
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    for name, kind in (("Qwen3ForCausalLM", OwnQwen3), ("Qwen2ForCausalLM", OwnQwen3)):
        ModelRegistry.register_model(name, f"{__name__}:{kind.__name__}" if by_name else kind)
    assert class_of("Qwen3ForCausalLM") == f"{__name__}:OwnQwen3"
    assert find_unaudited(model("Qwen3ForCausalLM")) == "Qwen3ForCausalLM"
    # It is this one's language model.
    assert find_unaudited(model("Qwen2_5_VLForConditionalGeneration")) == "Qwen2ForCausalLM"


def test_the_documentation_lists_them() -> None:
    section = (
        PAGE.read_text().partition("\n## Full CUDA graphs of steps with prompts")[2].partition("\n##")[0]
    )
    listed = re.findall(r"`(\w+(?:ForCausalLM|ForConditionalGeneration|LMHeadModel|MTP))`", section)
    audited = {**AUDITED_CLASSES, **AUDITED_FOR_DECODES}
    own = {name.partition(":")[2] for name in audited if name.startswith("vllm.")}
    assert len(listed) == len(set(listed)) and set(listed) == own


@pytest.mark.usefixtures("make_config")
def test_vllms_registry_has_every_audited_class() -> None:
    registered = {
        f"{entry.module_name}:{entry.class_name}"
        for entry in ModelRegistry.models.values()
        if isinstance(entry, _LazyRegisteredModel)
    }
    assert AUDITED_CLASSES.keys() | AUDITED_FOR_DECODES.keys() <= registered
    assert not AUDITED_CLASSES.keys() & AUDITED_FOR_DECODES.keys()


# A prompt's last token beside decodes: not replayed as a decode where a model keeps features for its forward.
KEEPS, KEEPS_NOTHING = "Qwen3VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"
DECODES = [(30, 40), (20, 21)]
"""Prompt tokens of each row, and computed ones."""
TAIL = [(30, 40), (20, 19)]
PLAIN, PLAIN_V1 = (
    getattr(method, "__wrapped__", method)
    for method in (RunnerV2.gather_batch_req_state, RunnerV1._determine_batch_execution_and_padding)
)


@pytest.fixture(params=[KEEPS, KEEPS_NOTHING, "another backend", "text"])
def runner(
    request: pytest.FixtureRequest, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> SimpleNamespace:
    """Return what model runners know of their model."""
    config = make_config(attention_backend=None if request.param == "another backend" else "rose")
    architecture = KEEPS_NOTHING if request.param == KEEPS_NOTHING else KEEPS
    monkeypatch.setattr(config.model_config, "_architecture", architecture)
    return SimpleNamespace(
        vllm_config=config,
        model_config=config.model_config,
        supports_mm_inputs=request.param != "text",
        replays_tails=request.param != KEEPS,
    )


def uniform_tokens_v2(runner: SimpleNamespace, rows: list[tuple[int, int]]) -> int | None:
    """Return for how many tokens of each row vLLM looks for a graph of decodes; None: for none."""
    prompts, computed = np.array(rows).T
    vars(runner).update(
        decode_query_len=1,
        use_pp=False,
        adaptive_verification=None,
        pcp_manager=None,
        req_states=SimpleNamespace(
            req_id_to_index={str(row): row for row in range(len(rows))},
            prefill_len=SimpleNamespace(np=prompts),
            num_computed_prefill_tokens=np.minimum(prompts, computed),
        ),
    )
    output = SimpleNamespace(
        num_scheduled_tokens={str(row): 1 for row in range(len(rows))},
        total_num_scheduled_tokens=len(rows),
        scheduled_spec_decode_tokens={},
    )
    state, uniform = wrap_gather_batch_req_state(PLAIN)(runner, output, False)
    assert state.has_prefill == bool((computed < prompts).any())
    return uniform


def is_uniform_v1(runner: SimpleNamespace, rows: list[tuple[int, int]], force: bool | None = None) -> bool:
    """Return whether vLLM looks for a graph of decodes."""

    class DispatchedError(Exception):
        pass

    def dispatch(*, uniform_decode: bool, **kwargs: Any) -> None:
        raise DispatchedError(uniform_decode)

    prompts, computed = np.array(rows).T
    vars(runner).update(
        uniform_decode_query_len=1,
        _is_uniform_decode=RunnerV1._is_uniform_decode,
        # Rows behind the batch are what others left.
        input_batch=SimpleNamespace(
            num_prompt_tokens=np.append(prompts, 9),
            num_computed_tokens_cpu=np.append(computed, 0),
            lora_id_to_lora_request={},
        ),
        cudagraph_dispatcher=SimpleNamespace(dispatch=dispatch),
    )
    with pytest.raises(DispatchedError) as dispatched:
        wrap_determine_batch_execution(PLAIN_V1)(
            runner,
            num_tokens=len(rows),
            num_reqs=len(rows),
            num_scheduled_tokens_np=np.ones(len(rows), np.int32),
            max_num_scheduled_tokens=1,
            force_uniform_decode=force,
        )
    return bool(dispatched.value.args[0])


def test_a_tail_is_replayed_as_a_decode_only_where_nothing_is_kept(runner: SimpleNamespace) -> None:
    assert uniform_tokens_v2(runner, DECODES) == 1
    assert uniform_tokens_v2(runner, TAIL) == (1 if runner.replays_tails else None)
    assert is_uniform_v1(runner, DECODES)
    assert is_uniform_v1(runner, TAIL) is runner.replays_tails
    # As while graphs are captured.
    assert is_uniform_v1(runner, TAIL, force=True) and not is_uniform_v1(runner, DECODES, force=False)


@pytest.mark.parametrize("architecture", [KEEPS, KEEPS_NOTHING])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_runners_are_patched_for_models_that_are_not_audited(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, architecture: str, runner: str
) -> None:
    config = make_config()
    monkeypatch.setattr(config.model_config, "_architecture", architecture)
    monkeypatch.setattr(type(config), "use_v2_model_runner", runner == "v2")
    for name in ("prompt_tails_v1", "prompt_tails_v2"):
        owner, attribute = resolve_owner(LEDGER[name].target)
        method = getattr(owner, attribute)
        monkeypatch.setattr(owner, attribute, getattr(method, "__wrapped__", method))
    make_builder(config)
    assert is_applied(f"prompt_tails_{runner}") == (architecture == KEEPS)
    assert not is_applied(f"prompt_tails_{'v2' if runner == 'v1' else 'v1'}")
