"""Numbers in float8 caches: rounded, limited and scaled alike by torch and by Triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from rose_backend.errors import ShapeError
from rose_backend.kernels.attention.reference import attend
from rose_backend.kernels.kv import write_kv as gpu
from rose_backend.kernels.kv.reference import from_cache, to_cache
from rose_backend.kernels.tensor_checks import (
    CACHE_DTYPE,
    check_cache_dtype,
    check_float8_capability,
    check_sinks,
)
from tests.support.interpreter import run_interpreted


@triton.jit
def _to_cache_kernel(out_ptr, values_ptr, scale_ptr, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    scale = gpu.load_scale(scale_ptr)
    stored = gpu.to_cache(tl.load(values_ptr + lanes), scale, out_ptr.dtype.element_ty)
    tl.store(out_ptr + lanes, stored)


def launch(out: torch.Tensor, values: torch.Tensor, scale: torch.Tensor | None) -> None:
    _to_cache_kernel[(1,)](out, values, scale, len(values))


def edge_values() -> torch.Tensor:
    """Every number that float8 holds, the ties between neighbours, and what lies outside its range."""
    held = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(CACHE_DTYPE).float()
    steps = held[~held.isnan()].sort().values
    ties = (steps[1:] + steps[:-1]) / 2
    outside = torch.tensor([448.0, 449.0, 464.0, 465.0, 1e4, -1e4, float("inf"), float("-inf"), float("nan")])
    values = torch.cat((held, ties, ties * 1.001, outside, torch.randn(300)))
    return torch.nn.functional.pad(values, (0, 2048 - len(values)))


def nearest_by_search(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the nearest finite numbers; of two equally near ones that with an even last bit."""
    order = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    held = order.view(CACHE_DTYPE).double()
    distance = (values.double().clamp(-448, 448)[:, None] - held).abs().nan_to_num(float("inf"))
    is_nearest = distance == distance.min(1, keepdim=True).values
    preferred = is_nearest * (2 - order % 2)
    return order[preferred.argmax(1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [None, 1.0, 0.03, 7.0])
def test_stored_numbers(dtype: torch.dtype, scale: float | None) -> None:
    values = edge_values().to(dtype)
    factor = None if scale is None else torch.tensor(scale)
    stored = to_cache(values, CACHE_DTYPE, factor)
    scaled = values.float() / (1.0 if scale is None else factor)
    real = ~scaled.isnan()
    # Comparing numbers, not bytes: zero has two.
    assert torch.equal(stored[real].float(), nearest_by_search(scaled[real]).view(CACHE_DTYPE).float())
    assert stored[~real].float().isnan().all()


def test_interpreted_kernels_store_the_same() -> None:
    # Numbers that are held exactly: Triton's interpreter itself rounds others wrongly.
    held = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(CACHE_DTYPE)
    normal = held[(held.float().abs() >= 2**-6) & (held.float().abs() < 448)]
    values = torch.cat((normal.float(), torch.tensor([448.0, 500.0, -1e9, float("inf")])))[-128:] * 0.5
    scale = torch.tensor([0.5])
    stored = torch.zeros(len(values), dtype=CACHE_DTYPE)
    run_interpreted(launch, stored, values, scale)
    assert torch.equal(stored.view(torch.uint8), to_cache(values, CACHE_DTYPE, scale).view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [None, 0.03])
def test_kernels_on_a_gpu_store_the_same(dtype: torch.dtype, scale: float | None) -> None:
    values = edge_values().to(dtype).cuda()
    factor = None if scale is None else torch.tensor(scale, device="cuda")
    stored = torch.zeros(len(values), dtype=CACHE_DTYPE, device="cuda")
    launch(stored, values, factor)
    expected = to_cache(values, CACHE_DTYPE, factor)
    real = ~values.isnan()
    assert torch.equal(stored[real].view(torch.uint8), expected[real].view(torch.uint8))
    assert stored[~real].float().isnan().all()


def test_scales_are_undone() -> None:
    scale = torch.tensor([0.5])
    values = torch.tensor([1.0, -3.5, 448.0, 300.0])
    stored = to_cache(values, CACHE_DTYPE, scale)
    assert from_cache(stored, torch.float32, scale).tolist() == [1.0, -3.5, 224.0, 224.0]
    assert from_cache(stored, torch.float16, None).tolist() == [2.0, -7.0, 448.0, 448.0]
    assert to_cache(values, torch.float32, None) is values
    assert from_cache(values, torch.float32, None) is values


HALF = torch.zeros(2, 3, 16, dtype=torch.float16)
CACHE = torch.zeros(4, 8, 3, 16, dtype=CACHE_DTYPE)


def test_caches_that_fit() -> None:
    check_cache_dtype(CACHE, CACHE, query=HALF, out=HALF)
    check_cache_dtype(
        CACHE, CACHE, key_scale=torch.ones(1), value_scale=torch.tensor(2.0), query=HALF.float()
    )
    check_cache_dtype(CACHE.half(), CACHE.half(), query=HALF)


@pytest.mark.parametrize(
    ("caches", "query", "scales", "message"),
    [
        (
            (CACHE.float(), CACHE.float()),
            HALF,
            {},
            "key_cache: expected dtype torch.float16 as query, or torch.flo",
        ),
        (
            (CACHE, CACHE.half()),
            HALF,
            {},
            "value_cache: expected dtype torch.float8_e4m3fn as key_cache, got torch",
        ),
        ((CACHE, CACHE), HALF.double(), {}, "key_cache: expected dtype torch.float64 as query"),
        (
            (CACHE.half(), CACHE.half()),
            HALF,
            {"key_scale": torch.ones(1)},
            "key_scale: expected None with caches of torch.float16, got a tensor",
        ),
        (
            (CACHE, CACHE),
            HALF,
            {"value_scale": torch.ones(3)},
            r"value_scale: expected torch.float32 of one element, got torch.float32 \[3\]",
        ),
        (
            (CACHE, CACHE),
            HALF,
            {"key_scale": torch.ones(1).double()},
            "key_scale: expected torch.float32 of one element, got torch.float64",
        ),
        (
            (CACHE, CACHE),
            HALF,
            {"key_scale": torch.ones(1, device="meta")},
            "key_scale: expected device cpu as key_cache, got meta",
        ),
        (
            (CACHE.to("meta"), CACHE.to("meta")),
            HALF,
            {},
            "key_cache: expected device cpu as query, got meta",
        ),
    ],
)
def test_caches_that_do_not_fit_are_named(
    caches: tuple[torch.Tensor, torch.Tensor],
    query: torch.Tensor,
    scales: dict[str, torch.Tensor],
    message: str,
) -> None:
    with pytest.raises(ShapeError, match=message):
        check_cache_dtype(*caches, **scales, query=query)


def test_gpus_that_cannot_convert_are_named() -> None:
    check_float8_capability((8, 9))
    with pytest.raises(
        ShapeError, match=r"key_cache: torch.float8_e4m3fn needs compute capability 8.9, .* has 8.0"
    ):
        check_float8_capability((8, 0))


def test_sinks_are_one_logit_per_head() -> None:
    check_sinks(None, HALF)
    check_sinks(torch.zeros(3), HALF)
    with pytest.raises(ShapeError, match="sinks: expected HQ=3, got 4"):
        check_sinks(torch.zeros(4), HALF)
    with pytest.raises(ShapeError, match=r"sinks: expected dtype torch.float32, got torch.float16"):
        check_sinks(HALF[0, :, 0], HALF)
    with pytest.raises(ShapeError, match="sinks: expected device cpu as query, got meta"):
        check_sinks(torch.zeros(3, device="meta"), HALF)


@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 0.7}, {"is_causal": True}], ids="+".join)
def test_a_sink_is_a_key_without_a_value(options: dict[str, Any]) -> None:
    query, key, value = (torch.randn(2, 3, 4, 8) for _ in range(3))
    sinks = torch.tensor([[0.0], [3.0], [-1.0]])
    attended = attend(query, key, value, None, scale=0.3, sinks=sinks, **options)
    scores = query @ key.transpose(-1, -2) * 0.3
    if "logits_soft_cap" in options:
        scores = 0.7 * torch.tanh(scores / 0.7)
    if "is_causal" in options:
        scores = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks.exp()[..., None])
    torch.testing.assert_close(attended, weights @ value, rtol=0, atol=1e-6)
