"""Find the fastest cuts of a GPT-2 layer's four products on this GPU: all four together, in a chain of layers.

    python -m benchmarks.tune_small_batch_linear [--json FILE] [--rows 1 8 16 32 64 128 256]

A product's best cut depends on what its neighbours leave free, so each candidate is timed with the other three products
as they are best so far, in a CUDA graph of twelve layers whose weights do not fit the L2 cache. The search starts with
the cuts that are in use. Every cut is first compared with float64.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton

from benchmarks.kernel_cases.case import LaunchGraph
from benchmarks.support.run_facts import run_facts, write_json
from rose_backend.kernels.gpu.linear_tuning import LinearConfig, choose_config
from rose_backend.kernels.gpu.small_batch_linear import small_batch_linear as launch
from rose_backend.kernels.small_batch_linear import PackedLinear, pack_linear

PRODUCTS = ("qkv", "attn_proj", "fc", "fc_proj")
SHAPES = {"qkv": (768, 2304), "attn_proj": (768, 768), "fc": (768, 3072), "fc_proj": (3072, 768)}
NORMED = ("qkv", "fc")
NUM_LAYERS, WIDTH, EPS = 12, 768, 1e-5
MAX_SHARED_BYTES = 220_000
NUM_WORKERS = 8
"""Processes that compile."""

Cuts = dict[str, LinearConfig]


def cuts_in_use(rows: int) -> Cuts:
    """Return the cut of each product where moments are given."""
    return {
        name: choose_config(rows, columns, depth, own_sums=False, exact=False, can_use_tma=True)
        for name, (depth, columns) in SHAPES.items()
    }


def candidates(rows: int, name: str) -> list[LinearConfig]:
    """Return the cuts worth timing."""
    depth = SHAPES[name][0]
    block_m, found = triton.next_power_of_2(rows), [cuts_in_use(rows)[name]]
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
        for block_m, tile, split_k in product((32, 64, 128), tiles, (1, 3, 6) if depth > 1024 else (1,)):
            block_n, block_k, num_stages = tile
            if block_m <= max(triton.next_power_of_2(rows), 32):
                num_warps = 8 if block_m == 128 else 4
                config = LinearConfig(
                    block_m, block_n, block_k, split_k, 1, num_warps, num_stages, use_tma=True
                )
                found += [config, replace(config, weights_left=True)] if block_m == 32 else [config]
    found += [replace(config, is_early=not config.is_early) for config in found]
    return list(dict.fromkeys(found))


class Chain:
    """Twelve layers' products, each of which waits for the one before. Attention is left out."""

    def __init__(self, rows: int, num_layers: int = NUM_LAYERS) -> None:
        torch.manual_seed(0)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, device="cuda") * scale).half()

        self.norm = (1 + random(WIDTH, scale=0.1), random(WIDTH, scale=0.1))
        self.biases = {name: random(columns, scale=0.1) for name, (_, columns) in SHAPES.items()}
        self.weights = [
            {
                name: random(columns, depth, scale=0.3 * depth**-0.5)
                for name, (depth, columns) in SHAPES.items()
            }
            for _ in range(num_layers)
        ]
        self.layers = [
            {name: self._pack(name, weight) for name, weight in weights.items()} for weights in self.weights
        ]
        self.start = random(rows, WIDTH)
        self.inputs = {"qkv": self.start, "attn_proj": random(rows, WIDTH), "fc": self.start}
        self.inputs["fc_proj"] = random(rows, 4 * WIDTH)

    def _pack(self, name: str, weight: torch.Tensor) -> PackedLinear:
        norm_weight, norm_bias = self.norm if name in NORMED else (None, None)
        return pack_linear(weight, self.biases[name], norm_weight=norm_weight, norm_bias=norm_bias, eps=EPS)

    def product(
        self,
        name: str,
        layer: PackedLinear,
        x: torch.Tensor,
        moments: torch.Tensor | None,
        config: LinearConfig,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run one product; return its result and, where a norm follows, the result's moments."""
        ends_block = name not in NORMED
        out = torch.empty((len(x), len(layer.weight)), dtype=x.dtype, device=x.device)
        out_moments = launch(
            x,
            layer.weight,
            layer.bias,
            layer.column_sums,
            self.start if ends_block else None,
            out,
            eps=EPS,
            gelu=name == "fc",
            x_moments=moments,
            with_moments=ends_block,
            config=config,
        )
        return out, out_moments

    def run(self, cuts: Cuts) -> None:
        hidden, moments = self.start, moments_of(self.start)
        for layer in self.layers:
            qkv, _ = self.product("qkv", layer["qkv"], hidden, moments, cuts["qkv"])
            hidden, moments = self.product(
                "attn_proj", layer["attn_proj"], qkv[:, :WIDTH], None, cuts["attn_proj"]
            )
            wide, _ = self.product("fc", layer["fc"], hidden, moments, cuts["fc"])
            hidden, moments = self.product("fc_proj", layer["fc_proj"], wide, None, cuts["fc_proj"])

    def error(self, name: str, config: LinearConfig) -> float:
        """Return how far one product is from float64."""
        x, weight = self.inputs[name], self.weights[0][name].double()
        exact = x.double()
        moments = None
        if name in NORMED:
            moments = moments_of(x)
            exact = F.layer_norm(exact, (WIDTH,), *(vector.double() for vector in self.norm), EPS)
        exact = exact @ weight.T + self.biases[name].double()
        if name == "fc":
            exact = F.gelu(exact, approximate="tanh")
        if name not in NORMED:
            exact = exact + self.start.double()
        result, _ = self.product(name, self.layers[0][name], x, moments, config)
        return (result.double() - exact).abs().max().item()


def moments_of(x: torch.Tensor) -> torch.Tensor:
    """Return the moments of ``x`` in 16 parts."""
    parts = x.float().view(len(x), 16, -1)
    return torch.stack([parts.sum(2), parts.square().sum(2)], 1)


def us_per_layer(chain: Chain, cuts: Cuts) -> float:
    """Return the median of a few samples."""
    graph = LaunchGraph([functools.partial(chain.run, cuts)])
    return statistics.median(graph.sample() for _ in range(7)) / NUM_LAYERS


def warm(job: tuple[int, int, int]) -> None:
    """Compile a share of the candidates into the cache that all processes share."""
    rows, worker, workers = job
    chain = Chain(rows, num_layers=1)
    jobs = [(name, config) for name in PRODUCTS for config in candidates(rows, name)]
    for name, config in jobs[worker::workers]:
        chain.error(name, config)


def search(rows: int) -> dict[str, Any]:
    """Return the fastest cuts that were found."""
    chain, best = Chain(rows), cuts_in_use(rows)
    in_use = fastest = us_per_layer(chain, best)
    for name in PRODUCTS * 2:
        for config in candidates(rows, name):
            error = chain.error(name, config)
            if not error < 0.02:
                raise SystemExit(f"{name}, {rows} rows, {config}: wrong by {error}")
            us = us_per_layer(chain, {**best, name: config})
            if us < fastest:
                fastest, best = us, {**best, name: config}
    found = {name: asdict(config) for name, config in best.items()}
    return {"rows": rows, "in_use_us": in_use, "fastest_us": fastest, "fastest": found}


def main() -> int:
    """Search for each number of rows and print what was found, in microseconds per layer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"needs a CUDA device; torch {torch.__version__} sees none", file=sys.stderr)
        return 1
    jobs = [(rows, worker, NUM_WORKERS) for rows in options.rows for worker in range(NUM_WORKERS)]
    with ProcessPoolExecutor(NUM_WORKERS, mp_context=get_context("spawn")) as pool:
        list(pool.map(warm, jobs))
    results = []
    for rows in options.rows:
        result = search(rows)
        results.append(result)
        print(
            f"{rows:3d} rows: in use {result['in_use_us']:.2f}, fastest {result['fastest_us']:.2f}",
            flush=True,
        )
        for name, config in result["fastest"].items():
            print(f"    {name:9s} {LinearConfig(**config)}", flush=True)
    if options.json:
        write_json(options.json, {**run_facts(), "device": torch.cuda.get_device_name(), "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
