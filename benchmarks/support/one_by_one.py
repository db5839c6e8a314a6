"""What the engine's block management was before: one request after the other, copies block by block and layer by layer.

It decides exactly as ``BlockManager`` does, because it is one that is asked about one row at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

from rose_backend import AsyncEngine, kernels
from rose_backend.block_manager import BlockManager
from rose_backend.block_manager.array_types import IntArray
from rose_backend.block_manager.reservation import Reservation
from rose_backend.engine import core


class OneByOneManager(BlockManager):
    """``BlockManager`` whose calls for many rows are loops over them."""

    def reserve(self, rows: IntArray, num_tokens: IntArray | int) -> Reservation:
        """As ``BlockManager.reserve``; rows before one that cannot be served give back what they have got."""
        rows = np.asarray(rows, np.int64)
        servable = np.zeros(len(rows), np.bool_)
        num_new_blocks = 0
        for index, count in enumerate(np.broadcast_to(num_tokens, len(rows)).tolist()):
            answer = super().reserve(rows[index : index + 1], count)
            if not answer.ok:
                self.roll_back(rows[:index])
                return Reservation(False, servable, 0)
            servable[index] = True
            num_new_blocks += answer.num_new_blocks
        return Reservation(True, servable, num_new_blocks)

    def commit(self, rows: IntArray, num_tokens: IntArray | int, token_ids: IntArray) -> None:
        """As ``BlockManager.commit``."""
        rows, begin = np.asarray(rows, np.int64), 0
        for index, count in enumerate(np.broadcast_to(num_tokens, len(rows)).tolist()):
            super().commit(rows[index : index + 1], count, token_ids[begin : begin + count])
            begin += count

    def free(self, rows: IntArray) -> None:
        """As ``BlockManager.free``."""
        rows = np.asarray(rows, np.int64)
        for index in range(len(rows)):
            super().free(rows[index : index + 1])


def copy_one_by_one(cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, *, block_dim: int) -> None:
    """As ``kernels.block_clone`` for a cache ``[L, 2, NB, ...]``, where no source is a destination."""
    assert block_dim == 2, f"block_dim: got {block_dim}, the engine's cache has 2"
    for source, destination in zip(src.tolist(), dst.tolist(), strict=True):
        for layer in cache:
            for keys_or_values in layer:
                keys_or_values[destination].copy_(keys_or_values[source])


def make_engine(model: str, *, one_by_one: bool, **options: Any) -> AsyncEngine:
    """Return an engine; its steps have to run inside ``block_management``."""
    if not one_by_one:
        return AsyncEngine(model, **options)
    with mock.patch.object(core, "BlockManager", OneByOneManager):
        return AsyncEngine(model, **options)


@contextlib.contextmanager
def block_management(*, one_by_one: bool) -> Iterator[None]:
    """Let engines of this process copy blocks one by one, or as they do."""
    with contextlib.ExitStack() as stack:
        if one_by_one:
            stack.enter_context(mock.patch.object(kernels, "block_clone", copy_one_by_one))
        yield
