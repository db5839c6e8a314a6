"""A model of another family than GPT-2, written in one file, through the whole engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rose_backend import LLM, SamplingParams
from rose_backend.models import base
from tests.support.llama_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.reference_generation import greedy_differences


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random Llama with 6 query heads of 32 on 2 K/V heads, twice as wide together as the hidden state."""
    sizes = {"hidden_size": 96, "intermediate_size": 144, "num_hidden_layers": 3, "num_attention_heads": 6}
    rotation = {"rope_type": "default", "rope_theta": 10_000.0}
    return write_checkpoint(
        tmp_path_factory.mktemp("llama"), "llama", head_dim=32, rope_parameters=rotation, **sizes
    )


@pytest.fixture(autouse=True)
def toy_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base.MODEL_CLASSES, "LlamaForCausalLM", "tests.models.toy_llama:ToyLlama")


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_greedy_tokens_are_those_of_dense_torch(checkpoint: Path, fused: bool) -> None:
    random = np.random.default_rng(0)
    shared = random.integers(1, VOCAB_SIZE, 50).tolist()
    prompts = [
        (*shared[: length // 2], *random.integers(1, VOCAB_SIZE, length - length // 2).tolist())
        for length in (1, 15, 16, 17, 60, 100)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, n=2)
    switches = dict.fromkeys(("fused_kv_append", "fused_add_layernorm", "fused_sampler"), fused)
    # Chunks that split blocks, a prefix cache, and a pool that is too small for all prompts at once.
    limits = {"max_num_batched_tokens": 37, "num_blocks": 20, "max_model_len": 256}
    with LLM(str(checkpoint), device="cpu", dtype="float32", **limits, **switches) as llm:
        outputs = [output for _ in range(2) for output in llm.generate(list(map(list, prompts)), params)]
        assert llm.stats.preemptions > 0 and llm.stats.cached_tokens > 0
        llm.core.check_integrity()
    asked = tuple(prompt for prompt in (*prompts, *prompts) for _ in range(2))
    given = [completion.token_ids for output in outputs for completion in output.outputs]
    assert len(given) == len(asked)
    assert not (differences := greedy_differences(checkpoint, asked, given)), "\n".join(differences)


def test_each_of_several_end_tokens_ends_an_answer(checkpoint: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(str(checkpoint), device="cpu") as llm:
        tokens = llm.generate([[3, 1, 4]], params)[0].outputs[0].token_ids
    assert len(tokens) == 8
    for path in checkpoint.iterdir():
        (tmp_path / path.name).symlink_to(path)
    fields = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**fields, "eos_token_id": [tokens[4], tokens[2]]}))
    with LLM(str(tmp_path), device="cpu") as llm:
        answer = llm.generate([[3, 1, 4]], params)[0].outputs[0]
    assert (answer.token_ids, answer.finish_reason) == (tokens[:3], "stop")
