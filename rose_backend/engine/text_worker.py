"""The thread that makes texts, so that the step loop never waits for one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from rose_backend.engine.output_processor import Abort, EarlyTokens, Judgement, NewTokens, OutputProcessor
from rose_backend.engine.outputs import RequestOutput
from rose_backend.engine.request import Completion, Request

Message = NewTokens | EarlyTokens | Abort

_RETRY_S = 0.01
"""How soon a stream that was not ready for an output is looked at again when no step comes before."""
_MAX_ROUND = 64
"""Streams that get text in one round: a first token waits for no more than that many others."""
_SHORT_ROUND_S = 500e-6
"""A round that took less, of up to about ten streams, holds nobody up; rests begin behind that."""
_MAX_REST_S = 0.02
"""However long rounds took, texts stand still no longer than this."""
_NUM_REMEMBERED = 16
"""Rounds whose average is the length of a rest."""


@dataclass(frozen=True, slots=True)
class Readers:
    """Those who read streams beside the engine, in threads that share one interpreter lock with it."""

    is_ready: Callable[[str], bool]
    """Whether a stream has taken its last output; until then its new text waits and comes in one piece."""
    wait_until_seen: Callable[[], None]
    """Return when the readers have had their turn with what was delivered."""


@dataclass(frozen=True, slots=True)
class OutputSink:
    """Where outputs go, straight from the text thread."""

    deliver: Callable[[list[RequestOutput]], None]
    readers: Readers | None = None
    """None: whoever reads does it between steps. Every token makes an output of its own then."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    """Notified when there is news for the step loop."""


@dataclass(frozen=True, slots=True)
class TextNews:
    """What the step loop has to hear."""

    judgements: dict[Completion, Judgement] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    """Requests whose last output has been delivered."""


class TextWorker:
    """Takes the tokens of every step in order, makes outputs of them, and says which texts have ended.

    A thread, and not a part of the step loop: at 256 streams the texts of a step take longer than the step itself.
    Outputs of one request are delivered in order. With readers beside the engine, this thread and theirs work at most
    half of the time: after a round of outputs they rest for as long as rounds have taken lately, and the tokens that
    come meanwhile are one piece of text in a later round. So the step loop gets the interpreter lock when it wants it,
    and 256 streams slow the steps down by a fraction instead of several times. Now and then a round takes several times
    as long as others, because the step loop takes in prompts; a rest as long as that one would double the gap in each
    text. A round is for a few streams only, those that have waited longest, so that rests are short. The first tokens
    of a text do not wait for the end of a rest.
    """

    def __init__(self, processor: OutputProcessor, sink: OutputSink) -> None:
        self.failure: BaseException | None = None
        """What ended the thread; it does nothing more then."""
        self._processor = processor
        self._sink = sink
        self._inbox: deque[Message | None] = deque()
        self._is_called = threading.Event()
        self._is_resting = False
        self._news = TextNews()
        self._undelivered: dict[Request, None] = {}  # whoever has waited longest leads
        self._judgements: dict[Completion, Judgement] = {}
        self._thread = threading.Thread(target=self._run, name="rose-texts", daemon=True)
        self._thread.start()

    @property
    def has_news(self) -> bool:
        """Whether ``take`` has something to tell."""
        return bool(self._news.judgements or self._news.finished or self.failure)

    def post(self, message: Message, *, is_urgent: bool = False) -> None:
        """Hand something over; returns at once. What is urgent is looked at during a rest, too."""
        self._inbox.append(message)
        if is_urgent or not self._is_resting:
            self._is_called.set()

    def take(self) -> TextNews:
        """Return what is new for the step loop.

        Raises:
            BaseException: the one that ended the thread.
        """
        if not self.has_news:
            return TextNews()
        with self._sink.changed:
            if self.failure is not None:
                raise self.failure
            news, self._news = self._news, TextNews()
        return news

    def wait(self) -> None:
        """Wait for news."""
        with self._sink.changed:
            self._sink.changed.wait_for(lambda: self.has_news)

    def stop(self) -> None:
        """Ask the thread to end; what it has not begun is dropped."""
        self._inbox.append(None)
        self._is_called.set()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    # From here on: in the text thread.

    def _run(self) -> None:
        readers = self._sink.readers
        try:
            if readers is None:
                self._work_at_once()
            else:
                self._work_half_of_the_time(readers)
        except BaseException as error:  # the step loop raises it: nobody else would hear of it
            with self._sink.changed:
                self.failure = error
                self._sink.changed.notify_all()

    def _work_at_once(self) -> None:
        """Every token makes an output of its own."""
        while (messages := self._take_messages(None)) is not None:
            for message in messages:
                self._process([message])
                self._deliver(list(self._undelivered))

    def _work_half_of_the_time(self, readers: Readers) -> None:
        rest_until, usual_s = 0.0, 0.0
        while (messages := self._take_messages(self._time_to_wait(rest_until))) is not None:
            start = time.perf_counter()
            self._process(messages)
            if start < rest_until:
                self._deliver([request for request in self._undelivered if not request.has_output])
                continue
            due = self._due(readers)
            self._deliver(due)
            if due:
                readers.wait_until_seen()
                now = time.perf_counter()
                took = now - start
                if took > _SHORT_ROUND_S or len(due) == _MAX_ROUND:
                    usual_s += (took - usual_s) / _NUM_REMEMBERED if usual_s else took
                    rest_until = now + min(usual_s, _MAX_REST_S)

    def _time_to_wait(self, rest_until: float) -> float | None:
        """Return for how many seconds nothing but a message is of interest; None for as long as it takes."""
        rest = rest_until - time.perf_counter()
        self._is_resting = rest > 0
        if self._is_resting:
            return rest
        return _RETRY_S if self._undelivered else None

    def _take_messages(self, seconds: float | None) -> list[Message] | None:
        """Return what has come, after ``seconds`` at the latest, or when called; None is the end."""
        # While resting, messages come without a call.
        if self._is_resting or not self._inbox:
            self._is_called.wait(seconds)
        self._is_resting = False
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
            requests, judged = self._processor.process(message)
            self._undelivered.update(dict.fromkeys(requests))
            self._judgements |= judged

    def _due(self, readers: Readers) -> list[Request]:
        """Return who gets text in this round."""
        is_ready = readers.is_ready
        ready = (each for each in self._undelivered if each.is_finished or is_ready(each.request_id))
        return list(islice(ready, _MAX_ROUND))

    def _deliver(self, due: list[Request]) -> None:
        """Deliver outputs of ``due``, and tell the step loop what has been found out."""
        for request in due:
            del self._undelivered[request]
        outputs = [self._processor.request_output(request) for request in due]
        finished = [output.request_id for output in outputs if output.finished]
        if not self._judgements and not finished:
            if outputs:
                self._sink.deliver(outputs)
            return
        # Together: who sees a last output finds the request gone, and who hears that it has gone finds its output.
        with self._sink.changed:
            self._news.judgements.update(self._judgements)
            self._news.finished.extend(finished)
            self._sink.deliver(outputs)
            self._sink.changed.notify_all()
        self._judgements = {}
