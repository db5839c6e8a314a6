"""Long prompts are converted without holding the interpreter lock, and refused early if they cannot fit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from rose_backend.engine import tokenizer as tokenizer_module
from rose_backend.engine.request import InputProcessor
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.engine.tokenizer import ByteLevelDecoder, Tokenizer
from rose_backend.errors import RequestError

WINDOW = 20_000
RUN = "=" * 128
"""One token, as Llama 3 and its like have them for spaces."""
SHORT = 8192


def byte_level() -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "a"), ("aa", "aa")]
    vocab = {token: index for index, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    made = Backend(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(RUN)])
    return made


def byte_fallback() -> Backend:
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("a", "a"), ("aa", "aa")]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁thea", *(a + b for a, b in merges)]
    vocab = {token: index for index, token in enumerate(tokens)}
    made = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return made


def word_piece() -> Backend:
    tokens = ["[UNK]", *"theaz", *(f"##{letter}" for letter in "theaz"), "the"]
    vocab = {token: index for index, token in enumerate(tokens)}
    made = Backend(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    return made


def unigram() -> Backend:
    pieces = [
        ("<unk>", 0.0),
        ("▁the", -2.0),
        ("the", -2.5),
        ("aaa", -3.0),
        *((each, -6.0) for each in "▁thea"),
    ]
    made = Backend(models.Unigram(vocab=pieces, unk_id=0, byte_fallback=False))
    made.normalizer = normalizers.Replace(Regex(" +"), " ")
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    return made


KINDS = {"bytes": byte_level, "fallback": byte_fallback, "words": word_piece, "unigram": unigram}


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return saved(KINDS[request.param](), tmp_path)


def saved(backend: Backend, directory: Path) -> Tokenizer:
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return Tokenizer(directory)


def texts(length: int) -> list[str]:
    """Return texts of about that many characters, of one kind each and mixed."""
    draw = random.Random(0)
    parts = ["the ", "a" * 50, " ", "the" * 40, "z", "\u85d4", "\U0001f642", "\n\n", RUN, "a" * 150]
    mixed = "".join(draw.choices(parts, k=length // 40))
    return [
        mixed,
        "the " * (length // 4),
        "a" * length,
        " " * length,
        "\U0001f642" * (length // 2),
        "z a" * (length // 3),
    ]


class Spy:
    """A backend that notes how much each call is given that keeps the interpreter lock."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.held: list[int] = []
        self.lengths: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def encode(self, text: str, **how: Any) -> Any:
        self.held.append(len(text))
        return self.backend.encode(text, **how)

    def encode_batch_fast(self, batch: list[str], **how: Any) -> Any:
        self.lengths += map(len, batch)
        return self.backend.encode_batch_fast(batch, **how)

    def decode(self, token_ids: list[int], **how: Any) -> Any:
        self.held.append(len(token_ids))
        return self.backend.decode(token_ids, **how)


@pytest.fixture
def spy(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Spy:
    spy = Spy(tokenizer._backend)
    monkeypatch.setattr(tokenizer, "_backend", spy)
    return spy


@pytest.mark.parametrize("adds", [False, True])
def test_ids_are_the_librarys(tokenizer: Tokenizer, spy: Spy, adds: bool) -> None:
    for text in [*texts(30_000), *texts(5000)]:
        expected = spy.backend.encode(text, add_special_tokens=adds).ids
        assert tokenizer.encode(text, add_special_tokens=adds) == expected
        assert tokenizer.decode(expected) == spy.backend.decode(expected)
    assert spy.held and max(spy.held) <= SHORT


def test_bytes_are_joined_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = saved(byte_level(), tmp_path)
    decoder = tokenizer.decoder(skip_special_tokens=True)
    assert isinstance(decoder, ByteLevelDecoder)
    lengths: list[int] = []
    bytes_of = decoder.bytes_of

    def note(token_ids: list[int]) -> bytes:
        lengths.append(len(token_ids))
        return bytes_of(token_ids)

    monkeypatch.setattr(decoder, "bytes_of", note)
    ids = tokenizer.encode("\u85d4" * 20_000)
    assert tokenizer.decode(ids) == "\u85d4" * 20_000
    assert sum(lengths) == 60_000 and max(lengths) <= SHORT


def test_no_more_is_counted_than_there_is(tokenizer: Tokenizer) -> None:
    for text in texts(300_000):
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
        count, length = tokenizer.count_tokens(text, 1 << 30)
        assert count <= num_tokens and length == len(text)
        # What is left out for the cuts is little.
        num_pieces = len(text) // (1 << 16) + 1
        assert count >= num_tokens - 2 * num_pieces * (1024 + 4 * tokenizer.max_token_length)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_cuts_anywhere_are_allowed_for(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(tokenizer_module, "_CHARACTERS_AT_ONCE", size)
    for text in texts(4000):
        assert tokenizer.count_tokens(text, 1 << 30)[0] <= len(
            tokenizer.encode(text, add_special_tokens=False)
        )


def processor_of(tokenizer: Tokenizer) -> InputProcessor:
    return InputProcessor(
        tokenizer, vocab_size=1000, max_model_len=WINDOW, max_num_seqs=8, seed=0, eos_token_ids=()
    )


def test_the_rest_of_a_text_that_cannot_fit_is_not_tokenized(tokenizer: Tokenizer, spy: Spy) -> None:
    processor = processor_of(tokenizer)
    text = "z" + "a z" * (4 << 20)
    with pytest.raises(
        RequestError, match=r"^prompt: got more than 19999 tokens in the first \d+ of 12582913 ch"
    ) as caught:
        processor.process(text, SamplingParams())
    assert caught.value.parameter == "prompt"
    assert sum(spy.lengths) <= 1 << 18 and not spy.held


def test_a_long_text_that_fits_is_taken(tmp_path: Path) -> None:
    processor = processor_of(saved(byte_level(), tmp_path))
    params = SamplingParams(max_tokens=1)
    # The longest that any window takes, and one token more.
    assert len(processor.process(RUN * (WINDOW - 1), params).token_ids) == WINDOW - 1
    with pytest.raises(RequestError, match=r"^prompt: got 20000 tokens, allowed are at most 19999: "):
        processor.process(RUN * WINDOW, params)
    # Shorter ones are refused with their number of tokens.
    with pytest.raises(RequestError, match=r"^prompt: got 200000 tokens, allowed are at most 19999: "):
        processor.process("z" * 200_000, params)


def test_half_a_character_in_a_long_text(tmp_path: Path) -> None:
    processor = processor_of(saved(byte_level(), tmp_path))
    for length in (10, 20_000, 2 << 20):
        with pytest.raises(RequestError, match=r"^prompt: not valid Unicode text"):
            processor.process("a" * length + "\ud800", SamplingParams())


@pytest.mark.parametrize("length", [10, (1 << 16) - 1, 1 << 16, 150_000])
def test_long_lists_of_ids(length: int) -> None:
    processor = InputProcessor(
        None, vocab_size=1000, max_model_len=200_000, max_num_seqs=8, seed=0, eos_token_ids=()
    )  # type: ignore[arg-type]
    ids = [index % 1000 for index in range(length)]
    params = SamplingParams(max_tokens=1)
    for prompt in (ids, tuple(ids), np.array(ids)):
        taken = processor.process(prompt, params).token_ids  # type: ignore[arg-type]
        assert taken.dtype == np.int32 and taken.tolist() == ids
    for bad, shown in (
        (True, "bool"),
        (False, "bool"),
        (1000, "1000"),
        (-1, "-1"),
        ("a", "str"),
        (1.0, "float"),
    ):
        for place in (0, length // 2, length - 1):
            wrong: list[Any] = [*ids[:place], bad, *ids[place + 1 :]]
            with pytest.raises(
                RequestError, match=f"got token id {shown}, allowed are integers from 0 to 999"
            ):
                processor.process_all([[5], wrong, [0]], [params] * 3)
