"""On a GPU: vLLM's monitor of compilations ends the engine at the first one while it serves; 2,000 random steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from rose_backend.vllm_plugin import pending_kernels
from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.engine.test_start_up_on_gpu import forgotten_kernels

__all__ = ["forgotten_kernels"]

pytestmark = pytest.mark.gpu

NUM_STEPS = 2000
LONGEST = 6000


@pytest.fixture
def new_monitor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the engine switch the monitor on after its own start, and leave none behind: it is one for the process."""
    from triton import knobs
    from vllm.utils import jit_monitor

    monkeypatch.setattr(jit_monitor, "_active", False)
    monkeypatch.setattr(jit_monitor, "_mode", "warn")
    # An earlier engine's kernels are forgotten.
    monkeypatch.setattr(pending_kernels, "_begun", set())
    hook, prints = knobs.runtime.jit_post_compile_hook, knobs.autotuning.print
    yield
    knobs.runtime.jit_post_compile_hook, knobs.autotuning.print = hook, prints


@pytest.fixture
def llama_8b_shape(tmp_path: Path) -> Path:
    """Return a directory with Llama 3.1 8B's config.json, of 2 layers; weights are made up at the start."""
    from transformers import LlamaConfig

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=4096,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
    ).save_pretrained(tmp_path)
    return tmp_path


def params_of(rng: np.random.Generator) -> SamplingParams:
    kind = rng.integers(9)
    others: list[dict[str, Any]] = [
        {"logprobs": int(rng.integers(21))},
        {"repetition_penalty": 1.2, "presence_penalty": 0.2},
        {"min_tokens": 1, "stop_token_ids": [7, 8, 9]},
        {"logit_bias": {5: 4.0, 7: -3.0}},
        {"allowed_token_ids": [20, 30, 40], "logprobs": 2},
    ]
    return SamplingParams(
        temperature=0.0 if kind == 0 else 0.8,
        top_k=20 if kind == 2 else 0,
        top_p=0.9 if kind == 3 else 1.0,
        seed=int(rng.integers(1000)) if kind == 1 else None,
        max_tokens=int(rng.integers(1, 40)),
        ignore_eos=True,
        detokenize=False,
        **(others[kind - 4] if kind >= 4 else {}),
    )


def run_random_steps(engine: Any, longest: int, vocab_size: int) -> None:
    """Let requests of all lengths arrive alone and in crowds, beside many decodes and beside none."""
    rng, num_requests = np.random.default_rng(9), 0
    for _ in range(NUM_STEPS):
        if rng.random() < 0.2 or not engine.has_unfinished_requests():
            for _ in range(int(2 ** rng.uniform(0, 6))):
                length = int(2 ** rng.uniform(0, np.log2(longest)))
                prompt = rng.integers(5, vocab_size, length).tolist()
                engine.add_request(str(num_requests), {"prompt_token_ids": prompt}, params_of(rng))
                num_requests += 1
        engine.step()
    assert num_requests > 100


@pytest.mark.usefixtures("new_monitor")
def test_llama_8b_compiles_nothing(make_engine: MakeEngine, llama_8b_shape: Path) -> None:
    with make_engine(
        model=str(llama_8b_shape),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=8192,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        enforce_eager=False,
        jit_monitor_mode="error",
        **GPU_MEMORY,
    ) as llm:
        run_random_steps(llm.llm_engine, LONGEST, 4096)


@pytest.mark.usefixtures("new_monitor")
def test_gpt2_compiles_nothing(make_engine: MakeEngine, gpt2_124m_path: Path) -> None:
    with make_engine(
        model=str(gpt2_124m_path),
        dtype="float16",
        max_num_seqs=256,
        enforce_eager=False,
        jit_monitor_mode="error",
        **GPU_MEMORY,
    ) as llm:
        run_random_steps(llm.llm_engine, 900, 50_000)
