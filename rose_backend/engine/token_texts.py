"""What log-probabilities call a token: its text, by vLLM's rules, and its bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rose_backend.engine.decoding import (
    REPLACEMENT,
    ByteLevelDecoder,
    LibraryDecoder,
    byte_fallback,
    text_behind,
)

MAX_TOKENS_BEFORE = 4
"""Tokens in front of one that are looked at for the rest of its character."""


class TokenTexts:
    """Texts and bytes of single tokens, special ones by their name.

    Args:
        backend: the library's tokenizer.
        decoder: of it, with special tokens.
    """

    def __init__(self, backend: Any, decoder: ByteLevelDecoder | LibraryDecoder) -> None:
        self._backend = backend
        self._decoder = decoder
        self._bytes = byte_fallback(backend) if isinstance(decoder, LibraryDecoder) else {}
        self._space = _space_marker(backend)
        # Log-probabilities name the same few tokens again and again.
        self._alone: dict[int, str] = {}

    def text(self, token_id: int, before: Sequence[int] = ()) -> str:
        """Return the text of a token.

        That of a part of a character is empty, but for the last part: there it is the character, with the other bytes
        of the tokens in front.

        Args:
            before: the ``MAX_TOKENS_BEFORE`` tokens in front of it, fewer at the beginning of an answer.
        """
        text = self._text_alone(token_id)
        if not text.endswith(REPLACEMENT):
            return text
        decode = self._decoder.decode
        for first in range(len(before) - 1, -1, -1):
            context = list(before[first:])
            whole = decode([*context, token_id])
            if whole.endswith(REPLACEMENT):
                continue
            # These have no text of their own.
            while context and decode(context[-1:]).endswith(REPLACEMENT):
                del context[-1]
            return text_behind(decode(context), whole)
        return ""

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's own bytes, also of a part of a character."""
        if isinstance(self._decoder, ByteLevelDecoder):
            return self._decoder.bytes_of([token_id])
        byte = self._bytes.get(token_id)
        return self._text_alone(token_id).encode() if byte is None else bytes([byte])

    def _text_alone(self, token_id: int) -> str:
        text = self._alone.get(token_id)
        if text is None:
            text = self._decoder.decode([token_id])
            if self._space is not None:
                # The decoder takes the space away from the first token that it sees.
                token = self._backend.id_to_token(token_id) or ""
                num_spaces = len(token) - len(token.lstrip(self._space))
                num_missing = num_spaces - (len(text) - len(text.lstrip(" ")))
                text = " " * num_missing + text
            self._alone[token_id] = text
        return text


def _space_marker(backend: Any) -> str | None:
    """Return the character that a Metaspace pre-tokenizer writes for a space; None without one."""
    if backend.pre_tokenizer is None:
        return None
    state = json.loads(backend.pre_tokenizer.__getstate__())
    for each in state.get("pretokenizers", [state]):
        if each["type"] == "Metaspace":
            marker: str = each["replacement"]
            return marker
    return None
