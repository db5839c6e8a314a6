"""Random requests for a ``Simulation`` or a ``Pair``, and what must have become of each of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from rose_backend.conformance.block_manager.pretended_model import (
    ITEM_PLACES,
    VOCAB_SIZE,
    expected_output,
    items_of,
    with_contents,
)

KINDS = ("logprobs", "grammar", "stop", "eos", "repetition", "trace", "session", "other client")
"""Of requests that are not plain ones; a session is several in a row."""


def make_hasher(block_size: int = 16, hash_function: Any = sha256) -> Any:
    """Return vLLM's function that hashes the blocks of a request."""
    init_none_hash(hash_function)
    return get_request_block_hasher(block_size, hash_function)


class SomeGrammar:
    """Accepts 15 tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.num_tokens += len(tokens)
        return self.num_tokens < 15


def place_of(item: Any) -> tuple[int, int]:
    """Return an item's first position and its length."""
    return item.mm_position.offset, item.mm_position.length


@dataclass
class Traffic:
    """Requests that share beginnings, repeat each other, follow up on each other and differ in salt.

    Args:
        num_requests: in all.
        arrival_rate: share of steps that begin with new ones.
        burst: new ones of such a step, at most.
        num_stems: beginnings that they share.
        kinds: of every second request, by chance.
        has_items: whether prompts have multimodal items.
        share_aborted: of steps that begin with an abort, of a request that is being loaded if there is one.
        is_reset: whether the cache is reset now and then, and scheduling paused.
        has_known_outputs: whether outputs are those that a request alone would have.
    """

    seed: int = 7
    num_requests: int = 150
    arrival_rate: float = 0.5
    burst: int = 1
    num_stems: int = 3
    kinds: tuple[str, ...] = ()
    has_items: bool = False
    share_aborted: float = 0.03
    is_reset: bool = True
    has_known_outputs: bool = True
    block_hasher: Any = None
    ended: dict[str, str] = field(default_factory=dict)
    """How requests ended that were cut short."""

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._stems = [[self._rng.randrange(VOCAB_SIZE) for _ in range(100)] for _ in range(self.num_stems)]
        self._prompts: list[tuple[list[int], list[Any]]] = []
        self._expected: dict[str, list[int]] = {}
        self._requests: dict[str, Request] = {}
        self._may_stop_early: set[str] = set()

    def run(self, side: Any, after_step: Callable[[], None] = lambda: None) -> dict[str, str]:
        """Serve all requests and check them; return ``ended``.

        Raises:
            AssertionError: a wrong read or write in the worker, a wrong output, or a block that is still held.
        """
        while len(self._requests) < self.num_requests or side.is_busy:
            if len(self._requests) < self.num_requests and self._rng.random() < self.arrival_rate:
                for _ in range(self._rng.randrange(self.burst) + 1):
                    self._add(side)
            if self._rng.random() < self.share_aborted and side.scheduler.requests:
                self._abort(side)
            if self.is_reset:
                self._interrupt(side)
            side.checked_step()
            after_step()
        # One more schedule tells the worker what has finished; no block may be held any more.
        side.checked_step()
        self._check(side)
        return self.ended

    def _add(self, side: Any) -> None:
        rng, request_id = self._rng, f"{self.seed}.{len(self._requests)}"
        kind = rng.choice([*["plain"] * len(self.kinds), *self.kinds]) if self.kinds else "plain"
        max_tokens, (prompt, items) = rng.randrange(1, 50), self._prompt()
        if kind == "plain" and self._prompts and rng.random() < 0.4:
            # One that is found to its last token starts with a single token.
            prompt, items = rng.choice(self._prompts)
            if rng.random() < 0.7:
                # A follow-up: prompt and answer, as in a conversation.
                prompt = (prompt + expected_output(with_contents(prompt, items), 20))[:110]
        self._prompts.append((prompt, items))
        make = self._maker(request_id, prompt, items, kind, max_tokens)
        if kind != "session":
            self._expected[request_id] = expected_output(with_contents(prompt, items), max_tokens)
            makers = [make]
        else:
            # It stops early, goes on with a much lower limit, and is closed.
            first = {"max_tokens": 30, "stop_token_ids": list(range(0, VOCAB_SIZE, 5))}
            makers = [lambda: make(30, **first), lambda: make(1, max_tokens=4), make]
        if kind in ("grammar", "stop", "eos", "repetition"):
            self._may_stop_early.add(request_id)
        self._requests[request_id] = side.add(*makers)

    def _prompt(self) -> tuple[list[int], list[Any]]:
        """Return a new prompt and its items."""
        rng = self._rng
        prompt = rng.choice(self._stems)[: rng.randrange(1, 100)]
        if not self.has_items:
            return prompt + [rng.randrange(VOCAB_SIZE)] * rng.randrange(3), []
        if rng.random() < 0.5:
            # To the end of an item.
            prompt = prompt[: sum(rng.choice(ITEM_PLACES))]
        return prompt, items_of(prompt, rng.randrange(8))

    def _maker(
        self, request_id: str, prompt: list[int], items: list[Any], kind: str, max_tokens: int
    ) -> Callable[..., Request]:
        """Return a function that builds the same request each time."""
        rng, index = self._rng, len(self._requests)
        params: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0}
        params |= {
            "logprobs": lambda: {"logprobs": 0},
            "grammar": lambda: {"structured_outputs": StructuredOutputsParams(regex="a*")},
            "stop": lambda: {"stop_token_ids": rng.sample(range(VOCAB_SIZE), 4)},
            "repetition": lambda: {"repetition_detection": RepetitionDetectionParams(1, 1, 2)},
        }.get(kind, dict)()
        options: dict[str, Any] = {
            "priority": rng.randrange(3),
            "cache_salt": rng.choice([None] * 3 + ["other"]),
        }
        options |= {"arrival_time": float(index), "client_index": int(kind == "other client")}
        eos = rng.randrange(VOCAB_SIZE)

        def make(prompt_len: int | None = None, **session: Any) -> Request:
            sampling_params = SamplingParams(**params | session)
            sampling_params.ignore_eos = kind != "eos"
            if kind == "eos":
                sampling_params._eos_token_id = eos
            request = Request(
                request_id,
                prompt[:prompt_len],
                sampling_params,
                None,
                trace_headers={"traceparent": "x"} if kind == "trace" else None,
                block_hasher=self.block_hasher,
                resumable=bool(session),
                mm_features=[item for item in items if sum(place_of(item)) <= (prompt_len or len(prompt))],
                **options,
            )
            if request.structured_output_request is not None:
                request.structured_output_request.grammar = SomeGrammar()  # type: ignore[assignment]
                request.structured_output_request.reasoning_ended = True
            return request

        return make

    def _abort(self, side: Any) -> None:
        loading = getattr(side.worker.connector, "loading", [])
        victim = self._rng.choice(loading or list(side.scheduler.requests))
        if not side.scheduler.requests[victim].is_finished():
            side.for_all(lambda s: s.finish_requests(victim, RequestStatus.FINISHED_ABORTED))
            self.ended[victim] = "aborted"

    def _interrupt(self, side: Any) -> None:
        scheduler = side.scheduler
        # vLLM resets nothing while a session waits for more input or its turn, and says so by an error.
        if self._rng.random() < 0.01 and not (scheduler.deferred_waiting or scheduler.kv_holding_waiting):
            side.for_all(lambda s: s.reset_prefix_cache(reset_running_requests=True))
        if self._rng.random() < 0.01:
            side.for_all(lambda s: s.set_pause_state(PauseState.PAUSED_ALL))
            side.checked_step()
            side.for_all(lambda s: s.set_pause_state(PauseState.UNPAUSED))

    def _check(self, side: Any) -> None:
        for name, tokens in self._expected.items():
            got = side.outputs.get(name, [])
            if self._requests[name].status == RequestStatus.FINISHED_ERROR:
                self.ended[name] = "failed"
            is_cut = name in self.ended or name in self._may_stop_early
            expected = tokens[: len(got)] if is_cut else tokens
            assert got == expected or not self.has_known_outputs, name
        for each in side.sides:
            assert each.manager.usage == 0.0 and not len(each.manager.clones.held_sources())
