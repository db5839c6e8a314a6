"""Where two servers answer a request in different ways, field by field."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

from tests.support.recording_proxy import Exchange

ABSENT = "absent"
# Of these only the type counts.
_OWN_VALUES = frozenset(
    {
        *("id", "item_id", "call_id", "created", "created_at", "system_fingerprint", "signature", "version"),
        *("owned_by", "message"),
        # What the prefix cache has depends on what came before.
        *("cached_tokens", "cache_read_input_tokens", "input_tokens", "created_cache_tokens"),
        *("cache_creation_input_tokens", "cache_write_tokens"),
    }
)
# Likewise in streams, where text comes in more or fewer events, and where a tool has to be called: vLLM then holds
# answers to the format of its parser.
_TEXTS = frozenset(
    {
        *("content", "text", "delta", "arguments", "partial_json", "sequence_number", "token_ids", "input"),
        *("prompt_tokens", "completion_tokens", "total_tokens", "output_tokens", "text_offset", "tokens"),
        *("logprobs", "token_logprobs", "top_logprobs", "token", "bytes"),
    }
)
_FREE_CHOICES = (None, "none", "auto")


class Difference(NamedTuple):
    """What one field of two answers is.

    Attributes:
        path: names of fields with dots between; ``[]`` stands for each item of a list, ``events[]`` are a
            stream's. Where the statuses differ, ``status:`` and the parameter that the refusal names.
    """

    path: str
    first: str
    second: str


def differences(first: Exchange, second: Exchange) -> list[Difference]:
    """Return where two answers to the same request differ."""
    if first.status != second.status:
        param = _refused_parameter(first if first.status >= 400 else second)
        return [Difference(f"status: {param}", str(first.status), str(second.status))]
    if first.answer_type != second.answer_type:
        return [Difference("content type", first.answer_type, second.answer_type)]
    if first.answer_type == "text/event-stream":
        found = _event_differences(_events(first), _events(second))
    else:
        bodies = [json.loads(each.answer) if each.answer else None for each in (first, second)]
        found = _compare("", *bodies, _OWN_VALUES | (_TEXTS if _must_call(first) else frozenset()))
    return list(dict.fromkeys(found))


def _must_call(exchange: Exchange) -> bool:
    """Return whether a request forces the call of a tool."""
    body = _read(exchange.content)
    choice = body.get("tool_choice") if isinstance(body, dict) else None
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return kind not in _FREE_CHOICES


def _read(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _refused_parameter(exchange: Exchange) -> str:
    error = json.loads(exchange.answer)["error"]
    # Anthropic's errors name it in the message only.
    param = str(error.get("param") or error["message"].partition(":")[0])
    return re.sub(r"\.\d+", "[]", param.removeprefix("body."))


def _events(exchange: Exchange) -> list[tuple[str, Any]]:
    """Return the name and the data of each event; consecutive ones that differ in texts only are one."""
    events: list[tuple[str, Any]] = []
    prompt_ids: dict[int, Any] = {}
    for block in exchange.answer.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if fields:
            data = fields["data"]
            read = data if data == "[DONE]" else _without_changes(json.loads(data), prompt_ids)
            events.append((fields.get("event", ""), read))
    events += [(f"prompt of {index}", {"prompt_token_ids": ids}) for index, ids in sorted(prompt_ids.items())]
    # Several completions come in any order.
    events.sort(key=lambda event: _choice_index(event[1]))
    shapes = groupby(events, key=lambda event: (event[0], _shape(event[1])))
    return [(name, next(same)[1]) for (name, _), same in shapes]


def _without_changes(data: dict[str, Any], prompt_ids: dict[int, Any]) -> dict[str, Any]:
    """Leave out of an event what may come now or in another event; ``prompt_ids`` gets those of each choice."""
    for choice in data.get("choices", ()):
        if "prompt_token_ids" in choice:
            ids = choice.pop("prompt_token_ids")
            prompt_ids[choice["index"]] = prompt_ids.get(choice["index"]) or ids
        delta = choice.get("delta", {})
        if "role" not in delta:
            late = ("tool_calls",) if choice["finish_reason"] else ()
            for name in ("content", "reasoning", "reasoning_content", *late):
                delta.pop(name, None)
        for call in delta.get("tool_calls", ()):
            call["function"].pop("arguments", None)
    return data


def _choice_index(data: Any) -> int:
    if data == "[DONE]" or data.get("choices") == []:
        return sys.maxsize
    return int(data["choices"][0]["index"]) if "choices" in data else 0


def _shape(value: Any, name: str = "") -> str:
    """Return a text that is the same for events that differ in texts only."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_shape(item, key)}" for key, item in sorted(value.items())) + "}"
    if name in _TEXTS or name in _OWN_VALUES:
        return _kind(value)
    if isinstance(value, list):
        return "[" + ",".join(_shape(item, name) for item in value) + "]"
    return json.dumps(value)


def _event_differences(first: list[tuple[str, Any]], second: list[tuple[str, Any]]) -> Iterator[Difference]:
    # An answer's text may come with its end, alone.
    kinds = [{_event_kind(*event): event[1] for event in events} for events in (first, second)]
    ours, theirs = ([kind for kind in each if not _is_optional(each[kind])] for each in kinds)
    for index in range(max(len(ours), len(theirs))):
        pair = [each[index] if index < len(each) else ABSENT for each in (ours, theirs)]
        if pair[0] != pair[1]:
            yield Difference(f"events: {pair[0]}", *pair)
    for kind in kinds[0].keys() & kinds[1].keys():
        yield from _compare("events[]", kinds[0][kind], kinds[1][kind], _OWN_VALUES | _TEXTS)


def _event_kind(name: str, data: Any) -> str:
    """Return in short what an event says."""
    if not isinstance(data, dict):
        return str(data)
    parts = [name or str(data.get("object", "error" if "error" in data else "?"))]
    for choice in data.get("choices", ()):
        calls = [
            call.get("function", {}).get("name", "") for call in choice.get("delta", {}).get("tool_calls", ())
        ]
        parts += [
            str(choice["index"]),
            *sorted(choice.get("delta", {})),
            *calls,
            str(choice["finish_reason"]),
        ]
    return " ".join(parts)


def _is_optional(data: Any) -> bool:
    """Return whether an event only adds to a text, or begins a call, which may come with the end."""
    if not isinstance(data, dict) or len(data.get("choices", ())) != 1:
        return False
    choice = data["choices"][0]
    return choice["finish_reason"] is None and "role" not in choice.get("delta", {})


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "number", float: "number", str: "text", list: "list", dict: "object"}
    return "null" if value is None else kinds[type(value)]


def _compare(path: str, first: Any, second: Any, own_values: frozenset[str]) -> Iterator[Difference]:
    name = path.rpartition(".")[2].removesuffix("[]")
    # Arguments of a call, and alternatives to a token by their texts, have fields of their own.
    is_own = name == "input" or (
        name in own_values and name == "top_logprobs" and "logprob" not in (first or ())
    )
    if isinstance(first, dict) and isinstance(second, dict) and not is_own:
        for key in dict.fromkeys([*first, *second]):
            inner = f"{path}.{key}" if path else key
            if key not in second:
                yield Difference(inner, _shown(first[key]), ABSENT)
            elif key not in first:
                yield Difference(inner, ABSENT, _shown(second[key]))
            else:
                yield from _compare(inner, first[key], second[key], own_values)
    elif isinstance(first, list) and isinstance(second, list):
        if len(first) != len(second) and name not in own_values:
            yield Difference(path, f"{len(first)} items", f"{len(second)} items")
        for ours, theirs in zip(first, second, strict=False):
            yield from _compare(f"{path}[]", ours, theirs, own_values)
    elif _kind(first) != _kind(second) or not (
        name in own_values or isinstance(first, float) or first == second
    ):
        yield Difference(path, _shown(first), _shown(second))


def _shown(value: Any) -> str:
    return _kind(value) if isinstance(value, (list, dict)) else json.dumps(value)
