"""Calls of tools in answers: what is found, the same however the text is split, in time proportional to its length."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from rose_backend.server import answer_parsers
from rose_backend.server.answer_parsers import (
    MAKE_TOOL_CALL_PARSER,
    AnswerParser,
    HermesParser,
    ReasoningParser,
)

Found = tuple[str, list[tuple[str, str]]]
"""Content, behind reasoning in parentheses if there is any, and name and arguments of each call."""


def found(parser: AnswerParser, pieces: list[str]) -> Found:
    """Return what a parser finds, and check the order of its parts."""
    content, reasoning, calls = "", "", []
    for piece in [*pieces, None]:
        for kind, text, call in parser.end() if piece is None else parser.feed(piece):
            if kind == "content":
                content += text
            elif kind == "reasoning":
                assert not content and not calls, "reasoning comes first"
                reasoning += text
            elif kind == "name":
                assert call == len(calls), "a name begins the next call"
                calls.append((text, ""))
            else:
                assert call == len(calls) - 1, "arguments belong to the last call"
                calls[call] = (calls[call][0], calls[call][1] + text)
    return f"({reasoning}){content}" if reasoning else content, calls


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


A = '{"name": "find", "arguments": {"where": "here", "deep": [1, {"x": "]}"}]}}'
B = '{"arguments": {"b": "\\"}"}, "name": "later"}'
FOUND_A = ("find", '{"where": "here", "deep": [1, {"x": "]}"}]}')
FOUND_B = ("later", '{"b": "\\"}"}')
TEXTS: dict[str, list[tuple[str, Found]]] = {
    "hermes": [
        ("", ("", [])),
        ("No call, a < b.", ("No call, a < b.", [])),
        (hermes(A), ("", [FOUND_A])),
        ("I look.\n" + hermes(A), ("I look.\n", [FOUND_A])),
        (hermes(A, B), ("", [FOUND_A, FOUND_B])),
        # Neither a closing mark nor anything between two calls is needed.
        (f"<tool_call>{A}<tool_call>{B} and more", ("", [FOUND_A, FOUND_B])),
        # Marks inside of strings are text.
        (
            hermes('{"name": "say", "arguments": {"text": "</tool_call><tool_call>"}}'),
            ("", [("say", '{"text": "</tool_call><tool_call>"}')]),
        ),
        # Cut off: before there is a call, and inside of its arguments.
        ('Hm <tool_call>\n{"name": "find', ('Hm <tool_call>\n{"name": "find', [])),
        ('<tool_call>{"name": "find", "arguments": {"a": "b', ("", [("find", '{"a": "b')])),
        ("Hm <tool_c", ("Hm <tool_c", [])),
        # No call: what follows a mark is kept, and later calls are found.
        ("<tool_call> is a mark", ("<tool_call> is a mark", [])),
        (hermes("{}", A), ("<tool_call>\n{}\n</tool_call>\n", [FOUND_A])),
        (hermes('{"name": "find"}'), (hermes('{"name": "find"}'), [])),
        (hermes('{"name": 5, "arguments": {}}'), (hermes('{"name": 5, "arguments": {}}'), [])),
        (hermes('{"name": "", "arguments": {}}'), (hermes('{"name": "", "arguments": {}}'), [])),
        (hermes("{'name': 'find'}"), (hermes("{'name': 'find'}"), [])),
        (hermes(A, "no") + "!", ("<tool_call>\nno\n</tool_call>!", [FOUND_A])),
        ("<tool_call><tool_call>" + A, ("<tool_call>", [FOUND_A])),
        # Other fields, other values of arguments, escapes.
        (hermes('{"id": 1, "t": [{}], "name": "f\\u00fc", "arguments": "{}"}'), ("", [("f\u00fc", '"{}"')])),
        (hermes('{"name": "f", "arguments": null, "x": "arguments"}'), ("", [("f", "null")])),
        (hermes('{"name": "f", "arguments": -1.5}'), ("", [("f", "-1.5")])),
        (
            hermes('{"name": "a\\"b\\\\", "arguments": {"\\\\": "\\\\"}}'),
            ("", [('a"b\\', '{"\\\\": "\\\\"}')]),
        ),
    ],
}
REASONED: list[tuple[str, Found]] = [
    ("", ("", [])),
    ("<think>\nHm.\n</think>\n\nYes.", ("(\nHm.\n)\n\nYes.", [])),
    ("Hm.</think>Yes.", ("(Hm.)Yes.", [])),
    ("<think>Hm < 5", ("(Hm < 5)", [])),
    ("Hm</thin", ("(Hm</thin)", [])),
    ("<think></think>Yes</think><think>", ("Yes</think><think>", [])),
    # What is only thought of is not called.
    (f"<think>{hermes(A)}</think>I look.{hermes(B)}", (f"({hermes(A)})I look.", [FOUND_B])),
]


@pytest.mark.parametrize(("text", "expected"), REASONED, ids=lambda value: repr(value)[:50])
def test_reasoning_at_every_split(text: str, expected: Found) -> None:
    for first in range(len(text) + 1):
        pieces = [text[:first], text[first:]]
        assert found(ReasoningParser(HermesParser()), pieces) == expected, f"split before {text[first:]!r}"
    assert found(ReasoningParser(HermesParser()), list(text)) == expected


CASES = [(name, text, expected) for name, cases in TEXTS.items() for text, expected in cases]


@pytest.mark.parametrize(("name", "text", "expected"), CASES, ids=lambda value: repr(value)[:50])
def test_what_is_found_at_every_split(name: str, text: str, expected: Found) -> None:
    make = MAKE_TOOL_CALL_PARSER[name]
    assert found(make(), [text]) == expected
    assert found(make(), list(text)) == expected
    for first in range(len(text) + 1):
        assert found(make(), [text[:first], text[first:]]) == expected, f"split before {text[first:]!r}"


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>"),
        *('{"name": "f", "arguments": {}}', '{"name"', '"arguments"', '"parameters"', ": ", '"f"', ", ", ";"),
        *("{", "}", "[", "]", '"', "\\", " ", "\n", "a", "1", "null", "\u00fc"),
    ]
)


@pytest.mark.parametrize("name", MAKE_TOOL_CALL_PARSER)
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(text=st.lists(PIECES, max_size=30).map("".join), data=st.data())
def test_made_up_texts_at_any_split(name: str, text: str, data: st.DataObject) -> None:
    make_calls = MAKE_TOOL_CALL_PARSER[name]
    make = data.draw(st.sampled_from([make_calls, lambda: ReasoningParser(make_calls())]))
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    whole = found(make(), [text])
    assert found(make(), pieces) == whole == found(make(), list(text))


@pytest.mark.parametrize("name", MAKE_TOOL_CALL_PARSER)
@pytest.mark.parametrize(
    "piece", ["<", "<tool_call>", "<tool_call>{", '{"a":', "[", '"', "\\", ";{", "[TOOL_CALLS]"]
)
def test_work_grows_with_the_length(name: str, piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps of a reader are the work beside calls of Python's own functions on each new piece.
    start = next(text for text, expected in TEXTS[name] if expected[1])[:-40]
    num_steps = 0
    step = answer_parsers._CallReader._step

    def counted(*arguments: Any) -> int:
        nonlocal num_steps
        num_steps += 1
        return step(*arguments)

    monkeypatch.setattr(answer_parsers._CallReader, "_step", counted)
    found(MAKE_TOOL_CALL_PARSER[name](), [start, *[piece] * 2000])
    assert num_steps <= 3 * (len(start) + 2000 * len(piece))


def test_whole_calls_are_vllms() -> None:
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    parser = object.__new__(Hermes2ProToolParser)
    for text in (hermes(A), "I look.\n" + hermes(A, B), "None."):
        theirs: Any = parser.extract_tool_calls(text, None)  # type: ignore[arg-type]
        content, calls = found(MAKE_TOOL_CALL_PARSER["hermes"](), [text])
        assert content == (theirs.content or "")
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [
            (call.function.name, json.loads(call.function.arguments)) for call in theirs.tool_calls
        ]


def test_what_looked_like_a_call_behind_reasoning_is_content_in_the_end() -> None:
    parser = ReasoningParser(HermesParser())
    parts = [*parser.feed("So.</think>Hi <tool_"), *parser.end()]
    assert "".join(part.text for part in parts if part.kind == "content") == "Hi <tool_"
