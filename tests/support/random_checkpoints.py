"""Randomly initialised checkpoints of the shapes that models in use have, small enough to start in seconds.

Like those of ``tiny_checkpoint``, their weights are wide: one other token early in a prompt changes every third to
second greedy token that follows it by hundreds of places. Stored in float16, or bfloat16 where that is said, so that
both sides of a comparison in half precision have the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.support.tiny_checkpoint import save_random, write_random_gpt2_124m, write_tokenizer

VOCAB_SIZE = 4096
MAX_MODEL_LEN = 2048
SLIDING_WINDOW = 40
"""Tokens that windowed layers attend to. It begins inside a block of 16 more often than not."""
LORA_MODULES = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
Writer = Callable[..., Path]
"""Writes a checkpoint to a path, and returns it; may be given a seed."""
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.05,
}


_WIDE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
_CONV, _FULL, _LINEAR, _MAMBA, _SLIDING = (
    "conv",
    "full_attention",
    "linear_attention",
    "mamba",
    "sliding_attention",
)
_WITHOUT_HEAD_DIM = {name: size for name, size in _SMALL.items() if name != "head_dim"}
_DELTA_NETS = {
    "head_dim": 256,
    "num_hidden_layers": 4,
    "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL],
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def _writer(
    model_class: type[PreTrainedModel],
    config_class: Callable[..., PreTrainedConfig],
    fields: dict[str, Any],
    dtype: torch.dtype = torch.float16,
) -> Writer:
    def write(path: str | Path, seed: int = 0) -> Path:
        return write_random(model_class, config_class(**fields), Path(path), seed, dtype)

    return write


# As Llama's: rotary positions, RMSNorm, 8 query heads of 64 on 2 K/V heads.
write_random_llama = _writer(
    LlamaForCausalLM,
    LlamaConfig,
    _WITHOUT_HEAD_DIM | _WIDE | {"num_attention_heads": 8, "tie_word_embeddings": False},
)
# As Qwen3's: queries and keys normed, 4 query heads of 128 on 2 K/V heads.
write_random_qwen3 = _writer(
    Qwen3ForCausalLM, Qwen3Config, _SMALL | _WIDE | {"head_dim": 128, "tie_word_embeddings": True}
)
# As Qwen3 30B A3B's: a Qwen3 with experts. Each token takes all 4, so that no rounding decides which.
write_random_qwen3_moe = _writer(
    Qwen3MoeForCausalLM,
    Qwen3MoeConfig,
    _SMALL
    | {
        "num_hidden_layers": 3,
        "num_experts": 4,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    },
)
# As Mistral 7B v0.1's: a Llama of 3 layers, all of them with a sliding window.
write_random_mistral = _writer(
    MistralForCausalLM, MistralConfig, _SMALL | {"num_hidden_layers": 3, "sliding_window": SLIDING_WINDOW}
)
# As Gemma 3's for text: one of 4 layers has no window, and turns by another frequency.
write_random_gemma3 = _writer(
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    _SMALL
    | {
        "num_hidden_layers": 4,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING],
        "query_pre_attn_scalar": 64,
    },
)
# As Gemma 4's for text: one of 4 layers has no window, and heads of 512 instead of 64.
write_random_gemma4 = _writer(
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    _SMALL
    | {
        "num_hidden_layers": 4,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL],
        "global_head_dim": 512,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    },
)
_GPT_OSS = {"num_hidden_layers": 4, "sliding_window": SLIDING_WINDOW, "num_local_experts": 4}
# As gpt-oss': every other of 4 layers has a window, all have sinks; 2 of 4 experts a token.
write_random_gpt_oss = _writer(
    GptOssForCausalLM, GptOssConfig, _SMALL | _GPT_OSS | {"num_experts_per_tok": 2}
)
# 4 layers with the shapes of Gemma 3 4B's text model, one without a window. vLLM refuses it in float16.
write_random_gemma3_4b = _writer(
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    _SMALL
    | {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "num_hidden_layers": 4,
        "sliding_window": 1024,
        "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING],
        "initializer_range": 0.03,
    },
    torch.bfloat16,
)
# 4 layers with the shapes of gpt-oss 20B's, but for its experts. In bfloat16, as FlashAttention's sinks are. Each token
# takes all of 4 experts: where it takes some of many, rounding decides which, and half precision cannot be held to
# float32.
write_random_gpt_oss_20b = _writer(
    GptOssForCausalLM,
    GptOssConfig,
    _SMALL
    | _GPT_OSS
    | {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "num_experts_per_tok": 4,
        "initializer_range": 0.02,
    },
    torch.bfloat16,
)
# As LFM2's: two of six layers attend, the others convolve over three tokens.
write_random_lfm2 = _writer(
    Lfm2ForCausalLM,
    Lfm2Config,
    _WITHOUT_HEAD_DIM
    | {
        "num_hidden_layers": 6,
        "layer_types": [_CONV, _FULL, _CONV, _CONV, _FULL, _CONV],
        "conv_L_cache": 3,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        # vLLM reads these, as the published checkpoints have them.
        **dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), _SMALL["hidden_size"]),
    },
)
# As Granite 4 H's: one of four layers attends, the others are Mamba 2 with 8 heads.
write_random_granite_hybrid = _writer(
    GraniteMoeHybridForCausalLM,
    GraniteMoeHybridConfig,
    _WITHOUT_HEAD_DIM
    | {
        "num_hidden_layers": 4,
        "layer_types": [_MAMBA, _MAMBA, "attention", _MAMBA],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 512,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 32,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 64,
        "mamba_expand": 2,
        "attention_multiplier": 0.125,
        "position_embedding_type": "rope",
    },
)
# As Qwen3.5's for text: one of four layers attends, the others are gated delta nets.
write_random_qwen3_5 = _writer(Qwen3_5ForCausalLM, Qwen3_5TextConfig, _SMALL | _DELTA_NETS, torch.bfloat16)
# As Qwen3-Next's: layers as Qwen3.5's, and experts.
write_random_qwen3_next = _writer(
    Qwen3NextForCausalLM,
    Qwen3NextConfig,
    _SMALL
    | _DELTA_NETS
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    torch.bfloat16,
)


def write_random_idefics3(path: str | Path, seed: int = 0) -> Path:
    """Write a checkpoint as Idefics3's and SmolVLM's, for text and images: a small Llama, and 2 layers of vision.

    Without what prepares images for it.
    """
    text = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_MODEL_LEN,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.05,
    )
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 16,
    }
    config = Idefics3Config(
        text_config=text, vision_config=vision, image_token_id=VOCAB_SIZE - 1, scale_factor=2, pad_token_id=0
    )
    return write_random(Idefics3ForConditionalGeneration, config, Path(path), seed)


def write_random_gpt2_124m_half(path: str | Path) -> Path:
    """Write a checkpoint with the shapes of GPT-2 124M."""
    return write_random_gpt2_124m(path, dtype=torch.float16)


WRITERS: dict[str, Writer] = {
    "GPT-2": write_random_gpt2_124m_half,
    "Llama": write_random_llama,
    "Qwen3": write_random_qwen3,
}


def write_random(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    path: Path,
    seed: int,
    dtype: torch.dtype = torch.float16,
) -> Path:
    """Write a tokenizer, and random weights of a model."""
    path.mkdir(parents=True, exist_ok=True)
    end_of_text_id = write_tokenizer(path, vocab_size=VOCAB_SIZE, model_max_length=MAX_MODEL_LEN)
    config.bos_token_id = config.eos_token_id = end_of_text_id
    save_random(model_class, config, path, seed, dtype)
    return path


def write_random_adapter(
    model_path: Path, path: Path, *, rank: int = 8, seed: int = 1, with_head: bool = False
) -> Path:
    """Write a LoRA adapter for a checkpoint of this module, and below ``path / "merged"`` what the two make together.

    Args:
        with_head: adapt the embedding and ``lm_head``, too, which must not be tied.

    Returns:
        The folder of the merged checkpoint.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    adapted = {
        f"model.layers.{index}.{part}.{name}": getattr(getattr(layer, part), name).weight
        for index, layer in enumerate(model.model.layers)
        for part, names in LORA_MODULES.items()
        for name in names
    }
    if with_head:
        adapted["lm_head"] = model.lm_head.weight
    for name, weight in adapted.items():
        down = (0.1 * torch.randn(rank, weight.shape[1], generator=random)).half()
        up = (0.1 * torch.randn(weight.shape[0], rank, generator=random)).half()
        stem = f"base_model.model.{name}"
        tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"] = down, up
        # Scaled by alpha / rank.
        weight.data += up.float() @ down.float()
    if with_head:
        embedding = model.model.embed_tokens.weight
        down = (0.1 * torch.randn(rank, embedding.shape[0], generator=random)).half()
        up = (0.1 * torch.randn(embedding.shape[1], rank, generator=random)).half()
        stem = "base_model.model.model.embed_tokens.lora_embedding_"
        tensors[f"{stem}A"], tensors[f"{stem}B"] = down, up
        embedding.data += down.float().t() @ up.float().t()
    save_adapter(tensors, path, rank)
    model.save_pretrained(path / "merged")
    return path / "merged"


def save_adapter(tensors: dict[str, torch.Tensor], path: Path, rank: int) -> None:
    """Write a LoRA adapter of ``LORA_MODULES``."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    modules = [*(name for names in LORA_MODULES.values() for name in names), "lm_head", "embed_tokens"]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
