"""Decode steps on a GPU: the same text whatever way a step takes, and nothing left behind by thousands of requests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from rose_backend import LLM, SamplingParams
from rose_backend.engine.request import Completion
from tests.support.crowd import VOCAB_SIZE, crowd, tokens_of
from tests.support.near_ties import near_ties
from tests.support.reference_generation import tie_free_case
from tests.support.soak import assert_idle, count_completions, differences_alone, soak

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "num_blocks": 3000, "max_num_seqs": 96}


@pytest.fixture(scope="module")
def default_llm(tiny_model_path: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model_path), **OPTIONS) as llm:
        yield llm
        llm.core.check_integrity()


@pytest.mark.parametrize("max_num_seqs", [96, 256])
def test_greedy_tokens_with_joins_and_leaves_equal_transformers(
    tiny_model_path: Path, max_num_seqs: int
) -> None:
    prompts, reference = tie_free_case(tiny_model_path, vocab_size=VOCAB_SIZE)
    # Eight of each prompt, of different lengths, so that rows come and go in every step.
    order = [(index, 1 + (7 * index + 13 * copy) % 64) for copy in range(8) for index in range(len(prompts))]
    params = [
        SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True) for _, max_tokens in order
    ]
    num_others = count_completions()
    with LLM(str(tiny_model_path), **{**OPTIONS, "num_blocks": 8000, "max_num_seqs": max_num_seqs}) as llm:
        outputs = tokens_of(llm, [list(prompts[index]) for index, _ in order], params)
        assert_idle(llm.core, num_others=num_others)
    for (index, max_tokens), (tokens,) in zip(order, outputs, strict=True):
        assert tuple(tokens) == reference.token_ids[index][:max_tokens], reference.explain_difference(
            index, tokens
        )


def test_greedy_tokens_while_requests_come_and_go_in_every_step(tiny_model_path: Path) -> None:
    prompts, reference = tie_free_case(tiny_model_path, vocab_size=VOCAB_SIZE)
    # Eight come with every step, one of each of these lengths, so that eight leave in every step, too.
    lengths = range(8, 65, 8)
    order = [(index % len(prompts), lengths[index % 8]) for index in range(1024)]
    running: list[set[Completion]] = []
    tokens: dict[str, list[int]] = {}
    with LLM(str(tiny_model_path), **{**OPTIONS, "num_blocks": 8000, "max_num_seqs": 320}) as llm:
        core = llm.core
        requests = [
            core.input_processor.make(
                list(prompts[index]), SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            )
            for index, max_tokens in order
        ]
        for first in range(0, len(requests), 8):
            for request in requests[first : first + 8]:
                core.add(request)
            outputs = core.step()
            tokens |= {each.request_id: each.outputs[0].token_ids for each in outputs if each.finished}
            running.append({each for each in core._state.completions if each is not None})
        while core.num_unfinished:
            outputs = core.step()
            tokens |= {each.request_id: each.outputs[0].token_ids for each in outputs if each.finished}
        core.check_integrity()
    assert max(map(len, running)) >= 256
    assert all(now - before and before - now for before, now in pairwise(running[70:]))
    for request, (index, max_tokens) in zip(requests, order, strict=True):
        actual = tuple(tokens[request.request_id])
        expected = reference.token_ids[index][:max_tokens]
        assert actual == expected, reference.explain_difference(index, list(actual))


@pytest.mark.parametrize(
    "options",
    [
        {"cuda_graph": False},
        {"run_ahead": 0},
        {"run_ahead": 3},
        {"cuda_graph": False, "run_ahead": 0},
        {"prefix_cache": False},
        {"max_num_batched_tokens": 61},
        {"num_blocks": 130},
        {"fused_sampler": False},
    ],
    ids=str,
)
def test_same_text_whatever_the_path(
    tiny_model_path: Path, default_llm: LLM, options: dict[str, Any]
) -> None:
    prompts, params = crowd(150, seed=16)
    expected = tokens_of(default_llm, prompts, params)
    with LLM(str(tiny_model_path), **{**OPTIONS, **options}) as llm:
        actual = tokens_of(llm, prompts, params)
        llm.core.check_integrity()
        assert (llm.stats.preemptions > 0) == ("num_blocks" in options)
    different = [index for index in range(len(prompts)) if actual[index] != expected[index]]
    assert not different, f"requests {different}: {[params[index] for index in different[:3]]}"


@pytest.mark.parametrize(("num_requests", "seed"), [(150, 16), (40, 7)])
def test_no_draw_of_these_crowds_is_a_near_tie(
    tiny_model_path: Path, default_llm: LLM, num_requests: int, seed: int
) -> None:
    prompts, params = crowd(num_requests, seed)
    outputs = tokens_of(default_llm, prompts, params)
    assert near_ties(tiny_model_path, prompts, params, outputs) == []


@pytest.mark.parametrize("switch", ["fused_kv_append", "fused_mlp", "fused_add_layernorm"])
def test_same_greedy_text_from_other_operations(tiny_model_path: Path, default_llm: LLM, switch: str) -> None:
    prompts, params = crowd(150, seed=16)
    # Other operations round differently: now and then a draw between equals falls on the other side.
    params = [replace(each, temperature=0.0) for each in params]
    expected = tokens_of(default_llm, prompts, params)
    with LLM(str(tiny_model_path), **{**OPTIONS, switch: False}) as llm:
        assert tokens_of(llm, prompts, params) == expected


def test_same_text_alone(default_llm: LLM) -> None:
    prompts, params = crowd(40, seed=7)
    together = tokens_of(default_llm, prompts, params)
    for index in range(len(prompts)):
        (alone,) = tokens_of(default_llm, [prompts[index]], [params[index]])
        assert alone == together[index], f"request {index}: {params[index]}"


def test_rows_with_sampling_extras_beside_others(default_llm: LLM) -> None:
    prompts, params = crowd(30, seed=5)
    plain = tokens_of(default_llm, prompts, params)
    penalised = [
        SamplingParams(
            temperature=0.0, max_tokens=5 + 3 * index, repetition_penalty=1.3, min_tokens=4, logprobs=2
        )
        for index in range(6)
    ]
    mixed = tokens_of(default_llm, prompts + prompts[:6], params + penalised)
    assert mixed[:30] == plain
    for index, expected in enumerate(mixed[30:]):
        assert tokens_of(default_llm, [prompts[index]], [penalised[index]])[0] == expected


@pytest.mark.parametrize(("num_requests", "run_ahead"), [(10_000, 1), (1500, 3)])
def test_thousands_of_requests(tiny_model_path: Path, num_requests: int, run_ahead: int) -> None:
    options = {**OPTIONS, "num_blocks": 130, "max_num_batched_tokens": 400, "run_ahead": run_ahead}
    prompts, params = crowd(num_requests, seed=run_ahead)
    num_others = count_completions()
    with LLM(str(tiny_model_path), **options) as llm:
        soak(llm.core, prompts[:500], params[:500], seed=run_ahead)
        num_bytes = torch.cuda.memory_allocated()
        finished, num_aborted = soak(llm.core, prompts, params, seed=run_ahead)
        assert len(finished) + num_aborted == num_requests and num_aborted > num_requests // 100
        assert llm.stats.preemptions > 0
        assert_idle(llm.core, num_others=num_others)
        assert torch.cuda.memory_allocated() - num_bytes < 1 << 20
        sample = random.Random(1).sample(sorted(finished), 60)
        assert differences_alone(llm, tiny_model_path, prompts, params, finished, sample) == []
