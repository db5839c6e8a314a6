"""Rows with penalties, ``min_tokens`` or logprobs in steps that are started ahead: as defined, and no slower."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rose_backend import LLM, SamplingParams
from rose_backend.config import MAX_REPETITION_PENALTY, MAX_TEMPERATURE, MIN_REPETITION_PENALTY
from rose_backend.engine.core import EngineCore
from rose_backend.engine.sampling_params import GREEDY_TEMPERATURE
from tests.engine.conftest import GREEDY
from tests.engine.test_sampling import greedy_with_penalties
from tests.support.crowd import crowd, tokens_of
from tests.support.near_ties import near_ties
from tests.support.reference_generation import reference_logits

SPECIAL: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "logprobs": {"logprobs": 3},
    "min_tokens": {"min_tokens": 60, "stop_token_ids": [5, 6]},
    "processors": {"bad_words": ["king", "the king"], "logit_bias": {5: 2.0}},
}


@pytest.fixture
def make_ahead(make_llm: Callable[..., LLM]) -> Callable[..., LLM]:
    def make(run_ahead: int, **options: Any) -> LLM:
        # On a GPU draws are replayed from graphs: no call could be counted.
        llm = make_llm(**{"device": "cpu", "max_num_seqs": 24, "run_ahead": run_ahead, **options})
        # Widths as graphs have them leave holes and make rows move.
        llm.core._runner.decoder.widths = (4, 8, 12, 24)
        return llm

    return make


def start(core: EngineCore, *all_params: SamplingParams) -> None:
    for index, params in enumerate(all_params):
        core.add(core.input_processor.make([index + 1] * 10, params))
    for _ in range(5):
        core.step()


def count_redraws(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    special, widths = core._runner._extras, []
    redraw = special.redraw
    monkeypatch.setattr(
        special, "redraw", lambda buffers, logits: widths.append(len(logits)) or redraw(buffers, logits)
    )
    return widths


@pytest.mark.parametrize("kind", list(SPECIAL))
def test_steps_are_started_ahead_and_not_planned_again(
    make_ahead: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    core = make_ahead(3).core
    plain = replace(GREEDY, max_tokens=60)
    start(core, plain, replace(plain, **SPECIAL[kind]), plain)
    assert core.stats.generated_tokens == 3 * (core.stats.steps - 3)
    widths = count_redraws(core, monkeypatch)
    make_step, planned = core._scheduler._make_step, []
    monkeypatch.setattr(
        core._scheduler, "_make_step", lambda rows, *args: planned.append(len(rows)) or make_step(rows, *args)
    )
    for _ in range(30):
        core.step()
    assert core.stats.generated_tokens == 3 * (core.stats.steps - 3) == 3 * 32
    # One plan, for blocks for 32 tokens.
    assert planned == [3] and widths == [4] * 30
    while core.num_unfinished:
        core.step()


def test_steps_without_sampling_extras_draw_once(
    make_ahead: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_ahead(1).core
    widths = count_redraws(core, monkeypatch)
    start(core, replace(GREEDY, max_tokens=60), replace(GREEDY, max_tokens=60))
    assert widths == []
    core.add(core.input_processor.make([9] * 10, replace(GREEDY, max_tokens=12, logprobs=0)))
    core.add(
        core.input_processor.make([8] * 10, replace(GREEDY, max_tokens=40, min_tokens=5, stop_token_ids=[3]))
    )
    while core.num_unfinished:
        core.step()
    # Twelve tokens with logprobs, the first of them behind the prompt. The other row is no special one by then.
    assert widths == [4] * 11


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_row_among_others_that_come_and_go_against_the_definition(
    make_ahead: Callable[..., LLM], tiny_model_path: Path, run_ahead: int
) -> None:
    rng = random.Random(run_ahead)
    prompt = [7, 300, 301, 302, 7]
    params = replace(
        GREEDY, max_tokens=30, min_tokens=20, logprobs=2, repetition_penalty=1.2, frequency_penalty=0.3
    )
    wanted = greedy_with_penalties(tiny_model_path, prompt, params, 8)
    params = replace(params, stop_token_ids=[wanted[1], wanted[4], 9])
    expected = greedy_with_penalties(tiny_model_path, prompt, params, 30)
    assert expected[:5] != wanted[:5]
    core = make_ahead(run_ahead).core
    others, other_params = crowd(40, seed=9, max_tokens=9)
    names = ["first", "second"]
    finished = {}
    while others or core.num_unfinished:
        for _ in range(rng.randrange(4)):
            if others:
                core.add(core.input_processor.make(others.pop(), other_params.pop()))
        if names and core.stats.steps > 6 - 4 * len(names):
            core.add(core.input_processor.make(prompt, params, request_id=names.pop()))
        finished |= {output.request_id: output for output in core.step() if output.finished}
    end = next(i for i in range(20, 30) if expected[i] in params.stop_token_ids or i == 29) + 1
    logprobs = torch.log_softmax(reference_logits(tiny_model_path, prompt + expected), -1)[len(prompt) - 1 :]
    for name in ("first", "second"):
        (completion,) = finished[name].outputs
        assert completion.token_ids == expected[:end]
        for token_id, row, entry in zip(expected, logprobs, completion.logprobs, strict=False):
            assert set(entry) == {token_id, *row.topk(2).indices.tolist()}
            assert entry[token_id].logprob == pytest.approx(float(row[token_id]), abs=2e-4)
            assert entry[token_id].rank == int((row > row[token_id]).sum()) + 1


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_stop_token_may_be_drawn_behind_min_tokens_and_not_before(
    make_ahead: Callable[..., LLM], run_ahead: int
) -> None:
    llm, prompt = make_ahead(run_ahead), [9, 8, 7]
    whole = llm.generate([prompt], replace(GREEDY, max_tokens=20))[0].outputs[0].token_ids
    later = next(index for index in range(6, 20) if whole[index] not in whole[:index])
    for index in (0, later):
        params = replace(GREEDY, max_tokens=20, stop_token_ids=[whole[index]])
        early, late = (replace(params, min_tokens=index + extra) for extra in (0, 1))
        (ended,), (went_on,) = (llm.generate([prompt], each)[0].outputs for each in (early, late))
        # Without the cache the first token is drawn behind the prompt, with it in a decode step.
        assert llm.core.manager.reset_prefix_cache()
        assert llm.generate([prompt], late)[0].outputs[0].token_ids == went_on.token_ids
        assert ended.token_ids == whole[: index + 1] and ended.finish_reason == "stop"
        assert went_on.token_ids[:index] == whole[:index] and went_on.token_ids[index] != whole[index]


@pytest.mark.parametrize("fused_sampler", [True, False])
@pytest.mark.parametrize("repetition_penalty", [MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY])
def test_min_tokens_holds_at_the_ends_of_every_range(
    make_llm: Callable[..., LLM], repetition_penalty: float, fused_sampler: bool
) -> None:
    # Some 190 draws at the highest temperature would bring up a twentieth of the vocabulary.
    llm = make_llm(fused_sampler=fused_sampler, max_num_seqs=32)
    eos, *others = stops = [llm.core._state.eos_token_ids[0], *range(128)]
    penalties = {"presence_penalty": 2.0, "frequency_penalty": -2.0, "repetition_penalty": repetition_penalty}
    params = [
        SamplingParams(
            n=8, seed=1, temperature=temperature, top_p=top_p, min_tokens=12, max_tokens=14,
            stop_token_ids=others, **(penalties if has_penalties else {}),
        )
        for temperature in (GREEDY_TEMPERATURE, MAX_TEMPERATURE)
        for top_p in (5e-324, 1.0)
        for has_penalties in (True, False)
    ]  # fmt: skip
    for output in llm.generate([[eos, *range(40)]] * len(params), params):
        for completion in output.outputs:
            assert len(completion.token_ids) >= 12
            assert not set(stops) & set(completion.token_ids[:12])


def test_a_slot_forgets_the_row_that_left_it(make_ahead: Callable[..., LLM]) -> None:
    llm, prompt = make_ahead(1), [300, 301, 302]
    expected = llm.generate([prompt], replace(GREEDY, max_tokens=12))[0].outputs[0].token_ids
    core = llm.core
    plain = replace(GREEDY, max_tokens=60)
    start(core, replace(plain, min_tokens=60, stop_token_ids=expected), replace(plain, logprobs=0))
    row_of_slot = core._runner.decoder._rows._row_of_slot
    (row,) = row_of_slot[core._scheduler.running_slots[:1]].tolist()
    core.abort(next(iter(core._requests)))
    core.add(core.input_processor.make(prompt, replace(GREEDY, max_tokens=12), request_id="plain"))
    core.step()
    core.step()
    assert row_of_slot[core._scheduler.running_slots[-1]] == row
    finished = {}
    while core.num_unfinished:
        finished |= {output.request_id: output for output in core.step()}
    assert finished["plain"].outputs[0].token_ids == expected


def test_every_draw_of_a_crowd_against_the_definition(
    make_ahead: Callable[..., LLM], tiny_model_path: Path
) -> None:
    prompts, params = crowd(40, seed=5, max_tokens=25)
    outputs = tokens_of(make_ahead(2), prompts, params)
    assert near_ties(tiny_model_path, prompts, params, outputs) == []


@pytest.mark.parametrize("kind", ["penalties", "processors"])
def test_preempted_rows_are_counted_anew(make_ahead: Callable[..., LLM], kind: str) -> None:
    # Few tokens, so that the first of a bad word's is often the last before a preemption.
    few = {"allowed_token_ids": [259, 269, 623], "bad_words": ["the king", "king and", "and the king"]}
    options = {**SPECIAL[kind], **(few if kind == "processors" else {})}
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=90, ignore_eos=True, **options) for i in range(6)
    ]
    prompts = [[100 + i] * (20 + i) for i in range(6)]
    expected = tokens_of(make_ahead(0), prompts, params)
    tight = make_ahead(2, max_model_len=160, num_blocks=18)
    assert tokens_of(tight, prompts, params) == expected
    assert tight.stats.preemptions > 0
