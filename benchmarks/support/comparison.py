"""A comparison of engines from its options to its report: the workload says what is sent and what the figures mean."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from benchmarks.reports.text import Result, publish
from benchmarks.support.checkpoint import (
    EAGLE3_HEAD,
    GPT2_124M,
    SHAPES,
    ModelFacts,
    checkpoint,
    model_facts,
    write_head,
)
from benchmarks.support.cli import (
    DEFAULT,
    QUICK_MODEL,
    above_zero,
    add_device_options,
    at_least,
    new_parser,
    set_device_defaults,
)
from benchmarks.support.engines import STEP_MS, EngineOptions
from benchmarks.support.run_facts import check_same, device_name, earlier_report, run_facts, with_runs
from benchmarks.support.turns import Row, Turn
from benchmarks.support.worker_pool import ROOT, Engines

Sides = dict[str, tuple[str, list[str]]]
"""Name -> backend, and Rose's switches that are off."""
Kind = tuple[str, Row]
"""A label, and the columns that tell its turns from others."""

_VLLMS = ("rose-in-vllm", "vllm")
MAX_CACHED_TOKENS = 1024
"""Of a request, for the size of the KV cache: more than requests have by default. Full windows of several engines would
not fit one GPU together."""


class Workload:
    """What is compared. It is made from the options and the facts of the model."""

    benchmark: ClassVar[str]
    backends: ClassVar[tuple[str, ...]]
    """That there are; the default is all of them."""
    table: ClassVar[Any]
    """Makes README's table of a report."""
    summed_by: ClassVar[tuple[str, ...]] = ()
    """Columns, besides the backend, by which a row of the report sums up ``turns``; without any each row is a turn."""

    def __init__(self, options: argparse.Namespace, facts: ModelFacts) -> None:
        self.options, self.vocab_size = options, facts.vocab_size
        self.rows: list[Row] = []
        """Of all turns that were taken, in this run or in the one that it goes on with."""
        self.settings: Row = {}
        """For the report, with what every comparison has."""
        self.facts: Row = {}
        """For the report, known before any engine starts."""

    @staticmethod
    def add_options(parser: argparse.ArgumentParser, *, quick: bool) -> None:
        """Add what only this workload has."""
        raise NotImplementedError

    @staticmethod
    def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        """Exit if options do not fit together."""

    @staticmethod
    def window(options: argparse.Namespace) -> int | None:
        """Return how many tokens the longest request has, where a random checkpoint is to have room for it."""
        return None

    @staticmethod
    def sides(options: argparse.Namespace) -> Sides:
        """Return which engines run."""
        return {backend: (backend, []) for backend in options.backends}

    def open(self, logs: Path) -> AbstractContextManager[Engines]:
        """Return what starts and ends the engines."""
        raise NotImplementedError

    def warm_up(self, engines: Engines) -> None:
        """Let engines compile what they have not yet."""
        raise NotImplementedError

    def phases(self) -> list[list[Kind]]:
        """Return the kinds of turns; those of a phase follow each other in each repeat, phases in all repeats."""
        raise NotImplementedError

    def take(self, engine: Any, name: str, turn: Turn) -> Row:
        """Return the figures of one engine's turn."""
        raise NotImplementedError

    def findings(self, start_up_s: dict[str, float]) -> Row:
        """Return what the report has besides facts."""
        raise NotImplementedError

    def turns_left(self) -> list[Turn]:
        """Return the turns that ``rows`` lacks."""
        turns: list[Turn] = []
        for kinds in self.phases():
            for repeat in range(self.options.repeats):
                for number, (label, columns) in enumerate(kinds):
                    columns = {**columns, "repeat": repeat}
                    turns.append(Turn(label, columns, first=repeat + number, seed=1 + len(turns)))
        return [turn for turn in turns if not any(turn.columns.items() <= row.items() for row in self.rows)]

    def rows_of(self, earlier: Result) -> list[Row]:
        """Return the rows of turns that an earlier report holds."""
        if not self.summed_by:
            return list(earlier["rows"])
        return [
            {**{name: row[name] for name in (*self.summed_by, "backend")}, "repeat": repeat, **turn}
            for row in earlier["rows"]
            for repeat, turn in enumerate(row["turns"])
        ]

    def summed_up(self) -> list[Row]:
        """Return, for each value of the columns ``summed_by`` and the backend, these and the figures of its turns."""
        names = (*self.summed_by, "backend")
        turns: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            figures = {name: value for name, value in row.items() if name not in (*names, "repeat")}
            turns.setdefault(tuple(row[name] for name in names), []).append(figures)
        return [{**dict(zip(names, key, strict=True)), "turns": of_key} for key, of_key in turns.items()]


def chosen(options: argparse.Namespace, *names: str) -> Row:
    """Return options by name."""
    return {name: getattr(options, name) for name in names}


def parse_comparison(
    description: str | None, arguments: Sequence[str] | None, workload: type[Workload]
) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = new_parser(description)
    repeats = f"turns of each kind and engine {DEFAULT}"
    parser.add_argument("--repeats", type=at_least(1), default=3, help=repeats)
    parser.add_argument("--max-seconds", type=above_zero, help="begin no other turn after this time")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep what the engines print here")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="keep the whole turns of an earlier report of the same sources, device, versions and settings, and take "
        "those that it lacks",
    )
    group = add_engine_options(parser, workload.backends)
    group.add_argument(
        "--kv-cache-tokens",
        type=int,
        help=f"KV cache of each engine (default: --max-num-seqs windows, of at most {MAX_CACHED_TOKENS:,} tokens)",
    )
    run_on = "let idle engines run on beside the one that has its turn"
    group.add_argument("--no-pause", dest="pause", action="store_false", help=run_on)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    workload.add_options(parser, quick="--quick" in arguments)
    options = parser.parse_args(arguments)
    options.workload = workload
    if options.backends is None and options.shape != GPT2_124M:
        # This comparison is about what Rose is worth inside vLLM.
        options.backends = [backend for backend in workload.backends if backend in _VLLMS]
    set_engine_defaults(options, workload.backends)
    workload.check_options(parser, options)
    return options


def set_engine_defaults(options: argparse.Namespace, backends: Sequence[str]) -> None:
    """Fill in which engines run, what depends on the machine, and a short run's small model."""
    set_device_defaults(options)
    options.backends = options.backends or list(backends)
    if options.quick:
        if options.shape == GPT2_124M:
            options.model = options.model or QUICK_MODEL
        options.max_num_seqs = min(options.max_num_seqs, 16)
    size = ", two narrow layers" if options.quick else ""
    options.model_name = options.model or f"random weights, {SHAPES[options.shape]}'s shapes{size}"


def add_engine_options(parser: argparse.ArgumentParser, backends: Sequence[str]) -> argparse._ArgumentGroup:
    """Add what says which engines run, on what model, and how their processes are started; return the group."""
    group = parser.add_argument_group("engines")
    group.add_argument("--backends", nargs="+", choices=backends)
    weights = group.add_mutually_exclusive_group()
    weights.add_argument("--model", help="checkpoint; default: random weights")
    weights.add_argument("--shape", choices=SHAPES, default=GPT2_124M, help=f"of random weights {DEFAULT}")
    add_device_options(group)
    group.add_argument("--max-num-seqs", type=int, default=256, help=DEFAULT)

    def of_backend(text: str) -> tuple[str, str]:
        backend, equals, value = text.partition("=")
        if not equals or backend not in backends:
            known = ", ".join(backends)
            raise argparse.ArgumentTypeError(f"got {text!r}, needed is BACKEND=..., BACKEND one of {known}")
        return backend, value

    several = partial(group.add_argument, action="append", type=of_backend)
    several(
        "--python-path",
        default=[],
        metavar="BACKEND=DIR",
        help="where it is installed, if not where this runs",
    )
    several(
        "--env", default=[], metavar="BACKEND=NAME=VALUE", help="variable for its process; as often as needed"
    )
    several(
        "--engine-options",
        default=[],
        metavar="BACKEND=JSON",
        help="options in its own words, over those given here",
    )
    return group


def engine_options(
    options: argparse.Namespace, backend: str, model: str, facts: ModelFacts, switches_off: list[str]
) -> EngineOptions:
    """Return what a process makes its engine from."""
    tokens = kv_cache_tokens(options, facts)
    element_bytes = 4 if options.dtype == "float32" else 2
    # vLLM compiles its models for longer than all of a quick run takes.
    extra: dict[str, Any] = {"enforce_eager": True} if options.quick and backend in _VLLMS else {}
    for text in _given(options.engine_options, backend):
        extra |= json.loads(text)
    if (extra.get("speculative_config") or {}).get("model") == EAGLE3_HEAD:
        if options.model is not None:
            raise SystemExit(
                f"--engine-options: {EAGLE3_HEAD} is made for random weights, got --model {options.model}"
            )
        write_head(Path(model))
    return EngineOptions(
        backend=backend,
        **chosen(options, "dtype", "device", "max_num_seqs"),
        model=model,
        kv_cache_tokens=tokens,
        kv_cache_bytes=tokens * facts.kv_elements_per_token * element_bytes,
        variables=_variables(options, backend),
        switches_off=switches_off,
        extra=extra,
    )


def kv_cache_tokens(options: argparse.Namespace, facts: ModelFacts) -> int:
    """Return the size of each engine's KV cache in tokens."""
    return int(options.kv_cache_tokens or options.max_num_seqs * min(facts.max_model_len, MAX_CACHED_TOKENS))


def _variables(options: argparse.Namespace, backend: str) -> dict[str, str]:
    """Return the environment of the process that runs a backend, which may be installed elsewhere."""
    variables = dict(os.environ)
    for path in _given(options.python_path, backend):
        variables["PYTHONPATH"] = os.pathsep.join((path, str(ROOT)))
    if options.quick and backend in _VLLMS:
        # On a CPU each vLLM would bind its worker to the first core, where all of them start one after the other.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if getattr(options, "step_ms", None) is not None:
        variables[STEP_MS] = str(options.step_ms)
    if backend in _VLLMS and hasattr(options, "rust_front_end"):
        # Not what this process happens to have: the report names the API server.
        variables["VLLM_USE_RUST_FRONTEND"] = str(int(options.rust_front_end))
    for text in _given(options.env, backend):
        name, _, value = text.partition("=")
        variables[name] = value
    if backend == "vllm":
        # Stock: no plug-in is loaded, not even one that stays out of the way.
        variables["VLLM_PLUGINS"] = ""
    return variables


def _given(values: list[tuple[str, str]], backend: str) -> list[str]:
    return [value for name, value in values if name == backend]


def compare(options: argparse.Namespace) -> int:
    """Compare, print, write; the status is 1 if an engine or a request failed, or none was there."""
    window = options.workload.window(options)
    with (
        checkpoint(options.model, options.shape, small=options.quick, window=window) as model,
        tempfile.TemporaryDirectory() as folder,
    ):
        report = _run(options, model, options.logs or Path(folder))
    publish(report, options.workload.table(report), options.json)
    rows = report["rows"]
    return int(bool(report["failed"]) or not rows or any(row.get("failed") for row in rows))


def _run(options: argparse.Namespace, model: str, logs: Path) -> Result:
    """Start the engines, let them take turns, and return the report."""
    deadline = time.monotonic() + (options.max_seconds or float("inf"))
    facts = model_facts(model)
    workload: Workload = options.workload(options, facts)
    wanted = {
        name: engine_options(options, backend, model, facts, switches_off)
        for name, (backend, switches_off) in workload.sides(options).items()
    }
    known = {
        "benchmark": workload.benchmark,
        **run_facts(),
        "device": device_name(options.device),
        "settings": {
            "model": options.model_name,
            **chosen(options, "dtype", "max_num_seqs", "pause", "quick"),
            **workload.settings,
            "engine_options": {name: wanted[name].extra for name in options.backends},
        },
        **workload.facts,
    }
    earlier = earlier_report(options.resume, known)
    if earlier:
        workload.rows += workload.rows_of(earlier)
    with workload.open(logs) as engines:
        with Console(stderr=True).status("starting engines"):
            start_up_s = engines.start(wanted)
            if earlier:
                check_same(earlier, {"backends": engines.facts}, ["backends"])
            workload.warm_up(engines)
        turns_left_out = engines.take_turns(
            workload.turns_left(), workload.take, workload.rows, pause=options.pause, deadline=deadline
        )
    report = {
        **known,
        "backends": engines.facts,
        "missing": engines.missing,
        "failed": engines.failed,
        "turns_left_out": turns_left_out,
        **workload.findings(start_up_s),
    }
    return with_runs(report, earlier)
