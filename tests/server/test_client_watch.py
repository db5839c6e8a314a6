"""What a client that leaves does to the work for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from rose_backend.server.generation import ClientWatch
from tests.server.live_server import in_event_loop


class Client:
    """One that sends nothing more, and leaves when told."""

    def __init__(self) -> None:
        self._has_left = asyncio.Event()

    async def receive(self) -> Message:
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def leave(self) -> None:
        """Disconnect."""
        self._has_left.set()
        await asyncio.sleep(0.01)


Scene = Callable[[Client, ClientWatch], Coroutine[Any, Any, None]]


async def leaves_during_work(client: Client, watch: ClientWatch) -> None:
    leaving = asyncio.create_task(client.leave())
    with pytest.raises(ClientDisconnect):
        async with watch:
            await asyncio.sleep(60)
    task = asyncio.current_task()
    assert task is not None and not task.cancelling(), "nothing of it is left in the task"
    await leaving


async def leaves_between(client: Client, watch: ClientWatch) -> None:
    async with watch:
        await asyncio.sleep(0)
    await client.leave()
    with pytest.raises(ClientDisconnect):
        async with watch:
            raise AssertionError("the client has disconnected")


async def leaves_after_the_end(client: Client, watch: ClientWatch) -> None:
    async with watch:
        await asyncio.sleep(0)
    watch.close()
    await client.leave()


async def work_fails_as_it_is_given_up(client: Client, watch: ClientWatch) -> None:
    leaving = asyncio.create_task(client.leave())
    with pytest.raises(KeyError):
        async with watch:
            try:
                await asyncio.sleep(60)
            finally:
                raise KeyError
    await leaving


async def another_cancellation(client: Client, watch: ClientWatch) -> None:
    async def work() -> None:
        async with watch:
            await asyncio.sleep(60)

    for leaves_too in (False, True):
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        if leaves_too:
            leaving = asyncio.create_task(client.leave())
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await leaving


@pytest.mark.parametrize(
    "scene",
    [
        leaves_during_work,
        leaves_between,
        leaves_after_the_end,
        work_fails_as_it_is_given_up,
        another_cancellation,
    ],
)
@in_event_loop
async def test_a_client_leaves(scene: Scene) -> None:
    client = Client()
    watch = ClientWatch(client.receive)
    try:
        await scene(client, watch)
    finally:
        watch.close()
