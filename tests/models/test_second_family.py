"""A model of another family than GPT-2, written in one file, through the whole engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rose_backend import LLM, SamplingParams
from rose_backend.models import base
from tests.support.reference_generation import greedy_differences
from tests.support.tiny_checkpoint import write_tokenizer

VOCAB_SIZE, WINDOW = 512, 256


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random Llama with 6 query heads of 32 on 2 K/V heads, twice as wide together as the hidden state."""
    path = tmp_path_factory.mktemp("llama")
    end_of_text = write_tokenizer(path, vocab_size=VOCAB_SIZE, model_max_length=WINDOW)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=WINDOW,
        hidden_size=96,
        intermediate_size=144,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=end_of_text,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data.normal_(1.0, 0.1)  # norms start at 1, which would hide a forgotten one
    model.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def toy_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base.MODEL_CLASSES, "LlamaForCausalLM", "tests.models.toy_llama:ToyLlama")


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_greedy_tokens_are_those_of_dense_torch(checkpoint: Path, fused: bool) -> None:
    random = np.random.default_rng(0)
    shared = random.integers(1, VOCAB_SIZE, 50).tolist()
    lengths = (1, 15, 16, 17, 60, 100)
    prompts = [
        (*shared[: length // 2], *random.integers(1, VOCAB_SIZE, length - length // 2).tolist())
        for length in lengths
    ]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, n=2)
    switches = dict.fromkeys(("fused_kv_append", "fused_add_layernorm", "fused_sampler"), fused)
    # Chunks that split blocks, a prefix cache, and a pool that is too small for all prompts at once.
    limits = {"max_num_batched_tokens": 37, "num_blocks": 20}
    with LLM(str(checkpoint), device="cpu", dtype="float32", **limits, **switches) as llm:
        answers = [
            (prompt, completion.token_ids)
            for _ in range(2)
            for prompt, output in zip(
                prompts, llm.generate([list(each) for each in prompts], params), strict=True
            )
            for completion in output.outputs
        ]
        assert llm.stats.preemptions > 0 and llm.stats.cached_tokens > 0
        llm.core.check_integrity()
    assert len(answers) == 2 * 2 * len(prompts)
    asked, given = zip(*answers, strict=True)
    assert not (differences := greedy_differences(checkpoint, asked, list(given))), "\n".join(differences)


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
