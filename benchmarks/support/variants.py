"""Benchmarks that time variants of one job on a KV cache ``[L, 2, NB, BS, H, D]``, each in parts."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.reports.parts import OURS, variant_losses
from benchmarks.reports.text import publish
from benchmarks.support.cli import check_at_least, new_parser
from benchmarks.support.run_facts import device_name, run_facts
from benchmarks.support.timing import Samples, alternate, no_garbage_collection, spreads
from rose_backend.block_manager import BlockManager

WARM_UPS = 3
"""Runs that are not counted: compilation, first touch of memory."""


@dataclass(frozen=True)
class CacheCase:
    """Shapes of one measurement. Subclasses say how many blocks the cache has."""

    batch: int
    block_size: int = 16
    num_layers: int = 12
    num_heads: int = 12
    head_size: int = 64
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def num_blocks(self) -> int:
        """The null block and all others."""
        raise NotImplementedError

    def random(self, *size: int) -> torch.Tensor:
        """Return random numbers ``[L, *size, H, D]``."""
        size = (self.num_layers, *size, self.num_heads, self.head_size)
        return torch.randn(size, device=self.device).to(self.dtype)

    def make_cache(self) -> torch.Tensor:
        """Return a cache of random numbers, so that a copy that did not happen shows."""
        return self.random(2, self.num_blocks, self.block_size)


class Variant(Protocol):
    """One way to do the job."""

    def run(self, inputs: torch.Tensor) -> Iterator[str]:
        """Do it once. Yield anything when all is ready, then the name of each part at its end."""


def computed_row(manager: BlockManager, prompt: np.ndarray, **matching: Any) -> int:
    """Add and compute a prompt; return its row. ``matching``: as ``BlockManager.match`` takes it."""
    admission = manager.add(prompt, match=manager.match(prompt, **matching))
    assert admission is not None
    row, new_tokens = np.array([admission.row]), prompt[admission.num_cached_tokens :]
    assert manager.reserve(row, len(new_tokens)).ok, "the pool is too small"
    manager.commit(row, len(new_tokens), new_tokens)
    return admission.row


def new_variants_parser(description: str | None, *, block_size: int) -> argparse.ArgumentParser:
    """Return a parser of device, number type and shapes."""
    parser = new_parser(description)
    add, default = parser.add_argument, "default: %(default)s"
    add("--device", choices=("cpu", "cuda"), default="cpu", help=default)
    add("--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help=default)
    add("--block-size", type=int, default=block_size, help=default)
    add("--layers", type=int, default=12, help=default)
    add("--heads", type=int, default=12, help=default)
    add("--head-size", type=int, default=64, help=default)
    add("--repeats", type=int, default=20, help="at least 3 (default: %(default)s)")
    return parser


def parse_variants(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, with the ``shape`` of cases; exit with what is wrong."""
    options = parser.parse_args(arguments)
    check_at_least(parser, options, 3, "repeats")
    check_at_least(parser, options, 1, "block_size", "layers", "heads", "head_size")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} sees no CUDA device")
    if options.quick:
        options.repeats = 3
    options.shape = {
        "block_size": options.block_size,
        "num_layers": options.layers,
        "num_heads": options.heads,
        "head_size": options.head_size,
        "dtype": getattr(torch, options.dtype),
        "device": options.device,
    }
    torch.manual_seed(0)
    return options


def part_times(parts: Iterator[str], device: str) -> Samples:
    """Run a variant; microseconds of each part, finished on the device before the next starts, and in ``total``."""
    times: Samples = {}
    next(parts)
    synchronise = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronise()
    start = time.perf_counter()
    for name in parts:
        synchronise()
        now = time.perf_counter()
        times[name] = [(now - start) * 1e6]
        start = now
    return {**times, "total": [sum(us for (us,) in times.values())]}


def timed(variants: Mapping[str, Variant], inputs: torch.Tensor, device: str, repeats: int) -> dict[str, Any]:
    """Return spreads in microseconds by variant and part, ``total`` included."""
    runs = {
        name: lambda variant=variant: part_times(variant.run(inputs), device)
        for name, variant in variants.items()
    }
    alternate(runs, WARM_UPS)
    with no_garbage_collection():
        return spreads(alternate(runs, repeats))


def report_variants(
    options: argparse.Namespace,
    benchmark: str,
    case: CacheCase,
    rows: list[dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
) -> None:
    """Print rows with ``batch`` and ``variants``, and write them where the options say; ``case`` tells the shapes."""
    known = run_facts()
    known["machine"] |= {"device": device_name(options.device), "torch_threads": torch.get_num_threads()}
    settings = {name: value for name, value in vars(case).items() if name != "batch"}
    chosen = {name: getattr(options, name) for name in ("device", "dtype", "repeats", "quick")}
    report = {
        "benchmark": benchmark,
        **known,
        "settings": {**settings, **chosen},
        "losses": variant_losses(rows, OURS[benchmark]),
        "rows": rows,
    }
    publish(report, table(report), options.json)
