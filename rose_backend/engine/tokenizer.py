"""Text to token ids and back, over a Hugging Face fast tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rose_backend.engine.byte_level import ByteLevelDecoder, is_byte_level, special_tokens
from rose_backend.errors import ModelError, RequestError
from rose_backend.models.weight_loading import read_json

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model")
_ADJUSTMENTS = ("add_bos_token", "add_eos_token", "add_prefix_space")
"""Fields of ``tokenizer_config.json`` by which transformers changes what ``tokenizer.json`` says."""


class Tokenizer:
    """The tokenizer that lies beside a model's weights.

    Decoding is the tokenizer library's own, or to the letter the same (``ByteLevelDecoder``), without transformers'
    clean-up of spaces, so that the text of tokens read one by one equals the text of all of them.

    Args:
        directory: local directory with ``tokenizer.json`` or the files it can be made from; nothing is downloaded.

    Raises:
        ModelError: there is no usable fast tokenizer.
    """

    def __init__(self, directory: str | Path) -> None:
        self._backend = _load_backend(Path(directory))
        self._byte_level: dict[bool, ByteLevelDecoder] = {}  # by skip_special_tokens
        if is_byte_level(self._backend):
            left_out = {True: special_tokens(self._backend), False: []}
            self._byte_level = {skips: ByteLevelDecoder(self._backend, left_out[skips]) for skips in left_out}
        # Log-probabilities name the same few tokens again and again.
        self._token_texts: dict[int, str] = {}
        self.max_token_length = max(map(len, self._backend.get_vocab()), default=1)
        """Characters of the longest token, as the vocabulary writes it."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt, with whatever special tokens the tokenizer adds to one.

        Raises:
            RequestError: the text holds code points that are not Unicode characters (lone surrogates).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt: not valid Unicode text ({error.reason})", parameter="prompt"
            ) from error
        ids: list[int] = self._backend.encode(text).ids
        return ids

    def prepare(self) -> None:
        """Make now what decoding many texts at once needs, and not when the first of them are made."""
        for decoder in self._byte_level.values():
            decoder.prepare()

    def byte_level(self, *, skip_special_tokens: bool = True) -> ByteLevelDecoder | None:
        """Return what decodes texts piece by piece; None where only the tokenizer library can decode."""
        return self._byte_level.get(skip_special_tokens)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text; bytes that are no valid UTF-8 become U+FFFD."""
        if (decoder := self._byte_level.get(skip_special_tokens)) is not None:
            return decoder.decode(token_ids)
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_batch(self, batch: list[list[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each list; on several cores where the tokenizer library may use them."""
        texts: list[str] = self._backend.decode_batch(batch, skip_special_tokens=skip_special_tokens)
        return texts

    def decode_token(self, token_id: int) -> str:
        """Return the text of one token alone, special tokens by their name."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text


def _load_backend(directory: Path) -> Any:
    # Without any of them transformers would make up an empty tokenizer and say nothing.
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(f"{directory}: no tokenizer, one of {', '.join(_TOKENIZER_FILES)} is needed")
    if (directory / "tokenizer.json").is_file() and not _is_adjusted(directory):
        return _read_backend(directory / "tokenizer.json")
    # Imported here: it takes seconds, and a mistaken model path should be reported before that.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), use_fast=True, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(f"{directory}: no usable tokenizer ({first_line})") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"{directory}: its tokenizer has no fast form (tokenizer.json); only fast ones are supported"
        )
    return backend


def _is_adjusted(directory: Path) -> bool:
    path = directory / "tokenizer_config.json"
    return path.is_file() and any(name in read_json(path) for name in _ADJUSTMENTS)


def _read_backend(path: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise ModelError(f"{path}: no usable tokenizer ({error})") from error
