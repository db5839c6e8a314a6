"""A tiny random checkpoint of each architecture that docs/models.md says works, with what sets its layout apart.

Drawn wide, as those of ``tests.support``: one other token early in a prompt changes what follows it.
Where a layer has experts, a token takes all of them: of more, rounding decides which, and nothing could be compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from tests.support.llama_checkpoints import LLAMA3
from tests.support.random_checkpoints import (
    MAX_MODEL_LEN,
    SLIDING_WINDOW,
    VOCAB_SIZE,
    write_random,
    write_random_adapter,
)

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.08,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
GEMMA: dict[str, Any] = {
    # Embeddings are scaled up and tied: with larger weights each token would be followed by itself.
    "initializer_range": 0.035,
    "num_hidden_layers": 4,
    "sliding_window": SLIDING_WINDOW,
    "head_dim": 256,
}
GEMMA3: dict[str, Any] = GEMMA | {
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
    "query_pre_attn_scalar": 256,
}
TEXT_MODELS: dict[str, dict[str, Any]] = {
    # Heads that are together wider than the hidden state; tied, as in 0.6B to 4B.
    "Qwen3ForCausalLM": {"head_dim": 128, "tie_word_embeddings": True},
    "Qwen3MoeForCausalLM": {"head_dim": 128, "norm_topk_prob": True, "tie_word_embeddings": False, **EXPERTS},
    # Biases of queries, keys and values are this family's own.
    "Qwen2ForCausalLM": {"tie_word_embeddings": True},
    "LlamaForCausalLM": {"head_dim": 128, "rope_parameters": LLAMA3, "tie_word_embeddings": False},
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma4ForCausalLM": GEMMA
    | {
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "global_head_dim": 512,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    },
    "GptOssForCausalLM": {
        "initializer_range": 0.05,
        "num_hidden_layers": 4,
        "head_dim": 64,
        "sliding_window": SLIDING_WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
    },
    # 7B v0.1: all layers have a window.
    "MistralForCausalLM": {"head_dim": 128, "sliding_window": SLIDING_WINDOW},
    # Phi-3 mini's heads of 96, and its window in all layers; queries, keys and values are one matrix.
    "Phi3ForCausalLM": {
        "hidden_size": 384,
        "num_key_value_heads": 4,
        "sliding_window": SLIDING_WINDOW,
        "original_max_position_embeddings": MAX_MODEL_LEN,
    },
    # Four factors, with which layers count as much as in published ones, whose embeddings are smaller.
    "GraniteForCausalLM": {
        "embedding_multiplier": 0.5,
        "attention_multiplier": 0.0625,
        "residual_multiplier": 0.5,
        "logits_scaling": 0.5,
        "tie_word_embeddings": True,
    },
    # A first layer without experts, then an expert that all tokens share; half of each head rotates; biases.
    "Glm4MoeForCausalLM": {
        "head_dim": 128,
        "use_qk_norm": True,
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    },
    # Mamba 2, experts, attention without positions; Nemotron 3 has no other layers.
    "NemotronHForCausalLM": {
        "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe", "mamba"],
        "head_dim": 128,
        "ssm_state_size": 128,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "n_groups": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 128,
        "routed_scaling_factor": 2.5,
    },
    # Every other layer without positions (published: every fourth).
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True},
}
NORM_FROM_ZERO = {"norm.weight": 0.0}
"""Norms that multiply by 1 + weight."""
DECAYS_SLOWLY = {"A_log": -4.0}
"""States that remember some 30 tokens; otherwise they would forget in three."""
VECTORS: dict[str, dict[str, float]] = {
    "Gemma3ForCausalLM": NORM_FROM_ZERO,
    # Attention is not scaled; published norms are as small.
    "Gemma4ForCausalLM": {"q_norm.weight": 0.25, "k_norm.weight": 0.25},
    "NemotronHForCausalLM": DECAYS_SLOWLY,
}
"""Mean of vectors with these ends of their names, where it is not 1, or 0 for biases."""
CONFIGS = {
    "Qwen3ForCausalLM": "Qwen3Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "Gemma4ForCausalLM": "Gemma4TextConfig",
}


def write_text_model(architecture: str, path: Path, dtype: torch.dtype, **changes: Any) -> Path:
    """Write one of ``TEXT_MODELS``, with other fields of its config where ``changes`` say so."""
    fields = SIZES | TEXT_MODELS[architecture] | changes
    if "layers_block_type" in fields:
        del fields["num_hidden_layers"]
    name = CONFIGS.get(architecture, architecture.removesuffix("ForCausalLM") + "Config")
    config: PreTrainedConfig = getattr(transformers, name)(**fields)
    write_random(getattr(transformers, architecture), config, path, seed=0, dtype=dtype)
    return redraw(path, VECTORS.get(architecture, {}))


def redraw(path: Path, means: dict[str, float]) -> Path:
    """Draw vectors of a checkpoint anew, around a mean for each end of a name; the first that fits counts."""
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    random = torch.Generator().manual_seed(7)
    for name, tensor in tensors.items():
        mean = next((mean for end, mean in means.items() if name.endswith(end)), None)
        if mean is not None and tensor.ndim == 1:
            drawn = mean + 0.1 * max(abs(mean), 0.3) * torch.randn(tensor.shape, generator=random)
            tensors[name] = drawn.to(tensor.dtype)
    save_file(tensors, file, {"format": "pt"})
    return path


def write_with_adapter(path: Path) -> Path:
    """Write a Llama and, in ``path / "adapter"``, a LoRA adapter, below which is what the two make together."""
    write_text_model("LlamaForCausalLM", path, torch.float16)
    write_random_adapter(path, path / "adapter")
    return path
