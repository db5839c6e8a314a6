"""Replay a chat trace to several servers with one client, and compare what users would see.

    python -m benchmarks.online_compare [--backends rose rose-in-vllm vllm sglang] [--scales 0.006 0.012 0.025 0.05]
                                        [--trace qwen_traceA_blksz_16.jsonl] [--json FILE] [--quick]

Servers are started as users start them (rose serve, vllm serve, SGLang's launch_server), live side by side with KV
caches of the same number of tokens, and take turns; whose turn it is not is stopped, so that idle ones take no cores
(--no-pause lets them run on).

--scales MULTIPLIES the times at which requests are sent: a smaller scale is more load. Without --trace, requests are
made up with the published statistics of that trace. All lengths are multiplied by --length-scale, and requests that do
not fit the model's window even so are left out and counted: both are part of the result, with the lengths that came out
of it. Prompts share prefixes as those of the trace do, within one turn only. A small model answers a chat of these
lengths in a tenth of a second, so that it takes far more than the trace's own load to keep a GPU busy.

Figures have the names of ``vllm bench serve``, times count from when a request was due. End-of-text is ignored; a
server that makes fewer tokens than it was asked for has failed that request. Servers that are not installed are named
and left out, as are those that do not start; then the status is 1. `python -m benchmarks.report` draws the
result.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks.support import resume
from benchmarks.support.checkpoint import ModelFacts, checkpoint, model_facts
from benchmarks.support.compare_options import (
    add_engine_options,
    engine_options,
    environment,
    set_defaults,
)
from benchmarks.support.http_client import ClientProcesses, Load
from benchmarks.support.online_report import losses, print_online
from benchmarks.support.pause import only
from benchmarks.support.report import device_name, run_facts, write_json
from benchmarks.support.servers import Server, Servers
from benchmarks.support.streaming import summary
from benchmarks.support.trace import (
    HASHED_TOKENS,
    TraceRequest,
    fitted,
    read_trace,
    statistics,
    synthetic_trace,
)
from benchmarks.support.workload import MODES

BACKENDS = ("rose", "rose-in-vllm", "vllm", "sglang")
SCALES = [0.006, 0.012, 0.025, 0.05]
WARM_UP_REQUESTS = 256


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    group = parser.add_argument_group("trace")
    group.add_argument("--trace", type=Path, metavar="FILE", help="default: a made-up one")
    group.add_argument("--timed-trace-chunk-hash-size", type=int, default=HASHED_TOKENS, metavar="TOKENS",
                       help="tokens behind a hash id of FILE (default: %(default)s)")  # fmt: skip
    group.add_argument("--timed-trace-sec-multiplier", type=float, default=1.0, metavar="S",
                       help="seconds per unit of FILE's timestamps (default: %(default)s)")  # fmt: skip
    group.add_argument("--requests", type=int, metavar="N", help="that are replayed (default: 1000)")
    group.add_argument(
        "--scales", type=float, nargs="+", metavar="S", help=f"of sending times (default: {SCALES})"
    )
    group.add_argument("--length-scale", type=float, default=0.1, help="of lengths (default: %(default)s)")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES),
                        help="how tokens are drawn (default: all)")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3, help="turns at each scale (default: %(default)s)")
    parser.add_argument(
        "--max-seconds", type=float, help="begin no other turn after this time, and report what is there"
    )
    parser.add_argument("--clients", type=int, help="processes of the client (default: 4)")
    resume.add_option(parser)
    add_engine_options(parser, BACKENDS)
    options = parser.parse_args(arguments)
    set_defaults(options)
    quick = options.quick
    options.requests = (8 if quick else 1000) if options.requests is None else options.requests
    options.clients = (1 if quick else 4) if options.clients is None else options.clients
    options.scales = options.scales or ([0.05] if quick else SCALES)
    for name in ("requests", "repeats", "clients", "timed_trace_chunk_hash_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(options, name)}, at least 1")
    for name in ("length_scale", "timed_trace_sec_multiplier"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(options, name)}, has to be above 0")
    if min(options.scales) <= 0:
        parser.error(f"--scales: got {options.scales}, each has to be above 0")
    return options


class Contest:
    """Servers that are sent the same trace in turns."""

    def __init__(
        self, servers: Servers, trace: Sequence[TraceRequest], vocab_size: int, options: argparse.Namespace
    ) -> None:
        self._servers, self._trace, self._vocab_size, self._options = (
            servers.running,
            trace,
            vocab_size,
            options,
        )
        self._clients = ClientProcesses(options.clients)
        self.rows: list[dict[str, Any]] = []
        """May hold turns of an earlier run: these are not taken again."""
        self.turns_left_out = 0

    def _load(self, server: Server, prompts: list[list[int]], mode: str, scale: float) -> Load:
        output_lens = [request.output_length for request in self._trace[: len(prompts)]]
        due = [request.timestamp * scale for request in self._trace[: len(prompts)]]
        return Load(server.url, server.model, MODES[mode], prompts, output_lens, due)

    def _prompts(self, salt: int, count: int | None = None) -> list[list[int]]:
        return [request.prompt(self._vocab_size, salt) for request in self._trace[:count]]

    def warm_up(self) -> None:
        """Let all servers compile what they need, at the same time: many requests at once in each mode."""
        for mode in self._options.modes:
            prompts = self._prompts(0, WARM_UP_REQUESTS)
            loads = [self._load(server, prompts, mode, 0.0) for server in self._servers.values()]
            for part in [self._clients.send_whole(load, index) for index, load in enumerate(loads)]:
                part.result()

    def run(self, deadline: float) -> None:
        """Fill ``rows`` and ``turns_left_out``; ``deadline`` is in ``time.monotonic``'s seconds.

        An interrupt is a deadline: turns that were whole stay.
        """
        options = self._options
        taken = {(row["repeat"], row["mode"], row["scale"]) for row in self.rows}
        all_turns = [
            (repeat, mode, scale)
            for repeat in range(options.repeats)
            for scale in sorted(options.scales)
            for mode in options.modes
        ]
        turns = [(index, turn) for index, turn in enumerate(all_turns) if turn not in taken]
        columns = (
            TextColumn("{task.description:48}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("", total=len(turns) * len(self._servers))
            for num_taken, (index, turn) in enumerate(turns):
                self.turns_left_out = len(turns) - num_taken
                if time.monotonic() > deadline:
                    return
                try:
                    self.rows += self._whole_turn(index, *turn, progress, task)
                except KeyboardInterrupt:
                    return
            self.turns_left_out = 0

    def _whole_turn(
        self, index: int, repeat: int, mode: str, scale: float, progress: Progress, task: TaskID
    ) -> list[dict[str, Any]]:
        """Return the figures of every server, each with the same prompts."""
        rows = []
        prompts = self._prompts(index + 1)
        names = deque(self._servers)
        names.rotate(-index)
        for name in names:
            progress.update(task, description=f"{name}, {mode}, scale {scale:g}")
            with only(name, self._servers, pause=self._options.pause) as server:
                figures = self._turn(server, prompts, mode, scale)
            rows.append({"backend": name, "mode": mode, "scale": scale, "repeat": repeat, **figures})
            progress.advance(task)
        return rows

    def _turn(self, server: Server, prompts: list[list[int]], mode: str, scale: float) -> dict[str, Any]:
        replay = self._clients.send(self._load(server, prompts, mode, scale))
        errors = [timeline.error for timeline in replay.timelines if timeline.error]
        pieces = sum(len(timeline.arrivals) for timeline in replay.timelines)
        return {
            **summary(replay.timelines, replay.duration),
            "pieces": pieces,
            "client_busy": replay.client_busy,
            "client_late_s": replay.client_late_s,
            "errors": errors[:10],
        }

    def close(self) -> None:
        """End the client's processes."""
        self._clients.close()


def read_requests(
    options: argparse.Namespace, max_model_len: int
) -> tuple[list[TraceRequest], dict[str, Any]]:
    """Return requests that fit the window, and what there is to know of them."""
    if options.trace is None:
        # Twice as many, because some will not fit.
        source, trace = "a made-up trace", iter(synthetic_trace(2 * options.requests))
    else:
        source = options.trace.name
        trace = read_trace(
            options.trace,
            hashed_tokens=options.timed_trace_chunk_hash_size,
            sec_multiplier=options.timed_trace_sec_multiplier,
        )
    fitting, num_left_out = fitted(
        trace, options.requests, length_scale=options.length_scale, max_model_len=max_model_len
    )
    return fitting, {
        "source": source,
        "length_scale": options.length_scale,
        "max_model_len": max_model_len,
        "num_left_out": num_left_out,
        **statistics(fitting),
    }


def run(options: argparse.Namespace, model: str, facts: ModelFacts, logs: Path) -> dict[str, Any]:
    """Start the servers, let them take turns, and return the report."""
    start = time.monotonic()
    trace, facts_of_trace = read_requests(options, facts.max_model_len)
    facts_of_run = {**_facts(options), "trace": facts_of_trace}
    earlier = resume.earlier_report(options.resume, facts_of_run)
    servers = Servers(logs)
    for backend in options.backends:
        arguments = engine_options(options, backend, model, facts, [])
        servers.add(backend, arguments, **environment(options, backend))
    contest = Contest(servers, trace, facts.vocab_size, options)
    try:
        with Console(stderr=True).status("starting servers"):
            servers.wait_until_ready()
            start_up_s = time.monotonic() - start
            resume.check_engines(earlier, servers.versions)
            contest.rows += earlier["rows"] if earlier else []
            contest.warm_up()
        contest.run(start + (options.max_seconds or float("inf")))
    finally:
        contest.close()
        servers.stop()
    report = {
        **facts_of_run,
        "start_up_s": start_up_s,
        "backends": servers.versions,
        "missing": servers.missing,
        "failed": servers.failed,
        "turns_left_out": contest.turns_left_out,
        "losses": losses(contest.rows),
        "rows": contest.rows,
    }
    return resume.with_runs(report, earlier)


def _facts(options: argparse.Namespace) -> dict[str, Any]:
    """Return what is known before any server starts."""
    settings = ("dtype", "max_num_seqs", "repeats", "clients", "pause", "quick")
    return {
        "benchmark": "online_compare",
        **run_facts(),
        "device": device_name(options.device),
        "settings": {
            "model": options.model_name,
            **{name: getattr(options, name) for name in settings},
            "scale": "sending times are multiplied by it: smaller is more load",
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, write; the status is 1 if a server or a request failed."""
    options = parse_options(arguments)
    with (
        checkpoint(options.model, options.shape, small=options.quick) as model,
        tempfile.TemporaryDirectory() as folder,
    ):
        report = run(options, model, model_facts(model), options.logs or Path(folder))
    print_online(Console(width=200), report)
    if options.json:
        write_json(options.json, report)
    return int(bool(report["failed"]) or not report["rows"] or any(row["failed"] for row in report["rows"]))


if __name__ == "__main__":
    sys.exit(main())
