"""Time Rose's block manager beside vLLM's, in one run on one core.

    python -m benchmarks.block_manager [--quick] [--json benchmarks/results/cpu/block_manager.json]

Three sides, alternated: Rose's BlockManager as its own engine calls it (rose_core), the same behind the interface of
vLLM's KVCacheManager (rose_in_vllm), and vLLM's KVCacheManager (stock). Figures are medians with 10th and 90th
percentile; times of decode steps are for all rows together unless they say "per row". Rose's invariants are recounted
after the decode scenes, so a fast wrong answer fails. `python -m benchmarks.report` draws the curves.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.reports.parts import block_manager_table, scenes_table
from benchmarks.reports.text import publish
from benchmarks.support.cli import check_at_least, new_parser
from benchmarks.support.run_facts import bar, run_facts
from benchmarks.support.timing import no_garbage_collection, pin_to_one_core


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--rows", type=int, default=256, help="running requests (default: %(default)s)")
    add("--block-size", type=int, default=16, help="tokens per block (default: %(default)s)")
    add("--repeats", type=int, default=5, help="of each scene, at least 3 (default: %(default)s)")
    options = parser.parse_args(arguments)
    check_at_least(parser, options, 3, "repeats")
    check_at_least(parser, options, 1, "rows")
    check_at_least(parser, options, 2, "block_size")
    return options


def run_scenes(options: argparse.Namespace) -> dict[str, Any]:
    """Run every scene and return its figures by name."""
    # vLLM takes seconds to import; --help need not wait for it.
    from benchmarks.support import block_manager_scenes as makes

    rows, size, repeats, quick = options.rows, options.block_size, options.repeats, options.quick
    cycles = 1 if quick else 12
    pool_sizes = [10**3, 10**4] if quick else [10**3, 10**4, 10**5, 10**6, 10**7]
    lengths = [16, 1024] if quick else [16, 128, 1024, 8192, 32_768, 131_072]
    counts = [10, 100] if quick else [10, 100, 1000, 10_000, 100_000]
    lookups = 10 * repeats if quick else 100 * repeats
    num_copies = repeats * (4 if quick else 40)
    scenes: dict[str, Callable[[], Any]] = {
        "steady_decode": lambda: makes.steady_decode(rows, size, repeats, num_cycles=cycles),
        "copy_on_write": lambda: makes.all_copy_on_write(rows, size, num_copies),
        "pool_size": lambda: makes.cost_over_pool_size(pool_sizes, rows, size, repeats),
        "sequence_length": lambda: makes.cost_over_length(lengths, rows, size, repeats),
        "long_prompt": lambda: makes.long_prompt(4096, size, lookups),
        "among_many": lambda: makes.among_many(counts, size, lookups),
    }
    figures = {}
    for name, scene in scenes.items():
        start = time.perf_counter()
        figures[name] = scene()
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return figures


def judge(scenes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the goals this benchmark has and whether this run met them. They are set for 256 rows, blocks of 16."""
    steady = scenes["steady_decode"]
    core, stock = steady["rose_core"]["inside"]["median"], steady["stock"]["inside"]["median"]
    return [
        bar("decode inside blocks, reserve + commit", core, 40, "us"),
        bar("decode inside blocks, vLLM's time over Rose's", stock / core, 20, "times", at_least=True),
        bar("every row rolls over, reserve", steady["rose_core"]["rolls_over.reserve"]["median"], 150, "us"),
        bar("every row copies on write, reserve + plan", scenes["copy_on_write"]["median"], 250, "us"),
        bar(
            "lookup of 256 blocks, hashes given",
            scenes["long_prompt"]["rose_core"]["match"]["median"],
            150,
            "us",
        ),
    ]


def losses(scenes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every comparison of this run in which a Rose side took longer than vLLM's manager."""
    pairs: list[tuple[str, str, float, float]] = []
    steady = scenes["steady_decode"]
    for side in ("rose_core", "rose_in_vllm"):
        for phase in ("inside", "rolls_over", "fills", "whole_block"):
            times = (steady[name][phase]["median"] for name in (side, "stock"))
            pairs.append((f"steady_decode: {phase}", side, *times))
    for scene, axis, figure in (
        ("pool_size", "num_blocks", "whole_block_us_per_row"),
        ("sequence_length", "num_tokens", "whole_block_us_per_row"),
        ("among_many", "num_prompts", "lookup_us"),
    ):
        stock = {point[axis]: point for point in scenes[scene] if point["side"] == "stock"}
        for point in scenes[scene]:
            other = stock[point[axis]]
            if point["side"] != "stock" and figure in point and figure in other:
                name = f"{scene}: {axis} {point[axis]:,}"
                pairs.append((name, point["side"], point[figure]["median"], other[figure]["median"]))
    lookup = scenes["long_prompt"]
    ready = lookup["stock"]["get_computed_blocks.again"]["median"]
    pairs.append(("long_prompt: hashes ready", "rose_core", lookup["rose_core"]["match"]["median"], ready))
    for figure in ("first", "again"):
        times = (
            lookup[side][f"get_computed_blocks.{figure}"]["median"] for side in ("rose_in_vllm", "stock")
        )
        pairs.append((f"long_prompt: get_computed_blocks, {figure} time", "rose_in_vllm", *times))
    hashing = (lookup["rose_core"]["hash_blocks"]["median"], lookup["stock"]["hash_request"]["median"])
    pairs.append(("long_prompt: hashing", "rose_core", *hashing))
    return [
        {"name": name, "side": side, "rose_us": rose, "stock_us": stock}
        for name, side, rose, stock in pairs
        if rose > stock
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = parse_options(arguments)
    facts = run_facts(pin_to_one_core())
    with no_garbage_collection():
        scenes = run_scenes(options)
    settings = {name: getattr(options, name) for name in ("rows", "block_size", "repeats", "quick")}
    report = {
        "benchmark": "block_manager",
        **facts,
        "settings": settings,
        "bars": judge(scenes),
        "losses": losses(scenes),
        "scenes": scenes,
    }
    publish(report, f"{scenes_table(report)}\n\n{block_manager_table(report)}", options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
