"""The shape checker names tensor, symbol, expected and got."""

from __future__ import annotations

import re

import pytest
import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels.tensor_checks import check_head_groups, check_same_dtype, check_tensors


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
