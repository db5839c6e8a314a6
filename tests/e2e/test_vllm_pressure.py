"""Two hundred requests through a tenth of the blocks they need, inside vLLM: the same text as one at a time.

On CUDA with model runner V2, asynchronous scheduling, compiled, from CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.support.pressure_case import PressureCase, pressure_case
from tests.support.random_traffic import LOST_BY_RESETS, plan_visits, spend_day, wrong_outputs
from tests.support.stepped_engine import SteppedEngine

BLOCK_SIZE = 16
ON_GPU: dict[str, Any] = {"scheduling_policy": "priority", "enforce_eager": False, **GPU_MEMORY}
ENGINES = [pytest.param({}, id="CPU"), pytest.param(ON_GPU, id="GPU", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def case(tiny_model_path: Path) -> PressureCase:
    return pressure_case(tiny_model_path, vocab_size=2559)


@pytest.fixture(scope="module", params=ENGINES)
def engine(
    make_engine: MakeEngine, case: PressureCase, request: pytest.FixtureRequest
) -> Iterator[SteppedEngine]:
    with make_engine(
        num_gpu_blocks_override=1 + case.num_blocks_needed(BLOCK_SIZE) // 10,
        block_size=BLOCK_SIZE,
        max_model_len=400,
        max_num_batched_tokens=203,
        **request.param,
    ) as llm:
        engine = SteppedEngine(llm)
        if request.param is ON_GPU:
            assert engine.core.async_scheduling and engine.scheduler.use_v2_model_runner
        yield engine


def test_200_requests_at_once_and_some_of_them_alone(
    engine: SteppedEngine, case: PressureCase, request: pytest.FixtureRequest
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

    # One at a time: from what is left in the cache, then, on a CPU, each with an empty one.
    is_on_gpu = request.node.get_closest_marker("gpu") is not None
    for keep_cache in (True,) if is_on_gpu else (True, False):
        for index in case.sample(20):
            if not keep_cache:
                assert engine.llm.reset_prefix_cache()
            (alone,) = engine.generate([case.prompts[index]], params[index])
            assert alone.outputs[0].text == outputs[index].outputs[0].text, f"request {index}"
            assert keep_cache or alone.num_cached_tokens == 0


@pytest.mark.parametrize("engine", ENGINES[1:], indirect=True)
@pytest.mark.parametrize("has_resets", [True, False], ids=["with resets", "without resets"])
def test_a_random_day(engine: SteppedEngine, case: PressureCase, has_resets: bool) -> None:
    """On a GPU; ``test_vllm_traffic`` has more of them for CPUs."""
    assert engine.llm.reset_prefix_cache()
    tokenizer = engine.llm.get_tokenizer()
    without = LOST_BY_RESETS if has_resets else ()
    visits = plan_visits(case, tokenizer, 150, seed=int(has_resets), without=without)
    clones_before = engine.manager.stats.clones
    day = spend_day(engine, case, visits, seed=0, has_resets=has_resets)
    assert not (wrong := wrong_outputs(day, case, tokenizer)), "\n".join(wrong[:4])
    assert len(day.aborted) > 5 and (day.num_resets > 2) == has_resets
    assert engine.manager.stats.clones - clones_before > 10
