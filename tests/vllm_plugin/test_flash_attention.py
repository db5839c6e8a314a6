"""Which prefill rows are FlashAttention 3's, and what it is handed. Its kernels are replaced by a torch reference."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backends import fa_utils

from rose_backend.vllm_plugin.attention import flash_attention
from rose_backend.vllm_plugin.attention.backend import RoseAttentionImpl
from rose_backend.vllm_plugin.attention.flash_attention import (
    LAUNCHED_FROM,
    Threshold,
    choose_rows,
    is_faster,
    uses_flash_attention,
)
from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadata
from rose_backend.vllm_plugin.config_hook import describe_parts
from rose_backend.vllm_plugin.models.model_choice import ModelChoice
from rose_backend.vllm_plugin.options import rose_options
from tests.support.vllm_plugin.attention_steps import (
    BLOCK_SIZE,
    HEAD_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    SCALE,
    STEPS,
    Manager,
    Step,
    attend,
    make_builder,
    make_layer,
)
from tests.support.vllm_plugin.configs import MakeConfig, OnGpu, rose
from tests.support.vllm_plugin.fake_flash import FakeFlash

PLUGIN = "rose_backend.vllm_plugin.attention"
PREFILLS_OF = {"mixed": (3, 3), "prefills": (0, 0)}
"""Step -> its first prefill row and that row's first token."""


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> FakeFlash:
    """Return what stands in for FlashAttention 3; rows of two tokens and more are its own, of this test's head size."""
    fake = FakeFlash()
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", fake)
    monkeypatch.setattr(flash_attention, "HEAD_SIZE", HEAD_SIZE)
    monkeypatch.setattr(flash_attention, "FASTER_FROM", (Threshold(0, 2),))
    for module in ("flash_attention", "metadata"):
        monkeypatch.setattr(f"{PLUGIN}.{module}.uses_flash_attention", lambda config: True)
    return fake


Run = Callable[..., RoseAttentionMetadata]


@pytest.fixture(params=[True, False], ids=["fused", "separate"])
def run(request: pytest.FixtureRequest, make_config: MakeConfig) -> Run:
    """Return a function that runs layers of one step and checks each one's output."""
    config = make_config(**rose(fused_kv_append=request.param))

    def run_layers(step: Step, layers: tuple[dict[str, Any], ...] = ({},)) -> RoseAttentionMetadata:
        impls = [make_layer(config, **layer) for layer in layers]
        metadata = make_builder(config).build(0, step.common_metadata())
        for impl, layer in zip(impls, layers, strict=True):
            step.check(attend(impl, step, metadata), layer.get("sliding_window"))
        return metadata

    return run_layers


@pytest.mark.parametrize("order", ["BHNC", "BNHC", "HBNC"])
@pytest.mark.parametrize("name", PREFILLS_OF)
def test_it_gets_the_prefill_rows_and_all_is_stored(
    flash: FakeFlash, run: Run, name: str, order: str
) -> None:
    step = Step(STEPS[name], cache_order=order, padding=3)
    wanted = step.expected_cache()
    run(step)
    assert torch.equal(step.cache.nan_to_num(nan=-1e9), wanted)
    [call] = flash.calls
    first_row, first_token = PREFILLS_OF[name]
    rows = STEPS[name][first_row:]
    assert call["cu_seqlens_q"].tolist() == [start - first_token for start in step.starts[first_row:]]
    assert call["seqused_k"].tolist() == [computed + new for computed, new in rows]
    assert torch.equal(call["block_table"], step.table[first_row:])
    assert call["q"].data_ptr() == step.query[first_token].data_ptr()
    assert call["q"].shape[0] == call["out"].shape[0] == step.num_tokens - first_token
    for tensor, offset in ((call["k"], 0), (call["v"], HEAD_SIZE)):
        view = step.cache.transpose(1, 2)[..., offset : offset + HEAD_SIZE]
        assert tensor.data_ptr() == view.data_ptr() and tensor.stride() == view.stride()
    assert call["softmax_scale"] == SCALE and call["scheduler_metadata"].tolist() == [1]
    [schedule] = flash.schedules
    for name, given in schedule.items():
        if name in call and name not in ("window_size", "scheduler_metadata"):
            assert given is call[name] or given == call[name], name
    assert schedule["cache_seqlens"] is call["seqused_k"]
    sizes = ("batch_size", "num_heads_q", "num_heads_kv", "headdim", "page_size", "qkv_dtype")
    assert [schedule[size] for size in sizes] == [
        *(len(rows), NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, torch.float32)
    ]


def test_layers_share_a_schedule_and_special_ones_stay_roses(flash: FakeFlash, run: Run) -> None:
    special: list[dict[str, Any]] = [{"sliding_window": 9}]
    run(Step(STEPS["mixed"]), ({}, *special, {}))
    assert len(flash.calls) == 2 and len(flash.schedules) == 1
    flash.calls.clear()
    run(Step(STEPS["mixed"]), ({"kv_sharing_target_layer_name": None}, *special))
    assert len(flash.calls) == 1


def test_a_layer_that_shares_anothers_cache_writes_nothing(flash: FakeFlash, run: Run) -> None:
    step = Step(STEPS["mixed"])
    run(step)
    before = step.cache.clone()
    key, step.key = step.key, torch.zeros_like(step.key)
    with pytest.raises(AssertionError):  # It attends what is stored, not these keys.
        run(step, ({"kv_sharing_target_layer_name": "other"},))
    assert torch.equal(step.cache.nan_to_num(), before.nan_to_num())
    step.key = key
    run(step, ({"kv_sharing_target_layer_name": "other"},))


@pytest.mark.parametrize(
    "layer",
    [
        {"alibi_slopes": [0.1] * NUM_HEADS},
        {"logits_soft_cap": 5.0},
        {"sinks": torch.zeros(NUM_HEADS)},
        {"kv_cache_dtype": "fp8"},
    ],
    ids=str,
)
def test_special_layers_are_roses(flash: FakeFlash, make_config: MakeConfig, layer: dict[str, Any]) -> None:
    with set_current_vllm_config(make_config()):
        assert RoseAttentionImpl(NUM_HEADS, HEAD_SIZE, SCALE, NUM_KV_HEADS).may_use_flash
        assert not RoseAttentionImpl(NUM_HEADS, HEAD_SIZE, SCALE, NUM_KV_HEADS, **layer).may_use_flash
        assert not RoseAttentionImpl(NUM_HEADS, HEAD_SIZE // 2, SCALE, NUM_KV_HEADS).may_use_flash


def test_blocks_that_are_loaded_whole_are_roses(
    flash: FakeFlash, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_attention, "_KEY_TILE", BLOCK_SIZE)
    run(Step(STEPS["mixed"]))
    assert flash.calls == []


def test_decodes_and_captured_graphs_are_roses(flash: FakeFlash, run: Run, make_config: MakeConfig) -> None:
    assert run(Step(STEPS["decodes"])).flash_rows is None
    builder = make_builder(make_config())
    common = Step(STEPS["mixed"]).common_metadata()
    assert builder.build(0, common).flash_rows is not None
    assert builder.build_for_cudagraph_capture(common).flash_rows is None
    assert flash.calls == []


def test_the_run_before_a_capture_compiles_the_write(
    flash: FakeFlash, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, step = make_config(), Step([(0, 17), (31, 2)])
    impl, builder = make_layer(config), make_builder(config)
    metadata = builder.build_for_cudagraph_capture(step.common_metadata())
    written: list[int] = []
    monkeypatch.setattr(f"{PLUGIN}.backend.write_kv", lambda key, *rest: written.append(len(key)))
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda answer=capturing: answer)
        impl.forward(
            None, step.query, step.key, step.value, step.cache, metadata, torch.empty_like(step.query)
        )
    assert written == [step.num_tokens] and flash.calls == []


def test_measured_shapes_take_the_faster_side() -> None:
    # benchmarks/results/h200/kernels.json: 0.95 and 0.73 times FlashAttention's speed with Llama-8B's heads.
    assert is_faster(8192, 0) and is_faster(2048, 6144)
    assert not is_faster(512, 0) and not is_faster(64, 8192)
    contexts, lengths = zip(*flash_attention.FASTER_FROM, strict=True)
    assert list(contexts) == sorted(set(contexts)), "a threshold that another one covers"
    assert list(lengths) == sorted(set(lengths), reverse=True), "a threshold that another one covers"
    # Steps that may have rows for FlashAttention are launched, the others are replayed.
    assert min(lengths) <= LAUNCHED_FROM


@pytest.mark.parametrize(
    ("rows", "threshold", "chosen"),
    [
        ([(0, 60)], Threshold(0, 60), True),
        ([(0, 60)], Threshold(0, 61), False),
        # The row of an average token: one long row decides, many short ones do, and decodes do not.
        ([(90, 1), (0, 60), (0, 2), (0, 2)], Threshold(0, 50), True),
        ([(90, 1), (0, 20), *[(0, 5)] * 12], Threshold(0, 15), False),
        ([(90, 1), (0, 60), (0, 2)], Threshold(0, 60), False),
        ([(48, 40), (0, 2)], Threshold(40, 20), True),
        ([(90, 1), (0, 40)], Threshold(40, 20), False),
        ([(48, 40)], Threshold(49, 20), False),
    ],
    ids=str,
)
def test_rows_are_chosen_by_an_average_token(
    monkeypatch: pytest.MonkeyPatch, rows: list[tuple[int, int]], threshold: Threshold, chosen: bool
) -> None:
    monkeypatch.setattr(flash_attention, "FASTER_FROM", (threshold,))
    step = Step(rows)
    common = step.common_metadata()
    num_decodes = sum(new == 1 for _, new in rows)
    # Without lengths on the CPU a context counts as none.
    for seq_lens, is_chosen in (
        (common.seq_lens, chosen),
        (None, chosen and threshold.num_computed_tokens == 0),
    ):
        common.seq_lens_cpu_upper_bound = seq_lens
        starts = common.query_start_loc[num_decodes:] - num_decodes
        assert (choose_rows(common, num_decodes, num_decodes, starts) is not None) == is_chosen


@pytest.fixture
def on_hopper(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that builds a configuration for a GPU of compute capability 9.0, and heads of 128."""

    def make(head_size: int = 128, **options: Any) -> Any:
        config = make_config(**{"dtype": "bfloat16", "block_size": 16, **options})
        platform = type(current_platform)
        monkeypatch.setattr(platform, "is_cuda", lambda self: True)
        monkeypatch.setattr(platform, "is_device_capability_family", lambda self, family: family == 90)
        monkeypatch.setattr(fa_utils, "is_fa_version_supported", lambda version: version == 3)
        monkeypatch.setattr(type(config.model_config), "get_head_size", lambda self: head_size)
        return config

    return make


def test_it_needs_hopper_half_precision_and_its_head_size(
    on_hopper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on_hopper()
    assert uses_flash_attention(config)
    line = describe_parts(config, rose_options(config), ModelChoice(None))
    assert "(stores K/V itself, FlashAttention 3 for prefill rows from 4,096 after 0, " in line
    assert " tokens on, outside full CUDA graphs);" in line
    assert uses_flash_attention(on_hopper(dtype="float16"))
    for options in ({"head_size": 64}, {"dtype": "float32"}, {"block_size": 128}, {"block_size": 256}):
        other = on_hopper(**options)
        assert not uses_flash_attention(other), options
        assert "FlashAttention" not in describe_parts(other, rose_options(other), ModelChoice(None))
    config = on_hopper(block_size=64)
    assert uses_flash_attention(config)
    config.cache_config.cache_dtype = "fp8"
    assert not uses_flash_attention(config)
    # All layers slide: none is left that FlashAttention 3 may attend.
    for overrides, has_plain_layers in (
        ({"sliding_window": 64}, False),
        ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}, True),
    ):
        config = on_hopper(hf_overrides=overrides)
        assert uses_flash_attention(config) is has_plain_layers
    for target, name, answer in (
        (fa_utils, "is_fa_version_supported", lambda version: False),
        (type(current_platform), "is_device_capability_family", lambda self, family: family == 100),
        (type(current_platform), "is_cuda", lambda self: False),
    ):
        config = on_hopper()
        monkeypatch.setattr(target, name, answer)
        assert not uses_flash_attention(config), name


def test_a_build_without_its_extensions_attends_with_roses_kernel(
    on_hopper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on_hopper()
    # Importing it raises ImportError, as vLLM's module does where its compiled extensions are missing.
    monkeypatch.setitem(sys.modules, fa_utils.__name__, None)
    assert not uses_flash_attention(config)
    assert "FlashAttention" not in describe_parts(config, rose_options(config), ModelChoice(None))


@pytest.mark.parametrize("data_parallel_size", [1, 2])
def test_steps_of_long_rows_are_launched(
    on_gpu: OnGpu,
    monkeypatch: pytest.MonkeyPatch,
    data_parallel_size: int,
) -> None:
    monkeypatch.setattr(f"{PLUGIN}.mixed_graphs.uses_flash_attention", lambda config: True)
    monkeypatch.setattr(f"{PLUGIN}.mixed_graphs.LAUNCHED_FROM", 16)
    sizes = [1, 2, 4, 8, 16, 20, 32, 64]
    config = on_gpu(sizes, max_num_seqs=20)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    config.parallel_config.data_parallel_size = data_parallel_size
    manager = Manager(config, CUDAGraphMode.FULL, 20)
    assert all(desc.cg_mode == CUDAGraphMode.FULL for desc in manager._capture_descs[CUDAGraphMode.FULL])
    for num_tokens in range(1, 65):
        for num_requests in range(1, min(num_tokens, 20) + 1):
            desc = manager.dispatch(num_requests, num_tokens, None, 0, None)
            if num_tokens >= 16 * num_requests and data_parallel_size == 1:
                assert desc.cg_mode == CUDAGraphMode.NONE
                assert (desc.num_tokens, desc.num_reqs) == (num_tokens, num_requests), "nothing is padded"
            else:
                assert desc.cg_mode == CUDAGraphMode.FULL
    assert manager.dispatch(20, 20, 1, 0, 1).uniform_token_count == 1


def test_graphs_serve_long_rows_without_flash_attention(on_gpu: OnGpu) -> None:
    config = on_gpu([1, LAUNCHED_FROM * 2], max_num_seqs=20)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    manager = Manager(config, CUDAGraphMode.FULL, 20)
    assert manager.dispatch(1, LAUNCHED_FROM, None, 0, None).cg_mode == CUDAGraphMode.FULL
