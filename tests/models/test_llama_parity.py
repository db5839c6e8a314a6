"""Greedy tokens of Llama and its relatives equal transformers' in float32, whatever the engine does on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rose_backend import LLM, SamplingParams
from rose_backend.config import SWITCH_NAMES
from rose_backend.engine.startup.load import storage_bytes
from rose_backend.kernels import rotate_query_key
from rose_backend.kernels.gpu_properties import GpuProperties, meta_stands_for
from rose_backend.layers import decoder, linear
from rose_backend.models import base
from rose_backend.models.registry import load_model
from tests.support.llama_checkpoints import CASES, VOCAB_SIZE, write_checkpoint
from tests.support.moments import record_moments
from tests.support.reference_generation import (
    NUM_NEW_TOKENS,
    NUM_PROMPTS,
    GreedyReference,
    Prompts,
    prompt_lengths,
    tie_free_case,
)

Case = tuple[Path, Prompts, GreedyReference]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Return a checkpoint, 64 prompts for it, and what transformers makes of them."""
    path = write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    prompts, reference = tie_free_case(path, VOCAB_SIZE)
    assert len(prompts) == NUM_PROMPTS and len(set(reference.token_ids)) > NUM_PROMPTS // 2
    return path, prompts, reference


def check(
    llm: LLM, case: Case, *, num_prompts: int = NUM_PROMPTS, num_tokens: int = NUM_NEW_TOKENS, n: int = 1
) -> None:
    """Generate for the first prompts and compare every completion."""
    _, prompts, reference = case
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, n=n)
    outputs = llm.generate([list(prompt) for prompt in prompts[:num_prompts]], params)
    completions = [(index, each.token_ids) for index, output in enumerate(outputs) for each in output.outputs]
    assert len(completions) == num_prompts * n
    differences = [
        reference.explain_difference(index, tokens)
        for index, tokens in completions
        if tuple(tokens) != reference.token_ids[index][:num_tokens]
    ]
    assert not differences, "\n".join(differences)
    llm.core.check_integrity()


def test_all_at_once_and_again_from_the_cache(case: Case) -> None:
    path, prompts, _ = case
    with LLM(str(path), device="cpu", dtype="float32") as llm:
        check(llm, case)
        before = llm.stats.cached_tokens
        check(llm, case)
        assert llm.stats.cached_tokens - before == sum(len(prompt) - 1 for prompt in prompts)
        check(llm, case, num_prompts=16, num_tokens=24, n=4)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_chunks_and_preemption(case: Case, prefix_cache: bool) -> None:
    path, _, _ = case
    limits = {"max_num_batched_tokens": 101, "num_blocks": 70, "prefix_cache": prefix_cache}
    with LLM(str(path), device="cpu", dtype="float32", **limits) as llm:
        check(llm, case)
        assert llm.stats.preemptions > 0 and llm.stats.recomputed_tokens > 0


@pytest.mark.parametrize("name", [*SWITCH_NAMES, "all"])
def test_switches_off(case: Case, name: str) -> None:
    path, prompts, _ = case
    num_prompts = 16
    assert {len(prompt) for prompt in prompts[:num_prompts]} >= set(prompt_lengths()[:5])
    off = dict.fromkeys(SWITCH_NAMES if name == "all" else [name], False)
    with LLM(str(path), device="cpu", dtype="float32", **off) as llm:
        check(llm, case, num_prompts=num_prompts, num_tokens=24)


def test_the_way_for_few_decodes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = case
    num_bytes = storage_bytes(load_model(path).weights)
    # Taken by itself on a GPU only.
    monkeypatch.setattr(base, "packs_layers", lambda *_: True)
    # No matrix is there twice; a packed layer has vectors of its own.
    assert storage_bytes(load_model(path).weights) < 1.02 * num_bytes
    seen = record_moments(monkeypatch)
    with LLM(str(path), device="cpu", dtype="float32") as llm:
        check(llm, case, num_prompts=16, num_tokens=24)
    assert seen


def test_halves_of_products_summed_by_the_next_norm(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = case
    num_parts = []

    def adds_halves(x: torch.Tensor, product: linear.Linear) -> bool:
        num_parts.append(2 if product.bias is None and x.shape[1] % 2 == 0 else 1)
        return num_parts[-1] == 2

    monkeypatch.setattr(linear, "adds_halves", adds_halves)
    with LLM(str(path), device="cpu", dtype="float32") as llm:
        check(llm, case, num_prompts=16)
    assert set(num_parts) == {1 if "biases" in path.parent.name + path.name else 2}
    num_parts.clear()
    with LLM(str(path), device="cpu", dtype="float32", fused_add_layernorm=False) as llm:
        check(llm, case, num_prompts=2)
    assert not num_parts


def test_where_halves_of_products_are_summed_by_the_next_norm() -> None:
    def adds_halves(rows: int, fan_in: int, fan_out: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        weight = torch.empty(fan_out, fan_in, dtype=dtype, device="meta").t()
        return linear.adds_halves(weight.new_empty(rows, fan_in), linear.Linear(weight, None))

    with meta_stands_for(GpuProperties((9, 0), 132)):
        of_llama_8b = [rows for rows in range(1, 1025) if adds_halves(rows, 14_336, 4096)]
        assert of_llama_8b == list(range(129, 257))
        assert not adds_halves(200, 4096, 4096) and not adds_halves(200, 14_336, 4096, torch.float16)
        # Wider ones fill it with 128 rows and fewer, too, which was not measured.
        assert not any(adds_halves(rows, 28_672, 8192) for rows in range(1, 1025))
        # Llama 3.2 1B's halves do not fill the GPU.
        assert not any(adds_halves(rows, 8192, 2048) for rows in range(1, 257))
        weight, bias = torch.empty(2, 4096, 14_336, dtype=torch.bfloat16, device="meta"), torch.empty(4096)
        x = weight.new_empty(200, 14_336)
        assert not linear.adds_halves(x, linear.Linear(weight[0].t(), bias))
    with meta_stands_for(GpuProperties((8, 0), 108)):
        assert not adds_halves(200, 14_336, 4096)
    host = torch.empty(200, 14_336, dtype=torch.bfloat16)
    assert not linear.adds_halves(host, linear.Linear(torch.empty(14_336, 4096), None))


@pytest.mark.gpu
def test_on_a_gpu(case: Case) -> None:
    path, _, _ = case
    with LLM(str(path), device="cuda", dtype="float32", max_num_batched_tokens=515, num_blocks=1000) as llm:
        assert llm.core.feature_status["cuda_graph"] == "on"
        check(llm, case)
        check(llm, case, n=2)
        assert llm.stats.cached_tokens > 0


def test_heads_are_rotated_inside_decode_attention_of_few_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, num_launches = write_checkpoint(tmp_path, "qwen3"), []

    def count(*args: Any) -> None:
        num_launches.append(len(args[0]))
        rotate_query_key(*args)

    monkeypatch.setattr(decoder, "rotate_query_key", count)
    prompts, params = [[5, 6, 7], [8, 9]], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(str(path), device="cpu", dtype="float32", prefix_cache=False) as llm:
        inside = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        num_layers = num_launches.count(5)
        assert num_launches == [5] * num_layers and num_layers > 1, "prompts alone"
        monkeypatch.setattr(decoder, "MAX_ROTATED_ROWS", 1)
        again = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert again == inside and num_launches.count(2) == 5 * num_layers
