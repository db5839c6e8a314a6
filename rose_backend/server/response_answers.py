"""Engine outputs as answers of the Responses API: reasoning, text and calls as items, whole or as events."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, NamedTuple

from rose_backend.engine.outputs import CompletionOutput, RequestOutput
from rose_backend.server.answer_parsers import AnswerParser, Part, PlainParser, ReasoningParser
from rose_backend.server.answers import (
    AnswerOptions,
    ChatAnswer,
    JsonLists,
    Usage,
    compact_json,
    pieces,
    quoted_text,
)
from rose_backend.server.error_answers import ApiError

_EVENT_END = "}\n\n"
_NULLS = (
    *("previous_response_id", "prompt", "kv_transfer_params", "ec_transfer_params"),
    *("input_messages", "output_messages"),
)
"""Fields of vLLM's answers that are null here."""
_TURNS: Usage = {"input_tokens_per_turn": [], "cached_tokens_per_turn": []}
_TOOL_TURNS: Usage = {
    "tool_output_tokens": 0,
    "output_tokens_per_turn": [],
    "tool_output_tokens_per_turn": [],
}


class _Kind(NamedTuple):
    """How items of one kind are written."""

    prefix: str
    """Of their ids."""
    head: str
    """Fields that are the same in each."""
    event: str
    """Name of the events with their text, and type of the part that holds it."""
    part_end: str = ""
    """Fields of this part after the text, and before log-probabilities."""
    has_logprobs: bool = False
    """This part and these events have a field for log-probabilities."""

    def logprobs(self, lists: Iterable[str]) -> Iterator[str]:
        """Yield the field for log-probabilities: ``lists``, the insides of lists in JSON."""
        if self.has_logprobs:
            yield ',"logprobs":['
            for number, each in enumerate(lists):
                yield f",{each}" if number else each
            yield "]"


_MESSAGE = _Kind(
    "msg",
    '"type":"message","role":"assistant","phase":null',
    "output_text",
    ',"annotations":[]',
    has_logprobs=True,
)
_REASONING = _Kind("rs", '"type":"reasoning","summary":[]', "reasoning_text")
_CALL = _Kind(
    "fc", '"type":"function_call","async":null,"caller":null,"namespace":null', "function_call_arguments"
)
_KINDS = {"content": _MESSAGE, "reasoning": _REASONING, "name": _CALL, "arguments": _CALL}


class _Item:
    """One item of an answer, which grows.

    Args:
        first: its first part.
        index: its place in the answer.
        make_call_id: returns the id of one more call.
    """

    def __init__(self, first: Part, index: int, make_call_id: Callable[[], str]) -> None:
        self.kind = _KINDS[first.kind]
        self.call = first.call
        own_id = f"{self.kind.prefix}_{secrets.token_hex(16)}"
        self._head = f'{{"id":"{own_id}",{self.kind.head}'
        self.index = f'"output_index":{index}'
        self.place = f'"item_id":"{own_id}",{self.index}'
        self._name = ""
        if self.kind is _CALL:
            self._name = f',"name":{_quoted(first.text)}'
            self._head += f',"call_id":"{make_call_id()}"{self._name}'
        else:
            self.place += ',"content_index":0'
        self.texts: list[str] = []
        self.logprobs: list[str] = []
        """Of the text's tokens: insides of lists in JSON."""

    def json(self, status: str, *, is_empty: bool = False) -> Iterator[str]:
        """Yield the item as JSON, without its text if ``is_empty``."""
        yield self._head
        if self.kind is _CALL:
            yield ',"arguments":'
            yield from self._text(is_empty)
        else:
            yield ',"content":['
            if not is_empty:
                yield from self.part()
            yield "]"
        yield f',"status":"{status}"}}'

    def part(self, *, is_empty: bool = False) -> Iterator[str]:
        """Yield the part of a message or of reasoning as JSON."""
        yield f'{{"type":"{self.kind.event}","text":'
        yield from self._text(is_empty)
        yield self.kind.part_end
        if is_empty or self.logprobs or not self.kind.has_logprobs:
            yield from self.kind.logprobs(() if is_empty else self.logprobs)
        else:
            yield ',"logprobs":null'
        yield "}"

    def done(self) -> Iterator[str]:
        """Yield the fields of the event with the whole text."""
        yield f'{self.place}{self._name},"{"arguments" if self.kind is _CALL else "text"}":'
        yield from self._text()
        yield from self.kind.logprobs(self.logprobs)

    def _text(self, is_empty: bool = False) -> Iterator[str]:
        return quoted_text("" if is_empty else "".join(self.texts))


class ResponseAnswer(ChatAnswer):
    """Answer of ``/v1/responses``: that of a chat, with one choice.

    Args:
        echoed: fields of the request that are repeated.
        usage: returns the token counts so far.
        end_of_reasoning: token that ends it; None where the model has none, and its tokens are not counted.
        parser: makes one for the answer; None where all text is content.
        how: other arguments of ``ChatAnswer``.
    """

    def __init__(
        self,
        options: AnswerOptions,
        *,
        echoed: Mapping[str, Any],
        usage: Callable[[], Usage],
        end_of_reasoning: int | None,
        parser: Callable[[], AnswerParser] | None,
        **how: Any,
    ) -> None:
        super().__init__(options, parser=parser or PlainParser, **how)
        self._parsers[0] = (parser or PlainParser)()
        own = {"id": options.id, "object": "response", "created_at": options.created, "model": options.model}
        fixed = {"background": False, "error": None, **dict.fromkeys(_NULLS)}
        self._response_start = compact_json({**own, **echoed, **fixed})[:-1]
        self._usage = usage
        reasons = isinstance(self._parsers[0], ReasoningParser)
        self._end_of_reasoning = end_of_reasoning if reasons else None
        self._num_reasoning_tokens = 0
        self._num_events = 0
        self._items: list[_Item] = []
        # Log-probabilities of tokens whose text is still to come, of earlier outputs and of the last one: insides of
        # lists in JSON.
        self._held: list[str] = []
        self._new: list[str] = []
        self._reason: str | None = None

    def keep(self, prompt_index: int, output: RequestOutput) -> Iterator[str]:
        """Add what is new to the whole answer; yields after each piece of work."""
        yield from self._read_logprobs(output.outputs[0])
        for part in self._new_parts(output.outputs[0]):
            if isinstance(part, Part):
                self._take(part)
                self._take_logprobs(self._items[-1])
            else:
                yield part
        if output.finished and self._items:
            self._take_logprobs(self._items[-1])

    def body(self, usage: Usage) -> Iterator[bytes]:
        """Yield the whole answer as JSON, in pieces."""
        return pieces(self._response(self._status))

    def _event_parts(self, prompt_index: int, output: RequestOutput) -> Iterator[str]:
        if not self._num_events:
            for kind in ("created", "in_progress"):
                yield from self._event(kind, '"response":', self._response("in_progress"))
        yield from self._read_logprobs(output.outputs[0])
        for part in self._new_parts(output.outputs[0]):
            if isinstance(part, Part):
                yield from self._part_events(part)
            else:
                yield part
        if output.finished:
            if self._items:
                self._take_logprobs(self._items[-1])
                yield from self._closing(self._items[-1], self._status)
            yield from self._event(self._status, '"response":', self._response(self._status))

    def end_events(self, usage: Usage) -> bytes:
        """Return nothing: the event with the whole answer has ended the stream."""
        return b""

    def error_events(self, error: ApiError) -> bytes:
        """Return OpenAI's event of an error, with the object of other routes, which its clients raise."""
        detail = error.body()
        fields = {**detail["error"], **detail, "type": "error", "sequence_number": self._num_events}
        return f"event: error\ndata: {compact_json(fields)}\n\n".encode()

    @property
    def _status(self) -> str:
        return "completed" if self._reason == "stop" else "incomplete"

    def _new_parts(self, completion: CompletionOutput) -> Iterator[Part | str]:
        if self._end_of_reasoning is not None:
            ids = list(completion.token_ids)
            is_over = self._end_of_reasoning in ids
            self._num_reasoning_tokens += ids.index(self._end_of_reasoning) if is_over else len(ids)
            self._end_of_reasoning = None if is_over else self._end_of_reasoning
        self._reason = completion.finish_reason
        return super()._new_parts(completion)

    def _read_logprobs(self, completion: CompletionOutput) -> Iterator[str]:
        """Make JSON of the log-probabilities of new tokens, if there are any; yields after each piece of work."""
        if completion.logprobs:
            lists: JsonLists = {}
            yield from self._format(0, completion.logprobs, lists)
            self._held, self._new = self._held + self._new, lists["content"]

    def _take_logprobs(self, item: _Item) -> list[str]:
        """Give an item the log-probabilities of its new text, and return them; reasoning and calls have none."""
        new, self._held, self._new = self._held + self._new, [], []
        if not item.kind.has_logprobs:
            return []
        item.logprobs += new
        return new

    def _take(self, part: Part) -> bool:
        """Add a part to the last item, or begin an item with it; return whether it did."""
        last = self._items[-1] if self._items else None
        begins = last is None or (last.kind, last.call) != (_KINDS[part.kind], part.call)
        if begins:
            if last is not None:
                # What came between two items, such as the mark that ends reasoning, is not of the text.
                self._held = []
            self._items.append(_Item(part, len(self._items), self._make_call_id))
        if part.kind != "name":
            self._items[-1].texts.append(part.text)
        return begins

    def _part_events(self, part: Part) -> Iterator[str]:
        earlier = self._items[-1:]
        begins, item = self._take(part), self._items[-1]
        if begins:
            for each in earlier:
                yield from self._closing(each, "completed")
            added = item.json("in_progress", is_empty=True)
            yield from self._event("output_item.added", f'{item.index},"item":', added)
            if item.kind is not _CALL:
                empty = item.part(is_empty=True)
                yield from self._event("content_part.added", f'{item.place},"part":', empty)
        if part.kind != "name":
            kind, new = item.kind, self._take_logprobs(item)
            fields = f'{item.place},"delta":{_quoted(part.text)}'
            yield from self._event(f"{kind.event}.delta", fields, kind.logprobs(new))

    def _closing(self, item: _Item, status: str) -> Iterator[str]:
        """Yield the events that end an item."""
        yield from self._event(f"{item.kind.event}.done", "", item.done())
        if item.kind is not _CALL:
            yield from self._event("content_part.done", f'{item.place},"part":', item.part())
        yield from self._event("output_item.done", f'{item.index},"item":', item.json(status))

    def _event(self, name: str, fields: str, rest: Iterable[str] = ()) -> Iterator[str]:
        """Yield an event whose last fields may be long."""
        kind = f"response.{name}"
        yield f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{self._num_events},{fields}'
        self._num_events += 1
        yield from rest
        yield _EVENT_END

    def _response(self, status: str) -> Iterator[str]:
        """Yield the answer as JSON."""
        is_over = status != "in_progress"
        cause = {"reason": "max_output_tokens"} if is_over and self._reason == "length" else None
        yield f'{self._response_start},"status":"{status}","incomplete_details":{compact_json(cause)},"output":['
        for number, item in enumerate(self._items):
            yield "," if number else ""
            yield from item.json(status if item is self._items[-1] else "completed")
        yield f'],"usage":{compact_json(self._described_usage()) if is_over else "null"}}}'

    def _described_usage(self) -> Usage:
        usage = self._usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0, **_TURNS},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens, **_TOOL_TURNS},
            "total_tokens": usage["total_tokens"],
        }
