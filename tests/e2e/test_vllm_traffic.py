"""vLLM's scheduler over Rose's block manager in a real engine, stepped by hand and recounted after every step.

Every test runs twice: each step awaited, as on CPUs, and with two steps in flight, as on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.e2e.conftest import MakeEngine
from tests.support.pressure_case import PressureCase, pressure_case
from tests.support.random_traffic import LOST_BY_RESETS, plan_visits, spend_day, wrong_outputs
from tests.support.reference_generation import tie_free_answer
from tests.support.stepped_engine import SteppedEngine, overlap_steps_on_cpu, tokens_of
from tests.support.vllm_engines import random_tokens

AnswerTo = Callable[..., tuple[int, ...]]

BLOCK_SIZE = 16
NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
NO_HITS = SamplingParams(
    temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, skip_reading_prefix_cache=True
)


@pytest.fixture(scope="module", params=["awaited steps", "overlapped steps"])
def shared_engine(make_engine: MakeEngine, request: pytest.FixtureRequest) -> Iterator[SteppedEngine]:
    """Return an engine with few blocks, and chunks that split them."""
    with pytest.MonkeyPatch.context() as environment:
        if request.param == "overlapped steps":
            overlap_steps_on_cpu(environment)
        with make_engine(
            num_gpu_blocks_override=61,
            block_size=BLOCK_SIZE,
            max_model_len=400,
            max_num_seqs=12,
            max_num_batched_tokens=61,
            scheduling_policy="priority",
        ) as llm:
            engine = SteppedEngine(llm)
            assert engine.core.async_scheduling == (request.param == "overlapped steps")
            yield engine


@pytest.fixture
def engine(shared_engine: SteppedEngine) -> SteppedEngine:
    """Return the engine with an empty prefix cache."""
    assert shared_engine.llm.reset_prefix_cache()
    return shared_engine


@pytest.fixture(scope="module")
def case(tiny_model_path: Path) -> PressureCase:
    return pressure_case(tiny_model_path, vocab_size=2559)


@pytest.fixture(scope="module")
def answer_to(tiny_model_path: Path) -> AnswerTo:
    """Return a function that says what transformers generates behind a prompt."""

    def answer(prompt: list[int], num_tokens: int = NUM_TOKENS) -> tuple[int, ...]:
        return tie_free_answer(tiny_model_path, prompt, num_tokens)

    return answer


@pytest.mark.parametrize(("num_shared", "num_clones", "num_claims"), [(43, 2, 0), (47, 1, 1)])
def test_a_part_filled_block_of_a_cache_entry_and_two_sessions(
    engine: SteppedEngine, answer_to: AnswerTo, num_shared: int, num_clones: int, num_claims: int
) -> None:
    entry = random_tokens(40, seed=1)
    # Of an answer the last token is never computed: 47 tokens stay in the cache, 15 of them in the third block.
    entry += answer_to(entry, 8)
    engine.generate([entry[:40]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    prompts = {name: entry[:num_shared] + random_tokens(9, seed) for seed, name in enumerate("ab", start=2)}
    stats = engine.manager.stats
    before = stats.clones, stats.claims
    for name, prompt in prompts.items():
        engine.add(name, prompt, GREEDY)
    engine.step()
    a, b = (engine.manager.block_table[engine.row_of(name)] for name in prompts)
    # Two full blocks are shared; each session writes into a third block of its own.
    assert a[:2].tolist() == b[:2].tolist() and a[2] != b[2]
    outputs = engine.drain()
    assert [outputs[name].num_cached_tokens for name in prompts] == [num_shared] * 2
    for name, prompt in prompts.items():
        assert tokens_of(outputs[name]) == answer_to(prompt)
    assert (stats.clones - before[0], stats.claims - before[1]) == (num_clones, num_claims)

    # Nobody has disturbed the entry: it is found again to its last token, and is what it was.
    again = [*entry[:47], 7]
    (output,) = engine.generate([again], GREEDY)
    assert output.num_cached_tokens == 47
    assert tokens_of(output) == answer_to(again)


def test_two_sessions_behind_a_full_block_copy_nothing(engine: SteppedEngine, answer_to: AnswerTo) -> None:
    stem = random_tokens(2 * BLOCK_SIZE, seed=4)
    engine.generate([[*stem, 5]], GREEDY)
    stats = engine.manager.stats
    before = stats.clones, stats.claims
    prompts = {"a": [*stem, 11], "b": [*stem, 13]}
    for name, prompt in prompts.items():
        engine.add(name, prompt, GREEDY)
    engine.step()
    a, b = (engine.manager.block_table[engine.row_of(name)] for name in prompts)
    assert a[:2].tolist() == b[:2].tolist() and a[2] != b[2]
    outputs = engine.drain()
    assert [outputs[name].num_cached_tokens for name in prompts] == [32, 32]
    for name, prompt in prompts.items():
        assert tokens_of(outputs[name]) == answer_to(prompt)
    assert (stats.clones, stats.claims) == before


@pytest.mark.parametrize("victim", ["owner", "copier"])
def test_either_side_of_a_clone_may_leave_at_any_step(
    engine: SteppedEngine, answer_to: AnswerTo, victim: str
) -> None:
    owner = random_tokens(40, seed=6)
    prompts = {"owner": owner, "copier": owner[:38] + random_tokens(5, seed=7)}
    (survivor,) = prompts.keys() - {victim}
    expected = answer_to(prompts[survivor])
    for abort_step in range(6):
        assert engine.llm.reset_prefix_cache()
        clones_before = engine.manager.stats.clones
        engine.add("owner", prompts["owner"], GREEDY)
        # The tokens of a step are found once the next one begins.
        engine.step()
        engine.add("copier", prompts["copier"], GREEDY)
        for _ in range(abort_step):
            engine.step()
        engine.abort(victim)
        assert tokens_of(engine.drain()[survivor]) == expected
        is_cloned = abort_step > 0 or victim == "owner"
        assert engine.manager.stats.clones - clones_before == is_cloned


def test_abort_while_the_step_that_clones_is_running(engine: SteppedEngine, answer_to: AnswerTo) -> None:
    owner = random_tokens(40, seed=8)
    copier = owner[:38] + random_tokens(5, seed=9)
    engine.generate([owner], GREEDY)
    execute = engine.core.model_executor.execute_model

    def abort_meanwhile(scheduler_output: Any, **options: Any) -> Any:
        assert len(scheduler_output.kv_cache_block_copies) == 1
        (internal_id,) = scheduler_output.num_scheduled_tokens
        # The way of a server: what its input thread has received is handled when the step is over.
        engine.core.aborts_queue.put_nowait([internal_id])
        return execute(scheduler_output, **options)

    engine.add("copier", copier, GREEDY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.core.model_executor, "execute_model", abort_meanwhile)
        engine.step()
    while engine.manager.usage:
        engine.step()
    engine.abort("copier")
    assert "copier" not in engine.drain()
    (output,) = engine.generate([copier], GREEDY)
    assert output.num_cached_tokens > 38
    assert tokens_of(output) == answer_to(copier)


def test_abort_at_every_moment_of_a_chunked_prompt(engine: SteppedEngine, answer_to: AnswerTo) -> None:
    neighbour, long = random_tokens(30, seed=10), random_tokens(150, seed=11)
    for abort_step in range(8):
        engine.add("neighbour", neighbour, GREEDY)
        engine.add("long", long, NO_HITS)
        for _ in range(abort_step):
            engine.step()
        engine.abort("long")
        outputs = engine.drain()
        assert tokens_of(outputs["neighbour"]) == answer_to(neighbour)
        if "long" in outputs:
            partial = tokens_of(outputs["long"])
            assert partial == answer_to(long)[: len(partial)]
    # What the aborted prompt had computed is still right.
    (output,) = engine.generate([long], GREEDY)
    assert output.num_cached_tokens > 100
    assert tokens_of(output) == answer_to(long)


def test_urgent_requests_push_others_out(engine: SteppedEngine, case: PressureCase) -> None:
    chosen = [index for index, prompt in enumerate(case.prompts) if len(prompt) > 90][:14]
    preemptions_before = engine.num_preemptions
    finished: list[str] = []
    for number, index in enumerate(chosen):
        params = SamplingParams(temperature=0.0, max_tokens=case.max_tokens[index], ignore_eos=True)
        # The last four come latest and matter most.
        engine.add(str(index), case.prompts[index], params, priority=1 if number < 10 else 0)
        finished += [output.request_id for output in engine.step() if output.finished]
    while engine.is_busy:
        finished += [output.request_id for output in engine.step() if output.finished]
    outputs = engine.drain()
    assert engine.num_preemptions > preemptions_before
    assert set(map(str, chosen[10:])) <= set(finished[:8]), finished
    for index in chosen:
        assert tokens_of(outputs[str(index)]) == case.expected[index]


@pytest.mark.parametrize("has_resets", [True, False], ids=["with resets", "without resets"])
def test_a_random_day(engine: SteppedEngine, case: PressureCase, has_resets: bool) -> None:
    tokenizer = engine.llm.get_tokenizer()
    without = LOST_BY_RESETS if has_resets and engine.core.async_scheduling else ()
    visits = plan_visits(case, tokenizer, 150, seed=int(has_resets), without=without)
    preemptions_before, evictions_before = engine.num_preemptions, engine.manager.stats.evictions
    clones_before = engine.manager.stats.clones
    day = spend_day(engine, case, visits, seed=0, has_resets=has_resets)
    assert not (wrong := wrong_outputs(day, case, tokenizer)), "\n".join(wrong[:4])
    assert min(len(day.aborted), engine.num_preemptions - preemptions_before) > 5
    assert (day.num_resets > 2) == has_resets
    stats = engine.manager.stats
    assert min(stats.evictions - evictions_before, stats.clones - clones_before) > 10, stats

    sampled = [visit for visit in visits if visit.kind == "sampled" and visit.name not in day.aborted][:6]
    for visit in sampled:
        (alone,) = engine.generate([case.prompts[visit.index]], visit.params)
        completions = day.outputs[visit.name].outputs
        assert [c.token_ids for c in completions] == [c.token_ids for c in alone.outputs], visit
