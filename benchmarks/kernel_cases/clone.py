"""Block clones of a whole GPT-2 cache: 590 kB per block, all layers, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.kernel_cases.timing import KernelCase
from rose_backend.kernels.gpu.block_clone import block_clone

BLOCK_SHAPE = (16, 12, 64)
NUM_LAYERS, NUM_BLOCKS = 12, 6000
BLOCK_BYTES = NUM_LAYERS * 2 * 16 * 12 * 64 * 2


def clone_case(num_pairs: int, *, independent: bool) -> KernelCase:
    """Copy random blocks over other random blocks; with ``independent`` off as if they might be chained."""

    def make_launches(num_sets: int) -> Sequence[Callable[[], object]]:
        cache = torch.randn(NUM_LAYERS, 2, NUM_BLOCKS, *BLOCK_SHAPE, dtype=torch.float16, device="cuda")

        def launch() -> Callable[[], object]:
            src, dst = torch.randperm(NUM_BLOCKS, device="cuda")[: 2 * num_pairs].int().chunk(2)
            return lambda: block_clone(cache, src, dst, block_dim=2, independent=independent)

        return [launch() for _ in range(num_sets)]

    kind = "independent" if independent else "maybe chained"
    return KernelCase(f"clone {num_pairs} blocks, {kind}", 2 * num_pairs * BLOCK_BYTES, make_launches)


def cases() -> Iterator[KernelCase]:
    """Yield the cases that the table shows."""
    for num_pairs in (1, 8, 64, 256, 1024):
        yield clone_case(num_pairs, independent=True)
    for num_pairs in (8, 256, 1024):
        yield clone_case(num_pairs, independent=False)
