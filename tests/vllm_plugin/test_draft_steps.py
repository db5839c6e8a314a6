"""Replayed steps with n-gram drafts: which steps are replayed, and what they leave behind."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

from rose_backend.draft_depth import draft_depths
from rose_backend.errors import IntegrityError
from rose_backend.vllm_plugin.plugin_logger import STEPS
from rose_backend.vllm_plugin.step_graph import draft_steps
from rose_backend.vllm_plugin.step_graph.draft_steps import AdaptiveSteps, DraftSteps, max_num_logits
from rose_backend.vllm_plugin.step_graph.reasons import (
    FIELDS_OF_MIXED_STEPS,
    FIELDS_OF_OTHER_STEPS,
    why_drafts_are_not_replayed,
)
from rose_backend.vllm_plugin.step_graph.steps import StepGraphs
from tests.support.patience import HANG_S
from tests.support.vllm_plugin.draft_runner import DraftRequests, DraftRunner, rejection_sample
from tests.support.vllm_plugin.steady_runner import GROUPS, MAX_LEN, MAX_REQS, VOCAB_SIZE


@pytest.fixture(autouse=True)
def _sampler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rejection_sampler_utils, "rejection_sample", rejection_sample)
    yield


def adaptive_steps(runner: DraftRunner) -> AdaptiveSteps:
    depths = draft_depths(runner.num_drafts)
    return AdaptiveSteps(
        {depth: DraftSteps(runner, depth) if depth else StepGraphs(runner) for depth in depths}
    )


def check_state(runner: DraftRunner, requests: DraftRequests, num_drafts: int | None = None) -> None:
    states = runner.req_states
    num_drafts = runner.num_drafts if num_drafts is None else num_drafts
    for request_id in requests.running:
        slot, length = states.req_id_to_index[request_id], requests.num_known[request_id]
        text = requests.texts[request_id][:length]
        assert states.all_token_ids.gpu[slot, :length].tolist() == text
        assert int(states.total_len.gpu[slot]) == int(states.num_computed_tokens.gpu[slot]) + 1 == length
        assert int(states.last_sampled_tokens[slot]) == text[-1]
        if num_drafts:
            expected = runner.propose_for(slot, length)[:num_drafts]
            assert states.draft_tokens[slot].tolist() == expected + [-1] * (runner.num_drafts - num_drafts)


def replay(steps: DraftSteps | AdaptiveSteps, output: SchedulerOutput) -> Any:
    assert steps.launch(output), STEPS
    result = steps.take_output(None)
    assert result is not None and steps.take_output(None) is None
    return result


@pytest.mark.parametrize("share_own", [0.0, 0.4])
@pytest.mark.parametrize("share_right", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_requests_come_and_go(
    groups: tuple[tuple[int, int | None, int], ...], num_drafts: int, share_right: float, share_own: float
) -> None:
    """With a scheduler that is a step ahead, and steps of vLLM's own in between."""
    runner, choose = DraftRunner(num_drafts, groups), random.Random(5)
    steps, requests = DraftSteps(runner, runner.num_drafts), DraftRequests(runner, share_right, 5)
    counts, num_own = [], 0
    ahead: tuple[list[str], Any] | None = None

    def hear() -> None:
        nonlocal ahead
        if ahead is not None:
            ids, expected, result = ahead
            told = result if isinstance(result, list) else result.get_output().sampled_token_ids
            assert told == expected
            requests.hear(ids, told)
            counts.extend(map(len, told))
        ahead = None

    for _ in range(150):
        for request_id in list(requests.running):
            if not requests.has_room(request_id) or choose.random() < 0.03:
                requests.end(request_id)
        if len(requests.running) < MAX_REQS - len(requests.finished) and choose.random() < 0.4:
            requests.add(choose.randint(1, 20))
        if not requests.running:
            hear()
            continue
        output = requests.step()
        ids = list(requests.running)
        if choose.random() < share_own:
            steps._loaded_batch = None
            result: Any = runner.own_step_with_drafts(output, requests.next_tokens())
            num_own += 1
        else:
            result = replay(steps, output)
        expected = requests.expect(ids)
        hear()
        ahead = ids, expected, result
        check_state(runner, requests)
    hear()
    assert (30 < num_own < 110) == (share_own > 0)
    shares = {0.0: {1}, 1.0: {num_drafts + 1}, 0.7: {*range(1, num_drafts + 2)}}
    assert {*counts} == shares[share_right] and len(counts) > 150


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_drafts_come_and_go(groups: tuple[tuple[int, int | None, int], ...], num_drafts: int) -> None:
    """With a scheduler that is a step ahead. Steps between two numbers of drafts are vLLM's."""
    runner, choose = DraftRunner(num_drafts, groups), random.Random(5)
    steps, requests = adaptive_steps(runner), DraftRequests(runner, 0.7, 5)
    kinds, drafts = [], num_drafts
    ahead: tuple[list[str], Any, Any, int] | None = None

    def hear() -> None:
        nonlocal ahead
        if ahead is not None:
            ids, expected, result, of_step = ahead
            told = result if isinstance(result, list) else result.get_output().sampled_token_ids
            assert told == expected
            requests.hear(ids, told, of_step)
        ahead = None

    depths = draft_depths(num_drafts)
    for _ in range(60 * len(depths) ** 2):
        for request_id in list(requests.running):
            if not requests.has_room(request_id) or choose.random() < 0.03:
                requests.end(request_id)
        if drafts and len(requests.running) < MAX_REQS - len(requests.finished) and choose.random() < 0.4:
            requests.add(choose.randint(1, 20))
        if not requests.running:
            hear()
            drafts = num_drafts
            continue
        num_next = choose.choice(depths) if choose.random() < 0.4 else drafts
        output, ids = requests.step(drafts, num_next), list(requests.running)
        if num_next == drafts:
            result: Any = replay(steps, output)
        else:
            assert not steps.launch(output)
            result = runner.own_step_with_drafts(output, requests.next_tokens())
        expected = requests.expect(ids, drafts)
        hear()
        ahead = ids, expected, result, drafts
        kinds.append((drafts, num_next))
        check_state(runner, requests, num_next)
        drafts = num_next
    hear()
    assert all(kinds.count(kind) > 8 for kind in itertools.product(depths, repeat=2)), kinds
    steps.close()
    assert runner.model.compute_logits == runner._logits


def test_tokens_of_one_kind_are_asked_for_before_a_step_of_the_other() -> None:
    runner = DraftRunner(3)
    steps, requests = adaptive_steps(runner), DraftRequests(runner, 0.7, 1)
    requests.add(3)
    assert steps.launch(requests.step())
    with pytest.raises(IntegrityError, match="never asked for its tokens"):
        steps.launch(requests.step(0, 0))


def test_outputs_count_tokens_and_vllm_is_told_of_drafts() -> None:
    runner = DraftRunner(3)
    steps, requests = DraftSteps(runner, runner.num_drafts), DraftRequests(runner, 0.7, 1)
    requests.add(3)
    requests.add(9)
    counted = STEPS.rose
    for _ in range(4):
        output = requests.step()
        told = replay(steps, output).get_output()
        ids = list(requests.running)
        assert told.req_ids == ids == [*told.req_id_to_index]
        assert told.sampled_token_ids == requests.expect(ids)
        requests.hear(ids, told.sampled_token_ids)
    assert STEPS.rose == counted + 4
    assert runner.told == [(ids, 3)] * 4


def test_the_same_batch_is_not_taken_over_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = DraftRunner(3)
    steps, requests = DraftSteps(runner, runner.num_drafts), DraftRequests(runner, 1.0, 1)
    for _ in range(3):
        requests.add(5)
    calls: list[str] = []
    update = DraftRunner.update_requests
    monkeypatch.setattr(
        runner, "update_requests", lambda output: (calls.append("update"), update(runner, output))
    )
    for _ in range(4):
        told = replay(steps, requests.step()).get_output().sampled_token_ids
        assert told == requests.expect(requests.running)
    assert calls == ["update"]


def test_rows_of_padding_write_no_drafts_of_others() -> None:
    runner = DraftRunner(3)
    steps, requests = DraftSteps(runner, runner.num_drafts), DraftRequests(runner, 1.0, 1)
    for _ in range(3):
        requests.add(4)
    drafts = runner.req_states.draft_tokens
    idle = [slot for slot in range(MAX_REQS) if slot not in runner.req_states.req_id_to_index.values()]
    drafts[idle] = 9
    replay(steps, requests.step())
    assert (drafts[idle] == 9).all()


def test_seeds_and_temperatures_are_those_of_the_batch() -> None:
    """At addresses that stay: vLLM's own take turns."""
    runner = DraftRunner(2)
    steps, requests = DraftSteps(runner, runner.num_drafts), DraftRequests(runner, 1.0, 1)
    temperature, seeds = steps._parameters["temperature"], steps._parameters["seeds"]
    places = temperature.data_ptr(), seeds.data_ptr()
    for number in range(3):
        requests.add(4)
        slot = runner.req_states.req_id_to_index[requests.running[-1]]
        runner.sampler.sampling_states.seeds.np[slot] = 100 + number
        assert replay(steps, requests.step()).get_output().sampled_token_ids == requests.expect(
            requests.running
        )
        assert int(seeds[slot]) == 100 + number
    assert (steps._parameters["temperature"].data_ptr(), steps._parameters["seeds"].data_ptr()) == places
    assert int(seeds[MAX_REQS]) == 0


@pytest.fixture
def output() -> SchedulerOutput:
    runner = DraftRunner(3)
    requests = DraftRequests(runner, 1.0, 1)
    requests.add(5)
    requests.add(6)
    made = requests.step()
    assert why_drafts_are_not_replayed(made, 3) is None
    return made


@pytest.mark.parametrize("name", [*FIELDS_OF_OTHER_STEPS, *FIELDS_OF_MIXED_STEPS])
def test_a_step_with_anything_else_is_vllms(output: SchedulerOutput, name: str) -> None:
    setattr(output, name, [1] if name != "scheduled_spec_decode_tokens" else {"a": [1]})
    assert why_drafts_are_not_replayed(output, 3) is not None


def test_rows_with_fewer_drafts_are_vllms(output: SchedulerOutput) -> None:
    first, second = output.scheduled_cached_reqs.req_ids
    drafts = output.scheduled_spec_decode_tokens
    reason = "rows with fewer drafts, or parts of prompts"
    drafts[first] = [-1, -1]
    # Known tokens in the place of drafts.
    assert why_drafts_are_not_replayed(output, 3) == reason
    output.total_num_scheduled_tokens -= 1
    assert why_drafts_are_not_replayed(output, 3) == reason
    del drafts[first]
    output.total_num_scheduled_tokens = 8
    assert why_drafts_are_not_replayed(output, 3) == reason
    drafts[first] = [-1] * 3
    assert why_drafts_are_not_replayed(output, 3) is None
    assert why_drafts_are_not_replayed(output, 2) == "another number of drafts"
    output.scheduled_cached_reqs.resumed_req_ids.add(second)
    assert why_drafts_are_not_replayed(output, 3) == "resumed requests"


def test_grammars_are_vllms(output: SchedulerOutput) -> None:
    output.has_structured_output_requests = True
    assert why_drafts_are_not_replayed(output, 3) == "structured output beside drafts"


def test_what_a_request_wants_decides() -> None:
    runner = DraftRunner(3)
    steps, requests = DraftSteps(runner, runner.num_drafts), DraftRequests(runner, 1.0, 1)
    requests.add(5)
    slot, sampler = runner.req_states.req_id_to_index["request 0"], runner.sampler
    bias, penalties, bad_words = sampler.logits_processors
    states = sampler.sampling_states
    output = requests.step()
    states.temperature.np[slot] = 0.7
    for reason, array, value in (
        ("log-probabilities beside drafts", states.num_logprobs, 2),
        ("logits processors beside drafts", bias.use_logit_bias, True),
        ("logits processors beside drafts", penalties.use_penalty, True),
        ("logits processors beside drafts", bad_words.num_bad_words.np, 1),
        ("logits processors beside drafts", sampler.thinking_budget_state.use_thinking_budget, True),
        ("top-k, top-p or min-p beside drafts", states.top_k.np, 5),
        ("top-k, top-p or min-p beside drafts", states.top_p.np, 0.5),
        ("top-k, top-p or min-p beside drafts", states.min_p.np, 0.1),
        ("prompts beside drafts", runner.req_states.prefill_len.np, 6),
    ):
        count, kept = STEPS.vllm.get(reason, 0), array[slot]
        array[slot] = value
        assert not steps.launch(output) and steps.take_output(None) is None
        assert STEPS.vllm[reason] == count + 1
        array[slot] = kept
    states.temperature.np[slot] = 0
    # Greedy requests have no use for it.
    states.top_k.np[slot] = 5
    assert steps.launch(output)


def test_more_requests_than_logits_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_steps, "_MAX_HEAD_BYTES", 4 * VOCAB_SIZE * 18)
    runner = DraftRunner(3)
    assert max_num_logits(runner, 4) == 18
    steps, requests = DraftSteps(runner, runner.num_drafts), DraftRequests(runner, 1.0, 1)
    assert steps._sizes == [4, 2, 1]
    for _ in range(5):
        requests.add(2)
    assert not steps.launch(requests.step())
    assert max_num_logits(runner, 1) == MAX_REQS


@pytest.mark.parametrize("num_drawn", [1, 3])
def test_random_draws_are_verified_in_parts(monkeypatch: pytest.MonkeyPatch, num_drawn: int) -> None:
    """Of as many requests as have room; temperature comes before, on a copy in float32."""
    runner = DraftRunner(2)
    monkeypatch.setattr(draft_steps, "MAX_LOGITS_BYTES", 4 * VOCAB_SIZE * 3 * num_drawn)
    steps, requests = DraftSteps(runner, runner.num_drafts), DraftRequests(runner, 0.7, 1)
    for _ in range(5):
        requests.add(4)
    changed: list[tuple[int, list[int]]] = []

    def note(logits: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
        changed.append((len(logits), slots.tolist()))
        assert logits.dtype is torch.float32 and len(values) == MAX_REQS + 1

    from vllm.v1.worker.gpu.sample import gumbel

    monkeypatch.setattr(gumbel, "apply_temperature", note)
    # Told to be random, and greedy by the stand-in's parameters.
    temperatures = runner.sampler.sampling_states.temperature
    steps._temperatures = np.ones_like(temperatures.np)
    told = replay(steps, requests.step()).get_output().sampled_token_ids
    assert told == requests.expect(requests.running)
    assert [count for count, _ in changed] == [3 * num_drawn] * (8 // num_drawn) + [8 % num_drawn * 3] * (
        num_drawn == 3
    )
    real = [runner.req_states.req_id_to_index[each] for each in requests.running]
    assert [slot for _, slots in changed for slot in slots[::3]] == [*real, *[MAX_REQS] * 3]


def test_both_kinds_of_steps_multiply_as_many_rows() -> None:
    runner = DraftRunner(3)
    steps, requests = DraftSteps(runner, runner.num_drafts), DraftRequests(runner, 1.0, 1)
    for _ in range(3):
        requests.add(4)
    replay(steps, requests.step()).get_output()
    hidden, num_logits = runner.cudagraph_manager.hidden_states, 12
    batch = SimpleNamespace(num_reqs=3, num_draft_tokens=9, num_tokens=12)
    runner.execute_model_state = SimpleNamespace(input_batch=batch, hidden_states=hidden[:16])
    runner.products.clear()
    steps.note_vllm_step()
    assert len(runner.model.compute_logits(hidden[torch.arange(12)])) == num_logits
    # Once: what comes next is another product.
    runner.model.compute_logits(hidden[:12])
    for changed in ({"num_draft_tokens": 8}, {"num_tokens": 13}):
        runner.execute_model_state.input_batch = SimpleNamespace(**{**vars(batch), **changed})
        steps.note_vllm_step()
        runner.model.compute_logits(hidden[:12])
    runner.execute_model_state = SimpleNamespace(input_batch=batch, hidden_states=hidden[:16].clone())
    steps.note_vllm_step()
    runner.model.compute_logits(hidden[:12])
    assert runner.products == [16, 12, 12, 12, 12]
    steps.close()
    assert runner.model.compute_logits == steps._compute_logits


def test_a_row_ends_before_its_last_column() -> None:
    runner = DraftRunner(3)
    steps, requests = DraftSteps(runner, runner.num_drafts), DraftRequests(runner, 1.0, 1)
    requests.add(MAX_LEN - 9)
    while requests.has_room("request 0"):
        told = replay(steps, requests.step()).get_output().sampled_token_ids
        assert told == requests.expect(requests.running)
    assert requests.num_known["request 0"] == MAX_LEN - 4


@pytest.mark.parametrize("method", ["standard", "synthetic", "block"])
def test_a_step_leaves_what_vllms_leaves(method: str) -> None:
    """Tokens and state, by vLLM's own kernels, interpreted."""
    cases = [
        {"num_drafts": num_drafts, "draws": draws, "dtype": dtype, "method": method, "seed": seed}
        for seed, (num_drafts, draws, dtype) in enumerate(
            [(3, False, "bfloat16"), (1, False, "float32"), (3, True, "float32"), (2, True, "bfloat16")]
        )
    ]
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.vllm_plugin.draft_lockstep", json.dumps(cases)],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr[-2000:]
    counts = json.loads(run.stdout.splitlines()[-1])
    assert len(counts) == len(cases) and {*itertools.chain(*counts)} == {1, 2, 3, 4}
