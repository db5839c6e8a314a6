"""Tenants take turns for request slots: nobody waits for all that another one has sent."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rose_backend import LLM
from rose_backend.engine.request import Completion, Request
from rose_backend.engine.waiting_queue import WaitingQueue
from tests.engine.conftest import GREEDY
from tests.engine.test_prefix_sharing import random_prompt

NUM_SLOTS = 8
PROMPT_LEN = 23
"""Of the other tenant: no other prompt is as long."""


def completion_of(tenant: bytes, number: int) -> Completion:
    ids = np.array([number], np.int32)
    request = Request(str(number), None, ids, GREEDY, 1, is_streaming=False, tenant=tenant)
    completion: Any = Completion.__new__(Completion)
    completion.request = request
    return completion  # type: ignore[no-any-return]


def test_the_next_one_is_of_the_tenant_that_holds_the_fewest_slots() -> None:
    queue = WaitingQueue()
    sent = {tenant: [completion_of(tenant, number) for number in range(3)] for tenant in (b"a", b"b", b"c")}
    for tenant in (b"a", b"b", b"c"):
        for each in sent[tenant]:
            queue.append(each)
    taken = [queue.take().request for _ in range(7)]
    # In turns, each tenant's in the order they came.
    assert [(each.tenant, each.request_id) for each in taken] == [
        *((tenant, "0") for tenant in (b"a", b"b", b"c")),
        *((tenant, "1") for tenant in (b"a", b"b", b"c")),
        (b"a", "2"),
    ]
    queue.hold(b"c", -2)
    assert queue.first is sent[b"c"][2] and queue.largest_holder == b"a" and queue.first_has_nothing
    queue.put_back([sent[b"c"][1]])
    assert queue.take() is sent[b"c"][1] and not queue.first_has_nothing and queue.num_held(b"c") == 1
    queue.remove(sent[b"c"][2])
    assert list(queue) == [sent[b"b"][2]] and len(queue) == 1 and sent[b"c"][2] not in queue
    assert queue.take() is sent[b"b"][2] and not queue


def test_tenants_that_hold_as_many_take_turns() -> None:
    queue = WaitingQueue()
    for number in range(6):
        queue.append(completion_of(b"a", number))
    for number in range(6):
        queue.append(completion_of(b"b", number))
    taken = []
    for _ in range(6):  # through a single slot
        taken.append(queue.take().request.tenant)
        queue.hold(taken[-1], -1)
    assert taken == [b"a", b"b"] * 3


def test_a_single_tenant_has_what_came_first() -> None:
    queue = WaitingQueue()
    all_of_them = [completion_of(b"", number) for number in range(20)]
    for each in all_of_them:
        queue.append(each)
    assert [queue.take() for _ in range(20)] == all_of_them and not queue.first_has_nothing


def request_of(llm: LLM, tenant: bytes, ids: list[int], max_tokens: int, **fields: Any) -> Request:
    processor, params = llm.core.input_processor, replace(GREEDY, max_tokens=max_tokens, **fields)
    return processor.build(processor.process_all([ids], [params], tenant=tenant)[0])


def fill(llm: LLM, num_requests: int, max_tokens: int) -> list[Request]:
    """Let a tenant take all request slots, and others of its requests wait."""
    requests = [
        request_of(llm, b"many", [*range(1, 9), number], max_tokens) for number in range(num_requests)
    ]
    for each in requests:
        llm.core.add(each)
    while len(llm.core._scheduler.running_slots) < NUM_SLOTS:
        llm.core.step()
    return requests


def run(llm: LLM) -> dict[str, list[list[int]]]:
    """Return what requests say, in the order in which they end."""
    said = {}
    while llm.core.num_unfinished:
        said |= {
            each.request_id: [list(answer.token_ids) for answer in each.outputs] for each in llm.core.step()
        }
    return said


def check_that_nobody_holds_anything(llm: LLM) -> None:
    waiting = llm.core._scheduler.waiting
    assert not waiting._num_held and not waiting._queues


def alone(llm: LLM, requests: list[Request]) -> dict[str, list[list[int]]]:
    """Return what requests say that wait for nobody."""
    outputs = llm.generate(
        [each.prompt_token_ids.tolist() for each in requests], [each.params for each in requests]
    )
    return {
        each.request_id: [list(answer.token_ids) for answer in output.outputs]
        for each, output in zip(requests, outputs, strict=True)
    }


@pytest.fixture
def prompt_lengths(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM], list[list[int]]]:
    """Return a function that records how many tokens each request of each later step of an engine computes."""

    def record(llm: LLM) -> list[list[int]]:
        lengths: list[list[int]] = []
        schedule = llm.core._scheduler.schedule
        repeat = llm.core._scheduler.repeat

        def scheduled(*args: Any) -> Any:
            step = schedule(*args)
            if step is not None:
                lengths.append(step.num_new_tokens.tolist())
            return step

        def repeated() -> bool:
            repeats = repeat()
            if repeats:
                lengths.append([])
            return repeats

        monkeypatch.setattr(llm.core._scheduler, "schedule", scheduled)
        monkeypatch.setattr(llm.core._scheduler, "repeat", repeated)
        return lengths

    return record


@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("n", [1, 3])
def test_the_first_request_of_a_tenant_is_computed_within_three_steps(
    make_llm: Callable[..., LLM], prompt_lengths: Callable[[LLM], list[list[int]]], run_ahead: int, n: int
) -> None:
    llm = make_llm(max_num_seqs=NUM_SLOTS, run_ahead=run_ahead, max_num_batched_tokens=64)
    llm.core._scheduler._prompts_first = False  # as in a server
    requests = fill(llm, 80, max_tokens=100)
    while llm.core._scheduler._num_repeats < 8:  # decodes that repeat the step before
        llm.core.step()
    assert llm.core.num_waiting == 80 - NUM_SLOTS
    lengths = prompt_lengths(llm)
    single = {"temperature": 1.0, "seed": 3, "n": n} if n > 1 else {}
    few = [request_of(llm, b"few", random_prompt(PROMPT_LEN, seed=seed), 4, **single) for seed in range(3)]
    for each in few:
        llm.core.add(each)
    said = run(llm)
    assert next(index for index, each in enumerate(lengths) if PROMPT_LEN in each) <= 3
    check_that_nobody_holds_anything(llm)
    # A slot was taken from who holds many for the first only: the others wait for what is free, and come in turns.
    assert n <= llm.stats.preemptions <= 2 * n
    assert set(list(said)[: NUM_SLOTS * 2]) > {each.request_id for each in few}
    assert said == alone(make_llm(max_num_seqs=96), requests + few)


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_tenants_get_blocks_that_another_one_has_taken(
    make_llm: Callable[..., LLM], prompt_lengths: Callable[[LLM], list[list[int]]], run_ahead: int
) -> None:
    # Four requests of six blocks each leave two free, and grow inside of their last ones.
    llm = make_llm(
        max_num_seqs=NUM_SLOTS, run_ahead=run_ahead, block_size=32, num_blocks=27, max_model_len=256
    )
    llm.core._scheduler._prompts_first = False
    requests = [request_of(llm, b"many", random_prompt(165, seed=seed), 26) for seed in range(12)]
    for each in requests:
        llm.core.add(each)
    while llm.stats.generated_tokens < 6:
        llm.core.step()
    lengths = prompt_lengths(llm)
    few = [request_of(llm, b"few", random_prompt(150, seed=40 + seed), 10) for seed in range(2)]
    for each in few:
        llm.core.add(each)
    said = run(llm)
    assert next(index for index, each in enumerate(lengths) if 150 in each) <= 3
    check_that_nobody_holds_anything(llm)
    assert said == alone(make_llm(max_num_seqs=NUM_SLOTS), requests + few)


def test_who_holds_the_most_slots_is_preempted_where_blocks_are_short(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=NUM_SLOTS, block_size=16, num_blocks=26, max_model_len=200)
    llm.core._scheduler._prompts_first = False
    many = [request_of(llm, b"many", random_prompt(60, seed=seed), 100) for seed in range(3)]
    (newest,) = [request_of(llm, b"few", random_prompt(60, seed=9), 100)]
    for each in many:
        llm.core.add(each)
    while len(llm.core._scheduler.running_slots) < len(many):
        llm.core.step()
    llm.core.add(newest)
    said = run(llm)
    assert llm.stats.preemptions and newest.completions[0].num_computed_before == 0
    assert said == alone(make_llm(max_num_seqs=NUM_SLOTS), [*many, newest])


def test_many_tenants_and_few_slots(make_llm: Callable[..., LLM]) -> None:
    rng = random.Random(7)
    llm = make_llm(max_num_seqs=NUM_SLOTS, num_blocks=40, max_model_len=200)
    llm.core._scheduler._prompts_first = False
    requests = []
    for number in range(150):
        tenant = b"%d" % min(int(rng.expovariate(0.4)), 11)
        ids = random_prompt(rng.randint(2, 60), seed=number)
        requests.append(request_of(llm, tenant, ids, rng.randint(1, 30)))
    said, waiting = {}, requests.copy()
    while waiting or llm.core.num_unfinished:
        for _ in range(rng.randint(0, 6)):
            if waiting:
                llm.core.add(waiting.pop())
        for output in llm.core.step():
            said[output.request_id] = [list(answer.token_ids) for answer in output.outputs]
    assert said == alone(make_llm(max_num_seqs=96), requests)
    check_that_nobody_holds_anything(llm)
