"""Randomly initialised checkpoints of models that take images, with what prepares images for them.

An image is large and of random colours, and the encoder's weights are wide: another image changes what follows it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    AutoTokenizer,
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor

from tests.support.random_checkpoints import MAX_MODEL_LEN, VOCAB_SIZE, write_random

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


def write_random_paddleocr_vl(path: str | Path, seed: int = 0) -> Path:
    """Write a checkpoint as PaddleOCR-VL's, with what prepares images for it.

    As in Qwen2.5-VL and Qwen3-VL, an image has one token for each 28 x 28 pixels, and positions are rotary in three
    directions. Those two need torchvision to prepare images, this one does not.
    """
    rope = {"rope_type": "default", "rope_theta": 500_000.0, "mrope_section": [8, 12, 12]}
    text = VISION_TEXT | {"head_dim": 64, "rope_parameters": rope}
    vision = VISION | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 84}
    config = PaddleOCRVLConfig(text_config=text, vision_config=vision, **VISION_TOKEN_IDS)
    path = write_random(PaddleOCRVLForConditionalGeneration, config, Path(path), seed)
    images = PaddleOCRVLImageProcessorPil(patch_size=14, merge_size=2, size=IMAGE_SIZES)
    PaddleOCRVLProcessor(images, _add_vision_tokens(path)).save_pretrained(path)
    return path


def write_random_qwen2_5_vl(path: str | Path, seed: int = 0) -> Path:
    """Write a checkpoint as Qwen2.5-VL's, with what prepares images for it. Needs torchvision."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    path = write_random(Qwen2_5_VLForConditionalGeneration, qwen2_5_vl_config(), Path(path), seed)
    images = Qwen2VLImageProcessor(patch_size=14, merge_size=2, size=IMAGE_SIZES)
    videos = Qwen2VLVideoProcessor(patch_size=14, merge_size=2)
    Qwen2_5_VLProcessor(images, _add_vision_tokens(path), video_processor=videos).save_pretrained(path)
    return path


def qwen2_5_vl_config() -> Qwen2_5_VLConfig:
    """Return the configuration of ``write_random_qwen2_5_vl``."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
    blocks = {
        "depth": 2,
        "num_heads": 2,
        "out_hidden_size": 256,
        "initializer_range": 0.2,
        "window_size": 112,
    }
    return Qwen2_5_VLConfig(
        text_config=VISION_TEXT | {"rope_parameters": rope},
        vision_config=VISION | blocks | {"fullatt_block_indexes": [1]},
        **VISION_TOKEN_IDS,
    )


def write_random_qwen3_vl(path: str | Path, seed: int = 0) -> Path:
    """Write a checkpoint as Qwen3-VL's, with what prepares images for it. Needs torchvision."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    path = write_random(Qwen3VLForConditionalGeneration, qwen3_vl_config(), Path(path), seed)
    images = Qwen2VLImageProcessor(patch_size=14, merge_size=2, size=IMAGE_SIZES)
    videos = Qwen3VLVideoProcessor(patch_size=14, merge_size=2)
    Qwen3VLProcessor(images, _add_vision_tokens(path), video_processor=videos).save_pretrained(path)
    return path


def qwen3_vl_config() -> Qwen3VLConfig:
    """Return the configuration of ``write_random_qwen3_vl``."""
    rope = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    }
    blocks = {"depth": 3, "num_heads": 2, "out_hidden_size": 256, "initializer_range": 0.2}
    return Qwen3VLConfig(
        text_config=VISION_TEXT | {"head_dim": 64, "rope_parameters": rope},
        vision_config=VISION | blocks | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        **VISION_TOKEN_IDS,
    )


def _add_vision_tokens(path: Path) -> PreTrainedTokenizerBase:
    """Give the tokenizer of a checkpoint the tokens around images, with ``VISION_TOKEN_IDS``."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    unused = [f"<|{index}|>" for index in range(len(tokenizer), VOCAB_SIZE - len(VISION_TOKENS))]
    tokenizer.add_tokens([*unused, *VISION_TOKENS], special_tokens=True)
    tokenizer.save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path, extra_special_tokens={"image_token": "<|image_pad|>"})
    assert tokenizer.convert_tokens_to_ids(VISION_TOKENS[0]) == VOCAB_SIZE - len(VISION_TOKENS)
    return tokenizer
