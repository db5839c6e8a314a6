"""Text from tokens one by one: the same wherever token boundaries fall, and never half a character."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models

from rose_backend.config import MAX_STOP_STRING_LENGTH, MAX_STOP_STRINGS
from rose_backend.engine.detokenizer import Detokenizer
from rose_backend.engine.tokenizer import Tokenizer


class ByteTokenizer:
    """One token per byte; ids from 256 on are special tokens."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        assert skip_special_tokens
        return bytes(token_id for token_id in token_ids if token_id < 256).decode("utf-8", errors="replace")


def make_stream(stops: list[str] | None = None, *, keep: bool = False, min_tokens: int = 0) -> Detokenizer:
    return Detokenizer(
        cast(Tokenizer, ByteTokenizer()),
        stop_strings=stops or [],
        keep_stop_string=keep,
        min_tokens=min_tokens,
    )


def run(stream: Detokenizer, data: bytes) -> tuple[str, list[str], str | None]:
    """Push bytes until the text stops; return the text, the deltas and the stop string."""
    deltas, stop_string = [], None
    for byte in data:
        stop_string = stream.extend([byte])
        deltas.append(stream.take_delta())
        if stop_string is not None:
            break
    stop_string = stream.close() if stop_string is None else stop_string
    deltas.append(stream.take_delta())
    return stream.visible_text, deltas, stop_string


def test_no_half_character_is_ever_shown() -> None:
    text, deltas, _ = run(make_stream(), "a薔薇🌹é!".encode())
    assert text == "a薔薇🌹é!"
    assert [delta for delta in deltas if delta] == ["a", "薔", "薇", "🌹", "é", "!"]


def test_unfinished_character_is_shown_at_the_end_only() -> None:
    stream = make_stream()
    text, deltas, _ = run(stream, b"a\xe8\x96")
    assert deltas == ["a", "", "", "\ufffd"]
    assert text == "a\ufffd"


def test_special_tokens_leave_no_trace() -> None:
    stream = make_stream()
    for token_id in (256, ord("a"), 300, ord("b")):
        stream.extend([token_id])
    assert stream.visible_text == "ab"


def test_stop_string_across_tokens() -> None:
    text, deltas, stop_string = run(make_stream(["STOP"]), b"say STOP now")
    assert (text, stop_string) == ("say ", "STOP")
    assert "".join(deltas) == "say "


def test_possible_stop_prefix_is_held_back_and_let_go() -> None:
    stream = make_stream(["abcd"])
    shown = []
    for byte in b"xabcabcd":
        stream.extend([byte])
        shown.append(stream.visible_text)
    assert shown == ["x", "x", "x", "x", "xabc", "xabc", "xabc", "xabc"]


def test_held_back_prefix_is_shown_at_the_end() -> None:
    text, deltas, stop_string = run(make_stream(["abcd"]), b"xabc")
    assert (text, deltas[-1], stop_string) == ("xabc", "abc", None)


def test_kept_stop_string() -> None:
    text, deltas, stop_string = run(make_stream(["lo"], keep=True), b"hello there")
    assert (text, "".join(deltas), stop_string) == ("hello", "hello", "lo")


def test_first_end_wins_then_the_longest() -> None:
    class WholeTextTokenizer:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
            return "xabcd" * len(token_ids)

    for stops, text, stop_string in (
        (["abcd", "bc"], "xa", "bc"),
        (["bc", "abc"], "x", "abc"),
        (["abc", "bc"], "x", "abc"),
    ):
        stream = Detokenizer(cast(Tokenizer, WholeTextTokenizer()), stop_strings=stops)
        assert stream.extend([0]) == stop_string
        assert stream.visible_text == text


def test_no_stop_within_min_tokens() -> None:
    text, _, stop_string = run(make_stream(["ab"], min_tokens=4), b"ababxab")
    assert (text, stop_string) == ("ababx", "ab")


def reference_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Look for stop strings character by character, as a reader would."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(
    st.text(alphabet="abé🌹", max_size=20),
    st.lists(st.text(alphabet="abé🌹", min_size=1, max_size=4), max_size=3),
)
def test_any_text_and_stops(text: str, stops: list[str]) -> None:
    expected, expected_stop = reference_stop(text, stops)
    actual, deltas, stop_string = run(make_stream(stops), text.encode())
    assert (actual, stop_string) == (expected, expected_stop)
    assert "".join(deltas) == expected


@given(st.binary(max_size=40))
def test_any_bytes_stream_to_the_text_of_all(data: bytes) -> None:
    text, deltas, _ = run(make_stream(), data)
    assert text == "".join(deltas) == data.decode("utf-8", errors="replace")


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path: Path) -> Tokenizer:
    return Tokenizer(tiny_model_path)


@given(st.lists(st.integers(0, 2559), max_size=40))
def test_any_tokens_of_the_real_tokenizer(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    stream = Detokenizer(tokenizer)
    deltas = []
    for token_id in token_ids:
        stream.extend([token_id])
        deltas.append(stream.take_delta())
        assert not deltas[-1].endswith("\ufffd" * 4)
    stream.close()
    deltas.append(stream.take_delta())
    assert "".join(deltas) == stream.visible_text == tokenizer.decode(token_ids)


class PieceTokenizer:
    """Each token stands for a piece of text of its own."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(self._pieces.__getitem__, token_ids))


class PlainStream:
    """What ``Detokenizer`` does for stop strings, in the simplest way: it searches the whole text at each token."""

    def __init__(self, stops: list[str], *, keep: bool, min_tokens: int) -> None:
        self.stop: str | None = None
        self.text, self.num_tokens = "", 0
        self._stops, self._keep, self._min_tokens = stops, keep, min_tokens

    def push(self, piece: str) -> str | None:
        old_length, self.num_tokens = len(self.text), self.num_tokens + 1
        self.text += piece
        ends = range(old_length + 1, len(self.text) + 1) if self.num_tokens > self._min_tokens else ()
        for end in ends:
            found = [stop for stop in self._stops if self.text[:end].endswith(stop)]
            if found:
                stop = self.stop = max(found, key=len)
                self.text = self.text[: end if self._keep else end - len(stop)]
                return stop
        return None

    @property
    def visible_text(self) -> str:
        if self.stop is not None or self._keep:
            return self.text
        starts = [stop[:length] for stop in self._stops for length in range(len(stop))]
        held_back = max((len(start) for start in starts if self.text.endswith(start)), default=0)
        return self.text[: len(self.text) - held_back]


@pytest.mark.parametrize("keep", [False, True])
@given(
    st.lists(st.text(alphabet="ab", max_size=6), max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=7), min_size=1, max_size=5),
    st.integers(0, 6),
)
def test_stop_strings_however_they_overlap_and_the_text_is_cut(
    keep: bool, pieces: list[str], stops: list[str], min_tokens: int
) -> None:
    stream = Detokenizer(
        cast(Tokenizer, PieceTokenizer(pieces)),
        stop_strings=stops,
        keep_stop_string=keep,
        min_tokens=min_tokens,
    )
    plain, shown = PlainStream(stops, keep=keep, min_tokens=min_tokens), ""
    for token_id, piece in enumerate(pieces):
        assert stream.extend([token_id]) == plain.push(piece)
        assert stream.visible_text == plain.visible_text
        shown += stream.take_delta()
        assert shown == plain.visible_text
        if plain.stop is not None:
            return
    assert stream.close() is None
    assert shown + stream.take_delta() == stream.visible_text == plain.text


A_LOT = MAX_STOP_STRING_LENGTH


@pytest.mark.parametrize(
    ("stops", "pieces"),
    [
        ([chr(ord("A") + index) * A_LOT for index in range(MAX_STOP_STRINGS)], [" the"] * 500),
        (["a" * (A_LOT - 1) + chr(ord("b") + index) for index in range(MAX_STOP_STRINGS)], ["aaaa"] * 500),
        (
            [
                "a" * (100 + 8 * index) + "z" + "a" * (A_LOT - 101 - 8 * index)
                for index in range(MAX_STOP_STRINGS)
            ],
            ["aaaa"] * 500,
        ),
        # Held back as far as can be, and let go at once.
        (
            ["a" * (A_LOT - 1) + chr(ord("b") + index) for index in range(MAX_STOP_STRINGS)],
            ([*["aaaa"] * 62, "x"]) * 8,
        ),
    ],
    ids=["plain", "last-character-differs", "middle-differs", "bursts"],
)
def test_stop_strings_at_their_limits_take_few_steps(stops: list[str], pieces: list[str]) -> None:
    """Calls into Python and into C are counted, each of which looks at 256 characters at most."""
    stream = Detokenizer(cast(Tokenizer, PieceTokenizer(pieces)), stop_strings=stops)
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for token_id in range(len(pieces)):
            assert stream.extend([token_id]) is None
            stream.take_delta()
    finally:
        sys.setprofile(None)
    # Looking for each of the 16, and a few for each of the four characters.
    assert num_calls < 64 * len(pieces)


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tokenizer that decodes as Llama 2's and Mistral's: the first space of what it sees is left out."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        "▁",
        "▁the",
        "▁rose",
        "s",
        ".",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    backend = LibraryTokenizer(
        models.BPE(
            {word: index for index, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    directory = tmp_path_factory.mktemp("sentence_piece")
    backend.save(str(directory / "tokenizer.json"))
    return directory


# Byte tokens begin at 8: 0xC3 0xA9 is e with an accent.
@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        ([1, 4, 5], [5, 6, 7], " roses."),
        ([1, 4], [6, 7], "s."),
        ([4, 2, 1], [4, 5], " the rose"),
        ([4, 8 + 0xC3], [8 + 0xA9, 5], "é rose"),
        ([4], [3, 5], "  rose"),
        ([4] * 50, [5] * 20, " rose" * 20),
    ],
)
def test_an_answer_begins_as_it_does_behind_its_prompt(
    sentence_piece: Path, prompt: list[int], answer: list[int], text: str
) -> None:
    tokenizer = Tokenizer(sentence_piece)
    ids: NDArray[np.int32] = np.array(prompt, dtype=np.int32)
    assert tokenizer.byte_level() is None
    assert tokenizer.decode_answers([ids, ids], [answer, answer[:1]])[0] == text
    stream = Detokenizer(tokenizer, context=tokenizer.decoding_context(ids))
    deltas = []
    for token in answer:
        assert stream.extend([token]) is None
        deltas.append(stream.take_delta())
    assert stream.close() is None
    assert "".join(deltas) + stream.take_delta() == stream.visible_text == text
