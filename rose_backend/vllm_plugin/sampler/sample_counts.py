"""How many tokens of this process Rose's sampler drew, and how many vLLM's, with the reason."""

from __future__ import annotations

import time

from rose_backend.vllm_plugin.plugin_logger import logger

_LOG_INTERVAL_S = 10.0


class SampleCounts:
    """Draws since start-up, one per request and step, of steps in which at least one request is not greedy.

    Steps with greedy requests only are not counted. vLLM's warm-up at start-up is.

    Attributes:
        rose: draws by Rose's sampler.
        vllm: draws by vLLM's, by reason.
    """

    def __init__(self) -> None:
        self.rose = 0
        self.vllm: dict[str, int] = {}
        self._next_log = float("-inf")

    def count_rose(self, num_rows: int) -> None:
        """Count a step that Rose's sampler draws."""
        self.rose += num_rows
        self._log_now_and_then()

    def count_vllm(self, reason: str, num_rows: int) -> None:
        """Count a step that vLLM's sampler draws. A reason that is new is logged at once."""
        if reason not in self.vllm:
            self._next_log = float("-inf")
        self.vllm[reason] = self.vllm.get(reason, 0) + num_rows
        self._log_now_and_then()

    def __str__(self) -> str:
        by_reason = [f"{count} by vLLM's for {reason}" for reason, count in self.vllm.items()]
        return ", ".join([f"{self.rose} by Rose's sampler", *(by_reason or ["0 by vLLM's"])])

    def _log_now_and_then(self) -> None:
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + _LOG_INTERVAL_S
            logger.info("Rose sampler, draws since start-up: %s", self)


SAMPLES = SampleCounts()
"""Of all engines whose workers are in this process. Every worker process counts, and logs, its own."""
