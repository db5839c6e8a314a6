"""What a start on a GPU promises: the memory it reports, and that serving compiles nothing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from triton.runtime.jit import JITFunction

from rose_backend import LLM, SamplingParams
from rose_backend.compile_ahead.pool import watch_compilations
from rose_backend.engine import gpu_startup as start_kernels
from tests.engine.test_drafts import n_grams
from tests.support.crowd import crowd
from tests.support.random_checkpoints import MAX_MODEL_LEN, VOCAB_SIZE, write_random, write_random_qwen3
from tests.support.tiny_checkpoint import write_random_gpt2_124m

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float16", "num_blocks": 3000, "max_num_seqs": 48}
MIB = 1 << 20


@pytest.fixture(autouse=True)
def forgotten_kernels() -> Iterator[None]:
    """Let each test compile, or load from disk, whatever it launches, as a new process does."""
    gc.collect()
    for name, module in list(sys.modules.items()):
        if name.startswith("rose_backend.kernels."):
            for value in vars(module).values():
                if isinstance(value, JITFunction):
                    value.device_caches.clear()
    torch.cuda.empty_cache()
    yield


@pytest.fixture(scope="module")
def gpt2_124m_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_gpt2_124m(tmp_path_factory.mktemp("gpt2_124m"))


def serve_everything(llm: LLM) -> None:
    """Serve requests of every kind in steps of every size."""
    prompts, params = crowd(120, seed=3)
    for index, each in enumerate(params):
        if index % 5 == 1:
            params[index] = replace(each, repetition_penalty=1.2, presence_penalty=0.1)
        elif index % 7 == 2:
            params[index] = replace(each, logprobs=3, min_tokens=min(2, each.max_tokens))
        elif index % 11 == 3:
            params[index] = replace(each, n=3)
    llm.generate(prompts, params)
    plain = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    penalised = replace(plain, frequency_penalty=0.5)
    for count in (1, 2, 3, 7, 16, 17, 31, 48):
        llm.generate([[5 + count, *range(9, 9 + length)] for length in range(count)], plain)
        llm.generate([[6 + count, 7]] * count, penalised)
    for length in (1, 15, 16, 60, 130, 700, 1000):
        for count in (1, 5, 33):
            llm.generate([[length % 50, count, *([11] * length)] for _ in range(count)], plain)
    llm.core.check_integrity()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cuda_graph": False},
        {"fused_kv_append": False},
        {"fused_mlp": False, "fused_add_layernorm": False},
        {"fused_sampler": False},
        {"max_num_batched_tokens": 61, "max_num_seqs": 13},
        {"num_blocks": 130},
        {"dtype": "float32"},
        {"speculative_config": n_grams(3)},
        {"speculative_config": n_grams(6), "cuda_graph": False},
    ],
    ids=str,
)
def test_serving_compiles_nothing(tiny_model_path: Path, options: dict[str, Any]) -> None:
    with LLM(str(tiny_model_path), **{**OPTIONS, **options}) as llm:
        assert llm.core.start_up.num_kernels > 0
        with watch_compilations() as seen:
            serve_everything(llm)
    assert not seen.names, f"{len(seen.names)} kernels: {sorted(set(seen.names))}"


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_2000_random_steps_compile_nothing(model: str, gpt2_124m_path: Path, tmp_path: Path) -> None:
    path = gpt2_124m_path
    if model == "llama":
        # Llama 3.1 8B's heads.
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=MAX_MODEL_LEN,
            hidden_size=1024,
            intermediate_size=2048,
            num_hidden_layers=2,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
        )
        path = write_random(LlamaForCausalLM, config, tmp_path, 0)
    rng, longest = np.random.default_rng(7), 900
    with LLM(str(path), device="cuda", dtype="float16", num_blocks=6000, max_num_seqs=64) as llm:
        counters = llm.core._pipeline.counters
        with watch_compilations() as seen:
            while counters.steps < 2000:
                count = int(2 ** rng.uniform(0, 7))
                prompts = [
                    rng.integers(5, 250, int(2 ** rng.uniform(0, np.log2(longest)))).tolist()
                    for _ in range(count)
                ]
                params = [
                    SamplingParams(
                        temperature=float(rng.choice([0.0, 0.8])),
                        top_k=int(rng.choice([0, 20])),
                        max_tokens=int(rng.integers(1, 60)),
                        ignore_eos=True,
                        logprobs=rng.choice([None, None, None, 2]),
                    )
                    for _ in range(count)
                ]
                llm.generate(prompts, params)
    assert not seen.names, f"{len(seen.names)} kernels: {sorted(set(seen.names))}"


@pytest.mark.parametrize(
    "options", [{}, {"cuda_graph": False}, {"fused_kv_append": False}, {"dtype": "float32"}], ids=str
)
@pytest.mark.parametrize("model", ["gpt2", "qwen3"])
def test_a_first_start_compiles_in_other_processes(
    model: str,
    options: dict[str, Any],
    tiny_model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    path = tiny_model_path if model == "gpt2" else write_random_qwen3(tmp_path / "qwen3")
    with watch_compilations() as seen:
        LLM(str(path), **{**OPTIONS, **options}).close()
    assert seen.names and seen.compiled == [], f"of {len(seen.names)} kernels"


def test_without_a_warm_up_serving_would_compile(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_kernels, "warm_kernels", lambda *args: None)
    with LLM(str(tiny_model_path), **OPTIONS, cuda_graph=False) as llm, watch_compilations() as seen:
        serve_everything(llm)
    assert seen.names


def named_bytes(memory: dict[str, int]) -> int:
    """Return the bytes of weights, KV pool and captured steps."""
    others = ("set aside for steps", "CUDA, libraries, other programs", "free")
    return sum(num_bytes for name, num_bytes in memory.items() if name not in others)


def test_report_agrees_with_the_device(gpt2_124m_path: Path) -> None:
    """Exclusive use of the GPU is assumed."""
    torch.zeros(1, device="cuda")
    free_before, total = torch.cuda.mem_get_info()
    with LLM(str(gpt2_124m_path), **OPTIONS) as llm:
        report = llm.core.start_up
        memory, workspace = report.memory, report.memory["set aside for steps"]
        free_after = torch.cuda.mem_get_info()[0]
        assert sum(memory.values()) == report.total_memory == total
        assert all(num_bytes >= 0 for num_bytes in memory.values())
        assert abs(memory["free"] + workspace - free_after) <= 64 * MIB
        named = named_bytes(memory)
        # Beside that: what steps took already, libraries, kernels and graphs themselves, rounding.
        assert named <= free_before - free_after <= named + workspace + 512 * MIB
        assert memory["weights"] > 2 * 124e6
        assert memory["KV pool"] == 3000 * 16 * 12 * 2 * 768 * 2


@pytest.mark.parametrize("more", [{}, {"speculative_config": n_grams(7)}], ids=["plain", "drafts"])
def test_steps_take_no_more_than_was_set_aside(gpt2_124m_path: Path, more: dict[str, Any]) -> None:
    with LLM(str(gpt2_124m_path), **{**OPTIONS, "num_blocks": 9000, "max_num_seqs": 256, **more}) as llm:
        report = llm.core.start_up
        memory = report.memory
        before = torch.cuda.memory_reserved()
        greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        prompts = [[1 + index, *range(100, 610)] for index in range(256)]
        llm.generate(prompts, [replace(greedy, logprobs=5 if index % 2 else None) for index in range(256)])
        llm.generate(prompts, replace(greedy, temperature=1.0, top_p=0.9))
        after = torch.cuda.memory_reserved()
    print(f"reserved {before / MIB:.0f} MiB, after large steps {after / MIB:.0f}")
    for name, value in report.lines():
        print(f"{name}: {value}")
    # Rounding of many small tensors beside it.
    assert after <= named_bytes(memory) + memory["set aside for steps"] + 64 * MIB
