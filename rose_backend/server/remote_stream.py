"""Outputs of one request in the API process, assembled from the updates that the engine process sends."""

from __future__ import annotations

import asyncio

from rose_backend.engine.outputs import CompletionOutput, RequestOutput
from rose_backend.errors import EngineDeadError, RequestError
from rose_backend.server.engine_messages import Update


class RemoteStream:
    """A queue for one reader: updates that it has not taken yet are merged into one output.

    Args:
        prompt_token_ids: shared by all outputs.
    """

    __slots__ = (
        "_completions",
        "_failure",
        "_has_update",
        "_is_finished",
        "_loop",
        "_num_cached_tokens",
        "_prompt",
        "_prompt_token_ids",
        "_scheduled_s",
        "_waiter",
        "request_id",
    )

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.request_id = request_id
        self._loop = loop
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._num_cached_tokens = 0
        self._scheduled_s: float | None = None
        self._is_finished = False
        # In order of index: the first one splits off the others in that order.
        self._completions: dict[int, CompletionOutput] = {}
        self._has_update = False
        self._failure: RequestError | EngineDeadError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, update: Update) -> None:
        """Add what is new."""
        # Merged at once: updates in a queue would take many times the memory.
        _, self._num_cached_tokens, self._is_finished, deltas, self._scheduled_s = update
        # In the order of messages.CompletionDelta: making one would cost as much as all that is done with it here.
        for index, text, token_ids, logprobs, cumulative_logprob, finish_reason, stop_reason in deltas:
            completion = self._completions.get(index)
            if completion is None:
                completion = CompletionOutput(index, "", [], None if logprobs is None else [])
                self._completions[index] = completion
            completion.text += text
            completion.delta_text += text
            completion.token_ids += token_ids
            if completion.logprobs is not None and logprobs is not None:
                completion.logprobs += logprobs
            completion.cumulative_logprob = cumulative_logprob
            completion.finish_reason = finish_reason
            completion.stop_reason = stop_reason
        self._has_update = True
        self._wake()

    def fail(self, error: RequestError | EngineDeadError) -> None:
        """Let ``get`` raise after what has been put so far."""
        self._failure = error
        self._wake()

    async def get(self) -> RequestOutput:
        """Wait for an update and return the request's state.

        Raises:
            RequestError: it was refused.
            EngineDeadError: the engine failed or was shut down.
        """
        while not self._has_update:
            if self._failure is not None:
                raise self._failure
            self._waiter = self._loop.create_future()
            await self._waiter
        self._has_update = False
        return self._snapshot()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _snapshot(self) -> RequestOutput:
        # Copies: the caller may keep an output after later ones have been made. Delta text is given out once.
        outputs = [
            CompletionOutput(
                each.index,
                each.text,
                each.token_ids.copy(),
                None if each.logprobs is None else each.logprobs.copy(),
                each.cumulative_logprob,
                each.finish_reason,
                each.stop_reason,
                each.delta_text,
            )
            for each in self._completions.values()
        ]
        for completion in self._completions.values():
            completion.delta_text = ""
        return RequestOutput(
            self.request_id,
            self._prompt,
            self._prompt_token_ids,
            outputs,
            self._is_finished,
            self._num_cached_tokens,
            self._scheduled_s,
        )
