"""Benchmarks that time variants of one job on a KV cache ``[L, 2, NB, BS, H, D]``, each in parts."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.reports.parts import OURS, variant_losses
from benchmarks.reports.text import publish
from benchmarks.support.cli import check_at_least, new_parser
from benchmarks.support.run_facts import device_name, run_facts
from benchmarks.support.timing import Samples, alternate, no_garbage_collection, spreads

SIZES = ("block_size", "layers", "heads", "head_size")


@dataclass(frozen=True)
class CacheCase:
    """Shapes of one measurement. Subclasses say how many blocks there are."""

    batch: int
    block_size: int
    num_layers: int = 12
    num_heads: int = 12
    head_size: int = 64

    @property
    def num_blocks(self) -> int:
        """The null block and all others."""
        raise NotImplementedError

    def make_cache(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a cache ``[L, 2, NB, BS, H, D]`` of random numbers, so that a copy that did not happen shows."""
        size = (self.num_layers, 2, self.num_blocks, self.block_size, self.num_heads, self.head_size)
        return torch.randn(size, device=device, dtype=torch.float32).to(dtype)

    def make_step(self, kinds: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return what a projection gives for one token of each sequence, ``[L, kinds, B, H, D]``."""
        size = (self.num_layers, kinds, self.batch, self.num_heads, self.head_size)
        return torch.randn(size, device=device, dtype=torch.float32).to(dtype)


class Clock:
    """Times parts one after the other, each finished on the device before the next starts."""

    def __init__(self, device: torch.device) -> None:
        self._synchronise: Callable[[], None] = (
            torch.cuda.synchronize if device.type == "cuda" else lambda: None
        )
        self.parts_us: dict[str, float] = {}
        self._start = 0.0

    def start(self) -> None:
        """Begin."""
        self._synchronise()
        self._start = time.perf_counter()

    def part(self, name: str) -> None:
        """Note what has passed since the last part as ``name``."""
        self._synchronise()
        now = time.perf_counter()
        self.parts_us[name] = (now - self._start) * 1e6
        self._start = now


def new_variants_parser(description: str | None, *, block_size: int) -> argparse.ArgumentParser:
    """Return a parser of device, number type and shapes; ``check_variants_options`` checks them."""
    parser = new_parser(description)
    add, default = parser.add_argument, "default: %(default)s"
    add("--device", choices=("cpu", "cuda"), default="cpu", help=default)
    add("--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help=default)
    for name, value in zip(SIZES, (block_size, 12, 12, 64), strict=True):
        add(f"--{name.replace('_', '-')}", type=int, default=value, help=default)
    add("--repeats", type=int, default=20, help="at least 3 (default: %(default)s)")
    return parser


def check_variants_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with what is wrong."""
    check_at_least(parser, options, 3, "repeats")
    check_at_least(parser, options, 1, *SIZES)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} sees no CUDA device")


def shape_of(options: argparse.Namespace) -> dict[str, int]:
    """Return the cache's sizes under the names that cases have."""
    names = ("block_size", "num_layers", "num_heads", "head_size")
    return dict(zip(names, (getattr(options, name) for name in SIZES), strict=True))


def timed(
    variants: Mapping[str, Any], inputs: torch.Tensor, device: torch.device, repeats: int, *, warm_ups: int
) -> dict[str, Any]:
    """Return spreads in microseconds by variant and part, ``total`` included."""

    def runner(variant: Any) -> Callable[[], Samples]:
        def run() -> Samples:
            clock = Clock(device)
            variant.run(inputs, clock)
            total = sum(clock.parts_us.values())
            return {**{name: [us] for name, us in clock.parts_us.items()}, "total": [total]}

        return run

    runs = {name: runner(variant) for name, variant in variants.items()}
    alternate(runs, warm_ups)  # compilation, first touch of memory
    with no_garbage_collection():
        return spreads(alternate(runs, repeats))


def report_variants(
    options: argparse.Namespace,
    benchmark: str,
    rows: Sequence[dict[str, Any]],
    settings: Mapping[str, Any],
    table: Callable[[dict[str, Any]], str],
    **facts: Any,
) -> None:
    """Print rows with ``batch`` and ``variants``, and write them where the options say."""
    known = run_facts()
    known["machine"] |= {"device": device_name(options.device), "torch_threads": torch.get_num_threads()}
    chosen = {name: getattr(options, name) for name in ("device", "dtype", "quick")}
    report = {
        "benchmark": benchmark,
        **known,
        "settings": {**settings, **chosen},
        **facts,
        "losses": variant_losses(rows, OURS[benchmark]),
        "rows": list(rows),
    }
    publish(report, table(report), options.json)
