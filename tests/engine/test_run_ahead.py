"""Steps that start before the tokens of earlier ones are read: the same text, exact ends, nothing cached too early."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rose_backend import LLM, SamplingParams
from rose_backend.engine.core import EngineCore
from rose_backend.engine.scheduler import Step
from rose_backend.errors import ConfigError
from tests.engine.conftest import GREEDY
from tests.support.crowd import crowd, tokens_of

PROMPT = "Once upon a time there was a"
WIDTHS = (4, 8, 12, 24)
"""Graphs' widths leave holes and make rows move; without any a step is as wide as it must be."""


@pytest.fixture
def make_ahead(make_llm: Callable[..., LLM]) -> Callable[..., LLM]:
    def make(run_ahead: int, widths: tuple[int, ...] = WIDTHS, **options: Any) -> LLM:
        llm = make_llm(**{"max_num_seqs": 24, "run_ahead": run_ahead, **options})
        llm.core._runner.decoder.widths = widths
        return llm

    return make


@pytest.mark.parametrize(("run_ahead", "widths"), [(0, WIDTHS), (1, ()), (2, WIDTHS), (4, WIDTHS)])
def test_same_text(make_ahead: Callable[..., LLM], llm: LLM, run_ahead: int, widths: tuple[int, ...]) -> None:
    prompts, params = crowd(40, seed=1, max_tokens=25)
    ahead = make_ahead(run_ahead, widths)
    tokens = tokens_of(ahead, prompts, params)
    assert tokens == tokens_of(llm, prompts, params)
    assert ahead.stats.generated_tokens == sum(len(one) for completions in tokens for one in completions)


def test_long_steady_state_decode_is_committed_on_the_way(make_ahead: Callable[..., LLM]) -> None:
    core = make_ahead(1, (), block_size=128, max_model_len=256).core
    state, computed = core._state, core.manager.num_computed_tokens
    core.add(core.input_processor.make([5, 6, 7], SamplingParams(max_tokens=100, ignore_eos=True)))
    lags = []
    while core.num_unfinished:
        core.step()
        for row in core._scheduler.running_slots.tolist():
            lags.append(int(state.num_tokens[row] - computed[row]))
    assert len(lags) > 90
    assert 20 < max(lags) < 40


@pytest.mark.parametrize("run_ahead", [1, 3])
def test_pressure(make_ahead: Callable[..., LLM], llm: LLM, run_ahead: int) -> None:
    prompts, params = crowd(40, seed=2, max_tokens=25)
    tight = make_ahead(run_ahead, num_blocks=28, max_model_len=256, max_num_batched_tokens=37)
    assert tokens_of(tight, prompts, params) == tokens_of(llm, prompts, params)
    assert tight.stats.preemptions > 0


@pytest.mark.parametrize("run_ahead", [1, 3])
def test_more_rows_than_a_step_takes(make_ahead: Callable[..., LLM], llm: LLM, run_ahead: int) -> None:
    prompts, params = crowd(30, seed=2, max_tokens=12)
    # A prompt's first token may be drawn long before its row is in a decode step.
    narrow = make_ahead(run_ahead, max_num_batched_tokens=5)
    assert tokens_of(narrow, prompts, params) == tokens_of(llm, prompts, params)


def test_rows_with_sampling_extras(make_ahead: Callable[..., LLM], llm: LLM) -> None:
    prompts, params = crowd(20, seed=3, max_tokens=15)
    special: list[dict[str, Any]] = [
        {"logprobs": 2},
        {"repetition_penalty": 1.5},
        {"min_tokens": 9, "stop_token_ids": [5, 6, 7], "stop": ["a"]},
    ]
    params += [SamplingParams(max_tokens=12, seed=index, **options) for index, options in enumerate(special)]
    prompts += prompts[:3]
    ahead = make_ahead(2)
    outputs, expected = ahead.generate(prompts, params), llm.generate(prompts, params)
    for output, other in zip(outputs, expected, strict=True):
        for completion, reference in zip(output.outputs, other.outputs, strict=True):
            assert completion.token_ids == reference.token_ids and completion.text == reference.text
    for ours, theirs in zip(outputs[20].outputs[0].logprobs, expected[20].outputs[0].logprobs, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(abs(ours[token].logprob - theirs[token].logprob) < 1e-4 for token in ours)


def test_rows_go_on_when_rows_with_sampling_extras_join_and_leave(
    make_ahead: Callable[..., LLM], llm: LLM
) -> None:
    prompts = [[index + 1] * 10 for index in range(3)]
    expected = llm.generate(prompts, replace(GREEDY, max_tokens=60))
    core = decoding(make_ahead(2), 3)
    core.add(core.input_processor.make([9] * 20, replace(GREEDY, max_tokens=6, logprobs=1)))
    finished = {}
    while core.num_unfinished:
        finished |= {output.prompt_token_ids[0]: output for output in core.step()}
    assert len(finished[9].outputs[0].logprobs) == 6
    for index, output in enumerate(expected):
        assert finished[index + 1].outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize("run_ahead", [1, 4])
def test_tokens_behind_a_stop_are_neither_shown_nor_cached(
    make_ahead: Callable[..., LLM], run_ahead: int
) -> None:
    llm = make_ahead(run_ahead)
    long = replace(GREEDY, max_tokens=40)
    whole = llm.generate(PROMPT, long)[0].outputs[0]
    assert llm.core.manager.reset_prefix_cache()
    stop_token = whole.token_ids[5]
    before = llm.stats.generated_tokens
    (stopped,) = llm.generate(PROMPT, replace(long, stop_token_ids=[stop_token]))
    end = whole.token_ids.index(stop_token) + 1
    assert stopped.outputs[0].token_ids == whole.token_ids[:end]
    assert llm.stats.generated_tokens - before == end
    known = stopped.prompt_token_ids + whole.token_ids[:end]
    # Steps behind the stop have computed the stop token and more, but nobody had asked for them.
    assert (
        llm.generate([[*known, *whole.token_ids[end : end + 3]]], GREEDY)[0].num_cached_tokens
        == len(known) - 1
    )


def test_streams_show_every_token_once(make_ahead: Callable[..., LLM], llm: LLM) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=12, stop=["e"])
    outputs = list(make_ahead(2).stream(PROMPT, params))
    (expected,) = llm.generate(PROMPT, params)
    for index, completion in enumerate(expected.outputs):
        assert "".join(
            output.outputs[index].delta_text for output in outputs if len(output.outputs) > index
        ) == (completion.text)
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == sorted(lengths) and lengths[0] == 1


def decoding(llm: LLM, num_requests: int, max_tokens: int = 60) -> EngineCore:
    core = llm.core
    for index in range(num_requests):
        core.add(core.input_processor.make([index + 1] * 10, replace(GREEDY, max_tokens=max_tokens)))
    for _ in range(4):
        core.step()
    return core


def test_a_cpu_runs_not_ahead_unless_told_to(make_llm: Callable[..., LLM]) -> None:
    core = decoding(make_llm(device="cpu"), 1)
    assert core.stats.generated_tokens == core.stats.steps == 4
    with pytest.raises(ConfigError, match=r"run_ahead: got 5, allowed is an integer from 0 to 4"):
        make_llm(run_ahead=5)
    while core.num_unfinished:
        core.step()


def test_a_new_request_is_in_the_next_step(
    make_ahead: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = decoding(make_ahead(1), 3)
    started: list[Step] = []
    forward = core._runner.forward
    monkeypatch.setattr(core._runner, "forward", lambda step: started.append(step) or forward(step))
    core.add(core.input_processor.make([9] * 20, GREEDY))
    core.step()
    (step,) = started
    assert (step.num_decodes, step.num_new_tokens.tolist()) == (3, [1, 1, 1, 20])
    while core.num_unfinished:
        core.step()


def test_steps_are_read_in_order_at_most_run_ahead_steps_later(make_ahead: Callable[..., LLM]) -> None:
    for run_ahead in (0, 1, 3):
        core = decoding(make_ahead(run_ahead), 2)
        assert core.stats.steps == 4
        assert core.stats.generated_tokens == 2 * (4 - run_ahead)
        for _ in range(10):
            core.step()
        assert core.stats.generated_tokens == 2 * (14 - run_ahead)
        while core.num_unfinished:
            core.step()
        # Nobody decodes past a length that was known before.
        assert core.stats.steps == 60


def test_steady_state_decode_writes_no_row(
    make_ahead: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = decoding(make_ahead(1), 5)
    buffers = core._runner.decoder.buffers
    written: list[str] = []
    for name in ("write_rows", "write_block_tables"):
        write = getattr(buffers, name)
        monkeypatch.setattr(
            buffers, name, lambda *args, name=name, write=write: (written.append(name), write(*args))
        )
    for _ in range(44):
        core.step()
    # All five rows get three blocks of 16 tokens at a time: one that they need, and two to spare.
    assert written == ["write_block_tables"]
    while core.num_unfinished:
        core.step()


def test_steady_state_decode_is_not_scheduled_again(
    make_ahead: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = decoding(make_ahead(1), 5)
    make_step, planned = core._scheduler._make_step, []
    monkeypatch.setattr(
        core._scheduler, "_make_step", lambda rows, *args: planned.append(len(rows)) or make_step(rows, *args)
    )
    for _ in range(44):
        core.step()
    assert planned == [5]
    core.abort(next(iter(core._requests)))
    core.step()
    core.step()
    assert planned == [5, 4]
    core.add(core.input_processor.make([7] * 9, GREEDY))
    core.step()
    assert planned[2:] == [5]
    while core.num_unfinished:
        core.step()


def test_blocks_are_taken_a_few_rows_at_a_time_and_before_they_are_needed(
    make_ahead: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = decoding(make_ahead(1, (), max_num_seqs=150, num_blocks=8192), 150, max_tokens=110)
    reserve, make_step = core.manager.reserve, core._scheduler._make_step
    taken, planned = [0], [0]

    def counting(rows: Any, num_tokens: Any) -> Any:
        answer = reserve(rows, num_tokens)
        taken[-1] += answer.num_new_blocks
        return answer

    def planning(*args: Any) -> Any:
        planned[-1] += 1
        return make_step(*args)

    monkeypatch.setattr(core.manager, "reserve", counting)
    monkeypatch.setattr(core._scheduler, "_make_step", planning)
    while int(core._state.num_tokens[0]) < 110:
        core.step()
        taken.append(0)
        planned.append(0)
    # Several rounds, each of several steps: no step takes the blocks of all rows at once.
    plans = np.flatnonzero(planned)
    assert len(plans) >= 2 and np.count_nonzero(taken) > len(plans)
    assert all(max(each) < sum(each) for each in np.split(np.array(taken), plans[1:]))
    # Rows get several blocks at a time: steps are planned less often than blocks fill up.
    assert np.diff(plans).min() > 16
    while core.num_unfinished:
        core.step()
    core.check_integrity()


@pytest.mark.parametrize("run_ahead", [1, 3])
def test_arrivals_and_aborts_at_any_time(make_ahead: Callable[..., LLM], llm: LLM, run_ahead: int) -> None:
    prompts, params = crowd(40, seed=6, max_tokens=20)
    expected = tokens_of(llm, prompts, params)
    rng = random.Random(run_ahead)
    core = make_ahead(run_ahead, max_num_seqs=8, num_blocks=40, max_model_len=256).core
    core._runner.decoder.widths = (2, 5, 8)
    arrivals = list(range(len(prompts)))
    seen: dict[str, list[list[int]]] = {}
    ended: dict[str, list[list[int]]] = {}
    while arrivals or core.num_unfinished:
        for _ in range(rng.choice((0, 0, 1, 3))):
            if arrivals:
                index = arrivals.pop()
                core.add(core.input_processor.make(prompts[index], params[index], request_id=str(index)))
        if core._requests and rng.random() < 0.15:
            aborted = core.abort(rng.choice(list(core._requests)))
            assert aborted is not None
            ended[aborted.request_id] = [completion.token_ids for completion in aborted.outputs]
        for output in core.step():
            seen[output.request_id] = [completion.token_ids for completion in output.outputs]
        core.check_integrity()
    assert len(seen) + len(ended) == len(prompts) and len(ended) > 3
    for name, tokens in seen.items():
        assert tokens == expected[int(name)], name
    for name, tokens in ended.items():
        for some, whole in zip(tokens, expected[int(name)], strict=False):
            assert some == whole[: len(some)], name
    assert core.manager.num_free_blocks == core.manager.num_usable_blocks


def test_nothing_is_findable_before_its_token_is_known(make_ahead: Callable[..., LLM]) -> None:
    core = decoding(make_ahead(3), 1)
    (row,) = core._scheduler.running_slots.tolist()
    for _ in range(20):
        core.step()
        num_known = int(core._state.num_tokens[row])
        assert core.manager.num_computed_tokens[row] <= num_known - 1
        known = core._state.token_ids[row, :num_known]
        match = core.manager.match(np.concatenate([known, known]).astype(np.int32))
        assert match.num_tokens <= num_known - 1
    while core.num_unfinished:
        core.step()


def test_rows_hold_block_lookahead_only_where_blocks_are_plenty(make_ahead: Callable[..., LLM]) -> None:
    # The short rows get their next blocks together with the long ones, before they need them.
    for num_blocks, num_held in ((200, 3 * 4 + 2 * 3), (120, 3 * 3 + 2 * 2), (5 * 16, 3 * 2 + 2)):
        core = make_ahead(1, num_blocks=num_blocks, max_model_len=128).core
        for index in range(5):
            core.add(
                core.input_processor.make(
                    [index + 1] * (10 if index < 3 else 4), replace(GREEDY, max_tokens=60)
                )
            )
        while int(core._state.num_tokens.max()) < 19:
            core.step()
        assert core.manager.num_usable_blocks - core.manager.num_free_blocks == num_held
        while core.num_unfinished:
            core.step()


@pytest.mark.parametrize("num_steps", [1, 7, 30])
def test_a_new_request_finds_all_known_tokens(make_ahead: Callable[..., LLM], num_steps: int) -> None:
    core = decoding(make_ahead(2), 3)
    for _ in range(num_steps):
        core.step()
    row = int(core._scheduler.running_slots[1])
    known = core._state.token_ids[row, : core._state.num_tokens[row]].tolist()
    core.add(core.input_processor.make([*known, 5, 5], replace(GREEDY, max_tokens=1), request_id="newcomer"))
    finished = {}
    while core.num_unfinished:
        finished |= {output.request_id: output for output in core.step()}
    assert finished["newcomer"].num_cached_tokens >= len(known) - 1
