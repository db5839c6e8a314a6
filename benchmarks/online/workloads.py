"""What ``online_compare`` sends: a chat trace, Poisson arrivals of two request sets, or streams within a process."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.online.http_client import ClientProcesses, Load
from benchmarks.online.servers import Server, Servers, processor_seconds, server_counts
from benchmarks.online.timeline import summary
from benchmarks.online.trace import fitted, read_trace, statistics_of, synthetic_trace
from benchmarks.reports import serving
from benchmarks.reports.serving import CAPACITY, OUTPUTS_APART, OWN_LOAD, SAME_LOAD
from benchmarks.reports.text import Result
from benchmarks.support.checkpoint import ModelFacts
from benchmarks.support.cli import check_above_zero, check_at_least, fill_in
from benchmarks.support.comparison import Sides, Workload
from benchmarks.support.timing import spread
from benchmarks.support.turns import Row, Turn
from benchmarks.support.worker_pool import Worker, WorkerPool
from benchmarks.support.workload import MODES, SETS, RandomRequests, Requests

WARM_UP_REQUESTS = 256
QUICK_LENGTH_DIVISOR = 16
SCALES = [0.006, 0.012, 0.025, 0.05]


def _settings(options: argparse.Namespace, *names: str) -> Row:
    return {name: getattr(options, name) for name in names}


class OverHttp(Workload):
    """Servers, and a client of several processes. Subclasses say what is sent."""

    def __init__(self, options: argparse.Namespace, facts: ModelFacts) -> None:
        super().__init__(options, facts)
        self._clients = ClientProcesses(options.clients)

    def open(self, logs: Path) -> Servers:
        return Servers(logs, in_turn=getattr(self.options, "start_in_turn", False))

    def close(self) -> None:
        self._clients.close()

    def load(self, server: Server, requests: Requests, mode: str = "greedy") -> Load:
        """Return requests as they are sent to one server."""
        return Load(server.url, server.model, MODES[mode], requests)

    def figures(self, load: Load) -> Row:
        """Send requests; return what their callers saw, and how busy the client was."""
        replay = self._clients.send(load)
        return {
            **summary(replay.timelines, replay.duration),
            "pieces": sum(len(timeline.arrivals) for timeline in replay.timelines),
            "client_busy": replay.client_busy,
            "client_late_s": replay.client_late_s,
            "errors": [timeline.error for timeline in replay.timelines if timeline.error][:10],
        }


class Trace(OverHttp):
    """A chat trace, replayed at several scales of its sending times."""

    benchmark = "online_compare"
    backends = ("rose", "rose-in-vllm", "vllm", "sglang")
    table = staticmethod(serving.trace_table)

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument_group("trace").add_argument
        add("--trace", type=Path, metavar="FILE", help="default: a made-up one")
        add("--requests", type=int, metavar="N", help="that are replayed (default: 1000)")
        add("--scales", type=float, nargs="+", metavar="S", help=f"of sending times (default: {SCALES})")
        add("--length-scale", type=float, default=0.1, help="of lengths (default: %(default)s)")
        add("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="of sampling (default: all)")
        add("--clients", type=int, help="processes of the client (default: 4)")

    @staticmethod
    def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        fill_in(options, requests=(1000, 8), clients=(4, 1), scales=(SCALES, [0.05]), repeats=(3, 3))
        check_at_least(parser, options, 1, "requests", "clients")
        check_above_zero(parser, options, "length_scale", "scales")

    def __init__(self, options: argparse.Namespace, facts: ModelFacts) -> None:
        super().__init__(options, facts)
        if options.trace is None:
            # Twice as many, because some will not fit.
            source, trace = "a made-up trace", iter(synthetic_trace(2 * options.requests))
        else:
            source, trace = options.trace.name, read_trace(options.trace)
        self._trace, num_left_out = fitted(
            trace, options.requests, length_scale=options.length_scale, max_model_len=facts.max_model_len
        )
        self.facts = {
            "trace": {
                "source": source,
                "length_scale": options.length_scale,
                "max_model_len": facts.max_model_len,
                "num_left_out": num_left_out,
                **statistics_of(self._trace),
            }
        }
        self.settings = {
            **_settings(options, "repeats", "clients"),
            "scale": "sending times are multiplied by it: smaller is more load",
        }

    def requests(self, salt: int, scale: float, count: int | None = None) -> Requests:
        """Return the first ``count`` requests of the trace, with prompts that another ``salt`` does not make."""
        trace = self._trace[:count]
        prompts = [request.prompt(self.vocab_size, salt) for request in trace]
        output_lens = [request.output_length for request in trace]
        return Requests(prompts, output_lens, [request.timestamp * scale for request in trace])

    def warm_up(self, servers: Servers) -> None:
        """Let all servers compile what they need, at the same time: many requests at once in each mode."""
        for mode in self.options.modes:
            requests = self.requests(0, 0.0, WARM_UP_REQUESTS)
            loads = [self.load(server, requests, mode) for server in servers.running.values()]
            for part in [self._clients.send_whole(load, index) for index, load in enumerate(loads)]:
                part.result()

    def turns(self, rows: Sequence[Row]) -> list[Turn]:
        taken = {(row["repeat"], row["mode"], row["scale"]) for row in rows}
        kinds = list(itertools.product(sorted(self.options.scales), self.options.modes))
        return [
            Turn(
                f"{mode}, scale {scale:g}",
                {"mode": mode, "scale": scale, "repeat": repeat},
                first=repeat + number,
                seed=1 + repeat * len(kinds) + number,
            )
            for repeat in range(self.options.repeats)
            for number, (scale, mode) in enumerate(kinds)
            if (repeat, mode, scale) not in taken
        ]

    def take(self, server: Server, name: str, turn: Turn) -> Row:
        requests = self.requests(turn.seed, turn.columns["scale"])
        return self.figures(self.load(server, requests, turn.columns["mode"]))

    def findings(self, rows: list[Row], start_up_s: dict[str, float]) -> Row:
        longest = max(start_up_s.values(), default=0.0)
        return {"start_up_s": longest, "losses": serving.trace_losses(rows), "rows": rows}


class Poisson(OverHttp):
    """Requests all at once, then Poisson arrivals at shares of what saturates vLLM's own server."""

    benchmark = "vllm_serving"
    backends = ("rose-in-vllm", "vllm")
    table = staticmethod(serving.poisson_table)

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument_group("poisson").add_argument
        add("--sets", nargs="+", choices=SETS, default=list(SETS), help="(default: both)")
        add(
            "--loads", type=float, nargs="+", metavar="SHARE", help="(default: 0.25 0.5 0.75 1.0; quick: 0.5)"
        )
        add("--rates", type=float, nargs="+", metavar="N", help="per second, instead of --loads")
        add("--requests", type=int, metavar="N", help="sent at once (default: 512; quick: 8)")
        add("--seconds", type=float, help="of arrivals in a turn (default: 5; quick: 0.5)")
        add("--clients", type=int, help="client processes (default: 4; quick: 1)")
        add("--start-in-turn", action="store_true", help="start one server after the other, not all at once")
        add("--compare-joined-outputs", action="store_true", help="Rose without joined_outputs, too")
        add(
            "--step-ms",
            type=float,
            metavar="MS",
            help="no model runs: every step takes so long and draws made-up tokens, so that the servers' own work is "
            "measured, on a machine without a GPU (vLLM's CPU build, --device cpu)",
        )

    @staticmethod
    def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        if options.loads and options.rates:
            parser.error("--loads and --rates exclude each other")
        fill_in(
            options,
            requests=(512, 8),
            seconds=(5.0, 0.5),
            clients=(4, 1),
            repeats=(3, 1),
            loads=([0.25, 0.5, 0.75, 1.0], [0.5]),
        )
        check_above_zero(parser, options, "requests", "seconds", "clients", "loads", "rates")
        if options.step_ms is not None and (options.step_ms < 0 or options.device != "cpu"):
            got = f"got {options.step_ms} on {options.device}"
            parser.error(f"--step-ms: {got}, needed are 0 or more on --device cpu")

    def __init__(self, options: argparse.Namespace, facts: ModelFacts) -> None:
        super().__init__(options, facts)
        self._sets = {
            name: SETS[name].shortened(QUICK_LENGTH_DIVISOR) if options.quick else SETS[name]
            for name in options.sets
        }
        self._rows: Sequence[Row] = ()
        self.settings = _settings(
            options, "requests", "seconds", "repeats", "clients", "start_in_turn", "step_ms"
        )

    @staticmethod
    def sides(options: argparse.Namespace) -> Sides:
        apart: Sides = {OUTPUTS_APART: ("rose-in-vllm", ["joined_outputs"])}
        return OverHttp.sides(options) | (apart if options.compare_joined_outputs else {})

    def warm_up(self, servers: Servers) -> None:
        count = min(self.options.requests, WARM_UP_REQUESTS)
        for request_set in self._sets.values():
            requests = request_set.requests(count, self.vocab_size, rate=None, seed=0)
            for server in servers.running.values():
                self._clients.send(self.load(server, requests))

    def turns(self, rows: Sequence[Row]) -> list[Turn]:
        self._rows, options = rows, self.options
        kinds = list(itertools.product(self._sets, [0, *range(1, 1 + len(options.rates or options.loads))]))
        taken = {(row["set"], row["repeat"]): 0 for row in rows}
        for row in rows:
            taken[row["set"], row["repeat"]] += row["backend"] == rows[0]["backend"]
        return [
            Turn(
                f"{name}, {options.rates or options.loads} [{number - 1}]" if number else f"{name}, at once",
                {"set": name, "number": number, "repeat": repeat},
                first=repeat + number,
                seed=1 + repeat * len(kinds) + index,
            )
            for repeat in range(options.repeats)
            for index, (name, number) in enumerate(kinds)
            # Turns of a set are taken in the order of their loads.
            if number >= taken.get((name, repeat), 0)
        ]

    def rate(self, name: str, number: int) -> float | None:
        """Return the ``number``th rate of a set; the 0th is all at once.

        Loads are shares of the requests per second of vLLM's own server in its first turn with all of them at once.
        """
        if number == 0:
            return None
        if self.options.rates:
            return float(self.options.rates[number - 1])
        first = [row for row in self._rows if (row["set"], row["rate"]) == (name, None)]
        saturated = next((row for row in first if row["backend"] == "vllm"), first[0])
        return float(self.options.loads[number - 1] * saturated["request_throughput"])

    def take(self, server: Server, name: str, turn: Turn) -> Row:
        """Return the figures of one server's turn, with what the server itself counts."""
        of_set = turn.columns["set"]
        rate = self.rate(of_set, turn.columns["number"])
        count = self.options.requests if rate is None else max(1, round(rate * self.options.seconds))
        requests = self._sets[of_set].requests(count, self.vocab_size, rate=rate, seed=turn.seed)
        return {"rate": rate, **self.counted(server, requests)}

    def counted(self, server: Server, requests: Requests) -> Row:
        """Return figures, with tokens that the server counts and cores that its processes kept busy."""
        before, seconds_before = server_counts(server.url), processor_seconds(server.pid)
        figures = self.figures(self.load(server, requests))
        counts, seconds = server_counts(server.url), processor_seconds(server.pid)
        counts.subtract(before)
        busy = {name: used - seconds_before.get(name, 0.0) for name, used in seconds.items()}
        return {
            **figures,
            "prefilled_tokens": counts["prompt_tokens"] - counts["cached_tokens"],
            "cached_tokens": counts["cached_tokens"],
            "preemptions": counts["preemptions"],
            "server_busy": {name: used / figures["duration"] for name, used in busy.items()},
        }

    def findings(self, rows: list[Row], start_up_s: dict[str, float]) -> Row:
        comparison = serving.compare(rows)
        bars = serving.poisson_bars(comparison, start_up_s)
        return {"start_up_s": start_up_s, "comparison": comparison, "bars": bars, "rows": rows}


class InProcess(Workload):
    """Poisson arrivals of streams to engines whose callers live in the engine's own process, without HTTP."""

    benchmark = "arrivals"
    backends = ("rose", "rose-in-vllm", "vllm")
    table = staticmethod(serving.in_process_table)

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument_group("in-process").add_argument
        add("--share", type=float, default=0.5, help="load over capacity (default: %(default)s)")
        add("--rate", type=float, help="requests a second of the same load (default: by --share)")
        add("--requests", type=int, metavar="N", help="of each turn (default: 384)")

    @staticmethod
    def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        fill_in(options, requests=(384, 12), repeats=(3, 3))
        check_at_least(parser, options, 2, "requests")
        if not 0.0 < options.share <= 1.0:
            parser.error(f"--share: got {options.share}, allowed is more than 0 and at most 1")
        check_above_zero(parser, options, "rate")

    def __init__(self, options: argparse.Namespace, facts: ModelFacts) -> None:
        super().__init__(options, facts)
        self._rows: list[Row] = []
        self._lengths = ((4, 16), (4, 8)) if options.quick else ((16, 512), (16, 256))
        lengths = dict(zip(("input_len", "output_len"), self._lengths, strict=True))
        self.settings = {**_settings(options, "share", "rate", "requests"), **lengths, "mode": "greedy"}

    def open(self, logs: Path) -> WorkerPool:
        return WorkerPool("streaming", logs, self.vocab_size)

    def rows_of(self, earlier: Result) -> list[Row]:
        return [
            {"scene": row["scene"], "backend": row["backend"], "request_rate": row["request_rate"], **turn}
            for row in earlier["rows"]
            for turn in row["turns"]
        ]

    def warm_up(self, pool: WorkerPool) -> None:
        """Let all engines compile what they need: everything at once, at the same time."""
        pool.ask_all("serve", workload=self._workload(1_000_000).as_json(), rate=None)
        pool.ask_all("wake")

    def _workload(self, seed: int) -> RandomRequests:
        return RandomRequests(self.options.requests, *self._lengths, "greedy", seed)

    def turns(self, rows: list[Row]) -> list[Turn]:
        self._rows, repeats = rows, self.options.repeats
        scenes = [CAPACITY] * repeats + [SAME_LOAD, OWN_LOAD] * repeats
        taken = {
            scene: max((len(found) for found in self._turns_of(scene).values()), default=0)
            for scene in set(scenes)
        }
        turns = []
        for number, scene in enumerate(scenes, 1):
            if scenes[:number].count(scene) > taken[scene]:
                turns.append(Turn(scene, {"scene": scene}, first=number, seed=number))
        return turns

    def _turns_of(self, scene: str) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in self._rows:
            if row["scene"] == scene:
                found.setdefault(row["backend"], []).append(row)
        return found

    def rate(self, scene: str, name: str) -> float | None:
        """Return an engine's requests per second in a scene; None sends all at once."""
        if scene == CAPACITY:
            return None
        capacity = {
            engine: spread([row["request_throughput"] for row in rows])["median"]
            for engine, rows in self._turns_of(CAPACITY).items()
        }
        if scene == OWN_LOAD:
            return float(self.options.share * capacity[name])
        return float(self.options.rate or self.options.share * min(capacity.values()))

    def take(self, worker: Worker, name: str, turn: Turn) -> Row:
        """Return the figures of one engine's turn; where its own load is the same load, those of that turn."""
        scene = turn.columns["scene"]
        earlier = self._turns_of(scene).get(name)
        # All turns of a scene have one rate, those of an earlier run included.
        rate = earlier[0]["request_rate"] if earlier else self.rate(scene, name)
        same = self._turns_of(SAME_LOAD).get(name)
        if scene == OWN_LOAD and same and rate == same[-1]["request_rate"]:
            return {**same[-1], "scene": OWN_LOAD}
        workload = self._workload(turn.seed).as_json()
        return {"request_rate": rate, **worker.ask("serve", workload=workload, rate=rate)}

    def findings(self, rows: list[Row], start_up_s: dict[str, float]) -> Row:
        """Return what the report has besides facts: a row per scene and engine, with medians over its turns."""
        found = []
        for scene in (CAPACITY, SAME_LOAD, OWN_LOAD):
            for backend, turns in self._turns_of(scene).items():
                runs = [
                    {
                        name: value
                        for name, value in turn.items()
                        if name not in ("scene", "backend", "request_rate")
                    }
                    for turn in turns
                ]
                medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
                rate = turns[0]["request_rate"]
                row = {"scene": scene, "backend": backend, "request_rate": rate, **medians, "turns": runs}
                found.append(row)
        return {"bars": serving.in_process_bars(found), "rows": found}


WORKLOADS: dict[str, Any] = {"trace": Trace, "poisson": Poisson, "in-process": InProcess}
