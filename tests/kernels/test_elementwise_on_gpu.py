"""Block clones, norms and the element-wise parts of the MLP on a device: exact, repeatable, at any offset."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from rose_backend.kernels import (
    add_layer_norm,
    add_rms_norm,
    bias_gelu,
    bias_residual,
    block_clone,
    layer_norm,
    rms_norm,
    silu_mul,
)
from rose_backend.kernels.kv import reference as twin
from tests.support.error_budget import assert_within_budget

pytestmark = pytest.mark.gpu

EPS = 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 768), (3, 7), (257, 768), (5, 3072), (2, 5000), (33, 129)]


def clone_and_check(cache: torch.Tensor, pairs: list[tuple[int, int]], block_dim: int, device: str) -> None:
    before = cache.clone()
    src, dst = torch.tensor(pairs, dtype=torch.int32, device=device).unbind(1)
    block_clone(cache, src, dst, block_dim=block_dim)
    twin.block_clone(before, src.cuda(), dst.cuda(), block_dim=block_dim)
    assert torch.equal(cache.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("num_pairs", [1, 2, 3, 100, 256, 1000, 9000])
@pytest.mark.parametrize("kind", ["independent", "chain", "cycle", "fan"])
def test_clone_pairs_of_every_kind(kind: str, num_pairs: int, device: str) -> None:
    generator = torch.Generator().manual_seed(num_pairs)
    blocks = torch.randperm(2 * num_pairs + 3, generator=generator).tolist()
    if kind == "independent":
        pairs = list(zip(blocks[:num_pairs], blocks[num_pairs:], strict=False))
    elif kind == "fan":
        pairs = [(blocks[0], block) for block in blocks[1 : num_pairs + 1]]
    else:
        end = blocks[0] if kind == "cycle" else blocks[num_pairs]
        pairs = list(zip(blocks[:num_pairs], [*blocks[1:num_pairs], end], strict=True))
    pairs = [pairs[index] for index in torch.randperm(num_pairs, generator=generator).tolist()]
    cache = torch.randint(-(2**15), 2**15, (3, 2, len(blocks), 4, 2, 40), dtype=torch.int16, device="cuda")
    clone_and_check(cache.view(torch.float16), pairs, 2, device)


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("layout", ["keys", "every_second", "last"])
def test_clone_views_and_leave_the_rest(layout: str, offset: int) -> None:
    # Words of 16, 8 and 2 bytes, depending on where the storage starts.
    storage = torch.randint(-(2**15), 2**15, (2 * 60 * 16 * 2 * 128 + 8,), dtype=torch.int16, device="cuda")
    whole = storage[offset : offset + 2 * 60 * 16 * 2 * 128].view(2, 60, 16, 2, 128)
    cache = {"keys": whole[..., :64], "every_second": whole[..., ::2], "last": whole.movedim(1, -1)}[layout]
    block_dim = cache.ndim - 1 if layout == "last" else 1
    before = storage.clone()
    expected = before[offset : offset + whole.numel()].view(whole.shape)
    expected = {
        "keys": expected[..., :64],
        "every_second": expected[..., ::2],
        "last": expected.movedim(1, -1),
    }[layout]
    src, dst = torch.tensor([[1, 2, 3, 50], [2, 3, 1, 10]], dtype=torch.int64, device="cuda")
    block_clone(cache, src, dst, block_dim=block_dim)
    twin.block_clone(expected, src, dst, block_dim=block_dim)
    assert torch.equal(storage, before)


def test_clone_past_two_to_the_31() -> None:
    cache = torch.empty(2, 1200, 1_000_000, dtype=torch.float16, device="cuda")
    assert cache[0].numel() < 2**31 < cache.numel()
    cache[:, [3, 700, 1199]] = torch.randn(2, 3, 1_000_000, device="cuda").half()
    sources = cache[:, [1199, 3]].clone()
    for device in ("cpu", "cuda"):
        cache[:, [1198, 1100]] = float("nan")
        block_clone(
            cache,
            torch.tensor([1199, 3], device=device),
            torch.tensor([1198, 1100], device=device),
            block_dim=1,
        )
        assert torch.equal(cache[:, [1198, 1100]], sources)
        assert torch.equal(cache[:, [1199, 3]], sources)


@pytest.mark.parametrize("kind", ["independent", "chain", "cycle"])
def test_a_thousand_clones_agree_and_graphs_replay(kind: str) -> None:
    start = torch.randn(12, 2, 600, 16, 64, device="cuda").half()
    order = torch.randperm(600, device="cuda")
    src = order[:256].contiguous()
    dst = {"independent": order[256:512], "chain": order[1:257], "cycle": src.roll(1)}[kind].contiguous()
    expected = start.clone()
    twin.block_clone(expected, src, dst, block_dim=2)
    cache = start.clone()
    graph = torch.cuda.CUDAGraph()
    block_clone(cache, src, dst, block_dim=2)
    with torch.cuda.graph(graph):
        block_clone(cache, src, dst, block_dim=2)
    for _ in range(1000):
        cache.copy_(start)
        graph.replay()
        assert torch.equal(cache, expected)


def make(num_tokens: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device="cuda").manual_seed(num_tokens + width)
    x, residual = (
        (torch.randn(num_tokens, width, generator=generator, device="cuda") * 2 + 1).to(dtype)
        for _ in range(2)
    )
    weight, bias = (torch.randn(width, generator=generator, device="cuda").to(dtype) for _ in range(2))
    return x, residual, weight, bias


def exact_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x.double(), weight.shape, weight.double(), bias.double(), EPS)


def exact_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, weight, bias = make(*shape, dtype)
    total = x.double() + residual.double()
    torch_result = F.layer_norm(x, weight.shape, weight, bias, EPS)
    assert_within_budget(layer_norm(x, weight, bias, EPS), exact_layer_norm(x, weight, bias), torch_result)
    torch_rms = F.rms_norm(x, weight.shape, weight, EPS)
    assert_within_budget(rms_norm(x, weight, EPS), exact_rms_norm(x, weight), torch_rms)
    torch_result = F.layer_norm(x + residual, weight.shape, weight, bias, EPS)
    for normed, new_residual, exact in (
        (*add_layer_norm(x, residual, weight, bias, EPS), exact_layer_norm(total, weight, bias)),
        (*add_rms_norm(x, residual, weight, EPS), exact_rms_norm(total, weight)),
    ):
        assert torch.equal(new_residual, x + residual)
        assert_within_budget(normed, exact, torch_result)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_of_parts(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, weight, bias = make(*shape, dtype)
    parts = torch.stack((x, 0.4 * residual))
    total = parts.double().sum(0) + residual.double()
    rounded = (parts.float().sum(0) + residual).to(dtype)
    torch_result = F.layer_norm(rounded, weight.shape, weight, bias, EPS)
    for normed, new_residual, exact in (
        (*add_layer_norm(parts, residual, weight, bias, EPS), exact_layer_norm(total, weight, bias)),
        (*add_rms_norm(parts, residual, weight, EPS), exact_rms_norm(total, weight)),
    ):
        assert_within_budget(new_residual, total, rounded)
        assert_within_budget(normed, exact, torch_result)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mlp_parts(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, _, bias = make(*shape, dtype)
    summed = x.double() + bias.double()
    exact = 0.5 * summed * (1 + torch.tanh(math.sqrt(2 / math.pi) * (summed + 0.044715 * summed**3)))
    assert_within_budget(bias_gelu(x.clone(), bias), exact, F.gelu(x + bias, approximate="tanh"))
    actual = bias_residual(x.clone(), bias, residual)
    assert_within_budget(actual, summed + residual.double(), x + bias + residual)
    gate_up = torch.cat((x, residual), 1)
    before = gate_up.clone()
    exact = x.double() / (1 + torch.exp(-x.double())) * residual.double()
    assert_within_budget(silu_mul(gate_up), exact, F.silu(x) * residual)
    assert torch.equal(gate_up, before)
    pairs = torch.stack((x, residual), 2).flatten(1)
    assert torch.equal(silu_mul(pairs, alternating=True), silu_mul(gate_up))


def test_views_of_wider_tensors() -> None:
    x, residual, weight, bias = make(9, 1536, torch.float16)
    left, right = x[:, :768], residual[:, ::2]
    expected = add_layer_norm(left.contiguous(), right.contiguous(), weight[::2], bias[:768], EPS)
    actual = add_layer_norm(left, right, weight[::2], bias[:768], EPS)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    rest = x[:, 768:].clone()
    expected_sum = bias_residual(left.clone(), bias[:768], right)
    assert torch.equal(bias_residual(left, bias[:768], right), expected_sum)
    assert torch.equal(x[:, :768], expected_sum)
    assert torch.equal(x[:, 768:], rest)
    assert torch.equal(silu_mul(residual[:, ::2]), silu_mul(residual[:, ::2].contiguous()))


def test_rows_past_two_to_the_31() -> None:
    num_tokens, width = 2**31 // 768 + 100, 768
    x = torch.randn(num_tokens, width, device="cuda", dtype=torch.float16)
    weight, bias = torch.randn(2, width, device="cuda").half()
    last = x[-50:].clone()
    assert torch.equal(layer_norm(x, weight, bias, EPS)[-50:], layer_norm(last, weight, bias, EPS))
    assert torch.equal(silu_mul(x)[-50:], silu_mul(last))
    expected = bias_gelu(last.clone(), bias)
    assert torch.equal(bias_gelu(x, bias)[-50:], expected)


def test_a_thousand_norms_agree_bit_for_bit() -> None:
    x, residual, weight, bias = make(300, 768, torch.float16)
    first = add_layer_norm(x, residual, weight, bias, EPS)
    for _ in range(1000):
        again = add_layer_norm(x, residual, weight, bias, EPS)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_graph_replay() -> None:
    x, residual, weight, bias = make(32, 768, torch.float16)
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
