"""Time decode steps of the standalone engine, and an offline run of long prompts.

    python -m benchmarks.decode_steps [--model DIR] [--batches 1 8 32 128 256] [--json FILE] [--quick]

A step is wall time of the whole engine, scheduling and texts included: 16-token prompts, 256 new tokens, so the context
grows from 16 to 272. Offline: 256 prompts of 512 tokens, 128 new tokens each. Medians of ``--repeats`` runs. Without
``--model`` a random checkpoint with the shapes of GPT-2 124M is made.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.support.checkpoint import checkpoint
from benchmarks.support.compare_report import MAX_OFFLINE_S, MAX_SAMPLING_SHARE, STEP_LIMITS_MS
from benchmarks.support.decode_runs import NEW_TOKENS, QUICK_NEW_TOKENS, time_decoding
from benchmarks.support.report import bar, device_name, run_facts, write_json
from benchmarks.support.serving_report import QUICK_MODEL
from benchmarks.support.timing import no_garbage_collection
from benchmarks.support.workload import MODES, random_prompts
from rose_backend import LLM, SamplingParams
from rose_backend.config import EngineConfig

MAX_HOST_US = 150.0
OFFLINE = (256, 512, 128)
QUICK_OFFLINE = (4, 32, 8)
"""Prompts, their length, new tokens of each."""


def measure_steps(llm: LLM, batches: list[int], repeats: int, max_tokens: int) -> list[dict[str, Any]]:
    """Return one row per batch size and mode."""
    rows = []
    for batch in batches:
        for mode in MODES:
            runs = [
                time_decoding(llm, batch, mode, seed=repeat, max_tokens=max_tokens)
                for repeat in range(repeats + 1)
            ][1:]
            rows.append(
                {
                    "batch": batch,
                    "mode": mode,
                    "step_ms": statistics.median(run.step_us for run in runs) / 1e3,
                    "fastest_step_ms": min(run.step_us for run in runs) / 1e3,
                    "host_us": statistics.median(run.host_us for run in runs),
                }
            )
    return rows


def measure_offline(llm: LLM, mode: str, repeats: int, sizes: tuple[int, int, int]) -> float:
    """Return seconds for all prompts of ``sizes``: their number, their length, new tokens of each."""
    count, input_len, output_len = sizes
    vocab_size = llm.core._runner._model.config.vocab_size
    seconds = []
    for repeat in range(repeats + 1):
        prompts = random_prompts(count, input_len, vocab_size, seed=100 + repeat)
        params = [
            SamplingParams(max_tokens=output_len, ignore_eos=True, seed=i, **MODES[mode])
            for i in range(count)
        ]
        start = time.perf_counter()
        llm.generate(prompts, params)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def judge(rows: list[dict[str, Any]], offline: dict[str, float]) -> list[dict[str, Any]]:
    """Compare with the goals."""
    bars = []
    steps = {(row["batch"], row["mode"]): row for row in rows}
    for batch, limit in STEP_LIMITS_MS.items():
        if (batch, "greedy") in steps:
            greedy = steps[batch, "greedy"]["step_ms"]
            share = steps[batch, "top-k 50, top-p 0.9"]["step_ms"] / greedy
            bars.append(bar(f"step, {batch} requests", greedy, limit, "ms"))
            bars.append(bar(f"sampling over greedy, {batch} requests", share, MAX_SAMPLING_SHARE, "x"))
    if (256, "greedy") in steps:
        bars.append(bar("host per step, 256 requests", steps[256, "greedy"]["host_us"], MAX_HOST_US, "us"))
    if "greedy" in offline:
        bars.append(bar("offline, 256 x 512 / 128 new", offline["greedy"], MAX_OFFLINE_S, "s"))
    return bars


def print_report(
    rows: list[dict[str, Any]],
    offline: dict[str, float],
    sizes: tuple[int, int, int],
    bars: list[dict[str, Any]],
) -> None:
    """Print everything for people."""
    table = Table(title="decode steps")
    for name in ("requests", "mode", "step ms", "fastest", "host us"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for row in rows:
        numbers = (f"{row['step_ms']:.3f}", f"{row['fastest_step_ms']:.3f}", f"{row['host_us']:.0f}")
        table.add_row(str(row["batch"]), row["mode"], *numbers)
    console = Console(width=100)
    console.print(table)
    for mode, seconds in offline.items():
        console.print(f"offline, {mode}: {seconds:.3f} s, {sizes[0] * sizes[2] / seconds:,.0f} output tok/s")
    for goal in bars:
        verdict = "met" if goal["met"] else "MISSED"
        console.print(
            f"{verdict}: {goal['name']}: {goal['value']:.3f} {goal['unit']}, at most {goal['limit']}"
        )


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="checkpoint; default: random weights, GPT-2 124M's shapes")
    parser.add_argument("--dtype", help="default: float16, on a CPU float32")
    parser.add_argument("--batches", type=int, nargs="+", help=f"default: {list(STEP_LIMITS_MS)}")
    parser.add_argument("--repeats", type=int, default=3, help="runs that count, after one that does not")
    parser.add_argument("--off", nargs="*", default=[], help="switches to turn off, such as cuda_graph")
    parser.add_argument("--run-ahead", type=int, default=None)
    parser.add_argument("--max-num-batched-tokens", type=int, default=EngineConfig.max_num_batched_tokens)
    parser.add_argument("--no-offline", action="store_true")
    parser.add_argument("--quick", action="store_true", help=f"a few seconds, small sizes on {QUICK_MODEL}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE, too")
    options = parser.parse_args(arguments)
    options.dtype = options.dtype or ("float16" if torch.cuda.is_available() else "float32")
    options.batches = options.batches or ([1, 4] if options.quick else list(STEP_LIMITS_MS))
    options.model = options.model or (QUICK_MODEL if options.quick else None)
    for name in ("batches", "repeats"):
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            parser.error(f"--{name}: got {value}, at least 1")
    return options


def measure(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """Make the engine, measure, and return the report."""
    engine: dict[str, Any] = dict.fromkeys(options.off, False)
    engine |= {"run_ahead": options.run_ahead, "max_num_batched_tokens": options.max_num_batched_tokens}
    sizes, max_tokens = (QUICK_OFFLINE, QUICK_NEW_TOKENS) if options.quick else (OFFLINE, NEW_TOKENS)
    max_num_seqs = max(4 if options.quick else 256, *options.batches)
    start = time.perf_counter()
    with LLM(model, dtype=options.dtype, max_num_seqs=max_num_seqs, **engine) as llm:
        start_up_s = time.perf_counter() - start
        print(f"start-up {start_up_s:.1f} s; {llm.core.parts}; run_ahead {llm.core._pipeline._depth}")
        with no_garbage_collection(), torch.inference_mode():
            rows = measure_steps(llm, options.batches, options.repeats, max_tokens)
            offline = {}
            if not options.no_offline:
                offline = {mode: measure_offline(llm, mode, options.repeats, sizes) for mode in MODES}
        llm.core.check_integrity()
    return {
        "benchmark": "decode_steps",
        **run_facts(),
        "device": device_name("cuda" if torch.cuda.is_available() else "cpu"),
        "start_up_s": start_up_s,
        "steps": rows,
        "offline": {"sizes": sizes, "seconds": offline},
        # They are for GPT-2 124M on one H200.
        "bars": [] if options.quick else judge(rows, offline),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = parse_options(arguments)
    with checkpoint(options.model) as model:
        report = measure(options, model)
    offline = report["offline"]
    print_report(report["steps"], offline["seconds"], offline["sizes"], report["bars"])
    if options.json is not None:
        write_json(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
