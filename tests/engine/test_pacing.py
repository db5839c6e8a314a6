"""When a server starts its steps, and how much prompt it takes on: decided from what steps have taken, by a clock."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from rose_backend import LLM, AsyncEngine, SamplingParams
from rose_backend.engine.paced_pipeline import PacedPipeline
from rose_backend.engine.pacing import Pacer, StepLoad, StepTimes
from rose_backend.engine.prompt_cap import PromptCap
from rose_backend.engine.request import Completion

DECODES = StepLoad(100, 0)


class Device:
    """A clock, and a device that computes one step after the other."""

    def __init__(self, *, step_s: float, host_s: float, oversleep_s: float = 0.0) -> None:
        self.now = 1000.0
        self.pacer = Pacer(clock=lambda: self.now)
        self.busy_until = self.now
        self.idle_s = 0.0
        self.ends: list[float] = []
        self._step_s, self._host_s, self.oversleep_s = step_s, host_s, oversleep_s

    def start(self, load: StepLoad = DECODES) -> None:
        begun_at, before = self.now, self.busy_until
        self.now += self._host_s
        self.pacer.started(load, begun_at, is_first=not self.ends or before <= self.now)
        if self.ends:
            self.idle_s += max(self.now - before, 0.0)
        self.busy_until = max(before, self.now) + self._step_s
        self.ends.append(self.busy_until)

    def read(self) -> None:
        end = self.ends.pop(0)
        was_seen = end > self.now
        self.now = max(self.now, end)
        self.pacer.over(was_seen=was_seen)

    def sleep(self) -> float:
        seconds = self.pacer.hold()
        if seconds:
            self.now += seconds + self.oversleep_s
        return seconds


def serve(device: Device, num_steps: int) -> list[float]:
    """Run ahead by one step; return how long each was held back."""
    held = []
    if not device.ends:
        device.start()
    for _ in range(num_steps):
        held.append(device.sleep())
        device.start()
        device.read()
    return held


@pytest.mark.parametrize("oversleep_s", [0.0, 60e-6, 400e-6])
def test_a_step_is_held_back_until_shortly_before_it_is_due(oversleep_s: float) -> None:
    device = Device(step_s=15e-3, host_s=100e-6, oversleep_s=oversleep_s)
    held = serve(device, 200)
    assert held[0] == 0.0
    # The lead is what the host takes, and a little more.
    assert device.pacer.lead == pytest.approx(100e-6 + oversleep_s + 30e-6)
    assert held[-1] == pytest.approx(15e-3 - device.pacer.lead)
    # It may have had to learn that once.
    assert device.idle_s < 300e-6


def test_pacing_costs_no_more_than_its_share() -> None:
    device = Device(step_s=5e-3, host_s=100e-6)
    serve(device, 20)
    idle_s = device.idle_s
    # Nobody can foresee when this host wakes up.
    rng = random.Random(1)
    num_held = 0
    for _ in range(5000):
        device.oversleep_s = rng.choice((0.0, 0.0, 0.0, 0.0, 2e-3 * rng.random()))
        num_held += serve(device, 1)[0] > 0
    assert num_held > 100
    assert device.idle_s - idle_s < 0.02 * 5000 * 5e-3


def test_a_slow_spell_is_forgotten() -> None:
    device = Device(step_s=5e-3, host_s=100e-6, oversleep_s=25e-3)
    serve(device, 20)
    assert device.pacer.lead > 25e-3
    device.oversleep_s = 0.0
    assert not any(serve(device, 100))
    serve(device, 5000)
    assert device.pacer.lead == pytest.approx(130e-6)


def test_one_slow_start_is_forgotten_slowly() -> None:
    pacer = Pacer(clock=lambda: 0.0)
    pacer.times.record(DECODES, 5e-3)
    pacer._latencies.extend([25e-3, 20e-3])
    pacer.started(DECODES, 0.0, is_first=True)
    assert [pacer.hold() > 0 for _ in range(33)] == [False] * 32 + [True]


def test_short_steps_are_never_held_back() -> None:
    device = Device(step_s=1.2e-3, host_s=100e-6)
    assert not any(serve(device, 50))


def test_nothing_is_held_back_without_a_step_in_flight_or_a_known_time() -> None:
    clock = iter(np.arange(0.0, 1.0, 1e-3))
    pacer = Pacer(clock=lambda: float(next(clock)))
    assert pacer.hold() == 0.0
    pacer.started(DECODES, 0.0, is_first=True)
    assert pacer.hold() == 0.0  # nothing like it has been seen
    pacer.times.record(DECODES, 0.1)
    assert pacer.hold() > 0.09
    pacer.started(DECODES, 0.0, is_first=False)
    assert pacer.hold() == 0.0  # two in flight
    pacer.over(was_seen=False)
    assert pacer.hold() == 0.0  # nobody saw when the one in flight began
    pacer.forget()
    pacer.started(DECODES, 0.0, is_first=True)
    assert pacer.hold() > 0.09
    on_cpu = Pacer(can_hold=False)
    on_cpu.times.record(DECODES, 100.0)
    on_cpu.started(DECODES, on_cpu.clock(), is_first=True)
    assert on_cpu.hold() == 0.0


def test_a_step_that_ended_unseen_teaches_nothing() -> None:
    device = Device(step_s=1e-3, host_s=100e-6)
    device.start()
    device.start()
    device.read()
    device.now += 5e-3
    device.read()
    assert device.pacer.times.decoding(100) == pytest.approx(1.1e-3)


def test_times_are_the_least_of_the_last_ones() -> None:
    times = StepTimes()
    assert times.expect(DECODES) is None and times.decoding(0) == 0.0
    for seconds in (1.0, 3.0, *[2.0] * 7):
        times.record(DECODES, seconds)
    assert times.expect(StepLoad(97, 0)) == 2.0 and times.expect(StepLoad(96, 0)) is None
    assert times.expect(StepLoad(200, 0)) == 2.0  # at least that
    assert times.expect(StepLoad(100, 500)) == 2.0  # at least that
    times.record(StepLoad(100, 500), 6.0)
    times.record(StepLoad(100, 400), 7.0)
    assert times.expect(StepLoad(100, 512)) == 6.0
    times.record(StepLoad(1, 500), 1.0)  # what one decode takes is not known: nor is the rest
    assert times.expect(StepLoad(100, 512)) == 6.0


def waiting(*lengths: int) -> list[Completion]:
    return [Completion(None, 0, 0, np.zeros(length, np.int32), None) for length in lengths]  # type: ignore[arg-type]


def test_prompts_take_what_room_running_texts_leave() -> None:
    times = StepTimes()
    cap = PromptCap(times, 8192)
    assert cap.budget(3, 0, []) == cap.budget(100, 100, []) == 8192
    times.record(DECODES, 1.0)
    # Nothing is known about prompts: begin with little.
    assert cap.budget(110, 100, waiting(500)) == 110 + 256
    for num_tokens, seconds in ((256, 1.3), (512, 1.8), (1024, 3.7)):
        times.record(StepLoad(100, num_tokens), seconds)
    # Up to three times the decodes' own time: 512 fit, 1024 do not.
    assert cap.budget(110, 100, waiting(500)) == 110 + 896
    times.record(StepLoad(100, 896), 3.1)
    assert cap.budget(110, 100, waiting(500)) == 110 + 768
    # Nobody reads along: no need to save.
    assert cap.budget(3, 0, waiting(500)) == 8192


def test_passes_that_cannot_be_short_are_not_made_shorter() -> None:
    times = StepTimes()
    cap = PromptCap(times, 8192)
    times.record(DECODES, 1.0)
    # A pass takes nine times what the decodes take, however small it is; 512 tokens take a little more, 1024 much more.
    for num_tokens, seconds in ((128, 10.0), (512, 12.0), (1024, 20.0)):
        times.record(StepLoad(100, num_tokens), seconds)
    assert cap.budget(110, 100, waiting(500)) == 110 + 896


def test_a_long_queue_is_worked_off_faster() -> None:
    times = StepTimes()
    cap = PromptCap(times, 8192)
    times.record(DECODES, 1.0)
    times.record(StepLoad(100, 128), 9.0)
    assert cap.budget(110, 100, waiting(500)) == 110 + 256
    assert cap.budget(110, 100, waiting(*[1000] * 16)) == 110 + 4000
    assert cap.budget(110, 100, waiting(*[1000] * 1000)) == 8192


@pytest.mark.parametrize(
    "options",
    [{}, {"pacing": True}, {"pacing": True, "run_ahead": 1}, {"pacing": True, "chunked_prefill": False}],
    ids=str,
)
def test_same_text_with_and_without(tiny_model_path: Path, llm: LLM, options: dict[str, bool]) -> None:
    prompts = [[index + 1] * (200 * (index % 3) + 5) for index in range(9)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    async def body() -> list[list[int]]:
        engine = AsyncEngine(str(tiny_model_path), max_num_seqs=8, **options)

        async def one(index: int) -> list[int]:
            await asyncio.sleep(0.01 * index)
            outputs = [output async for output in engine.generate(prompts[index], params)]
            return outputs[-1].outputs[0].token_ids

        tokens = await asyncio.gather(*(one(index) for index in range(9)))
        engine._core.check_integrity()
        pipeline = engine._core._pipeline
        assert isinstance(pipeline, PacedPipeline) == options.get("pacing", False)
        if isinstance(pipeline, PacedPipeline):
            assert pipeline.pacer.times.decoding(8) is not None
        # The last steps had no prompts: nothing is left of a cap.
        assert engine._core._scheduler.token_budget == engine._core.config.token_budget
        await engine.shutdown()
        return tokens

    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert asyncio.run(body()) == expected
