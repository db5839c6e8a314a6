"""Time Rose's prefill attention beside FlashAttention 3: rows of equal lengths, fresh and behind cached tokens.

    python -m benchmarks.prefill_flash_attention [--json FILE]

Microseconds of one layer, the store of K/V included on both sides: median with 20th and 80th percentile, from replays
of captured graphs that rotate among input sets larger than the L2 cache, taken in turns. FlashAttention's schedule,
which a step makes once, counts with one layer's share. "ratio" is Rose's median over FlashAttention's: above 1
FlashAttention is faster. What both return and store is compared before a point is timed. From which rows on the plugin
takes FlashAttention (``rose_backend/vllm_plugin/attention/flash_attention.py``) is chosen by the result.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kernel_cases import kv_cache
from benchmarks.kernel_cases.case import ROSE, Contest, LaunchGraph
from benchmarks.kernel_cases.kv_cache import FLASH, Heads, PagedStep
from benchmarks.reports.parts import prefill_flash_attention_table
from benchmarks.reports.text import publish
from benchmarks.support.run_facts import device_name, run_facts
from benchmarks.support.timing import alternate, no_garbage_collection
from rose_backend.vllm_plugin.attention import flash_attention

NUM_LAYERS = {
    Heads("Qwen3-0.6B", 16, 8, flash_attention.HEAD_SIZE, torch.bfloat16): 28,
    Heads("Llama-3.1-8B", 32, 8, flash_attention.HEAD_SIZE, torch.bfloat16): 32,
}
ROWS, QUERY_LENS, CONTEXTS = (1, 2, 4, 8, 16), (512, 1024, 2048, 4096, 8192), (0, 512, 1024, 2048, 6144)
MAX_NEW_TOKENS = 16_384
"""Of all rows of a step."""
SAMPLES = 11
SCHEDULE = "schedule"


def missing() -> str | None:
    """Return why FlashAttention 3 does not run here, or None."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    if (capability := torch.cuda.get_device_capability()) != (9, 0):
        return f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}"
    try:
        from vllm.vllm_flash_attn import fa_version_unsupported_reason
    except ImportError as error:
        return str(error)
    return fa_version_unsupported_reason(3)


def flash_rows(step: PagedStep) -> flash_attention.FlashRows:
    """Return a step's rows as the plugin describes them, without a schedule."""
    tensors = (step.block_table, step.query_start_loc, step.seq_lens, step.slot_mapping)
    return flash_attention.FlashRows(slice(0, len(step.query)), *tensors, step.query_len, step.seq_len)


def flash_launch(step: PagedStep, rows: flash_attention.FlashRows) -> torch.Tensor:
    """Store and attend as the plugin does, with the schedule that ``rows`` has or else is given."""
    tensors = (step.query, step.key, step.value, step.key_cache, step.value_cache)
    flash_attention.flash_prefill(*tensors, rows, step.heads.head_size**-0.5, step.out)
    return step.out


def measure(heads: Heads, rows: int, query_len: int, context: int) -> dict[str, Any]:
    """Return the times of ``rows`` with so many new tokens each behind so many cached ones.

    Raises:
        SystemExit: the sides differ; the message says in which case and by how much.
    """
    case = kv_cache.prefill_case(heads, rows, query_len, context)
    steps = kv_cache.make_steps(heads, rows, query_len, context, case.num_sets)
    launches = {
        ROSE: [kv_cache.rose_attention(step) for step in steps],
        FLASH: [functools.partial(flash_launch, step, flash_rows(step)) for step in steps],
        SCHEDULE: [lambda s=s: flash_attention._schedule(flash_rows(s), s.query, s.key_cache) for s in steps],
    }
    contest = Contest(
        launches,
        steps[0].forget,
        observe=lambda side, out: (out, steps[0].stored()),
        tolerance=kv_cache.TOLERANCE[heads.dtype],
    )
    if complaint := contest.disagreement(FLASH):
        raise SystemExit(f"{case.name}: {FLASH} {complaint}")
    for launch in launches[FLASH]:
        launch()  # makes the schedule: within the graph it would be timed
    graphs = {side: LaunchGraph(calls) for side, calls in launches.items()}
    runs = {side: lambda graph=graph: {"us": [graph.sample()]} for side, graph in graphs.items()}
    us = {side: np.array(samples["us"]) for side, samples in alternate(runs, SAMPLES).items()}
    us[FLASH] += float(np.median(us[SCHEDULE])) / NUM_LAYERS[heads]
    point: dict[str, Any] = {"heads": heads.name, "rows": rows, "query_len": query_len, "context": context}
    for name, side in (("rose_us", ROSE), ("flash_us", FLASH), ("schedule_us", SCHEDULE)):
        found = np.percentile(us[side], (20, 50, 80)).tolist()
        point[name] = dict(zip(("p20", "median", "p80"), found, strict=True))
    return {**point, "ratio": point["rose_us"]["median"] / point["flash_us"]["median"]}


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE, too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, time, print, write; the status is 1 where FlashAttention 3 does not run."""
    options = parse_options(arguments)
    if why := missing():
        print(f"needs compute capability 9.0 and vLLM with FlashAttention 3: {why}", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    points = itertools.product(NUM_LAYERS, ROWS, QUERY_LENS, CONTEXTS)
    with no_garbage_collection():  # every capture would collect all of vLLM's objects
        rows = [measure(*point) for point in points if point[1] * point[2] <= MAX_NEW_TOKENS]
    heads = {heads.name: [heads.num_query_heads, heads.num_kv_heads] for heads in NUM_LAYERS}
    settings = {"heads": heads, "dtype": "bfloat16", "block_size": kv_cache.BLOCK_SIZE, "samples": SAMPLES}
    report = {
        "benchmark": "prefill_flash_attention",
        **run_facts(),
        "device": device_name("cuda"),
        "settings": settings,
        "rows": rows,
    }
    publish(report, prefill_flash_attention_table(report), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
