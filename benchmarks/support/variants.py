"""Benchmarks that time variants of one job on a KV cache ``[L, 2, NB, BS, H, D]``, each in parts."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks.reports.parts import OURS, variant_losses
from benchmarks.reports.text import publish
from benchmarks.support.cli import check_at_least, new_parser
from benchmarks.support.run_facts import device_name, run_facts
from benchmarks.support.timing import Samples, alternate, no_garbage_collection, spread, spreads
from rose_backend.block_manager import BlockManager

WARM_UPS = 3
"""Runs that are not counted: compilation, first touch of memory."""
_CHOICES = {"device": ("cpu", "cuda"), "dtype": ("float32", "float16", "bfloat16")}


@dataclass(frozen=True)
class CacheCase:
    """One measurement. Each field but ``batch`` is an option; subclasses say how many blocks the cache has."""

    batch: int = 1
    block_size: int = 16
    num_layers: int = 12
    num_heads: int = 12
    head_size: int = 64
    device: str = "cpu"
    dtype: str = "float32"
    repeats: int = 20

    def random(self, *size: int) -> torch.Tensor:
        """Return random numbers ``[L, *size, H, D]``."""
        size = (self.num_layers, *size, self.num_heads, self.head_size)
        return torch.randn(size, device=self.device).to(getattr(torch, self.dtype))

    def make_cache(self) -> torch.Tensor:
        """Return a cache of random numbers, so that a copy that did not happen shows."""
        return self.random(2, self.num_blocks, self.block_size)

    def make_step(self, kinds: int) -> torch.Tensor:
        """Return what a projection gives for one token of each sequence, ``[L, kinds, B, H, D]``."""
        return self.random(kinds, self.batch)


Case = TypeVar("Case", bound=CacheCase)


def computed_row(manager: BlockManager, prompt: np.ndarray, **matching: Any) -> int:
    """Add and compute a prompt; return its row. ``matching``: as ``BlockManager.match`` takes it."""
    admission = manager.add(prompt, match=manager.match(prompt, **matching))
    assert admission is not None
    row, new_tokens = np.array([admission.row]), prompt[admission.num_cached_tokens :]
    assert manager.reserve(row, len(new_tokens)).ok, "the pool is too small"
    manager.commit(row, len(new_tokens), new_tokens)
    return admission.row


def parse_case(
    case: type[Case], description: str | None, arguments: Sequence[str] | None
) -> tuple[argparse.ArgumentParser, argparse.Namespace, Case]:
    """Return the parser, the options and the case that they describe, or exit with what is wrong."""
    parser = new_parser(description)
    sizes = {field.name.removeprefix("num_"): field for field in fields(case) if field.name != "batch"}
    for name, field in sizes.items():
        choices, value = _CHOICES.get(name), field.default
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(value),
            choices=choices,
            default=value,
            help="default: %(default)s",
        )
    options = parser.parse_args(arguments)
    check_at_least(parser, options, 3, "repeats")
    check_at_least(parser, options, 1, *(name for name in sizes if name not in _CHOICES))
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} sees no CUDA device")
    if options.quick:
        options.repeats = 3
    torch.manual_seed(0)
    return parser, options, case(**{field.name: getattr(options, name) for name, field in sizes.items()})


def part_times(parts: Iterator[str], device: str) -> Samples:
    """Run a variant; microseconds of each part, finished on the device before the next starts, and in ``total``.

    Args:
        parts: yields anything when all is ready, then the name of each part at its end.
    """
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


def measure(case: CacheCase, makes: Mapping[str, Callable[..., Any]], kinds: int) -> dict[str, Any]:
    """Time every variant for one batch size; microseconds by variant and part, ``total`` included."""
    cache, inputs = case.make_cache(), case.make_step(kinds)
    variants = {name: make(case, cache) for name, make in makes.items()}
    runs = {
        name: lambda variant=variant: part_times(variant.run(inputs), case.device)
        for name, variant in variants.items()
    }
    alternate(runs, WARM_UPS)
    with no_garbage_collection():
        figures = spreads(alternate(runs, case.repeats))
    for name, variant in variants.items():
        if case.device == "cuda" and hasattr(variant, "graph_us"):
            figures[name]["graph"] = spread(variant.graph_us(inputs))
    return {"batch": case.batch, "variants": figures}


def compare_variants(
    benchmark: str,
    options: argparse.Namespace,
    cases: Sequence[CacheCase],
    makes: Mapping[str, Callable[..., Any]],
    kinds: int,
    table: Callable[[dict[str, Any]], str],
) -> int:
    """Measure, print, write; return the status."""
    rows = [measure(case, makes, kinds) for case in cases]
    known = run_facts()
    known["machine"] |= {"device": device_name(options.device), "torch_threads": torch.get_num_threads()}
    report = {
        "benchmark": benchmark,
        **known,
        "settings": {
            **{name: value for name, value in vars(cases[0]).items() if name != "batch"},
            "quick": options.quick,
        },
        "losses": variant_losses(rows, OURS[benchmark]),
        "rows": rows,
    }
    publish(report, table(report), options.json)
    return 0
