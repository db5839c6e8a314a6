"""What ``offline_compare`` runs: decode steps, long prompts at full batch, and prompts of mixed lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.support.workload import MODES, Workload

GREEDY = "greedy"
SCENES = ("decode", "offline", "mixed")
WARM_UP_REQUESTS = 256


class Asked(Protocol):
    """What a case needs of a worker."""

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send a command and return its answer."""


@dataclass(frozen=True)
class Case:
    """One thing to time."""

    scene: str
    num_requests: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    mode: str
    short_output_len: int | None = None
    """Decode steps are timed as the difference to a run of so many new tokens."""

    @property
    def name(self) -> str:
        """How people call it."""
        if self.scene == "decode":
            return f"step, {self.num_requests} requests, {self.mode}"
        lengths = f"{_span(self.input_len)} in, {_span(self.output_len)} out"
        return f"{self.scene}, {self.num_requests:,} x {lengths}, {self.mode}"

    @property
    def figure(self) -> str:
        """The figure that is compared; less is better."""
        return "step_ms" if self.scene == "decode" else "duration"

    def workload(self, seed: int) -> Workload:
        """Return the requests; those of different seeds share no prefix."""
        return Workload(self.num_requests, self.input_len, self.output_len, self.mode, seed)

    def warm_up(self, seed: int) -> Workload:
        """Return requests that make an engine compile what it needs."""
        return self.workload(seed).shortened(WARM_UP_REQUESTS, self.short_output_len or 8)

    def run(self, worker: Asked, seed: int) -> dict[str, float]:
        """Return the figures of one run, under the names of ``vllm bench`` where it has one.

        ``step_ms`` is wall time of one decode step of the whole engine, from the call to the texts: the time of a run
        to ``output_len`` tokens less that of a run to ``short_output_len``, over the difference in tokens. Prompts, the
        start and the end of a run cancel out.
        """
        long = worker.ask("generate", workload=self.workload(2 * seed).as_json())
        if self.short_output_len is not None:
            short = worker.ask(
                "generate",
                workload=self.workload(2 * seed + 1)
                .shortened(self.num_requests, self.short_output_len)
                .as_json(),
            )
            steps = self.output_len[0] - self.short_output_len
            return {"step_ms": (long["seconds"] - short["seconds"]) / steps * 1e3}
        seconds, tokens = long["seconds"], long["output_tokens"]
        return {
            "duration": seconds,
            "request_throughput": self.num_requests / seconds,
            "output_throughput": tokens / seconds,
            "total_token_throughput": (tokens + long["input_tokens"]) / seconds,
        }


def cases(
    scenes: Sequence[str],
    batches: Sequence[int],
    *,
    offline: tuple[int, int, int],
    num_mixed: int,
    quick: bool,
) -> list[Case]:
    """Return every case of the chosen scenes.

    Args:
        batches: requests at once in the decode scene.
        offline: number of prompts, their length, and new tokens of each.
    """
    prompt, new, short = (8, 24, 4) if quick else (16, 256, 16)
    num_prompts, input_len, output_len = offline
    mixed_in, mixed_out = ((4, 32), (4, 16)) if quick else ((16, 512), (16, 256))
    return [
        case
        for case in (
            *(
                Case("decode", batch, (prompt, prompt), (new, new), mode, short)
                for batch in batches
                for mode in MODES
            ),
            *(
                Case("offline", num_prompts, (input_len, input_len), (output_len, output_len), mode)
                for mode in MODES
            ),
            Case("mixed", num_mixed, mixed_in, mixed_out, GREEDY),
        )
        if case.scene in scenes
    ]


def _span(lengths: tuple[int, int]) -> str:
    low, high = lengths
    return str(low) if low == high else f"{low} to {high}"
