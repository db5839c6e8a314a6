"""Tiny random checkpoints of Llama and its relatives, each with what sets its family apart, and a tokenizer.

Drawn wide, as those of ``tiny_checkpoint``; norms are not 1 and biases not 0, as transformers starts them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tests.support.tiny_checkpoint import save_random, write_tokenizer

VOCAB_SIZE = 500
WINDOW = 1024
NUM_EXPERTS = 8
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": WINDOW,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 256}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}

Case = tuple[type[PreTrainedModel], Callable[..., PreTrainedConfig], dict[str, Any]]
CASES: dict[str, Case] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama-biases": (
        LlamaForCausalLM,
        LlamaConfig,
        # Heads that are together wider than the hidden state.
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 32},
    ),
    "llama-yarn": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": YARN, "num_key_value_heads": 4}),
    # rose stretches the window, too, so that the longest prompts fit.
    "llama-linear": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": LINEAR, "max_position_embeddings": WINDOW // 4},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32, "rms_norm_eps": 1e-3}),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        # One of the layers has no experts.
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "num_experts": NUM_EXPERTS,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config, {"no_rope_layers": [1, 0, 1], "num_hidden_layers": 3}),
}


def write_checkpoint(
    path: Path, case: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> Path:
    """Write one of ``CASES``, with other fields of its config where ``changes`` say so, and return ``path``."""
    path.mkdir(parents=True, exist_ok=True)
    end_of_text = write_tokenizer(
        path, vocab_size=changes.get("vocab_size", VOCAB_SIZE), model_max_length=WINDOW
    )
    model_class, config_class, fields = CASES[case]
    config = config_class(**{**_SIZES, "eos_token_id": end_of_text, **fields, **changes})
    save_random(model_class, config, path, seed, dtype)
    return path


def change_json(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file; "absent" removes one."""
    fields = {**json.loads(path.read_text()), **changes} if path.is_file() else changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value != "absent"}))
