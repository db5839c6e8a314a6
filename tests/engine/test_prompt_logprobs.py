"""Log-probabilities of prompts are those of transformers, whatever computes the prompts and beside what."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rose_backend import LLM, SamplingParams
from rose_backend.engine import prompt_logprobs
from rose_backend.engine.core import EngineCore
from rose_backend.engine.model_runner import ModelRunner
from rose_backend.engine.outputs import PromptLogprobs, RequestOutput
from rose_backend.errors import RequestError
from tests.engine.conftest import GREEDY

MODELS = Path(__file__).resolve().parents[2] / "models"
NAMES = ["tiny-gpt2", "tiny-qwen3-chat"]
TEXT = "Once upon a time there was a king, 薔薇 and a rose, who lived in a castle by the sea"
IDS = list(range(40, 90))


@cache
def reference(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval()


def expected_logprobs(name: str, token_ids: list[int]) -> torch.Tensor:
    """Return log-softmax of the logits of a whole prompt, ``[P, V]``."""
    with torch.inference_mode():
        logits: torch.Tensor = reference(name)(torch.tensor([token_ids])).logits[0]
    return logits.log_softmax(-1)


def check(output: RequestOutput, num_logprobs: int, name: str = "tiny-gpt2") -> None:
    token_ids, found = output.prompt_token_ids, output.prompt_logprobs
    assert found is not None and len(found) == len(token_ids) and found[0] is None
    for place, (logprobs, token_id) in enumerate(
        zip(expected_logprobs(name, token_ids), token_ids[1:], strict=False), start=1
    ):
        entry = found[place]
        assert entry is not None
        first, *_ = entry
        assert first == token_id
        top = logprobs.topk(num_logprobs).values.tolist()
        by_rank = {each.rank: each.logprob for each in entry.values()}
        assert [by_rank[rank + 1] for rank in range(num_logprobs)] == pytest.approx(top, abs=1e-4)
        for other, each in entry.items():
            assert each.logprob == pytest.approx(float(logprobs[other]), abs=1e-4), (place, other)
        # Tokens that are as likely but for rounding may stand on either side.
        fewest, most = (int((logprobs >= logprobs[token_id] + margin).sum()) for margin in (1e-4, -1e-4))
        assert fewest < entry[token_id].rank <= most
        assert len(entry) == num_logprobs + (entry[token_id].rank > num_logprobs)


def asking(num_logprobs: int | None, **fields: Any) -> SamplingParams:
    return replace(GREEDY, max_tokens=4, prompt_logprobs=num_logprobs, **fields)


@pytest.mark.parametrize(("budget", "run_ahead"), [(7, 2), (64, 0), (2048, 1)])
@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_transformers(name: str, budget: int, run_ahead: int) -> None:
    numbers = [3, 0, 20, None, 1]
    options = {"max_num_batched_tokens": budget, "run_ahead": run_ahead, "max_num_seqs": 7}
    with LLM(str(MODELS / name), dtype="float32", **options) as llm:
        prompts = [TEXT, "The rose", IDS, TEXT, [5]]
        # The last one has siblings; of the fourth, nothing is reported.
        params = [asking(number, n=3 if number == 1 else 1) for number in numbers]
        outputs = llm.generate(prompts, params)
        for output, number in zip(outputs, numbers, strict=True):
            if number is None:
                assert output.prompt_logprobs is None
            else:
                check(output, number, name)
        assert len(outputs[-1].outputs) == 3 and outputs[-1].prompt_logprobs is not None
        assert list(outputs[-1].prompt_logprobs) == [None]
        # Asking changes no text.
        plain = llm.generate(prompts, [replace(each, prompt_logprobs=None) for each in params])
        for output, other in zip(outputs, plain, strict=True):
            assert [each.token_ids for each in output.outputs] == [each.token_ids for each in other.outputs]


def test_names_are_completed_by_the_tokens_before(llm: LLM) -> None:
    (output,) = llm.generate("x 薔薇", asking(0))
    assert output.prompt_logprobs is not None
    names = [entry[token].decoded_token for entry in output.prompt_logprobs if entry for token in entry]
    assert "".join(names) == " 薔薇" and "" in names


@pytest.mark.parametrize("salt", [None, "other"])
def test_no_cached_prefix_is_used_and_what_is_computed_is_cached(llm: LLM, salt: str | None) -> None:
    def generate(number: int | None) -> RequestOutput:
        return llm.generate({"prompt_token_ids": IDS, "cache_salt": salt}, asking(number))[0]

    assert generate(None).num_cached_tokens == 0
    num_queries = llm.stats.prefix_cache_queries
    for _ in range(2):
        output = generate(2)
        assert output.num_cached_tokens == 0
        check(output, 2)
    assert llm.stats.prefix_cache_queries == num_queries
    assert generate(None).num_cached_tokens == len(IDS) - 1
    assert llm.core.manager.reset_prefix_cache()
    generate(2)
    assert generate(None).num_cached_tokens == len(IDS) - 1


def test_prompts_in_one_step_wait_for_no_shared_prefix(llm: LLM) -> None:
    prompts = [[*range(100, 230), last] for last in (1, 2, 3)]
    num_steps = llm.stats.steps
    outputs = llm.generate(prompts, [asking(None), asking(1), asking(0)])
    assert llm.stats.steps == num_steps + 4
    for output in outputs[1:]:
        assert output.num_cached_tokens == 0
        check(output, 1 if output.prompt_token_ids[-1] == 2 else 0)


def preempt(core: EngineCore) -> None:
    """Preempt the newest request as soon as nothing is in flight."""
    pipeline, scheduler = core._pipeline, core._scheduler
    schedule = scheduler.schedule

    def schedule_after(num_in_flight: int = 0) -> Any:
        if not num_in_flight:
            scheduler.schedule = schedule  # type: ignore[method-assign]
            core._commits.flush()
            scheduler._preempt_newest()
        return schedule(num_in_flight)

    assert pipeline._scheduler is scheduler
    scheduler.schedule = schedule_after  # type: ignore[method-assign]


@pytest.mark.parametrize("num_steps", [2, 7, 12])
def test_a_preempted_prompt_is_reported_all_the_same(
    make_llm: Callable[..., LLM], num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(max_num_batched_tokens=8, run_ahead=0, max_num_seqs=4)
    core, computed = llm.core, []
    launch = ModelRunner._launch_chunks

    def note(self: ModelRunner, inputs: Any, *, last_tokens_only: bool) -> torch.Tensor:
        computed.append((len(inputs.positions), last_tokens_only))
        return launch(self, inputs, last_tokens_only=last_tokens_only)

    monkeypatch.setattr(ModelRunner, "_launch_chunks", note)
    stream = llm.stream(IDS, replace(asking(2), max_tokens=20))
    steps = core.step
    monkeypatch.setattr(core, "step", lambda: (core.stats.steps == num_steps and preempt(core)) or steps())
    *_, last = stream
    assert core.stats.preemptions == 1
    check(last, 2)
    # What was reported is not computed once more; the rest of the prompt comes without the cache.
    num_reported = sum(count for count, last_tokens_only in computed if not last_tokens_only)
    assert num_reported == (len(IDS) + 8 * num_steps if 8 * num_steps < len(IDS) else len(IDS))
    assert (
        last.outputs[0].token_ids == llm.generate(IDS, replace(GREEDY, max_tokens=20))[0].outputs[0].token_ids
    )


def test_many_through_few_blocks(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(num_blocks=24, max_model_len=120, max_num_seqs=16, max_num_batched_tokens=48)
    prompts = [[*range(first, first + 60)] for first in range(0, 400, 20)]
    params = [
        replace(GREEDY, max_tokens=40, prompt_logprobs=index % 3 if index % 3 else None)
        for index in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params)
    assert llm.stats.preemptions > 0
    for output, each in zip(outputs, params, strict=True):
        if each.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            check(output, each.prompt_logprobs)


def test_logits_of_a_few_rows_are_there_at_once(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, rows = make_llm(max_num_seqs=8), []
    model = llm.core._runner._model
    compute = model.compute_logits
    monkeypatch.setattr(model, "compute_logits", lambda hidden: rows.append(len(hidden)) or compute(hidden))
    monkeypatch.setattr(prompt_logprobs, "LOGITS_BYTES", 20 * 4 * model.config.vocab_size)
    params = [asking(1), asking(None), asking(0)]
    outputs = llm.generate([IDS, IDS[::-1], IDS[:9]], [replace(each, max_tokens=1) for each in params])
    # Of 49 and 8 rows, which ask, then of the last tokens of three prompts. Bounds are multiples of 16 rows.
    assert rows == [16, 16, 16, 9, 3]
    check(outputs[0], 1)
    check(outputs[2], 0)
    rows.clear()
    llm.generate([IDS, IDS[:9]], replace(GREEDY, max_tokens=1))
    assert rows == [2]


def test_who_does_not_ask_pays_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError("nothing is to be reported")

    monkeypatch.setattr("rose_backend.engine.model_runner.report_prompts", fail)
    only_last, launch = [], ModelRunner._launch_chunks

    def note(self: ModelRunner, inputs: Any, *, last_tokens_only: bool) -> torch.Tensor:
        only_last.append(last_tokens_only)
        return launch(self, inputs, last_tokens_only=last_tokens_only)

    monkeypatch.setattr(ModelRunner, "_launch_chunks", note)
    llm.generate([IDS, [5], TEXT], [GREEDY, asking(3), replace(GREEDY, logprobs=3)])
    assert only_last and all(only_last)


def test_all_outputs_of_a_stream_share_them(llm: LLM) -> None:
    outputs = list(llm.stream(IDS, asking(1)))
    assert len(outputs) == 4
    assert len({id(output.prompt_logprobs) for output in outputs}) == 1
    check(outputs[0], 1)


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_an_abort_before_the_first_token_reports_nothing(
    make_llm: Callable[..., LLM], num_steps: int
) -> None:
    llm = make_llm(max_num_batched_tokens=8, max_num_seqs=4)
    core = llm.core
    core.add(core.input_processor.make(IDS, asking(2), request_id="aborted"))
    core.add(core.input_processor.make(IDS[:9], asking(2), request_id="other"))
    for _ in range(num_steps):
        assert not core.step()
    output = core.abort("aborted")
    assert output is not None and output.prompt_logprobs is None
    others = [each for _ in range(20) for each in core.step()]
    assert [each.request_id for each in others] == ["other"]
    check(others[0], 2)
    core.check_integrity()


def test_no_side_pass_computes_them(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_llm(max_num_seqs=4).core
    scheduler, state = core._scheduler, core._state
    monkeypatch.setattr("rose_backend.engine.scheduler.MAX_PROMPT_TOKENS_AMONG_DECODES", 0)
    monkeypatch.setattr(scheduler, "_may_overlap", lambda *args: True)
    slots, counts = np.array([1, 2], np.int32), np.array([30, 30], np.int32)
    assert scheduler._has_side_pass(2, slots, counts)
    state.num_prompt_logprobs[2] = 0
    assert not scheduler._has_side_pass(2, slots, counts)


def test_entries_are_made_when_they_are_looked_at(llm: LLM) -> None:
    (output,) = llm.generate(IDS, asking(3))
    found = output.prompt_logprobs
    assert found is not None
    assert found[-1] == found[len(IDS) - 1] and found[1:3] == [found[1], found[2]] and found[:1] == [None]
    assert len(list(found)) == len(IDS)
    with pytest.raises(IndexError):
        found[len(IDS)]
    texts = llm.tokenizer.token_texts
    tracemalloc.start()
    long = PromptLogprobs(np.zeros(1 << 15, np.int32), 20, texts)
    pieces = list(long.pieces(1 << 18))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 32,768 tokens with 20 candidates each; as dictionaries they take some 200 MB.
    assert size < 8 << 20
    assert sum(len(words) for _, words in pieces) == (1 << 15) - 1
    assert max(words.nbytes for _, words in pieces) <= 1 << 18
    copy = PromptLogprobs(found.token_ids, 3, texts)
    for piece in found.pieces(100):
        copy.write(*piece)
    assert list(copy) == list(found)


@pytest.mark.parametrize("number", [21, -1, 2.0, True, "1"])
def test_limits(number: Any) -> None:
    with pytest.raises(RequestError, match=r"prompt_logprobs: got .*, allowed is an integer from 0 to 20"):
        SamplingParams(prompt_logprobs=number)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"cuda_graph": False}, {"max_num_batched_tokens": 16}])
def test_values_on_a_gpu(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "LOGITS_BYTES", 32 * 4 * 1536)
    with LLM(
        str(MODELS / NAMES[1]), device="cuda", dtype="float32", num_blocks=600, max_num_seqs=8, **options
    ) as llm:
        prompts = [TEXT, IDS, [5], "The rose", TEXT]
        numbers = [3, 20, 0, None, 1]
        for _ in range(2):
            outputs = llm.generate(prompts, [asking(number) for number in numbers])
            for output, number in zip(outputs, numbers, strict=True):
                if number is not None:
                    check(output, number, NAMES[1])
