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

from rich.console import Console
from rich.table import Table

from benchmarks.support.report import bar, run_facts, write_json
from benchmarks.support.timing import alternate, no_garbage_collection, pin_to_one_core, spreads

SCENES = {
    "steady": "All requests decode",
    "turnover": "Requests come and go, each lives for 128 steps",
    "saturated": "More requests than may run, each makes 128 tokens on average",
}
_NUM_STEPS = {"steady": 48, "turnover": 128, "saturated": 128}
_NAMES = {"rose": "Rose", "rose_unbatched": "Rose, batched_scheduling off", "stock": "vLLM"}


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[1, 8, 32, 128, 256],
        help="numbers of running requests (default: 1 8 32 128 256)",
    )
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=6, help="runs of each side and scene (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="few steps, rough figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE, too")
    options = parser.parse_args(arguments)
    if min(*options.batches, options.repeats, 1) < 1 or options.block_size < 2:
        parser.error("--batches and --repeats must be at least 1, --block-size at least 2")
    return options


def run_scenes(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures of every scene by number of requests and side."""
    # vLLM takes seconds to import; --help need not wait for it.
    from benchmarks.support.scheduler_loops import SIDES, SchedulerLoop

    def run(side: str, batch: int, scene: str) -> dict[str, list[float]]:
        samples = loops[side].run(batch, _NUM_STEPS[scene] // (4 if options.quick else 1), scene)
        if side != "stock":
            loops[side].scheduler.kv_cache_manager.manager.check_integrity()
        return samples

    loops = {side: SchedulerLoop(side, options.block_size, max(options.batches), folder) for side in SIDES}
    scenes: dict[str, Any] = {}
    with no_garbage_collection():
        for scene in SCENES:
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
            bars.append(
                bar(f"{scene}, {batch} requests, Rose's time over vLLM's", rose / stock, 1.0, "times")
            )
            if scene == "steady" and batch == "256":
                bars.append(bar(f"{scene}, {batch} requests, both", rose, 500, "us"))
    return bars


def print_report(console: Console, report: dict[str, Any]) -> None:
    for scene, batches in report["scenes"].items():
        table = Table(
            "requests", "part", *_NAMES.values(), "vLLM / Rose", title=f"{SCENES[scene]}, us per step"
        )
        for batch, sides in batches.items():
            for part in ("schedule", "update_from_output", "both"):
                figures = [sides[side][part] for side in _NAMES]
                cells = [f"{f['median']:,.0f} ({f['p10']:,.0f} - {f['p90']:,.0f})" for f in figures]
                ratio = figures[-1]["median"] / figures[0]["median"]
                table.add_row(batch if part == "schedule" else "", part, *cells, f"{ratio:.2f}")
        console.print(table)
    for entry in report["bars"]:
        if not entry["met"]:
            console.print(
                f"NOT MET: {entry['name']}: {entry['value']:.2f}, limit {entry['limit']} {entry['unit']}"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    facts = run_facts(pin_to_one_core())
    with tempfile.TemporaryDirectory() as folder:
        scenes = run_scenes(options, Path(folder))
    settings = {name: getattr(options, name) for name in ("batches", "block_size", "repeats", "quick")}
    report = {
        "benchmark": "vllm_scheduler",
        **facts,
        "settings": settings,
        "bars": judge(scenes),
        "scenes": scenes,
    }
    print_report(Console(), report)
    if options.json:
        write_json(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
