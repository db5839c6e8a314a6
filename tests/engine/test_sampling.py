"""Tokens are chosen as asked: transformers' distribution, at any batch size, with penalties, filters and logprobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rose_backend import LLM, SamplingParams
from tests.engine.conftest import GREEDY
from tests.support.reference_generation import reference_logits

PROMPT = "The king had a daughter, and the daughter had a"
EOS = 2559


def greedy_with_penalties(path: Path, prompt: list[int], params: SamplingParams, count: int) -> list[int]:
    """Generate greedily from transformers' logits, with penalties and ``min_tokens`` as defined, token by token."""
    output: list[int] = []
    for _ in range(count):
        logits = reference_logits(path, prompt + output)[-1].numpy().astype(np.float64)
        for token_id in set(prompt) | set(output):
            value = logits[token_id]
            factor = params.repetition_penalty
            logits[token_id] = value / factor if value > 0 else value * factor
        for token_id in set(output):
            logits[token_id] -= params.presence_penalty + params.frequency_penalty * output.count(token_id)
        if len(output) < params.min_tokens:
            logits[list(params.stop_token_ids or ())] = -np.inf
        output.append(int(logits.argmax()))
    return output


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -0.4, "repetition_penalty": 1.4},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    ],
)
def test_penalties_against_the_definition(
    llm: LLM, tiny_model_path: Path, penalties: dict[str, float]
) -> None:
    params = replace(GREEDY, max_tokens=24, **penalties)
    prompt = llm.tokenizer.encode(PROMPT)
    expected = greedy_with_penalties(tiny_model_path, prompt, params, 24)
    # Beside requests without penalties, and with others: each row keeps its own counts.
    batch = [GREEDY, params, replace(params, repetition_penalty=2.0), GREEDY]
    outputs = llm.generate([prompt] * 4, batch)
    assert outputs[1].outputs[0].token_ids == expected
    assert outputs[0].outputs[0].token_ids == llm.generate([prompt], GREEDY)[0].outputs[0].token_ids
    assert expected[:16] != outputs[0].outputs[0].token_ids


def test_penalties_survive_preemption_and_a_change_of_rows(make_llm: Callable[..., LLM]) -> None:
    params = [
        SamplingParams(
            temperature=0.8, seed=i, max_tokens=90, frequency_penalty=0.4 * (i % 3), ignore_eos=True
        )
        for i in range(6)
    ]
    prompts = [[100 + i] * (20 + i) for i in range(6)]
    roomy, tight = make_llm(), make_llm(max_model_len=160, num_blocks=18)
    expected = [output.outputs[0].token_ids for output in roomy.generate(prompts, params)]
    assert [output.outputs[0].token_ids for output in tight.generate(prompts, params)] == expected
    assert tight.stats.preemptions > 0


MIXES = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.5, "top_k": 1},
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 2560},
]


@pytest.mark.parametrize("fused_sampler", [True, False])
def test_seeded_text_is_the_same_at_any_batch_size(make_llm: Callable[..., LLM], fused_sampler: bool) -> None:
    llm = make_llm(fused_sampler=fused_sampler)
    params = [SamplingParams(seed=i, max_tokens=12, **mix) for i, mix in enumerate(MIXES)]
    together = [output.outputs[0].token_ids for output in llm.generate([PROMPT] * len(MIXES), params)]
    alone = [llm.generate(PROMPT, one)[0].outputs[0].token_ids for one in params]
    assert together == alone
    assert together[5] == together[6]
    assert len({tuple(tokens) for tokens in together}) > 5


def test_both_samplers_draw_the_same_tokens(make_llm: Callable[..., LLM]) -> None:
    params = [SamplingParams(seed=i, max_tokens=12, **mix) for i, mix in enumerate(MIXES)]
    one, other = (
        [
            output.outputs[0].token_ids
            for output in make_llm(fused_sampler=fused).generate([PROMPT] * 8, params)
        ]
        for fused in (True, False)
    )
    assert one == other


@pytest.mark.parametrize(
    "mix",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.2},
        {"temperature": 2.0, "top_k": 8},
    ],
)
def test_drawn_tokens_follow_the_distribution(llm: LLM, tiny_model_path: Path, mix: dict[str, float]) -> None:
    prompt, num_draws = llm.tokenizer.encode(PROMPT), 512
    outputs = [
        completion
        for seed in range(num_draws // 32)
        for completion in llm.generate([prompt], SamplingParams(n=32, seed=1000 * seed, max_tokens=1, **mix))[
            0
        ].outputs
    ]
    probs = filtered_distribution(reference_logits(tiny_model_path, prompt)[-1], **mix)
    counts = np.bincount([completion.token_ids[0] for completion in outputs], minlength=len(probs))
    assert not counts[probs == 0].any(), "a token was drawn that the filters exclude"
    # Five standard deviations for each of the likely tokens: one false alarm in about a million runs.
    likely = probs > 0.02
    deviation = np.sqrt(num_draws * probs * (1 - probs))
    assert (np.abs(counts - num_draws * probs)[likely] <= 5 * deviation[likely] + 1e-9).all()


def filtered_distribution(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Return probabilities after temperature, then min-p, top-k, top-p, each renormalised."""
    probs = torch.softmax(logits.double() / temperature, -1).numpy()
    probs = np.where(probs >= min_p * probs.max(), probs, 0.0)
    if top_k:
        probs = np.where(probs >= np.sort(probs)[-top_k], probs, 0.0)
    probs = probs / probs.sum()
    order = np.argsort(-probs, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= top_p]] = 0.0
    return probs / probs.sum()


def test_draws_depend_on_seed_and_absolute_position(llm: LLM) -> None:
    # At this temperature all tokens are nearly equally likely, so a repeated draw shows as a repeated token.
    params = SamplingParams(seed=4, temperature=500.0, max_tokens=30, ignore_eos=True)
    prompt = llm.tokenizer.encode(PROMPT)
    tokens = llm.generate([prompt], params)[0].outputs[0].token_ids
    assert len(set(tokens)) > 25
    rest = llm.generate([prompt + tokens[:10]], replace(params, max_tokens=20))[0].outputs[0].token_ids
    assert rest == tokens[10:]
    other = llm.generate([prompt], replace(params, seed=5))[0].outputs[0].token_ids
    assert sum(one == two for one, two in zip(tokens, other, strict=True)) < 3


def test_unseeded_requests_differ_but_a_run_repeats(make_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(max_tokens=12)
    runs = []
    for seed in (0, 0, 1):
        outputs = make_llm(seed=seed).generate([PROMPT] * 3, params)
        runs.append([output.outputs[0].token_ids for output in outputs])
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(tokens) for tokens in runs[0]}) == 3


@pytest.mark.parametrize("num_logprobs", [0, 1, 5])
@pytest.mark.parametrize("min_tokens", [0, 4])
def test_logprobs_against_transformers(
    llm: LLM, tiny_model_path: Path, num_logprobs: int, min_tokens: int
) -> None:
    # Neither temperature, penalties nor the mask of min_tokens may show in the numbers.
    params = SamplingParams(
        logprobs=num_logprobs,
        seed=3,
        temperature=1.5,
        repetition_penalty=1.5,
        max_tokens=8,
        min_tokens=min_tokens,
    )
    prompt = llm.tokenizer.encode(PROMPT)
    likeliest = reference_logits(tiny_model_path, prompt)[-1].topk(3).indices.tolist()
    params = replace(params, stop_token_ids=likeliest if min_tokens else None)
    others = [replace(params, logprobs=None), replace(params, logprobs=20, seed=9)]
    completion = llm.generate([prompt] * 3, [params, *others])[0].outputs[0]
    assert completion.logprobs is not None and completion.cumulative_logprob is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    expected = torch.log_softmax(reference_logits(tiny_model_path, prompt + completion.token_ids), -1)
    texts = llm.tokenizer.token_texts
    total = 0.0
    for position, (token_id, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        row = expected[len(prompt) - 1 + position]
        top = row.topk(num_logprobs).indices.tolist()
        assert set(entry) == {token_id, *top}
        for candidate, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(row[candidate]), abs=2e-4)
            assert logprob.rank == int((row > row[candidate]).sum()) + 1
            assert logprob.decoded_token == texts.text(
                candidate, completion.token_ids[max(position - 4, 0) : position]
            )
        total += entry[token_id].logprob
    assert completion.cumulative_logprob == pytest.approx(total)
    assert llm.generate([prompt], others[0])[0].outputs[0].logprobs is None
