"""The budget of steps with prompts in vLLM's schedulers, on a clock that runs only while steps do."""

from __future__ import annotations

from typing import Any

import pytest

from rose_backend.conformance.block_manager.pretended_model import expected_output
from tests.support.vllm_plugin.configs import MakeConfig, rose
from tests.support.vllm_plugin.simulation import (
    NUM_DRAFTS,
    Simulation,
    drafting,
    make_request,
    make_simulation,
)
from tests.support.vllm_plugin.traffic import Traffic, make_hasher

ROOMY = {"num_blocks": 400, "block_size": 16, "max_num_seqs": 24, "max_num_batched_tokens": 300}
PROMPT = [*range(140)]


class Clock:
    """Time that passes in steps: 10 ms, up to 40 prompt tokens beside decodes included, and 0.1 ms for each further.

    Attributes:
        parts: decodes and prompt tokens of each step, oldest first; the latter by request.
    """

    def __init__(self, simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.parts: list[tuple[int, dict[str, int]]] = []
        # Its scheduler's, and nobody else's.
        monkeypatch.setattr("rose_backend.vllm_plugin.scheduler.scheduler.time", self)
        self._update = simulation.scheduler.update_from_output
        simulation.scheduler.update_from_output = self._run

    def perf_counter(self) -> float:
        return self.now_s

    def _run(self, output: Any, result: Any) -> Any:
        drafts = output.scheduled_spec_decode_tokens
        prompts = {id: n for id, n in output.num_scheduled_tokens.items() if n > 1 and id not in drafts}
        self.parts.append((len(output.num_scheduled_tokens) - len(prompts), prompts))
        self.now_s += 10e-3 + max(sum(prompts.values()) - 40, 0) * 0.1e-3
        return self._update(output, result)

    def chunks(self, request_id: str) -> list[int]:
        """Return how many tokens of a prompt each step has computed."""
        return [prompts[request_id] for _, prompts in self.parts if request_id in prompts]


def start(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, budget: object, depth: int = 1, **options: Any
) -> tuple[Simulation, Clock]:
    """Return a simulation in which a request, ``stream``, decodes, and its clock."""
    simulation = make_simulation(make_config, depth=depth, **{**ROOMY, **options, **rose(step_budget=budget)})
    clock = Clock(simulation, monkeypatch)
    simulation.add(lambda: make_request("stream", [1] * 4, 150))
    for _ in range(20):
        simulation.checked_step()
    return simulation, clock


def send(simulation: Simulation, count: int, first: int = 0, num_steps: int = 4) -> None:
    """Send prompts one by one, as many steps apart. Each prompt has tokens of its own."""
    for index in range(first, first + count):
        prompt = [(token * 7 + index) % 200 for token in PROMPT]
        simulation.add(lambda prompt=prompt, index=index: make_request(f"r{index}", prompt, 1))
        for _ in range(num_steps):
            simulation.checked_step()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_v2", [False, True])
def test_prompts_are_cut_to_steps_of_one_and_a_half_decode_steps(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, depth: int, is_v2: bool
) -> None:
    simulation, clock = start(make_config, monkeypatch, "auto", depth)
    simulation.scheduler.use_v2_model_runner = is_v2
    send(simulation, 24)
    # Rare and unknown at first; then 15 ms, which are 90 tokens, in units of 16.
    assert clock.chunks("r3") == [140]
    assert clock.chunks("r23")[0] in (64, 80)
    assert simulation.scheduler._step_budget.num_limited > 5
    assert all(num_decodes for num_decodes, _ in clock.parts[1:])


def test_without_a_budget_prompts_are_whole(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation, clock = start(make_config, monkeypatch, "off")
    send(simulation, 24)
    assert all(clock.chunks(f"r{index}") == [140] for index in range(24))


def test_a_budget_of_milliseconds_holds_at_once(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation, clock = start(make_config, monkeypatch, "13")
    send(simulation, 8)
    chunks = clock.chunks("r7")
    assert len(chunks) == 3 and 56 < max(chunks) <= 80


def test_a_step_is_timed_from_the_end_of_the_one_before(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[tuple[int, float]] = []
    simulation, clock = start(make_config, monkeypatch, "auto", depth=2)
    budget = simulation.scheduler._step_budget
    monkeypatch.setattr(budget, "note_decode_step", lambda seconds: noted.append((0, round(seconds, 6))))
    monkeypatch.setattr(budget, "note_mixed_step", lambda count, s: noted.append((count, round(s, 6))))
    send(simulation, 1)
    # Idle until the next step is scheduled: that is no part of it.
    while simulation.in_flight:
        simulation.scheduler.update_from_output(*simulation.in_flight.popleft())
    clock.now_s += 50.0
    simulation.checked_step()
    simulation.checked_step()
    assert noted[:3] == [(0, 10e-3), (140, 20e-3), (0, 10e-3)] and {s for _, s in noted} == {10e-3, 20e-3}


def start_with_another(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return a simulation in which a second request has begun, and its clock."""
    simulation, clock = start(make_config, monkeypatch, 13)
    send(simulation, 6)
    simulation.add(lambda: make_request("other", [2] * 4, 60))
    simulation.checked_step()
    return simulation, clock


def test_decodes_behind_a_prompt_keep_their_token(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation, clock = start_with_another(make_config, monkeypatch)
    scheduler = simulation.scheduler
    simulation.add(lambda: make_request("long", [3, *PROMPT], 4))
    simulation.checked_step()
    # As where a prompt's chunk was cut for another reason than the step's tokens, and others were admitted after it.
    assert [request.request_id for request in scheduler.running] == ["stream", "other", "long"]
    scheduler.running = [scheduler.running[index] for index in (0, 2, 1)]
    simulation.checked_step()
    num_decodes, prompts = clock.parts[-1]
    assert num_decodes == 2 and 32 <= prompts["long"] <= 80
    assert scheduler.scheduler_config.long_prefill_token_threshold == 0


def test_decodes_behind_several_prompts_keep_their_token(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation, clock = start_with_another(make_config, monkeypatch)
    scheduler = simulation.scheduler
    for name, first in (("long", 3), ("longer", 4)):
        simulation.add(lambda name=name, first=first: make_request(name, [first, *PROMPT], 4))
        simulation.checked_step()
        # Each begins as if it were alone.
        running = {request.request_id: request for request in scheduler.running}
        if name == "long":
            scheduler.running = [running["stream"], running["other"]]
            long = running["long"]
    scheduler.running = [running["stream"], long, running["longer"], running["other"]]
    simulation.checked_step()
    num_decodes, prompts = clock.parts[-1]
    assert num_decodes == 2 and prompts.keys() == {"long", "longer"} and sum(prompts.values()) <= 80


@pytest.mark.parametrize("num_decodes", [1, 2])
def test_a_waiting_prompt_of_a_single_token_does_not_lift_the_limit(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, num_decodes: int
) -> None:
    simulation, clock = start(make_config, monkeypatch, 13, depth=2, **drafting(share_right=0.0))
    others = [lambda: make_request("other", [2] * 4, 150)][: num_decodes - 1]
    for make in (*others, lambda: make_request("long", [3, *PROMPT], 4)):
        simulation.add(make)
        monkeypatch.setattr(simulation.scheduler, "_max_prompt_tokens", lambda: 40)
        simulation.checked_step()
    simulation.add(lambda: make_request("longer", [4, *PROMPT], 4), lambda: make_request("single", [5], 4))
    while simulation.is_busy:
        simulation.checked_step()
    chunks = [sum(prompts.values()) for _, prompts in clock.parts if prompts]
    assert len(simulation.outputs["single"]) == 4
    assert len(chunks) >= 7 and max(chunks) <= 40


@pytest.mark.parametrize("limit", [4, 40])
def test_decodes_behind_prompts_keep_their_drafts(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    simulation, _ = start(make_config, monkeypatch, 13, depth=2, **drafting(share_right=0.0))
    scheduler = simulation.scheduler
    simulation.add(lambda: make_request("other", [2] * 4, 60))
    simulation.checked_step()
    monkeypatch.setattr(scheduler, "_max_prompt_tokens", lambda: limit)
    prompts: list[Any] = []
    for name, first in (("long", 3), ("longer", 4)):
        simulation.add(lambda name=name, first=first: make_request(name, [first, *PROMPT], 4))
        simulation.checked_step()
        # Each begins as if it were alone.
        prompts.append(scheduler.running.pop())
    stream, other = scheduler.running
    scheduler.running = [stream, *prompts, other]
    output = scheduler.schedule()
    counts = output.num_scheduled_tokens
    assert counts["stream"] == counts["other"] == 1 + NUM_DRAFTS
    # What is cut into less than a decode computes would cut the decode, too.
    assert 0 < counts["long"] + counts["longer"] <= max(limit, 2 * (1 + NUM_DRAFTS))
    assert output.scheduled_spec_decode_tokens.keys() == {"stream", "other"}


def test_what_cannot_be_cut_is_computed_in_the_next_step(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation, clock = start(make_config, monkeypatch, "auto")
    budget = simulation.scheduler._step_budget
    monkeypatch.setattr(budget, "new_step_starts", lambda: True)
    # As if no part fitted of what is left of a prompt.
    monkeypatch.setattr(budget, "max_prompt_tokens", lambda begun, waiting: 0 if begun else 64)
    send(simulation, 3)
    assert all(clock.chunks(f"r{index}") == [64, 76] for index in range(3))


def test_prompts_that_wait_for_something_else_do_not_lift_the_limit(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation, _ = start(make_config, monkeypatch, 12)
    scheduler, limits = simulation.scheduler, []
    decide, allocate = scheduler._max_prompt_tokens, scheduler.kv_cache_manager.allocate_slots

    def asking() -> int | None:
        limits.append(decide())
        return limits[-1]

    def allocating(request: Any, *args: Any, **kwargs: Any) -> Any:
        return None if request.request_id == "waits" else allocate(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_max_prompt_tokens", asking)
    monkeypatch.setattr(scheduler.kv_cache_manager, "allocate_slots", allocating)
    simulation.add(lambda: make_request("waits", PROMPT, 1))
    for _ in range(6):
        simulation.checked_step()
    assert len(limits) == 6 and None not in limits


def test_requests_that_hold_blocks_while_they_wait_are_told(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation, _ = start(make_config, monkeypatch, 12)
    scheduler, asked = simulation.scheduler, []
    monkeypatch.setattr(scheduler._step_budget, "max_prompt_tokens", lambda *told: asked.append(told))
    held = make_request("held", PROMPT, 1)
    held.num_computed_tokens = 100
    monkeypatch.setattr(scheduler, "kv_holding_waiting", [held])
    scheduler._max_prompt_tokens()
    assert asked == [([], [40])]


def test_what_begins_and_what_waits_is_told(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation, _ = start(make_config, monkeypatch, 12)
    budget, asked, noted = simulation.scheduler._step_budget, [], []
    decide = budget.max_prompt_tokens

    def asking(begun: list[int], waiting: list[int]) -> int | None:
        asked.append((begun, waiting))
        return decide(begun, waiting)

    monkeypatch.setattr(budget, "max_prompt_tokens", asking)
    monkeypatch.setattr(budget, "note_prompt", lambda *numbers: noted.append(numbers))
    monkeypatch.setattr(budget, "_fixed_limit", lambda seconds: 64)
    for index in range(80):
        simulation.add(lambda index=index: make_request(f"r{index}", [5, *PROMPT][: 140 + index % 2], 1))
    simulation.checked_step()
    simulation.checked_step()
    simulation.checked_step()
    simulation.checked_step()
    # The 65th tells that there are more than are looked at.
    assert asked[0] == ([], [140, 141] * 32 + [140])
    assert [begun for begun, _ in asked] == [[], [76], [12], [11]]
    # The second waits for what it shares with the first, and finds it.
    assert noted[0] == (140, 0) and noted[1][1] >= 128


@pytest.mark.parametrize("depth", [1, 2])
def test_texts_do_not_depend_on_the_budget(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    simulation, _ = start(make_config, monkeypatch, "auto", depth, num_blocks=60, max_num_seqs=8)
    traffic = Traffic(
        5, num_requests=60, arrival_rate=0.3, burst=4, share_aborted=0.0, block_hasher=make_hasher()
    )
    traffic.run(simulation)
    assert simulation.scheduler._step_budget.num_limited > 0
    assert simulation.outputs["stream"] == expected_output([1] * 4, 150)
