"""Engine outputs as OpenAI's answers: whole, or as server-sent events.

Events are formatted as text: a dictionary or pydantic model per token would cost more than the rest of the server.
"""

from __future__ import annotations

import json
import math
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rose_backend.engine.outputs import (
    CompletionOutput,
    GrowingCompletions,
    Logprob,
    Logprobs,
    PromptLogprobs,
    RequestOutput,
    json_logprob,
    json_logprobs,
)
from rose_backend.server.answer_parsers import AnswerParser, Part
from rose_backend.server.error_answers import ApiError

DONE_EVENT = b"data: [DONE]\n\n"

# Made once: making an encoder takes longer than encoding a small value.
compact_json = json.JSONEncoder(separators=(",", ":")).encode

_POSITIONS_AT_ONCE = 64
"""Logprobs that are formatted in one go: with 20 alternatives each, that takes a few milliseconds."""
_PROMPT_POSITIONS_AT_ONCE = 32
"""The same of prompts, whose entries are made on the way, and which are written twice where they are echoed."""
_PARSED_AT_ONCE = 1 << 12
"""Characters of an answer that are parsed in a few milliseconds, whatever they are."""
_IDS_AT_ONCE = 4096
"""Token ids that are written in less than a millisecond."""
_CHARACTERS_AT_ONCE = 1 << 16
"""Characters of an answer, about as many as that gives."""


_LETTERS_AND_DIGITS = string.ascii_letters + string.digits

Usage: TypeAlias = dict[str, Any]
"""Token counts as OpenAI's object."""
JsonLists: TypeAlias = dict[str, list[str]]
"""Lists by name; each item is the inside of a list in JSON, a part of the whole."""


def make_call_id() -> str:
    """Return a random id of a call, as vLLM makes most of them."""
    return f"chatcmpl-tool-{secrets.token_hex(16)}"


def _make_mistral_call_id() -> str:
    """Return a random id of nine letters and digits, the only ones that chat templates of Mistral's models take."""
    return "".join(secrets.choice(_LETTERS_AND_DIGITS) for _ in range(9))


MAKE_CALL_ID: Mapping[str | None, Callable[[], str]] = {"mistral": _make_mistral_call_id}
"""Of ``settings.TOOL_CALL_PARSERS`` whose models need others than ``make_call_id``'s."""


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
    continuous_usage: bool = False
    """Send the token counts of each completion in its events, too."""
    prompts: Sequence[NDArray[np.int32]] = ()
    """Token ids of each prompt, which both this and the next option need."""
    return_token_ids: bool = False
    """Report the token ids of prompts and completions."""
    tokens_as_token_ids: bool = False
    """Call tokens ``token_id:5`` instead of by their text, in log-probabilities."""
    fingerprint: str = ""
    """Of the server's version and configuration."""
    role: str = "assistant"
    """Of a chat's answer, as is the next option."""
    echo: str = ""
    """Text that its content begins with."""


class Answer(ABC):
    """Collects the outputs of one HTTP request, and formats them.

    Large answers are formatted piece by piece, each in a few milliseconds, so that others can run between two of them.
    """

    object_name: str
    event_object_name: str
    # Fields of vLLM's that are null here: of an answer, of a choice without token ids, of one that has not ended in a
    # stream, and of token counts in its events.
    _answer_nulls = ',"service_tier":null,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null'
    _no_ids: str
    _unfinished: str
    _usage_nulls: str
    _make_parser: Callable[[], AnswerParser] | None = None
    """None: all text is content."""
    _has_prompt_fields_in_choices: bool
    """Log-probabilities of a prompt are a field of each of its choices, else of the whole answer."""
    _echo: Sequence[str] | None = None
    """Text that begins the completions of each prompt."""
    _echoed_logprobs: int | None = None
    """Log-probabilities begin with those of the prompt, with at most this many alternatives."""
    _shows_prompt_only = False
    """What is generated is left out."""

    def __init__(self, options: AnswerOptions) -> None:
        self._head = {"id": options.id, "created": options.created, "model": options.model}
        self._n = options.n
        self._include_usage = options.include_usage
        self._continuous_usage = options.include_usage and options.continuous_usage
        self._prompts = options.prompts
        self._returns_token_ids = options.return_token_ids
        self._tokens_as_token_ids = options.tokens_as_token_ids
        self._fingerprint = f',"system_fingerprint":{_quoted(options.fingerprint)}'
        self._nums_tokens: dict[int, int] = {}
        self._completions: dict[int, GrowingCompletions] = {}
        self._kept_logprobs: dict[int, JsonLists] = {}
        # Parts of the field with each prompt's log-probabilities.
        self._prompt_fields: dict[int, list[str]] = {}
        self._started: set[int] = set()
        head_json = compact_json({"object": self.event_object_name, **self._head})
        self._event_start = f"data: {head_json[:-1]}"
        self._prefix = self._event_start + ',"choices":[{"index":'
        # What ends an event, and the last one of a completion.
        self._suffix = '}],"usage":null}\n\n' if options.include_usage else "}]}\n\n"
        self._last_suffix = self._suffix if options.include_usage else f"}}]{self._fingerprint}}}\n\n"

    def keep(self, prompt_index: int, output: RequestOutput) -> Iterator[str]:
        """Add what is new in a prompt's completions to the whole answer; yields after each piece of work.

        Log-probabilities become JSON here: with a million of their objects alive, a garbage collection takes 0.2 s.
        """
        completions = self._completions.setdefault(prompt_index, GrowingCompletions())
        outputs = list(map(self._shown_part, output.outputs))
        completions.add([replace(each, logprobs=None) for each in outputs])
        if output.prompt_logprobs is not None:
            yield from self._read_prompt(prompt_index, output.prompt_logprobs, has_field=True)
        for completion in outputs:
            if completion.logprobs is not None:
                index = prompt_index * self._n + completion.index
                if index not in self._kept_logprobs:
                    self._kept_logprobs[index] = self._first_logprobs(index)
                yield from self._format(index, completion.logprobs, self._kept_logprobs[index])
                yield _PAUSE

    def events(self, prompt_index: int, output: RequestOutput) -> Iterator[bytes]:
        """Yield, in pieces, an event for each completion with something new; nothing when there is none.

        As in vLLM, tokens whose text is held back (part of a character or of a stop string) still make an event.
        """
        return pieces(self._event_parts(prompt_index, output))

    def _event_parts(self, prompt_index: int, output: RequestOutput) -> Iterator[str]:
        if output.prompt_logprobs is not None:
            yield from self._read_prompt(prompt_index, output.prompt_logprobs, has_field=False)
        for completion in output.outputs:
            if self._shows_prompt_only:
                completion = self._shown_part(completion)
            index = prompt_index * self._n + completion.index
            is_first = index not in self._started
            if is_first:
                self._started.add(index)
                yield from self._opening(index)
            if self._make_parser is not None:
                has_text = False
                for part in self._parsed_event_text(index, completion):
                    has_text = has_text or bool(part)
                    yield part
                if not has_text:
                    continue
            text, end = self._event_text(index, completion, is_first), self._event_end(index, completion)
            if completion.logprobs is None:
                yield f'{text},"logprobs":null'
            else:
                yield f'{text},"logprobs":'
                lists = self._first_logprobs(index) if is_first else {}
                yield from self._format(index, completion.logprobs, lists)
                yield from _shown(lists)
            if self._returns_token_ids or (is_first and self._echo is not None):
                yield from self._choice_ids(index, completion, is_first)
            else:
                yield self._no_ids
            yield end

    def end_events(self, usage: Usage) -> bytes:
        """Return the last events of a complete stream."""
        if not self._include_usage:
            return DONE_EVENT
        shown = {**usage, "prompt_tokens_details": self._cache_details(usage)}
        fields = f'"choices":[]{self._fingerprint},"usage":{compact_json(shown)}'
        return f"{self._event_start},{fields}}}\n\n".encode() + DONE_EVENT

    def error_events(self, error: ApiError) -> bytes:
        """Return the last events of a stream that failed."""
        return error.event() + DONE_EVENT

    def body(self, usage: Usage) -> Iterator[bytes]:
        """Yield the whole answer as JSON, in pieces; takes the outputs, which are freed on the way."""
        return pieces(self._body_parts(usage))

    def _body_parts(self, usage: Usage) -> Iterator[str]:
        yield compact_json({"object": self.object_name, **self._head})[:-1]
        yield from self._answer_ids()
        if not self._has_prompt_fields_in_choices:
            yield from self._prompt_field(0)
        separator = ',"choices":['
        for prompt_index in sorted(self._completions):
            for completion in self._completions.pop(prompt_index).take():
                index = prompt_index * self._n + completion.index
                yield f'{separator}{{"index":{index},'
                yield from self._whole_text(prompt_index, completion)
                yield ',"logprobs":'
                if index in self._kept_logprobs:
                    yield from _shown(self._kept_logprobs.pop(index))
                else:
                    yield "null"
                if self._has_prompt_fields_in_choices:
                    yield from self._prompt_field(prompt_index)
                if self._returns_token_ids:
                    yield from self._choice_ids(index, completion, True)
                else:
                    yield self._no_ids
                yield f',"finish_reason":{compact_json(self._finish_reason(index, completion))}'
                yield f',"stop_reason":{compact_json(completion.stop_reason)},"routed_experts":null}}'
                separator = ","
            self._prompt_fields.pop(prompt_index, None)
        details = {"created_cache_tokens": None, "multimodal_tokens": None, **self._cache_details(usage)}
        shown = {**usage, "prompt_tokens_details": details, "completion_tokens_details": None}
        yield f'],"usage":{compact_json(shown)}{self._fingerprint}{self._answer_nulls}}}'

    def _cache_details(self, usage: Usage) -> dict[str, int]:
        """Return what became of a prompt's tokens in the prefix cache."""
        details: dict[str, int] = usage["prompt_tokens_details"]
        return details

    def _opening(self, index: int) -> Iterator[str]:
        """Yield what comes before the first event of one completion, or is the start of it."""
        yield from ()

    @abstractmethod
    def _event_text(self, index: int, completion: CompletionOutput, is_first: bool) -> str:
        """Return the start of the event for what is new in one completion, up to its text."""

    def _parsed_event_text(self, index: int, completion: CompletionOutput) -> Iterator[str]:
        """Yield the same in pieces, where a parser takes the text apart; ``_event_text`` is then the rest of it."""
        yield from ()

    def _answer_ids(self) -> Iterator[str]:
        """Yield the field for the prompt's token ids, where an answer has one for all completions."""
        yield from ()

    def _choice_ids(self, index: int, completion: CompletionOutput, is_first: bool) -> Iterator[str]:
        """Yield the fields of one completion for token ids."""
        if self._returns_token_ids:
            yield ',"token_ids":['
            yield from _id_parts(completion.token_ids)
            yield "]"
        else:
            yield ',"token_ids":null'

    @abstractmethod
    def _whole_text(self, prompt_index: int, completion: CompletionOutput) -> Iterator[str]:
        """Yield the text of one finished completion as a field."""

    def _shown_part(self, completion: CompletionOutput) -> CompletionOutput:
        """Return what an answer shows of what is new in one completion."""
        if not self._shows_prompt_only:
            return completion
        return replace(completion, text="", logprobs=None if completion.logprobs is None else [])

    def _read_prompt(self, prompt_index: int, logprobs: PromptLogprobs, *, has_field: bool) -> Iterator[str]:
        """Format what is said of a prompt, once: the field, and what completions begin with. Yields after each piece
        of work."""
        if prompt_index in self._prompt_fields or not (has_field or self._echoed_logprobs is not None):
            return
        parts = self._prompt_fields[prompt_index] = []
        for first in range(0, len(logprobs), _PROMPT_POSITIONS_AT_ONCE):
            positions = logprobs[first : first + _PROMPT_POSITIONS_AT_ONCE]
            if has_field:
                parts.append(compact_json(list(map(json_logprobs, positions)))[1:-1])
            self._add_echo(prompt_index, positions, int(logprobs.token_ids[0]))
            yield _PAUSE

    def _prompt_field(self, prompt_index: int) -> Iterator[str]:
        if (parts := self._prompt_fields.get(prompt_index)) is None:
            yield ',"prompt_logprobs":null'
            return
        yield ',"prompt_logprobs":['
        yield from _joined(parts)
        yield "]"

    def _add_echo(  # noqa: B027
        self, prompt_index: int, positions: list[dict[int, Logprob] | None], first_token_id: int
    ) -> None:
        """Format the next positions of a prompt for ``_first_logprobs``, where it is echoed."""

    def _first_logprobs(self, index: int) -> JsonLists:
        """Return what the log-probabilities of one completion begin with."""
        return {}

    @abstractmethod
    def _described(self, index: int, positions: Logprobs) -> dict[str, Any]:
        """Return the log-probabilities of the next positions of one completion, as lists."""

    def _format(self, index: int, positions: Logprobs, lists: JsonLists) -> Iterator[str]:
        """Add the log-probabilities of the next positions of one completion to ``lists``."""
        for first in range(0, max(len(positions), 1), _POSITIONS_AT_ONCE):
            if first:
                yield _PAUSE
            _add_lists(self._described(index, positions[first : first + _POSITIONS_AT_ONCE]), lists)

    def _finish_reason(self, index: int, completion: CompletionOutput) -> str | None:
        return completion.finish_reason

    def _event_end(self, index: int, completion: CompletionOutput) -> str:
        end = self._suffix if completion.finish_reason is None else self._last_suffix
        if self._continuous_usage:
            end = f"}}],{self._usage_field(index, len(completion.token_ids))}}}\n\n"
        if completion.finish_reason is None:
            return f"{self._unfinished}{end}"
        stop_reason = "null" if completion.stop_reason is None else json.dumps(completion.stop_reason)
        reason = self._finish_reason(index, completion)
        return f',"finish_reason":"{reason}","stop_reason":{stop_reason}{end}'

    def _usage_field(self, index: int, num_new: int) -> str:
        """Return the token counts of one completion and its prompt, with ``num_new`` tokens more than before."""
        num_prompt = len(self._prompts[index // self._n])
        num_tokens = self._nums_tokens[index] = self._nums_tokens.get(index, 0) + num_new
        return (
            f'"usage":{{"prompt_tokens":{num_prompt},"completion_tokens":{num_tokens},'
            f'"total_tokens":{num_prompt + num_tokens}{self._usage_nulls}}}'
        )

    def _name(self, token_id: int, entry: Logprob) -> str:
        return f"token_id:{token_id}" if self._tokens_as_token_ids else entry.decoded_token


class CompletionAnswer(Answer):
    """Answer of ``/v1/completions``.

    Args:
        echo: text of each prompt, to repeat before its completions.
        echoed_logprobs: log-probabilities begin with those of the prompt, with at most this many alternatives; None:
            they do not.
        shows_prompt_only: leave out what is generated.
        decode: returns the text of tokens; for the prompt's first one, which has no log-probability to name it.
    """

    object_name = event_object_name = "text_completion"
    _has_prompt_fields_in_choices = True
    _no_ids = ',"prompt_token_ids":null,"token_ids":null'
    _unfinished = ',"finish_reason":null,"stop_reason":null'
    _usage_nulls = ""

    def __init__(
        self,
        options: AnswerOptions,
        *,
        echo: Sequence[str] | None = None,
        echoed_logprobs: int | None = None,
        shows_prompt_only: bool = False,
        decode: Callable[[Sequence[int]], str] = str,
    ) -> None:
        super().__init__(options)
        self._echo = echo
        self._echoed_logprobs = echoed_logprobs
        self._shows_prompt_only = shows_prompt_only
        self._decode = decode
        # Of each prompt, until all completions have begun with it.
        self._echoes: dict[int, JsonLists] = {}
        # Of completions; of prompts by the complement of their index.
        self._text_lengths: dict[int, int] = {}

    def _opening(self, index: int) -> Iterator[str]:
        if self._echo is not None:
            yield f'{self._prefix}{index},"text":"'
            yield from _quoted_parts(self._echo[index // self._n])

    def _event_text(self, index: int, completion: CompletionOutput, is_first: bool) -> str:
        if self._echo is not None and is_first:
            return _quoted(completion.text)[1:]
        return f'{self._prefix}{index},"text":{_quoted(completion.text)}'

    def _whole_text(self, prompt_index: int, completion: CompletionOutput) -> Iterator[str]:
        yield '"text":"'
        if self._echo is not None:
            yield from _quoted_parts(self._echo[prompt_index])
        yield from _quoted_parts(completion.text)
        yield '"'

    def _add_echo(
        self, prompt_index: int, positions: list[dict[int, Logprob] | None], first_token_id: int
    ) -> None:
        if self._echoed_logprobs is None:
            return
        lists, num_shown = self._echoes.setdefault(prompt_index, {}), 1 + self._echoed_logprobs
        if positions[0] is None:
            alone: Logprobs = [{first_token_id: Logprob(math.nan, 0, self._decode([first_token_id]))}]
            _add_lists({**self._described(~prompt_index, alone), "top_logprobs": [None]}, lists)
        shown = [dict(islice(each.items(), num_shown)) for each in positions if each is not None]
        _add_lists(self._described(~prompt_index, shown), lists)

    def _first_logprobs(self, index: int) -> JsonLists:
        prompt_index = index // self._n
        lists = self._echoes.get(prompt_index, {})
        self._text_lengths[index] = self._text_lengths.get(~prompt_index, 0)
        if self._started.issuperset(range(prompt_index * self._n, (prompt_index + 1) * self._n)):
            self._echoes.pop(prompt_index, None)
        return {name: parts.copy() for name, parts in lists.items()}

    def _described(self, index: int, positions: Logprobs) -> dict[str, Any]:
        # The token itself is the first entry of each position.
        chosen = [next(iter(position.items())) for position in positions]
        names = [self._name(*each) for each in chosen]
        offsets, end = [], self._text_lengths.get(index, 0)
        for name in names:
            offsets.append(end)
            end += len(name)
        self._text_lengths[index] = end
        return {
            "text_offset": offsets,
            "token_logprobs": [json_logprob(entry.logprob) for _, entry in chosen],
            "tokens": names,
            "top_logprobs": [
                {self._name(*each): json_logprob(each[1].logprob) for each in position.items()}
                for position in positions
            ],
        }

    def _choice_ids(self, index: int, completion: CompletionOutput, is_first: bool) -> Iterator[str]:
        # Streams that echo a prompt return its ids unasked, as in vLLM.
        if is_first:
            yield ',"prompt_token_ids":['
            yield from _id_parts(self._prompts[index // self._n])
            yield "]"
        else:
            yield ',"prompt_token_ids":null'
        yield from super()._choice_ids(index, completion, is_first)


class ChatAnswer(Answer):
    """Answer of ``/v1/chat/completions``.

    Args:
        token_bytes: returns the bytes of a token.
        num_top_logprobs: alternatives to report for each token, where log-probabilities were asked for.
        parser: makes one for each completion; None where all text is content.
        max_calls: of tools, later ones are left out; None: all are there.
        shows_reasoning: False leaves it out.
        make_call_id: returns the id of one more call.
    """

    object_name, event_object_name = "chat.completion", "chat.completion.chunk"
    _has_prompt_fields_in_choices = False
    _answer_nulls = f',"prompt_text":null{Answer._answer_nulls}'
    _no_ids = ',"token_ids":null'
    _unfinished = ',"finish_reason":null'
    _usage_nulls = ',"completion_tokens_details":null'

    def __init__(
        self,
        options: AnswerOptions,
        *,
        token_bytes: Callable[[int], bytes],
        num_top_logprobs: int = 0,
        parser: Callable[[], AnswerParser] | None = None,
        max_calls: int | None = None,
        shows_reasoning: bool = True,
        make_call_id: Callable[[], str] = make_call_id,
    ) -> None:
        super().__init__(options)
        self._make_parser = parser
        self._max_calls = max_calls
        self._shows_reasoning = shows_reasoning
        self._role = _quoted(options.role)
        self._echoed = options.echo
        self._make_call_id = make_call_id
        self._parsers: dict[int, AnswerParser] = {}
        self._callers: set[int] = set()
        self._token_bytes = token_bytes
        self._num_top_logprobs = num_top_logprobs

    def _opening(self, index: int) -> Iterator[str]:
        usage = ""
        if self._continuous_usage:
            usage = f",{self._usage_field(index, 0)}"
        elif self._include_usage:
            usage = ',"usage":null'
        yield self._event_start
        yield from self._answer_ids()
        yield f',"prompt_text":null{usage},"choices":[{{"index":{index},"delta":{{"role":{self._role},"content":""}}'
        yield f',"logprobs":null{self._unfinished}}}]}}\n\n'
        if self._echoed:
            yield f'{self._prefix}{index},"delta":{{"content":'
            yield from quoted_text(self._echoed)
            yield f'}},"logprobs":null{self._unfinished}}}]{usage}}}\n\n'

    def _answer_ids(self) -> Iterator[str]:
        if not self._returns_token_ids:
            yield ',"prompt_token_ids":null'
            return
        yield ',"prompt_token_ids":['
        yield from _id_parts(self._prompts[0])
        yield "]"

    def _cache_details(self, usage: Usage) -> dict[str, int]:
        details = super()._cache_details(usage)
        return {**details, "created_cache_tokens": usage["prompt_tokens"] - details["cached_tokens"]}

    def _event_text(self, index: int, completion: CompletionOutput, is_first: bool) -> str:
        if self._make_parser is not None:
            return ""
        return f'{self._prefix}{index},"delta":{{"content":{_quoted(completion.text)}}}'

    def _parsed_event_text(self, index: int, completion: CompletionOutput) -> Iterator[str]:
        new = _Joined()
        yield from self._parse(index, completion, new.add)
        is_over = completion.finish_reason is not None
        if new.is_empty and not (is_over or completion.logprobs is not None or self._returns_token_ids):
            # As in vLLM. Its tokens count all the same.
            self._usage_field(index, len(completion.token_ids))
            return
        yield f'{self._prefix}{index},"delta":'
        yield from _delta(new, self._make_call_id)

    def _whole_text(self, prompt_index: int, completion: CompletionOutput) -> Iterator[str]:
        yield f'"message":{{"role":{self._role},"content":'
        whole = _Joined()
        if self._echoed:
            whole.add(Part("content", self._echoed))
        if self._make_parser is None:
            whole.add(Part("content", completion.text))
        else:
            yield from self._parse(prompt_index * self._n + completion.index, completion, whole.add)
        yield from _message(whole, self._make_call_id)
        yield ',"refusal":null,"annotations":null,"audio":null,"function_call":null}'

    def _parse(
        self, index: int, completion: CompletionOutput, add: Callable[[Part], object]
    ) -> Iterator[str]:
        """Call ``add`` with what is new in one completion; yields after each piece of work."""
        assert self._make_parser is not None, "answers without a parser are not parsed"
        parser = self._parsers.setdefault(index, self._make_parser())
        for first in range(0, len(completion.text), _PARSED_AT_ONCE):
            if first:
                yield _PAUSE
            self._add(index, parser.feed(completion.text[first : first + _PARSED_AT_ONCE]), add)
        if completion.finished:
            self._add(index, parser.end(), add)

    def _new_parts(self, completion: CompletionOutput) -> Iterator[Part | str]:
        """Yield what is new in the only completion, and a pause after each piece of work."""
        parts: list[Part] = []
        for pause in self._parse(0, completion, parts.append):
            yield from parts
            parts.clear()
            yield pause
        yield from parts

    def _add(self, index: int, parts: list[Part], add: Callable[[Part], object]) -> None:
        for part in parts:
            if part.kind == "name" and self._parsers[index].ends_with_calls:
                self._callers.add(index)
            is_late = self._max_calls is not None and part.call >= self._max_calls
            if not is_late and (self._shows_reasoning or part.kind != "reasoning"):
                add(part)

    def _finish_reason(self, index: int, completion: CompletionOutput) -> str | None:
        # As OpenAI does: an answer that was cut off may have calls, too.
        is_call = completion.finish_reason == "stop" and index in self._callers
        return "tool_calls" if is_call else completion.finish_reason

    def _described(self, index: int, positions: Logprobs) -> dict[str, Any]:
        content = []
        for position in positions:
            entries, num_top = list(position.items()), self._num_top_logprobs
            top = sorted((each for each in entries if each[1].rank <= num_top), key=lambda each: each[1].rank)
            content.append({**self._token(*entries[0]), "top_logprobs": [self._token(*each) for each in top]})
        return {"content": content}

    def _token(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        data = list(self._token_bytes(token_id))
        return {"token": self._name(token_id, entry), "logprob": json_logprob(entry.logprob), "bytes": data}


class _Call(NamedTuple):
    """What is new in one call."""

    name: str | None
    """None where it came earlier."""
    arguments: list[str]


class _Joined:
    """Parts of an answer, put together."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {"content": [], "reasoning": []}
        self.calls: dict[int, _Call] = {}
        """By number."""

    def add(self, part: Part) -> None:
        """Add the next part."""
        kind, text, call = part
        if kind == "name":
            self.calls[call] = _Call(text, [])
        elif kind == "arguments":
            self.calls.setdefault(call, _Call(None, [])).arguments.append(text)
        else:
            self._texts[kind].append(text)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing of an answer."""
        return not self.calls and not any(map(any, self._texts.values()))

    def text(self, kind: Literal["content", "reasoning"]) -> str:
        """Return all text of one kind."""
        return "".join(self._texts[kind])


def _delta(new: _Joined, make_call_id: Callable[[], str]) -> Iterator[str]:
    """Yield the delta of one event."""
    content, reasoning = new.text("content"), new.text("reasoning")
    fields = [f'"content":{_quoted(content)}'] if content else []
    if reasoning:
        quoted = _quoted(reasoning)
        fields.append(f'"reasoning":{quoted},"reasoning_content":{quoted}')
    if new.calls:
        fields.append('"tool_calls":[')
    yield "{" + ",".join(fields)
    separator = ""
    for number, call in new.calls.items():
        start = '"function":{' if call.name is None else _call_start(call.name, make_call_id)
        yield f'{separator}{{"index":{number},{start}"arguments":{_quoted("".join(call.arguments))}}}}}'
        separator = ","
    yield "]}" if new.calls else "}"


def _message(whole: _Joined, make_call_id: Callable[[], str]) -> Iterator[str]:
    """Yield the fields of a whole answer, from the value of its content on."""
    content, reasoning = whole.text("content"), whole.text("reasoning")
    if content or not (whole.calls or reasoning):
        yield from quoted_text(content)
    else:
        yield "null"
    if not reasoning:
        yield ',"reasoning":null'
    for name in ("reasoning", "reasoning_content") if reasoning else ():
        yield f',"{name}":'
        yield from quoted_text(reasoning)
    separator = ',"tool_calls":[{'
    for call in whole.calls.values():
        assert call.name is not None, "a whole answer has the names of its calls"
        yield f'{separator}{_call_start(call.name, make_call_id)}"arguments":'
        yield from quoted_text("".join(call.arguments))
        yield "}}"
        separator = ",{"
    if whole.calls:
        yield "]"


def _call_start(name: str, make_call_id: Callable[[], str]) -> str:
    return f'"id":"{make_call_id()}","type":"function","function":{{"name":{_quoted(name)},'


_PAUSE = ""
"""Among the parts of an answer: what was done since the last one has taken a few milliseconds."""


def pieces(parts: Iterable[str]) -> Iterator[bytes]:
    """Join short parts. A piece may be empty, where there was much to do but nothing to write."""
    joined: list[str] = []
    num_characters = 0
    for part in parts:
        joined.append(part)
        num_characters += len(part)
        if not part or num_characters >= _CHARACTERS_AT_ONCE:
            yield "".join(joined).encode()
            joined.clear()
            num_characters = 0
    if joined:
        yield "".join(joined).encode()


def _shown(lists: JsonLists) -> Iterator[str]:
    start = "{"
    for name, parts in lists.items():
        yield f'{start}"{name}":['
        yield from _joined(parts)
        start = "],"
    yield "]}"


def _joined(parts: list[str]) -> Iterator[str]:
    """Yield the inside of a list of which ``parts`` are that of parts."""
    for number, part in enumerate(parts):
        yield f",{part}" if number else part


def _add_lists(described: Mapping[str, list[Any]], lists: JsonLists) -> None:
    """Add more items to lists, in JSON."""
    for name, values in described.items():
        parts = lists.setdefault(name, [])
        if values:
            parts.append(compact_json(values)[1:-1])


def quoted_text(text: str) -> Iterator[str]:
    """Yield a text as a JSON string."""
    yield '"'
    yield from _quoted_parts(text)
    yield '"'


def _id_parts(token_ids: Sequence[int] | NDArray[np.int32]) -> Iterator[str]:
    """Yield token ids as the inside of a JSON list."""
    for first in range(0, len(token_ids), _IDS_AT_ONCE):
        part = token_ids[first : first + _IDS_AT_ONCE]
        separator = "," if first else ""
        yield separator + compact_json(part if isinstance(part, list) else np.asarray(part).tolist())[1:-1]


def _quoted_parts(text: str) -> Iterator[str]:
    """Yield a text as the inside of a JSON string."""
    for first in range(0, len(text), _CHARACTERS_AT_ONCE):
        yield _quoted(text[first : first + _CHARACTERS_AT_ONCE])[1:-1]
