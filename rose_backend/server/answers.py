"""Engine outputs as OpenAI's answers: whole, or as server-sent events.

Events are put together from text made once per stream and the few values that are new: building a dictionary or a model
for each token would cost more than the rest of the server together.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, NamedTuple

from rose_backend.engine.outputs import CompletionOutput, Logprob, RequestOutput

DONE_EVENT = b"data: [DONE]\n\n"

# Made once: making an encoder takes longer than a small value does.
_compact = json.JSONEncoder(separators=(",", ":")).encode

Positions = list[dict[int, Logprob]]
_MIN_LOGPROB = -9999.0
"""JSON has no infinity; this is what vLLM writes for it."""


class AnswerHead(NamedTuple):
    """What every part of an answer repeats."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str


class Answer(ABC):
    """Collects the outputs of one HTTP request, whose prompts each have ``n`` completions.

    Args:
        include_usage: end a stream with token counts.
        hit_unit: cached tokens are told in multiples of so many, for each prompt.
    """

    object_name: str
    event_object_name: str

    def __init__(self, head: AnswerHead, *, n: int, include_usage: bool = False, hit_unit: int = 1) -> None:
        self._head = head
        self._n = n
        self._include_usage = include_usage
        self._hit_unit = hit_unit
        self._latest: dict[int, RequestOutput] = {}
        self._num_sent_tokens: dict[int, int] = {}
        self._finished: set[int] = set()
        head_json = _compact({"object": self.event_object_name, **head._asdict()})
        self._event_start = f"data: {head_json[:-1]}"
        self._prefix = self._event_start + ',"choices":[{"index":'
        self._suffix = '}],"usage":null}\n\n' if include_usage else "}]}\n\n"

    def keep(self, prompt_index: int, output: RequestOutput) -> None:
        """Note a prompt's latest output."""
        self._latest[prompt_index] = output

    def events(self, prompt_index: int, output: RequestOutput) -> bytes:
        """Return an event for each completion that has news; empty when none has.

        Tokens without text are news, as they are for vLLM: half a character, or what may become a stop string. Whoever
        waits sees that there is progress.
        """
        self._latest[prompt_index] = output
        parts = []
        for completion in output.outputs:
            index = prompt_index * self._n + completion.index
            if index in self._finished:
                continue
            start = self._num_sent_tokens.get(index, 0)
            if completion.finished:
                self._finished.add(index)
            elif len(completion.token_ids) == start:
                continue
            self._num_sent_tokens[index] = len(completion.token_ids)
            logprobs = None if completion.logprobs is None else completion.logprobs[start:]
            parts.append(self._event(index, completion, logprobs))
        return "".join(parts).encode()

    def end_events(self) -> bytes:
        """Return what closes a complete stream."""
        if not self._include_usage:
            return DONE_EVENT
        return (
            f'{self._event_start},"choices":[],"usage":{_compact(self.usage())}}}\n\n'.encode() + DONE_EVENT
        )

    def body(self) -> bytes:
        """Return the whole answer as JSON."""
        choices = [
            self._choice(prompt_index * self._n + completion.index, completion)
            for prompt_index, output in sorted(self._latest.items())
            for completion in output.outputs
        ]
        answer = {
            "object": self.object_name,
            **self._head._asdict(),
            "choices": choices,
            "usage": self.usage(),
        }
        return json.dumps(answer).encode()

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
    def _choice(self, index: int, completion: CompletionOutput) -> dict[str, Any]:
        """Return one finished completion."""

    def _event_end(self, completion: CompletionOutput) -> str:
        if not completion.finished:
            return f',"finish_reason":null{self._suffix}'
        stop_reason = "null" if completion.stop_reason is None else json.dumps(completion.stop_reason)
        return f',"finish_reason":"{completion.finish_reason}","stop_reason":{stop_reason}{self._suffix}'


class CompletionAnswer(Answer):
    """Answer of ``/v1/completions``.

    Args:
        echo: gives the text to repeat in front of a prompt's completions; asked once the prompt has been accepted.
    """

    object_name = event_object_name = "text_completion"

    def __init__(
        self,
        head: AnswerHead,
        *,
        n: int,
        include_usage: bool = False,
        hit_unit: int = 1,
        echo: Callable[[int], str] | None = None,
    ) -> None:
        super().__init__(head, n=n, include_usage=include_usage, hit_unit=hit_unit)
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

    def _choice(self, index: int, completion: CompletionOutput) -> dict[str, Any]:
        echo = "" if self._echo is None else self._echo(index // self._n)
        logprobs = completion.logprobs
        return {
            "index": index,
            "text": echo + completion.text,
            "logprobs": None if logprobs is None else _completion_logprobs(logprobs, 0),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }


class ChatAnswer(Answer):
    """Answer of ``/v1/chat/completions``.

    Args:
        num_top_logprobs: alternatives to report for each token, where log-probabilities were asked for.
    """

    object_name, event_object_name = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        head: AnswerHead,
        *,
        n: int,
        include_usage: bool = False,
        hit_unit: int = 1,
        num_top_logprobs: int = 0,
    ) -> None:
        super().__init__(head, n=n, include_usage=include_usage, hit_unit=hit_unit)
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

    def _choice(self, index: int, completion: CompletionOutput) -> dict[str, Any]:
        logprobs = completion.logprobs
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text},
            "logprobs": None if logprobs is None else _chat_logprobs(logprobs, self._num_top_logprobs),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
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
