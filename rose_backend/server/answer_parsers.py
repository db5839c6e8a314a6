"""Answers in parts: reasoning, calls of tools, and what is around them, found while the text comes.

A parser finds the same however the text is split, takes time in proportion to its length, and holds back only what may
still become something else: part of a mark, or the start of a call whose name is not known.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum, auto
from typing import ClassVar, Literal, NamedTuple

from rose_backend.server.settings import MAX_NAME_LENGTH

END_OF_REASONING = "</think>"
_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_STRING_PART = re.compile(r'[^"\\]*')
_NESTED_PART = re.compile(r'[^"{}\[\]]*')


class Part(NamedTuple):
    """A piece of an answer; pieces of one kind and call follow each other."""

    kind: Literal["content", "reasoning", "name", "arguments"]
    text: str
    call: int = 0
    """Which call of the answer, from 0."""


class AnswerParser(ABC):
    """Parses one answer."""

    ends_with_calls: bool = True
    """Whether an answer with calls ends with the reason ``tool_calls``."""

    @abstractmethod
    def feed(self, text: str) -> list[Part]:
        """Return what more text has made certain."""

    @abstractmethod
    def end(self) -> list[Part]:
        """Return what was held back, when no more text comes."""


class _Place(Enum):
    """Where in an object its next character stands."""

    START = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()
    STRING = auto()
    """In a key, or in a value that is a string."""
    NESTED = auto()
    NESTED_STRING = auto()
    SCALAR = auto()


class _CallReader:
    """Reads one call, ``{"name": "...", "arguments": ...}``, with fields in any order.

    The object itself must be JSON until the call has begun; the value of its arguments is passed on as it is, and need
    only have its strings and brackets closed.

    Args:
        call: its number.
        arguments: names of the field with the arguments.
        name: what is called, where the text is the value of the arguments alone.
        is_lenient: arguments may also be a string with JSON inside, which is passed on when it is complete, or null or
            missing, which is an empty object.
    """

    def __init__(
        self, call: int, arguments: frozenset[str], *, name: str | None = None, is_lenient: bool = False
    ) -> None:
        self._call = call
        self._argument_names = arguments
        self._is_lenient = is_lenient
        self._is_value_alone = name is not None
        self._place = _Place.START
        self._depth = 0
        self._is_escaped = False
        self._is_key = False
        self._key = ""
        self._string: list[str] = []
        """Of a key, a name, or arguments that are passed on when they are complete."""
        self._name = name
        self._has_arguments = False
        self._takes_value = False
        """The present value is that of the arguments."""
        self._is_collected = False
        """It is passed on when it is complete."""
        self._held: list[str] = []
        """Arguments that no part has yet."""
        self.raw: list[str] = []
        """What was read before the call had begun."""
        self.has_begun = False
        """Name and first character of the arguments were there."""
        self.is_open = True
        self.is_complete = False
        """Closed as an object is."""
        if name is not None:
            (self._key,) = arguments
            self._place = _Place.VALUE

    def read(self, text: str, at: int, parts: list[Part]) -> int:
        """Read on from ``text[at]``, add to ``parts``, and return the place of the first character left over."""
        start = at
        while self.is_open and at < len(text):
            at = self._step(text, at, parts)
        if not self.has_begun:
            self.raw.append(text[start:at])
        self._pass_on(parts)
        return at

    def end(self, parts: list[Part]) -> None:
        """Add the start of arguments that will not be completed, as it was written."""
        if self._is_collected:
            start = '"' if self._place is _Place.STRING else ""
            self._held += [start, *self._string]
        self._pass_on(parts)

    def _pass_on(self, parts: list[Part]) -> None:
        if self.has_begun and self._held:
            # One part, of pieces as short as a bracket.
            parts.append(Part("arguments", "".join(self._held), self._call))
            self._held.clear()

    def _step(self, text: str, at: int, parts: list[Part]) -> int:
        place = self._place
        if place is _Place.STRING:
            return self._read_string(text, at, parts)
        if place in (_Place.NESTED, _Place.NESTED_STRING, _Place.SCALAR):
            return self._read_value(text, at)
        end = _end(_SPACE, text, at)
        if end > at:
            return end
        self._read_mark(text[at], parts)
        # A character that is wrong belongs to what follows, and one that begins a value to the value.
        is_left = self._place is _Place.SCALAR or (not self.is_open and text[at] != "}")
        return at if is_left else at + 1

    def _read_mark(self, mark: str, parts: list[Part]) -> None:
        place = self._place
        if place is _Place.VALUE:
            self._begin_value(mark, parts)
        elif mark == '"' and place is _Place.KEY:
            self._place, self._is_key = _Place.STRING, True
            self._string.clear()
        elif (place, mark) in _NEXT:
            self._place = _NEXT[place, mark]
        else:
            # The end of the object, or a character that is not allowed here.
            self.is_open = False
            self.is_complete = mark == "}" and place in (_Place.KEY, _Place.COMMA)
            if self.is_complete and self._is_lenient and self._name and not self._has_arguments:
                self._has_arguments = True
                self._held.append("{}")
                self._begin(parts)

    def _begin_value(self, mark: str, parts: list[Part]) -> None:
        self._is_key = False
        is_name = self._key == "name" and not self.has_begun
        self._takes_value = self._key in self._argument_names and not self._has_arguments
        if mark == '"':
            self._place = _Place.STRING
            self._string.clear()
        elif mark in "{[" and not is_name:
            self._place, self._depth = _Place.NESTED, 1
        elif _SCALAR.fullmatch(mark) and not is_name:
            self._place = _Place.SCALAR
        else:
            self.is_open = False
            return
        if self._takes_value:
            self._has_arguments = True
            self._begin(parts)
            self._is_collected = self._is_lenient and self._place is not _Place.NESTED
            if self._is_collected:
                self._string.clear()
            elif self._place is not _Place.SCALAR:
                self._held.append(mark)

    def _end_collected(self) -> None:
        self._is_collected = False
        value = "".join(self._string)
        if self._place is _Place.SCALAR:
            self._held.append("{}" if value == "null" else value)
            return
        text = _decoded(value[:-1])
        self._held.append(f'"{value}' if text is None else text)

    def _read_string(self, text: str, at: int, parts: list[Part]) -> int:
        end, is_over = self._string_end(text, at)
        if self._is_key or self._key == "name" or self._is_collected:
            self._string.append(text[at:end])
        elif self._takes_value:
            self._held.append(text[at:end])
        if not is_over:
            return end
        if self._is_collected:
            self._end_collected()
        whole = "".join(self._string)[:-1]
        if self._is_key:
            self._key, self._place = whole, _Place.COLON
            return end
        self._place = _Place.COMMA
        if self._key == "name" and not self.has_begun:
            name = _decoded(whole)
            self._name = name if name and len(name) <= MAX_NAME_LENGTH else None
            self.is_open = self._name is not None
            self._begin(parts)
        self._takes_value = False
        return end

    def _read_value(self, text: str, at: int) -> int:
        is_over = False
        if self._place is _Place.NESTED_STRING:
            end, is_string_over = self._string_end(text, at)
            if is_string_over:
                self._place = _Place.NESTED
        elif self._place is _Place.SCALAR:
            end = _end(_SCALAR, text, at)
            is_over = end < len(text)
        else:
            end = _end(_NESTED_PART, text, at)
            if end < len(text):
                mark = text[end]
                end += 1
                if mark == '"':
                    self._place = _Place.NESTED_STRING
                else:
                    self._depth += 1 if mark in "{[" else -1
                    is_over = not self._depth
        if self._is_collected:
            self._string.append(text[at:end])
            if is_over:
                self._end_collected()
        elif self._takes_value:
            self._held.append(text[at:end])
        if is_over:
            self._place, self._takes_value = _Place.COMMA, False
            self.is_open = not self._is_value_alone
        return end

    def _string_end(self, text: str, at: int) -> tuple[int, bool]:
        """Return the end of the next part of a string, and whether the string ends there."""
        if self._is_escaped:
            self._is_escaped = False
            return at + 1, False
        end = _end(_STRING_PART, text, at)
        if end == len(text):
            return end, False
        self._is_escaped = text[end] == "\\"
        return end + 1, not self._is_escaped

    def _begin(self, parts: list[Part]) -> None:
        if self.has_begun or not self._name or not self._has_arguments:
            return
        self.has_begun = True
        parts.append(Part("name", self._name, self._call))
        self.raw.clear()


_NEXT: Mapping[tuple[_Place, str], _Place] = {
    (_Place.START, "{"): _Place.KEY,
    (_Place.COLON, ":"): _Place.VALUE,
    (_Place.COMMA, ","): _Place.KEY,
}


class ToolCallParser(AnswerParser):
    """Looks for calls after marks. As in vLLM, text before the first call is content, other text around calls is left
    out. What follows a mark and is no call is content, the mark included.
    """

    _MARK: ClassVar[str]
    _ARGUMENTS = frozenset({"arguments"})
    needs_special_tokens: ClassVar[bool] = True
    """Marks may be special tokens, and no call is found without them."""
    _drops_blank: ClassVar[bool] = True
    """Leave out white space that is all there is before the first call, as vLLM does for most formats."""

    def __init__(self) -> None:
        self._held = ""
        """Text that more text may make a mark, or the start of a call."""
        self._raw: list[str] = []
        """What follows a mark, the mark included, and is no call yet."""
        self._is_behind_mark = False
        self._reader: _CallReader | None = None
        self._num_calls = 0
        self._keeps_text = True
        self._is_blank = self._drops_blank
        """There was nothing but white space."""
        self._blank: list[str] = []

    def feed(self, text: str) -> list[Part]:
        """Return what more text has made certain."""
        parts: list[Part] = []
        text, self._held, at = self._held + text, "", 0
        while at < len(text):
            if self._reader is not None:
                at = self._reader.read(text, at, parts)
                if not self._reader.is_open:
                    self._end_call(self._reader, parts)
            elif self._is_behind_mark:
                at = self._read_start(text, at, parts)
            else:
                at = self._read_text(text, at, parts)
        return parts

    def end(self) -> list[Part]:
        """Return what was held back."""
        parts: list[Part] = []
        if self._reader is not None:
            self._reader.end(parts)
            self._end_call(self._reader, parts)
        self._refuse(parts)
        self._add_content(self._held, parts)
        parts += [Part("content", text) for text in self._blank]
        self._held, self._blank = "", []
        return parts

    def _read_text(self, text: str, at: int, parts: list[Part]) -> int:
        """Read on from ``text[at]``, where no mark precedes, and return the place of the first character left over."""
        start = text.find(self._MARK, at)
        if start < 0:
            start = len(text) - num_begun(text[at:], self._MARK)
            self._add_content(text[at:start], parts)
            self._held = text[start:]
            return len(text)
        self._add_content(text[at:start], parts)
        self._raw.append(self._MARK)
        self._is_behind_mark = True
        return start + len(self._MARK)

    @abstractmethod
    def _read_start(self, text: str, at: int, parts: list[Part]) -> int:
        """Do the same after a mark, up to where a call may begin."""

    def _end_call(self, reader: _CallReader, parts: list[Part]) -> None:
        self._reader = None
        if reader.has_begun:
            self._num_calls += 1
            self._keeps_text = self._is_blank = False
            self._raw, self._blank = [], []
        else:
            self._raw += reader.raw

    def _refuse(self, parts: list[Part]) -> None:
        """Let what follows a mark be content, if there is anything, and look for the next mark."""
        self._is_behind_mark = False
        if self._raw:
            self._keeps_text = True
            self._add_content("".join(self._raw), parts)
            self._raw.clear()

    def _add_content(self, text: str, parts: list[Part]) -> None:
        if not text or not self._keeps_text:
            return
        if self._is_blank and text.isspace():
            self._blank.append(text)
            return
        parts += [Part("content", blank) for blank in self._blank]
        parts.append(Part("content", text))
        self._is_blank, self._blank = False, []


class HermesParser(ToolCallParser):
    """``<tool_call>{"name": ..., "arguments": ...}</tool_call>``, of Hermes and Qwen models."""

    _MARK = "<tool_call>"
    _drops_blank = False

    def _read_start(self, text: str, at: int, parts: list[Part]) -> int:
        self._reader = _CallReader(self._num_calls, self._ARGUMENTS)
        return at

    def _end_call(self, reader: _CallReader, parts: list[Part]) -> None:
        super()._end_call(reader, parts)
        self._refuse(parts)


class Llama3JsonParser(ToolCallParser):
    """``{"name": ..., "parameters": ...}``, with or without ``<|python_tag|>`` before it, of Llama models.

    As in vLLM, any ``{`` may begin a call; one that begins none ends the search.
    """

    needs_special_tokens = False
    _MARK = "<|python_tag|>"
    _START = re.compile(r"\{|<\|python_tag\|>")
    _ARGUMENTS = frozenset({"arguments", "parameters"})

    def __init__(self) -> None:
        super().__init__()
        self._is_over = False

    def _read_text(self, text: str, at: int, parts: list[Part]) -> int:
        if self._is_over:
            self._add_content(text[at:], parts)
            return len(text)
        found = self._START.search(text, at)
        if found is None or found[0] == self._MARK:
            return super()._read_text(text, at, parts)
        self._add_content(text[at : found.start()], parts)
        return self._read_start(text, found.start(), parts)

    def _read_start(self, text: str, at: int, parts: list[Part]) -> int:
        end = _end(_SPACE, text, at)
        self._raw.append(text[at:end])
        if text[end : end + 1] == "{":
            self._reader = _CallReader(self._num_calls, self._ARGUMENTS)
        elif end < len(text):
            self._refuse(parts)
        return end

    def _end_call(self, reader: _CallReader, parts: list[Part]) -> None:
        super()._end_call(reader, parts)
        self._is_over = not reader.has_begun
        self._refuse(parts)


class MistralParser(ToolCallParser):
    """``[TOOL_CALLS][{"name": ..., "arguments": ...}, ...]`` of older Mistral models, ``[TOOL_CALLS]name{...}`` and
    ``[TOOL_CALLS]name[ARGS]{...}`` of newer ones.
    """

    _MARK = "[TOOL_CALLS]"
    _MARKS = ("[CALL_ID]", "[ARGS]")
    _START = re.compile(
        r"\s*(?:(?P<list>\[)\s*|(?P<name>[^\s\[\]{}\"]{1,256})\s*(?:\[CALL_ID]\w+)?(?:\[ARGS]\s*)?)?(?={)"
    )
    _START_BEGUN = re.compile(r"\s*(?:\[\s*|[^\s\[\]{}\"]{1,256}\s*(?:\[CALL_ID]\w*)?(?:\[ARGS]\s*)?)?")
    _NEXT = re.compile(r"\s*(?:(?P<end>])|,\s*(?={))")
    _NEXT_BEGUN = re.compile(r"\s*(?:,\s*)?")
    _MAX_LENGTH = 512
    """Characters before a call of which none may be passed on yet."""

    def __init__(self) -> None:
        super().__init__()
        self._is_list = False
        self._num_before = 0
        """Calls before the list."""

    def _read_start(self, text: str, at: int, parts: list[Part]) -> int:
        found = (self._NEXT if self._is_list else self._START).match(text, at, at + self._MAX_LENGTH)
        if found is None:
            return self._wait_for_start(text, at, parts)
        self._raw.append(found[0])
        fields = found.groupdict()
        if fields.get("end"):
            if self._num_calls > self._num_before:
                self._raw.clear()
            self._refuse(parts)
        else:
            if fields.get("list"):
                self._is_list, self._num_before = True, self._num_calls
            self._reader = _CallReader(
                self._num_calls, self._ARGUMENTS, name=fields.get("name"), is_lenient=True
            )
        return found.end()

    def _wait_for_start(self, text: str, at: int, parts: list[Part]) -> int:
        start = text[at : at + self._MAX_LENGTH]
        whole = start[: len(start) - max(num_begun(start, mark) for mark in self._MARKS)]
        begun = self._NEXT_BEGUN if self._is_list else self._START_BEGUN
        if len(start) < self._MAX_LENGTH and begun.fullmatch(start if self._is_list else whole):
            self._held = start
            return len(text)
        self._refuse(parts)
        return at

    def _end_call(self, reader: _CallReader, parts: list[Part]) -> None:
        super()._end_call(reader, parts)
        if self._is_list and (reader.has_begun or reader.is_complete):
            return
        self._refuse(parts)

    def _refuse(self, parts: list[Part]) -> None:
        super()._refuse(parts)
        self._is_list = False


class RequiredCallsParser(MistralParser):
    """``[{"name": ..., "parameters": ...}, ...]``, to which a grammar holds the answer."""

    _ARGUMENTS = frozenset({"parameters"})

    def __init__(self) -> None:
        super().__init__()
        self._is_behind_mark = True


class NamedCallParser(AnswerParser):
    """All text is the arguments of one call, to which a grammar holds the answer.

    Args:
        name: of the function.
    """

    # As OpenAI's and vLLM's.
    ends_with_calls = False

    def __init__(self, name: str) -> None:
        self._name: list[Part] = [Part("name", name)]

    def feed(self, text: str) -> list[Part]:
        """Return the text, and first the name."""
        parts, self._name = self._name, []
        return [*parts, Part("arguments", text)]

    def end(self) -> list[Part]:
        """Return nothing."""
        return []


class PlainParser(AnswerParser):
    """All text is content."""

    def feed(self, text: str) -> list[Part]:
        """Return the text."""
        return [Part("content", text)] if text else []

    def end(self) -> list[Part]:
        """Return nothing."""
        return []


class ReasoningParser(AnswerParser):
    """Reasoning up to ``</think>``, then the answer. ``<think>`` may be part of the prompt, or come first.

    Args:
        answer: parses what follows.
    """

    _MARK = re.compile("</?think>")
    _MARKS = ("<think>", END_OF_REASONING)

    def __init__(self, answer: AnswerParser) -> None:
        self._answer = answer
        self.ends_with_calls = answer.ends_with_calls
        self._held = ""
        self._is_over = False

    def feed(self, text: str) -> list[Part]:
        """Return what more text has made certain."""
        if self._is_over:
            return self._answer.feed(text)
        parts: list[Part] = []
        text, self._held, at = self._held + text, "", 0
        for mark in self._MARK.finditer(text):
            self._add(text[at : mark.start()], parts)
            at = mark.end()
            if mark[0] == END_OF_REASONING:
                self._is_over = True
                return parts + self._answer.feed(text[at:])
        end = len(text) - max(num_begun(text[at:], mark) for mark in self._MARKS)
        self._add(text[at:end], parts)
        self._held = text[end:]
        return parts

    def end(self) -> list[Part]:
        """Return what was held back."""
        parts: list[Part] = []
        self._add(self._held, parts)
        self._held = ""
        return parts + self._answer.end()

    @staticmethod
    def _add(text: str, parts: list[Part]) -> None:
        if text:
            parts.append(Part("reasoning", text))


def num_begun(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the start of a mark."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return where the longest match from ``text[at]`` ends, of a pattern that matches anywhere."""
    found = pattern.match(text, at)
    assert found is not None
    return found.end()


def _decoded(inside: str) -> str | None:
    """Return the text of a JSON string without its quotation marks; None if it is not valid."""
    try:
        text: str = json.loads(f'"{inside}"')
        text.encode()  # half a surrogate pair is no text
    except ValueError:
        return None
    return text


MAKE_TOOL_CALL_PARSER: Mapping[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
}
"""Of ``settings.TOOL_CALL_PARSERS``."""
