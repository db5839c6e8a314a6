"""What ``online_compare`` sends: a chat trace, Poisson arrivals of two request sets, or requests within a process."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.online.http_client import ClientProcesses
from benchmarks.online.servers import Server, processor_seconds, server_counts
from benchmarks.online.streams import together
from benchmarks.online.timeline import summary
from benchmarks.online.trace import fitted, read_trace, statistics_of, synthetic_trace
from benchmarks.reports import serving
from benchmarks.reports.engines import HOST, ROSE_HOSTS, STOCK
from benchmarks.reports.serving import (
    BUDGET_AUTO,
    CAPACITY,
    FIXED,
    OUTPUTS_APART,
    OWN_LOAD,
    POISSON,
    SAME_LOAD,
)
from benchmarks.support.checkpoint import GPT2_124M, LLAMA_8B, ModelFacts
from benchmarks.support.cli import DEFAULT, above_zero, at_least
from benchmarks.support.comparison import Kind, Sides, Workload, chosen, kv_cache_tokens
from benchmarks.support.engines import STEP_BUDGET
from benchmarks.support.turns import Row, Turn
from benchmarks.support.worker_pool import EngineError, Engines, Worker
from benchmarks.support.workload import MODES, HeldStreams, RandomRequests, Requests, request_sets

WARM_UP_REQUESTS = 256
SETS = ("random", "shared-prefix")
_STREAM_PROMPT_LEN = {False: 128, True: 4}
"""Tokens of the prompt of a stream, with ``--quick`` fewer."""
_NEW_TOKENS = 16
"""Of each prompt that arrives beside streams."""
_PROMPTS_AT_ONCE, _SPARE_STREAMS = 8, 4
"""Prompts that the KV cache has room for by default, and whole streams, beside what streams take on average."""
SCALES, LOADS = [0.006, 0.012, 0.025, 0.05], [0.25, 0.5, 0.75, 1.0]


class OverHttp(Workload):
    """Servers, and a client of several processes. Subclasses say what is sent."""

    clients: ClientProcesses

    @staticmethod
    def add_server_options(group: argparse._ArgumentGroup) -> None:
        """Add what decides how servers start."""
        text = "vllm serve, with Rose and without, answers through vLLM's API server in Rust, vllm-rs"
        group.add_argument("--rust-front-end", action="store_true", help=text)

    @contextlib.contextmanager
    def open(self, logs: Path) -> Iterator[Engines]:
        in_turn = getattr(self.options, "start_in_turn", False)
        self.clients = ClientProcesses(self.options.clients)
        # Servers end first: requests that an interrupt has left on their way end with them.
        with contextlib.closing(self.clients), Engines(Server, logs, in_turn=in_turn) as servers:
            yield servers

    def figures(self, server: Server, requests: Requests, mode: str) -> Row:
        """Send requests; return what their callers saw, and how busy the client was."""
        replay = self.clients.send(server.url, {"model": server.model, **MODES[mode]}, requests)
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
    def add_options(parser: argparse.ArgumentParser, *, quick: bool) -> None:
        group = parser.add_argument_group("trace")
        add = group.add_argument
        Trace.add_server_options(group)
        count, clients, scales = (8, 1, [0.05]) if quick else (1000, 4, SCALES)
        text = f"of sending times {DEFAULT}"
        add("--trace", type=Path, metavar="FILE", help="default: a made-up one")
        add("--requests", type=at_least(1), default=count, metavar="N", help=f"that are replayed {DEFAULT}")
        add("--scales", type=above_zero, nargs="+", default=scales, metavar="S", help=text)
        add("--length-scale", type=above_zero, default=0.1, help=f"of lengths {DEFAULT}")
        add("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="of sampling (default: all)")
        add("--clients", type=at_least(1), default=clients, help=f"processes of the client {DEFAULT}")

    @staticmethod
    def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        if options.rust_front_end and not {HOST, STOCK} & set(options.backends):
            parser.error(
                f"--rust-front-end: got --backends {' '.join(options.backends)}, needed is one in vLLM"
            )

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
            **chosen(options, "repeats", "clients", "rust_front_end"),
            "scale": "sending times are multiplied by it: smaller is more load",
        }

    def requests(self, salt: int, scale: float, count: int | None = None) -> Requests:
        """Return the first ``count`` requests of the trace, with prompts that another ``salt`` does not make."""
        trace = self._trace[:count]
        prompts = [request.prompt(self.vocab_size, salt) for request in trace]
        output_lens = [request.output_length for request in trace]
        return Requests(prompts, output_lens, [request.timestamp * scale for request in trace])

    def warm_up(self, engines: Engines) -> None:
        """Send many requests at once to each server, in each mode."""
        requests = self.requests(0, 0.0, WARM_UP_REQUESTS)
        for server, mode in itertools.product(engines.running.values(), self.options.modes):
            self.figures(server, requests, mode)

    def phases(self) -> list[list[Kind]]:
        kinds = itertools.product(sorted(self.options.scales), self.options.modes)
        return [[(f"{mode}, scale {scale:g}", {"mode": mode, "scale": scale}) for scale, mode in kinds]]

    def take(self, server: Server, name: str, turn: Turn) -> Row:
        requests = self.requests(turn.seed, turn.columns["scale"])
        return self.figures(server, requests, turn.columns["mode"])

    def findings(self, start_up_s: dict[str, float]) -> Row:
        longest = max(start_up_s.values(), default=0.0)
        return {"start_up_s": longest, "losses": serving.trace_losses(self.rows), "rows": self.rows}


class Poisson(OverHttp):
    """Requests all at once, then Poisson arrivals at shares of what saturates vLLM's own server."""

    benchmark = "vllm_serving"
    backends = ("rose-in-vllm", "vllm")
    table = staticmethod(serving.poisson_table)

    @staticmethod
    def add_options(parser: argparse.ArgumentParser, *, quick: bool) -> None:
        group = parser.add_argument_group("poisson")
        add, at_rates = group.add_argument, group.add_mutually_exclusive_group().add_argument
        loads, count, seconds, clients, repeats = ([0.5], 8, 0.5, 1, 1) if quick else (LOADS, 512, 5.0, 4, 3)
        parser.set_defaults(repeats=repeats)
        Poisson.add_server_options(group)
        add("--sets", nargs="+", choices=SETS, default=SETS, help="(default: both)")
        at_rates("--loads", type=above_zero, nargs="+", default=loads, metavar="SHARE", help=DEFAULT)
        at_rates("--rates", type=above_zero, nargs="+", metavar="N", help="per second, instead of --loads")
        add("--requests", type=at_least(1), default=count, metavar="N", help=f"sent at once {DEFAULT}")
        add("--seconds", type=above_zero, default=seconds, help=f"of arrivals in a turn {DEFAULT}")
        add("--clients", type=at_least(1), default=clients, help=f"client processes {DEFAULT}")
        add("--start-in-turn", action="store_true", help="start one server after the other, not all at once")
        add("--compare-joined-outputs", action="store_true", help="Rose without joined_outputs, too")
        text = "no model runs: every step takes so long and draws made-up tokens (vLLM's CPU build, --device cpu)"
        add("--step-ms", type=at_least(0, float), metavar="MS", help=text)

    @staticmethod
    def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        if options.step_ms is not None and options.device != "cpu":
            parser.error(f"--step-ms: got --device {options.device}, needed is cpu")
        if options.compare_joined_outputs and options.rust_front_end:
            parser.error(
                "--compare-joined-outputs: got --rust-front-end, behind which outputs are never joined"
            )

    @staticmethod
    def sides(options: argparse.Namespace) -> Sides:
        apart: Sides = {OUTPUTS_APART: ("rose-in-vllm", ["joined_outputs"])}
        return OverHttp.sides(options) | (apart if options.compare_joined_outputs else {})

    def __init__(self, options: argparse.Namespace, facts: ModelFacts) -> None:
        super().__init__(options, facts)
        self._sets = request_sets(options.requests, quick=options.quick)
        # With other sets or loads the turns of an earlier report would be taken for those of this one.
        names = (
            "sets",
            "loads",
            "rates",
            "requests",
            "seconds",
            "repeats",
            "clients",
            "start_in_turn",
            "step_ms",
            "rust_front_end",
        )
        self.settings = chosen(options, *names)

    def warm_up(self, engines: Engines) -> None:
        """Send many requests at once to each server, of each set."""
        count = min(self.options.requests, WARM_UP_REQUESTS)
        for server, name in itertools.product(engines.running.values(), self.options.sets):
            few = replace(self._sets[name], num_requests=count)
            self.figures(server, few.requests(self.vocab_size), "greedy")

    def phases(self) -> list[list[Kind]]:
        loads = self.options.rates or self.options.loads
        labels = ("at once", *(f"{loads} [{index}]" for index in range(len(loads))))
        kinds = itertools.product(self.options.sets, enumerate(labels))
        return [[(f"{name}, {label}", {"set": name, "number": number}) for name, (number, label) in kinds]]

    def rate(self, name: str, number: int) -> float | None:
        """Return the ``number``th rate of a set; the 0th is all at once.

        Loads are shares of the requests per second of vLLM's own server in its first turn with all of them at once.
        """
        if number == 0:
            return None
        if self.options.rates:
            return float(self.options.rates[number - 1])
        first = [row for row in self.rows if (row["set"], row["rate"]) == (name, None)]
        saturated = next((row for row in first if row["backend"] == "vllm"), first[0])
        return float(self.options.loads[number - 1] * saturated["request_throughput"])

    def take(self, server: Server, name: str, turn: Turn) -> Row:
        """Return the figures of one server's turn, with what the server itself counts."""
        of_set = turn.columns["set"]
        rate = self.rate(of_set, turn.columns["number"])
        count = self.options.requests if rate is None else max(1, round(rate * self.options.seconds))
        chosen_set = replace(self._sets[of_set], num_requests=count, seed=turn.seed)
        return {"rate": rate, **self.counted(server, chosen_set.requests(self.vocab_size, rate))}

    def counted(self, server: Server, requests: Requests) -> Row:
        """Return figures, with tokens that the server counts and cores that its processes kept busy."""
        before, seconds_before = server_counts(server.url), processor_seconds(server.pid)
        figures = self.figures(server, requests, "greedy")
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

    def findings(self, start_up_s: dict[str, float]) -> Row:
        comparison = serving.compare(self.rows)
        bars = serving.poisson_bars(comparison, start_up_s)
        return {"start_up_s": start_up_s, "comparison": comparison, "bars": bars, "rows": self.rows}


class InProcess(Workload):
    """Poisson arrivals of streams to engines whose callers live in the engine's own process, without HTTP."""

    benchmark = "arrivals"
    backends = ("rose", "rose-in-vllm", "vllm")
    table = staticmethod(serving.in_process_table)
    summed_by = ("scene", "request_rate")

    @staticmethod
    def add_options(parser: argparse.ArgumentParser, *, quick: bool) -> None:
        add, count = parser.add_argument_group("in-process").add_argument, 12 if quick else 384
        add("--share", type=above_zero, default=0.5, help=f"load over capacity {DEFAULT}")
        add("--rate", type=above_zero, help="requests a second of the same load (default: by --share)")
        add("--requests", type=at_least(2), default=count, metavar="N", help=f"of each turn {DEFAULT}")

    def __init__(self, options: argparse.Namespace, facts: ModelFacts) -> None:
        super().__init__(options, facts)
        lengths = ((4, 16), (4, 8)) if options.quick else ((16, 512), (16, 256))
        self._lengths = dict(zip(("input_len", "output_len"), lengths, strict=True))
        self.settings = {**chosen(options, "share", "rate", "requests"), **self._lengths, "mode": "greedy"}

    def open(self, logs: Path) -> Engines:
        return Engines(partial(Worker, "streaming"), logs)

    def warm_up(self, engines: Engines) -> None:
        """Let all engines compile what they need: everything at once, at the same time."""
        engines.run_all(self._requests(1_000_000, None), MODES["greedy"])

    def _requests(self, seed: int, rate: float | None) -> Requests:
        workload = RandomRequests(self.options.requests, **self._lengths, seed=seed)
        return workload.requests(self.vocab_size, rate)

    def phases(self) -> list[list[Kind]]:
        loads: list[Kind] = [(scene, {"scene": scene}) for scene in (SAME_LOAD, OWN_LOAD)]
        return [[(CAPACITY, {"scene": CAPACITY})], loads]

    def _turns_of(self, scene: str, name: str) -> list[Row]:
        return [row for row in self.rows if (row["scene"], row["backend"]) == (scene, name)]

    def rate(self, scene: str, name: str) -> float | None:
        """Return an engine's requests per second in a scene; None sends all at once."""
        if scene == CAPACITY:
            return None
        if turns := self._turns_of(scene, name):
            # All turns of a scene have one rate, those of an earlier run included.
            return float(turns[0]["request_rate"])
        names = {name} if scene == OWN_LOAD else {row["backend"] for row in self.rows}
        capacity = min(
            statistics.median(row["request_throughput"] for row in self._turns_of(CAPACITY, each))
            for each in names
        )
        return float((scene == SAME_LOAD and self.options.rate) or self.options.share * capacity)

    def take(self, worker: Worker, name: str, turn: Turn) -> Row:
        """Return the figures of one engine's turn."""
        rate = self.rate(turn.columns["scene"], name)
        return {"request_rate": rate, **worker.run(self._requests(turn.seed, rate), MODES["greedy"])}

    def findings(self, start_up_s: dict[str, float]) -> Row:
        """Return what the report has besides facts: a row per scene and engine, with medians over its turns."""
        rows = []
        for row in self.summed_up():
            turns = row.pop("turns")
            medians = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
            rows.append({**row, **medians, "turns": turns})
        return {"bars": serving.in_process_bars(rows), "rows": rows}


class Streams(Workload):
    """Long streams that run all the while, and prompts that arrive beside them."""

    benchmark = "streams"
    backends = (*ROSE_HOSTS, STOCK)
    table = staticmethod(serving.streams_table)
    summed_by = ("arrivals",)

    @staticmethod
    def add_options(parser: argparse.ArgumentParser, *, quick: bool) -> None:
        group = parser.add_argument_group("streams")
        add, sizes = group.add_argument, (3, 48, 6, 24, 0.02) if quick else (32, 4096, 300, 4096, 0.4)
        streams, length, prompts, prompt_len, interval = sizes
        parser.set_defaults(shape=GPT2_124M if quick else LLAMA_8B)
        add("--streams", type=at_least(1), default=streams, metavar="N", help=f"at once {DEFAULT}")
        text = f"of a stream, its prompt of {_STREAM_PROMPT_LEN[quick]} included {DEFAULT}"
        add("--stream-tokens", type=at_least(1), default=length, metavar="N", help=text)
        add(
            "--arrivals",
            nargs="+",
            choices=(FIXED, POISSON),
            default=[FIXED],
            help="of prompts (default: fixed)",
        )
        text = f"of each engine and kind of arrivals, over its --repeats turns {DEFAULT}"
        add("--prompts", type=at_least(1), default=prompts, metavar="N", help=text)
        add("--prompt-tokens", type=at_least(1), default=prompt_len, metavar="N", help=DEFAULT)
        text = f"from a prompt to the next, with poisson on average {DEFAULT}"
        add("--interval", type=above_zero, default=interval, metavar="SECONDS", help=text)
        add("--compare-step-budget", action="store_true", help="Rose in vLLM with a step budget (auto), too")

    @staticmethod
    def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        longer = _STREAM_PROMPT_LEN[options.quick]
        if options.stream_tokens <= longer:
            parser.error(f"--stream-tokens: got {options.stream_tokens}, has to be above {longer}")
        if options.prompts < options.repeats:
            parser.error(
                f"--prompts: got {options.prompts}, needed is one for each of {options.repeats} turns"
            )
        if options.streams >= options.max_num_seqs:
            parser.error(
                f"--streams: got {options.streams}, has to be below --max-num-seqs {options.max_num_seqs}"
            )

    @staticmethod
    def window(options: argparse.Namespace) -> int:
        return int(max(options.stream_tokens, options.prompt_tokens + _NEW_TOKENS))

    @staticmethod
    def sides(options: argparse.Namespace) -> Sides:
        sides = Workload.sides(options)
        if options.compare_step_budget and HOST in sides:
            sides[BUDGET_AUTO] = (HOST, [STEP_BUDGET])
        return sides

    def __init__(self, options: argparse.Namespace, facts: ModelFacts) -> None:
        super().__init__(options, facts)
        if self.window(options) > facts.max_model_len:
            raise SystemExit(
                f"--stream-tokens, --prompt-tokens: the longest request has {self.window(options):,} tokens; "
                f"the model takes {facts.max_model_len:,}"
            )
        if options.kv_cache_tokens is None:
            room = _PROMPTS_AT_ONCE * (options.prompt_tokens + _NEW_TOKENS)
            # Engines refuse a cache that a whole window would not fit; vLLM has blocks of up to 128 tokens, one unused.
            of_window = facts.max_model_len + 256
            # Streams have different ages: all together they are half as long as if all were at their ends.
            of_streams = (options.streams // 2 + _SPARE_STREAMS) * options.stream_tokens
            options.kv_cache_tokens = max(of_streams + room, of_window)
        sizes = ("streams", "stream_tokens", "prompts", "prompt_tokens", "interval", "repeats")
        self.settings = {
            **chosen(options, *sizes),
            "stream_prompt_tokens": _STREAM_PROMPT_LEN[options.quick],
            "new_tokens": _NEW_TOKENS,
            "kv_cache_tokens": kv_cache_tokens(options, facts),
            "mode": "greedy",
        }

    def open(self, logs: Path) -> Engines:
        return Engines(partial(Worker, "serving"), logs)

    def _held(self, arriving: Requests, seconds: float, seed: int) -> HeldStreams:
        return HeldStreams(
            arriving=arriving,
            seconds=seconds,
            num_streams=self.options.streams,
            prompt_len=_STREAM_PROMPT_LEN[self.options.quick],
            length=self.options.stream_tokens,
            vocab_size=self.vocab_size,
            seed=seed,
            settle_s=0.05 if self.options.quick else 1.0,
        )

    def _prompts(self, count: int, arrivals: str, seed: int) -> Requests:
        lengths = (self.options.prompt_tokens,) * 2, (_NEW_TOKENS,) * 2
        rate = 1 / self.options.interval if arrivals == POISSON else None
        requests = RandomRequests(count, *lengths, seed=seed).requests(self.vocab_size, rate)
        if arrivals == POISSON:
            return requests
        return replace(requests, due=[number * self.options.interval for number in range(count)])

    def warm_up(self, engines: Engines) -> None:
        """Let streams of each engine, one after the other, meet as many prompts at once as there is room for, and some
        apart."""
        requests = self._prompts(2 * _PROMPTS_AT_ONCE, FIXED, 1_000_000)
        due = [max(at - requests.due[_PROMPTS_AT_ONCE - 1], 0.0) for at in requests.due]
        held = self._held(replace(requests, due=due), 0.0, 1_000_000)
        for name, worker in list(engines.running.items()):
            try:
                worker.hold(held, MODES["greedy"])
            except EngineError as error:
                engines.drop(name, error)

    def phases(self) -> list[list[Kind]]:
        return [[(f"{arrivals} arrivals", {"arrivals": arrivals}) for arrivals in self.options.arrivals]]

    def take(self, worker: Worker, name: str, turn: Turn) -> Row:
        """Return the figures of one engine's turn."""
        whole, more = divmod(self.options.prompts, self.options.repeats)
        count = whole + (turn.columns["repeat"] < more)
        requests = self._prompts(count, turn.columns["arrivals"], turn.seed)
        return worker.hold(self._held(requests, count * self.options.interval, turn.seed), MODES["greedy"])

    def findings(self, start_up_s: dict[str, float]) -> Row:
        """Return what the report has besides facts: a row for each engine and kind of arrivals."""
        rows = [{**row, **together(row["turns"])} for row in self.summed_up()]
        return {"start_up_s": start_up_s, "bars": serving.streams_bars(rows), "rows": rows}


WORKLOADS: dict[str, type[Workload]] = {
    "trace": Trace,
    "poisson": Poisson,
    "in-process": InProcess,
    "streams": Streams,
}
