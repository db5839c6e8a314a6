"""Compare ``vllm serve`` with Rose and with vLLM's own best backend, over HTTP, as ``vllm bench serve`` does.

    python -m benchmarks.vllm_serving [--sets random shared-prefix] [--loads 0.25 0.5 0.75 1.0] [--repeats 3]
                                      [--requests 512] [--seconds 5] [--json FILE] [--quick]

Both servers live side by side with KV caches of the same size and take turns. The first turn with each set of requests
sends all of them at once: that gives the saturated throughput. Then come Poisson arrivals at a share of the requests
per second at which vLLM's own server was saturated in its first such turn, or at --rates.

random: prompts of 512 random tokens, 128 new tokens each. shared-prefix: one of 8 system prompts of 500 tokens, which
end inside a block, and a tail of 16 to 64 tokens. Every turn has prompts that no server has seen.

Figures have the names of ``vllm bench serve``; times count from when a request was due. prefilled_tokens are prompt
tokens less those found in the prefix cache, as the server counts them. client_busy near 1 says that the client
was the limit: give it more processes with --clients. server_busy are cores that the server's processes kept busy.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.support.checkpoint import ModelFacts, checkpoint, model_facts
from benchmarks.support.compare_options import add_engine_options, engine_options, environment, set_defaults
from benchmarks.support.http_client import ClientProcesses, Load
from benchmarks.support.report import run_facts, write_json
from benchmarks.support.request_sets import SETS, Requests, RequestSet
from benchmarks.support.server_metrics import processor_seconds, server_counts
from benchmarks.support.servers import Server, ServerError
from benchmarks.support.streaming import summary
from benchmarks.support.vllm_serving_report import bars, compare, print_report

BACKENDS = ("rose-in-vllm", "vllm")
GREEDY = {"temperature": 0.0}
QUICK_LENGTH_DIVISOR = 16
WARM_UP_REQUESTS = 128


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="(default: both)")
    parser.add_argument(
        "--loads", type=float, nargs="+", metavar="SHARE", help="(default: 0.25 0.5 0.75 1.0; quick: 0.5)"
    )
    parser.add_argument("--rates", type=float, nargs="+", metavar="N", help="per second, instead of --loads")
    parser.add_argument("--requests", type=int, metavar="N", help="sent at once (default: 512; quick: 8)")
    parser.add_argument("--seconds", type=float, help="of arrivals in a turn (default: 5; quick: 0.5)")
    parser.add_argument("--repeats", type=int, help="turns of each kind (default: 3; quick: 1)")
    parser.add_argument(
        "--max-seconds", type=float, help="begin no other turn after this time, and report what is there"
    )
    parser.add_argument("--clients", type=int, help="client processes (default: 4; quick: 1)")
    parser.add_argument(
        "--start-in-turn", action="store_true", help="start one server after the other, not both at once"
    )
    add_engine_options(parser, BACKENDS)
    options = parser.parse_args(arguments)
    set_defaults(options)
    defaults = {"requests": (512, 8), "seconds": (5.0, 0.5), "repeats": (3, 1), "clients": (4, 1)}
    for name, values in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, values[options.quick])
        if getattr(options, name) <= 0:
            parser.error(f"--{name}: got {getattr(options, name)}, has to be above 0")
    if options.max_seconds is not None and options.max_seconds <= 0:
        parser.error(f"--max-seconds: got {options.max_seconds}, has to be above 0")
    if options.loads and options.rates:
        parser.error("--loads and --rates exclude each other")
    options.loads = options.loads or ([0.5] if options.quick else [0.25, 0.5, 0.75, 1.0])
    for name in ("loads", "rates"):
        if min(getattr(options, name) or [1]) <= 0:
            parser.error(f"--{name}: got {getattr(options, name)}, each has to be above 0")
    return options


@contextlib.contextmanager
def running_servers(
    options: argparse.Namespace, model: str, facts: ModelFacts, logs: Path
) -> Iterator[tuple[dict[str, Server], dict[str, float]]]:
    """Start the servers; yield them by name, and the seconds that each took until it was ready.

    Raises:
        ServerError: one of them did not start.
    """
    logs.mkdir(parents=True, exist_ok=True)

    def start(backend: str) -> float:
        begin = time.monotonic()
        servers[backend] = Server(
            backend,
            engine_options(options, backend, model, facts, []),
            log=logs / f"server_{backend}.log",
            **environment(options, backend),
        )
        servers[backend].wait_until_ready()
        return time.monotonic() - begin

    servers: dict[str, Server] = {}
    try:
        with ThreadPoolExecutor(1 if options.start_in_turn else len(options.backends)) as starters:
            start_up_s = dict(zip(options.backends, starters.map(start, options.backends), strict=True))
        yield {backend: servers[backend] for backend in options.backends}, start_up_s
    finally:
        for server in servers.values():
            server.terminate()
        for server in servers.values():
            server.stop()


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

    def take(self, request_set: RequestSet, repeat: int, rate: float | None) -> None:
        """Send the same requests to each server: ``rate`` a second, or for None all at once."""
        options = self._options
        count = options.requests if rate is None else max(1, round(rate * options.seconds))
        self._num_turns += 1
        requests = request_set.requests(count, self._vocab_size, rate=rate, seed=self._num_turns)
        # Whoever is first finds the other one's caches cold.
        order = list(self._servers) if self._num_turns % 2 else list(reversed(self._servers))
        for backend in order:
            figures = self._figures(self._servers[backend], requests)
            self.rows.append(
                {"set": request_set.name, "rate": rate, "repeat": repeat, "backend": backend, **figures}
            )

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


def measure(
    servers: dict[str, Server], vocab_size: int, options: argparse.Namespace, deadline: float
) -> tuple[list[dict[str, Any]], int]:
    """Return one row for each turn of each server, and the number of turns for which there was no time.

    Args:
        deadline: in ``time.monotonic``'s seconds.
    """
    sets = [
        SETS[name].shortened(QUICK_LENGTH_DIVISOR) if options.quick else SETS[name] for name in options.sets
    ]
    num_rates = len(options.rates or options.loads)
    left = len(sets) * options.repeats * (1 + num_rates)
    with (
        contextlib.closing(ClientProcesses(options.clients)) as clients,
        Progress(console=Console(stderr=True)) as progress,
    ):
        task = progress.add_task("turns", total=left)
        turns = Turns(servers, clients, vocab_size, options)
        for request_set in sets:
            turns.warm_up(request_set)
        for repeat, request_set, number in itertools.product(
            range(options.repeats), sets, range(1 + num_rates)
        ):
            if time.monotonic() > deadline:
                break
            turns.take(request_set, repeat, turns.rate(request_set, number))
            left -= 1
            progress.advance(task)
    return turns.rows, left


def run(options: argparse.Namespace, model: str, facts: ModelFacts, logs: Path) -> dict[str, Any]:
    """Start the servers, measure, and return the report.

    Raises:
        ServerError: a server did not start.
    """
    deadline = time.monotonic() + (options.max_seconds or float("inf"))
    with running_servers(options, model, facts, logs) as (servers, start_up_s):
        rows, turns_left_out = measure(servers, facts.vocab_size, options, deadline)
    comparison = compare(rows)
    kept = ("dtype", "max_num_seqs", "requests", "seconds", "repeats", "clients", "start_in_turn", "quick")
    return {
        "benchmark": "vllm_serving",
        **run_facts(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "settings": {"model": options.model_name, **{name: getattr(options, name) for name in kept}},
        "start_up_s": start_up_s,
        "turns_left_out": turns_left_out,
        "comparison": comparison,
        "bars": bars(comparison, start_up_s),
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, write; the status is 1 if a server or a request failed."""
    options = parse_options(arguments)
    with checkpoint(options.model) as model, tempfile.TemporaryDirectory() as folder:
        try:
            report = run(options, model, model_facts(model), options.logs or Path(folder))
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
    print_report(Console(width=160), report)
    if options.json:
        write_json(options.json, report)
    return int(not report["rows"] or any(row["failed"] for row in report["rows"]))


if __name__ == "__main__":
    sys.exit(main())
