"""Random traffic through a manager: a small scheduler in the manner of vLLM's, and what came of it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.request import Request

from rose_backend.conformance.block_manager.host import Host
from rose_backend.conformance.block_manager.pretended_model import (
    VOCAB_SIZE,
    expected_output,
    items_of,
    with_contents,
)


@dataclass(frozen=True)
class Arrival:
    """A request of the traffic."""

    name: str
    step: int
    prompt: list[int]
    num_outputs: int
    abort_after: int | None = None
    """Outputs after which the client leaves."""
    items: tuple[MultiModalFeatureSpec, ...] = ()

    @property
    def contents(self) -> list[int]:
        """The prompt with what a model reads in place of its items' placeholders."""
        return with_contents(self.prompt, list(self.items))

    @property
    def expected(self) -> list[int]:
        """What the request must generate before it ends or leaves."""
        return expected_output(
            self.contents, self.num_outputs if self.abort_after is None else self.abort_after
        )


@dataclass
class Record:
    """What a drive did."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    """What each request finds at the start of the step in which it arrives."""
    hit_tokens: int = 0
    """Over all admissions, resumptions included."""
    used_blocks: list[int] = field(default_factory=list)
    """After each step."""
    num_preemptions: int = 0


def make_traffic(
    seed: int, *, num_requests: int, one_per_step: bool, has_items: bool = False
) -> list[Arrival]:
    """Return requests that share stems, repeat each other and continue earlier conversations.

    Args:
        has_items: whether they have multimodal items, one of two at each of three places.
    """
    rng = random.Random(seed)
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(90)] for _ in range(3)]
    traffic: list[Arrival] = []
    step = 0
    for index in range(num_requests):
        kind, items = rng.random(), None
        if kind < 0.25 and traffic:  # a conversation goes on
            earlier = rng.choice(traffic)
            prompt = (earlier.prompt + expected_output(earlier.contents, earlier.num_outputs))[:100]
            items = earlier.items
        elif kind < 0.4 and traffic:
            prompt = rng.choice(traffic).prompt
        else:
            prompt = rng.choice(stems)[: rng.randrange(1, 90)]
            prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(4))]
        step += rng.randrange(1, 4) if one_per_step else rng.choice((0, 0, 1, 3))
        num_outputs = rng.randrange(1, 24)
        abort_after = rng.randrange(num_outputs) if rng.random() < 0.1 else None
        if items is None:
            items = tuple(items_of(prompt, rng.randrange(8))) if has_items else ()
        traffic.append(Arrival(f"r{index}", step, prompt, num_outputs, abort_after, items))
    return traffic


def drive(host: Host, traffic: Sequence[Arrival], *, token_budget: int, max_num_seqs: int = 8) -> Record:
    """Serve all of ``traffic``: running requests first, then the queue in order; the last admitted is preempted first.

    Args:
        token_budget: tokens of a step; longer prompts are computed in chunks.
    """
    record = Record()
    arrivals = deque(traffic)
    waiting: deque[Request] = deque()
    running: list[Request] = []
    limits = {arrival.name: len(arrival.expected) for arrival in traffic}
    for step in range(100 * len(traffic)):
        while arrivals and arrivals[0].step <= step:
            arrival = arrivals.popleft()
            record.outputs[arrival.name] = []
            if limits[arrival.name]:
                waiting.append(host.new_request(arrival.name, arrival.prompt, items=arrival.items))
        if not (arrivals or waiting or running):
            return record
        host.start_step()
        for request in waiting:
            if request.request_id not in record.hits:
                record.hits[request.request_id] = host.lookup(request)
        budget = _schedule_running(host, running, waiting, token_budget, record)
        if budget is not None:
            _schedule_waiting(host, running, waiting, budget, max_num_seqs, record)
        host.finish_step()
        for request in [r for r in running if r.num_output_tokens >= limits[r.request_id]]:
            record.outputs[request.request_id] = list(request.output_token_ids)
            running.remove(request)
            host.free(request)
        record.used_blocks.append(host.num_used_blocks)
    raise AssertionError(f"{len(waiting)} requests wait and {len(running)} run, and nothing moves")


def _schedule_running(
    host: Host, running: list[Request], waiting: deque[Request], budget: int, record: Record
) -> int | None:
    """Return the tokens left for newcomers; None after a preemption, when no request is admitted."""
    preempted = False
    for request in list(running):
        if request not in running:
            continue
        num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
        while num_tokens and request in running and host.append(request, num_tokens) is None:
            victim = running.pop()
            host.preempt(victim)
            waiting.appendleft(victim)
            record.num_preemptions += 1
            preempted = True
        if request in running:
            budget -= num_tokens
    return None if preempted else budget


def _schedule_waiting(
    host: Host,
    running: list[Request],
    waiting: deque[Request],
    budget: int,
    max_num_seqs: int,
    record: Record,
) -> None:
    while waiting and budget and len(running) < max_num_seqs:
        request = waiting[0]
        num_hits = host.lookup(request)
        num_tokens = min(request.num_tokens - num_hits, budget)
        if host.admit(request, num_tokens, full_sequence_must_fit=True) is None:
            return
        budget -= num_tokens
        running.append(waiting.popleft())
        record.hit_tokens += num_hits
