"""Grammars of structured outputs: compiled by a thread, followed token by token, and asked what may be drawn next.

llguidance does all three. It computes a mask only when it is needed, so compiling takes milliseconds. All requests of a
step wait while a grammar follows a token. So a grammar that takes too long, as a highly ambiguous one may after a few
hundred tokens, ends its completion.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.engine.structured_outputs import StructuredOutputsParams
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.errors import RequestError, kind_and_text

_MAX_CACHED = 32
"""Compiled grammars that are kept for later requests; the largest take some MiB."""
_NUM_COMPILERS = 2
_MAX_MASK_THREADS = 8
_MAX_LEXER_STATES, _MAX_GRAMMAR_SIZE = 50_000, 200_000
"""A fifth and two of llguidance's own limits."""
_MAX_FOLLOW_S = 0.02
"""Of the CPU's time that one grammar may take to follow what was drawn in a step: JSON takes at most 1 ms a token. It
holds the interpreter lock, and the step waits."""
_MAX_STEP_S, _LONG_FOLLOW_S = 0.05, 0.005
"""Of all grammars of a step together; beyond, the slowest of those that take long end."""
_MAX_ERROR_LENGTH = 300


class Grammar:
    """What the text of one completion may become.

    Args:
        matcher: llguidance's; this grammar's own.
        params: of the completion.
        eos_token_ids: of the model.
    """

    __slots__ = ("_begins_after", "_eos_token_ids", "_matcher", "_params", "error", "num_tokens")

    def __init__(self, matcher: Any, params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
        assert params.structured_outputs is not None
        self._matcher = matcher
        self._params = params
        self._eos_token_ids = eos_token_ids
        self._begins_after = params.structured_outputs.begins_after
        self.num_tokens = 0
        """Output tokens that it has followed."""
        self.error: str | None = None
        """Why no token can be drawn any more."""

    def copy(self) -> Grammar:
        """Return the same for another completion. Only a grammar that has followed nothing is copied."""
        return Grammar(self._matcher.deep_copy(), self._params, self._eos_token_ids)

    def follow(self, token_ids: list[int]) -> Any | None:
        """Follow what was drawn; return the matcher if it restricts the next token."""
        self.num_tokens += len(token_ids)
        if self._begins_after is not None:
            if self._begins_after not in token_ids:
                return None
            token_ids = token_ids[token_ids.index(self._begins_after) + 1 :]
            self._begins_after = None
        for token_id in token_ids:
            # Once the text has ended, only end tokens follow.
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token_id)
        return self._matcher

    def give_up(self, reason: str) -> None:
        """Let no token be drawn any more."""
        self.error = f"{_field(self._params)}: its grammar cannot go on ({reason})"

    def may_begin_with(self, token_ids: Sequence[int]) -> bool:
        """Return whether one of ``token_ids`` may be the first token. Call it before ``follow``."""
        if self._begins_after is not None:
            return True
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32).copy()
        self.finish(mask)
        return any(mask[token_id >> 5] >> (token_id & 31) & 1 for token_id in token_ids)

    def finish(self, mask: NDArray[np.uint32]) -> None:
        """Allow and forbid stop tokens in the matcher's mask; forbid everything where it cannot go on."""
        matcher, stops = self._matcher, self._params.stop_token_ids or ()
        if matcher.is_error():
            self.give_up(_short(matcher.get_error()))
            mask[:] = 0
            return
        if stops and matcher.is_accepting():
            _set(mask, stops, True)
        self.forbid_early_ends(mask)

    def forbid_early_ends(self, mask: NDArray[np.uint32]) -> None:
        """Forbid what would end a text before its ``min_tokens``, unless it can only end."""
        params, stops = self._params, self._params.stop_token_ids or ()
        if self.num_tokens < params.min_tokens:
            longer = mask.copy()
            _set(longer, (*stops, *(() if params.ignore_eos else self._eos_token_ids)), False)
            # A text that can only end is no longer than that.
            if longer.any():
                mask[:] = longer


class GrammarCompiler:
    """Makes grammars for one model's tokens, in threads or in the caller's.

    Args:
        vocab_size: of the model.
        eos_token_ids: allowed where a text may end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokens: Any = None
        self._tokens_lock = threading.Lock()
        self._cache: OrderedDict[StructuredOutputsParams, Any] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_NUM_COMPILERS, thread_name_prefix="rose-grammars")
        # Of each tenant, what is to be compiled; the tenant whose turn is next is first.
        self._queues: dict[bytes, deque[tuple[Future[None], Callable[[], None]]]] = {}
        self._queues_lock = threading.Lock()

    def prepare(self) -> Future[Any]:
        """Begin to index the vocabulary, which would stop streams for some tenths of a second later."""
        return self._threads.submit(self._prepared)

    def start(
        self, params: SamplingParams, done: Callable[[Grammar | RequestError], None], tenant: bytes = b""
    ) -> Future[None]:
        """Compile in a thread, which calls ``done``, unless what is returned is canceled before it begins.

        Tenants take turns, a grammar each.
        """

        def compile_one() -> None:
            try:
                outcome: Grammar | RequestError = self.compile(params)
            except RequestError as error:
                outcome = error
            except BaseException as error:  # panics of llguidance are no Exception, and the request waits
                outcome = RequestError(f"{_field(params)}: {kind_and_text(error)}", parameter=_field(params))
            done(outcome)

        future: Future[None] = Future()
        with self._queues_lock:
            self._queues.setdefault(tenant, deque()).append((future, compile_one))
        self._threads.submit(self._compile_next)
        return future

    def _compile_next(self) -> None:
        """Compile the oldest of the tenant whose turn it is; called once for each that was queued."""
        with self._queues_lock:
            tenant = next(iter(self._queues))
            queue = self._queues.pop(tenant)
            future, compile_one = queue.popleft()
            if queue:
                self._queues[tenant] = queue  # after all others
        if future.set_running_or_notify_cancel():
            compile_one()

    def compile(self, params: SamplingParams) -> Grammar:
        """Return a grammar that has followed nothing.

        Raises:
            RequestError: it is not valid, too large, or the model has no end token; or ``allowed_token_ids`` has
                no token that may be the first one.
        """
        structured = params.structured_outputs
        assert structured is not None
        with self._cache_lock:
            matcher = self._cache.get(structured)
            if matcher is not None:
                self._cache.move_to_end(structured)
        if matcher is None:
            matcher = self._compile(structured)
            with self._cache_lock:
                self._cache[structured] = matcher
                if len(self._cache) > _MAX_CACHED:
                    self._cache.popitem(last=False)
        grammar = Grammar(matcher.deep_copy(), params, self._eos_token_ids)
        if params.allowed_token_ids is not None and not grammar.may_begin_with(params.allowed_token_ids):
            raise RequestError(
                "allowed_token_ids: got none that may begin the structured output, allowed are lists with at least one",
                parameter="allowed_token_ids",
            )
        return grammar

    def close(self) -> None:
        """Compile nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, structured: StructuredOutputsParams) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        field = structured.field
        if not self._eos_token_ids:
            raise RequestError(
                f"{field}: got one for a model without an end token, allowed is none", parameter=field
            )
        try:
            tokens = self._prepared()
            text = structured.lark_grammar()
            limits = LLParserLimits(
                max_lexer_states=_MAX_LEXER_STATES, max_grammar_size=_MAX_GRAMMAR_SIZE, verbose_errors=False
            )
            matcher = LLMatcher(tokens, text, log_level=0, limits=limits)
            if not matcher.is_error():
                # What can have no text at all is found here.
                matcher.compute_bitmask()
            reason = matcher.get_error()
        except Exception as error:  # whatever a reader of three syntaxes makes of a client's text
            reason = str(error)
        if reason:
            raise RequestError(
                f"{field}: got one that cannot be compiled ({_short(reason)}), allowed is what docs/standalone.md "
                "describes",
                parameter=field,
            )
        return matcher

    def _prepared(self) -> Any:
        with self._tokens_lock:
            if self._tokens is None:
                self._tokens = self._index()
        return self._tokens

    def _index(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids[0])
        return LLTokenizer(TokenizerWrapper(vocabulary), self._vocab_size, self._eos_token_ids)


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = [tokenizer.token_texts.bytes_of(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [each for each in tokenizer.special_token_ids if each < vocab_size]

    def __call__(self, text: str) -> list[int]:
        """Tokenize nothing: masks allow every tokenization."""
        return []


class GrammarMasks:
    """Says which tokens may be drawn next.

    Args:
        vocab_size: of the model.
    """

    def __init__(self, vocab_size: int) -> None:
        self.num_words = -(-vocab_size // 32)
        self._executor: Any = None

    def fill(self, grammars: list[Grammar], token_ids: list[list[int]]) -> NDArray[np.int32]:
        """Return a mask for each of ``grammars``, ``[N, num_words]``, as ``mask_logits`` takes them.

        Args:
            token_ids: what each has to follow before, ``[N]``.
        """
        masks = np.zeros((len(grammars), self.num_words), np.int32)
        matchers = []
        for index, matcher in enumerate(_follow_all(grammars, token_ids)):
            grammar = grammars[index]
            if grammar.error is not None:
                continue
            if matcher is None:
                masks[index] = -1
                grammar.forbid_early_ends(masks[index].view(np.uint32))
            else:
                matchers.append((matcher, index))
        if matchers:
            self._compute(matchers, masks)
        for _, index in matchers:
            grammars[index].finish(masks[index].view(np.uint32))
        return masks

    def _compute(self, matchers: list[tuple[Any, int]], masks: NDArray[np.int32]) -> None:
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        if self._executor is None:
            self._executor = LLExecutor(min(_MAX_MASK_THREADS, len(os.sched_getaffinity(0))))
        # Without the interpreter lock, and side by side.
        fill_next_token_bitmask_par(self._executor, matchers, masks)


def _follow_all(grammars: list[Grammar], token_ids: list[list[int]]) -> list[Any | None]:
    """Let each grammar follow its tokens; those that take too long give up. Return what ``follow`` returns."""
    matchers, times = [], []
    for grammar, new in zip(grammars, token_ids, strict=True):
        start = time.thread_time()
        matchers.append(grammar.follow(new))
        # Not what is waited for: a busy machine ends no grammar.
        times.append((time.thread_time() - start if new else 0.0, grammar))
    total = sum(seconds for seconds, _ in times)
    for seconds, grammar in sorted(times, key=lambda each: -each[0]):
        if seconds <= _LONG_FOLLOW_S or (seconds <= _MAX_FOLLOW_S and total <= _MAX_STEP_S):
            break
        grammar.give_up("following it takes too long")
        total -= seconds
    return matchers


def _set(mask: NDArray[np.uint32], token_ids: Sequence[int], allowed: bool) -> None:
    for token_id in token_ids:
        bit = np.uint32(1 << (token_id & 31))
        if allowed:
            mask[token_id >> 5] |= bit
        else:
            mask[token_id >> 5] &= ~bit


def _field(params: SamplingParams) -> str:
    return "" if params.structured_outputs is None else params.structured_outputs.field


def _short(reason: str) -> str:
    # Without the lines of the grammar, of which the first is ours.
    line = " ".join(reason.partition("\n   1 | ")[0].replace("<non-verbose/>", "").split())
    return line if len(line) <= _MAX_ERROR_LENGTH else f"{line[:_MAX_ERROR_LENGTH]}..."
