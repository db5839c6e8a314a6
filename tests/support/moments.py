"""What a kernel that writes hidden states leaves to the norm in front of the next product."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_backend.conformance.error_budget import assert_within_budget
from rose_backend.kernels import NormInput, PackedLinear, PackedNorm, norm_input_of, small_batch_linear
from rose_backend.layers import linear


def moments_of(x: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Return the sums of rows and of their squares, each in some parts."""
    parts = x.float().tensor_split(num_parts, 1)
    return torch.stack([torch.stack([part.sum(1), part.square().sum(1)], 1) for part in parts], 2)


def left_to(norm: PackedNorm, hidden: torch.Tensor, num_parts: int = 1) -> NormInput:
    """Return what a kernel that sums up moments in some parts leaves of hidden states."""
    return norm_input_of(hidden, norm)._replace(moments=moments_of(hidden, num_parts))


def check_left(left: NormInput | None, norm: PackedNorm, hidden: torch.Tensor) -> None:
    """Hold what a kernel has left to ``norm`` to the hidden states that it has written."""
    assert left is not None and left.norm is norm
    torch.testing.assert_close(left.moments.sum(2), moments_of(hidden, 1)[:, :, 0], rtol=1e-4, atol=1e-2)
    if norm.weight is None:
        assert left.scaled.data_ptr() == hidden.data_ptr()
        return
    assert left.scaled.data_ptr() != hidden.data_ptr() or not len(hidden)
    exact = hidden.double() * norm.weight.double()
    exact = exact if norm.scale is None else exact / norm.scale.double()
    assert left.scaled.dtype == hidden.dtype
    assert_within_budget(left.scaled, exact, exact.to(hidden.dtype))


def record_moments(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Have layers check the moments of each norm's input, and return the list that these inputs are put into."""
    seen: list[torch.Tensor] = []

    def checked(x: torch.Tensor | NormInput, layer: PackedLinear, **options: Any) -> torch.Tensor:
        if not isinstance(x, NormInput):
            # Of a prompt, by int4 weights: no norm is in front.
            return small_batch_linear(x, layer, **options)
        hidden = x.scaled if x.norm.weight is None else x.scaled / x.norm.weight
        expected = moments_of(hidden, 1)
        torch.testing.assert_close(x.moments.sum(2, keepdim=True), expected, rtol=1e-4, atol=1e-3)
        seen.append(hidden)
        return small_batch_linear(x, layer, **options)

    monkeypatch.setattr(linear, "small_batch_linear", checked)
    return seen
