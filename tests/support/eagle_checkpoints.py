"""Random EAGLE-3 heads, with the config and the tensors of those that are published for Llama 3.1 8B and Qwen3 8B."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.llama_checkpoints import write_checkpoint

_FROM_MODEL = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "rms_norm_eps", "vocab_size", "bos_token_id", "eos_token_id", "dtype"),
)


def write_eagle3_head(path: Path, model: Path, *, draft_vocab_size: int, std: float, **changes: Any) -> Path:
    """Write a head of one layer for the model in a folder, and return ``path``.

    Args:
        draft_vocab_size: tokens that the head knows, drawn from the model's.
        std: standard deviation of matrices; norms are drawn around 1.
        changes: other fields of its config, such as ``eagle_aux_hidden_state_layer_ids``.
    """
    of_model = json.loads((model / "config.json").read_text())
    config = {name: of_model[name] for name in _FROM_MODEL if name in of_model} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "draft_vocab_size": draft_vocab_size,
        **changes,
    }
    width, inner, vocab_size = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config.get("head_dim") or width // heads
    num_layers = len(changes.get("eagle_aux_hidden_state_layer_ids", (1, 2, 3)))
    matrices = {
        "fc": (width, num_layers * width),
        "midlayer.self_attn.q_proj": (heads * head_size, 2 * width),
        "midlayer.self_attn.k_proj": (kv_heads * head_size, 2 * width),
        "midlayer.self_attn.v_proj": (kv_heads * head_size, 2 * width),
        "midlayer.self_attn.o_proj": (width, heads * head_size),
        "midlayer.mlp.gate_proj": (inner, width),
        "midlayer.mlp.up_proj": (inner, width),
        "midlayer.mlp.down_proj": (width, inner),
        "lm_head": (draft_vocab_size, width),
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    random = torch.Generator().manual_seed(3)
    dtype = getattr(torch, str(of_model["dtype"]))
    tensors = {
        f"{name}.weight": torch.empty(shape).normal_(0.0, std, generator=random).to(dtype)
        for name, shape in matrices.items()
    }
    for name in (*(f"midlayer.{norm}" for norm in norms), "norm"):
        tensors[f"{name}.weight"] = torch.empty(width).normal_(1.0, 0.1, generator=random).to(dtype)
    known = torch.randperm(vocab_size, generator=random)[:draft_vocab_size].sort().values
    tensors["d2t"] = known - torch.arange(draft_vocab_size)
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, known, True)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_right_pair(path: Path, *, share: float, vocab_size: int) -> tuple[Path, Path]:
    """Write a model that says the same after the same token, mostly, and a head that knows what; return both.

    The model is its embedding and its LM head, but for ``share`` of what its layers add. The head's attention finds
    the places with the newest token, as queries and keys are that token alone, and passes its embedding on.

    Args:
        share: with 0 the head is right about every greedy token; the larger it is, the more often it is wrong.
    """
    model = write_checkpoint(
        path / "model", "llama", vocab_size=vocab_size, num_hidden_layers=4, num_key_value_heads=4
    )
    file = model / "model.safetensors"
    of_model = load_file(file)
    for name in of_model:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            of_model[name] *= share
    # All tokens are as long, in each head: none but the token itself is as near to it.
    of_model["model.embed_tokens.weight"] = 0.2 * of_model["model.embed_tokens.weight"].sign()
    save_file(of_model, file, {"format": "pt"})
    head = write_eagle3_head(
        path / "head",
        model,
        draft_vocab_size=vocab_size,
        std=0.2,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        norm_before_residual=True,
    )
    file = head / "model.safetensors"
    tensors = load_file(file)
    width = tensors["norm.weight"].shape[0]
    identity, nothing = torch.eye(width), torch.zeros(width, width)
    for name, scale in (("q_proj", 10.0), ("k_proj", 10.0), ("v_proj", 1.0)):
        tensors[f"midlayer.self_attn.{name}.weight"] = torch.cat([scale * identity, nothing], dim=1)
    tensors["midlayer.self_attn.o_proj.weight"] = identity.clone()
    tensors["midlayer.input_layernorm.weight"] = torch.ones(width)
    tensors["midlayer.hidden_norm.weight"] = torch.zeros(width)
    tensors["midlayer.mlp.down_proj.weight"].zero_()
    tensors["norm.weight"] = of_model["model.norm.weight"].clone()
    tensors["lm_head.weight"] = of_model["lm_head.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    return model, head


def write_eagle3_drafter(model: Path, num_tokens: int, **changes: Any) -> dict[str, Any]:
    """Write a head for a small model, which knows four of five tokens, and return vLLM's ``speculative_config``."""
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    head = write_eagle3_head(model / "head", model, draft_vocab_size=4 * vocab_size // 5, std=0.2, **changes)
    drafter = {"method": "eagle3", "model": str(head), "num_speculative_tokens": num_tokens}
    # Model runner V1, which CPUs have, gives a drafter another backend than the model's.
    return drafter if torch.cuda.is_available() else drafter | {"attention_backend": "ROSE"}
