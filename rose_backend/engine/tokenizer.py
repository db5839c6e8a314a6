"""Text to token ids and back, over a Hugging Face fast tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose_backend.block_manager.block_pool import IntArray
from rose_backend.block_manager.sequence_table import concatenate_ranges
from rose_backend.engine.tokenizer_loading import TokenizerParts, load_tokenizer
from rose_backend.errors import RequestError

_NUM_CONTEXT_TOKENS = 8
"""A character takes at most four tokens of single bytes; a few special tokens may stand behind it."""
_SHORT_LENGTH = 8192
"""Characters or token ids whose conversion holds the interpreter lock for a few milliseconds at most."""
_CHARACTERS_AT_ONCE = 1 << 16
"""A long text is counted in pieces of that many."""
_UNSURE_TOKENS = 1024
"""Tokens of a piece that may be owed to the cuts, beside those of a cut token: half a word, where a whole one that is
long has a single token for unknown text; a space that is put in front."""


class Tokenizer:
    """The tokenizer in a model's directory, equal to transformers' ``AutoTokenizer`` of all files there.

    Decoding is the tokenizer library's own, or identical (``ByteLevelDecoder``), without transformers'
    clean-up of spaces, so that the text of tokens read one by one equals the text of all of them.

    Args:
        source: the directory, which ``load_tokenizer`` then loads, or what was loaded.

    Raises:
        ModelError: there is no usable fast tokenizer.
    """

    def __init__(self, source: str | Path | TokenizerParts) -> None:
        parts = source if isinstance(source, TokenizerParts) else load_tokenizer(source)
        self._backend = parts.backend
        self._backend.encode_special_tokens = parts.splits_special_tokens
        self._byte_level: dict[bool, ByteLevelDecoder] = {}  # by skip_special_tokens
        if is_byte_level(self._backend):
            left_out = {True: special_tokens(self._backend), False: []}
            self._byte_level = {skips: ByteLevelDecoder(self._backend, left_out[skips]) for skips in left_out}
        # Log-probabilities name the same few tokens again and again.
        self._token_texts: dict[int, str] = {}
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
        """Count the tokens of a long text from its start, as far as ``limit``, without tokenizing the rest.

        Tokenized whole, 16 MiB may take 2 GiB of memory. The text is cut anywhere, which changes the tokens beside a
        cut: so many are left out of the count that the text itself never has fewer tokens than were counted.

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
        for decoder in self._byte_level.values():
            decoder.prepare()

    def byte_level(self, *, skip_special_tokens: bool = True) -> ByteLevelDecoder | None:
        """Return what decodes texts piece by piece; None where only the tokenizer library can decode."""
        return self._byte_level.get(skip_special_tokens)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text; bytes that are no valid UTF-8 become U+FFFD."""
        if (decoder := self._byte_level.get(skip_special_tokens)) is not None:
            return decoder.decode(token_ids)
        if len(token_ids) > _SHORT_LENGTH:
            # Unlike ``decode``, it works without the interpreter lock.
            return self.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_batch(self, batch: list[list[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each list; on several cores where the tokenizer library may use them."""
        texts: list[str] = self._backend.decode_batch(batch, skip_special_tokens=skip_special_tokens)
        return texts

    def decoding_context(self, prompt_token_ids: NDArray[np.int32]) -> list[int]:
        """Return the last tokens of a prompt, to be decoded in front of an answer and left out of its text.

        Decoders of SentencePiece models take the space away from the first token that they see. Byte-level ones need
        no context.
        """
        return [] if self._byte_level else prompt_token_ids[-_NUM_CONTEXT_TOKENS:].tolist()

    def decode_answers(
        self,
        prompts: Sequence[NDArray[np.int32]],
        answers: Sequence[list[int]],
        *,
        skip_special_tokens: bool = True,
    ) -> list[str]:
        """Return the text of each answer behind its prompt."""
        if self._byte_level:
            return [self.decode(answer, skip_special_tokens=skip_special_tokens) for answer in answers]
        contexts = [self.decoding_context(prompt) for prompt in prompts]
        joined = [context + answer for context, answer in zip(contexts, answers, strict=True)]
        texts = self.decode_batch(joined, skip_special_tokens=skip_special_tokens)
        heads = self.decode_batch(contexts, skip_special_tokens=skip_special_tokens)
        return [text[len(whole_characters(head)) :] for text, head in zip(texts, heads, strict=True)]

    def decode_token(self, token_id: int) -> str:
        """Return the text of one token alone, special tokens by their name."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"prompt: not valid Unicode text ({error.reason})", parameter="prompt") from error


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


def whole_characters(text: str) -> str:
    """Return a text without an unfinished character at its end."""
    return text.rstrip("\N{REPLACEMENT CHARACTER}")


def text_of(data: bytes | bytearray) -> str:
    """Return the text of UTF-8 bytes; those that are no valid UTF-8 become U+FFFD."""
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


def is_byte_level(backend: Any) -> bool:
    """Whether the text of tokens is the text of their bytes and of nothing else."""
    from tokenizers.decoders import ByteLevel

    return isinstance(backend.decoder, ByteLevel)


def special_tokens(backend: Any) -> list[str]:
    """Return what the special tokens are called."""
    return [token.content for token in backend.get_added_tokens_decoder().values() if token.special]


def _byte_of_character() -> dict[str, int]:
    """Return the byte of each character: itself if printable in Latin-1; U+0100 and on are all others, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
