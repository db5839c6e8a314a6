"""Outputs of one request in the API process, made from the updates that the engine process sends."""

from __future__ import annotations

import asyncio

from rose_backend.engine.outputs import GrowingCompletions, RequestOutput
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
        self._completions = GrowingCompletions()
        self._has_update = False
        self._failure: RequestError | EngineDeadError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, update: Update) -> None:
        """Add what is new."""
        # Merged at once: updates in a queue would take many times the memory.
        _, self._num_cached_tokens, self._is_finished, deltas, self._scheduled_s = update
        for delta in deltas:
            self._completions.extend(*delta)
        self._has_update = True
        self._wake()

    def fail(self, error: RequestError | EngineDeadError) -> None:
        """Let ``get`` raise after what has been put so far."""
        self._failure = error
        self._wake()

    async def get(self) -> RequestOutput:
        """Wait for an update and return all that is new since the previous call.

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
        return RequestOutput(
            self.request_id,
            self._prompt,
            self._prompt_token_ids,
            self._completions.take(),
            self._is_finished,
            self._num_cached_tokens,
            self._scheduled_s,
        )

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
