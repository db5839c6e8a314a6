"""Token ids to text: all at once, or token by token, with the same text either way.

The text of an answer is what stands behind its prompt's whole characters. It is made token by token and never takes
back what it has shown, so it is the same in streams and in whole answers. Text that is made in one call could differ:
decoders of SentencePiece models make a run of byte tokens U+FFFD from its first to its last byte if it is not valid
UTF-8 as a whole, also where its beginning is, and was shown.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rose_backend.block_manager.block_pool import IntArray
from rose_backend.block_manager.sequence_table import concatenate_ranges

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What becomes of bytes that are no valid UTF-8."""
_MAX_UNFINISHED = 3
"""Bytes of a character that may be there while it is unfinished."""
_SHORT_LENGTH = 8192
"""Token ids whose conversion holds the interpreter lock for a few milliseconds at most."""


class TextStream(Protocol):
    """The text of one answer while its tokens arrive."""

    def extend(self, token_ids: Sequence[int]) -> str:
        """Return the text that ``token_ids`` add; an unfinished character is held back."""

    def close(self) -> str:
        """Return what was held back; unfinished characters become U+FFFD. Nothing may be added after it."""


def text_of(data: bytes | bytearray) -> str:
    """Return the text of UTF-8 bytes; those that are no valid UTF-8 become U+FFFD."""
    return data.decode("utf-8", "replace")


def text_behind(head: str, whole: str) -> str:
    """Return ``whole`` without the characters at its beginning that ``head`` begins with, too."""
    if whole.startswith(head):
        return whole[len(head) :]
    return whole[next(place for place in range(len(head)) if head[place] != whole[place : place + 1]) :]


def _num_unfinished(data: bytes) -> int:
    """Return how many bytes at the end of ``data`` may be the beginning of a character."""
    tail = data[-_MAX_UNFINISHED:]
    _, num_decoded = codecs.utf_8_decode(tail, "replace", False)
    return len(tail) - num_decoded


# Decoders that map each token to bytes: GPT-2's and its successors'.

_PIECES_AT_ONCE = 64
"""For 256 pieces of 20 tokens, the system maps and zeroes memory in every call: slower than all the rest."""


class ByteLevelDecoder:
    """Token ids to text, the same as the tokenizer library's and several times as fast, with or without special tokens.

    The bytes of a token are looked up when they are first needed. Memory: about 80 bytes per token that was; after
    ``prepare`` 100 for each token of the vocabulary.

    Args:
        backend: the library's tokenizer; ``is_byte_level`` of it.
        left_out: what special tokens that have no text are called; none to show all of them.
    """

    def __init__(self, backend: Any, left_out: Collection[str]) -> None:
        self._bytes_of = _TokenBytes(backend, left_out)

    def prepare(self) -> None:
        """Look all tokens up now: ``pieces_of`` would take a microsecond for each in its first call."""
        _ = self._table

    def bytes_of(self, token_ids: Sequence[int]) -> bytes:
        """Return the bytes of a piece; joined, those of all pieces are the whole text's. Unknown ids have none."""
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
        """The bytes of all tokens, and start and length of each by id; the last entry, empty, is for unknown ids."""
        tokens = [*self._bytes_of.fill(), b""]
        lengths = np.array([len(token) for token in tokens], np.int64)
        return np.frombuffer(b"".join(tokens), np.uint8), np.cumsum(lengths) - lengths, lengths

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text."""
        if len(token_ids) <= _SHORT_LENGTH:
            return text_of(self.bytes_of(token_ids))
        # Between two parts, other threads may take the interpreter lock.
        parts = range(0, len(token_ids), _SHORT_LENGTH)
        return text_of(b"".join([self.bytes_of(token_ids[part : part + _SHORT_LENGTH]) for part in parts]))

    def context(self, prompt_token_ids: NDArray[np.int32]) -> list[int]:
        """Return the tokens of the unfinished character at a prompt's end, mostly none. An answer may finish it."""
        token_ids: list[int] = []
        data = b""
        for token_id in map(int, prompt_token_ids[::-1]):
            token = self._bytes_of[token_id]
            if token:
                token_ids.append(token_id)
                data = token + data
            if len(data) >= _MAX_UNFINISHED:
                break
        token_ids.reverse()
        return token_ids if _num_unfinished(data) else []

    def unfinished(self, context: Sequence[int]) -> bytes:
        """Return the bytes of the unfinished character at the end of ``context``."""
        data = self.bytes_of(context)
        return data[len(data) - _num_unfinished(data) :]

    def stream(self, context: Sequence[int]) -> ByteLevelStream:
        """Return the stream of an answer behind ``context``."""
        return ByteLevelStream(self, context)


class ByteLevelStream:
    """``TextStream`` of a byte-level tokenizer.

    Args:
        context: see ``ByteLevelDecoder.context``.
    """

    def __init__(self, decoder: ByteLevelDecoder, context: Sequence[int]) -> None:
        self._bytes_of = decoder.bytes_of
        self._unfinished = decoder.unfinished(context)

    def extend(self, token_ids: Sequence[int]) -> str:
        """See ``TextStream``."""
        data = self._unfinished + self._bytes_of(token_ids)
        text, num_decoded = codecs.utf_8_decode(data, "replace", False)
        self._unfinished = data[num_decoded:]
        return text

    def close(self) -> str:
        """See ``TextStream``."""
        return text_of(self._unfinished)


class _TokenBytes(dict[int, bytes]):
    """What each token stands for, filled as tokens come up."""

    def __init__(self, backend: Any, left_out: Collection[str]) -> None:
        super().__init__()
        self._backend = backend
        self._left_out = frozenset(left_out)

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            # Not kept: a caller could fill memory with 2**31 such ids.
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


def special_tokens(backend: Any) -> list[str]:
    """Return what the special tokens are called."""
    return [token.content for token in backend.get_added_tokens_decoder().values() if token.special]


def _byte_of_character() -> dict[str, int]:
    """Return the byte of each character: itself if printable in Latin-1; U+0100 and on are all others, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


# All other decoders: the text of a token depends on what stands around it.

_NUM_CONTEXT_TOKENS = 8
"""Tokens of a prompt in front of its answer. One with text would do: some decoders write a first token in another way
than later ones, without its space for example."""
_MAX_PENDING = 128
"""Tokens without text after which a stream waits no longer. A character has at most four."""
_INVALID_PREFIX = "Invalid prefix"
"""How the library's message begins when the text of all tokens does not begin with what was shown."""


class LibraryDecoder:
    """Token ids to text by the tokenizer library, with or without special tokens."""

    def __init__(self, backend: Any, *, skip_special_tokens: bool) -> None:
        self.backend = backend
        self.skip_special_tokens = skip_special_tokens
        names = special_tokens(backend) if skip_special_tokens else []
        self._left_out = frozenset(backend.token_to_id(name) for name in names)
        self._bytes = byte_fallback(backend)
        self.letter = [token_id for token_id, byte in self._bytes.items() if byte == ord("a")]
        """The byte token of a letter; empty where there are no such tokens."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids`` alone."""
        text: str
        if len(token_ids) <= _SHORT_LENGTH:
            text = self.backend.decode(token_ids, skip_special_tokens=self.skip_special_tokens)
        else:
            # Unlike ``decode``, it works without the interpreter lock.
            (text,) = self.backend.decode_batch([token_ids], skip_special_tokens=self.skip_special_tokens)
        return text

    def context(self, prompt_token_ids: NDArray[np.int32]) -> list[int]:
        """Return a prompt's last tokens that have text."""
        tokens: list[int] = []
        for token_id in map(int, prompt_token_ids[::-1]):
            if self.has_text(token_id):
                tokens.append(token_id)
            if len(tokens) == _NUM_CONTEXT_TOKENS + _MAX_UNFINISHED:
                break
        tokens.reverse()
        end = len(tokens) - self.num_unfinished(tokens)
        # A run of byte tokens that begins with the rest of a character has no text.
        for start in range(_MAX_UNFINISHED + 1):
            text = self.decode(tokens[start:end])
            if text and not text.endswith(REPLACEMENT):
                return tokens[start:]
        return tokens

    def num_unfinished(self, token_ids: Sequence[int]) -> int:
        """Return how many byte tokens at the end of ``token_ids``, which all have text, may begin a character."""
        data = [self._bytes.get(token_id) for token_id in token_ids[-_MAX_UNFINISHED:]]
        data = data[len(data) - data[::-1].index(None) :] if None in data else data
        return _num_unfinished(bytes(byte for byte in data if byte is not None))

    def has_text(self, token_id: int) -> bool:
        """Whether it is a token, and shown."""
        return token_id not in self._left_out and self.backend.id_to_token(token_id) is not None

    def stream(self, context: list[int]) -> LibraryStream:
        """Return the stream of an answer behind ``context``."""
        return LibraryStream(self, context)


def byte_fallback(backend: Any) -> dict[int, int]:
    """Return the byte of each token like ``<0xF0>``; none if the decoder shows such tokens as they are."""
    ids = {byte: backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    letter = ids[ord("a")]
    if letter is None or backend.decode([letter], skip_special_tokens=False) != "a":
        return {}
    return {token_id: byte for byte, token_id in ids.items() if token_id is not None}


class LibraryStream:
    """``TextStream`` by the library's ``DecodeStream``, except where that is not right:

    - Where the text of all tokens does not begin with what was shown, it raises from then on, and what it holds back is
      lost. Shown is, for example, a character of four byte tokens, and a byte follows that begins none. Here the new
      tokens' own text follows.
    - What it still holds back at the end is lost: here it is shown.
    - Tokens without text, and bytes that are no text, make each step longer without a limit. Here they are let go after
      ``_MAX_PENDING`` of them, which changes the text in one case: of a longer run of byte tokens with an invalid one
      among them, a part is shown as characters, where the library shows all of it as U+FFFD.
    - Behind tokens whose text ends with U+FFFD, it repeats their text; behind an unfinished character, all of the
      prompt. Here nothing of a prompt is repeated.

    Args:
        context: tokens in front of the text, see ``LibraryDecoder.context``.
    """

    def __init__(self, decoder: LibraryDecoder, context: list[int]) -> None:
        self._decoder = decoder
        end = len(context) - decoder.num_unfinished(context)
        self._begin(context[:end], context[end:])

    def extend(self, token_ids: Sequence[int]) -> str:
        """See ``TextStream``. The text does not depend on how many tokens come at once."""
        return "".join([self._step(token_id) for token_id in token_ids])

    def close(self) -> str:
        """See ``TextStream``."""
        return self._text_behind_context(self._pending)

    def _begin(self, context: list[int], pending: list[int]) -> None:
        from tokenizers.decoders import DecodeStream

        decoder = self._decoder
        # Tokens whose text was shown last, and those behind them that have shown none.
        self._context: list[int] = context
        self._pending: list[int] = []
        self._stream = DecodeStream(ids=context, skip_special_tokens=decoder.skip_special_tokens)
        head = decoder.decode(context)
        self._repeated = head if head.endswith(REPLACEMENT) else ""
        for token_id in pending:
            self._step(token_id)

    def _step(self, token_id: int) -> str:
        self._pending.append(token_id)
        try:
            text: str | None = self._stream.step(self._decoder.backend, token_id)
        except Exception as error:  # the library raises nothing more special
            if not str(error).startswith(_INVALID_PREFIX):
                raise
            text = self._text_behind_context(self._pending)
            self._begin(self._pending, [])
            return text
        if text is None:
            return self._let_go() if len(self._pending) >= _MAX_PENDING else ""
        if self._repeated:
            text, self._repeated = text_behind(self._repeated, text), ""
        self._context, self._pending = self._pending, []
        return text

    def _let_go(self) -> str:
        """Return the text of what is pending, but for an unfinished character."""
        decoder = self._decoder
        pending = [token_id for token_id in self._pending if decoder.has_text(token_id)]
        end = len(pending) - decoder.num_unfinished(pending)
        text = self._text_behind_context(pending[:end])
        context = self._context
        if text and not decoder.decode(context):
            # What follows is no first token any more. Behind a byte that is no text, others would be none either.
            context = decoder.letter or pending[:end][-1:]
        # One without text may matter to the next: CTC's decoders leave out repeated tokens.
        self._begin(context, pending[end if text else max(end - 1, 0) :])
        return text

    def _text_behind_context(self, token_ids: list[int]) -> str:
        decode = self._decoder.decode
        head, whole = decode(self._context), decode(self._context + token_ids)
        return whole[len(head) :] if whole.startswith(head) else decode(token_ids)


def make_decoder(backend: Any, skip_special_tokens: bool) -> ByteLevelDecoder | LibraryDecoder:
    """Return the faster decoder where the text of tokens is the text of their bytes and of nothing else."""
    from tokenizers.decoders import ByteLevel

    if isinstance(backend.decoder, ByteLevel):
        return ByteLevelDecoder(backend, special_tokens(backend) if skip_special_tokens else [])
    return LibraryDecoder(backend, skip_special_tokens=skip_special_tokens)
