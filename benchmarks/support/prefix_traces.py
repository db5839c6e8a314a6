"""Prompts that share prefixes, made up from a seed: conversations, agents with branching tails, questions on documents,
short instructions that many requests begin with.

A prompt is its tokens; requests come in the order of the list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.online.trace import fitted, synthetic_trace

VOCAB_SIZE = 50_000
MAX_MODEL_LEN = 16_384


@dataclass(frozen=True)
class PrefixRequest:
    """Tokens of a prompt, and how many are generated behind it."""

    prompt: tuple[int, ...]
    num_outputs: int
    num_shared: int = 0
    """Tokens of the head that it was given, where each head is that of many."""


def chat(scale: float = 1.0, seed: int = 0) -> list[PrefixRequest]:
    """Return requests of the benchmarks' chat trace, at full length, that fit ``MAX_MODEL_LEN``."""
    trace = synthetic_trace(max(round(400 * scale), 8), seed)
    kept, _ = fitted(trace, len(trace), length_scale=1.0, max_model_len=MAX_MODEL_LEN)
    return [PrefixRequest(tuple(request.prompt(VOCAB_SIZE, seed)), request.output_length) for request in kept]


def agents(scale: float = 1.0, seed: int = 0) -> list[PrefixRequest]:
    """Return requests of agents: one of four heads of 3,000 tokens, a task, then steps that branch off each other.

    A step's prompt is that of an earlier step of its task and 50 to 600 tokens more; three of four go on from the
    latest, the others from any.
    """
    rng = np.random.default_rng([seed, 1])
    heads = [_tokens(rng, 3_000) for _ in range(4)]
    tasks = []
    for _ in range(max(round(24 * scale), 4)):
        steps = [heads[rng.integers(4)] + _tokens(rng, int(rng.integers(100, 800)))]
        for _ in range(int(rng.integers(6, 14))):
            before = steps[-1] if rng.random() < 0.75 else steps[rng.integers(len(steps))]
            steps.append(before + _tokens(rng, int(rng.integers(50, 600))))
        tasks.append([PrefixRequest(step, int(rng.integers(20, 120))) for step in steps])
    return _interleaved(rng, tasks)


def documents(scale: float = 1.0, seed: int = 0) -> list[PrefixRequest]:
    """Return questions of 20 to 150 tokens, 16 for each of 24 documents of 2,000 to 12,000 tokens, in any order."""
    rng = np.random.default_rng([seed, 2])
    texts = [_tokens(rng, int(rng.integers(2_000, 12_000))) for _ in range(max(round(24 * scale), 2))]
    requests = [
        PrefixRequest(text + _tokens(rng, int(rng.integers(20, 150))), int(rng.integers(20, 200)))
        for text in texts
        for _ in range(16)
    ]
    return [requests[index] for index in rng.permutation(len(requests))]


def short_heads(scale: float = 1.0, seed: int = 0) -> list[PrefixRequest]:
    """Return 12 to 20 requests for each of 24 heads of 200 to 500 tokens, with tails of 50 to 400, in any order."""
    rng = np.random.default_rng([seed, 3])
    requests = []
    for _ in range(max(round(24 * scale), 4)):
        head = _tokens(rng, int(rng.integers(200, 501)))
        for _ in range(int(rng.integers(12, 21))):
            tail = _tokens(rng, int(rng.integers(50, 400)))
            requests.append(PrefixRequest(head + tail, int(rng.integers(20, 200)), len(head)))
    return [requests[index] for index in rng.permutation(len(requests))]


TRACES: dict[str, Callable[[float], list[PrefixRequest]]] = {
    "chat": chat,
    "agents": agents,
    "documents": documents,
}
STATE_TRACES = {**TRACES, "short heads": short_heads}
"""For models with states."""


def _tokens(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, VOCAB_SIZE, count).tolist())


def _interleaved(rng: np.random.Generator, tasks: list[list[PrefixRequest]]) -> list[PrefixRequest]:
    """Return all requests, those of a task in order, the next always of one of eight tasks that are under way."""
    requests, waiting = [], [list(task) for task in tasks]
    while waiting:
        task = waiting[rng.integers(min(len(waiting), 8))]
        requests.append(task.pop(0))
        waiting = [task for task in waiting if task]
    return requests
