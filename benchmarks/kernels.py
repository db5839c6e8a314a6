"""Time the GPU kernels on cold inputs beside their peers, once their tests have passed on this machine.

    python -m benchmarks.kernels --prove [--families decode sampler] [--match B=1] [--json FILE]
    python -m benchmarks.kernels --quick      on a CPU, seconds: small cases, Rose's operations in plain torch

Microseconds are per launch, from replays of captured graphs that rotate among input sets larger than the L2 cache,
taken in turns by all sides: 20th, 50th and 80th percentile. GB/s counts each input and output once, by the median; "of
copy" divides that by what a large copy reaches on the same device. A peer's "x Rose" is its median over Rose's: above 1
Rose is faster. It is shown only for families whose tests have passed, all of them, with these sources, versions and
this GPU: ``--prove`` runs them first, and what came of it is kept. Peers that are not installed are named and left
out; a peer whose result differs from Rose's is named and not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kernel_cases import FAMILIES, case, cases_of, small
from benchmarks.kernel_cases.case import ROSE, KernelCase, LaunchGraph
from benchmarks.kernel_cases.small import LaunchLoop
from benchmarks.reports.parts import all_kernels_table
from benchmarks.reports.text import publish
from benchmarks.support.cli import check_at_least, new_parser
from benchmarks.support.proof import DEFAULT_FOLDER, machine_facts, prove, source_digest, unproved_because
from benchmarks.support.run_facts import run_facts
from benchmarks.support.timing import alternate


def main(arguments: list[str] | None = None) -> int:
    """Time every chosen case; the status is 1 if a peer disagreed or broke, or a family is unproved."""
    options = parse_options(arguments)
    if not options.quick and not torch.cuda.is_available():
        message = f"needs a CUDA device; torch {torch.__version__} sees none (--quick needs none)"
        print(message, file=sys.stderr)
        return 1
    if options.prove:
        prove([FAMILIES[family] for family in options.families], options.proofs)
    with small.on_cpu() if options.quick else contextlib.nullcontext():
        report = time_cases(options)
    publish(report, all_kernels_table(report), options.json)
    broken = any("error" in side for row in report["rows"] for side in row["sides"].values())
    unproved = any(state["unproved_because"] for state in report["families"].values())
    return int(broken or (unproved and not options.quick))


def time_cases(options: argparse.Namespace) -> dict[str, Any]:
    """Return the report. A short run times the small cases of every chosen family on the CPU."""
    torch.manual_seed(0)
    if options.quick:
        machine = {"gpu": "none, on a CPU", "driver": "none"}
        unproved: dict[str, str | None] = dict.fromkeys(options.families, "a short run on a CPU")
        copy = small.copy_bandwidth()
    else:
        machine = machine_facts()
        unproved = {
            name: unproved_because(FAMILIES[name], options.proofs, machine) for name in options.families
        }
        copy = case.copy_bandwidth()
    rows = []
    for family in options.families:
        for timed in (small.small_cases if options.quick else cases_of)(family):
            if re.search(options.match, timed.name):
                row = measure(timed, options, copy, compare=unproved[family] is None)
                rows.append({"family": family, **row})
                print(timed.name, file=sys.stderr, flush=True)
                if not options.quick:
                    torch.cuda.empty_cache()
    return {
        **run_facts(),
        "commit": options.commit,
        "kernels_digest": source_digest(),
        "gpu": machine["gpu"],
        "driver": machine["driver"],
        "quick": options.quick,
        "repeats": options.repeats,
        "samples_per_repeat": options.samples,
        "copy_bytes_per_s": copy,
        "families": {
            name: {"tests": [FAMILIES[name]], "unproved_because": why} for name, why in unproved.items()
        },
        "missing_peers": case.MISSING,
        "rows": rows,
    }


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    add("--match", default="", help="only cases whose name has a match of this expression")
    add("--repeats", type=int, default=5, help="turns that every side takes (default 5)")
    add("--samples", type=int, default=5, help="measurements per turn (default 5)")
    add("--prove", action="store_true", help="run the families' tests first")
    add("--proofs", type=Path, default=DEFAULT_FOLDER, help="folder of the tests' records")
    add("--commit", help="of the sources, to be recorded")
    options = parser.parse_args(arguments)
    if options.quick and options.prove:
        parser.error("--prove: --quick shows no speed that could be compared")
    check_at_least(parser, options, 3, "repeats")
    check_at_least(parser, options, 1, "samples")
    return options


def measure(timed: KernelCase, options: argparse.Namespace, copy: float, *, compare: bool) -> dict[str, Any]:
    """Return one row: what each side took, or what is wrong with it.

    Args:
        copy: bandwidth of a copy in bytes per second.
        compare: the family's tests have passed.
    """
    contest = timed.make(2 if options.quick else timed.num_sets)
    sides: dict[str, Any] = {}
    # All are compared before any is timed: some work in place, and on what others share.
    for name in contest.sides:
        with tolerating(name, sides):
            if name != ROSE and (complaint := contest.disagreement(name)):
                sides[name] = {"error": complaint}
    runs = {}
    for name, launches in contest.sides.items():
        if name not in sides:
            with tolerating(name, sides):
                graph = LaunchLoop(launches) if options.quick else LaunchGraph(launches)
                runs[name] = lambda graph=graph: {"us": [graph.sample() for _ in range(options.samples)]}
            # Collections are slow with a peer's many objects around, and every capture makes one.
            if not options.quick:
                gc.freeze()
    for name, samples in alternate(runs, options.repeats).items():
        p20, p50, p80 = np.percentile(samples["us"], (20, 50, 80)).tolist()
        rate = timed.num_bytes / p50 * 1e6
        sides[name] = {
            "p20_us": p20,
            "p50_us": p50,
            "p80_us": p80,
            "gb_per_s": rate / 1e9,
            "copy_share": rate / copy,
            "tflop_per_s": timed.flops / p50 / 1e6,
        }
        if name != ROSE:
            sides[name]["times_rose"] = p50 / sides[ROSE]["p50_us"] if compare else None
    return {"case": timed.name, "num_bytes": timed.num_bytes, "flops": timed.flops, "sides": sides}


@contextlib.contextmanager
def tolerating(side: str, sides: dict[str, Any]) -> Iterator[None]:
    """Note how a peer breaks: that is no reason to lose the other figures. Rose has to work."""
    try:
        yield
    except Exception as error:
        if side == ROSE:
            raise
        sides[side] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


if __name__ == "__main__":
    sys.exit(main())
