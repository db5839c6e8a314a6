"""Statistics of outputs are those of vLLM's own function; of outputs with tokens only, without the environment."""

from __future__ import annotations

import inspect
import random
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput
from vllm.v1.metrics import stats
from vllm.v1.metrics.stats import IterationStats, LoRARequestStates, PrefillStats, RequestStateStats

from rose_backend.vllm_plugin.scheduler.merged_outputs import KNOWN_NAMES, wrap_update_from_output

VLLMS = inspect.unwrap(IterationStats.update_from_output)


def counted(update: Any) -> tuple[Any, ...]:
    """Return what a front end counts of random outputs of ten requests."""
    rng = random.Random(3)
    iteration, lora_states = IterationStats(), LoRARequestStates()
    iteration.iteration_timestamp = 100.0
    states = [RequestStateStats(arrival_time=index / 10) for index in range(10)]
    for index in range(400):
        state = states[rng.randrange(10)]
        output = EngineCoreOutput(f"r{index}", [1] * rng.randrange(4))
        is_first = state.first_token_ts == 0.0
        if is_first:
            output.prefill_stats = PrefillStats(num_prompt_tokens=7, num_computed_tokens=5)
        if rng.random() < 0.1:
            output.events = [EngineCoreEvent.new_event(EngineCoreEventType.PREEMPTED, 3.0)]
        if rng.random() < 0.1:
            output.num_nans_in_logits = 2
        update(iteration, output, 1.0 + index, is_first, state, lora_states, None)
    fields = {name: value for name, value in vars(iteration).items() if name != "prompt_token_stats"}
    return fields, vars(iteration.prompt_token_stats), [asdict(state) for state in states]


@pytest.mark.parametrize("counts_nans", [False, True])
def test_statistics_are_vllms(monkeypatch: pytest.MonkeyPatch, counts_nans: bool) -> None:
    monkeypatch.setattr(stats, "envs", SimpleNamespace(VLLM_COMPUTE_NANS_IN_LOGITS=counts_nans))
    vllms, ours = counted(VLLMS), counted(wrap_update_from_output(VLLMS))
    assert ours == vllms
    assert any(state["is_corrupted"] for state in ours[2]) == counts_nans


def test_plain_outputs_are_counted_without_vllms_function() -> None:
    assert KNOWN_NAMES.issuperset(VLLMS.__code__.co_names)
    calls: list[bool] = []

    def vllms(self: Any, output: Any, timestamp: float, is_prefilling: bool, *_: Any) -> None:
        calls.append(is_prefilling)

    update, iteration, state = wrap_update_from_output(vllms), IterationStats(), RequestStateStats()
    for is_prefilling in (True, False, False):
        update(iteration, EngineCoreOutput("r", [1, 2]), 1.0, is_prefilling, state, None, None)
    assert calls == [True] and state.num_generation_tokens == iteration.num_generation_tokens == 4


def test_a_function_that_counts_more_stays() -> None:
    def vllms(self: Any, output: Any, timestamp: float, is_prefilling: bool, *_: Any) -> None:
        self.num_of_something_new = 1

    update, iteration = wrap_update_from_output(vllms), IterationStats()
    update(iteration, EngineCoreOutput("r", [1]), 1.0, False, RequestStateStats(), None, None)
    assert iteration.num_of_something_new == 1 and iteration.num_generation_tokens == 0
