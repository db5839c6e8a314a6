"""vLLM's own Llama and Qwen3 with ROSE: grouped heads, rotary positions, RMSNorm, adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PaliGemmaConfig
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest

from rose_backend.vllm_plugin.kv_cache.manager import MIN_TOKENS_WORTH_COPYING
from rose_backend.vllm_plugin.models import decoder
from tests.e2e.conftest import MakeEngine
from tests.support.half_precision import first_differences, judge, mixed_prompts, wrong_tokens
from tests.support.random_checkpoints import (
    VOCAB_SIZE,
    write_random_adapter,
    write_random_idefics3,
    write_random_llama,
    write_random_mistral,
    write_random_qwen3,
)
from tests.support.tiny_checkpoint import write_tokenizer
from tests.support.vllm_engines import generate, has_roses_layers, inputs_of, manager_of, runner_of

ROUNDING = 1e-3
"""Leads that two ways of computing in float32 may see on different sides."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize(
    "write", [write_random_llama, write_random_mistral], ids=["Llama", "Mistral with sliding windows"]
)
def test_with_and_without_an_adapter(
    make_engine: MakeEngine, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    base = write(tmp_path / "base")
    merged = write_random_adapter(base, tmp_path / "adapter")
    prompts = mixed_prompts(VOCAB_SIZE, max_len=200)[0][:16]
    adapter = LoRARequest("an adapter", 1, str(tmp_path / "adapter"))
    requests = [adapter] * len(prompts) + [None] * len(prompts)
    # On a CPU vLLM 0.32 gives rows without an adapter the last of the places for one: it has to stay empty.
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with make_engine(model=str(base), max_num_batched_tokens=300, **lora) as llm:
        for _ in range(2):
            outputs = llm.generate(inputs_of(prompts * 2), GREEDY, use_tqdm=False, lora_request=requests)
            tokens = [output.outputs[0].token_ids for output in outputs]
            adapted = judge(merged, prompts, tokens[: len(prompts)])
            plain = judge(base, prompts, tokens[len(prompts) :])
            assert wrong_tokens(adapted, ROUNDING) == wrong_tokens(plain, ROUNDING) == []
            # The same prompt finds nothing of the other kind in the cache.
            assert len(first_differences(adapted, plain)) > 12
        hits = [len(prompt) - 1 for prompt in prompts * 2]
        assert [output.num_cached_tokens for output in outputs] == [
            num_hits if num_hits >= MIN_TOKENS_WORTH_COPYING else 0 for num_hits in hits
        ]
        manager_of(llm).check_integrity()


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize(
    "write", [write_random_llama, write_random_qwen3], ids=["Llama, with its head", "Qwen3"]
)
def test_adapters_come_and_go(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    write: Callable[[Path], Path],
    is_packed: bool,
) -> None:
    """Adapters that are loaded, dropped and loaded again, beside requests without one and with the same prompts."""
    # As on a GPU.
    monkeypatch.setattr(decoder, "packs_layers", lambda switches, device: is_packed)
    base, has_own_head = write(tmp_path / "base"), write is write_random_llama
    models: dict[LoRARequest | None, Path] = {None: base}
    for number in (1, 2, 3):
        path = tmp_path / f"adapter {number}"
        merged = write_random_adapter(base, path, seed=number, with_head=has_own_head)
        models[LoRARequest(path.name, number, str(path))] = merged
    prompts = mixed_prompts(VOCAB_SIZE, max_len=200)[0][:6]
    requests = [adapter for _ in prompts for adapter in models]
    inputs = inputs_of([prompt for prompt in prompts for _ in models])
    # On a CPU vLLM 0.32 gives rows without an adapter the last of the places for one: it has to stay empty.
    lora = {"enable_lora": True, "max_loras": 4, "max_cpu_loras": 4, "max_lora_rank": 8}
    with make_engine(model=str(base), max_num_batched_tokens=300, **lora) as llm:
        assert has_roses_layers(llm)
        assert (runner_of(llm).model._layers[0].mlp.gate_up.packed is not None) == is_packed
        for number in (1, 2):
            outputs = llm.generate(inputs, GREEDY, use_tqdm=False, lora_request=requests)
            for nth, path in enumerate(models.values()):
                tokens = [output.outputs[0].token_ids for output in outputs[nth :: len(models)]]
                assert wrong_tokens(judge(path, prompts, tokens), ROUNDING) == []
            assert llm.llm_engine.remove_lora(number)
            assert llm.llm_engine.list_loras() == {1, 2, 3} - {number}
        manager_of(llm).check_integrity()


def test_a_multimodal_model_without_its_other_inputs(make_engine: MakeEngine, tmp_path: Path) -> None:
    model = str(write_random_idefics3(tmp_path))
    prompts = mixed_prompts(VOCAB_SIZE, max_len=200)[0][:16]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)

    def said(llm: Any) -> tuple[list[Any], list[list[float]]]:
        outputs = generate(llm, prompts, params)
        tokens = [output.outputs[0].token_ids for output in outputs]
        leads = [
            [entry[token].logprob for entry, token in zip(o.outputs[0].logprobs, row, strict=True)]
            for o, row in zip(outputs, tokens, strict=True)
        ]
        return tokens, leads

    options = {"model": model, "language_model_only": True, "max_num_batched_tokens": 300}
    with make_engine(**options, attention_backend=None, block_size=32) as llm:
        tokens, leads = said(llm)
    with make_engine(**options) as llm:
        # Computed, then from the cache.
        for _ in range(2):
            again = said(llm)
            assert again[0] == tokens
            for row, expected in zip(again[1], leads, strict=True):
                assert row == pytest.approx(expected, abs=ROUNDING)
        manager = manager_of(llm)
        manager.check_integrity()
        assert manager.stats.partial_hits > 0, manager.stats


def test_attention_in_both_directions_is_refused_where_an_image_may_arrive(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, vocab_size=512, model_max_length=512)
    text = {"model_type": "gemma", "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
    config = PaliGemmaConfig(text_config=text | {"head_dim": 64, "vocab_size": 512}, vision_config=vision)
    config.architectures = ["PaliGemmaForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    options = {"model": str(tmp_path), "attention_backend": "rose"}
    with pytest.raises(ValueError, match="attention in both directions within an image"):
        EngineArgs(**options).create_engine_config()
    EngineArgs(**options, language_model_only=True).create_engine_config()
