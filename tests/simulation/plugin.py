"""The plug-in's scheduler and block manager over a ``FakeWorker``: one seed makes options, traffic and connector.

The worker keeps a hash of all tokens up to each position in the slots that scheduler outputs name, and compares what
each step reads with what the request's own tokens make. vLLM's scheduler classes, which Rose's extend, are real.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.conftest import ROOT
from tests.support.vllm_plugin.configs import EVENTS, connector, n_grams
from tests.support.vllm_plugin.fake_connector import FakeConnector
from tests.support.vllm_plugin.fake_worker import STATE
from tests.support.vllm_plugin.simulation import MAX_MODEL_LEN, Simulation, make_simulation
from tests.support.vllm_plugin.traffic import KINDS, Traffic, make_hasher

MAX_STEPS = 20_000
"""Of one seed: what takes longer hangs."""


@cache
def _hasher() -> Any:
    return make_hasher()


def _make_config(**arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    defaults: dict[str, Any] = {
        "model": str(ROOT / "models" / "tiny-gpt2"),
        "attention_backend": "rose",
        "dtype": "float32",
        "enforce_eager": True,
    }
    return EngineArgs(**{**defaults, **arguments}).create_engine_config()


@dataclass(frozen=True)
class PluginSettings:
    """Which options and events a seed has."""

    options: dict[str, Any]
    traffic: dict[str, Any]
    share_failing: float | None
    """Of loads by a KV connector; None: there is no connector."""

    @classmethod
    def draw(cls, rng: random.Random) -> PluginSettings:
        """Draw the settings of a seed."""
        depth, is_async = rng.choice(((1, False), (2, True), (3, True), (3, False)))
        windows = rng.choice([(None,)] * 4 + [(None, 20), (20, None, 20), (None, 7, 60), (STATE, None)])
        has_states = STATE in windows
        has_connector = windows == (None,) and (depth == 1 or is_async) and rng.random() < 0.3
        has_drafts = not has_connector and not has_states and rng.random() < 0.25
        # What a sequence of full length needs, and more.
        least = (MAX_MODEL_LEN // 16 + 2) * len(windows) + 2
        options: dict[str, Any] = {
            "depth": depth,
            "is_async": is_async,
            "block_size": 16,
            "windows": windows,
            "num_blocks": int(least * rng.choice((1, 1.3, 2, 6))) + 6 * has_states,
            "max_num_seqs": rng.choice((1, 2, 4, 8, 20)),
            "max_num_batched_tokens": rng.choice((37, 48, 200)),
            "enable_prefix_caching": has_states or has_connector or rng.random() < 0.9,
            "scheduling_policy": rng.choice(("fcfs", "fcfs", "priority")),
            "watermark": rng.choice((0.0, 0.0, 0.1)),
            "additional_config": {"rose": {"batched_scheduling": rng.random() < 0.8}},
        }
        if has_drafts:
            options["max_num_batched_tokens"] = 200
            # Scheduled at once where steps overlap.
            options["use_v2_model_runner"] = is_async
            options["speculative_config"] = n_grams(2)
            options["worker_options"] = {"num_drafts": 2}
        elif has_connector:
            options |= connector("ExampleConnector")
        elif rng.random() < 0.2:
            options["kv_events_config"] = EVENTS
        # With asynchronous scheduling a session's turn takes back a token that a state has seen: refused.
        kinds = [
            kind for kind in KINDS if kind != "session" or not (has_states or has_connector or has_drafts)
        ]
        kinds = [kind for kind in kinds if not has_drafts or kind not in ("grammar", "logprobs")]
        traffic = {
            "num_requests": rng.choice((15, 30)),
            "arrival_rate": rng.choice((0.05, 0.2, 0.9)),
            "burst": rng.choice((1, 3, 6)),
            # Requests that begin alike would find what another one's failed load has left.
            "num_stems": 25 if has_connector else rng.choice((1, 3)),
            "kinds": tuple(kind for kind in kinds if rng.random() < 0.5),
            "share_aborted": rng.choice((0.0, 0.03, 0.1)),
            # vLLM refuses resets while loads are under way.
            "is_reset": not has_connector and rng.random() < 0.5,
        }
        return cls(options, traffic, rng.choice((0.0, 0.2, 0.5)) if has_connector else None)


class PluginSimulation:
    """One seed; ``standalone.Simulation`` says what its attributes are."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.settings = PluginSettings.draw(random.Random(seed))
        self.states: set[int] = set()
        self.digest = 0
        self.num_steps = self.num_rows = 0

    def run(self) -> None:
        """Serve all requests of the seed.

        Raises:
            AssertionError, RoseError: something is wrong; the text says what.
        """
        settings = self.settings
        fake = None if settings.share_failing is None else FakeConnector(share_failing=settings.share_failing)
        hasher = _hasher()
        side = make_simulation(_make_config, connector=fake, **settings.options)
        run = side.worker.run

        def counting(output: Any, requests: Any) -> Any:
            self.num_rows += len(output.num_scheduled_tokens)
            return run(output, requests)

        side.worker.run = counting  # type: ignore[method-assign]
        traffic = Traffic(self.seed, block_hasher=hasher, **settings.traffic)
        traffic.run(side, lambda: self._note(side))

    def _note(self, side: Simulation) -> None:
        self.num_steps += 1
        assert self.num_steps < MAX_STEPS, "requests are still unfinished"
        scheduler, manager = side.scheduler, side.manager
        rows, table = scheduler.kv_cache_manager.running.row_of, manager.table
        about = sorted(
            (
                int(table.capacity[rows[name]]) if name in rows else -1,
                request.num_computed_tokens - request.num_tokens,
                int(request.status),
            )
            for name, request in scheduler.requests.items()
        )
        shared = int((manager.pool.ref_counts > 1).sum())
        whole = (tuple(about), shared, len(side.in_flight))
        self.states.add(hash(whole))
        self.digest = hash((self.digest, whole))
