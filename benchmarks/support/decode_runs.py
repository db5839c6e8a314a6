"""Runs of the standalone engine that only decode: how long a step takes, and how long the host works in it."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rose_backend import LLM, SamplingParams

PROMPT_TOKENS = 16
NEW_TOKENS = 256

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-k 50, top-p 0.9": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
}


@dataclass(frozen=True)
class DecodeRun:
    """What one run saw, per step."""

    step_us: float
    """Wall time."""
    host_us: float
    """Of that, what the host did not spend waiting for the device."""


@contextlib.contextmanager
def checkpoint(model: str | None) -> Iterator[str]:
    """Return ``model``, or for None a random checkpoint with the shapes of GPT-2 124M, made for this run."""
    if model is not None:
        yield model
        return
    from tests.support.tiny_checkpoint import write_random_gpt2_124m

    with tempfile.TemporaryDirectory() as directory:
        yield str(write_random_gpt2_124m(Path(directory)))


def random_prompts(num_prompts: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Return prompts that share no prefix worth mentioning."""
    prompts: list[list[int]] = (
        np.random.default_rng(seed).integers(1, vocab_size, (num_prompts, length)).tolist()
    )
    return prompts


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


def time_decoding(llm: LLM, batch: int, mode: str, *, seed: int) -> DecodeRun:
    """Decode ``batch`` prompts of 16 tokens to 256 new ones and time the steps behind the first two, to the texts."""
    core = llm.core
    with waits_of(llm) as waits:
        start_decoding(llm, batch, mode, seed=seed)
        num_steps, waited = core.stats.steps, sum(waits)
        start = time.perf_counter()
        while core.num_unfinished:
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
