"""Find the fastest cuts of a GPT-2 layer's four products on this GPU, all four together.

    python -m benchmarks.tune_small_batch_linear [--json FILE] [--rows 1 8 16 32 64 128 256]

A product's best cut depends on what its neighbours leave free, so each candidate is timed with the other three products
as they are best so far, in a CUDA graph of twelve layers whose weights do not fit the L2 cache. The search starts with
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
from benchmarks.kernel_cases.layer import CUBLAS, SHAPES, layer_case
from benchmarks.support.run_facts import run_facts, write_json
from rose_backend.kernels.gpu import small_batch_linear as gpu
from rose_backend.kernels.gpu.linear_tuning import LinearConfig, choose_config

PRODUCTS = [(columns, depth) for columns, depth, _ in SHAPES]
NUM_LAYERS = 12
MAX_SHARED_BYTES = 220_000

Cuts = dict[tuple[int, int], LinearConfig]
"""Columns and depth of a product -> its cut."""


def cuts_in_use(rows: int) -> Cuts:
    """Return the cut of each product."""
    return {
        (columns, depth): choose_config(rows, columns, depth, exact=False, can_use_tma=True)
        for columns, depth in PRODUCTS
    }


def candidates(rows: int, columns: int, depth: int) -> list[LinearConfig]:
    """Return the cuts worth timing."""
    block_m, found = triton.next_power_of_2(rows), [cuts_in_use(rows)[columns, depth]]
    if rows <= 32:
        # Two tiles of 16 rows read the same weights, the second time from the L2 cache.
        row_tiles = (16, 32) if block_m == 32 else (max(block_m, 8),)
        splits = (1, 3) if depth > 1024 else (1,)
        for tile_m, block_n, num_warps, split_k in product(row_tiles, (16, 32), (4, 8, 16), splits):
            whole = triton.next_power_of_2(depth // split_k)
            fits_shared = (tile_m + block_n) * whole * 2 <= MAX_SHARED_BYTES
            if fits_shared and block_n * whole <= 4096 * num_warps:
                found.append(
                    LinearConfig(tile_m, block_n, whole, split_k, num_warps, num_warps, 3, True, True)
                )
    if rows > 8:
        tiles = [(16, 256, 3), (32, 128, 4), (32, 256, 3), (64, 64, 6), (64, 128, 3)]
        for tile_m, tile, split_k in product((32, 64, 128), tiles, (1, 3, 6) if depth > 1024 else (1,)):
            block_n, block_k, num_stages = tile
            if tile_m <= max(block_m, 32):
                num_warps = 8 if tile_m == 128 else 4
                config = LinearConfig(
                    tile_m, block_n, block_k, split_k, 1, num_warps, num_stages, use_tma=True
                )
                found += [config, replace(config, weights_left=True)] if tile_m == 32 else [config]
    found += [replace(config, is_early=not config.is_early) for config in found]
    return list(dict.fromkeys(found))


@contextlib.contextmanager
def cut_as(cuts: Cuts) -> Iterator[None]:
    """Let Rose cut its products so."""
    with mock.patch.object(gpu, "choose_config", lambda rows, columns, depth, **_: cuts[columns, depth]):
        yield


def search(rows: int) -> dict[str, Any]:
    """Return the fastest cuts that were found, and microseconds per layer: the median of a few samples.

    Raises:
        SystemExit: a cut gives a wrong result; the message names it.
    """
    contest = layer_case(rows).make(NUM_LAYERS)

    def us_per_layer(cuts: Cuts) -> float:
        with cut_as(cuts):
            if wrong := contest.disagreement(CUBLAS):
                raise SystemExit(f"{rows} rows, {cuts}: {wrong}")
            graph = LaunchGraph(contest.sides[ROSE])
        return statistics.median(graph.sample() for _ in range(7))

    best = cuts_in_use(rows)
    in_use = fastest = us_per_layer(best)
    for sizes in PRODUCTS * 2:
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
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"needs a CUDA device; torch {torch.__version__} sees none", file=sys.stderr)
        return 1
    results = [search(rows) for rows in options.rows]
    if options.json:
        write_json(options.json, {**run_facts(), "device": torch.cuda.get_device_name(), "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
