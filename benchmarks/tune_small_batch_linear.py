"""Time every sensible cut of the small-batch products on this GPU and print the best one per shape.

    python -m benchmarks.tune_small_batch_linear [--json FILE] [--rows 1 2 4 8 16 32 64]

Each figure is microseconds per launch in a CUDA graph of dependent launches over so many weight sets that they do not
fit the L2 cache. Every cut is first compared with float64. The baseline is cuBLAS with separate element-wise kernels.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
import triton

from rose_backend.kernels.gpu.small_batch_linear import LinearConfig
from rose_backend.kernels.gpu.small_batch_linear import small_batch_linear as launch
from rose_backend.kernels.small_batch_linear import pack_linear

SHAPES = {  # name: depth, columns, norm, gelu, residual
    "qkv": (768, 2304, True, False, False),
    "attention projection": (768, 768, False, False, True),
    "fc": (768, 3072, True, True, False),
    "fc projection": (3072, 768, False, False, True),
}
WEIGHT_BYTES = 160 << 20


def configs(rows: int, depth: int, has_norm: bool) -> list[LinearConfig]:
    """Return the cuts worth timing; wider searches have not found others among the best three."""
    whole = triton.next_power_of_2(depth)
    found = []
    if rows <= 8:
        for block_n, warps in [(2, 2), (2, 4), (2, 8), (4, 2), (4, 4), (4, 8), (8, 2), (8, 4)]:
            for block_k in {min(whole, 1024), whole}:
                if rows * block_n * block_k <= 32768:
                    found.append(LinearConfig(block_n, block_k, 1, warps, 3, False))
    if rows >= 4:
        for block_n, warps in product([16, 32], [2, 4, 8]):
            cuts = [(min(whole, 1024), 1, 3), (256, 1, 3), (256, 1, 5), (128, 1, 5)]
            if not has_norm:
                cuts += [(whole // 4, 4, 3), (whole // 8, 8, 3), (256, 4, 3), (256, 4, 5)]
            for block_k, split_k, stages in dict.fromkeys(cuts):
                deep = -(-depth // split_k // block_k) * block_k
                in_flight = 1 if deep == block_k else stages
                if (max(rows, 16) + block_n) * block_k * in_flight * 2 <= 220_000:
                    found.append(LinearConfig(block_n, block_k, split_k, warps, stages, True))
    return found


class Case:
    def __init__(self, name: str, rows: int, sets: int | None = None) -> None:
        depth, columns, norm, self.gelu, residual = SHAPES[name]
        torch.manual_seed(0)
        sets = sets or max(2, WEIGHT_BYTES // (depth * columns * 2))

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, device="cuda") * scale).half()

        self.norm = (1 + random(depth, scale=0.1), random(depth, scale=0.1)) if norm else (None, None)
        self.weights = [random(columns, depth, scale=depth**-0.5) for _ in range(sets)]
        self.bias = random(columns)
        self.layers = [
            pack_linear(weight, self.bias, norm_weight=self.norm[0], norm_bias=self.norm[1], eps=1e-5)
            for weight in self.weights
        ]
        self.x = random(rows, depth)
        self.residual = random(rows, columns) if residual else None
        self.out = torch.empty((rows, columns), device="cuda", dtype=torch.float16)

    def run(self, config: LinearConfig, use_pdl: bool, count: int | None = None) -> None:
        for layer in self.layers[:count]:
            launch(self.x, layer.weight, layer.bias, layer.column_sums, self.residual, self.out,
                   eps=1e-5, gelu=self.gelu, config=config, use_pdl=use_pdl)  # fmt: skip

    def baseline(self) -> None:
        for weight in self.weights:
            x = self.x if self.norm[0] is None else F.layer_norm(self.x, (self.x.shape[1],), *self.norm, 1e-5)
            y = torch.addmm(self.bias, x, weight.T)
            if self.gelu:
                y = F.gelu(y, approximate="tanh")
            if self.residual is not None:
                y = y + self.residual

    def exact(self) -> torch.Tensor:
        x = self.x.double()
        if self.norm[0] is not None:
            x = F.layer_norm(x, (x.shape[1],), self.norm[0].double(), self.norm[1].double(), 1e-5)
        y = x @ self.weights[0].double().T + self.bias.double()
        if self.gelu:
            y = F.gelu(y, approximate="tanh")
        return y if self.residual is None else y + self.residual.double()


def graph_us(function, launches: int) -> float:
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times[2:])


def warm(job: tuple[str, int, int, int]) -> None:
    """Compile a share of one shape's candidates into the cache that all processes share."""
    name, rows, worker, workers = job
    case = Case(name, rows, sets=1)
    depth, _, norm, _, _ = SHAPES[name]
    for index, config in enumerate(configs(rows, depth, norm)):
        if index % workers == worker:
            for use_pdl in (False, True):
                case.run(config, use_pdl, 1)
    torch.cuda.synchronize()


def time_all(case: Case, name: str, rows: int) -> list[tuple[float, bool, LinearConfig]]:
    """Return microseconds, use of programmatic dependent launch, and cut of all candidates, the fastest first."""
    depth, _, has_norm, _, _ = SHAPES[name]
    exact, launches = case.exact(), len(case.layers)
    timed = []
    for config, use_pdl in product(configs(rows, depth, has_norm), (False, True)):
        case.out.fill_(float("nan"))
        case.run(config, use_pdl, 1)
        error = (case.out.double() - exact).abs().max().item()
        if not error < 0.02:
            raise SystemExit(f"{name}, {rows} rows, {config}: wrong by {error}")
        timed.append((graph_us(functools.partial(case.run, config, use_pdl), launches), use_pdl, config))
    return sorted(timed, key=lambda item: item[0])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workers", type=int, default=16, help="processes that compile")
    options = parser.parse_args()
    jobs = [(name, rows, worker, 4) for rows in options.rows for name in SHAPES for worker in range(4)]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(warm, jobs))
    results = []
    for rows, name in product(options.rows, SHAPES):
        case = Case(name, rows)
        baseline = graph_us(case.baseline, len(case.layers))
        timed = time_all(case, name, rows)
        depth, columns = SHAPES[name][:2]
        result = {
            "product": name,
            "rows": rows,
            "baseline_us": baseline,
            "floor_us": depth * columns * 2 / 4.3e6,
            "plain": [[us, asdict(config)] for us, use_pdl, config in timed if not use_pdl][:4],
            "pdl": [[us, asdict(config)] for us, use_pdl, config in timed if use_pdl][:4],
        }
        results.append(result)
        print(f"{name:22s} rows {rows:3d}  cuBLAS {baseline:5.2f}  floor {result['floor_us']:4.2f}")
        for us, use_pdl, config in timed[:3]:
            print(f"    {us:5.2f} {'pdl  ' if use_pdl else 'plain'} {config}", flush=True)
    if options.json:
        device = torch.cuda.get_device_name()
        report = {
            "device": device,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "results": results,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
