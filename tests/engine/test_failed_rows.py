"""Logits that allow no token: the completion ends with an error, and no other request is touched."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rose_backend import LLM, SamplingParams
from rose_backend.engine.outputs import json_logprob

FIRST_BROKEN = 30
"""The first position whose hidden state is NaN; the token that stands there is the last one of its sequence."""
PROMPT = list(range(100, 120))
LATE_PROMPT = list(range(200, 240))
SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@contextmanager
def broken_positions(llm: LLM) -> Iterator[None]:
    """Let the model compute NaN from ``FIRST_BROKEN`` on."""
    with torch.inference_mode():
        positions = llm.core._runner._model.weights.position_embedding
        rest = positions[FIRST_BROKEN:].clone()
        positions[FIRST_BROKEN:] = math.nan
        try:
            yield
        finally:
            positions[FIRST_BROKEN:] = rest


@pytest.mark.parametrize("fused_sampler", [True, False])
@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"seed": 1},
        {"seed": 2, "top_k": 5, "top_p": 0.9},
        {"seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"seed": 4, "logprobs": 3},
        {"seed": 5, "min_tokens": 15},
        {"temperature": 0.0, "stop": ["no such text"]},
        {"seed": 6, "n": 3},
        {"seed": 7, "ignore_eos": False, "stop_token_ids": [0]},
    ],
    ids=str,
)
def test_a_completion_without_a_token_ends_with_an_error(
    make_llm: Callable[..., LLM], fields: dict[str, Any], run_ahead: int, fused_sampler: bool
) -> None:
    llm = make_llm(run_ahead=run_ahead, fused_sampler=fused_sampler, max_num_seqs=16, num_blocks=100)
    params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **fields})
    prompts = [PROMPT, LATE_PROMPT, PROMPT[:10]]
    healthy = llm.generate(prompts, [params, params, SHORT])
    assert llm.core.manager.reset_prefix_cache()
    before = llm.core.stats.generated_tokens
    with broken_positions(llm):
        outputs = llm.generate(prompts, [params, params, SHORT])
        again = llm.generate(prompts, [params, params, SHORT])
    for early, late, short in (outputs, again):
        assert short.outputs == healthy[2].outputs
        for completion, whole in zip(early.outputs, healthy[0].outputs, strict=True):
            # Position 30 is reached with the 11th token, and that is the last one.
            assert completion.finish_reason == "error" and completion.stop_reason is None
            assert completion.token_ids == whole.token_ids[: FIRST_BROKEN - len(PROMPT) + 1]
            assert whole.text.startswith(completion.text) and completion.text
            if completion.logprobs is not None:
                assert len(completion.logprobs) == len(completion.token_ids)
                assert math.isfinite(completion.cumulative_logprob or math.nan)
        for completion in late.outputs:
            assert (completion.finish_reason, completion.token_ids, completion.text) == ("error", [], "")
    num_tokens = sum(len(each.token_ids) for output in (*outputs, *again) for each in output.outputs)
    assert llm.core.stats.generated_tokens - before == num_tokens
    # What NaN was computed for is found by nobody, and does no harm to those who get its blocks.
    for output, whole in zip(llm.generate(prompts, [params, params, SHORT]), healthy, strict=True):
        assert [each.token_ids for each in output.outputs] == [each.token_ids for each in whole.outputs]
        assert [each.text for each in output.outputs] == [each.text for each in whole.outputs]


def test_failures_are_logged_ever_more_rarely(
    make_llm: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(max_num_seqs=4, num_blocks=100)
    caplog.set_level(logging.ERROR, logger="rose_backend")
    with broken_positions(llm):
        llm.generate([LATE_PROMPT] * 20, SHORT)
    lines = [message for message in caplog.messages if "all NaN or minus infinity" in message]
    assert [line.rpartition("(")[2] for line in lines] == [
        f"{number} since start-up)" for number in (1, 2, 4, 8, 16)
    ]


def test_a_failed_completion_with_stop_strings_holds_its_slot_until_it_is_checked(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(max_num_seqs=1, num_blocks=100)
    core, params = llm.core, SamplingParams(max_tokens=8, stop=["no such text"])
    process, is_waited_for = core._output_thread._processor.process, threading.Event()
    wait = core._output_thread.wait
    monkeypatch.setattr(
        core._output_thread._processor, "process", lambda each: is_waited_for.wait() and process(each)
    )
    monkeypatch.setattr(core._output_thread, "wait", lambda: is_waited_for.set() or wait())
    with broken_positions(llm):
        for prompt in (LATE_PROMPT, LATE_PROMPT[:10]):
            core.add(core.input_processor.make(prompt, params, is_streaming=True))
        core.step()
        # The next request waits for the slot. Nothing is in flight, and yet the engine is not stuck.
        reasons = []
        try:
            while core.num_unfinished:
                reasons += [each.outputs[0].finish_reason for each in core.step()]
        finally:
            is_waited_for.set()
    assert (reasons[0], reasons[-1]) == ("error", "length")


@pytest.mark.parametrize(
    ("logprob", "shown"),
    [(-1.5, -1.5), (0.0, 0.0), (-math.inf, -9999.0), (-1e5, -9999.0), (math.nan, None), (math.inf, None)],
)
def test_log_probabilities_in_json(logprob: float, shown: float | None) -> None:
    assert json_logprob(logprob) == shown
