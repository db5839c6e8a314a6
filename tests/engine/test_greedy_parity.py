"""Greedy tokens equal transformers' in float32, whatever the engine does on the way there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rose_backend import LLM, SamplingParams
from rose_backend.config import SWITCH_NAMES
from tests.support.reference_generation import (
    NUM_NEW_TOKENS,
    NUM_PROMPTS,
    GreedyReference,
    Prompts,
    greedy_differences,
    parity_prompts,
    tie_free_case,
)
from tests.support.tiny_checkpoint import write_random_gpt2, write_random_gpt2_124m

Case = tuple[Prompts, GreedyReference]

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def case(tiny_model_path: Path) -> Case:
    """Return 64 prompts for the embedded model and what transformers makes of them."""
    return tie_free_case(tiny_model_path, vocab_size=2559)


@pytest.fixture(scope="module")
def small_case(case: Case) -> Case:
    """Return a third of ``case`` that still has every prompt length."""
    prompts, reference = case
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    chosen = [index for indices in by_length.values() for index in indices[: max(1, len(indices) // 3)]]
    return (
        tuple(prompts[index] for index in chosen),
        GreedyReference(
            tuple(reference.token_ids[index] for index in chosen),
            tuple(reference.leads[index] for index in chosen),
        ),
    )


def generate(llm: LLM, prompts: Prompts) -> list[list[int]]:
    outputs = llm.generate([list(prompt) for prompt in prompts], GREEDY)
    return [output.outputs[0].token_ids for output in outputs]


def assert_equal(actual: list[list[int]], reference: GreedyReference) -> None:
    differences = [
        reference.explain_difference(index, tokens)
        for index, tokens in enumerate(actual)
        if tuple(tokens) != reference.token_ids[index]
    ]
    assert not differences, "\n".join(differences)


def test_all_at_once_and_again_from_the_cache(make_llm: Callable[..., LLM], case: Case) -> None:
    prompts, reference = case
    llm = make_llm()
    assert_equal(generate(llm, prompts), reference)
    first = llm.stats
    assert_equal(generate(llm, prompts), reference)
    again = llm.stats
    assert again.cached_tokens - first.cached_tokens == sum(len(prompt) - 1 for prompt in prompts)
    assert again.clones > first.clones


def test_alone(make_llm: Callable[..., LLM], case: Case) -> None:
    prompts, reference = case
    llm = make_llm(prefix_cache=False)
    assert_equal([generate(llm, (prompt,))[0] for prompt in prompts], reference)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("max_num_batched_tokens", [37, 100])
def test_chunks_that_split_blocks(
    make_llm: Callable[..., LLM], case: Case, max_num_batched_tokens: int, prefix_cache: bool
) -> None:
    prompts, reference = case
    llm = make_llm(max_num_batched_tokens=max_num_batched_tokens, prefix_cache=prefix_cache)
    assert_equal(generate(llm, prompts), reference)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_forced_preemption(make_llm: Callable[..., LLM], case: Case, prefix_cache: bool) -> None:
    prompts, reference = case
    llm = make_llm(num_blocks=70, prefix_cache=prefix_cache, max_num_batched_tokens=300)
    assert_equal(generate(llm, prompts), reference)
    assert llm.stats.preemptions > 0
    assert llm.stats.recomputed_tokens > 0
    assert llm.core.manager.num_free_blocks == 69


@pytest.mark.parametrize("name", SWITCH_NAMES)
def test_each_switch_off_alone(make_llm: Callable[..., LLM], small_case: Case, name: str) -> None:
    prompts, reference = small_case
    llm = make_llm(**{name: False})
    assert llm.core.feature_status[name] == "off"
    assert_equal(generate(llm, prompts), reference)


def test_all_switches_off(make_llm: Callable[..., LLM], small_case: Case) -> None:
    prompts, reference = small_case
    llm = make_llm(**dict.fromkeys(SWITCH_NAMES, False))
    assert_equal(generate(llm, prompts), reference)
    assert llm.stats.cached_tokens == 0


def test_one_token_per_step(make_llm: Callable[..., LLM], case: Case) -> None:
    prompts, reference = case
    indices = [index for index, prompt in enumerate(prompts) if len(prompt) <= 17][:8]
    llm = make_llm(max_num_seqs=2, max_num_batched_tokens=1)
    actual = generate(llm, tuple(prompts[index] for index in indices))
    assert [tuple(tokens) for tokens in actual] == [reference.token_ids[index] for index in indices]


@pytest.mark.parametrize("block_size", [1, 5, 128])
def test_other_block_sizes(make_llm: Callable[..., LLM], small_case: Case, block_size: int) -> None:
    prompts, reference = small_case
    llm = make_llm(block_size=block_size, max_num_batched_tokens=611)
    assert_equal(generate(llm, prompts), reference)


def test_random_weights(tmp_path: Path) -> None:
    path = write_random_gpt2(tmp_path / "random")
    prompts, reference = tie_free_case(path, vocab_size=500)
    with LLM(str(path), max_num_batched_tokens=257) as llm:
        assert_equal(generate(llm, prompts), reference)
        llm.core.check_integrity()


def test_random_weights_of_gpt2_124m(tmp_path: Path) -> None:
    path = write_random_gpt2_124m(tmp_path / "gpt2-124m")
    prompts = parity_prompts(50_257, seed=0)
    assert len(prompts) == NUM_PROMPTS
    # Chunks that split blocks, a prefix cache, and a pool that is too small for all of them.
    with LLM(str(path), max_num_seqs=NUM_PROMPTS, max_num_batched_tokens=515, num_blocks=480) as llm:
        outputs = generate(llm, prompts)
        assert llm.stats.preemptions > 0
        llm.core.check_integrity()
    assert not (differences := greedy_differences(path, prompts, outputs)), "\n".join(differences)
