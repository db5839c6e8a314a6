"""Text to token ids and back, over a Hugging Face fast tokenizer.

``Tokenizer`` does both. Decoders make text from all tokens at once and their streams token by token, with the same
result; ``Detokenizer`` finds stop strings in it, and ``TokenTexts`` makes the text of single tokens in
log-probabilities.

The text of an answer is what follows the last whole character of its prompt. It is made token by token, and what has
been shown is never taken back, so streams and whole answers have the same text. Decoding all tokens in one library call
could differ: decoders of SentencePiece models replace a whole run of byte tokens with U+FFFD if any part of it is
invalid UTF-8, even if a stream has already shown its valid beginning.
"""

from __future__ import annotations

import codecs
import json
from bisect import bisect_right
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from rose_backend.block_manager.block_pool import IntArray
from rose_backend.block_manager.sequence_table import concatenate_ranges
from rose_backend.engine.tokenizer_loading import TokenizerParts, load_tokenizer
from rose_backend.errors import RequestError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What becomes of bytes that are no valid UTF-8."""
_MAX_UNFINISHED = 3
"""Bytes of a character that may be there while it is unfinished."""
_SHORT_LENGTH = 8192
"""Characters or token ids whose conversion holds the interpreter lock for a few milliseconds at most."""


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
            token_ids: ``[sum(counts)]``, piece after piece.
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
        """Return the stream of an answer that follows ``context``."""
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
    """The bytes of each token, filled when a token is first seen."""

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
"""Last tokens of a prompt, before its answer. One with text would do: some decoders write a first token in another way
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
        """Return the stream of an answer that follows ``context``."""
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
    - Tokens without text, and bytes that are no text, make each step longer without limit. Here they are dropped after
      ``_MAX_PENDING`` of them, which changes the text in one case: of a longer run of byte tokens with an invalid one
      among them, a part is shown as characters, where the library shows all of it as U+FFFD.
    - After tokens whose text ends with U+FFFD, it repeats their text; after an unfinished character, all of the
      prompt. Here nothing of a prompt is repeated.

    Args:
        context: tokens before the text, see ``LibraryDecoder.context``.
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
        # Tokens whose text was shown last, and those after them that have shown none.
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


Decoder: TypeAlias = ByteLevelDecoder | LibraryDecoder


def make_decoder(backend: Any, skip_special_tokens: bool) -> Decoder:
    """Return the faster decoder where the text of tokens is the text of their bytes and of nothing else."""
    from tokenizers.decoders import ByteLevel

    if isinstance(backend.decoder, ByteLevel):
        return ByteLevelDecoder(backend, special_tokens(backend) if skip_special_tokens else [])
    return LibraryDecoder(backend, skip_special_tokens=skip_special_tokens)


class Detokenizer:
    """The text of one completion while its tokens arrive.

    The result does not depend on how the text falls into tokens: of all stop strings the one whose end comes first
    wins, of several ending there the longest. Each token takes the same time however long the text is.

    Args:
        stream: the text of the tokens.
        stop_strings: strings that end the text.
        keep_stop_string: leave the stop string at the end of the text.
        min_tokens: no stop string ends within the text of this many first tokens.
    """

    def __init__(
        self,
        stream: TextStream,
        *,
        stop_strings: Sequence[str] = (),
        keep_stop_string: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._stream = stream
        self._stops_and_lengths = [(stop, len(stop)) for stop in stop_strings]
        # In order, so that those which begin with some text follow each other.
        self._sorted_stops = sorted(stop_strings)
        self._first_characters = frozenset(stop[0] for stop in stop_strings)
        self._max_uncertain = max(map(len, stop_strings), default=1) - 1
        self._keep_stop_string = keep_stop_string
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._uncertain = ""  # the end of the text, which may become a stop string
        self._pieces: list[str] = []  # text that cannot change any more, not yet taken
        self._closed = False

    @property
    def has_stop_strings(self) -> bool:
        """Whether a string can end the text."""
        return bool(self._sorted_stops)

    def extend(self, token_ids: Sequence[int]) -> str | None:
        """Add tokens; a stop string may end at any of them.

        Returns:
            The stop string that ended the text, or None. After one, nothing more may be added.
        """
        if not self._sorted_stops:
            self._pieces.append(self._stream.extend(token_ids))
            return None
        for token_id in token_ids:
            self._num_tokens += 1
            if (stop_string := self._append(self._stream.extend([token_id]))) is not None:
                return stop_string
        return None

    def close(self) -> str | None:
        """End the text: what was held back as an unfinished character, or as the beginning of a stop string, is shown.

        Returns:
            A stop string that this completed, or None.
        """
        if self._closed:
            return None
        stop_string = self._append(self._stream.close())
        if stop_string is None and not self._keep_stop_string:
            self._pieces.append(self._uncertain)
        self._closed = True
        return stop_string

    def take_delta(self) -> str:
        """Return the text that cannot change any more and that the previous call did not return."""
        delta = "".join(self._pieces)
        self._pieces.clear()
        return delta

    def _append(self, new_text: str) -> str | None:
        old_length = len(self._uncertain)
        text = self._uncertain + new_text
        found = None
        if new_text and self._num_tokens > self._min_tokens:
            found = self._find_stop(text, old_length)
        if found is None:
            num_certain = self._num_certain(text)
            self._uncertain = text[num_certain:]
            self._pieces.append(new_text if self._keep_stop_string else text[:num_certain])
            return None
        end, start, stop = found
        self._pieces.append(text[old_length:end] if self._keep_stop_string else text[:start])
        self._closed = True
        return stop

    def _find_stop(self, text: str, old_length: int) -> tuple[int, int, str] | None:
        """Return end and start of the stop string whose end comes first after ``old_length``, and the string."""
        best: tuple[int, int, str] | None = None
        for stop, length in self._stops_and_lengths:
            start = text.find(stop, max(old_length - length + 1, 0))
            if start >= 0 and (best is None or (start + length, start) < best[:2]):
                best = (start + length, start, stop)
        return best

    def _num_certain(self, text: str) -> int:
        """Return how much of ``text`` is no part of what may become a stop string."""
        # Each place is tried once: a possible stop string never starts before the place found for the previous piece.
        start = max(len(text) - self._max_uncertain, 0)
        while start < len(text):
            if text[start] in self._first_characters:
                end = text[start:]
                # Stop strings that begin with this sort directly after it.
                place = bisect_right(self._sorted_stops, end)
                if place < len(self._sorted_stops) and self._sorted_stops[place].startswith(end):
                    break
            start += 1
        return start


MAX_TOKENS_BEFORE = 4
"""Preceding tokens that are searched for the rest of a token's character."""


class TokenTexts:
    """Texts and bytes of single tokens, special ones by their name.

    Args:
        backend: the library's tokenizer.
        decoder: of it, with special tokens.
    """

    def __init__(self, backend: Any, decoder: Decoder) -> None:
        self._backend = backend
        self._decoder = decoder
        self._bytes = byte_fallback(backend) if isinstance(decoder, LibraryDecoder) else {}
        self._space = _space_marker(backend)
        # Log-probabilities name the same few tokens again and again.
        self._alone: dict[int, str] = {}

    def text(self, token_id: int, before: Sequence[int] = ()) -> str:
        """Return the text of a token.

        That of a part of a character is empty, except for the last part: there it is the character, with the
        other bytes of the preceding tokens.

        Args:
            before: the ``MAX_TOKENS_BEFORE`` tokens before it, fewer at the beginning of an answer.
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
            # These have no text alone.
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
        self._backend = cast(Any, parts.backend)
        self._backend.encode_special_tokens = parts.splits_special_tokens
        self._decoders = {skips: make_decoder(self._backend, skips) for skips in (True, False)}
        self.token_texts = TokenTexts(self._backend, self._decoders[False])
        """What log-probabilities call a token."""
        self.max_token_length = max(map(len, self._backend.get_vocab()), default=1)
        """Characters of the longest token, as the vocabulary writes it."""
        self.special_tokens = parts.special_tokens
        """Texts of special tokens by name, ``eos_token`` for example; chat templates use them."""
        self.special_token_ids = [self._backend.token_to_id(each) for each in special_tokens(self._backend)]
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

    def token_strs(self, token_ids: Sequence[int]) -> list[str]:
        """Return tokens as the vocabulary writes them; ids that none has are empty."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    @cached_property
    def num_added_tokens(self) -> tuple[int, int]:
        """Numbers of special tokens that ``encode`` adds before a text and after it."""
        plain, whole = (self.encode("a", add_special_tokens=adds) for adds in (False, True))
        num_added = len(whole) - len(plain)
        starts = (first for first in range(num_added + 1) if whole[first : first + len(plain)] == plain)
        before = next(starts, 0)
        return before, num_added - before

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

    def decoder(self, *, skip_special_tokens: bool = True) -> Decoder:
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
