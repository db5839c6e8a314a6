"""Replay a chat trace to several servers with one client, and compare what users would see.

    python -m benchmarks.online_compare [--backends rose rose-in-vllm vllm sglang] [--scales 0.4 0.8 1.6] [--json FILE]
                                        [--trace qwen_traceA_blksz_16.jsonl] [--quick]

Servers are started as users start them (rose serve, vllm serve, SGLang's launch_server), live side by side with KV
caches of the same number of tokens, and take turns. --scales MULTIPLIES the times at which requests are sent: a smaller
scale is more load. Without --trace, requests are made up with the published statistics of that trace. All lengths are
multiplied by --length-scale, and requests that do not fit the model's window even so are left out and counted: both are
part of the result, with the lengths that came out of it. Prompts share prefixes as those of the trace do, within one
turn only.

Figures have the names of ``vllm bench serve``, times count from when a request was due. End-of-text is ignored; a
server that makes fewer tokens than it was asked for has failed that request. benchmarks/plot_online.py draws the
result.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.support.checkpoint import ModelFacts, checkpoint, model_facts
from benchmarks.support.compare_options import (
    add_engine_options,
    engine_options,
    environment,
    set_defaults,
)
from benchmarks.support.report import run_facts, write_json
from benchmarks.support.servers import Client, Server, ServerError, client_session
from benchmarks.support.streaming import METRICS, PERCENTILES, Timeline, play, summary
from benchmarks.support.trace import TraceRequest, fitted, read_trace, statistics, synthetic_trace

BACKENDS = ("rose", "rose-in-vllm", "vllm", "sglang")
GREEDY = {"temperature": 0.0}
WARM_UP_REQUESTS = 32


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="default: a made-up one")
    parser.add_argument("--requests", type=int, metavar="N", help="of the trace (default: 1000)")
    parser.add_argument(
        "--scales", type=float, nargs="+", metavar="S", help="of sending times (default: 0.4 0.6 0.8 1.6)"
    )
    parser.add_argument("--length-scale", type=float, default=0.1, help="of lengths (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="turns at each scale (default: %(default)s)")
    add_engine_options(parser, BACKENDS)
    options = parser.parse_args(arguments)
    set_defaults(options)
    if options.requests is None:
        options.requests = 8 if options.quick else 1000
    options.scales = options.scales or ([0.05] if options.quick else [0.4, 0.6, 0.8, 1.6])
    for name in ("requests", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: got {getattr(options, name)}, at least 1")
    if options.length_scale <= 0:
        parser.error(f"--length-scale: got {options.length_scale}, has to be above 0")
    if min(options.scales) <= 0:
        parser.error(f"--scales: got {options.scales}, each has to be above 0")
    return options


class Servers:
    """Servers by name; those that do not start are left out and named in ``failed``."""

    def __init__(self, options: argparse.Namespace, model: str, facts: ModelFacts, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.running: dict[str, Server] = {}
        self.failed: dict[str, str] = {}
        for backend in options.backends:
            self.running[backend] = Server(
                backend,
                engine_options(options, backend, model, facts, []),
                log=logs / f"server_{backend}.log",
                **environment(options, backend),
            )

    def wait_until_ready(self) -> None:
        """Drop what does not start."""
        for name, server in list(self.running.items()):
            try:
                server.wait_until_ready()
            except ServerError as error:
                self.failed[name] = str(error)
                self.running.pop(name).stop()

    def stop(self) -> None:
        """End all of them."""
        for server in self.running.values():
            server.stop()


async def replay(
    server: Server, trace: Sequence[TraceRequest], vocab_size: int, *, scale: float, salt: int
) -> tuple[list[Timeline], float]:
    """Send a trace to one server; return what came, and seconds from the start to the last token.

    Args:
        scale: factor of sending times.
        salt: prompts of another one have other tokens.
    """
    prompts = [request.prompt(vocab_size, salt) for request in trace]
    output_lens = [request.output_length for request in trace]
    due = [request.timestamp * scale for request in trace]
    async with client_session() as session:
        client = Client(session, server.url, server.model, GREEDY)
        return await play(client.send, prompts, output_lens, due)


def measure(
    servers: Servers, trace: Sequence[TraceRequest], vocab_size: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return one row per turn."""
    for server in servers.running.values():
        asyncio.run(replay(server, trace[:WARM_UP_REQUESTS], vocab_size, scale=0.0, salt=0))
    rows = []
    turns = [(repeat, scale) for repeat in range(options.repeats) for scale in options.scales]
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(turns) * len(servers.running))
        for salt, (repeat, scale) in enumerate(turns, 1):
            for backend, server in servers.running.items():
                progress.update(task, description=f"{backend}, scale {scale:g}")
                timelines, duration = asyncio.run(replay(server, trace, vocab_size, scale=scale, salt=salt))
                errors = [timeline.error for timeline in timelines if timeline.error]
                rows.append(
                    {
                        "backend": backend,
                        "scale": scale,
                        "repeat": repeat,
                        **summary(timelines, duration),
                        "errors": errors[:10],
                    }
                )
                progress.advance(task)
    return rows


def print_rows(console: Console, report: dict[str, Any]) -> None:
    """Print one line per turn, and who is not in it."""
    trace = report["trace"]
    table = Table(
        title=f"{report['device']}, {trace['num_requests']} requests of {trace['source']}, milliseconds"
    )
    table.add_column("scale", justify="right")
    table.add_column("backend")
    percentiles = "/".join(f"p{share}" for share in PERCENTILES)
    for name in ("failed", "output tok/s", *(f"{metric.upper()} {percentiles}" for metric in METRICS)):
        table.add_column(name, justify="right")
    for row in sorted(report["rows"], key=lambda row: row["scale"]):
        cells = (" / ".join(f"{row[f'p{p}_{metric}_ms']:.2f}" for p in PERCENTILES) for metric in METRICS)
        speed = f"{row['output_throughput']:,.0f}"
        table.add_row(f"{row['scale']:g}", row["backend"], str(row["failed"]), speed, *cells)
    console.print(table)
    for row in report["rows"]:
        for error in row["errors"][:1]:
            console.print(f"{row['backend']}, scale {row['scale']:g}: {error}", markup=False)
    for name, why in report["failed"].items():
        console.print(f"failed: {name}: {why}", markup=False)


def run(options: argparse.Namespace, model: str, facts: ModelFacts, logs: Path) -> dict[str, Any]:
    """Start the servers, let them take turns, and return the report."""
    source = "a made-up trace" if options.trace is None else options.trace.name
    trace = (
        synthetic_trace(options.requests)
        if options.trace is None
        else read_trace(options.trace, options.requests)
    )
    window = facts.max_model_len
    fitting, num_left_out = fitted(trace, length_scale=options.length_scale, max_model_len=window)
    servers = Servers(options, model, facts, logs)
    start = time.monotonic()
    try:
        with Console(stderr=True).status("starting servers"):
            servers.wait_until_ready()
        start_up_s = time.monotonic() - start
        rows = measure(servers, fitting, facts.vocab_size, options)
    finally:
        servers.stop()
    return {
        "benchmark": "online_compare",
        **run_facts(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "settings": {
            "model": options.model_name,
            **{name: getattr(options, name) for name in ("dtype", "max_num_seqs", "repeats", "quick")},
            "scale": "sending times are multiplied by it: smaller is more load",
        },
        "trace": {
            "source": source,
            "length_scale": options.length_scale,
            "num_left_out": num_left_out,
            **statistics(fitting),
        },
        "start_up_s": start_up_s,
        "failed": servers.failed,
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, write; the status is 1 if a server or a request failed."""
    options = parse_options(arguments)
    with checkpoint(options.model) as model, tempfile.TemporaryDirectory() as folder:
        report = run(options, model, model_facts(model), options.logs or Path(folder))
    print_rows(Console(width=160), report)
    if options.json:
        write_json(options.json, report)
    return int(bool(report["failed"]) or not report["rows"] or any(row["failed"] for row in report["rows"]))


if __name__ == "__main__":
    sys.exit(main())
