"""Texts made token by token: those of the library's ``DecodeStream``, and nothing lost where it loses something.

The streams of one run are few; ``ROSE_RANDOM_STREAMS=100000 make test PYTEST_ARGS=tests/engine/test_text_streams.py``
compares 100,000 of each decoder, ``ROSE_RANDOM_SEED`` chooses others.
"""

from __future__ import annotations

import os
import random
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers.decoders import DecodeStream

from rose_backend.engine.tokenizer import Detokenizer, make_decoder
from tests.support.random_tokenizers import KINDS, Kind

NUM_STREAMS = int(os.environ.get("ROSE_RANDOM_STREAMS", "1500"))
SEED = int(os.environ.get("ROSE_RANDOM_SEED", "0"))


@cache
def kind_named(name: str) -> Kind:
    return KINDS[name]()


def library_text(
    kind: Kind, prompt: list[int], unfinished: list[int], answer: list[int], *, skips: bool
) -> str:
    """Return what ``DecodeStream`` shows, and behind it what it has held back."""
    backend, shown = kind.backend, ""
    stream = DecodeStream(ids=prompt, skip_special_tokens=skips)
    context, pending = prompt, list[int]()

    def rest() -> str:
        head = backend.decode(context, skip_special_tokens=skips)
        whole = backend.decode(context + pending, skip_special_tokens=skips)
        alone = backend.decode(pending, skip_special_tokens=skips)
        return whole[len(head) :] if whole.startswith(head) else alone

    for token_id in [*unfinished, *answer]:
        pending.append(token_id)
        try:
            text = stream.step(backend, token_id)
        except Exception as error:
            assert str(error).startswith("Invalid prefix")
            # From here on it would raise for each token. What it had shown cannot be taken back.
            text = rest()
            stream = DecodeStream(ids=pending, skip_special_tokens=skips)
        if text is not None:
            shown += text
            context, pending = pending, []
    return shown + rest()


def stream_text(detokenizer: Detokenizer, tokens: list[int], rng: random.Random | None = None) -> str:
    """Return the text of ``tokens``, added one by one or in random portions."""
    text, start = "", 0
    while start < len(tokens):
        end = start + (1 if rng is None else rng.randrange(1, 9))
        assert detokenizer.extend(tokens[start:end]) is None
        text, start = text + detokenizer.take_delta(), end
    detokenizer.close()
    return text + detokenizer.take_delta()


@pytest.mark.parametrize("name", KINDS)
def test_texts_are_those_of_the_library(name: str) -> None:
    kind, rng = kind_named(name), random.Random(f"{SEED} {name}")
    ours = {skips: make_decoder(kind.backend, skips) for skips in (False, True)}
    for _ in range(NUM_STREAMS):
        skips = rng.random() < 0.7
        (prompt, unfinished), answer = kind.prompt(rng), kind.answer(rng)
        ids: NDArray[np.int32] = np.array(prompt + unfinished, np.int32)
        expected = library_text(kind, prompt, unfinished, answer, skips=skips)
        context = ours[skips].context(ids)
        case = (skips, prompt, unfinished, answer)
        assert stream_text(Detokenizer(ours[skips].stream(context)), answer) == expected, case
        assert stream_text(Detokenizer(ours[skips].stream(context)), answer, rng) == expected, case


def text_behind(name: str, prompt: list[int], answer: list[int], *, skips: bool = True) -> str:
    decoder = make_decoder(kind_named(name).backend, skips)
    context = decoder.context(np.array(prompt, np.int32))
    return stream_text(Detokenizer(decoder.stream(context)), answer)


def spelled(name: str, *pieces: str | bytes) -> list[int]:
    """Return tokens: of a string the token with that name, of bytes the token of each."""
    kind = kind_named(name)
    tokens: list[int] = []
    for piece in pieces:
        if isinstance(piece, str):
            tokens.append(kind.backend.token_to_id(piece))
        else:
            assert kind.byte_ids is not None
            tokens += [kind.byte_ids[byte] for byte in piece]
    assert None not in tokens
    return tokens


def utf8(text: str) -> bytes:
    return text.encode()


@pytest.mark.parametrize("name", ["byte-fallback", "byte-fallback-unstripped", "byte-level"])
@pytest.mark.parametrize("text", ["🙂中", "🇫🇷", "ก็ไม่", "🙂🙂", "薔é🙂 a"])
def test_characters_of_byte_tokens_in_a_row(name: str, text: str) -> None:
    tokens = spelled(name, utf8(text))
    assert text_behind(name, spelled(name, utf8("a")), tokens) == text
    for end in range(1, len(utf8(text))):
        before, behind = tokens[:end], tokens[end:]
        num_whole = len(utf8(text)[:end].decode(errors="ignore"))
        assert text_behind(name, before, behind) == text[num_whole:], "the prompt left a character unfinished"
    many = spelled(name, utf8("ไม่") * 100)
    assert text_behind(name, many, many[:-1]) == "ไม่" * 99 + "ไม" + "\ufffd" * (
        1 if name == "byte-level" else 2
    )


SPACES: list[tuple[str, list[str | bytes], list[str | bytes], str]] = [
    ("byte-fallback", ["▁the"], ["s", "<s>", "▁x", "."], "s x."),
    ("byte-fallback", ["▁the"], ["▁x", *["<s>"] * 300, "▁x"], " x x"),
    ("byte-fallback", ["▁the", *["<s>"] * 300], ["▁x"], " x"),
    ("byte-fallback", ["<s>"] * 300, ["▁x", "▁x"], "x x"),
    ("byte-fallback", ["<s>"], [b"\x80" * 128, "▁x"], "\ufffd" * 128 + " x"),
    ("metaspace", ["<s>"], ["\ufffd"] * 128 + ["▁x"], "\ufffd" * 128 + " x"),
    ("byte-fallback", ["▁the", "\ufffd"], ["▁x"], " x"),
    ("metaspace", ["▁the"], ["s", "<s>", "▁x", "."], "s x."),
    ("metaspace", ["▁the", "\ufffd"], ["▁x", "\ufffd", "\ufffd"], " x\ufffd\ufffd"),
    ("word-piece", ["the", "</s>"], ["rose", "</s>", "##s", "n't", "."], " rosesn't."),
    ("suffix", ["the</w>"], ["ro", "<s>", "se</w>", "."], " rose ."),
    ("ctc", ["a"], ["a", "<pad>", "a", *["<pad>"] * 300, "a"], "aa"),
    ("ctc", ["a"], [*["a"] * 300, "b"], "b"),
    ("none", ["the", "<s>"], ["rose", "<s>", "s"], " rose s"),
]


@pytest.mark.parametrize(("name", "prompt", "answer", "text"), SPACES, ids=range(len(SPACES)))
def test_what_stands_before_a_token_without_text_counts(
    name: str, prompt: list[str | bytes], answer: list[str | bytes], text: str
) -> None:
    assert text_behind(name, spelled(name, *prompt), spelled(name, *answer)) == text


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        # The library raises at each token behind the 80.
        ([utf8("🙂"), b"\x80", "s", "▁x"], "🙂\ufffds x"),
        ([utf8("🙂"), b"\xe4\xb8", "▁x"], "🙂\ufffd\ufffd x"),
        # It holds these back until the end.
        (["s", b"\xe4\xb8"], "s\ufffd\ufffd"),
        (["s", "\ufffd"], "s\ufffd"),
        # And these: with the end, it would show nothing else than U+FFFD.
        (["s", b"\x80" * 128 + utf8("ไม่" * 100)], "s" + "\ufffd" * 128 + "ไม่" * 100),
        (["s", b"\x80" * 126 + utf8("ไม่" * 100)], "s" + "\ufffd" * 126 + "ไม่" * 100),
    ],
    ids=range(6),
)
def test_nothing_that_the_library_loses_is_lost(answer: list[str | bytes], text: str) -> None:
    name = "byte-fallback"
    assert text_behind(name, spelled(name, "▁the"), spelled(name, *answer)) == text


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("byte-fallback", "<s>"),
        ("byte-fallback", b"\x80"),
        ("byte-fallback", b"\xf0"),
        ("byte-fallback", "\ufffd"),
        ("byte-level", "<s>"),
        ("byte-level", b"\x80"),
        ("byte-level", b"\xf0"),
        ("metaspace", "\ufffd"),
        ("ctc", "a"),
        ("ctc", "<pad>"),
    ],
)
def test_a_token_costs_the_same_behind_any_number_of_others(name: str, piece: str | bytes) -> None:
    (token,) = spelled(name, piece)
    decoder = make_decoder(kind_named(name).backend, True)
    context = decoder.context(np.array([token] * 5000, np.int32))
    assert len(context) <= 16
    stream = decoder.stream(context)
    detokenizer = Detokenizer(stream, stop_strings=["never seen"])
    num_characters = 0
    for _ in range(1500):
        assert detokenizer.extend([token]) is None
        num_characters += len(detokenizer.take_delta())
        # All that a step looks at, and keeps.
        values = [*vars(stream).values(), *vars(detokenizer).values()]
        kept = [value for value in values if isinstance(value, (list, bytes, str))]
        assert sum(map(len, kept)) <= 160
    assert num_characters in (0, *range(1370, 1501))
