"""Every kernel of the package on small inputs, on a CPU and on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from rose_backend import kernels
from rose_backend.kernels import embed_tokens
from rose_backend.kernels.arguments import DraftedRows, TokenLimits
from rose_backend.kernels.decode_step.ops import (
    accept_drafts,
    advance_rows,
    end_step,
    look_up_drafts,
    write_block_ids,
)
from rose_backend.kernels.sampling.ops import mask_logits, report_logprobs, write_bitmask
from tests.support.decode_steps import make_case, make_mixed_case, make_sampled, random_writes
from tests.support.expert_cases import make_case as make_experts
from tests.support.linear_cases import random_float8, random_int4
from tests.support.paged_inputs import PagedInputs, build_paged_inputs
from tests.support.quantized_activations import QUANTIZATIONS
from tests.support.sampling_cases import (
    Limited,
    chosen_rows,
    make_limits,
    make_params,
    new_report,
    random_case,
)

Case = Callable[[str], list[torch.Tensor]]
"""Given a device, does the same work there and returns its results."""

HALF, BFLOAT16, FLOAT32, FLOAT8_DTYPE = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
EPS = 1e-5


def moved(inputs: PagedInputs, device: str) -> PagedInputs:
    """Return the inputs on a device, the caches still views of one storage."""
    tensors = {
        field.name: getattr(inputs, field.name).to(device)
        for field in fields(inputs)
        if isinstance(getattr(inputs, field.name), torch.Tensor)
    }
    for name in ("key_cache", "value_cache"):
        view = getattr(inputs, name)
        tensors[name] = tensors["storage"].as_strided(view.shape, view.stride(), view.storage_offset())
    return replace(inputs, **tensors)


def attention(
    lengths: list[int],
    query_lens: list[int] | None = None,
    *,
    prefill: bool = False,
    masked: bool = False,
    **shape: Any,
) -> Case:
    """Decode attention, with one new token per row where ``query_lens`` is None, or prefill attention."""

    def run(device: str) -> list[torch.Tensor]:
        inputs = moved(build_paged_inputs(lengths, query_lens, layout="vllm", **shape), device)
        out = torch.zeros_like(inputs.query)
        options = inputs.options()
        if masked:
            per_head = torch.linspace(-1, 1, inputs.query.shape[1]).to(device)
            options = replace(
                options,
                sinks=per_head.to(inputs.query.dtype),
                alibi_slopes=per_head.abs() / 8,
                sliding_window=133,
                logits_soft_cap=2.0,
            )
        tokens = inputs.query, inputs.new_tokens()
        if prefill:
            kernels.paged_prefill(*tokens, inputs.kv(1), options=options, out=out)
        else:
            kv = inputs.kv(None if query_lens is None else max(query_lens))
            plan = kernels.plan_paged_decode(kv, options=options)
            kernels.paged_decode(*tokens, kv, options=options, out=out, plan=plan)
        return [out, inputs.storage]

    return run


def overlapped_decode(lengths: list[int]) -> Case:
    """Decode attention that starts while the product in front of it still runs."""

    def run(device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(6)
        weight, bias, hidden = (
            torch.randn(shape, generator=generator).half().to(device)
            for shape in ((3 * 768, 768), (3 * 768,), (len(lengths), 768))
        )
        layer = kernels.pack_linear(weight * 768**-0.5, bias)
        inputs = moved(build_paged_inputs(lengths, layout="vllm", **GPT2), device)
        projected = kernels.small_batch_linear(hidden, layer).view(len(lengths), 36, 64)
        query, key, value = projected.split(12, dim=1)
        out = torch.zeros_like(inputs.query)
        options = kernels.AttentionOptions(0.125)
        new = kernels.NewTokens(key, value)
        kernels.paged_decode(query, new, inputs.kv(), options=options, out=out, overlap=True)
        return [out, inputs.storage]

    return run


def write_kv(**shape: Any) -> Case:
    """Slots of three rows, one of them padding."""

    def run(device: str) -> list[torch.Tensor]:
        inputs = moved(
            build_paged_inputs([5, 0, -1], [9, 1, 2], head_size=80, layout="vllm", **shape), device
        )
        kernels.write_kv(
            inputs.new_key,
            inputs.new_value,
            inputs.key_cache,
            inputs.value_cache,
            inputs.slot_mapping,
            key_scale=inputs.key_scale,
            value_scale=inputs.value_scale,
        )
        return [inputs.storage]

    return run


def clone(pairs: list[tuple[int, int]], *, ids_on_device: bool) -> Case:
    """Copy blocks of several layers."""

    def run(device: str) -> list[torch.Tensor]:
        cache = torch.randn(3, 2, 9, 16, 3, 64, generator=torch.Generator().manual_seed(0)).half().to(device)
        ids = torch.tensor(pairs, dtype=torch.int32, device=device if ids_on_device else "cpu")
        kernels.block_clone(cache, *ids.unbind(1), block_dim=2)
        return [cache]

    return run


def norms(num_tokens: int, width: int) -> Case:
    """Norms with and without the residual add, and the element-wise parts of MLPs."""

    def run(device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        x, residual = torch.randn(2, num_tokens, width, generator=generator).half().to(device)
        weight, bias = torch.randn(2, width, generator=generator).half().to(device)
        return [
            kernels.layer_norm(x, weight, bias, EPS),
            *kernels.add_layer_norm(x, residual, weight, bias, EPS),
            kernels.rms_norm(x, weight, EPS),
            *kernels.add_rms_norm(x, residual, weight, EPS),
            *kernels.add_rms_norm(torch.stack((x, residual)), residual, weight, EPS),
            kernels.bias_gelu(x.clone(), bias),
            kernels.bias_residual(x.clone(), bias, residual),
            kernels.silu_mul(torch.cat((x, residual), 1)),
            kernels.silu_mul(torch.cat((x, residual), 1), alternating=True),
        ]

    return run


def quantized(num_tokens: int, width: int) -> Case:
    """Norms and activations that are quantized. Numbers at the border of two round otherwise on a CPU."""

    def run(device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        x, residual = torch.randn(2, num_tokens, width, generator=generator).bfloat16().to(device)
        gate_up, found = torch.cat((x, residual), 1), []
        for quantization in QUANTIZATIONS:
            found += [
                kernels.rms_norm_quantized(x, None, residual[0], EPS, quantization)[0],
                kernels.rms_norm_quantized(x, residual, residual[0], EPS, quantization)[0],
                kernels.silu_mul_quantized(gate_up, quantization),
                kernels.silu_mul_quantized(gate_up, quantization, alternating=True),
                kernels.quantize(gate_up[:, :width], quantization),
            ]
        return [
            (values.float().unflatten(1, (scales.shape[1], -1)) * scales[:, :, None]).bfloat16()
            for values, scales in ((each.values, each.scales) for each in found)
        ]

    return run


def rotary(num_tokens: int, heads: int, kv_heads: int, size: int, rotated: int) -> Case:
    """Rotary positions of query and key in one projection, then again behind norms of their heads."""

    def run(device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(8)
        positions = torch.randint(0, 50, (num_tokens,), generator=generator).to(device)
        table = torch.randn(50, rotated, generator=generator).to(device)
        norms = torch.randn(2, size, generator=generator).half().to(device)
        width = (heads + 2 * kv_heads) * size
        projected = torch.randn(num_tokens, width, generator=generator).half().to(device)
        both = projected.unflatten(1, (-1, size))
        pair = both[:, :heads], both[:, heads : heads + kv_heads]
        kernels.rotate_query_key(*pair, positions, kernels.HeadRotation(table))
        kernels.rotate_query_key(*pair, positions, kernels.HeadRotation(table, *norms, EPS))
        return [projected]

    return run


def differences(left: kernels.NormInput | None, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Return how far off is what a kernel left to a norm: a CPU's hidden states are themselves as far off."""
    assert left is not None
    plain = kernels.norm_input_of(hidden, left.norm)
    moments, expected = left.moments.sum(2), plain.moments.sum(2)
    # A sum is as exact as the sum of squares is large.
    return [left.scaled - plain.scaled, (moments - expected) / expected[:, 1:].clamp(min=1.0)]


def adapters(slots: list[int], rank: int, *widths: int) -> Case:
    """LoRA adapters of rows added to a product, of two slices with columns in turns."""

    def run(device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(9)

        def draw(*shape: int) -> torch.Tensor:
            return (0.1 * torch.randn(shape, generator=generator)).half().to(device)

        slices = [(draw(3, rank, 603), draw(3, width, rank)) for width in widths]
        x, out = draw(len(slots), 603), draw(len(slots), sum(widths))
        kernels.add_adapters(
            x,
            kernels.Adapters(*zip(*slices, strict=True)),
            kernels.adapter_rows(torch.tensor(slots, device=device)),
            out,
            alternating=len(widths) == 2,
        )
        return [out]

    return run


def linear(
    num_rows: int,
    depth: int,
    columns: int,
    *,
    norm: bool,
    gated: bool = False,
    quantized: str = "",
    dtype: torch.dtype = HALF,
) -> Case:
    """A small-batch product with a norm and GELU, or with a residual; if gated, an RMSNorm and no bias.

    With ``quantized`` the weight is in 8 bits, with scales of "rows" or "blocks", or in 4, with scales and zeros of as
    many columns.
    """

    def run(device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(2)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)

        weight, bias = random(columns, depth, scale=depth**-0.5), random(columns)
        norm_weight, norm_bias = (random(depth), random(depth)) if norm else (None, None)
        if gated:
            bias = norm_bias = None
        if quantized:
            in_few_bits: kernels.Float8Weight | kernels.Int4Weight
            if quantized.isdecimal():
                in_few_bits, _ = random_int4(
                    columns, depth, generator, int(quantized), zeros=True, device=device
                )
            else:
                blocks = quantized == "blocks"
                in_few_bits = random_float8(columns, depth, generator, blocks=blocks, device=device)
            layer = kernels.pack_linear(in_few_bits, bias, gated=gated)
            hidden = random(num_rows, depth)
            return [
                kernels.small_batch_linear(hidden, layer),
                kernels.quantized_linear(hidden, in_few_bits, bias),
            ]
        folded = {} if norm_bias is None else {"norm_weight": norm_weight, "norm_bias": norm_bias}
        layer = kernels.pack_linear(weight, bias, **folded, gated=gated)
        hidden = random(num_rows, depth)
        if norm_weight is not None:
            before = kernels.PackedNorm(None, EPS) if folded else kernels.pack_norm(norm_weight, EPS)
            x = kernels.norm_input_of(hidden, before)
            return [kernels.small_batch_linear(x, layer, gelu=not gated)]
        residual = random(num_rows, layer.num_outputs)
        after = kernels.pack_norm(random(layer.num_outputs), EPS)
        result, left = kernels.small_batch_linear_before_norm(hidden, layer, after, residual=residual)
        return [result, *differences(left, result)]

    return run


def experts(num_tokens: int, *, float8: bool = False) -> Case:
    """A mixture of experts behind an RMSNorm, of shapes that no tile divides."""

    def run(device: str) -> list[torch.Tensor]:
        case = make_experts(num_tokens, 9, 3, 136, 72, HALF, norm=True, float8=float8)
        gate_up, down = (
            kernels.Float8Experts(each.values.to(device), each.scales.to(device))
            if isinstance(each, kernels.Float8Experts)
            else each.to(device)
            for each in (case.experts.gate_up, case.experts.down)
        )
        weights = replace(case.experts, gate_up=gate_up, down=down)
        assert case.norm is not None and case.norm.weight is not None
        before, after = (
            kernels.pack_norm(each.weight.to(device), EPS) for each in (case.norm, case.next_norm)
        )
        x = kernels.norm_input_of(case.x.to(device), before)
        result, left = kernels.expert_mlp(x, case.router_logits.to(device), weights, next_norm=after)
        return [result, *differences(left, result)]

    return run


def sampler(num_rows: int, vocab_size: int) -> Case:
    """Rows with every mix of filters and penalties."""

    def run(device: str) -> list[torch.Tensor]:
        logits, params = random_case(num_rows, vocab_size, seed=3)
        output = kernels.sample(logits.to(device), chosen_rows(params, device=device))
        return [output.token_ids, output.logprob, output.top_logprobs]

    return run


def greedy(device: str) -> list[torch.Tensor]:
    """Rows that need no draw."""
    logits = torch.randn(5, 1009, generator=torch.Generator().manual_seed(4))
    params = chosen_rows(make_params(5, temperature=0.0), device=device)
    return [kernels.sample(logits.to(device), params).token_ids]


def report(device: str) -> list[torch.Tensor]:
    """Log-probabilities of tokens that were chosen elsewhere, of rows that ask for 0 to 3 more, and of one for none."""
    logits = torch.randn(5, 5003, generator=torch.Generator().manual_seed(6)).to(device)
    token_ids = torch.tensor([0, 5002, 77, 1024, 9], device=device)
    counts = torch.tensor([0, 3, 1, -1, 2], dtype=torch.int32, device=device)
    written = new_report(5, 4, device)
    report_logprobs(logits, token_ids, counts, written)
    return [written.token_ids, written.logprobs, written.ranks]


def mask(device: str) -> list[torch.Tensor]:
    """Logits behind masks: two rows have the same one, one has none."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(4, 5003, generator=generator).to(device)
    bits = torch.randint(-(2**31), 2**31 - 1, (2, 157), generator=generator, dtype=torch.int32).to(device)
    mask_logits(logits, bits, torch.tensor([1, -1, 0, 1], dtype=torch.int32, device=device))
    return [logits]


def bitmask(device: str) -> list[torch.Tensor]:
    """Allowed tokens, stop tokens and bad words of two rows, and a row without any."""
    limits = make_limits(
        [
            Limited([5, 6, 7], 5, [3, 999], [], [[8], [6, 7, 9]]),
            Limited([5, 6, 7], 0, [3], [9, 8, 40], [[7, 9], [8]]),
        ]
    )
    written = torch.zeros(2, 32, dtype=torch.int32, device=device)
    rows = [torch.tensor(each, device=device) for each in ([1, -1, 0], [3, 9, 3])]
    on_device = TokenLimits(*(table.to(device) for table in limits))
    write_bitmask(written, rows[0].int(), rows[1], on_device)
    return [written]


def step_ends(device: str) -> list[torch.Tensor]:
    """Embeddings at the start of a decode step, and the new tokens' way into the next one; one row is padding."""
    token_ids, lengths = torch.tensor([5, 9, 2, 40, 7]), torch.tensor([7, -1, 0, 300, 16], dtype=torch.int32)
    positions = lengths.clamp(min=0).long()
    state = [token_ids, torch.zeros(5, dtype=torch.int64), lengths, positions, positions + 1]
    state += [torch.zeros(4, 6, dtype=torch.int64), torch.tensor([9])]
    state = [tensor.to(device) for tensor in state]
    advance_rows(*state)
    generator = torch.Generator().manual_seed(7)
    tables = [torch.randn(rows, 257, generator=generator).half().to(device) for rows in (41, 302)]
    norm = kernels.pack_norm(torch.randn(257, generator=generator).half().to(device), EPS)
    for added, next_norm in ((tables[1], kernels.PackedNorm(None, EPS)), (None, norm)):
        hidden, left = embed_tokens(state[1], state[3], tables[0], added, next_norm=next_norm)
        state += [hidden, *differences(left, hidden)]
    return state


def drafts_of_a_step(device: str) -> list[torch.Tensor]:
    """A lookup in several parts of a text, and drafts of which some are right; one row is padding."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.tensor([7, -1, 0, 2098, 16], dtype=torch.int32, device=device)
    token_ids = torch.randint(3, (6, 2100), generator=generator, dtype=torch.int32).to(device)
    slots = torch.tensor([4, 5, 0, 1, 3], device=device)
    positions = lengths.clamp(min=0).long()
    rows = DraftedRows(
        slots, token_ids, token_ids[slots, positions].long(), lengths, positions, positions + 1
    )
    drafts = look_up_drafts(rows, num_drafts=3, min_n=1, max_n=4)
    drawn = torch.randint(3, (5, 4), generator=generator).to(device)
    history, step_index = (
        torch.zeros(4, 4, 6, dtype=torch.int64, device=device),
        torch.tensor([9], device=device),
    )
    accept_drafts(drawn, drafts, rows, history, step_index)
    return [drafts, *rows, history, step_index]


def mixed_step(*block_sizes: int) -> Case:
    """Both ends of a step with prompts, with rows and tokens of padding."""

    def run(device: str) -> list[torch.Tensor]:
        case = make_mixed_case([1, 1, 2, 150], 7, 200, block_sizes=block_sizes, device=device)
        case.begin()
        end_step(case.slots, case.tokens, case.state, case.rows)
        return [value for value in case.tensors().values() if isinstance(value, torch.Tensor)]

    return run


def step_with_drafts(num_drafts: int) -> Case:
    """Both ends of a step of decodes with drafts, with rows and tokens of padding."""

    def run(device: str) -> list[torch.Tensor]:
        counts = [num_drafts + 1] * 5
        case = make_mixed_case(counts, 7, 9 * (num_drafts + 1), num_drafts=num_drafts, device=device)
        case.begin()
        tokens, num_sampled = make_sampled(case, num_drafts)
        end_step(case.slots, tokens, case.state, num_sampled=num_sampled)
        return [value for value in case.tensors().values() if isinstance(value, torch.Tensor)]

    return run


def steady_decode(*block_sizes: int, num_states: int = 0) -> Case:
    """Both ends of a decode step over slots, with rows that have no request, and block ids written in front."""

    def run(device: str) -> list[torch.Tensor]:
        case = make_case(5, 7, block_sizes=block_sizes, num_states=num_states, device=device)
        write_block_ids(random_writes(case, 40)[0], case.groups)
        case.begin()
        end_step(case.slots, case.tokens, case.state)
        return [value for value in case.tensors().values() if isinstance(value, torch.Tensor)]

    return run


GPT2 = {"num_query_heads": 12, "num_kv_heads": 12, "head_size": 64, "block_size": 16, "dtype": HALF}
GROUPED = {"num_query_heads": 8, "num_kv_heads": 2, "head_size": 128, "block_size": 16, "dtype": BFLOAT16}
ODD = {"num_query_heads": 4, "num_kv_heads": 2, "head_size": 80, "block_size": 48, "dtype": FLOAT32}
FLOAT8 = {"cache_dtype": FLOAT8_DTYPE, "key_scale": 0.7, "value_scale": 1.3}
LENGTHS = [0, 15, 16, -1, 130, 700]

CASES: dict[str, Case] = {
    "decode GPT-2": attention(LENGTHS, **GPT2),
    "decode, whole rows": attention([0, 15, 16, -1, 130, 300], **GPT2),
    "decode, short rows": attention([3, -1, 5], **GPT2),
    "decode, one row": attention([700], **GPT2),
    "decode, 100 rows": attention([*[0, 5, 40, -1] * 25, 700], **GPT2),
    "decode, 180 rows": attention([*[17, 0, -1] * 60, 330], **GPT2),
    "decode, overlapped": overlapped_decode(LENGTHS),
    "decode, overlapped, one row": overlapped_decode([700]),
    "decode grouped": attention([3, 1500], **GROUPED),
    "decode masked": attention([3, 1500], masked=True, **GROUPED),
    "decode odd": attention(LENGTHS, **ODD),
    "decode odd, several tokens": attention([0, 14, -1, 300], [4, 3, 2, 0], **ODD),
    "decode several tokens": attention([0, 14, -1, 300], [4, 3, 2, 0], **GPT2),
    "decode float8": attention(LENGTHS, **GPT2, **FLOAT8),
    "prefill GPT-2": attention([0, 40, -1, 16], [130, 33, 2, 1], prefill=True, **GPT2),
    "prefill grouped": attention([0, 200], [70, 40], prefill=True, **GROUPED),
    "prefill masked": attention([0, 200], [70, 40], prefill=True, masked=True, **GROUPED),
    "prefill odd": attention([7, 0], [33, 17], prefill=True, **ODD),
    "prefill float8": attention([0, 40], [70, 33], prefill=True, **GPT2, **FLOAT8),
    "write_kv": write_kv(),
    "write_kv float8": write_kv(**FLOAT8),
    "clone, independent": clone([(1, 5), (2, 6), (3, 0)], ids_on_device=False),
    "clone, cycle": clone([(1, 2), (2, 3), (3, 1), (8, 0)], ids_on_device=True),
    "norms": norms(5, 768),
    "norms, odd": norms(3, 129),
    "norms, quantized": quantized(5, 1152),
    "rotary": rotary(5, 32, 8, 128, 128),
    "rotary, odd": rotary(3, 7, 1, 80, 48),
    "adapters, 1 row": adapters([2], 5, 43),
    "adapters, tiles with and without": adapters([-1] * 20 + [0, 2, -1] * 6, 16, 43, 21, 21),
    "adapters, columns in turns": adapters([1, 0, 2, 2, -1], 33, 70, 70),
    "adapters, long prompts": adapters([0] * 290 + [2] * 9, 8, 70, 70),
    "linear, 1 row": linear(1, 801, 203, norm=True),
    "linear, 5 rows": linear(5, 801, 203, norm=True),
    "linear, split": linear(5, 3072, 203, norm=False),
    "linear, 33 rows": linear(33, 801, 203, norm=False),
    "linear, gated": linear(5, 801, 206, norm=True, gated=True),
    "linear, float8 rows": linear(5, 801, 206, norm=False, gated=True, quantized="rows"),
    "linear, float8 blocks": linear(17, 3072, 206, norm=False, quantized="blocks"),
    "linear, float8 blocks, gated": linear(5, 801, 256, norm=False, gated=True, quantized="blocks"),
    "linear, float8 of split activations": linear(
        17, 3072, 206, norm=False, quantized="blocks", dtype=torch.bfloat16
    ),
    "linear, int4": linear(5, 384, 206, norm=False, gated=True, quantized="128"),
    "linear, int4, split": linear(17, 3072, 206, norm=False, quantized="32"),
    "linear, gated, split": linear(17, 3072, 206, norm=False, gated=True),
    "experts, 2 tokens": experts(2),
    "experts, 70 tokens": experts(70),
    "experts, float8, 2 tokens": experts(2, float8=True),
    "experts, float8, 70 tokens": experts(70, float8=True),
    "sampler": sampler(24, 5003),
    "sampler, large": sampler(3, 50_257),
    "greedy": greedy,
    "report": report,
    "mask": mask,
    "bitmask": bitmask,
    "ends of a step": step_ends,
    "drafts of a step": drafts_of_a_step,
    "mixed step": mixed_step(16),
    "mixed step, groups": mixed_step(16, 48, 16),
    "step with drafts": step_with_drafts(3),
    "steady decode": steady_decode(16),
    "steady decode, groups": steady_decode(16, 48, 16),
    "steady decode, states": steady_decode(16, num_states=2),
}
