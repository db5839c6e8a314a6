"""An answer has one text, however it is asked for: whole, in a stream, with stop strings, with log-probabilities."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose_backend import LLM, AsyncEngine, CompletionOutput, SamplingParams
from rose_backend.engine.output_thread import Ending, IncrementalTokens, NewTokens, OutputProcessor
from rose_backend.engine.outputs import GrowingCompletions
from rose_backend.engine.request import Completion, InputProcessor, Request
from rose_backend.engine.tokenizer import Tokenizer
from tests.engine.test_text_streams import kind_named, library_text, text_behind
from tests.support.random_tokenizers import KINDS, save

NEVER = "never seen in a text"


@cache
def _processor(directory: Path) -> InputProcessor:
    return InputProcessor(
        Tokenizer(directory), vocab_size=1000, max_model_len=512, max_num_seqs=8, seed=0, eos_token_ids=()
    )


@pytest.fixture(params=KINDS)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def processor(name: str, tmp_path: Path) -> InputProcessor:
    return _processor(save(kind_named(name), tmp_path))


class Play:
    """One request whose tokens are known."""

    def __init__(self, processor: InputProcessor, prompt: list[int], *, streams: bool = False, **params: Any):
        self.request: Request = processor.make(
            prompt, SamplingParams(max_tokens=100, **params), is_streaming=streams
        )
        self._outputs = OutputProcessor(processor.tokenizer)
        self._prompt = prompt
        self._growing = GrowingCompletions()

    @property
    def completion(self) -> Completion:
        return self.request.completions[0]

    def finish(self, answer: list[int], portions: list[int]) -> CompletionOutput:
        """Let the request draw ``answer``; what is decoded before its end ends at ``portions``."""
        if self.completion.needs_each_token:
            for index, token_id in enumerate(answer):
                self._process([token_id], is_last=index == len(answer) - 1)
                if self.completion.text.is_finished:
                    break
        else:
            for start, end in zip([0, *portions], portions, strict=False):
                part = np.array(answer[start:end], np.int32)
                self._outputs.process(
                    IncrementalTokens([self.completion], [len(self._prompt) + start], [len(part)], part)
                )
            self.completion.token_ids = np.array([*self._prompt, *answer], np.int32)
            self._process([], is_last=True)
        (whole,) = self._growing.snapshot()
        return whole

    def _process(self, token_ids: list[int], *, is_last: bool) -> None:
        endings = {self.completion: Ending("length", None)} if is_last else {}
        followed = [self.completion] * len(token_ids)
        words = np.zeros((len(token_ids), 2), np.float32)
        message = NewTokens(followed, token_ids, np.arange(len(token_ids)), words, endings, False)
        requests, _ = self._outputs.process(message)
        for request in requests:
            self._growing.add(self._outputs.request_output(request).outputs)


def test_every_way_gives_the_same_text(name: str, processor: InputProcessor) -> None:
    kind, rng = kind_named(name), random.Random(name)
    ways: list[dict[str, Any]] = [
        {},
        {"streams": True},
        {"stop": [NEVER]},
        {"stop": [NEVER], "include_stop_str_in_output": True, "streams": True},
        {"logprobs": 0},
        {"logprobs": 0, "streams": True},
    ]
    for _ in range(150):
        (prompt, unfinished), answer = kind.prompt(rng), [*kind.answer(rng), kind.words[0]]
        prompt.insert(0, kind.words[1])
        skips = rng.random() < 0.7
        expected = library_text(kind, prompt, unfinished, answer, skips=skips)
        ids = prompt + unfinished
        portions = sorted(rng.sample(range(len(answer) + 1), min(2, len(answer))))
        for way in ways:
            play = Play(processor, ids, skip_special_tokens=skips, **way)
            output = play.finish(answer, portions)
            assert (output.text, output.token_ids) == (expected, answer), (way, ids, answer)
            assert output.finish_reason == "length"


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Look for stop strings character by character, as a reader would."""
    for end in range(1, len(text) + 1):
        if matches := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(matches, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("streams", [False, True])
def test_stop_strings_are_found_wherever_tokens_end(
    name: str, processor: InputProcessor, streams: bool
) -> None:
    kind, rng, num_stopped = kind_named(name), random.Random(name), 0
    for _ in range(150):
        prompt, answer = [kind.words[0], *kind.prompt(rng)[0]], [*kind.answer(rng), kind.words[0]]
        whole = library_text(kind, prompt, [], answer, skips=True)
        stops = [NEVER]
        for _ in range(rng.randrange(3)):
            start = rng.randrange(max(len(whole), 1))
            stops.append(whole[start : start + rng.randrange(1, 6)] or NEVER)
        expected, stop = first_stop(whole, stops)
        keeps = rng.random() < 0.5
        play = Play(processor, prompt, streams=streams, stop=stops, include_stop_str_in_output=keeps)
        output = play.finish(answer, [])
        num_stopped += stop is not None
        assert output.text == expected + (stop or "") * keeps, (prompt, answer, stops)
        assert (output.stop_reason, output.finish_reason) == (stop, "stop" if stop else "length")
        assert output.token_ids == answer[: len(output.token_ids)]
    assert num_stopped > 50


def test_text_ends_before_a_stop_token_that_was_decoded_before_it_was_known_to_be_one(
    name: str, processor: InputProcessor
) -> None:
    kind = kind_named(name)
    prompt, answer = [kind.words[0]], [kind.words[0], kind.words[1], kind.words[0]]
    play = Play(processor, prompt)
    completion = play.completion
    outputs = OutputProcessor(processor.tokenizer)
    part = np.array(answer, np.int32)
    outputs.process(IncrementalTokens([completion], [1], [3], part))
    completion.token_ids = np.array([*prompt, *answer], np.int32)
    endings = {completion: Ending("stop", answer[-1])}
    (request,), _ = outputs.process(NewTokens([], [], np.zeros(0, np.intp), None, endings, False))
    (output,) = outputs.request_output(request).outputs
    assert output.text == library_text(kind, prompt, [], answer[:-1], skips=True)
    assert output.token_ids == answer


@pytest.fixture
def byte_fallback_model(tiny_model_path: Path, tmp_path: Path) -> Iterator[Path]:
    """Yield the embedded model with a tokenizer most of whose tokens are bytes."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_model_path, directory)
    save(kind_named("byte-fallback"), directory)
    yield directory


# Nine of ten tokens that the model draws are unknown to the tokenizer and have no text.
ANYTHING: dict[str, Any] = {"temperature": 5.0, "top_k": 0, "max_tokens": 400, "ignore_eos": True, "seed": 3}


def test_engines_agree(byte_fallback_model: Path, one_thread: None) -> None:
    kind, path = kind_named("byte-fallback"), str(byte_fallback_model)
    prompt = [*kind.words[:3], *kind.special]
    n = 3
    with LLM(path, dtype="float32", max_num_seqs=8) as llm:
        whole = llm.generate([prompt], SamplingParams(n=n, **ANYTHING))[0].outputs
        stopped = llm.generate([prompt], SamplingParams(n=n, stop=[NEVER], **ANYTHING))[0].outputs
        streamed = list(llm.stream(prompt, SamplingParams(n=n, **ANYTHING)))

    async def generate() -> list[CompletionOutput]:
        engine = AsyncEngine(path, dtype="float32", max_num_seqs=8)
        try:
            outputs = [each async for each in engine.generate(prompt, SamplingParams(n=n, **ANYTHING))]
        finally:
            await engine.shutdown()
        return outputs[-1].outputs

    other = asyncio.run(generate())
    for index in range(n):
        tokens = whole[index].token_ids
        expected = text_behind("byte-fallback", prompt, tokens)
        for each in (whole, stopped, streamed[-1].outputs, other):
            assert (each[index].token_ids, each[index].text) == (tokens, expected)
        news = [out.outputs[index].delta_text for out in streamed if len(out.outputs) > index]
        assert "".join(news) == expected
    assert len({completion.text for completion in whole}) == n
    assert any("\ufffd" in completion.text for completion in whole)
