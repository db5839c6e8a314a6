"""The Triton kernel of the block clone, interpreted on small caches and compiled for three generations of GPUs."""

from __future__ import annotations

import importlib

import pytest
import torch

from rose_backend.kernels.kv import reference as twin
from tests.support.aot import compile_launch, compiles, record_launches
from tests.support.interpreter import run_interpreted

CHAIN, CYCLE = [(1, 2), (2, 3), (3, 4)], [(1, 2), (2, 3), (3, 1)]
PAIRS = {
    "one": [(4, 0)],
    "independent": [(1, 5), (2, 6), (3, 0)],
    "fan": [(3, 0), (3, 1), (3, 6)],
    "chain": CHAIN,
    "chain_backwards": CHAIN[::-1],
    "cycle": CYCLE,
    "swap_and_copy": [(0, 6), (6, 0), (2, 4)],
    "to_itself": [(1, 1), (5, 2)],
}


def launch(
    storage: torch.Tensor,
    cache: torch.Tensor,
    pairs: list[tuple[int, int]],
    block_dim: int,
    id_dtype: torch.dtype,
    max_dependent_pairs: int,
) -> torch.Tensor:
    """Run the launcher's device path; return what became of the storage."""
    from rose_backend.kernels.kv import block_clone as gpu

    gpu.MAX_DEPENDENT_PAIRS = max_dependent_pairs
    launcher = importlib.import_module("rose_backend.kernels.kv.ops")
    src, dst = torch.tensor(pairs, dtype=id_dtype).unbind(1)
    launcher._launch(cache, src, dst, block_dim)
    return storage


def clone_and_check(
    storage: torch.Tensor,
    cache: torch.Tensor,
    pairs: list[tuple[int, int]],
    block_dim: int,
    id_dtype: torch.dtype = torch.int32,
    max_dependent_pairs: int = 8192,
) -> None:
    expected = storage.clone()
    view = expected.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    twin.block_clone(view, *torch.tensor(pairs).unbind(1), block_dim=block_dim)
    actual = run_interpreted(launch, storage, cache, pairs, block_dim, id_dtype, max_dependent_pairs)
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_every_kind(name: str) -> None:
    storage = torch.randn(2, 2, 7, 4, 3, 8).half()
    clone_and_check(storage, storage, PAIRS[name], block_dim=2)
    clone_and_check(storage, storage, PAIRS[name], block_dim=2, id_dtype=torch.int64)


@pytest.mark.parametrize("layout", ["keys", "every_second", "blocks_innermost", "shifted", "padded", "bytes"])
def test_any_layout_and_nothing_beside_it(layout: str) -> None:
    storage = torch.randn(2, 7, 4, 3, 16).half()
    block_dim = 1
    if layout == "keys":
        cache = storage[..., :8]
    elif layout == "every_second":
        cache = storage[..., ::2]
    elif layout == "blocks_innermost":
        cache, block_dim = storage.movedim(1, -1), -1
    elif layout == "shifted":
        storage = torch.randn(2 * 7 * 12 + 1).half()
        cache = storage[1:].view(2, 7, 12)
    elif layout == "padded":
        # Blocks are 16 bytes apart, layers are not a multiple of that.
        storage = torch.randn(2, 57).half()
        cache = storage[:, :56].unflatten(1, (7, 8))
    else:
        storage = torch.randint(0, 255, (2, 7, 13), dtype=torch.uint8)
        cache = storage
    clone_and_check(storage, cache, CYCLE, block_dim)
    clone_and_check(storage, cache, PAIRS["independent"], block_dim)


def test_more_dependent_pairs_than_one_program_holds() -> None:
    storage = torch.randn(2, 7, 8)
    clone_and_check(storage, storage, CYCLE, block_dim=1, max_dependent_pairs=2)


def test_blocks_are_described_by_few_wide_dimensions() -> None:
    from rose_backend.kernels.kv.block_clone import block_layout

    cache = torch.empty(12, 2, 100, 16, 12, 64, dtype=torch.float16, device="meta")
    layout = block_layout(tuple(cache.shape), cache.stride(), 2, 2, 16)
    assert (layout.shape, layout.strides) == ((3072, 24), (1, 307200))
    assert (layout.element.primitive_bitwidth, layout.block_stride) == (64, 3072)


@compiles("_block_clone_kernel")
def test_compiles_to_16_byte_words_without_spills(capability: int) -> None:
    from rose_backend.kernels.kv import block_clone as gpu

    cache = torch.empty(4, 2, 600, 16, 4, 64, dtype=torch.float16)
    with record_launches(gpu, "_block_clone_kernel") as launches:
        for num_pairs, independent in ((256, True), (256, False), (8192, False)):
            ids = torch.zeros(num_pairs, dtype=torch.int32)
            gpu.block_clone(cache, ids, ids, block_dim=2, independent=independent)
    for recorded in launches:
        resources = compile_launch(recorded, capability)
        assert "ld.global.v2.b64" in resources.ptx and "st.global.v2.b64" in resources.ptx
