"""Drafts: texts are those without drafts, whatever is proposed, and only what was accepted counts."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rose_backend import LLM, SamplingParams
from rose_backend.config import SpeculativeConfig
from rose_backend.engine.drafts import AdaptiveDrafts
from rose_backend.engine.sequence_state import SequenceState
from rose_backend.engine.structured_outputs import StructuredOutputsParams
from rose_backend.kernels.arguments import DraftedRows
from tests.engine.conftest import GREEDY
from tests.support.crowd import VOCAB_SIZE, crowd, tokens_of
from tests.support.llama_checkpoints import write_checkpoint

WIDTHS = (4, 8, 12, 24)
"""Graphs' widths leave holes and make rows move; without any a step is as wide as it must be."""
DRAFTERS = ("right", "wrong", "empty", "random", "some", "looked up")
PROMPT = "Once upon a time there was a"


NOT_ADAPTIVE = {"adaptive_drafts": False}
"""Drafts whatever the time they take."""


def n_grams(num_drafts: int, most: int = 4, least: int = 1) -> dict[str, Any]:
    return {
        "method": "ngram",
        "num_speculative_tokens": num_drafts,
        "prompt_lookup_max": most,
        "prompt_lookup_min": least,
    }


class Drafter:
    """Proposes what is known to come, or something else.

    Args:
        kind: one of ``DRAFTERS``, but not the engine's own.
        texts: all tokens of each completion, prompts included.
    """

    def __init__(self, kind: str, num_drafts: int, texts: Sequence[list[int]]) -> None:
        self._kind, self._num_drafts, self._rng = kind, num_drafts, random.Random(5)
        self._next: dict[tuple[int, ...], list[int]] = {}
        for text in texts:
            for end in range(1, len(text)):
                self._next.setdefault(tuple(text[:end]), text[end : end + num_drafts])

    def __call__(self, rows: DraftedRows, num_drafts: int) -> torch.Tensor:
        drafts = torch.full((len(rows.slots), num_drafts), -1)
        for row, computed in enumerate(rows.num_computed_tokens.tolist()):
            if computed >= 0 and self._kind != "empty":
                known = tuple(rows.token_ids[rows.slots[row], : computed + 1].tolist())
                right = self._next.get(known, [])
                right = [*right[:num_drafts], *[0] * (num_drafts - len(right))]
                drafts[row] = torch.tensor([self._draft(token) for token in right])
        return drafts

    def _draft(self, token: int) -> int:
        if self._kind == "random":
            return self._rng.randrange(-1, VOCAB_SIZE)
        is_right = self._kind == "right" or (self._kind == "some" and self._rng.random() < 0.7)
        return token if is_right else (token - 1 if token else 1)


MakeDrafting = Callable[..., LLM]


@pytest.fixture
def make_drafting(make_llm: Callable[..., LLM]) -> MakeDrafting:
    """Return a function that makes engines with drafts, of what is looked up or of a ``Drafter``."""

    def make(
        drafter: str = "looked up",
        texts: Sequence[list[int]] = (),
        num_drafts: int = 3,
        widths: tuple[int, ...] = WIDTHS,
        **options: Any,
    ) -> LLM:
        llm = make_llm(
            **{**NOT_ADAPTIVE, "max_num_seqs": 24, "speculative_config": n_grams(num_drafts), **options}
        )
        decoder = llm.core._runner.decoder
        decoder.widths = widths
        if drafter != "looked up":
            decoder.drafts.propose = Drafter(drafter, num_drafts, texts)
        return llm

    return make


def texts_of(prompts: list[list[int]], tokens: list[list[list[int]]]) -> list[list[int]]:
    return [
        prompt + each for prompt, completions in zip(prompts, tokens, strict=True) for each in completions
    ]


def plain_crowd(num_requests: int, seed: int, max_tokens: int = 30) -> tuple[Any, list[SamplingParams]]:
    """Return a crowd that drafts can be made for."""
    prompts, params = crowd(num_requests, seed, max_tokens)
    plain = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0}
    plain |= {"logprobs": None, "logit_bias": None, "bad_words": None, "allowed_token_ids": None}
    return prompts, [replace(each, **plain) for each in params]


@pytest.mark.parametrize(("run_ahead", "num_drafts"), [(0, 3), (1, 1), (2, 7)])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_same_text(
    make_drafting: MakeDrafting, llm: LLM, drafter: str, run_ahead: int, num_drafts: int
) -> None:
    prompts, params = plain_crowd(40, seed=1)
    expected = tokens_of(llm, prompts, params)
    drafting = make_drafting(drafter, texts_of(prompts, expected), num_drafts, run_ahead=run_ahead)
    assert tokens_of(drafting, prompts, params) == expected
    stats = drafting.stats
    assert stats.generated_tokens == sum(len(one) for completions in expected for one in completions)
    assert stats.spec_decode_num_draft_tokens == num_drafts * stats.spec_decode_num_drafts > 200
    by_place = stats.spec_decode_num_accepted_tokens_per_pos
    assert len(by_place) == num_drafts and sum(by_place) == stats.spec_decode_num_accepted_tokens
    share = stats.spec_decode_num_accepted_tokens / stats.spec_decode_num_draft_tokens
    least, most = {"right": (0.6, 1), "some": (0.2, 0.9), "looked up": (0.001, 1)}.get(drafter, (0, 0.01))
    assert least <= share <= most
    if drafter in ("wrong", "empty"):
        assert share == 0


@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("drafter", ["some", "looked up"])
def test_same_text_beside_requests_without_drafts(
    make_drafting: MakeDrafting, llm: LLM, drafter: str, run_ahead: int
) -> None:
    prompts, params = crowd(60, seed=7, max_tokens=25)
    expected = llm.generate(prompts, params)
    tokens = [[c.token_ids for c in output.outputs] for output in expected]
    # So few that some steps have no request that needs more than a draw.
    drafting = make_drafting(
        drafter, texts_of(prompts, tokens), widths=(2, 3), run_ahead=run_ahead, max_num_seqs=3
    )
    outputs = drafting.generate(prompts, params)
    for output, other in zip(outputs, expected, strict=True):
        for ours, theirs in zip(output.outputs, other.outputs, strict=True):
            assert ours.token_ids == theirs.token_ids and ours.text == theirs.text
            assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
            for mine, reference in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
                assert mine.keys() == reference.keys()
                assert all(abs(mine[token].logprob - reference[token].logprob) < 1e-4 for token in mine)
    assert drafting.stats.spec_decode_num_accepted_tokens > 0
    assert drafting.stats.spec_decode_num_drafts < drafting.stats.generated_tokens / 2


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
@pytest.mark.parametrize("drafter", ["right", "wrong", "some"])
def test_pressure(make_drafting: MakeDrafting, llm: LLM, drafter: str, run_ahead: int) -> None:
    prompts, params = plain_crowd(40, seed=2, max_tokens=25)
    expected = tokens_of(llm, prompts, params)
    limits = {"num_blocks": 28, "max_model_len": 256, "max_num_batched_tokens": 37}
    tight = make_drafting(drafter, texts_of(prompts, expected), run_ahead=run_ahead, **limits)
    assert tokens_of(tight, prompts, params) == expected
    assert tight.stats.preemptions > 0 and tight.stats.spec_decode_num_drafts > 0


@pytest.mark.parametrize("max_model_len", [39, 48, 49])
@pytest.mark.parametrize(("drafter", "run_ahead"), [("right", 0), ("right", 4), ("some", 2), ("wrong", 1)])
def test_the_last_tokens_before_the_greatest_length(
    make_drafting: MakeDrafting,
    make_llm: Callable[..., LLM],
    drafter: str,
    run_ahead: int,
    max_model_len: int,
) -> None:
    prompts = [[7 + index] * (max_model_len - 1 - index) for index in range(12)]
    params = [replace(GREEDY, max_tokens=None), SamplingParams(seed=3, max_tokens=None, ignore_eos=True)] * 6
    plain = make_llm(max_num_seqs=12, max_model_len=max_model_len)
    expected = tokens_of(plain, prompts, params)
    assert [len(one[0]) for one in expected] == list(range(1, 13))
    # As few blocks as there may be: those of one sequence.
    for num_blocks in (None, -(-max_model_len // 16) + 1):
        drafting = make_drafting(
            drafter,
            texts_of(prompts, expected),
            num_drafts=7,
            run_ahead=run_ahead,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
        )
        assert tokens_of(drafting, prompts, params) == expected
        assert drafting.stats.spec_decode_num_drafts > 0


def test_texts_up_to_the_models_window(make_drafting: MakeDrafting, llm: LLM) -> None:
    """There are no positions past it."""
    prompts, params = [[7 + index] * (1018 + index) for index in range(4)], replace(GREEDY, max_tokens=None)
    expected = tokens_of(llm, prompts, [params] * 4)
    assert [len(one[0]) for one in expected] == [6, 5, 4, 3]
    drafting = make_drafting("some", texts_of(prompts, expected), num_drafts=7)
    assert tokens_of(drafting, prompts, [params] * 4) == expected


@pytest.mark.parametrize("drafter", ["right", "some"])
def test_ends_inside_drafts(make_drafting: MakeDrafting, llm: LLM, drafter: str) -> None:
    prompt = llm.tokenizer.encode(PROMPT)
    long = replace(GREEDY, max_tokens=40)
    (whole,) = tokens_of(llm, [prompt], [long])
    text = llm.tokenizer.decode(whole[0])
    drafting = make_drafting(drafter, texts_of([prompt], [whole]), num_drafts=7, run_ahead=2)
    for end in range(3, 20):
        ends: list[dict[str, Any]] = [
            {"max_tokens": end},
            {"stop_token_ids": [whole[0][end]]},
            {"stop": [text[2 * end : 2 * end + 3]]},
            {"min_tokens": end + 2, "stop_token_ids": [whole[0][end]]},
        ]
        for options in ends:
            params = replace(long, **options)
            for ours, theirs in zip(
                drafting.generate([prompt], params), llm.generate([prompt], params), strict=True
            ):
                assert ours.outputs == theirs.outputs
    assert drafting.stats.spec_decode_num_accepted_tokens > 0


def test_streams_show_every_token_once(make_drafting: MakeDrafting, llm: LLM) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=24, stop=["zq"], ignore_eos=True)
    (expected,) = llm.generate(PROMPT, params)
    prompt = expected.prompt_token_ids
    texts = [prompt + each.token_ids for each in expected.outputs]
    outputs = list(make_drafting("some", texts, run_ahead=1).stream(PROMPT, params))
    for index, completion in enumerate(expected.outputs):
        pieces = [output.outputs[index].delta_text for output in outputs if len(output.outputs) > index]
        assert "".join(pieces) == completion.text


def test_only_accepted_tokens_are_cached(make_drafting: MakeDrafting, llm: LLM) -> None:
    prompt = list(range(50, 71))
    (whole,) = tokens_of(llm, [prompt], [replace(GREEDY, max_tokens=40)])
    known = prompt + whole[0]
    for drafter in ("wrong", "some"):
        drafting = make_drafting(drafter, [known], num_drafts=7, run_ahead=2)
        tokens_of(drafting, [prompt], [replace(GREEDY, max_tokens=40)])
        for length in range(30, 56, 5):
            # What the drafter has proposed here was computed, and then something else.
            other = [*known[:length], known[length] - 1, 3, 4, 5]
            assert drafting.generate([other], GREEDY)[0].num_cached_tokens <= length
            (hit,) = drafting.generate([known[: length + 1]], GREEDY)
            assert hit.num_cached_tokens == length
            assert (
                hit.outputs[0].token_ids
                == llm.generate([known[: length + 1]], GREEDY)[0].outputs[0].token_ids
            )


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_hits_in_what_requests_with_drafts_still_write(
    make_drafting: MakeDrafting, llm: LLM, run_ahead: int
) -> None:
    prompt = list(range(50, 71))
    (whole,) = tokens_of(llm, [prompt], [replace(GREEDY, max_tokens=60)])
    known = prompt + whole[0]
    drafting = make_drafting("some", [known], run_ahead=run_ahead)
    core = drafting.core
    make = core.input_processor.make
    core.add(make(prompt, replace(GREEDY, max_tokens=60)))
    finished, lengths = {}, [25, 33, 41, 47]
    while core.num_unfinished:
        slots = core._scheduler.running_slots.tolist()
        if lengths and slots and core._state.num_tokens[slots[0]] > lengths[0] + 1:
            length = lengths.pop(0)
            core.add(make([*known[:length], 9, 8, 7], replace(GREEDY, n=2, max_tokens=8)))
        finished |= {tuple(output.prompt_token_ids): output for output in core.step()}
    assert finished[tuple(prompt)].outputs[0].token_ids == whole[0]
    for length in (25, 33, 41, 47):
        branch = [*known[:length], 9, 8, 7]
        (expected,) = llm.generate([branch], replace(GREEDY, n=2, max_tokens=8))
        output = finished[tuple(branch)]
        assert output.num_cached_tokens == length
        assert [each.token_ids for each in output.outputs] == [each.token_ids for each in expected.outputs]
    assert core.stats.clones > 0


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_aborts(make_drafting: MakeDrafting, llm: LLM, run_ahead: int) -> None:
    prompts, params = plain_crowd(12, seed=4)
    params = [replace(each, n=1, max_tokens=30, stop=None) for each in params]
    expected = tokens_of(llm, prompts, params)
    drafting = make_drafting("some", texts_of(prompts, expected), run_ahead=run_ahead)
    core, rng = drafting.core, random.Random(1)
    requests = [core.input_processor.make(*each) for each in zip(prompts, params, strict=True)]
    for request in requests:
        core.add(request)
    aborted, finished = {}, {}
    while core.num_unfinished:
        finished |= {output.request_id: output for output in core.step()}
        left = [each.request_id for each in requests if each.request_id in core._requests]
        if left and rng.random() < 0.2:
            request_id = rng.choice(left)
            aborted[request_id] = core.abort(request_id)
    assert aborted and finished
    for request, whole in zip(requests, expected, strict=True):
        output = (aborted | finished)[request.request_id]
        tokens = output.outputs[0].token_ids if output.outputs else []
        assert tokens == whole[0][: len(tokens)]
        assert request.request_id in aborted or tokens == whole[0]


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_grammars(make_drafting: MakeDrafting, llm: LLM, run_ahead: int) -> None:
    masked = SamplingParams(
        seed=2,
        max_tokens=30,
        structured_outputs=StructuredOutputsParams(regex="[a-z]{3,12}(, [a-z]{2,9}){2}"),
    )
    plain = SamplingParams(seed=3, max_tokens=60, ignore_eos=True)
    prompts = [list(range(20, 40)), list(range(30, 44)), [5] * 9]
    params = [masked, plain, plain]
    expected = tokens_of(llm, prompts, params)
    drafting = make_drafting("some", texts_of(prompts, expected), run_ahead=run_ahead)
    assert tokens_of(drafting, prompts, params) == expected
    assert drafting.stats.spec_decode_num_accepted_tokens > 0


@pytest.mark.parametrize("case", ["llama", "llama-linear", "qwen2", "qwen3", "qwen3-moe", "smollm3"])
def test_other_models(tmp_path: Path, case: str) -> None:
    path = write_checkpoint(tmp_path, case)
    rng = random.Random(3)
    prompts = [[rng.randrange(5, 200) for _ in range(rng.randrange(3, 40))] for _ in range(9)]
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 1, "n": 2}, {"seed": 2, "top_k": 20}]
    params = [SamplingParams(max_tokens=30, ignore_eos=True, **kind) for kind in kinds] * 3
    options = {"dtype": "float32", "max_num_seqs": 8, "num_blocks": 200}
    with LLM(str(path), **options) as plain:
        expected = tokens_of(plain, prompts, params)
    for drafter in ("some", "looked up"):
        with LLM(
            str(path), run_ahead=1, speculative_config=n_grams(5, 2), **NOT_ADAPTIVE, **options
        ) as drafting:
            if drafter == "some":
                texts = texts_of(prompts, expected)
                drafting.core._runner.decoder.drafts.propose = Drafter("some", 5, texts)
            assert tokens_of(drafting, prompts, params) == expected
            drafting.core.check_integrity()
            assert drafting.stats.spec_decode_num_accepted_tokens > 0


@pytest.mark.parametrize("switch", ["fused_kv_append", "fused_sampler", "prefix_cache", "chunked_prefill"])
def test_without_a_switch(make_drafting: MakeDrafting, make_llm: Callable[..., LLM], switch: str) -> None:
    prompts, params = plain_crowd(20, seed=5, max_tokens=20)
    options = {switch: False, "max_num_seqs": 24}
    expected = tokens_of(make_llm(**options), prompts, params)
    drafting = make_drafting("some", texts_of(prompts, expected), run_ahead=1, **options)
    assert tokens_of(drafting, prompts, params) == expected
    assert drafting.stats.spec_decode_num_accepted_tokens > 0


def test_a_step_never_has_more_tokens_than_it_may(make_drafting: MakeDrafting, llm: LLM) -> None:
    prompts, params = plain_crowd(40, seed=6)
    expected = tokens_of(llm, prompts, params)
    drafting = make_drafting("some", texts_of(prompts, expected), max_num_batched_tokens=30)
    scheduler, sizes = drafting.core._scheduler, []
    make_step = scheduler._make_step

    def spy(*args: Any) -> Any:
        step = make_step(*args)
        sizes.append((int(step.num_new_tokens.sum()) + step.num_decodes * step.num_drafts, step.num_drafts))
        return step

    scheduler._make_step = spy
    assert tokens_of(drafting, prompts, params) == expected
    assert max(size for size, _ in sizes) <= 30
    assert {num_drafts for _, num_drafts in sizes} == {0, 3}


def test_large_steps_have_no_drafts(
    make_drafting: MakeDrafting, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose_backend.engine.drafts.MAX_VERIFIED_TOKENS", 20)
    prompts = [[index + 3] * 9 for index in range(8)]
    params = [replace(GREEDY, max_tokens=8 + 2 * index) for index in range(8)]
    expected = tokens_of(llm, prompts, params)
    drafting = make_drafting("right", texts_of(prompts, expected), widths=())
    enqueue, decoded = drafting.core._runner.decoder.enqueue, []
    drafting.core._runner.decoder.enqueue = lambda slots, num_drafts: (
        decoded.append((len(slots), num_drafts)) or enqueue(slots, num_drafts)
    )
    assert tokens_of(drafting, prompts, params) == expected
    assert {num_drafts for size, num_drafts in decoded if size > 5} == {0}
    assert {num_drafts for size, num_drafts in decoded if size <= 5} == {3}


def test_draws_without_a_seed_follow_the_distribution(make_drafting: MakeDrafting, llm: LLM) -> None:
    """Of two tokens, one of which is always drafted: a chi-square test of how often each is drawn."""
    prompt = list(range(60, 80))
    params = SamplingParams(temperature=1.3, top_k=2, max_tokens=2, ignore_eos=True)
    report = llm.generate([prompt], replace(GREEDY, max_tokens=1, logprobs=2))[0].outputs[0].logprobs[0]
    first = max(report, key=lambda token: report[token].logprob)
    (after,) = llm.generate([[*prompt, first]], replace(GREEDY, max_tokens=1, logprobs=2))
    best = sorted(after.outputs[0].logprobs[0].items(), key=lambda each: -each[1].logprob)[:2]
    weights = torch.tensor([each.logprob / 1.3 for _, each in best]).softmax(0).tolist()
    for drafted in range(2):
        drafting = make_drafting(num_drafts=1, max_num_seqs=64, widths=(), seed=drafted)
        decoder = drafting.core._runner.decoder
        token = best[drafted][0]
        decoder.drafts.propose = lambda rows, _, token=token: torch.full((len(rows.slots), 1), token)
        tokens = [output.outputs[0].token_ids for output in drafting.generate([prompt] * 2000, params)]
        drawn = [second for one, second in tokens if one == first]
        counts = [drawn.count(token) for token, _ in best]
        assert sum(counts) == len(drawn) > 500
        expected = [weight * len(drawn) for weight in weights]
        chi_square = sum((got - want) ** 2 / want for got, want in zip(counts, expected, strict=True))
        assert chi_square < 10.8, f"{counts} of {expected}"  # one in a thousand, with one degree of freedom
        assert drafting.stats.spec_decode_num_accepted_tokens >= counts[drafted]


def test_drafts_after_an_end_are_not_counted(make_drafting: MakeDrafting, llm: LLM) -> None:
    prompt = list(range(50, 71))
    params = SamplingParams(seed=1, max_tokens=60, ignore_eos=True)
    (whole,) = tokens_of(llm, [prompt], [params])
    stop = next(token for token in whole[0][20:] if whole[0].index(token) >= 20)
    drafting = make_drafting("right", [prompt + whole[0]], num_drafts=2, run_ahead=4)
    (stopped,) = drafting.generate([prompt], replace(params, stop_token_ids=[stop]))
    num_tokens, stats = len(stopped.outputs[0].token_ids), drafting.stats
    # The first token is the prompt's; with the last ones a step may have accepted two more.
    assert (
        num_tokens - 1
        <= stats.spec_decode_num_drafts + stats.spec_decode_num_accepted_tokens
        <= num_tokens + 1
    )


class Clock:
    """Pretended seconds: a step with drafts takes as long as 1.6 without."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.steps: list[int] = []
        decoder = llm.core._runner.decoder
        start = decoder.enqueue_again

        def enqueue_again() -> int:
            self.steps.append(decoder._num_drafts)
            self.now += 1.6 if decoder._num_drafts else 1.0
            return start()

        monkeypatch.setattr(decoder, "enqueue_again", enqueue_again)
        clock = SimpleNamespace(perf_counter=lambda: self.now, monotonic=lambda: self.now)
        monkeypatch.setattr("rose_backend.engine.drafts.time", clock)

    def takes_an_hour(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **options: Any) -> Any:
            self.now += 3600
            return function(*args, **options)

        return slow


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("pays", [False, True])
def test_drafts_are_made_where_they_pay(
    make_drafting: MakeDrafting,
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    run_ahead: int,
    pays: bool,
) -> None:
    prompts = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, index + 9] for index in range(3)]
    # What is drawn at this temperature has not been there before; the most likely tokens go round and round.
    params = [
        replace(GREEDY, temperature=0.0 if pays else 2.0, seed=index, max_tokens=700) for index in range(3)
    ]
    expected = tokens_of(llm, prompts, params)
    drafting = make_drafting(run_ahead=run_ahead, adaptive_drafts=True)
    clock = Clock(drafting, monkeypatch)
    with caplog.at_level(logging.INFO, "rose_backend.engine.drafts"):
        assert tokens_of(drafting, prompts, params) == expected
    assert set(clock.steps) == {0, 1, 3}
    late = clock.steps[100:]
    assert late.count(3 if pays else 0) > 0.9 * len(late) > 60
    assert pays or "adaptive drafts: 0 for each request from now on; " in caplog.text


def test_times_of_steps_that_did_more_than_decode_are_not_noted(
    make_drafting: MakeDrafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting = make_drafting(run_ahead=0, adaptive_drafts=True, max_num_seqs=4, widths=())
    core, clock = drafting.core, Clock(drafting, monkeypatch)
    runner, adaptive = core._runner, core._runner.decoder.drafts.adaptive
    noted: list[tuple[int, int, float]] = []
    monkeypatch.setattr(adaptive._depth, "note_time", lambda *each: noted.append(each))
    for owner, name in (
        (runner, "_forward_chunks"),
        (runner.decoder, "_redraw"),
        (runner._extras, "upload_masks"),
    ):
        monkeypatch.setattr(owner, name, clock.takes_an_hour(getattr(owner, name)))
    # The graphs hold the parts of a step.
    monkeypatch.setattr(
        runner.decoder._graphs,
        "_parts",
        (runner.decoder._step, runner.decoder._redraw_masked, runner.decoder._redraw),
    )
    grammar = StructuredOutputsParams(regex="[a-z ]{9,40}")
    kinds: list[dict[str, Any]] = [{}, {"logprobs": 1}, {}, {"structured_outputs": grammar}, {}, {}]
    for index, kind in enumerate(kinds):
        # In the middle of others' decodes; the last ones find all of their prompt in the cache, after a time of rest.
        prompt = [min(index, 4) + 5] * 20
        core.add(core.input_processor.make(prompt, replace(GREEDY, max_tokens=20, **kind)))
        for _ in range(6 if index < 4 else 100):
            if core.num_unfinished:
                core.step()
        if index == 4:
            assert not core.num_unfinished
            clock.now += 3600
    assert {num_drafts for num_drafts, *_ in noted} == {3}
    assert max(seconds for *_, seconds in noted) < 2


def test_a_step_of_another_kind_than_the_one_before_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, noted = 0.0, []
    clock = SimpleNamespace(perf_counter=lambda: now, monotonic=lambda: now)
    monkeypatch.setattr("rose_backend.engine.drafts.time", clock)
    adaptive = AdaptiveDrafts(SpeculativeConfig(**n_grams(2)), SequenceState(3, 64))
    monkeypatch.setattr(adaptive._depth, "note_time", lambda *each: noted.append(each))
    for seconds, num_drafts in ((9, 2), (1, 2), (2, 0), (3, 0), (4, 0), (5, 2), (6, 2)):
        now += seconds
        adaptive.note_step(num_drafts, 7)
    assert noted == [(2, 7, 1), (0, 7, 3), (0, 7, 4), (2, 7, 6)]


@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("drafter", ["some", "looked up"])
def test_any_number_of_drafts_says_the_same(
    make_drafting: MakeDrafting, llm: LLM, drafter: str, run_ahead: int
) -> None:
    prompts, params = plain_crowd(40, seed=3)
    expected = tokens_of(llm, prompts, params)
    drafting = make_drafting(
        drafter, texts_of(prompts, expected), num_drafts=5, run_ahead=run_ahead, adaptive_drafts=True
    )
    decoder, rng, started = drafting.core._runner.decoder, random.Random(4), []
    start = decoder.enqueue_again
    decoder.enqueue_again = lambda: started.append(decoder._num_drafts) or start()
    assert decoder.drafts.depths == (1, 3, 5)
    decoder.drafts.adaptive.choose = lambda _: rng.choice((0, 1, 1, 3, 3, 5))
    assert tokens_of(drafting, prompts, params) == expected
    assert min(started.count(depth) for depth in (0, 1, 3, 5)) > 2
    stats = drafting.stats
    assert stats.generated_tokens == sum(len(one) for completions in expected for one in completions)
    by_place = stats.spec_decode_num_accepted_tokens_per_pos
    assert len(by_place) == 5 and sum(by_place) == stats.spec_decode_num_accepted_tokens > 20
    drafting.core.check_integrity()


def test_what_is_chosen_holds_for_the_next_step(make_drafting: MakeDrafting) -> None:
    drafting = make_drafting("empty", run_ahead=1, adaptive_drafts=True, max_num_seqs=1, widths=())
    adaptive, decoder = drafting.core._runner.decoder.drafts.adaptive, drafting.core._runner.decoder
    start, chosen, started = decoder.enqueue_again, [], []

    def choose(num_requests: int) -> int:
        chosen.append((0, 3, 1)[len(chosen) // 2 % 3])
        return chosen[-1]

    adaptive.choose = choose
    decoder.enqueue_again = lambda: started.append(decoder._num_drafts) or start()
    drafting.generate([[5, 6, 7] * 9], replace(GREEDY, max_tokens=60))
    # The first step of all is the prompt's, before any request runs.
    assert len(started) > 50 and started == chosen[: len(started)]


def test_what_would_have_been_drafted_is_looked_at() -> None:
    state = SequenceState(3, 64)
    adaptive = AdaptiveDrafts(SpeculativeConfig(**n_grams(2, 1)), state)
    noted: list[list[bool]] = []
    adaptive.note_accepted = adaptive._depth.note_accepted = noted.append  # type: ignore[method-assign]
    texts = [[8, 9] * 20, list(range(40)), [7] * 40]
    slots = np.arange(3)
    state.num_tokens[:] = 4
    state.generation[:] = 5, 1, 2
    for slot, text in enumerate(texts):
        state.token_ids[slot, :40] = text
    adaptive.look(slots)
    adaptive.look(slots)
    assert noted == []
    # In turn: no number comes again, all are the same, and they take turns.
    for _ in range(3):
        state.num_tokens[:] += 2
        adaptive.look(slots)
    assert noted == [[False] * 2, [True] * 2, [True] * 2]
    # Whoever was looked at has gone, and another has the slot.
    state.generation[1] += 1
    state.num_tokens[:] = 20
    adaptive.look(slots)
    assert noted == [[False] * 2, [True] * 2, [True] * 2]
    state.num_tokens[:] += 2
    adaptive.look(slots[:2])
    assert noted == [[False] * 2, *[[True] * 2] * 3]
