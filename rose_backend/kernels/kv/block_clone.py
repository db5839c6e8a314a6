"""Copy KV blocks of all layers in one launch, as 16-byte words.

A program copies the same few words of several blocks. Where a destination may be another pair's source, it takes those
words of all pairs at once: it loads them all, waits for its threads, and stores them all. No other program touches
those words, so chains and cycles need no order. Pairs known not to depend on one another are spread over programs.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rose_backend.kernels.tuning.measured import constants

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
