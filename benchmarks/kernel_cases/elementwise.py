"""LayerNorm with the residual add in front, bias + GELU and bias + residual at GPT-2's widths, and torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from benchmarks.kernel_cases.case import ROSE, Contest, KernelCase
from rose_backend.kernels import add_layer_norm, bias_gelu, bias_residual

TORCH = "torch"
EPS = 1e-5
Operation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Name -> (width, passes over [T, width], ours, the same in torch); operations get x, residual, weight and bias.
OPERATIONS: dict[str, tuple[int, int, Operation, Operation]] = {
    "add_layer_norm": (
        768,
        4,
        lambda x, residual, weight, bias: add_layer_norm(x, residual, weight, bias, EPS)[0],
        lambda x, residual, weight, bias: F.layer_norm(x + residual, weight.shape, weight, bias, EPS),
    ),
    "bias_gelu": (
        3072,
        2,
        lambda x, residual, weight, bias: bias_gelu(x, bias),
        lambda x, residual, weight, bias: F.gelu(x + bias, approximate="tanh"),
    ),
    "bias_residual": (
        768,
        3,
        lambda x, residual, weight, bias: bias_residual(x, bias, residual),
        lambda x, residual, weight, bias: x + bias + residual,
    ),
}


def operation_case(name: str, num_tokens: int) -> KernelCase:
    """Run one operation on float16 activations."""
    width, passes, ours, torchs = OPERATIONS[name]

    def make(num_sets: int) -> Contest:
        sets = []
        for _ in range(num_sets):
            x, residual = torch.randn(2, num_tokens, width, dtype=torch.float16, device="cuda")
            weight, bias = torch.randn(2, width, dtype=torch.float16, device="cuda")
            sets.append((x, residual, weight, bias))
        first = sets[0][0].clone()

        def bind(operation: Operation, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
            return lambda: operation(*inputs)

        return Contest(
            {
                ROSE: [bind(ours, inputs) for inputs in sets],
                TORCH: [bind(torchs, inputs) for inputs in sets],
            },
            # Two of ours work in place.
            reset=lambda: sets[0][0].copy_(first),
            tolerance=2e-3,
        )

    return KernelCase(f"{name} T={num_tokens:,}", passes * num_tokens * width * 2, make)


def cases() -> Iterator[KernelCase]:
    """Yield the cases that the table shows."""
    for name in OPERATIONS:
        for num_tokens in (1, 32, 256, 16_384):
            yield operation_case(name, num_tokens)
