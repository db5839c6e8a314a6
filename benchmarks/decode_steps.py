"""Time decode steps of the standalone engine, and an offline run of long prompts.

    python -m benchmarks.decode_steps [--model DIR] [--batches 1 8 32 128 256] [--json FILE]

A step is wall time of the whole engine, scheduling and texts included: 16-token prompts, 256 new tokens, so the context
grows from 16 to 272. Offline: 256 prompts of 512 tokens, 128 new tokens each. Medians of ``--repeats`` runs. Without
``--model`` a random checkpoint with the shapes of GPT-2 124M is made.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.support.checkpoint import checkpoint
from benchmarks.support.compare_report import MAX_OFFLINE_S, MAX_SAMPLING_SHARE, STEP_LIMITS_MS
from benchmarks.support.decode_runs import time_decoding
from benchmarks.support.report import bar, run_facts, write_json
from benchmarks.support.timing import no_garbage_collection
from benchmarks.support.workload import MODES, random_prompts
from rose_backend import LLM, SamplingParams
from rose_backend.config import EngineConfig

MAX_HOST_US = 150.0


def measure_steps(llm: LLM, batches: list[int], repeats: int) -> list[dict[str, Any]]:
    """Return one row per batch size and mode."""
    rows = []
    for batch in batches:
        for mode in MODES:
            runs = [time_decoding(llm, batch, mode, seed=repeat) for repeat in range(repeats + 1)][1:]
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


def measure_offline(llm: LLM, mode: str, repeats: int) -> float:
    """Return seconds for 256 prompts of 512 tokens, 128 new tokens each."""
    vocab_size = llm.core._runner._model.config.vocab_size
    seconds = []
    for repeat in range(repeats + 1):
        prompts = random_prompts(256, 512, vocab_size, seed=100 + repeat)
        params = [SamplingParams(max_tokens=128, ignore_eos=True, seed=i, **MODES[mode]) for i in range(256)]
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


def print_report(rows: list[dict[str, Any]], offline: dict[str, float], bars: list[dict[str, Any]]) -> None:
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
        console.print(f"offline, {mode}: {seconds:.3f} s, {256 * 128 / seconds:,.0f} output tok/s")
    for goal in bars:
        verdict = "met" if goal["met"] else "MISSED"
        console.print(
            f"{verdict}: {goal['name']}: {goal['value']:.3f} {goal['unit']}, at most {goal['limit']}"
        )


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="checkpoint; default: random weights, GPT-2 124M's shapes")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--batches", type=int, nargs="+", default=list(STEP_LIMITS_MS))
    parser.add_argument("--repeats", type=int, default=3, help="runs that count, after one that does not")
    parser.add_argument("--off", nargs="*", default=[], help="switches to turn off, such as cuda_graph")
    parser.add_argument("--run-ahead", type=int, default=None)
    parser.add_argument("--max-num-batched-tokens", type=int, default=EngineConfig.max_num_batched_tokens)
    parser.add_argument("--no-offline", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options: dict[str, Any] = dict.fromkeys(args.off, False)
    options |= {"run_ahead": args.run_ahead, "max_num_batched_tokens": args.max_num_batched_tokens}
    with checkpoint(args.model) as model:
        start = time.perf_counter()
        with LLM(model, dtype=args.dtype, max_num_seqs=max(256, *args.batches), **options) as llm:
            start_up_s = time.perf_counter() - start
            print(f"start-up {start_up_s:.1f} s; {llm.core.parts}; run_ahead {llm.core._pipeline._depth}")
            with no_garbage_collection(), torch.inference_mode():
                rows = measure_steps(llm, args.batches, args.repeats)
                offline = {}
                if not args.no_offline:
                    offline = {mode: measure_offline(llm, mode, args.repeats) for mode in MODES}
            llm.core.check_integrity()
    bars = judge(rows, offline)
    print_report(rows, offline, bars)
    if args.json is not None:
        report = {
            "run": run_facts(),
            "start_up_s": start_up_s,
            "steps": rows,
            "offline_s": offline,
            "bars": bars,
        }
        write_json(args.json, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
