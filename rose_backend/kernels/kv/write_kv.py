"""Store new keys and values at given slots of a paged cache: a program stores one KV head of a few tokens.

Attention converts to and from 8-bit caches with the same functions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
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
    """Return ``values`` as a cache of ``CACHE_DTYPE`` holds them, as ``kv.reference.to_cache`` bit for bit."""
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


class StoreStrides(NamedTuple):
    """Strides of new keys and values: tokens, heads, elements; and of caches: blocks, tokens, heads, elements."""

    new_key: tuple[int, ...]
    new_value: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]


_TOKEN_TILE = 16


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["slot_mapping_ptr", "key_scale_ptr", "value_scale_ptr"],
)
def _write_kv_kernel(
    new_key_ptr,
    new_value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    key_scale_ptr,
    value_scale_ptr,
    num_tokens,
    strides,  # StoreStrides
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
):
    head = (tl.program_id(0) % NUM_KV_HEADS).to(tl.int64)
    tokens = tl.program_id(0) // NUM_KV_HEADS * TOKEN_TILE + tl.arange(0, TOKEN_TILE)
    slots = tl.load(slot_mapping_ptr + tokens, mask=tokens < num_tokens, other=-1)
    dims = tl.arange(0, HEAD_TILE)[None, :].to(tl.int64)
    mask = (slots >= 0)[:, None] & (dims < HEAD_SIZE)
    rows = tokens.to(tl.int64)[:, None]
    block_ids = (slots // BLOCK_SIZE)[:, None]
    offsets = (slots % BLOCK_SIZE)[:, None]
    key = tl.load(new_key_ptr + _offsets(rows, head, dims, strides.new_key), mask)
    value = tl.load(new_value_ptr + _offsets(rows, head, dims, strides.new_value), mask)
    key = to_cache(key, load_scale(key_scale_ptr), key_cache_ptr.dtype.element_ty)
    value = to_cache(value, load_scale(value_scale_ptr), value_cache_ptr.dtype.element_ty)
    key_slots = block_ids * strides.key[0] + offsets * strides.key[1]
    value_slots = block_ids * strides.value[0] + offsets * strides.value[1]
    tl.store(key_cache_ptr + key_slots + head * strides.key[2] + dims * strides.key[3], key, mask)
    tl.store(value_cache_ptr + value_slots + head * strides.value[2] + dims * strides.value[3], value, mask)


@triton.jit
def _offsets(rows, head, dims, strides):
    return rows * strides[0] + head * strides[1] + dims * strides[2]


def write_kv(
    new_key: torch.Tensor,  # [T, HKV, D]
    new_value: torch.Tensor,  # [T, HKV, D]
    key_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    value_cache: torch.Tensor,  # [NB, BS, HKV, D]  written
    slot_mapping: torch.Tensor,  # [T] int64
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """``rose_backend.kernels.write_kv`` on a GPU."""
    num_tokens, num_kv_heads, head_size = new_key.shape
    if num_tokens == 0:
        return
    _write_kv_kernel[(num_kv_heads * triton.cdiv(num_tokens, _TOKEN_TILE),)](
        new_key,
        new_value,
        key_cache,
        value_cache,
        slot_mapping,
        key_scale,
        value_scale,
        num_tokens,
        StoreStrides(new_key.stride(), new_value.stride(), key_cache.stride(), value_cache.stride()),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        HEAD_TILE=triton.next_power_of_2(head_size),
        BLOCK_SIZE=key_cache.shape[1],
        TOKEN_TILE=_TOKEN_TILE,
    )
