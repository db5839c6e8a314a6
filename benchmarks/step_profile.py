"""Show where a decode step of the standalone engine goes: launches, time per kernel, gaps, bytes, the host's share.

    python -m benchmarks.step_profile [--model DIR] [--batches 1 32 256] [--mode greedy] [--json FILE] [--quick]

For each batch size the engine decodes 128 tokens behind 16-token prompts. Then its captured step is replayed alone:
wall time per step, and under torch's profiler the time of each kernel. The floor is the bytes that a step has to read
once (weights, head, keys and values) at the speed of a large copy on the same device. On a CPU nothing is captured, and
torch's operations stand for kernels.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernel_cases.timing import copy_bandwidth
from benchmarks.support.checkpoint import checkpoint
from benchmarks.support.decode_runs import NEW_TOKENS, QUICK_NEW_TOKENS, start_decoding, time_decoding
from benchmarks.support.report import device_name, run_facts, write_json
from benchmarks.support.serving_report import QUICK_MODEL
from benchmarks.support.timing import no_garbage_collection
from benchmarks.support.workload import MODES
from rose_backend import LLM

GPU_REPLAYS, CPU_REPLAYS = 20, 4


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="checkpoint; default: random weights, GPT-2 124M's shapes")
    parser.add_argument("--dtype", help="default: float16, on a CPU float32")
    parser.add_argument("--batches", type=int, nargs="+", help="default: 1 32 256")
    parser.add_argument("--mode", choices=list(MODES), default="greedy")
    parser.add_argument("--quick", action="store_true", help=f"a few seconds, small sizes on {QUICK_MODEL}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE, too")
    options = parser.parse_args(arguments)
    options.dtype = options.dtype or ("float16" if torch.cuda.is_available() else "float32")
    options.batches = options.batches or ([1, 4] if options.quick else [1, 32, 256])
    options.model = options.model or (QUICK_MODEL if options.quick else None)
    if min(options.batches) < 1:
        parser.error(f"--batches: got {options.batches}, each has to be at least 1")
    return options


def copy_speed() -> float:
    """Return bytes read and written per second by a large copy on the device of the engine."""
    if torch.cuda.is_available():
        return copy_bandwidth()
    source = torch.zeros(1 << 26, dtype=torch.uint8)
    target = torch.empty_like(source)
    seconds = min(_seconds(lambda: target.copy_(source)) for _ in range(5))
    return 2 * source.nbytes / seconds


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def step_bytes(llm: LLM, num_tokens: int) -> int:
    """Return the bytes that a step has to read: all weights once, and K/V of ``num_tokens`` tokens."""
    model, kv_cache = llm.core._runner._model, llm.core._runner._kv_cache
    weights = model.weights
    num_bytes = weights.padded_lm_head.nbytes
    for layer in weights.layers:
        num_bytes += sum(getattr(layer, name).nbytes for name in layer.__slots__)
    token_bytes = kv_cache[:, :, 0, 0].numel() * kv_cache.element_size()
    return int(num_bytes + num_tokens * token_bytes)


def timed_runs(llm: LLM, batch: int, mode: str, max_tokens: int) -> dict[str, float]:
    """Return medians over three runs of the engine, after one that does not count.

    Call it before anything is profiled: the profiler's hooks stay behind, and launches take longer.
    """
    with no_garbage_collection():
        runs = [time_decoding(llm, batch, mode, seed=seed, max_tokens=max_tokens) for seed in range(4)][1:]
    return {
        "engine_step_us": statistics.median(run.step_us for run in runs),
        "host_us": statistics.median(run.host_us for run in runs),
    }


def profile(llm: LLM, batch: int, mode: str, copy: float, max_tokens: int) -> dict[str, Any]:
    """Return what a step of ``batch`` requests consists of, half-way to ``max_tokens`` new tokens each."""
    core = llm.core
    start_decoding(llm, batch, mode, seed=7, max_tokens=max_tokens)
    target = core.stats.generated_tokens + max_tokens // 2 * batch
    while core.stats.generated_tokens < target:
        core.step()
    decoder = core._runner.decoder
    width = decoder._width_for(batch)
    num_tokens = int((decoder.buffers.num_computed_tokens[:width].clamp(min=-1) + 1).sum())
    with torch.inference_mode():
        kernels, wall_us = _replay(decoder, width)
    while core.num_unfinished:
        core.step()
    floor_us = step_bytes(llm, num_tokens) / copy * 1e6
    busy_us = sum(kernel["us"] for kernel in kernels)
    return {
        "batch": batch,
        "mode": mode,
        "launches": sum(kernel["launches"] for kernel in kernels),
        "replay_us": wall_us,
        "busy_us": busy_us,
        "gaps_us": wall_us - busy_us,
        "floor_us": floor_us,
        "kernels": kernels,
    }


def _replay(decoder: Any, width: int) -> tuple[list[dict[str, Any]], float]:
    """Replay the step from where it stands; return kernels per step, longest first, and wall time per step in us."""
    on_gpu = torch.cuda.is_available()
    num_replays = GPU_REPLAYS if on_gpu else CPU_REPLAYS
    wait = torch.cuda.synchronize if on_gpu else (lambda: None)
    # A step that was not read yet still has its tokens in these.
    kept = [(t, t.clone()) for t in vars(decoder.buffers).values() if isinstance(t, torch.Tensor)]

    def rewind() -> None:
        for tensor, values in kept:
            tensor.copy_(values)
        wait()

    def replay() -> None:
        for _ in range(num_replays):
            decoder._run(width)
        wait()

    times = []
    for _ in range(5):
        rewind()
        times.append(_seconds(replay) / num_replays * 1e6)
    rewind()
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        replay()
    rewind()
    found = _kernels_of_gpu(profiler) if on_gpu else _operations(profiler)
    kernels = [
        {"name": name, "launches": launches / num_replays, "us": us / num_replays}
        for name, (launches, us) in sorted(found.items(), key=lambda item: -item[1][1])
    ]
    return kernels, min(times)


def _kernels_of_gpu(profiler: Any) -> dict[str, tuple[int, float]]:
    launches: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            launches[event.name] += 1
            microseconds[event.name] += event.time_range.elapsed_us()
    return {name: (count, microseconds[name]) for name, count in launches.items()}


def _operations(profiler: Any) -> dict[str, tuple[int, float]]:
    return {event.key: (event.count, event.self_cpu_time_total) for event in profiler.key_averages()}


def print_profile(report: dict[str, Any]) -> None:
    """Print one batch size for people."""
    console = Console(width=120)
    console.print(
        f"[bold]{report['batch']} requests, {report['mode']}[/]: {report['launches']:.0f} launches, "
        f"replay {report['replay_us']:.1f} us = kernels {report['busy_us']:.1f} + gaps {report['gaps_us']:.1f}; "
        f"floor {report['floor_us']:.1f} us; engine {report['engine_step_us']:.1f} us, host {report['host_us']:.1f} us"
    )
    table = Table()
    for name in ("kernel", "launches", "us", "share"):
        table.add_column(
            name, justify="left" if name == "kernel" else "right", overflow="ellipsis", no_wrap=True
        )
    for kernel in report["kernels"][:16]:
        share = kernel["us"] / report["busy_us"]
        table.add_row(kernel["name"][:70], f"{kernel['launches']:.0f}", f"{kernel['us']:.2f}", f"{share:.1%}")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile, print, write."""
    options = parse_options(arguments)
    copy = copy_speed()
    max_tokens = QUICK_NEW_TOKENS if options.quick else NEW_TOKENS
    with (
        checkpoint(options.model) as model,
        LLM(model, dtype=options.dtype, max_num_seqs=max(options.batches)) as llm,
    ):
        runs = [timed_runs(llm, batch, options.mode, max_tokens) for batch in options.batches]
        reports = [
            profile(llm, batch, options.mode, copy, max_tokens) | medians
            for batch, medians in zip(options.batches, runs, strict=True)
        ]
    for report in reports:
        print_profile(report)
    if options.json is not None:
        facts = run_facts() | {"device": device_name("cuda" if torch.cuda.is_available() else "cpu")}
        report = {"benchmark": "step_profile", **facts, "copy_bytes_per_s": copy, "profiles": reports}
        write_json(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
