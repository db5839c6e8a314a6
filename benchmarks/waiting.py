"""Measure what it is worth to wait for a prefix that another request computes in the same step.

    python -m benchmarks.waiting [--host rose | rose-in-vllm] [--shape llama-1b] [--json FILE] [--quick]

Bursts come in at one moment: --sharing requests with --shared tokens in common and a tail of their own, and between
them prompts that share nothing. Each burst is played twice, on an empty prefix cache: those that share wait for the
first of them ("wait"), or all compute what they share ("at once"). Sides are alternated; the engine runs in this
process, one step after the other, and time counts from the first step to the first token as the caller sees it.

TTFT is given for those that share and for the others, with the time of the whole burst and the prompt tokens that were
computed. A threshold chooses a side for each burst: wait if at least so many tokens are shared. Per threshold the
report has the geometric mean of each figure over all bursts, over that of waiting never.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.support.checkpoint import GPT2_124M, SHAPES, checkpoint, model_facts
from benchmarks.support.compare_options import QUICK_MODEL
from benchmarks.support.engines import EngineOptions
from benchmarks.support.report import device_name, run_facts, write_json
from benchmarks.support.stepped_hosts import HOSTS, SteppedHost
from benchmarks.support.workload import random_prompts
from rose_backend.block_manager.prefixes_under_way import MIN_TOKENS_WORTH_WAITING

NEVER = 1 << 30
THRESHOLDS = (16, 32, 48, 64, 100, 128, 256)
FIGURES = (
    "ttft_sharing_p50_ms",
    "ttft_sharing_p90_ms",
    "ttft_others_p50_ms",
    "ttft_others_p90_ms",
    "total_ms",
)
SIDES = ("wait", "at once")
MAX_NUM_SEQS = 64


@dataclass(frozen=True)
class Burst:
    """Requests that come in together: those that share come in turns with those that do not, sharing ones first."""

    sharing: int
    shared: int
    """Tokens."""
    tail: int
    others: int
    other_len: int

    def prompts(self, vocab_size: int, seed: int) -> tuple[list[list[int]], list[bool]]:
        """Return token ids, and which of them share."""
        (stem,) = random_prompts(1, self.shared, vocab_size, seed)
        tails = random_prompts(self.sharing, self.tail, vocab_size, seed + 1)
        others = random_prompts(self.others, self.other_len, vocab_size, seed + 2)
        queue: list[tuple[list[int], bool]] = []
        for index in range(max(self.sharing, self.others)):
            queue += [(stem + tail, True) for tail in tails[index : index + 1]]
            queue += [(other, False) for other in others[index : index + 1]]
        return [prompt for prompt, _ in queue], [is_sharing for _, is_sharing in queue]


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", choices=HOSTS, default="rose", help="(default: %(default)s)")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--model", help="checkpoint; default: random weights")
    weights.add_argument("--shape", choices=SHAPES, default=GPT2_124M, help="(default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--dtype", help="default: float16, on a CPU float32")
    parser.add_argument("--sharing", type=int, nargs="+", metavar="N", help="default: 2 8 32")
    parser.add_argument("--shared", type=int, nargs="+", metavar="TOKENS", help="default: 16 to 256")
    parser.add_argument("--tails", type=int, nargs="+", metavar="TOKENS", help="default: 32 512")
    parser.add_argument("--others", type=int, default=4, help="that share nothing (default: %(default)s)")
    parser.add_argument("--other-len", type=int, metavar="TOKENS", help="default: 128; quick: 16")
    parser.add_argument("--new-tokens", type=int, default=4, help="of each request (default: %(default)s)")
    parser.add_argument("--repeats", type=int, help="of each burst (default: 20; quick: 1)")
    parser.add_argument("--max-seconds", type=float, help="begin no other round of bursts after this time")
    parser.add_argument("--quick", action="store_true", help=f"few small bursts on {QUICK_MODEL}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE, too")
    options = parser.parse_args(arguments)
    if options.quick:
        options.model = options.model or QUICK_MODEL
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.dtype = options.dtype or ("float16" if options.device == "cuda" else "float32")
    options.sharing = options.sharing or ([3] if options.quick else [2, 8, 32])
    options.shared = options.shared or ([16, 40] if options.quick else list(THRESHOLDS))
    options.tails = options.tails or ([8] if options.quick else [32, 512])
    options.other_len = options.other_len or (16 if options.quick else 128)
    options.repeats = options.repeats or (1 if options.quick else 20)
    lists = {name: getattr(options, name) for name in ("sharing", "shared", "tails")}
    numbers = {name: [getattr(options, name)] for name in ("others", "other_len", "new_tokens", "repeats")}
    for name, values in (lists | numbers).items():
        least = 2 if name == "sharing" else 1
        if min(values) < least:
            parser.error(f"--{name.replace('_', '-')}: got {min(values)}, at least {least}")
    if max(options.sharing) + options.others > MAX_NUM_SEQS:
        parser.error(
            f"--sharing and --others: got {max(options.sharing)} + {options.others}, at most {MAX_NUM_SEQS}"
        )
    return options


def play(host: SteppedHost, burst: Burst, side: str, seed: int, num_new_tokens: int) -> dict[str, Any]:
    """Return what one burst took, milliseconds."""
    prompts, is_sharing = burst.prompts(host.vocab_size, seed)
    host.under_way.min_tokens = burst.shared if side == "wait" else NEVER
    host.reset_prefix_cache()
    before = host.num_computed_prompt_tokens
    start, firsts = host.run(prompts, num_new_tokens)
    total_ms = (time.perf_counter() - start) * 1e3
    ttft_ms = (np.array(firsts) - start) * 1e3
    return {
        "sharing": ttft_ms[is_sharing].tolist(),
        "others": ttft_ms[np.logical_not(is_sharing)].tolist(),
        "total_ms": total_ms,
        "prompt_tokens_computed": host.num_computed_prompt_tokens - before,
    }


def measure(host: SteppedHost, bursts: list[Burst], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row for each burst and side."""
    deadline = time.monotonic() + (options.max_seconds or float("inf"))
    runs: dict[tuple[Burst, str], list[dict[str, Any]]] = {}
    # The first round compiles and captures what the others need.
    for repeat in track(range(-1, options.repeats), console=Console(stderr=True)):
        if repeat > 0 and time.monotonic() > deadline:
            break
        for index, burst in enumerate(bursts):
            seed = 1000 * (repeat + 1) + 10 * index
            for side in SIDES if repeat % 2 else SIDES[::-1]:
                run = play(host, burst, side, seed * 1000, options.new_tokens)
                if repeat >= 0:
                    runs.setdefault((burst, side), []).append(run)
    return [{**asdict(burst), "side": side, **summed_up(found)} for (burst, side), found in runs.items()]


def summed_up(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return percentiles over the requests of all runs, and medians over the runs."""
    figures: dict[str, Any] = {"runs": len(runs)}
    for kind, share in product(("sharing", "others"), (50, 90)):
        values = [value for run in runs for value in run[kind]]
        figures[f"ttft_{kind}_p{share}_ms"] = float(np.percentile(values, share))
    figures["total_ms"] = float(np.median([run["total_ms"] for run in runs]))
    figures["prompt_tokens_computed"] = int(np.median([run["prompt_tokens_computed"] for run in runs]))
    return figures


def by_threshold(rows: list[dict[str, Any]], shared: Sequence[int]) -> list[dict[str, Any]]:
    """Return each threshold's figures over those of waiting never, geometric means over all bursts."""
    keys = tuple(Burst.__annotations__)
    found = {(*(row[key] for key in keys), row["side"]): row for row in rows}
    results = []
    for threshold in sorted(shared):
        ratios: dict[str, list[float]] = {name: [] for name in (*FIGURES, "prompt_tokens_computed")}
        for *burst, side in found:
            if side == "at once":
                base = chosen = found[(*burst, side)]
                if base["shared"] >= threshold:
                    chosen = found[(*burst, "wait")]
                for name, values in ratios.items():
                    values.append(chosen[name] / base[name])
        means = {name: float(np.exp(np.log(values).mean())) for name, values in ratios.items()}
        results.append({"threshold": threshold, **means})
    return results


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Print wait over at once for each burst, then the thresholds."""
    table = Table(
        "sharing", "shared", "tail", *FIGURES, "prompt tokens",
        title=f"{report['device']}, {report['settings']['model']}, {report['settings']['host']}: wait / at once",
    )  # fmt: skip
    rows = report["rows"]
    for wait in (row for row in rows if row["side"] == "wait"):
        base = next(
            r for r in rows if r["side"] != "wait" and all(r[k] == wait[k] for k in Burst.__annotations__)
        )
        cells = [f"{wait[name]:.2f} / {base[name]:.2f}" for name in FIGURES]
        tokens = f"{wait['prompt_tokens_computed']} / {base['prompt_tokens_computed']}"
        table.add_row(*(str(wait[name]) for name in ("sharing", "shared", "tail")), *cells, tokens)
    console.print(table)
    table = Table("wait for", *FIGURES, "prompt tokens", title="Over waiting never, geometric means")
    for row in report["thresholds"]:
        ratios = (f"{row[name]:.3f}" for name in (*FIGURES, "prompt_tokens_computed"))
        table.add_row(f"{row['threshold']} tokens", *ratios)
    console.print(table)


def run(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """Start the engine, measure, and return the report."""
    facts = model_facts(model)
    tokens = MAX_NUM_SEQS * facts.max_model_len
    element_bytes = 4 if options.dtype == "float32" else 2
    host = HOSTS[options.host](
        EngineOptions(
            model=model,
            dtype=options.dtype,
            device=options.device,
            max_num_seqs=MAX_NUM_SEQS,
            kv_cache_tokens=tokens,
            kv_cache_bytes=tokens * facts.kv_elements_per_token * element_bytes,
            extra={"enforce_eager": True} if options.quick and options.host != "rose" else {},
        ),
        facts.vocab_size,
    )
    bursts = [
        Burst(*each, options.others, options.other_len)
        for each in product(options.sharing, options.shared, options.tails)
    ]
    chosen = host.under_way.min_tokens or MIN_TOKENS_WORTH_WAITING
    try:
        rows = measure(host, bursts, options)
        engine_facts = host.facts()
    finally:
        host.close()
    kept = ("host", "dtype", "others", "other_len", "new_tokens", "repeats", "quick")
    size = f"random weights, {SHAPES[options.shape]}'s shapes"
    return {
        "benchmark": "waiting",
        **run_facts(),
        "device": device_name(options.device),
        "settings": {
            "model": options.model or size,
            "threshold_in_force": chosen,
            **{name: getattr(options, name) for name in kept},
        },
        "backends": {options.host: engine_facts},
        "thresholds": by_threshold(rows, options.shared),
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = parse_options(arguments)
    # vLLM's engine core stays in this process, where the threshold can be set.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with checkpoint(options.model, options.shape) as model:
        report = run(options, model)
    print_report(Console(width=180), report)
    if options.json:
        write_json(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
