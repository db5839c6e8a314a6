"""Run the real scheduling code over a pretended model, seed after seed; a seed decides all that happens.

    python -m tests.simulation [--host standalone|vllm] [--hours H | --steps N] [--seed S]

Prints a line a minute: seeds, engine steps, rows computed in them, and distinct states that the scheduler was in. The
first failure ends it with status 1, and with the command that repeats the seed.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

REPORT_S = 60
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

    def add(self, simulation: Any) -> None:
        """Add a seed that was run."""
        self.seeds += 1
        self.steps += simulation.num_steps
        self.rows += simulation.num_rows
        if len(self.states) < MAX_STATES:
            self.states |= simulation.states


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
        totals.add(simulation)
        if time.monotonic() - reported_s >= REPORT_S:
            reported_s += REPORT_S
            report(str(totals))
    return totals, None


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
    options = parser.parse_args(arguments)
    steps = options.steps or (200_000 if options.hours is None else sys.maxsize)
    end = time.monotonic() + 3600 * options.hours if options.hours is not None else float("inf")
    # Some seeds let engines fail on purpose.
    logging.disable(logging.CRITICAL)
    totals, failure = run_seeds(
        options.host,
        itertools.count(options.seed),
        lambda totals: totals.steps >= steps or time.monotonic() >= end,
        lambda line: print(line, flush=True),
    )
    print(f"failed: {failure}" if failure else totals)
    return int(failure is not None)


if __name__ == "__main__":
    sys.exit(main())
