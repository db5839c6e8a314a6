"""vLLM with two workers on a CPU: each has half of a model's heads, or half of its layers, and a cache of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.e2e import test_vllm_layers
from tests.e2e.conftest import MakeEngine
from tests.e2e.test_vllm_features import VOCAB_SIZE, assert_greedy, first, inputs_of, scheduler_of
from tests.support.llama_checkpoints import write_checkpoint
from tests.support.reference_generation import GreedyReference, parity_prompts, tie_free_case

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_vllm_gpu_features.py has these for two GPUs"),
]

NUM_TOKENS = 32
MANNERS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    # vLLM 0.32 makes room for what the first half hands to the second in a warm-up step, which on a CPU only compiled
    # models have; "eager" is a compiler that changes nothing.
    "pipeline": {
        "pipeline_parallel_size": 2,
        "enforce_eager": False,
        "compilation_config": {"mode": 3, "backend": "eager"},
    },
}


@pytest.mark.parametrize("manner", MANNERS)
def test_both_halves_write_and_copy_the_same_blocks(
    make_engine: MakeEngine, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, manner: str
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    prompts, whole = first(16, tie_free_case(tiny_model_path, vocab_size=VOCAB_SIZE))
    reference = GreedyReference(tuple(row[:NUM_TOKENS] for row in whole.token_ids), whole.leads)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with make_engine(num_gpu_blocks_override=120, **MANNERS[manner]) as llm:
        assert llm.llm_engine.vllm_config.parallel_config.world_size == 2
        for _ in range(2):
            assert_greedy(llm.generate(inputs_of(prompts), params, use_tqdm=False), reference)
        manager = scheduler_of(llm).kv_cache_manager.manager
        manager.check_integrity()
        assert min(manager.stats.clones, manager.stats.evictions) > 0, manager.stats


def names_and_reductions(worker: Any) -> tuple[str, bool]:
    model = worker.model_runner.model
    return type(model).__name__, model._all_reduce is not None


def test_roses_layers_sum_over_ranks(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    # With biases, which one rank adds.
    model = write_checkpoint(tmp_path, "llama-biases")
    prompts = parity_prompts(test_vllm_layers.VOCAB_SIZE)[:24]
    with make_engine(model=str(model), tensor_parallel_size=2, max_num_batched_tokens=300) as llm:
        ((name, reduces), other) = llm.collective_rpc(names_and_reductions)
        assert name.startswith("Rose") and reduces and other == (name, reduces)
        for _ in range(2):
            test_vllm_layers.assert_right(model, prompts, test_vllm_layers.complete(llm, prompts))
        scheduler_of(llm).kv_cache_manager.manager.check_integrity()
