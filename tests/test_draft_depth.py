"""How many drafts requests get, by what was measured; and what would have been drafted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rose_backend.draft_depth import DraftDepth, ShadowDrafts, look_up

NUM_DRAFTS = 3
TIMES = {0: 1.0, NUM_DRAFTS: 1.6}
"""Of a step, by drafts."""


class Engine:
    """Steps of requests that accept a share of their drafts.

    Args:
        times: of a step, by drafts and number of requests.
    """

    def __init__(
        self, depth: DraftDepth, times: Callable[[int, int], float] = lambda drafts, _: TIMES[drafts]
    ) -> None:
        self.depth, self._times, self._rng = depth, times, random.Random(3)
        self.chosen: list[int] = []
        self.seconds = self.tokens = 0.0
        self._last = NUM_DRAFTS

    def run(self, num_steps: int, num_requests: int, share: float) -> None:
        for _ in range(num_steps):
            drafts = self._last
            # Scheduled before the step's output is there.
            self._last = self.depth.choose(num_requests)
            self.chosen.append(self._last)
            seconds = self._times(drafts, num_requests) * self._rng.uniform(0.95, 1.05)
            accepted = [self._accept(share) for _ in range(num_requests)]
            self.seconds += seconds
            self.tokens += num_requests + sum(accepted) * (drafts > 0)
            if drafts == self._last:
                self.depth.note_time(drafts, num_requests, seconds)
            # Without drafts those of one request are known.
            self.depth.note_accepted(sum(accepted) / num_requests if drafts else accepted[0])

    def _accept(self, share: float) -> int:
        return [*(self._rng.random() < share for _ in range(NUM_DRAFTS)), False].index(False)


@pytest.mark.parametrize("num_requests", [1, 32, 256])
@pytest.mark.parametrize(("share", "best"), [(0.9, NUM_DRAFTS), (0.7, NUM_DRAFTS), (0.2, 0), (0.0, 0)])
def test_the_better_number_is_chosen(num_requests: int, share: float, best: int) -> None:
    engine = Engine(DraftDepth(NUM_DRAFTS))
    engine.run(300, num_requests, share)
    assert set(engine.chosen) == {0, NUM_DRAFTS}
    assert engine.chosen[60:].count(best) > 0.95 * len(engine.chosen[60:])


def test_a_drafter_that_is_never_right_costs_next_to_nothing() -> None:
    engine = Engine(DraftDepth(NUM_DRAFTS))
    engine.run(20_000, 32, 0.0)
    assert engine.tokens / engine.seconds > 0.98 * 32


@pytest.mark.parametrize("num_requests", [1, 32])
def test_a_change_of_what_is_written_is_followed_within_200_steps(num_requests: int) -> None:
    engine = Engine(DraftDepth(NUM_DRAFTS))
    for share, best in ((0.9, NUM_DRAFTS), (0.1, 0), (0.9, NUM_DRAFTS)):
        engine.run(600, num_requests, share)
        assert engine.chosen[-400:].count(best) > 0.97 * 400


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
        depth.note_accepted(2.5)
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
    assert shadow.look([request]) == 2
    # Drafted: 9, as nothing like it has been there.
    request.tokens += [9, 9, 9, 9]
    assert shadow.look([request]) == 3
    request.tokens += [5, 9, 9]
    assert shadow.look([request]) == 0


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
    assert 2 in seen and 0 in seen
    assert shadow.look([]) in (None, 0, 2)
    assert shadow.look([]) is None
