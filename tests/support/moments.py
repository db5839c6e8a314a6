"""Moments of rows, which one product leaves to the norm in front of the next."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_backend.kernels import PackedLinear, small_batch_linear
from rose_backend.layers import linear


def moments_of(x: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Return the sums of rows and of their squares, each in some parts."""
    parts = x.float().tensor_split(num_parts, 1)
    return torch.stack([torch.stack([part.sum(1), part.square().sum(1)], 1) for part in parts], 2)


def record_moments(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Have layers check the moments of each norm's input, and return the list that these inputs are put into."""
    seen: list[torch.Tensor] = []

    def checked(x: torch.Tensor, layer: PackedLinear, **options: Any) -> torch.Tensor:
        if layer.has_rms_norm or layer.column_sums is not None:
            assert options["x_moments"] is not None, "nobody left the moments"
            torch.testing.assert_close(options["x_moments"].sum(2, keepdim=True), moments_of(x, 1))
            seen.append(x)
        return small_batch_linear(x, layer, **options)

    monkeypatch.setattr(linear, "small_batch_linear", checked)
    return seen
