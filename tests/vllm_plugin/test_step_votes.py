"""Steps that data-parallel ranks run together: what they vote on, when, and what becomes of the answer."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu import model_runner

from rose_backend.errors import IntegrityError
from rose_backend.vllm_plugin.step_graph import votes as step_votes
from rose_backend.vllm_plugin.step_graph.steps import StepGraphs
from rose_backend.vllm_plugin.step_graph.votes import StepVotes
from tests.support.vllm_plugin.steady_runner import Desc, Requests, Runner, SamplingRunner
from tests.support.vllm_plugin.voting_ranks import NUM_RANKS, run_rank


def test_ranks_vote_as_often_and_run_the_same_graphs_as_with_vllms_steps(tmp_path: Path) -> None:
    """Two processes; dummy, replayed and vLLM's steps meet in any way."""
    seeds, num_steps = [0, 1], 250
    with ProcessPoolExecutor(NUM_RANKS, get_context("spawn")) as pool:
        ranks = [
            pool.submit(run_rank, rank, str(tmp_path / "store"), seeds, num_steps)
            for rank in range(NUM_RANKS)
        ]
        courses = [rank.result() for rank in ranks]
    kinds = Counter[str]()
    for seed in seeds:
        votes = courses[0][seed, False].votes
        assert len(votes) == num_steps
        for of_rank in courses:
            stock, rose = of_rank[seed, False], of_rank[seed, True]
            assert stock.votes == rose.votes == votes
            assert stock.layers == rose.layers and len(rose.layers) == num_steps
            kinds += rose.kinds
    assert min(kinds.values()) > 10 and len(kinds) == 7, kinds


class Ballots:
    """In the place of vLLM's vote: always the same answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, desc: Any) -> None:
        self.answer, self.asked = (desc, object()), list[dict[str, Any]]()
        signature = step_votes.dispatch_cg_and_sync_dp

        def vote(**question: Any) -> Any:
            self.asked.append(question)
            return self.answer

        vote.__wrapped__ = signature  # type: ignore[attr-defined]
        monkeypatch.setattr(step_votes, "dispatch_cg_and_sync_dp", vote)


def of_two(runner: Any) -> Any:
    runner.dp_size = 2
    return runner


def test_a_rank_alone_has_no_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    ballots, runner = Ballots(monkeypatch, Desc(8)), Runner()
    votes = StepVotes(runner)
    assert votes.dispatch(3, 3, 1, 0, 1) == Desc(4) and ballots.asked == []
    own = model_runner.dispatch_cg_and_sync_dp
    with votes.handed_on():
        assert model_runner.dispatch_cg_and_sync_dp is own


def test_a_step_is_voted_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ballots = Ballots(monkeypatch, Desc(8))
    votes = StepVotes(of_two(Runner()))
    for num_votes in (1, 2):
        votes.begin_step()
        assert votes.dispatch(3, 3, 1, 0, 1) == votes.dispatch(3, 3, 1, 0, 1) == Desc(8)
        assert len(ballots.asked) == num_votes


def test_a_batch_goes_on_in_graphs_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind its rows there are none of an earlier and larger batch."""
    runner = of_two(Runner())
    ballots, steps, requests = Ballots(monkeypatch, None), StepGraphs(runner), Requests(runner)
    for _ in range(6):
        requests.add(3)
    for num_ended, size in ((0, 8), (4, 2), (0, 8), (0, 4), (0, 8), (0, 2)):
        for request_id in list(requests.tokens)[:num_ended]:
            requests.end(request_id)
        ballots.answer = Desc(size), None
        assert steps.launch(requests.step())
        assert steps.take_output(None).get_output().sampled_token_ids == [
            [each] for each in requests.expect()
        ]  # type: ignore[union-attr]
        is_padding = runner.input_buffers.is_padding[:size].tolist()
        assert is_padding == [row >= len(requests.tokens) for row in range(size)]
    # Ends sample as many rows as the batch's own graph has.
    assert runner.products == [8, 2, 2, 2, 2, 2] and len(ballots.asked) == 6


@pytest.mark.parametrize("asks", ["once", "again", "something else", "never"])
def test_vllms_step_gets_the_answer_once(monkeypatch: pytest.MonkeyPatch, asks: str) -> None:
    runner = of_two(SamplingRunner())
    ballots = Ballots(monkeypatch, Desc(3, CUDAGraphMode.NONE, None))
    steps, requests = StepGraphs(runner), Requests(runner)
    requests.add(3)
    assert not steps.launch(requests.step()) and len(ballots.asked) == 1
    question = ballots.asked[0]
    positional = ["cudagraph_manager", "num_reqs", "num_tokens", "uniform_token_count", "dp_size", "dp_rank"]
    named = {name: value for name, value in question.items() if name not in positional}

    def ask(**changes: Any) -> Any:
        return model_runner.dispatch_cg_and_sync_dp(
            *(question[each] for each in positional), **named, need_eager=False, **changes
        )

    if asks == "once":
        with steps.votes.handed_on():
            assert ask(allow_ubatching=False) is ballots.answer
        return
    told = {"again": "asks again", "something else": "in place of", "never": "has not asked"}[asks]
    with pytest.raises(IntegrityError, match=told), steps.votes.handed_on():
        if asks == "something else":
            ask(allow_ubatching=True)
        for _ in range(2 if asks == "again" else 0):
            ask()
    assert len(ballots.asked) == 1


def test_a_step_that_is_vllms_for_its_own_reasons_votes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = of_two(SamplingRunner())
    ballots, steps, requests = Ballots(monkeypatch, Desc(8)), StepGraphs(runner), Requests(runner)
    requests.add(3)
    assert steps.launch(requests.step()) and steps.take_output(None) is not None and requests.expect()
    output = requests.step()
    output.has_sync_kv_loads = True
    assert not steps.launch(output) and len(ballots.asked) == 1
    own = model_runner.dispatch_cg_and_sync_dp
    # Not the answer of the step before.
    with steps.votes.handed_on():
        assert model_runner.dispatch_cg_and_sync_dp is own
