"""AsyncEngine: many callers on event loops, one thread that runs the steps (``StepLoop``)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Any

from rose_backend.config import EngineConfig
from rose_backend.engine.client import Delivery, EngineClient, OutputStream
from rose_backend.engine.core import Command, EngineCore
from rose_backend.engine.output_thread import OutputHandler
from rose_backend.engine.outputs import Counters, EngineLoad, EngineStats, GrowingCompletions, RequestOutput
from rose_backend.engine.process_settings import begin_serving, end_serving
from rose_backend.engine.request import (
    LoRARequest,
    ProcessedInput,
    Prompt,
    Request,
    UnloadAdapter,
    sampling_defaults,
)
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.engine.tokenizer_loading import PendingTokenizer
from rose_backend.errors import EngineDeadError, RequestError

logger = logging.getLogger(__name__)


class AsyncEngine(EngineClient):
    """A model that serves any number of concurrent callers::

        engine = AsyncEngine("models/tiny-gpt2")
        async for output in engine.generate("The rose", SamplingParams(max_tokens=32)):
            print(output.outputs[0].delta_text, end="", flush=True)
        await engine.shutdown()

    Loading happens in the constructor, which blocks. Steps run in a separate thread; callers only wait on queues.

    Args:
        model: local directory or Hugging Face id.
        **options: fields of ``EngineConfig``.

    Raises:
        ConfigError: unknown option (the nearest valid one is named) or bad value.
        ModelError: the model cannot be loaded.
    """

    def __init__(self, model: str, **options: Any) -> None:
        config = EngineConfig.from_mapping({"model": model, **options}, source="AsyncEngine")
        self._defaults = sampling_defaults(config)
        self._dispatcher = OutputDispatcher()
        handler = OutputHandler(self._deliver, self._is_ready, self._dispatcher.wait_until_consumed)
        # One lock for all: outputs are delivered, and requests ended, with it held.
        super().__init__(handler.changed)
        self._steps = StepLoop(config, handler)
        self._core = core = self._steps.core
        self.config = config
        self.tokenizer = core.input_processor.tokenizer
        self.input_processor = core.input_processor
        self.max_model_len = core.input_processor.max_model_len
        """Prompt plus output, in tokens."""
        self.vocab_size = core.input_processor.vocab_size
        """Token ids of the model are below it."""
        self.num_blocks = core.num_blocks
        self.feature_status = core.feature_status
        """Every switch, and whether its part is active."""
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
        """Return both."""
        return self._core.counters

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Generate for one prompt and yield its output after every token, or after several if the caller takes longer.

        Each output holds all tokens so far; ``outputs[i].delta_text`` is the text that is new. The last one has
        ``finished`` set. Leaving the loop early, or cancelling the task, aborts the request.

        Args:
            prompt: as for ``LLM.generate``.
            sampling_params: None takes those of the model, see ``LLM.get_default_sampling_params``.
            request_id: name for ``abort``; None makes one up.
            lora_request: an adapter, which is loaded before if it is not; a slot has to be free then.

        Raises:
            QueueFullError: the queue is full (max_queue_size).
            RequestError: the request or its adapter is not allowed, or its id is in use.
            EngineDeadError: the engine failed or was shut down.
        """
        self._check_running()
        if sampling_params is None:
            checked = self._defaults.process_all(self.input_processor, [prompt])[0]
        else:
            checked = self.input_processor.process(prompt, sampling_params)
        if lora_request is not None:
            await self.load_adapter(lora_request)
            # It may have been unloaded while this task waited for its turn.
            while not self._core.adapter_table().has(lora_request):
                await self.load_adapter(lora_request)
            checked = checked._replace(lora_id=lora_request.lora_int_id)
        completions = GrowingCompletions()
        async with aclosing(self.generate_deltas(checked, request_id=request_id)) as outputs:
            async for output in outputs:
                completions.add(output.outputs)
                output.outputs = completions.snapshot()
                yield output

    async def load_adapter(self, lora: LoRARequest) -> None:
        """Do what ``EngineClient.load_adapter`` does."""
        self._check_running()
        if not isinstance(lora, LoRARequest):
            raise RequestError(
                f"lora_request: got {type(lora).__name__}, allowed is a LoRARequest", parameter="lora_request"
            )
        await asyncio.to_thread(self._core.adapter_table().load, lora)

    def unload_adapter(self, lora_id: int) -> None:
        """Do what ``EngineClient.unload_adapter`` does."""
        self._core.adapter_table()  # where there is none, the caller learns of it, not the step loop
        self._steps.put(UnloadAdapter(lora_id))

    async def shutdown(self) -> None:
        """Stop after the present step; unfinished requests end with ``EngineDeadError``. May be repeated."""
        with self._lock:
            self._is_stopping = True
            self._steps.stop()
        await asyncio.to_thread(self._thread.join)

    def _submit(self, prompt: ProcessedInput, stream: OutputStream) -> None:
        request = self.input_processor.build(prompt, request_id=stream.request_id, is_streaming=True)
        with self._lock:
            # A step may take long: what comes meanwhile is bounded, too.
            self._core.check_queue(self._steps.num_requests)
            self._register(stream)
            self._steps.put(request)

    def _end(self, stream: OutputStream) -> None:
        self._steps.put(stream.request_id)

    # In the step thread.

    def _run(self) -> None:
        try:
            self._steps.run(self._refuse)
            death = EngineDeadError("the engine was shut down")
        except EngineDeadError as error:
            death = error
            logger.error("the engine has died", exc_info=error)
        except BaseException as error:
            death = EngineDeadError(f"the engine stopped: {error!r}")
            death.__cause__ = error
            logger.error("the engine has died", exc_info=error)
        end_serving()
        with self._lock:
            self._death = death
            orphans = self._take_all()
        self._dispatcher.post((stream, death) for stream in orphans)

    def _refuse(self, request_id: str, error: RequestError) -> None:
        with self._lock:
            stream = self._streams.pop(request_id)
        self._dispatcher.post([(stream, error)])

    # In the output thread.

    def _is_ready(self, request_id: str) -> bool:
        stream = self._streams.get(request_id)
        return stream is None or stream.has_consumed_all

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        deliveries: list[tuple[OutputStream, Delivery]] = []
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                deliveries.append((stream, output))
        finished = [output.request_id for output in outputs if output.finished]
        if finished:
            with self._lock:
                for request_id in finished:
                    self._streams.pop(request_id, None)
        for stream, _ in self._dispatcher.post(deliveries):
            self._abandon(stream)


_MAX_LAG_S = 0.05
"""Longest wait for an event loop that is busy with other work."""


class OutputDispatcher:
    """Passes deliveries to event loops, with one wake-up for all of a loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open = 0
        self._is_quiet = threading.Event()
        self._is_quiet.set()

    def post(
        self, deliveries: Iterable[tuple[OutputStream, Delivery]]
    ) -> list[tuple[OutputStream, Delivery]]:
        """Queue deliveries, from any thread; returns those whose loop is closed."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, Delivery]]] = defaultdict(list)
        for stream, delivery in deliveries:
            stream.num_posted += 1
            by_loop[stream.loop].append((stream, delivery))
        unreachable: list[tuple[OutputStream, Delivery]] = []
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

    def _put_all(self, loop: asyncio.AbstractEventLoop, batch: list[tuple[OutputStream, Delivery]]) -> None:
        for stream, delivery in batch:
            stream.put(delivery)
        # Runs after the callers' tasks, which have just become ready.
        loop.call_soon(self._count, -1)

    def _count(self, change: int) -> None:
        with self._lock:
            self._num_open += change
            if self._num_open:
                self._is_quiet.clear()
            else:
                self._is_quiet.set()


class StepLoop:
    """Runs the steps of one engine in the thread that calls ``run``; any thread gives it commands.

    Args:
        handler: gets outputs with what is new.
        tokenizer: of the model, if something else loads it.

    Raises:
        ConfigError: the options do not fit the model or the machine.
        ModelError: the model cannot be loaded.
    """

    def __init__(
        self,
        config: EngineConfig,
        handler: OutputHandler,
        tokenizer: PendingTokenizer | None = None,
    ) -> None:
        self._changed = handler.changed
        # Both guarded by the condition above; the core belongs to the thread of ``run`` alone.
        self._inbox: deque[Command] = deque()
        self._is_stopping = False
        self.core = EngineCore(config, output_handler=handler, tokenizer=tokenizer)

    @property
    def num_requests(self) -> int:
        """Requests that the next step will add."""
        with self._changed:
            return sum(isinstance(each, Request) for each in self._inbox)

    def put(self, command: Command) -> None:
        """Queue a command for the next step."""
        if isinstance(command, UnloadAdapter) and self.core.adapters is not None:
            self.core.adapters.announce_unload(command.lora_id)
        with self._changed:
            self._inbox.append(command)
            self._changed.notify()

    def stop(self) -> None:
        """Let ``run`` return after the present step."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()

    def run(self, refuse: Callable[[str, RequestError], None]) -> None:
        """Run steps until ``stop`` is called, then close the engine.

        Args:
            refuse: called with the id of a request that the engine does not take, and the reason.

        Raises:
            EngineDeadError: a step failed.
        """
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_stopping or self._inbox or self.core.can_step)
                    if self._is_stopping:
                        return
                    refused = self.core.carry_out(self._inbox)
                for request_id, error in refused:
                    refuse(request_id, error)
                self.core.step()
        finally:
            self.core.close()
            with self._changed:
                self._inbox.clear()
