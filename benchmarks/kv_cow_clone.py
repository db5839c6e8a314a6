"""Time copy-on-write of KV blocks: clone, append one token, free; request by request against all at once.

    python -m benchmarks.kv_cow_clone [--device cuda] [--dtype float16] [--quick] [--json FILE]

Many requests share a part-filled block of a base sequence (a prompt sampled several times, for example), and each is
about to write its next token into it. Per row: batch size; microseconds, median with 10th and 90th percentile, of

    loop          one Python loop over requests and layers: allocate, copy, append, free one by one
    batched_torch BlockManager plans, torch copies (index_select, index_copy_), kernels.write_kv appends
    batched       rose_backend: BlockManager plans, kernels.block_clone copies, kernels.write_kv appends

in parts: bookkeeping, copy, append, free. Before anything is timed each variant runs once on random data: the base must
stay as it was bit for bit, copies must equal it, new tokens must be there. Every part is synchronised with the device.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.reports.parts import kv_cow_clone_table
from benchmarks.support.variants import (
    CacheCase,
    Clock,
    check_variants_options,
    new_variants_parser,
    report_variants,
    shape_of,
    timed,
)
from rose_backend.block_manager import BlockManager
from rose_backend.kernels import block_clone, write_kv

PARTS = ("bookkeeping", "copy", "append", "free")
BATCHES, QUICK_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 16)
Check = Callable[[np.ndarray], None] | None
"""Gets each request's own block before it is freed."""


@dataclass(frozen=True)
class CloneCase(CacheCase):
    """Shapes of one measurement."""

    block_size: int = 64
    old_len: int = 1

    @property
    def num_blocks(self) -> int:
        """Null block, the base's blocks, and one copy for each request."""
        return 1 + -(-self.old_len // self.block_size) + self.batch


class LoopedClone:
    """Before: one request after the other, layer by layer, with a list of free blocks and a table of lists."""

    def __init__(self, case: CloneCase, cache: torch.Tensor) -> None:
        self._case, self._cache = case, cache
        num_base = -(-case.old_len // case.block_size)
        self._base_table = list(range(1, num_base + 1))
        self._free = list(range(num_base + 1, case.num_blocks))
        self._ref_counts = [0, *[1 + case.batch] * num_base, *[0] * case.batch]

    def run(self, new_kv: torch.Tensor, clock: Clock, check: Check = None) -> None:
        """Clone, append and free."""
        case, cache = self._case, self._cache
        offset, source = case.old_len % case.block_size, self._base_table[-1]
        clock.start()
        tables = []
        for _ in range(case.batch):
            table = list(self._base_table)
            own = self._free.pop()
            self._ref_counts[source] -= 1
            self._ref_counts[own] = 1
            table[-1] = own
            tables.append(table)
        clock.part("bookkeeping")
        for table in tables:
            for layer in cache:
                for keys_or_values in layer:
                    keys_or_values[table[-1]].copy_(keys_or_values[source])
        clock.part("copy")
        for index, table in enumerate(tables):
            for layer in range(case.num_layers):
                for kind in range(2):
                    cache[layer, kind, table[-1], offset] = new_kv[layer, kind, index]
        clock.part("append")
        if check is not None:
            check(np.array([table[-1] for table in tables]))
        clock.start()
        for table in tables:
            self._ref_counts[table[-1]] -= 1
            self._free.append(table[-1])
            self._ref_counts[source] += 1
        clock.part("free")


class BatchedClone:
    """Now: ``BlockManager`` plans all copies at once, ``block_clone`` runs them, ``write_kv`` appends per layer.

    Args:
        torch_copy: let torch's index_select and index_copy_ run the plan instead.
    """

    def __init__(self, case: CloneCase, cache: torch.Tensor, *, torch_copy: bool = False) -> None:
        self._case, self._cache, self._torch_copy = case, cache, torch_copy
        self._manager = BlockManager(
            num_blocks=case.num_blocks,
            block_size=case.block_size,
            max_num_seqs=case.batch + 1,
            max_model_len=case.old_len + case.block_size,
        )
        prompt = np.arange(case.old_len, dtype=np.int32)
        admission = self._manager.add(prompt)
        assert admission is not None
        self._parent = admission.row
        assert self._manager.reserve(np.array([self._parent]), case.old_len).ok
        self._manager.commit(np.array([self._parent]), case.old_len, prompt)

    def run(self, new_kv: torch.Tensor, clock: Clock, check: Check = None) -> None:
        """Clone, append and free."""
        case, cache, manager = self._case, self._cache, self._manager
        children = manager.fork(self._parent, case.batch)
        assert children is not None
        column, offset = divmod(case.old_len, case.block_size)
        clock.start()
        assert manager.reserve(children, 1).ok
        plan = manager.take_clone_plan()
        assert plan is not None and len(plan) == case.batch
        own = manager.block_table[children, column].astype(np.int64)
        clock.part("bookkeeping")
        sources, destinations = torch.from_numpy(plan.src_block_ids), torch.from_numpy(plan.dst_block_ids)
        if self._torch_copy:
            copies = cache.index_select(2, sources.to(cache.device, torch.int64))
            cache.index_copy_(2, destinations.to(cache.device, torch.int64), copies)
        else:
            block_clone(cache, sources, destinations, block_dim=2)
        clock.part("copy")
        slots = torch.from_numpy(own * case.block_size + offset).to(cache.device)
        for layer in range(case.num_layers):
            write_kv(new_kv[layer, 0], new_kv[layer, 1], cache[layer, 0], cache[layer, 1], slots)
        clock.part("append")
        if check is not None:
            check(own)
        clock.start()
        manager.finish_clone_plan(plan)
        manager.free(children)
        clock.part("free")


VARIANTS: dict[str, Callable[[CloneCase, torch.Tensor], Any]] = {
    "loop": LoopedClone,
    "batched_torch": functools.partial(BatchedClone, torch_copy=True),
    "batched": BatchedClone,
}


def check_variant(
    case: CloneCase, make: Callable[[CloneCase, torch.Tensor], Any], cache: torch.Tensor
) -> None:
    """Run a variant once on random data and compare every block with what it must hold.

    Raises:
        AssertionError: the base changed, a copy's old tokens are not the base's bit for bit, or a new token is missing.
    """
    before = cache.clone()
    new_kv = case.make_step(2, cache.dtype, cache.device)
    base, offset = -(-case.old_len // case.block_size), case.old_len % case.block_size

    def check(own: np.ndarray) -> None:
        blocks = torch.from_numpy(own).to(cache.device)
        assert len(set(own.tolist())) == case.batch and int(own.min()) > base, f"own blocks {own.tolist()}"
        assert torch.equal(cache[:, :, : base + 1], before[:, :, : base + 1]), "the base has changed"
        copies = cache[:, :, blocks]  # [L, 2, B, BS, H, D]
        old = before[:, :, base, None, :offset]
        assert torch.equal(copies[:, :, :, :offset], old.expand_as(copies[:, :, :, :offset])), "wrong copy"
        assert torch.equal(copies[:, :, :, offset], new_kv), "wrong new token"

    make(case, cache).run(new_kv, Clock(cache.device), check)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = new_variants_parser(__doc__, block_size=64)
    parser.add_argument(
        "--old-len", type=int, default=1, help="tokens before the clone (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    check_variants_options(parser, options)
    if options.old_len < 1 or options.old_len % options.block_size == 0:
        why = f"its last block of {options.block_size} must be part-filled"
        parser.error(f"--old-len: got {options.old_len}, {why}")
    return options


def measure(case: CloneCase, dtype: torch.dtype, device: torch.device, repeats: int) -> dict[str, Any]:
    """Check and time every variant for one batch size; microseconds by variant and part."""
    cache, new_kv = case.make_cache(dtype, device), case.make_step(2, dtype, device)
    for make in VARIANTS.values():
        check_variant(case, make, cache)
    variants = {name: make(case, cache) for name, make in VARIANTS.items()}
    token_bytes = case.num_layers * 2 * case.num_heads * case.head_size * dtype.itemsize
    return {
        "batch": case.batch,
        "bytes_copied": case.batch * case.block_size * token_bytes,
        "variants": timed(variants, new_kv, device, repeats, warm_ups=2),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, time, print, write."""
    options = parse_options(arguments)
    torch.manual_seed(0)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    batches, repeats = (QUICK_BATCHES, 3) if options.quick else (BATCHES, options.repeats)
    shape = {"old_len": options.old_len, **shape_of(options)}
    rows = [measure(CloneCase(batch, **shape), dtype, device, repeats) for batch in batches]
    settings, classic = {**shape, "repeats": repeats}, asdict(CloneCase(16))
    report_variants(options, "kv_cow_clone", rows, settings, kv_cow_clone_table, classic=classic)
    return 0


if __name__ == "__main__":
    sys.exit(main())
