"""Texts of byte-level tokenizers, made without the tokenizer library, are the library's to the letter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from rose_backend.engine.tokenizer import (
    ByteLevelDecoder,
    LibraryDecoder,
    Tokenizer,
    make_decoder,
    special_tokens,
    text_of,
)

ALPHABET = [*map(chr, range(0x21, 0x7F)), *map(chr, range(0xA1, 0xAD)), *map(chr, range(0xAE, 0x144))]
"""What single bytes are called: token ``i`` is one of the 256 bytes."""


@pytest.fixture(scope="module")
def backend() -> Any:
    """Return a tokenizer with a token for each byte, an added token, two special ones and a gap in the ids."""
    vocab = {character: index for index, character in enumerate(ALPHABET)} | {"Ġrose": 300}
    made = Backend(models.BPE(vocab=vocab, merges=[]))
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken("wörd 🌹", special=False)])
    made.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<é>", special=True)])
    assert made.get_vocab_size() == 260
    return made


def make(backend: Any, skips: bool) -> ByteLevelDecoder:
    return ByteLevelDecoder(backend, special_tokens(backend) if skips else [])


@pytest.mark.parametrize("skips", [False, True])
def test_every_token_alone(backend: Any, skips: bool) -> None:
    decoder = make(backend, skips)
    for token_id in range(310):
        expected = backend.decode([token_id], skip_special_tokens=skips)
        assert decoder.decode([token_id]) == expected, backend.id_to_token(token_id)


@given(st.lists(st.integers(0, 310), max_size=30), st.booleans(), st.integers(0, 30))
def test_any_tokens_and_pieces(backend: Any, token_ids: list[int], skips: bool, cut: int) -> None:
    decoder = make(backend, skips)
    expected = backend.decode(token_ids, skip_special_tokens=skips)
    assert decoder.decode(token_ids) == expected
    assert text_of(decoder.bytes_of(token_ids[:cut]) + decoder.bytes_of(token_ids[cut:])) == expected


@given(st.lists(st.lists(st.integers(0, 400), max_size=9), max_size=9), st.booleans())
def test_many_pieces_at_once(backend: Any, pieces: list[list[int]], skips: bool) -> None:
    decoder = make(backend, skips)
    counts = np.array([len(piece) for piece in pieces], np.int64)
    token_ids = np.array([token_id for piece in pieces for token_id in piece], np.int32)
    expected = [decoder.bytes_of(piece) for piece in pieces]
    assert decoder.pieces_of(token_ids, counts) == expected
    decoder.prepare()
    assert [decoder.bytes_of(piece) for piece in pieces] == expected


@pytest.mark.parametrize("num_pieces", [63, 64, 65, 200])
def test_more_pieces_than_are_looked_up_at_once(backend: Any, num_pieces: int) -> None:
    decoder = make(backend, skips=True)
    pieces = [[(7 * index + place) % 310 for place in range(index % 5)] for index in range(num_pieces)]
    counts = np.array([len(piece) for piece in pieces])
    token_ids = np.array([token_id for piece in pieces for token_id in piece], np.int32)
    assert decoder.pieces_of(token_ids, counts) == [decoder.bytes_of(piece) for piece in pieces]


@given(st.binary(max_size=12))
def test_any_bytes_become_the_same_characters(backend: Any, data: bytes) -> None:
    printable = {ord(character) for character in ALPHABET if ord(character) < 256}
    others = [byte for byte in range(256) if byte not in printable]
    token_of = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    token_ids = [backend.token_to_id(token_of[byte]) for byte in data]
    decoder = make(backend, skips=True)
    assert decoder.bytes_of(token_ids) == data
    assert decoder.decode(token_ids) == backend.decode(token_ids)


@pytest.mark.parametrize("skips", [False, True])
def test_the_whole_vocabulary_of_the_embedded_model(tiny_model_path: Path, skips: bool) -> None:
    tokenizer, library = (
        Tokenizer(tiny_model_path),
        Backend.from_file(str(tiny_model_path / "tokenizer.json")),
    )
    assert isinstance(tokenizer.decoder(skip_special_tokens=skips), ByteLevelDecoder)
    everything = list(range(library.get_vocab_size() + 5))
    for token_ids in (everything, everything[::-1], *([token_id] for token_id in everything)):
        assert tokenizer.decode(token_ids, skip_special_tokens=skips) == library.decode(
            token_ids, skip_special_tokens=skips
        )


def test_tokenizers_of_other_kinds_are_left_to_the_library(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel(vocab={"ro": 0, "##se": 1, "is": 2, "?": 3}, unk_token="?"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert isinstance(make_decoder(backend, True), LibraryDecoder)
    assert isinstance(tokenizer.decoder(), LibraryDecoder)
    assert tokenizer.decode([0, 1, 2]) == "rose is"


def test_ids_without_a_token_are_not_remembered(tiny_model_path: Path) -> None:
    backend = Backend.from_file(str(tiny_model_path / "tokenizer.json"))
    decoder = ByteLevelDecoder(backend, [])
    decoder.prepare()
    num_known = len(decoder._bytes_of)
    assert decoder.decode(list(range(backend.get_vocab_size(), 1_000_000, 7))) == ""
    assert len(decoder._bytes_of) == num_known
