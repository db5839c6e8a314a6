"""Greedy tokens equal transformers' in float32, whatever the engine does on the way: GPT-2, Llama and its relatives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rose_backend import LLM, SamplingParams
from rose_backend.config import SWITCH_NAMES
from rose_backend.engine.startup import storage_bytes
from rose_backend.kernels import rotate_query_key
from rose_backend.kernels.gpu_properties import GpuProperties, meta_stands_for
from rose_backend.layers import decoder, linear
from rose_backend.models import base
from rose_backend.models.base import load_model
from tests.support.llama_checkpoints import CASES, VOCAB_SIZE, write_checkpoint
from tests.support.moments import record_moments
from tests.support.reference_generation import (
    NUM_NEW_TOKENS,
    NUM_PROMPTS,
    GreedyReference,
    Prompts,
    greedy_differences,
    parity_prompts,
    prompt_lengths,
    tie_free_case,
)
from tests.support.tiny_checkpoint import write_random_gpt2, write_random_gpt2_124m


@dataclass
class Case:
    """A checkpoint, 64 prompts for it, and what transformers makes of them."""

    name: str
    path: Path
    prompts: Prompts
    reference: GreedyReference

    @property
    def few(self) -> list[int]:
        """Prompts of every length: three of each, one of the longest."""
        lengths = [len(prompt) for prompt in self.prompts]
        most = {length: 3 for length in prompt_lengths()} | {max(lengths): 1}
        return [index for index, length in enumerate(lengths) if lengths[:index].count(length) < most[length]]

    def llm(self, **options: Any) -> LLM:
        """Return an engine, to be closed."""
        return LLM(str(self.path), device="cpu", dtype="float32", **options)

    def check(
        self,
        llm: LLM,
        which: Iterable[int] = range(NUM_PROMPTS),
        num_tokens: int = NUM_NEW_TOKENS,
        n: int = 1,
    ) -> None:
        """Generate for these prompts and compare every completion."""
        which = list(which)
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, n=n)
        outputs = llm.generate([list(self.prompts[index]) for index in which], params)
        completions = [
            (index, completion.token_ids)
            for index, output in zip(which, outputs, strict=True)
            for completion in output.outputs
        ]
        assert len(completions) == len(which) * n
        differences = [
            self.reference.explain_difference(index, tokens)
            for index, tokens in completions
            if tuple(tokens) != self.reference.token_ids[index][:num_tokens]
        ]
        assert not differences, "\n".join(differences)
        llm.core.check_integrity()


@pytest.fixture(scope="module")
def gpt2(tiny_model_path: Path) -> Case:
    """Return the embedded model, for what the engine does alike with all models."""
    return Case("gpt2", tiny_model_path, *tie_free_case(tiny_model_path, vocab_size=2559))


@pytest.fixture(scope="module", params=["gpt2", *CASES])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    if request.param == "gpt2":
        return request.getfixturevalue("gpt2")
    path = write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    prompts, reference = tie_free_case(path, VOCAB_SIZE)
    assert len(prompts) == NUM_PROMPTS and len(set(reference.token_ids)) > NUM_PROMPTS // 2
    return Case(request.param, path, prompts, reference)


def test_all_at_once_and_again_from_the_cache(case: Case) -> None:
    with case.llm() as llm:
        case.check(llm)
        first = llm.stats
        case.check(llm)
        again = llm.stats
        assert again.cached_tokens - first.cached_tokens == sum(len(prompt) - 1 for prompt in case.prompts)
        assert again.clones > first.clones
        case.check(llm, case.few, 24, n=4)


@pytest.mark.parametrize(("prefix_cache", "max_num_batched_tokens"), [(True, 101), (False, 37)])
def test_chunks_and_preemption(case: Case, prefix_cache: bool, max_num_batched_tokens: int) -> None:
    limits = {"max_num_batched_tokens": max_num_batched_tokens, "num_blocks": 70}
    with case.llm(prefix_cache=prefix_cache, **limits) as llm:
        case.check(llm)
        assert llm.stats.preemptions > 0 and llm.stats.recomputed_tokens > 0
        assert llm.core.manager.num_free_blocks == 69


@pytest.mark.parametrize("name", [*SWITCH_NAMES, "all"])
def test_switches_off(case: Case, name: str) -> None:
    assert {len(case.prompts[index]) for index in case.few} == set(prompt_lengths())
    off = dict.fromkeys(SWITCH_NAMES if name == "all" else [name], False)
    with case.llm(**off) as llm:
        assert all(llm.core.feature_status[each] == "off" for each in off)
        case.check(llm, case.few, 24)
        assert name not in ("prefix_cache", "all") or llm.stats.cached_tokens == 0


def test_each_prompt_alone(gpt2: Case) -> None:
    with gpt2.llm(prefix_cache=False) as llm:
        for index in range(NUM_PROMPTS):
            gpt2.check(llm, [index])


def test_one_token_per_step(gpt2: Case) -> None:
    short = [index for index, prompt in enumerate(gpt2.prompts) if len(prompt) <= 17][:8]
    with gpt2.llm(max_num_seqs=2, max_num_batched_tokens=1) as llm:
        gpt2.check(llm, short)


@pytest.mark.parametrize("block_size", [1, 5, 128])
def test_other_block_sizes(gpt2: Case, block_size: int) -> None:
    with gpt2.llm(block_size=block_size, max_num_batched_tokens=611) as llm:
        gpt2.check(llm, gpt2.few)


def test_random_weights_of_gpt2(tmp_path: Path) -> None:
    path = write_random_gpt2(tmp_path / "random")
    random = Case("random", path, *tie_free_case(path, vocab_size=500))
    with random.llm(max_num_batched_tokens=257) as llm:
        random.check(llm)


def test_random_weights_of_gpt2_124m(tmp_path: Path) -> None:
    path = write_random_gpt2_124m(tmp_path / "gpt2-124m")
    prompts = parity_prompts(50_257, seed=0)
    assert len(prompts) == NUM_PROMPTS
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    # Chunks that split blocks, a prefix cache, and a pool that is too small for all of them.
    with LLM(str(path), max_num_seqs=NUM_PROMPTS, max_num_batched_tokens=515, num_blocks=480) as llm:
        outputs = [each.outputs[0].token_ids for each in llm.generate(list(map(list, prompts)), params)]
        assert llm.stats.preemptions > 0
        llm.core.check_integrity()
    assert not (differences := greedy_differences(path, prompts, outputs)), "\n".join(differences)


def test_the_way_for_few_decodes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = storage_bytes(load_model(case.path).weights)
    # Taken by itself on a GPU only.
    monkeypatch.setattr(base, "packs_layers", lambda *_: True)
    # No matrix is there twice; a packed layer has vectors of its own.
    assert storage_bytes(load_model(case.path).weights) < 1.02 * num_bytes
    seen = record_moments(monkeypatch)
    with case.llm() as llm:
        case.check(llm, case.few, 24)
    assert seen


def test_halves_of_products_summed_by_the_next_norm(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    num_parts = []

    def adds_halves(x: torch.Tensor, product: linear.Linear) -> bool:
        num_parts.append(2 if product.bias is None and x.shape[1] % 2 == 0 else 1)
        return num_parts[-1] == 2

    monkeypatch.setattr(linear, "adds_halves", adds_halves)
    with case.llm() as llm:
        case.check(llm, case.few)
    has_biases = case.name in ("gpt2", "llama-biases")
    assert set(num_parts) == {1 if has_biases else 2}
    num_parts.clear()
    with case.llm(fused_add_layernorm=False) as llm:
        case.check(llm, range(2))
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
    limits = {"max_num_batched_tokens": 515, "num_blocks": 1000}
    with LLM(str(case.path), device="cuda", dtype="float32", **limits) as llm:
        assert llm.core.feature_status["cuda_graph"] == "on"
        case.check(llm)
        case.check(llm, n=2)
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
