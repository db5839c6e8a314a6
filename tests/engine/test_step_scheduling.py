"""What one step contains, and what a pure decode step does not touch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rose_backend import LLM
from rose_backend.engine.output_thread import OutputProcessor
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


def test_a_prompt_waits_where_decodes_fill_the_budget(
    make_llm: Callable[..., LLM], steps: Callable[[LLM], list[Step]]
) -> None:
    # Four completions of the first prompt begin to decode when the second one has computed a token.
    llm = make_llm(max_num_batched_tokens=4, max_num_seqs=8, prefix_cache=False)
    llm.core._scheduler._prompts_first = False
    recorded = steps(llm)
    llm.generate([[9] * 3, [8] * 20], [replace(GREEDY, temperature=1.0, n=4, max_tokens=6), GREEDY])
    counts = [step.num_new_tokens.tolist() for step in recorded]
    assert counts[:2] == [[1, 3], [1, 1, 1, 1]] and max(map(sum, counts)) == 4


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
