"""The four products of a GPT-2 layer at few rows, with the norms, activations and sums around them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.kernel_cases.case import ROSE, Contest, KernelCase
from rose_backend.kernels import pack_linear, small_batch_linear, small_batch_linear_and_moments

EPS = 1e-5
CUBLAS = "cuBLAS and torch"
WIDTH = 768
# Columns, depth, a norm in front.
SHAPES = ((2304, 768, True), (768, 768, False), (3072, 768, True), (768, 3072, False))
WEIGHT_BYTES = sum(columns * depth for columns, depth, _ in SHAPES) * 2


class Layer:
    """One layer's weights. What attention would make is taken from the queries, so that each product waits."""

    def __init__(self, num_rows: int) -> None:
        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, device="cuda") * scale).half()

        self.x = random(num_rows, WIDTH)
        self.weights = [random(columns, depth, scale=depth**-0.5) for columns, depth, _ in SHAPES]
        self.biases = [random(columns) for columns, _, _ in SHAPES]
        self.norms = [(1 + random(WIDTH, scale=0.1), random(WIDTH, scale=0.1)) for _ in range(2)]

    def rose(self) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Four launches; all four results."""
        norms = (self.norms[0], (None, None), self.norms[1], (None, None))
        qkv, projection, widen, narrow = (
            pack_linear(weight, bias, norm_weight=norm[0], norm_bias=norm[1], eps=EPS)
            for weight, bias, norm in zip(self.weights, self.biases, norms, strict=True)
        )

        # In a model the layer in front has left them.
        wide_x = self.x.float()
        moments = torch.stack([wide_x.sum(1), wide_x.square().sum(1)], 1).unsqueeze(2)

        def run() -> tuple[torch.Tensor, ...]:
            states = small_batch_linear(self.x, qkv, x_moments=moments)
            query = states[:, :WIDTH]
            hidden, hidden_moments = small_batch_linear_and_moments(query, projection, residual=self.x)
            wide = small_batch_linear(hidden, widen, gelu=True, x_moments=hidden_moments)
            return states, hidden, wide, small_batch_linear_and_moments(wide, narrow, residual=hidden)[0]

        return run

    def cublas(self) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Four products with their biases, and an operation of torch for each other part; the products' results."""

        def run() -> tuple[torch.Tensor, ...]:
            weights, biases = [weight.T for weight in self.weights], self.biases
            normed = F.layer_norm(self.x, (WIDTH,), *self.norms[0], EPS)
            states = torch.addmm(biases[0], normed, weights[0])
            hidden = torch.addmm(biases[1], states[:, :WIDTH], weights[1]) + self.x
            normed = F.layer_norm(hidden, (WIDTH,), *self.norms[1], EPS)
            wide = F.gelu(torch.addmm(biases[2], normed, weights[2]), approximate="tanh")
            return states, hidden, wide, torch.addmm(biases[3], wide, weights[3]) + hidden

        return run


def layer_case(num_rows: int) -> KernelCase:
    """All four products of one layer; a set of inputs is a layer."""

    def make(num_sets: int) -> Contest:
        layers = [Layer(num_rows) for _ in range(num_sets)]
        return Contest(
            {ROSE: [layer.rose() for layer in layers], CUBLAS: [layer.cublas() for layer in layers]},
            observe=lambda side, results: results,
            tolerance=3e-3,
        )

    plural = "" if num_rows == 1 else "s"
    flops = num_rows * WEIGHT_BYTES
    return KernelCase(f"products of a GPT-2 layer, {num_rows} row{plural}", WEIGHT_BYTES, make, flops=flops)


CASES = {"linear": [layer_case(num_rows) for num_rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)]}
