"""Kernels compiled for three generations of GPUs that need not be there; those of attention and products are apart."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from rose_backend.kernels import PackedNorm, pack_norm
from rose_backend.kernels.arguments import CACHE_DTYPE, DraftedRows, LogprobReport
from rose_backend.kernels.decode_step import drafts, steps
from rose_backend.kernels.experts import expert_mlp
from rose_backend.kernels.kv import cache_writes
from rose_backend.kernels.pointwise import elementwise
from rose_backend.kernels.pointwise import elementwise as rotary
from rose_backend.kernels.sampling import bitmask, sampler
from tests.support import decode_steps, expert_cases, rotations, sampling_cases
from tests.support.aot import CAPABILITIES, compile_launch, compiles, overlapped, record_launches
from tests.support.quantized_activations import QUANTIZATIONS
from tests.support.rotations import MODEL_HEADS
from tests.support.sampling_cases import Limited

HALF_DTYPES = (torch.float16, torch.bfloat16)


@compiles("_bias_kernel", "_silu_mul_kernel", "_norm_kernel")
def test_pointwise_kernels(capability: int) -> None:
    with record_launches(elementwise, "_bias_kernel", "_silu_mul_kernel", "_norm_kernel") as launches:
        for dtype in HALF_DTYPES:
            x, bias = torch.empty(4, 3072, dtype=dtype), torch.empty(3072, dtype=dtype)
            elementwise.bias_gelu(x, bias)
            elementwise.bias_residual(x, bias, x)
            elementwise.silu_mul(x)
            elementwise.silu_mul(x, alternating=True)
            for width in (768, 16_384):
                x, weight = torch.empty(4, width, dtype=dtype), torch.empty(width, dtype=dtype)
                elementwise.add_layer_norm(x, x, weight, weight, 1e-5)
        elementwise.rms_norm(x, weight, 1e-5)
        x, weight = torch.empty(2, 4, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
        elementwise.add_rms_norm(x, x[0], weight, 1e-5)
    assert len(launches) == 14
    for recorded in launches:
        is_norm = recorded.kernel.__name__ == "_norm_kernel"
        resources = compile_launch(overlapped(recorded, capability) if is_norm else recorded, capability)
        assert "ld.global.v4.b32" in resources.ptx and "st.global.v4.b32" in resources.ptx


@compiles("_silu_mul_kernel", "_norm_kernel", "_quantize_kernel", capabilities=(90, 100))
def test_kernels_that_quantize(capability: int) -> None:
    weight = torch.empty(28_672, dtype=torch.bfloat16)
    with record_launches(elementwise, "_silu_mul_kernel", "_norm_kernel", "_quantize_kernel") as launches:
        for quantization in QUANTIZATIONS:
            for width in (4096, 5120, 8192):
                x = torch.empty(4, width, dtype=torch.bfloat16)
                elementwise.rms_norm_quantized(x, x, weight[:width], 1e-5, quantization)
                elementwise.quantize(x, quantization)
            for width in (12_288, 14_336, 28_672):
                x = torch.empty(4, 2 * width, dtype=torch.bfloat16)
                elementwise.silu_mul_quantized(x, quantization, alternating=width == 14_336)
    assert len(launches) == 27
    for recorded in launches:
        ptx = compile_launch(overlapped(recorded, capability), capability).ptx
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx and "st.global.v2.b32" in ptx and "div.rn.f32" in ptx
        # Nothing changes places before the sum of squares, which is so of the same order as without.
        before, norms, _ = ptx.partition("rsqrt.approx")
        assert not norms or "st.shared.v" not in before


@compiles("_rotate_kernel")
def test_rotations(capability: int) -> None:
    with record_launches(rotary, "_rotate_kernel") as launches:
        for heads in MODEL_HEADS:
            for dtype in HALF_DTYPES if heads is MODEL_HEADS[0] else (torch.bfloat16,):
                for norms in (False, True):
                    case = rotations.make_case(2, heads, dtype, norms=norms)
                    # Rows of a model's own projection.
                    width = case.projected.shape[1] - 5
                    case.projected = case.projected[:, :width].contiguous()
                    rotary.rotate_query_key(*case.query_key(), case.positions, case.rotation())
    assert len(launches) == 10
    for recorded in launches:
        resources = compile_launch(overlapped(recorded, capability), capability)
        if recorded.arguments["HALF"] == 64:
            assert "ld.global.v4.b32" in resources.ptx and "st.global.v4.b32" in resources.ptx
        assert ("griddepcontrol.wait" in resources.ptx) == (capability >= 90)


@compiles("_begin_mixed_kernel")
def test_ends_of_a_step_with_prompts(capability: int) -> None:
    with record_launches(steps, "_begin_mixed_kernel", "_end_kernel") as launches:
        for num_rows, num_tokens, num_drafts in ((8, 200, 0), (9, 333, 0), (8, 200, 1), (8, 200, 3)):
            case = decode_steps.make_mixed_case(
                [1, 1, 150], num_rows, num_tokens, block_sizes=(16, 48), num_drafts=num_drafts
            )
            sizes = num_tokens, 150
            steps.begin_mixed_step(
                case.rows, case.state, case.inputs, case.groups, case.computed_tokens, sizes, 9
            )
            if num_drafts:
                tokens, num_sampled = decode_steps.make_sampled(case, num_drafts)
                steps.end_step(case.slots, tokens, case.state, num_sampled=num_sampled)
            else:
                steps.end_step(case.slots, case.tokens, case.state, case.rows)
    assert [launch.grid for launch in launches[::2]] == [(9, 2, 2), (10, 2, 2), *[(9, 2, 2)] * 2]
    for recorded in launches:
        compile_launch(recorded, capability)


@compiles("_look_up_kernel", "_draft_kernel", "_accept_kernel")
def test_drafts(capability: int) -> None:
    tokens = torch.zeros(256, dtype=torch.int64)
    token_ids, history = torch.zeros(257, 40960, dtype=torch.int32), torch.zeros(8, 8, 256, dtype=torch.int64)
    rows = DraftedRows(tokens, token_ids, tokens, tokens.int(), tokens, tokens)
    names = ("_look_up_kernel", "_draft_kernel", "_accept_kernel")
    with record_launches(drafts, *names) as launches:
        for num_drafts in (1, 3, 7):
            proposed = drafts.look_up_drafts(rows, num_drafts, 2, 5)
            drawn = torch.zeros(256, num_drafts + 1, dtype=torch.int64)
            drafts.accept_drafts(drawn, proposed, rows, history, tokens[:1])
        drafts.accept_drafts(drawn[:, :1].contiguous(), proposed[:, :0], rows, history, tokens[:1])
    assert [launch.grid for launch in launches[:3]] == [(256, 32), (256,), (1,)]
    for recorded in launches:
        compile_launch(recorded, capability)


@compiles("_embed_tokens_kernel", "_advance_rows_kernel", "_begin_kernel", "_end_kernel", "_write_kernel")
def test_ends_of_a_decode_step(capability: int) -> None:
    tokens = torch.zeros(256, dtype=torch.int64)
    table = torch.zeros(300, 768, dtype=torch.float16)
    out, history = torch.empty_like(table[:256]), torch.zeros(8, 256, dtype=torch.int64)
    with record_launches(elementwise, "_embed_tokens_kernel") as launches:
        elementwise.embed_tokens(tokens, tokens, table, table, out, PackedNorm(None, 1e-5))
        elementwise.embed_tokens(tokens, tokens, table, None, out, pack_norm(table[0], 1e-5))
        elementwise.embed_tokens(tokens.int(), tokens, table, None, out)
    with record_launches(steps, "_advance_rows_kernel") as more:
        steps.advance_rows(tokens, tokens, tokens.int(), tokens, tokens, history, tokens[:1])
    for recorded in [*launches, *more]:
        compile_launch(overlapped(recorded, capability), capability)

    def begin(case: decode_steps.Case) -> None:
        steps.begin_decode_step(case.slots, case.state, case.inputs, case.groups, decode_steps.NUM_SLOTS)

    with record_launches(steps, "_begin_kernel", "_end_kernel", "_write_kernel") as launches:
        for num_rows in (4, 7, 300):
            case = decode_steps.make_case(3, num_rows)
            begin(case)
            steps.end_step(case.slots, case.tokens, case.state)
        case = decode_steps.make_case(3, 4, block_sizes=(16, 48), counts=False)
        begin(case)
        steps.write_block_ids(decode_steps.random_writes(case, 5)[0], case.groups)
        steps.end_step(case.slots, case.tokens, case.state)
        begin(decode_steps.make_case(3, 4, num_states=2))
    assert len(launches) == 10
    grids = [launch.grid for launch in launches if launch.kernel is launches[0].kernel]
    assert grids == [(4,), (7,), (300,), (4, 2), (4, 3)]
    for recorded in launches:
        compile_launch(recorded, capability)


@compiles("_write_kv_kernel")
def test_stores(capability: int) -> None:
    new, slots = torch.empty(64, 12, 64, dtype=torch.float16), torch.empty(64, dtype=torch.int64)
    caches = [(torch.empty(4, 16, 12, 64, dtype=torch.float16), None, "st.global.v4")]
    if capability >= 90:
        caches.append((torch.empty(4, 16, 12, 64, dtype=CACHE_DTYPE), torch.ones(1), "st.global.v2"))
    for cache, scale, wide_store in caches:
        with record_launches(cache_writes, "_write_kv_kernel") as launches:
            cache_writes.write_kv(new, new, cache, cache, slots, key_scale=scale, value_scale=scale)
        resources = compile_launch(launches[0], capability)
        assert wide_store in resources.ptx, "the stores are not 8 elements wide"


@compiles("_block_clone_kernel")
def test_clones_by_words_of_16_bytes(capability: int) -> None:
    cache = torch.empty(4, 2, 600, 16, 4, 64, dtype=torch.float16)
    with record_launches(cache_writes, "_block_clone_kernel") as launches:
        for num_pairs, independent in ((256, True), (256, False), (8192, False)):
            ids = torch.zeros(num_pairs, dtype=torch.int32)
            cache_writes.block_clone(cache, ids, ids, block_dim=2, independent=independent)
    for recorded in launches:
        resources = compile_launch(recorded, capability)
        assert "ld.global.v2.b64" in resources.ptx and "st.global.v2.b64" in resources.ptx


@compiles("_choose_experts_kernel", "_expert_product_kernel", "_add_experts_kernel")
@pytest.mark.parametrize(
    ("dtype", "float8"),
    [
        (torch.float16, False),
        (torch.float32, False),
        *((dtype, True) for dtype in (torch.float16, torch.bfloat16, torch.float32)),
    ],
    ids=str,
)
@pytest.mark.parametrize("numbers", [(1, 10), (20, 125), (40, 140)], ids=str)
def test_experts(numbers: tuple[int, int], dtype: torch.dtype, float8: bool, capability: int) -> None:
    can_use_tma = capability >= 90
    for num_tokens in numbers:
        # Qwen3 30B-A3B's, but for the number of experts, which takes memory: with 128 eight times as many tokens have
        # the same tiles.
        case = expert_cases.make_case(
            num_tokens, 16, 8, 2048, 768, dtype, norm=num_tokens <= 128, float8=float8, has_values=False
        )
        with (
            record_launches(expert_mlp, "_choose_experts_kernel") as choices,
            record_launches(expert_mlp, "_expert_product_kernel") as products,
            record_launches(expert_mlp, "_add_experts_kernel") as sums,
            mock.patch.object(expert_mlp, "can_use_tma", lambda matrix: can_use_tma),
            mock.patch.object(expert_mlp, "has_dependent_launch", lambda device: can_use_tma),
        ):
            expert_mlp.expert_mlp(
                case.given(),
                case.router_logits,
                replace(case.experts, top_k=8, renormalize=True),
                residual=case.residual,
                out=torch.empty_like(case.x),
                next_norm=case.next_norm if case.norm else None,
            )
        for recorded in choices + products + sums:
            resources = compile_launch(recorded, capability)
            assert resources.shared_bytes <= (227 << 10 if can_use_tma else 99 << 10)
            assert ("griddepcontrol.wait" in resources.ptx) == can_use_tma
            if "product" in recorded.kernel.__name__:
                # What one has counted the other waits for: in the interpreter programs run one after the other.
                is_first = recorded.arguments["GATED"]
                assert ("gpu.release" in resources.ptx) == is_first
                assert ("gpu.acquire" in resources.ptx) != is_first
            if can_use_tma and "product" in recorded.kernel.__name__:
                # The second product reads what the first one's programs have counted, and waits when it has stored.
                is_last = resources.ptx.index("griddepcontrol.wait") > resources.ptx.rindex("st.global")
                assert is_last != recorded.arguments["GATED"]


@compiles("_scan_kernel", "_choose_kernel")
def test_sampler(capability: int) -> None:
    logits = torch.zeros(1, 50_257)
    everything = sampling_cases.make_params(
        1,
        prompt_mask=torch.zeros(1, 50_257, dtype=torch.bool),
        output_counts=torch.zeros(1, 50_257, dtype=torch.int32),
        processors=sampling_cases.make_processors(50_257, {5: 1.0}),
        num_logprobs=3,
    )
    with record_launches(sampler, "_scan_kernel", "_choose_kernel") as launches:
        sampler.sample(logits, everything)
    assert len(launches) == 2
    for recorded in launches:
        compile_launch(overlapped(recorded, capability), capability)


@compiles("_summarize_kernel", "_report_kernel")
def test_reports(capability: int) -> None:
    tokens, counts = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    for dtype in (torch.float32, *HALF_DTYPES):
        logits = torch.zeros(2, 151_936, dtype=dtype)
        report = LogprobReport(torch.zeros(2, 21, dtype=torch.int64), torch.zeros(2, 21), tokens)
        with record_launches(sampler, "_summarize_kernel", "_report_kernel") as launches:
            sampler.report_logprobs(logits, tokens, counts, report)
        assert len(launches) == 2
        for recorded in launches:
            assert compile_launch(recorded, capability).spill_bytes == 0


@compiles("_mask_kernel")
def test_masks(capability: int) -> None:
    bitmask, mask_rows = torch.zeros(2, 4748, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    for dtype in (torch.float32, *HALF_DTYPES):
        with record_launches(sampler, "_mask_kernel") as launches:
            sampler.mask_logits(torch.zeros(2, 151_936, dtype=dtype), bitmask, mask_rows)
        assert compile_launch(launches[0], capability).spill_bytes == 0


@compiles("_bitmask_kernel")
def test_bitmasks(capability: int) -> None:
    limits = sampling_cases.make_limits([Limited([1], 0, [], [], [])], (129, 1024, 128, 1024))
    with record_launches(bitmask, "_bitmask_kernel") as launches:
        bitmask.write_bitmask(
            torch.zeros(1, 4748, dtype=torch.int32), limits.lengths[0, :1], limits.drawn_token_ids[0], limits
        )
    assert compile_launch(launches[0], capability).spill_bytes == 0


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("stride", "is_aligned"), [(50_304, True), (50_257, False)])
def test_aligned_logits_are_loaded_four_at_a_time(capability: int, stride: int, is_aligned: bool) -> None:
    logits = torch.zeros(2, stride)[:, :50_257]
    with record_launches(sampler, "_scan_kernel", "_choose_kernel") as launches:
        sampler.sample(logits, sampling_cases.make_params(2))
    resources = compile_launch(overlapped(launches[0], capability), capability)
    assert resources.spill_bytes == 0
    assert ("ld.global.v4" in resources.ptx) == is_aligned
