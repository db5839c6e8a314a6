"""One request and its completions: what is known of them outside the step path."""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rose_backend.engine.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.engine.text_stream import TextStream
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.errors import RequestError

Prompt = str | Sequence[int]

_SEED_MASK = (1 << 63) - 1
_LISTS_PER_STEP = 2
"""Lists of 512 tokens take as long as planning a step that is like the one before."""


@dataclass(slots=True, eq=False)
class CompletionText:
    """What the caller sees of a completion. Belongs to the text thread, as long as the engine runs."""

    stream: TextStream | None
    """None when the text is only needed at the end."""
    logprobs: list[dict[int, Logprob]] | None
    token_ids: list[int] = field(default_factory=list)
    """Output so far of a followed completion; of any other, until the end, what was handed over early."""
    num_decoded: int = 0
    """Of these, how many ``stream`` has been given, or without one, ``early_bytes`` stand for."""
    early_bytes: bytearray = field(default_factory=bytearray)
    """Text of a completion that is not followed, as far as it was made before the end."""
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    final: CompletionOutput | None = None
    is_lazy: bool = field(init=False)
    """Nobody looks at single tokens: text is made when an output is."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing will be added."""
        return self.finish_reason is not None

    def __post_init__(self) -> None:
        has_stop_strings = self.stream is not None and self.stream.has_stop_strings
        self.is_lazy = self.logprobs is None and not has_stop_strings


@dataclass(slots=True, eq=False)
class Completion:
    """One of a request's ``n`` completions: a sequence of tokens that holds one row while it runs.

    While it runs its tokens stand in the row's buffers; ``token_ids`` is written when it leaves the row.
    All but ``text`` belongs to the step loop.
    """

    request: Request
    index: int
    seed: int
    token_ids: NDArray[np.int32]
    """Prompt and output, as of the last time it had no row."""
    text: CompletionText
    row: int = -1
    num_siblings_to_fork: int = 0
    """Completions that are split off when this one has computed the prompt."""
    num_computed_before: int = 0
    """Tokens that were computed before a preemption took the row away."""
    has_ended: bool = False
    """No further step computes anything for it."""
    num_handed_over: int = 0
    """Tokens that the text thread was given, counted where there are stop strings."""

    @property
    def is_followed(self) -> bool:
        """Whether each of its tokens goes to the text thread as it comes: streams, stop strings, logprobs."""
        return self.text.stream is not None or self.text.logprobs is not None


@dataclass(slots=True, eq=False)
class Request:
    """A checked request. Built by ``RequestFactory``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: NDArray[np.int32]
    params: SamplingParams
    max_tokens: int
    is_streaming: bool
    completions: list[Completion] = field(default_factory=list)
    num_cached_tokens: int | None = None
    """None until it first got a row."""
    is_aborted: bool = False
    has_output: bool = False
    """Its caller has been given something. For the text thread."""
    _prompt_list: list[int] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether its last output can be made. For the text thread."""
        if self.is_aborted:
            return True
        if len(self.completions) != self.params.n:
            return False
        # Asked for every piece of every stream: a generator would take most of the time.
        for completion in self.completions:  # noqa: SIM110
            if completion.text.finish_reason is None:
                return False
        return True

    def prompt_list(self) -> list[int]:
        """Return the prompt's tokens as outputs have them; made once, by whichever thread asks first."""
        if self._prompt_list is None:
            self._prompt_list = self.prompt_token_ids.tolist()
        return self._prompt_list

    def make_output(self, snapshot: Callable[[Completion], CompletionOutput]) -> RequestOutput:
        """Describe the request's present state, each completion as ``snapshot`` shows it.

        All outputs of one stream share the list of prompt tokens.
        """
        self.has_output = True
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_list(),
            outputs=[snapshot(completion) for completion in self.completions],
            finished=self.is_finished,
            num_cached_tokens=self.num_cached_tokens or 0,
        )


class PromptLists:
    """Makes the lists of prompt tokens that outputs have while the device is busy: many requests may end at once."""

    def __init__(self) -> None:
        self._unlisted: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """Note that ``request`` will need one; a stream does with its first token, and gets it then."""
        if not request.is_streaming:
            self._unlisted.append(request)

    def make_some(self) -> None:
        """Make few enough to be done before the device is."""
        for _ in range(min(_LISTS_PER_STEP, len(self._unlisted))):
            self._unlisted.popleft().prompt_list()


class RequestFactory:
    """Turns what a caller asks for into a ``Request``, or refuses it before anything is allocated.

    Args:
        max_model_len: prompt plus output, in tokens.
        max_num_seqs: completions that may run at once.
        seed: with the number of the request, the seed of requests that bring none.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, max_model_len: int, max_num_seqs: int, seed: int
    ) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._seed = seed
        self._numbers = itertools.count()

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        is_streaming: bool = False,
    ) -> Request:
        """Tokenize and check one request.

        Raises:
            RequestError: see ``SamplingParams.check_against_model``; or the prompt is empty, too long, or holds an id
                outside the vocabulary.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params: got {type(params).__name__}, allowed is SamplingParams")
        ids = self._checked_prompt(prompt)
        params.check_against_model(
            prompt_length=len(ids),
            vocab_size=self.vocab_size,
            max_model_len=self._max_model_len,
            max_num_seqs=self._max_num_seqs,
        )
        number = next(self._numbers)
        room = self._max_model_len - len(ids)
        request = Request(
            request_id=request_id if request_id is not None else f"request-{number}",
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=ids,
            params=params,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            is_streaming=is_streaming,
        )
        seed = derive_seed(self._seed, number) if params.seed is None else params.seed
        first = self.make_completion(request, 0, seed)
        first.num_siblings_to_fork = params.n - 1
        request.completions.append(first)
        return request

    def make_completion(self, request: Request, index: int, base_seed: int) -> Completion:
        """Make completion ``index``, which draws with ``base_seed + index``."""
        params = request.params
        stream = None
        if request.is_streaming or params.stop_strings:
            stream = TextStream(
                self._tokenizer,
                stop_strings=params.stop_strings,
                keep_stop_string=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
                skip_special_tokens=params.skip_special_tokens,
            )
        return Completion(
            request=request,
            index=index,
            seed=(base_seed + index) & _SEED_MASK,
            token_ids=request.prompt_token_ids,
            text=CompletionText(stream, None if params.logprobs is None else []),
        )

    def _checked_prompt(self, prompt: Prompt) -> NDArray[np.int32]:
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else self._checked_ids(prompt)
        if len(ids) == 0:
            raise RequestError("prompt: got no tokens, allowed is at least one", parameter="prompt")
        if len(ids) > self._max_model_len - 1:
            raise RequestError(
                f"prompt: got {len(ids)} tokens, allowed are at most {self._max_model_len - 1} "
                f"(a window of {self._max_model_len} less one token to generate)",
                parameter="prompt",
            )
        return np.array(ids, np.int32)

    def _checked_ids(self, prompt: Sequence[int]) -> list[int] | NDArray[np.int32]:
        if isinstance(prompt, np.ndarray) and prompt.ndim == 1:
            prompt = prompt.tolist()
        if not isinstance(prompt, (list, tuple)):
            raise RequestError(
                f"prompt: got {type(prompt).__name__}, allowed are a string and a list of token ids",
                parameter="prompt",
            )
        # Long prompts of integers are looked through without a Python step per token. Only integers can be packed, and
        # truth values, which become 0 and 1.
        with contextlib.suppress(struct.error):
            ids = np.frombuffer(struct.pack(f"{len(prompt)}i", *prompt), np.int32)
            # Seen as unsigned numbers, negative ones are the largest.
            is_known = len(ids) > 0 and ids.view(np.uint32).max() < self.vocab_size
            if is_known and (ids.min() > 1 or bool not in map(type, prompt)):
                return ids
        for token_id in prompt:
            is_id = isinstance(token_id, (int, np.integer)) and not isinstance(token_id, bool)
            if not is_id or not 0 <= token_id < self.vocab_size:
                shown = str(token_id) if is_id and abs(int(token_id)) < 2**63 else type(token_id).__name__
                raise RequestError(
                    f"prompt: got token id {shown}, allowed are integers from 0 to {self.vocab_size - 1}",
                    parameter="prompt",
                )
        return list(prompt)


def derive_seed(engine_seed: int, request_number: int) -> int:
    """Return a 63-bit seed; different for neighbouring requests and engine seeds (SplitMix64's finaliser)."""
    mask = (1 << 64) - 1
    value = (engine_seed * 0xD1342543DE82EF95 + (request_number + 1) * 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) & _SEED_MASK
