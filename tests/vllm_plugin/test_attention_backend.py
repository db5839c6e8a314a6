"""ROSE's attention against plain softmax attention, in every layout that vLLM may lay the cache out in."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.compilation.backends import set_model_tag
from vllm.config.utils import replace
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from rose_backend.errors import ConfigError
from rose_backend.kernels.gpu_properties import current_workspace
from rose_backend.vllm_plugin.attention import backend
from rose_backend.vllm_plugin.attention.backend import RoseAttentionBackend
from rose_backend.vllm_plugin.kv_cache.spec import RoseAttentionSpec, as_rose_spec
from tests.support.vllm_plugin.attention_steps import (
    BLOCK_SIZE,
    HEAD_SIZE,
    NUM_BLOCKS,
    NUM_HEADS,
    STEPS,
    Step,
    attend,
    make_builder,
    make_layer,
)
from tests.support.vllm_plugin.configs import MakeConfig, n_grams


@pytest.fixture(scope="module")
def configs(make_config: MakeConfig) -> dict[bool, Any]:
    """Return configurations by whether attention stores K/V itself."""
    return {
        fused: make_config(additional_config={"rose": {"fused_kv_append": fused}}) for fused in (True, False)
    }


def run(step: Step, config: Any, **layer_options: Any) -> torch.Tensor:
    metadata = make_builder(config).build(0, step.common_metadata())
    return attend(make_layer(config, **layer_options), step, metadata)


@pytest.mark.parametrize("order", ["".join(order) for order in itertools.permutations("BHN")])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
def test_any_layout_gives_plain_attention(configs: dict[bool, Any], order: str, fused: bool) -> None:
    step = Step(STEPS["mixed"], cache_order=f"{order}C")
    step.check(run(step, configs[fused]))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
@pytest.mark.parametrize("name", STEPS)
def test_new_tokens_are_stored_and_nothing_else_changes(
    configs: dict[bool, Any], name: str, fused: bool
) -> None:
    step = Step(STEPS[name], padding=3)
    wanted = step.expected_cache()
    step.check(run(step, configs[fused]))
    assert torch.equal(step.cache.nan_to_num(nan=-1e9), wanted)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
def test_sliding_window(configs: dict[bool, Any], fused: bool) -> None:
    step = Step(STEPS["mixed"])
    step.check(run(step, configs[fused], sliding_window=9), 9)


def test_a_separate_write_lets_requests_read_what_others_store_in_the_same_step(
    configs: dict[bool, Any],
) -> None:
    # vLLM's own manager publishes blocks in the step that fills them: the first row reads the last row's new block.
    step = Step([(16, 1), (16, 4), (0, 16)])
    for reader in (0, 1):
        step.table[reader, 0] = step.table[2, 0]
        step.history[reader] = (step.key[5:21], step.value[5:21])
    step.cache[step.table[2, 0]] = float("nan")
    step.check(run(step, configs[False]))


def test_a_layer_that_shares_anothers_cache_writes_nothing(configs: dict[bool, Any]) -> None:
    step = Step(STEPS["mixed"])
    run(step, configs[True])
    before, expected = step.cache.clone(), step.expected()
    step.key, step.value = torch.zeros_like(step.key), torch.zeros_like(step.value)
    output = run(step, configs[True], kv_sharing_target_layer_name="other")
    assert torch.equal(step.cache.nan_to_num(), before.nan_to_num())
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_a_drafters_layer_leaves_out_what_has_no_slot(configs: dict[bool, Any]) -> None:
    step = Step(STEPS["mixed"])
    metadata, layer = make_builder(configs[True]).build(0, step.common_metadata()), make_layer(configs[True])
    with set_model_tag("eagle_head"):
        drafter = make_layer(configs[True])
    assert layer.appends_in_attention and not drafter.appends_in_attention
    everything, (cache, slots) = step.expected_cache(), (step.cache.clone(), step.slot_mapping.clone())
    # vLLM hands the metadata of the model's step on to the drafter. Slots are read as they are then.
    step.check(attend(layer, step, metadata))
    assert torch.equal(step.cache.nan_to_num(nan=-1e9), everything)
    step.cache.copy_(cache)
    step.slot_mapping[:2] = -1
    attend(drafter, step, metadata)
    left_out = everything == cache.nan_to_num(nan=-1e9)
    for slot in slots[:2].tolist():
        left_out[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = True
    expected = torch.where(left_out, cache.nan_to_num(nan=-1e9), everything)
    assert torch.equal(step.cache.nan_to_num(nan=-1e9), expected)
    # In the other order, too.
    metadata = make_builder(configs[True]).build(0, step.common_metadata())
    attend(drafter, step, metadata)
    step.cache.copy_(cache)
    step.check(attend(layer, step, metadata))
    assert torch.equal(step.cache.nan_to_num(nan=-1e9), everything)


def test_a_drafters_next_step_has_the_lengths_of_then(configs: dict[bool, Any]) -> None:
    rows = [(0, 1), (15, 1), (37, 1)]
    step, builder = Step(rows), make_builder(configs[True])
    with set_model_tag("eagle_head"):
        drafter = make_layer(configs[True])
    common = step.common_metadata()
    metadata = builder.build(0, common)
    attend(drafter, step, metadata)
    for token, (computed, _) in enumerate(rows):
        known = zip(step.history[token], (step.key, step.value), strict=True)
        step.history[token] = tuple(torch.cat((old, new[token : token + 1])) for old, new in known)
        position = computed + 1
        block = step.table[token, position // BLOCK_SIZE]
        if position % BLOCK_SIZE == 0:
            block.fill_(min({*range(1, NUM_BLOCKS)} - {*step.table.flatten().tolist()}))
        step.slot_mapping[token] = int(block) * BLOCK_SIZE + position % BLOCK_SIZE
    # As vLLM's graph of a drafter's steps does, in place.
    step.rows = [(computed + 1, 1) for computed, _ in rows]
    common.seq_lens.add_(1)
    step.query, step.key, step.value = (torch.randn_like(each) for each in (step.query, step.key, step.value))
    builder.update_draft_decode_metadata(metadata)
    step.check(attend(drafter, step, metadata))


def test_a_drafters_next_step_may_have_several_tokens_in_a_row(configs: dict[bool, Any]) -> None:
    metadata: Any = SimpleNamespace(
        max_decode_query_len=3,
        query_start_loc=torch.tensor([0, 3, 6, 6]),
        seq_lens=torch.tensor([10, 21, 0]),
        decode_computed_tokens=torch.full((3,), -7),
        steps={True: None},
    )
    make_builder(configs[True]).update_draft_decode_metadata(metadata)
    assert metadata.decode_computed_tokens.tolist() == [7, 18, 0] and not metadata.steps


def test_a_part_of_a_model_under_a_tag_of_its_own_is_no_drafter(configs: dict[bool, Any]) -> None:
    for tag, is_drafter in (("eagle_head", True), ("draft_model", True), ("self_decoder", False)):
        with set_model_tag(tag):
            layer = make_layer(configs[True])
        assert (layer.is_drafter, layer.appends_in_attention) == (is_drafter, not is_drafter)


def test_profiling_without_a_cache_returns_zeros(configs: dict[bool, Any]) -> None:
    impl = make_layer(configs[True])
    output = torch.full((3, NUM_HEADS, HEAD_SIZE), float("nan"))
    query = torch.randn(3, NUM_HEADS, HEAD_SIZE)
    assert impl.forward(None, query, query, query, torch.tensor([]), None, output).eq(0).all()


def test_unknown_layer_options_are_refused(configs: dict[bool, Any]) -> None:
    with pytest.raises(ConfigError, match="chunk_lookback"):
        make_layer(configs[True], chunk_lookback=4)
    with pytest.raises(ConfigError, match="ENCODER_ONLY"):
        make_layer(configs[True], attn_type=AttentionType.ENCODER_ONLY)


def test_the_platform_refuses_what_the_backend_does_not_support() -> None:
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from rose_backend.vllm_plugin import register

    register()
    good = AttentionSelectorConfig(64, torch.float32, "auto", 16)
    rose = AttentionBackendEnum["ROSE"]
    assert CpuPlatform.get_attn_backend_cls(rose, attn_selector_config=good).endswith("RoseAttentionBackend")
    assert "CPUAttentionBackend" in CpuPlatform.get_attn_backend_cls(AttentionBackendEnum.CPU_ATTN, good)
    assert "CPUAttentionBackend" in CpuPlatform.get_attn_backend_cls(None, good)
    for change, reason in (
        ({"head_size": 60}, "head_size"),
        ({"head_size": 520}, "head_size"),
        ({"dtype": torch.float64}, "dtype not supported"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype float16 with a model in float32"),
        ({"kv_cache_dtype": "fp8", "use_per_head_quant_scales": True}, "per-head quant scales"),
        ({"block_size": 24}, "block_size"),
        ({"use_mla": True}, "MLA"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "ENCODER_ONLY"),
    ):
        with pytest.raises(ConfigError, match=reason):
            CpuPlatform.get_attn_backend_cls(rose, good._replace(**change))


@pytest.mark.parametrize(("capability", "refused"), [((8, 0), True), ((8, 9), False), ((9, 0), False)])
def test_float8_needs_a_gpu_that_converts_it(capability: tuple[int, int], refused: bool) -> None:
    for cache_dtype in ("auto", "fp8", "fp8_e4m3"):
        reasons = RoseAttentionBackend.validate_configuration(
            **AttentionSelectorConfig(64, torch.float16, cache_dtype, 16)._asdict(),
            device_capability=DeviceCapability(*capability),
        )
        if refused and cache_dtype != "auto":
            assert reasons == [f"kv_cache_dtype {cache_dtype} needs compute capability 8.9, this GPU has 8.0"]
        else:
            assert reasons == []


def test_kernels_read_the_sinks_that_vllm_loads(configs: dict[bool, Any]) -> None:
    # Not a copy: vLLM's models load them past any hook.
    loaded = torch.nn.Parameter(torch.zeros(NUM_HEADS, dtype=torch.bfloat16))
    sinks = make_layer(configs[True], sinks=loaded)._options(None, torch.device("cpu")).sinks
    assert sinks is not None and not sinks.requires_grad
    assert sinks.data_ptr() == loaded.data_ptr() and sinks.dtype is torch.bfloat16


def test_specifications_are_marked_and_otherwise_equal() -> None:
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    marked = RoseAttentionBackend.customize_spec(full)
    assert type(marked) is RoseAttentionSpec and marked.page_size_bytes == full.page_size_bytes
    assert type(RoseAttentionSpec.merge([marked, as_rose_spec(full)])) is RoseAttentionSpec
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=8
    )
    assert as_rose_spec(window) is window


def test_layers_of_one_engine_share_scratch_memory_with_no_other(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, config = make_config(), make_config()
    layers = [make_layer(each) for each in (first, first, config, config)]
    assert layers[0].workspace is layers[1].workspace and layers[2].workspace is layers[3].workspace
    assert layers[0].workspace is not layers[2].workspace
    # vLLM copies configurations, one for flashinfer's warm-up for example.
    assert replace(config, cache_config=config.cache_config).cache_config is config.cache_config
    used = []
    monkeypatch.setattr(backend, "attend", lambda *args, **options: used.append(current_workspace()))
    step = Step(STEPS["decodes"])
    attend(layers[0], step, make_builder(config).build(0, step.common_metadata()))
    assert used == [layers[0].workspace]


# What attention layers are told of a step, and what a captured CUDA graph may rely on.
def test_rows_without_tokens_are_padding(make_config: MakeConfig) -> None:
    step = Step(STEPS["decodes"])
    common = step.common_metadata()
    last = common.query_start_loc[-1:]
    common.query_start_loc = common.query_start_loc_cpu = torch.cat((common.query_start_loc, last, last))
    common.seq_lens = torch.cat((common.seq_lens, torch.zeros(2, dtype=torch.int32)))
    common.block_table_tensor = torch.cat((step.table, torch.zeros(2, 8, dtype=torch.int32)))
    common.num_reqs += 2
    builder = make_builder(make_config())
    metadata = builder.build(0, common)
    assert metadata.decode_computed_tokens.tolist() == [0, 15, 16, 40, -1, -1]
    assert metadata.num_decodes == 4 and metadata.num_prefill_tokens == 0


def test_a_step_keeps_the_addresses_that_a_captured_graph_reads(make_config: MakeConfig) -> None:
    builder = make_builder(make_config())
    captured = builder.build_for_cudagraph_capture(Step([(0, 1)] * 4).common_metadata())
    common = Step(STEPS["decodes"]).common_metadata()
    metadata = builder.build(0, common)
    assert metadata.decode_computed_tokens.data_ptr() == captured.decode_computed_tokens.data_ptr()
    assert captured.decode_computed_tokens.tolist() == [0, 15, 16, 40]
    for name in ("query_start_loc", "slot_mapping"):
        assert getattr(metadata, name).data_ptr() == getattr(common, name).data_ptr()
    assert metadata.block_table.data_ptr() == common.block_table_tensor.data_ptr()


@pytest.mark.parametrize(
    ("num_drafts", "support", "threshold"),
    [(0, "UNIFORM_BATCH", 1), (4, "UNIFORM_BATCH", 5), (8, "UNIFORM_SINGLE_TOKEN_DECODE", 1)],
)
def test_what_is_declared_about_graphs_and_drafts(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    num_drafts: int,
    support: str,
    threshold: int,
) -> None:
    config = make_config(speculative_config=n_grams(num_drafts) if num_drafts else None)
    builder = make_builder(config)
    assert builder.reorder_batch_threshold == threshold
    # The torch reference kernels cannot be captured.
    assert builder.get_cudagraph_support(config, None) is AttentionCGSupport.NEVER
    monkeypatch.setattr("vllm.platforms.current_platform.is_cuda", lambda: True)
    assert builder.get_cudagraph_support(config, None) is AttentionCGSupport[support]


def test_rows_with_drafts_are_decodes(make_config: MakeConfig) -> None:
    builder = make_builder(make_config(speculative_config=n_grams(4)))
    metadata = builder.build(0, Step([(20, 5), (37, 1), (0, 3), (3, 30), (0, 17)]).common_metadata())
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.max_decode_query_len) == (3, 9, 5)
    assert (metadata.first_prefill_row, metadata.num_prefill_tokens) == (3, 47)
    assert metadata.prefill_start_loc.tolist() == [0, 30, 47]
    assert metadata.decode_computed_tokens.tolist() == [20, 37, 0, -1, -1]
    assert metadata.prefill_computed_tokens.tolist() == [-1, -1, -1, 3, 0]
    single = builder.build(0, Step(STEPS["decodes"]).common_metadata())
    assert (single.num_decodes, single.num_decode_tokens, single.max_decode_query_len) == (4, 4, 1)
