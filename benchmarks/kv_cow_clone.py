"""Time copy-on-write of KV blocks: clone, append one token, free; request by request against all at once.

    python -m benchmarks.kv_cow_clone [--device cuda] [--dtype float16] [--quick] [--json FILE]

Many requests share a part-filled block of a base sequence (a prompt sampled several times, for example), and each is
about to write its next token into it. Per row: batch size; microseconds, median with 10th and 90th percentile, of

    loop          one Python loop over requests and layers: allocate, copy, append, free one by one
    loop_filled   the same, copying only the tokens that the shared block holds
    batched_torch BlockManager plans, torch copies (index_select, index_copy_), kernels.write_kv appends
    batched       rose_backend: BlockManager plans, kernels.block_clone copies, kernels.write_kv appends

in parts: bookkeeping, copy, append, free. Before anything is timed each variant runs once on random data: the base must
stay as it was bit for bit, copies must equal it, new tokens must be there. Every part is synchronised with the device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.support.clone_variants import (
    PARTS,
    BatchedClone,
    Clock,
    CloneCase,
    LoopedClone,
    check_variant,
)
from benchmarks.support.report import device_name, run_facts, write_json
from benchmarks.support.timing import Samples, alternate, no_garbage_collection, spreads
from benchmarks.support.variant_tables import losses, print_losses, print_variants

VARIANTS: dict[str, Callable[[CloneCase, torch.Tensor], Any]] = {
    "loop": LoopedClone,
    "loop_filled": lambda case, cache: LoopedClone(case, cache, filled_only=True),
    "batched_torch": lambda case, cache: BatchedClone(case, cache, torch_copy=True),
    "batched": BatchedClone,
}
OURS = ("batched_torch", "batched")
"""Losses are counted for these, against every variant before them."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="default: %(default)s"
    )
    parser.add_argument(
        "--old-len", type=int, default=1, help="tokens before the clone (default: %(default)s)"
    )
    parser.add_argument("--block-size", type=int, default=64, help="tokens per block (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--heads", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--head-size", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=20, help="at least 3 (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few seconds: two batch sizes, three repeats")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE, too")
    options = parser.parse_args(arguments)
    if options.repeats < 3:
        parser.error(f"--repeats: got {options.repeats}, at least 3 are needed for a spread")
    if options.old_len < 1 or options.old_len % options.block_size == 0:
        parser.error(
            f"--old-len: got {options.old_len}, its last block of {options.block_size} must be part-filled"
        )
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} sees no CUDA device")
    return options


def measure(case: CloneCase, dtype: torch.dtype, device: torch.device, repeats: int) -> dict[str, Any]:
    """Check and time every variant for one batch size; microseconds by variant and part."""
    cache = case.make_cache(dtype, device)
    new_kv = case.make_new_kv(dtype, device)
    for make in VARIANTS.values():
        check_variant(case, lambda cache, make=make: make(case, cache), cache)
    variants = {name: make(case, cache) for name, make in VARIANTS.items()}

    def runner(variant: Any) -> Callable[[], Samples]:
        def run() -> Samples:
            clock = Clock(device)
            variant.run(new_kv, clock)
            samples = {name: [clock.parts_us[name]] for name in PARTS}
            return {**samples, "total": [sum(clock.parts_us.values())]}

        return run

    runs = {name: runner(variant) for name, variant in variants.items()}
    alternate(runs, 2)  # warm up: compilation, first touch of memory
    with no_garbage_collection():
        figures = spreads(alternate(runs, repeats))
    return {"batch": case.batch, "bytes_copied": _copied_bytes(case, dtype), "variants": figures}


def _copied_bytes(case: CloneCase, dtype: torch.dtype) -> int:
    per_token = case.num_layers * 2 * case.num_heads * case.head_size * dtype.itemsize
    return case.batch * case.block_size * per_token


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    torch.manual_seed(0)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    batches, repeats = ((1, 16), 3) if options.quick else (BATCHES, options.repeats)
    shape = {
        "old_len": options.old_len,
        "block_size": options.block_size,
        "num_layers": options.layers,
        "num_heads": options.heads,
        "head_size": options.head_size,
    }
    rows = [measure(CloneCase(batch, **shape), dtype, device, repeats) for batch in batches]
    facts = run_facts()
    facts["machine"]["device"] = device_name(device.type)
    facts["machine"]["torch_threads"] = torch.get_num_threads()
    settings = {**shape, "device": options.device, "dtype": options.dtype, "repeats": repeats}
    report = {
        "benchmark": "kv_cow_clone",
        **facts,
        "settings": {**settings, "quick": options.quick},
        "classic": asdict(CloneCase(16)),
        "losses": losses(rows, OURS),
        "rows": rows,
    }
    title = f"Copy-on-write, {options.dtype} on {facts['machine']['device']}, {shape}, us: median (p10 - p90)"
    print_variants(Console(width=140), rows, PARTS, before="loop", title=title)
    print_losses(report["losses"])
    if options.json:
        write_json(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
