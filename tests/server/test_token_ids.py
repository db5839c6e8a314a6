"""Token ids and token counts that answers report when they are asked to, as vLLM's do."""

from __future__ import annotations

from typing import Any

import pytest

from rose_backend import LLM, SamplingParams
from tests.server.live_server import LiveServer, check_refused, running_server, stream
from tests.server.test_chat import MESSAGES, RENDERED

CHAT = "/v1/chat/completions"
FIELDS: dict[str, Any] = {"n": 2, "seed": 3, "max_tokens": 9, "return_token_ids": True}
PROMPTS = ["Once upon a time", "薔薇"]
USAGE = {"include_usage": True, "continuous_usage_stats": True}


def choices_of(events: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    return [each["choices"][0] for each in events if each["choices"] and each["choices"][0]["index"] == index]


def test_token_ids_of_completions(server: LiveServer, llm: LLM) -> None:
    params = SamplingParams(n=2, seed=3, max_tokens=9)
    expected = [
        (output.prompt_token_ids, completion.token_ids)
        for output in llm.generate(PROMPTS, params)
        for completion in output.outputs
    ]
    choices = server.complete(prompt=PROMPTS, **FIELDS).json()["choices"]
    assert [(each["prompt_token_ids"], each["token_ids"]) for each in choices] == expected
    events = stream(server, prompt=PROMPTS, **FIELDS)
    for index, (prompt, token_ids) in enumerate(expected):
        mine = choices_of(events, index)
        assert [each["prompt_token_ids"] for each in mine] == [prompt] + [None] * (len(mine) - 1)
        assert [token for each in mine for token in each["token_ids"]] == token_ids


def test_token_ids_of_chats(server: LiveServer, llm: LLM) -> None:
    output = llm.generate(RENDERED, SamplingParams(n=2, seed=3, max_tokens=9))[0]
    expected = [completion.token_ids for completion in output.outputs]
    answer = server.post(CHAT, {"messages": MESSAGES, **FIELDS}).json()
    assert answer["prompt_token_ids"] == output.prompt_token_ids
    assert [each["token_ids"] for each in answer["choices"]] == expected
    events = stream(server, CHAT, messages=MESSAGES, **FIELDS)
    prompts = [each["prompt_token_ids"] for each in events if "prompt_token_ids" in each]
    # As in vLLM, in the event that opens each completion.
    assert prompts == [output.prompt_token_ids] * 2
    for index, token_ids in enumerate(expected):
        opening, *mine = choices_of(events, index)
        assert opening["delta"] == {"role": "assistant", "content": ""} and "token_ids" not in opening
        assert [token for each in mine for token in each["token_ids"]] == token_ids


def test_nobody_gets_token_ids_unasked(server: LiveServer) -> None:
    for value in (None, False):
        answer = server.complete(prompt=PROMPTS, max_tokens=2, return_token_ids=value)
        assert answer.status_code == 200
        for choice in answer.json()["choices"]:
            assert choice["token_ids"] is choice["prompt_token_ids"] is None
        events = stream(server, CHAT, messages=MESSAGES, max_tokens=2, return_token_ids=value)
        assert events[0]["prompt_token_ids"] is None
        assert all(event["choices"][0].get("token_ids") is None for event in events)


def test_token_ids_take_the_place_of_an_echo(server: LiveServer) -> None:
    fields = {"prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    plain = server.complete(**fields).json()["choices"][0]
    assert server.complete(**fields, echo=True).json()["choices"][0] == plain


def test_long_prompts_come_back_whole(server: LiveServer) -> None:
    ids = [number % 2500 for number in range(1020)]
    answer = server.complete(prompt=[ids] * 5, max_tokens=1, return_token_ids=True).json()
    assert [each["prompt_token_ids"] for each in answer["choices"]] == [ids] * 5


def test_returned_token_ids_count_as_tokens(server: LiveServer, tiny_model_path: Any) -> None:
    with running_server(tiny_model_path, {"max_answer_tokens": 120}) as small:
        body = {"prompt": [[5] * 20, [6] * 20], "max_tokens": 40}
        assert small.complete(**body).status_code == 200
        assert small.complete(**{**body, "return_token_ids": False}).status_code == 200
        answer = small.complete(**body, return_token_ids=True)
        check_refused(answer, "max_tokens", "got up to 200 tokens in 2 completions")


def test_tokens_as_token_ids(server: LiveServer) -> None:
    body = {"prompt": "Once", "logprobs": 2, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    named = server.complete(**body, return_tokens_as_token_ids=True).json()["choices"][0]
    plain = server.complete(**body).json()["choices"][0]
    names = [f"token_id:{token}" for token in named["token_ids"]]
    shown = named["logprobs"]
    assert shown["tokens"] == names and shown["token_logprobs"] == plain["logprobs"]["token_logprobs"]
    assert shown["text_offset"] == [len("".join(names[:index])) for index in range(5)]
    for name, top in zip(names, shown["top_logprobs"], strict=True):
        assert name in top and all(each.startswith("token_id:") for each in top)
    assert all(not token.startswith("token_id:") for token in plain["logprobs"]["tokens"])
    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_tokens": 5, "temperature": 0}
    fields = {**chat, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = server.post(CHAT, fields).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert [each["token"] for each in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(top["token"].startswith("token_id:") for each in content for top in each["top_logprobs"])


def test_usage_in_every_event(server: LiveServer) -> None:
    fields = {"n": 2, "seed": 4, "max_tokens": 7, "ignore_eos": True, "stream_options": USAGE}
    for path, prompts in (("/v1/completions", {"prompt": [[5, 6, 7], [8]]}), (CHAT, {"messages": MESSAGES})):
        plain = {**fields, "stream_options": {"include_usage": True}, **prompts}
        events, last = stream(server, path, **fields, **prompts), stream(server, path, **plain)[-1]
        assert events[-1]["choices"] == [] and events[-1]["usage"] == last["usage"]
        nums: dict[int, int] = {}
        for event in events[:-1]:
            usage, choice = event["usage"], event["choices"][0]
            index = choice["index"]
            assert usage["completion_tokens"] >= nums.get(index, 0)
            nums[index] = usage["completion_tokens"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            if path != CHAT:
                assert usage["prompt_tokens"] == (3 if index < 2 else 1)
            else:
                assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
                assert usage["completion_tokens"] > 0 or "role" in choice["delta"]
        assert set(nums.values()) == {7}


@pytest.mark.parametrize("options", [{"continuous_usage_stats": True}, {**USAGE, "include_usage": False}])
def test_usage_in_events_needs_the_usage_at_the_end(server: LiveServer, options: dict[str, bool]) -> None:
    events = stream(server, prompt="a", max_tokens=3, stream_options=options)
    assert all("usage" not in event for event in events)
