"""The constraint that a request puts on its text: JSON, a regular expression, a list of choices, or a grammar.

Names and meaning are vLLM's. Everything that needs no tokenizer is checked here; ``grammars`` compiles the rest.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any

from rose_backend.errors import RequestError

MAX_GRAMMAR_LENGTH = 65_536
"""Characters of a schema, an expression, a grammar, or all choices together."""
MAX_SCHEMA_DEPTH = 64
"""Levels of lists and objects in a schema."""
MAX_SCHEMA_VALUES = 16_384
"""In it: looking at each takes a microsecond."""
MAX_SCHEMA_COUNT = 10_000
"""Of items and properties that a schema asks for: beyond, compiling some schemas takes seconds and gigabytes."""
MAX_SCHEMA_MULTIPLE = 10_000
"""Largest ``multipleOf``, ignoring the decimal point: its automaton has that many states. For several it limits their
sum, or their product where schemas are combined."""
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains")
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("enum", "const", "default", "examples", "required")
"""Keywords whose values are no schemas."""
_DIRECTIVES = ("%json", "%llguidance")
_COMBINING = ("allOf", "anyOf", "oneOf", "if", "$ref", "unevaluatedProperties")
"""Keywords that may allow properties which the schema itself does not list."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of ``json``, ``regex``, ``choice``, ``grammar`` and ``json_object``.

    Raises:
        RequestError: names the field, what was got and what is allowed.
    """

    json: str | Mapping[str, Any] | None = None
    """JSON schema. An object that lists properties has no others, unless it sets ``additionalProperties``."""
    regex: str | None = None
    """Regular expression in the syntax of Rust's ``regex``, which the whole text matches."""
    choice: Sequence[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """Context-free grammar, in llguidance's Lark syntax or as GBNF."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """JSON without whitespace between its parts."""
    disable_additional_properties: bool = False
    """Without effect, as in vLLM with xgrammar; see ``json``."""
    whitespace_pattern: str | None = None
    """Not supported, nor is the next one."""
    structural_tag: str | None = None
    begins_after: int | None = None
    """Token after which the structured text begins; None: at once. Set by the server, where answers reason first."""

    def __post_init__(self) -> None:
        for name in ("whitespace_pattern", "structural_tag"):
            if getattr(self, name) is not None:
                raise _refusal(name, "one, which is not supported", "null")
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            raise _refusal("", got, f"exactly one of {', '.join(_KINDS)}")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise _refusal(name, type(getattr(self, name)).__name__, "true and false")
        if self.json_object not in (None, True):
            raise _refusal("json_object", repr(self.json_object), "true, or another field instead")
        _check_text("regex", self.regex)
        _check_text("grammar", self.grammar)
        for name in _DIRECTIVES if isinstance(self.grammar, str) else ():
            if name in str(self.grammar):
                # A schema in it would not be checked.
                raise _refusal("grammar", f"{name} in one, which is not supported", "rules alone")
        if self.grammar is not None and not self.grammar.strip():
            raise _refusal("grammar", "an empty text", "a grammar")
        # As text and tuple the parameters can be a key, and cost little to send to the engine process.
        if self.json is not None:
            object.__setattr__(self, "json", _checked_schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _checked_choices(self.choice))

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> StructuredOutputsParams:
        """Build from user-supplied fields.

        Raises:
            RequestError: unknown field or bad value.
        """
        valid = [each.name for each in fields(cls) if each.name != "begins_after"]
        for name in options:
            if name not in valid:
                raise _refusal("", f"a field {name!r}", ", ".join(valid))
        return cls(**options)

    def starting_after(self, token_id: int) -> StructuredOutputsParams:
        """Return the same for a text that starts after a token, without checking again what has been checked."""
        other = copy.copy(self)
        object.__setattr__(other, "begins_after", token_id)
        return other

    @property
    def field(self) -> str:
        """The field that was given, as errors name it."""
        return next(f"structured_outputs.{name}" for name in _KINDS if getattr(self, name) is not None)

    def lark_grammar(self) -> str:
        """Return the grammar as llguidance reads it.

        Raises:
            Exception: of its reader, where it is written in no syntax that is known.
        """
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import any_to_lark

        if self.grammar is not None:
            text = any_to_lark(self.grammar)
        elif self.choice is not None:
            # One terminal: as many rules would be slow, and too many are refused.
            text = "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(each) for each in self.choice)
        elif self.regex is not None:
            text = json.loads(LLMatcher.grammar_from_regex(self.regex))["grammars"][0]["lark_grammar"]
        else:
            text = "start: %json " + json.dumps(self._schema())
        # Where only one text can follow, any of its tokenizations may be drawn, not the tokenizer's alone.
        return '%llguidance {"no_forcing": true}\n' + text

    def _schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "object"} if self.json is None else json.loads(str(self.json))
        for each in _subschemas(schema):
            lists = isinstance(each.get("properties"), dict) or isinstance(
                each.get("patternProperties"), dict
            )
            if lists and not any(name in each for name in (*_COMBINING, "additionalProperties")):
                each["additionalProperties"] = False
        schema["x-guidance"] = {"whitespace_flexible": not self.disable_any_whitespace}
        return schema


def _checked_schema(value: object) -> str:
    """Return a schema as JSON."""
    if isinstance(value, str):
        _check_text("json", value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _refusal("json", f"a text that is no JSON ({error})", "a JSON schema") from error
    if not isinstance(value, Mapping):
        raise _refusal("json", type(value).__name__, "a JSON schema: an object, or one as text")
    num_values, num_characters = 1, 0
    multiples, is_combined = [0], False
    waiting: list[tuple[Any, int]] = [(value, 1)]
    while waiting:
        part, depth = waiting.pop()
        if not part:
            continue
        num_values += len(part)
        num_characters += sum(len(each) for each in _all_of(part) if isinstance(each, str))
        if num_characters > MAX_GRAMMAR_LENGTH:
            raise _refusal("json", f"{num_characters} characters and more", f"at most {MAX_GRAMMAR_LENGTH}")
        if depth > MAX_SCHEMA_DEPTH or num_values > MAX_SCHEMA_VALUES:
            most = f"{MAX_SCHEMA_DEPTH} levels and {MAX_SCHEMA_VALUES} values"
            raise _refusal("json", "more of one", f"a schema of at most {most}")
        for name in _COUNTS:
            count = part.get(name) if isinstance(part, Mapping) else None
            if isinstance(count, (int, float)) and count > MAX_SCHEMA_COUNT:
                raise _refusal("json", f"{name} of more than that", f"a count of at most {MAX_SCHEMA_COUNT}")
        if isinstance(part, Mapping):
            is_combined |= any(name in part for name in ("allOf", "if", "$ref"))
            multiples.append(_multiple_of(part))
        values = part.values() if isinstance(part, Mapping) else part
        waiting.extend((each, depth + 1) for each in values if isinstance(each, (Mapping, list, tuple)))
    multiples = [each for each in multiples if each > 1]
    if (math.prod(multiples) if is_combined else sum(multiples)) > MAX_SCHEMA_MULTIPLE:
        allowed = f"digits of a number of at most {MAX_SCHEMA_MULTIPLE}, of all together"
        raise _refusal("json", "multipleOf of more than that", allowed)
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        raise _refusal("json", f"a value that JSON lacks ({error})", "a JSON schema") from error
    _check_text("json", text)
    return text


def _all_of(part: Any) -> Iterator[Any]:
    """Return an iterator over keys and values of an object, or over the values of a list."""
    return itertools.chain(part, part.values()) if isinstance(part, Mapping) else iter(part)


def _multiple_of(part: Mapping[Any, Any]) -> int:
    """Return the number ``multipleOf`` without its decimal point; 0 where there is none."""
    number = part.get("multipleOf")
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
        return 0
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    # More zeros than that are too many anyway.
    return int("".join(map(str, digits[:20]))) * int(
        10 ** min(max(int(exponent), 0) + max(len(digits) - 20, 0), 20)
    )


def _checked_choices(choices: object) -> tuple[str, ...]:
    if not isinstance(choices, (list, tuple)) or not choices:
        raise _refusal("choice", type(choices).__name__, "a list of at least one text")
    # Before its elements: a list of millions is refused at once.
    if len(choices) > MAX_GRAMMAR_LENGTH or not all(isinstance(each, str) and each for each in choices):
        raise _refusal("choice", "others", f"at most {MAX_GRAMMAR_LENGTH} texts, none of them empty")
    _check_text("choice", "".join(choices))
    return tuple(choices)


def _check_text(name: str, text: object) -> None:
    if text is None:
        return
    if not isinstance(text, str):
        raise _refusal(name, type(text).__name__, "a text")
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise _refusal(name, f"{len(text)} characters", f"at most {MAX_GRAMMAR_LENGTH}")
    if "\0" in text or (not text.isascii() and any("\ud800" <= each <= "\udfff" for each in text)):
        raise _refusal(name, "NUL or half of a character", "a text of Unicode characters")


def _subschemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schema and those in it, but for parts of ``allOf``: each allows what the others list."""
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            yield part
            for name, value in part.items():
                if name in _MAPS_OF_SCHEMAS and isinstance(value, dict):
                    waiting += value.values()
                elif name not in _DATA and name not in ("allOf", "if", "then", "else", "not"):
                    waiting.append(value)


def _refusal(name: str, got: str, allowed: str) -> RequestError:
    field = f"structured_outputs.{name}" if name else "structured_outputs"
    return RequestError(f"{field}: got {got[:200]}, allowed is {allowed}", parameter=field)
