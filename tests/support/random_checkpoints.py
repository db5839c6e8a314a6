"""Randomly initialised checkpoints of the shapes that models in use have, small enough to start in seconds.

Like those of ``tiny_checkpoint``, their weights are wide: one other token early in a prompt changes every third to
second greedy token that follows it by hundreds of places. Stored in float16, so that both sides of a comparison in
half precision have the same weights.
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
    AutoTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor

from tests.support.tiny_checkpoint import write_random_gpt2_124m, write_tokenizer

VOCAB_SIZE = 4096
MAX_MODEL_LEN = 2048
VISION_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
IMAGE_IN_PROMPT = [VOCAB_SIZE - 4, VOCAB_SIZE - 3, VOCAB_SIZE - 2]
"""What stands for an image in a prompt: its start, a placeholder, its end."""
VISION_TOKEN_IDS: dict[str, Any] = {
    "vision_start_token_id": VOCAB_SIZE - 4,
    "image_token_id": VOCAB_SIZE - 3,
    "vision_end_token_id": VOCAB_SIZE - 2,
    "video_token_id": VOCAB_SIZE - 1,
    "tie_word_embeddings": False,
}
VISION_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "patch_size": 14,
    "spatial_merge_size": 2,
}
IMAGE_SIZES = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 36}
"""Pixels of an image, at least and at most."""
LORA_MODULES = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("down_proj",)}


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
    return _write(LlamaForCausalLM, config, Path(path), seed)


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
    return _write(Qwen3ForCausalLM, config, Path(path), seed)


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
    return _write(Idefics3ForConditionalGeneration, config, Path(path), seed)


def write_random_paddleocr_vl(path: str | Path, seed: int = 0) -> Path:
    """Write a checkpoint as PaddleOCR-VL's, with what prepares images for it.

    As in Qwen2.5-VL and Qwen3-VL, an image has one token for each 28 x 28 pixels, and positions are rotary in three
    directions. Those two need torchvision to prepare images, this one does not.
    """
    rope = {"rope_type": "default", "rope_theta": 500_000.0, "mrope_section": [8, 12, 12]}
    text = VISION_TEXT | {"head_dim": 64, "rope_parameters": rope}
    vision = VISION | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 84}
    config = PaddleOCRVLConfig(text_config=text, vision_config=vision, **VISION_TOKEN_IDS)
    path = _write(PaddleOCRVLForConditionalGeneration, config, Path(path), seed)
    images = PaddleOCRVLImageProcessorPil(patch_size=14, merge_size=2, size=IMAGE_SIZES)
    PaddleOCRVLProcessor(images, _add_vision_tokens(path)).save_pretrained(path)
    return path


def write_random_qwen2_5_vl(path: str | Path, seed: int = 0) -> Path:
    """Write a checkpoint as Qwen2.5-VL's, with what prepares images for it. Needs torchvision."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
    blocks = {
        "depth": 2,
        "num_heads": 2,
        "out_hidden_size": 256,
        "initializer_range": 0.2,
        "window_size": 112,
    }
    config = Qwen2_5_VLConfig(
        text_config=VISION_TEXT | {"rope_parameters": rope},
        vision_config=VISION | blocks | {"fullatt_block_indexes": [1]},
        **VISION_TOKEN_IDS,
    )
    path = _write(Qwen2_5_VLForConditionalGeneration, config, Path(path), seed)
    images = Qwen2VLImageProcessor(patch_size=14, merge_size=2, size=IMAGE_SIZES)
    videos = Qwen2VLVideoProcessor(patch_size=14, merge_size=2)
    Qwen2_5_VLProcessor(images, _add_vision_tokens(path), video_processor=videos).save_pretrained(path)
    return path


def write_random_qwen3_vl(path: str | Path, seed: int = 0) -> Path:
    """Write a checkpoint as Qwen3-VL's, with what prepares images for it. Needs torchvision."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    rope = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    }
    blocks = {"depth": 3, "num_heads": 2, "out_hidden_size": 256, "initializer_range": 0.2}
    config = Qwen3VLConfig(
        text_config=VISION_TEXT | {"head_dim": 64, "rope_parameters": rope},
        vision_config=VISION | blocks | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        **VISION_TOKEN_IDS,
    )
    path = _write(Qwen3VLForConditionalGeneration, config, Path(path), seed)
    images = Qwen2VLImageProcessor(patch_size=14, merge_size=2, size=IMAGE_SIZES)
    videos = Qwen3VLVideoProcessor(patch_size=14, merge_size=2)
    Qwen3VLProcessor(images, _add_vision_tokens(path), video_processor=videos).save_pretrained(path)
    return path


def _add_vision_tokens(path: Path) -> PreTrainedTokenizerBase:
    """Give the tokenizer of a checkpoint the tokens around images, with ``VISION_TOKEN_IDS``."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    unused = [f"<|{index}|>" for index in range(len(tokenizer), VOCAB_SIZE - len(VISION_TOKENS))]
    tokenizer.add_tokens([*unused, *VISION_TOKENS], special_tokens=True)
    tokenizer.save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path, extra_special_tokens={"image_token": "<|image_pad|>"})
    assert tokenizer.convert_tokens_to_ids(VISION_TOKENS[0]) == VOCAB_SIZE - len(VISION_TOKENS)
    return tokenizer


def write_random_gpt2_124m_half(path: str | Path) -> Path:
    """Write a checkpoint with the shapes of GPT-2 124M."""
    return write_random_gpt2_124m(path, dtype=torch.float16)


WRITERS: dict[str, Callable[[Path], Path]] = {
    "GPT-2": write_random_gpt2_124m_half,
    "Llama": write_random_llama,
    "Qwen3": write_random_qwen3,
}


def _write(model_class: type[PreTrainedModel], config: PreTrainedConfig, path: Path, seed: int) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    end_of_text_id = write_tokenizer(path, vocab_size=VOCAB_SIZE, model_max_length=MAX_MODEL_LEN)
    config.bos_token_id = config.eos_token_id = end_of_text_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                # They start at 1, which would hide one that is forgotten or swapped.
                parameter.data.normal_(1.0, 0.1)
    model.generation_config.eos_token_id = end_of_text_id
    model.half().save_pretrained(path)
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
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    modules = [name for names in LORA_MODULES.values() for name in names]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    model.save_pretrained(path / "merged")
    return path / "merged"
