"""Passes over prompts beside several decode steps: the same text, and nobody touches what a pass in flight does."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rose_backend import LLM, SamplingParams
from rose_backend.config import EngineConfig
from rose_backend.engine import scheduler, step_pipeline
from rose_backend.engine.core import EngineCore
from rose_backend.engine.model_runner import PromptGraphs
from rose_backend.engine.output_thread import OutputHandler
from rose_backend.errors import EngineDeadError
from tests.engine.conftest import GREEDY
from tests.support.crowd import crowd, tokens_of
from tests.support.side_passes import SideSteps, serve_with_side_passes
from tests.support.soak import assert_idle, count_completions

LONG = replace(GREEDY, max_tokens=60)


class Switch:
    """Says whether passes are over."""

    def __init__(self) -> None:
        self.is_on = False

    def __call__(self, num_looks: int) -> bool:
        return self.is_on


@pytest.fixture(autouse=True)
def short_prompts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute prompts of any length beside decodes."""
    monkeypatch.setattr(scheduler, "MAX_PROMPT_TOKENS_AMONG_DECODES", 0)


@pytest.fixture
def make_server(make_llm: Callable[..., LLM]) -> Callable[..., tuple[EngineCore, SideSteps, Switch]]:
    """Return a function that makes an engine in which two requests decode, passes over when the switch is on."""

    def make(num_texts: int = 2, **options: Any) -> tuple[EngineCore, SideSteps, Switch]:
        switch = Switch()
        side = SideSteps(switch)
        core = serve_with_side_passes(make_llm(**{"max_num_seqs": 8, "run_ahead": 1, **options}), side)
        for index in range(num_texts):
            core.add(core.input_processor.make([index + 1] * 10, LONG, request_id=f"text {index}"))
        for _ in range(4):
            core.step()
        assert not side.is_busy, "steps without decodes are one pass after the other"
        return core, side, switch

    return make


def finish(core: EngineCore) -> dict[str, list[int]]:
    """Run an engine until nothing is left; return the tokens of what finishes meanwhile."""
    finished: dict[str, list[int]] = {}
    while core.num_unfinished:
        finished |= {each.request_id: each.outputs[0].token_ids for each in core.step() if each.finished}
    return finished


def alone(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    return list(llm.generate(prompt, params)[0].outputs[0].token_ids)


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_texts_go_on_beside_a_pass_and_its_requests_join_when_it_is_over(
    make_server: Callable[..., Any], llm: LLM, run_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, side, switch = make_server(run_ahead=run_ahead)
    newcomer = core.input_processor.make([7] * 50, GREEDY, request_id="new")
    core.add(newcomer)
    make_step, planned = core._scheduler._make_step, []
    monkeypatch.setattr(
        core._scheduler,
        "_make_step",
        lambda slots, *args: planned.append(len(slots)) or make_step(slots, *args),
    )
    before = core.stats
    for _ in range(12):
        core.step()
    # One token of each text per step, and steps that repeat the one that began the pass are not planned.
    assert core.stats.steps - before.steps == 12
    assert core.stats.generated_tokens - before.generated_tokens == 24
    assert side.is_busy and side.num_looks == 11 and planned == [3]
    slot = newcomer.completions[0].slot
    assert core.manager.num_computed_tokens[slot] == 0 and core._state.num_tokens[slot] == 50
    switch.is_on = True
    num_steps = core.stats.steps
    core.step()
    # The step that notices it is the first with the newcomer, whose first token it has on the device.
    assert not side.is_busy and planned == [3, 3] and core.stats.steps == num_steps + 1
    for _ in range(run_ahead + 2):
        core.step()
    assert core._state.num_tokens[slot] >= 51
    assert core._pipeline.num_in_flight <= run_ahead
    texts = finish(core)
    assert texts.pop("new") == alone(llm, [7] * 50, GREEDY)
    assert texts == {f"text {index}": alone(llm, [index + 1] * 10, LONG) for index in range(2)}


def test_steps_beside_a_pass_are_repeated_while_requests_wait(
    make_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, side, _ = make_server()
    core.add(core.input_processor.make([7] * 50, GREEDY))
    core.step()
    core.add(core.input_processor.make([8] * 50, GREEDY))
    monkeypatch.setattr(core._scheduler, "_make_step", None)
    for _ in range(8):
        core.step()
    assert side.is_busy and core.num_waiting == 1


def test_a_pass_does_not_wait_for_the_step_that_it_runs_beside(
    make_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, side, _ = make_server()
    enqueue, marked = core._runner.decoder.enqueue, []
    monkeypatch.setattr(
        core._runner.decoder, "enqueue", lambda *args: marked.append(side.is_marked) or enqueue(*args)
    )
    core.add(core.input_processor.make([7] * 50, GREEDY))
    core.step()
    assert side.num_begun == 1 and marked == [True]


def test_requests_wait_for_the_pass_in_flight_and_find_what_it_has_computed(
    make_server: Callable[..., Any], llm: LLM
) -> None:
    core, side, switch = make_server()
    core.add(core.input_processor.make([*[7] * 64, 5, 5], GREEDY, request_id="first"))
    core.step()
    core.add(core.input_processor.make([*[7] * 64, 9], GREEDY, request_id="second"))
    for _ in range(5):
        core.step()
    assert core.num_waiting == 1 and side.num_begun == 1
    assert core.manager.match(np.full(66, 7, np.int32)).num_tokens == 0
    switch.is_on = True
    core.step()
    assert core.num_waiting == 0
    assert core._requests["second"].num_cached_tokens == 64
    texts = finish(core)
    assert texts["first"] == alone(llm, [*[7] * 64, 5, 5], GREEDY)
    assert texts["second"] == alone(llm, [*[7] * 64, 9], GREEDY)


def test_long_prompts_take_one_pass_after_the_other(make_server: Callable[..., Any], llm: LLM) -> None:
    core, side, switch = make_server(max_num_batched_tokens=34, prefix_cache=False)
    switch.is_on = True
    before = core.stats.steps
    core.add(core.input_processor.make([7] * 140, GREEDY, request_id="new"))
    while core.num_waiting or side.is_busy or not side.num_begun:
        core.step()
        core.check_integrity()
    # 32 tokens beside the texts in each; the request that waits for its next pass does not hold them up.
    assert side.num_begun == 5 and core.stats.steps - before <= 7
    assert finish(core)["new"] == alone(llm, [7] * 140, GREEDY)


def test_prompts_come_before_decodes_while_further_requests_wait(
    make_server: Callable[..., Any], llm: LLM
) -> None:
    core, side, switch = make_server(max_num_seqs=3)
    for index in range(2):
        core.add(core.input_processor.make([7 + index] * 50, GREEDY, request_id=f"new {index}"))
    for _ in range(3):
        core.step()
    assert side.num_begun == 0 and core.num_waiting == 1
    # Nobody waits behind the second one.
    switch.is_on = True
    texts = finish(core)
    assert side.num_begun == 1
    for index in range(2):
        assert texts[f"new {index}"] == alone(llm, [7 + index] * 50, GREEDY)


def test_nothing_runs_beside_decodes_that_the_runner_does_not_take(make_server: Callable[..., Any]) -> None:
    core, side, _ = make_server()
    asked: list[tuple[int, ...]] = []
    core._scheduler._may_overlap = lambda *sizes: bool(asked.append(sizes))
    core.add(core.input_processor.make([7] * 50, GREEDY))
    for _ in range(3):
        core.step()
    assert asked == [(2, 50, 1)] and side.num_begun == 0


def test_servers_overlap_what_their_runner_takes_and_offline_use_nothing(
    make_llm: Callable[..., LLM], tiny_model_path: Path
) -> None:
    assert make_llm().core._scheduler._may_overlap is None
    core = EngineCore(
        EngineConfig(model=str(tiny_model_path), device="cpu", num_blocks=20, max_model_len=64),
        output_handler=OutputHandler(lambda outputs: None),
    )
    with closing(core):
        assert core._scheduler._may_overlap == core._runner.can_overlap


def test_what_has_no_graph_does_not_run_beside_decodes(make_server: Callable[..., Any]) -> None:
    core, *_ = make_server()
    runner = core._runner
    runner.decoder.widths = (2, 8)
    assert not runner.can_overlap(2, 50, 1), "no graphs of passes"
    runner.prompts = PromptGraphs(lambda *_: torch.empty(0), 256, 4, torch.device("cpu"))
    fits = [(1, 1, 1), (8, 256, 16), (8, 64, 8)]
    assert all(runner.can_overlap(*sizes) for sizes in fits)
    assert not any(runner.can_overlap(*sizes) for sizes in [(9, 50, 1), (8, 257, 1), (8, 256, 17)])
    runner.side = None
    assert not any(runner.can_overlap(*sizes) for sizes in fits)


@pytest.mark.parametrize(("num_tokens", "is_beside"), [(20, False), (21, True)])
def test_short_prompts_come_before_decodes(
    make_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, num_tokens: int, is_beside: bool
) -> None:
    monkeypatch.setattr(scheduler, "MAX_PROMPT_TOKENS_AMONG_DECODES", 20)
    core, side, _ = make_server()
    core.add(core.input_processor.make([7] * num_tokens, GREEDY))
    for _ in range(3):
        core.step()
    assert side.num_begun == is_beside


@pytest.mark.parametrize("others", [0, 1], ids=["nobody else is in the pass", "another one is in the pass"])
def test_what_an_aborted_request_held_is_free_when_its_pass_is_over(
    make_server: Callable[..., Any], llm: LLM, others: int
) -> None:
    core, side, switch = make_server(num_blocks=12, max_model_len=128)
    core.add(core.input_processor.make([7] * 60, GREEDY, request_id="aborted"))
    for index in range(others):
        core.add(core.input_processor.make([9] * 20, GREEDY, request_id=f"other {index}"))
    core.step()
    slot, num_free_rows = core._requests["aborted"].completions[0].slot, core.manager.num_free_rows
    blocks = core.manager.block_table[slot, :4].tolist()
    assert core.abort("aborted") is not None and side.is_busy
    core.add(core.input_processor.make([8] * 60, GREEDY, request_id="next"))
    for _ in range(5):
        core.step()
        core.check_integrity()
        assert core.manager.num_free_rows == num_free_rows
        assert core.manager.pool.ref_counts[blocks].tolist() == [1] * 4
    assert core.num_waiting == 1
    switch.is_on = True
    core.step()
    # Its blocks had computed nothing that a lookup could find, and have a new owner at once.
    assert core.num_waiting == 0
    texts = finish(core)
    assert texts["next"] == alone(llm, [8] * 60, GREEDY)
    for index in range(others):
        assert texts[f"other {index}"] == alone(llm, [9] * 20, GREEDY)
    for index in range(2):
        assert texts[f"text {index}"] == alone(llm, [index + 1] * 10, LONG)


def test_the_last_request_leaves_nothing_behind_while_its_pass_is_in_flight(
    make_server: Callable[..., Any],
) -> None:
    core, side, _ = make_server()
    core.add(core.input_processor.make([7] * 60, replace(GREEDY, n=3, temperature=1.0), request_id="last"))
    core.step()
    for name in ("text 0", "last", "text 1"):
        assert side.is_busy
        core.abort(name)
    assert not side.is_busy and core.manager.num_free_blocks == core.manager.num_usable_blocks
    core.check_integrity()


def test_a_pass_is_waited_for_where_there_is_nothing_else_to_do(
    make_server: Callable[..., Any], llm: LLM
) -> None:
    core, side, _ = make_server()
    core.add(core.input_processor.make([7] * 60, GREEDY, request_id="last"))
    core.step()
    assert side.is_busy
    texts = finish(core)
    assert side.num_begun == 1 and set(texts) == {"text 0", "text 1", "last"}
    assert texts["last"] == alone(llm, [7] * 60, GREEDY)


@pytest.mark.parametrize("num_tokens", [50, 200])
def test_a_pass_that_takes_too_long_is_waited_for(
    make_server: Callable[..., Any], llm: LLM, num_tokens: int
) -> None:
    core, side, _ = make_server()
    core.add(core.input_processor.make([7] * num_tokens, GREEDY, request_id="new"))
    num_steps = core.stats.steps
    while side.is_busy or not side.num_begun:
        core.step()
    # With the one that began it, and the one that waits for it.
    assert core.stats.steps - num_steps == 16 + num_tokens // 64 + 2
    assert finish(core)["new"] == alone(llm, [7] * num_tokens, GREEDY)


def test_nobody_is_preempted_beside_a_pass(
    make_server: Callable[..., Any], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_pipeline, "_STEPS_BESIDE_PASS", 100)
    core, side, switch = make_server(num_blocks=13, max_model_len=128, prefix_cache=False)
    core.add(core.input_processor.make([7] * 100, replace(LONG, max_tokens=28), request_id="new"))
    core.step()
    # In the end the texts need a block each, there is one, and the steps in flight are read: the pass is all that is
    # left, and is waited for.
    while side.is_busy:
        assert core.stats.preemptions == 0
        core.step()
    texts = finish(core)
    assert core.stats.preemptions > 0 and not switch.is_on
    assert texts["new"] == alone(llm, [7] * 100, replace(LONG, max_tokens=28))
    assert texts["text 0"] == alone(llm, [1] * 10, LONG)


@pytest.mark.parametrize("where", ["begin", "is_over", "join"])
def test_a_failed_pass_ends_the_engine(
    make_server: Callable[..., Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, side, switch = make_server()

    def fail(*args: object) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(side, where, fail)
    switch.is_on = True
    core.add(core.input_processor.make([7] * 60, GREEDY))
    with pytest.raises(EngineDeadError, match="RuntimeError: CUDA error"):
        for _ in range(3):
            core.step()
    core.close()


@pytest.mark.parametrize("is_late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize("run_ahead", [0, 1, 3])
@pytest.mark.parametrize("num_blocks", [40, 200])
def test_arrivals_and_aborts_beside_passes(
    make_llm: Callable[..., LLM], llm: LLM, is_late: bool, run_ahead: int, num_blocks: int
) -> None:
    prompts, params = crowd(90, seed=8, max_tokens=20)
    expected = tokens_of(llm, prompts, params)
    rng = random.Random(10 * run_ahead + is_late)
    num_others = count_completions()
    side = SideSteps(lambda num_looks: rng.random() < 0.3, is_late=is_late)
    options = {"max_num_seqs": 10, "num_blocks": num_blocks, "max_num_batched_tokens": 100}
    core = serve_with_side_passes(make_llm(run_ahead=run_ahead, max_model_len=256, **options), side)
    core._runner.decoder.widths = (2, 5, 8)
    arrivals, num_aborted, num_aborted_in_pass = list(range(len(prompts)))[::-1], 0, 0
    seen: dict[str, list[list[int]]] = {}
    while arrivals or core.num_unfinished:
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            if arrivals:
                index = arrivals.pop()
                core.add(core.input_processor.make(prompts[index], params[index], request_id=str(index)))
        if core._requests and rng.random() < 0.15:
            in_pass = [
                completion.request.request_id
                for slot in core._scheduler._slots_in_pass.tolist()
                if (completion := core._state.completions[slot]) is not None
            ]
            num_aborted_in_pass += bool(in_pass)
            core.abort(rng.choice(in_pass or list(core._requests)))
            num_aborted += 1
        for output in core.step():
            seen[output.request_id] = [completion.token_ids for completion in output.outputs]
        core.check_integrity()
    assert len(seen) + num_aborted == len(prompts) and num_aborted_in_pass > 1 and side.num_begun > 6
    assert seen == {name: expected[int(name)] for name in seen}
    assert_idle(core, num_others=num_others)
