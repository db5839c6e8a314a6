"""The four products of a model's layer at few rows, with the norms, activations and sums around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.kernel_cases.case import ROSE, Contest, KernelCase
from rose_backend.kernels import (
    PackedNorm,
    norm_input_of,
    pack_linear,
    pack_norm,
    small_batch_linear,
    small_batch_linear_before_norm,
)

EPS = 1e-5
CUBLAS = "cuBLAS and torch"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a layer's products."""

    name: str
    products: tuple[tuple[int, int], ...]
    """Columns and depth: query, key and value together; attention's output; into the MLP; out of it."""
    is_gated: bool = True

    @property
    def weight_bytes(self) -> int:
        """Of numbers of 16 bits."""
        return 2 * sum(columns * depth for columns, depth in self.products)


GPT2_124M = LayerShape("GPT-2", ((2304, 768), (768, 768), (3072, 768), (768, 3072)), is_gated=False)
QWEN3_06B = LayerShape("Qwen3 0.6B", ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)))
LLAMA_1B = LayerShape("Llama 3.2 1B", ((3072, 2048), (2048, 2048), (16_384, 2048), (2048, 8192)))
LLAMA_8B = LayerShape("Llama 3.1 8B", ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)))
SHAPES = {"gpt2-124m": GPT2_124M, "qwen3-0.6b": QWEN3_06B, "llama-1b": LLAMA_1B, "llama-8b": LLAMA_8B}
WIDTH = 768


class Layer:
    """GPT-2's weights of a layer. What attention would make is the queries, so that each product waits."""

    def __init__(self, num_rows: int) -> None:
        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, device="cuda") * scale).half()

        self.x = random(num_rows, WIDTH)
        self.weights = [random(columns, depth, scale=depth**-0.5) for columns, depth in GPT2_124M.products]
        self.biases = [random(columns) for columns, _ in GPT2_124M.products]
        self.norms = [(1 + random(WIDTH, scale=0.1), random(WIDTH, scale=0.1)) for _ in range(2)]

    def rose(self) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Four launches; all four results."""
        norms = (self.norms[0], (None, None), self.norms[1], (None, None))
        qkv, projection, up, down = (
            pack_linear(weight, bias, norm_weight=norm[0], norm_bias=norm[1])
            for weight, bias, norm in zip(self.weights, self.biases, norms, strict=True)
        )

        norm = PackedNorm(None, EPS)
        x = norm_input_of(self.x, norm)  # In a model the layer in front has left it.

        def run() -> tuple[torch.Tensor, ...]:
            states = small_batch_linear(x, qkv)
            query = states[:, :WIDTH]
            hidden, left = small_batch_linear_before_norm(query, projection, norm, residual=self.x)
            wide = small_batch_linear(left, up, gelu=True)
            return states, hidden, wide, small_batch_linear_before_norm(wide, down, norm, residual=hidden)[0]

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


class GatedLayer:
    """As ``Layer`` of Llama's relatives: RMSNorm, a gated MLP, no biases."""

    def __init__(self, num_rows: int, shape: LayerShape) -> None:
        def random(*sizes: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(sizes, device="cuda") * scale).bfloat16()

        width = shape.products[0][1]
        self.query_width = shape.products[1][1]
        self.x = random(num_rows, width)
        self.weights = [random(columns, depth, scale=depth**-0.5) for columns, depth in shape.products]
        self.norms = [1 + random(width, scale=0.1) for _ in range(2)]

    def rose(self) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Four launches; all four results."""
        qkv, projection, up, down = (
            pack_linear(weight, gated=index == 2) for index, weight in enumerate(self.weights)
        )
        attn_norm, mlp_norm = (pack_norm(norm, EPS) for norm in self.norms)
        x = norm_input_of(self.x, attn_norm)

        def run() -> tuple[torch.Tensor, ...]:
            states = small_batch_linear(x, qkv)
            query = states[:, : self.query_width]
            hidden, left = small_batch_linear_before_norm(query, projection, mlp_norm, residual=self.x)
            wide = small_batch_linear(left, up)
            out, _ = small_batch_linear_before_norm(wide, down, attn_norm, residual=hidden)
            return states, hidden, wide, out

        return run

    def cublas(self) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Four products, and an operation of torch for each other part; the products' results."""

        def run() -> tuple[torch.Tensor, ...]:
            weights, width = [weight.T for weight in self.weights], self.x.shape[-1:]
            states = F.rms_norm(self.x, width, self.norms[0], EPS) @ weights[0]
            hidden = states[:, : self.query_width] @ weights[1] + self.x
            gate, factor = (F.rms_norm(hidden, width, self.norms[1], EPS) @ weights[2]).chunk(2, 1)
            wide = F.silu(gate) * factor
            return states, hidden, wide, wide @ weights[3] + hidden

        return run


def layer_case(num_rows: int, shape: LayerShape = GPT2_124M) -> KernelCase:
    """All four products of one layer; a set of inputs is a layer."""

    def make(num_sets: int) -> Contest:
        layers: list[Layer | GatedLayer] = [
            GatedLayer(num_rows, shape) if shape.is_gated else Layer(num_rows) for _ in range(num_sets)
        ]
        return Contest(
            {ROSE: [layer.rose() for layer in layers], CUBLAS: [layer.cublas() for layer in layers]},
            observe=lambda side, results: results,
            # Sums are rounded to 11 or 8 bits on the way.
            tolerance=2.5e-2 if shape.is_gated else 3e-3,
        )

    plural = "" if num_rows == 1 else "s"
    flops = num_rows * shape.weight_bytes
    name = f"products of a {shape.name} layer, {num_rows} row{plural}"
    return KernelCase(name, shape.weight_bytes, make, flops=flops)


_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CASES = {
    "linear": [
        *(layer_case(num_rows) for num_rows in _ROWS),
        *(
            layer_case(num_rows, shape)
            for shape in (QWEN3_06B, LLAMA_8B)
            for num_rows in _ROWS[::3] + _ROWS[-1:]
        ),
    ]
}
