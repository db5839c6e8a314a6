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

import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.reports.parts import kv_cow_clone_table
from benchmarks.support.variants import CacheCase, compare_variants, computed_row, parse_case
from rose_backend.block_manager import BlockManager
from rose_backend.kernels import block_clone, write_kv

BATCHES, QUICK_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 16)


@dataclass(frozen=True)
class CloneCase(CacheCase):
    """One measurement."""

    block_size: int = 64
    old_len: int = 1
    """Tokens before the clone."""

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

    def own_blocks(self) -> list[int]:
        """Return each request's own block, until it is freed."""
        return [table[-1] for table in self._tables]

    def run(self, new_kv: torch.Tensor) -> Iterator[str]:
        """Clone, append and free."""
        cache, offset, source = self._cache, self._case.old_len % self._case.block_size, self._base_table[-1]
        yield "ready"
        self._tables = []
        for _ in range(self._case.batch):
            table = list(self._base_table)
            own = self._free.pop()
            self._ref_counts[source] -= 1
            self._ref_counts[own] = 1
            table[-1] = own
            self._tables.append(table)
        yield "bookkeeping"
        for table in self._tables:
            for layer in cache:
                for keys_or_values in layer:
                    keys_or_values[table[-1]].copy_(keys_or_values[source])
        yield "copy"
        for index, table in enumerate(self._tables):
            for layer in range(self._case.num_layers):
                for kind in range(2):
                    cache[layer, kind, table[-1], offset] = new_kv[layer, kind, index]
        yield "append"
        for table in self._tables:
            self._ref_counts[table[-1]] -= 1
            self._free.append(table[-1])
            self._ref_counts[source] += 1
        yield "free"


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
        self._parent = computed_row(self._manager, np.arange(case.old_len, dtype=np.int32))

    def own_blocks(self) -> list[int]:
        """Return each request's own block, until it is freed."""
        return self._own.tolist()

    def run(self, new_kv: torch.Tensor) -> Iterator[str]:
        """Clone, append and free."""
        case, cache, manager = self._case, self._cache, self._manager
        children = manager.fork(self._parent, case.batch)
        assert children is not None
        column, offset = divmod(case.old_len, case.block_size)
        yield "ready"
        assert manager.reserve(children, 1).ok
        plan = manager.take_clone_plan()
        assert plan is not None and len(plan) == case.batch
        self._own = manager.block_table[children, column].astype(np.int64)
        yield "bookkeeping"
        sources, destinations = torch.from_numpy(plan.src_block_ids), torch.from_numpy(plan.dst_block_ids)
        if self._torch_copy:
            copies = cache.index_select(2, sources.to(cache.device, torch.int64))
            cache.index_copy_(2, destinations.to(cache.device, torch.int64), copies)
        else:
            block_clone(cache, sources, destinations, block_dim=2)
        yield "copy"
        slots = torch.from_numpy(self._own * case.block_size + offset).to(cache.device)
        for layer, (keys, values) in zip(cache, new_kv, strict=True):
            write_kv(keys, values, layer[0], layer[1], slots)
        yield "append"
        manager.finish_clone_plan(plan)
        manager.free(children)
        yield "free"


VARIANTS: dict[str, Callable[[CloneCase, torch.Tensor], Any]] = {
    "loop": LoopedClone,
    "batched_torch": functools.partial(BatchedClone, torch_copy=True),
    "batched": BatchedClone,
}


def check_variant(case: CloneCase, variant: Any, cache: torch.Tensor) -> None:
    """Run a variant once on random data and compare every block with what it must hold.

    Raises:
        AssertionError: the base changed, a copy's old tokens are not the base's bit for bit, or a new token is missing.
    """
    before, new_kv = cache.clone(), case.make_step(2)
    base, offset = -(-case.old_len // case.block_size), case.old_len % case.block_size
    for part in variant.run(new_kv):
        if part != "append":
            continue
        own = variant.own_blocks()
        assert len(set(own)) == case.batch and min(own) > base, f"own blocks {own}"
        assert torch.equal(cache[:, :, : base + 1], before[:, :, : base + 1]), "the base has changed"
        copies = cache[:, :, own]  # [L, 2, B, BS, H, D]
        old = before[:, :, base, None, :offset]
        assert torch.equal(copies[:, :, :, :offset], old.expand_as(copies[:, :, :, :offset])), "wrong copy"
        assert torch.equal(copies[:, :, :, offset], new_kv), "wrong new token"


def parse_options(arguments: Sequence[str] | None) -> tuple[Namespace, CloneCase]:
    """Return the options and the case that they describe, or exit with what is wrong with them."""
    parser, options, case = parse_case(CloneCase, __doc__, arguments)
    if case.old_len % case.block_size == 0:
        why = f"its last block of {case.block_size} must be part-filled"
        parser.error(f"--old-len: got {case.old_len}, {why}")
    return options, case


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, time, print, write."""
    options, case = parse_options(arguments)
    cases = [replace(case, batch=batch) for batch in (QUICK_BATCHES if options.quick else BATCHES)]
    for checked in cases:
        cache = checked.make_cache()
        for make in VARIANTS.values():
            check_variant(checked, make(checked, cache), cache)
    return compare_variants("kv_cow_clone", options, cases, VARIANTS, 2, kv_cow_clone_table)


if __name__ == "__main__":
    sys.exit(main())
