"""Pressure and random traffic on a CUDA device: model runner V2, asynchronous scheduling, compiled, CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.support.pressure_case import PressureCase, pressure_case
from tests.support.random_traffic import LOST_BY_RESETS, plan_visits, spend_day, wrong_outputs
from tests.support.stepped_engine import SteppedEngine

pytestmark = pytest.mark.gpu

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def case(tiny_model_path: Path) -> PressureCase:
    return pressure_case(tiny_model_path, vocab_size=2559)


@pytest.fixture(scope="module")
def engine(make_engine: MakeEngine, case: PressureCase) -> Iterator[SteppedEngine]:
    with make_engine(
        num_gpu_blocks_override=1 + case.num_blocks_needed(BLOCK_SIZE) // 10,
        block_size=BLOCK_SIZE,
        max_model_len=400,
        max_num_batched_tokens=203,
        scheduling_policy="priority",
        enforce_eager=False,
        **GPU_MEMORY,
    ) as llm:
        engine = SteppedEngine(llm)
        assert engine.core.async_scheduling and engine.scheduler.use_v2_model_runner
        yield engine


def test_200_requests_through_a_tenth_of_the_blocks_they_need(
    engine: SteppedEngine, case: PressureCase
) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in case.max_tokens]
    outputs = engine.generate(case.prompts, params)
    wrong = [
        f"request {index} ({case.kinds[index]}): got {output.outputs[0].token_ids}"
        for index, output in enumerate(outputs)
        if tuple(output.outputs[0].token_ids) != case.expected[index]
    ]
    assert not wrong, "\n".join(wrong[:4])
    stats = engine.manager.stats
    assert engine.num_preemptions > 0
    assert min(stats.evictions, stats.clones, stats.partial_hits, stats.hit_tokens) > 0, stats
    for index in case.sample(20):
        (alone,) = engine.generate([case.prompts[index]], params[index])
        assert alone.outputs[0].text == outputs[index].outputs[0].text, f"request {index}"


@pytest.mark.parametrize("has_resets", [True, False], ids=["with resets", "without resets"])
def test_a_random_day(engine: SteppedEngine, case: PressureCase, has_resets: bool) -> None:
    assert engine.llm.reset_prefix_cache()
    tokenizer = engine.llm.get_tokenizer()
    without = LOST_BY_RESETS if has_resets else ()
    visits = plan_visits(case, tokenizer, 150, seed=int(has_resets), without=without)
    clones_before = engine.manager.stats.clones
    day = spend_day(engine, case, visits, seed=0, has_resets=has_resets)
    assert not (wrong := wrong_outputs(day, case, tokenizer)), "\n".join(wrong[:4])
    assert len(day.aborted) > 5 and (day.num_resets > 2) == has_resets
    assert engine.manager.stats.clones - clones_before > 10
