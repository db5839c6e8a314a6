"""Tokens of byte-level tokenizers, as GPT-2's, Llama 3's and Qwen's, as bytes: their text needs no library call."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any


class ByteLevelDecoder:
    """Token ids to text for one way to treat special tokens; to the letter what the tokenizer library returns.

    The library looks at one character of a token after the other, which takes several times as long. The bytes of a
    token are looked up in its vocabulary when they are first needed. Memory: about 80 bytes per token that was.

    Args:
        backend: the library's tokenizer; ``is_byte_level`` of it.
        left_out: what special tokens that have no text are called; none to show all of them.
    """

    def __init__(self, backend: Any, left_out: Collection[str]) -> None:
        self._bytes_of = _TokenBytes(backend, left_out)

    def bytes_of(self, token_ids: Sequence[int]) -> bytes:
        """Return the bytes of a piece; those of pieces that follow each other are those of all. Ids without a token
        have none."""
        return b"".join(map(self._bytes_of.__getitem__, token_ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text."""
        return text_of(self.bytes_of(token_ids))


def text_of(data: bytes | bytearray) -> str:
    """Return what all bytes of a text say; those that are no valid UTF-8 become U+FFFD."""
    return data.decode("utf-8", "replace")


class _TokenBytes(dict[int, bytes]):
    """What each token stands for, filled as tokens come up."""

    def __init__(self, backend: Any, left_out: Collection[str]) -> None:
        super().__init__()
        self._backend = backend
        self._left_out = frozenset(left_out)

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None or token in self._left_out:
            data = b""
        else:
            try:
                data = bytes([_BYTE_OF_CHARACTER[character] for character in token])
            except KeyError:  # it was added to the vocabulary as it is
                data = token.encode()
        self[token_id] = data
        return data


def is_byte_level(backend: Any) -> bool:
    """Whether the text of tokens is the text of their bytes and of nothing else."""
    from tokenizers.decoders import ByteLevel

    return isinstance(backend.decoder, ByteLevel)


def special_tokens(backend: Any) -> list[str]:
    """Return what the special tokens are called."""
    return [token.content for token in backend.get_added_tokens_decoder().values() if token.special]


def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character of a token stands for.

    Bytes that are printable in Latin-1 stand for themselves. All others, in their order, are written as the characters
    from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
