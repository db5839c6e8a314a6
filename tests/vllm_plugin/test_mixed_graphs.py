"""Graphs that serve any mix of decodes and prompts: which are captured, what they are told, and what they compute."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode, KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from rose_backend.vllm_plugin.attention.backend import RoseAttentionImpl
from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadataBuilder
from rose_backend.vllm_plugin.attention.mixed_graphs import (
    choose_mixed_graphs,
    graph_sizes,
    leaves_graphs_to_vllm,
)
from rose_backend.vllm_plugin.config_hook import describe_parts
from rose_backend.vllm_plugin.models.model_choice import ModelChoice
from rose_backend.vllm_plugin.options import rose_options
from rose_backend.vllm_plugin.patch_ledger import apply_patch, is_applied
from tests.support.vllm_plugin.configs import MakeConfig
from tests.vllm_plugin.test_attention_backend import (
    BLOCK_SIZE,
    HEAD_SIZE,
    NUM_BLOCKS,
    NUM_HEADS,
    NUM_KV_HEADS,
    SCALE,
    STEPS,
    Step,
)

VLLM_SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
LAYER_BY_LAYER = KVTransferConfig(
    kv_connector="ExampleConnector",
    # Not a random one: tests are named after what they are given.
    engine_id="engine",
    kv_role="kv_both",
    kv_connector_extra_config={"shared_storage_path": "unused"},
)
N_GRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


OnGpu = Callable[..., Any]


@pytest.fixture
def on_gpu(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> OnGpu:
    """Return a function that builds a configuration with what vLLM would choose on a GPU."""

    def make(sizes: list[int] = VLLM_SIZES, **options: Any) -> Any:
        config = make_config(**options)
        compilation = config.compilation_config
        compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = list(sizes), sizes[-1]
        # Not before: the configuration was made for the platform that is there.
        monkeypatch.setattr("vllm.platforms.current_platform.is_cuda", lambda: True)
        monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
        return config

    return make


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
def test_full_graphs_take_the_place_of_pieces(on_gpu: OnGpu, switches: dict[str, bool]) -> None:
    config = on_gpu(max_num_batched_tokens=1000, max_model_len=256, additional_config={"rose": switches})
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
        {"speculative_config": N_GRAM},
        {"kv_transfer_config": LAYER_BY_LAYER},
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


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"speculative_config": N_GRAM}, "drafts"),
        ({"kv_transfer_config": LAYER_BY_LAYER}, "a KV connector that works layer by layer"),
    ],
    ids=str,
)
def test_the_log_says_why_prompts_have_no_full_graphs(
    on_gpu: OnGpu, options: dict[str, Any], reason: str
) -> None:
    config = on_gpu(**options)
    assert graphs_told_of(config) == f" graphs of decodes only ({reason})"
    support = RoseAttentionMetadataBuilder.get_cudagraph_support(config, None)
    assert support is AttentionCGSupport.UNIFORM_BATCH


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
    make_config()
    assert asked
    asked.clear()
    make_config(compilation_config=said)
    assert not asked


def test_a_finished_configuration_counts_as_set_by_the_user(make_config: MakeConfig) -> None:
    assert not leaves_graphs_to_vllm(make_config())


class Manager(CudaGraphManager):
    """vLLM's choice of graphs without a device."""

    def __init__(self, config: Any, mode: CUDAGraphMode, max_num_reqs: int) -> None:
        self.vllm_config, self.compilation_config = config, config.compilation_config
        self.cudagraph_mode, self.max_num_reqs, self.decode_query_len = mode, max_num_reqs, 1
        self.varlen_decode, self.ubatch_runner = False, None
        self.lora_capture_cases, self._lora_dispatch_map, self._max_lora_case = [0], {}, 0
        self._candidates, self._capture_descs = {}, {}
        self._graphs_captured = True
        apply_patch("decode_graphs")
        self._init_candidates()


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


def test_graphs_in_pieces_are_left_alone(on_gpu: OnGpu) -> None:
    manager = Manager(on_gpu(max_num_seqs=20), CUDAGraphMode.FULL_AND_PIECEWISE, 20)
    assert {desc.uniform_token_count for desc in manager._capture_descs[CUDAGraphMode.FULL]} == {1}
    assert {desc.uniform_token_count for desc in manager._capture_descs[CUDAGraphMode.PIECEWISE]} == {None}


def test_graphs_are_patched_where_rose_attends_to_mixed_steps_only(
    make_config: MakeConfig, on_gpu: OnGpu
) -> None:
    drafting, config = make_config(speculative_config=N_GRAM), on_gpu()
    with pytest.MonkeyPatch.context() as patch:
        # As in a process in which it is not applied yet.
        method = CudaGraphManager._init_candidates
        patch.setattr(CudaGraphManager, "_init_candidates", getattr(method, "__wrapped__", method))
        RoseAttentionMetadataBuilder(None, ["layer"], drafting, torch.device("cpu"))
        assert not is_applied("decode_graphs")
        RoseAttentionMetadataBuilder(None, ["layer"], config, torch.device("cpu"))
        assert is_applied("decode_graphs")


class Buffers:
    """What a graph reads and writes: room for ``num_rows`` requests and ``num_tokens`` tokens, padded as vLLM does."""

    def __init__(self, num_rows: int, num_tokens: int, device: str) -> None:
        self.num_rows, self.num_tokens = num_rows, num_tokens
        self.query = torch.zeros(num_tokens, NUM_HEADS, HEAD_SIZE, device=device)
        self.key = torch.zeros(num_tokens, NUM_KV_HEADS, HEAD_SIZE, device=device)
        self.value, self.output = torch.zeros_like(self.key), torch.zeros_like(self.query)
        self.cache = torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE, device=device)
        self.starts = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.table = torch.zeros(num_rows, 8, dtype=torch.int32, device=device)
        self.slot_mapping = torch.full((num_tokens,), -1, device=device)
        self.starts_cpu = torch.zeros(num_rows + 1, dtype=torch.int32)
        self.max_query_len = num_tokens

    def fill(self, step: Step) -> None:
        rows, tokens = len(step.rows), step.num_tokens
        self.max_query_len = max(new for _, new in step.rows)
        for buffer, values in ((self.query, step.query), (self.key, step.key), (self.value, step.value)):
            buffer.fill_(float("nan"))
            buffer[:tokens] = values
        self.output.fill_(7.0)
        self.cache.copy_(step.cache)
        self.starts_cpu.fill_(tokens)
        self.starts_cpu[: rows + 1] = torch.tensor(step.starts, dtype=torch.int32)
        self.starts.copy_(self.starts_cpu)
        self.seq_lens.zero_()
        self.seq_lens[:rows] = torch.tensor([sum(row) for row in step.rows])
        self.table.zero_()
        self.table[:rows] = step.table
        self.slot_mapping.fill_(-1)
        self.slot_mapping[:tokens] = step.slot_mapping

    def common_metadata(self) -> CommonAttentionMetadata:
        return CommonAttentionMetadata(
            query_start_loc=self.starts,
            query_start_loc_cpu=self.starts_cpu,
            seq_lens=self.seq_lens,
            num_reqs=self.num_rows,
            num_actual_tokens=self.num_tokens,
            max_query_len=self.max_query_len,
            max_seq_len=128,
            block_table_tensor=self.table,
            slot_mapping=self.slot_mapping,
        )


def random_step(rng: random.Random) -> Step:
    """Return up to 6 requests of up to 60 tokens, decodes first, as vLLM sorts them; some steps have one kind only."""
    decodes = [(rng.randrange(60), 1) for _ in range(rng.randrange(0, 4))]
    prefills = [
        (rng.choice([0, 0, rng.randrange(30)]), rng.randrange(2, 30)) for _ in range(rng.randrange(0, 4))
    ]
    return Step([*decodes, *prefills] or [(3, 1)])


def test_each_row_is_one_attentions_and_the_other_skips_it(make_config: MakeConfig) -> None:
    builder = RoseAttentionMetadataBuilder(None, ["layer"], make_config(), torch.device("cpu"))
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


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
@pytest.mark.parametrize("num_rows", [6, 40])
def test_one_graph_serves_any_step(make_config: MakeConfig, fused: bool, num_rows: int) -> None:
    config = make_config(additional_config={"rose": {"fused_kv_append": fused}})
    with set_current_vllm_config(config):
        impl = RoseAttentionImpl(NUM_HEADS, HEAD_SIZE, SCALE, NUM_KV_HEADS)
        builder = RoseAttentionMetadataBuilder(None, ["layer"], config, torch.device("cuda"))
    buffers = Buffers(num_rows, 96, "cuda")

    def forward(metadata: Any) -> None:
        impl.forward(None, buffers.query, buffers.key, buffers.value, buffers.cache, metadata, buffers.output)

    buffers.fill(Step(STEPS["mixed"]))
    buffers.max_query_len = 96
    forward(builder.build_for_cudagraph_capture(buffers.common_metadata()))
    metadata = builder.build_for_cudagraph_capture(buffers.common_metadata())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(metadata)
    rng = random.Random(3)
    for step in (*map(Step, STEPS.values()), *(random_step(rng) for _ in range(40))):
        buffers.fill(step)
        builder.build(0, buffers.common_metadata())
        graph.replay()
        wanted = step.cache.clone()
        for token, slot in enumerate(step.slot_mapping[: step.num_tokens].tolist()):
            new = torch.cat((step.key[token], step.value[token]), -1)
            wanted[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = new
        output = buffers.output.cpu()
        torch.testing.assert_close(output[: step.num_tokens], step.expected(), rtol=1e-4, atol=1e-5)
        assert (output[step.num_tokens :] == 7.0).all(), "padding was written"
        assert torch.equal(buffers.cache.cpu().nan_to_num(nan=-1e9), wanted.nan_to_num(nan=-1e9))
