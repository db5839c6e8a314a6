"""Compare what streaming callers see: Poisson arrivals on Rose's AsyncEngine and on vLLM's AsyncLLM.

    python -m benchmarks.arrivals [--backends rose vllm] [--share 0.5] [--json FILE] [--quick]

Each engine lives in a process of its own together with its callers, without HTTP in between. First all requests are
sent at once: what an engine completes a second is its capacity. Then requests arrive at random

    same load    at --share of the smallest capacity, or at --rate, at the same moments for every engine
    own load     at --share of each engine's own capacity; where that is the same load, its turns count for both

and the engines take turns; whose turn it is not is stopped, so that idle ones take no cores (--no-pause lets them run
on). Figures have the names of ``vllm bench serve``: TTFT is the time to the first token from when a request was due,
ITL the gap between two pieces of an answer, TPOT the time per token behind the first one, E2EL the time to the last
token. End-of-text is ignored; prompts were never seen before; medians of --repeats turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.support import resume
from benchmarks.support.arrivals_report import goal_bars, print_arrivals
from benchmarks.support.checkpoint import ModelFacts, checkpoint, model_facts
from benchmarks.support.compare_options import (
    add_engine_options,
    engine_options,
    environment,
    set_defaults,
)
from benchmarks.support.pause import only
from benchmarks.support.report import device_name, run_facts, write_json
from benchmarks.support.timing import spread
from benchmarks.support.worker_pool import WorkerError, WorkerPool
from benchmarks.support.workload import MODES, Workload

BACKENDS = ("rose", "rose-in-vllm", "vllm")
CAPACITY, SAME_LOAD, OWN_LOAD = "capacity", "same load", "own load"

Runs = dict[tuple[str, str], list[dict[str, Any]]]
"""Scene and backend -> figures of each turn."""


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--share", type=float, default=0.5, help="load over capacity (default: %(default)s)")
    parser.add_argument("--rate", type=float, help="requests a second of the same load (default: by --share)")
    parser.add_argument("--requests", type=int, metavar="N", help="of each turn (default: 384)")
    parser.add_argument("--input-len", type=int, nargs=2, metavar=("LOW", "HIGH"), help="default: 16 512")
    parser.add_argument("--output-len", type=int, nargs=2, metavar=("LOW", "HIGH"), help="default: 16 256")
    parser.add_argument("--mode", choices=list(MODES), default="greedy")
    parser.add_argument("--repeats", type=int, default=3, help="turns of every engine (default: %(default)s)")
    parser.add_argument(
        "--max-seconds", type=float, help="begin no other turn after this time, and report what is there"
    )
    resume.add_option(parser)
    add_engine_options(parser, BACKENDS)
    options = parser.parse_args(arguments)
    set_defaults(options)
    if options.requests is None:
        options.requests = 12 if options.quick else 384
    options.input_len = tuple(options.input_len or ((4, 16) if options.quick else (16, 512)))
    options.output_len = tuple(options.output_len or ((4, 8) if options.quick else (16, 256)))
    if options.requests < 2:
        parser.error(f"--requests: got {options.requests}, at least 2")
    if options.repeats < 1:
        parser.error(f"--repeats: got {options.repeats}, at least 1")
    if not 0.0 < options.share <= 1.0:
        parser.error(f"--share: got {options.share}, allowed is more than 0 and at most 1")
    if options.rate is not None and not 0.0 < options.rate < float("inf"):
        parser.error(f"--rate: got {options.rate}, allowed is more than 0")
    for name in ("input_len", "output_len"):
        low, high = getattr(options, name)
        if not 1 <= low <= high:
            parser.error(f"--{name.replace('_', '-')}: got {low} {high}, allowed is 1 <= LOW <= HIGH")
    return options


class Contest:
    """Engines that are sent the same requests in turns."""

    def __init__(self, pool: WorkerPool, options: argparse.Namespace) -> None:
        self._pool, self._options = pool, options
        self._num_turns = 0
        self.runs: Runs = {}
        self.rates: dict[str, dict[str, float]] = {SAME_LOAD: {}, OWN_LOAD: {}}

    def take_over(self, rows: Sequence[dict[str, Any]]) -> None:
        """Begin with the turns of an earlier report, at its rates."""
        for row in rows:
            self.runs[row["scene"], row["backend"]] = row["turns"]
            if row["scene"] != CAPACITY:
                self.rates[row["scene"]][row["backend"]] = row["request_rate"]

    def warm_up(self) -> None:
        """Let all engines compile what they need: everything at once, at the same time."""
        self._pool.ask_all("serve", workload=self._workload(1_000_000).as_json(), rate=None)
        self._pool.ask_all("wake")

    def run(self, deadline: float) -> None:
        """Fill ``runs`` and ``rates``; ``deadline`` is in ``time.monotonic``'s seconds, an interrupt is one, too."""
        columns = (
            TextColumn("{task.description:32}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        repeats = self._options.repeats
        left = {scene: repeats - self._num_taken(scene) for scene in (CAPACITY, SAME_LOAD, OWN_LOAD)}
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("", total=sum(left.values()))
            self._num_turns = 3 * repeats - sum(left.values())
            turns = [CAPACITY] * repeats + [SAME_LOAD, OWN_LOAD] * repeats
            for scene in turns:
                if time.monotonic() > deadline or not self._pool.workers:
                    break
                if left[scene] <= 0:
                    continue
                left[scene] -= 1
                if scene != CAPACITY and not self.rates[scene]:
                    self._choose_rates()
                progress.update(task, description=scene)
                try:
                    self._take_turn(scene)
                except KeyboardInterrupt:
                    break
                progress.advance(task)

    def _num_taken(self, scene: str) -> int:
        return max((len(runs) for (found, _), runs in self.runs.items() if found == scene), default=0)

    def _take_turn(self, scene: str) -> None:
        """Note figures only when all have had their turn."""
        self._num_turns += 1
        workload = self._workload(self._num_turns).as_json()
        names = deque(self._pool.workers)
        names.rotate(-self._num_turns)
        taken: dict[str, dict[str, Any]] = {}
        for name in list(names):
            rate = None if scene == CAPACITY else self.rates[scene][name]
            if scene == OWN_LOAD and rate == self.rates[SAME_LOAD][name]:
                taken[name] = self.runs[SAME_LOAD, name][-1]
                continue
            try:
                with only(name, self._pool.workers, pause=self._options.pause) as worker:
                    taken[name] = worker.ask("serve", workload=workload, rate=rate)
            except WorkerError as error:
                self._pool.drop(name, error)
        for name, figures in taken.items():
            self.runs.setdefault((scene, name), []).append(figures)

    def _choose_rates(self) -> None:
        capacity = {
            name: spread([run["request_throughput"] for run in self.runs[CAPACITY, name]])["median"]
            for name in self._pool.workers
        }
        same_load = self._options.rate or self._options.share * min(capacity.values())
        for name, value in capacity.items():
            self.rates[OWN_LOAD][name] = self._options.share * value
            self.rates[SAME_LOAD][name] = same_load

    def _workload(self, seed: int) -> Workload:
        options = self._options
        return Workload(options.requests, options.input_len, options.output_len, options.mode, seed)


def rows_of(contest: Contest) -> list[dict[str, Any]]:
    """Return one row per scene and backend: each figure's median over the turns, and the turns."""
    return [
        {
            "scene": scene,
            "backend": backend,
            "request_rate": contest.rates.get(scene, {}).get(backend),
            **{name: spread([run[name] for run in runs])["median"] for name in runs[0]},
            "turns": runs,
        }
        for (scene, backend), runs in contest.runs.items()
    ]


def run(options: argparse.Namespace, model: str, facts: ModelFacts) -> dict[str, Any]:
    """Start the engines, let them take turns, and return the report."""
    deadline = time.monotonic() + (options.max_seconds or float("inf"))
    facts_of_run = _facts(options)
    earlier = resume.earlier_report(options.resume, facts_of_run)
    with WorkerPool("streaming", options.logs) as pool:
        for backend in options.backends:
            pool.add(
                backend,
                backend,
                engine_options(options, backend, model, facts, []),
                vocab_size=facts.vocab_size,
                **environment(options, backend),
            )
        contest = Contest(pool, options)
        with Console(stderr=True).status("starting engines"):
            pool.wait_until_started()
            resume.check_engines(earlier, pool.facts)
            contest.take_over(earlier["rows"] if earlier else [])
            contest.warm_up()
        contest.run(deadline)
    rows = rows_of(contest)
    report = {
        **facts_of_run,
        "backends": pool.facts,
        "missing": pool.missing,
        "failed": pool.failed,
        "bars": goal_bars(rows),
        "rows": rows,
    }
    return resume.with_runs(report, earlier)


def _facts(options: argparse.Namespace) -> dict[str, Any]:
    """Return what is known before any engine starts."""
    settings = (
        "dtype",
        "max_num_seqs",
        "share",
        "rate",
        "requests",
        "input_len",
        "output_len",
        "mode",
        "pause",
        "quick",
    )
    return {
        "benchmark": "arrivals",
        **run_facts(),
        "device": device_name(options.device),
        "settings": {"model": options.model_name, **{name: getattr(options, name) for name in settings}},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, write; the status is 1 if an engine failed or none was there."""
    options = parse_options(arguments)
    with checkpoint(options.model, options.shape, small=options.quick) as model:
        report = run(options, model, model_facts(model))
    print_arrivals(Console(width=140), report)
    if options.json:
        write_json(options.json, report)
    return int(bool(report["failed"]) or not report["rows"])


if __name__ == "__main__":
    sys.exit(main())
