"""AsyncEngine: many callers on event loops, one thread that runs the steps."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any

from rose_backend.config import EngineConfig
from rose_backend.engine.core import Command, EngineCore
from rose_backend.engine.engine_stats import Counters, EngineLoad, EngineStats
from rose_backend.engine.generation_config import sampling_defaults
from rose_backend.engine.input_processor import ProcessedInput
from rose_backend.engine.output.output_thread import OutputHandler, StreamConsumers
from rose_backend.engine.outputs import GrowingCompletions, RequestOutput
from rose_backend.engine.process_settings import begin_serving, end_serving
from rose_backend.engine.request import Prompt, Request, check_queue, check_request_id
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.errors import EngineDeadError, RequestError

logger = logging.getLogger(__name__)


class AsyncEngine:
    """A model that serves any number of concurrent callers::

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
        self._defaults = sampling_defaults(self.config)
        self._lock = threading.Condition()
        # Everything below is guarded by the lock; the core belongs to the step thread alone.
        self._inbox: deque[Command] = deque()
        self._subscribers: dict[str, Subscriber] = {}
        self._is_stopping = False
        self._death: EngineDeadError | None = None
        self._dispatcher = OutputDispatcher()
        consumers = StreamConsumers(self._is_ready, self._dispatcher.wait_until_consumed)
        self._core = EngineCore(
            self.config, is_online=True, output_handler=OutputHandler(self._deliver, consumers, self._lock)
        )
        self.tokenizer = self._core.tokenizer
        self.input_processor = self._core.input_processor
        """Tokenizes and checks prompts, in any thread."""
        self.max_model_len = self._core.max_model_len
        """Prompt plus output, in tokens."""
        self.vocab_size = self.input_processor.vocab_size
        """Token ids of the model are below it."""
        self.num_blocks = self._core.num_blocks
        """KV blocks, the null block included."""
        self.feature_status = self._core.feature_status
        """Every switch, and whether its part is in force."""
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

    async def counters(self) -> Counters:
        """Return both, as an engine in a process of its own does."""
        return Counters(self.stats, self.load)

    @property
    def is_running(self) -> bool:
        """False after a failure or ``shutdown``."""
        return self._death is None and not self._is_stopping

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Generate for one prompt and yield its output after every token, or after several if the caller takes longer.

        Each output holds all tokens so far; ``outputs[i].delta_text`` is the text that is new. The last one has
        ``finished`` set. Leaving the loop early, or cancelling the task, aborts the request.

        Args:
            prompt: as for ``LLM.generate``.
            sampling_params: None takes those of the model, see ``LLM.get_default_sampling_params``.
            request_id: name for ``abort``; None makes one up.

        Raises:
            QueueFullError: the queue is full (max_queue_size).
            RequestError: the request is not allowed, or its id is in use.
            EngineDeadError: the engine failed or was shut down.
        """
        self._check_running()
        if sampling_params is None:
            checked = self._defaults.process_all(self.input_processor, [prompt])[0]
        else:
            checked = self.input_processor.process(prompt, sampling_params)
        completions = GrowingCompletions()
        async with aclosing(self.generate_deltas(checked, request_id=request_id)) as outputs:
            async for output in outputs:
                completions.add(output.outputs)
                output.outputs = completions.snapshot()
                yield output

    async def generate_deltas(
        self, prompt: ProcessedInput, *, request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Do what ``generate`` does with outputs that hold only what is new since the previous one.

        Args:
            prompt: an answer of ``input_processor`` that is used once.
        """
        self._check_running()
        request = self.input_processor.build(prompt, request_id=request_id, is_streaming=True)
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
        """End a request: ``generate`` yields a last output with ``finish_reason`` "abort". False for an unknown id."""
        with self._lock:
            if request_id not in self._subscribers:
                return False
            self._inbox.append(request_id)
            self._lock.notify()
        return True

    async def shutdown(self) -> None:
        """Stop after the present step; unfinished requests end with ``EngineDeadError``. May be repeated."""
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
            check_queue(num_waiting, self.config.max_queue_size)
            check_request_id(request.request_id, self._subscribers)
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
                self._core.step()
            death = EngineDeadError("the engine was shut down")
        except EngineDeadError as error:
            death = error
            logger.error("the engine has died", exc_info=error)
        except BaseException as error:
            death = EngineDeadError(f"the engine stopped: {error!r}")
            death.__cause__ = error
            logger.error("the engine has died", exc_info=error)
        self._core.close()
        end_serving()
        with self._lock:
            self._death = death
            self._inbox.clear()
            orphans = list(self._subscribers.values())
            self._subscribers.clear()
        self._dispatcher.post((subscriber, death) for subscriber in orphans)

    def _take_commands(self) -> bool:
        """Wait until there is work, and process queued commands. False: stop."""
        with self._lock:
            self._lock.wait_for(lambda: self._is_stopping or self._inbox or self._core.can_step)
            if self._is_stopping:
                return False
            # Under the lock, so that a caller never sees a request in neither the inbox nor the queue.
            refused: list[tuple[Subscriber, Delivery]] = [
                (self._subscribers.pop(request_id), error)
                for request_id, error in self._core.carry_out(self._inbox)
            ]
        self._dispatcher.post(refused)
        return True

    # In the output thread.

    def _is_ready(self, request_id: str) -> bool:
        subscriber = self._subscribers.get(request_id)
        return subscriber is None or subscriber.has_consumed_all

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        deliveries: list[tuple[Subscriber, RequestOutput]] = []
        for output in outputs:
            if (subscriber := self._subscribers.get(output.request_id)) is not None:
                deliveries.append((subscriber, output))
        finished = [output.request_id for output in outputs if output.finished]
        if finished:
            with self._lock:
                for request_id in finished:
                    self._subscribers.pop(request_id, None)
        for subscriber, delivery in self._dispatcher.post(deliveries):
            if isinstance(delivery, RequestOutput):
                self._abandon(delivery.request_id, subscriber)


def _for_one_caller(death: EngineDeadError) -> EngineDeadError:
    """Return a new exception for one caller: tracebacks of several callers must not accumulate in one object."""
    error = EngineDeadError(str(death))
    error.__cause__ = death.__cause__ or death
    return error


Delivery = RequestOutput | RequestError | EngineDeadError

_MAX_LAG_S = 0.05
"""Longest wait for an event loop that is busy with other work."""


class Subscriber:
    """Queue of one request's outputs for its caller, on an event loop; cheaper than asyncio's."""

    __slots__ = ("_deliveries", "_num_taken", "_waiter", "loop", "num_posted")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._deliveries: deque[Delivery] = deque()
        self._waiter: asyncio.Future[None] | None = None
        # Each is counted by one thread alone.
        self.num_posted = 0
        self._num_taken = 0

    @property
    def has_consumed_all(self) -> bool:
        """Whether every delivery was taken out. For any thread."""
        return self.num_posted == self._num_taken

    def put(self, delivery: Delivery) -> None:
        """Queue a delivery for the caller. In the loop's thread."""
        self._deliveries.append(delivery)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Delivery:
        """Return the next delivery."""
        while not self._deliveries:
            self._waiter = self.loop.create_future()
            await self._waiter
        self._num_taken += 1
        return self._deliveries.popleft()


class OutputDispatcher:
    """Passes deliveries to event loops, with one wake-up for all of a loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open = 0
        self._is_quiet = threading.Event()
        self._is_quiet.set()

    def post(self, deliveries: Iterable[tuple[Subscriber, Delivery]]) -> list[tuple[Subscriber, Delivery]]:
        """Queue deliveries, from any thread; returns those whose loop is closed."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Subscriber, Delivery]]] = defaultdict(list)
        for subscriber, delivery in deliveries:
            subscriber.num_posted += 1
            by_loop[subscriber.loop].append((subscriber, delivery))
        unreachable: list[tuple[Subscriber, Delivery]] = []
        for loop, batch in by_loop.items():
            self._count(1)
            try:
                loop.call_soon_threadsafe(self._put_all, loop, batch)
            except RuntimeError:  # the loop is closed
                self._count(-1)
                unreachable.extend(batch)
        return unreachable

    def wait_until_consumed(self) -> None:
        """Wait until callers had a chance to process what was posted, for at most ``_MAX_LAG_S``."""
        self._is_quiet.wait(_MAX_LAG_S)

    def _put_all(self, loop: asyncio.AbstractEventLoop, batch: list[tuple[Subscriber, Delivery]]) -> None:
        for subscriber, delivery in batch:
            subscriber.put(delivery)
        # Runs after the callers' tasks, which have just become ready.
        loop.call_soon(self._count, -1)

    def _count(self, change: int) -> None:
        with self._lock:
            self._num_open += change
            if self._num_open:
                self._is_quiet.clear()
            else:
                self._is_quiet.set()
