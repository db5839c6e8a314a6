"""The thread that makes texts, so that the step loop never waits for one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from rose_backend.engine.output_processor import Abort, Judgement, NewTokens, OutputProcessor
from rose_backend.engine.outputs import RequestOutput
from rose_backend.engine.request import Completion, Request

Message = NewTokens | Abort

_RETRY_S = 0.01
"""How soon a stream that was not ready for an output is looked at again when no step comes before."""
_SHORT_ROUND_S = 200e-6
"""A round that took less holds nobody up; rests begin behind that."""
_MAX_REST_S = 0.02
"""However long a round took, texts stand still no longer than this."""


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
    half of the time: after a round of outputs they rest for as long as it took, and the tokens that come meanwhile
    are one piece of text in the next round. So the step loop gets the interpreter lock when it wants it, and 256
    streams slow the steps down by a fraction instead of several times.
    """

    def __init__(self, processor: OutputProcessor, sink: OutputSink) -> None:
        self.failure: BaseException | None = None
        """What ended the thread; it does nothing more then."""
        self._processor = processor
        self._sink = sink
        self._inbox: SimpleQueue[Message | None] = SimpleQueue()
        self._news = TextNews()
        self._undelivered: dict[Request, None] = {}
        self._thread = threading.Thread(target=self._run, name="rose-texts", daemon=True)
        self._thread.start()

    @property
    def has_news(self) -> bool:
        """Whether ``take`` has something to tell."""
        return bool(self._news.judgements or self._news.finished or self.failure)

    def post(self, message: Message) -> None:
        """Hand something over; returns at once."""
        self._inbox.put(message)

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
        self._inbox.put(None)

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    # From here on: in the text thread.

    def _run(self) -> None:
        try:
            while (messages := self._take_messages()) is not None:
                if self._sink.readers is None:
                    for message in messages:
                        self._work([message])
                else:
                    self._work_half_of_the_time(messages, self._sink.readers)
        except BaseException as error:  # the step loop raises it: nobody else would hear of it
            with self._sink.changed:
                self.failure = error
                self._sink.changed.notify_all()

    def _take_messages(self) -> list[Message] | None:
        messages: list[Message] = []
        try:
            message = self._inbox.get(timeout=_RETRY_S if self._undelivered else None)
            while message is not None:
                messages.append(message)
                message = self._inbox.get_nowait()
        except Empty:
            return messages
        return None

    def _work_half_of_the_time(self, messages: list[Message], readers: Readers) -> None:
        start = time.perf_counter()
        if self._work(messages):
            readers.wait_until_seen()
            busy = time.perf_counter() - start
            if busy > _SHORT_ROUND_S:
                time.sleep(min(busy, _MAX_REST_S))

    def _work(self, messages: list[Message]) -> bool:
        """Take ``messages`` in and deliver what is due; returns whether there was anything."""
        judgements: dict[Completion, Judgement] = {}
        for message in messages:
            requests, judged = self._processor.process(message)
            self._undelivered.update(dict.fromkeys(requests))
            judgements |= judged
        readers = self._sink.readers
        due = [
            request
            for request in self._undelivered
            if readers is None or request.is_finished or readers.is_ready(request.request_id)
        ]
        for request in due:
            del self._undelivered[request]
        outputs = [self._processor.request_output(request) for request in due]
        finished = [output.request_id for output in outputs if output.finished]
        if not judgements and not finished:
            self._sink.deliver(outputs)
            return bool(outputs)
        # Together: who sees a last output finds the request gone, and who hears that it has gone finds its output.
        with self._sink.changed:
            self._news.judgements.update(judgements)
            self._news.finished.extend(finished)
            self._sink.deliver(outputs)
            self._sink.changed.notify_all()
        return bool(outputs)
