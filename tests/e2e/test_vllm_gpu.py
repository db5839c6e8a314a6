"""vLLM with ROSE on a CUDA device: model runners V2 and V1, asynchronous scheduling, float32 against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.support.reference_generation import (
    NUM_NEW_TOKENS,
    Prompts,
    greedy_differences,
    parity_prompts,
    tie_free_case,
)

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
OPTIONS: dict[str, dict[str, Any]] = {
    "compiled": {"enforce_eager": False},
    "eager": {},
    "no prefix cache, chunks": {"enable_prefix_caching": False, "max_num_batched_tokens": 77},
    "preemption": {"num_gpu_blocks_override": 200},
    "no in-kernel write": {"additional_config": {"rose": {"fused_kv_append": False}}},
    "vLLM's block manager": {"additional_config": {"rose": {"block_manager": False}}},
}


def generate(llm: Any, prompts: Prompts) -> list[list[int]]:
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(inputs, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


@pytest.mark.parametrize("manner", OPTIONS)
@pytest.mark.parametrize("runner", ["V2", "V1"])
def test_tiny_model(
    make_engine: MakeEngine,
    tiny_model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runner: str,
    manner: str,
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner == "V2")))
    prompts, reference = tie_free_case(tiny_model_path, vocab_size=2559)
    with make_engine(**GPU_MEMORY, **OPTIONS[manner]) as llm:
        assert scheduler_of(llm).scheduler_config.async_scheduling
        for _ in range(2):
            for index, tokens in enumerate(generate(llm, prompts)):
                assert tuple(tokens) == reference.token_ids[index], reference.explain_difference(
                    index, tokens
                )
        if manner != "vLLM's block manager":
            manager = scheduler_of(llm).kv_cache_manager.manager
            manager.check_integrity()
            assert manager.usage == 0.0


@pytest.mark.parametrize("manner", ["eager", "alone", "no prefix cache, chunks", "preemption"])
def test_gpt2_of_124m_parameters(make_engine: MakeEngine, gpt2_124m_path: Path, manner: str) -> None:
    prompts = parity_prompts(50_257, seed=0)
    options = {"model": str(gpt2_124m_path), **GPU_MEMORY, **OPTIONS.get(manner, {})}
    with make_engine(**options) as llm:
        batches = [(prompt,) for prompt in prompts] if manner == "alone" else [prompts]
        answers = [answer for batch in batches for answer in generate(llm, batch)]
    assert greedy_differences(gpt2_124m_path, prompts, answers) == []


def test_seeded_draws_do_not_depend_on_the_batch(make_engine: MakeEngine, tiny_model_path: Path) -> None:
    prompts = parity_prompts(2559)[:16]
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    params = [SamplingParams(temperature=0.9, top_k=50, top_p=0.9, seed=i, max_tokens=16) for i in range(16)]
    with make_engine(enable_prefix_caching=False, **GPU_MEMORY) as llm:
        together = llm.generate(inputs, params, use_tqdm=False)
        alone = [llm.generate(inputs[i], params[i], use_tqdm=False)[0] for i in range(16)]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
