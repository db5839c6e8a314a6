"""Tokens appended to rows: in their place, up to the length of the row's present completion."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose_backend import LLM
from rose_backend.engine.request import Completion
from rose_backend.engine.sequence_state import Batch, SequenceState
from tests.engine.conftest import GREEDY

WINDOW = 64


def completion(llm: LLM, prompt: list[int], max_tokens: int) -> Completion:
    return llm.core.input_processor.make(prompt, replace(GREEDY, max_tokens=max_tokens)).completions[0]


def test_the_same_rows_with_other_completions_have_other_lengths(llm: LLM) -> None:
    state = SequenceState(3, WINDOW)
    rows = np.array([0, 2])
    batch = Batch.of(state, rows, 2)
    for row, max_tokens in ((0, 9), (2, 2)):
        state.fill(row, completion(llm, [5, 6], max_tokens))
    assert state.append(batch, np.array([10, 20])).tolist() == [False, False]
    assert state.append(batch, np.array([11, 21])).tolist() == [False, True]
    (cleared,) = state.clear(np.array([2], np.int32))
    assert cleared.token_ids.tolist() == [5, 6, 20, 21]
    state.fill(2, completion(llm, [7, 8, 9], 3))
    assert state.append(batch, np.array([12, 30])).tolist() == [False, False]
    assert state.append(Batch.of(state, np.array([2, 0]), 2), np.array([31, 13])).tolist() == [False, False]
    assert state.append(batch, np.array([14, 32])).tolist() == [False, True]
    assert state.token_ids[0, state.num_prompt_tokens[0] : state.num_tokens[0]].tolist() == [
        10,
        11,
        12,
        13,
        14,
    ]
    assert state.token_ids[2, state.num_prompt_tokens[2] : state.num_tokens[2]].tolist() == [30, 31, 32]


def test_tokens_of_some_rows_from_some_position(llm: LLM) -> None:
    state = SequenceState(3, WINDOW)
    for row in range(3):
        state.fill(row, completion(llm, [10 * row + place for place in range(1, 8)], 8))
    for rows in (np.array([2, 0], np.int32), np.array([2, 0])):
        some = state.tokens_at(rows, np.array([1, 4]), np.array([3, 2]))
        assert some.tolist() == [22, 23, 24, 5, 6]
        assert state.tokens_at(rows, np.array([6, 0]), np.array([1, 1])).tolist() == [27, 1]


def test_tokens_behind_two_to_the_31(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    window, allocate = 1 << 24, np.empty

    def sparse(shape: tuple[int, ...] | int, dtype: Any = float) -> np.ndarray:
        # Small machines refuse 9 GB of memory, used or not, but not a file that consists of a hole.
        if np.prod(shape) < window:
            return allocate(shape, dtype)
        return np.memmap(tmp_path / "tokens", dtype, "w+", shape=shape)

    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", sparse)
        state = SequenceState(130, window)
    assert 129 * window > 2**31
    state.token_ids[129, 7:10] = [5, 6, 7]
    state.token_ids[128, window - 1] = 8
    rows, starts = np.array([129, 128], np.int32), np.array([7, window - 1], np.int32)
    assert state.tokens_at(rows, starts, np.array([3, 1])).tolist() == [5, 6, 7, 8]


def test_rows_that_are_full_do_not_touch_their_neighbours(llm: LLM) -> None:
    state = SequenceState(3, WINDOW)
    for row in range(3):
        state.fill(row, completion(llm, [40 + row], WINDOW - 1))
    rows = np.arange(3)
    batch = Batch.of(state, rows, 3)
    for position in range(1, WINDOW):
        is_full = state.append(batch, position + 100 * rows)
    assert is_full.all()
    for row in range(3):
        assert state.token_ids[row].tolist() == [40 + row, *(100 * row + np.arange(1, WINDOW)).tolist()]


def test_rows_that_are_cleared_leave_others_alone(llm: LLM) -> None:
    state = SequenceState(3, WINDOW)
    for row in range(3):
        state.fill(row, completion(llm, [40 + row] * (row + 1), 8))
    state.append(Batch.of(state, np.arange(3), 3), np.array([10, 11, 12]))
    per_row = (state.num_unread_tokens, state.num_uncommitted_tokens, state.num_held_tokens)
    for counts in per_row:
        counts[:] = [3, 4, 5]
    state.is_on_device[:] = True
    before = state.generation.copy()
    cleared = state.clear(np.array([2, 0], np.int32))
    assert [each.token_ids.tolist() for each in cleared] == [[42, 42, 42, 12], [40, 10]]
    assert [each.slot for each in cleared] == [-1, -1]
    assert [each is None for each in state.completions] == [True, False, True]
    assert [counts.tolist() for counts in per_row] == [[0, 4, 0]] * 3
    assert state.is_on_device.tolist() == [False, True, False]
    assert (state.generation - before).tolist() == [1, 0, 1] and state.num_cleared == 2


def test_a_batch_is_steady_until_other_rows_or_tokens_come(llm: LLM) -> None:
    state = SequenceState(3, WINDOW)
    for row in range(3):
        state.fill(row, completion(llm, [40 + row], 20))
    batch, other = (Batch.of(state, np.array(rows), 2) for rows in ([0, 1], [1, 2]))
    tokens = np.array([10, 11])
    assert not batch.is_steady
    for _ in range(2):
        state.append(batch, tokens)
        assert batch.is_steady and not other.is_steady
    state.append(other, tokens)
    assert other.is_steady and not batch.is_steady, "it does not know of the token of row 1"
    state.append(batch, tokens)
    state.take_back(np.array([1]))
    assert not batch.is_steady
    state.append(batch, tokens)
    state.clear(np.array([2], np.int32))
    assert batch.is_steady, "row 2 is none of its own"
    state.fill(2, completion(llm, [7], 20))
    assert not batch.is_steady
    assert state.token_ids[0, state.num_prompt_tokens[0] : state.num_tokens[0]].tolist() == [
        10
    ] * 4 and state.token_ids[1, state.num_prompt_tokens[1] : state.num_tokens[1]].tolist() == [
        11,
        11,
        10,
        11,
    ]


def test_a_batch_keeps_the_rows_whose_completions_are_left(llm: LLM) -> None:
    state = SequenceState(4, WINDOW)
    for row in range(4):
        state.fill(row, completion(llm, [40 + row], 20))
    batch = Batch.of(state, np.array([3, 0, 2]), 2)
    assert batch.decode_slots.tolist() == [0, 2] and batch.live() is None
    state.clear(np.array([0], np.int32))
    state.fill(0, completion(llm, [7], 20))
    is_live = batch.live()
    assert is_live is not None and is_live.tolist() == [True, False, True]
    left = batch.only(is_live)
    assert left.slots.tolist() == [3, 2] and left.decode_slots.tolist() == [2] and left.live() is None
