"""Two hundred requests through a tenth of the blocks they need, inside vLLM: the same text as one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.e2e.conftest import MakeEngine
from tests.support.pressure_case import PressureCase, pressure_case
from tests.support.stepped_engine import SteppedEngine

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
    ) as llm:
        yield SteppedEngine(llm)


def greedy(case: PressureCase, index: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=case.max_tokens[index], ignore_eos=True)


def test_200_requests_at_once_and_some_of_them_alone(engine: SteppedEngine, case: PressureCase) -> None:
    everyone = range(len(case.prompts))
    outputs = engine.generate(case.prompts, [greedy(case, index) for index in everyone])
    wrong = [
        f"request {index} ({case.kinds[index]}): got {outputs[index].outputs[0].token_ids}"
        for index in everyone
        if tuple(outputs[index].outputs[0].token_ids) != case.expected[index]
    ]
    assert not wrong, "\n".join(wrong[:4])
    stats = engine.manager.stats
    assert engine.num_preemptions > 0
    assert min(stats.evictions, stats.clones, stats.partial_hits, stats.hit_tokens) > 0, stats

    # One at a time: from what is left in the cache, then each with an empty one.
    for keep_cache in (True, False):
        for index in case.sample(20):
            if not keep_cache:
                assert engine.llm.reset_prefix_cache()
            (alone,) = engine.generate([case.prompts[index]], greedy(case, index))
            assert alone.outputs[0].text == outputs[index].outputs[0].text, f"request {index}"
            assert keep_cache or alone.num_cached_tokens == 0
