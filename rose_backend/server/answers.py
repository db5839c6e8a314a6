"""Engine outputs as OpenAI's answers: whole, or as server-sent events.

Events are formatted as text: a dictionary or pydantic model per token would cost more than the rest of the server.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, NamedTuple

from rose_backend.engine.outputs import CompletionOutput, Logprob, RequestOutput

DONE_EVENT = b"data: [DONE]\n\n"

# Made once: making an encoder takes longer than encoding a small value.
_compact = json.JSONEncoder(separators=(",", ":")).encode

Positions = list[dict[int, Logprob]]
_MIN_LOGPROB = -9999.0
"""Written for minus infinity, which JSON lacks; vLLM writes the same."""


class AnswerOptions(NamedTuple):
    """What an answer takes over from its request and its server."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    n: int = 1
    """Completions of each prompt."""
    include_usage: bool = False
    """End a stream with token counts."""
    hit_unit: int = 1
    """The number of cached tokens of each prompt is rounded down to multiples of this."""


class Answer(ABC):
    """Collects the outputs of one HTTP request, and formats them."""

    object_name: str
    event_object_name: str

    def __init__(self, options: AnswerOptions) -> None:
        self._head = {"id": options.id, "created": options.created, "model": options.model}
        self._n = options.n
        self._include_usage = options.include_usage
        self._hit_unit = options.hit_unit
        self._latest: dict[int, RequestOutput] = {}
        self._num_sent_tokens: dict[int, int] = {}
        self._finished: set[int] = set()
        head_json = _compact({"object": self.event_object_name, **self._head})
        self._event_start = f"data: {head_json[:-1]}"
        self._prefix = self._event_start + ',"choices":[{"index":'
        self._suffix = '}],"usage":null}\n\n' if options.include_usage else "}]}\n\n"

    def keep(self, prompt_index: int, output: RequestOutput) -> None:
        """Note a prompt's latest output."""
        self._latest[prompt_index] = output

    def events(self, prompt_index: int, output: RequestOutput) -> bytes:
        """Return an event for each completion that has changed; empty when none has.

        As in vLLM, tokens whose text is held back (part of a character or of a stop string) still make an event.
        """
        self._latest[prompt_index] = output
        parts = []
        for completion in output.outputs:
            index = prompt_index * self._n + completion.index
            if index in self._finished:
                continue
            start = self._num_sent_tokens.get(index, 0)
            if completion.finish_reason is not None:
                self._finished.add(index)
            elif len(completion.token_ids) == start:
                continue
            self._num_sent_tokens[index] = len(completion.token_ids)
            logprobs = None if completion.logprobs is None else completion.logprobs[start:]
            parts.append(self._event(index, completion, logprobs))
        return "".join(parts).encode()

    def end_events(self) -> bytes:
        """Return the last events of a complete stream."""
        if not self._include_usage:
            return DONE_EVENT
        return (
            f'{self._event_start},"choices":[],"usage":{_compact(self.usage())}}}\n\n'.encode() + DONE_EVENT
        )

    def body(self) -> bytes:
        """Return the whole answer as JSON."""
        choices = [
            {
                "index": prompt_index * self._n + completion.index,
                **self._content(prompt_index, completion),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            for prompt_index, output in sorted(self._latest.items())
            for completion in output.outputs
        ]
        head = {"object": self.object_name, **self._head}
        return json.dumps({**head, "choices": choices, "usage": self.usage()}).encode()

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far; a prompt with several completions counts once."""
        outputs, unit = self._latest.values(), self._hit_unit
        num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        num_output_tokens = sum(
            len(completion.token_ids) for output in outputs for completion in output.outputs
        )
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(output.num_cached_tokens // unit * unit for output in outputs)
            },
        }

    @abstractmethod
    def _event(self, index: int, completion: CompletionOutput, logprobs: Positions | None) -> str:
        """Return the event for what is new in one completion."""

    @abstractmethod
    def _content(self, prompt_index: int, completion: CompletionOutput) -> dict[str, Any]:
        """Return text and log-probabilities of one finished completion."""

    def _event_end(self, completion: CompletionOutput) -> str:
        if completion.finish_reason is None:
            return f',"finish_reason":null{self._suffix}'
        stop_reason = "null" if completion.stop_reason is None else json.dumps(completion.stop_reason)
        return f',"finish_reason":"{completion.finish_reason}","stop_reason":{stop_reason}{self._suffix}'


class CompletionAnswer(Answer):
    """Answer of ``/v1/completions``.

    Args:
        echo: returns the text to repeat in front of a prompt's completions; called once the prompt is accepted.
    """

    object_name = event_object_name = "text_completion"

    def __init__(self, options: AnswerOptions, *, echo: Callable[[int], str] | None = None) -> None:
        super().__init__(options)
        self._echo = echo
        self._text_lengths: dict[int, int] = {}

    def _event(self, index: int, completion: CompletionOutput, logprobs: Positions | None) -> str:
        text = completion.delta_text
        if self._echo is None and logprobs is None:
            end = self._event_end(completion)
            return f'{self._prefix}{index},"text":{_quoted(text)},"logprobs":null{end}'
        if self._echo is not None and index not in self._text_lengths:
            text = self._echo(index // self._n) + text
        start = self._text_lengths.get(index, 0)
        self._text_lengths[index] = start
        shown = "null"
        if logprobs is not None:
            shown = _compact(_completion_logprobs(logprobs, start))
            self._text_lengths[index] = start + _num_characters(logprobs)
        return f'{self._prefix}{index},"text":{_quoted(text)},"logprobs":{shown}{self._event_end(completion)}'

    def _content(self, prompt_index: int, completion: CompletionOutput) -> dict[str, Any]:
        echo = "" if self._echo is None else self._echo(prompt_index)
        logprobs = completion.logprobs
        return {
            "text": echo + completion.text,
            "logprobs": None if logprobs is None else _completion_logprobs(logprobs, 0),
        }


class ChatAnswer(Answer):
    """Answer of ``/v1/chat/completions``.

    Args:
        num_top_logprobs: alternatives to report for each token, where log-probabilities were asked for.
    """

    object_name, event_object_name = "chat.completion", "chat.completion.chunk"

    def __init__(self, options: AnswerOptions, *, num_top_logprobs: int = 0) -> None:
        super().__init__(options)
        self._num_top_logprobs = num_top_logprobs
        self._started: set[int] = set()

    def _event(self, index: int, completion: CompletionOutput, logprobs: Positions | None) -> str:
        first = ""
        if index not in self._started:
            self._started.add(index)
            delta = '{"role":"assistant","content":""}'
            first = (
                f'{self._prefix}{index},"delta":{delta},"logprobs":null,"finish_reason":null{self._suffix}'
            )
        content = _quoted(completion.delta_text)
        shown = "null"
        if logprobs is not None:
            shown = _compact(_chat_logprobs(logprobs, self._num_top_logprobs))
        delta = f'{{"content":{content}}}'
        return f'{first}{self._prefix}{index},"delta":{delta},"logprobs":{shown}{self._event_end(completion)}'

    def _content(self, prompt_index: int, completion: CompletionOutput) -> dict[str, Any]:
        logprobs = completion.logprobs
        return {
            "message": {"role": "assistant", "content": completion.text},
            "logprobs": None if logprobs is None else _chat_logprobs(logprobs, self._num_top_logprobs),
        }


def _completion_logprobs(positions: Positions, start: int) -> dict[str, Any]:
    """Describe positions as lists; ``start`` is the offset of the first one's text."""
    # The token itself is the first entry of each position.
    chosen = [next(iter(position.values())) for position in positions]
    offsets = []
    for entry in chosen:
        offsets.append(start)
        start += len(entry.decoded_token)
    return {
        "text_offset": offsets,
        "token_logprobs": [_finite(entry.logprob) for entry in chosen],
        "tokens": [entry.decoded_token for entry in chosen],
        "top_logprobs": [
            {entry.decoded_token: _finite(entry.logprob) for entry in position.values()}
            for position in positions
        ],
    }


def _chat_logprobs(positions: Positions, num_top: int) -> dict[str, Any]:
    content = []
    for position in positions:
        entries = list(position.values())
        top = sorted((entry for entry in entries if entry.rank <= num_top), key=lambda entry: entry.rank)
        content.append({**_token_object(entries[0]), "top_logprobs": [_token_object(entry) for entry in top]})
    return {"content": content}


def _token_object(entry: Logprob) -> dict[str, Any]:
    token = entry.decoded_token
    return {"token": token, "logprob": _finite(entry.logprob), "bytes": list(token.encode())}


def _num_characters(positions: Positions) -> int:
    return sum(len(next(iter(position.values())).decoded_token) for position in positions)


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
