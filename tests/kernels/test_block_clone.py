"""Destinations become their sources as they were before the call; every other block stays, bit for bit."""

from __future__ import annotations

import pytest
import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels import block_clone
from tests.support.paged_inputs import same_bits


def ids(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("block_dim", [0, 2, -4])
@pytest.mark.parametrize("strided", [False, True])
def test_clones_whole_blocks(block_dim: int, strided: bool, id_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = [11, 2, 11, 4, 2, 8] if block_dim != -4 else [3, 2, 11, 4, 2, 8]
    cache = torch.randn(shape, generator=generator)
    if strided:
        cache = torch.randn([*shape[:-1], 2 * shape[-1]], generator=generator)[..., ::2]
    before = cache.clone()
    # 7 is a destination and another pair's source; 3 is the source of two pairs.
    src, dst = ids(3, 7, 3, 0, dtype=id_dtype), ids(7, 5, 10, 1, dtype=id_dtype)
    block_clone(cache, src, dst, block_dim=block_dim)
    expected = before.movedim(block_dim, 0).clone()
    expected[dst.long()] = before.movedim(block_dim, 0)[src.long()]
    assert same_bits(cache.movedim(block_dim, 0).contiguous(), expected.contiguous())


def test_swap_reads_all_sources_first() -> None:
    cache = torch.arange(6.0).view(3, 2)
    block_clone(cache, ids(0, 2), ids(2, 0))
    assert cache.tolist() == [[4.0, 5.0], [2.0, 3.0], [0.0, 1.0]]


def test_no_pairs() -> None:
    cache = torch.randn(3, 2)
    before = cache.clone()
    block_clone(cache, ids(), ids())
    assert same_bits(cache, before)


def test_mismatches_are_named() -> None:
    cache = torch.zeros(3, 2)
    with pytest.raises(ShapeError, match="dst_block_ids: expected N=2, got 1"):
        block_clone(cache, ids(0, 1), ids(2))
    with pytest.raises(ShapeError, match=r"src_block_ids: expected dtype torch.int32 or torch.int64"):
        block_clone(cache, ids(0, dtype=torch.int16), ids(2))
    with pytest.raises(ShapeError, match=r"block_dim: expected a dimension of kv_cache \[3, 2\], got 2"):
        block_clone(cache, ids(0), ids(2), block_dim=2)
