"""Calls of tools in answers: what is found, the same however the text is split, in time proportional to its length."""

from __future__ import annotations

import itertools
import json
import time
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
P = A.replace("arguments", "parameters")
TAG, MARK = "<|python_tag|>", "[TOOL_CALLS]"
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
        # As long as a request's may be.
        (hermes(f'{{"name": "{"f" * 256}", "arguments": {{}}}}'), ("", [("f" * 256, "{}")])),
        (
            hermes(f'{{"name": "{"f" * 257}", "arguments": {{}}}}'),
            (hermes(f'{{"name": "{"f" * 257}", "arguments": {{}}}}'), []),
        ),
        # Half of a surrogate pair is no text, and so no name.
        (
            hermes('{"name": "\\ud800", "arguments": {}}'),
            (hermes('{"name": "\\ud800", "arguments": {}}'), []),
        ),
    ],
    "llama3_json": [
        ("", ("", [])),
        ("No call, a < b.", ("No call, a < b.", [])),
        (P, ("", [FOUND_A])),
        (TAG + P, ("", [FOUND_A])),
        (f"{TAG} \n{A}", ("", [FOUND_A])),
        (f"{P};{B}; {P}", ("", [FOUND_A, FOUND_B, FOUND_A])),
        (f"{P}; {TAG}{B}", ("", [FOUND_A, FOUND_B])),
        (f"\n {P}\n", ("", [FOUND_A])),
        (f"I look: {P} Done.", ("I look: ", [FOUND_A])),
        (f"I look: {TAG}{P}", ("I look: ", [FOUND_A])),
        # What is no call, and all behind it.
        (f"{TAG}print(1)", (f"{TAG}print(1)", [])),
        (f"{TAG} print({P})", (f"{TAG} print(", [FOUND_A])),
        (f"{TAG}{TAG}{P}", (TAG, [FOUND_A])),
        ("<|python_t", ("<|python_t", [])),
        (f" {TAG} ", (f" {TAG} ", [])),
        ('{"name": "find"}', ('{"name": "find"}', [])),
        ('{"parameters": {}}', ('{"parameters": {}}', [])),
        (" {}", (" {}", [])),
        (f"A set {{1, 2}}. {P}", (f"A set {{1, 2}}. {P}", [])),
        (f"{TAG}{{oops}} {P}", (f"{TAG}{{oops}} {P}", [])),
        (f"{P} {{oops}} {P}", (f"{{oops}} {P}", [FOUND_A])),
        ('{"name": {}, "parameters": {}}', ('{"name": {}, "parameters": {}}', [])),
        # Cut off.
        ('{"name": "find", "parameters": {"a": "b', ("", [("find", '{"a": "b')])),
        (f'{P}; {{"name": "fi', ('{"name": "fi', [FOUND_A])),
        # Of several fields with arguments the first one counts.
        ('{"name": "f", "parameters": {}, "arguments": {"a": 1}}', ("", [("f", "{}")])),
        ('{"name": "f", "parameters": {"a": NaN, "b": 1e999}}', ("", [("f", '{"a": NaN, "b": 1e999}')])),
        ('{"type": "function", "name": "f", "parameters": "{}"}', ("", [("f", '"{}"')])),
    ],
    "mistral": [
        ("", ("", [])),
        ("No call, a[0] < b.", ("No call, a[0] < b.", [])),
        (f"{MARK}[{A}]", ("", [FOUND_A])),
        (f"{MARK} [ {A} , {B} ] ", ("", [FOUND_A, FOUND_B])),
        (f"{MARK}[{A}]{MARK}[{B}]", ("", [FOUND_A, FOUND_B])),
        (MARK + A, ("", [FOUND_A])),
        (f"\n {MARK}[{A}]", ("", [FOUND_A])),
        (f"I look. {MARK}[{A}] Done.", ("I look. ", [FOUND_A])),
        (f'{MARK}find{{"a": "{{"}}', ("", [("find", '{"a": "{"}')])),
        (f"{MARK}find[ARGS]{{}} and {MARK} f-1.x {{}}", ("", [("find", "{}"), ("f-1.x", "{}")])),
        (f"{MARK}f\n[ARGS] {{}}\n\n{MARK}\u00fc{{}}", ("", [("f", "{}"), ("\u00fc", "{}")])),
        (f'{MARK}f{{}}, "{MARK}g{{}}', ("", [("f", "{}"), ("g", "{}")])),
        # The model's own id of a call is left out.
        (f"{MARK}f[CALL_ID]a1B2c3D4e[ARGS]{{}}", ("", [("f", "{}")])),
        (
            f'{MARK}f{{"name": "g", "arguments": "{MARK}"}}',
            ("", [("f", f'{{"name": "g", "arguments": "{MARK}"}}')]),
        ),
        # Arguments as a string, or none.
        (f'{MARK}[{{"name": "f", "arguments": "{{\\"a\\": 1}}"}}]', ("", [("f", '{"a": 1}')])),
        (f'{MARK}[{{"arguments": "\\u00fc", "name": "f"}}]', ("", [("f", "\u00fc")])),
        (f'{MARK}[{{"name": "f", "arguments": ""}}]', ("", [("f", "")])),
        (f'{MARK}[{{"name": "f", "arguments": "\\ud800"}}]', ("", [("f", '"\\ud800"')])),
        (f'{MARK}[{{"name": "f", "arguments": null}}, {{"name": "g"}}]', ("", [("f", "{}"), ("g", "{}")])),
        (f'{MARK}[{{"name": "f", "arguments": [null]}}]', ("", [("f", "[null]")])),
        (f'{MARK}[{{"name": "f", "arguments": 1e5}}]', ("", [("f", "1e5")])),
        # Other objects in a list.
        (f'{MARK}[{{"x": 1}}, {A}, {{}}]', ("", [FOUND_A])),
        (f"{MARK}[{A}, {{}}, 5]", (", {}, 5]", [FOUND_A])),
        # What is no call.
        (f"{MARK} is a mark", (f"{MARK} is a mark", [])),
        (f"{MARK}a b {{}}", (f"{MARK}a b {{}}", [])),
        (f"{MARK}f[ARGS]5", (f"{MARK}f[ARGS]5", [])),
        (f"{MARK}f[CALL_ID][ARGS]{{}}", (f"{MARK}f[CALL_ID][ARGS]{{}}", [])),
        (f"{MARK}{{}}", (f"{MARK}{{}}", [])),
        (f"{MARK}[]", (f"{MARK}[]", [])),
        (f'{MARK}[{{"x": 1}}]!', (f'{MARK}[{{"x": 1}}]!', [])),
        (f'{MARK}[{{"arguments": {{}}}}]', (f'{MARK}[{{"arguments": {{}}}}]', [])),
        (f"{MARK}{'n' * 257}{{}}", (f"{MARK}{'n' * 257}{{}}", [])),
        (f"{MARK}{' ' * 511}{A}", ("", [FOUND_A])),
        (f"{MARK}{' ' * 512}{A}{MARK}f{{}}", (f"{MARK}{' ' * 512}{A}", [("f", "{}")])),
        (f"{MARK}{MARK}[{A}]", (MARK, [FOUND_A])),
        (f"{MARK}no{MARK}[{A}]", (f"{MARK}no", [FOUND_A])),
        # Cut off.
        (f"Hm{MARK}find[AR", (f"Hm{MARK}find[AR", [])),
        (f'{MARK}f{{"a', ("", [("f", '{"a')])),
        (f"{MARK}[{A}, ", ("", [FOUND_A])),
        (f'{MARK}[{A}, {{"name": "f', (', {"name": "f', [FOUND_A])),
        (f'{MARK}[{{"name": "f", "arguments": "{{\\"a', ("", [("f", '"{\\"a')])),
        (f'{MARK}[{{"name": "f", "arguments": nul', ("", [("f", "nul")])),
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
        *(
            "[TOOL_",
            "[ARGS]",
            "[CALL_ID]",
            "[AR",
            ", [",
            '{"name": "f", "arguments": "',
            " " * 500,
            "n" * 250,
        ),
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
    "piece",
    [
        *("<", "<tool_call>", "<tool_call>{", '{"a":', "[", '"', "\\", ";{", "[TOOL_CALLS]", "[TOOL_CALLS]{"),
        *("[TOOL_CALLS]f{}", "[ARGS]", "<|python_tag|>", " ", "{},", '{"name":"f","arguments":{}},', '\\"'),
    ],
)
def test_work_grows_with_the_length(name: str, piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps of a reader are the work beside calls of Python's own functions on each new piece.
    starts = [
        "",
        '{"name":"f","parameters":{"a":',
        MARK + "[",
        MARK + '[{"name":"f","arguments":"',
        "<tool_call>{",
    ]
    num_steps = 0
    step = answer_parsers._CallReader._step

    def counted(*arguments: Any) -> int:
        nonlocal num_steps
        num_steps += 1
        return step(*arguments)

    monkeypatch.setattr(answer_parsers._CallReader, "_step", counted)
    for start in starts:
        num_steps = 0
        found(MAKE_TOOL_CALL_PARSER[name](), [start, *[piece] * 2000])
        assert num_steps <= 3 * (len(start) + 2000 * len(piece))


@pytest.mark.parametrize("name", MAKE_TOOL_CALL_PARSER)
def test_long_answers_take_time_in_proportion(name: str) -> None:
    starts = (
        "",
        MARK,
        MARK + "[",
        TAG,
        MARK + '[{"name":"f","arguments":"',
        '{"name":"f","parameters":{"a":"',
    )
    texts = (
        *('{"a":', " ", "n" * 255, MARK + "f{}", MARK + "f[ARGS", TAG + " ", '\\"'),
        '{"name":"f","arguments":{}},',
    )
    for start, text in itertools.product(starts, texts):
        whole = start + text * (40_000 // len(text))

        def seconds(length: int, whole: str = whole) -> float:
            parser, begin = MAKE_TOOL_CALL_PARSER[name](), time.process_time()
            for first in range(0, length, 10):
                parser.feed(whole[first : first + 10])
            parser.end()
            return time.process_time() - begin

        # Were it the square, eight times the length would take 64 times as long.
        assert seconds(len(whole)) < 24 * max(seconds(len(whole) // 8), 0.002), (start, text)


def test_calls_nested_deeply() -> None:
    deep = '{"a": ' * 3000 + "[" * 3000 + "]" * 3000 + "}" * 3000
    for name, text in (("hermes", hermes("{0}")), ("llama3_json", "{0}"), ("mistral", MARK + "[{0}]")):
        call = '{"name": "f", "arguments": ' + deep + "}"
        for pieces in ([text.replace("{0}", call)], list(text.replace("{0}", call))):
            assert found(MAKE_TOOL_CALL_PARSER[name](), pieces) == ("", [("f", deep)])
    assert found(MAKE_TOOL_CALL_PARSER["llama3_json"](), [deep]) == (deep, [])


class _Vocabulary:
    """Stands for a tokenizer, of which vLLM's parsers look up their marks."""

    def __init__(self, *tokens: str) -> None:
        self._ids = {token: token_id for token_id, token in enumerate(tokens)}

    def get_vocab(self) -> dict[str, int]:
        return self._ids


def vllms(name: str, text: str) -> Found:
    """Return what vLLM's parser finds in a whole answer."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    # Marks of Mistral's tell vLLM which of the two formats is looked for.
    own = (
        ("[ARGS]",) if name == "mistral" and not text.split(MARK)[-1].lstrip().startswith(("[", "{")) else ()
    )
    tokens: Any = _Vocabulary("<tool_call>", "</tool_call>", TAG, MARK, *own)
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], tools=tools)  # type: ignore[arg-type]
    answer = ToolParserManager.get_tool_parser(name)(tokens, request.tools).extract_tool_calls(text, request)
    calls = [(call.function.name, call.function.arguments) for call in answer.tool_calls]
    return answer.content or "", calls


def as_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


DIFFERENT = {
    "hermes": {
        # A stream cannot take back content or calls: what is no call leaves the others as they are.
        *(f"<tool_call>{A}<tool_call>{B} and more", hermes("{}", A), hermes(A, "no") + "!"),
        "<tool_call><tool_call>" + A,
        # Marks inside of strings are text.
        hermes('{"name": "say", "arguments": {"text": "</tool_call><tool_call>"}}'),
        # A call that is cut off is one, with the finish_reason length.
        '<tool_call>{"name": "find", "arguments": {"a": "b',
        # No names.
        hermes('{"name": "", "arguments": {}}'),
        hermes(f'{{"name": "{"f" * 257}", "arguments": {{}}}}'),
        hermes('{"name": "\\ud800", "arguments": {}}'),
    },
    "llama3_json": {
        # Text before a call is content.
        *(f"I look: {P} Done.", f"I look: {TAG}{P}", f"{TAG} print({P})", f"{TAG}{TAG}{P}"),
        *(f"{P} {{oops}} {P}", f'{P}; {{"name": "fi', '{"name": "find", "parameters": {"a": "b'),
        # The first field with arguments counts, not "arguments" before "parameters".
        '{"name": "f", "parameters": {}, "arguments": {"a": 1}}',
    },
    "mistral": {
        *(f"{MARK}[{A}, {{}}, 5]", f"{MARK}[{A}, ", f'{MARK}[{A}, {{"name": "f'),
        f'{MARK}[{{"name": "f", "arguments": "{{\\"a',
        f'{MARK}[{{"name": "f", "arguments": nul',
        f'{MARK}f{{"name": "g", "arguments": "{MARK}"}}',
        # Both formats in one model, and calls behind a list.
        *(f"{MARK}[{A}]{MARK}[{B}]", f"{MARK}no{MARK}[{A}]", f"{MARK}{MARK}[{A}]"),
        # The id is left out.
        f"{MARK}f[CALL_ID]a1B2c3D4e[ARGS]{{}}",
        f"{MARK}f[CALL_ID][ARGS]{{}}",
        # What begins no call keeps its mark, and is not called.
        *(f"{MARK} is a mark", f"{MARK}a b {{}}", f"{MARK}f[ARGS]5", f"{MARK}{{}}", f"{MARK}[]"),
        *(f'{MARK}[{{"x": 1}}]!', f'{MARK}[{{"arguments": {{}}}}]', f"Hm{MARK}find[AR"),
        *(f"{MARK}{'n' * 257}{{}}", f"{MARK}{' ' * 512}{A}{MARK}f{{}}"),
    },
}


@pytest.mark.parametrize("name", MAKE_TOOL_CALL_PARSER)
def test_whole_calls_are_vllms(name: str) -> None:
    pytest.importorskip("vllm")
    different = set()
    for text, (content, calls) in TEXTS[name]:
        their_content, their_calls = vllms(name, text)
        # What stands around content differs between their formats.
        is_same = their_content.strip() == content.strip() and [
            (function, as_json(arguments)) for function, arguments in their_calls
        ] == [(function, as_json(arguments)) for function, arguments in calls]
        if not is_same:
            different.add(text)
    assert different == DIFFERENT[name]


def test_what_looked_like_a_call_behind_reasoning_is_content_in_the_end() -> None:
    parser = ReasoningParser(HermesParser())
    parts = [*parser.feed("So.</think>Hi <tool_"), *parser.end()]
    assert "".join(part.text for part in parts if part.kind == "content") == "Hi <tool_"
