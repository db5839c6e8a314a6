"""Files of LoRA adapters: what is refused, before anything is read into a slot, and what slots hold."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rose_backend.errors import ModelError
from rose_backend.models.adapters import AdapterSlots
from rose_backend.models.base import CausalLM, load_model
from tests.support.adapters import write_adapter
from tests.support.llama_checkpoints import change_json, write_checkpoint

MAX_RANK = 8
UNKNOWN = "got tensor .*, allowed are lora_A"
NAME = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), "qwen3")


@pytest.fixture(scope="module")
def model(base: Path) -> CausalLM:
    return load_model(base)


@pytest.fixture
def slots(model: CausalLM) -> AdapterSlots:
    return AdapterSlots(list(model.weights.layers), model.config, 2, MAX_RANK)


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", base)


def test_a_slot_holds_one_adapter_and_zeros(base: Path, model: CausalLM, tmp_path: Path) -> None:
    layers = list(model.weights.layers)
    slots = AdapterSlots(layers, model.config, 2, MAX_RANK)
    slots.load(1, write_adapter(tmp_path / "all", base, rank=8, seed=1))
    query = layers[1].qkv.adapters
    assert query is not None and query.lora_a[0][1].count_nonzero() == 8 * 64
    # Less of everything: what the first one had is gone.
    path = write_adapter(tmp_path / "queries", base, rank=3, alpha=12, modules=["q_proj"])
    slots.load(1, path)
    stored = load_file(path / "adapter_model.safetensors")
    assert torch.equal(query.lora_a[0][1, :3], stored[NAME])
    assert torch.equal(query.lora_b[0][1, :, :3], 4 * stored[NAME.replace("lora_A", "lora_B")])
    assert not query.lora_a[0][1, 3:].any() and not query.lora_b[0][1, :, 3:].any()
    for layer in layers:
        for linear in (layer.attn_out, layer.mlp.gate_up, layer.mlp.down):  # type: ignore[union-attr]
            assert not any(each.any() for each in (*linear.adapters.lora_a, *linear.adapters.lora_b))
    assert not any(each[0].any() for each in (*query.lora_a, *query.lora_b))
    assert slots.num_bytes == sum(
        each.nbytes
        for layer in layers
        for linear in (layer.qkv, layer.attn_out, layer.mlp.gate_up, layer.mlp.down)  # type: ignore[union-attr]
        for each in (*linear.adapters.lora_a, *linear.adapters.lora_b)
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("use_dora", True),
        ("use_dora", "yes"),
        ("lora_bias", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 4}),
        ("alpha_pattern", {"q_proj": 4}),
        ("layer_replication", [[0, 2]]),
        ("alora_invocation_tokens", [1]),
        ("target_parameters", ["experts"]),
        ("trainable_token_indices", [3]),
        ("use_qalora", True),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "loftq"),
        ("use_rslora", 1),
        ("r", MAX_RANK + 1),
        ("r", 10**100),
        ("r", 0),
        ("r", True),
        ("r", "8"),
        ("r", "absent"),
        ("lora_alpha", float("nan")),
        ("lora_alpha", float("inf")),
        ("lora_alpha", 10**100),
        ("lora_alpha", "absent"),
        ("lora_alpha", [16]),
    ],
)
def test_fields_that_are_not_supported_are_refused_by_name(
    slots: AdapterSlots, adapter: Path, field: str, value: Any
) -> None:
    change_json(adapter / "adapter_config.json", **{field: value})
    with pytest.raises(ModelError, match=f"adapter_config.json: {field}: got "):
        slots.load(0, adapter)


def test_fields_that_change_nothing_are_taken(slots: AdapterSlots, adapter: Path) -> None:
    change_json(adapter / "adapter_config.json", init_lora_weights="gaussian", bias=None, inference_mode=True)
    slots.load(0, adapter)


def change_tensors(path: Path, tensors: dict[str, torch.Tensor | None]) -> None:
    """Change tensors by their whole names, or remove them."""
    file = path / "adapter_model.safetensors"
    found = {**load_file(file), **tensors}
    save_file({name: each for name, each in found.items() if each is not None}, file)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({NAME: torch.zeros(8, 65)}, r"lora_A.weight' has shape \[8, 65\], expected \[8, 64\]"),
        ({NAME: torch.zeros(4, 64)}, r"has shape \[4, 64\], expected \[8, 64\]"),
        ({NAME: torch.zeros(8, 64, 1)}, r"has shape \[8, 64, 1\]"),
        ({NAME: torch.zeros(8, 64, dtype=torch.int64)}, "is stored as I64, allowed are float32, float16"),
        ({NAME: None}, "q_proj.lora_B.weight' lacks the other one of lora_A and lora_B"),
        (
            {NAME.replace("layers.1", "layers.2"): torch.zeros(8, 64)},
            "got tensor .*layers.2.self_attn",
        ),
        (
            {"base_model.model.lm_head.lora_A.weight": torch.zeros(8, 64)},
            "got tensor .*lm_head",
        ),
        (
            {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(8, 9)},
            UNKNOWN,
        ),
        (
            {NAME.replace("lora_A.weight", "lora_magnitude_vector"): torch.zeros(8)},
            UNKNOWN,
        ),
        ({NAME: torch.full((8, 64), float("nan"))}, "q_proj.lora_A.weight' has weights that are not finite"),
        ({NAME.replace("_A", "_B"): torch.full((128, 8), 3e38)}, "lora_B.weight' has weights that are not"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    slots: AdapterSlots, adapter: Path, tensors: dict[str, torch.Tensor | None], message: str
) -> None:
    change_tensors(adapter, tensors)
    with pytest.raises(ModelError, match=message):
        slots.load(0, adapter)


def test_damaged_files_are_refused(slots: AdapterSlots, base: Path, tmp_path: Path) -> None:
    def damaged(name: str, content: bytes | None, file: str = "adapter_model.safetensors") -> Path:
        path = write_adapter(tmp_path / name, base)
        (path / file).unlink()
        if content is not None:
            (path / file).write_bytes(content)
        return path

    whole = (write_adapter(tmp_path / "whole", base) / "adapter_model.safetensors").read_bytes()
    header = json.dumps({}).encode()
    config = "adapter_config.json"
    for path, message in (
        (damaged("missing", None), "has no adapter_model.safetensors"),
        (damaged("no config", None, config), "has no adapter_config.json"),
        (damaged("empty", b""), "is not a complete safetensors file"),
        (damaged("cut", whole[:-1]), "is not a complete safetensors file"),
        (damaged("noise", os.urandom(4096)), "is not a complete|has a header of"),
        (
            damaged("huge header", struct.pack("<Q", 1 << 50) + b"{}"),
            "has a header of 1125899906842624 bytes",
        ),
        (damaged("long header", struct.pack("<Q", 2 << 20) + b" " * (2 << 20)), "has a header of 2097152"),
        (
            damaged("no tensors", struct.pack("<Q", len(header)) + header),
            "got no tensors, allowed are lora_A",
        ),
        (damaged("no JSON", b"{", config), "cannot read"),
        (damaged("a list", b"[]", config), "a JSON object is needed"),
        (damaged("deep", b"[" * 100_000, config), "cannot read"),
        (damaged("long", b" " * ((1 << 20) + 1), config), "got 1048577 bytes, allowed are at most"),
        (damaged("no text", b"\xff\xfe", config), "cannot read"),
        (tmp_path / "nowhere", "has no adapter_config.json"),
    ):
        with pytest.raises(ModelError, match=message):
            slots.load(0, path)
    pipe = damaged("a pipe", None, config)
    os.mkfifo(pipe / config)
    with pytest.raises(ModelError, match="has no adapter_config"):
        slots.load(0, pipe)
