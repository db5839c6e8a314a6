"""Prompts with different salts neither find each other's cached prefixes nor wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rose_backend import LLM, AsyncEngine
from rose_backend.engine.request import TokensPrompt
from tests.engine.conftest import GREEDY
from tests.engine.test_prefix_sharing import random_prompt


def salted(ids: list[int], salt: str | None) -> TokensPrompt:
    return {"prompt_token_ids": ids, "cache_salt": salt}


def test_each_salt_has_a_prefix_cache_of_its_own(llm: LLM) -> None:
    ids = random_prompt(50, seed=30)
    prompts: list[Any] = [ids, salted(ids, "one"), salted(ids, "other"), {"prompt_token_ids": ids}]
    prompts += [salted(ids, "one"), salted([*ids[:37], 5, 6], "other"), salted(ids, None), salted(ids, "One")]
    outputs = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 49, 49, 37, 49, 0]
    same = [output.outputs[0].token_ids for index, output in enumerate(outputs) if index != 5]
    assert same == [same[0]] * 7 and outputs[1].prompt_token_ids == ids


def test_texts_in_dictionaries_are_texts(llm: LLM) -> None:
    text = "The rose is a flower that has many names in many tongues."
    plain, in_dictionary = llm.generate([text, {"prompt": text, "cache_salt": "s"}], GREEDY)
    assert in_dictionary.prompt == plain.prompt == text
    assert in_dictionary.prompt_token_ids == plain.prompt_token_ids
    assert in_dictionary.outputs[0].text == plain.outputs[0].text
    assert [llm.generate({"prompt": text}, GREEDY)[0].num_cached_tokens > 0] == [True]


@pytest.mark.parametrize(("salts", "num_first"), [(("a", "a"), 1), (("a", "b"), 2), ((None, "b"), 2)])
def test_no_request_waits_for_a_prefix_that_it_will_not_find(
    make_llm: Callable[..., LLM], salts: tuple[str | None, str | None], num_first: int
) -> None:
    stem = random_prompt(140, seed=31)
    core = make_llm(max_num_seqs=4, max_num_batched_tokens=1000, run_ahead=0).core
    for number, salt in enumerate(salts):
        core.add(core.input_processor.make(salted([*stem, number], salt), GREEDY))
    core.step()
    assert core.stats.prompt_tokens_computed == num_first * 141
    while core.num_unfinished:
        core.step()
    assert core.stats.prompt_tokens_computed == (141 + 1 if num_first == 1 else 2 * 141)


def test_a_preempted_request_finds_its_own_prefix_again(make_llm: Callable[..., LLM]) -> None:
    prompts = [salted(random_prompt(60, seed=seed), f"tenant {seed}") for seed in range(4)]
    params = replace(GREEDY, max_tokens=100)
    tight, roomy = make_llm(max_model_len=200, num_blocks=24), make_llm()
    outputs, expected = tight.generate(prompts, params), roomy.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert tight.stats.preemptions > 0
    # Each finds what it had computed before; requests without a salt find none of it.
    assert tight.stats.prefix_cache_hits > 0
    assert tight.generate(prompts[0]["prompt_token_ids"], params)[0].num_cached_tokens == 0


def test_streams_of_an_asynchronous_engine(tiny_model_path: Path) -> None:
    ids = random_prompt(40, seed=33)

    async def cached(engine: AsyncEngine, salt: str | None) -> int:
        outputs = [output async for output in engine.generate(salted(ids, salt), GREEDY)]
        return outputs[-1].num_cached_tokens

    async def body() -> list[int]:
        engine = AsyncEngine(str(tiny_model_path), dtype="float32", max_num_seqs=4, num_blocks=100)
        try:
            return [await cached(engine, salt) for salt in (None, "a", "b", "a", None)]
        finally:
            await engine.shutdown()

    assert asyncio.run(body()) == [0, 0, 0, 39, 39]
