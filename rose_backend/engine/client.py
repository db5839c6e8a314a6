"""The client of an engine, wherever its steps run: the requests under way, and a stream of outputs for each."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TypeAlias

from rose_backend.config import EngineConfig
from rose_backend.engine.outputs import Counters, GrowingCompletions, PromptLogprobs, RequestOutput
from rose_backend.engine.request import InputProcessor, LoRARequest, ProcessedInput, check_request_id
from rose_backend.errors import EngineDeadError, EngineStalledError, RequestError

Delivery: TypeAlias = RequestOutput | RequestError | EngineDeadError
"""What is new in a request, or why there will be nothing more."""


@dataclass(slots=True, eq=False)
class OutputStream:
    """Outputs of one request for its reader; those that it has not taken yet are merged into one.

    Args:
        loop: of the reader. All but ``has_consumed_all`` belongs to its thread.
    """

    request_id: str
    loop: asyncio.AbstractEventLoop
    prompt: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    """Of an engine whose answers come without prompts; shared by all outputs."""
    num_posted: int = 0
    """Deliveries that another thread has scheduled for ``put``; counted by that thread alone."""
    _num_put: int = 0
    _num_taken: int = 0
    _latest: RequestOutput | None = None
    # What is new in the latest output and in those before it, where there were any.
    _completions: GrowingCompletions = field(default_factory=GrowingCompletions)
    _is_merged: bool = False
    _failure: RequestError | EngineDeadError | None = None
    _waiter: asyncio.Future[None] | None = None

    @property
    def has_consumed_all(self) -> bool:
        """Whether everything that was posted has been taken. For any thread."""
        return self.num_posted == self._num_taken

    def put(self, delivery: Delivery) -> None:
        """Add what is new, or let ``get`` raise an error after what has been put so far."""
        if isinstance(delivery, RequestOutput):
            # Merged at once: outputs in a queue would take many times the memory.
            if self._latest is not None:
                if not self._is_merged:
                    self._completions.add(self._latest.outputs)
                self._completions.add(delivery.outputs)
                self._is_merged = True
            self._latest = delivery
        else:
            self._failure = delivery
        self._num_put += 1
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> RequestOutput:
        """Wait for an output and return all that is new since the previous call.

        Raises:
            RequestError: it was refused.
            EngineDeadError: the engine failed or was shut down.
        """
        while self._latest is None:
            if self._failure is not None:
                raise _for_one_caller(self._failure)
            self._waiter = self.loop.create_future()
            await self._waiter
        output, self._latest = self._latest, None
        self._num_taken = self._num_put
        if self._is_merged:
            output.outputs = self._completions.take()
            self._is_merged = False
        return output


class EngineClient(ABC):
    """Any number of concurrent requests to one engine.

    A subclass is the transport to the engine: it sends requests and their ends there (``_submit``, ``_end``), puts what
    the engine answers into streams, and takes the stream of a request that has ended out of ``_streams``.
    """

    config: EngineConfig
    """With a value for each option that was left open."""
    input_processor: InputProcessor
    """Tokenizes and checks prompts, in any thread."""
    num_blocks: int
    """KV blocks, the null block included."""
    is_stalled = False
    """The engine runs, but does not answer. Requests wait; it may go on."""

    def __init__(self, lock: threading.Condition) -> None:
        self._lock = lock
        # Everything below is guarded by the lock.
        # By id, until the engine has sent the last output, also of requests whose reader has gone.
        self._streams: dict[str, OutputStream] = {}
        self._is_stopping = False
        self._death: EngineDeadError | None = None

    @property
    def is_running(self) -> bool:
        """False after a failure or ``shutdown``."""
        return self._death is None and not self._is_stopping

    async def start(self) -> None:  # noqa: B027
        """Serve requests of the running event loop, where that has to be known before the first request."""

    async def generate_deltas(
        self, prompt: ProcessedInput, *, request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one prompt, each with what is new since the previous one. Closing it aborts the request.

        Args:
            prompt: an answer of ``input_processor`` that is used once.
            request_id: name for ``abort``; None makes one up.

        Raises:
            QueueFullError: the queue is full (max_queue_size).
            RequestError: the request is not allowed, or its id is in use.
            EngineDeadError: the engine failed or was shut down.
            EngineStalledError: the engine does not answer.
        """
        await self.wait_for_room()
        if request_id is None:
            request_id = f"request-{prompt.number}"
        stream = OutputStream(request_id, asyncio.get_running_loop())
        self._submit(prompt, stream)
        is_over = False
        try:
            while not is_over:
                output = await stream.get()
                is_over = output.finished
                yield output
        finally:
            if not is_over:
                self._abandon(stream)

    async def wait_for_room(self) -> None:
        """Wait while the engine has too much to read; else return at once.

        Raises:
            EngineDeadError: the engine failed or was shut down.
            EngineStalledError: the engine does not answer.
        """
        self._check_running()

    async def abort(self, request_id: str) -> bool:
        """End a request: its stream yields a last output with ``finish_reason`` "abort". False for an unknown id."""
        with self._lock:
            stream = self._streams.get(request_id)
            if stream is not None:
                self._end(stream)
        return stream is not None

    @abstractmethod
    async def counters(self) -> Counters:
        """Return counters and present load; of an engine that has died or does not answer, the last ones known."""

    @abstractmethod
    async def load_adapter(self, lora: LoRARequest) -> None:
        """Load an adapter; prompts with its ``lora_id`` are answered with it when this returns.

        Raises:
            RequestError: see ``AdapterTable.load``.
            EngineDeadError: the engine failed or was shut down.
        """

    @abstractmethod
    def unload_adapter(self, lora_id: int) -> None:
        """Let no prompt that is submitted from now on use an adapter."""

    @abstractmethod
    async def shutdown(self) -> None:
        """Stop after the present step; unfinished requests end with ``EngineDeadError``. May be repeated."""

    @abstractmethod
    def _submit(self, prompt: ProcessedInput, stream: OutputStream) -> None:
        """Register a stream and send its request."""

    @abstractmethod
    def _end(self, stream: OutputStream) -> None:
        """Tell the engine to end a request. Called with the lock."""

    def _check_running(self) -> None:
        if self._death is not None:
            raise _for_one_caller(self._death)
        if self._is_stopping:
            raise EngineDeadError("the engine was shut down")
        if self.is_stalled:
            raise EngineStalledError

    def _register(self, stream: OutputStream) -> None:
        """Add a stream. Called with the lock."""
        self._check_running()
        check_request_id(stream.request_id, self._streams)
        self._streams[stream.request_id] = stream

    def _abandon(self, stream: OutputStream) -> None:
        """End a request that nobody reads any more, unless it has ended or failed."""
        with self._lock:
            # The id may belong to a later request by now.
            if self._streams.get(stream.request_id) is stream:
                self._end(stream)

    def _take_all(self) -> list[OutputStream]:
        """Take all streams out, to let them fail."""
        with self._lock:
            streams = list(self._streams.values())
            self._streams.clear()
        return streams


def _for_one_caller(error: RequestError | EngineDeadError) -> RequestError | EngineDeadError:
    """Return a new exception where several callers get it: their tracebacks must not accumulate in one object."""
    if isinstance(error, RequestError):
        return error
    own = EngineDeadError(str(error))
    own.__cause__ = error.__cause__ or error
    return own
