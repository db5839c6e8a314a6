"""A request that comes while others run: its prompt starts after one step at most, no running request is delayed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rose_backend import LLM, AsyncEngine
from rose_backend.engine.core import EngineCore
from rose_backend.engine.request import Completion
from rose_backend.engine.scheduler import Step
from rose_backend.engine.startup import _DEFAULT_RUN_AHEAD
from tests.engine.conftest import GREEDY
from tests.support.patience import HANG_S

RUN_AHEAD = _DEFAULT_RUN_AHEAD["cuda"]
NUM_TEXTS = 4
LONG = replace(GREEDY, max_tokens=120)


def tokens_read(core: EngineCore, texts: list[Completion]) -> list[int]:
    """Return how many tokens of each text the host knows."""
    return [int(core._state.num_tokens[text.slot]) for text in texts]


@pytest.mark.parametrize("budget", [512, 24])
def test_a_prompt_starts_behind_one_step_at_most_and_no_text_waits(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    options = {"run_ahead": RUN_AHEAD, "max_num_seqs": 24, "max_num_batched_tokens": budget}
    core = make_llm(prefix_cache=False, **options).core
    core._scheduler._prompts_first = False  # as in a server
    requests = [core.input_processor.make([index + 1] * 10, LONG) for index in range(NUM_TEXTS)]
    for request in requests:
        core.add(request)
    for _ in range(6):
        core.step()
    texts = [request.completions[0] for request in requests]
    started: list[tuple[Step, int]] = []
    forward = core._runner.forward

    def spy(step: Step) -> object:
        started.append((step, core._pipeline.num_in_flight))
        return forward(step)

    monkeypatch.setattr(core._runner, "forward", spy)
    # At other places in blocks, in runs of steady-state decode steps, and between commits each time.
    for index, gap in enumerate((0, 1, 2, 3, 5, 8, 13, 21)):
        for _ in range(gap):
            core.step()
        started.clear()
        newcomer = core.input_processor.make([50 + index] * 60, replace(GREEDY, max_tokens=1))
        core.add(newcomer)
        known, num_steps = tokens_read(core, texts), 0
        # Until the step loop knows its end: when its text is made is up to another thread.
        while not newcomer.completions[0].has_ended:
            core.step()
            num_steps += 1
            assert tokens_read(core, texts) == [count + num_steps for count in known]
            assert num_steps < 10
        # The very next step computes as much of the prompt as fits beside one token of each text.
        (step, num_ahead), *_ = started
        chunk = min(60, budget - NUM_TEXTS)
        assert (step.num_decodes, step.num_new_tokens.tolist()) == (NUM_TEXTS, [1] * NUM_TEXTS + [chunk])
        assert num_ahead <= 1
        # And no step after it leaves the rest of the prompt waiting.
        with_prompt = [each for each, _ in started if len(each.slots) > each.num_decodes]
        assert len(with_prompt) == -(-60 // chunk) and with_prompt == [
            each for each, _ in started[: len(with_prompt)]
        ]
    while core.num_unfinished:
        core.step()


class DatedInbox(deque[Any]):
    """What callers ask for, and how many steps had been counted when they did."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__()
        self._core = core
        self.num_steps: dict[str, int] = {}

    def append(self, command: Any) -> None:
        self.num_steps[command.request_id] = self._core.stats.steps
        super().append(command)


def test_callers_wait_for_one_step_at_most(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AsyncEngine(str(tiny_model_path), dtype="float32", max_num_seqs=24, run_ahead=RUN_AHEAD)
    core = engine._core
    inbox = DatedInbox(core)
    monkeypatch.setattr(engine._steps, "_inbox", inbox)
    waited: dict[str, int] = {}
    forward = core._runner.forward

    def spy(step: Step) -> object:
        for row in step.slots[step.num_decodes :].tolist():
            completion = core._state.completions[row]
            assert completion is not None
            name = completion.request.request_id
            waited.setdefault(name, core.stats.steps - inbox.num_steps[name])
        return forward(step)

    monkeypatch.setattr(core._runner, "forward", spy)

    async def one(index: int) -> None:
        params = replace(GREEDY, max_tokens=120 if index < NUM_TEXTS else 2)
        await asyncio.sleep(0.03 * index)
        async for _ in engine.generate([index + 1] * 30, params, f"request-{index}"):
            pass

    async def body() -> None:
        await asyncio.wait_for(asyncio.gather(*(one(index) for index in range(12))), HANG_S)
        await engine.shutdown()

    asyncio.run(body())
    assert len(waited) == 12
    # A step that was being planned is counted a moment later; the prompt is in the next one.
    assert max(waited.values()) <= 2, waited
