"""How many steps of this process were replayed whole, and how many were vLLM's, with the reason."""

from __future__ import annotations

import time

from rose_backend.vllm_plugin.plugin_logger import logger
from rose_backend.vllm_plugin.sampler.sample_counts import SAMPLES

_LOG_INTERVAL_S = 10.0


class StepCounts:
    """Steps of engines with a step graph since their start-up.

    Attributes:
        replayed: steps that were replayed whole.
        vllm: other steps, by reason.
    """

    def __init__(self) -> None:
        self.replayed = 0
        self.vllm: dict[str, int] = {}
        self._next_log = float("-inf")

    def count_replayed(self, num_draws: int) -> None:
        """Count a step that was replayed whole, and the draws in it."""
        self.replayed += 1
        if num_draws:
            SAMPLES.count_rose(num_draws)
        self._log_now_and_then()

    def count_vllm(self, reason: str) -> None:
        """Count a step of vLLM's."""
        self.vllm[reason] = self.vllm.get(reason, 0) + 1
        self._log_now_and_then()

    def __str__(self) -> str:
        by_reason = [f"{count} by vLLM for {reason}" for reason, count in self.vllm.items()]
        return ", ".join([f"{self.replayed} replayed whole", *(by_reason or ["0 by vLLM"])])

    def _log_now_and_then(self) -> None:
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + _LOG_INTERVAL_S
            logger.info("Rose step graph, steps since start-up: %s", self)


STEPS = StepCounts()
"""Of all engines whose workers are in this process. Every worker process counts, and logs, its own."""
