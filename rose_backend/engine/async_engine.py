"""AsyncEngine: many callers on event loops, one thread that runs the steps."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from rose_backend.config import EngineConfig
from rose_backend.engine.core import EngineCore
from rose_backend.engine.delivery import Delivery, Postman, Subscriber
from rose_backend.engine.engine_stats import EngineLoad, EngineStats
from rose_backend.engine.interpreter import begin_serving, end_serving
from rose_backend.engine.outputs import RequestOutput
from rose_backend.engine.request import Prompt, Request
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.engine.step_loop import Command, carry_out, step_and_hold
from rose_backend.engine.text_worker import OutputSink, Readers
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.errors import EngineDeadError, QueueFullError, RequestError


class AsyncEngine:
    """A model that serves any number of concurrent callers.

    ::

        engine = AsyncEngine("models/tiny-gpt2")
        async for output in engine.generate("The rose", SamplingParams(max_tokens=32)):
            print(output.outputs[0].delta_text, end="", flush=True)
        await engine.shutdown()

    Loading happens in the constructor, which blocks. Steps run in a thread of their own; callers only wait on queues.

    Args:
        model: local directory or Hugging Face id.
        **options: fields of ``EngineConfig``.

    Raises:
        ConfigError: unknown option (the nearest valid one is named) or bad value.
        ModelError: the model cannot be loaded.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.config = EngineConfig.from_mapping({"model": model, **options}, source="AsyncEngine")
        self._lock = threading.Condition()
        # Everything below is guarded by the lock; the core belongs to the step thread alone.
        self._inbox: deque[Command] = deque()
        self._subscribers: dict[str, Subscriber] = {}
        self._is_stopping = False
        self._death: EngineDeadError | None = None
        self._postman = Postman()
        readers = Readers(self._is_ready, self._postman.wait_until_seen)
        self._core = EngineCore(
            self.config, is_online=True, sink=OutputSink(self._deliver, readers, self._lock)
        )
        begin_serving()
        self._thread = threading.Thread(target=self._run, name="rose-engine", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> EngineStats:
        """Counters since the start, as of some moment during the latest step."""
        return self._core.stats

    @property
    def load(self) -> EngineLoad:
        """What is in use, as of some moment during the latest step."""
        return self._core.load

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._core.tokenizer

    @property
    def max_model_len(self) -> int:
        """Prompt plus output, in tokens."""
        return self._core.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids of the model are below it."""
        return self._core.factory.vocab_size

    @property
    def num_blocks(self) -> int:
        """KV blocks, the null block included."""
        return self._core.num_blocks

    @property
    def parts(self) -> dict[str, str]:
        """Every switch, and whether its part is in force."""
        return self._core.parts

    @property
    def is_running(self) -> bool:
        """False after a failure or ``shutdown``."""
        return self._death is None and not self._is_stopping

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Generate for one prompt and yield its output after every token, or after several if the caller takes longer.

        Each output holds everything so far; ``outputs[i].delta_text`` is the text that is new. The last one has
        ``finished`` set. Leaving the loop early, or cancelling the task, aborts the request.

        Args:
            prompt: a string, a list of token ids, or a dictionary as ``LLM.generate`` takes it.
            sampling_params: None takes the defaults.
            request_id: name for ``abort``; None makes one up.

        Raises:
            QueueFullError: as many requests wait as may. No other request notices.
            RequestError: the request is not allowed, or its id is in use. No other request notices.
            EngineDeadError: the engine failed or was shut down.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        self._check_running()
        request = self._core.factory.make(prompt, params, request_id=request_id, is_streaming=True)
        subscriber = Subscriber(asyncio.get_running_loop())
        self._submit(request, subscriber)
        is_over = False
        try:
            while not is_over:
                delivery = await subscriber.get()
                is_over = not isinstance(delivery, RequestOutput) or delivery.finished
                if isinstance(delivery, EngineDeadError):
                    raise _for_one_caller(delivery)
                if isinstance(delivery, RequestError):
                    raise delivery
                yield delivery
        finally:
            if not is_over:
                self._abandon(request.request_id, subscriber)

    async def abort(self, request_id: str) -> bool:
        """End a request; its ``generate`` yields a last output with ``finish_reason`` "abort".

        Returns:
            False for an id that no unfinished request has; then nothing has changed.
        """
        with self._lock:
            if request_id not in self._subscribers:
                return False
            self._inbox.append(request_id)
            self._lock.notify()
        return True

    async def shutdown(self) -> None:
        """Stop after the present step. Unfinished requests end with ``EngineDeadError``. May be repeated."""
        with self._lock:
            self._is_stopping = True
            self._lock.notify()
        await asyncio.to_thread(self._thread.join)

    def _check_running(self) -> None:
        if self._death is not None:
            raise _for_one_caller(self._death)
        if self._is_stopping:
            raise EngineDeadError("the engine was shut down")

    def _submit(self, request: Request, subscriber: Subscriber) -> None:
        with self._lock:
            self._check_running()
            num_waiting = self._core.num_waiting + sum(isinstance(item, Request) for item in self._inbox)
            if num_waiting >= self.config.max_queue_size:
                raise QueueFullError(
                    f"queue: got a request while {num_waiting} wait, allowed are {self.config.max_queue_size} "
                    "(max_queue_size)"
                )
            if request.request_id in self._subscribers:
                raise RequestError(
                    f"request_id: got {request.request_id!r}, which an unfinished request has",
                    parameter="request_id",
                )
            self._subscribers[request.request_id] = subscriber
            self._inbox.append(request)
            self._lock.notify()

    def _abandon(self, request_id: str, subscriber: Subscriber) -> None:
        with self._lock:
            # The id may belong to a later request by now.
            if self._subscribers.get(request_id) is subscriber:
                self._inbox.append(request_id)
                self._lock.notify()

    # From here on: in the step thread.

    def _run(self) -> None:
        try:
            while self._take_commands():
                step_and_hold(self._core)
            death = EngineDeadError("the engine was shut down")
        except BaseException as error:
            death = (
                error
                if isinstance(error, EngineDeadError)
                else EngineDeadError(f"the engine stopped: {error!r}")
            )
            if death is not error:
                death.__cause__ = error
        self._core.close()
        end_serving()
        with self._lock:
            self._death = death
            self._inbox.clear()
            orphans = list(self._subscribers.values())
            self._subscribers.clear()
        self._postman.post((subscriber, death) for subscriber in orphans)

    def _take_commands(self) -> bool:
        """Carry out what callers asked for, waiting while there is nothing to do. False: stop."""
        with self._lock:
            self._lock.wait_for(lambda: self._is_stopping or self._inbox or self._core.can_step)
            if self._is_stopping:
                return False
            # Under the lock, so that a caller never sees a request in neither the inbox nor the queue.
            refused: list[tuple[Subscriber, Delivery]] = [
                (self._subscribers.pop(request_id), error)
                for request_id, error in carry_out(self._core, self._inbox)
            ]
        self._postman.post(refused)
        return True

    # In the text thread.

    def _is_ready(self, request_id: str) -> bool:
        subscriber = self._subscribers.get(request_id)
        return subscriber is None or subscriber.has_taken_all

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        deliveries: list[tuple[Subscriber, RequestOutput]] = []
        for output in outputs:
            subscriber = self._subscribers.get(output.request_id)
            if subscriber is not None:
                deliveries.append((subscriber, output))
        finished = [output.request_id for output in outputs if output.finished]
        if finished:
            with self._lock:
                for request_id in finished:
                    self._subscribers.pop(request_id, None)
        for subscriber, delivery in self._postman.post(deliveries):
            if isinstance(delivery, RequestOutput):
                self._abandon(delivery.request_id, subscriber)


def _for_one_caller(death: EngineDeadError) -> EngineDeadError:
    """Return an exception of the caller's own: tracebacks of several callers must not pile up in one object."""
    error = EngineDeadError(str(death))
    error.__cause__ = death.__cause__ or death
    return error
