"""Tiny random checkpoints of the architectures that take pictures, with what prepares pictures for them.

All but Gemma 3's need torchvision, as vLLM's classes for these models do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.gpu_matrix.checkpoints import (
    DECAYS_SLOWLY,
    DELTA_NET,
    EXPERTS,
    GEMMA3,
    NORM_FROM_ZERO,
    SIZES,
    redraw,
)
from tests.support.random_checkpoints import VOCAB_SIZE, write_random
from tests.support.random_vision_checkpoints import (
    IMAGE_SIZES,
    VISION,
    VISION_TOKEN_IDS,
    VISION_TOKENS,
    write_random_qwen2_5_vl,
    write_random_qwen3_vl,
)

FIRST_TOKEN = VOCAB_SIZE - 4
"""Of four that stand for pictures."""
QWEN_PLACEHOLDER = (FIRST_TOKEN, FIRST_TOKEN + 1, FIRST_TOKEN + 2)
"""What stands for a picture in a prompt: its start, a placeholder, its end."""
MISTRAL_PLACEHOLDER = (FIRST_TOKEN,)
_QWEN3_5 = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        # A quarter of each head rotates.
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": False,
}


def write_qwen2_5_vl(path: Path) -> Path:
    """Write a checkpoint as Qwen2.5-VL's: a window in all layers of vision but one."""
    return _never_says_pictures(write_random_qwen2_5_vl(path))


def write_qwen3_vl(path: Path) -> Path:
    """Write a checkpoint as Qwen3-VL's: features of two of three vision layers enter the text's first layers."""
    return _never_says_pictures(write_random_qwen3_vl(path))


def write_qwen3_5(path: Path, has_experts: bool) -> Path:
    """Write a checkpoint as Qwen3.5's: three of four layers are gated delta nets; with experts as Qwen3.6 35B-A3B's."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    text = SIZES | DELTA_NET | _QWEN3_5
    if has_experts:
        text |= EXPERTS | {"shared_expert_intermediate_size": 128}
    blocks = {
        "depth": 2,
        "num_heads": 2,
        "out_hidden_size": 256,
        "initializer_range": 0.2,
        "num_position_embeddings": 64,
    }
    name = "Qwen3_5Moe" if has_experts else "Qwen3_5"
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=VISION | blocks, **VISION_TOKEN_IDS
    )
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    write_random(model_class, config, path, seed=0)
    # The norm of a delta net's output and those of vision multiply by their weights.
    redraw(path, {"linear_attn.norm.weight": 1.0, "merger.norm.weight": 1.0} | NORM_FROM_ZERO | DECAYS_SLOWLY)
    tokenizer = _with_tokens(path, VISION_TOKENS, {"image_token": VISION_TOKENS[1]})
    images = Qwen2VLImageProcessor(patch_size=14, merge_size=2, size=IMAGE_SIZES)
    videos = Qwen3VLVideoProcessor(patch_size=14, merge_size=2)
    Qwen3VLProcessor(images, tokenizer, video_processor=videos).save_pretrained(path)
    return _never_says_pictures(path)


def write_mistral3(path: Path) -> Path:
    """Write a checkpoint as Mistral Small 3's: Pixtral's vision, patches joined by fours, breaks at ends of lines."""
    from transformers import (
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        PixtralImageProcessor,
        PixtralProcessor,
    )

    vision = {
        "model_type": "pixtral",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 32,
        "image_size": 168,
        "patch_size": 14,
        "initializer_range": 0.2,
    }
    config = Mistral3Config(
        text_config=SIZES
        | {"model_type": "mistral", "head_dim": 128, "sliding_window": None, "tie_word_embeddings": False},
        vision_config=vision,
        image_token_index=FIRST_TOKEN,
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    write_random(Mistral3ForConditionalGeneration, config, path, seed=0)
    names = ("[IMG]", "[IMG_BREAK]", "[IMG_END]", "[IMG_UNUSED]")
    images = PixtralImageProcessor(patch_size={"height": 28, "width": 28}, size={"longest_edge": 168})
    PixtralProcessor(images, _with_tokens(path, names), patch_size=14, spatial_merge_size=2).save_pretrained(
        path
    )
    return _never_says_pictures(path)


def write_gemma3(path: Path) -> Path:
    """Write a checkpoint as Gemma 3's with vision, for a start with text alone: without what prepares pictures."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    }
    config = Gemma3Config(
        text_config=SIZES | GEMMA3,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=FIRST_TOKEN,
        boi_token_index=FIRST_TOKEN + 1,
        eoi_token_index=FIRST_TOKEN + 2,
    )
    write_random(Gemma3ForConditionalGeneration, config, path, seed=0, dtype=torch.bfloat16)
    return redraw(path, NORM_FROM_ZERO)


def _with_tokens(
    path: Path, names: Sequence[str], extra: dict[str, str] | None = None
) -> PreTrainedTokenizerBase:
    """Give the tokenizer of a checkpoint tokens of these names, the last ones of the vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    unused = [f"<|{index}|>" for index in range(len(tokenizer), VOCAB_SIZE - len(names))]
    tokenizer.add_tokens([*unused, *names], special_tokens=True)
    tokenizer.save_pretrained(path)
    return AutoTokenizer.from_pretrained(path, **({"extra_special_tokens": extra} if extra else {}))


def _never_says_pictures(path: Path) -> Path:
    """Give tokens that stand for pictures no chance to be generated: transformers would look for the picture."""
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    (head,) = (name for name in tensors if name.endswith("lm_head.weight"))
    tensors[head][FIRST_TOKEN:] = 0.0
    save_file(tensors, file, {"format": "pt"})
    return path
