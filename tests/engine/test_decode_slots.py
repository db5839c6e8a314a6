"""Slots of the decode buffers: which row is in which slot, what moves, and what is sent to the device."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from rose_backend.engine.decode_runner import NO_ROW, DecodeRows, graph_widths
from rose_backend.engine.sequence_state import SequenceState

NUM_ROWS = 12


@pytest.fixture
def state() -> SequenceState:
    return SequenceState(NUM_ROWS, 4)


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_rows_keep_their_slots_while_none_joins_or_leaves(state: SequenceState) -> None:
    slots = DecodeRows(state)
    first, change = slots.assign(rows(5, 2, 9), 4)
    assert first.tolist() == [0, 1, 2]
    assert (
        change is not None and change.slots.tolist() == [5, 2, 9] and change.old_rows.tolist() == [NO_ROW] * 3
    )
    assert not len(change.emptied)
    again, change = slots.assign(rows(9, 5, 2), 4)
    assert again.tolist() == [2, 0, 1] and change is None


def test_one_leaves_and_one_takes_the_hole(state: SequenceState) -> None:
    slots = DecodeRows(state)
    slots.assign(rows(5, 2, 9), 4)
    left, change = slots.assign(rows(5, 9), 4)
    assert left.tolist() == [0, 2]
    assert change is not None and change.emptied.tolist() == [1] and not len(change.rows)
    # The device was told once.
    assert slots.assign(rows(5, 9), 4)[1] is None
    joined, change = slots.assign(rows(5, 9, 7), 4)
    assert joined.tolist() == [0, 2, 1]
    assert change is not None and (change.rows.tolist(), change.slots.tolist()) == ([1], [7])
    assert not len(change.emptied)


def test_rows_move_only_out_of_slots_behind_the_width(state: SequenceState) -> None:
    slots = DecodeRows(state)
    slots.assign(rows(0, 1, 2, 3, 4, 5), 8)
    moved, change = slots.assign(rows(1, 4, 5), 4)
    assert moved[0] == 1 and sorted(moved.tolist()) == [0, 1, 2]
    assert change is not None and change.old_rows.tolist() == [4, 5] and change.slots.tolist() == [4, 5]
    assert change.emptied.tolist() == [3, 4, 5]


def test_a_row_with_another_holder_is_another_row(state: SequenceState) -> None:
    slots = DecodeRows(state)
    slots.assign(rows(3, 4), 4)
    state.generation[3] += 1
    assert slots.rows_of(rows(3, 4)).tolist() == [NO_ROW, 1]
    assert slots.slots().tolist() == [4]
    again, change = slots.assign(rows(3, 4), 4)
    assert again.tolist() == [0, 1]
    assert change is not None and change.old_rows.tolist() == [NO_ROW] and change.slots.tolist() == [3]


def test_random_comings_and_goings(state: SequenceState) -> None:
    rng = np.random.default_rng(0)
    slots = DecodeRows(state)
    device: dict[int, int] = {}
    for _ in range(400):
        wanted = rng.permutation(NUM_ROWS)[: rng.integers(1, NUM_ROWS + 1)].astype(np.int32)
        width = min(int(len(wanted) + rng.integers(0, 4)), NUM_ROWS)
        before = dict(device)
        answer, change = slots.assign(wanted, width)
        if change is not None:
            for row, old in zip(change.slots, change.old_rows, strict=True):
                assert old == NO_ROW or before[int(old)] == row
            for slot in change.emptied.tolist():
                del device[slot]
            device |= dict(zip(change.rows.tolist(), change.slots.tolist(), strict=True))
        assert (answer < width).all() and device == dict(zip(answer.tolist(), wanted.tolist(), strict=True))


def test_widths_waste_little() -> None:
    assert graph_widths(1) == (1,)
    assert graph_widths(5) == (1, 2, 4, 5)
    assert graph_widths(10_000)[-1] == 512
    for limit in (256, 300, 512):
        widths = graph_widths(limit)
        assert widths[-1] == limit and list(widths) == sorted(set(widths))
        for small, large in pairwise(widths):
            assert large <= 2 * small and (small < 64 or large <= 1.5 * small)
