"""Stop strings are found steps later, in the output thread, and take effect exactly."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rose_backend import LLM, CompletionOutput, RequestOutput, SamplingParams
from rose_backend.engine.core import EngineCore
from rose_backend.engine.output_thread import OutputQueue
from rose_backend.engine.outputs import GrowingCompletions
from rose_backend.errors import EngineDeadError
from tests.engine.conftest import GREEDY
from tests.support.crowd import crowd, tokens_of
from tests.support.patience import HANG_S

PROMPT = "Once upon a time there was a"
LONG = replace(GREEDY, max_tokens=40)


def delay_texts(core: EngineCore, num_steps: int) -> None:
    """Let the output thread look at tokens only when so many more steps have started, or no more start."""
    process, wait = core._output_thread._processor.process, core._output_thread.wait
    is_waited_for = threading.Event()

    def waiting() -> None:
        is_waited_for.set()
        wait()
        is_waited_for.clear()

    def late(message: Any) -> Any:
        due, latest = core.stats.steps + num_steps, time.monotonic() + HANG_S
        while core.stats.steps < due and not core._is_stalled and time.monotonic() < latest:
            if is_waited_for.is_set() or not core.is_alive:
                break
            time.sleep(0.0002)
        return process(message)

    core._output_thread.wait = waiting  # type: ignore[method-assign]
    core._output_thread._processor.process = late  # type: ignore[method-assign]


@pytest.fixture
def make_late(make_llm: Callable[..., LLM]) -> Callable[..., LLM]:
    def make(num_steps: int = 3, **options: Any) -> LLM:
        llm = make_llm(**{"max_num_seqs": 24, **options})
        delay_texts(llm.core, num_steps)
        return llm

    return make


def complete(llm: LLM, params: SamplingParams) -> CompletionOutput:
    return llm.generate([PROMPT], params)[0].outputs[0]


@pytest.mark.parametrize("run_ahead", [0, 1, 4])
@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_stop_string_that_is_found_steps_later(
    make_late: Callable[..., LLM], llm: LLM, run_ahead: int, is_streaming: bool
) -> None:
    whole = complete(llm, LONG)
    params = replace(LONG, stop=["never seen", whole.text[30:45]])
    expected = complete(llm, params)
    late = make_late(run_ahead=run_ahead)
    if is_streaming:
        outputs = [output.outputs[0] for output in late.stream(PROMPT, params)]
        assert all(expected.text.startswith(output.text) for output in outputs)
        assert "".join(output.delta_text for output in outputs) == expected.text
        actual = outputs[-1]
    else:
        actual = complete(late, params)
    assert (actual.text, actual.token_ids) == (expected.text, expected.token_ids)
    assert (actual.finish_reason, actual.stop_reason) == ("stop", whole.text[30:45])
    # Tokens drawn behind it count for nothing, and nobody finds them.
    assert late.core._reader.num_dropped_tokens > 2
    num_tokens = len(expected.token_ids)
    assert late.stats.generated_tokens == num_tokens
    known = late.tokenizer.encode(PROMPT) + whole.token_ids
    (again,) = late.generate([known], GREEDY)
    assert again.num_cached_tokens == len(late.tokenizer.encode(PROMPT)) + num_tokens - 1


@pytest.mark.parametrize("stop", ["never seen", "found"])
def test_rows_are_free_when_the_last_output_is_returned(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    llm = make_llm()
    whole = complete(llm, LONG)
    take = OutputQueue.take

    def take_once_all_is_said(outputs: OutputQueue) -> list[RequestOutput]:
        time.sleep(0.01)  # outputs come behind everything else that the step does
        return take(outputs)

    monkeypatch.setattr(OutputQueue, "take", take_once_all_is_said)
    complete(llm, replace(LONG, stop=whole.text[30:45] if stop == "found" else stop))
    llm.core.check_integrity()
    assert llm.core._reader.num_unchecked == 0
    assert llm.core.manager.reset_prefix_cache()


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_text_with_stop_strings_that_ends_otherwise(
    make_late: Callable[..., LLM], llm: LLM, run_ahead: int
) -> None:
    whole = complete(llm, LONG)
    late = make_late(run_ahead=run_ahead)
    known = late.tokenizer.encode(PROMPT) + whole.token_ids
    for params, reason in (
        (replace(LONG, stop="never seen", max_tokens=20), ("length", None)),
        (replace(LONG, stop="never seen", stop_token_ids=[whole.token_ids[9]]), ("stop", whole.token_ids[9])),
        (replace(LONG, stop=late.tokenizer.decode(whole.token_ids[:20])[-3:], max_tokens=20), None),
    ):
        assert late.core.manager.reset_prefix_cache()
        actual, expected = complete(late, params), complete(llm, params)
        assert (actual.text, actual.token_ids) == (expected.text, expected.token_ids)
        assert (actual.finish_reason, actual.stop_reason) == (
            reason or ("stop", late.tokenizer.decode(whole.token_ids[:20])[-3:])
        )
        # Nothing was drawn behind an end that the step loop saw itself.
        assert reason is None or late.core._reader.num_dropped_tokens == 0
        (again,) = late.generate([known], GREEDY)
        assert again.num_cached_tokens == len(known) - 40 + len(actual.token_ids) - 1
    assert late.core._reader.num_unchecked == 0


@pytest.mark.parametrize(
    "options", [{"run_ahead": 2}, {"num_blocks": 28, "max_num_batched_tokens": 37}], ids=str
)
def test_a_crowd(make_late: Callable[..., LLM], llm: LLM, options: dict[str, Any]) -> None:
    prompts, params = crowd(40, seed=9, max_tokens=25)
    params = [replace(each, stop=["e", "the"]) if index % 2 else each for index, each in enumerate(params)]
    late = make_late(2, max_model_len=256, **options)
    tokens = tokens_of(late, prompts, params)
    assert tokens == tokens_of(llm, prompts, params)
    assert late.stats.generated_tokens == sum(len(one) for completions in tokens for one in completions)
    assert late.core._reader.num_dropped_tokens > 10
    assert (late.stats.preemptions > 0) == ("num_blocks" in options)


def test_abort_while_outputs_are_outstanding(make_late: Callable[..., LLM], llm: LLM) -> None:
    whole = complete(llm, LONG)
    core = make_late(4, run_ahead=1).core
    for stop in ("never seen", whole.text[10:20]):
        request = core.input_processor.make(
            PROMPT, replace(LONG, stop=stop, max_tokens=12), is_streaming=True
        )
        core.add(request)
        seen = [output for _ in range(8) for output in core.step()]
        output = core.abort(request.request_id)
        assert output is not None and output.finished and core.num_unfinished == 0
        completions = GrowingCompletions()
        for each in [*seen, output]:
            completions.add(each.outputs)
        (last,) = completions.snapshot()
        # The output thread sees tokens in the order in which they were drawn: the stop came before the abort.
        assert last.finish_reason == ("abort" if stop == "never seen" else "stop")
        assert last.token_ids == whole.token_ids[: len(last.token_ids)]
        assert whole.text.startswith(last.text)
        core.check_integrity()
        assert core._reader.num_unchecked == 0 and core.step() == []


def test_waiting_for_the_output_thread_is_no_busy_wait(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    process, step, num_steps = llm.core._output_thread._processor.process, llm.core.step, 0
    may_go_on = threading.Event()

    def stuck(message: Any) -> Any:
        assert may_go_on.wait(HANG_S)
        return process(message)

    def counted() -> Any:
        nonlocal num_steps
        num_steps += 1
        return step()

    llm.core._output_thread._processor.process = stuck  # type: ignore[method-assign]
    llm.core.step = counted  # type: ignore[method-assign]
    threading.Timer(0.3, may_go_on.set).start()
    assert len(complete(llm, GREEDY).token_ids) == 16
    assert num_steps <= 16 + 3


@pytest.mark.parametrize("fails_at", [1, 16])
def test_a_failure_of_the_text_thread_ends_the_engine(make_llm: Callable[..., LLM], fails_at: int) -> None:
    llm = make_llm()
    process, num_messages = llm.core._output_thread._processor.process, 0

    def fail(message: Any) -> Any:
        nonlocal num_messages
        num_messages += 1
        if num_messages == fails_at:
            raise ZeroDivisionError("made for this test")
        return process(message)

    llm.core._output_thread._processor.process = fail  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError, match=r"in its output thread: ZeroDivisionError: made for") as caught:
        list(llm.stream(PROMPT, GREEDY))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(EngineDeadError, match=r"stopped earlier: ZeroDivisionError"):
        llm.generate(PROMPT, GREEDY)


def test_closing_with_an_open_stream_does_not_hang(tiny_model_path: Path) -> None:
    llm = LLM(str(tiny_model_path))
    streams = [llm.stream(PROMPT, LONG), llm.stream(PROMPT, LONG)]
    for stream in streams:
        next(stream)
    llm.close()
    streams[0].close()  # type: ignore[attr-defined]
    with pytest.raises(EngineDeadError, match="it was closed"):
        list(streams[1])


def test_an_engine_that_is_never_closed_leaves_no_thread(tiny_model_path: Path) -> None:
    llm = LLM(str(tiny_model_path))
    thread = llm.core._output_thread._thread
    assert thread.is_alive()
    del llm
    gc.collect()
    thread.join(10.0)
    assert not thread.is_alive()
