"""Keys and values in an 8-bit cache, inside Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

_LARGEST = tl.constexpr(448.0)


@triton.jit
def load_scale(scale_ptr):
    """Return the scale of a cache; ``scale_ptr`` is None where it is 1."""
    if scale_ptr is None:
        scale = 1.0
    else:
        scale = tl.load(scale_ptr).to(tl.float32)
    return scale


@triton.jit
def to_cache(values, scale, CACHE_DTYPE: tl.constexpr):
    """Return ``values`` as a cache of ``CACHE_DTYPE`` holds them, as ``reference.kv_cache.to_cache`` bit for bit."""
    if tl.float8e4nv == CACHE_DTYPE:
        # Rounded as torch's division is; a plain ``/`` may be off by two units in the last place.
        scaled = tl.div_rn(values.to(tl.float32), scale)
        scaled = tl.clamp(scaled, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
        values = scaled.to(tl.float8e4nv)
    return values


@triton.jit
def to_half(cached, BY_ASSEMBLER: tl.constexpr):
    """Return float8 numbers as float16, which is exact.

    ``BY_ASSEMBLER`` does the same where Triton cannot follow: so it converts in the layout that numbers are loaded in,
    16 at once, not byte by byte in the one that a transposed operand of a product has. Not for Triton's interpreter.
    """
    if BY_ASSEMBLER:
        halves = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
            " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            "=r,=r,r",
            [cached],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    else:
        halves = cached.to(tl.float16)
    return halves


@triton.jit
def scale_to_half(values):
    """Return rows of ``values`` as float16 beside the power of two that each is to be multiplied with.

    Exact for bfloat16, but for numbers below 2**-14 of a row's largest: those keep 2**-25 of it.
    """
    largest = tl.max(tl.abs(values.to(tl.float32)), 1)
    exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
    inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    halves = (values.to(tl.float32) * inverse[:, None]).to(tl.float16)
    return halves, exponent.to(tl.float32, bitcast=True)
