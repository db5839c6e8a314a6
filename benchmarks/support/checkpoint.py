"""The checkpoint a benchmark runs on: one that is given, or random weights with the shapes of GPT-2 124M.

transformers is imported late: what it takes is no part of ``--help``.
"""

from __future__ import annotations

import contextlib
import itertools
import string
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"


@contextlib.contextmanager
def checkpoint(model: str | None) -> Iterator[str]:
    """Return ``model``, or for None a random checkpoint with the shapes of GPT-2 124M, made for this run."""
    if model is not None:
        yield model
        return
    with tempfile.TemporaryDirectory() as directory:
        yield str(write_checkpoint(Path(directory)))


def write_checkpoint(folder: Path) -> Path:
    """Write random weights with the shapes of GPT-2 124M, and a tokenizer that has a text for each of 50,257 tokens."""
    from transformers import AutoConfig

    from tests.support.tiny_checkpoint import write_random_gpt2_124m

    write_random_gpt2_124m(folder)
    write_tokenizer(folder, AutoConfig.from_pretrained(folder).vocab_size)
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer of ``vocab_size`` tokens without training one.

    Token 0 ends a text, then come the 256 bytes, then words of two letters, of three and of four. Random weights draw
    from the whole vocabulary: with a small trained tokenizer most tokens would have no text, and no engine would have
    any text to make.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([END_OF_TEXT, *alphabet])}
    merges: list[tuple[str, str]] = []
    for length in (2, 3, 4):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            if len(vocab) == vocab_size:
                break
            word = "".join(letters)
            vocab[word] = len(vocab)
            merges.append((word[:-1], word[-1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)


@dataclass(frozen=True)
class ModelFacts:
    """What a benchmark has to know of a model."""

    vocab_size: int
    max_model_len: int
    kv_elements_per_token: int
    """Keys and values of one token, over all layers."""


def model_facts(model: str) -> ModelFacts:
    """Read a checkpoint's configuration."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelFacts(
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        kv_elements_per_token=2 * config.num_hidden_layers * num_kv_heads * head_size,
    )
