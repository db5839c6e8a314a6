"""Log-probabilities call tokens as vLLM does, and give the bytes of each, also of a part of a character."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine.logprobs import LogprobsProcessor

from rose_backend.engine.outputs import CompletionOutput, Logprob, RequestOutput
from rose_backend.engine.request import InputProcessor
from rose_backend.engine.tokenizer import MAX_TOKENS_BEFORE, Tokenizer, TokenTexts, make_decoder
from rose_backend.server.answers import Answer, AnswerOptions, ChatAnswer, CompletionAnswer
from rose_backend.server.service import RequestRecord
from tests.engine.test_one_text import Play
from tests.engine.test_text_streams import kind_named, spelled, utf8
from tests.support.random_tokenizers import KINDS, save


def texts_of(backend: Backend) -> TokenTexts:
    return TokenTexts(backend, make_decoder(backend, False))


def vllm_texts(backend: Backend, token_ids: list[int], before: list[int]) -> list[str]:
    """Return what vLLM calls tokens that may follow ``before``."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    processor = LogprobsProcessor(tokenizer, None, None, None, None, None)
    texts = convert_ids_list_to_tokens(tokenizer, token_ids)
    return processor._verify_tokens(texts, token_ids, before[-4:])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("has_metaspace", [False, True])
def test_texts_are_vllms(name: str, has_metaspace: bool) -> None:
    kind, rng = kind_named(name), random.Random(name)
    backend = Backend.from_str(kind.backend.to_str())
    if has_metaspace:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Punctuation(), pre_tokenizers.Metaspace()]
        )
    texts, everything = texts_of(backend), list(range(backend.get_vocab_size()))
    num_characters = 0
    for _ in range(10):
        before = [token for token in kind.answer(rng) if token < len(everything)]
        ours = [texts.text(token, before[-MAX_TOKENS_BEFORE:]) for token in everything]
        assert ours == vllm_texts(backend, everything, before), before
        num_characters += sum(map(len, ours))
    assert num_characters > 100


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_the_last_part_of_a_character_is_called_by_all_of_it(name: str) -> None:
    texts = texts_of(kind_named(name).backend)
    tokens = spelled(name, utf8("a🙂中"))
    named = [texts.text(token, tokens[max(place - 4, 0) : place]) for place, token in enumerate(tokens)]
    assert named == ["a", "", "", "", "🙂", "", "", "中"]
    assert [texts.bytes_of(token) for token in tokens] == [bytes([byte]) for byte in utf8("a🙂中")]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_outputs_call_tokens_by_those_in_front_of_them(name: str, streams: bool, tmp_path: Path) -> None:
    kind = kind_named(name)
    tokenizer = Tokenizer(save(kind, tmp_path))
    processor = InputProcessor(
        tokenizer, vocab_size=1000, max_model_len=512, max_num_seqs=8, seed=0, eos_token_ids=()
    )
    tokens = spelled(name, utf8("🙂a中"))
    output = Play(processor, [kind.words[0]], streams=streams, logprobs=0).finish(tokens, [])
    assert output.logprobs is not None
    named = [position[token].decoded_token for position, token in zip(output.logprobs, tokens, strict=True)]
    assert named == ["", "", "", "🙂", "a", "", "", "中"]


@pytest.mark.parametrize(
    ("name", "token", "data"),
    [
        ("byte-level", "Ġrose", b" rose"),
        ("byte-level", "<s>", b"<s>"),
        ("byte-level", "<tool é>", "<tool é>".encode()),
        ("byte-level", "ðŁ", b"\xf0\x9f"),
        ("byte-fallback", "▁rose", b"rose"),
        ("byte-fallback", "\ufffd", b"\xef\xbf\xbd"),
        ("metaspace", "▁rose", b"rose"),
        ("word-piece", "##s", b"##s"),
        ("none", "the", b"the"),
    ],
)
def test_bytes_of_tokens(name: str, token: str, data: bytes) -> None:
    backend = Backend.from_str(kind_named(name).backend.to_str())
    if backend.token_to_id(token) is None:
        backend.add_tokens([token])
    assert texts_of(backend).bytes_of(backend.token_to_id(token)) == data
    if "▁" in token:
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        assert texts_of(backend).bytes_of(backend.token_to_id(token)) == b" " + data


def answered(answer: Answer, output: RequestOutput, *, streams: bool) -> dict[str, Any]:
    if streams:
        event = b"".join(answer.events(0, output)).split(b"\n\n")[-2]
        body = json.loads(event.removeprefix(b"data: "))
    else:
        list(answer.keep(0, output))
        usage = RequestRecord("id", "/v1/completions").usage()
        body = json.loads(b"".join(answer.body(usage)))
    logprobs: dict[str, Any] = body["choices"][0]["logprobs"]
    return logprobs


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_answers_with_parts_of_a_character(name: str, streams: bool) -> None:
    texts = texts_of(kind_named(name).backend)
    tokens = spelled(name, utf8("a🙂"))
    other = spelled(name, b"\xe4")[0]
    logprobs = []
    for place, token in enumerate(tokens):
        before = tokens[:place][-MAX_TOKENS_BEFORE:]
        logprobs.append(
            {
                token: Logprob(-1.0, 1, texts.text(token, before)),
                other: Logprob(-2.0, 2, texts.text(other, before)),
            }
        )
    completion = CompletionOutput(0, "a🙂", tokens, logprobs, finish_reason="length")
    output = RequestOutput("r", None, [1], [completion], finished=True)
    options = AnswerOptions("id", 0, "m")
    chat = ChatAnswer(options, token_bytes=texts.bytes_of, num_top_logprobs=2)
    content = answered(chat, output, streams=streams)["content"]
    assert [each["bytes"] for each in content] == [[byte] for byte in utf8("a🙂")]
    assert [each["token"] for each in content] == ["a", "", "", "", "🙂"]
    assert all(each["top_logprobs"][1]["bytes"] == [0xE4] for each in content)
    listed = answered(CompletionAnswer(options), output, streams=streams)
    assert listed["tokens"] == ["a", "", "", "", "🙂"]
    assert listed["text_offset"] == [0, 1, 1, 1, 1]
