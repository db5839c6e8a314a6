"""Randomly initialised GPT-2 checkpoints in Hugging Face format, tokenizer included.

The weights are drawn with a standard deviation of 0.2 instead of GPT-2's 0.02: a narrow random model gives almost the
same greedy token everywhere, a wide one continues each prompt differently, so that a wrong cache shows in the text.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

END_OF_TEXT = "<|endoftext|>"

_TRAINING_TEXT = (
    "The rose grows beside the wall, and the wall keeps the wind away from the rose.",
    "In the morning the gardener brings water; in the evening she counts the new leaves.",
    "Nobody remembers who planted it, but everyone who passes stops to look at it for a while.",
    "When the winter comes the branches are cut back, and the ground around them is covered with straw.",
    "def grow(rose, days):\n    for day in range(days):\n        rose.water(1.5)\n    return rose.height\n",
    "Numbers such as 0, 1, 2, 10, 100 and 2048 appear here, and so do signs: () [] {} <> ? ! : ; ' \" - _ / \\",
    "Die Rose blüht im Juni. La rose fleurit en juin. La rosa fiorisce a giugno. 薔薇は六月に咲く。",
)


def write_random_gpt2(
    path: str | Path,
    *,
    n_layer: int = 2,
    n_embd: int = 128,
    n_head: int = 2,
    vocab_size: int = 512,
    n_positions: int = 1024,
    seed: int = 0,
    initializer_std: float = 0.2,
    dtype: torch.dtype = torch.float32,
    tie_word_embeddings: bool = True,
) -> Path:
    """Write config, weights (safetensors) and a byte-level BPE tokenizer to ``path``.

    Args:
        vocab_size: of the model; at least 257 (256 bytes and the end-of-text token). The tokenizer has at most as many.
        initializer_std: standard deviation of every weight matrix and embedding; biases and LayerNorm are random too.
        dtype: of the stored weights.

    Returns:
        The directory, created where needed.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    end_of_text_id = write_tokenizer(path, vocab_size=vocab_size, model_max_length=n_positions)
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=n_positions,
        n_embd=n_embd,
        n_layer=n_layer,
        n_head=n_head,
        initializer_range=initializer_std,
        bos_token_id=end_of_text_id,
        eos_token_id=end_of_text_id,
        tie_word_embeddings=tie_word_embeddings,
    )
    save_random(GPT2LMHeadModel, config, path, seed, dtype)
    return path


def write_random_gpt2_124m(path: str | Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random checkpoint with the shapes of GPT-2 124M: 12 layers, 12 heads, width 768, 50,257 tokens."""
    return write_random_gpt2(
        path,
        n_layer=12,
        n_embd=768,
        n_head=12,
        vocab_size=50_257,
        n_positions=1024,
        seed=seed,
        initializer_std=0.08,
        dtype=dtype,
    )


def write_tokenizer(path: Path, *, vocab_size: int, model_max_length: int) -> int:
    """Train a byte-level BPE tokenizer on a few lines of text, save it, and return the id of the end-of-text token."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        _TRAINING_TEXT,
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(path)
    return int(tokenizer.eos_token_id)


def save_random(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, path: Path, seed: int, dtype: torch.dtype
) -> None:
    """Save random weights of a model; norms and biases, too, are drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
        for name, parameter in model.named_parameters():
            # transformers starts them at 0 or 1, which would hide one that is forgotten or swapped.
            if name.endswith("bias"):
                parameter.data.normal_(0.0, 0.1)
            elif parameter.ndim == 1:
                parameter.data.normal_(1.0, 0.1)
    model.generation_config.eos_token_id = config.eos_token_id
    model.to(dtype).save_pretrained(path)
