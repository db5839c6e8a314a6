"""What tests ask of vLLM engines that run in their own process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig

from tests.support.reference_generation import NUM_NEW_TOKENS, GreedyReference, Prompts

VOCAB_SIZE = 2559
"""Of the embedded model, without the end-of-text token."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
# The drafter of n-grams is compiled in its first engine.
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
RUNNERS = pytest.mark.parametrize("runner", ["V2", "V1"])
ROSES_LAYERS = ("GPT-2", "Llama", "Qwen3", "Mistral 7B v0.1")
"""Models, of those that tests on GPUs name, that Rose has layers for."""
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def random_tokens(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB_SIZE, length).tolist()


def inputs_of(prompts: Sequence[Sequence[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": list(prompt)} for prompt in prompts]


def generate(llm: Any, prompts: Sequence[Sequence[int]], params: Any = GREEDY) -> list[Any]:
    return list(llm.generate(inputs_of(prompts), params, use_tqdm=False))


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def manager_of(llm: Any) -> Any:
    """Return Rose's block manager."""
    return scheduler_of(llm).kv_cache_manager.manager


def runner_of(llm: Any) -> Any:
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    return worker.worker.model_runner


def has_roses_layers(llm: Any) -> bool:
    (name,) = llm.llm_engine.vllm_config.model_config.hf_config.architectures
    return str(name).startswith("Rose")


def metrics_of(llm: Any) -> dict[str, Any]:
    """Return the values of all counters, of all engines of this process so far."""
    return {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}


def count_preemptions(scheduler: Any) -> list[str]:
    """Return a list to which the scheduler adds the requests that it preempts from now on."""
    preempted: list[str] = []
    preempt = scheduler._preempt_request

    def record(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    scheduler._preempt_request = record
    return preempted


def first(count: int, case: tuple[Prompts, GreedyReference]) -> tuple[Prompts, GreedyReference]:
    prompts, reference = case
    return prompts[:count], GreedyReference(reference.token_ids[:count], reference.leads[:count])


def assert_greedy(outputs: list[Any], reference: GreedyReference) -> None:
    tokens = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert len(tokens) == len(reference.token_ids)
    wrong = [index for index, row in enumerate(tokens) if row != reference.token_ids[index]]
    assert not wrong, [reference.explain_difference(index, list(tokens[index])) for index in wrong[:4]]


def files_below(path: Path, role: str = "kv_both") -> KVTransferConfig:
    """Return the configuration of ``ExampleConnector``, which keeps K/V in files."""
    extra = {"shared_storage_path": str(path)}
    return KVTransferConfig(kv_connector="ExampleConnector", kv_role=role, kv_connector_extra_config=extra)


def draft_counts(llm: Any) -> tuple[int, int]:
    """Return how many tokens were drafted and how many of them accepted, by all engines of this process so far."""
    values, prefix = metrics_of(llm), "vllm:spec_decode_num_"
    return values[f"{prefix}draft_tokens"], values[f"{prefix}accepted_tokens"]


def assert_drafts_were_kept_and_rejected(llm: Any, before: tuple[int, int]) -> None:
    num_drafted, num_accepted = (now - then for now, then in zip(draft_counts(llm), before, strict=True))
    assert 0 < num_accepted < num_drafted, (num_drafted, num_accepted)


def start(llm: Any, prompts: Prompts, name: str) -> dict[str, int]:
    """Add requests and run a few steps; return request id -> index."""
    for index, prompt in enumerate(prompts):
        llm.llm_engine.add_request(f"{name}{index}", {"prompt_token_ids": list(prompt)}, GREEDY)
    for _ in range(6):
        assert not any(output.finished for output in llm.llm_engine.step())
    return {f"{name}{index}": index for index in range(len(prompts))}


def finish(llm: Any, indices: dict[str, int]) -> list[Any]:
    """Run to the end; return the outputs in order."""
    done: dict[int, Any] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                done[indices[output.request_id]] = output
    return [done[index] for index in sorted(done)]
