"""Checkpoints in every form that is served, and one clear sentence for each that is not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rose_backend import LLM, SamplingParams
from rose_backend.conformance.error_budget import assert_within_budget
from rose_backend.errors import ConfigError, ModelError
from rose_backend.kernels.gpu_properties import GpuProperties
from rose_backend.layers.linear import SparseMlp
from rose_backend.models import config
from rose_backend.models.base import load_model
from rose_backend.models.config import choose_dtype
from rose_backend.models.weights import resolve_model_path
from tests.support.llama_checkpoints import (
    CASES,
    NUM_EXPERTS,
    VOCAB_SIZE,
    WINDOW,
    change_json,
    write_checkpoint,
)
from tests.support.paged_sequences import PagedSequences
from tests.support.tiny_checkpoint import write_random_gpt2

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


GPT2_SIZES = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 300, "n_positions": 64}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return one checkpoint of each family, which no test changes."""
    names = ("llama", "llama-biases", "mistral", "qwen2", "qwen3", "qwen3-moe", "smollm3")
    found = {name: write_checkpoint(tmp_path_factory.mktemp(name), name) for name in names}
    return {"gpt2": write_random_gpt2(tmp_path_factory.mktemp("gpt2"), **GPT2_SIZES), **found}


@pytest.fixture
def copy(originals: dict[str, Path], tmp_path: Path) -> Path:
    """Return a place for a checkpoint whose files a test may change."""
    return tmp_path / "copy"


@pytest.fixture
def gpt2(originals: dict[str, Path], copy: Path) -> Path:
    """Return a GPT-2 whose files a test may change."""
    return copied(originals["gpt2"], copy)


def copied(original: Path, copy: Path, **changes: Any) -> Path:
    """Copy a checkpoint and change its config.json."""
    copy.mkdir()
    for path in original.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    change_json(copy / "config.json", **changes)
    return copy


def change_tensors(path: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replace or add tensors of a checkpoint of one file; None removes one."""
    tensors = {**load_file(path / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})


def logits_of(path: Path) -> torch.Tensor:
    """Return logits of some tokens, [T, V]."""
    return PagedSequences(load_model(path), [torch.arange(1, 41)]).step([40])[0]


def assert_like_transformers(path: Path) -> torch.Tensor:
    """Compare logits of some tokens with those of transformers, and return them."""
    reference = AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.no_grad():
        expected = reference(torch.arange(1, 41)[None]).logits[0]
    actual = logits_of(path)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    return actual


def error_of(path: Path | str, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sizes_and_types(originals: dict[str, Path]) -> None:
    config = load_model(originals["gpt2"]).config
    assert (config.vocab_size, config.num_layers, config.head_size) == (300, 1, 16)
    assert (config.num_attention_heads, config.num_kv_heads) == (2, 2)
    assert (config.hidden_size, config.intermediate_size, config.max_position_embeddings) == (32, 128, 64)
    assert (config.eos_token_ids, config.norm_eps, config.activation_width) == ((0,), 1e-5, 11 * 32)
    assert (config.dtype, config.device.type) == (torch.float32, "cpu")


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", "float16"), ("qwen3", "bfloat16")])
def test_auto_dtype_on_a_cpu_is_float32(
    originals: dict[str, Path], copy: Path, name: str, dtype: str
) -> None:
    path, stored = copied(originals[name], copy), getattr(torch, dtype)
    tensors = load_file(path / "model.safetensors")
    change_tensors(path, {name: tensor.to(stored) for name, tensor in tensors.items()})
    for chosen, expected in (("auto", torch.float32), (dtype, stored)):
        model = load_model(path, dtype=chosen)
        assert model.config.dtype == model.weights.layers[0].mlp.gate_up.weight.dtype == expected
    with LLM(str(path), device="cpu", dtype=dtype) as llm:
        output = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    ("stored", "capability", "expected"),
    [
        (torch.float16, (9, 0), torch.float16),
        (torch.bfloat16, (9, 0), torch.bfloat16),
        (torch.float32, (8, 0), torch.bfloat16),
        (torch.float32, (7, 5), torch.float16),
    ],
)
def test_auto_dtype_on_a_gpu_is_that_of_vllm(
    monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, capability: tuple[int, int], expected: torch.dtype
) -> None:
    monkeypatch.setattr(config, "gpu_properties", lambda device: GpuProperties(capability, 132))
    assert choose_dtype("auto", "cuda", stored) is expected


def test_names_without_prefix(originals: dict[str, Path], gpt2: Path) -> None:
    tensors = load_file(gpt2 / "model.safetensors")
    assert "transformer.wte.weight" in tensors
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare, gpt2 / "model.safetensors")
    assert torch.equal(logits_of(gpt2), logits_of(originals["gpt2"]))


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_several_files_with_an_index(originals: dict[str, Path], copy: Path, name: str) -> None:
    path = copied(originals[name], copy)
    tensors = sorted(load_file(path / "model.safetensors").items())
    (path / "model.safetensors").unlink()
    weight_map = {}
    for part, items in (("a.safetensors", tensors[::2]), ("b.safetensors", tensors[1::2])):
        save_file(dict(items), path / part)
        weight_map.update({name: part for name, _ in items})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(logits_of(path), logits_of(originals[name]))
    (path / "b.safetensors").unlink()
    assert "names 'b.safetensors', which is missing" in error_of(path)


@pytest.mark.parametrize("name", ["gpt2", "llama-biases"])
def test_tied_heads_stored_or_not(originals: dict[str, Path], copy: Path, name: str) -> None:
    path = copied(originals[name], copy)
    tensors = load_file(path / "model.safetensors")
    (embedding,) = (each for each in tensors if each.endswith(("wte.weight", "embed_tokens.weight")))
    assert "lm_head.weight" not in tensors
    for _ in range(2):
        weights = load_model(path).weights
        assert weights.padded_lm_head.data_ptr() == weights.token_embedding.data_ptr()
        assert torch.equal(logits_of(path), logits_of(originals[name]))
        change_tensors(path, {"lm_head.weight": tensors[embedding].clone()})
    change_tensors(path, {"lm_head.weight": tensors[embedding] + 1})
    short = embedding.removeprefix("transformer.").removeprefix("model.")
    assert f"lm_head.weight differs from {short}" in error_of(path)


def test_untied_head(tmp_path: Path) -> None:
    checkpoint = write_random_gpt2(tmp_path / "untied", tie_word_embeddings=False, **GPT2_SIZES)
    stored = load_file(checkpoint / "model.safetensors")
    weights = load_model(checkpoint).weights
    assert weights.padded_lm_head.shape == (320, 32) and not weights.padded_lm_head[300:].any()
    assert torch.equal(weights.padded_lm_head[:300], stored["lm_head.weight"])
    assert not torch.equal(weights.padded_lm_head[:300], weights.token_embedding)
    change_tensors(checkpoint, {"lm_head.weight": None})
    assert "tensor 'lm_head.weight' is missing" in error_of(checkpoint)


def test_several_end_tokens(gpt2: Path) -> None:
    change_json(gpt2 / "config.json", eos_token_id=[7, 9])
    assert load_model(gpt2).config.eos_token_ids == (7, 9)
    change_json(gpt2 / "config.json", eos_token_id=None)
    assert load_model(gpt2).config.eos_token_ids == ()


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "gpt2": [
        ({"activation_function": "relu"}, "activation_function='relu' is not supported"),
        ({"scale_attn_weights": False}, "scale_attn_weights=False is not supported"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supported"),
        ({"add_cross_attention": True}, "add_cross_attention=True is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method=None is not supported"),
        (
            {"architectures": ["BertModel"]},
            "architecture BertModel, supported are GPT2LMHeadModel, LlamaForCausalLM",
        ),
        ({"architectures": "absent"}, "architecture unknown, supported are GPT2LMHeadModel"),
        ({"n_embd": "absent"}, "n_embd must be a positive integer, got None"),
        ({"n_head": 3}, "n_embd=32 is not a multiple of n_head=3"),
        ({"n_layer": 0}, "n_layer must be a positive integer, got 0"),
        ({"n_layer": 2}, "tensor 'transformer.h.1.ln_1.weight' is missing"),
        ({"vocab_size": 301}, "tensor 'transformer.wte.weight' has shape [300, 32], expected [301, 32]"),
        ({"eos_token_id": "end"}, "eos_token_id must be one integer, or a list of them, got 'end'"),
    ],
    "llama": [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, allowed are silu"),
        ({"is_causal": False}, "is_causal=False is not supported"),
        ({"rope_interleaved": True}, "rope_interleaved=True is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method=None is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' is not"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0] is not supported"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"architectures": ["MixtralForCausalLM"]}, "architecture MixtralForCausalLM, supported are"),
        ({"architectures": 3}, "architectures must be a list of names, got 3"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a number from 0 to 1, got 'x'"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a number from 0 to 1, got -1.0"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings must be at most 16777216"),
        ({"layer_types": 5}, "layer_types must be a list, got 5"),
        ({"sliding_window": "1023"}, "sliding_window must be an integer, got '1023'"),
        ({"sliding_window": 1023}, "sliding_window=1023 is not supported for 1024 tokens"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types has 'sliding_attention', but sliding_window is missing",
        ),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types has 'linear_attention'"),
        ({"logit_scale": 0.5}, "logit_scale=0.5 is not supported, allowed are null, 1.0"),
        ({"num_local_experts": 8}, "num_local_experts=8 is not supported, allowed are null, 0"),
    ],
    "mistral": [
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"sliding_window": 512}, "it changes nothing with a max_model_len of 512 or less"),
    ],
    "qwen2": [
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"use_sliding_window": True, "sliding_window": 512}, "sliding_window=512 is not supported"),
        ({"dual_chunk_attention_config": {}}, "dual_chunk_attention_config={} is not supported"),
    ],
    "qwen3": [
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 512},
            "sliding_window=512 is not supported",
        ),
        ({"num_experts": 128}, "num_experts=128 is not supported, allowed are null, 0"),
    ],
    "qwen3-moe": [
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"num_local_experts": 0}, "num_local_experts must be a positive integer, got 0"),
        ({"num_local_experts": 2000}, "num_local_experts must be at most 1024, got 2000"),
        ({"num_experts_per_tok": 9}, "must be at most num_local_experts=8, got 9"),
        ({"moe_intermediate_size": "48"}, "moe_intermediate_size must be a positive integer"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer, got 0"),
        ({"mlp_only_layers": ["1"]}, "mlp_only_layers must be a list of integers, got ['1']"),
    ],
    "smollm3": [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers must be 3 times 0 or 1, got [1, 0]"),
        ({"no_rope_layers": [1, 2, 0]}, "no_rope_layers must be 3 times 0 or 1, got [1, 2, 0]"),
        (
            {"no_rope_layers": None, "no_rope_layer_interval": 0},
            "no_rope_layer_interval must be at least 1, got 0",
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [(name, *case) for name, cases in REFUSED.items() for case in cases],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value if value in REFUSED else "",
)
def test_refused(
    originals: dict[str, Path], copy: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    path = copied(originals[name], copy, **changes)
    if name != "gpt2":  # the others before weights are looked at
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
    assert_like_transformers(path)


def test_which_layers_have_experts(originals: dict[str, Path], copy: Path) -> None:
    path = copied(originals["qwen3-moe"], copy)
    is_sparse = [isinstance(layer.mlp, SparseMlp) for layer in load_model(path).weights.layers]
    assert is_sparse == [True, False, True]
    change_json(path / "config.json", mlp_only_layers="absent", decoder_sparse_step=2)
    assert "tensor 'model.layers.0.mlp.gate_proj.weight' is missing" in error_of(path)
    change_json(path / "config.json", mlp_only_layers=[1], decoder_sparse_step=1, num_local_experts=7)
    assert "tensor 'model.layers.0.mlp.gate.weight' has shape [8, 64], expected [7, 64]" in error_of(path)
    missing = "model.layers.2.mlp.experts.7.up_proj.weight"
    change_tensors(path, {missing: None})
    change_json(path / "config.json", num_local_experts=8)
    assert f"tensor '{missing}' is missing" in error_of(path)


def test_experts_under_the_older_name_and_weights_as_they_come(
    originals: dict[str, Path], copy: Path
) -> None:
    path = copied(originals["qwen3-moe"], copy, num_local_experts="absent", num_experts=8)
    assert torch.equal(logits_of(path), logits_of(originals["qwen3-moe"]))
    change_json(path / "config.json", norm_topk_prob="absent")
    logits = assert_like_transformers(path)
    assert not torch.allclose(logits, logits_of(originals["qwen3-moe"]), atol=1e-2)


def test_tensors_that_would_not_be_used(originals: dict[str, Path], copy: Path) -> None:
    path = copied(originals["llama"], copy)
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(path, {old: torch.zeros(8)})
    assert torch.equal(logits_of(path), logits_of(originals["llama"]))
    bias = "model.layers.1.self_attn.q_proj.bias"
    change_tensors(path, {old: None, bias: torch.zeros(64)})
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
    sequences = PagedSequences(model, [tokens])
    actual = torch.cat([sequences.step([count])[0] for count in (150, 1, 49)])
    assert model.config.dtype == dtype
    assert_within_budget(actual.to(dtype), exact, same)
    # The largest error is one number's luck, their mean is not.
    assert (actual.double() - exact).abs().mean() <= 1.2 * (same - exact).abs().mean()


def test_missing_and_misshapen_tensors(gpt2: Path) -> None:
    name = "transformer.h.0.mlp.c_fc.weight"
    change_tensors(gpt2, {name: torch.zeros(128, 32)})
    assert f"tensor '{name}' has shape [128, 32], expected [32, 128]" in error_of(gpt2)
    change_tensors(gpt2, {name: None})
    assert f"tensor '{name}' is missing from" in error_of(gpt2)


@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "header"])
def test_damaged_weights(gpt2: Path, damage: str) -> None:
    path = gpt2 / "model.safetensors"
    content = path.read_bytes()
    damaged = {
        "truncated": content[: len(content) // 2],
        "empty": b"",
        "text": b"version https://git-lfs.github.com/spec/v1\n",
        "header": content[:8] + b"x" * (len(content) - 8),
    }
    path.write_bytes(damaged[damage])
    message = error_of(gpt2)
    assert f"{str(path)!r} is not a complete safetensors file" in message


def test_missing_files(gpt2: Path) -> None:
    (gpt2 / "model.safetensors").unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in error_of(gpt2)
    (gpt2 / "config.json").write_text("{")
    assert "cannot read" in error_of(gpt2)
    (gpt2 / "config.json").write_text("[]")
    assert "holds a list, a JSON object is needed" in error_of(gpt2)
    (gpt2 / "config.json").unlink()
    assert "has no config.json" in error_of(gpt2)


@pytest.mark.parametrize(
    "name",
    [
        "/no/such/directory",
        "./missing",
        "../missing",
        "a/b/c",
        "nobody-here/no-such-model",
        "no-such-model",
        "",
    ],
)
def test_unknown_path_is_named_quickly(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    _go_offline(monkeypatch)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"it waits {seconds} s to try again"))
    message = error_of(name)
    assert repr(name) in message


def test_a_file_is_not_a_model(gpt2: Path) -> None:
    path = gpt2 / "config.json"
    assert f"{str(path)!r} is a file" in error_of(path)


def test_hub_id_is_found_in_the_cache(gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "hub" / "models--someone--tiny"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    gpt2.rename(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    _go_offline(monkeypatch)
    assert resolve_model_path("someone/tiny").resolve() == snapshot.resolve()
    assert load_model("someone/tiny").config.hidden_size == 32


def test_a_caller_without_need_of_weights_downloads_the_configuration_alone(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(name: str, *, local_files_only: bool = False, **options: Any) -> str:
        asked.append((local_files_only, options.get("allow_patterns")))
        if local_files_only and not (tmp_path / "cached").exists():
            raise FileNotFoundError(name)
        return str(gpt2)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model_path("someone/tiny", needs_weights=False) == gpt2
    assert asked == [(True, ["config.json"]), (False, ["config.json"])]
    # What is cached without weights is enough for it, and for nobody else.
    (tmp_path / "cached").touch()
    for weights in gpt2.glob("*.safetensors"):
        weights.unlink()
    assert resolve_model_path("someone/tiny", needs_weights=False) == gpt2
    assert [is_cached for is_cached, _ in asked[2:]] == [True]
    resolve_model_path("someone/tiny")
    assert [is_cached for is_cached, _ in asked[3:]] == [True, False] and "*.safetensors" in asked[4][1]


def _go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
