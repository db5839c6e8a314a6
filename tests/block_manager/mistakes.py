"""Calls of the block manager that no right caller makes. Each must raise RowError and change nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from rose_backend.block_manager import BlockManager
from tests.block_manager.simulation import Simulation

Mistake = tuple[str, Callable[[BlockManager], object]]


def possible_mistakes(simulation: Simulation, rng: random.Random) -> list[Mistake]:
    """Return name and call of every mistake that can be made now."""
    num_rows = simulation.oracle.books.max_num_seqs
    bad = rng.choice([*sorted(set(range(num_rows)) - set(simulation.sequences)), -1, num_rows])
    longest, one = simulation.manager.max_model_len, np.array([1], np.int32)
    mistakes: list[Mistake] = [
        ("add an empty prompt", lambda m: m.add(np.zeros(0, np.int32))),
        ("add a prompt that is too long", lambda m: m.add(np.zeros(longest + 1, np.int32))),
        ("reserve for a row not in use", lambda m: m.reserve(np.array([bad]), 1)),
        ("reserve a block for a row not in use", lambda m: m.reserve_next_blocks(np.array([bad]))),
        ("commit a row not in use", lambda m: m.commit(np.array([bad]), 1, one)),
        ("free a row not in use", lambda m: m.free(np.array([bad]))),
        ("fork a row not in use", lambda m: m.fork(bad, 1)),
    ]
    if simulation.oracle.prefix_cache:
        prompt = np.zeros(longest, np.int32)
        mistakes.append(("match with too few hashes", lambda m: m.match(prompt, block_hashes=[])))
    if simulation.finished_plan is not None:
        plan = simulation.finished_plan
        mistakes.append(("finish a plan twice", lambda m: m.finish_clone_plan(plan)))
    if simulation.sequences:
        mistakes += _mistakes_with_a_row(simulation, rng.choice(list(simulation.sequences)))
    return mistakes


def _mistakes_with_a_row(simulation: Simulation, row: int) -> list[Mistake]:
    writable, room = simulation.num_writable(row), simulation.room(row)
    ids = np.zeros(writable + 1, np.int32)
    mistakes: list[Mistake] = [
        ("reserve for a row twice", lambda m: m.reserve(np.array([row, row]), min(room, 1))),
        ("reserve a block for a row twice", lambda m: m.reserve_next_blocks(np.array([row, row]))),
        ("reserve a negative number", lambda m: m.reserve(np.array([row]), -1)),
        ("reserve beyond max_model_len", lambda m: m.reserve(np.array([row]), room + 1)),
        ("commit more than was reserved", lambda m: m.commit(np.array([row]), writable + 1, ids)),
        ("commit with too many ids", lambda m: m.commit(np.array([row]), writable, ids)),
        ("commit a row twice", lambda m: m.commit(np.array([row, row]), 0, ids[:0])),
        ("commit a negative number", lambda m: m.commit(np.array([row]), -1, ids[:0])),
        ("free a row twice", lambda m: m.free(np.array([row, row]))),
        ("fork a negative number", lambda m: m.fork(row, -1)),
    ]
    if writable:
        mistakes.append(
            ("commit with too few ids", lambda m: m.commit(np.array([row]), writable, ids[: writable - 1]))
        )
    return mistakes
