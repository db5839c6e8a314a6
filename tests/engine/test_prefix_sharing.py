"""Prefix hits to the token, and several completions from one prefill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rose_backend import LLM, SamplingParams
from rose_backend.scheduling import MIN_TOKENS_WORTH_WAITING
from tests.engine.conftest import GREEDY

RANDOM = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)


def random_prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 2559, length).tolist()


def tokens_of(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate([prompt], params)[0].outputs[0].token_ids


def test_hit_ends_inside_a_block(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(block_size=128)
    cold = make_llm(block_size=128, prefix_cache=False)
    first = random_prompt(120, seed=0)
    second = first[:100] + random_prompt(30, seed=1)
    first_tokens = tokens_of(llm, first)
    clones_before = llm.stats.clones
    output = llm.generate([second], GREEDY)[0]
    assert output.num_cached_tokens == 100
    assert llm.stats.clones - clones_before == 1
    assert output.outputs[0].token_ids == tokens_of(cold, second)
    assert tokens_of(llm, first) == first_tokens == tokens_of(cold, first)


def test_hits_at_block_borders_only(make_llm: Callable[..., LLM]) -> None:
    llm, cold = make_llm(token_granular_hits=False), make_llm(prefix_cache=False)
    first = random_prompt(120, seed=0)
    prompts = [first, first[:100] + random_prompt(30, seed=1), [*first[:15], 7, 8], first[:96], first]
    outputs = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    # The last token is always computed, and with it its block.
    assert [output.num_cached_tokens for output in outputs] == [0, 96, 0, 80, 112]
    assert llm.core.manager.stats.partial_hits == 0
    assert [output.outputs[0].token_ids for output in outputs] == [tokens_of(cold, each) for each in prompts]


def test_second_request_does_not_disturb_the_first_while_it_runs(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(block_size=128)
    first = random_prompt(110, seed=2)
    second = first[:100] + random_prompt(9, seed=3)
    long = replace(GREEDY, max_tokens=40)
    expected = [tokens_of(make_llm(prefix_cache=False), prompt, long) for prompt in (first, second)]
    core = llm.core
    core.add(core.input_processor.make(first, long, request_id="first"))
    for _ in range(3):
        core.step()
    # The first request holds the block that the second copies from, and goes on writing into it.
    core.add(core.input_processor.make(second, long, request_id="second"))
    finished = {}
    while core.num_unfinished:
        finished |= {output.request_id: output for output in core.step() if output.finished}
    assert finished["second"].num_cached_tokens == 100
    assert [finished[name].outputs[0].token_ids for name in ("first", "second")] == expected


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("prompt_length", [1, 16, 45])
def test_n_completions_from_one_prefill(
    make_llm: Callable[..., LLM], prefix_cache: bool, prompt_length: int
) -> None:
    prompt = random_prompt(prompt_length, seed=4)
    llm = make_llm(prefix_cache=prefix_cache, max_num_batched_tokens=20)
    output = llm.generate([prompt], replace(RANDOM, n=4, seed=100))[0]
    assert llm.stats.prompt_tokens_computed == prompt_length
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    singles = [
        tokens_of(make_llm(prefix_cache=False), prompt, replace(RANDOM, seed=100 + i)) for i in range(4)
    ]
    assert [completion.token_ids for completion in output.outputs] == singles
    assert len({tuple(tokens) for tokens in singles}) == 4
    # Four private tails of a part-filled block: one writer keeps it, three copy; a full block is never copied.
    assert llm.stats.clones == (0 if prompt_length % 16 == 0 else 3)


def test_many_n_at_once_with_few_rows(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=5, max_num_batched_tokens=50)
    prompts = [random_prompt(10 + 7 * index, seed=index) for index in range(6)]
    params = [replace(RANDOM, n=1 + index % 4, seed=index, max_tokens=9 + index) for index in range(6)]
    outputs = llm.generate(prompts, params)
    single = make_llm(prefix_cache=False)
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        expected = [
            tokens_of(single, prompt, replace(param, n=1, seed=(param.seed or 0) + i)) for i in range(param.n)
        ]
        assert [completion.token_ids for completion in output.outputs] == expected


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_children_draw_the_same_tokens(make_llm: Callable[..., LLM], prefix_cache: bool) -> None:
    prompts = [random_prompt(60, seed=20), random_prompt(33, seed=21)]
    params = [replace(RANDOM, n=4, seed=7, max_tokens=120), replace(RANDOM, n=3, seed=70, max_tokens=120)]
    roomy = make_llm(prefix_cache=prefix_cache)
    tight = make_llm(prefix_cache=prefix_cache, max_model_len=200, num_blocks=20)
    expected = roomy.generate(prompts, params)
    actual = tight.generate(prompts, params)
    assert roomy.stats.preemptions == 0
    assert tight.stats.preemptions > 0
    for one, other in zip(expected, actual, strict=True):
        assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]
        assert [c.text for c in one.outputs] == [c.text for c in other.outputs]


def test_cached_tokens_count_the_first_admission_only(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_model_len=200, num_blocks=20)
    outputs = llm.generate([random_prompt(60, seed=s) for s in range(4)], replace(RANDOM, max_tokens=100))
    assert llm.stats.preemptions > 0
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 0]
    assert llm.stats.prompt_tokens_computed == 240


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_burst_computes_each_long_prefix_once(make_llm: Callable[..., LLM], run_ahead: int) -> None:
    stem_len = MIN_TOKENS_WORTH_WAITING + 12
    stems = [random_prompt(stem_len, seed=seed) for seed in range(3)]
    prompts = [[*stems[index % 3], 2000 + index] for index in range(24)]
    llm = make_llm(max_num_seqs=24, max_num_batched_tokens=4000, run_ahead=run_ahead)
    outputs = llm.generate(prompts, replace(GREEDY, max_tokens=3))
    assert llm.stats.prompt_tokens_computed == 3 * stem_len + 24
    cold = make_llm(max_num_seqs=24, max_num_batched_tokens=4000, prefix_cache=False)
    expected = cold.generate(prompts, replace(GREEDY, max_tokens=3))
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    # Without a cache nobody waits, and nobody does for a short prefix.
    assert cold.stats.steps == 3
    assert llm.core.manager.reset_prefix_cache()
    before = llm.stats.prompt_tokens_computed
    short = stems[0][: MIN_TOKENS_WORTH_WAITING - 1]
    llm.generate([[*short, 2000 + index] for index in range(8)], replace(GREEDY, max_tokens=1))
    assert llm.stats.prompt_tokens_computed - before == 8 * MIN_TOKENS_WORTH_WAITING


def test_a_prompt_waits_for_one_chunk_of_a_chunked_prefix_only(make_llm: Callable[..., LLM]) -> None:
    stem = random_prompt(300, seed=7)
    llm = make_llm(max_num_seqs=4, max_num_batched_tokens=160)
    outputs = llm.generate([[*stem, 1], [*stem, 2]], replace(GREEDY, max_tokens=3))
    cold = make_llm(prefix_cache=False)
    expected = cold.generate([[*stem, 1], [*stem, 2]], replace(GREEDY, max_tokens=3))
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert outputs[1].num_cached_tokens >= 160
