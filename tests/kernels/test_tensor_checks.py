"""The shape checker names tensor, symbol, expected and got."""

from __future__ import annotations

import re

import pytest
import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels.arguments import (
    CACHE_DTYPE,
    check_cache_dtype,
    check_float8_capability,
    check_head_groups,
    check_same_dtype,
    check_sinks,
    check_tensors,
)


def test_sizes_are_returned() -> None:
    sizes = check_tensors(
        a=(torch.zeros(3, 5), "R V"),
        b=(torch.zeros(4), "R+1"),
        c=(torch.zeros(5, dtype=torch.int32), "V", torch.int32),
    )
    assert sizes == {"R": 3, "V": 5}


@pytest.mark.parametrize(
    ("shape", "spec", "message"),
    [
        ((3, 4), "R V", "b: expected V=5, got 4 (shape [3, 4], expected [R V])"),
        ((3,), "R+1", "b: expected R+1=4, got 3 (shape [3], expected [R+1])"),
        ((3,), "R V", "b: expected shape [R V], got 1 dimensions [3]"),
        ((2, 3), "X X", "b: expected X=2, got 3 (shape [2, 3], expected [X X])"),
    ],
)
def test_shape_mismatch(shape: tuple[int, ...], spec: str, message: str) -> None:
    with pytest.raises(ShapeError, match=re.escape(message)):
        check_tensors(a=(torch.zeros(3, 5), "R V"), b=(torch.zeros(shape), spec))


def test_zero_is_a_size() -> None:
    with pytest.raises(ShapeError, match=re.escape("b: expected R=0, got 1")):
        check_tensors(a=(torch.zeros(0, 5), "R V"), b=(torch.zeros(1), "R"))


def test_dtype_mismatch() -> None:
    with pytest.raises(ShapeError, match=re.escape("a: expected dtype torch.int64, got torch.float32")):
        check_tensors(a=(torch.zeros(3), "R", torch.int64))
    with pytest.raises(
        ShapeError, match=re.escape("y: expected dtype torch.float32 as x, got torch.float16")
    ):
        check_same_dtype(x=torch.zeros(1), y=torch.zeros(1, dtype=torch.float16))


def test_device_mismatch() -> None:
    with pytest.raises(ShapeError, match="y: expected device cpu as x, got meta"):
        check_same_dtype(x=torch.zeros(1), y=torch.zeros(1, device="meta"))


def test_head_groups() -> None:
    check_head_groups(8, 2)
    with pytest.raises(ShapeError, match="HQ must be a multiple of HKV=3, got HQ=8"):
        check_head_groups(8, 3)


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
    check_sinks(HALF[0, :, 0], HALF)
    with pytest.raises(ShapeError, match=r"sinks: expected a floating-point dtype, got torch.int32"):
        check_sinks(HALF[0, :, 0].int(), HALF)
    with pytest.raises(ShapeError, match="sinks: expected device cpu as query, got meta"):
        check_sinks(torch.zeros(3, device="meta"), HALF)
