"""Run the real scheduling code over a pretended model, seed after seed; a seed decides all that happens.

    python -m tests.simulation [--host standalone|vllm] [--hours H | --steps N] [--seed S] [--jobs J]

Prints a line a minute: seeds, engine steps, rows computed in them, and distinct states that the scheduler was in. The
first failure ends it with status 1, and with the command that repeats the seed.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

REPORT_S = 60
SEEDS_AT_ONCE = 16
"""That a process runs before it reports."""
MAX_STATES = 20_000_000
"""Hashes that are kept: some 2 GiB."""


@dataclass
class Totals:
    """Over all seeds."""

    seeds: int = 0
    steps: int = 0
    rows: int = 0
    states: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        bound = "at least " if len(self.states) >= MAX_STATES else ""
        return (
            f"{self.seeds} seeds, {self.steps} steps, {self.rows} rows x steps, {bound}{len(self.states)} "
            "distinct states"
        )

    def merge(self, other: Totals) -> None:
        """Add what was run elsewhere."""
        self.seeds += other.seeds
        self.steps += other.steps
        self.rows += other.rows
        if len(self.states) < MAX_STATES:
            self.states |= other.states


def simulation_of(host: str) -> Callable[[int], Any]:
    """Return what makes the simulation of a seed; each host is imported where it is used."""
    if host == "vllm":
        from tests.simulation.plugin import PluginSimulation

        return PluginSimulation
    from tests.simulation.standalone import Simulation

    return Simulation


def run_seeds(
    host: str, seeds: Iterator[int], is_over: Callable[[Totals], bool], report: Callable[[str], None] = print
) -> tuple[Totals, str | None]:
    """Run seeds until one fails or ``is_over``.

    Returns:
        What was run, and how to repeat what failed; None if nothing did.
    """
    make, totals, reported_s = simulation_of(host), Totals(), time.monotonic()
    for seed in seeds:
        if is_over(totals):
            break
        simulation = make(seed)
        try:
            simulation.run()
        except Exception:
            report(traceback.format_exc())
            command = f"python -m tests.simulation --host {host} --seed {seed} --steps 1"
            return totals, f"seed {seed}, step {simulation.num_steps}, {simulation.settings}\n{command}"
        totals.merge(Totals(1, simulation.num_steps, simulation.num_rows, simulation.states))
        if time.monotonic() - reported_s >= REPORT_S:
            reported_s += REPORT_S
            report(str(totals))
    return totals, None


def _run_some(host: str, seeds: range) -> tuple[Totals, str | None, list[str]]:
    lines: list[str] = []
    return *run_seeds(host, iter(seeds), lambda _: False, lines.append), lines


def run_in_processes(
    host: str, seeds: Iterator[int], is_over: Callable[[Totals], bool], num_processes: int
) -> tuple[Totals, str | None]:
    """As ``run_seeds``, in several processes; forked ones hash states alike."""
    totals, reported_s, pending = Totals(), time.monotonic(), set[Any]()
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("fork")) as processes:
        while True:
            while len(pending) < 2 * num_processes and not is_over(totals):
                first = next(seeds) * SEEDS_AT_ONCE
                pending.add(processes.submit(_run_some, host, range(first, first + SEEDS_AT_ONCE)))
            if not pending:
                return totals, None
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for some, failure, lines in (each.result() for each in done):
                if failure is not None:
                    processes.shutdown(wait=False, cancel_futures=True)
                    print(*lines, sep="\n")
                    return totals, failure
                totals.merge(some)
            if time.monotonic() - reported_s >= REPORT_S:
                reported_s += REPORT_S
                print(totals, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if a seed fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", choices=("standalone", "vllm"), default="standalone")
    parser.add_argument("--hours", type=float, help="begin no seed afterwards")
    parser.add_argument(
        "--steps", type=int, help="begin no seed after so many engine steps (default: 200000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args(arguments)
    steps = options.steps or (200_000 if options.hours is None else sys.maxsize)
    end = time.monotonic() + 3600 * options.hours if options.hours is not None else float("inf")
    # Some seeds let engines fail on purpose.
    logging.disable(logging.CRITICAL)

    def is_over(totals: Totals) -> bool:
        return totals.steps >= steps or time.monotonic() >= end

    if options.jobs > 1:
        chunks = itertools.count(options.seed // SEEDS_AT_ONCE)
        totals, failure = run_in_processes(options.host, chunks, is_over, options.jobs)
    else:
        seeds = itertools.count(options.seed)
        totals, failure = run_seeds(options.host, seeds, is_over, lambda line: print(line, flush=True))
    print(f"failed: {failure}" if failure else totals)
    return int(failure is not None)


if __name__ == "__main__":
    sys.exit(main())
