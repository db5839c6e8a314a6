"""New requests are let through few at a time, in order, and what else is ready has its turn in between."""

from __future__ import annotations

import asyncio

from rose_backend.server.turnstile import MAX_PER_TURN, Turnstile
from tests.support.patience import HANG_S

NUM_REQUESTS = 5 * MAX_PER_TURN + 1


def test_a_burst_is_spread_over_turns() -> None:
    async def play() -> None:
        turnstile = Turnstile()
        passed: list[tuple[int, int]] = []
        turn = 0

        async def request(number: int) -> None:
            await turnstile.pass_through()
            passed.append((turn, number))

        # Twice: it comes to rest in between, and starts again.
        for _ in range(2):
            passed.clear()
            tasks = [asyncio.create_task(request(number)) for number in range(NUM_REQUESTS)]
            while not all(task.done() for task in tasks):
                await asyncio.sleep(0)
                turn += 1
            turns = [at for at, _ in passed]
            assert [number for _, number in passed] == list(range(NUM_REQUESTS))
            assert max(map(turns.count, turns)) <= MAX_PER_TURN
            for _ in range(3):
                await asyncio.sleep(0)
            assert not turnstile._is_turning, "an idle server does nothing"

    asyncio.run(play())


def test_who_gives_up_holds_up_nobody() -> None:
    async def play() -> None:
        turnstile = Turnstile()
        tasks = [asyncio.create_task(turnstile.pass_through()) for _ in range(NUM_REQUESTS)]
        await asyncio.sleep(0)
        given_up = tasks[MAX_PER_TURN : 3 * MAX_PER_TURN]
        for task in given_up:
            task.cancel()
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), HANG_S)
        assert sum(isinstance(end, asyncio.CancelledError) for end in ends) == len(given_up)

    asyncio.run(play())
