"""Three ways to store the new tokens of a decode step before attention reads them.

All do the same step on caches of the same size ``[L, 2, NB, BS, H, D]``: make room for one token of each sequence,
store its K/V in every layer, attend. Sequences grow by one token a step, so that one step in ``BS`` needs new blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.support.clone_variants import Clock
from rose_backend.block_manager import BlockManager
from rose_backend.kernels import paged_decode, write_kv

PARTS = ("bookkeeping", "append", "attention")


@dataclass(frozen=True)
class AppendCase:
    """Shapes of one measurement."""

    batch: int
    context: int = 512
    """Tokens of each sequence before the first step."""
    max_steps: int = 64
    block_size: int = 16
    num_layers: int = 12
    num_heads: int = 12
    head_size: int = 64

    @property
    def blocks_per_row(self) -> int:
        """Blocks of a sequence after ``max_steps``."""
        return -(-(self.context + self.max_steps) // self.block_size)

    @property
    def num_blocks(self) -> int:
        """Null block, and the blocks of all sequences."""
        return 1 + self.batch * self.blocks_per_row

    def make_cache(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a cache of random numbers."""
        size = (self.num_layers, 2, self.num_blocks, self.block_size, self.num_heads, self.head_size)
        return torch.randn(size, device=device, dtype=dtype)

    def make_projections(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return queries, keys and values of one step, ``[L, 3, B, H, D]``."""
        size = (self.num_layers, 3, self.batch, self.num_heads, self.head_size)
        return torch.randn(size, device=device, dtype=dtype)


class AppendStep:
    """One way; subclasses say where tokens go and who stores them. Sequences hold ``context`` tokens at first."""

    def __init__(self, case: AppendCase, cache: torch.Tensor) -> None:
        self._case, self._cache = case, cache
        self.length = case.context
        self._out = torch.empty(
            (case.num_layers, case.batch, case.num_heads, case.head_size),
            dtype=cache.dtype,
            device=cache.device,
        )

    def block_table(self) -> np.ndarray:
        """Return the sequences' blocks, int32 ``[B, MB]``."""
        raise NotImplementedError

    def make_room(self) -> np.ndarray:
        """Give every sequence room for one token; return the block table."""
        raise NotImplementedError

    def append(self, projections: torch.Tensor, table: np.ndarray) -> None:
        """Store the new tokens of all layers, if that is a step of its own."""

    def grow(self) -> None:
        """Count the new tokens as computed."""
        self.length += 1

    def attend(self, projections: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> None:
        """Attend in all layers."""
        for layer, (query, _, _) in enumerate(projections):
            self._attend(layer, query, None, None, table, lengths)

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

    def _attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        table: torch.Tensor,
        lengths: torch.Tensor,
    ) -> None:
        cache, scale = self._cache[layer], self._case.head_size**-0.5
        out = self._out[layer]
        paged_decode(query, key, value, cache[0], cache[1], table, lengths, scale=scale, out=out)


class LoopedAppend(AppendStep):
    """Before: one sequence after the other, layer by layer, with a list of free blocks and a list of blocks each."""

    def __init__(self, case: AppendCase, cache: torch.Tensor) -> None:
        super().__init__(case, cache)
        self._free = list(range(case.num_blocks - 1, 0, -1))
        num_blocks = -(-case.context // case.block_size)
        self._tables = [[self._free.pop() for _ in range(num_blocks)] for _ in range(case.batch)]

    def block_table(self) -> np.ndarray:
        """Return the sequences' blocks, int32 ``[B, MB]``."""
        return np.array(self._tables, np.int32)

    def make_room(self) -> np.ndarray:
        """Give every sequence room for one token; return the block table."""
        for table in self._tables:
            if self.length == len(table) * self._case.block_size:
                table.append(self._free.pop())
        return self.block_table()

    def append(self, projections: torch.Tensor, table: np.ndarray) -> None:
        """Store the new tokens of all layers."""
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
        """Return the sequences' blocks, int32 ``[B, MB]``."""
        num_blocks = int(self._manager.num_row_blocks[self._rows].max())
        return self._manager.block_table[self._rows, :num_blocks]

    def make_room(self) -> np.ndarray:
        """Give every sequence room for one token; return the block table."""
        assert self._manager.reserve(self._rows, 1).ok
        return self.block_table()

    def append(self, projections: torch.Tensor, table: np.ndarray) -> None:
        """Store the new tokens of all layers."""
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
        """Count the new tokens as computed."""
        super().grow()
        self._manager.commit(self._rows, 1, np.zeros(len(self._rows), np.int32))


class InKernelAppend(ReservedAppend):
    """``BlockManager`` reserves for all sequences at once, attention itself stores what it computes with."""

    def append(self, projections: torch.Tensor, table: np.ndarray) -> None:
        """Do nothing: ``attend`` stores."""

    def store(self, projections: torch.Tensor, slots: torch.Tensor) -> None:
        """Do nothing: ``attend`` stores."""

    def attend(self, projections: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> None:
        """Store and attend in all layers."""
        for layer, (query, key, value) in enumerate(projections):
            self._attend(layer, query, key, value, table, lengths)


def check_variants(
    makes: dict[str, Callable[[AppendCase, torch.Tensor], Any]],
    case: AppendCase,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Run a few steps of every variant on the same numbers, and compare with plain attention over all of them.

    Raises:
        AssertionError: names the variant and the step.
    """
    sequences = torch.randn(
        (case.num_layers, 2, case.batch, case.context + case.max_steps, case.num_heads, case.head_size),
        device=device,
    ).to(dtype)
    for name, make in makes.items():
        cache = case.make_cache(dtype, device)
        variant = make(case, cache)
        table = torch.from_numpy(variant.block_table().astype(np.int64)).to(device)
        positions = torch.arange(case.context, device=device)
        blocks = table[:, positions // case.block_size]  # [B, context]
        cache[:, :, blocks, positions % case.block_size] = sequences[:, :, :, : case.context]
        for step in range(case.max_steps):
            projections = case.make_projections(dtype, device)
            length = case.context + step
            projections[:, 1:] = sequences[:, :, :, length]
            out = variant.run(projections, Clock(device)).float()
            keys, values = sequences[:, :, :, : length + 1].float().transpose(3, 4).unbind(1)
            query = projections[:, 0].float().unsqueeze(3)
            expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values).squeeze(3)
            worst = float((out - expected).abs().max())
            assert worst < 5e-3, f"{name}, step {step}: attention is off by {worst:.1e}"
