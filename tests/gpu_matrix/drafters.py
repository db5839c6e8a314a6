"""Small Llamas with something beside them that drafts: a model, an EAGLE head, an MTP head.

What layers add to embeddings is small: the token before decides the likeliest one at times, and what is further back at
others. So drafters that know little more than the token before are right at times and wrong at others.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.gpu_matrix.checkpoints import SIZES
from tests.support.random_checkpoints import write_random

SMALL_SHARE = 0.03
"""Of the layers' outputs, as they are drawn otherwise."""
_COMMON = slice(700, 740)
"""Token ids that ``write_repetitive_llama`` makes likely."""
_WEIGHTS = "model.safetensors"


def write_with_draft_model(path: Path) -> Path:
    """Write a model of 3 layers and, in ``path / "draft"``, its first one as a model."""
    write_llama(path)
    write_llama(path / "draft", num_hidden_layers=1)
    tensors = load_file(path / _WEIGHTS)
    kept = load_file(path / "draft" / _WEIGHTS)
    save_file({name: tensors[name] for name in kept}, path / "draft" / _WEIGHTS, {"format": "pt"})
    return path


def write_with_eagle_head(path: Path) -> Path:
    """Write a model and, in ``path / "draft"``, an EAGLE head for it, which has no embeddings and no norm in front."""
    write_llama(path)
    draft = path / "draft"
    write_llama(draft, num_hidden_layers=1)
    tensors = load_file(draft / _WEIGHTS)
    layer = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if ".layers." in name}
    del layer["layers.0.input_layernorm.weight"]
    width = SIZES["hidden_size"]
    final_norm = load_file(path / _WEIGHTS)["model.norm.weight"]
    # The token's embedding as the model's last norm scales it, and a little of what the model made of the one before.
    halves = [
        final_norm.float().diag(),
        0.001 * torch.randn(width, width, generator=torch.Generator().manual_seed(3)),
    ]
    layer["fc.weight"] = torch.cat(halves, dim=1).half()
    save_file(layer, draft / _WEIGHTS, {"format": "pt"})
    config = json.loads((draft / "config.json").read_text())
    # A name of vLLM's: the registry has no other for a head of this kind.
    config["architectures"] = ["EagleLlamaForCausalLM"]
    (draft / "config.json").write_text(json.dumps(config))
    return path


def write_with_mtp_head(path: Path) -> Path:
    """Write a model as MiMo's: a Qwen2 with an MTP head in the same checkpoint."""
    config = Qwen2Config(**SIZES, tie_word_embeddings=False)
    write_random(Qwen2ForCausalLM, config, path, seed=0)
    tensors = _with_small_layers(load_file(path / _WEIGHTS))
    width = SIZES["hidden_size"]
    prefix = "model.mtp_layers.0."
    for name, tensor in list(tensors.items()):
        if name.startswith("model.layers.0."):
            tensors[prefix + name.removeprefix("model.layers.0.")] = tensor.clone()
    noise = 0.01 * torch.randn(width, width, generator=torch.Generator().manual_seed(3))
    tensors[prefix + "input_proj.weight"] = torch.cat([noise, torch.eye(width)], dim=1).half()
    for name in ("token_layernorm", "hidden_layernorm"):
        tensors[f"{prefix}{name}.weight"] = torch.ones(width).half()
    tensors[prefix + "final_layernorm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, path / _WEIGHTS, {"format": "pt"})
    fields = json.loads((path / "config.json").read_text())
    fields |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(fields))
    return path


def write_llama(path: Path, dtype: torch.dtype = torch.float16, **changes: int) -> Path:
    """Write the model alone."""
    config = LlamaConfig(**SIZES | changes, tie_word_embeddings=False)
    write_random(LlamaForCausalLM, config, path, seed=0, dtype=dtype)
    save_file(_with_small_layers(load_file(path / _WEIGHTS)), path / _WEIGHTS, {"format": "pt"})
    return path


def write_repetitive_llama(path: Path) -> Path:
    """Write the model alone, with 40 tokens far more likely than all others, so that generated text repeats itself."""
    write_llama(path)
    tensors = load_file(path / _WEIGHTS)
    head = 0.2 * tensors["lm_head.weight"]
    head[_COMMON] = tensors["lm_head.weight"][_COMMON]
    save_file(tensors | {"lm_head.weight": head}, path / _WEIGHTS, {"format": "pt"})
    return path


def _with_small_layers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    outputs = ("o_proj.weight", "down_proj.weight")
    return {
        name: tensor * SMALL_SHARE if name.endswith(outputs) else tensor for name, tensor in tensors.items()
    }
