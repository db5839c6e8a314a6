"""Text from tokens one by one: the same wherever token boundaries fall, and never half a character."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_backend.config import MAX_STOP_STRING_LENGTH, MAX_STOP_STRINGS
from rose_backend.engine.tokenizer import Detokenizer


class ByteStream:
    """One token per byte; ids from 256 on have no text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def extend(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(token_id for token_id in token_ids if token_id < 256))

    def close(self) -> str:
        return self._decoder.decode(b"", True)


class PieceStream:
    """Each token stands for a piece of text of its own."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def extend(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._pieces.__getitem__, token_ids))

    def close(self) -> str:
        return ""


def make_stream(stops: list[str] | None = None, *, keep: bool = False, min_tokens: int = 0) -> Detokenizer:
    return Detokenizer(ByteStream(), stop_strings=stops or [], keep_stop_string=keep, min_tokens=min_tokens)


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
    return "".join(deltas), deltas, stop_string


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
    assert stream.take_delta() == "ab"


def test_stop_string_across_tokens() -> None:
    text, _, stop_string = run(make_stream(["STOP"]), b"say STOP now")
    assert (text, stop_string) == ("say ", "STOP")


def test_possible_stop_prefix_is_held_back_and_let_go() -> None:
    stream = make_stream(["abcd"])
    text, shown = "", []
    for byte in b"xabcabcd":
        stream.extend([byte])
        text += stream.take_delta()
        shown.append(text)
    assert shown == ["x", "x", "x", "x", "xabc", "xabc", "xabc", "xabc"]


def test_held_back_prefix_is_shown_at_the_end() -> None:
    text, deltas, stop_string = run(make_stream(["abcd"]), b"xabc")
    assert (text, deltas[-1], stop_string) == ("xabc", "abc", None)


def test_kept_stop_string() -> None:
    text, deltas, stop_string = run(make_stream(["lo"], keep=True), b"hello there")
    assert (text, deltas[3], stop_string) == ("hello", "l", "lo")


def test_first_end_wins_then_the_longest() -> None:
    for stops, text, stop_string in (
        (["abcd", "bc"], "xa", "bc"),
        (["bc", "abc"], "x", "abc"),
        (["abc", "bc"], "x", "abc"),
    ):
        stream = Detokenizer(PieceStream(["xabcd"]), stop_strings=stops)
        assert stream.extend([0]) == stop_string
        assert stream.take_delta() == text


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
    actual, _, stop_string = run(make_stream(stops), text.encode())
    assert (actual, stop_string) == (expected, expected_stop)


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
        PieceStream(pieces), stop_strings=stops, keep_stop_string=keep, min_tokens=min_tokens
    )
    plain, shown = PlainStream(stops, keep=keep, min_tokens=min_tokens), ""
    for token_id, piece in enumerate(pieces):
        assert stream.extend([token_id]) == plain.push(piece)
        shown += stream.take_delta()
        assert shown == plain.visible_text
        if plain.stop is not None:
            return
    assert stream.close() is None
    assert shown + stream.take_delta() == plain.text


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
    stream = Detokenizer(PieceStream(pieces), stop_strings=stops)
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
