"""Embeddings, norms and the element-wise parts of MLPs: against float64, within twice plain torch's own error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rose_backend.conformance.error_budget import assert_within_budget
from rose_backend.errors import ShapeError
from rose_backend.kernels import (
    InputQuantization,
    PackedNorm,
    QuantizedActivations,
    add_layer_norm,
    add_rms_norm,
    bias_gelu,
    bias_residual,
    embed_tokens,
    layer_norm,
    pack_norm,
    quantize,
    rms_norm,
    rms_norm_quantized,
    silu_mul,
    silu_mul_quantized,
)
from tests.support.implementations import DTYPES, GPU, Implementation, each_dtype, kernels_only
from tests.support.moments import check_left
from tests.support.quantized_activations import (
    ADVERSARIAL,
    QUANTIZATIONS,
    gated,
    quantized_as_vllm,
    rounded_as_gpus,
)

EPS = 1e-5
SHAPES = [(1, 128), (3, 7), (5, 768), (0, 16), (2, 1500), (2, 1)]
LARGE_SHAPES = [(257, 768), (5, 3072), (2, 5000), (33, 129)]


def make(num_tokens: int, width: int, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Return two matrices and two vectors."""
    generator = torch.Generator().manual_seed(num_tokens + width)
    shapes = [(num_tokens, width)] * 2 + [(width,)] * 2
    x, residual, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return tuple(each.to(device, dtype) for each in (x * 2 + 1, residual * 2 + 1, weight, bias))


def exact_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = EPS
) -> torch.Tensor:
    centred = x.double() - x.double().mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + eps).sqrt() * weight.double() + bias.double()


def exact_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def in_place(function: Callable[..., torch.Tensor], x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """Require that the function writes to ``x`` and returns it."""
    assert function(x, *rest) is x
    return x


def check_norms(call: Implementation, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, _, weight, bias = make(*shape, dtype, call.device)
    before = x.clone()
    normed = call(layer_norm, x, weight, bias, EPS)
    torch_result = F.layer_norm(x, weight.shape, weight, bias, EPS)
    assert_within_budget(normed, exact_layer_norm(x, weight, bias), torch_result)
    normed = call(rms_norm, x, weight, EPS)
    assert_within_budget(normed, exact_rms_norm(x, weight), F.rms_norm(x, weight.shape, weight, EPS))
    assert normed.dtype == dtype and torch.equal(x, before)


def check_norms_of_sums(call: Implementation, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, weight, bias = make(*shape, dtype, call.device)
    before = x.clone(), residual.clone()
    exact_sum, rounded = x.double() + residual.double(), x + residual
    for function, plain, arguments, exact, torch_norm in (
        (add_layer_norm, layer_norm, (weight, bias, EPS), exact_layer_norm(exact_sum, weight, bias), F.layer_norm),
        (add_rms_norm, rms_norm, (weight, EPS), exact_rms_norm(exact_sum, weight), F.rms_norm),
    ):  # fmt: skip
        normed, total = call(function, x, residual, *arguments)
        assert_within_budget(normed, exact, torch_norm(rounded, weight.shape, *arguments))
        assert torch.equal(total, rounded)
        if call is not GPU:
            # The same as in two steps.
            assert torch.equal(normed, call(plain, total, *arguments))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def check_norms_of_parts(call: Implementation, shape: tuple[int, int], dtype: torch.dtype) -> None:
    for num_parts in (1, 2, 3):
        x, residual, weight, bias = make(*shape, dtype, call.device)
        # A part next to the other in memory, as products of two halves may be.
        parts = torch.stack([x * (0.3 + part) for part in range(num_parts)], 1).transpose(0, 1)
        before = parts.clone()
        exact_sum = parts.double().sum(0) + residual.double()
        rounded = (parts.float().sum(0) + residual).to(dtype)
        for function, arguments, exact, torch_norm in (
            (add_layer_norm, (weight, bias, EPS), exact_layer_norm(exact_sum, weight, bias), F.layer_norm),
            (add_rms_norm, (weight, EPS), exact_rms_norm(exact_sum, weight), F.rms_norm),
        ):
            normed, total = call(function, parts, residual, *arguments)
            assert normed.shape == total.shape == residual.shape
            assert_within_budget(normed, exact, torch_norm(rounded, weight.shape, *arguments))
            assert_within_budget(total, exact_sum, rounded)
        assert torch.equal(parts, before)


def check_bias(call: Implementation, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, bias, _ = make(*shape, dtype, call.device)
    others = bias.clone(), residual.clone()
    summed = x.double() + bias.double()
    exact = 0.5 * summed * (1 + torch.tanh(math.sqrt(2 / math.pi) * (summed + 0.044715 * summed**3)))
    torch_result = F.gelu(x + bias, approximate="tanh")
    assert_within_budget(call(in_place, bias_gelu, x.clone(), bias), exact, torch_result)
    actual = call(in_place, bias_residual, x.clone(), bias, residual)
    assert_within_budget(actual, summed + residual.double(), x + bias + residual)
    assert torch.equal(bias, others[0]) and torch.equal(residual, others[1])


def check_silu_mul(call: Implementation, shape: tuple[int, int], dtype: torch.dtype) -> None:
    num_tokens, width = shape
    wide = make(num_tokens, 2 * width + 3, dtype, call.device)[0]
    gate_up = wide[:, : 2 * width]
    gate, up = gate_up.double().split(width, 1)
    exact = gate / (1 + torch.exp(-gate)) * up
    torch_result = F.silu(gate_up[:, :width]) * gate_up[:, width:]
    before = wide.clone()
    actual = call(silu_mul, gate_up)
    assert actual.dtype == dtype
    assert_within_budget(actual, exact, torch_result)
    assert torch.equal(wide, before)
    assert torch.equal(call(silu_mul, gate_up.contiguous()), actual)
    assert torch.equal(call(silu_mul, gate_up.t().contiguous().t()), actual)
    pairs = wide.clone()
    pairs[:, : 2 * width] = torch.stack((gate_up[:, :width], gate_up[:, width:]), 2).flatten(1)
    in_turns = call(silu_mul, pairs[:, : 2 * width], alternating=True)
    assert_within_budget(in_turns, exact, torch_result)
    assert not call.has_kernels or torch.equal(in_turns, actual)


CHECKS = [check_norms, check_norms_of_sums, check_norms_of_parts, check_bias, check_silu_mul]


@each_dtype
@pytest.mark.parametrize("check", CHECKS)
def test_values(check: Callable[..., None], implementation: Implementation, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        check(implementation, shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_values_of_large_shapes(check: Callable[..., None], dtype: torch.dtype) -> None:
    for shape in LARGE_SHAPES:
        check(GPU, shape, dtype)


def bits(quantized: QuantizedActivations) -> list[torch.Tensor]:
    return [quantized.values.view(torch.uint8), quantized.scales.view(torch.int32)]


@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_quantized_as_vllm(
    implementation: Implementation, dtype: torch.dtype, quantization: InputQuantization
) -> None:
    """Both bit for bit: what would have been stored in 16 bits, and then numbers and scales."""
    numbers = ADVERSARIAL.to(implementation.device, dtype)
    exact = [(gated(numbers, alternating=each), each) for each in (False, True)]
    # Products that are rounded first, and more columns than a program has.
    products = make(3, 2 * 1152, dtype, implementation.device)[0]
    for gate_up, alternating in (*exact, (products, False)):
        plain = implementation(rounded_as_gpus, silu_mul, gate_up, alternating=alternating)
        if gate_up is not products:
            assert torch.equal(plain[1:4], numbers[1:4]) and torch.equal(plain.isnan(), numbers.isnan())
        quantized = implementation(
            rounded_as_gpus, silu_mul_quantized, gate_up, quantization, alternating=alternating
        )
        # By itself, of rows that are further apart.
        apart = torch.cat((plain, plain), 1)[:, : plain.shape[1]]
        alone = implementation(rounded_as_gpus, quantize, apart, quantization)
        for each in (quantized, alone):
            for got, expected in zip(bits(each), quantized_as_vllm(plain, quantization), strict=True):
                assert torch.equal(got, expected)
            assert each.dtype == dtype and each.quantization == quantization
    for width in (128, 384, 1152):
        x, residual, weight, _ = make(9, width, dtype, implementation.device)
        x[1], residual[1], x[2, 3], x[3, 5] = 0.0, 0.0, math.inf, math.nan
        for parts, added in ((x, None), (x, residual), (torch.stack((x, -x, x)), residual)):
            given = (parts, weight, EPS) if added is None else (parts, added, weight, EPS)
            plain = implementation(rounded_as_gpus, rms_norm if added is None else add_rms_norm, *given)
            plain, total = (plain, x) if added is None else plain
            quantized, new_residual = implementation(
                rounded_as_gpus, rms_norm_quantized, parts, added, weight, EPS, quantization
            )
            for got, expected in zip(bits(quantized), quantized_as_vllm(plain, quantization), strict=True):
                assert torch.equal(got, expected)
            assert torch.equal(new_residual.nan_to_num(7.0), total.nan_to_num(7.0))


@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=str)
def test_memory_of_quantized_activations(quantization: InputQuantization) -> None:
    for num_rows in (0, 1, 5, 8):
        made = silu_mul_quantized(torch.zeros(num_rows, 768), quantization)
        assert made.values.shape == (num_rows, 384) and made.values.is_contiguous()
        groups = 3 if quantization.by_group else 1
        assert made.scales.shape == (num_rows, groups)
        stride = {0: 0, 1: 4, 5: 8, 8: 8}[num_rows] if quantization.aligned_scales else num_rows
        assert made.scales.stride() == ((1, stride) if quantization.by_group else (1, 1))


def test_eps_counts(implementation: Implementation) -> None:
    x, _, weight, bias = make(4, 16, torch.float32, implementation.device)
    for function, arguments, exact in (
        (layer_norm, (weight, bias, 0.5), exact_layer_norm(x, weight, bias, 0.5)),
        (rms_norm, (weight, 0.5), exact_rms_norm(x, weight, 0.5)),
    ):
        actual = implementation(function, x, *arguments)
        torch.testing.assert_close(actual.double(), exact, rtol=0, atol=1e-5)


@each_dtype
def test_half_types_round_once(implementation: Implementation, dtype: torch.dtype) -> None:
    # The first whole number whose successor is rounded back to it.
    number = 2 / torch.finfo(dtype).eps
    x, ones = (torch.full((1, 1), each, dtype=dtype, device=implementation.device) for each in (number, 1.0))
    assert (x + 1).item() == number
    expected = number if dtype == torch.float32 else number + 2
    assert implementation(bias_residual, x, ones[0], ones).item() == expected


def test_large_values_stay_finite(implementation: Implementation) -> None:
    x = torch.tensor([[-3e4, -20.0, 20.0, 3e4]], device=implementation.device)
    actual = implementation(bias_gelu, x, torch.zeros_like(x[0]))
    assert actual.tolist() == [[0.0, 0.0, 20.0, 3e4]]
    gate_up = torch.tensor([[-3e4, -200.0, 200.0, 3e4, 2.0, 3.0, 0.5, 1.0]], device=implementation.device)
    assert implementation(silu_mul, gate_up).tolist() == [[0.0, 0.0, 100.0, 3e4]]


@pytest.mark.parametrize("width", [64, pytest.param(1536, marks=pytest.mark.gpu)])
@kernels_only
def test_views_of_wider_tensors(implementation: Implementation, width: int) -> None:
    x, residual, weight, bias = make(4, width, torch.float16, implementation.device)
    arguments = (x[:, ::2], residual[:, 1::2], weight[::2], bias[1::2])
    expected = implementation(add_layer_norm, *(value.contiguous() for value in arguments), EPS)
    actual = implementation(add_layer_norm, *arguments, EPS)
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    left, rest = x[:, : width // 2], x[:, width // 2 :].clone()
    others = bias[: width // 2], residual[:, ::2]
    expected = implementation(bias_residual, left.clone(), *(other.contiguous() for other in others))
    assert torch.equal(implementation(bias_residual, left, *others), expected)
    # Only the view is written.
    assert torch.equal(left, expected) and torch.equal(x[:, width // 2 :], rest)


def embed_before(norm: PackedNorm | None, *arguments: torch.Tensor | None) -> torch.Tensor:
    """Return embeddings, and check what they leave to a norm, memory that the launcher allocates being full of NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        embedded, left = embed_tokens(*arguments, next_norm=norm)
    finally:
        torch.use_deterministic_algorithms(False)
    if norm is None:
        assert left is None
    else:
        check_left(left, norm, embedded)
    return embedded


@pytest.mark.parametrize("id_type", [torch.int64, torch.int32], ids=str)
@each_dtype
def test_embed(implementation: Implementation, dtype: torch.dtype, id_type: torch.dtype) -> None:
    # Columns of wider tensors: the ids of the same token of several sequences. A negative one is read as 0.
    ids = torch.tensor([[4, 0, 30, -1], [0, 9, 3, 3]], device=implementation.device).t().contiguous()
    tokens, positions = ids.unbind(1)
    wide = torch.randn(31, 50).to(implementation.device, dtype)
    token_embedding, position_embedding = wide[:, :40], torch.randn(10, 40).to(wide)
    plain = token_embedding[tokens.clamp(min=0)]
    norms = (None, PackedNorm(None, EPS), pack_norm(torch.linspace(-3, 3, 40).to(wide), EPS))
    for norm in norms:
        for added, expected in ((position_embedding, plain + position_embedding[positions]), (None, plain)):
            actual = implementation(embed_before, norm, tokens.to(id_type), positions, token_embedding, added)
            assert torch.equal(actual, expected)


def test_no_tokens_to_embed(implementation: Implementation) -> None:
    nothing = torch.zeros(0, dtype=torch.int64, device=implementation.device)
    table = torch.randn(3, 8, device=implementation.device)
    norm = pack_norm(torch.ones(8, device=implementation.device), EPS)
    embedded, left = implementation(embed_tokens, nothing, nothing, table, table, next_norm=norm)
    assert embedded.shape == left.scaled.shape == (0, 8) and left.moments.shape == (0, 2, 1)


X, RESIDUAL, WEIGHT, BIAS = make(4, 16, torch.float32)
IDS = torch.zeros(2, dtype=torch.int64)
ROWS, GROUPS = QUANTIZATIONS[:2]


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (layer_norm, (X, WEIGHT[:-1], BIAS, EPS), "weight: expected E=16, got 15"),
        (layer_norm, (X, WEIGHT, BIAS.bfloat16(), EPS), "bias: expected dtype torch.float32 as x, got torch.bf"),
        (add_layer_norm, (X, RESIDUAL[:-1], WEIGHT, BIAS, EPS), "residual: expected T=4, got 3"),
        (add_layer_norm, (torch.stack((X, X))[:, :2], RESIDUAL, WEIGHT, BIAS, EPS), "residual"),
        (add_rms_norm, (torch.stack((X, X))[:, :2], RESIDUAL, WEIGHT, EPS), "residual"),
        (bias_gelu, (X, BIAS[:-1]), "bias: expected I=16, got 15"),
        (bias_residual, (X, BIAS, RESIDUAL[:-1]), "residual: expected T=4, got 3"),
        (bias_residual, (X, BIAS, RESIDUAL.half()), "residual: expected dtype torch.float32 as x, got torch.fl"),
        (silu_mul, (X[:, 1:],), "gate_up: expected an even number of columns, got 15"),
        (rms_norm_quantized, (X, RESIDUAL[:-1], WEIGHT, EPS, ROWS), "residual: expected T=4, got 3"),
        (rms_norm_quantized, (X, None, WEIGHT.half(), EPS, ROWS), "weight: expected dtype torch.float32 as x"),
        (rms_norm_quantized, (X, None, WEIGHT, EPS, GROUPS), "quantization: expected a multiple of 128 columns"),
        (quantize, (X[0], ROWS), r"x: expected shape \[T E\], got 1 dimensions"),
        (quantize, (X, GROUPS), "quantization: expected a multiple of 128 columns, got 16"),
        (silu_mul_quantized, (X[:, 1:], ROWS), "gate_up: expected an even number of columns, got 15"),
        (silu_mul_quantized, (X, GROUPS), "quantization: expected a multiple of 128 columns, got 8"),
        (embed_tokens, (IDS.short(), IDS, X), "input_ids: expected dtype torch.int64 or torch.int32, got torch.in"),
    ],
)  # fmt: skip
def test_mismatches_are_named(function: Callable[..., Any], arguments: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        function(*arguments)


@pytest.mark.gpu
def test_rows_past_two_to_the_31() -> None:
    num_tokens, width = 2**31 // 768 + 100, 768
    x = torch.randn(num_tokens, width, device="cuda", dtype=torch.float16)
    weight, bias = torch.randn(2, width, device="cuda").half()
    last = x[-50:].clone()
    assert torch.equal(layer_norm(x, weight, bias, EPS)[-50:], layer_norm(last, weight, bias, EPS))
    assert torch.equal(silu_mul(x)[-50:], silu_mul(last))
    for quantization in QUANTIZATIONS:
        for few, many in (
            [rms_norm_quantized(each, None, weight, EPS, quantization)[0] for each in (last, x)],
            [quantize(each, quantization) for each in (last, x)],
        ):
            assert torch.equal(many.values[-50:].view(torch.uint8), few.values.view(torch.uint8))
            assert torch.equal(many.scales[-50:], few.scales)
    expected = bias_gelu(last.clone(), bias)
    assert torch.equal(bias_gelu(x, bias)[-50:], expected)


@pytest.mark.gpu
def test_a_thousand_norms_agree_bit_for_bit() -> None:
    x, residual, weight, bias = make(300, 768, torch.float16, "cuda")
    first = add_layer_norm(x, residual, weight, bias, EPS)
    for _ in range(1000):
        again = add_layer_norm(x, residual, weight, bias, EPS)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.gpu
def test_graph_replay() -> None:
    x, residual, weight, bias = make(32, 768, torch.float16, "cuda")
    static = x.clone()

    def step() -> torch.Tensor:
        normed, total = add_layer_norm(static, residual, weight, bias, EPS)
        activated = bias_residual(bias_gelu(normed, bias), bias, total)
        return silu_mul(activated)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    for value in (x, x * 2):
        static.copy_(value)
        graph.replay()
        assert torch.equal(output, step())
