"""A token of a stream costs the same behind any number of others: elements of lists and characters are counted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rose_backend import SamplingParams
from rose_backend.engine.client import OutputStream
from rose_backend.engine.messages import Update
from rose_backend.engine.output_thread import Ending, NewTokens, OutputProcessor
from rose_backend.engine.outputs import RequestOutput
from rose_backend.engine.request import InputProcessor, ProcessedInput
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.server.answers import Answer, AnswerOptions, ChatAnswer, CompletionAnswer
from rose_backend.server.generation import Generation
from rose_backend.server.service import RequestRecord, ServerMetrics, Service
from tests.engine.test_text_streams import kind_named
from tests.support.random_tokenizers import save

NUM_TOKENS = 5_000
PROMPT = [4, 5]


class CountingList(list[Any]):
    """Counts its elements that are copied."""

    num_copied = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        CountingList.num_copied += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self) -> Iterator[Any]:
        for element in super().__iter__():
            CountingList.num_copied += 1
            yield element

    def copy(self) -> list[Any]:
        CountingList.num_copied += len(self)
        return super().copy()

    def __add__(self, other: Iterable[Any]) -> list[Any]:
        return [*self, *other]


def make_answer(tokenizer: Tokenizer, *, is_chat: bool) -> Answer:
    options = AnswerOptions("id", 0, "m", include_usage=True)
    if is_chat:
        return ChatAnswer(options, token_bytes=tokenizer.token_texts.bytes_of, num_top_logprobs=1)
    return CompletionAnswer(options)


class Server:
    """The way of one stream from the output thread to the socket, without threads and sockets."""

    def __init__(self, directory: Path, params: SamplingParams, *, is_chat: bool) -> None:
        tokenizer = Tokenizer(directory)
        processor = InputProcessor(
            tokenizer, vocab_size=1000, max_model_len=200_000, max_num_seqs=8, seed=0, eos_token_ids=()
        )
        self.request = processor.make(PROMPT, params, is_streaming=True)
        (self.completion,) = self.request.completions
        self.completion.text.token_ids = CountingList()
        self.processor = OutputProcessor(tokenizer)
        self.answer = make_answer(tokenizer, is_chat=is_chat)
        self.remote: OutputStream | None = None

    async def generate_deltas(self, prompt: ProcessedInput, *, request_id: str) -> Any:
        stream = self.remote = OutputStream(request_id, asyncio.get_running_loop())
        is_over = False
        while not is_over:
            output = await stream.get()
            is_over = output.finished
            yield output

    def draw(self, token_id: int, *, is_last: bool) -> RequestOutput:
        """Let the engine draw a token; return what its process sends."""
        endings = {self.completion: Ending("length", None)} if is_last else {}
        words = np.array([[-1.0, 0.0, -1.0, 0.0]], np.float32)
        words.view(np.int32)[0, [1, 3]] = 1, token_id
        message = NewTokens([self.completion], [token_id], np.array([0]), words, endings, False)
        requests, _ = self.processor.process(message)
        assert requests == [self.request]
        return self.processor.request_output(self.request)


def generation_of(server: Server, params: SamplingParams) -> Generation:
    service = SimpleNamespace(
        engine=server, engine_request_ids=set(), metrics=None, hit_unit=16, tracing=None
    )
    service.metrics = ServerMetrics("tiny", block_size=16, num_blocks=1, max_model_len=200_000)
    processed = ProcessedInput(0, None, np.array(PROMPT, np.int32), params, b"", [])
    return Generation(cast(Service, service), RequestRecord("id", "/v1/completions"), [processed])


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"stop": ["never seen in a text"]}], ids=str)
def test_each_token_of_a_long_stream_costs_the_same(
    name: str, fields: dict[str, Any], is_chat: bool, tmp_path: Path
) -> None:
    kind = kind_named(name)
    params = SamplingParams(max_tokens=NUM_TOKENS, **fields)
    server = Server(save(kind, tmp_path), params, is_chat=is_chat)
    generation = generation_of(server, params)
    num_bytes: list[int] = []

    async def play() -> None:
        outputs = generation.outputs()
        reading = asyncio.create_task(anext(outputs))
        await asyncio.sleep(0)
        stream = server.remote
        assert stream is not None
        for index in range(NUM_TOKENS):
            output = server.draw(kind.words[index % 3], is_last=index == NUM_TOKENS - 1)
            stream.put(Update.of(output).output(None, PROMPT))
            _, got = await reading
            for (each,) in (output.outputs, got.outputs):
                assert len(each.token_ids) == 1 and len(each.text) < 40 and len(each.delta_text) < 40
                assert each.logprobs is None or len(each.logprobs) == 1
            num_bytes.append(sum(map(len, server.answer.events(0, got))))
            if not got.finished:
                reading = asyncio.create_task(anext(outputs))
        await outputs.aclose()

    CountingList.num_copied = 0
    asyncio.run(play())
    assert CountingList.num_copied <= 8 * NUM_TOKENS
    # Offsets in a text have some digits more at its end.
    assert max(num_bytes[100:]) <= max(num_bytes[:100]) + 60
    usage = generation._record.usage()
    assert usage["completion_tokens"] == NUM_TOKENS
    assert f'"completion_tokens":{NUM_TOKENS}'.encode() in server.answer.end_events(usage)
