"""Options, medians and tables that ``scheduler`` and ``streaming`` share."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.support.served_requests import METRICS, PERCENTILES

QUICK_MODEL = "models/tiny-gpt2"


def add_run_options(parser: argparse.ArgumentParser, *, num_requests: int) -> None:
    """Add the options; ``set_run_defaults`` completes and checks them."""
    parser.add_argument("--model", help="local checkpoint; default: random weights, GPT-2 124M's shapes")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--dtype", help="default: float16, on a CPU float32")
    parser.add_argument(
        "--num-requests", type=int, metavar="N", help=f"of each run (default: {num_requests})"
    )
    parser.add_argument(
        "--submit-interval-ms", type=float, default=0.0, help="between two requests (default: %(default)s)"
    )
    parser.add_argument(
        "--max-batch-size",
        type=int,
        default=256,
        help="sequences at once, max_num_seqs (default: %(default)s)",
    )
    parser.add_argument("--warmup-runs", type=int, default=1, help="not counted (default: %(default)s)")
    parser.add_argument("--repeat-runs", type=int, default=3, help="counted (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"a few seconds, small sizes on {QUICK_MODEL}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE, too")
    parser.set_defaults(usual_num_requests=num_requests)


def set_run_defaults(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Fill in what depends on the machine and on ``--quick``, and exit with what makes no sense."""
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.dtype = options.dtype or ("float16" if options.device == "cuda" else "float32")
    if options.quick:
        options.model = options.model or QUICK_MODEL
        options.max_batch_size = min(options.max_batch_size, 16)
        options.repeat_runs = min(options.repeat_runs, 2)
    if options.num_requests is None:
        options.num_requests = 8 if options.quick else options.usual_num_requests
    options.model_name = options.model or "random weights, GPT-2 124M's shapes"
    for name, least in (("num_requests", 1), ("max_batch_size", 1), ("warmup_runs", 0), ("repeat_runs", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(options, name)}, at least {least}")
    if options.submit_interval_ms < 0:
        parser.error(f"--submit-interval-ms: got {options.submit_interval_ms}, at least 0")


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each figure's median over the runs."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def print_figures(console: Console, title: str, rows: Iterable[tuple[str, Mapping[str, float]]]) -> None:
    """Print one line per row: milliseconds, and tokens a second."""
    table = Table(title=title)
    table.add_column("")
    percentiles = "/".join(f"p{share}" for share in PERCENTILES)
    labels = {"queue_wait": "queue wait", "prefill": "prefill to first", "latency": "latency"}
    for name in METRICS:
        table.add_column(f"{labels.get(name, name.upper())} {percentiles}", justify="right")
    for name in ("requests/s", "tok/s"):
        table.add_column(name, justify="right")
    for label, row in rows:
        cells = (" / ".join(f"{row[f'p{p}_{name}_ms']:.2f}" for p in PERCENTILES) for name in METRICS)
        speeds = (f"{row['request_throughput']:,.1f}", f"{row['output_throughput']:,.0f}")
        table.add_row(label, *cells, *speeds)
    console.print(table)
