"""The output thread: detokenizes and makes outputs, so that the step loop never waits for text.

``IncrementalDetokenization`` says which tokens it gets before their completions end, and when.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from rose_backend.block_manager.block_pool import IntArray
from rose_backend.engine.output_processor import (
    Abort,
    IncrementalTokens,
    NewTokens,
    OutputProcessor,
    StopCheck,
)
from rose_backend.engine.outputs import GrowingCompletions, RequestOutput
from rose_backend.engine.request import Completion, Request
from rose_backend.engine.sequence_state import Int32Array, SequenceState

Message = NewTokens | IncrementalTokens | Abort

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
        return bool(self._report.stop_checks or self._report.finished or self.failure)

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
        if not self.has_report:
            return OutputReport()
        with self._handler.changed:
            if self.failure is not None:
                raise self.failure
            report, self._report = self._report, OutputReport()
        return report

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
