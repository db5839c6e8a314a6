"""Randomly initialised checkpoints of the shapes that models in use have, small enough to start in seconds.

Like those of ``tiny_checkpoint``, their weights are wide: one other token early in a prompt changes every third to
second greedy token that follows it by hundreds of places. Stored in float16, or bfloat16 where that is said, so that
both sides of a comparison in half precision have the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

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
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.support.tiny_checkpoint import write_random_gpt2_124m, write_tokenizer

VOCAB_SIZE = 4096
MAX_MODEL_LEN = 2048
SLIDING_WINDOW = 40
"""Tokens that windowed layers attend to. It begins inside a block of 16 more often than not."""
LORA_MODULES = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("down_proj",)}
_SMALL = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.05,
}


def write_random_llama(path: str | Path, seed: int = 0) -> Path:
    """Write a checkpoint as Llama's: rotary positions, RMSNorm, 8 query heads of 64 on 2 K/V heads, 4 layers."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_MODEL_LEN,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=0.05,
        tie_word_embeddings=False,
    )
    return write_random(LlamaForCausalLM, config, Path(path), seed)


def write_random_qwen3(path: str | Path, seed: int = 0) -> Path:
    """Write a checkpoint as Qwen3's: queries and keys normed, 4 query heads of 128 on 2 K/V heads, 4 layers."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_MODEL_LEN,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        initializer_range=0.05,
        tie_word_embeddings=True,
    )
    return write_random(Qwen3ForCausalLM, config, Path(path), seed)


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


def write_random_mistral(path: str | Path, seed: int = 0) -> Path:
    """Write a checkpoint as Mistral 7B v0.1's: a Llama of 3 layers, all of them with a sliding window."""
    config = MistralConfig(**_SMALL, num_hidden_layers=3, sliding_window=SLIDING_WINDOW)
    return write_random(MistralForCausalLM, config, Path(path), seed)


def write_random_gemma3(path: str | Path, seed: int = 0) -> Path:
    """Write a checkpoint as Gemma 3's for text: one of 4 layers has no window, and turns by another frequency."""
    sliding, full = "sliding_attention", "full_attention"
    config = Gemma3TextConfig(
        **_SMALL,
        num_hidden_layers=4,
        sliding_window=SLIDING_WINDOW,
        layer_types=[sliding, sliding, full, sliding],
        query_pre_attn_scalar=64,
    )
    return write_random(Gemma3ForCausalLM, config, Path(path), seed)


def write_random_gemma4(path: str | Path, seed: int = 0) -> Path:
    """Write a checkpoint as Gemma 4's for text: one of 4 layers has no window, and heads of 512 instead of 64."""
    sliding, full = "sliding_attention", "full_attention"
    config = Gemma4TextConfig(
        **_SMALL,
        num_hidden_layers=4,
        sliding_window=SLIDING_WINDOW,
        layer_types=[sliding, sliding, sliding, full],
        global_head_dim=512,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
    )
    return write_random(Gemma4ForCausalLM, config, Path(path), seed)


def write_random_gpt_oss(path: str | Path, seed: int = 0) -> Path:
    """Write a checkpoint as gpt-oss': every other of 4 layers has a window, all have sinks; 2 of 4 experts a token."""
    config = GptOssConfig(
        **_SMALL,
        num_hidden_layers=4,
        sliding_window=SLIDING_WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return write_random(GptOssForCausalLM, config, Path(path), seed)


def write_random_gemma3_4b(path: str | Path, seed: int = 0) -> Path:
    """Write 4 layers with the shapes of Gemma 3 4B's text model, one without a window. vLLM refuses it in float16."""
    sliding, full = "sliding_attention", "full_attention"
    config = Gemma3TextConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_MODEL_LEN,
        hidden_size=2560,
        intermediate_size=10240,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        query_pre_attn_scalar=256,
        num_hidden_layers=4,
        sliding_window=1024,
        layer_types=[sliding, sliding, full, sliding],
        initializer_range=0.03,
    )
    return write_random(Gemma3ForCausalLM, config, Path(path), seed, dtype=torch.bfloat16)


def write_random_gpt_oss_20b(path: str | Path, seed: int = 0) -> Path:
    """Write 4 layers with the shapes of gpt-oss 20B's, but for its experts. In bfloat16, as FlashAttention's sinks are.

    Each token takes all of 4 experts: where it takes some of many, rounding decides which, and half precision cannot be
    held to float32.
    """
    config = GptOssConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_MODEL_LEN,
        hidden_size=2880,
        intermediate_size=2880,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_hidden_layers=4,
        sliding_window=128,
        num_local_experts=4,
        num_experts_per_tok=4,
        initializer_range=0.02,
    )
    return write_random(GptOssForCausalLM, config, Path(path), seed, dtype=torch.bfloat16)


def write_random_lfm2(path: str | Path, seed: int = 0) -> Path:
    """Write a checkpoint as LFM2's: two of six layers attend, the others convolve over three tokens."""
    conv, full = "conv", "full_attention"
    config = Lfm2Config(
        **{key: value for key, value in _SMALL.items() if key != "head_dim"},
        num_hidden_layers=6,
        layer_types=[conv, full, conv, conv, full, conv],
        conv_L_cache=3,
        block_multiple_of=16,
        block_ffn_dim_multiplier=1.0,
        # vLLM reads these, as the published checkpoints have them.
        block_dim=_SMALL["hidden_size"],
        conv_dim=_SMALL["hidden_size"],
        conv_dim_out=_SMALL["hidden_size"],
    )
    return write_random(Lfm2ForCausalLM, config, Path(path), seed)


def write_random_granite_hybrid(path: str | Path, seed: int = 0) -> Path:
    """Write a checkpoint as Granite 4 H's: one of four layers attends, the others are Mamba 2 with 8 heads."""
    config = GraniteMoeHybridConfig(
        **{key: value for key, value in _SMALL.items() if key != "head_dim"},
        num_hidden_layers=4,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=512,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_d_state=32,
        mamba_n_groups=1,
        mamba_chunk_size=64,
        mamba_expand=2,
        attention_multiplier=0.125,
        position_embedding_type="rope",
    )
    return write_random(GraniteMoeHybridForCausalLM, config, Path(path), seed)


def write_random_qwen3_5(path: str | Path, seed: int = 0) -> Path:
    """Write a checkpoint as Qwen3.5's for text: one of four layers attends, the others are gated delta nets."""
    linear = "linear_attention"
    config = Qwen3_5TextConfig(
        **_SMALL | {"head_dim": 256},
        num_hidden_layers=4,
        layer_types=[linear, linear, linear, "full_attention"],
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    return write_random(Qwen3_5ForCausalLM, config, Path(path), seed, dtype=torch.bfloat16)


def write_random_qwen3_next(path: str | Path, seed: int = 0) -> Path:
    """Write a checkpoint as Qwen3-Next's: layers as Qwen3.5's, and experts."""
    linear = "linear_attention"
    config = Qwen3NextConfig(
        **_SMALL | {"head_dim": 256},
        num_hidden_layers=4,
        layer_types=[linear, linear, linear, "full_attention"],
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
    )
    return write_random(Qwen3NextForCausalLM, config, Path(path), seed, dtype=torch.bfloat16)


def write_random_gpt2_124m_half(path: str | Path) -> Path:
    """Write a checkpoint with the shapes of GPT-2 124M."""
    return write_random_gpt2_124m(path, dtype=torch.float16)


WRITERS: dict[str, Callable[[Path], Path]] = {
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
        for name, parameter in model.named_parameters():
            # They start at 0 or 1, which would hide one that is forgotten or swapped.
            if name.endswith("bias"):
                parameter.data.normal_(0.0, 0.1)
            elif parameter.ndim == 1:
                parameter.data.normal_(1.0, 0.1)
    model.generation_config.eos_token_id = end_of_text_id
    model.to(dtype).save_pretrained(path)
    return path


def write_random_adapter(model_path: Path, path: Path, *, rank: int = 8, seed: int = 1) -> Path:
    """Write a LoRA adapter for a checkpoint of this module, and below ``path / "merged"`` what the two make together.

    Returns:
        The folder of the merged checkpoint.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        for part, names in LORA_MODULES.items():
            for name in names:
                weight = getattr(getattr(layer, part), name).weight
                down = (0.1 * torch.randn(rank, weight.shape[1], generator=random)).half()
                up = (0.1 * torch.randn(weight.shape[0], rank, generator=random)).half()
                stem = f"base_model.model.model.layers.{index}.{part}.{name}"
                tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"] = down, up
                # Scaled by alpha / rank.
                weight.data += up.float() @ down.float()
    save_adapter(tensors, path, rank)
    model.save_pretrained(path / "merged")
    return path / "merged"


def save_adapter(tensors: dict[str, torch.Tensor], path: Path, rank: int) -> None:
    """Write a LoRA adapter of ``LORA_MODULES``."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    modules = [name for names in LORA_MODULES.values() for name in names]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
