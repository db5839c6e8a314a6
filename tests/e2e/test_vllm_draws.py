"""Engines whose options concern every draw: log-probabilities of what could be drawn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from rose_backend.vllm_plugin.plugin_logger import SAMPLES
from tests.e2e.conftest import MakeEngine
from tests.e2e.test_vllm_features import inputs_of
from tests.support.stepped_engine import tokens_of


@pytest.fixture
def engine_options() -> dict[str, Any]:
    return {}


def test_processed_logprobs_are_those_of_the_tokens_that_could_be_drawn(
    make_engine: MakeEngine, engine_options: dict[str, Any]
) -> None:
    prompts = tuple(
        tuple(np.random.default_rng(seed).integers(1, 2559, 20 + seed).tolist()) for seed in range(6)
    )
    filters = [{"top_k": 5}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.9, "min_p": 0.01}] * 2
    asked = [
        SamplingParams(temperature=0.8, seed=index, max_tokens=12, ignore_eos=True, logprobs=12, **options)
        for index, options in enumerate(filters)
    ]
    plain = [params.clone() for params in asked]
    for params in plain:
        params.logprobs = None
    with make_engine(logprobs_mode="processed_logprobs", **engine_options) as llm:
        by_vllm, before = dict(SAMPLES.vllm), SAMPLES.rose
        expected = llm.generate(inputs_of(prompts), plain, use_tqdm=False)
        outputs = llm.generate(inputs_of(prompts), asked, use_tqdm=False)
        assert SAMPLES.rose - before >= 2 * 6 * 12 and SAMPLES.vllm == by_vllm
    assert list(map(tokens_of, outputs)) == list(map(tokens_of, expected))
    for options, output in zip(filters, outputs, strict=True):
        for token, logprobs in zip(tokens_of(output), output.outputs[0].logprobs, strict=True):
            kept = [entry.logprob for entry in logprobs.values() if math.isfinite(entry.logprob)]
            assert math.isfinite(logprobs[token].logprob)
            if "top_k" in options:
                # Everything that is kept is reported.
                assert len(kept) <= options["top_k"] and sum(map(math.exp, kept)) == pytest.approx(
                    1.0, abs=1e-3
                )
