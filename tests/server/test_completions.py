"""``/v1/completions`` gives what the engine gives, whole and as a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, cast

import openai
import pytest
from starlette.types import Message

from rose_backend import LLM, SamplingParams
from rose_backend.engine.outputs import CompletionOutput, FinishReason, RequestOutput
from rose_backend.server.answers import AnswerOptions, CompletionAnswer
from rose_backend.server.generation import ClientWatch, EventStream, PromptOutput
from rose_backend.server.service import RequestRecord
from tests.server.live_server import (
    GREEDY,
    MODEL,
    LiveServer,
    stream,
)

PROMPT = "Once upon a time"
IDS = [5, 6, 7]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        (PROMPT, [PROMPT]),
        ([PROMPT, "Die Rose blüht", "薔薇"], [PROMPT, "Die Rose blüht", "薔薇"]),
        (IDS, [IDS]),
        ([IDS, [9], [1, 2, 3, 4]], [IDS, [9], [1, 2, 3, 4]]),
    ],
)
def test_every_form_of_prompt(server: LiveServer, llm: LLM, prompt: Any, prompts: list[Any]) -> None:
    expected = llm.generate(prompts, SamplingParams(**GREEDY))
    answer = server.openai.completions.create(model=MODEL, prompt=prompt, **GREEDY)
    assert [choice.text for choice in answer.choices] == [output.outputs[0].text for output in expected]
    assert [choice.index for choice in answer.choices] == list(range(len(prompts)))
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.object == "text_completion" and answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in expected)
    assert answer.usage.completion_tokens == 12 * len(prompts)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 3, "n": 3, "temperature": 0.9},
        {"seed": 4, "top_p": 0.7, "top_k": 20, "min_p": 0.05},
        {"temperature": 0.0, "repetition_penalty": 1.7},
        {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 1.1},
        {"temperature": 0.0, "stop": " king"},
        {"temperature": 0.0, "stop": [" zebra", "the"], "include_stop_str_in_output": True},
        {"temperature": 0.0, "stop": "the", "min_tokens": 9},
        {"temperature": 0.0, "stop_token_ids": [268, 271]},
        {"temperature": 0.0, "bad_words": ["king", "very angry"], "allowed_token_ids": list(range(600))},
        {"seed": 3, "n": 2, "bad_words": ["the"], "logit_bias": {"259": 4.5, "11": "-2.5"}},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_every_sampling_field(server: LiveServer, llm: LLM, fields: dict[str, Any]) -> None:
    fields = {"max_tokens": 16, **fields}
    bias = {key: float(value) for key, value in fields.get("logit_bias", {}).items()}
    expected = llm.generate(PROMPT, SamplingParams(**{**fields, "logit_bias": bias}))[0].outputs
    choices = server.complete(prompt=PROMPT, **fields).json()["choices"]
    assert [choice["text"] for choice in choices] == [completion.text for completion in expected]
    for name in ("finish_reason", "stop_reason"):
        assert [choice[name] for choice in choices] == [getattr(completion, name) for completion in expected]


def test_bias_is_cut_off_at_a_hundred(server: LiveServer) -> None:
    def drawn(bias: dict[int, float]) -> int:
        fields = {"allowed_token_ids": [5, 7], "logit_bias": bias, "return_token_ids": True}
        answer = server.complete(prompt=PROMPT, temperature=0, max_tokens=1, **fields)
        return int(answer.json()["choices"][0]["token_ids"][0])

    likelier = drawn({})
    other = 12 - likelier
    assert drawn({likelier: 100, other: 1e6}) == drawn({likelier: -1e6, other: -100}) == likelier
    assert drawn({other: 50}) == other


def test_null_takes_the_default(server: LiveServer) -> None:
    fields = (
        *("temperature", "top_p", "n", "stop", "logprobs", "stream", "stream_options", "model", "top_k"),
        "max_tokens",
    )
    plain = server.complete(prompt=PROMPT, seed=5).json()["choices"]
    assert (
        server.complete(prompt=PROMPT, seed=5, echo=None, **dict.fromkeys(fields)).json()["choices"] == plain
    )


def test_logprobs_are_the_engines(server: LiveServer, llm: LLM) -> None:
    expected = llm.generate(PROMPT, SamplingParams(logprobs=3, **GREEDY))[0].outputs[0]
    shown = (
        server.openai.completions.create(model=MODEL, prompt=PROMPT, logprobs=3, **GREEDY).choices[0].logprobs
    )
    assert shown is not None and expected.logprobs is not None
    assert shown.tokens is not None and "".join(shown.tokens) == expected.text
    assert shown.text_offset == [len("".join(shown.tokens[:index])) for index in range(len(shown.tokens))]
    chosen = [entry[token] for token, entry in zip(expected.token_ids, expected.logprobs, strict=True)]
    assert shown.token_logprobs == pytest.approx([entry.logprob for entry in chosen], abs=1e-4)
    assert shown.top_logprobs is not None
    for top, entry in zip(shown.top_logprobs, expected.logprobs, strict=True):
        assert top == pytest.approx({each.decoded_token: each.logprob for each in entry.values()}, abs=1e-4)
        assert len(top) == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": PROMPT},
        {"prompt": PROMPT, "n": 3, "seed": 2, "temperature": 1.0},
        {"prompt": [PROMPT, "薔薇"], "n": 2, "seed": 8, "temperature": 1.0, "max_tokens": 20},
        {"prompt": PROMPT, "n": 4, "seed": 2, "temperature": 1.0, "stop": "e", "max_tokens": 40},
        {"prompt": PROMPT, "logprobs": 2},
        {"prompt": PROMPT, "stop": ["the", "king was"], "max_tokens": 30},
        {"prompt": [IDS, [9]], "echo": True},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_a_stream_adds_up_to_the_whole(server: LiveServer, fields: dict[str, Any]) -> None:
    whole = server.complete(**{**GREEDY, **fields}).json()
    events = stream(server, **{**GREEDY, **fields}, stream_options={"include_usage": True})
    usage = events.pop()
    assert (
        usage["choices"] == [] and usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    )
    assert usage["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert all(event["usage"] is None for event in events)
    assert len({event["id"] for event in events}) == 1
    for choice in whole["choices"]:
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [part["finish_reason"] for part in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"] is not None:
            for name, values in choice["logprobs"].items():
                joined = [value for part in mine for value in part["logprobs"][name]]
                for value, expected in zip(joined, values, strict=True):
                    assert value == pytest.approx(expected, abs=1e-4)
    assert len(events) >= len(whole["choices"])


def test_a_prompt_with_several_completions_counts_once(server: LiveServer) -> None:
    usage = server.complete(prompt=[1, 2, 3, 4], n=3, seed=1, max_tokens=5, ignore_eos=True).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 15, 19)


def test_usage_event_only_when_asked_for(server: LiveServer) -> None:
    events = stream(server, prompt=PROMPT, **GREEDY)
    assert all(event["choices"] and "usage" not in event for event in events)


def test_echo_puts_the_prompt_in_front(server: LiveServer, llm: LLM) -> None:
    text = server.text(prompt=PROMPT, **GREEDY)
    assert server.text(prompt=PROMPT, echo=True, **GREEDY) == PROMPT + text
    ids = llm.tokenizer.encode(PROMPT)
    assert server.text(prompt=ids, echo=True, **GREEDY) == PROMPT + text


def test_cached_tokens_are_reported(server: LiveServer) -> None:
    prompt = "A prompt that no other test has, long enough for a block or two: " + "rose " * 20
    first, second = (server.complete(prompt=prompt, **GREEDY).json() for _ in range(2))
    assert first["choices"] == second["choices"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    num_found = second["usage"]["prompt_tokens"] - 1
    assert cached == num_found - num_found % 16 > 0


def test_many_streams_at_once(server: LiveServer, llm: LLM) -> None:
    prompts = [f"Chapter {number}. The king" for number in range(24)]
    expected = llm.generate(prompts, SamplingParams(**GREEDY))

    async def one(client: openai.AsyncOpenAI, prompt: str) -> str:
        events = await client.completions.create(model=MODEL, prompt=prompt, stream=True, **GREEDY)
        return "".join([event.choices[0].text async for event in events])

    async def body() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    assert asyncio.run(body()) == [output.outputs[0].text for output in expected]


def test_tokens_without_text_are_events() -> None:
    answer = CompletionAnswer(AnswerOptions("cmpl-1", 0, "m"))

    def events(token_ids: list[int], new_text: str) -> list[bytes]:
        output = RequestOutput("r", None, [1], [CompletionOutput(0, new_text, token_ids)], finished=False)
        return b"".join(answer.events(0, output)).split(b"\n\n")[:-1]

    assert len(events([5], "")) == 1
    (event,) = events([6], "\u8594")
    assert json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] == "\u8594"


def test_the_last_events_and_the_end_are_one_message() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    def output(num_tokens: int) -> PromptOutput:
        reason: FinishReason | None = "length" if num_tokens == 3 else None
        completion = CompletionOutput(0, "a", [5], finish_reason=reason)
        return 0, RequestOutput("r", None, [1], [completion], finished=num_tokens == 3)

    async def outputs() -> AsyncGenerator[PromptOutput, None]:
        yield output(2)
        yield output(3)

    answer = CompletionAnswer(AnswerOptions("cmpl-1", 0, "m", include_usage=True))
    record = RequestRecord("r", "/v1/completions", num_output_tokens=3)
    stream = EventStream(output(1), outputs(), answer, record, 1, cast(ClientWatch, None))
    asyncio.run(stream._send_events(send))
    assert [message["more_body"] for message in sent] == [True, True, False]
    *_, last, usage, done, rest = sent[-1]["body"].split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert b'"finish_reason":"length"' in last
    assert json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"] == 3
