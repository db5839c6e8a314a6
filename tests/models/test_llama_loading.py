"""Checkpoints of Llama and its relatives: every form that is served, and one clear sentence for each that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rose_backend import LLM, SamplingParams
from rose_backend.errors import ConfigError, ModelError
from rose_backend.layers.linear import SparseMlp
from rose_backend.models.base import load_model
from tests.models.test_gpt2_logits import Sequences
from tests.support.error_budget import assert_within_budget
from tests.support.llama_checkpoints import (
    CASES,
    NUM_EXPERTS,
    VOCAB_SIZE,
    WINDOW,
    change_json,
    write_checkpoint,
)

# What their makers' config.json say, but for sizes of no interest here.
_SIZES = {"hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 36}
_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "vocab_size": 32_000}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 2": {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "tie_word_embeddings": False,
    },
    "Llama 3.2": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "eos_token_id": [128_001, 128_008, 128_009],
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
    "Mistral 7B v0.3": {
        "architectures": ["MistralForCausalLM"],
        "max_position_embeddings": 32_768,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
    },
    "Qwen2.5": {
        "architectures": ["Qwen2ForCausalLM"],
        "max_position_embeddings": 32_768,
        "max_window_layers": 21,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32_768, "type": "yarn"},
        "rope_theta": 1_000_000.0,
        "sliding_window": 32_768,
        "use_sliding_window": False,
    },
    "Qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "max_window_layers": 28,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "Qwen3 30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "rope_scaling": None,
        "rope_theta": 1_000_000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "SmolLM2": {
        "architectures": ["LlamaForCausalLM"],
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100_000,
    },
    "SmolLM3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65_536,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        # It says how early releases of transformers cut their products, which changes no result.
        "pretraining_tp": 2,
        "rope_scaling": None,
        "rope_theta": 5_000_000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    },
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return one checkpoint of each family, which no test changes."""
    names = ("llama", "mistral", "qwen2", "qwen3", "qwen3-moe", "smollm3")
    return {name: write_checkpoint(tmp_path_factory.mktemp(name), name) for name in names}


@pytest.fixture
def copy(originals: dict[str, Path], tmp_path: Path) -> Path:
    """Return a place for a checkpoint whose files a test may change."""
    return tmp_path / "copy"


def copied(original: Path, copy: Path, **changes: Any) -> Path:
    """Copy a checkpoint and change its config.json."""
    copy.mkdir()
    for path in original.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    change_json(copy / "config.json", **changes)
    return copy


def logits_of(path: Path) -> torch.Tensor:
    """Return logits of some tokens, [T, V]."""
    model = load_model(path)
    return Sequences(model, [torch.arange(1, 41)]).step([40])[0]


def error_of(path: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, allowed are silu"),
        ("llama", {"is_causal": False}, "is_causal=False is not supported"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved=True is not supported"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' is not"),
        ("llama", {"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0] is not supported"),
        (
            "llama",
            {"num_key_value_heads": 3},
            "num_attention_heads=4 is not a multiple of num_key_value_heads=3",
        ),
        (
            "llama",
            {"architectures": ["MixtralForCausalLM"]},
            "architecture MixtralForCausalLM, supported are",
        ),
        ("llama", {"architectures": 3}, "architectures must be a list of names, got 3"),
        ("llama", {"rms_norm_eps": "x"}, "rms_norm_eps must be a number from 0 to 1, got 'x'"),
        ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps must be a number from 0 to 1, got -1.0"),
        ("llama", {"max_position_embeddings": 10**12}, "max_position_embeddings must be at most 16777216"),
        ("llama", {"layer_types": 5}, "layer_types must be a list, got 5"),
        ("llama", {"sliding_window": "1023"}, "sliding_window must be an integer, got '1023'"),
        ("llama", {"sliding_window": 1023}, "sliding_window=1023 is not supported for 1024 tokens"),
        (
            "llama",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types has 'sliding_attention', but sliding_window is missing",
        ),
        (
            "llama",
            {"layer_types": ["full_attention", "linear_attention"]},
            "layer_types has 'linear_attention'",
        ),
        ("llama", {"logit_scale": 0.5}, "logit_scale=0.5 is not supported, allowed are null, 1.0"),
        ("llama", {"num_local_experts": 8}, "num_local_experts=8 is not supported, allowed are null, 0"),
        ("mistral", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("mistral", {"sliding_window": 512}, "it changes nothing with a max_model_len of 512 or less"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 512}, "sliding_window=512 is not supported"),
        ("qwen2", {"dual_chunk_attention_config": {}}, "dual_chunk_attention_config={} is not supported"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 512},
            "sliding_window=512 is not supported",
        ),
        ("qwen3", {"num_experts": 128}, "num_experts=128 is not supported, allowed are null, 0"),
        ("qwen3-moe", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("qwen3-moe", {"num_local_experts": 0}, "num_local_experts must be a positive integer, got 0"),
        ("qwen3-moe", {"num_local_experts": 2000}, "num_local_experts must be at most 1024, got 2000"),
        ("qwen3-moe", {"num_experts_per_tok": 9}, "must be at most num_local_experts=8, got 9"),
        ("qwen3-moe", {"moe_intermediate_size": "48"}, "moe_intermediate_size must be a positive integer"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer, got 0"),
        ("qwen3-moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers must be a list of integers, got ['1']"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must be 3 times 0 or 1, got [1, 0]"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "no_rope_layers must be 3 times 0 or 1, got [1, 2, 0]"),
        (
            "smollm3",
            {"no_rope_layers": None, "no_rope_layer_interval": 0},
            "no_rope_layer_interval must be at least 1, got 0",
        ),
    ],
)
def test_refused_before_weights_are_read(
    originals: dict[str, Path], copy: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    path = copied(originals[name], copy, **changes)
    (path / "model.safetensors").unlink()
    assert message in error_of(path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_pass(name: str, tmp_path: Path) -> None:
    change_json(tmp_path / "config.json", **_SIZES, **_HEADS, **PUBLISHED[name])
    assert "has neither model.safetensors nor" in error_of(tmp_path)


def test_sliding_windows_that_no_request_fills(originals: dict[str, Path], copy: Path) -> None:
    path = copied(originals["mistral"], copy, sliding_window=512)
    assert load_model(path, max_model_len=512).weights.rotary_table.shape == (512, 16)
    with pytest.raises(ModelError, match="for 513 tokens"):
        load_model(path, max_model_len=513)
    with LLM(str(path), device="cpu", max_model_len=512) as llm:
        assert llm.generate([[1, 2, 3]])[0].outputs[0].token_ids
    with pytest.raises(ModelError, match="sliding_window=512"):
        LLM(str(path), device="cpu")
    change_json(path / "config.json", sliding_window="absent")
    assert load_model(path).config.max_position_embeddings == WINDOW  # it is 4096 unless told otherwise
    change_json(path / "config.json", max_position_embeddings=8192)
    assert "sliding_window=4096 is not supported for 8192 tokens" in error_of(path)


def test_unused_windows_of_qwen(originals: dict[str, Path], copy: Path) -> None:
    path = copied(originals["qwen2"], copy, sliding_window=16, max_window_layers=2, use_sliding_window=False)
    assert torch.equal(logits_of(path), logits_of(originals["qwen2"]))


def test_the_window_is_the_limit(originals: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="allowed are at most 1024"):
        LLM(str(originals["llama"]), device="cpu", max_model_len=1025)


def test_a_linearly_stretched_window(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama-linear")
    assert load_model(path).config.max_position_embeddings == WINDOW


def test_defaults_are_those_of_transformers(originals: dict[str, Path], copy: Path) -> None:
    changes = dict.fromkeys(("rms_norm_eps", "no_rope_layers", "rope_parameters", "layer_types"), "absent")
    path = copied(originals["smollm3"], copy, tie_word_embeddings="absent", **changes)
    reference = AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.no_grad():
        expected = reference(torch.arange(1, 41)[None]).logits[0]
    torch.testing.assert_close(logits_of(path), expected, rtol=0, atol=1e-4)


def test_which_layers_have_experts(originals: dict[str, Path], copy: Path) -> None:
    path = copied(originals["qwen3-moe"], copy)
    tensors = load_file(path / "model.safetensors")
    assert [isinstance(layer.mlp, SparseMlp) for layer in load_model(path).weights.layers] == [
        True,
        False,
        True,
    ]
    change_json(path / "config.json", mlp_only_layers="absent", decoder_sparse_step=2)
    assert "tensor 'model.layers.0.mlp.gate_proj.weight' is missing" in error_of(path)
    change_json(path / "config.json", mlp_only_layers=[1], decoder_sparse_step=1, num_local_experts=7)
    assert "tensor 'model.layers.0.mlp.gate.weight' has shape [8, 64], expected [7, 64]" in error_of(path)
    missing = "model.layers.2.mlp.experts.7.up_proj.weight"
    del tensors[missing]
    save_file(tensors, path / "model.safetensors")
    change_json(path / "config.json", num_local_experts=8)
    assert f"tensor '{missing}' is missing" in error_of(path)


def test_experts_under_the_older_name_and_weights_as_they_come(
    originals: dict[str, Path], copy: Path
) -> None:
    path = copied(originals["qwen3-moe"], copy, num_local_experts="absent", num_experts=8)
    assert torch.equal(logits_of(path), logits_of(originals["qwen3-moe"]))
    change_json(path / "config.json", norm_topk_prob="absent")
    reference = AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.no_grad():
        expected = reference(torch.arange(1, 41)[None]).logits[0]
    torch.testing.assert_close(logits_of(path), expected, rtol=0, atol=1e-4)
    assert not torch.allclose(expected, logits_of(originals["qwen3-moe"]), atol=1e-2)


def test_several_files_with_an_index(originals: dict[str, Path], copy: Path) -> None:
    path = copied(originals["qwen3"], copy)
    tensors = sorted(load_file(path / "model.safetensors").items())
    (path / "model.safetensors").unlink()
    weight_map = {}
    for part, items in (("a.safetensors", tensors[::2]), ("b.safetensors", tensors[1::2])):
        save_file(dict(items), path / part)
        weight_map.update({name: part for name, _ in items})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(logits_of(path), logits_of(originals["qwen3"]))
    (path / "b.safetensors").unlink()
    assert "names 'b.safetensors', which is missing" in error_of(path)


def test_tied_heads_stored_or_not(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tied", "llama-biases")
    file = path / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    weights = load_model(path).weights
    assert weights.padded_lm_head.data_ptr() == weights.token_embedding.data_ptr()
    expected = logits_of(path)
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, file)
    assert torch.equal(logits_of(path), expected)
    save_file({**tensors, "lm_head.weight": embedding + 1}, file)
    assert "lm_head.weight differs from embed_tokens.weight" in error_of(path)


def test_tensors_that_would_not_be_used(originals: dict[str, Path], copy: Path) -> None:
    path = copied(originals["llama"], copy)
    file = path / "model.safetensors"
    tensors = load_file(file)
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    save_file({**tensors, **old}, file)
    assert torch.equal(logits_of(path), logits_of(originals["llama"]))
    bias = "model.layers.1.self_attn.q_proj.bias"
    save_file({**tensors, bias: torch.zeros(64)}, file)
    assert f"tensor '{bias}' would not be used" in error_of(path)
    change_json(path / "config.json", attention_bias=True)
    assert "tensor 'model.layers.0.self_attn.q_proj.bias' is missing" in error_of(path)
    change_json(path / "config.json", attention_bias=False, num_hidden_layers=1)
    assert "and 9 more would not be used; config.json does not fit" in error_of(path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_half_types_are_as_near_to_float32_as_torch(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    # Where a token takes some of its experts, rounding decides which, and nothing can be compared.
    changes = {"num_experts_per_tok": NUM_EXPERTS} if name == "qwen3-moe" else {}
    path = write_checkpoint(tmp_path, name, dtype=dtype, **changes)
    tokens = torch.randint(VOCAB_SIZE, (200,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact, same = (
            AutoModelForCausalLM.from_pretrained(path, dtype=kind).eval()(tokens[None]).logits[0].double()
            for kind in (torch.float32, dtype)
        )
    model = load_model(path, dtype=str(dtype).removeprefix("torch."))
    sequences = Sequences(model, [tokens])
    sequences.kv_cache = sequences.kv_cache.to(dtype)
    actual = torch.cat([sequences.step([count])[0] for count in (150, 1, 49)])
    assert model.config.dtype == dtype
    assert_within_budget(actual.to(dtype), exact, same)
    # The largest error is one number's luck, their mean is not.
    assert (actual.double() - exact).abs().mean() <= 1.2 * (same - exact).abs().mean()


def test_greedy_by_default_types_on_a_cpu(originals: dict[str, Path], copy: Path) -> None:
    path = copied(originals["qwen3"], copy)
    tensors = load_file(path / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, path / "model.safetensors")
    assert load_model(path).config.dtype == torch.float32
    with LLM(str(path), device="cpu", dtype="bfloat16") as llm:
        output = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 4
