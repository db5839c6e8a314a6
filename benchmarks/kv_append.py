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

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.reports.parts import kv_append_table
from benchmarks.support.cli import check_at_least
from benchmarks.support.timing import spread
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
from rose_backend.kernels import AttentionOptions, paged_decode, write_kv

PARTS = ("bookkeeping", "append", "attention")
BATCHES, QUICK_BATCHES = (1, 8, 32, 128, 256), (1, 4)
WARM_UPS = 3
REPLAYS = 20


@dataclass(frozen=True)
class AppendCase(CacheCase):
    """Shapes of one measurement."""

    block_size: int = 16
    context: int = 512
    """Tokens of each sequence before the first step."""
    max_steps: int = 64

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
        size = (case.num_layers, case.batch, case.num_heads, case.head_size)
        self._out = torch.empty(size, dtype=cache.dtype, device=cache.device)

    def block_table(self) -> np.ndarray:
        """Return the sequences' blocks, int32 ``[B, MB]``."""
        raise NotImplementedError

    def make_room(self) -> np.ndarray:
        """Give every sequence room for one token; return the block table."""
        raise NotImplementedError

    def append(self, projections: torch.Tensor, table: np.ndarray) -> None:
        """Store the new tokens of all layers, if that is a step of its own."""
        raise NotImplementedError

    def grow(self) -> None:
        """Count the new tokens as computed."""
        self.length += 1

    def attend(self, projections: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> None:
        """Attend in all layers."""
        scale = self._case.head_size**-0.5
        for (query, key, value), cache, out in zip(projections, self._cache, self._out, strict=True):
            new = (key, value) if self.stores_in_attention else (None, None)
            paged_decode(
                query, *new, cache[0], cache[1], table, lengths, options=AttentionOptions(scale), out=out
            )

    def run(self, projections: torch.Tensor, clock: Clock) -> torch.Tensor:
        """Take one step; return what attention gives, ``[L, B, H, D]``."""
        device = self._cache.device
        clock.start()
        table = self.make_room()
        device_table = torch.from_numpy(table).to(device)
        lengths = torch.full((self._case.batch,), self.length, dtype=torch.int32, device=device)
        clock.part("bookkeeping")
        self.append(projections, table)
        clock.part("append")
        self.attend(projections, device_table, lengths)
        clock.part("attention")
        self.grow()
        return self._out


class LoopedAppend(AppendStep):
    """Before: one sequence after the other, layer by layer, with a list of free blocks and a list of blocks each."""

    def __init__(self, case: AppendCase, cache: torch.Tensor) -> None:
        super().__init__(case, cache)
        self._free = list(range(case.num_blocks - 1, 0, -1))
        num_blocks = -(-case.context // case.block_size)
        self._tables = [[self._free.pop() for _ in range(num_blocks)] for _ in range(case.batch)]

    def block_table(self) -> np.ndarray:
        return np.array(self._tables, np.int32)

    def make_room(self) -> np.ndarray:
        for table in self._tables:
            if self.length == len(table) * self._case.block_size:
                table.append(self._free.pop())
        return self.block_table()

    def append(self, projections: torch.Tensor, table: np.ndarray) -> None:
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
        admissions = [self._manager.add(prompt) for _ in range(case.batch)]
        self._rows = np.array([admission.row for admission in admissions if admission is not None])
        assert self._manager.reserve(self._rows, case.context).ok
        self._manager.commit(self._rows, case.context, np.tile(prompt, case.batch))

    def block_table(self) -> np.ndarray:
        num_blocks = int(self._manager.num_row_blocks[self._rows].max())
        return self._manager.block_table[self._rows, :num_blocks]

    def make_room(self) -> np.ndarray:
        assert self._manager.reserve(self._rows, 1).ok
        return self.block_table()

    def append(self, projections: torch.Tensor, table: np.ndarray) -> None:
        if not self.stores_in_attention:
            self.store(projections, self.slots(table))

    def slots(self, table: np.ndarray) -> torch.Tensor:
        """Return where the new tokens go, int64 ``[B]``."""
        column, offset = divmod(self.length, self._case.block_size)
        slots = table[:, column].astype(np.int64) * self._case.block_size + offset
        return torch.from_numpy(slots).to(self._cache.device)

    def store(self, projections: torch.Tensor, slots: torch.Tensor) -> None:
        """Store the new tokens of all layers at ``slots``."""
        for cache, (_, key, value) in zip(self._cache, projections, strict=True):
            write_kv(key, value, cache[0], cache[1], slots)

    def grow(self) -> None:
        super().grow()
        self._manager.commit(self._rows, 1, np.zeros(len(self._rows), np.int32))


class InKernelAppend(ReservedAppend):
    """``BlockManager`` reserves for all sequences at once, attention itself stores what it computes with."""

    stores_in_attention = True


VARIANTS: dict[str, Callable[[AppendCase, torch.Tensor], Any]] = {
    "append": LoopedAppend,
    "reserve_write": ReservedAppend,
    "reserve_fused": InKernelAppend,
}


def check_variants(
    makes: Mapping[str, Callable[[AppendCase, torch.Tensor], Any]],
    case: AppendCase,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Run a few steps of every variant on the same numbers, and compare with plain attention over all of them.

    Raises:
        AssertionError: names the variant and the step.
    """
    size = (case.num_layers, 2, case.batch, case.context + case.max_steps, case.num_heads, case.head_size)
    sequences = torch.randn(size, device=device).to(dtype)
    for name, make in makes.items():
        cache = case.make_cache(dtype, device)
        variant = make(case, cache)
        table = torch.from_numpy(variant.block_table().astype(np.int64)).to(device)
        positions = torch.arange(case.context, device=device)
        blocks = table[:, positions // case.block_size]  # [B, context]
        cache[:, :, blocks, positions % case.block_size] = sequences[:, :, :, : case.context]
        for step in range(case.max_steps):
            projections = case.make_step(3, dtype, device)
            length = case.context + step
            projections[:, 1:] = sequences[:, :, :, length]
            out = variant.run(projections, Clock(device)).float()
            keys, values = sequences[:, :, :, : length + 1].float().transpose(3, 4).unbind(1)
            query = projections[:, 0].float().unsqueeze(3)
            expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values).squeeze(3)
            worst = float((out - expected).abs().max())
            assert worst < 5e-3, f"{name}, step {step}: attention is off by {worst:.1e}"


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = new_variants_parser(__doc__, block_size=16)
    parser.add_argument("--context", type=int, default=512, help="tokens before (default: %(default)s)")
    options = parser.parse_args(arguments)
    check_variants_options(parser, options)
    check_at_least(parser, options, 1, "context")
    return options


def measure(case: AppendCase, dtype: torch.dtype, device: torch.device, repeats: int) -> dict[str, Any]:
    """Time every variant for one batch size; microseconds by variant and part."""
    cache, projections = case.make_cache(dtype, device), case.make_step(3, dtype, device)
    variants = {name: make(case, cache) for name, make in VARIANTS.items()}
    figures = timed(variants, projections, device, repeats, warm_ups=WARM_UPS)
    if device.type == "cuda":
        for name in ("reserve_write", "reserve_fused"):
            figures[name]["graph"] = spread(replayed_us(variants[name], projections))
    return {"batch": case.batch, "variants": figures}


def replayed_us(variant: Any, projections: torch.Tensor) -> list[float]:
    """Capture append and attention of one step in a CUDA graph; return microseconds of each replay."""
    table = variant.make_room()
    device_table = torch.from_numpy(table).cuda()
    lengths = torch.full((len(table),), variant.length, dtype=torch.int32, device="cuda")
    slots = variant.slots(table)

    def step() -> None:
        if not variant.stores_in_attention:
            variant.store(projections, slots)
        variant.attend(projections, device_table, lengths)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(REPLAYS + WARM_UPS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times[WARM_UPS:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, time, print, write."""
    options = parse_options(arguments)
    torch.manual_seed(0)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    batches, repeats = (QUICK_BATCHES, 3) if options.quick else (BATCHES, options.repeats)
    shape = {"context": options.context, "max_steps": repeats + WARM_UPS + 1, **shape_of(options)}
    small = replace(AppendCase(3, **shape), context=min(options.context, 30), max_steps=4, num_layers=1)
    check_variants(VARIANTS, small, dtype, device)
    rows = [
        measure(AppendCase(batch, **shape), dtype, device, repeats)
        for batch in track(batches, "batch sizes", console=Console(stderr=True))
    ]
    report_variants(options, "kv_append", rows, {**shape, "repeats": repeats}, kv_append_table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
