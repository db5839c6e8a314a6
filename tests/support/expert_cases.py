"""Random calls of the MLP of a mixture of experts, and what comes of them, one expert after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rose_backend.conformance.error_budget import assert_within_budget
from rose_backend.kernels import Experts, Float8Experts, NormInput, PackedNorm, norm_input_of, pack_norm
from tests.support.moments import check_left

EPS = 1e-5


@dataclass
class Case:
    """Arguments, and what comes of them, one expert after the other."""

    x: torch.Tensor
    router_logits: torch.Tensor
    experts: Experts
    residual: torch.Tensor | None
    norm: PackedNorm | None
    """In front."""

    def given(self) -> torch.Tensor | NormInput:
        """Return what the experts take: ``x``, or what a kernel in front leaves of it."""
        return self.x if self.norm is None else norm_input_of(self.x, self.norm)

    @property
    def next_norm(self) -> PackedNorm:
        """Return a norm for the result."""
        width, generator = self.x.shape[1], torch.Generator().manual_seed(self.x.shape[1])
        return pack_norm((torch.rand(width, generator=generator) * 6 - 3).to(self.x), EPS)

    def by_hand(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the result of separate operations in ``dtype``."""
        x = self.x.to(dtype)
        normed = x
        if self.norm is not None and self.norm.weight is not None:
            normed = F.rms_norm(x, x.shape[1:], self.norm.weight.to(dtype), self.norm.eps)
        logits = self.router_logits.double()
        chosen = torch.zeros_like(logits, dtype=torch.bool)
        for row, marks in zip(logits.tolist(), chosen, strict=True):
            # Python's sort keeps the order of equals.
            marks[sorted(range(len(row)), key=lambda index: -row[index])[: self.experts.top_k]] = True
        weights = torch.softmax(logits, 1) * chosen
        if self.experts.renormalize:
            weights /= weights.sum(1, keepdim=True)
        result = torch.zeros_like(x)
        for expert, takes in enumerate(chosen.T):
            # One expert at a time in float64: all of Qwen3 30B-A3B's take 5 GB.
            gate_up, down = self.experts.matrices(expert, dtype)
            gate, factor = (normed[takes] @ gate_up.T).chunk(2, 1)
            output = (F.silu(gate) * factor) @ down.T
            result[takes] += output * weights[takes, expert].to(dtype)[:, None]
        return result if self.residual is None else result + self.residual.to(dtype)

    def check(self, actual: torch.Tensor, left: NormInput | None) -> None:
        """Hold a result to the budget, and what it leaves to a norm, if that was asked for, to the result."""
        assert actual.dtype == self.x.dtype
        assert_within_budget(actual, self.by_hand(torch.float64), self.by_hand(self.x.dtype))
        if left is not None:
            check_left(left, left.norm, actual)


def make_case(
    num_tokens: int,
    num_experts: int = 6,
    top_k: int = 2,
    width: int = 72,
    inner: int = 40,
    dtype: torch.dtype = torch.float32,
    *,
    renormalize: bool = True,
    residual: bool = True,
    norm: bool = False,
    float8: bool = False,
    device: str = "cpu",
    has_values: bool = True,
) -> Case:
    """Return random arguments, or some that were never written; ``x`` and the residual are views of wider rows."""
    generator = torch.Generator(device).manual_seed(num_tokens + num_experts)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        if not has_values:
            return torch.empty(shape, dtype=dtype, device=device)
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    def random_float8(*shape: int) -> Float8Experts:
        rows, depth = shape[2:]
        scales = torch.empty((*shape[:2], -(-rows // 128), -(-depth // 128)), device=device)
        values = torch.empty(shape, dtype=torch.uint8, device=device)
        if has_values:
            # Every finite number, and scales that differ by far.
            values.copy_(torch.randint(0, 127, shape, generator=generator, device=device))
            values += 128 * torch.randint(0, 2, shape, generator=generator, device=device).to(torch.uint8)
            scales.copy_(torch.rand(scales.shape, generator=generator, device=device))
            scales.mul_(6).sub_(3).exp2_().mul_(depth**-0.5 / 100)
        return Float8Experts(values.view(torch.float8_e4m3fn), scales)

    return Case(
        random(num_tokens, width + 5)[:, :width],
        random(num_tokens, num_experts),
        Experts(
            random_float8(num_experts, 2, inner, width)
            if float8
            else random(num_experts, 2 * inner, width, scale=width**-0.5),
            random_float8(num_experts, 1, width, inner)
            if float8
            else random(num_experts, width, inner, scale=inner**-0.5),
            top_k,
            renormalize,
        ),
        random(num_tokens, width + 3)[:, :width] if residual else None,
        pack_norm(random(width, scale=1.5), EPS) if norm else None,
    )
