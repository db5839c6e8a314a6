"""The output thread makes texts, log-probabilities and outputs of tokens, so that the step loop never waits for text.

``OutputProcessor`` does the work and finds stop strings, ``OutputThread`` is the thread, and
``IncrementalDetokenization`` decides which tokens it gets before their completions end, and when.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rose_backend.block_manager.block_pool import IntArray
from rose_backend.block_manager.sequence_table import concatenate_ranges
from rose_backend.engine.grammars import Grammar
from rose_backend.engine.outputs import (
    CompletionOutput,
    FinishReason,
    GrowingCompletions,
    Logprob,
    LogprobWords,
    RequestOutput,
)
from rose_backend.engine.request import Completion, CompletionText, Request
from rose_backend.engine.sequence_state import Int32Array, SequenceState
from rose_backend.engine.tokenizer import (
    MAX_TOKENS_BEFORE,
    ByteLevelDecoder,
    Decoder,
    Detokenizer,
    Tokenizer,
    TokenTexts,
    text_of,
)
from rose_backend.errors import RequestError


def logprobs_entry(
    words: LogprobWords, token_id: int, num_logprobs: int, texts: TokenTexts, before: list[int]
) -> dict[int, Logprob]:
    """Return the dictionary of one row, ``[2 + 2K]``: its sampled token and its ``num_logprobs`` most likely ones.

    Args:
        before: tokens in front, see ``TokenTexts.text``.
    """
    numbers = words.view(np.int32)
    first_token = 1 + len(words) // 2
    top_logprobs = words[2:first_token][:num_logprobs].tolist()
    top_tokens = numbers[first_token:][:num_logprobs].tolist()
    entry = {token_id: Logprob(float(words[0]), int(numbers[1]), texts.text(token_id, before))}
    for rank, (candidate, logprob) in enumerate(zip(top_tokens, top_logprobs, strict=True), start=1):
        if candidate != token_id:
            entry[candidate] = Logprob(logprob, rank, texts.text(candidate, before))
    return entry


class Ending(NamedTuple):
    """How the step loop ended a completion. A stop string in its last token takes precedence."""

    reason: FinishReason
    stop_reason: int | str | None
    """The stop token, or why a grammar could not go on."""


@dataclass(frozen=True, slots=True)
class NewTokens:
    """One step's tokens of ``F`` completions with ``needs_each_token``, and which completions ended in it."""

    completions: list[Completion]  # [F]
    token_ids: list[int]  # [F], negative where an error ended the completion in place of a token
    indices: NDArray[np.intp]  # [F], of each in logprobs
    logprobs: LogprobWords | None
    endings: dict[Completion, Ending]
    """Of any completion. One without ``needs_each_token`` has left its slot: its ``token_ids`` are complete."""
    has_first_tokens: bool
    """Some of the tokens are the first ones of their completion."""


class PromptRows(NamedTuple):
    """Some tokens of one prompt whose log-probabilities a step has computed."""

    request: Request
    first: int
    """Index of the first of these tokens in the prompt."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PromptReport:
    """Log-probabilities of prompts that one step has computed, part after part. A preemption brings some again."""

    parts: list[PromptRows]
    words: LogprobWords


@dataclass(frozen=True, slots=True)
class IncrementalTokens:
    """Some tokens of ``N`` completions without ``needs_each_token``, detokenized before these end.

    Many may end in one step: detokenizing all of their tokens then would leave the device idle.
    """

    completions: list[Completion]  # [N]
    starts: list[int]  # [N], where in prompt and output the first token of each stands
    counts: list[int]  # [N]
    token_ids: NDArray[np.int32]  # [sum(counts)]


@dataclass(frozen=True, slots=True)
class Abort:
    """End what has not finished of a request; no step computes anything for it any more."""

    request: Request


class StopCheck(NamedTuple):
    """How far the output thread has checked a completion with stop strings."""

    num_tokens: int
    """Output tokens that were checked; the last of them ended the text if ``is_stopped``."""
    is_stopped: bool


class OutputProcessor:
    """Keeps the text side of completions (``Completion.text``) up to date."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def process(self, message: Message) -> tuple[list[Request], dict[Completion, StopCheck]]:
        """Update completions.

        Returns:
            Requests with new output for their caller, and the stop checks of completions with stop strings.
        """
        if isinstance(message, Abort):
            return self._abort(message.request), {}
        if isinstance(message, IncrementalTokens):
            self._take_incremental(message)
            return [], {}
        if isinstance(message, PromptReport):
            _keep_prompt_logprobs(message)
            return [], {}
        stop_checks: dict[Completion, StopCheck] = {}
        touched: dict[Request, None] = {}
        for index, completion in enumerate(message.completions):
            text = completion.text
            # The step loop may have drawn tokens after a stop string before it learned of it.
            if text.finish_reason is not None:
                continue
            touched[completion.request] = None
            if text.is_decoded_lazily and completion not in message.endings:
                text.token_ids.append(message.token_ids[index])
                continue
            self._see_token(completion, index, message)
            if text.stream is not None and text.stream.has_stop_strings:
                stop_checks[completion] = StopCheck(len(text.token_ids), text.is_finished)
        plain = [completion for completion in message.endings if not completion.needs_each_token]
        if plain:
            self._finish_batch(plain, message.endings)
            touched.update((completion.request, None) for completion in plain)
        updated = [request for request in touched if request.is_streaming or request.is_finished]
        return updated, stop_checks

    def request_output(self, request: Request) -> RequestOutput:
        """Return what is new in the request since its previous output; all of a stream share the prompt's list."""
        request.has_output = True
        # The prompt's report comes before the first token. None comes where that failed, or after an abort.
        has_prompt_logprobs = any(each.text.token_ids for each in request.completions)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_list(),
            outputs=[new for each in request.completions if (new := self._news(each)) is not None],
            finished=request.is_finished,
            num_cached_tokens=request.num_cached_tokens or 0,
            scheduled_s=request.scheduled_s,
            prompt_logprobs=request.prompt_logprobs if has_prompt_logprobs else None,
        )

    def _abort(self, request: Request) -> list[Request]:
        if request.is_finished:
            return []
        request.is_aborted = True
        for completion in request.completions:
            text = completion.text
            if text.is_finished:
                continue
            text.finish_reason = "abort"
            if not completion.needs_each_token:
                _take_remaining([completion], None)
            if text.stream is not None:
                _catch_up(text, len(text.token_ids))
                text.stream.close()
            text.final = self._describe(completion)
        return [request]

    def _see_token(self, completion: Completion, index: int, message: NewTokens) -> None:
        text, token_id = completion.text, message.token_ids[index]
        num_logprobs = completion.request.params.logprobs
        has_token = token_id >= 0
        if has_token:
            text.token_ids.append(token_id)
        if (
            has_token
            and text.logprobs is not None
            and num_logprobs is not None
            and message.logprobs is not None
        ):
            words = message.logprobs[message.indices[index]]
            before = text.token_ids[-1 - MAX_TOKENS_BEFORE : -1]
            entry = logprobs_entry(words, token_id, num_logprobs, self._tokenizer.token_texts, before)
            text.logprobs.append(entry)
            text.cumulative_logprob += entry[token_id].logprob
        ending = message.endings.get(completion)
        if ending is not None:
            text.finish_reason, text.stop_reason = ending
        if text.stream is not None:
            self._extend_text(completion, text.stream)
        if text.is_finished:
            text.final = self._describe(completion)

    def _extend_text(self, completion: Completion, stream: Detokenizer) -> None:
        text = completion.text
        stop_string = _catch_up(text, len(_shown_token_ids(completion)))
        if text.is_finished and stop_string is None:
            stop_string = stream.close()
        if stop_string is not None:
            text.finish_reason, text.stop_reason = "stop", stop_string

    def _finish_batch(self, completions: list[Completion], endings: dict[Completion, Ending]) -> None:
        """Finish completions without ``needs_each_token``. Many may end in one step: they are detokenized together."""
        batches: defaultdict[Decoder, list[Completion]] = defaultdict(list)
        for completion in completions:
            completion.text.finish_reason, completion.text.stop_reason = endings[completion]
            batches[self._decoder(completion.request)].append(completion)
        for decoder, batch in batches.items():
            _take_remaining(batch, decoder)
            for completion in batch:
                text = completion.text
                if text.num_decoded > len(_shown_token_ids(completion)):
                    # The last token was decoded before it was known to be a stop token that is not shown.
                    text.stream = None
                if text.stream is not None:
                    self._extend_text(completion, text.stream)
                text.final = self._describe(completion)

    def _take_incremental(self, message: IncrementalTokens) -> None:
        taken: defaultdict[Decoder, list[tuple[CompletionText, int, int]]] = defaultdict(list)
        end = 0
        for completion, first, count in zip(message.completions, message.starts, message.counts, strict=True):
            start, end = end, end + count
            text, request = completion.text, completion.request
            # The first may be the prompt's, or known from before a preemption. After a gap, all wait for the end.
            num_known = len(request.prompt_token_ids) + len(text.token_ids) - first
            if not text.is_finished and 0 <= num_known < count:
                taken[self._decoder(request)].append((text, start + num_known, end))
        for decoder, spans in taken.items():
            _extend(spans, message.token_ids, decoder)

    def _decoder(self, request: Request) -> Decoder:
        return self._tokenizer.decoder(skip_special_tokens=request.params.skip_special_tokens)

    def _describe(self, completion: Completion) -> CompletionOutput:
        """Return what is new in a completion, and note that it has been reported."""
        text, stream = completion.text, completion.text.stream
        if not text.is_finished:
            _catch_up(text, len(text.token_ids))
        delta = self._whole_text(completion) if stream is None else stream.take_delta()
        start, text.num_reported = text.num_reported, len(text.token_ids)
        logprobs, cumulative_logprob = text.logprobs, None
        if logprobs is not None:
            text.logprobs, cumulative_logprob = [], text.cumulative_logprob
        return CompletionOutput(
            index=completion.index,
            text=delta,
            token_ids=text.token_ids[start:],
            logprobs=logprobs,
            cumulative_logprob=cumulative_logprob,
            finish_reason=text.finish_reason,
            stop_reason=text.stop_reason,
            delta_text=delta,
        )

    def _news(self, completion: Completion) -> CompletionOutput | None:
        """Return what is new in a completion; None for nothing."""
        text = completion.text
        if text.is_finished:
            final, text.final = text.final, None
            return final
        return self._describe(completion) if text.num_reported < len(text.token_ids) else None

    def _whole_text(self, completion: Completion) -> str:
        """Return the text of a completion without stream, which has ended."""
        text, shown = completion.text, _shown_token_ids(completion)
        if text.num_decoded == len(shown):
            return text_of(text.decoded_bytes)
        stream = self._decoder(completion.request).stream(completion.request.text_context)
        return stream.extend(shown) + stream.close()


def _keep_prompt_logprobs(report: PromptReport) -> None:
    end = 0
    for request, first, num_tokens in report.parts:
        start, end = end, end + num_tokens
        assert request.prompt_logprobs is not None, "it has asked for them"
        request.prompt_logprobs.write(first, report.words[start:end])


def _catch_up(text: CompletionText, num_tokens: int) -> str | None:
    """Add the first ``num_tokens`` tokens to the stream, unless it has them; returns the stop string it found."""
    new = text.token_ids[text.num_decoded : num_tokens]
    if not new or text.stream is None:
        return None
    text.num_decoded = num_tokens
    return text.stream.extend(new)


def _take_remaining(completions: list[Completion], decoder: Decoder | None) -> None:
    """Add the tokens that were not sent in portions, of completions that have left their slots."""
    rests, spans, hidden, end = [], [], [], 0
    for completion in completions:
        text = completion.text
        rest = completion.token_ids[len(completion.request.prompt_token_ids) + len(text.token_ids) :]
        start, end = end, end + len(rest)
        rests.append(rest)
        # A stop token that is not shown has no text.
        is_hidden = start < end and not _shows_last_token(completion)
        spans.append((text, start, end - is_hidden))
        if is_hidden:
            hidden.append((text, int(rest[-1])))
    _extend(spans, np.concatenate(rests), decoder)
    for text, token_id in hidden:
        text.token_ids.append(token_id)


def _extend(
    spans: list[tuple[CompletionText, int, int]],
    token_ids: NDArray[np.int32],
    decoder: Decoder | None,
) -> None:
    """Add to each text its tokens in ``token_ids``, ``[start, end)``, decoded unless ``decoder`` is None."""
    starts, ends = (np.array([span[place] for span in spans]) for place in (1, 2))
    token_ids = token_ids[concatenate_ranges(starts, ends - starts)]
    pieces = decoder.pieces_of(token_ids, ends - starts) if isinstance(decoder, ByteLevelDecoder) else None
    listed, position = token_ids.tolist(), 0
    for index, (text, start, end) in enumerate(spans):
        text.token_ids += listed[position : position + end - start]
        position += end - start
        if pieces is not None:
            text.decoded_bytes += pieces[index]
            text.num_decoded += end - start
        elif decoder is not None:
            _catch_up(text, len(text.token_ids))


def _shows_last_token(completion: Completion) -> bool:
    """Whether the newest token belongs to the text; a stop token does so only when that was asked for."""
    return completion.text.finish_reason != "stop" or completion.request.params.include_stop_str_in_output


def _shown_token_ids(completion: Completion) -> list[int]:
    token_ids = completion.text.token_ids
    return token_ids if _shows_last_token(completion) else token_ids[:-1]


Message = NewTokens | IncrementalTokens | PromptReport | Abort

_RETRY_S = 0.01
"""How soon a stream that was not ready for an output is checked again when no message arrives before."""
_MAX_ROUND = 64
"""Streams that get an output in one round: a first token waits for at most this many others."""
_SHORT_ROUND_S = 500e-6
"""A round that took less, of up to about ten streams, delays no step: there is no back-off after it."""
_MAX_BACK_OFF_S = 0.02
"""Upper limit of a back-off."""
_NUM_REMEMBERED = 16
"""Rounds whose average duration is the length of a back-off."""


@dataclass(frozen=True, slots=True)
class OutputHandler:
    """Receives outputs, in the output thread."""

    deliver: Callable[[list[RequestOutput]], None]
    is_ready: Callable[[str], bool] | None = None
    """Whether a stream has consumed its last output; until then new tokens are merged into its next one. None: the
    caller reads outputs between steps, and every token makes one output."""
    wait_until_consumed: Callable[[], None] = lambda: None
    """Return when the readers of streams have processed what was delivered, if they are threads of this process."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    """Notified when there is a report for the step loop."""


@dataclass(frozen=True, slots=True)
class OutputReport:
    """What the output thread reports to the step loop."""

    stop_checks: dict[Completion, StopCheck] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    """Requests whose last output has been delivered."""
    compiled: list[tuple[Request, Grammar | RequestError]] = field(default_factory=list)
    """Requests that waited for their grammar; another thread reports them."""


class OutputThread:
    """Makes outputs from the tokens of every step, delivers those of a request in order, and reports finished ones.

    It is a separate thread because at 256 streams the detokenization of a step takes longer than the step itself.

    With streams, this thread and their readers' work at most half of the time, which leaves the interpreter lock to
    the step loop: after a round of outputs it backs off for as long as the average recent round took (single rounds
    take several times as long while prompts are admitted), and tokens that arrive meanwhile are merged into one output
    per request. A round serves the streams that have waited longest. First tokens bypass the back-off.
    """

    def __init__(self, processor: OutputProcessor, output_handler: OutputHandler) -> None:
        self.failure: BaseException | None = None
        """What ended the thread."""
        self._processor = processor
        self._handler = output_handler
        self._inbox: deque[Message | None] = deque()
        self._is_called = threading.Event()
        self._is_backing_off = False
        self._report = OutputReport()
        self._waiting: dict[Request, None] = {}  # longest waiting first
        self._stop_checks: dict[Completion, StopCheck] = {}
        self._thread = threading.Thread(target=self._run, name="rose-texts", daemon=True)
        self._thread.start()

    @property
    def has_report(self) -> bool:
        """Whether ``take`` would return a report or raise."""
        report = self._report
        return bool(report.stop_checks or report.finished or report.compiled or self.failure)

    def post(self, message: Message, *, is_urgent: bool = False) -> None:
        """Queue a message; returns at once. An urgent one is processed during a back-off, too."""
        self._inbox.append(message)
        if is_urgent or not self._is_backing_off:
            self._is_called.set()

    def take(self) -> OutputReport:
        """Return what the step loop does not know yet.

        Raises:
            BaseException: the one that ended the thread.
        """
        with self._handler.changed:
            if self.failure is not None:
                raise self.failure
            report, self._report = self._report, OutputReport()
        return report

    def report_compiled(self, request: Request, outcome: Grammar | RequestError) -> None:
        """Let the step loop know what became of a request's grammar; from any thread."""
        with self._handler.changed:
            self._report.compiled.append((request, outcome))
            self._handler.changed.notify_all()

    def wait(self) -> None:
        """Wait for a report."""
        with self._handler.changed:
            self._handler.changed.wait_for(lambda: self.has_report)

    def stop(self) -> None:
        """Ask the thread to end; unprocessed messages are dropped."""
        self._inbox.append(None)
        self._is_called.set()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    # From here on: in the output thread.

    def _run(self) -> None:
        is_ready = self._handler.is_ready
        try:
            if is_ready is None:
                self._run_unthrottled()
            else:
                self._run_throttled(is_ready)
        except BaseException as error:  # the step loop raises it
            with self._handler.changed:
                self.failure = error
                self._handler.changed.notify_all()

    def _run_unthrottled(self) -> None:
        """Make one output per token."""
        while (messages := self._take_messages(None)) is not None:
            for message in messages:
                self._process([message])
                self._deliver(list(self._waiting))

    def _run_throttled(self, is_ready: Callable[[str], bool]) -> None:
        back_off_until, usual_s = 0.0, 0.0
        while (messages := self._take_messages(self._time_to_wait(back_off_until))) is not None:
            start = time.perf_counter()
            self._process(messages)
            if start < back_off_until:
                self._deliver([request for request in self._waiting if not request.has_output])
                continue
            # An output is due to the requests that have waited longest.
            ready = (each for each in self._waiting if each.is_finished or is_ready(each.request_id))
            due = list(islice(ready, _MAX_ROUND))
            self._deliver(due)
            if due:
                self._handler.wait_until_consumed()
                now = time.perf_counter()
                took = now - start
                if took > _SHORT_ROUND_S or len(due) == _MAX_ROUND:
                    usual_s += (took - usual_s) / _NUM_REMEMBERED if usual_s else took
                    back_off_until = now + min(usual_s, _MAX_BACK_OFF_S)

    def _time_to_wait(self, back_off_until: float) -> float | None:
        """Return for how many seconds to wait for a message; None: without limit."""
        rest = back_off_until - time.perf_counter()
        self._is_backing_off = rest > 0
        if self._is_backing_off:
            return rest
        return _RETRY_S if self._waiting else None

    def _take_messages(self, seconds: float | None) -> list[Message] | None:
        """Return the queued messages, after ``seconds`` at the latest; None: the thread was stopped."""
        # During a back-off, messages are queued without waking this thread.
        if self._is_backing_off or not self._inbox:
            self._is_called.wait(seconds)
        self._is_backing_off = False
        self._is_called.clear()
        messages: list[Message] = []
        while self._inbox:
            message = self._inbox.popleft()
            if message is None:
                return None
            messages.append(message)
        return messages

    def _process(self, messages: list[Message]) -> None:
        for message in messages:
            requests, checked = self._processor.process(message)
            self._waiting.update(dict.fromkeys(requests))
            self._stop_checks |= checked

    def _deliver(self, due: list[Request]) -> None:
        """Deliver outputs of ``due``, and report to the step loop."""
        for request in due:
            del self._waiting[request]
        outputs = [self._processor.request_output(request) for request in due]
        finished = [output.request_id for output in outputs if output.finished]
        if not self._stop_checks and not finished:
            if outputs:
                self._handler.deliver(outputs)
            return
        # Atomically: a request is forgotten exactly when its last output is delivered.
        with self._handler.changed:
            self._report.stop_checks.update(self._stop_checks)
            self._report.finished.extend(finished)
            self._handler.deliver(outputs)
            self._handler.changed.notify_all()
        self._stop_checks = {}


class OutputQueue:
    """Outputs for the caller of ``EngineCore.step``: the output thread puts them in, the step loop takes them out."""

    def __init__(self) -> None:
        self._outputs: deque[RequestOutput] = deque()

    def __len__(self) -> int:
        return len(self._outputs)

    def put(self, outputs: list[RequestOutput]) -> None:
        """Append ``outputs``."""
        self._outputs.extend(outputs)

    def take(self) -> list[RequestOutput]:
        """Return all there are, oldest first."""
        # One by one: the other thread may append meanwhile.
        return [self._outputs.popleft() for _ in range(len(self._outputs))]

    def take_last(self, request_id: str) -> RequestOutput | None:
        """Return a request's last output, if it is here, and drop its earlier ones: no caller has them, so what they
        hold becomes part of the last one."""
        outputs = self.take()
        own = [output for output in outputs if output.request_id == request_id]
        if not own or not own[-1].finished:
            self._outputs.extendleft(reversed(outputs))
            return None
        self._outputs.extendleft(output for output in reversed(outputs) if output.request_id != request_id)
        completions = GrowingCompletions()
        for output in own:
            completions.add(output.outputs)
        own[-1].outputs = completions.take()
        return own[-1]


_MIN_SLOTS_PER_PORTION, _MAX_PORTIONS = 32, 6
"""Detokenizing 32 requests of 32 tokens takes 0.1 to 0.5 ms, about as long as the host waits for a step of many.
Portions of 64 requests cost the step loop more, of 16 no less."""
_MAX_KEPT_PORTIONS = 24


class IncrementalDetokenization:
    """Committed tokens of completions without ``needs_each_token``, until they are sent to the output thread.

    They are sent in portions, in steps that commit little, and detokenized while the host waits for such a step: beside
    a detokenizing output thread, which competes for the interpreter lock, a commit takes three times as long.
    """

    def __init__(self, state: SequenceState, send: Callable[[IncrementalTokens], None]) -> None:
        self.send = send
        """Receives the tokens."""
        self._state = state
        self._portions: deque[IncrementalTokens] = deque()

    def put(self, slots: IntArray, starts: IntArray, counts: Int32Array, token_ids: Int32Array) -> None:
        """Keep what was committed, without prompts and completions with ``needs_each_token``.

        When there is too much of it, the oldest is sent at once.

        Args:
            slots: ``[N]``, request slots.
            starts: ``[N]``, position of the first token of each slot, in prompt and output.
            counts: ``[N]``
            token_ids: ``[sum(counts)]``, slot after slot.
        """
        state = self._state
        is_due = ~state.needs_each_token[slots] & (starts + counts > state.num_prompt_tokens[slots])
        num_due = int(np.count_nonzero(is_due))
        if num_due < len(slots):
            token_ids = token_ids[np.repeat(is_due, counts)]
            slots, starts, counts = slots[is_due], starts[is_due], counts[is_due]
        size = max(_MIN_SLOTS_PER_PORTION, -(-num_due // _MAX_PORTIONS))
        ends = np.cumsum(counts)
        for first in range(0, num_due, size):
            some = slice(first, first + size)
            tokens = token_ids[ends[first] - counts[first] : ends[some][-1]]
            completions = [state.completion(slot) for slot in slots[some].tolist()]
            self._portions.append(
                IncrementalTokens(completions, starts[some].tolist(), counts[some].tolist(), tokens)
            )
        while len(self._portions) > _MAX_KEPT_PORTIONS:
            self.send(self._portions.popleft())

    def send_next(self) -> None:
        """Send the output thread a portion, or some if they are small. Call it right before the host waits."""
        portions, num_slots = self._portions, 0
        while portions and (
            not num_slots or num_slots + len(portions[0].completions) <= _MIN_SLOTS_PER_PORTION
        ):
            num_slots += len(portions[0].completions)
            self.send(portions.popleft())

    def drop(self) -> None:
        """Drop what was not sent: all completions have ended."""
        self._portions.clear()
