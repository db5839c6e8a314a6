"""Find the fastest cuts of a layer's four products on this GPU, all four together.

    python -m benchmarks.tune_small_batch_linear [--shape qwen3-0.6b] [--rows 1 8 16 32 64 128 256] [--json FILE]

A product's best cut depends on what its neighbours leave free, so each candidate is timed with the other three products
as they are best so far, in a CUDA graph of layers whose weights do not fit the L2 cache. The search starts with
the cuts that are in use. With every cut, each product's result is first compared with cuBLAS's. Each number of rows
takes minutes, most of which are compilation.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

from benchmarks.kernel_cases.case import ROSE, LaunchGraph
from benchmarks.kernel_cases.layer import CUBLAS, SHAPES, LayerShape, layer_case
from benchmarks.support.run_facts import run_facts, write_json
from rose_backend.kernels.gpu import small_batch_linear as gpu
from rose_backend.kernels.gpu.linear_tuning import MAX_SPLIT_FLOATS, LinearConfig, choose_config

MIN_WEIGHT_BYTES = 160_000_000
MAX_SHARED_BYTES = 220_000

Cuts = dict[tuple[int, int], LinearConfig]
"""Columns and depth of a product -> its cut."""


def cuts_in_use(rows: int, shape: LayerShape) -> Cuts:
    """Return the cut of each product."""
    return {
        (columns, depth): choose_config(rows, columns, depth, exact=False, can_use_tma=True)
        for columns, depth in shape.products
    }


def candidates(rows: int, columns: int, depth: int) -> list[LinearConfig]:
    """Return the cuts worth timing, without the one in use."""
    block_m, found = triton.next_power_of_2(rows), []
    if rows <= 32:
        # Two tiles of 16 rows read the same weights, the second time from the L2 cache.
        row_tiles = (16, 32) if block_m == 32 else (max(block_m, 8),)
        for tile_m, block_n, num_warps, split_k in product(row_tiles, (16, 32), (4, 8, 16), (1, 2, 3)):
            whole = triton.next_power_of_2(triton.cdiv(depth, split_k))
            fits_shared = (tile_m + block_n) * whole * 2 <= MAX_SHARED_BYTES
            if fits_shared and block_n * whole <= 4096 * num_warps and (split_k == 1 or depth > 1024):
                found.append(
                    LinearConfig(tile_m, block_n, whole, split_k, num_warps, num_warps, 3, True, True)
                )
    if rows <= 2:
        for block_n, block_k, num_warps in product((2, 4), (1024, 2048, 4096), (4, 8)):
            if block_k <= depth:
                found.append(LinearConfig(block_m, block_n, block_k, num_warps=num_warps, use_dot=False))
    row_tiles = (max(block_m, 16),) if rows <= 32 else (64, 128)
    for tile_m, block_n, block_k, split_k in product(row_tiles, (32, 64, 128), (64, 128, 256), (1, 2, 4)):
        programs = triton.cdiv(columns, block_n) * triton.cdiv(rows, tile_m) * split_k
        if tile_m > max(block_m, 32) or (split_k > 1 and (depth <= 1024 or programs > 400)):
            continue
        if split_k > 1 and programs * tile_m * block_n > MAX_SPLIT_FLOATS:
            continue
        num_stages = min(MAX_SHARED_BYTES // ((tile_m + block_n) * block_k * 2), 8)
        num_warps = 8 if tile_m * block_n == 128 * 128 else 4
        for stages in {num_stages, num_stages // 2} - {0, 1}:
            found.append(
                LinearConfig(
                    tile_m,
                    block_n,
                    block_k,
                    split_k,
                    1,
                    num_warps,
                    stages,
                    weights_left=rows <= 32,
                    use_tma=True,
                )
            )
    found += [replace(config, is_early=not config.is_early) for config in found]
    return list(dict.fromkeys(found))


@contextlib.contextmanager
def cut_as(cuts: Cuts) -> Iterator[None]:
    """Let Rose cut its products so."""
    with mock.patch.object(gpu, "choose_config", lambda rows, columns, depth, **_: cuts[columns, depth]):
        yield


def search(rows: int, shape: LayerShape) -> dict[str, Any]:
    """Return the fastest cuts that were found, and microseconds per layer: the median of a few samples.

    Raises:
        SystemExit: a cut gives a wrong result; the message names it.
    """
    contest = layer_case(rows, shape).make(max(MIN_WEIGHT_BYTES // shape.weight_bytes, 2))

    def us_per_layer(cuts: Cuts) -> float:
        with cut_as(cuts):
            if wrong := contest.disagreement(CUBLAS):
                raise SystemExit(f"{rows} rows, {cuts}: {wrong}")
            graph = LaunchGraph(contest.sides[ROSE])
        return statistics.median(graph.sample() for _ in range(7))

    best = cuts_in_use(rows, shape)
    in_use = fastest = us_per_layer(best)
    for sizes in shape.products * 2:
        for config in candidates(rows, *sizes):
            cuts = {**best, sizes: config}
            us = us_per_layer(cuts)
            if us < fastest:
                fastest, best = us, cuts
    print(f"{rows} rows: in use {in_use:.2f} us, fastest {fastest:.2f} us", flush=True)
    for sizes, config in best.items():
        print(f"    {sizes} {config}", flush=True)
    found = {f"{columns} x {depth}": asdict(config) for (columns, depth), config in best.items()}
    return {"rows": rows, "in_use_us": in_use, "fastest_us": fastest, "fastest": found}


def main() -> int:
    """Search for each number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="gpt2-124m")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"needs a CUDA device; torch {torch.__version__} sees none", file=sys.stderr)
        return 1
    results = [search(rows, SHAPES[options.shape]) for rows in options.rows]
    if options.json:
        write_json(
            options.json,
            {
                **run_facts(),
                "device": torch.cuda.get_device_name(),
                "shape": options.shape,
                "results": results,
            },
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
