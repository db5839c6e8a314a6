"""Time Rose's block manager beside vLLM's, in one run on one core.

    python -m benchmarks.block_manager [--quick] [--json benchmarks/results/cpu/block_manager.json]

Three sides, alternated: Rose's BlockManager as its own engine calls it (rose_core), the same behind the interface of
vLLM's KVCacheManager (rose_in_vllm), and vLLM's KVCacheManager (stock). Figures are medians with 10th and 90th
percentile; times of decode steps are for all rows together unless they say "per row". Rose's invariants are recounted
after the decode scenes, so a fast wrong answer fails. `python -m benchmarks.report` draws the curves.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.support.block_manager_tables import print_report
from benchmarks.support.report import bar, run_facts, write_json
from benchmarks.support.timing import no_garbage_collection, pin_to_one_core


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256, help="running requests (default: %(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=5, help="of each scene, at least 3 (default: %(default)s)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few seconds: small pools, few repeats, rough figures"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE, too")
    options = parser.parse_args(arguments)
    if options.repeats < 3:
        parser.error(f"--repeats: got {options.repeats}, at least 3 are needed for a spread")
    if options.rows < 1 or options.block_size < 2:
        parser.error("--rows must be at least 1, --block-size at least 2")
    return options


def run_scenes(options: argparse.Namespace) -> dict[str, Any]:
    """Run every scene and return its figures by name."""
    # vLLM takes seconds to import; --help need not wait for it.
    from benchmarks.support import decode_scenes, lookup_scenes

    rows, size, repeats, quick = options.rows, options.block_size, options.repeats, options.quick
    cycles = 1 if quick else 12
    pool_sizes = [10**3, 10**4] if quick else [10**3, 10**4, 10**5, 10**6, 10**7]
    lengths = [16, 1024] if quick else [16, 128, 1024, 8192, 32_768, 131_072]
    counts = [10, 100] if quick else [10, 100, 1000, 10_000, 100_000]
    lookups = 10 * repeats if quick else 100 * repeats
    decode = functools.partial(decode_scenes.steady_decode, rows, size, repeats, num_cycles=cycles)
    num_copies = repeats * (4 if quick else 40)
    scenes: dict[str, Callable[[], Any]] = {
        "steady_decode": decode,
        "decode_evicting": lambda: decode(evicting=True),
        "decode_with_lookups": lambda: decode(lookup=True),
        "copy_on_write": lambda: decode_scenes.all_copy_on_write(rows, size, num_copies),
        "pool_size": lambda: decode_scenes.cost_over_pool_size(pool_sizes, rows, size, repeats),
        "sequence_length": lambda: decode_scenes.cost_over_length(lengths, rows, size, repeats),
        "long_prompt": lambda: lookup_scenes.long_prompt(4096, size, lookups),
        "among_many": lambda: lookup_scenes.among_many(counts, size, lookups),
        "memory_per_block": lambda: lookup_scenes.memory_per_block(2049 if quick else 16_385, size),
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
    for scene in ("steady_decode", "decode_evicting", "decode_with_lookups"):
        for side in ("rose_core", "rose_in_vllm"):
            for phase in ("inside", "rolls_over", "fills", "whole_block"):
                if side in scenes[scene]:
                    times = (scenes[scene][name][phase]["median"] for name in (side, "stock"))
                    pairs.append((f"{scene}: {phase}", side, *times))
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
    print_report(Console(), report)
    if options.json:
        write_json(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
