"""Runs of the standalone engine that only decode: how long a step takes, and how long the host works in it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.support.workload import MODES, random_prompts
from rose_backend import LLM, SamplingParams
from rose_backend.engine.interpreter import short_turns

PROMPT_TOKENS = 16
NEW_TOKENS, QUICK_NEW_TOKENS = 256, 24


@dataclass(frozen=True)
class DecodeRun:
    """What one run saw, per step."""

    step_us: float
    """Wall time."""
    host_us: float
    """Of that, what the host did not spend waiting for the device."""


def start_decoding(llm: LLM, batch: int, mode: str, *, seed: int, max_tokens: int = NEW_TOKENS) -> None:
    """Queue ``batch`` requests and step until all of them have two tokens."""
    core = llm.core
    vocab_size = core._runner._model.config.vocab_size
    for index, prompt in enumerate(random_prompts(batch, PROMPT_TOKENS, vocab_size, seed)):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=index, **MODES[mode])
        core.add(core.factory.make(prompt, params))
    first = core.stats.generated_tokens
    while core.stats.generated_tokens < first + 2 * batch:
        core.step()


def time_decoding(llm: LLM, batch: int, mode: str, *, seed: int, max_tokens: int = NEW_TOKENS) -> DecodeRun:
    """Decode ``batch`` prompts of 16 tokens to ``max_tokens`` new ones and time the steps behind the first two."""
    core = llm.core
    with waits_of(llm) as waits:
        start_decoding(llm, batch, mode, seed=seed, max_tokens=max_tokens)
        num_steps, waited = core.stats.steps, sum(waits)
        start = time.perf_counter()
        while core.num_unfinished:
            with short_turns():  # as LLM.generate does it
                core.step()
        elapsed = time.perf_counter() - start
        num_steps = core.stats.steps - num_steps
        waited = sum(waits) - waited
    return DecodeRun(elapsed / num_steps * 1e6, (elapsed - waited) / num_steps * 1e6)


@contextlib.contextmanager
def waits_of(llm: LLM) -> Iterator[list[float]]:
    """Collect how long, in seconds, the host waits for each step."""
    pipeline = llm.core._pipeline
    wait, waits = pipeline._wait, []

    def timed(step: Any) -> None:
        start = time.perf_counter()
        wait(step)
        waits.append(time.perf_counter() - start)

    pipeline._wait = timed  # type: ignore[method-assign]
    try:
        yield waits
    finally:
        del pipeline._wait
