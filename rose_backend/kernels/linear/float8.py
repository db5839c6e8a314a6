"""Float8 weights on a GPU: numbers of 8 bits in registers, activations as sums of two, rows in the type of ``x``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rose_backend.kernels.arguments import SCALED_BLOCK, Float8Weight
from rose_backend.kernels.gpu_properties import has_dependent_launch


def _assembler(kind: str, shift: int, factor: int) -> tl.constexpr:
    """Return what makes two registers of two wider numbers each of four e4m3 numbers in one.

    Args:
        kind: of the numbers that come out, ``bf16x2`` or ``f16x2``.
        shift: of a number, sign-extended to 16 bits, that moves exponent and mantissa to where they go.
        factor: that makes up for the exponents' biases.
    """
    # What is shifted in between the sign and the exponent are copies of the sign.
    mask = 0x8000 | 0x7F << shift
    moves = "".join(
        f" prmt.b32 {name}, $2, 0, {order}; shl.b32 {name}, {name}, {shift};"
        f" and.b32 {name}, {name}, {mask << 16 | mask:#010x};"
        for name, order in (("low", "0x9180"), ("high", "0xb3a2"))
    )
    products = " ".join(
        f"fma.rn.{kind} ${index}, {name}, factors, zeros;" for index, name in enumerate(("low", "high"))
    )
    return tl.constexpr(
        f"{{ .reg .b32 low, high, factors, zeros;{moves} mov.b32 factors, {factor:#010x};"
        # Adding -0 changes nothing; a plain product needs compute capability 9.0.
        f" mov.b32 zeros, 0x80008000; {products} }}"
    )


_TO_BFLOAT16 = _assembler("bf16x2", 4, 0x7B807B80)
_TO_FLOAT16 = _assembler("f16x2", 7, 0x5C005C00)


@triton.jit
def from_float8(bits, DTYPE: tl.constexpr, BY_ASSEMBLER: tl.constexpr):
    """Return e4m3 numbers, given as uint8, in ``DTYPE``, which is exact; the two NaN codes become 480 and -480.

    Exponent and mantissa go to where they are in the wider type. The exponents' biases differ, so the number is too
    small by a power of two, which it is multiplied by; that holds of subnormal numbers, too. ``BY_ASSEMBLER`` does so
    with four numbers at once, on every GPU; not for Triton's interpreter, and not for float32.
    """
    if BY_ASSEMBLER and tl.bfloat16 == DTYPE:
        numbers = tl.inline_asm_elementwise(
            _TO_BFLOAT16, "=r,=r,r", [bits], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    elif BY_ASSEMBLER and tl.float16 == DTYPE:
        numbers = tl.inline_asm_elementwise(
            _TO_FLOAT16, "=r,=r,r", [bits], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        wide = bits.to(tl.int32)
        moved = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        numbers = (moved.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DTYPE)  # 2**120
    return numbers


_GROUP = tl.constexpr(SCALED_BLOCK)
_SPLIT_COLUMNS = 8 * SCALED_BLOCK
"""Of a program that splits a row."""


@triton.jit
def _truncated(numbers):
    """Return float32 numbers without the bits that e4m3 does not have: four are left, or multiples of 2**-9."""
    leading = (numbers.to(tl.int32, bitcast=True) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(
        tl.abs(numbers) < 0.015625, (numbers * 512.0).to(tl.int32).to(tl.float32) / 512.0, leading
    )


@triton.jit(do_not_specialize=["num_rows"])
def _split_kernel(
    x_ptr,  # [T, E]
    parts_ptr,  # [T, 2, E] float8  written
    scales_ptr,  # [E / 128, T] float32  written
    num_rows,
    x_stride,
    K: tl.constexpr,  # E
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (row, part of its columns)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * (COLUMNS // _GROUP) + tl.arange(0, COLUMNS // _GROUP)
    columns = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = columns < K
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    # A power of two, which is exact: the largest number is divided into 128 to 256, of 448 that e4m3 has. Bounded, so
    # that all scales are normal numbers.
    exponents = tl.maximum(tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23, 17) - 7
    scales = (exponents << 23).to(tl.float32, bitcast=True)
    divided = x * ((254 - exponents) << 23).to(tl.float32, bitcast=True)[:, None]
    # Rounded down, as what is left has four bits then, and its sign.
    high = _truncated(divided)
    low = _truncated((divided - high) * 16.0)
    part_ptrs = parts_ptr + row * (2 * K) + columns
    tl.store(part_ptrs, high.to(tl.float8e4nv), mask=inside)
    tl.store(part_ptrs + K, low.to(tl.float8e4nv), mask=inside)
    tl.store(scales_ptr + groups.to(tl.int64) * num_rows + row, scales, mask=groups * _GROUP < K)


def split_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bfloat16 activations as sums of two float8 numbers each, which tensor cores multiply by float8 weights.

    The first number has the four leading bits, the second the other four. Numbers below 2**-13 of the largest one of
    their 128 columns lose bits: less than 2**-20 of the largest one, or of 2**-110 if that is larger.

    Args:
        x: [T, E], E a multiple of 128.

    Returns:
        The numbers, [T, 2, E] float8, of which the second is to be divided by 16, and what the sum is then to be
        multiplied by, [E / 128, T] float32.
    """
    num_rows, depth = x.shape
    parts = torch.empty((num_rows, 2, depth), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((depth // SCALED_BLOCK, num_rows), dtype=torch.float32, device=x.device)
    use_pdl = has_dependent_launch(x.device)
    _split_kernel[(num_rows, triton.cdiv(depth, _SPLIT_COLUMNS))](
        x,
        parts,
        scales,
        num_rows,
        x.stride(0),
        K=depth,
        COLUMNS=_SPLIT_COLUMNS,
        PDL=use_pdl,
        launch_pdl=use_pdl,
    )
    return parts, scales


_ROWS, _COLUMNS = 8, 1024
"""Of a program that writes rows in another type."""


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _dequantize_kernel(
    values_ptr,  # [O, E] uint8
    scales_ptr,  # of rows or of blocks
    scale_strides,
    out_ptr,  # [num_rows, E]  written
    first_row,
    num_rows,
    K: tl.constexpr,  # E
    SCALE_ROWS: tl.constexpr,  # as in WeightFormat
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program per tile of the rows from ``first_row`` on."""
    out_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows = first_row + out_rows
    inside = (out_rows < num_rows)[:, None] & (columns < K)[None, :]
    bits = tl.load(values_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :], mask=inside, other=0)
    if SCALE_ROWS == 1:
        scales = tl.load(scales_ptr + rows * scale_strides[0], mask=out_rows < num_rows, other=0.0)[:, None]
    else:
        down, across = rows // SCALE_ROWS * scale_strides[0], columns // SCALE_ROWS * scale_strides[1]
        places = down[:, None] + across[None, :]
        scales = tl.load(scales_ptr + places, mask=inside, other=0.0)
    numbers = from_float8(bits, tl.float32, False) * scales
    out_ptrs = out_ptr + out_rows.to(tl.int64)[:, None] * K + columns[None, :]
    tl.store(out_ptrs, numbers.to(out_ptr.dtype.element_ty), mask=inside)


def dequantize_float8(
    weight: Float8Weight,  # [O, E]
    first: int,
    out: torch.Tensor,  # [rows, E]  written
) -> None:
    """Write rows of a weight from ``first`` on, each number rounded once from float32."""
    count, depth = out.shape
    _dequantize_kernel[(triton.cdiv(count, _ROWS), triton.cdiv(depth, _COLUMNS))](
        weight.values.view(torch.uint8),
        weight.scales,
        weight.scales.stride(),
        out,
        first,
        count,
        K=depth,
        SCALE_ROWS=SCALED_BLOCK if weight.has_blocks else 1,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
    )
