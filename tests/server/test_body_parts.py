"""Values of a body are counted, and too many of them refused, before any of them is processed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_backend.errors import RequestError
from rose_backend.server import middleware
from rose_backend.server.middleware import BodyParts, as_utf8, check_body_parts, count_body_parts
from rose_backend.server.routes import read_prompts, read_token_ids
from rose_backend.server.settings import MAX_BODY_FIELDS, MAX_BODY_LISTS
from tests.server.live_server import LiveServer, error_of

MAX_PROMPTS, MAX_MODEL_LEN = 1024, 1024


def plain_count(value: Any) -> BodyParts:
    """Count what ``json.dumps`` writes for a value, by looking at the value."""
    if not isinstance(value, (list, dict)):
        return BodyParts(0, 0, 0, words=int(value is None or isinstance(value, str)))
    inner = [plain_count(each) for each in (value.values() if isinstance(value, dict) else value)]
    num_colons = len(value) if isinstance(value, dict) else 0
    return BodyParts(
        sum(each.commas for each in inner) + max(len(value) - 1, 0),
        sum(each.colons for each in inner) + num_colons,
        sum(each.brackets for each in inner) + 1,
        sum(each.words for each in inner) + num_colons,
    )


texts = st.text(alphabet='a"\\,:[{é\n', max_size=8)


@given(
    st.recursive(
        texts | st.integers() | st.none(),
        lambda children: st.lists(children, max_size=4) | st.dictionaries(texts, children, max_size=4),
    ),
    st.integers(1, 40),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32-le"]),
)
def test_parts_are_counted_outside_of_strings(value: Any, chunk: int, encoding: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(middleware, "_CHUNK_BYTES", chunk)
        content = as_utf8(json.dumps(value, ensure_ascii=False).encode(encoding))
        assert count_body_parts(content) == plain_count(value)


def test_the_largest_body_that_may_have_a_meaning_is_taken() -> None:
    prompts = {"prompt": [[1] * MAX_MODEL_LEN] * MAX_PROMPTS, "stop": ["a"] * 16}
    check_body_parts(json.dumps(prompts).encode(), MAX_PROMPTS, MAX_MODEL_LEN)
    # Whatever is written in strings.
    check_body_parts(json.dumps({"prompt": ',:[{"\\' * 1_000_000}).encode(), MAX_PROMPTS, MAX_MODEL_LEN)


TOO_MANY = [
    (b'{"prompt": [' + b"1," * 1_300_000 + b"1]}", "values"),
    (b'{"prompt": "a", "stop": [' + b"[]," * 70_000 + b"[]]}", "lists and objects"),
    (b'{"prompt": "a", "stop": [[' + b"1," * 1_300_000 + b"1]]}", "values"),
    (b'{"prompt": [' + b'"",' * 150_000 + b'""]}', "strings, truth values and nulls"),
    (b'{"prompt": "a", "stop": [' + b"null,true," * 75_000 + b"null]}", "strings, truth values and nulls"),
    (b'{"prompt": "a", ' + b",".join(b'"q%07d": 1' % each for each in range(140_000)) + b"}", "fields"),
]


@pytest.mark.parametrize(
    ("content", "what"), TOO_MANY, ids=["ids", "nested stop", "ids in stop", "texts", "nulls", "fields"]
)
def test_too_many_parts_are_refused_before_they_are_parsed(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, content: bytes, what: str
) -> None:
    def parse(*_: object, **__: object) -> None:
        raise AssertionError("the body is parsed")

    monkeypatch.setattr(middleware, "parse_body", parse)
    for path in direct_routes_of(server):
        answer = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
        error = error_of(answer)
        assert error["param"] == "body" and f"{what}, allowed are at most " in error["message"]


def direct_routes_of(server: LiveServer) -> list[str]:
    schema = server.http.get("/openapi.json").json()
    return [path for path, methods in schema["paths"].items() if "post" in methods]


def test_limits_are_named() -> None:
    max_lists = MAX_PROMPTS + MAX_BODY_LISTS
    for content, limit in (
        (b'"a":1,', MAX_BODY_FIELDS),
        (b"[", max_lists),
        (b"true ", 2 * MAX_BODY_FIELDS + max_lists),
    ):
        check_body_parts(content * limit, MAX_PROMPTS, MAX_MODEL_LEN)
        with pytest.raises(
            RequestError, match=f"^body: got {limit + 1} .* allowed are at most {limit} in one"
        ):
            check_body_parts(content * (limit + 1), MAX_PROMPTS, MAX_MODEL_LEN)


def test_unknown_fields_are_counted_before_they_are_checked(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(*_: object, **__: object) -> None:
        raise AssertionError("each of the fields is looked at")

    monkeypatch.setattr("rose_backend.server.protocol.CompletionRequest.model_validate", check)
    answer = server.complete(prompt="a", **{f"q{index}": 1 for index in range(1000)})
    assert answer.status_code == 400
    assert "got 1000 unknown fields, allowed are at most 16" in error_of(answer)["message"]


class Untouchable(list[Any]):
    """A list that gives its length and first element, and fails when it is iterated over."""

    def __iter__(self) -> Any:
        raise AssertionError("the elements are iterated over")


def test_lengths_come_before_elements(server: LiveServer) -> None:
    with pytest.raises(RequestError, match="prompt: got 5 prompts, allowed are at most 4"):
        read_prompts(Untouchable(["a"] * 5), max_prompts=4, max_model_len=10)
    with pytest.raises(RequestError, match="tokens: got 11 token ids, allowed are at most 10"):
        read_token_ids("tokens", Untouchable([1] * 11), 10, 100)
    (prompt,) = read_prompts(Untouchable([1] * 11), max_prompts=4, max_model_len=10)
    assert isinstance(prompt, Untouchable)
    # The engine's: of one prompt, and of one of several.
    for prompts in ([1, "a"] * 600, [[1, "a"] * 600], [[1], [None] * 1024]):
        answer = server.complete(prompt=prompts)
        assert answer.status_code == 400 and "tokens, allowed are at most 1023" in error_of(answer)["message"]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
def test_half_a_surrogate_hides_nothing(encoding: str) -> None:
    # The second character has a byte of its own that looks like a quotation mark.
    text = '["\ud800", "\u2200", ' + "[], " * 1000 + "1]"
    content = text.encode(encoding, "surrogatepass")
    assert len(json.loads(content)) == 1003
    assert count_body_parts(as_utf8(content)) == BodyParts(commas=1002, colons=0, brackets=1001, words=2)
