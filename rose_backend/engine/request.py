"""A request: what a caller asks for, checked, and the completions that answer it.

``InputProcessor`` makes it of a prompt and its sampling parameters in two stages: ``process`` tokenizes and checks,
``build`` follows. With the engine in a separate process, ``process`` runs in the API process and ``build`` in the
engine's.
"""

from __future__ import annotations

import itertools
import json
import reprlib
import struct
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from rose_backend.config import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_LENGTH,
    EngineConfig,
    is_unicode,
)
from rose_backend.engine.grammars import Grammar
from rose_backend.engine.outputs import CompletionOutput, FinishReason, Logprobs, PromptLogprobs
from rose_backend.engine.process_settings import return_free_memory
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.engine.tokenizer import Decoder, Detokenizer, LibraryDecoder, Tokenizer
from rose_backend.errors import ModelError, RequestError
from rose_backend.models.weights import read_eos_token_ids, read_json, resolve_model_path


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str | None]
    """Only requests with the same salt share cached prefixes: 1 to 128 characters, none of them @, /, \\ or NUL."""


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str | None]
    """As in ``TextPrompt``."""


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter that PEFT has written, in vLLM's words.

    Raises:
        RequestError: a value is of another type, or empty.
    """

    lora_name: str
    lora_int_id: int
    """From 1 on. An adapter that is loaded is known by it, so it names one and the same path until it is unloaded."""
    lora_path: str
    """Local directory."""

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not is_unicode(value) or not value or "\0" in value:
                raise RequestError(f"{name}: got {reprlib.repr(value)}, allowed is a text that is not empty")
        if type(self.lora_int_id) is not int or not 1 <= self.lora_int_id < 1 << 63:
            raise RequestError(
                f"lora_int_id: got {self.lora_int_id!r}, allowed is an integer from 1 to {(1 << 63) - 1}"
            )


class UnloadAdapter(NamedTuple):
    """Asks an engine to let later requests not use an adapter."""

    lora_id: int


@dataclass(slots=True, eq=False)
class CompletionText:
    """What the caller sees of a completion. Only the output thread touches it while the engine runs."""

    stream: Detokenizer | None
    """None when the text is only needed at the end, and a ``ByteLevelDecoder`` makes it."""
    logprobs: Logprobs | None
    """Those that are in no output yet; None unless asked for."""
    decoded_bytes: bytearray
    """Text of a completion without ``stream``, in UTF-8; first, the beginning of a character at the prompt's end."""
    token_ids: list[int] = field(default_factory=list)
    """Output so far; without ``Completion.needs_each_token``, until the end, what was sent in portions."""
    num_decoded: int = 0
    """Of these, how many ``stream`` has been given, or without one, ``decoded_bytes`` hold."""
    num_reported: int = 0
    """Of these, how many are in an output."""
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    final: CompletionOutput | None = None
    """The last output, until it is delivered."""
    is_decoded_lazily: bool = field(init=False)
    """No stop string or logprob needs single tokens: they are decoded when an output is made."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing will be added."""
        return self.finish_reason is not None

    def __post_init__(self) -> None:
        has_stop_strings = self.stream is not None and self.stream.has_stop_strings
        self.is_decoded_lazily = self.logprobs is None and not has_stop_strings


@dataclass(slots=True, eq=False)
class Completion:
    """One of a request's ``n`` completions: a sequence of tokens that holds one request slot while it runs.

    While it runs its tokens are in the slot's buffers; ``token_ids`` is written when it leaves the slot.
    Only the step loop touches it, but for ``text``.
    """

    request: Request
    index: int
    seed: int
    token_ids: NDArray[np.int32]
    """Prompt and output, as of the last time it had no slot."""
    text: CompletionText
    slot: int = -1
    num_siblings_to_fork: int = 0
    """Completions that are split off when this one has computed the prompt."""
    num_computed_before: int = 0
    """Tokens that were computed before a preemption took the slot away."""
    place: int = 0
    """In the queue: less than that of whoever waits for a shorter time. Only ``WaitingQueue`` sets it."""
    num_overtaken: int = 0
    """Times that others went before it that held more than its tenant, see ``turns.py``."""
    num_turns_given: int = 0
    """Times that it was preempted so that another tenant could take its turn."""
    has_ended: bool = False
    """No further step computes anything for it."""
    num_sent_tokens: int = 0
    """Tokens sent to the output thread, counted where there are stop strings."""
    grammar: Grammar | None = None
    """What its text may become; None for anything."""

    @property
    def num_slots(self) -> int:
        """Request slots that it takes, and that are kept for its siblings."""
        return 1 + self.num_siblings_to_fork

    @property
    def needs_each_token(self) -> bool:
        """Whether each token goes to the output thread in its own step: streams, stop strings, logprobs."""
        params = self.request.params
        return self.request.is_streaming or bool(params.stop_strings) or params.logprobs is not None


@dataclass(slots=True, eq=False)
class Request:
    """A checked request. Built by ``InputProcessor``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: NDArray[np.int32]
    params: SamplingParams
    max_tokens: int
    is_streaming: bool
    namespace: bytes = b""
    """Of the prefix cache: only requests with the same one share cached tokens."""
    tenant: bytes = b""
    """Who shares slots with others, see ``turns.py``."""
    lora_id: int = 0
    """``lora_int_id`` of its adapter; 0 for none."""
    lora_slot: int = -1
    """Where that is, once the engine has the request; -1 for none."""
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    text_context: list[int] = field(default_factory=list)
    """Tokens of the prompt on which the text of its answers depends."""
    completions: list[Completion] = field(default_factory=list)
    num_cached_tokens: int | None = None
    """None until it first got a slot."""
    scheduled_s: float | None = None
    """``time.monotonic`` when it first got a slot."""
    is_aborted: bool = False
    has_output: bool = False
    """Its caller has been given an output. For the output thread."""
    grammar: Grammar | None = None
    """Of each of its completions, which get copies."""
    prompt_logprobs: PromptLogprobs | None = None
    """Filled by the output thread; None unless asked for."""
    reports_prompt: bool = False
    """Some of them are not computed yet: then no step may skip tokens of the prompt."""
    _prompt_list: list[int] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether its last output can be made. For the output thread."""
        if self.is_aborted:
            return True
        if len(self.completions) != self.params.n:
            return False
        # Called for every output of every stream: a generator would take most of the time.
        for completion in self.completions:  # noqa: SIM110
            if completion.text.finish_reason is None:
                return False
        return True

    def use_grammar(self, grammar: Grammar) -> None:
        """Let the text of each completion follow ``grammar``; before the first of them runs."""
        self.grammar = grammar
        self.completions[0].grammar = grammar.copy()

    def prompt_list(self) -> list[int]:
        """Return the prompt's tokens as outputs have them; made at the first call, in any thread."""
        if self._prompt_list is None:
            self._prompt_list = self.prompt_token_ids.tolist()
        return self._prompt_list


def check_request_id(request_id: str, unfinished: Container[str]) -> None:
    """Raise RequestError if a request may not have this id, or an unfinished one has it."""
    if not is_unicode(request_id):
        raise RequestError(
            f"request_id: got {request_id!r}, allowed is a text of Unicode characters", parameter="request_id"
        )
    if request_id in unfinished:
        message = f"request_id: got {request_id!r}, which an unfinished request has"
        raise RequestError(message, parameter="request_id")


GENERATION_CONFIG_FILE = "generation_config.json"
_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_SEED_MASK = (1 << 63) - 1
_PROMPTS_PER_PASS = 64
"""Checked together: looking at each alone would cost more than its tokens, and more would not fit the caches."""
_IDS_AT_ONCE = 1 << 16
"""Token ids that are converted in one call; it takes about 2 ms."""
MAX_CUT_TOKENS = 1 << 20
"""Tokens of a text of which only some are computed, where the window holds fewer."""
_MAX_UNCOUNTED_TOKENS = 1 << 20
"""A text that cannot have more tokens is tokenized at once, a longer one is counted first."""
_TRIMMED_LENGTH = 1 << 18
"""Characters of a text after which memory is given back: the tokenizer library takes some dozens of bytes for each."""
_FORBIDDEN_IN_SALTS = frozenset("@/\\\0")
"""As in vLLM, so that the same salts are valid in both."""


class PromptOptions(NamedTuple):
    """How prompts become token ids, and how long their answers may be."""

    max_new_tokens: int | None = None
    """Limit for parameters that leave it open, where the window does not end before."""
    add_special_tokens: bool = True
    """Add the special tokens that the tokenizer adds to a text."""
    truncate_prompt_tokens: int | None = None
    """Keep this many tokens at most."""
    truncation_side: Literal["left", "right"] | None = None
    """Where tokens are cut off. None is the left, but keeps special tokens that the tokenizer adds there."""
    clips_max_tokens: bool = False
    """Lower ``max_tokens`` to what the window leaves after a prompt, as servers do, instead of refusing it."""


_AS_GIVEN = PromptOptions()


class ProcessedInput(NamedTuple):
    """A tokenized prompt and its parameters, both checked."""

    number: int
    """Consecutive per processor; the seed of a request without one is derived from it."""
    prompt: str | None
    """The text, unless the prompt came as token ids."""
    token_ids: NDArray[np.int32]
    params: SamplingParams
    namespace: bytes
    """Of the prefix cache."""
    bad_words_token_ids: list[list[int]]
    """What ``bad_words`` are as tokens."""
    tenant: bytes = b""
    """Who shares slots with others."""
    lora_id: int = 0
    """As in ``Request``."""


class InputProcessor:
    """Turns prompts into requests, or refuses them before anything is allocated. Any thread may call it.

    Args:
        max_model_len: prompt plus output, in tokens.
        max_num_seqs: completions that may run at once.
        seed: of the engine; requests without a seed derive theirs from it and their number.
        eos_token_ids: the model's end-of-sequence tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_model_len: int,
        max_num_seqs: int,
        seed: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._seed = seed
        self.eos_token_ids = tuple(eos_token_ids)
        self._numbers = itertools.count()
        self._last_bad_words: tuple[Mapping[str, None], list[list[int]]] = {}, []

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        is_streaming: bool = False,
    ) -> Request:
        """Do both stages for one request; errors are those of ``process``."""
        return self.build(self.process(prompt, params), request_id=request_id, is_streaming=is_streaming)

    def process(self, prompt: Prompt, params: SamplingParams) -> ProcessedInput:
        """Tokenize and check one prompt with its parameters.

        Raises:
            RequestError: see ``SamplingParams.check_against_model`` and ``check_cache_salt``; or the prompt is empty,
                too long, or holds an id outside the vocabulary; or no token may be the first one of the answer.
        """
        return self.process_all([prompt], [params])[0]

    def process_all(
        self,
        prompts: Sequence[Prompt],
        params_list: Sequence[SamplingParams],
        namespace: bytes | None = None,
        options: PromptOptions = _AS_GIVEN,
        tenant: bytes = b"",
    ) -> list[ProcessedInput]:
        """Tokenize and check prompts, each with its own parameters; errors are those of ``process``.

        Args:
            namespace: prefix cache of all of them; None takes each prompt's ``cache_salt``.
            options: of all of them.
            tenant: of all of them.
        """
        processed: list[ProcessedInput] = []
        for first in range(0, len(prompts), _PROMPTS_PER_PASS):
            part = slice(first, first + _PROMPTS_PER_PASS)
            some, salts = _without_salts(prompts[part])
            if options.truncate_prompt_tokens is not None:
                some = [each if isinstance(each, str) else _truncated(each, options) for each in some]
            ids_list = self._packed_ids(some) or (self._checked_prompt(each, options) for each in some)
            for prompt, ids, params, salt in zip(some, ids_list, params_list[part], salts, strict=True):
                words = self._bad_words_token_ids(params)
                params = self._checked_params(params, len(ids), options)
                self._check_drawable(params, words)
                text = prompt if isinstance(prompt, str) else None
                own = salt if namespace is None else namespace
                processed.append(ProcessedInput(next(self._numbers), text, ids, params, own, words, tenant))
        return processed

    def build(
        self, processed: ProcessedInput, *, request_id: str | None = None, is_streaming: bool = False
    ) -> Request:
        """Build a request of what ``process`` has returned."""
        number, prompt, ids, params, namespace, bad_words_token_ids, tenant, lora_id = processed
        room = self.max_model_len - len(ids)
        request = Request(
            request_id=request_id if request_id is not None else f"request-{number}",
            prompt=prompt,
            prompt_token_ids=ids,
            params=params,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            is_streaming=is_streaming,
            namespace=namespace,
            tenant=tenant,
            lora_id=lora_id,
            bad_words_token_ids=bad_words_token_ids,
            text_context=self._decoder(params).context(ids),
            prompt_logprobs=self.make_prompt_logprobs(processed),
            reports_prompt=params.prompt_logprobs is not None and len(ids) > 1,
        )
        seed = derive_seed(self._seed, number) if params.seed is None else params.seed
        first = self.make_completion(request, 0, seed)
        first.num_siblings_to_fork = params.n - 1
        request.completions.append(first)
        return request

    def make_prompt_logprobs(self, processed: ProcessedInput) -> PromptLogprobs | None:
        """Return what holds the log-probabilities of a prompt, still without any; None unless asked for."""
        count = processed.params.prompt_logprobs
        if count is None:
            return None
        return PromptLogprobs(processed.token_ids, min(count, self.vocab_size), self.tokenizer.token_texts)

    def make_completion(self, request: Request, index: int, base_seed: int) -> Completion:
        """Make completion ``index``, which draws with ``base_seed + index``."""
        params = request.params
        decoder, context = self._decoder(params), request.text_context
        stream, unfinished = None, b""
        if request.is_streaming or params.stop_strings or isinstance(decoder, LibraryDecoder):
            stream = Detokenizer(
                decoder.stream(context),
                stop_strings=params.stop_strings,
                keep_stop_string=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        else:
            unfinished = decoder.unfinished(context)
        logprobs: Logprobs | None = None if params.logprobs is None else []
        return Completion(
            request=request,
            index=index,
            seed=(base_seed + index) & _SEED_MASK,
            token_ids=request.prompt_token_ids,
            text=CompletionText(stream, logprobs, bytearray(unfinished)),
            grammar=None if request.grammar is None else request.grammar.copy(),
        )

    def _decoder(self, params: SamplingParams) -> Decoder:
        return self.tokenizer.decoder(skip_special_tokens=params.skip_special_tokens)

    def _checked_params(
        self, params: SamplingParams, prompt_length: int, options: PromptOptions
    ) -> SamplingParams:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params: got {type(params).__name__}, allowed is SamplingParams")
        room = self.max_model_len - prompt_length
        if options.clips_max_tokens and params.max_tokens is not None and params.max_tokens > room:
            params = replace(params, max_tokens=room)
        params.check_against_model(
            prompt_length=prompt_length,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self._max_num_seqs,
        )
        if options.max_new_tokens is not None and params.max_tokens is None:
            params = replace(params, max_tokens=min(options.max_new_tokens, room))
        return params

    def _check_drawable(self, params: SamplingParams, bad_words_token_ids: list[list[int]]) -> None:
        """Raise RequestError if no token may be the first one of the answer, whatever the model and a grammar say."""
        forbidden = {word[0] for word in bad_words_token_ids if len(word) == 1}
        # With a grammar, a text that cannot go on may end before min_tokens.
        if params.min_tokens and params.structured_outputs is None:
            forbidden.update(params.stop_token_ids or (), () if params.ignore_eos else self.eos_token_ids)
        given = params.allowed_token_ids
        allowed = range(self.vocab_size) if given is None else given
        if not forbidden or not all(token_id in forbidden for token_id in allowed):
            return
        field = (
            "allowed_token_ids" if given is not None else "min_tokens" if params.min_tokens else "bad_words"
        )
        raise RequestError(
            f"{field}: got limits that leave no token to draw, each one is a bad word or ends the text before "
            "min_tokens; allowed are those that leave at least one",
            parameter=field,
        )

    def _bad_words_token_ids(self, params: SamplingParams) -> list[list[int]]:
        """Return the tokens of each bad word, and those after a space where these are other ones, as in vLLM."""
        words = dict.fromkeys((isinstance(params, SamplingParams) and params.bad_words) or ())
        last_words, found = self._last_bad_words
        # Usually all prompts of a call have the same.
        if words == last_words:
            return found
        found, num_tokens = [], 0
        for word in words:
            texts = (prefix + word.lstrip() for prefix in ("", " "))
            bare, spaced = (self.tokenizer.encode(text, add_special_tokens=False) for text in texts)
            if not bare:
                raise _bad_words_refusal(f"{reprlib.repr(word)}, which has no tokens", "words with tokens")
            has_both = len(spaced) == len(bare) and spaced[0] != bare[0]
            found += [bare, spaced] if has_both else [bare]
            num_tokens += len(bare) * (1 + has_both)
            # Before all of them are tokenized.
            if len(found) > MAX_BAD_WORDS or num_tokens > MAX_BAD_WORD_TOKENS:
                raise _bad_words_refusal(
                    f"more than {MAX_BAD_WORDS} sequences, or {MAX_BAD_WORD_TOKENS} tokens, with and without a space "
                    "before each word",
                    "at most that many",
                )
        if (largest := max(map(max, found), default=0)) >= self.vocab_size:
            text = self.tokenizer.token_texts.text(largest)
            raise _bad_words_refusal(
                f"{text!r}, token {largest}", f"the model's, up to {self.vocab_size - 1}"
            )
        self._last_bad_words = words, found
        return found

    def _packed_ids(self, prompts: Sequence[str | Sequence[int]]) -> list[NDArray[np.int32]] | None:
        """Return the tokens of each prompt if all of them are lists of allowed token ids, else None.

        Takes no Python step per token.
        """
        most = self.max_model_len - 1
        if not all(type(prompt) is list and 1 <= len(prompt) <= most for prompt in prompts):
            return None
        try:
            parts = [struct.pack(f"{len(part)}i", *part) for prompt in prompts for part in _parts(prompt)]
        except struct.error:
            return None
        ids = np.frombuffer(bytearray().join(parts), np.int32)
        # Seen as unsigned numbers, negative ones are the largest.
        if ids.view(np.uint32).max() >= self.vocab_size:
            return None
        ends = list(itertools.accumulate(map(len, prompts)))
        starts = [0, *ends[:-1]]
        # Only integers can be packed, and truth values, which become 0 and 1.
        suspects = np.flatnonzero(np.logical_or.reduceat(ids <= 1, starts)).tolist()
        if any(bool in set(map(type, part)) for index in suspects for part in _parts(prompts[index])):
            return None
        return [ids[start:end] for start, end in zip(starts, ends, strict=True)]

    def _checked_prompt(self, prompt: str | Sequence[int], options: PromptOptions) -> NDArray[np.int32]:
        if not isinstance(prompt, str):
            return self._checked_ids(prompt)
        ids = self.encode_prompt(prompt, options)
        self._check_length(len(ids))
        array = _as_array(ids)
        # Files beside the tokenizer's may add tokens that the model has no embeddings for.
        if (largest := int(array.max())) >= self.vocab_size:
            text = self.tokenizer.token_texts.text(largest)
            raise RequestError(
                f"prompt: its text holds {text!r}, token {largest}, allowed are the model's, up to "
                f"{self.vocab_size - 1}",
                parameter="prompt",
            )
        return array

    def encode_prompt(self, text: str, options: PromptOptions) -> list[int]:
        """Return the token ids of a prompt, which may be too many for the window.

        Raises:
            RequestError: see ``encode``; a text to truncate may have ``MAX_CUT_TOKENS``, or a window of them.
        """
        adds, max_tokens = options.add_special_tokens, self.max_model_len - 1
        if options.truncate_prompt_tokens is None:
            return self.encode(text, max_tokens=max_tokens, add_special_tokens=adds)
        # As in vLLM, where the side is known only as many characters are tokenized as a window may have.
        most = self.max_model_len * self.tokenizer.max_token_length
        if options.truncation_side == "left":
            text = text[-most:]
        elif options.truncation_side == "right":
            text = text[:most]
        ids = self.encode(text, max_tokens=max(max_tokens, MAX_CUT_TOKENS), add_special_tokens=adds)
        return _truncated(ids, options, self.tokenizer.num_added_tokens if adds else (0, 0))

    def encode(self, text: str, *, max_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            max_tokens: a long text that has more is refused before all of it is tokenized; a shorter one is not.

        Raises:
            RequestError: the text is long and has more tokens, or see ``Tokenizer.encode``.
        """
        # A character is at most four tokens, of one byte each.
        if len(text) * (1 if text.isascii() else 4) > _MAX_UNCOUNTED_TOKENS:
            num_tokens, length = self.tokenizer.count_tokens(text, max_tokens)
            if num_tokens > max_tokens:
                raise RequestError(
                    f"prompt: got more than {max_tokens} tokens in the first {length} of {len(text)} characters, "
                    f"allowed are at most {max_tokens}: this model's maximum context length is "
                    f"{self.max_model_len} tokens",
                    parameter="prompt",
                )
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        finally:
            if len(text) > _TRIMMED_LENGTH:
                return_free_memory()

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens == 0:
            raise RequestError("prompt: got no tokens, allowed is at least one", parameter="prompt")
        if num_tokens > self.max_model_len - 1:
            raise RequestError(
                f"prompt: got {num_tokens} tokens, allowed are at most {self.max_model_len - 1}: "
                # Clients recognize this phrase of OpenAI's, and raise a more specific error.
                f"this model's maximum context length is {self.max_model_len} tokens, one of them to generate",
                parameter="prompt",
            )

    def _checked_ids(self, prompt: Sequence[int]) -> NDArray[np.int32]:
        is_array = isinstance(prompt, np.ndarray) and prompt.ndim == 1
        if is_array or isinstance(prompt, (list, tuple)):
            # Before its elements: a list of millions is refused at once.
            self._check_length(len(prompt))
        if isinstance(prompt, np.ndarray) and is_array:
            prompt = prompt.tolist()
        if not isinstance(prompt, (list, tuple)):
            raise RequestError(
                f"prompt: got {type(prompt).__name__}, allowed are a string and a list of token ids, alone or in a "
                "dictionary",
                parameter="prompt",
            )
        for token_id in prompt:
            is_id = isinstance(token_id, (int, np.integer)) and not isinstance(token_id, bool)
            if not is_id or not 0 <= token_id < self.vocab_size:
                shown = str(token_id) if is_id and abs(int(token_id)) < 2**63 else type(token_id).__name__
                raise RequestError(
                    f"prompt: got token id {shown}, allowed are integers from 0 to {self.vocab_size - 1}",
                    parameter="prompt",
                )
        return _as_array(prompt)


def _bad_words_refusal(got: str, allowed: str) -> RequestError:
    return RequestError(f"bad_words: got {got}, allowed are {allowed}", parameter="bad_words")


def _truncated(ids: Any, options: PromptOptions, num_added: tuple[int, int] = (0, 0)) -> Any:
    """Return a list of token ids cut to the length that ``options`` allow; what is no list is left as it is.

    Args:
        num_added: special tokens at both ends that are kept unless a side was chosen.
    """
    limit = options.truncate_prompt_tokens
    if not isinstance(ids, list) or limit is None or len(ids) <= limit:
        return ids
    if options.truncation_side == "right":
        return ids[:limit]
    before, after = num_added if options.truncation_side is None else (0, 0)
    # None of the text may remain beside the special tokens, nor all of these.
    first = min(len(ids) - limit + before, len(ids) - after)
    return (ids[:before] + ids[first:])[:limit]


def _parts(sequence: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield a sequence in parts: a call for all of a long one would hold the interpreter lock."""
    if len(sequence) <= _IDS_AT_ONCE:
        yield sequence
        return
    for first in range(0, len(sequence), _IDS_AT_ONCE):
        yield sequence[first : first + _IDS_AT_ONCE]


def _as_array(token_ids: Sequence[int]) -> NDArray[np.int32]:
    return np.concatenate([np.array(part, np.int32) for part in _parts(token_ids)])


def check_cache_salt(salt: object) -> None:
    """Check the salt of a prompt; None means no salt.

    Raises:
        RequestError: it is empty, too long, no string, or has characters that vLLM does not take.
    """
    if salt is None:
        return
    is_text = isinstance(salt, str) and 1 <= len(salt) <= MAX_CACHE_SALT_LENGTH
    if not is_text or not _FORBIDDEN_IN_SALTS.isdisjoint(str(salt)):
        raise RequestError(
            f"cache_salt: got {reprlib.repr(salt)}, allowed is a string of 1 to {MAX_CACHE_SALT_LENGTH} characters, "
            "none of them @, /, \\ or NUL",
            parameter="cache_salt",
        )


def _without_salts(prompts: Sequence[Prompt]) -> tuple[Sequence[Any], list[bytes]]:
    """Return the texts or token ids of prompts, and the namespace of each."""
    if not any(issubclass(kind, dict) for kind in set(map(type, prompts))):
        return prompts, [b""] * len(prompts)
    pairs = [_without_salt(prompt) if isinstance(prompt, dict) else (prompt, b"") for prompt in prompts]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _without_salt(prompt: Mapping[str, Any]) -> tuple[Any, bytes]:
    salt = prompt.get("cache_salt")
    check_cache_salt(salt)
    contents = [name for name in prompt if name != "cache_salt"]
    if contents not in (["prompt"], ["prompt_token_ids"]):
        raise RequestError(
            f"prompt: got dict with {reprlib.repr(list(prompt))}, allowed are prompt or prompt_token_ids, and "
            "cache_salt",
            parameter="prompt",
        )
    return prompt[contents[0]], b"" if salt is None else salt.encode("utf-8", "surrogatepass")


def derive_seed(engine_seed: int, request_number: int) -> int:
    """Return a 63-bit seed; different for neighbouring requests and engine seeds (SplitMix64's finaliser)."""
    mask = (1 << 64) - 1
    value = (engine_seed * 0xD1342543DE82EF95 + (request_number + 1) * 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) & _SEED_MASK


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What parameters are where a caller leaves them open."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of ``SamplingParams``, ``max_tokens`` left out."""
    max_new_tokens: int | None = None
    """Limit of answers without one, capped by the window; None: that of ``SamplingParams``."""

    def sampling_params(self) -> SamplingParams:
        """Return the parameters of a caller who says nothing."""
        fields = dict(self.fields)
        if self.max_new_tokens is not None:
            fields["max_tokens"] = self.max_new_tokens
        return SamplingParams(**fields)

    def process_all(self, processor: InputProcessor, prompts: Sequence[Prompt]) -> list[ProcessedInput]:
        """Process prompts of a caller who says nothing; errors are those of ``InputProcessor.process``."""
        params = self.sampling_params()
        if self.max_new_tokens is not None:
            params = replace(params, max_tokens=None)
        options = PromptOptions(max_new_tokens=self.max_new_tokens)
        return processor.process_all(prompts, [params] * len(prompts), options=options)

    def __str__(self) -> str:
        limit = {} if self.max_new_tokens is None else {"max_new_tokens": self.max_new_tokens}
        return json.dumps({**self.fields, **limit})


def sampling_defaults(config: EngineConfig) -> SamplingDefaults:
    """Return a model's sampling parameters; with ``generation_config`` off those of ``SamplingParams``.

    As in vLLM ``do_sample`` is not looked at: ``temperature`` alone says whether to draw.

    Raises:
        ModelError: there is no such model, or its file has a value that is not allowed.
    """
    if config.generation_config == "none":
        return SamplingDefaults()
    fields = _read(resolve_model_path(config.model))
    given = {name: fields[name] for name in _SAMPLING_FIELDS if fields.get(name) is not None}
    defaults = SamplingDefaults(given, fields.get("max_new_tokens"))
    try:
        defaults.sampling_params()
    except RequestError as error:
        raise ModelError(
            f"{GENERATION_CONFIG_FILE}: {error}; --generation-config none ignores its sampling parameters"
        ) from error
    return defaults


def generation_eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Return the end tokens that the file names beside those of config.json, whatever ``generation_config`` says.

    Raises:
        ModelError: they are no token ids.
    """
    return read_eos_token_ids(_read(directory), GENERATION_CONFIG_FILE)


def _read(directory: Path) -> dict[str, Any]:
    path = directory / GENERATION_CONFIG_FILE
    return read_json(path) if path.is_file() else {}
