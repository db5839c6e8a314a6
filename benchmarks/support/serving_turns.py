"""Turns of ``vllm_serving``: the same requests to one server after the other."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.support.http_client import ClientProcesses, Load
from benchmarks.support.pause import only
from benchmarks.support.request_sets import Requests, RequestSet
from benchmarks.support.server_metrics import processor_seconds, server_counts
from benchmarks.support.servers import Server
from benchmarks.support.streaming import summary

GREEDY = {"temperature": 0.0}
WARM_UP_REQUESTS = 256


class Turns:
    """Lets servers take turns, each turn with prompts of its own, and keeps a row for each."""

    def __init__(
        self,
        servers: dict[str, Server],
        clients: ClientProcesses,
        vocab_size: int,
        options: argparse.Namespace,
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self._servers, self._clients, self._vocab_size, self._options = servers, clients, vocab_size, options
        self._num_turns = 0

    def take(self, request_set: RequestSet, repeat: int, number: int) -> None:
        """Send the same requests to each server, at the ``number``th rate. An interrupted turn leaves no row."""
        options = self._options
        rate = self.rate(request_set, number)
        count = options.requests if rate is None else max(1, round(rate * options.seconds))
        self._num_turns += 1
        requests = request_set.requests(count, self._vocab_size, rate=rate, seed=self._num_turns)
        # Whoever is first finds the other one's caches cold. Each is first in every other turn of a kind.
        order = list(reversed(self._servers)) if (repeat + number) % 2 else list(self._servers)
        rows = []
        for backend in order:
            with only(backend, self._servers, pause=options.pause) as server:
                figures = self._figures(server, requests)
            rows.append(
                {"set": request_set.name, "rate": rate, "repeat": repeat, "backend": backend, **figures}
            )
        self.rows += rows

    def warm_up(self, request_set: RequestSet) -> None:
        """Let servers compile what they have not yet."""
        count = min(self._options.requests, WARM_UP_REQUESTS)
        requests = request_set.requests(count, self._vocab_size, rate=None, seed=0)
        for server in self._servers.values():
            self._clients.send(_load(server, requests))

    def rate(self, request_set: RequestSet, number: int) -> float | None:
        """Return the ``number``th rate of a set; the 0th is all at once."""
        if number == 0:
            return None
        if self._options.rates:
            return float(self._options.rates[number - 1])
        return float(self._options.loads[number - 1]) * self.saturated_rate(request_set)

    def saturated_rate(self, request_set: RequestSet) -> float:
        """Return requests per second of vLLM's own server in its first turn with all of them at once."""
        yardstick = "vllm" if "vllm" in self._servers else next(iter(self._servers))
        wanted = (request_set.name, None, yardstick)
        rate: float = next(
            row["request_throughput"]
            for row in self.rows
            if (row["set"], row["rate"], row["backend"]) == wanted
        )
        return rate

    def _figures(self, server: Server, requests: Requests) -> dict[str, Any]:
        before, seconds_before = server_counts(server.url), processor_seconds(server.pid)
        replay = self._clients.send(_load(server, requests))
        counts, seconds = server_counts(server.url), processor_seconds(server.pid)
        counts.subtract(before)
        errors = [timeline.error for timeline in replay.timelines if timeline.error]
        return {
            **summary(replay.timelines, replay.duration),
            "prefilled_tokens": counts["prompt_tokens"] - counts["cached_tokens"],
            "cached_tokens": counts["cached_tokens"],
            "preemptions": counts["preemptions"],
            "client_busy": replay.client_busy,
            "server_busy": {
                name: (used - seconds_before.get(name, 0.0)) / replay.duration
                for name, used in seconds.items()
            },
            "errors": errors[:10],
        }


def _load(server: Server, requests: Requests) -> Load:
    return Load(server.url, server.model, GREEDY, requests.prompts, requests.output_lens, requests.due)
