"""What tests ask of vLLM engines that run in their own process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

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


class HostCopies(OffloadingWorker):
    """Copies offloaded blocks at once, in place of vLLM's worker, which needs streams of a GPU."""

    def __init__(self, kv_caches: Any) -> None:
        self._caches: list[torch.Tensor] = [each.tensor for each in kv_caches.tensors]
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._done: list[TransferResult] = []
        self.num_stored = self.num_loaded = 0

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.num_stored += len(src_spec.block_ids)
        for block, place in zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True):
            self._kept[place] = [cache[block].clone() for cache in self._caches]
        return self._finish(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.num_loaded += len(dst_spec.block_ids)
        for place, block in zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True):
            for cache, kept in zip(self._caches, self._kept[place], strict=True):
                cache[block] = kept
        return self._finish(job_id)

    def _finish(self, job_id: int) -> bool:
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""


def lose_loads(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], list[set[int]]]:
    """Let every third load of an engine bring garbage, and fail.

    vLLM's offloading reports no failures; connectors that do report them as here.

    Returns:
        The engine's options, and the blocks of each report.
    """
    lost: set[int] = set()
    reports: list[set[int]] = []
    loads = count(1)

    class LosingCopies(HostCopies):
        def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            is_done = super().submit_load(job_id, src_spec, dst_spec)
            if next(loads) % 3 == 0:
                for cache in self._caches:
                    cache[dst_spec.block_ids] = 66
                lost.update(dst_spec.block_ids.tolist())
            return is_done

    def take_lost(_: Any) -> set[int]:
        taken = set(lost)
        lost.clear()
        reports.extend([taken] * bool(taken))
        return taken

    monkeypatch.setattr(CPUOffloadingSpec, "get_worker", lambda spec, kv_caches: LosingCopies(kv_caches))
    monkeypatch.setattr(OffloadingConnector, "get_block_ids_with_load_errors", take_lost)
    transfer = KVTransferConfig(kv_load_failure_policy="recompute")
    return {"kv_transfer_config": transfer, "kv_offloading_size": 1.0}, reports


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
