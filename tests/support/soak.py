"""Serving many requests of all kinds that come and go at random, and finding what they leave behind."""

from __future__ import annotations

import gc
import random
from pathlib import Path

from rose_backend import LLM, SamplingParams
from rose_backend.engine.core import EngineCore
from rose_backend.engine.outputs import RequestOutput
from rose_backend.engine.request import Completion
from tests.support.crowd import tokens_of
from tests.support.near_ties import near_ties


def soak(
    core: EngineCore, prompts: list[list[int]], params: list[SamplingParams], *, seed: int
) -> tuple[dict[int, RequestOutput], int]:
    """Add the requests a few at a time, abort some of them, step until nothing is left.

    Returns:
        The outputs of those that finished, by their index, and how many were aborted.
    """
    rng = random.Random(seed)
    arrivals = list(range(len(prompts)))[::-1]
    live: dict[str, None] = {}
    finished: dict[int, RequestOutput] = {}
    num_aborted = 0
    while arrivals or core.num_unfinished:
        for _ in range(min(rng.choice((0, 0, 1, 4, 8)), len(arrivals))):
            index = arrivals.pop()
            core.add(core.input_processor.make(prompts[index], params[index], request_id=str(index)))
            live[str(index)] = None
        if live and rng.random() < 0.1:
            name = rng.choice(list(live))
            del live[name]
            num_aborted += core.abort(name) is not None
        for output in core.step():
            if output.finished:
                finished[int(output.request_id)] = output
                live.pop(output.request_id, None)
    return finished, num_aborted


def count_completions() -> int:
    """Return how many completions of any engine are referred to in this process."""
    gc.collect()
    return sum(isinstance(each, Completion) for each in gc.get_objects())


def assert_idle(core: EngineCore, *, num_others: int) -> None:
    """Check that an engine without requests holds no block, no row, no request.

    Args:
        num_others: ``count_completions`` before its first request: other engines of this process may hold some.
    """
    core.check_integrity()
    manager = core.manager
    assert manager.num_free_blocks == manager.num_usable_blocks
    assert manager.num_free_rows == core.config.max_num_seqs
    assert core.num_waiting == 0 and len(core._scheduler.running_slots) == 0
    assert not any(core._state.completions)
    num_held = count_completions() - num_others
    # The output thread may hold its last message, which names no completion that had no row.
    assert num_held <= core.config.max_num_seqs, f"{num_held} completions are still referred to"


def differences_alone(
    llm: LLM,
    path: Path,
    prompts: list[list[int]],
    params: list[SamplingParams],
    together: dict[int, RequestOutput],
    sample: list[int],
) -> list[str]:
    """Serve some requests again, each alone, and return where they differ; draws between near ties do not count."""
    assert llm.core.manager.reset_prefix_cache()
    found = []
    for index in sample:
        (alone,) = tokens_of(llm, [prompts[index]], [params[index]])
        tokens = [completion.token_ids for completion in together[index].outputs]
        if tokens == alone:
            continue
        unsure = {(which, at) for _, which, at in near_ties(path, [prompts[index]], [params[index]], [alone])}
        for which, (some, other) in enumerate(zip(tokens, alone, strict=True)):
            pairs = zip(some, other, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(some), len(other)))
            if some != other and (which, at) not in unsure:
                found.append(f"request {index}, completion {which}, token {at}: {params[index]}")
    return found
