"""The budget of steps with prompts: what it learns, its rules, and pretended devices on which it serves traffic."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import mean, median

import numpy as np
import pytest

from rose_backend.scheduling import MAX_WAITING_LOOKED_AT, StepBudget

Device = Callable[[int], float]
"""Seconds of a step with running decodes and so many prompt tokens."""


def device(decode_ms: float, num_free: int, tokens_per_ms: float) -> Device:
    """Return one whose steps take no longer than a decode step with up to ``num_free`` prompt tokens."""
    start_ms = decode_ms - num_free / tokens_per_ms
    return lambda num_tokens: max(decode_ms, start_ms + num_tokens / tokens_per_ms) / 1e3


LLAMA_8B = device(6.9, 150, 42.0)
QWEN3_0_6B = device(0.85, 100, 273.0)
"""As their bytes and products would allow on an H100."""


def measured(*steps: tuple[int, float]) -> Device:
    """Return one of which the milliseconds of some steps are known, by their prompt tokens from 0 on, rising."""
    return lambda num_tokens: float(np.interp(num_tokens, *zip(*steps, strict=True))) / 1e3


MEASURED_LLAMA_8B = measured(
    *((0, 8.2), (1, 10.2), (128, 10.6), (256, 13.9), (384, 16.2), (512, 18.8), (1024, 31.0), (4096, 110.0)),
)
"""Inside vLLM on an H100, beside 32 decodes with contexts of 1,900 tokens; from 1,024 tokens on the sum of both."""
MEASURED_QWEN3_0_6B = measured(
    *(
        (0, 3.06),
        (1, 4.1),
        (64, 4.2),
        (128, 4.7),
        (256, 5.2),
        (512, 5.9),
        (768, 6.6),
        (1024, 7.4),
        (4096, 14.6),
    ),
)
"""Likewise."""


def host_bound(num_tokens: int) -> float:
    return 3e-3 if num_tokens else 0.85e-3


@dataclass
class Served:
    """What a simulation measured, in seconds."""

    gaps: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    limits: list[int | None] = field(default_factory=list)
    """Of steps with prompts."""
    seconds: float = 0.0

    @property
    def p99(self) -> float:
        return sorted(self.gaps)[int(len(self.gaps) * 0.99)]


def serve(
    of: Device, arrivals: Sequence[tuple[float, int]], budget: StepBudget | None, num_decodes: int = 32
) -> Served:
    """Serve prompts, each a time and a number of tokens, first come first served beside ``num_decodes`` streams."""
    served, coming = Served(), deque(arrivals)
    waiting: deque[tuple[float, int]] = deque()
    begun: deque[list[float]] = deque()
    while coming or waiting or begun:
        while coming and coming[0][0] <= served.seconds:
            waiting.append(coming.popleft())
        num_tokens, room = 0, 8192 - num_decodes
        if budget is not None and (waiting or begun):
            sizes = [size for _, size in islice(waiting, MAX_WAITING_LOOKED_AT + 1)]
            served.limits.append(budget.max_prompt_tokens([int(left) for _, left in begun], sizes))
            room = min(room, served.limits[-1] or room)
        while num_tokens < room and (waiting or num_tokens < sum(left for _, left in begun)):
            prompt = next((each for each in begun if each[1]), None)
            if prompt is None:
                begun.append(prompt := list(waiting.popleft()))
                if budget is not None:
                    budget.note_prompt(int(prompt[1]), 0)
            count = min(int(prompt[1]), room - num_tokens)
            prompt[1] -= count
            num_tokens += count
        served.gaps.append(of(num_tokens))
        served.seconds += served.gaps[-1]
        if budget is not None and num_tokens:
            budget.count_step()
            budget.note_mixed_step(num_tokens, served.gaps[-1])
        elif budget is not None:
            budget.note_decode_step(served.gaps[-1])
        while begun and not begun[0][1]:
            served.first_tokens.append(served.seconds - begun.popleft()[0])
    return served


def every(seconds: float, count: int, size: int) -> list[tuple[float, int]]:
    return [(0.5 + index * seconds, size) for index in range(count)]


def at_random(per_second: float, count: int, size: int) -> list[tuple[float, int]]:
    drawn, now, arrivals = random.Random(7), 0.5, []
    for _ in range(count):
        now += drawn.expovariate(per_second)
        arrivals.append((now, size))
    return arrivals


@pytest.mark.parametrize(
    ("of", "arrivals", "factor"),
    [
        (LLAMA_8B, every(0.4, 100, 4096), 1.5),
        (QWEN3_0_6B, every(0.125, 200, 4096), 2.0),
        (MEASURED_LLAMA_8B, every(0.4, 100, 4096), 2.5),
        (MEASURED_QWEN3_0_6B, every(0.125, 300, 4096), 3.0),
    ],
    ids=["Llama 8B", "Qwen3 0.6B", "Llama 8B measured", "Qwen3 0.6B measured"],
)
def test_a_prompt_at_a_time_makes_steps_a_little_longer(
    of: Device, arrivals: list[tuple[float, int]], factor: float
) -> None:
    budget, size = StepBudget(), arrivals[0][1]
    served, whole = serve(of, arrivals, budget), serve(of, arrivals, None)
    decode_s = median(served.gaps)
    # It costs first tokens what it may, and not for each chunk anew.
    allowed_s = 0.5 * of(size) + decode_s + of(0)
    assert mean(served.first_tokens[20:]) <= mean(whole.first_tokens) + allowed_s
    assert served.p99 <= 1.1 * factor * decode_s
    learned = served.gaps[len(served.gaps) // 3 :]
    assert max(learned) <= max(1.3 * factor, 2.1) * decode_s and max(whole.gaps) > 4.5 * decode_s
    assert budget.num_limited > 300 and (budget.num_raised > budget.num_limited / 5) == (factor > 1.5)


def test_what_stays_below_the_factor_is_spent() -> None:
    served = serve(LLAMA_8B, every(0.4, 60, 4096), StepBudget())
    learned = [limit for limit in served.limits[-100:] if limit is not None]
    assert len(learned) == 100
    # Steps of 1.5 * 6.9 ms are those of 295 tokens.
    assert all(256 <= limit <= 304 for limit in learned)


@pytest.mark.parametrize("per_second", [5.0, 8.5])
def test_where_prompts_pile_up_budgets_grow(per_second: float) -> None:
    arrivals, budget = at_random(per_second, 300, 4096), StepBudget()
    served, whole = serve(LLAMA_8B, arrivals, budget), serve(LLAMA_8B, arrivals, None)
    assert budget.num_raised > 25 and budget.num_given_up > 10
    assert mean(served.first_tokens) <= mean(whole.first_tokens) + 0.1
    assert mean(served.gaps) < 0.9 * mean(whole.gaps)


@pytest.mark.parametrize("size", [512, 4096])
def test_at_saturation_as_much_is_served_as_without_a_budget(size: int) -> None:
    arrivals, budget = every(size / 52_000, 1_200_000 // size, size), StepBudget()
    served, whole = serve(LLAMA_8B, arrivals, budget), serve(LLAMA_8B, arrivals, None)
    assert served.seconds <= 1.03 * whole.seconds
    assert budget.num_given_up > 100


def test_a_burst_is_served_as_without_a_budget() -> None:
    arrivals = every(0.4, 30, 4096) + [(13.0, 512)] * 256
    served, whole = serve(LLAMA_8B, arrivals, StepBudget()), serve(LLAMA_8B, arrivals, None)
    burst, burst_whole = served.first_tokens[-256:], whole.first_tokens[-256:]
    assert mean(burst) <= 1.03 * mean(burst_whole) and max(burst) <= 1.03 * max(burst_whole)


@pytest.mark.parametrize("of", [LLAMA_8B, QWEN3_0_6B])
def test_tiny_prompts_run_whole(of: Device) -> None:
    budget = StepBudget()
    served, whole = serve(of, every(0.02, 2000, 20), budget), serve(of, every(0.02, 2000, 20), None)
    assert budget.num_limited == 0 and served.first_tokens == whole.first_tokens


def test_where_a_small_step_costs_as_much_as_a_large_one_there_is_no_limit() -> None:
    budget = StepBudget()
    served = serve(host_bound, every(0.05, 500, 512), budget)
    # Some are tried.
    assert served.limits.count(None) > 0.9 * len(served.limits)
    assert budget.num_given_up > 400


def test_rare_prompts_run_whole() -> None:
    budget = StepBudget()
    # 9 begin within 2000 steps.
    served = serve(LLAMA_8B, every(1.55, 60, 4096), budget)
    assert set(served.limits) == {None} and budget.num_given_up == 0


def test_a_step_that_was_slow_at_first_is_forgotten() -> None:
    # The largest of all, with kernels that are compiled meanwhile: 8000 tokens in 3 s.
    budget = StepBudget()
    for _ in range(64):
        budget.note_decode_step(6.9e-3)
    budget.note_mixed_step(8000, 3.0)
    for _ in range(10):
        budget.note_prompt(512, 0)
    limits = serve(LLAMA_8B, every(0.05, 300, 512), budget).limits
    assert limits[0] == 32
    assert all(limit is None or limit > 200 for limit in limits[-20:])


def test_a_pause_is_forgotten() -> None:
    budget = StepBudget()
    before = serve(LLAMA_8B, every(0.4, 60, 4096), budget).limits[-1]
    budget.note_mixed_step(288, 60.0)
    budget.note_decode_step(60.0)
    assert before is not None and budget.max_prompt_tokens([4096], []) == before
    after = serve(LLAMA_8B, every(0.4, 5, 4096), budget).limits[-1]
    assert after is not None and abs(after - before) <= 32


def test_steps_that_were_read_late_are_not_fast_ones() -> None:
    budget = StepBudget()
    before = serve(LLAMA_8B, every(0.4, 60, 4096), budget).limits[-1]
    budget.note_mixed_step(288, 1e-6)
    assert before is not None
    assert budget.max_prompt_tokens([4096], []) in range(before, before + 64)


def learned_budget(seconds: float | None = None) -> StepBudget:
    """Return one that knows 10 ms per decode step and 100 tokens per ms."""
    budget = StepBudget(seconds)
    for _ in range(64):
        budget.note_decode_step(10e-3)
    budget.note_mixed_step(10_000, 0.1)
    for _ in range(10):
        budget.note_prompt(1000, 0)
    return budget


def ask(budget: StepBudget, begun: list[int], waiting: list[int]) -> int | None:
    """Return the limit of a step that computes prompt tokens."""
    limit = budget.max_prompt_tokens(begun, waiting)
    budget.count_step()
    return limit


def test_nothing_is_limited_before_times_are_known() -> None:
    budget = StepBudget()
    for _ in range(10):
        budget.note_prompt(1000, 0)
    assert budget.max_prompt_tokens([9000], []) is None
    budget.note_mixed_step(10_000, 0.1)
    assert budget.max_prompt_tokens([9000], []) is None
    for _ in range(16):
        budget.note_decode_step(10e-3)
    assert budget.max_prompt_tokens([9000], []) == 1488


def test_more_waiting_prompts_than_are_looked_at_mean_no_limit() -> None:
    budget = learned_budget()
    assert ask(budget, [], [50] * MAX_WAITING_LOOKED_AT) == 1488
    assert ask(budget, [], [50] * (MAX_WAITING_LOOKED_AT + 1)) is None
    assert (budget.num_limited, budget.num_given_up) == (1, 1)
    # Nothing could be admitted after all.
    assert budget.max_prompt_tokens([], [50] * MAX_WAITING_LOOKED_AT) == 1488
    budget.new_step_starts()
    budget.count_step()
    assert (budget.num_limited, budget.num_given_up) == (1, 1)


def test_waiting_prompts_count_by_what_the_cache_leaves_to_compute() -> None:
    budget = learned_budget()
    assert ask(budget, [], [4000]) == 1488 and budget.num_limited == 1
    for _ in range(40):
        budget.note_prompt(4000, 3900)
    # About 120 tokens: they fit.
    assert ask(budget, [], [4000]) == 1488 and budget.num_limited == 1
    assert ask(budget, [4000], []) == 1488 and budget.num_limited == 2


def test_a_fixed_time_is_kept_whatever_waits() -> None:
    budget = StepBudget(20e-3)
    assert budget.max_prompt_tokens([9000], []) == 512
    served = serve(LLAMA_8B, every(0.0, 100, 4096), budget)
    assert None not in served.limits
    # Under 42 tokens per ms, less what a step takes beside.
    assert all(672 <= limit <= 720 for limit in served.limits[-20:] if limit)
    assert max(served.gaps[40:]) < 20.5e-3
    assert budget.num_limited > 400 and budget.num_raised == budget.num_given_up == 0


def test_a_fixed_time_below_a_decode_step_still_leaves_some_tokens() -> None:
    served = serve(LLAMA_8B, every(0.0, 10, 512), StepBudget(1e-3))
    assert served.limits[-1] == 32 and len(served.first_tokens) == 10


def test_slow_steps_are_forgotten_when_they_are_over() -> None:
    budget = StepBudget()
    before = serve(LLAMA_8B, every(0.4, 60, 4096), budget).limits[-1]
    for _ in range(3):
        budget.note_mixed_step(288, 1.0)
    limits = serve(LLAMA_8B, every(0.4, 150, 4096), budget).limits
    assert before is not None and abs((limits[-1] or 0) - before) <= 32
    # Meanwhile prompts were whole.
    assert 0 < limits.count(None) < 140


def test_a_resumed_request_whose_output_is_cached_computes_no_less_than_nothing() -> None:
    budget = learned_budget()
    for _ in range(20):
        budget.note_prompt(100, 2000)
    assert budget.max_prompt_tokens([], [4096] * 3) == learned_budget().max_prompt_tokens([100], [])
