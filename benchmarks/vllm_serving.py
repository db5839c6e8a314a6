"""Compare ``vllm serve`` with Rose and with vLLM's own best backend, over HTTP, as ``vllm bench serve`` does.

    python -m benchmarks.vllm_serving [--sets random shared-prefix] [--loads 0.25 0.5 0.75 1.0] [--repeats 3]
                                      [--requests 512] [--seconds 5] [--json FILE] [--quick]

Both servers live side by side with KV caches of the same size and take turns; whose turn it is not is stopped, so that
the idle one takes no cores (--no-pause lets it run on).

The first turn with each set of requests sends all of them at once: that gives the saturated throughput. Then come
Poisson arrivals at a share of the requests per second at which vLLM's own server was saturated in its first such turn,
or at --rates.

random: prompts of 512 random tokens, 128 new tokens each. shared-prefix: one of 8 system prompts of 500 tokens, which
end inside a block, and a tail of 16 to 64 tokens. Every turn has prompts that no server has seen.

Figures have the names of ``vllm bench serve``; times count from when a request was due. prefilled_tokens are prompt
tokens less those found in the prefix cache, as the server counts them. client_busy near 1 says that the client
was the limit: give it more processes with --clients. server_busy are cores that the server's processes kept busy.

With --step-ms no model runs, and figures are of the servers' own work alone: HTTP, scheduling, texts.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.support.checkpoint import ModelFacts, checkpoint, model_facts
from benchmarks.support.compare_options import add_engine_options, engine_options, environment, set_defaults
from benchmarks.support.http_client import ClientProcesses
from benchmarks.support.pause import paused
from benchmarks.support.report import device_name, run_facts, write_json
from benchmarks.support.request_sets import SETS
from benchmarks.support.servers import Server, ServerError, stop_all
from benchmarks.support.serving_turns import Turns
from benchmarks.support.vllm_serving_report import OUTPUTS_APART, bars, compare, print_report

BACKENDS = ("rose-in-vllm", "vllm")
QUICK_LENGTH_DIVISOR = 16


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
    parser.add_argument(
        "--compare-joined-outputs", action="store_true", help="Rose without joined_outputs, too"
    )
    parser.add_argument(
        "--step-ms",
        type=float,
        metavar="MS",
        help="no model runs: every step takes so long and draws made-up tokens, so that the servers' own work is "
        "measured, on a machine without a GPU (vLLM's CPU build, --device cpu)",
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
    if options.step_ms is not None and (options.step_ms < 0 or options.device != "cpu"):
        parser.error(
            f"--step-ms: got {options.step_ms} on {options.device}, needed are 0 or more on --device cpu"
        )
    if options.loads and options.rates:
        parser.error("--loads and --rates exclude each other")
    options.loads = options.loads or ([0.5] if options.quick else [0.25, 0.5, 0.75, 1.0])
    for name in ("loads", "rates"):
        if min(getattr(options, name) or [1]) <= 0:
            parser.error(f"--{name}: got {getattr(options, name)}, each has to be above 0")
    return options


def sides(options: argparse.Namespace) -> dict[str, tuple[str, list[str]]]:
    """Return which servers run: name -> backend, and what is switched off."""
    found: dict[str, tuple[str, list[str]]] = {backend: (backend, []) for backend in options.backends}
    if options.compare_joined_outputs:
        found[OUTPUTS_APART] = ("rose-in-vllm", ["joined_outputs"])
    return found


@contextlib.contextmanager
def running_servers(
    options: argparse.Namespace, model: str, facts: ModelFacts, logs: Path
) -> Iterator[tuple[dict[str, Server], dict[str, float]]]:
    """Start the servers; yield them by name, and the seconds that each took until it was ready.

    Raises:
        ServerError: one of them did not start.
    """
    logs.mkdir(parents=True, exist_ok=True)

    def start(side: str) -> float:
        backend, switches_off = servers_wanted[side]
        idle = list(servers.values()) if options.start_in_turn and options.pause else []
        with paused(server.pid for server in idle):
            begin = time.monotonic()
            servers[side] = Server(
                backend,
                replace(
                    engine_options(options, backend, model, facts, switches_off), step_ms=options.step_ms
                ),
                log=logs / f"server_{side.replace(' ', '_')}.log",
                **environment(options, backend),
            )
            servers[side].wait_until_ready()
            return time.monotonic() - begin

    servers: dict[str, Server] = {}
    servers_wanted = sides(options)
    try:
        with ThreadPoolExecutor(1 if options.start_in_turn else len(servers_wanted)) as starters:
            start_up_s = dict(zip(servers_wanted, starters.map(start, servers_wanted), strict=True))
        yield {side: servers[side] for side in servers_wanted}, start_up_s
    finally:
        stop_all(servers.values())


def measure(
    servers: dict[str, Server], vocab_size: int, options: argparse.Namespace, deadline: float
) -> tuple[list[dict[str, Any]], int]:
    """Return one row for each turn of each server, and the number of turns for which there was no time.

    Args:
        deadline: in ``time.monotonic``'s seconds. An interrupt is one, too: turns that were whole stay.
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
            try:
                turns.take(request_set, repeat, number)
            except KeyboardInterrupt:
                break
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
        versions = {name: {"version": server.version()} for name, server in servers.items()}
        rows, turns_left_out = measure(servers, facts.vocab_size, options, deadline)
    comparison = compare(rows)
    kept = (
        "dtype",
        "max_num_seqs",
        "requests",
        "seconds",
        "repeats",
        "clients",
        "start_in_turn",
        "pause",
        "step_ms",
        "quick",
    )
    return {
        "benchmark": "vllm_serving",
        **run_facts(),
        "device": device_name(options.device),
        "settings": {
            "model": options.model_name,
            **{name: getattr(options, name) for name in kept},
            "engine_options": {
                name: engine_options(options, name, model, facts, []).extra for name in options.backends
            },
        },
        "backends": versions,
        "start_up_s": start_up_s,
        "turns_left_out": turns_left_out,
        "comparison": comparison,
        "bars": bars(comparison, start_up_s),
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, write; the status is 1 if a server or a request failed."""
    options = parse_options(arguments)
    with (
        checkpoint(options.model, options.shape, small=options.quick) as model,
        tempfile.TemporaryDirectory() as folder,
    ):
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
