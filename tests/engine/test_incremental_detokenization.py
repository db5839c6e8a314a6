"""What is done with tokens before their completions end changes nothing of what is handed out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose_backend import LLM, CompletionOutput
from rose_backend.engine.output_thread import (
    Abort,
    Ending,
    IncrementalDetokenization,
    IncrementalTokens,
    NewTokens,
    OutputProcessor,
)
from rose_backend.engine.request import Completion, InputProcessor
from rose_backend.engine.sequence_state import SequenceState
from rose_backend.engine.tokenizer import Tokenizer
from tests.engine.conftest import GREEDY

PROMPT = [5, 6, 7]
OUTPUT = [400 + 7 * number % 1900 for number in range(40)]
LONG = replace(GREEDY, max_tokens=100)


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path: Path) -> Tokenizer:
    return Tokenizer(tiny_model_path)


def make(tokenizer: Tokenizer, **params: Any) -> Completion:
    processor = InputProcessor(
        tokenizer, vocab_size=2560, max_model_len=512, max_num_seqs=8, seed=0, eos_token_ids=()
    )
    return processor.make(PROMPT, replace(LONG, **params)).completions[0]


def early(completion: Completion, start: int, end: int) -> IncrementalTokens:
    """Return prompt and output from ``start`` to ``end``, beside a neighbour that has ended already."""
    neighbour = replace(completion, text=replace(completion.text, finish_reason="length", token_ids=[1]))
    token_ids = np.array([*PROMPT, *OUTPUT][start:end], np.int32)
    return IncrementalTokens(
        [neighbour, completion],
        [2, start],
        [4, end - start],
        np.concatenate([np.zeros(4, np.int32), token_ids]),
    )


def end_of(
    processor: OutputProcessor, completion: Completion, reason: Any, stop_token: int | None = None
) -> CompletionOutput:
    completion.token_ids = np.array([*PROMPT, *OUTPUT], np.int32)
    endings = {completion: Ending(reason, stop_token)}
    (request,), _ = processor.process(NewTokens([], [], np.zeros(0, np.intp), None, endings, False))
    return processor.request_output(request).outputs[0]


@pytest.mark.parametrize("reason", ["length", "stop"])
@pytest.mark.parametrize(
    ("spans", "num_early"),
    [
        pytest.param([(3, 20), (20, 35)], 32, id="piece by piece"),
        pytest.param([(0, 20), (20, 35)], 32, id="with the prompt"),
        pytest.param([(0, 3)], 0, id="prompt alone"),
        pytest.param([(0, 20), (0, 12), (10, 30)], 27, id="computed once more"),
        pytest.param([(0, 20), (24, 30)], 17, id="some are missing"),
        pytest.param([(8, 20)], 0, id="the first are missing"),
        pytest.param([(0, 43)], 40, id="the last one, too"),
        pytest.param([], 0, id="none"),
    ],
)
def test_outputs_are_the_same(
    tokenizer: Tokenizer, spans: list[tuple[int, int]], num_early: int, reason: str
) -> None:
    processor, completion = OutputProcessor(tokenizer), make(tokenizer)
    for start, end in spans:
        assert processor.process(early(completion, start, end)) == ([], {})
    assert completion.text.token_ids == OUTPUT[:num_early]
    output = end_of(processor, completion, reason)
    assert output.token_ids == OUTPUT
    shown = OUTPUT if reason == "length" else OUTPUT[:-1]
    assert output.text == output.delta_text == tokenizer._backend.decode(shown)


def test_special_tokens_are_shown_where_that_was_asked_for(tokenizer: Tokenizer) -> None:
    end_of_text = tokenizer._backend.token_to_id("<|endoftext|>")
    texts = []
    for skips in (True, False):
        processor, completion = OutputProcessor(tokenizer), make(tokenizer, skip_special_tokens=skips)
        piece = early(completion, 0, 20)
        piece.token_ids[-1] = end_of_text
        processor.process(piece)
        texts.append(end_of(processor, completion, "length").text)
    assert "<|endoftext|>" in texts[1] and "<|endoftext|>" not in texts[0]


def test_an_aborted_completion_has_every_token_once(tokenizer: Tokenizer) -> None:
    processor, completion = OutputProcessor(tokenizer), make(tokenizer)
    processor.process(early(completion, 0, 20))
    completion.token_ids = np.array([*PROMPT, *OUTPUT[:30]], np.int32)
    processor.process(Abort(completion.request))
    processor.process(early(completion, 20, 30))
    output = processor.request_output(completion.request).outputs[0]
    assert output.token_ids == OUTPUT[:30] and output.text == tokenizer._backend.decode(OUTPUT[:30])


@pytest.mark.parametrize("run_ahead", [0, 1, 4])
def test_completions_without_stream_are_detokenized_in_portions(
    make_llm: Callable[..., LLM], run_ahead: int
) -> None:
    llm = make_llm(max_num_seqs=24, run_ahead=run_ahead)
    told: list[IncrementalTokens] = []
    process = llm.core._output_thread._processor.process

    def note(message: Any) -> Any:
        if isinstance(message, IncrementalTokens):
            told.append(message)
        return process(message)

    llm.core._output_thread._processor.process = note  # type: ignore[method-assign]
    prompts = [[5 + number] * (3 + 5 * number) for number in range(6)]
    two = replace(LONG, n=2, temperature=1.0, seed=1)
    params = [LONG, replace(LONG, logprobs=1), two, replace(LONG, stop=["never seen"]), LONG, two]
    alone = [llm.generate([prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
    told.clear()
    outputs = llm.generate(prompts, params)
    for output, expected in zip(outputs, alone, strict=True):
        assert [each.token_ids for each in output.outputs] == [each.token_ids for each in expected.outputs]
        for each in output.outputs:
            assert each.text == llm.tokenizer._backend.decode(each.token_ids)
    followed = {completion.needs_each_token for message in told for completion in message.completions}
    assert followed == {False}
    num_told = sum(sum(message.counts) for message in told)
    assert num_told >= 6 * 64, "hardly anything was handed over before the end"


def test_small_portions_go_together_and_none_is_kept_for_ever(tokenizer: Tokenizer) -> None:
    state = SequenceState(64, 512)
    for row in range(64):
        state.fill(row, make(tokenizer))
    told: list[int] = []
    texts = IncrementalDetokenization(state, lambda portion: told.append(int(portion.token_ids[0])))

    def put(first: int, num_rows: int) -> None:
        rows = np.arange(first, first + num_rows)
        texts.put(rows, np.full(num_rows, len(PROMPT)), np.ones(num_rows, np.int32), rows.astype(np.int32))

    for first in (0, 5, 10):
        put(first, 5)
    put(15, 30)
    texts.send_next()
    assert told == [0, 5, 10], "no more than 32 rows"
    texts.send_next()
    assert told == [0, 5, 10, 15]
    told.clear()
    for row in range(50):
        put(row, 1)
    assert told == list(range(26)), "what is kept is bounded, though nobody calls send_next"
    texts.send_next()
    assert told == list(range(50)), "all 24 have room"


@pytest.mark.parametrize("num_rows", [1, 32, 33, 200, 500])
def test_portions_are_small_and_few(tokenizer: Tokenizer, num_rows: int) -> None:
    state = SequenceState(512, 512)
    told: list[IncrementalTokens] = []
    texts = IncrementalDetokenization(state, told.append)
    rows = np.random.default_rng(num_rows).permutation(512)[: num_rows + 2]
    for row in rows.tolist():
        state.fill(row, make(tokenizer))
    counts = 1 + np.arange(len(rows), dtype=np.int32) % 5
    starts = np.full(len(rows), len(PROMPT))
    # Of the last two one is followed, and of the other the prompt is all that was computed.
    state.needs_each_token[rows[-1]] = True
    starts[-2], counts[-2] = 0, len(PROMPT)
    token_ids = np.repeat(1000 * rows, counts) + np.concatenate([np.arange(count) for count in counts])

    texts.send_next()
    assert not told
    texts.put(rows, starts, counts, token_ids)
    for number in range(1, 9):
        texts.send_next()
        assert len(told) <= number
    assert len(told) == -(-num_rows // max(32, -(-num_rows // 6)))
    assert max(len(portion.completions) for portion in told) <= max(32, num_rows / 5)
    seen = {}
    for portion in told:
        ends = np.cumsum(portion.counts)
        for each, start, end, count in zip(
            portion.completions, portion.starts, ends, portion.counts, strict=True
        ):
            seen[each.slot] = start, portion.token_ids[end - count : end].tolist()
        assert ends[-1] == len(portion.token_ids)
    expected = zip(rows[:-2].tolist(), counts.tolist(), strict=False)
    assert seen == {row: (len(PROMPT), [1000 * row + at for at in range(count)]) for row, count in expected}

    assert list(seen) == rows[:-2].tolist(), "the tokens of a row come in their order"

    texts.put(rows, starts, counts, token_ids)
    texts.drop()
    told.clear()
    texts.send_next()
    assert not told


def test_staggered_completions_are_detokenized_in_portions_too(
    make_llm: Callable[..., LLM],
) -> None:
    llm = make_llm(max_num_seqs=80, run_ahead=1)
    core, committed, told = llm.core, 0, 0
    commit, send = core._commits._commit, core._pipeline._incremental_detokenization.send

    def noting_commit(rows: Any) -> Any:
        nonlocal committed
        committed += 1
        return commit(rows)

    def noting_send(message: IncrementalTokens) -> None:
        nonlocal told
        told += len(message.completions)
        send(message)

    core._commits._commit = noting_commit  # type: ignore[method-assign]
    core._pipeline._incremental_detokenization.send = noting_send
    for number in range(40):
        core.add(core.input_processor.make([5 + number] * 4, LONG))
        core.step()
    while core.num_unfinished:
        before = committed
        core.step()
        assert committed - before <= 2
        assert (
            sum(len(portion.completions) for portion in core._pipeline._incremental_detokenization._portions)
            <= 4
        )
    assert told >= 2 * 40, "32 and 64 tokens of each, some 96"


def test_no_portion_is_sent_beside_a_large_commit(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=80, run_ahead=1)
    core, what = llm.core, [""]
    commit, send, release = (
        core._commits._manager.commit,
        core._pipeline._incremental_detokenization.send,
        core._scheduler.release,
    )

    def noting_commit(*arguments: Any) -> None:
        what[-1] += "c"
        commit(*arguments)

    def noting_send(message: IncrementalTokens) -> None:
        what[-1] += "t"
        send(message)

    def noting_release(rows: Any) -> Any:
        what[-1] += "e"
        return release(rows)

    core._scheduler.release = noting_release  # type: ignore[method-assign]
    core._commits._manager.commit = noting_commit  # type: ignore[method-assign]
    core._pipeline._incremental_detokenization.send = noting_send
    for number in range(80):
        core.add(core.input_processor.make([5 + number] * 4, LONG))
    while core.num_unfinished:
        core.step()
        what.append("")
    # Rows that end are committed before the wait for their last step, and their last token behind it.
    assert set(what) <= {"", "c", "cc", "t", "cec", "tcec"}
    assert what.count("cec") + what.count("tcec") == 1
    # 80 rows in three pieces at 32, 64 and 96 tokens. Those that come last may not be told before the end.
    assert 8 <= what.count("t") <= 12
    assert not core._pipeline._incremental_detokenization._portions
