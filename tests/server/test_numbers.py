"""Numbers as clients write them: as texts, and integers with a decimal point, where vLLM takes them."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import pytest
from pydantic import BaseModel

from rose_backend.engine.sampling_params import RANGES
from rose_backend.server.protocol import ChatCompletionRequest, CompletionRequest
from tests.server.live_server import LiveServer
from tests.server.test_chat import MESSAGES

WRITTEN = ("1", "1.0", 1.0, " 1 ", "1e0", "0_1", "+1", "0.5", 0.5, "one", "", "0x1", [1], {}, "½")
MODELS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "completion": (CompletionRequest, {"prompt": "a"}),
    "chat_completion": (ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}]}),
}


def test_texts_of_numbers(server: LiveServer) -> None:
    numbers = {
        "n": 2,
        "max_tokens": 9,
        "temperature": 0.5,
        "seed": 4,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.01,
    }
    numbers |= {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
    }
    texts = {name: str(number) for name, number in numbers.items()} | {"stop_token_ids": ["268", 271.0]}
    numbers |= {"stop_token_ids": [268, 271]}
    path = "/v1/chat/completions"
    for body in ({"prompt": "Once"}, {"messages": MESSAGES}):
        post = (lambda **fields: server.post(path, fields)) if "messages" in body else server.complete
        expected, answer = post(**body, **numbers), post(**body, **texts)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == expected.json()["choices"]
    answer = server.post(
        path, {"messages": MESSAGES, "max_completion_tokens": "3", "truncate_prompt_tokens": "5"}
    )
    assert answer.json()["usage"]["prompt_tokens"] == 5


def taken(model: type[BaseModel], name: str, body: dict[str, Any]) -> object:
    """Return the value of a field after validation, or that it is refused."""
    try:
        return getattr(model.model_validate(body), name)
    except Exception as error:
        assert type(error).__name__ in ("ValidationError", "VLLMValidationError")
        return "refused"


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("module", MODELS)
def test_numbers_are_written_as_for_vllm(module: str) -> None:
    ours, body = MODELS[module]
    theirs = getattr(importlib.import_module(f"vllm.entrypoints.openai.{module}.protocol"), ours.__name__)
    names = (
        RANGES.keys() | {"max_completion_tokens", "top_logprobs", "truncate_prompt_tokens"}
    ) & theirs.model_fields.keys()
    if module == "chat_completion":
        body, names = {**body, "logprobs": True}, names - {"logprobs"}
    assert len(names) > 12
    for name in sorted(names):
        for value in WRITTEN:
            fields = {**body, name: value}
            assert taken(ours, name, fields) == taken(theirs, name, fields), (name, value)
    for value in WRITTEN:
        for name, whole in (
            ("stop_token_ids", [value]),
            ("allowed_token_ids", [value]),
            ("logit_bias", {"5": value}),
        ):
            fields = {**body, name: whole}
            assert taken(ours, name, fields) == taken(theirs, name, fields), value
