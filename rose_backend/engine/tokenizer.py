"""Text to token ids and back, over a Hugging Face fast tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rose_backend.errors import ModelError, RequestError

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model")


class Tokenizer:
    """The tokenizer that lies beside a model's weights.

    Decoding is the tokenizer library's own, without transformers' clean-up of spaces, so that the text of tokens read
    one by one equals the text of all of them.

    Args:
        directory: local directory with ``tokenizer.json`` or the files it can be made from; nothing is downloaded.

    Raises:
        ModelError: there is no usable fast tokenizer.
    """

    def __init__(self, directory: str | Path) -> None:
        self._backend = _load_backend(Path(directory))

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

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text; bytes that are no valid UTF-8 become U+FFFD."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_batch(self, batch: list[list[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each list; on several cores where the tokenizer library may use them."""
        texts: list[str] = self._backend.decode_batch(batch, skip_special_tokens=skip_special_tokens)
        return texts

    def decode_token(self, token_id: int) -> str:
        """Return the text of one token alone, special tokens by their name."""
        return self.decode([token_id], skip_special_tokens=False)


def _load_backend(directory: Path) -> Any:
    # Without any of them transformers would make up an empty tokenizer and say nothing.
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(f"{directory}: no tokenizer, one of {', '.join(_TOKENIZER_FILES)} is needed")
    # Imported here: it takes a second, and a mistaken model path should be reported before that.
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
