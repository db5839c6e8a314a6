"""Replayed steps with the drafts of a head: what they leave behind, and which graphs of vLLM's they need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode

from rose_backend.vllm_plugin.plugin_logger import STEPS
from rose_backend.vllm_plugin.step_graph.head_steps import HeadSteps, PlainHeadSteps
from tests.support.patience import HANG_S
from tests.support.vllm_plugin.draft_runner import DraftRequests, DraftRunner
from tests.support.vllm_plugin.steady_runner import MAX_REQS, SIZES, Desc

CASES: dict[str, tuple[dict[str, Any], set[int]]] = {
    "EAGLE-3": ({"num_drafts": 3, "groups": "one group"}, {1, 2, 3, 4}),
    "one draft, several groups": ({"num_drafts": 1, "groups": "windows"}, {1, 2}),
    "EAGLE": ({"num_drafts": 2, "groups": "one group, two shapes", "method": "eagle"}, {1, 2, 3}),
    "MTP": ({"num_drafts": 3, "groups": "one group", "method": "mtp"}, {1, 2, 3, 4}),
    "drawn": ({"num_drafts": 2, "groups": "one group", "is_drawn": True}, {1, 2, 3}),
    # And to the end of the head's context.
    "never right": (
        {
            "num_drafts": 3,
            "groups": "one group",
            "share_right": 0.0,
            "share_replayed": 1.0,
            "max_model_len": 40,
        },
        {1},
    ),
    "always right": ({"num_drafts": 7, "groups": "one group", "share_right": 1.0}, {8}),
    "come and go": (
        {"num_drafts": 3, "groups": "windows", "share_turned": 0.3, "num_steps": 80},
        {1, 2, 3, 4},
    ),
    "EAGLE's come and go": (
        {
            "num_drafts": 1,
            "groups": "one group, two shapes",
            "method": "eagle",
            "share_turned": 0.3,
            "num_steps": 40,
        },
        {1, 2},
    ),
    "come and go, stored alone": (
        {"num_drafts": 3, "groups": "windows", "share_turned": 0.3, "num_steps": 80, "stores": True},
        {1, 2, 3, 4},
    ),
    "MTP's come and go": (
        {
            "num_drafts": 2,
            "groups": "windows",
            "method": "mtp",
            "share_turned": 0.3,
            "num_steps": 80,
            "seed": 18,
        },
        {1, 2, 3},
    ),
    "synthetic": ({"num_drafts": 3, "groups": "one group", "synthetic": True}, {1, 2, 3, 4}),
}
"""Options of a lockstep, and how many tokens rows must get."""


@pytest.mark.parametrize("case", CASES)
def test_steps_leave_what_vllms_leave(case: str) -> None:
    """Tokens, state and drafts, by vLLM's own kernels, interpreted; requests come and go, steps of both kinds mix."""
    options, counts = CASES[case]
    run = subprocess.run(
        [
            *(sys.executable, "-m", "tests.support.vllm_plugin.head_lockstep"),
            json.dumps([{"seed": len(case), **options}]),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr[-2000:]
    (told,) = json.loads(run.stdout.splitlines()[-1])
    assert len(told) > 40 and {*told} == counts


class Passes:
    """Graphs of a head's passes that are there for some numbers of requests."""

    def __init__(self, query_len: int, num_captured: int) -> None:
        self._query_len, self._num_captured = query_len, num_captured
        self.asked: list[tuple[int, ...]] = []

    def dispatch(self, num_reqs: int, num_tokens: int, query_len: int, num_active_loras: int) -> Desc:
        self.asked.append((num_reqs, num_tokens, query_len, num_active_loras))
        assert query_len in (1, 4, self._query_len)
        size = next(size for size in SIZES if size * query_len >= num_tokens)
        mode = CUDAGraphMode.FULL if num_reqs <= self._num_captured else CUDAGraphMode.NONE
        return Desc(size * query_len, mode, uniform_token_count=query_len)

    def specialize_spec_tokens(self, desc: Desc, num_drafts: int) -> Desc:
        self.num_drafts = num_drafts
        return desc


def make_runner(num_drafts: int, num_first: int, num_later: int) -> DraftRunner:
    runner = DraftRunner(num_drafts)
    runner.speculator = SimpleNamespace(
        prefill_cudagraph_manager=Passes(num_drafts + 1, num_first),
        decode_cudagraph_manager=Passes(1, num_later),
    )
    return runner


@pytest.mark.parametrize(
    ("num_drafts", "num_first", "num_later", "most"), [(3, 8, 8, 8), (3, 5, 8, 5), (3, 8, 3, 3), (1, 8, 0, 8)]
)
def test_steps_need_graphs_of_all_passes(num_drafts: int, num_first: int, num_later: int, most: int) -> None:
    runner = make_runner(num_drafts, num_first, num_later)
    steps, requests = HeadSteps(runner, num_drafts), DraftRequests(runner, 0.0, 1)
    assert sorted(steps._passes) == [*range(1, most + 1)]
    head = runner.speculator
    # As vLLM asks for them: with the tokens of padding that the step has.
    assert head.prefill_cudagraph_manager.asked[2] == (3, 4 * (num_drafts + 1), num_drafts + 1, 0)
    assert (3, 3, 1, 0) in head.decode_cudagraph_manager.asked or num_drafts == 1
    for _ in range(MAX_REQS):
        requests.add(2)
    if most < MAX_REQS:
        reason = "more requests than full graphs of decodes take"
        count = STEPS.vllm.get(reason, 0)
        assert not steps.launch(requests.step())
        assert STEPS.vllm[reason] == count + 1


def test_steps_with_some_of_the_drafts_have_as_many_passes() -> None:
    steps = HeadSteps(make_runner(7, 8, 8), 3)
    assert steps._head.decode_cudagraph_manager.num_drafts == 3
    assert all(passes.first.uniform_token_count == 4 for passes in steps._passes.values())


def test_steps_without_drafts_need_graphs_of_the_first_pass_and_have_no_prompts() -> None:
    runner = make_runner(3, 5, 0)
    steps, requests = PlainHeadSteps(runner), DraftRequests(runner, 0.0, 1)
    assert sorted(steps._desc_of) == [1, 2, 3, 4, 5]
    assert runner.speculator.prefill_cudagraph_manager.asked[2] == (3, 4, 1, 0)
    # Of prologues and greedy ends.
    assert steps._num_graphs() == 2 * len(SIZES)
    requests.add(4)
    prompt, last_of_prompt = requests.step(0, 0), requests.step(0, 0)
    prompt.scheduled_new_reqs = [SimpleNamespace()]  # type: ignore[list-item]
    last_of_prompt.scheduled_cached_reqs.num_computed_tokens = [2]
    for output in (prompt, last_of_prompt):
        count = STEPS.vllm.get("prompts beside drafts", 0)
        assert not steps.launch(output) and STEPS.vllm["prompts beside drafts"] == count + 1


def test_rows_of_padding_belong_to_nobody() -> None:
    runner = make_runner(3, 8, 8)
    steps = HeadSteps(runner, 3)
    steps._upload_rows(np.array([5, 2, 7]))
    given = steps._row_inputs.tensors
    assert given["is_row"].tolist() == [True] * 3 + [False] * 5
    assert given["head_slots"].tolist() == [5, 2, 7] + [-1] * 5
    # They write the first row's drafts once more.
    assert given["drafted_rows"].tolist() == [0, 1, 2] + [0] * 5
    assert given["drafted_slots"].tolist() == [5, 2, 7] + [5] * 5


def test_graphs_are_counted_and_given_back() -> None:
    runner = make_runner(3, 8, 8)
    steps = HeadSteps(runner, 3)
    num_sizes = len(SIZES)
    # Greedy and drawn ends, prologues, and two behind graphs of the head.
    assert steps._num_graphs() == 5 * num_sizes
    assert HeadSteps(make_runner(1, 8, 8), 1)._num_graphs() == 4 * num_sizes
    for graphs in (steps._begins_of_later_passes, steps._ends_of_passes):
        graphs._graphs[1] = (torch.cuda.CUDAGraph,)  # type: ignore[assignment]
    steps.close()
    assert not steps._begins_of_later_passes._graphs and not steps._ends_of_passes._graphs
