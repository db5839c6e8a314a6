"""With ``VLLM_BATCH_INVARIANT`` log-probabilities of a request are the same bits, whatever vLLM computes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from rose_backend.vllm_plugin.models.decoder import BatchInvariantHead
from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.support.llama_checkpoints import write_checkpoint
from tests.support.vllm_engines import (
    allow_batch_invariance,
    count_preemptions,
    generate,
    has_roses_layers,
    runner_of,
    scheduler_of,
)

FAMILIES = ["llama", "qwen3", "qwen2"]
ALONE: dict[str, Any] = {"enable_prefix_caching": False}


@pytest.fixture
def invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_batch_invariance(monkeypatch)


def random_requests(count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Return prompts, some of which begin alike, and parameters."""
    draw = np.random.default_rng(seed)
    shared = draw.integers(1, 400, 80).tolist()
    requests = []
    for index in range(count):
        own = draw.integers(1, 400, int(draw.integers(1, 40))).tolist()
        params = SamplingParams(
            temperature=float(draw.choice([0.0, 0.8])),
            top_p=float(draw.choice([0.9, 1.0])),
            seed=index,
            max_tokens=int(draw.integers(1, 40)),
            ignore_eos=True,
            logprobs=int(draw.integers(0, 5)),
            prompt_logprobs=1 if index % 5 == 0 else None,
        )
        requests.append((shared[: int(draw.integers(0, 80))] + own, params))
    return requests


def bits(output: Any) -> list[Any]:
    """Return the tokens of an answer, and all numbers that it reports.

    Not which of several equally likely tokens is reported: torch takes any of them.
    """
    (completion,) = output.outputs
    places = [*(output.prompt_logprobs or [])[1:], *completion.logprobs]
    numbers = [sorted(entry.logprob.hex() for entry in place.values()) for place in places]
    return [list(completion.token_ids), numbers]


def compare(alone: list[Any], llm: Any, requests: list[tuple[list[int], SamplingParams]], size: int) -> None:
    for start in range(0, len(requests), size):
        prompts, params = [list(each) for each in zip(*requests[start : start + size], strict=True)]
        found = [bits(output) for output in generate(llm, prompts, params)]
        expected = alone[start : start + size]
        assert [index for index, each in enumerate(found) if each != expected[index]] == [], (start, size)


def answers_alone(llm: Any, requests: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    assert has_roses_layers(llm)
    return [bits(generate(llm, [prompt], params)[0]) for prompt, params in requests]


@pytest.mark.parametrize("family", FAMILIES)
def test_any_batch_and_any_cut_gives_the_same_bits(
    make_engine: MakeEngine, tmp_path: Path, family: str, invariant: None
) -> None:
    write_checkpoint(tmp_path, family)
    requests = random_requests(12, seed=3)
    model: dict[str, Any] = {"model": str(tmp_path)}
    with make_engine(**model, **ALONE) as llm:
        alone = answers_alone(llm, requests)
    with make_engine(**model, max_num_batched_tokens=64, max_num_seqs=9) as llm:
        for size in (12, 12, 5):
            compare(alone, llm, requests, size)
    with make_engine(**model, num_gpu_blocks_override=18, max_model_len=200) as llm:
        preempted = count_preemptions(scheduler_of(llm))
        compare(alone, llm, requests, 12)
        assert preempted


def test_every_product_has_one_order(make_engine: MakeEngine, tmp_path: Path, invariant: None) -> None:
    """Which a CPU's numbers may hide: in small models torch's products of many rows round as those of one."""
    write_checkpoint(tmp_path, "qwen3")
    with make_engine(model=str(tmp_path)) as llm:
        model = runner_of(llm).model
        assert type(model.lm_head.quant_method) is BatchInvariantHead
        for layer in model._layers:
            products = (layer.qkv, layer.attn_out, layer.mlp.gate_up, layer.mlp.down)
            assert all(product.many_rows is not None and product.packed is None for product in products)


def test_a_hit_may_end_at_any_token(make_engine: MakeEngine, tmp_path: Path, invariant: None) -> None:
    write_checkpoint(tmp_path, "qwen3")
    prompt = np.random.default_rng(5).integers(1, 400, 37).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=4)
    warm_up = SamplingParams(temperature=0.0, max_tokens=1)
    with make_engine(model=str(tmp_path)) as llm:
        cold = bits(generate(llm, [prompt], params)[0])
        for cut in range(1, len(prompt)):
            assert llm.reset_prefix_cache()
            generate(llm, [[*prompt[:cut], prompt[cut] % 400 + 1]], warm_up)
            (warm,) = generate(llm, [prompt], params)
            # Shorter ones are computed.
            assert warm.num_cached_tokens == (cut if cut > 3 else 0)
            assert bits(warm) == cold, cut


def test_without_it_the_numbers_differ(make_engine: MakeEngine, tmp_path: Path) -> None:
    """The tests above would find a difference."""
    write_checkpoint(tmp_path, "qwen3")
    requests = random_requests(12, seed=3)
    with make_engine(model=str(tmp_path), **ALONE) as llm:
        alone = answers_alone(llm, requests)
        with pytest.raises(AssertionError):
            compare(alone, llm, requests, 12)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_any_batch_and_any_cut_gives_the_same_bits_on_a_gpu(
    make_engine: MakeEngine, tmp_path: Path, family: str, invariant: None
) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128, "num_attention_heads": 8}
    write_checkpoint(tmp_path, family, **sizes, initializer_range=0.05)
    requests = random_requests(60, seed=3)
    model: dict[str, Any] = {"model": str(tmp_path), "dtype": "bfloat16", "runner": "V2", **GPU_MEMORY}
    with make_engine(**model, **ALONE) as llm:
        alone = answers_alone(llm, requests)
    for is_eager in (True, False):
        with make_engine(**model, enforce_eager=is_eager, max_num_batched_tokens=128) as llm:
            for size in (60, 60, 1, 2, 7, 33):
                compare(alone, llm, requests, size)
