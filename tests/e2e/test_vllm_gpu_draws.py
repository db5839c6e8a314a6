"""On CUDA: who draws, Rose's sampler or vLLM's, where an engine has processed log-probabilities or watermarks."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams

from rose_backend.vllm_plugin.plugin_logger import SAMPLES
from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.e2e.test_vllm_draws import *  # noqa: F403 - its tests, with the options below
from tests.e2e.test_vllm_features import inputs_of
from tests.support.reference_generation import parity_prompts
from tests.support.stepped_engine import tokens_of

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["V2", "V1"])
def engine_options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(request.param == "V2")))
    return GPU_MEMORY


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
            answers[is_fused] = list(map(tokens_of, llm.generate(inputs_of(prompts), marked, use_tqdm=False)))
            num_marked, num_drawn = (
                SAMPLES.vllm.get("watermarks", 0) - marked_before,
                SAMPLES.rose - drawn_before,
            )
            assert num_drawn == 0 and (num_marked >= 8 * 24) == is_fused, (num_drawn, num_marked)
            unmarked = list(map(tokens_of, llm.generate(inputs_of(prompts), plain, use_tqdm=False)))
            assert unmarked != answers[is_fused]
            assert (SAMPLES.rose - drawn_before >= 8 * 24) == is_fused
    # The watermark's key and the tokens before decide, so they can be compared.
    assert answers[True] == answers[False]
