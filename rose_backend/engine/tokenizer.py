"""Text to token ids and back, over a Hugging Face fast tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rose_backend.engine.decoding import ByteLevelDecoder, LibraryDecoder, TokenTexts, make_decoder
from rose_backend.engine.tokenizer_loading import TokenizerParts, load_tokenizer
from rose_backend.errors import RequestError

_SHORT_LENGTH = 8192
"""Characters whose conversion holds the interpreter lock for a few milliseconds at most."""
_CHARACTERS_AT_ONCE = 1 << 16
"""A long text is counted in pieces of that many."""
_UNSURE_TOKENS = 1024
"""Tokens of a piece that may be owed to the cuts, besides those of a cut token: half a word, where a whole one that is
long has a single token for unknown text; a space that is prepended."""


class Tokenizer:
    """The tokenizer in a model's directory, equal to transformers' ``AutoTokenizer`` of all files there.

    Decoding is the tokenizer library's own, or identical (``ByteLevelDecoder``), without transformers'
    clean-up of spaces.

    Args:
        source: the directory, which ``load_tokenizer`` then loads, or what was loaded.

    Raises:
        ModelError: there is no usable fast tokenizer.
    """

    def __init__(self, source: str | Path | TokenizerParts) -> None:
        parts = source if isinstance(source, TokenizerParts) else load_tokenizer(source)
        self._backend = parts.backend
        self._backend.encode_special_tokens = parts.splits_special_tokens
        self._decoders = {skips: make_decoder(self._backend, skips) for skips in (True, False)}
        self.token_texts = TokenTexts(self._backend, self._decoders[False])
        """What log-probabilities call a token."""
        self.max_token_length = max(map(len, self._backend.get_vocab()), default=1)
        """Characters of the longest token, as the vocabulary writes it."""
        self.special_tokens = parts.special_tokens
        """Texts of special tokens by name, ``eos_token`` for example; chat templates use them."""
        eos_token = parts.special_tokens.get("eos_token")
        self.eos_token_id: int | None = None if eos_token is None else self._backend.token_to_id(eos_token)
        """What the tokenizer's own configuration calls the end of a text."""
        self.chat_templates = parts.chat_templates
        """The model's own by name; the only one is called ``default``."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a prompt.

        Args:
            add_special_tokens: with whatever special tokens the tokenizer adds to a prompt.

        Raises:
            RequestError: the text holds code points that are not Unicode characters (lone surrogates).
        """
        _check_unicode(text)
        ids: list[int] = self._encoding(text, add_special_tokens).ids
        return ids

    def count_tokens(self, text: str, limit: int) -> tuple[int, int]:
        """Count the tokens of a long text from its start, up to ``limit``, without tokenizing the rest.

        Tokenized whole, 16 MiB may take 2 GiB of memory. The text is cut anywhere, which changes the tokens at a
        cut: enough are left out of the count that the text never has fewer tokens than were counted.

        Returns:
            A lower bound for the number of tokens in the first characters, and how many these are: all, unless the
            first number is above ``limit``.

        Raises:
            RequestError: as from ``encode``.
        """
        _check_unicode(text)
        num_unsure = _UNSURE_TOKENS + 4 * self.max_token_length  # a character is at most four tokens
        count = end = 0
        while end < len(text) and count <= limit:
            piece = text[end : end + _CHARACTERS_AT_ONCE]
            count += max(len(self._encoding(piece, False)) - num_unsure, 0)
            end += len(piece)
        return count, end

    def _encoding(self, text: str, add_special_tokens: bool) -> Any:
        if len(text) <= _SHORT_LENGTH:
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        # Unlike ``encode``, it works without the interpreter lock. Its results have no offsets and are freed at once.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding

    def prepare(self) -> None:
        """Build the tables for batch decoding now instead of in its first call."""
        for decoder in self._decoders.values():
            if isinstance(decoder, ByteLevelDecoder):
                decoder.prepare()

    def decoder(self, *, skip_special_tokens: bool = True) -> ByteLevelDecoder | LibraryDecoder:
        """Return what makes text of token ids, with or without special tokens."""
        return self._decoders[skip_special_tokens]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids`` alone; bytes that are no valid UTF-8 become U+FFFD."""
        return self._decoders[skip_special_tokens].decode(token_ids)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"prompt: not valid Unicode text ({error.reason})", parameter="prompt") from error
