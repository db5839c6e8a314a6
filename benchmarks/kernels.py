"""Time the GPU kernels on cold inputs, and say how near to the speed of memory they come.

    python -m benchmarks.kernels [--match decode] [--repeats 50] [--json FILE]

Microseconds are per launch, from replays of a captured graph that rotates among input sets larger than the L2 cache:
20th, 50th and 80th percentile. GB/s counts each input and output once, by the median; the last columns divide that by
what a large copy reaches on the same device, and count the attention products as two operations each.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernel_cases.timing import KernelCase, copy_bandwidth, time_case

FAMILIES = ("attention", "clone", "elementwise", "sampler")


def measure(case: KernelCase, repeats: int, copy: float) -> dict[str, float | str]:
    """Return one row of the table."""
    times = time_case(case, repeats)
    p20, p50, p80 = (times[int(share * (len(times) - 1))] for share in (0.2, 0.5, 0.8))
    rate = case.num_bytes / p50 * 1e6
    return {
        "case": case.name,
        "p20_us": p20,
        "p50_us": p50,
        "p80_us": p80,
        "gb_per_s": rate / 1e9,
        "copy_share": rate / copy,
        "tflop_per_s": case.flops / p50 / 1e6,
    }


def print_table(rows: list[dict[str, float | str]], copy: float) -> None:
    """Print all rows for people."""
    table = Table(title=f"{torch.cuda.get_device_name()}, copy {copy / 1e12:.2f} TB/s")
    for name in ("case", "p20 us", "p50 us", "p80 us", "GB/s", "of copy", "TFLOP/s"):
        table.add_column(name, justify="left" if name == "case" else "right", no_wrap=True)
    for row in rows:
        times = (f"{row[name]:.2f}" for name in ("p20_us", "p50_us", "p80_us"))
        flops = f"{row['tflop_per_s']:.0f}" if row["tflop_per_s"] else ""
        table.add_row(str(row["case"]), *times, f"{row['gb_per_s']:.0f}", f"{row['copy_share']:.1%}", flops)
    Console(width=120).print(table)


def main() -> int:
    """Time every case whose name matches."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--repeats", type=int, default=50, help="graph replays per case (default 50)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"needs a CUDA device; torch {torch.__version__} sees none", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    copy = copy_bandwidth()
    rows = []
    for family in FAMILIES:
        for case in importlib.import_module(f"benchmarks.kernel_cases.{family}").cases():
            if args.match in case.name:
                rows.append(measure(case, args.repeats, copy))
                torch.cuda.empty_cache()
    print_table(rows, copy)
    if args.json:
        args.json.write_text(json.dumps({"copy_bytes_per_s": copy, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
