"""One product with a quantized weight, of one row to thousands, beside the products that vLLM has for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernel_cases import case
from benchmarks.kernel_cases.case import ROSE, Contest, KernelCase, Launches
from benchmarks.kernel_cases.layer import LLAMA_8B
from rose_backend.kernels import (
    Float8Weight,
    InputQuantization,
    Int4Weight,
    pack_linear,
    quantize,
    quantized_linear,
    small_batch_linear,
)
from rose_backend.kernels.arguments import SCALED_BLOCK
from rose_backend.layers.decoder import max_packed_float8_rows, max_packed_int4_rows

KINDS = ("rows", "blocks")
"""What one scale of a weight is for."""
_ROWS = (1, 8, 32, 64, 128, 512, 2048, 8192)
INT4_GROUP = 128


def _weights(count: int, columns: int, depth: int, kind: str) -> list[Float8Weight]:
    scales = (columns, 1) if kind == "rows" else (-(-columns // SCALED_BLOCK), -(-depth // SCALED_BLOCK))
    return [
        Float8Weight(
            torch.randn(columns, depth, device="cuda").to(torch.float8_e4m3fn),
            torch.rand(scales, device="cuda") * depth**-0.5,
        )
        for _ in range(count)
    ]


def float8_case(columns: int, depth: int, kind: str, num_rows: int) -> KernelCase:
    """A product with scales of ``kind``: Rose's kernel, or torch's product where Rose takes that one.

    Peers are given activations in 8 bits: the kernel that rounds them is not timed.
    """

    def make(num_sets: int) -> Contest:
        by_group = kind == "blocks"
        weights = _weights(num_sets, columns, depth, kind)
        x = torch.randn(num_rows, depth, device="cuda").bfloat16()
        quantized = quantize(x, InputQuantization(by_group, aligned_scales=by_group))
        sides: dict[str, Launches] = {ROSE: [partial(quantized_linear, quantized, each) for each in weights]}
        if num_rows <= max_packed_float8_rows(has_blocks=by_group, splits=True):
            packed = map(pack_linear, weights)
            sides = {ROSE: [partial(small_batch_linear, x, each) for each in packed], "torch": sides[ROSE]}
        case.add_peer(sides, "CUTLASS", partial(_cutlass, x, weights, by_group))
        if by_group:
            case.add_peer(sides, "DeepGEMM", partial(_deep_gemm, x, weights))
        sides["torch, bfloat16"] = [partial(F.linear, x, each.dequantized(x.dtype)) for each in weights]
        # Some sides round activations to e4m3, by at most a sixteenth each.
        return Contest(sides, tolerance=5e-2)

    plural = "" if num_rows == 1 else "s"
    name = f"float8 by {kind}, {columns} x {depth}, {num_rows} row{plural}"
    num_bytes = columns * depth + 2 * num_rows * (columns + depth)
    return KernelCase(name, num_bytes, make, flops=2 * num_rows * columns * depth)


def _cutlass(x: torch.Tensor, weights: list[Float8Weight], by_group: bool) -> Launches:
    from vllm._custom_ops import cutlass_scaled_mm

    given = quantize(x, InputQuantization(by_group))
    return [
        partial(
            cutlass_scaled_mm,
            given.values,
            weight.values.t(),
            given.scales,
            weight.scales.t() if by_group else weight.scales,
            x.dtype,
        )
        for weight in weights
    ]


def _deep_gemm(x: torch.Tensor, weights: list[Float8Weight]) -> Launches:
    from vllm.utils.deep_gemm import fp8_gemm_nt, is_deep_gemm_supported

    if not is_deep_gemm_supported():
        raise ImportError("vLLM finds no DeepGEMM")
    given = quantize(x, InputQuantization(by_group=True, aligned_scales=True))

    def multiply(weight: Float8Weight) -> Any:
        out = x.new_empty(len(x), len(weight.values))
        factors = (given.values, given.scales), (weight.values, weight.scales)
        fp8_gemm_nt(*factors, out, is_deep_gemm_e8m0_used=False)
        return out

    return [partial(multiply, weight) for weight in weights]


def int4_case(columns: int, depth: int, num_rows: int) -> KernelCase:
    """A product with a scale for each 128 columns: Rose's kernel, or the matrix in 16 bits and torch's product."""

    def make(num_sets: int) -> Contest:
        weights = [
            Int4Weight(
                torch.randint(-(1 << 15), 1 << 15, (columns, depth // 4), dtype=torch.int16, device="cuda"),
                (torch.rand(depth // INT4_GROUP, columns, device="cuda") * depth**-0.5 / 4).bfloat16(),
                None,
                depth,
            )
            for _ in range(num_sets)
        ]
        x = torch.randn(num_rows, depth, device="cuda").bfloat16()
        sides: dict[str, Launches] = {ROSE: [partial(quantized_linear, x, each) for each in weights]}
        if num_rows <= max_packed_int4_rows():
            sides = {ROSE: [partial(small_batch_linear, x, pack_linear(each)) for each in weights]}
        case.add_peer(sides, "Machete", partial(_machete, x, weights))
        case.add_peer(sides, "Marlin", partial(_marlin, x, weights))
        sides["torch, bfloat16"] = [partial(F.linear, x, each.dequantized(x.dtype)) for each in weights]
        # Peers round scaled weights to 16 bits.
        return Contest(sides, tolerance=1e-2)

    plural = "" if num_rows == 1 else "s"
    num_bytes = columns * depth // 2 + 2 * columns * depth // INT4_GROUP + 2 * num_rows * (columns + depth)
    name = f"int4, {columns} x {depth}, {num_rows} row{plural}"
    return KernelCase(name, num_bytes, make, flops=2 * num_rows * columns * depth)


def _by_column(weight: Int4Weight) -> torch.Tensor:
    """Return a weight's codes as GPTQ stores them: [E / 8, O] int32, eight of a column in each."""
    ones = torch.ones_like(weight.scales, dtype=torch.float32)
    codes = Int4Weight(weight.words, ones, None, weight.num_columns).dequantized(torch.float32).int() + 8
    shifts = torch.arange(0, 32, 4, device=codes.device, dtype=torch.int32)[:, None]
    return (codes.t().unflatten(0, (-1, 8)) << shifts).sum(1, dtype=torch.int32)


def _machete(x: torch.Tensor, weights: list[Int4Weight]) -> Launches:
    from vllm import _custom_ops
    from vllm.scalar_type import scalar_types

    form = scalar_types.uint4b8
    return [
        partial(
            _custom_ops.machete_mm,
            x,
            _custom_ops.machete_prepack_B(_by_column(each).t().contiguous().t(), x.dtype, form, x.dtype),
            form,
            b_group_scales=each.scales,
            b_group_size=INT4_GROUP,
        )
        for each in weights
    ]


def _marlin(x: torch.Tensor, weights: list[Int4Weight]) -> Launches:
    from vllm import _custom_ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.scalar_type import scalar_types

    none, workspace = (
        marlin_utils.marlin_make_empty(x.device),
        marlin_utils.marlin_make_workspace_new(x.device),
    )
    launches = []
    for each in weights:
        columns, depth = each.shape
        words = _custom_ops.gptq_marlin_repack(_by_column(each), depth, columns, 4)
        scales = marlin_utils.marlin_permute_scales(each.scales, depth, columns, INT4_GROUP)
        given = (x, words, scales, none, workspace, scalar_types.uint4b8, columns, depth)
        launches.append(partial(marlin_utils.apply_gptq_marlin_linear, *given))
    return launches


CASES = {
    "float8": [
        float8_case(*product, kind, num_rows)
        for kind in KINDS
        for product in LLAMA_8B.products
        for num_rows in _ROWS
    ],
    "int4": [int4_case(*product, num_rows) for product in LLAMA_8B.products for num_rows in _ROWS],
}
