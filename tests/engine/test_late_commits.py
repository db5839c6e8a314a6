"""Late commits: nothing is lost, nothing is committed twice, and no call takes more than its share of the rows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rose_backend.engine.late_commits import LateCommits

NUM_ROWS, WINDOW = 300, 4096


class Recorder:
    """Stands for the block manager and for the rows' state: token ``t`` of row ``r`` is ``r * WINDOW + t``."""

    def __init__(self, held: tuple[int, ...] = ()) -> None:
        self.num_computed_tokens = np.arange(NUM_ROWS, dtype=np.int32) % 7
        self.first = self.num_computed_tokens.copy()
        self.token_ids = np.arange(NUM_ROWS * WINDOW, dtype=np.int32).reshape(NUM_ROWS, WINDOW)
        self.has_stop_strings = np.isin(np.arange(NUM_ROWS), held)
        self.num_held_tokens = np.zeros(NUM_ROWS, np.int32)
        self.sizes: list[int] = []

    def commit(self, rows: np.ndarray, num_tokens: int | np.ndarray, token_ids: np.ndarray) -> None:
        counts = np.broadcast_to(num_tokens, len(rows))
        start = self.num_computed_tokens[rows]
        expected = [
            row * WINDOW + at + k for row, at, n in zip(rows, start, counts, strict=True) for k in range(n)
        ]
        assert token_ids.tolist() == expected
        self.num_computed_tokens[rows] += counts.astype(np.int32)
        self.sizes.append(len(rows))


def make(held: tuple[int, ...] = ()) -> tuple[LateCommits, Recorder]:
    recorder = Recorder(held)
    return LateCommits(recorder, recorder), recorder  # type: ignore[arg-type]


def uncommitted(commits: LateCommits) -> np.ndarray:
    counts = np.zeros(NUM_ROWS, np.int32)
    commits.count(counts)
    return counts


def test_rows_take_turns() -> None:
    commits, recorder = make()
    rows = np.arange(256)
    for step in range(1, 200):
        commits.add(rows)
        before = len(recorder.sizes)
        commits.keep_up()
        assert len(recorder.sizes) - before == (step % 8 == 0)
        lag = uncommitted(commits)[:256]
        assert (recorder.num_computed_tokens - recorder.first)[:256].tolist() == (step - lag).tolist()
        assert lag.max() <= 32 and not uncommitted(commits)[256:].any()
    assert set(recorder.sizes) == {64}


@pytest.mark.parametrize("num_rows", [1, 16, 17, 100, 300])
def test_few_rows_are_committed_together_and_many_in_four_pieces(num_rows: int) -> None:
    commits, recorder = make()
    for _ in range(64):
        commits.add(np.arange(num_rows))
        commits.keep_up()
    num_pieces = min(4, -(-num_rows // 16))
    assert len(recorder.sizes) == 2 * num_pieces
    assert sum(recorder.sizes) == 2 * num_rows


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_calls_commits_each_token_once(seed: int) -> None:
    commits, recorder = make()
    rng = random.Random(seed)
    noted = np.zeros(NUM_ROWS, np.int64)
    rows = np.arange(200)
    for _ in range(300):
        chance = rng.random()
        if chance < 0.02:
            rows = np.array(sorted(rng.sample(range(NUM_ROWS), rng.randint(1, NUM_ROWS))))
        elif chance < 0.04:
            commits.flush()
            assert (recorder.num_computed_tokens - recorder.first).tolist() == noted.tolist()
        commits.add(rows)
        noted[rows] += 1
        commits.keep_up()
        done = recorder.num_computed_tokens - recorder.first
        assert (done + uncommitted(commits)).tolist() == noted.tolist()


def test_rows_with_stop_strings_are_held_until_confirmed() -> None:
    commits, recorder = make(held=(3,))
    rows = np.arange(64)
    for _ in range(32):
        commits.add(rows)
        commits.keep_up()
    assert recorder.num_computed_tokens[3] == 3 and recorder.num_held_tokens[3] == 8
    commits.confirm(3, 3 + 5)
    for _ in range(32):
        commits.add(rows)
        commits.keep_up()
    assert recorder.num_computed_tokens[3] == 8 and recorder.num_held_tokens[3] == 8 + 32 - 5
