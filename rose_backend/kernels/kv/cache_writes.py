"""Writes to a paged KV cache: copies of whole blocks in one launch, and new keys and values at given slots.

A program of a copy takes the same few 16-byte words of several blocks. Where a destination may be another pair's
source, it takes those words of all pairs at once: it loads them all, waits for its threads, and stores them all. No
other program touches those words, so chains and cycles need no order. Pairs known not to depend on one another are
spread over programs. A program that stores new tokens has one KV head of a few of them; attention converts to and from
8-bit caches with the same functions.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rose_backend.kernels.tuning.measured import constants

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
    """Return ``values`` as a cache of ``CACHE_DTYPE`` holds them, as ``kv.ops.to_cache`` bit for bit."""
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


MAX_DEPENDENT_PAIRS = 8192
"""Pairs of which one program can hold a word each in its registers."""

_WORD_BYTES = 16
_INDEPENDENT_TILE = constants("block clone")["independent_tile"]
_DEPENDENT_TILE = constants("block clone")["dependent_tile"]
"""Elements per program; of a tile for dependent pairs each pair has a part."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the elements of one block lie. Elements are integers of up to 8 bytes, sizes and strides count them."""

    element: tl.dtype
    block_stride: int
    shape: tuple[int, ...]
    """Innermost dimension first; its stride is 1 where anything is contiguous."""
    strides: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements per block."""
        return math.prod(self.shape)


@triton.jit(do_not_specialize=["num_pairs"])
def _block_clone_kernel(
    cache_ptr,
    src_ptr,  # [N]
    dst_ptr,  # [N]
    num_pairs,
    strides,  # no constants: that of layers follows from the number of blocks, which differs between starts
    ELEMENT: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SHAPE: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
    TILE_PAIRS: tl.constexpr,
    TILE_ELEMENTS: tl.constexpr,
):
    num_tiles: tl.constexpr = (BLOCK_ELEMENTS + TILE_ELEMENTS - 1) // TILE_ELEMENTS
    program = tl.program_id(0)
    pairs = program // num_tiles * TILE_PAIRS + tl.arange(0, TILE_PAIRS)
    elements = program % num_tiles * TILE_ELEMENTS + tl.arange(0, TILE_ELEMENTS)
    is_pair = pairs < num_pairs
    mask = is_pair[:, None] & (elements < BLOCK_ELEMENTS)[None, :]

    offsets = tl.zeros([TILE_ELEMENTS], tl.int64)
    for dim in tl.static_range(len(SHAPE)):
        offsets += (elements % SHAPE[dim]).to(tl.int64) * strides[dim]
        elements = elements // SHAPE[dim]
    src = tl.load(src_ptr + pairs, mask=is_pair, other=0).to(tl.int64) * BLOCK_STRIDE
    dst = tl.load(dst_ptr + pairs, mask=is_pair, other=0).to(tl.int64) * BLOCK_STRIDE

    cache = cache_ptr.to(tl.pointer_type(ELEMENT))
    words = tl.load(cache + (src[:, None] + offsets[None, :]), mask=mask)
    if TILE_PAIRS > 1:
        tl.debug_barrier()
    tl.store(cache + (dst[:, None] + offsets[None, :]), words, mask=mask)


def block_clone(
    kv_cache: torch.Tensor,
    src_block_ids: torch.Tensor,  # [N]
    dst_block_ids: torch.Tensor,  # [N]
    *,
    block_dim: int = 0,
    independent: bool = False,
) -> None:
    """``rose_backend.kernels.block_clone`` on a GPU for at least one pair.

    Args:
        independent: no destination is another pair's source; otherwise there are at most ``MAX_DEPENDENT_PAIRS``.
    """
    layout = block_layout(
        kv_cache.shape,
        kv_cache.stride(),
        kv_cache.element_size(),
        block_dim % kv_cache.ndim,
        math.gcd(kv_cache.data_ptr(), _WORD_BYTES),
    )
    num_pairs = len(src_block_ids)
    if independent or num_pairs == 1:
        tile_pairs, tile_elements = 1, _INDEPENDENT_TILE
    else:
        tile_pairs = triton.next_power_of_2(num_pairs)
        tile_elements = max(_WORD_BYTES // 8, min(2 * _INDEPENDENT_TILE, _DEPENDENT_TILE // tile_pairs))
    grid = (triton.cdiv(num_pairs, tile_pairs) * triton.cdiv(layout.num_elements, tile_elements),)
    _block_clone_kernel[grid](
        kv_cache,
        src_block_ids,
        dst_block_ids,
        num_pairs,
        layout.strides,
        ELEMENT=layout.element,
        BLOCK_STRIDE=layout.block_stride,
        SHAPE=layout.shape,
        BLOCK_ELEMENTS=layout.num_elements,
        TILE_PAIRS=tile_pairs,
        TILE_ELEMENTS=tile_elements,
        num_warps=min(max(tile_pairs * tile_elements // 512, 4), 32),
    )


@functools.lru_cache(maxsize=64)
def block_layout(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    block_dim: int,
    alignment: int,
) -> BlockLayout:
    """Describe one block by as few dimensions and as wide elements as its strides allow.

    Args:
        shape, strides: of the whole cache, strides in items of ``itemsize`` bytes.
        alignment: a number of bytes that divides the address of the cache.
    """
    dims = [(stride * itemsize, size) for stride, size in zip(strides, shape, strict=True)]
    block_stride = dims.pop(block_dim)[0]
    merged = [(1, itemsize)]  # (stride, size) in bytes, innermost first
    for stride, size in sorted(dim for dim in dims if dim[1] != 1):
        inner_stride, inner_size = merged[-1]
        if stride == inner_stride * inner_size:
            merged[-1] = (inner_stride, inner_size * size)
        else:
            merged.append((stride, size))
    outer_strides = [stride for stride, _ in merged[1:]]
    width = min(math.gcd(alignment, block_stride, merged[0][1], *outer_strides), 8)
    return BlockLayout(
        element={1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[width],
        block_stride=block_stride // width,
        shape=(merged[0][1] // width, *(size for _, size in merged[1:])),
        strides=(1, *(stride // width for stride in outer_strides)),
    )
