"""The prompts of one HTTP request on their way through the engine."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeAlias

from rose_backend.engine.outputs import RequestOutput
from rose_backend.engine.request import TokensPrompt
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.server.request_record import RequestRecord
from rose_backend.server.service import Service

PromptOutput: TypeAlias = tuple[int, RequestOutput]
"""Index of the prompt, and its output."""

_numbers = itertools.count()


class Generation:
    """Submits all prompts and merges what comes back.

    Args:
        record: gets token counts, times and finish reasons.
        prompts: token ids of each prompt.
        cache_salt: the engine's, see ``CacheNamespaces``.
    """

    def __init__(
        self,
        service: Service,
        record: RequestRecord,
        prompts: list[list[int]],
        params: SamplingParams,
        cache_salt: str | None = None,
    ) -> None:
        self._service = service
        self._record = record
        self._prompts = prompts
        self._params = params
        self._cache_salt = cache_salt
        # The client's id may come twice, the engine's must not.
        self._name = f"{record.request_id}-{next(_numbers)}"
        self._num_tokens = [0] * len(prompts)
        self._first_s = [0.0] * len(prompts)
        self._last_s = [0.0] * len(prompts)

    def outputs(self) -> AsyncGenerator[PromptOutput, None]:
        """Yield every output of every prompt. Closing the iterator aborts what is unfinished.

        Raises:
            RequestError: a prompt is not allowed, or the queue is full; then none of them runs on.
            EngineDeadError: the engine failed or was shut down.
        """
        # Each generator on the way costs every piece of every text.
        return self._one(0) if len(self._prompts) == 1 else self._all()

    async def _one(self, index: int) -> AsyncGenerator[PromptOutput, None]:
        request_id = f"{self._name}-{index}"
        running = self._service.engine_request_ids
        running.add(request_id)
        prompt: TokensPrompt = {
            "prompt_token_ids": self._prompts[index],
            "cache_salt": self._cache_salt,
        }
        stream = self._service.engine.generate(prompt, self._params, request_id)
        is_over = False
        try:
            async with aclosing(stream):  # type: ignore[type-var]
                async for output in stream:
                    self._observe(index, output)
                    is_over = output.finished
                    yield index, output
        except (asyncio.CancelledError, GeneratorExit):
            # Nobody waits any longer.
            if not is_over:
                self._count_ends("abort", self._params.n)
            raise
        finally:
            running.discard(request_id)

    async def _all(self) -> AsyncGenerator[PromptOutput, None]:
        # Each output holds everything so far. When the client does not read, what comes meanwhile waits in front of
        # this queue, where it becomes one output for each prompt.
        queue: asyncio.Queue[PromptOutput | Exception] = asyncio.Queue(len(self._prompts))

        async def pump(index: int) -> None:
            try:
                async for output in self._one(index):
                    await queue.put(output)
            except Exception as error:  # raised again below, in the caller's task
                await queue.put(error)

        tasks = [asyncio.create_task(pump(index)) for index in range(len(self._prompts))]
        num_unfinished = len(tasks)
        try:
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
        num_tokens = 0
        # For every piece of every stream: a generator would take as long as all the rest.
        for completion in output.outputs:
            num_tokens += len(completion.token_ids)
        if self._num_tokens[index] == 0 and num_tokens:
            metrics.time_to_first_token.observe(now - record.start_s)
            metrics.prompt_tokens.inc(len(output.prompt_token_ids))
            record.num_prompt_tokens += len(output.prompt_token_ids)
            unit = self._service.hit_unit
            record.num_cached_tokens += output.num_cached_tokens // unit * unit
            self._first_s[index] = now
            if record.first_token_s is None:
                record.first_token_s = now
        elif num_tokens > self._num_tokens[index]:
            metrics.inter_token_latency.observe(now - self._last_s[index])
        record.num_output_tokens += num_tokens - self._num_tokens[index]
        self._num_tokens[index], self._last_s[index] = num_tokens, now
        if output.finished:
            self._observe_end(index, output, now)

    def _observe_end(self, index: int, output: RequestOutput, now: float) -> None:
        metrics = self._service.metrics
        for completion in output.outputs:
            if completion.finish_reason is not None:
                self._count_ends(completion.finish_reason, 1)
        metrics.request_latency.observe(now - self._record.start_s)
        num_later_tokens = max(len(completion.token_ids) for completion in output.outputs) - 1
        if num_later_tokens > 0:
            metrics.time_per_output_token.observe((now - self._first_s[index]) / num_later_tokens)

    def _count_ends(self, reason: str, num_completions: int) -> None:
        self._record.finish_reasons.add(reason)
        self._service.metrics.request_success[reason].inc(num_completions)
