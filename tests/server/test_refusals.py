"""Every refusal: its status, and an error object that names the field, what was got and what is allowed."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import openai
import pytest
from starlette.types import Message

from rose_backend.server import routes
from rose_backend.server.serve import build_app
from tests.server.live_server import MODEL, LiveServer, check_refused, error_of, running_server, sent

NO_OBJECT = "allowed is: a valid dictionary or object to extract fields from"
BODY = {"prompt": "The rose", "max_tokens": 2}


@pytest.fixture(autouse=True)
def keeps_serving(server: LiveServer) -> Iterator[None]:
    """Check that a refusal changes nothing for others."""
    before = server.text(**BODY, temperature=0)
    num_steps = server.counters().stats.steps
    yield
    server.wait_until_idle()
    # A refused request has not cost a step, an accepted one of a few tokens only few.
    assert server.counters().stats.steps - num_steps < 40
    assert server.text(**BODY, temperature=0) == before


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": None}, "prompt", "prompt: got None, allowed are a string"),
        ({"prompt": ""}, "prompt", "prompt: got no tokens"),
        ({"prompt": []}, "prompt", "prompt: got [], allowed are a string"),
        ({"prompt": [[]]}, "prompt", "prompt: got no tokens"),
        ({"prompt": ["a", 1]}, "prompt", "allowed are a string"),
        ({"prompt": ["a", ""]}, "prompt", "prompt: got no tokens"),
        ({"prompt": [True]}, "prompt", "allowed are a string"),
        ({"prompt": [[1, "a"]]}, "prompt", "got token id str"),
        ({"prompt": [-1]}, "prompt", "got token id -1, allowed are integers from 0 to 2559"),
        ({"prompt": [2560]}, "prompt", "got token id 2560"),
        ({"prompt": [10**40]}, "prompt", "got token id int"),
        ({"prompt": [1] * 1024}, "prompt", "got 1024 tokens, allowed are at most 1023"),
        ({"prompt": "rose " * 50_000}, "prompt", "got 250000 characters, allowed are at most"),
        ({"prompt": [[1]] * 1025}, "prompt", "got 1025 prompts, allowed are at most 1024"),
        ({"prompt": "\ud800"}, "prompt", "not valid Unicode"),
        ({"n": 0}, "n", "n: got 0, allowed is: greater than or equal to 1"),
        ({"n": 129}, "n", "n: got 129, allowed is: less than or equal to 128"),
        ({"n": 9}, "n", "n: got 9, allowed is at most 8"),
        ({"n": 1.5}, "n", "n: got 1.5, allowed is: a valid integer"),
        ({"n": "2.5"}, "n", "n: got '2.5', allowed is: a valid integer, unable to parse"),
        ({"n": "129"}, "n", "n: got '129', allowed is: less than or equal to 128"),
        ({"n": ""}, "n", "n: got '', allowed is: a valid integer"),
        ({"n": "9" * 5000}, "n", "n: got '99999"),
        ({"n": float("nan")}, "n", "n: got nan, allowed is: a finite number"),
        ({"n": float("inf")}, "n", "n: got inf, allowed is: a finite number"),
        ({"n": ["2"]}, "n", "n: got ['2'], allowed is: a valid integer"),
        ({"seed": "9223372036854775808"}, "seed", "seed: got '9223372036854775808'"),
        ({"temperature": "nan"}, "temperature", "temperature: got 'nan', allowed is: "),
        ({"temperature": "inf"}, "temperature", "temperature: got 'inf', allowed is: less than or equal"),
        ({"temperature": "1e999"}, "temperature", "temperature: got '1e999', allowed is: less than or equal"),
        ({"temperature": True}, "temperature", "temperature: got True, allowed is: a valid number"),
        ({"top_p": "0"}, "top_p", "top_p: got '0', allowed is: greater than 0"),
        ({"logprobs": "2"}, "logprobs", "logprobs: got '2', allowed is: a valid integer"),
        ({"logprobs": True}, "logprobs", "logprobs: got True, allowed is: a valid integer"),
        ({"stop_token_ids": [True]}, "stop_token_ids.0", "got True, allowed is: a valid integer"),
        ({"stop_token_ids": ["-1"]}, "stop_token_ids.0", "got '-1', allowed is: greater than or equal to 0"),
        ({"n": True}, "n", "n: got True"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens: got 0"),
        ({"max_tokens": 10**30}, "max_tokens", "max_tokens: got 10000"),
        ({"max_tokens": 1025}, "max_tokens", "got 1025, allowed are at most 1024, the model's window"),
        (
            {"max_tokens": 1024, "min_tokens": 1024},
            "min_tokens",
            "allowed is at most max_tokens, which is 10",
        ),
        ({"min_tokens": 3}, "min_tokens", "at most max_tokens, which is 2"),
        ({"temperature": -0.1}, "temperature", "temperature: got -0.1"),
        ({"temperature": 1e39}, "temperature", "got 1e+39, allowed is: less than or equal to 1000"),
        ({"temperature": 10**400}, "temperature", "temperature: got 1"),
        ({"temperature": float("nan")}, "temperature", "temperature: got nan"),
        ({"temperature": float("inf")}, "temperature", "temperature: got inf"),
        ({"top_p": 0}, "top_p", "top_p: got 0, allowed is: greater than 0"),
        ({"top_k": 2561}, "top_k", "top_k: got 2561"),
        ({"min_p": 1.1}, "min_p", "min_p: got 1.1"),
        ({"seed": 2**63}, "seed", "seed: got 9223372036854775808"),
        ({"presence_penalty": 2.5}, "presence_penalty", "presence_penalty: got 2.5"),
        ({"frequency_penalty": "x"}, "frequency_penalty", "a valid number"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"repetition_penalty": 1e39}, "repetition_penalty", "less than or equal to 100"),
        ({"logprobs": 21}, "logprobs", "logprobs: got 21, allowed is: less than or equal to 20"),
        ({"stop": ""}, "stop", "at least 1 character"),
        ({"stop": 5}, "stop", "stop: got 5, allowed is: a valid string or a valid list"),
        ({"stop": ["a"] * 17}, "stop", "at most 16 items"),
        ({"stop": ["a" * 257]}, "stop.0", "at most 256 characters"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids", "at most 128 items"),
        ({"stop_token_ids": [2560]}, "stop_token_ids", "stop_token_ids: got 2560"),
        ({"stream": 1}, "stream", "stream: got 1, allowed is: a valid boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "without stream"),
        ({"max_tokens": 0}, "max_tokens", "got 0, allowed is an integer from 1 to"),
        ({"model": 5}, "model", "model: got 5"),
        ({"best_of": 2}, "best_of", "best_of: got 2, which is not supported; allowed is null or 1"),
        ({"logit_bias": {"2560": 1}}, "logit_bias", "logit_bias: got 2560, allowed is ids from 0 to 2559"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "logit_bias: got -1, allowed is an integer from 0"),
        ({"logit_bias": {"x y": 1}}, "logit_bias", "logit_bias: got 'x y', allowed is token ids as keys"),
        ({"logit_bias": {"5": "x"}}, "logit_bias", "logit_bias: got 'x', allowed is: a valid number"),
        ({"logit_bias": {"5": True}}, "logit_bias", "logit_bias: got True, allowed is: a valid "),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias", "logit_bias: got nan, allowed is: a finite"),
        ({"logit_bias": {"5": float("inf")}}, "logit_bias", "logit_bias: got inf, allowed is: a finite"),
        ({"logit_bias": [1]}, "logit_bias", "logit_bias: got [1], allowed is: a valid dictionary"),
        (
            {"logit_bias": dict.fromkeys(map(str, range(60_000)), "x")},
            "logit_bias",
            "Dictionary should have at most 1024 items",
        ),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1 item"),
        ({"allowed_token_ids": list(range(100_000))}, "allowed_token_ids", "at most 1024 items"),
        ({"allowed_token_ids": [2560]}, "allowed_token_ids", "allowed_token_ids: got 2560, allowed is ids"),
        ({"allowed_token_ids": [10**40]}, "allowed_token_ids.0", "less than or equal to 2147483647"),
        ({"allowed_token_ids": [64], "bad_words": ["a"]}, "allowed_token_ids", "leave no token to draw"),
        ({"allowed_token_ids": [2559], "min_tokens": 1}, "allowed_token_ids", "leave no token to draw"),
        (
            {"allowed_token_ids": [3, 64], "bad_words": ["a"], "stop_token_ids": [3], "min_tokens": 2},
            "allowed_token_ids",
            "leave no token to draw",
        ),
        ({"bad_words": [""]}, "bad_words.0", "at least 1 character"),
        ({"bad_words": ["a"] * 100_000}, "bad_words", "at most 128 items"),
        ({"bad_words": ["a" * 1025]}, "bad_words.0", "at most 1024 characters"),
        ({"bad_words": ["\n"]}, "bad_words", "which has no tokens, allowed are words with tokens"),
        ({"bad_words": ["\ud800"]}, "bad_words.0", "allowed is: a valid string"),
        (
            {"bad_words": [chr(ord("a") + index // 26) + chr(ord("a") + index % 26) for index in range(128)]},
            "bad_words",
            "with and without a space before each word, allowed are at most that many",
        ),
        (
            {"bad_words": ["ab " * 340, "ba " * 340]},
            "bad_words",
            "got more than 128 sequences, or 1024 tokens",
        ),
        ({"suffix": "x"}, "suffix", "not supported"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "allowed is: 'text', 'json_object' or ",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "got json_schema without one"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "missing, but required",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "got none of them"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", ""),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "a valid list"),
        ({"structured_outputs": {"regex": "a" * 65_537}}, "structured_outputs.regex", "got 65537 characters"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "look-ahead"),
        (
            {"structured_outputs": {"json": {"type": "x"}}, "n": 3},
            "structured_outputs.json",
            "Invalid type: x",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "x"}},
                },
                "stream": True,
            },
            "response_format",
            "response_format: got one that cannot be compiled (",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
            "response_format: got regex and json_object, allowed is exactly one",
        ),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "got 21, allowed is: less than or equal to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "got -1, allowed is: greater than or equal to 0"),
        ({"prompt_logprobs": "1"}, "prompt_logprobs", "got '1', allowed is: a valid integer"),
        ({"prompt_logprobs": True}, "prompt_logprobs", "got True, allowed is: a valid integer"),
        (
            {"prompt_logprobs": 1, "stream": True},
            "prompt_logprobs",
            "got 1 with stream, allowed without a stream",
        ),
        ({"thinking_token_budget": 5}, "thinking_token_budget", "not supported; allowed is null or -1"),
        ({"watermarking": True}, "watermarking", "not supported; allowed is null or False"),
        (
            {"cache_salt": ""},
            "cache_salt",
            "cache_salt: got '', allowed is: String should have at least 1 char",
        ),
        ({"cache_salt": "x" * 129}, "cache_salt", "at most 128 characters"),
        ({"cache_salt": 5}, "cache_salt", "cache_salt: got 5, allowed is: a valid string"),
        ({"cache_salt": "a/b"}, "cache_salt", "cache_salt: got 'a/b', allowed is a string of 1 to 128"),
        ({"cache_salt": "\ud800"}, "cache_salt", "cache_salt: got"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"x" * 1000: 1, "max_token": 1}, "max_token", "did you mean 'max_tokens'?"),
        ({f"q{number}": 1 for number in range(17)}, "body", "got 17 unknown fields, allowed are at most 16"),
    ],
    ids=lambda value: ",".join(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_fields(server: LiveServer, fields: dict[str, Any], param: str, message: str) -> None:
    check_refused(server.post("/v1/completions", {**BODY, **fields}), param, message)


def test_one_bad_prompt_refuses_all(server: LiveServer) -> None:
    prompts: list[Any] = [[1, 2, 3]] * 30 + [[99_999]]
    for stream in (False, True):
        answer = server.complete(prompt=prompts, max_tokens=500, stream=stream)
        assert answer.status_code == 400
        assert "got token id 99999" in error_of(answer)["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": 1}, "store": True},
        {"best_of": 1, "suffix": None, "use_beam_search": False, "length_penalty": 1.0},
        {"logit_bias": {}, "bad_words": [], "allowed_token_ids": None},
        {
            "stream_interval": 5,
            "thinking_token_budget": -1,
            "mm_payload": "none",
            "return_token_offsets": True,
        },
        {"some_new_option": {"deep": [1]}},
    ],
)
def test_fields_that_ask_for_nothing(server: LiveServer, fields: dict[str, Any]) -> None:
    assert server.text(**BODY, temperature=0, **fields) == server.text(**BODY, temperature=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "body: missing, but required"),
        (b"null", "body: missing, but required"),
        (b"[1]", f"body: got [1], {NO_OBJECT}"),
        (b'"text"', f"body: got 'text', {NO_OBJECT}"),
        (b'{"prompt": ', "body: not valid JSON (Expecting value)"),
        (b'{"prompt": "a",}', "body: not valid JSON (Expecting property name enclosed in double quotes)"),
        (
            b'{"prompt": "\xff"}',
            "body: not valid UTF-8 at byte 12 (invalid start byte), allowed is JSON in UTF-8",
        ),
        (b"\x1f\x8b\x08", "body: not valid UTF-8 at byte 1 (invalid start byte), allowed is JSON in UTF-8"),
        (b"\xff\xfe{", "body: not valid UTF-16-LE at byte 2 (truncated data), allowed is JSON in UTF-8"),
        (
            b"[" * 100_000,
            "body: arrays or objects are nested too deeply, no field has more than a few levels",
        ),
        (b'{"n": ' + b"9" * 5000 + b"}", "body: got an integer of more digits than are allowed (4300)"),
        (b"{}", "prompt: missing, but required"),
        (
            b'{"prompt": "a", "n": "1", "n": 1.5}',
            "n: got 1.5, allowed is: a valid integer, got a number with a fractional part",
        ),
        (b'{"prompt": "a", "stop": [1, "b", ""]}', "stop.0: got 1, allowed is: a valid string"),
        (b'{"prompt": "a", "stream_options": []}', f"stream_options: got [], {NO_OBJECT}"),
        (
            b'{"prompt": "a", "stream_options": {"continuous_usage_stats": 5}}',
            "stream_options.continuous_usage_stats: got 5, allowed is: a valid boolean",
        ),
    ],
)
def test_bodies_that_are_refused(server: LiveServer, content: bytes, message: str) -> None:
    param = message.partition(":")[0]
    for path in routes.DIRECT_ROUTES if param == "body" else ("/v1/completions",):
        answer = server.post(path, content)
        check_refused(answer, param, message)
        assert error_of(answer)["message"] == message


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br, identity", "zstd"])
def test_only_plain_bodies_are_read(server: LiveServer, encoding: str) -> None:
    content = gzip.compress(json.dumps(BODY).encode())
    for path in ("/v1/completions", "/tokenize"):
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        answer = server.http.post(path, content=content, headers=headers)
        assert answer.status_code == 415
        message = error_of(answer)["message"]
        assert message == f"Content-Encoding: got {encoding.lower()!r}, allowed is a body as it is (identity)"
    headers = {"Content-Encoding": "identity"}
    assert server.http.post("/v1/completions", json=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_read(server: LiveServer, kind: str) -> None:
    # Any web page can post these to a server on the reader's machine.
    answer = server.http.post(
        "/v1/completions", content=json.dumps(BODY).encode(), headers={"Content-Type": kind}
    )
    assert answer.status_code == 415
    assert error_of(answer)["message"] == f"Content-Type: got {kind!r}, allowed is application/json"


def test_unknown_routes_and_methods(server: LiveServer) -> None:
    for method, path, status in (
        # Whatever their bodies are.
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/load_lora_adapter", 404),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/completions%0A", 404),
        ("POST", "/v1/chat/completions%0A", 404),
        ("GET", "/health%0A", 404),
        ("PUT", "/ping", 405),
        ("GET", "/v1/embeddings", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/health", 405),
    ):
        answer = server.http.request(method, path)
        assert answer.status_code == status
        assert error_of(answer)["message"].startswith(f"{method} {unquote(path)}: ")
    assert set(server.http.put("/ping").headers["allow"].split(", ")) == {"GET", "POST"}


def test_no_answer_sends_a_client_elsewhere(server: LiveServer) -> None:
    for method, path in (
        ("POST", "/v1/completions/"),
        ("GET", "/health/"),
        ("GET", "/docs/"),
        ("GET", "//health"),
    ):
        # Whole: of a path alone httpx takes what follows two slashes for a host.
        url = f"{server.url}{path}"
        answer = server.http.request(
            method, url, headers={"Host": "attacker.example"}, json={}, follow_redirects=False
        )
        assert answer.status_code == 404 and "location" not in answer.headers


def test_another_model_is_not_found(server: LiveServer) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.openai.completions.create(model="gpt-4", prompt="a")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    assert "'gpt-4'" in caught.value.message and MODEL in caught.value.message


@pytest.mark.parametrize("asked", ["a", "Trace_1.2:3-4", "x" * 128])
def test_request_ids_come_back(server: LiveServer, asked: str) -> None:
    answer = server.http.post("/v1/completions", json=BODY, headers={"X-Request-Id": asked})
    assert answer.headers["x-request-id"] == asked
    assert answer.json()["id"] == f"cmpl-{asked}"


@pytest.mark.parametrize("asked", ["", "x" * 129, "a b", "a=b", "ä".encode()])
def test_bad_request_ids(server: LiveServer, asked: str | bytes) -> None:
    answer = server.http.post("/v1/completions", json=BODY, headers=[("X-Request-Id", asked)])  # type: ignore[list-item]
    assert answer.status_code == 400 and error_of(answer)["param"] == "X-Request-Id"
    assert answer.headers["x-request-id"] != asked


def test_request_ids_are_made_up(server: LiveServer) -> None:
    ids = {server.complete(**BODY).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2 and all(len(name) == 32 for name in ids)


def test_sizes_of_bodies(tiny_model_path: Path) -> None:
    with running_server(tiny_model_path, {"max_body_bytes": 1000, "max_prompts": 2}) as small:
        large = json.dumps({**BODY, "user": "u" * 1000}).encode()
        fits = json.dumps({**BODY, "user": "u" * 900}).encode()
        headers = {"Content-Type": "application/json"}
        assert small.http.post("/v1/completions", content=fits, headers=headers).status_code == 200
        # With a length, and in chunks without one.
        for content in (large, (part for part in (large[:600], large[600:]))):
            answer = small.http.post("/v1/completions", content=content, headers=headers)
            assert answer.status_code == 413
            assert error_of(answer)["code"] == "body_too_large"
            assert "allowed are at most 1000" in error_of(answer)["message"]
        assert small.http.post("/v1/unknown", content=large, headers=headers).status_code == 413
        assert "at most 2" in error_of(small.complete(prompt=["a"] * 3))["message"]


def test_a_length_alone_is_refused_before_the_body_comes(server: LiveServer) -> None:
    with sent(server, b"{", length=99_999_999_999) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_never_comes(tiny_model_path: Path) -> None:
    with (
        running_server(tiny_model_path, {"body_timeout_s": 0.1}) as server,
        sent(server, b'{"prompt":', length=100) as connection,
    ):
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 408 ") and b"connection: close" in answer.lower()
        assert b"body: not complete after 0.1 seconds" in answer


def test_api_keys(tiny_model_path: Path) -> None:
    with running_server(tiny_model_path, {"api_keys": ("first-key", "second-key")}) as locked:
        assert locked.openai.completions.create(model=MODEL, **BODY).choices  # type: ignore[call-overload]
        for value in (None, "Bearer wrong", "Basic first-key", "first-key", "Bearer first-ke", "Bearer ü"):
            headers = {} if value is None else {"Authorization": value.encode("latin-1")}
            for path in ("/v1/completions", "/tokenize", "/nothing"):
                answer = locked.http.post(path, json=BODY, headers=headers)
                assert answer.status_code == 401
                assert error_of(answer)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/version", "/openapi.json"):
            assert locked.http.get(path).status_code == 401
            key = {"Authorization": "bearer second-key"}
            assert locked.http.get(path, headers=key).status_code == 200
        # Probes and scrapers have no key.
        assert locked.http.get("/health").status_code == locked.http.get("/metrics").status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_body_that_breaks_off_is_not_answered(server: LiveServer, path: str) -> None:
    parts: list[Message] = [
        {
            "type": "http.request",
            "body": b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}',
            "more_body": True,
        },
        {"type": "http.disconnect"},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return parts.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    asyncio.run(build_app(server.service)(scope, receive, send))
    assert sent[0]["status"] == 400
    assert b"body: the connection was closed before it was complete" in sent[1]["body"]


def test_other_methods_and_the_schema_are_fastapis(server: LiveServer) -> None:
    for path in routes.DIRECT_ROUTES:
        answer = server.http.get(path)
        assert answer.status_code == 405 and answer.headers["allow"] == "POST"
        assert "requestBody" in server.http.get("/openapi.json").json()["paths"][path]["post"]
    schema = server.http.get("/openapi.json").json()
    names = [each["operationId"] for methods in schema["paths"].values() for each in methods.values()]
    assert len(names) == len(set(names)) and {"get", "post"} <= schema["paths"]["/ping"].keys()
