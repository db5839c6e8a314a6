"""Engines whose options concern every draw: log-probabilities of what could be drawn, and, on CUDA, watermarks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from rose_backend.vllm_plugin.plugin_logger import SAMPLES
from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.support.reference_generation import parity_prompts
from tests.support.stepped_engine import tokens_of
from tests.support.vllm_engines import generate

ENGINES = [
    pytest.param({}, id="awaited steps"),
    pytest.param({"runner": "V2", **GPU_MEMORY}, id="V2", marks=pytest.mark.gpu),
    pytest.param({"runner": "V1", **GPU_MEMORY}, id="V1", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("options", ENGINES)
def test_processed_logprobs_are_those_of_the_tokens_that_could_be_drawn(
    make_engine: MakeEngine, options: dict[str, Any]
) -> None:
    prompts = tuple(
        tuple(np.random.default_rng(seed).integers(1, 2559, 20 + seed).tolist()) for seed in range(6)
    )
    filters = [{"top_k": 5}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.9, "min_p": 0.01}] * 2
    asked = [
        SamplingParams(temperature=0.8, seed=index, max_tokens=12, ignore_eos=True, logprobs=12, **kept)
        for index, kept in enumerate(filters)
    ]
    plain = [params.clone() for params in asked]
    for params in plain:
        params.logprobs = None
    with make_engine(logprobs_mode="processed_logprobs", **options) as llm:
        by_vllm, before = dict(SAMPLES.vllm), SAMPLES.rose
        expected = generate(llm, prompts, plain)
        outputs = generate(llm, prompts, asked)
        assert SAMPLES.rose - before >= 2 * 6 * 12 and SAMPLES.vllm == by_vllm
    assert list(map(tokens_of, outputs)) == list(map(tokens_of, expected))
    for limits, output in zip(filters, outputs, strict=True):
        for token, logprobs in zip(tokens_of(output), output.outputs[0].logprobs, strict=True):
            kept = [entry.logprob for entry in logprobs.values() if math.isfinite(entry.logprob)]
            assert math.isfinite(logprobs[token].logprob)
            if "top_k" in limits:
                # Everything that is kept is reported.
                assert len(kept) <= limits["top_k"] and sum(map(math.exp, kept)) == pytest.approx(
                    1.0, abs=1e-3
                )


@pytest.mark.gpu
def test_watermarks_are_vllms(make_engine: MakeEngine) -> None:
    prompts = parity_prompts(2559)[:8]
    options = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}
    marked = [SamplingParams(seed=index, **options) for index in range(len(prompts))]
    plain = [SamplingParams(seed=index, watermarking=False, **options) for index in range(len(prompts))]
    answers = {}
    for is_fused in (True, False):
        switches = {"additional_config": {"rose": {"fused_sampler": is_fused}}}
        with make_engine(
            watermark_config={"key": 11}, enable_prefix_caching=False, **switches, **GPU_MEMORY
        ) as llm:
            drawn_before, marked_before = SAMPLES.rose, SAMPLES.vllm.get("watermarks", 0)
            answers[is_fused] = list(map(tokens_of, generate(llm, prompts, marked)))
            num_marked, num_drawn = (
                SAMPLES.vllm.get("watermarks", 0) - marked_before,
                SAMPLES.rose - drawn_before,
            )
            assert num_drawn == 0 and (num_marked >= 8 * 24) == is_fused, (num_drawn, num_marked)
            unmarked = list(map(tokens_of, generate(llm, prompts, plain)))
            assert unmarked != answers[is_fused]
            assert (SAMPLES.rose - drawn_before >= 8 * 24) == is_fused
    # The watermark's key and the tokens before decide, so they can be compared.
    assert answers[True] == answers[False]
