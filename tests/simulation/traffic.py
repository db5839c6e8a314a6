"""Chosen traffic of several tenants over the simulated engine, step by step: who waits how long, and who holds what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rose_backend.engine.request import Request
from rose_backend.engine.sampling_params import SamplingParams
from tests.simulation.standalone import Settings, Simulation, replaced_parts

_SETTINGS: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 400,
    "max_model_len": 200,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "prefix_cache": True,
    "token_granular_hits": True,
    "chunked_prefill": True,
    "run_ahead": 0,
    "max_queue_size": 10_000,
    "is_online": True,
    "has_side_passes": False,
    "widths": (),
    "tokens_per_commit": 8,
    "prompt_tokens_among_decodes": 0,
    "tokens_worth_waiting": 10_000,
    "vocabulary": tuple(range(100, 140)),
    "share_run": 1.0,
    "share_delivered": 1.0,
    "arrival_rate": 0.0,
    "burst": 1,
    "num_requests": 0,
    "abort_rate": 0.0,
    "reset_rate": 0.0,
    "restart_rate": 0.0,
    "kinds": (),
}


class Traffic(Simulation):
    """An engine whose requests a test sends. All of its texts and its accounts are checked, as in any simulation.

    Args:
        has_tenants: False: the engine is told of none, as without API keys.
        options: of ``Settings``.

    Attributes:
        slot_steps: of each tenant, over all steps, the slots that it held.
        waits: steps from each tenant's requests to their first tokens.
    """

    def __init__(self, *, has_tenants: bool = True, **options: Any) -> None:
        super().__init__(0)
        self.settings = Settings(**{**_SETTINGS, **options})
        self.slot_steps: Counter[str] = Counter()
        self.waits: dict[str, list[int]] = {}
        self._has_tenants = has_tenants
        self._sent: dict[str, tuple[str, int]] = {}  # whose it is, and in which step it came
        self._unserved: set[str] = set()

    @classmethod
    @contextmanager
    def over(cls, **options: Any) -> Iterator[Traffic]:
        """Yield an engine; at the end all that was sent is served, and nothing may be left."""
        traffic = cls(**options)
        with replaced_parts(traffic.settings):
            traffic._start()
            traffic._count_steps()
            yield traffic
            traffic.serve()
            traffic.check_end()

    @property
    def step(self) -> int:
        """Steps so far."""
        return self._core.stats.steps

    @property
    def preemptions(self) -> int:
        """Completions that gave up a slot."""
        return self._core.stats.preemptions

    def send(
        self, tenant: str, count: int = 1, *, prompt: int = 10, n: int = 1, max_tokens: int = 60
    ) -> list[str]:
        """Send requests with prompts of so many random tokens; return their names."""
        names, processor = [], self._core.input_processor
        for _ in range(count):
            name = str(len(self._sent))
            names.append(name)
            params = SamplingParams(seed=len(self._sent), n=n, max_tokens=max_tokens, ignore_eos=True)
            checked = processor.process([self._token() for _ in range(prompt)], params)
            checked = checked._replace(tenant=tenant.encode() if self._has_tenants else b"")
            self._sent[name] = tenant, self.step
            self._unserved.add(name)
            self._send(processor.build(checked, request_id=name, is_streaming=True))
        return names

    def request(self, name: str) -> Request:
        """Return an unfinished request."""
        return self._core._requests[name]

    def abort(self, *names: str) -> None:
        """End requests that are not served yet."""
        for name in names:
            self._visits[name].is_aborted = True
            self._unserved.discard(name)
            self._core.end(name)

    def unfinished(self, tenant: str | None = None) -> list[str]:
        """Return the requests of a tenant, or of all, that are not finished."""
        return [name for name in self._visits if tenant in (None, self._sent[name][0])]

    def num_held(self, tenant: str) -> int:
        """Return how many slots a tenant holds."""
        return self._held()[tenant]

    def advance(self) -> None:
        """Let the engine take one step, or wait for what it has to wait for."""
        self._turn()
        for name in self._unserved & self.begun:
            tenant, sent = self._sent[name]
            self.waits.setdefault(tenant, []).append(self.step - sent)
            self._unserved.discard(name)

    def serve(self, tenant: str | None = None) -> None:
        """Advance until no request of a tenant, or of any, is unfinished."""
        while self.unfinished(tenant):
            self.advance()
            if self.step % 4 == 0:
                self._check_accounts()

    def _count_steps(self) -> None:
        pipeline = self._core._pipeline
        start, start_again = pipeline._start, pipeline._start_again

        def counted(start: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def start_and_count(step: Any) -> Any:
                self.slot_steps += self._held()
                return start(step)

            return start_and_count

        pipeline._start = counted(start)  # type: ignore[method-assign]
        pipeline._start_again = counted(start_again)  # type: ignore[method-assign]

    def _held(self) -> Counter[str]:
        held: Counter[str] = Counter()
        for each in self._core._state.completions:
            if each is not None:
                held[self._sent[each.request.request_id][0]] += each.num_slots
        return held

    @property
    def begun(self) -> set[str]:
        """Requests that have a token."""
        begun = set(self._sent) - set(self._visits)
        for name, request in self._core._requests.items():
            slots = [each.slot for each in request.completions if each.slot >= 0]
            lengths = [len(each.token_ids) for each in request.completions]
            lengths += [int(self._core._state.num_tokens[slot]) for slot in slots]
            if max(lengths) > len(request.prompt_token_ids):
                begun.add(name)
        return begun
