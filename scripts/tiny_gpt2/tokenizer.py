"""The byte-level BPE tokenizer: trained on the same text, written in Hugging Face format."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of ``vocab_size`` entries; the last id is ``<|endoftext|>``, as in GPT-2.

    All 256 bytes are in the vocabulary, so every string can be encoded and decoded again unchanged.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer=trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the text gives {tokenizer.get_vocab_size()} tokens, {vocab_size} were asked for")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, output: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json into ``output``."""
    tokenizer.save(str(output / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (output / "tokenizer_config.json").write_text(text, encoding="utf-8")


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """Return the id of ``<|endoftext|>``."""
    token_id = tokenizer.token_to_id(END_OF_TEXT)
    if token_id is None:
        raise ValueError(f"the tokenizer has no {END_OF_TEXT}")
    return token_id


def encode_documents(tokenizer: Tokenizer, documents: list[str]) -> list[int]:
    """Return one id stream: ``<|endoftext|>`` before every document and once at the very end."""
    end_of_text = end_of_text_id(tokenizer)
    stream = [end_of_text]
    for encoding in tokenizer.encode_batch(documents):
        stream.extend(encoding.ids)
        stream.append(end_of_text)
    return stream


def common_words(documents: list[str], count: int) -> list[str]:
    """Return the ``count`` most frequent lower-case words, most frequent first (ties alphabetical)."""
    frequency = Counter(word for document in documents for word in _WORD.findall(document.lower()))
    return sorted(frequency, key=lambda word: (-frequency[word], word))[:count]
