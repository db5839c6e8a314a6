"""Two ways to copy on write for many requests: one by one in Python loops, and all at once.

Both do the same work on the same cache: every request that shares the base's last block gets a copy of its own, the
next token's K/V goes into the copy, and at the end all copies return. The K/V cache is ``[L, 2, NB, BS, H, D]``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rose_backend.block_manager import BlockManager
from rose_backend.kernels import block_clone, write_kv

PARTS = ("bookkeeping", "copy", "append", "free")


@dataclass(frozen=True)
class CloneCase:
    """Shapes of one measurement."""

    batch: int
    old_len: int = 1
    block_size: int = 64
    num_layers: int = 12
    num_heads: int = 12
    head_size: int = 64

    @property
    def num_blocks(self) -> int:
        """Null block, the base's blocks, and one copy for each request."""
        return 1 + -(-self.old_len // self.block_size) + self.batch

    def make_cache(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a cache of random numbers, so that a copy that did not happen shows."""
        size = (self.num_layers, 2, self.num_blocks, self.block_size, self.num_heads, self.head_size)
        return torch.randn(size, device=device, dtype=torch.float32).to(dtype)

    def make_new_kv(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the next token's K/V of each request, ``[L, 2, B, H, D]``."""
        size = (self.num_layers, 2, self.batch, self.num_heads, self.head_size)
        return torch.randn(size, device=device, dtype=torch.float32).to(dtype)


class Clock:
    """Times parts one after the other, each finished on the device before the next starts."""

    def __init__(self, device: torch.device) -> None:
        self._synchronise: Callable[[], None] = (
            torch.cuda.synchronize if device.type == "cuda" else lambda: None
        )
        self.parts_us: dict[str, float] = {}
        self._start = 0.0

    def start(self) -> None:
        """Begin."""
        self._synchronise()
        self._start = time.perf_counter()

    def part(self, name: str) -> None:
        """Note what has passed since the last part as ``name``."""
        self._synchronise()
        now = time.perf_counter()
        self.parts_us[name] = (now - self._start) * 1e6
        self._start = now


class LoopedClone:
    """Before: one request after the other, layer by layer, with a list of free blocks and a table of lists.

    Args:
        filled_only: copy the tokens that the shared block holds rather than the whole block.
    """

    def __init__(self, case: CloneCase, cache: torch.Tensor, *, filled_only: bool = False) -> None:
        self._case, self._cache, self._filled_only = case, cache, filled_only
        num_base = -(-case.old_len // case.block_size)
        self._base_table = list(range(1, num_base + 1))
        self._free = list(range(num_base + 1, case.num_blocks))
        self._ref_counts = [0, *[1 + case.batch] * num_base, *[0] * case.batch]

    def run(
        self, new_kv: torch.Tensor, clock: Clock, check: Callable[[np.ndarray], None] | None = None
    ) -> None:
        """Clone, append and free; ``check`` gets each request's own block before it is freed."""
        case, cache = self._case, self._cache
        offset = case.old_len % case.block_size
        num_copied = offset if self._filled_only else case.block_size
        clock.start()
        tables = []
        for _ in range(case.batch):
            table = list(self._base_table)
            own = self._free.pop()
            self._ref_counts[table[-1]] -= 1
            self._ref_counts[own] = 1
            table[-1] = own
            tables.append(table)
        clock.part("bookkeeping")
        source = self._base_table[-1]
        for table in tables:
            for layer in range(case.num_layers):
                for kind in range(2):
                    cache[layer, kind, table[-1], :num_copied].copy_(cache[layer, kind, source, :num_copied])
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

    def run(
        self, new_kv: torch.Tensor, clock: Clock, check: Callable[[np.ndarray], None] | None = None
    ) -> None:
        """As ``LoopedClone.run``."""
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


def check_variant(case: CloneCase, make: Callable[[torch.Tensor], Any], cache: torch.Tensor) -> None:
    """Run a variant once on random data and compare every block with what it must hold.

    Raises:
        AssertionError: the base changed, a copy's old tokens are not the base's bit for bit, or a new token is missing.
    """
    before = cache.clone()
    new_kv = case.make_new_kv(cache.dtype, cache.device)
    base, offset = -(-case.old_len // case.block_size), case.old_len % case.block_size

    def check(own: np.ndarray) -> None:
        blocks = torch.from_numpy(own).to(cache.device)
        assert len(set(own.tolist())) == case.batch and int(own.min()) > base, f"own blocks {own.tolist()}"
        assert torch.equal(cache[:, :, : base + 1], before[:, :, : base + 1]), "the base has changed"
        copies = cache[:, :, blocks]  # [L, 2, B, BS, H, D]
        old = before[:, :, base, None, :offset]
        assert torch.equal(copies[:, :, :, :offset], old.expand_as(copies[:, :, :, :offset])), "wrong copy"
        assert torch.equal(copies[:, :, :, offset], new_kv), "wrong new token"

    make(cache).run(new_kv, Clock(cache.device), check)
