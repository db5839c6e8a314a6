"""Count prefix hits of Rose's block manager beside vLLM's, for models with windows or states; no model, one CPU core.

    python -m benchmarks.prefix_hits [--quick] [--json benchmarks/results/cpu/prefix_hits.json]
    python -m benchmarks.prefix_hits --states [--quick] [--json benchmarks/results/cpu/state_hits.json]

The same requests go through vLLM's KVCacheManager and Rose's in its place, both with one KV cache group that keeps
everything and one with a sliding window, or Qwen3.5's three with states, and as many blocks on both sides: shares of
what vLLM's manager fills where nothing is evicted. Everything is made up from fixed seeds, so every run gives the same
numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.reports.parts import prefix_hits_table, state_hits_table
from benchmarks.reports.text import publish
from benchmarks.support.cli import new_parser
from benchmarks.support.run_facts import run_facts

WINDOWS = (128, 1_024, 4_096)
SHARES = (0.25, 0.5, 0.75, 1.0)
ENDLESS = 1_000_000
"""Blocks that no trace fills."""


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = new_parser(__doc__)
    parser.add_argument("--states", action="store_true", help="Qwen3.5's states in place of sliding windows")
    return parser.parse_args(arguments)


def count_hits(requests: Any, window: int) -> list[dict[str, Any]]:
    """Return the hits of both sides for each size of the pool."""
    from benchmarks.support.prefix_host import SIDES, PrefixHost, make_manager

    longest = max(len(request.prompt) + request.num_outputs for request in requests)
    endless = make_manager("vllm", ENDLESS, window, longest)
    PrefixHost(endless).run(requests)
    num_needed = len(endless.block_pool.cached_block_hash_to_block)
    points = []
    for share in SHARES:
        point: dict[str, Any] = {"window": window, "share": share, "num_blocks": round(share * num_needed)}
        for side in SIDES:
            host = PrefixHost(make_manager(side, 1 + point["num_blocks"], window, longest))
            host.run(requests)
            point[side] = {"hit_tokens": host.hit_tokens, "preemptions": host.num_preemptions}
            point["prompt_tokens"] = host.prompt_tokens
        points.append(point)
    return points


def count_state_hits(requests: Any) -> list[dict[str, Any]]:
    """Return the hits of both sides with Qwen3.5's groups, for each size of the pool."""
    from benchmarks.support.prefix_host import (
        SIDES,
        STATE_BLOCK_SIZE,
        PrefixHost,
        make_state_manager,
        split_of,
    )

    longest = max(len(request.prompt) + request.num_outputs for request in requests)

    def run(side: str, num_blocks: int) -> PrefixHost:
        manager = make_state_manager(side, num_blocks, longest)
        host = PrefixHost(manager, STATE_BLOCK_SIZE, split_of(side, manager))
        host.run(requests)
        return host

    num_needed = len(run("vllm", ENDLESS).manager.block_pool.cached_block_hash_to_block)
    points = []
    for share in SHARES:
        point: dict[str, Any] = {"share": share, "num_blocks": round(share * num_needed)}
        for side in SIDES:
            host = run(side, 1 + point["num_blocks"])
            point[side] = {
                "hit_tokens": host.hit_tokens,
                "shared_hit_tokens": host.shared_hit_tokens,
                "preemptions": host.num_preemptions,
            }
            point["prompt_tokens"], point["shared_tokens"] = host.prompt_tokens, host.shared_tokens
        points.append(point)
    return points


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, print, write."""
    options = parse_options(arguments)
    facts = run_facts()
    from benchmarks.support.prefix_traces import STATE_TRACES, TRACES

    points = []
    for name, make in (STATE_TRACES if options.states else TRACES).items():
        requests = make(0.2 if options.quick else 1.0)
        if options.states:
            points += [{"trace": name, **point} for point in count_state_hits(requests)]
        for window in () if options.states else WINDOWS:
            points += [{"trace": name, **point} for point in count_hits(requests, window)]
    name, table = "prefix_hits", prefix_hits_table
    if options.states:
        name, table = "state_hits", state_hits_table
    report = {"benchmark": name, **facts, "settings": {"quick": options.quick}, "points": points}
    publish(report, table(report), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
