"""How a product of a few rows is tiled, as measured by ``benchmarks.tune_decode_layer``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from rose_backend.kernels.tuning.measured import Facts, Table, Value, next_power_of_2

MAX_SPLIT_COLUMNS = 4096
MAX_SPLIT_FLOATS = MAX_SPLIT_COLUMNS * 768
"""Scratch memory for the parts of a product whose depth is split over programs."""


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """How one product is divided among programs."""

    block_m: int
    """Rows of a program."""
    block_n: int
    """Columns of a program."""
    block_k: int
    """Depth that is loaded at once. If it covers a program's whole depth, weights are loaded before ``x`` is there."""
    split_k: int = 1
    """Programs that share one tile's depth."""
    warp_split: int = 1
    """Warps that share a program's depth, with ``use_dot`` and ``block_k`` covering it: 1 or ``num_warps``."""
    num_warps: int = 4
    num_stages: int = 3
    use_dot: bool = True
    """Tensor cores; else float32 products of up to two rows."""
    weights_left: bool = False
    """Weights are the left factor, for which tensor cores have taller tiles: for fewer rows than columns."""
    use_tma: bool = False
    """Tiles are copied by the tensor memory accelerator, which fills up with zeros what lies beyond the depth."""
    is_early: bool = True
    """The next kernel may start at once, not when ``x`` is loaded: its weights come earlier, but its programs take
    up processors for longer."""

    def num_tiles(self, num_rows: float, num_columns: float) -> int:
        """Return how many tiles of results there are."""
        return int(-(-num_rows // self.block_m) * -(-num_columns // self.block_n))


_MIN_PROGRAMS = 96
"""That parts of the depth are for, where each program takes a multiprocessor's shared memory: an H100 and an H200 have
132."""
_TENSOR_MEMORY_DEPTH = 512


@lru_cache(maxsize=4096)
def choose_config(
    num_rows: int,
    num_columns: int,
    depth: int,
    *,
    exact: bool,
    can_use_tma: bool,
    has_tensor_memory: bool = False,
) -> LinearConfig:
    """Return the measured configuration of a product.

    Args:
        exact: float32 inputs, which are multiplied without tensor cores.
        can_use_tma: the GPU has a tensor memory accelerator, and ``x`` and the weight lie as it needs them.
        has_tensor_memory: see ``GpuProperties``.
    """
    facts = {"rows": num_rows, "columns": num_columns, "depth": depth, "exact": exact, "tma": can_use_tma}
    config = _TABLE.choose(facts)
    if has_tensor_memory and config.use_tma and config.block_k > _TENSOR_MEMORY_DEPTH:
        # As much shared memory, a part at a time; in two parts a kernel spilled registers.
        return replace(config, block_k=256, num_stages=config.block_k // 256)
    return config


def _depth(most: int, facts: Facts, values: Mapping[str, Value], least: int = 1) -> int:
    """Return the depth, rounded up to a power of two: at least ``least``, at most ``most``."""
    return min(max(next_power_of_2(int(facts["depth"])), least), most)


def _whole(most: int, facts: Facts, values: Mapping[str, Value]) -> int:
    return _depth(most, facts, values, least=128)


def _parts(part: int, facts: Facts, values: Mapping[str, Value]) -> int:
    return int(-(-facts["depth"] // part))


def _fill(least: int, facts: Facts, values: Mapping[str, Value]) -> int:
    """Return how many programs share a tile's depth to fill the GPU, of ``least`` each at least."""
    sizes = (int(values["block_m"]), int(values["block_n"]), 0)  # type: ignore[arg-type]
    tiles = LinearConfig(*sizes).num_tiles(facts["rows"], facts["columns"])
    parts = 1
    while tiles * parts < _MIN_PROGRAMS and facts["depth"] >= 2 * parts * least:
        parts *= 2
    return parts


def _num_programs(facts: Facts, config: LinearConfig) -> int:
    return config.num_tiles(facts["rows"], facts["columns"]) * config.split_k


def _num_scratch_floats(facts: Facts, config: LinearConfig) -> int:
    if config.split_k == 1:
        return 0
    return _num_programs(facts, config) * config.block_m * config.block_n


_TABLE = Table(
    "linear",
    LinearConfig,
    ("rows", "columns", "depth", "exact", "tma"),
    rules={"depth": _depth, "whole": _whole, "parts": _parts, "fill": _fill},
    results={"programs": _num_programs, "scratch": _num_scratch_floats},
)
