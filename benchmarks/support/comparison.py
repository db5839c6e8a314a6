"""A comparison of engines from its options to its report: the workload says what is sent and what the figures mean."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from benchmarks.reports.text import Result, publish
from benchmarks.support.checkpoint import ModelFacts, checkpoint, model_facts
from benchmarks.support.cli import (
    add_engine_options,
    add_engines,
    check_above_zero,
    check_at_least,
    engine_options,
    new_parser,
    set_engine_defaults,
)
from benchmarks.support.run_facts import (
    add_resume_option,
    check_engines,
    device_name,
    earlier_report,
    run_facts,
    with_runs,
)
from benchmarks.support.turns import Row, Turn, take_turns

Sides = dict[str, tuple[str, list[str]]]
"""Name -> backend, and Rose's switches that are off."""


class Workload:
    """What is compared. It is made from the options and the facts of the model."""

    benchmark: ClassVar[str]
    backends: ClassVar[tuple[str, ...]]
    """That there are; the default is all of them."""

    def __init__(self, options: argparse.Namespace, facts: ModelFacts) -> None:
        self.options, self.vocab_size = options, facts.vocab_size
        self.settings: Row = {}
        """For the report, with what every comparison has."""
        self.facts: Row = {}
        """For the report, known before any engine starts."""

    @staticmethod
    def table(result: Result) -> str:
        """Return README's table."""
        raise NotImplementedError

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Add what only this workload has."""
        raise NotImplementedError

    @staticmethod
    def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        """Fill in defaults, or exit with what is wrong."""
        raise NotImplementedError

    @staticmethod
    def sides(options: argparse.Namespace) -> Sides:
        """Return which engines run."""
        return {backend: (backend, []) for backend in options.backends}

    def open(self, logs: Path) -> Any:
        """Return the ``Engines`` that starts and ends them."""
        raise NotImplementedError

    def close(self) -> None:
        """End what else was started."""

    def rows_of(self, earlier: Result) -> list[Row]:
        """Return the rows of turns that an earlier report holds."""
        return list(earlier["rows"])

    def warm_up(self, engines: Any) -> None:
        """Let engines compile what they have not yet."""
        raise NotImplementedError

    def turns(self, rows: list[Row]) -> list[Turn]:
        """Return the turns that ``rows`` lacks; what later ones send may follow from what is added to it."""
        raise NotImplementedError

    def take(self, engine: Any, name: str, turn: Turn) -> Row:
        """Return the figures of one engine's turn."""
        raise NotImplementedError

    def findings(self, rows: list[Row], start_up_s: dict[str, float]) -> Row:
        """Return what the report has besides facts."""
        raise NotImplementedError


def parse_comparison(
    description: str | None, arguments: Sequence[str] | None, workload: type[Workload]
) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = new_parser(description)
    parser.add_argument("--repeats", type=int, help="turns of each kind and engine (default: 3)")
    parser.add_argument("--max-seconds", type=float, help="begin no other turn after this time")
    add_resume_option(parser)
    add_engine_options(parser, workload.backends)
    workload.add_options(parser)
    options = parser.parse_args(arguments)
    options.workload = workload
    set_engine_defaults(options)
    workload.check_options(parser, options)
    check_at_least(parser, options, 1, "repeats")
    check_above_zero(parser, options, "max_seconds")
    return options


def compare(options: argparse.Namespace) -> int:
    """Compare, print, write; the status is 1 if an engine or a request failed, or none was there."""
    with (
        checkpoint(options.model, options.shape, small=options.quick) as model,
        tempfile.TemporaryDirectory() as folder,
    ):
        report = _run(options, model, model_facts(model), options.logs or Path(folder))
    publish(report, options.workload.table(report), options.json)
    rows = report["rows"]
    return int(bool(report["failed"]) or not rows or any(row.get("failed") for row in rows))


def _run(options: argparse.Namespace, model: str, facts: ModelFacts, logs: Path) -> Result:
    """Start the engines, let them take turns, and return the report."""
    start = time.monotonic()
    workload: Workload = options.workload(options, facts)
    known = {
        "benchmark": workload.benchmark,
        **run_facts(),
        "device": device_name(options.device),
        "settings": {
            "model": options.model_name,
            **{name: getattr(options, name) for name in ("dtype", "max_num_seqs", "pause", "quick")},
            **workload.settings,
            "engine_options": {
                name: engine_options(options, name, model, facts, []).extra for name in options.backends
            },
        },
        **workload.facts,
    }
    earlier = earlier_report(options.resume, known)
    try:
        rows = workload.rows_of(earlier) if earlier else []
        with workload.open(logs) as engines:
            with Console(stderr=True).status("starting engines"):
                add_engines(engines, workload.sides(options), options, model, facts)
                start_up_s = engines.wait_until_started()
                check_engines(earlier, engines.facts)
                workload.warm_up(engines)
            deadline = start + (options.max_seconds or float("inf"))
            turns_left_out = take_turns(
                engines.running,
                workload.turns(rows),
                workload.take,
                rows,
                pause=options.pause,
                deadline=deadline,
                drop=engines.drop,
            )
    finally:
        workload.close()
    report = {
        **known,
        "backends": engines.facts,
        "missing": engines.missing,
        "failed": engines.failed,
        "turns_left_out": turns_left_out,
        **workload.findings(rows, start_up_s),
    }
    return with_runs(report, earlier)
