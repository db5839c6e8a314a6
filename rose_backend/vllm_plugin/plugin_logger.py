"""What the plugin logs: a logger below vLLM's, whose lines get vLLM's format, level and destination, and its counts."""

from __future__ import annotations

import functools
import logging
import time

logger = logging.getLogger("vllm.rose_backend")

_LOG_INTERVAL_S = 10.0


@functools.lru_cache(maxsize=8)
def log_once(line: str, level: int = logging.INFO) -> None:
    """Log a line that is made several times, as vLLM copies its configuration and asks for it more than once."""
    logger.log(level, line, stacklevel=2)


class LogInterval:
    """Lets a line through at most every ``_LOG_INTERVAL_S``."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Let the next line through."""
        self._next_log = float("-inf")

    def is_over(self) -> bool:
        """Whether a line is due; the next interval then begins."""
        now = time.monotonic()
        if now < self._next_log:
            return False
        self._next_log = now + _LOG_INTERVAL_S
        return True


class Counts:
    """What Rose did, and what it left to vLLM, since start-up; logged now and then.

    Args:
        title: of the line.
        by_rose, by_vllm: follow the numbers in it.
        logs_new_reasons: whether a reason that is new is logged at once.

    Attributes:
        rose: done by Rose.
        vllm: left to vLLM, by reason.
    """

    def __init__(self, title: str, by_rose: str, by_vllm: str, *, logs_new_reasons: bool = False) -> None:
        self.rose = 0
        self.vllm: dict[str, int] = {}
        self._title, self._by_rose, self._by_vllm = title, by_rose, by_vllm
        self._logs_new_reasons = logs_new_reasons
        self._interval = LogInterval()

    def count_rose(self, count: int = 1) -> None:
        """Count what Rose does."""
        self.rose += count
        self._log_now_and_then()

    def count_vllm(self, reason: str, count: int = 1) -> None:
        """Count what is vLLM's for a reason."""
        if self._logs_new_reasons and reason not in self.vllm:
            self._interval.restart()
        self.vllm[reason] = self.vllm.get(reason, 0) + count
        self._log_now_and_then()

    def __str__(self) -> str:
        by_reason = [f"{count} {self._by_vllm} for {reason}" for reason, count in self.vllm.items()]
        return ", ".join([f"{self.rose} {self._by_rose}", *(by_reason or [f"0 {self._by_vllm}"])])

    def _log_now_and_then(self) -> None:
        if self._interval.is_over():
            logger.info("%s: %s", self._title, self)


def sample_counts() -> Counts:
    """Return counts of draws, one per request and step, of steps in which at least one request is not greedy.

    Steps with greedy requests only are not counted. vLLM's warm-up at start-up is.
    """
    title = "Rose sampler, draws since start-up"
    return Counts(title, "by Rose's sampler", "by vLLM's", logs_new_reasons=True)


# Of all engines whose workers are in this process. Every worker process counts and logs for itself.
SAMPLES = sample_counts()
STEPS = Counts("Rose step graph, steps since start-up", "replayed whole", "by vLLM")
"""Steps of engines with a step graph."""
