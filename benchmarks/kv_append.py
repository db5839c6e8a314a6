"""Time how new tokens get into the KV cache: appended one by one, or reserved and stored by the attention kernel.

    python -m benchmarks.kv_append [--device cuda] [--dtype float16] [--quick] [--json FILE]

Every sequence of a batch decodes one token. Per row: batch size; microseconds, median with 10th and 90th percentile, of

    append           one Python loop over sequences and layers: make room, store K/V, then one attention per layer
    reserve_write    rose_backend with fused_kv_append off: BlockManager reserves, kernels.write_kv stores per layer
    reserve_fused    rose_backend: BlockManager reserves, kernels.paged_decode stores what it computes with

in parts: bookkeeping, append, attention (of all layers). On a GPU also both batched ones replayed from a CUDA graph, as
the engine runs them: ``graph``, without bookkeeping. Before anything is timed all of them are compared with plain
attention, step by step. Every part is synchronised with the device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.support.append_variants import (
    PARTS,
    AppendCase,
    InKernelAppend,
    LoopedAppend,
    ReservedAppend,
    check_variants,
)
from benchmarks.support.clone_variants import Clock
from benchmarks.support.report import device_name, run_facts, write_json
from benchmarks.support.timing import Samples, alternate, no_garbage_collection, spread, spreads
from benchmarks.support.variant_tables import losses, print_losses, print_variants

VARIANTS: dict[str, Callable[[AppendCase, torch.Tensor], Any]] = {
    "append": LoopedAppend,
    "reserve_write": ReservedAppend,
    "reserve_fused": InKernelAppend,
}
OURS = ("reserve_write", "reserve_fused")
"""Losses are counted for these, against every variant before them."""
BATCHES = (1, 8, 32, 128, 256)
WARM_UPS = 3
REPLAYS = 20


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="default: %(default)s"
    )
    parser.add_argument("--context", type=int, default=512, help="tokens before (default: %(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--heads", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--head-size", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=20, help="at least 3 (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few seconds: two batch sizes, three repeats")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE, too")
    options = parser.parse_args(arguments)
    if options.repeats < 3:
        parser.error(f"--repeats: got {options.repeats}, at least 3 are needed for a spread")
    for name in ("context", "block_size", "layers", "heads", "head_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(options, name)}, at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} sees no CUDA device")
    return options


def measure(case: AppendCase, dtype: torch.dtype, device: torch.device, repeats: int) -> dict[str, Any]:
    """Time every variant for one batch size; microseconds by variant and part."""
    cache = case.make_cache(dtype, device)
    projections = case.make_projections(dtype, device)
    variants = {name: make(case, cache) for name, make in VARIANTS.items()}

    def runner(variant: Any) -> Callable[[], Samples]:
        def run() -> Samples:
            clock = Clock(device)
            variant.run(projections, clock)
            samples = {name: [clock.parts_us[name]] for name in PARTS}
            return {**samples, "total": [sum(clock.parts_us.values())]}

        return run

    runs = {name: runner(variant) for name, variant in variants.items()}
    alternate(runs, WARM_UPS)  # compilation, first touch of memory
    with no_garbage_collection():
        figures = spreads(alternate(runs, repeats))
    if device.type == "cuda":
        for name in ("reserve_write", "reserve_fused"):
            figures[name]["graph"] = spread(replayed_us(variants[name], projections))
    return {"batch": case.batch, "variants": figures}


def replayed_us(variant: Any, projections: torch.Tensor) -> list[float]:
    """Capture append and attention of one step in a CUDA graph; return microseconds of each replay."""
    table = variant.make_room()
    device_table = torch.from_numpy(table).cuda()
    lengths = torch.full((len(table),), variant.length, dtype=torch.int32, device="cuda")
    slots = variant.slots(table)

    def step() -> None:
        variant.store(projections, slots)
        variant.attend(projections, device_table, lengths)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(REPLAYS + WARM_UPS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times[WARM_UPS:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, time, print, write."""
    options = parse_options(arguments)
    torch.manual_seed(0)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    batches, repeats = ((1, 4), 3) if options.quick else (BATCHES, options.repeats)
    shape = {
        "context": options.context,
        "max_steps": repeats + WARM_UPS + 1,
        "block_size": options.block_size,
        "num_layers": options.layers,
        "num_heads": options.heads,
        "head_size": options.head_size,
    }
    small = replace(AppendCase(3, **shape), context=min(options.context, 30), max_steps=4, num_layers=1)
    check_variants(VARIANTS, small, dtype, device)
    rows = [
        measure(AppendCase(batch, **shape), dtype, device, repeats)
        for batch in track(batches, "batch sizes", console=Console(stderr=True))
    ]
    facts = run_facts()
    facts["machine"]["device"] = device_name(device.type)
    settings = {**shape, "device": options.device, "dtype": options.dtype, "repeats": repeats}
    report = {
        "benchmark": "kv_append",
        **facts,
        "settings": {**settings, "quick": options.quick},
        "losses": losses(rows, OURS),
        "rows": rows,
    }
    title = f"New tokens into the cache, {options.dtype} on {facts['machine']['device']}, {shape}, us"
    print_variants(Console(width=140), rows, PARTS, before="append", title=title)
    print_losses(report["losses"])
    if options.json:
        write_json(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
