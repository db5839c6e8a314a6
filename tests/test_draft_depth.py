"""How many drafts requests get, by what was measured; and what would have been drafted."""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rose_backend.draft_depth import DraftDepth, ShadowDrafts, draft_depths, look_up

NUM_DRAFTS = 3
TIMES = {0: 1.0, 1: 1.5, NUM_DRAFTS: 1.6}
"""Of a step, by drafts."""


class Engine:
    """Steps of requests that accept a share of their drafts.

    Args:
        times: of a step, by drafts and number of requests.
    """

    def __init__(
        self,
        depth: DraftDepth,
        times: Callable[[int, int], float] = lambda drafts, _: TIMES[drafts],
        seed: int = 3,
    ) -> None:
        self.depth, self._times, self._rng = depth, times, random.Random(seed)
        self.chosen: list[int] = []
        self.seconds = self.tokens = 0.0
        self._last = depth.num_drafts

    def run(self, num_steps: int, num_requests: int, share: float) -> None:
        for _ in range(num_steps):
            drafts = self._last
            # Scheduled before the step's output is there.
            self._last = self.depth.choose(num_requests)
            self.chosen.append(self._last)
            seconds = self._times(drafts, num_requests) * self._rng.uniform(0.95, 1.05)
            accepted = np.array([self._accept(share) for _ in range(num_requests)])
            # Without drafts those of one request are known.
            shares = accepted[:, :drafts].mean(0) if drafts else accepted[0]
            self.seconds += seconds
            self.tokens += num_requests * (1 + shares.sum() * (drafts > 0))
            if drafts == self._last:
                self.depth.note_time(drafts, num_requests, seconds)
            self.depth.note_accepted(shares.tolist())

    def _accept(self, share: float) -> list[bool]:
        are_accepted = (self._rng.random() < share for _ in range(self.depth.num_drafts))
        return list(itertools.accumulate(are_accepted, operator.and_))


@pytest.mark.parametrize("num_requests", [1, 32, 256])
@pytest.mark.parametrize(("share", "best"), [(0.9, NUM_DRAFTS), (0.7, NUM_DRAFTS), (0.2, 0), (0.0, 0)])
def test_the_better_number_is_chosen(num_requests: int, share: float, best: int) -> None:
    engine = Engine(DraftDepth(NUM_DRAFTS))
    engine.run(300, num_requests, share)
    assert set(engine.chosen) == {0, 1, NUM_DRAFTS}
    assert engine.chosen[80:].count(best) > 0.95 * len(engine.chosen[80:])


@pytest.mark.parametrize(
    ("num_drafts", "expected"),
    [(1, (0, 1)), (2, (0, 1, 2)), (3, (0, 1, 3)), (5, (0, 1, 3, 5)), (7, (0, 1, 3, 7)), (8, (0, 8))],
)
def test_numbers_between_all_and_none(num_drafts: int, expected: tuple[int, ...]) -> None:
    assert draft_depths(num_drafts) == expected


@pytest.mark.parametrize(("share", "best"), [(0.95, NUM_DRAFTS), (0.6, 1), (0.05, 0)])
def test_some_of_the_drafts_may_be_best(share: float, best: int) -> None:
    engine = Engine(DraftDepth(NUM_DRAFTS), lambda drafts, _: (1.0, 1.25, 1.6, 2.0)[drafts])
    engine.run(1000, 32, share)
    assert engine.chosen[-500:].count(best) > 0.95 * 500
    # What later drafts would be accepted is known from before, and found out again.
    engine.run(8000, 32, 0.95)
    assert engine.chosen[-500:].count(NUM_DRAFTS) > 0.95 * 500


def test_a_drafter_that_is_never_right_costs_next_to_nothing() -> None:
    engine = Engine(DraftDepth(NUM_DRAFTS))
    engine.run(20_000, 32, 0.0)
    assert engine.tokens / engine.seconds > 0.98 * 32


@pytest.mark.parametrize("num_requests", [1, 32])
def test_a_change_of_what_is_written_is_followed_within_200_steps(num_requests: int) -> None:
    engine = Engine(DraftDepth(NUM_DRAFTS))
    for share, best in ((0.9, NUM_DRAFTS), (0.1, 0), (0.9, NUM_DRAFTS)):
        engine.run(600, num_requests, share)
        assert engine.chosen[-400:].count(best) > 0.96 * 400


def test_what_a_head_drafts_is_found_out_again() -> None:
    """Nothing is known of drafts that a head did not make, and outputs arrive some steps late."""
    depth, steps = DraftDepth(NUM_DRAFTS), deque([NUM_DRAFTS] * 3)

    def run(num_steps: int, share: float) -> list[int]:
        chosen = []
        for _ in range(num_steps):
            before, drafts = steps.popleft(), steps[0]
            chosen.append(depth.choose(8))
            steps.append(chosen[-1])
            if drafts == before:
                depth.note_time(drafts, 8, TIMES[drafts])
            if drafts:
                depth.note_accepted([share**place for place in range(1, drafts + 1)])
        return chosen

    assert run(300, 0.0)[-100:].count(0) > 90
    chosen = run(4000, 0.0)
    # Of later drafts there is nothing to learn while the first one is never right.
    assert 5 < chosen.count(1) < 200 and chosen.count(NUM_DRAFTS) == 0
    assert run(800, 0.9)[-100:].count(NUM_DRAFTS) > 90


def test_each_size_of_batch_has_its_own_times() -> None:
    engine = Engine(
        DraftDepth(NUM_DRAFTS), lambda drafts, size: 1.0 + 0.6 * (drafts > 0) * (1 + 9 * (size > 100))
    )
    for num_requests, best in ((4, NUM_DRAFTS), (200, 0), (4, NUM_DRAFTS), (200, 0)):
        engine.run(200, num_requests, 0.8)
        assert engine.chosen[-120:].count(best) > 110


def test_a_size_that_has_not_been_seen_takes_what_the_most_similar_one_takes() -> None:
    engine = Engine(DraftDepth(NUM_DRAFTS))
    engine.run(200, 40, 0.1)
    for num_requests in (70, 250, 20):
        engine.run(3, num_requests, 0.1)
    assert engine.chosen[-9:] == [0] * 9


@pytest.mark.parametrize("slow", [0, NUM_DRAFTS])
@pytest.mark.parametrize(("share", "best"), [(0.9, NUM_DRAFTS), (0.1, 0)])
def test_times_beside_others_on_the_gpu_are_forgotten(slow: int, share: float, best: int) -> None:
    is_shared = True
    depth = DraftDepth(NUM_DRAFTS)
    engine = Engine(depth, lambda drafts, _: TIMES[drafts] * (4.0 if is_shared and drafts == slow else 1.0))
    engine.run(40, 8, share)
    is_shared = False
    # The longer, the more another trial would cost by what was measured.
    engine.run(4000, 8, share)
    assert engine.chosen[-500:].count(best) > 0.95 * 500


@pytest.mark.parametrize("verify_s", [1.02, 2.5, 20.0])
def test_trials_cost_next_to_nothing(verify_s: float) -> None:
    engine = Engine(DraftDepth(NUM_DRAFTS), lambda drafts, _: verify_s if drafts else 1.0)
    engine.run(300, 16, 0.0)
    engine.seconds = engine.tokens = 0.0
    engine.run(20_000, 16, 0.0)
    assert engine.tokens / engine.seconds > 0.98 * 16


def test_times_that_have_changed_are_found_out() -> None:
    verify_s = 9.0
    engine = Engine(DraftDepth(NUM_DRAFTS), lambda drafts, _: verify_s if drafts else 1.0)
    engine.run(300, 8, 0.9)
    assert engine.chosen[-1] == 0
    verify_s = 1.2
    engine.run(6000, 8, 0.9)
    assert engine.chosen[-1] == NUM_DRAFTS


def test_a_trial_without_steps_that_can_be_timed_is_given_up() -> None:
    engine = Engine(DraftDepth(NUM_DRAFTS))
    engine.run(200, 8, 0.9)
    depth = engine.depth
    chosen = [depth.choose(8) for _ in range(20_000)]
    assert chosen.count(0) < 0.02 * len(chosen)
    # Also the first one.
    depth = DraftDepth(NUM_DRAFTS)
    engine = Engine(depth)
    while depth.choose(8):
        depth.note_time(NUM_DRAFTS, 8, 1.6)
        depth.note_accepted([1.0, 0.9, 0.6])
    chosen = [depth.choose(8) for _ in range(1000)]
    assert 0 < chosen.count(0) < 60 and chosen[-1] == NUM_DRAFTS


def test_sizes_that_alternate_change_nothing() -> None:
    """Near a power of two: by what is known, drafts pay below it and do not from there on."""
    engine = Engine(
        DraftDepth(NUM_DRAFTS), lambda drafts, size: 1.0 + (0.8 if size < 16 else 2.6) * (drafts > 0)
    )
    for num_requests in (15, 16, 15, 16):
        engine.run(200, num_requests, 0.8)
    begin = len(engine.chosen)
    for step in range(1000):
        engine.run(1, 15 + step // 6 % 2, 0.8)
    chosen = engine.chosen[begin:]
    assert sum(now != then for now, then in itertools.pairwise(chosen)) < 40


@pytest.mark.parametrize("num_steps", [1, 3, 7, 8, 9, 12])
def test_sizes_that_alternate_keep_no_drafts_that_do_not_pay(num_steps: int) -> None:
    engine = Engine(DraftDepth(NUM_DRAFTS))
    for step in range(2000):
        engine.run(1, 15 + step // num_steps % 2, 0.0)
    assert engine.chosen[-1000:].count(0) > 950


def test_noise_costs_little() -> None:
    """Step times that scatter by 30 %, as beside other work on the GPU, cost 3 % of the best number's tokens."""
    depths, ratios = draft_depths(7), []
    for seed, share in itertools.product(range(4), (0.6, 0.8)):
        noise = random.Random(seed)

        def seconds(drafts: int, _: int, noise: random.Random = noise) -> float:
            return (1 + 0.3 * drafts) * noise.lognormvariate(0, 0.3)

        engine = Engine(DraftDepth(depths[-1]), seconds, seed)
        engine.run(2000, 32, share)
        tokens = {depth: sum(share**place for place in range(depth + 1)) for depth in depths}
        best = 32 * max(tokens[depth] / (1 + 0.3 * depth) for depth in depths)
        # The mean of such times is longer than their median.
        ratios.append(engine.tokens / engine.seconds * math.exp(0.3**2 / 2) / best)
    assert sum(ratios) / len(ratios) > 0.96


def test_steps_that_take_no_time_are_not_counted() -> None:
    depth = DraftDepth(NUM_DRAFTS)
    for _ in range(100):
        depth.note_time(depth.choose(8), 8, 0.0)
        depth.note_accepted([1.0] * NUM_DRAFTS)
    assert depth.choose(8) == NUM_DRAFTS


def test_nothing_is_tried_before_anything_is_known() -> None:
    depth = DraftDepth(NUM_DRAFTS)
    assert {depth.choose(8) for _ in range(100)} == {NUM_DRAFTS}
    assert {depth.choose(0) for _ in range(100)} == {NUM_DRAFTS}


def drafts_of(tokens: list[int], num_drafts: int, min_n: int, max_n: int) -> list[int]:
    """As vLLM's kernels: the longest n-gram first, its last occurrence that has a token behind it."""
    found: list[int] = []
    for n in range(max_n, min_n - 1, -1):
        places = [
            place
            for place in range(len(tokens) - n)
            if n < len(tokens) and tokens[place : place + n] == tokens[-n:]
        ]
        if places:
            found = tokens[places[-1] + n :][:num_drafts]
            break
    return found + [tokens[-1]] * (num_drafts - len(found))


@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (1, 4), (2, 3), (3, 3), (5, 5)])
def test_drafts_are_looked_up_as_vllm_does(min_n: int, max_n: int) -> None:
    rng = random.Random(min_n * 10 + max_n)
    for _ in range(400):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
        num_drafts = rng.randrange(1, 6)
        expected = drafts_of(tokens, num_drafts, min_n, max_n)
        assert look_up(np.array(tokens), num_drafts, min_n, max_n) == expected, tokens


def make_request(*tokens: int) -> Any:
    return SimpleNamespace(tokens=list(tokens), runs=True)


def tokens_of(request: Any) -> list[int] | None:
    return request.tokens if request.runs else None


def test_right_drafts_are_counted_once_their_tokens_are_known() -> None:
    shadow, request = ShadowDrafts(3, 1, 2, tokens_of), make_request(1, 2, 3, 4, 1, 2)
    assert shadow.look([request]) is None
    # Drafted: 3, 4, 1.
    for token in (3, 4):
        request.tokens.append(token)
        assert shadow.look([request]) is None
    request.tokens.append(9)
    assert shadow.look([request]) == [True, True, False]
    # Drafted: 9, as nothing like it has been there.
    request.tokens += [9, 9, 9, 9]
    assert shadow.look([request]) == [True] * 3
    request.tokens += [5, 9, 9]
    assert shadow.look([request]) == [False] * 3


def test_requests_take_turns_and_may_end() -> None:
    shadow, requests = (
        ShadowDrafts(2, 1, 1, tokens_of),
        [make_request(1, 1), make_request(2, 2), make_request(3, 3)],
    )
    seen = []
    for step in range(12):
        for index, request in enumerate(requests):
            # The first repeats itself, the others do not.
            request.tokens.append(1 if index == 0 else 10 * index + step)
        seen.append(shadow.look(requests))
        if step == 8:
            requests[1].runs = False
            del requests[1]
    assert [True, True] in seen and [False, False] in seen
    assert shadow.look([]) in (None, [False, False], [True, True])
    assert shadow.look([]) is None
