"""Checkpoints that benchmarks make for themselves, and the options that choose them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import offline_compare, online_compare
from benchmarks.support.checkpoint import (
    GPT2_124M,
    GPT_OSS_20B,
    LLAMA_1B,
    LLAMA_8B,
    QUANTIZED_FORMATS,
    QWEN3_06B,
    QWEN3_30B,
    QWEN3_VL_4B,
    QWEN35_4B,
    VOCAB_SIZE,
    checkpoint,
    gpt_oss_config,
    llama_1b_config,
    llama_8b_config,
    model_facts,
    qwen3_5_config,
    qwen3_moe_config,
    qwen3_vl_config,
)
from rose_backend import LLM, SamplingParams


def test_a_small_llama_is_a_model_that_transformers_reads() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with checkpoint(None, LLAMA_1B, small=True) as model:
        facts = model_facts(model)
        assert (facts.vocab_size, facts.max_model_len) == (VOCAB_SIZE, 2048)
        # Keys and values of 2 layers, of one head of 64 for 4 heads of queries.
        assert facts.kv_elements_per_token == 2 * 2 * 64
        assert len(AutoTokenizer.from_pretrained(model)) == VOCAB_SIZE
        llama, notes = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
        assert not any(notes[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        weights = dict(llama.named_parameters())
        assert weights["model.layers.1.mlp.down_proj.weight"].std().item() == pytest.approx(0.02, rel=0.05)
        assert bool((weights["model.norm.weight"] == 1).all())
        assert llama(torch.tensor([[5, 6, 7]])).logits.isfinite().all()
    assert not Path(model).exists()


@pytest.mark.parametrize(
    ("config", "num_weights"),
    [
        # Llama 3.2 1B with its own vocabulary, and without norms 8.03 and 30.5 billion.
        (llama_1b_config(), 1_235_814_400),
        (llama_8b_config(), 8_029_995_008 + (2 * 32 + 1) * 4096),
        (qwen3_moe_config(), 30_531_911_680 + 48 * (2 * 2048 + 2 * 128) + 2048),
        (gpt_oss_config(), 20_914_757_184),
        # Of text: with its vision and the head that drafts it is called 5 billion.
        (qwen3_5_config(), 4_205_751_296),
        (qwen3_vl_config(), 4_437_815_808),
    ],
    ids=[LLAMA_1B, LLAMA_8B, QWEN3_30B, GPT_OSS_20B, QWEN35_4B, QWEN3_VL_4B],
)
def test_shapes_are_those_of_the_published_models(config: Any, num_weights: int) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if num_weights < 2e9:
        config.vocab_size = 128_256
    factory = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(config)
    assert sum(weight.numel() for weight in model.parameters()) == num_weights


def test_experts_and_windows_are_those_of_the_published_models() -> None:
    assert qwen3_moe_config().num_experts_per_tok == 8
    assert gpt_oss_config().layer_types == ["sliding_attention", "full_attention"] * 12


def test_states_are_those_of_the_published_model() -> None:
    config = qwen3_5_config()
    assert config.layer_types == [*["linear_attention"] * 3, "full_attention"] * 8
    # M-RoPE's dimensions of what rotates of a head.
    assert 2 * sum(config.rope_parameters["mrope_section"]) == config.head_dim // 4
    assert set(qwen3_5_config(small=True).layer_types) == set(config.layer_types)


@pytest.mark.parametrize("shape", [GPT_OSS_20B, QWEN3_30B])
def test_layers_with_experts_are_written_one_by_one(shape: str) -> None:
    from transformers import AutoModelForCausalLM

    with checkpoint(None, shape, small=True) as model:
        assert sorted(path.name for path in Path(model).glob("*.safetensors")) == [
            "around.safetensors",
            "layer-0.safetensors",
            "layer-1.safetensors",
        ]
        moe, notes = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
        assert not any(notes[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        first, second = (
            dict(layer.named_parameters())["mlp.experts.down_proj"] for layer in moe.model.layers
        )
        assert first.std().item() == pytest.approx(0.02, rel=0.05) and not torch.equal(first, second)
        assert bool((moe.model.norm.weight == 1).all())


@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN3_06B, QWEN3_30B, *QUANTIZED_FORMATS])
def test_small_shapes_are_models_that_rose_serves(shape: str) -> None:
    with (
        checkpoint(None, shape, small=True) as model,
        LLM(model, dtype="float32", max_model_len=64, num_blocks=8, device="cpu") as llm,
    ):
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 4


@pytest.mark.parametrize(("window", "expected"), [(None, 4096), (4000, 4096), (4112, 4112)])
def test_the_longest_request_fits_the_window(window: int | None, expected: int) -> None:
    with checkpoint(None, QWEN3_06B, small=True, window=window) as model:
        assert model_facts(model).max_model_len == expected


def test_a_model_that_is_given_is_taken_as_it_is() -> None:
    with checkpoint("some/model", LLAMA_1B) as model:
        assert model == "some/model"


def test_shapes_choose_their_backends() -> None:
    options = offline_compare.parse_options(["--shape", LLAMA_1B])
    assert options.backends == ["rose-in-vllm", "vllm"]
    assert options.model_name == "random weights, Llama 1B's shapes"
    assert offline_compare.parse_options(["--shape", LLAMA_1B, "--backends", "sglang"]).backends == ["sglang"]
    options = offline_compare.parse_options([])
    assert (options.shape, options.backends) == (GPT2_124M, list(offline_compare.Offline.backends))
    assert options.model_name == "random weights, GPT-2 124M's shapes"
    assert online_compare.parse_options(["poisson", "--shape", LLAMA_1B]).backends == ["rose-in-vllm", "vllm"]


def test_a_quick_run_of_a_shape_takes_a_small_one() -> None:
    options = offline_compare.parse_options(["--shape", LLAMA_1B, "--quick"])
    assert options.model is None
    assert options.model_name == "random weights, Llama 1B's shapes, two narrow layers"
    assert offline_compare.parse_options(["--quick"]).model == "models/tiny-gpt2"


def test_model_and_shape_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        offline_compare.parse_options(["--model", "m", "--shape", LLAMA_1B])
    assert "argument --shape: not allowed with argument --model" in capsys.readouterr().err


def test_facts_without_grouped_heads(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2",
        "n_layer": 3,
        "n_head": 4,
        "n_embd": 256,
        "n_positions": 128,
        "vocab_size": 99,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = model_facts(str(tmp_path))
    assert (facts.vocab_size, facts.max_model_len, facts.kv_elements_per_token) == (99, 128, 2 * 3 * 256)
