"""Many small requests of all kinds: when they run together, nearly every step sees somebody come or go."""

from __future__ import annotations

import random
from typing import Any

from rose_backend import LLM, SamplingParams

VOCAB_SIZE = 2559
"""The embedded model's, without its end-of-text token."""

WORDS = ("the", "and", "king")
COMMON = (259, 269, 623)
"""These words behind a space, and as tokens of the embedded model."""


def crowd(num_requests: int, seed: int, max_tokens: int = 60) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts that share stems, and parameters of all kinds."""
    rng = random.Random(seed)
    prompts, params = [], []
    stem = [rng.randrange(1, VOCAB_SIZE) for _ in range(60)]
    for index in range(num_requests):
        own = [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.choice((1, 2, 15, 16, 17, 90)))]
        prompts.append(stem[: rng.choice((0, 0, 16, 37, 60))] + own)
        kind = rng.choice(("greedy", "greedy", "sampled", "filtered", "siblings", "stops"))
        options: dict[str, Any] = {
            "max_tokens": rng.randrange(1, max_tokens),
            "seed": index,
            "temperature": 0.0,
        }
        if kind != "greedy":
            options["temperature"] = 0.8
        if kind == "filtered":
            options |= {"top_k": 50, "top_p": 0.9}
        elif kind == "siblings":
            options["n"] = 3
        elif kind == "stops":
            options |= {"stop": ["e"], "stop_token_ids": [rng.randrange(VOCAB_SIZE) for _ in range(60)]}
        special = rng.choice(("", "", "", "", "penalties", "min_tokens", "logprobs", "processors"))
        if special == "penalties":
            options |= {"repetition_penalty": rng.choice((1.0, 1.3)), "presence_penalty": 0.4}
            options |= {"frequency_penalty": rng.choice((-0.3, 0.0, 0.6))}
        elif special == "min_tokens":
            options |= {"min_tokens": rng.randrange(1, options["max_tokens"] + 1)}
            options |= {"stop_token_ids": [rng.randrange(VOCAB_SIZE) for _ in range(100)]}
        elif special == "logprobs":
            options |= {"logprobs": rng.choice((0, 1, 5, 20))}
        elif special == "processors":
            options |= _processors(rng)
        params.append(SamplingParams(ignore_eos=True, **options))
    return prompts, params


def _processors(rng: random.Random) -> dict[str, Any]:
    """Return any mix of bias, allowed tokens and bad words, many of which are about to be drawn."""
    options: dict[str, Any] = {
        "logit_bias": {rng.randrange(VOCAB_SIZE): rng.uniform(-9, 9) for _ in range(60)}
    }
    options["logit_bias"] |= dict.fromkeys(COMMON, rng.choice((0, 0, 6)))
    if rng.random() < 0.7:
        options["bad_words"] = [" ".join(rng.choices(WORDS, k=rng.randrange(1, 4))) for _ in range(4)]
    if rng.random() < 0.5:
        options["allowed_token_ids"] = [*COMMON, *rng.sample(range(VOCAB_SIZE), 30)]
    return options


def tokens_of(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[list[int]]]:
    """Return the tokens of each completion of each request."""
    return [[c.token_ids for c in output.outputs] for output in llm.generate(prompts, params)]
