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
from collections.abc import Sequence
from typing import Any

from benchmarks.reports.parts import block_manager_table, scenes_table
from benchmarks.reports.text import publish
from benchmarks.support.cli import check_at_least, new_parser
from benchmarks.support.run_facts import run_facts
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


def losses(scenes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every comparison of this run in which a Rose side took longer than vLLM's manager."""
    steady = scenes["steady_decode"]
    compared = [
        (f"steady_decode: {phase}", side, steady[side][phase], steady["stock"][phase])
        for side in ("rose_core", "rose_in_vllm")
        for phase in ("inside", "rolls_over", "fills", "whole_block")
    ]
    for scene, axis, figure in (
        ("pool_size", "num_blocks", "whole_block_us_per_row"),
        ("sequence_length", "num_tokens", "whole_block_us_per_row"),
        ("among_many", "num_prompts", "lookup_us"),
    ):
        points = {(point[axis], point["side"]): point[figure] for point in scenes[scene] if figure in point}
        compared += [
            (f"{scene}: {axis} {value:,}", side, rose, points[value, "stock"])
            for (value, side), rose in points.items()
            if side != "stock" and (value, "stock") in points
        ]
    core, in_vllm, stock = (scenes["long_prompt"][side] for side in ("rose_core", "rose_in_vllm", "stock"))
    compared += [
        ("long_prompt: hashes ready", "rose_core", core["match"], stock["get_computed_blocks.again"]),
        ("long_prompt: hashing", "rose_core", core["hash_blocks"], stock["hash_request"]),
    ]
    for time in ("first", "again"):
        rose, other = (side[f"get_computed_blocks.{time}"] for side in (in_vllm, stock))
        compared.append((f"long_prompt: get_computed_blocks, {time} time", "rose_in_vllm", rose, other))
    return [
        {"name": name, "side": side, "rose_us": rose["median"], "stock_us": stock["median"]}
        for name, side, rose, stock in compared
        if rose["median"] > stock["median"]
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = parse_options(arguments)
    facts = run_facts(pin_to_one_core())
    # vLLM takes seconds to import; --help need not wait for it.
    from benchmarks.support.block_manager_scenes import SCENES

    with no_garbage_collection():
        scenes = {scene.__name__: scene(options) for scene in SCENES}
    report = {
        "benchmark": "block_manager",
        **facts,
        "settings": {name: getattr(options, name) for name in ("rows", "block_size", "repeats", "quick")},
        "losses": losses(scenes),
        "scenes": scenes,
    }
    publish(report, f"{scenes_table(report)}\n\n{block_manager_table(report)}", options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
