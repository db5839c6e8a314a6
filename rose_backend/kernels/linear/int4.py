"""Int4 weights on a GPU: codes of 4 bits as numbers in registers, and rows of a matrix in the type of ``x``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rose_backend.kernels.arguments import INT4_ZERO, Int4Weight

_ZERO = tl.constexpr(INT4_ZERO)


def _assembler(kind: str, base: int, one: int) -> tl.constexpr:
    """Return what makes eight numbers, in four registers, of two words in one.

    A code becomes the last bits of a mantissa that counts ones: that is ``base`` and the code. To each of a word's four
    codes a separate operand is added.

    Args:
        kind: of the numbers that come out, ``bf16x2`` or ``f16x2``.
        base, one: bits of two such numbers: of the base and of 1.
    """
    moves = "".join(
        f"{f' shr.b32 code, $4, {4 * index};' if index else ' mov.b32 code, $4;'}"
        f" lop3.b32 code, code, 0x000f000f, {base:#010x}, 0xea;"
        f" fma.rn.{kind} ${index}, code, ones, ${5 + index};"
        for index in range(4)
    )
    # A plain sum needs compute capability 9.0.
    return tl.constexpr(f"{{ .reg .b32 code, ones; mov.b32 ones, {one:#010x};{moves} }}")


_TO_BFLOAT16 = _assembler("bf16x2", 0x43004300, 0x3F803F80)  # 128
_TO_FLOAT16 = _assembler("f16x2", 0x64006400, 0x3C003C00)  # 1024
_REGISTERS = tl.constexpr("=r,=r,=r,=r,r,r,r,r,r")


@triton.jit
def from_int4(words, zeros, DTYPE: tl.constexpr, BY_ASSEMBLER: tl.constexpr):
    """Return four tiles of numbers in ``DTYPE``, which is exact: each code of the words, less its zero.

    ``zeros`` are four, [rows, 1] or [1, 1] of uint8. ``BY_ASSEMBLER`` makes eight numbers at once, on every GPU; not
    for Triton's interpreter, and not for float32.
    """
    if BY_ASSEMBLER and tl.bfloat16 == DTYPE:
        first, second, third, fourth = tl.inline_asm_elementwise(
            _TO_BFLOAT16,
            _REGISTERS,
            [
                words,
                (-128 - zeros[0].to(tl.int32)).to(DTYPE),
                (-128 - zeros[1].to(tl.int32)).to(DTYPE),
                (-128 - zeros[2].to(tl.int32)).to(DTYPE),
                (-128 - zeros[3].to(tl.int32)).to(DTYPE),
            ],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif BY_ASSEMBLER and tl.float16 == DTYPE:
        first, second, third, fourth = tl.inline_asm_elementwise(
            _TO_FLOAT16,
            _REGISTERS,
            [
                words,
                (-1024 - zeros[0].to(tl.int32)).to(DTYPE),
                (-1024 - zeros[1].to(tl.int32)).to(DTYPE),
                (-1024 - zeros[2].to(tl.int32)).to(DTYPE),
                (-1024 - zeros[3].to(tl.int32)).to(DTYPE),
            ],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        first = _number(words, zeros, 0, DTYPE)
        second = _number(words, zeros, 1, DTYPE)
        third = _number(words, zeros, 2, DTYPE)
        fourth = _number(words, zeros, 3, DTYPE)
    return first, second, third, fourth


@triton.jit
def _number(words, zeros, INDEX: tl.constexpr, DTYPE: tl.constexpr):
    return (((words.to(tl.int32) >> (4 * INDEX)) & 15) - zeros[INDEX].to(tl.int32)).to(DTYPE)


@triton.jit
def of_codes(
    tensor_ptr,  # [N, O], scales or zeros; None: zeros, which are INT4_ZERO
    rows,
    num_rows,  # O
    column,
    K: tl.constexpr,  # E
    STEP: tl.constexpr,  # as in WeightFormat
    GROUP: tl.constexpr,
):
    """Return scales or zeros of the four codes of words whose first one is of ``column``: [rows, 1] each, or [1, 1].

    Past the last column they are those of the last group.
    """
    if tensor_ptr is None:
        first = tl.full([1, 1], _ZERO, tl.uint8)
        third = first
    else:
        first = tl.load(tensor_ptr + rows + _group(column, K, GROUP) * num_rows)[:, None]
        third = first
        if GROUP > 0:
            third = tl.load(tensor_ptr + rows + _group(column + 2 * STEP, K, GROUP) * num_rows)[:, None]
    second, fourth = first, third
    if tensor_ptr is not None and GROUP == STEP:
        second = tl.load(tensor_ptr + rows + _group(column + STEP, K, GROUP) * num_rows)[:, None]
        fourth = tl.load(tensor_ptr + rows + _group(column + 3 * STEP, K, GROUP) * num_rows)[:, None]
    return first, second, third, fourth


@triton.jit
def _group(column, K: tl.constexpr, GROUP: tl.constexpr):
    group = 0
    if GROUP > 0:
        group = tl.minimum(column, K - 1) // GROUP
    return group


_ROWS, _WORDS = 8, 256
"""Of a program that writes rows in another type."""


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _dequantize_int4_kernel(
    words_ptr,  # [O, M] int16
    scales_ptr,  # [N, O]
    zeros_ptr,  # [N, O] uint8, or None
    out_ptr,  # [num_rows, E]  written
    first_row,
    num_rows,
    num_stored_rows,  # O
    K: tl.constexpr,  # E
    WIDTH: tl.constexpr,  # M
    STEP: tl.constexpr,  # as in WeightFormat
    GROUP: tl.constexpr,  # columns that share a scale
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One program per tile of the rows from ``first_row`` on, and of words: whole chunks."""
    CHUNKS: tl.constexpr = WORDS // STEP
    out_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = tl.minimum(first_row + out_rows, num_stored_rows - 1)
    chunks = (tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS))[None, :, None]
    steps = tl.arange(0, STEP)[None, None, :]
    places = chunks * STEP + steps
    words = tl.load(
        words_ptr + rows.to(tl.int64)[:, None, None] * WIDTH + places, mask=places < WIDTH, other=0
    )
    out_ptrs = out_ptr + out_rows.to(tl.int64)[:, None, None] * K
    in_rows = (out_rows < num_rows)[:, None, None]
    for code in tl.static_range(4):
        firsts = chunks * (4 * STEP) + code * STEP
        of_group = tl.minimum(firsts, K - 1) // GROUP * num_stored_rows + rows[:, None, None]
        zeros = tl.full([1, 1, 1], _ZERO, tl.int32)
        if zeros_ptr is not None:
            zeros = tl.load(zeros_ptr + of_group).to(tl.int32)
        numbers = ((words.to(tl.int32) >> (4 * code)) & 15) - zeros
        numbers = numbers.to(tl.float32) * tl.load(scales_ptr + of_group).to(tl.float32)
        columns = firsts + steps
        tl.store(out_ptrs + columns, numbers.to(out_ptr.dtype.element_ty), mask=in_rows & (columns < K))


def dequantize_int4(
    weight: Int4Weight,  # [O, E]
    first: int,
    out: torch.Tensor,  # [rows, E]  written
) -> None:
    """Write rows of a weight from ``first`` on, each number rounded once from float32."""
    count, depth = out.shape
    num_rows, width = weight.words.shape
    _dequantize_int4_kernel[(triton.cdiv(count, _ROWS), triton.cdiv(width, _WORDS))](
        weight.words,
        weight.scales,
        weight.zeros,
        out,
        first,
        count,
        num_rows,
        K=depth,
        WIDTH=width,
        STEP=weight.step,
        GROUP=weight.group_size,
        ROWS=_ROWS,
        WORDS=_WORDS,
    )
