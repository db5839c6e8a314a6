"""Deferred commits: nothing is lost or committed twice, no step commits all rows.

No prefix lookup finds less for it."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from rose_backend import LLM, SamplingParams
from rose_backend.engine.sequence_state import DeferredCommits

NUM_ROWS, WINDOW = 300, 4096


class Recorder:
    """Stands for the block manager and for the rows' state: token ``t`` of row ``r`` is ``r * WINDOW + t``."""

    def __init__(self, held: tuple[int, ...] = ()) -> None:
        self.num_computed_tokens = np.arange(NUM_ROWS, dtype=np.int32) % 7
        self.first = self.num_computed_tokens.copy()
        self.token_ids = np.arange(NUM_ROWS * WINDOW, dtype=np.int32).reshape(NUM_ROWS, WINDOW)
        self.has_stop_strings = np.isin(np.arange(NUM_ROWS), held)
        self.num_held_tokens = np.zeros(NUM_ROWS, np.int32)
        self.num_uncommitted_tokens = np.zeros(NUM_ROWS, np.int32)
        self.namespaces = [b""] * NUM_ROWS
        self.table = self
        self.sizes: list[int] = []

    def tokens_at(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        spans = zip(rows, starts, counts, strict=True)
        tokens = [self.token_ids[row, start : start + n] for row, start, n in spans]
        return np.concatenate([np.zeros(0, np.int32), *tokens])

    def commit(self, rows: np.ndarray, num_tokens: int | np.ndarray, token_ids: np.ndarray) -> None:
        counts = np.broadcast_to(num_tokens, len(rows))
        start = self.num_computed_tokens[rows]
        expected = [
            row * WINDOW + at + k for row, at, n in zip(rows, start, counts, strict=True) for k in range(n)
        ]
        assert token_ids.tolist() == expected
        self.num_computed_tokens[rows] += counts.astype(np.int32)
        self.sizes.append(len(rows))


def make(held: tuple[int, ...] = ()) -> tuple[DeferredCommits, Recorder]:
    recorder = Recorder(held)
    return DeferredCommits(recorder, recorder, lambda *_: None), recorder  # type: ignore[arg-type]


def uncommitted(commits: DeferredCommits) -> np.ndarray:
    counts = np.zeros(NUM_ROWS, np.int32)
    commits.count(counts)
    return counts


def test_no_step_commits_all_rows_and_none_is_left_behind() -> None:
    commits, recorder = make()
    rows = np.arange(256)
    for step in range(1, 200):
        if step == 1:
            commits.add(rows)
        else:
            commits.add_again()
        before = len(recorder.sizes)
        commits.commit_some()
        assert len(recorder.sizes) - before <= 1
        lag = uncommitted(commits)[:256]
        assert (recorder.num_computed_tokens - recorder.first)[:256].tolist() == (step - lag).tolist()
        assert lag.max() < 64 and not uncommitted(commits)[256:].any()
    # Seldom, and never all rows in one step.
    assert len(recorder.sizes) < 200 / 4 and max(recorder.sizes) < 256 / 2


@pytest.mark.parametrize("num_rows", [1, 16, 17, 100, 300])
def test_few_rows_are_committed_together_and_many_in_pieces(num_rows: int) -> None:
    commits, recorder = make()
    commits.add(np.arange(num_rows), np.zeros(num_rows, np.int32))
    for _ in range(70):
        commits.add_again()
        commits.commit_some()
    assert 0 < len(recorder.sizes) < 70 / 4
    if num_rows <= 16:
        assert set(recorder.sizes) == {num_rows}
    elif num_rows >= 100:
        assert max(recorder.sizes) <= num_rows / 2


def test_prompts_are_committed_a_few_at_a_time() -> None:
    commits, recorder = make()
    commits.add(np.arange(10), np.full(10, 600))
    commits.add(np.array([20]), np.array([3000]))
    while uncommitted(commits).any():
        before = recorder.num_computed_tokens.copy()
        commits.commit_some()
        done = recorder.num_computed_tokens - before
        assert done.sum() < 600 * 10 or np.count_nonzero(done) == 1
    assert 1 < len(recorder.sizes) < sum(recorder.sizes) == 11


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_calls_commits_each_token_once(seed: int) -> None:
    commits, recorder = make()
    rng = random.Random(seed)
    noted = np.zeros(NUM_ROWS, np.int64)
    rows = np.arange(200)
    is_steady = False
    for _ in range(300):
        chance = rng.random()
        some = np.array(sorted(rng.sample(range(NUM_ROWS), rng.randint(1, NUM_ROWS))))
        if chance < 0.02:
            rows, is_steady = some, False
        elif chance < 0.04:
            commits.flush()
            assert (recorder.num_computed_tokens - recorder.first).tolist() == noted.tolist()
        elif chance < 0.06:
            before = recorder.num_computed_tokens.copy()
            commits.flush(some)
            assert not uncommitted(commits)[some].any()
            assert set(np.flatnonzero(recorder.num_computed_tokens - before)) <= set(some.tolist())
        elif chance < 0.08:
            if rng.random() < 0.5:
                some = rows
            counts = np.array([rng.randint(1, 100) for _ in some])
            commits.add(some, counts)
            noted[some] += counts
            is_steady = False
        if is_steady:
            commits.add_again()
        else:
            commits.add(rows)
        is_steady = True
        noted[rows] += 1
        commits.commit_some()
        if rng.random() < 0.3:  # to ask changes what comes next
            done = recorder.num_computed_tokens - recorder.first
            assert (done + uncommitted(commits)).tolist() == noted.tolist()


def test_rows_with_stop_strings_are_held_until_confirmed() -> None:
    commits, recorder = make(held=(3,))
    rows = np.arange(64)
    for _ in range(32):
        commits.add(rows)
        commits.commit_some()
    assert recorder.num_computed_tokens[3] == 3 and recorder.num_held_tokens[3] == 32
    commits.confirm(3, 3 + 5)
    for _ in range(32):
        commits.add(rows)
        commits.commit_some()
    assert recorder.num_computed_tokens[3] == 8 and recorder.num_held_tokens[3] == 64 - 5


def test_rows_that_were_flushed_and_went_on_are_confirmed() -> None:
    commits, recorder = make(held=(3,))
    rows = np.arange(10)
    commits.add(rows)
    commits.flush()
    for _ in range(3):
        commits.add(rows)
    commits.confirm(3, 3 + 2)
    commits.flush_for(np.array([99], np.int32), b"")
    assert recorder.num_computed_tokens[3] == 5 and recorder.num_held_tokens[3] == 2


def test_what_a_step_counts_on_stays_the_same() -> None:
    # Computed, held and late tokens together, while a step is being planned.
    commits, recorder = make(held=(3,))
    rows = np.arange(10)
    for _ in range(9):
        commits.add(rows)
    recorder.num_uncommitted_tokens[:] = recorder.num_held_tokens
    commits.count(recorder.num_uncommitted_tokens)
    commits.confirm(3, 3 + 4)
    before = recorder.num_computed_tokens + recorder.num_uncommitted_tokens
    commits.flush()
    assert recorder.num_computed_tokens[3] == 7 and recorder.num_computed_tokens[4] == 4 + 9
    assert (recorder.num_computed_tokens + recorder.num_uncommitted_tokens).tolist() == before.tolist()


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("prompt", "commits_it"),
    [
        (range(6), True),  # the row's first six tokens: five can be found, the third of them is late
        (range(4), True),  # three can be found
        (range(3), False),  # two can be found, which are committed
        ([0, 1, 2, 99, 99], True),
        ([0, 1, 99, 3, 4], False),  # parts before what is late
        ([99, 1, 2, 3, 4], False),  # the late token is the same, but not the way to it
    ],
)
def test_a_lookup_commits_just_what_it_can_find(prompt: list[int], commits_it: bool, at_once: bool) -> None:
    commits, recorder = make()
    recorder.num_computed_tokens[0] = recorder.first[0] = 2
    rows = np.array([0, 1, 9])
    if at_once:
        commits.add(rows, np.array([10, 10, 10]))
    else:
        commits.add(rows)
        commits.flush()
        recorder.num_computed_tokens[rows] = recorder.first[rows]
        for _ in range(10):
            commits.add(rows)
    # Whoever cannot find it does not even wait for it.
    commits.flush_for(np.array(prompt, np.int32), b"another tenant")
    assert (uncommitted(commits)[[0, 1, 9]] == 10).all()
    commits.flush_for(np.array(prompt, np.int32), b"")
    assert (uncommitted(commits)[[0, 1, 9]] == 0).tolist() == [commits_it, False, False]


@pytest.mark.parametrize("num_steps", [1, 2, 20])
@pytest.mark.parametrize("run_ahead", [0, 1, 3])
@pytest.mark.parametrize("num_shared", [1, 16, 30])
def test_a_prompt_finds_all_that_running_rows_have_computed(
    make_llm: Callable[..., LLM], run_ahead: int, num_shared: int, num_steps: int
) -> None:
    core = make_llm(max_num_seqs=8, run_ahead=run_ahead).core
    rng = random.Random(num_shared)
    stem = [rng.randrange(2, 200) for _ in range(30)]
    others = [[rng.randrange(200, 250) for _ in range(40)] for _ in range(4)]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    for prompt in (*others, stem):
        core.add(core.input_processor.make(prompt, params))
    for _ in range(num_steps):
        core.step()
    second = core.input_processor.make(stem[:num_shared] + [1] * 9, SamplingParams(max_tokens=2))
    core.add(second)
    while not second.is_finished:
        core.step()
    assert second.num_cached_tokens == num_shared
    core.check_integrity()
