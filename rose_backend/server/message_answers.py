"""Engine outputs as answers of Anthropic's Messages API: thinking, text and calls as blocks, whole or as events."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, NamedTuple

from pydantic_core import from_json

from rose_backend.engine.outputs import RequestOutput
from rose_backend.server.answer_parsers import AnswerParser, Part, PlainParser
from rose_backend.server.answers import AnswerOptions, ChatAnswer, Usage, compact_json, pieces, quoted_text
from rose_backend.server.error_answers import ApiError


class _Kind(NamedTuple):
    """How blocks of one kind are written."""

    type: str
    field: str
    """With the text."""
    delta: str
    """Type of the change that adds to it."""
    delta_field: str


_TEXT = _Kind("text", "text", "text_delta", "text")
_THINKING = _Kind("thinking", "thinking", "thinking_delta", "thinking")
_CALL = _Kind("tool_use", "input", "input_json_delta", "partial_json")
_KINDS = {"content": _TEXT, "reasoning": _THINKING, "name": _CALL, "arguments": _CALL}


class _Block:
    """One block of an answer, which grows.

    Args:
        first: its first part.
        make_call_id: returns the id of one more call.
    """

    def __init__(self, first: Part, make_call_id: Callable[[], str]) -> None:
        self.kind = _KINDS[first.kind]
        self.call = first.call
        self.signature = secrets.token_hex(16) if self.kind is _THINKING else None
        self._head = f'{{"type":"{self.kind.type}"'
        if self.kind is _CALL:
            self._head += f',"id":"{make_call_id()}","name":{_quoted(first.text)}'
        self.texts: list[str] = []

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.texts)

    def json(self) -> Iterator[str]:
        """Yield the whole block as JSON."""
        yield f'{self._head},"{self.kind.field}":'
        if self.kind is _CALL:
            yield _input_json(self.text)
        else:
            yield from quoted_text(self.text)
        yield "}" if self.signature is None else f',"signature":"{self.signature}"}}'

    def start(self) -> str:
        """Return the block before its first text, as JSON."""
        nothing = "{}" if self.kind is _CALL else '""'
        end = "}" if self.signature is None else ',"signature":""}'
        return f'{self._head},"{self.kind.field}":{nothing}{end}'


class MessageAnswer(ChatAnswer):
    """Answer of ``/v1/messages``: that of a chat, with one choice.

    Args:
        usage: returns the token counts so far.
        parser: makes one for the answer; None where all text is content.
        how: other arguments of ``ChatAnswer``.
    """

    def __init__(
        self,
        options: AnswerOptions,
        *,
        usage: Callable[[], Usage],
        parser: Callable[[], AnswerParser] | None,
        **how: Any,
    ) -> None:
        super().__init__(options, parser=parser or PlainParser, **how)
        own = {"id": options.id, "type": "message", "role": "assistant", "model": options.model}
        self._message_start = compact_json(own)[:-1]
        self._usage = usage
        self._has_begun = False
        self._blocks: list[_Block] = []
        self._end = '"stop_reason":null,"stop_sequence":null'

    def keep(self, prompt_index: int, output: RequestOutput) -> Iterator[str]:
        """Add what is new to the whole answer; yields after each piece of work."""
        for part in self._new_parts(output.outputs[0]):
            if isinstance(part, str):
                yield part
            elif part.text:
                self._take(part)
        if output.finished:
            self._note_end(output)

    def body(self, usage: Usage) -> Iterator[bytes]:
        """Yield the whole answer as JSON, in pieces."""
        return pieces(self._whole(usage))

    def _whole(self, usage: Usage) -> Iterator[str]:
        yield f'{self._message_start},"content":['
        for number, block in enumerate(self._blocks):
            yield "," if number else ""
            yield from block.json()
        yield f'],{self._end},"usage":{_described(usage)}}}'

    def _event_parts(self, prompt_index: int, output: RequestOutput) -> Iterator[str]:
        if not self._has_begun:
            self._has_begun = True
            usage = compact_json({"input_tokens": self._usage()["prompt_tokens"], "output_tokens": 0})
            yield _event(
                "message_start", f'"message":{self._message_start},"content":[],{self._end},"usage":{usage}}}'
            )
        for part in self._new_parts(output.outputs[0]):
            if isinstance(part, Part):
                yield from self._part_events(part)
            else:
                yield part
        if output.finished:
            num_shown = len(self._blocks)
            self._note_end(output)
            if not num_shown:
                yield self._opened()
            yield from self._closing()

    def end_events(self, usage: Usage) -> bytes:
        """Return the events with the reason of the end and the token counts, and the last one."""
        end = _event("message_delta", f'"delta":{{{self._end}}},"usage":{_described(usage)}')
        return (end + 'event: message_stop\ndata: {"type":"message_stop"}\n\n').encode()

    def error_events(self, error: ApiError) -> bytes:
        """Return Anthropic's event of an error, which its clients raise."""
        return f"event: error\ndata: {compact_json(error.messages_body())}\n\n".encode()

    def _take(self, part: Part) -> None:
        """Add a part to the last block, or begin a block with it."""
        if self._begins(part):
            self._blocks.append(_Block(part, self._make_call_id))
        if part.kind != "name":
            self._blocks[-1].texts.append(part.text)

    def _begins(self, part: Part) -> bool:
        """Return whether a part begins a block."""
        last = self._blocks[-1] if self._blocks else None
        return last is None or (last.kind, last.call) != (_KINDS[part.kind], part.call)

    def _part_events(self, part: Part) -> Iterator[str]:
        if not part.text:
            return
        begins = self._begins(part)
        if begins:
            yield from self._closing()
        self._take(part)
        if begins:
            yield self._opened()
        if part.kind != "name":
            kind = self._blocks[-1].kind
            yield self._delta(f'"type":"{kind.delta}","{kind.delta_field}":{_quoted(part.text)}')

    def _opened(self) -> str:
        """Return the event that begins the last block."""
        return _event("content_block_start", f'{self._place},"content_block":{self._blocks[-1].start()}')

    def _closing(self) -> Iterator[str]:
        """Yield the events that end the last block."""
        if not self._blocks:
            return
        if (signature := self._blocks[-1].signature) is not None:
            yield self._delta(f'"type":"signature_delta","signature":"{signature}"')
        yield _event("content_block_stop", self._place)

    def _delta(self, fields: str) -> str:
        return _event("content_block_delta", f'{self._place},"delta":{{{fields}}}')

    @property
    def _place(self) -> str:
        return f'"index":{len(self._blocks) - 1}'

    def _note_end(self, output: RequestOutput) -> None:
        """Note why the answer ended: as in vLLM with its calls, unless the last one was cut off. One without text has
        a block all the same, which clients expect."""
        completion = output.outputs[0]
        calls = [block for block in self._blocks if block.kind is _CALL]
        reason: str | None = None
        sequence: str | None = None
        if completion.finish_reason == "length":
            reason = "max_tokens"
        elif completion.finish_reason == "stop":
            reason = "tool_use" if calls else "end_turn"
            is_complete = bool(calls) and _parsed(calls[-1].text) is not None
            if isinstance(completion.stop_reason, str) and not is_complete:
                reason, sequence = "stop_sequence", completion.stop_reason
        self._end = f'"stop_reason":{compact_json(reason)},"stop_sequence":{compact_json(sequence)}'
        if not self._blocks:
            self._take(Part("content", ""))


def _event(name: str, fields: str) -> str:
    return f'event: {name}\ndata: {{"type":"{name}",{fields}}}\n\n'


def _described(usage: Usage) -> str:
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return compact_json(
        {
            "input_tokens": usage["prompt_tokens"] - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }
    )


def _parsed(arguments: str, *, is_partial: bool = False) -> dict[str, Any] | None:
    """Return arguments if they are JSON of an object.

    Args:
        is_partial: their end may be missing.
    """
    try:
        value = from_json(arguments, allow_inf_nan=False, allow_partial=is_partial)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _input_json(arguments: str) -> str:
    """Return arguments as an object in JSON: what has come of one that was cut off, else as the model wrote it."""
    if _parsed(arguments) is not None:
        return arguments
    try:
        return json.dumps(_parsed(arguments, is_partial=True) or {}, allow_nan=False)
    except ValueError:
        # A number beyond the range of floats, which JSON cannot say as one.
        return "{}"
