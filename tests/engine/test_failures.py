"""Trouble while others are being served: clear answers, one report of a device that fails, no caller waits for ever."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rose_backend import LLM, AsyncEngine, RequestOutput, SamplingParams
from rose_backend.engine.core import EngineCore
from rose_backend.errors import EngineDeadError, QueueFullError, RequestError
from tests.engine.conftest import GREEDY
from tests.support.patience import HANG_S

LONG = replace(GREEDY, max_tokens=200)
CUDA_ERROR = "CUDA error: an illegal memory access was encountered"
NEIGHBOURS = ("Once upon a time", "The king")


def fail(*args: object, **options: object) -> None:
    raise RuntimeError(CUDA_ERROR)


def break_device(core: EngineCore, where: str) -> None:
    """Let one kind of call to the device fail from now on."""
    owners: dict[str, Any] = {
        "forward": core._runner,
        "sample": core._runner,
        "run_parts": core._runner.decoder._graphs,
        "_wait": core._pipeline,
    }
    setattr(owners[where], where, fail)


@pytest.mark.parametrize("where", ["forward", "sample", "run_parts", "_wait"])
def test_a_failed_device_call_is_reported_once_with_step_and_requests(
    make_llm: Callable[..., LLM], where: str, caplog: pytest.LogCaptureFixture
) -> None:
    core = make_llm(run_ahead=1).core
    for name in ("a", "b", "c", "d"):
        core.add(core.input_processor.make([len(name), 7, 8], LONG, request_id=name))
    for _ in range(5):
        core.step()
    break_device(core, where)
    if where in ("forward", "sample"):  # steps that are like the one before call neither
        core.add(core.input_processor.make([9] * 20, LONG, request_id="e"))
    with pytest.raises(EngineDeadError) as caught:
        core.step()
    num_rows, newest = (5, "c, d, e") if where in ("forward", "sample") else (4, "b, c, d")
    assert str(caught.value) == (
        f"the engine stopped in step {core.stats.steps} with {num_rows} request slots: RuntimeError: {CUDA_ERROR}"
    )
    # In the log only: every caller gets the error, whoever the requests belong to.
    assert (
        f"the newest requests in step {core.stats.steps} with {num_rows} request slots: {newest}"
        in caplog.messages
    )
    assert core.stats.steps == 6
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert not core.is_alive
    for action in (core.step, lambda: core.add(core.input_processor.make([1], LONG))):
        with pytest.raises(EngineDeadError, match=f"^the engine stopped earlier: RuntimeError: {CUDA_ERROR}"):
            action()
    core.close()
    assert not core._output_thread._thread.is_alive()


async def collect(engine: AsyncEngine, *args: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(*args)]


def serve(path: Path, body: Callable[[AsyncEngine], Awaitable[None]], **options: Any) -> None:
    """Run ``body`` beside an engine, with a limit, so that a hang is a failure."""

    async def limited() -> None:
        engine = AsyncEngine(str(path), dtype="float32", **options)
        try:
            await asyncio.wait_for(body(engine), HANG_S)
        finally:
            await asyncio.wait_for(engine.shutdown(), HANG_S)
        assert not engine._thread.is_alive()

    asyncio.run(limited())


@pytest.mark.parametrize("where", ["run_parts", "_wait"])
def test_a_failed_device_call_ends_streams_that_run_and_that_wait(tiny_model_path: Path, where: str) -> None:
    async def body(engine: AsyncEngine) -> None:
        core = engine._core
        tasks = [asyncio.create_task(collect(engine, "Once", LONG, str(index))) for index in range(4)]
        while core.stats.generated_tokens < 10 or core.num_waiting < 2:
            await asyncio.sleep(0.002)
        break_device(core, where)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        (message,) = {str(result) for result in results}
        assert re.fullmatch(
            r"the engine stopped in step \d+ with 2 request slots: RuntimeError: " + re.escape(CUDA_ERROR),
            message,
        )
        assert all(isinstance(result, EngineDeadError) for result in results)
        assert not engine.is_running

    serve(tiny_model_path, body, max_num_seqs=2, run_ahead=1)


async def rows_in_use(engine: AsyncEngine, number: int) -> None:
    while len(engine._core._scheduler.running_slots) < number:
        await asyncio.sleep(0.001)


async def too_long(engine: AsyncEngine) -> None:
    for args, message in (
        (([1] * 2000,), "prompt: got 2000 tokens, allowed are at most 1023"),
        (("One", SamplingParams(max_tokens=5000)), "max_tokens: got 5000, allowed is at most"),
        (("One", SamplingParams(n=4)), "n: got 4, allowed is at most 3"),
    ):
        with pytest.raises(RequestError, match=f"^{message}"):
            await collect(engine, *args)


async def full_queue(engine: AsyncEngine) -> None:
    tasks = [asyncio.create_task(collect(engine, "One", LONG))]
    await rows_in_use(engine, 3)
    tasks += [asyncio.create_task(collect(engine, "Two", GREEDY)) for _ in range(2)]
    while engine._core.num_waiting < 2:
        await asyncio.sleep(0.001)
    with pytest.raises(QueueFullError, match=r"^queue: got a request while 2 wait, allowed are 2 \(max_qu"):
        await collect(engine, "Three", GREEDY)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_what_comes_during_a_long_step_is_bounded(tiny_model_path: Path) -> None:
    async def body(engine: AsyncEngine) -> None:
        step, began, may_go_on = engine._core.step, threading.Event(), threading.Event()

        def slow_step() -> Any:
            began.set()
            may_go_on.wait(HANG_S)
            return step()

        engine._core.step = slow_step  # type: ignore[method-assign]
        tasks = [asyncio.create_task(collect(engine, "One", GREEDY))]
        await asyncio.to_thread(began.wait, HANG_S)
        tasks.append(asyncio.create_task(collect(engine, "Two", GREEDY)))
        while engine._steps.num_requests < 1:
            await asyncio.sleep(0.001)
        with pytest.raises(
            QueueFullError, match=r"^queue: got a request while 2 wait, allowed are 2 \(max_qu"
        ):
            await collect(engine, "Three", GREEDY)
        may_go_on.set()
        assert all(outputs[-1].finished for outputs in await asyncio.gather(*tasks))

    serve(tiny_model_path, body, max_queue_size=2)


async def unknown_abort(engine: AsyncEngine) -> None:
    assert not await engine.abort("nobody")


async def cancelled_stream(engine: AsyncEngine) -> None:
    task = asyncio.create_task(collect(engine, "One", replace(LONG, max_tokens=1000), "cancelled"))
    await rows_in_use(engine, 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while "cancelled" in engine._core._requests:
        await asyncio.sleep(0.001)
    assert engine._core.num_unfinished == len(NEIGHBOURS)


@pytest.mark.parametrize("trouble", [too_long, full_queue, unknown_abort, cancelled_stream])
def test_trouble_of_one_request_changes_no_other_text(
    tiny_model_path: Path, llm: LLM, trouble: Callable[[AsyncEngine], Awaitable[None]]
) -> None:
    params = [SamplingParams(seed=seed, max_tokens=150, ignore_eos=True) for seed in range(len(NEIGHBOURS))]
    expected = llm.generate(list(NEIGHBOURS), params)

    async def body(engine: AsyncEngine) -> None:
        pairs = zip(NEIGHBOURS, params, strict=True)
        tasks = [asyncio.create_task(collect(engine, *pair)) for pair in pairs]
        await rows_in_use(engine, len(NEIGHBOURS))
        await trouble(engine)
        assert not any(task.done() for task in tasks), "the others were to run meanwhile"
        for outputs, other in zip(await asyncio.gather(*tasks), expected, strict=True):
            assert outputs[-1].outputs[0].token_ids == other.outputs[0].token_ids
            assert outputs[-1].outputs[0].text == other.outputs[0].text
        while engine._core.num_unfinished:
            await asyncio.sleep(0.001)
        engine._core.check_integrity()

    serve(tiny_model_path, body, max_num_seqs=3, max_queue_size=2, run_ahead=1)
