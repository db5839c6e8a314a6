"""AsyncEngine: concurrent callers, aborts, failures; no caller waits for ever."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rose_backend import LLM, AsyncEngine, RequestOutput, SamplingParams
from rose_backend.engine import process_settings
from rose_backend.engine.request import Completion
from rose_backend.errors import ConfigError, EngineDeadError, RequestError
from tests.engine.conftest import GREEDY
from tests.support.patience import HANG_S

T = TypeVar("T")
LONG = replace(GREEDY, max_tokens=200)
PROMPT = "Once upon a time"


def run(make_body: Callable[[], Awaitable[T]]) -> T:
    """Run one coroutine with a limit, so that a hang is a failure."""

    async def limited() -> T:
        return await asyncio.wait_for(make_body(), HANG_S)

    return asyncio.run(limited())


async def collect(engine: AsyncEngine, *args: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(*args)]


@contextmanager
def started(path: Path, **options: Any) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(str(path), **options)
    yield engine
    run(engine.shutdown)
    assert not engine._thread.is_alive()


@pytest.fixture(scope="module")
def shared_engine(tiny_model_path: Path) -> Iterator[AsyncEngine]:
    with started(tiny_model_path, max_num_seqs=8) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: AsyncEngine) -> Iterator[AsyncEngine]:
    """Return a running engine without requests; fails the test that leaves a request or a block behind."""
    assert shared_engine._core.manager.reset_prefix_cache()
    yield shared_engine
    run(lambda: wait_until_idle(shared_engine))
    shared_engine._core.check_integrity()


async def wait_until_idle(engine: AsyncEngine) -> None:
    while engine._core.num_unfinished or engine._streams or engine._steps._inbox:
        await asyncio.sleep(0.01)


def test_concurrent_streams_equal_the_llm(engine: AsyncEngine, llm: LLM) -> None:
    prompts = [PROMPT, "The king", "薔薇", [5, 6, 7]] * 4
    params = [
        SamplingParams(seed=i, max_tokens=5 + i, n=1 + i % 2, temperature=0.8) for i in range(len(prompts))
    ]

    async def body() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(engine, *pair) for pair in zip(prompts, params, strict=True)))

    expected = llm.generate(prompts, params)
    for outputs, final in zip(run(body), expected, strict=True):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert [c.text for c in outputs[-1].outputs] == [c.text for c in final.outputs]
        assert [c.token_ids for c in outputs[-1].outputs] == [c.token_ids for c in final.outputs]
        for index, completion in enumerate(outputs[-1].outputs):
            assert "".join(output.outputs[index].delta_text for output in outputs) == completion.text
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths[0] >= 1 and lengths == sorted(lengths)


def test_leaving_the_loop_aborts(engine: AsyncEngine) -> None:
    async def body() -> None:
        stream = engine.generate(PROMPT, replace(LONG, max_tokens=1000))
        async for output in stream:
            if len(output.outputs[0].token_ids) >= 3:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        await wait_until_idle(engine)

    before = engine.stats.generated_tokens
    run(body)
    assert engine.stats.generated_tokens - before < 1000


def test_cancelling_the_task_aborts(engine: AsyncEngine) -> None:
    async def body() -> None:
        task = asyncio.create_task(collect(engine, PROMPT, LONG))
        while not engine._core.num_unfinished:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until_idle(engine)

    run(body)


def test_abort_by_id(engine: AsyncEngine) -> None:
    async def body() -> tuple[list[RequestOutput], list[RequestOutput]]:
        assert not await engine.abort("victim")
        num_steps = engine.stats.steps
        victim = asyncio.create_task(collect(engine, PROMPT, LONG, "victim"))
        other = asyncio.create_task(collect(engine, PROMPT, GREEDY, "other"))
        while engine.stats.steps < num_steps + 4:
            await asyncio.sleep(0.005)
        assert await engine.abort("victim")
        outputs = await victim, await other
        assert not await engine.abort("victim")
        return outputs

    victim, other = run(body)
    assert victim[-1].finished and victim[-1].outputs[0].finish_reason == "abort"
    assert 0 < len(victim[-1].outputs[0].token_ids) < 200
    assert other[-1].outputs[0].finish_reason == "length"
    assert len(other[-1].outputs[0].token_ids) == 16


def test_refused_requests_affect_no_other_request(engine: AsyncEngine) -> None:
    async def body() -> list[RequestOutput]:
        good = asyncio.create_task(collect(engine, PROMPT, LONG, "good"))
        while not engine._core.num_unfinished:
            await asyncio.sleep(0.005)
        for args, message in (
            (("",), "prompt: got no tokens"),
            (([1] * 2000,), "prompt: got 2000 tokens"),
            ((PROMPT, SamplingParams(max_tokens=5000)), "max_tokens: got 5000"),
            ((PROMPT, SamplingParams(n=9)), "n: got 9"),
            ((PROMPT, GREEDY, "good"), "request_id: got 'good', which an unfinished request has"),
        ):
            with pytest.raises(RequestError, match=f"^{message}"):
                await collect(engine, *args)
        return await good

    assert len(run(body)[-1].outputs[0].token_ids) == 200


def test_full_queue(tiny_model_path: Path) -> None:
    async def body(engine: AsyncEngine) -> None:
        params = replace(GREEDY, max_tokens=60)
        tasks = [asyncio.create_task(collect(engine, PROMPT, params, str(index))) for index in range(40)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [result for result in results if isinstance(result, RequestError)]
        finished = [result for result in results if isinstance(result, list)]
        assert refused and all("max_queue_size" in str(error) for error in refused)
        assert len(finished) >= 3 and len(finished) + len(refused) == 40
        assert all(result[-1].outputs[0].finish_reason == "length" for result in finished)

    with started(tiny_model_path, max_num_seqs=1, max_queue_size=3) as engine:
        run(lambda: body(engine))


def test_failure_reaches_every_waiter(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(tiny_model_path) as engine:

        def fail(*args: object) -> None:
            raise ZeroDivisionError("made for this test")

        async def body() -> list[Any]:
            tasks = [asyncio.create_task(collect(engine, PROMPT, LONG)) for _ in range(3)]
            while engine.stats.steps < 3:
                await asyncio.sleep(0.005)
            monkeypatch.setattr(engine._core._runner, "forward", fail)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            with pytest.raises(EngineDeadError, match=r"made for this test"):
                await collect(engine, PROMPT)
            return results

        results = run(body)
        assert not engine.is_running
        for result in results:
            assert isinstance(result, EngineDeadError)
            assert isinstance(result.__cause__, ZeroDivisionError)


def test_failure_of_the_output_thread_reaches_every_waiter(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tiny_model_path) as engine:

        def fail(*args: object) -> None:
            raise ZeroDivisionError("made for this test")

        async def body() -> list[Any]:
            tasks = [asyncio.create_task(collect(engine, PROMPT, LONG)) for _ in range(3)]
            while engine.stats.steps < 3:
                await asyncio.sleep(0.005)
            monkeypatch.setattr(engine._core._output_thread._processor, "process", fail)
            return await asyncio.gather(*tasks, return_exceptions=True)

        for result in run(body):
            assert isinstance(result, EngineDeadError) and "in its output thread: ZeroDivision" in str(result)
            assert isinstance(result.__cause__, ZeroDivisionError)


def test_a_slow_reader_gets_everything_in_fewer_pieces(engine: AsyncEngine) -> None:
    async def body() -> list[RequestOutput]:
        outputs = []
        core = engine._core
        end = core.stats.generated_tokens + 200
        async for output in engine.generate(PROMPT, LONG):
            outputs.append(output)
            due = min(core.stats.generated_tokens + 3, end)
            while core.stats.generated_tokens < due:
                await asyncio.sleep(0.001)
        return outputs

    outputs = run(body)
    assert len(outputs) < 150 and outputs[-1].finished
    assert "".join(output.outputs[0].delta_text for output in outputs) == outputs[-1].outputs[0].text
    # Nothing piles up for it: what comes next is as new as can be.
    assert len(outputs[-1].outputs[0].token_ids) == 200


def test_only_first_tokens_are_urgent(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    posts: list[tuple[list[Completion], bool]] = []
    post = engine._core._output_thread.post

    def spy(message: Any, *, is_urgent: bool = False) -> None:
        posts.append((message.completions, is_urgent))
        post(message, is_urgent=is_urgent)

    monkeypatch.setattr(engine._core._output_thread, "post", spy)

    async def body() -> None:
        tasks = []
        for index in range(4):
            params = replace(GREEDY, n=1 + index % 2, temperature=0.5, seed=1)
            tasks.append(asyncio.create_task(collect(engine, PROMPT * (1 + index), params)))
            await asyncio.sleep(0.02)
        await asyncio.gather(*tasks)

    run(body)
    seen: set[Completion] = set()
    for completions, is_urgent in posts:
        assert is_urgent == bool(set(completions) - seen)
        seen |= set(completions)
    assert len(seen) == 6 and len(posts) > 16


def test_an_id_is_free_once_its_last_output_is_there(engine: AsyncEngine) -> None:
    async def body() -> None:
        for _ in range(20):
            outputs = await collect(engine, PROMPT, replace(GREEDY, max_tokens=2), "again")
            assert outputs[-1].finished

    run(body)


def test_abort_and_stop_strings_with_a_slow_output_thread(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = engine._core._output_thread._processor.process

    def slow(message: Any) -> Any:
        time.sleep(0.005)
        return process(message)

    async def body() -> tuple[list[RequestOutput], list[RequestOutput]]:
        (whole,) = (await collect(engine, PROMPT, replace(LONG, max_tokens=30)))[-1].outputs
        monkeypatch.setattr(engine._core._output_thread._processor, "process", slow)
        params = replace(LONG, stop=whole.text[10:20])
        num_tokens = engine.stats.generated_tokens
        stopping = asyncio.create_task(collect(engine, PROMPT, params, "stopping"))
        victim = asyncio.create_task(collect(engine, PROMPT, replace(LONG, max_tokens=1000), "victim"))
        while engine.stats.generated_tokens < num_tokens + 40:
            await asyncio.sleep(0.001)
        assert await engine.abort("victim")
        assert (await stopping)[-1].outputs[0].text == whole.text[: whole.text.index(whole.text[10:20])]
        return await stopping, await victim

    stopping, victim = run(body)
    assert stopping[-1].outputs[0].finish_reason == "stop"
    assert victim[-1].outputs[0].finish_reason == "abort" and len(victim[-1].outputs[0].token_ids) < 1000


def test_shutdown_ends_waiters_and_may_be_repeated(tiny_model_path: Path) -> None:
    with started(tiny_model_path) as engine:

        async def body() -> None:
            task = asyncio.create_task(collect(engine, PROMPT, LONG))
            while engine.stats.steps < 2:
                await asyncio.sleep(0.005)
            await engine.shutdown()
            with pytest.raises(EngineDeadError, match=r"shut down"):
                await task
            with pytest.raises(EngineDeadError, match=r"shut down"):
                await collect(engine, PROMPT)
            await engine.shutdown()

        run(body)


def test_the_interpreter_is_as_before_when_the_last_engine_has_ended(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other test modules may keep a server running in this process.
    monkeypatch.setattr(process_settings, "_num_servers", 0)
    gc.unfreeze()
    before = sys.getswitchinterval(), gc.get_freeze_count()
    with started(tiny_model_path):
        with started(tiny_model_path):
            assert sys.getswitchinterval() <= 1e-3 and gc.get_freeze_count() > 10_000
        assert sys.getswitchinterval() <= 1e-3 and gc.get_freeze_count() > 10_000
    # Python keeps the interval in whole microseconds.
    assert (sys.getswitchinterval(), gc.get_freeze_count()) == pytest.approx(before, abs=2e-6)


def test_event_loop_that_ends_early_leaves_nothing(engine: AsyncEngine) -> None:
    async def start_and_leave() -> None:
        stream = engine.generate(PROMPT, LONG)
        await anext(stream)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(start_and_leave())
    loop.close()
    run(lambda: wait_until_idle(engine))
    assert run(lambda: collect(engine, PROMPT, GREEDY))[-1].finished


def test_unknown_option() -> None:
    with pytest.raises(
        ConfigError, match=r"^AsyncEngine: unknown option 'max_seqs'; did you mean 'max_num_seqs'"
    ):
        AsyncEngine("anything", max_seqs=3)
