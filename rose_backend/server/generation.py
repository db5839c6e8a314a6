"""The prompts of one HTTP request in the engine, and sending the answer, which ends when the client disconnects."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TypeAlias

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from rose_backend.engine.outputs import RequestOutput
from rose_backend.engine.request import ProcessedInput
from rose_backend.errors import EngineDeadError, GenerationError, RequestError
from rose_backend.server.answers import Answer
from rose_backend.server.error_answers import CLIENT_LEFT, as_api_error
from rose_backend.server.service import RequestRecord, Service

PromptOutput: TypeAlias = tuple[int, RequestOutput]
"""Index of the prompt, and its output."""

_numbers = itertools.count()
_STARTS_PER_TURN = 16
"""Prompts of one request that are submitted in one turn of the event loop; that takes about a millisecond."""
_NO_TOKEN = "the model's logits for this request are all NaN or minus infinity, so no token can be chosen"
_HEADERS = [
    (b"cache-control", b"no-cache"),
    # Proxies like nginx would buffer events.
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
]


class Generation:
    """Submits all prompts and merges their outputs.

    Args:
        record: gets token counts, times and finish reasons.
        inputs: one for each prompt.
    """

    def __init__(self, service: Service, record: RequestRecord, inputs: list[ProcessedInput]) -> None:
        self._service = service
        self._record = record
        self._inputs = inputs
        # Clients may repeat an id, the engine's must be unique.
        self._name = f"{record.request_id}-{next(_numbers)}"
        self._submit_s = [0.0] * len(inputs)
        # Of each completion of each prompt.
        self._num_tokens: list[dict[int, int]] = [{} for _ in inputs]
        self._finish_reasons: list[list[str]] = [[] for _ in inputs]
        self._first_s = [0.0] * len(inputs)
        self._last_s = [0.0] * len(inputs)

    def outputs(self) -> AsyncGenerator[PromptOutput, None]:
        """Yield every output of every prompt, each with what is new. Closing the iterator aborts what is unfinished.

        Raises:
            RequestError: the queue is full; then none of them runs on.
            EngineDeadError: the engine failed or was shut down.
            GenerationError: it could not go on with one of the completions; then none of them runs on.
        """
        # Each further generator would cost time for every event of every stream.
        return self._one(0) if len(self._inputs) == 1 else self._all()

    async def _one(self, index: int) -> AsyncGenerator[PromptOutput, None]:
        request_id = f"{self._name}-{index}"
        running = self._service.engine_request_ids
        running.add(request_id)
        self._submit_s[index] = time.monotonic()
        stream = self._service.engine.generate_deltas(self._inputs[index], request_id=request_id)
        is_over = False
        try:
            async with aclosing(stream):
                async for output in stream:
                    self._observe(index, output)
                    is_over = output.finished
                    yield index, output
        except (asyncio.CancelledError, GeneratorExit):
            # The client has disconnected.
            if not is_over:
                self._count_ends("abort", self._inputs[index].params.n)
            raise
        finally:
            running.discard(request_id)

    async def _all(self) -> AsyncGenerator[PromptOutput, None]:
        # While the client does not read, outputs are merged before they enter this queue.
        queue: asyncio.Queue[PromptOutput | Exception] = asyncio.Queue(len(self._inputs))

        async def pump(index: int) -> None:
            try:
                async for output in self._one(index):
                    await queue.put(output)
            except Exception as error:  # raised again below, in the consumer's task
                await queue.put(error)

        tasks: list[asyncio.Task[None]] = []
        num_unfinished = len(self._inputs)
        try:
            # Where large requests come at once, each enters the engine's queue whole: if they took turns, a queue that
            # has room for most of them would be full before any was in it, and all would be refused.
            async with self._service.submission:
                for index in range(num_unfinished):
                    tasks.append(asyncio.create_task(pump(index)))
                    if len(tasks) % _STARTS_PER_TURN == 0:
                        await asyncio.sleep(0)
                await asyncio.sleep(0)
            while num_unfinished:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                num_unfinished -= item[1].finished
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _observe(self, index: int, output: RequestOutput) -> None:
        """Count an output's new tokens."""
        now, record, metrics = time.monotonic(), self._record, self._service.metrics
        num_tokens, num_new, failure = self._num_tokens[index], 0, ""
        # Runs for every event of every stream: a generator would take as long as all the rest.
        for completion in output.outputs:
            num_new += len(completion.token_ids)
            num_before = num_tokens.get(completion.index, 0)
            num_tokens[completion.index] = num_before + len(completion.token_ids)
            if completion.finish_reason is not None:
                self._finish_reasons[index].append(completion.finish_reason)
                if completion.finish_reason == "error":
                    failure = str(completion.stop_reason or _NO_TOKEN)
        if not self._last_s[index]:
            record.num_prompt_tokens += len(output.prompt_token_ids)
            unit = self._service.hit_unit
            record.num_cached_tokens += output.num_cached_tokens // unit * unit
        if num_new and not self._first_s[index]:
            metrics.histograms["time_to_first_token_seconds"].observe(now - record.start_s)
            metrics.prompt_tokens.inc(len(output.prompt_token_ids))
            self._first_s[index] = now
            if record.first_token_s is None:
                record.first_token_s = now
        elif num_new:
            metrics.histograms["inter_token_latency_seconds"].observe(now - self._last_s[index])
        record.num_output_tokens += num_new
        self._last_s[index] = now
        if failure:
            reasons = self._finish_reasons[index]
            reasons += ["abort"] * (self._inputs[index].params.n - len(reasons))
            for reason in reasons:
                self._count_ends(reason, 1)
            raise GenerationError(failure)
        if output.finished:
            self._observe_end(index, output, now)

    def _observe_end(self, index: int, output: RequestOutput, now: float) -> None:
        histograms = self._service.metrics.histograms
        for reason in self._finish_reasons[index]:
            self._count_ends(reason, 1)
        histograms["e2e_request_latency_seconds"].observe(now - self._record.start_s)
        nums_tokens = self._num_tokens[index].values()
        max_num_tokens = max(nums_tokens, default=0)
        if max_num_tokens > 1:
            histograms["request_time_per_output_token_seconds"].observe(
                (now - self._first_s[index]) / (max_num_tokens - 1)
            )
        if max_num_tokens and output.scheduled_s is not None:
            histograms["request_queue_time_seconds"].observe(output.scheduled_s - self._submit_s[index])
            histograms["request_prefill_time_seconds"].observe(self._first_s[index] - output.scheduled_s)
            histograms["request_decode_time_seconds"].observe(now - self._first_s[index])
            histograms["request_prompt_tokens"].observe(len(output.prompt_token_ids))
            histograms["request_max_num_generation_tokens"].observe(max_num_tokens)
            for num_tokens in nums_tokens:
                histograms["request_generation_tokens"].observe(num_tokens)
        if self._service.tracing is not None:
            self._service.tracing.note_prompt(
                self._record.trace_headers, self._record.start_s, self._span_attributes(index, output, now)
            )

    def _span_attributes(
        self, index: int, output: RequestOutput, now: float
    ) -> dict[str, str | float | None]:
        """Return what vLLM says in a prompt's span; None where it leaves an attribute out."""
        params, first_s, scheduled_s = self._inputs[index].params, self._first_s[index], output.scheduled_s
        attributes: dict[str, str | float | None] = {
            "gen_ai.request.id": self._record.request_id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.max_tokens": params.max_tokens or None,
            "gen_ai.request.temperature": params.temperature or None,
            "gen_ai.request.top_p": params.top_p or None,
            "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
            "gen_ai.usage.completion_tokens": sum(self._num_tokens[index].values()),
            "gen_ai.latency.e2e": now - self._record.start_s,
        }
        if first_s and scheduled_s is not None:
            attributes |= {
                "gen_ai.latency.time_to_first_token": first_s - self._record.start_s,
                "gen_ai.latency.time_in_queue": scheduled_s - self._submit_s[index],
                "gen_ai.latency.time_in_model_prefill": first_s - scheduled_s,
                "gen_ai.latency.time_in_model_decode": now - first_s,
                "gen_ai.latency.time_in_model_inference": now - scheduled_s,
            }
        return attributes

    def _count_ends(self, reason: str, num_completions: int) -> None:
        self._record.finish_reasons.add(reason)
        self._service.metrics.request_success[reason].inc(num_completions)


class ClientWatch:
    """Cancels the code in its ``async with`` block when the client disconnects, and raises ``ClientDisconnect`` there.

    One task serves any number of such blocks in sequence: a task per block would cost more than a stream's first event.

    Args:
        receive: of a request whose body has been read.

    Raises:
        ClientDisconnect: from a block, if the client has disconnected before its end.
    """

    def __init__(self, receive: Receive) -> None:
        self._worker: asyncio.Task[object] | None = None
        self._num_cancellations = 0
        self._has_left = False
        self._watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
        self._watcher.add_done_callback(self._note_disconnect)

    async def __aenter__(self) -> None:
        if self._has_left:
            raise ClientDisconnect
        self._worker = asyncio.current_task()
        assert self._worker is not None, "a coroutine runs in a task"
        self._num_cancellations = self._worker.cancelling()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        worker, self._worker = self._worker, None
        is_ours = self._has_left and worker is not None and worker.uncancel() <= self._num_cancellations
        # Any other cancellation of the task is passed on.
        if is_ours and kind is asyncio.CancelledError:
            raise ClientDisconnect from error

    def close(self) -> None:
        """Stop watching."""
        self._watcher.remove_done_callback(self._note_disconnect)
        self._watcher.cancel()

    def _note_disconnect(self, watcher: asyncio.Future[None]) -> None:
        if watcher.cancelled():
            return
        watcher.exception()  # retrieved: with any error, the client is gone
        self._has_left = True
        if self._worker is not None:
            self._worker.cancel()


class EventStream(Response):
    """Sends server-sent events as they come.

    Args:
        first: output, which decides that the answer is a stream.
        outputs: those that follow; closed at the end.
        record: gets the status of a disconnect, and the reason of a failure.
        num_prompts: how many outputs are the last one of their prompt.
        watch: of the client; closed at the end.
    """

    def __init__(
        self,
        first: PromptOutput,
        outputs: AsyncGenerator[PromptOutput, None],
        answer: Answer,
        record: RequestRecord,
        num_prompts: int,
        watch: ClientWatch,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = "text/event-stream"
        self.raw_headers = _HEADERS
        self._first = first
        self._outputs = outputs
        self._answer = answer
        self._record = record
        self._num_prompts = num_prompts
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop when the client has disconnected."""
        try:
            async with aclosing(self._outputs), self._watch:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._send_events(send)
        except ClientDisconnect:
            self._record.status = CLIENT_LEFT
        finally:
            self._watch.close()

    async def _send_events(self, send: Send) -> None:
        answer, (index, output), num_unfinished = self._answer, self._first, self._num_prompts
        try:
            num_unfinished -= output.finished
            while num_unfinished:
                last = await _send_but_last(answer.events(index, output), send)
                await send(events_message(last))
                index, output = await anext(self._outputs)
                num_unfinished -= output.finished
            events = await _send_but_last(answer.events(index, output), send)
            events += answer.end_events(self._record.usage())
        except (RequestError, EngineDeadError, GenerationError) as error:
            self._record.error = str(error)
            events = answer.error_events(as_api_error(error))
        # The last events and the end of the answer are one message, and one system call.
        await send(events_message(events, is_last=True))


class WholeAnswer(Response):
    """Sends JSON that may be long.

    Args:
        pieces: of the text, at least one.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = "application/json"
        self._pieces = pieces
        self.init_headers({"content-length": str(sum(map(len, pieces)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for piece in self._pieces[:-1]:
            await send(events_message(piece))
        await send(events_message(self._pieces[-1], is_last=True))


def events_message(events: bytes, *, is_last: bool = False) -> Message:
    """Return the ASGI message of encoded events."""
    return {"type": "http.response.body", "body": events, "more_body": not is_last}


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def generate(
    request: Request, inputs: list[ProcessedInput], answer: Answer, *, is_streaming: bool
) -> Response:
    """Run the prompts and answer, whole or as a stream; abort them when the client disconnects.

    A stream's status is sent with its first token, so that a refusal can still have another status.

    Raises:
        ClientDisconnect: the client disconnected before the answer began.
        RequestError: the queue is full.
        EngineDeadError: the engine failed.
        GenerationError: it could not go on with this request.
    """
    record: RequestRecord = request.state.record
    outputs = Generation(request.app.state.service, record, inputs).outputs()
    watch = ClientWatch(request.receive)
    try:
        async with watch:
            if is_streaming:
                return EventStream(await anext(outputs), outputs, answer, record, len(inputs), watch)
            async for index, output in outputs:
                for _ in answer.keep(index, output):
                    await asyncio.sleep(0)
                # Outputs that are waiting already do not give other tasks a turn of the event loop.
                await asyncio.sleep(0)
            pieces = []
            for piece in answer.body(record.usage()):
                pieces.append(piece)
                await asyncio.sleep(0)
        watch.close()
        return WholeAnswer(pieces)
    except BaseException:
        watch.close()
        await outputs.aclose()
        raise


async def _send_but_last(pieces: Iterator[bytes], send: Send) -> bytes:
    """Send all pieces but the last one, each in a separate turn of the event loop; return the last one, if any."""
    last = next(pieces, b"")
    for piece in pieces:
        await send(events_message(last))
        await asyncio.sleep(0)
        last = piece
    return last
