"""EAGLE-3 heads that do not fit, or are not supported, are refused by name before weights are read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rose_backend import LLM
from rose_backend.errors import ModelError
from tests.support.eagle_checkpoints import write_eagle3_head
from tests.support.llama_checkpoints import change_json, write_checkpoint

LAYERS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("pair")
    model = write_checkpoint(path / "model", "llama", num_hidden_layers=4)
    layers = {LAYERS: [1, 2, 3]}
    return model, write_eagle3_head(path / "head", model, draft_vocab_size=400, std=0.2, **layers)


def load(model: Path, head: Path, **options: Any) -> LLM:
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    return LLM(str(model), speculative_config=drafts, dtype="float32", num_blocks=70, **options)


@pytest.fixture
def head(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    """Return a copy of the head."""
    shutil.copytree(pair[1], tmp_path / "head")
    return tmp_path / "head"


@pytest.fixture
def reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        pytest.fail("weights are read")

    monkeypatch.setattr("rose_backend.models.streaming.stream", fail)


@pytest.mark.usefixtures("reads_nothing")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            r"architectures is \['LlamaForCausalLM'\], of heads supported",
        ),
        ({"architectures": "absent"}, "architectures is None, of heads supported are LlamaForCausalLMEagle3"),
        ({"hidden_size": 32, "head_dim": 16}, "hidden_size is 32, with this model 64 is needed"),
        ({"target_hidden_size": 128}, "target_hidden_size is 128, with this model 64 is needed"),
        ({"vocab_size": 600}, "vocab_size is 600, with this model 500 is needed"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4, with this model 2 is needed"),
        ({"head_dim": 32}, "head_dim is 32, with this model 16 is needed"),
        ({"draft_vocab_size": 501}, "draft_vocab_size is 501, allowed are at most vocab_size=500"),
        ({"draft_vocab_size": 300}, r"tensor 'd2t' has shape \[400\], expected \[300\]"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2 is not supported, allowed are 1"),
        ({"norm_before_fc": True}, "norm_before_fc=True is not supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False is not supported"),
        ({"eagle_config": 3}, "eagle_config must be an object, got 3"),
        ({"norm_output": True}, "norm_output=True is not supported"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config={'quant_method': 'fp8'} is not",
        ),
        ({LAYERS: [1, 2, 4]}, rf"{LAYERS} must be different layers from 0 to 3, got \[1, 2, 4\]"),
        ({LAYERS: []}, rf"{LAYERS} must be different layers from 0 to 3, got \[\]"),
        ({"norm_before_residual": "no"}, "norm_before_residual must be true or false, got 'no'"),
        ({LAYERS: [1, 1, 2]}, rf"{LAYERS} must be different layers from 0 to 3, got \[1, 1, 2\]"),
        # As EAGLE-3 was trained: 2, half of all and the last but two.
        ({LAYERS: "absent"}, rf"{LAYERS} must be different layers from 0 to 3, got \[2, 2, 1\]"),
        ({LAYERS: [1, 2]}, r"tensor 'fc.weight' has shape \[64, 192\], expected \[64, 128\]"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type='dynamic' is not supported"),
        ({"attention_bias": True}, "tensor 'midlayer.self_attn.q_proj.bias' is missing"),
    ],
    ids=str,
)
def test_configurations(pair: tuple[Path, Path], head: Path, changes: dict[str, Any], message: str) -> None:
    change_json(head / "config.json", **changes)
    with pytest.raises(ModelError, match=f"^speculative_config.model: .*{message}"):
        load(pair[0], head)


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.usefixtures("reads_nothing")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("fc.weight"), "tensor 'fc.weight' is missing from"),
        (drop("midlayer.hidden_norm.weight"), "tensor 'midlayer.hidden_norm.weight' is missing from"),
        (drop("d2t"), "tensor 'd2t' is missing from"),
        (
            lambda tensors: tensors.update({"midlayer.self_attn.q_norm.weight": torch.ones(16)}),
            "tensor 'midlayer.self_attn.q_norm.weight' would not be used",
        ),
        (
            lambda tensors: tensors.update({"d2t": tensors["d2t"].int()}),
            "tensor 'd2t' is stored as I32, of heads allowed are F32, F16, BF16, I64, BOOL",
        ),
        (
            lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].to(torch.float8_e4m3fn)}),
            "tensor 'fc.weight' is stored as F8_E4M3, of heads allowed are",
        ),
        (
            lambda tensors: tensors.update({"d2t": tensors["d2t"].float()}),
            "tensor 'd2t' is stored as F32, expected I64",
        ),
    ],
)
def test_tensors(
    pair: tuple[Path, Path],
    head: Path,
    change: Callable[[dict[str, torch.Tensor]], object],
    message: str,
) -> None:
    tensors = load_file(head / "model.safetensors")
    change(tensors)
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(ModelError, match=f"^speculative_config.model: model: {message}"):
        load(pair[0], head)


@pytest.mark.usefixtures("reads_nothing")
def test_no_checkpoint(pair: tuple[Path, Path], head: Path) -> None:
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"^speculative_config.model: .* has neither model.safetensors nor"):
        load(pair[0], head)
    with pytest.raises(ModelError, match=r"^speculative_config.model: .*'/nowhere' is not a directory"):
        load(pair[0], Path("/nowhere"))


def test_tokens_that_the_model_has_not(pair: tuple[Path, Path], head: Path) -> None:
    tensors = load_file(head / "model.safetensors")
    tensors["d2t"][-1] = 200
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor 'd2t' names tokens \d+ to 599, allowed are 0 to 499"):
        load(pair[0], head)


@pytest.mark.parametrize("form", ["layers.0", "eagle_config", "no d2t"])
def test_other_forms_of_the_same_head(pair: tuple[Path, Path], head: Path, form: str) -> None:
    file = head / "model.safetensors"
    if form == "layers.0":
        save_file({name.replace("midlayer", form): each for name, each in load_file(file).items()}, file)
    elif form == "eagle_config":
        change_json(head / "config.json", **{LAYERS: "absent", "eagle_config": {LAYERS: [3, 1, 2]}})
    else:
        tensors = load_file(file)
        del tensors["d2t"], tensors["t2d"]
        tensors["lm_head.weight"] = tensors["lm_head.weight"].repeat(2, 1)[:500]
        save_file(tensors, file)
        change_json(head / "config.json", draft_vocab_size="absent")
    with load(pair[0], head) as llm:
        drafts = llm.core._runner.head_drafts
        assert drafts is not None and llm.core._runner._model._decoder.held_layers == (1, 2, 3)
        assert (drafts.head.weights.token_ids is None) == (form == "no d2t")
        assert len(llm.generate([[5, 6, 7]])[0].outputs[0].token_ids) > 0
