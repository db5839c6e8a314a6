"""Show where a decode step of the standalone engine goes: launches, time per kernel, gaps, bytes, the host's share.

    python -m benchmarks.step_profile [--model DIR | --shape qwen3-0.6b] [--batches 1 32 256] [--mode greedy]
                                      [--json FILE] [--quick]

For each batch size the engine decodes 256 tokens behind 16-token prompts: wall time of a step and what of it the host
works. Then its captured step is replayed alone: wall time per step, and under torch's profiler the time of each kernel.
The floor is the bytes that a step has to read once (weights, head, keys and values; of experts those that it touches on
average) at the speed of a large copy on the same device. On a CPU nothing is captured, and torch's operations stand for
kernels.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from benchmarks.kernel_cases import small
from benchmarks.kernel_cases.case import copy_bandwidth
from benchmarks.reports.text import markdown, publish
from benchmarks.support.checkpoint import GPT2_124M, SHAPES, checkpoint
from benchmarks.support.cli import (
    DEFAULT,
    QUICK_MODEL,
    add_device_options,
    at_least,
    new_parser,
    set_device_defaults,
)
from benchmarks.support.run_facts import bar, device_name, run_facts
from benchmarks.support.step_bytes import expert_share
from benchmarks.support.timing import no_garbage_collection, timed_us
from benchmarks.support.workload import MODES, RandomRequests
from rose_backend import LLM, SamplingParams
from rose_backend.engine.process_settings import short_switch_interval
from rose_backend.engine.startup import storage_bytes
from rose_backend.kernels import Experts, PackedLinear
from rose_backend.kernels.captured_graphs import size_for
from rose_backend.layers.linear import SparseMlp

PROMPT_TOKENS = 16
NEW_TOKENS, QUICK_NEW_TOKENS = 256, 24
GPU_REPLAYS, CPU_REPLAYS = 20, 4
MAX_HOST_US = 150.0
"""Goal for the host's work in a step of 256 requests, GPT-2 124M on one H200."""


def start_decoding(llm: LLM, batch: int, mode: str, seed: int, max_tokens: int, num_tokens: int) -> None:
    """Queue ``batch`` requests of ``max_tokens`` new tokens and step until they have ``num_tokens`` each."""
    core = llm.core
    requests = RandomRequests(batch, (PROMPT_TOKENS, PROMPT_TOKENS), (max_tokens, max_tokens), seed)
    for index, prompt in enumerate(requests.requests(core.input_processor.vocab_size).prompts):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=index, **MODES[mode])
        core.add(core.input_processor.make(prompt, params))
    target = core.stats.generated_tokens + num_tokens * batch
    while core.stats.generated_tokens < target:
        core.step()


def time_decoding(llm: LLM, batch: int, mode: str, *, seed: int, max_tokens: int) -> dict[str, float]:
    """Decode ``batch`` prompts of 16 tokens to ``max_tokens`` new ones and time the steps behind the first two.

    Returns: microseconds per step: wall time, and what of it the host did not spend waiting for the device.
    """
    core, waited_us = llm.core, 0.0
    wait = core._pipeline._wait

    def timed_wait(step: Any) -> None:
        nonlocal waited_us
        waited_us += timed_us(lambda: wait(step))

    def decode() -> None:
        while core.num_unfinished:
            with short_switch_interval():  # as LLM.generate does it
                core.step()

    start_decoding(llm, batch, mode, seed, max_tokens, 2)
    num_steps = core.stats.steps
    with mock.patch.object(core._pipeline, "_wait", timed_wait):
        elapsed_us = timed_us(decode)
    num_steps = core.stats.steps - num_steps
    return {"engine_step_us": elapsed_us / num_steps, "host_us": (elapsed_us - waited_us) / num_steps}


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = new_parser(__doc__)
    add_device_options(parser)
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--model", help="checkpoint; default: random weights")
    weights.add_argument("--shape", choices=SHAPES, default=GPT2_124M, help=f"of random weights {DEFAULT}")
    parser.add_argument("--batches", type=at_least(1), nargs="+", help="default: 1 32 256")
    parser.add_argument("--mode", choices=list(MODES), default="greedy")
    options = parser.parse_args(arguments)
    set_device_defaults(options)
    options.model = options.model or (QUICK_MODEL if options.quick else None)
    options.batches = options.batches or ([1, 4] if options.quick else [1, 32, 256])
    return options


def step_bytes(llm: LLM, batch: int, num_tokens: int) -> int:
    """Return the bytes that a step has to read: weights, experts on average, and K/V of ``num_tokens`` tokens."""
    model, kv_cache = llm.core._runner._model, llm.core._runner._kv_cache
    weights = model.weights
    num_bytes: float = weights.padded_lm_head.nbytes
    num_bytes += storage_bytes(weights.layers, leave_out=(PackedLinear, Experts))
    for mlp in (layer.mlp for layer in weights.layers):
        if isinstance(mlp, SparseMlp):
            share = expert_share(mlp.router.num_outputs, mlp.experts.top_k, batch)
            num_bytes += share * storage_bytes(mlp.experts)
    token_bytes = kv_cache[:, :, 0, 0].numel() * kv_cache.element_size()
    return int(num_bytes + num_tokens * token_bytes)


def timed_runs(llm: LLM, batch: int, mode: str, max_tokens: int) -> dict[str, float]:
    """Return medians over three runs of the engine, after one that does not count.

    To be called before anything is profiled: the profiler's hooks stay behind, and launches take longer.
    """
    with no_garbage_collection():
        runs = [time_decoding(llm, batch, mode, seed=seed, max_tokens=max_tokens) for seed in range(4)][1:]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def profile(llm: LLM, batch: int, mode: str, copy: float, max_tokens: int) -> dict[str, Any]:
    """Return what a step of ``batch`` requests consists of, half-way to ``max_tokens`` new tokens each."""
    core = llm.core
    start_decoding(llm, batch, mode, 7, max_tokens, max_tokens // 2 + 2)
    decoder = core._runner.decoder
    width = size_for(decoder.widths, batch) or batch
    num_tokens = int((decoder.buffers.num_computed_tokens[:width].clamp(min=-1) + 1).sum())
    with torch.inference_mode():
        kernels, wall_us = _replay(decoder, width)
    while core.num_unfinished:
        core.step()
    floor_us = step_bytes(llm, batch, num_tokens) / copy * 1e6
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
            decoder._graphs.run_parts(width, (0, 2) if decoder.needs_sampling_extras else (0,))
        wait()

    times = []
    for _ in range(5):
        rewind()
        times.append(timed_us(replay) / num_replays)
    rewind()
    kernels, _ = kernel_times(replay, num_replays)
    rewind()
    return kernels, min(times)


def kernel_times(run: Callable[[], object], num_steps: int) -> tuple[list[dict[str, Any]], float]:
    """Run something of ``num_steps`` steps under torch's profiler, and wait for the device.

    Returns:
        Kernels per step, longest first, and the microseconds of a step in which the device works on any of them. On a
        CPU torch's operations stand for kernels.
    """
    on_gpu = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    launches: Counter[str] = Counter()
    us: Counter[str] = Counter()
    busy_us, busy_until = 0.0, 0.0
    events = [
        event
        for event in profiler.events()
        if not on_gpu or event.device_type == torch.autograd.DeviceType.CUDA
    ]
    for event in sorted(events, key=lambda event: event.time_range.start):
        launches[event.name] += 1
        us[event.name] += event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        # Kernels may overlap.
        busy_us += max(event.time_range.end - max(event.time_range.start, busy_until), 0)
        busy_until = max(busy_until, event.time_range.end)
    kernels = [
        {"name": name, "launches": launches[name] / num_steps, "us": total / num_steps}
        for name, total in us.most_common()
    ]
    return kernels, busy_us / num_steps


def table(report: dict[str, Any]) -> str:
    """Return, for each batch size, what a step consists of, and its longest kernels."""
    line = (
        "{batch} requests, {mode}: {launches:.0f} launches, replay {replay_us:.1f} us = kernels {busy_us:.1f} + gaps "
        "{gaps_us:.1f}; floor {floor_us:.1f} us; engine {engine_step_us:.1f} us, host {host_us:.1f} us"
    )
    parts = []
    for step in report["profiles"]:
        parts += [line.format(**step), kernel_table(step["kernels"], step["busy_us"])]
    return "\n\n".join(parts)


def kernel_table(kernels: Sequence[dict[str, Any]], busy_us: float) -> str:
    """Return the longest kernels of a step, with their shares of the device's time."""
    rows = []
    for kernel in kernels[:16]:
        name = kernel["name"][:70].replace("|", "/")
        rows.append(
            (name, f"{kernel['launches']:.0f}", f"{kernel['us']:.2f}", f"{kernel['us'] / busy_us:.1%}")
        )
    return markdown(("kernel", "launches", "us", "share"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile, print, write."""
    options = parse_options(arguments)
    copy = copy_bandwidth() if options.device == "cuda" else small.copy_bandwidth()
    max_tokens = QUICK_NEW_TOKENS if options.quick else NEW_TOKENS
    engine = {"device": options.device, "dtype": options.dtype, "max_num_seqs": max(options.batches)}
    with checkpoint(options.model, options.shape) as model, LLM(model, **engine) as llm:
        runs = [timed_runs(llm, batch, options.mode, max_tokens) for batch in options.batches]
        profiles = [
            profile(llm, batch, options.mode, copy, max_tokens) | medians
            for batch, medians in zip(options.batches, runs, strict=True)
        ]
    is_gpt2 = options.model is None and options.shape == GPT2_124M
    hosts = (step["host_us"] for step in profiles if is_gpt2 and step["batch"] == 256)
    report = {
        "benchmark": "step_profile",
        **run_facts(),
        "device": device_name(options.device),
        "settings": {"model": options.model or f"random weights, {SHAPES[options.shape]}'s shapes"},
        "copy_bytes_per_s": copy,
        "bars": [bar("host per step, 256 requests", host_us, MAX_HOST_US, "us") for host_us in hosts],
        "profiles": profiles,
    }
    publish(report, table(report), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
