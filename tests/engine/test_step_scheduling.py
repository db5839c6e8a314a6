"""What one step contains, and what a pure decode step does not touch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rose_backend import LLM, scheduling
from rose_backend.config import EngineConfig
from rose_backend.engine.core import EngineCore
from rose_backend.engine.output_thread import OutputHandler, OutputProcessor
from rose_backend.engine.request import Request
from rose_backend.engine.scheduler import Step
from tests.engine.conftest import GREEDY


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM], list[Step]]:
    """Return a function that records every step an engine runs."""

    def record(llm: LLM) -> list[Step]:
        recorded: list[Step] = []
        forward = llm.core._runner.forward

        def spy(step: Step) -> Any:
            recorded.append(step)
            return forward(step)

        monkeypatch.setattr(llm.core._runner, "forward", spy)
        return recorded

    return record


def test_forward_passes_are_all_decodes_or_all_chunks(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Start-up prepares kernels for these two kinds of passes only. The first prompt leaves one token to the second.
    llm = make_llm(max_num_batched_tokens=20, prefix_cache=False)
    model = llm.core._runner._model
    forward = model.forward
    kinds: list[tuple[int, list[int]]] = []

    def spy(input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: Any, metadata: Any) -> Any:
        starts = metadata.query_start_loc
        counts = [1] * metadata.num_decodes if starts is None else starts.diff().tolist()
        kinds.append((metadata.num_decodes, counts))
        return forward(input_ids, positions, kv_cache, metadata)

    monkeypatch.setattr(model, "forward", spy)
    llm.generate([[9] * 19, [8] * 42], replace(GREEDY, max_tokens=3))
    assert all(num_decodes in (0, len(counts)) for num_decodes, counts in kinds)
    assert any(1 in counts and len(counts) > 1 for num_decodes, counts in kinds if not num_decodes)


def test_decodes_lead_and_prompts_fill_the_budget(
    make_llm: Callable[..., LLM], steps: Callable[[LLM], list[Step]]
) -> None:
    llm = make_llm(max_num_batched_tokens=40, prefix_cache=False)
    llm.core._scheduler._prompts_first = False  # as in a server
    recorded = steps(llm)
    llm.generate([[9] * 3, [9] * 100, [8] * 50], replace(GREEDY, max_tokens=8))
    for step in recorded:
        counts = step.num_new_tokens.tolist()
        assert sum(counts) <= 40
        assert all(count == 1 for count in counts[: step.num_decodes])
        assert all(count > 1 for count in counts[step.num_decodes :])
        assert len(set(step.slots.tolist())) == len(counts)
    # 3 + 37 of the second; its decode beside 39 more; the last 24 beside the decode and 15 of the third; ...
    shapes = [sorted(step.num_new_tokens.tolist()) for step in recorded[:4]]
    assert shapes == [[3, 37], [1, 39], [1, 15, 24], [1, 1, 35]]


@pytest.mark.parametrize("run_ahead", [0, 1, 2, 4])
def test_offline_decodes_are_left_out_of_steps_full_of_prompts(
    make_llm: Callable[..., LLM], steps: Callable[[LLM], list[Step]], run_ahead: int
) -> None:
    prompts, params = [[9] * 3, [9] * 100, [8] * 50, [7] * 19], replace(GREEDY, max_tokens=8)
    llm = make_llm(max_num_batched_tokens=40, prefix_cache=False, run_ahead=run_ahead)
    recorded = steps(llm)
    texts = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    # Nothing is kept free for those who sit out.
    assert [sorted(step.num_new_tokens.tolist()) for step in recorded[:4]] == [
        [3, 37],
        [40],
        [17, 23],
        [7, 33],
    ]
    assert all(step.num_new_tokens.sum() <= 40 for step in recorded)
    # Half of what a step may compute is 20 tokens.
    parts = [(step.num_decodes, int(step.num_new_tokens[step.num_decodes :].sum())) for step in recorded]
    assert all(num_decodes == 0 for num_decodes, num_prompt_tokens in parts if num_prompt_tokens >= 20)
    assert any(num_decodes > 0 for num_decodes, num_prompt_tokens in parts if 0 < num_prompt_tokens < 20)
    server = make_llm(max_num_batched_tokens=40, prefix_cache=False, run_ahead=run_ahead)
    server.core._scheduler._prompts_first = False
    assert texts == [output.outputs[0].token_ids for output in server.generate(prompts, params)]


def test_a_step_of_decodes_and_prompts_never_exceeds_the_budget(
    make_llm: Callable[..., LLM], steps: Callable[[LLM], list[Step]]
) -> None:
    # More decodes than half of the budget, and a prompt that would fit into it without them.
    llm = make_llm(max_num_batched_tokens=20, max_num_seqs=16, prefix_cache=False)
    recorded = steps(llm)
    prompts = [[index + 1] * 2 for index in range(14)] + [[99] * 9]
    params = [replace(GREEDY, max_tokens=12)] * 14 + [replace(GREEDY, max_tokens=3)]
    core = llm.core
    for prompt, each in zip(prompts[:14], params[:14], strict=True):
        core.add(core.input_processor.make(prompt, each))
    while core.stats.generated_tokens < 14:
        core.step()
    core.add(core.input_processor.make(prompts[14], params[14]))
    while core.num_unfinished:
        core.step()
    assert all(step.num_new_tokens.sum() <= 20 for step in recorded)
    beside = [step for step in recorded if step.num_decodes and len(step.slots) > step.num_decodes]
    assert any(step.num_decodes == 14 and step.num_new_tokens.sum() == 20 for step in beside)


def test_prompt_of_one_token_takes_the_decode_path(
    make_llm: Callable[..., LLM], steps: Callable[[LLM], list[Step]]
) -> None:
    llm = make_llm(prefix_cache=False)
    recorded = steps(llm)
    llm.generate([[9] * 3, [9], [8] * 5], replace(GREEDY, max_tokens=1))
    assert [(step.num_decodes, step.num_new_tokens.tolist()) for step in recorded] == [(1, [1, 3, 5])]


def test_without_chunked_prefill_a_prompt_is_one_piece(
    make_llm: Callable[..., LLM], steps: Callable[[LLM], list[Step]]
) -> None:
    llm = make_llm(max_num_batched_tokens=200, max_model_len=200, chunked_prefill=False, prefix_cache=False)
    recorded = steps(llm)
    llm.generate([[9] * 120, [8] * 150, [7] * 40], replace(GREEDY, max_tokens=5))
    pieces = sorted(count for step in recorded for count in step.num_new_tokens.tolist() if count > 1)
    assert pieces == [40, 120, 150]


def test_pure_decode_step_looks_at_no_completion(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    core = llm.core
    for index in range(6):
        core.add(core.input_processor.make([index + 1] * 10, replace(GREEDY, temperature=0.7, max_tokens=30)))
    for _ in range(3):
        core.step()
    rows = core._state
    real = rows.completions

    class Untouchable(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise AssertionError("a pure decode step looked at a completion")

    rows.completions = Untouchable(real)
    for _ in range(20):
        assert core.step() == []
    rows.completions = real
    outputs = [output for _ in range(10) for output in core.step()]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [30] * 6


def test_newest_is_preempted_and_the_oldest_finishes_first(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(num_blocks=12, max_model_len=160, max_num_seqs=3, prefix_cache=False)
    core = llm.core
    for name in ("old", "middle", "new", "last"):
        core.add(core.input_processor.make([len(name)] * 40, replace(GREEDY, max_tokens=60), request_id=name))
    finished = []
    while core.num_unfinished:
        finished.extend(output.request_id for output in core.step())
        core.manager.check_integrity()
    assert finished == ["old", "middle", "new", "last"]
    assert core.stats.preemptions > 0
    assert core.stats.generated_tokens == 240


def test_requests_that_do_not_fit_wait_without_lookups(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(num_blocks=12, max_model_len=160)
    core = llm.core
    core.add(core.input_processor.make([1] * 100, replace(GREEDY, max_tokens=12)))
    core.add(core.input_processor.make([2] * 100, replace(GREEDY, max_tokens=12)))
    num_lookups = 0
    match = core.manager.match

    def counting(token_ids: np.ndarray, **options: Any) -> Any:
        nonlocal num_lookups
        num_lookups += 1
        return match(token_ids, **options)

    monkeypatch.setattr(core.manager, "match", counting)
    while core.num_unfinished:
        core.step()
    assert num_lookups == 3


def test_lists_of_prompt_tokens_are_made_before_texts_end(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    was_there: list[bool] = []
    request_output = OutputProcessor.request_output

    def spy(processor: OutputProcessor, request: Request) -> Any:
        was_there.append(request._prompt_list is not None)
        return request_output(processor, request)

    monkeypatch.setattr(OutputProcessor, "request_output", spy)
    prompts = [[index + 1] * 9 for index in range(6)]
    outputs = llm.generate(prompts, replace(GREEDY, max_tokens=5))
    assert [output.prompt_token_ids for output in outputs] == prompts and was_there == [True] * 6
    # Texts of one token end before; nothing is kept of them.
    was_there.clear()
    outputs = llm.generate(prompts, replace(GREEDY, max_tokens=1))
    assert [output.prompt_token_ids for output in outputs] == prompts and not all(was_there)
    assert not llm.core._without_prompt_list
    # A stream's is made with its first output, and not by the step loop.
    was_there.clear()
    stream = llm.stream(prompts[0], replace(GREEDY, max_tokens=5))
    next(stream)
    assert was_there[0] is False and not llm.core._without_prompt_list
    stream.close()  # type: ignore[attr-defined]


class Clock:
    """Time that passes in steps: 10 ms, up to 40 prompt tokens beside decodes included, and 0.1 ms for each further.

    Attributes:
        parts: decodes and prompt tokens of each step but repeated ones, oldest first.
    """

    def __init__(self, core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.parts: list[tuple[int, list[int]]] = []
        self._forward, self._enqueue_again = core._runner.forward, core._runner.decoder.enqueue_again
        monkeypatch.setattr("rose_backend.engine.step_pipeline.time", self)
        monkeypatch.setattr(core._runner, "forward", self._run)
        monkeypatch.setattr(core._runner.decoder, "enqueue_again", self._run_again)

    def perf_counter(self) -> float:
        return self.now_s

    def _run(self, step: Step) -> Any:
        prompts = step.num_new_tokens[step.num_decodes :].tolist()
        self.parts.append((step.num_decodes, prompts))
        end_s = self.now_s + 10e-3 + max(sum(prompts) - 40, 0) * 0.1e-3
        forwarded = self._forward(step)
        # Whatever it has enqueued again.
        self.now_s = end_s
        return forwarded

    def _run_again(self) -> Any:
        self.now_s += 10e-3
        return self._enqueue_again()


@contextmanager
def serving(
    path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Iterator[tuple[EngineCore, Clock]]:
    """Yield an engine as in a server, in which a request decodes, and its clock; by default with a budget."""
    options = {"step_budget_ms": "auto", **options}
    config = EngineConfig(model=str(path), dtype="float32", device="cpu", prefix_cache=False, **options)
    with closing(EngineCore(config, output_handler=OutputHandler(lambda outputs: None))) as core:
        clock = Clock(core, monkeypatch)
        core.add(core.input_processor.make([1] * 4, replace(GREEDY, max_tokens=800)))
        for _ in range(20):
            core.step()
        yield core, clock
        core.check_integrity()


def send_prompts(core: EngineCore, count: int, num_tokens: int = 600, num_steps: int = 14) -> None:
    """Send prompts one by one, as many steps apart."""
    for index in range(count):
        core.add(core.input_processor.make([2 + index] * num_tokens, replace(GREEDY, max_tokens=1)))
        for _ in range(num_steps):
            core.step()


def chunks_of(parts: list[tuple[int, list[int]]]) -> list[int]:
    return [sum(prompts) for num_decodes, prompts in parts if num_decodes and prompts]


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_prompts_are_cut_to_steps_of_one_and_a_half_decode_steps(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, run_ahead: int
) -> None:
    # Prompts of 66 ms may take 112 ms.
    monkeypatch.setattr(scheduling, "_MAX_DELAY_IN_STEPS", 8)
    with serving(tiny_model_path, monkeypatch, run_ahead=run_ahead) as (core, clock):
        send_prompts(core, 18)
        chunks = chunks_of(clock.parts)
        # Rare and unknown at first; then 15 ms, which are 90 tokens.
        assert chunks[:5] == [600] * 5
        assert chunks[-8:] == [80] * 7 + [40]
        stats = core.stats
        assert stats.limited_steps > 40 and stats.raised_steps < 10 and stats.unlimited_steps == 0


@pytest.mark.parametrize("option", ["off", "auto"])
def test_without_a_budget_or_without_chunks_prompts_are_whole(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    with serving(tiny_model_path, monkeypatch, step_budget_ms=option, chunked_prefill=option == "off") as (
        core,
        clock,
    ):
        send_prompts(core, 18)
        assert chunks_of(clock.parts) == [600] * 18
        assert core.stats.limited_steps == 0


def test_a_budget_of_milliseconds_holds_at_once(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tiny_model_path, monkeypatch, step_budget_ms=13) as (core, clock):
        # More than one step can admit: what waits counts, and changes nothing.
        send_prompts(core, 8, num_steps=2)
        for _ in range(120):
            core.step()
        chunks = chunks_of(clock.parts)
        assert sum(chunks) == 8 * 600 and chunks[0] == 512
        # 13 ms are 70 tokens.
        assert max(chunks[10:]) == 64
        assert core.stats.limited_steps > 50


def test_time_between_steps_is_no_part_of_one(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[float] = []
    with serving(tiny_model_path, monkeypatch) as (core, clock):
        monkeypatch.setattr(core._scheduler.step_budget, "note_decode_step", noted.append)
        for _ in range(3):
            clock.now_s += 50.0
            core.step()
    assert noted == pytest.approx([10e-3] * 3)


def test_offline_prompts_have_no_budget(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(step_budget_ms=1)
    llm.generate([[9] * 300, [8] * 500], replace(GREEDY, max_tokens=3))
    assert llm.core._scheduler.step_budget is None and llm.stats.limited_steps == 0


def test_waiting_prompts_are_told_as_far_as_they_are_looked_at(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tiny_model_path, monkeypatch) as (core, clock):
        send_prompts(core, 12)
        asked: list[tuple[list[int], list[int]]] = []
        budget = core._scheduler.step_budget
        assert budget is not None
        decide = budget.max_prompt_tokens

        def asking(begun: list[int], waiting: list[int]) -> int | None:
            asked.append((begun, waiting))
            return decide(begun, waiting)

        monkeypatch.setattr(budget, "max_prompt_tokens", asking)
        for index in range(80):
            core.add(core.input_processor.make([2 + index] * 30, replace(GREEDY, max_tokens=1)))
        core.step()
        assert asked[-1] == ([], [30] * 65) and chunks_of(clock.parts)[-1] > 1000
        assert core.stats.unlimited_steps == 1
