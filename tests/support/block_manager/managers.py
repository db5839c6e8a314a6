"""Block managers for cases told one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rose_backend.block_manager import BlockManager


def make(num_blocks: int = 64, **options: Any) -> BlockManager:
    sizes = {"block_size": 4, "max_num_seqs": 8, "max_model_len": 64}
    return BlockManager(num_blocks=num_blocks, **{**sizes, **options})


def compute(manager: BlockManager, row: int, tokens: Sequence[int]) -> None:
    """Reserve, copy, write and commit ``tokens`` for one row."""
    assert manager.reserve(np.array([row]), len(tokens)).ok
    run_copies(manager)
    manager.commit(np.array([row]), len(tokens), np.array(tokens, np.int32))
    manager.check_integrity()


def run_copies(manager: BlockManager) -> int:
    """Return how many."""
    plan = manager.take_clone_plan()
    if plan is None:
        return 0
    manager.finish_clone_plan(plan)
    return len(plan)


def add(manager: BlockManager, tokens: Sequence[int], namespace: bytes = b"") -> tuple[int, int]:
    """Return (row, cached tokens)."""
    added = manager.add(np.array(tokens, np.int32), namespace=namespace)
    assert added is not None
    return added.row, added.num_cached_tokens


def admit(
    manager: BlockManager, tokens: Sequence[int], namespace: bytes = b"", *, at_once: int = 1 << 20
) -> tuple[int, int]:
    """Add a prompt and compute all of it, so many tokens at once; return (row, cached tokens)."""
    row, num_cached = add(manager, tokens, namespace)
    for start in range(num_cached, len(tokens), at_once):
        compute(manager, row, tokens[start : start + at_once])
    return row, num_cached


def free(manager: BlockManager, *rows: int) -> None:
    manager.free(np.array(rows))
    manager.check_integrity()


def num_found(manager: BlockManager, tokens: Sequence[int]) -> int:
    """Return how many tokens a lookup finds, with something else after them."""
    return manager.match(np.array([*tokens, -1], np.int32)).num_tokens


def table(manager: BlockManager, row: int, group_type: int = 0) -> list[int]:
    return manager.table.group_types[group_type].block_table[row, : manager.num_row_blocks[row]].tolist()
