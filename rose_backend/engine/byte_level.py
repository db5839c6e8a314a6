"""Tokens of byte-level tokenizers, as GPT-2's, Llama 3's and Qwen's, as bytes: their text needs no library call."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose_backend.block_manager.array_types import IntArray, concatenate_ranges

_PIECES_AT_ONCE = 64
"""For 256 pieces of 20 tokens, arrays are so large that the system hands out and zeroes their memory anew in every
call, which takes longer than all the rest."""


class ByteLevelDecoder:
    """Token ids to text for one way to treat special tokens; to the letter what the tokenizer library returns.

    The library looks at one character of a token after the other, which takes several times as long. The bytes of a
    token are looked up in its vocabulary when they are first needed. Memory: about 80 bytes per token that was; after
    ``prepare`` 100 for each of the vocabulary.

    Args:
        backend: the library's tokenizer; ``is_byte_level`` of it.
        left_out: what special tokens that have no text are called; none to show all of them.
    """

    def __init__(self, backend: Any, left_out: Collection[str]) -> None:
        self._bytes_of = _TokenBytes(backend, left_out)

    def prepare(self) -> None:
        """Look all tokens up at once, which takes ``pieces_of`` a microsecond for each when it is first called."""
        _ = self._table

    def bytes_of(self, token_ids: Sequence[int]) -> bytes:
        """Return the bytes of a piece; those of pieces that follow each other are those of all. Ids without a token
        have none."""
        return b"".join(map(self._bytes_of.__getitem__, token_ids))

    def pieces_of(self, token_ids: NDArray[np.int32], counts: IntArray) -> list[bytes]:
        """Return the bytes of many pieces; for some dozens in a third of the time that ``bytes_of`` takes.

        Args:
            token_ids: ``[sum(counts)]``, those of a piece behind those of the piece before.
            counts: ``[N]``, tokens of each piece; may be 0.
        """
        data, starts, lengths = self._table
        ends = np.concatenate([[0], np.cumsum(counts)])
        pieces: list[bytes] = []
        for first in range(0, len(counts), _PIECES_AT_ONCE):
            bounds = ends[first : first + _PIECES_AT_ONCE + 1]
            known = np.minimum(token_ids[bounds[0] : bounds[-1]], len(starts) - 1)
            sizes = lengths[known]
            joined = data[concatenate_ranges(starts[known], sizes)].tobytes()
            places = np.concatenate([[0], np.cumsum(sizes)])[bounds - bounds[0]]
            pieces += [joined[start:end] for start, end in pairwise(places.tolist())]
        return pieces

    @cached_property
    def _table(self) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """The bytes of all tokens in a row, and where those of each start and how many they are, by id.

        The last entry, of no bytes, stands for ids without a token.
        """
        tokens = [*self._bytes_of.fill(), b""]
        lengths = np.array([len(token) for token in tokens], np.int64)
        return np.frombuffer(b"".join(tokens), np.uint8), np.cumsum(lengths) - lengths, lengths

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
        if token is None:
            # Not kept: there are two thousand million such ids, and whoever may ask for any of them would fill memory.
            return b""
        data = self[token_id] = self._find(token)
        return data

    def fill(self) -> list[bytes]:
        """Look all tokens up; returns those of each id up to the largest."""
        token_of = {token_id: token for token, token_id in self._backend.get_vocab().items()}
        self.update((token_id, self._find(token)) for token_id, token in token_of.items())
        return [self.get(token_id, b"") for token_id in range(max(token_of, default=-1) + 1)]

    def _find(self, token: str) -> bytes:
        if token in self._left_out:
            return b""
        try:
            return bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:  # it was added to the vocabulary as it is
            return token.encode()


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
