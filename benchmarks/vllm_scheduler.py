"""Time vLLM's scheduler per decode step: with Rose's batched scheduling, without it, and with vLLM's own block manager.

    python -m benchmarks.vllm_scheduler [--quick] [--json benchmarks/results/cpu/vllm_scheduler.json]

What is timed, ``Scheduler.schedule`` and ``Scheduler.update_from_output``, is what the engine core does on the CPU
between two steps of the model. No model runs. Sides are alternated on one core; figures are medians with 10th and 90th
percentile, of whole runs unless all requests just decode. Rose's invariants are recounted after every run.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.reports.parts import scenes_table
from benchmarks.reports.text import publish
from benchmarks.support.cli import check_at_least, new_parser
from benchmarks.support.run_facts import bar, run_facts
from benchmarks.support.timing import alternate, no_garbage_collection, pin_to_one_core, spreads

NUM_STEPS = {"steady": 48, "turnover": 128, "saturated": 128}
"""Scene -> timed steps: all requests decode; requests come and go; more requests than may run."""


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    default = [1, 8, 32, 128, 256]
    add("--batches", type=int, nargs="+", default=default, help=f"running requests (default: {default})")
    add("--block-size", type=int, default=16, help="tokens per block (default: %(default)s)")
    add("--repeats", type=int, default=6, help="runs of each side and scene (default: %(default)s)")
    options = parser.parse_args(arguments)
    check_at_least(parser, options, 1, "batches", "repeats")
    check_at_least(parser, options, 2, "block_size")
    return options


def run_scenes(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures of every scene by number of requests and side."""
    # vLLM takes seconds to import; --help need not wait for it.
    from benchmarks.support.scheduler_loops import SIDES, SchedulerLoop

    def run(side: str, batch: int, scene: str) -> dict[str, list[float]]:
        samples = loops[side].run(batch, NUM_STEPS[scene] // (4 if options.quick else 1), scene)
        if side != "stock":
            loops[side].scheduler.kv_cache_manager.manager.check_integrity()
        return samples

    loops = {side: SchedulerLoop(side, options.block_size, max(options.batches), folder) for side in SIDES}
    scenes: dict[str, Any] = {}
    with no_garbage_collection():
        for scene in NUM_STEPS:
            for batch in options.batches:
                sides = {side: functools.partial(run, side, batch, scene) for side in SIDES}
                alternate(sides, 1)
                samples = alternate(sides, options.repeats)
                scenes.setdefault(scene, {})[str(batch)] = spreads(samples)
    return scenes


def judge(scenes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the goals this benchmark has and whether this run met them."""
    bars = []
    for scene, batches in scenes.items():
        for batch, sides in batches.items():
            rose, stock = (sides[side]["both"]["median"] for side in ("rose", "stock"))
            name = f"{scene}, {batch} requests"
            bars.append(bar(f"{name}, Rose's time over vLLM's", rose / stock, 1.0, "times"))
            if name == "steady, 256 requests":
                bars.append(bar(f"{name}, both", rose, 500, "us"))
    return bars


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = parse_options(arguments)
    facts = run_facts(pin_to_one_core())
    with tempfile.TemporaryDirectory() as folder:
        scenes = run_scenes(options, Path(folder))
    report = {
        "benchmark": "vllm_scheduler",
        **facts,
        "settings": {name: getattr(options, name) for name in ("batches", "block_size", "repeats", "quick")},
        "bars": judge(scenes),
        "scenes": scenes,
    }
    publish(report, scenes_table(report), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
