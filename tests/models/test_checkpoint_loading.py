"""Checkpoints in every form that is supported, and one clear sentence for each that is not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rose_backend.errors import ModelError
from rose_backend.kernels.gpu_properties import GpuProperties
from rose_backend.models import config
from rose_backend.models.base import CausalLM, load_model
from rose_backend.models.config import choose_dtype
from rose_backend.models.weights import resolve_model_path
from tests.support.tiny_checkpoint import write_random_gpt2


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_random_gpt2(
        tmp_path / "model", n_layer=1, n_embd=32, n_head=2, vocab_size=300, n_positions=32
    )


def change_config(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "absent"}))


def change_tensors(checkpoint: Path, changes: dict[str, torch.Tensor | None]) -> None:
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    tensors.update({name: tensor for name, tensor in changes.items() if tensor is not None})
    for name in [name for name, tensor in changes.items() if tensor is None]:
        del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})


def error_of(checkpoint: Path | str) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(checkpoint)
    message = str(caught.value)
    assert "\n" not in message
    return message


def same_weights(left: CausalLM, right: CausalLM) -> bool:
    pairs = [
        (left.weights.token_embedding, right.weights.token_embedding),
        (left.weights.padded_lm_head, right.weights.padded_lm_head),
        (left.weights.layers[0].qkv.weight, right.weights.layers[0].qkv.weight),
        (left.weights.final_norm.bias, right.weights.final_norm.bias),
    ]
    return all(torch.equal(a, b) for a, b in pairs)


def test_sizes_and_types(checkpoint: Path) -> None:
    config = load_model(checkpoint).config
    assert (config.vocab_size, config.num_layers, config.head_size) == (300, 1, 16)
    assert (config.num_attention_heads, config.num_kv_heads) == (2, 2)
    assert (config.hidden_size, config.intermediate_size, config.max_position_embeddings) == (32, 128, 32)
    assert (config.eos_token_ids, config.norm_eps, config.activation_width) == ((0,), 1e-5, 11 * 32)
    assert (config.dtype, config.device.type) == (torch.float32, "cpu")


def test_auto_dtype_on_cpu_is_float32(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    save_file({name: tensor.half() for name, tensor in tensors.items()}, checkpoint / "model.safetensors")
    assert load_model(checkpoint).weights.layers[0].mlp.widen.weight.dtype == torch.float32
    assert load_model(checkpoint, dtype="float16").weights.layers[0].mlp.widen.weight.dtype == torch.float16


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


def test_names_without_prefix(checkpoint: Path) -> None:
    expected = load_model(checkpoint)
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    assert "transformer.wte.weight" in tensors
    save_file({name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}, path)
    assert same_weights(load_model(checkpoint), expected)


def test_several_files_with_an_index(checkpoint: Path) -> None:
    expected = load_model(checkpoint)
    path = checkpoint / "model.safetensors"
    tensors = sorted(load_file(path).items())
    path.unlink()
    weight_map = {}
    for part, items in (("a.safetensors", tensors[::2]), ("b.safetensors", tensors[1::2])):
        save_file(dict(items), checkpoint / part)
        weight_map.update({name: part for name, _ in items})
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert same_weights(load_model(checkpoint), expected)
    (checkpoint / "b.safetensors").unlink()
    assert "names 'b.safetensors', which is missing" in error_of(checkpoint)


def test_tied_head_is_the_embedding(checkpoint: Path) -> None:
    weights = load_model(checkpoint).weights
    assert weights.padded_lm_head.data_ptr() == weights.token_embedding.data_ptr()
    embedding = load_file(checkpoint / "model.safetensors")["transformer.wte.weight"]
    change_tensors(checkpoint, {"lm_head.weight": embedding.clone()})
    weights = load_model(checkpoint).weights
    assert weights.padded_lm_head.data_ptr() == weights.token_embedding.data_ptr()
    change_tensors(checkpoint, {"lm_head.weight": embedding + 1})
    assert "lm_head.weight differs from wte.weight" in error_of(checkpoint)


def test_untied_head(tmp_path: Path) -> None:
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 300, "n_positions": 32}
    checkpoint = write_random_gpt2(tmp_path / "untied", tie_word_embeddings=False, **sizes)
    stored = load_file(checkpoint / "model.safetensors")
    weights = load_model(checkpoint).weights
    assert weights.padded_lm_head.shape == (320, 32) and not weights.padded_lm_head[300:].any()
    assert torch.equal(weights.padded_lm_head[:300], stored["lm_head.weight"])
    assert not torch.equal(weights.padded_lm_head[:300], weights.token_embedding)
    change_tensors(checkpoint, {"lm_head.weight": None})
    assert "tensor 'lm_head.weight' is missing" in error_of(checkpoint)


def test_several_end_tokens(checkpoint: Path) -> None:
    change_config(checkpoint, eos_token_id=[7, 9])
    assert load_model(checkpoint).config.eos_token_ids == (7, 9)
    change_config(checkpoint, eos_token_id=None)
    assert load_model(checkpoint).config.eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "relu"}, "activation_function='relu' is not supported"),
        ({"scale_attn_weights": False}, "scale_attn_weights=False is not supported"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supported"),
        ({"add_cross_attention": True}, "add_cross_attention=True is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
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
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_unsupported_config(checkpoint: Path, changes: dict[str, Any], message: str) -> None:
    change_config(checkpoint, **changes)
    assert message in error_of(checkpoint)


def test_missing_and_misshapen_tensors(checkpoint: Path) -> None:
    name = "transformer.h.0.mlp.c_fc.weight"
    change_tensors(checkpoint, {name: torch.zeros(128, 32)})
    assert f"tensor '{name}' has shape [128, 32], expected [32, 128]" in error_of(checkpoint)
    change_tensors(checkpoint, {name: None})
    assert f"tensor '{name}' is missing from" in error_of(checkpoint)


@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "header"])
def test_damaged_weights(checkpoint: Path, damage: str) -> None:
    path = checkpoint / "model.safetensors"
    content = path.read_bytes()
    damaged = {
        "truncated": content[: len(content) // 2],
        "empty": b"",
        "text": b"version https://git-lfs.github.com/spec/v1\n",
        "header": content[:8] + b"x" * (len(content) - 8),
    }
    path.write_bytes(damaged[damage])
    message = error_of(checkpoint)
    assert f"{str(path)!r} is not a complete safetensors file" in message


def test_missing_files(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in error_of(checkpoint)
    (checkpoint / "config.json").write_text("{")
    assert "cannot read" in error_of(checkpoint)
    (checkpoint / "config.json").write_text("[]")
    assert "holds a list, a JSON object is needed" in error_of(checkpoint)
    (checkpoint / "config.json").unlink()
    assert "has no config.json" in error_of(checkpoint)


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


def test_a_file_is_not_a_model(checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    assert f"{str(path)!r} is a file" in error_of(path)


def test_hub_id_is_found_in_the_cache(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub" / "models--someone--tiny"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    checkpoint.rename(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    _go_offline(monkeypatch)
    assert resolve_model_path("someone/tiny").resolve() == snapshot.resolve()
    assert load_model("someone/tiny").config.hidden_size == 32


def _go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
