"""Show where a decode step of the standalone engine goes: launches, time per kernel, gaps, bytes, the host's share.

    python -m benchmarks.step_profile [--model DIR] [--batches 1 32 256] [--mode greedy] [--json FILE]

For each batch size the engine decodes 128 tokens behind 16-token prompts. Then its captured step is replayed alone:
wall time per step, and under torch's profiler the time of each kernel. The floor is the bytes that a step has to read
once (weights, head, keys and values) at the speed of a large copy on the same device.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernel_cases.timing import copy_bandwidth
from benchmarks.support.checkpoint import checkpoint
from benchmarks.support.decode_runs import start_decoding, time_decoding
from benchmarks.support.report import run_facts, write_json
from benchmarks.support.workload import MODES
from rose_backend import LLM

REPLAYS = 20
CONTEXT_STEPS = 128


def step_bytes(llm: LLM, num_tokens: int) -> int:
    """Return the bytes that a step has to read: all weights once, and K/V of ``num_tokens`` tokens."""
    model, kv_cache = llm.core._runner._model, llm.core._runner._kv_cache
    weights = model.weights
    num_bytes = weights.padded_lm_head.nbytes
    for layer in weights.layers:
        num_bytes += sum(getattr(layer, name).nbytes for name in layer.__slots__)
    token_bytes = kv_cache[:, :, 0, 0].numel() * kv_cache.element_size()
    return int(num_bytes + num_tokens * token_bytes)


def profile(llm: LLM, batch: int, mode: str, copy: float) -> dict[str, Any]:
    """Return everything about steps of ``batch`` requests."""
    core = llm.core
    start_decoding(llm, batch, mode, seed=7)
    target = core.stats.generated_tokens + CONTEXT_STEPS * batch
    while core.stats.generated_tokens < target:
        core.step()
    decoder = core._runner.decoder
    width = decoder._width_for(batch)
    num_tokens = int((decoder.buffers.num_computed_tokens[:width].clamp(min=-1) + 1).sum())
    with torch.inference_mode():
        kernels, wall_us = _replay(decoder, width)
    while core.num_unfinished:
        core.step()
    run = time_decoding(llm, batch, mode, seed=8)
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
        "engine_step_us": run.step_us,
        "host_us": run.host_us,
        "kernels": kernels,
    }


def _replay(decoder: Any, width: int) -> tuple[list[dict[str, Any]], float]:
    """Replay the step from where it stands; return kernels per step, longest first, and wall time per step in us."""
    buffers = decoder.buffers
    torch.cuda.synchronize()
    # A step that was not read yet still has its tokens in the history.
    changing = (buffers.tokens, buffers._longs, buffers._words, buffers.step_index, buffers.history)
    kept = [(tensor, tensor.clone()) for tensor in changing]

    def rewind() -> None:
        for tensor, values in kept:
            tensor.copy_(values)
        torch.cuda.synchronize()

    times = []
    for _ in range(5):
        rewind()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(REPLAYS):
            decoder._run(width)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / REPLAYS * 1e3)
    rewind()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(REPLAYS):
            decoder._run(width)
        torch.cuda.synchronize()
    rewind()
    launches: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            launches[event.name] += 1
            microseconds[event.name] += event.time_range.elapsed_us()
    kernels = [
        {"name": name, "launches": launches[name] / REPLAYS, "us": total / REPLAYS}
        for name, total in microseconds.most_common()
    ]
    return kernels, min(times)


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


def main() -> int:
    """Profile, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="checkpoint; default: random weights, GPT-2 124M's shapes")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--mode", choices=list(MODES), default="greedy")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    copy = copy_bandwidth()
    with checkpoint(args.model) as model, LLM(model, dtype=args.dtype, max_num_seqs=256) as llm:
        reports = [profile(llm, batch, args.mode, copy) for batch in args.batches]
    for report in reports:
        print_profile(report)
    if args.json is not None:
        write_json(args.json, {"run": run_facts(), "copy_bytes_per_s": copy, "profiles": reports})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
