"""Time how new tokens get into the KV cache: appended one by one, or reserved and stored by the attention kernel.

    python -m benchmarks.kv_append [--device cuda] [--dtype float16] [--quick] [--json FILE]

Every sequence of a batch decodes one token; one step in ``block_size`` needs new blocks. Per row: batch size;
microseconds, median with 10th and 90th percentile, of

    append           one Python loop over sequences and layers: make room, store K/V, then one attention per layer
    reserve_write    rose_backend with fused_kv_append off: BlockManager reserves, kernels.write_kv stores per layer
    reserve_fused    rose_backend: BlockManager reserves, kernels.paged_decode stores what it computes with

in parts: bookkeeping, append, attention (of all layers). On a GPU also both batched ones replayed from a CUDA graph, as
the engine runs them: ``graph``, without bookkeeping. Before anything is timed all of them are compared with plain
attention, step by step. Every part is synchronised with the device.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.kernel_cases.case import LaunchGraph
from benchmarks.reports.parts import kv_append_table
from benchmarks.support.variants import WARM_UPS, CacheCase, compare_variants, computed_row, parse_case
from rose_backend.block_manager import BlockManager
from rose_backend.kernels import AttentionOptions, NewTokens, PagedKV, paged_decode, write_kv

BATCHES, QUICK_BATCHES = (1, 8, 32, 128, 256), (1, 4)
GRAPH_SAMPLES = 20


@dataclass(frozen=True)
class AppendCase(CacheCase):
    """One measurement."""

    context: int = 512
    """Tokens of each sequence before the first step."""

    @property
    def max_steps(self) -> int:
        """Steps that are taken at most, one for a graph included."""
        return WARM_UPS + self.repeats + 1

    @property
    def num_blocks(self) -> int:
        """Null block, and the blocks of all sequences after ``max_steps``."""
        return 1 + self.batch * -(-(self.context + self.max_steps) // self.block_size)


class AppendStep:
    """One way to take a step; sequences hold ``context`` tokens at first. Subclasses manage blocks and store tokens."""

    stores_in_attention = False

    def __init__(self, case: AppendCase, cache: torch.Tensor) -> None:
        self._case, self._cache = case, cache
        self.length = case.context
        self.out = case.random(case.batch)
        """What attention gives, ``[L, B, H, D]``."""

    def make_room(self) -> np.ndarray:
        """Give every sequence room for one token; return the sequences' blocks, int32 ``[B, MB]``."""
        raise NotImplementedError

    def append(self, projections: torch.Tensor) -> None:
        """Store the new tokens of all layers, if that is a step of its own."""
        raise NotImplementedError

    def grow(self) -> None:
        """Count the new tokens as computed."""
        self.length += 1

    def prepare(self) -> None:
        """Make room and put on the device what attention reads."""
        self.table = self.make_room()
        self._device_table = torch.from_numpy(self.table).to(self._case.device)
        self._lengths = torch.full(
            (self._case.batch,), self.length, dtype=torch.int32, device=self._case.device
        )

    def attend(self, projections: torch.Tensor) -> None:
        """Attend in all layers."""
        options = AttentionOptions(self._case.head_size**-0.5)
        for (query, key, value), cache, out in zip(projections, self._cache, self.out, strict=True):
            new = NewTokens(key, value) if self.stores_in_attention else None
            kv = PagedKV(cache[0], cache[1], self._device_table, self._lengths)
            paged_decode(query, new, kv, options=options, out=out)

    def run(self, projections: torch.Tensor) -> Iterator[str]:
        """Take one step."""
        yield "ready"
        self.prepare()
        yield "bookkeeping"
        self.append(projections)
        yield "append"
        self.attend(projections)
        yield "attention"
        self.grow()


class LoopedAppend(AppendStep):
    """Before: one sequence after the other, layer by layer, with a list of free blocks and a list of blocks each."""

    def __init__(self, case: AppendCase, cache: torch.Tensor) -> None:
        super().__init__(case, cache)
        self._free = list(range(case.num_blocks - 1, 0, -1))
        num_blocks = -(-case.context // case.block_size)
        self._tables = [[self._free.pop() for _ in range(num_blocks)] for _ in range(case.batch)]

    def make_room(self) -> np.ndarray:
        for table in self._tables:
            if self.length == len(table) * self._case.block_size:
                table.append(self._free.pop())
        return np.array(self._tables, np.int32)

    def append(self, projections: torch.Tensor) -> None:
        offset = self.length % self._case.block_size
        for row, blocks in enumerate(self._tables):
            for layer in range(self._case.num_layers):
                for kind in range(2):
                    self._cache[layer, kind, blocks[-1], offset] = projections[layer, 1 + kind, row]


class ReservedAppend(AppendStep):
    """``BlockManager`` reserves for all sequences at once, ``write_kv`` stores per layer."""

    def __init__(self, case: AppendCase, cache: torch.Tensor) -> None:
        super().__init__(case, cache)
        self._manager = BlockManager(
            num_blocks=case.num_blocks,
            block_size=case.block_size,
            max_num_seqs=case.batch,
            max_model_len=case.context + case.max_steps,
            prefix_cache=False,
        )
        prompt = np.zeros(case.context, np.int32)
        self._rows = np.array([computed_row(self._manager, prompt) for _ in range(case.batch)])

    def make_room(self) -> np.ndarray:
        assert self._manager.reserve(self._rows, 1).ok
        num_blocks = int(self._manager.num_row_blocks[self._rows].max())
        return self._manager.block_table[self._rows, :num_blocks]

    def prepare(self) -> None:
        super().prepare()
        if not self.stores_in_attention:
            column, offset = divmod(self.length, self._case.block_size)
            slots = self.table[:, column].astype(np.int64) * self._case.block_size + offset
            self._slots = torch.from_numpy(slots).to(self._case.device)

    def append(self, projections: torch.Tensor) -> None:
        if not self.stores_in_attention:
            for cache, (_, key, value) in zip(self._cache, projections, strict=True):
                write_kv(key, value, cache[0], cache[1], self._slots)

    def grow(self) -> None:
        super().grow()
        self._manager.commit(self._rows, 1, np.zeros(len(self._rows), np.int32))

    def graph_us(self, projections: torch.Tensor) -> list[float]:
        """Return microseconds of one step's append and attention, replayed from a CUDA graph."""
        self.prepare()
        graph = LaunchGraph([lambda: (self.append(projections), self.attend(projections))])
        return [graph.sample() for _ in range(GRAPH_SAMPLES)]


class InKernelAppend(ReservedAppend):
    """``BlockManager`` reserves for all sequences at once, attention itself stores what it computes with."""

    stores_in_attention = True


VARIANTS = {"append": LoopedAppend, "reserve_write": ReservedAppend, "reserve_fused": InKernelAppend}


def check_variant(case: AppendCase, name: str, make: type[AppendStep]) -> None:
    """Run a few steps of a variant on random numbers, and compare with plain attention over all of them.

    Raises:
        AssertionError: names the variant and the step.
    """
    cache, sequences = case.make_cache(), case.random(2, case.batch, case.context + case.max_steps)
    variant = make(case, cache)
    old = torch.arange(case.context)
    for step in range(case.max_steps):
        length = case.context + step
        projections = case.make_step(3)
        projections[:, 1:] = sequences[:, :, :, length]
        for part in variant.run(projections):
            if part == "bookkeeping" and step == 0:
                blocks = torch.from_numpy(variant.table).long()[:, old // case.block_size]
                cache[:, :, blocks, old % case.block_size] = sequences[:, :, :, : case.context]
        keys, values = sequences[:, :, :, : length + 1].float().transpose(3, 4).unbind(1)
        query = projections[:, 0].float().unsqueeze(3)
        expected = F.scaled_dot_product_attention(query, keys, values).squeeze(3)
        worst = float((variant.out.float() - expected).abs().max())
        assert worst < 5e-3, f"{name}, step {step}: attention is off by {worst:.1e}"


def parse_options(arguments: Sequence[str] | None) -> tuple[Namespace, AppendCase]:
    """Return the options and the case that they describe, or exit with what is wrong with them."""
    return parse_case(AppendCase, __doc__, arguments)[1:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, time, print, write."""
    options, case = parse_options(arguments)
    cases = [replace(case, batch=batch) for batch in (QUICK_BATCHES if options.quick else BATCHES)]
    for name, make in VARIANTS.items():
        check_variant(
            replace(case, batch=3, context=min(case.context, 30), repeats=3, num_layers=1), name, make
        )
    return compare_variants("kv_append", options, cases, VARIANTS, 3, kv_append_table)


if __name__ == "__main__":
    sys.exit(main())
