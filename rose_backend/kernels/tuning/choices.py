"""What decides the speed of attention, products and experts on a GPU, and nothing else: see ``measured.txt``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from rose_backend.kernels.arguments import MAX_ROWS
from rose_backend.kernels.gpu_properties import gpu_properties
from rose_backend.kernels.tuning.measured import Facts, Table, Value, constants, next_power_of_2

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


LINEAR_PREFETCH = constants("linear prefetch")
INT4_ZEROS = constants("int4 zeros")
INT4_PREFETCH = constants("int4 prefetch")
_MIN_PROGRAMS = 96
"""That parts of the depth are for, where each program takes a multiprocessor's shared memory: an H100 and an H200 have
132."""
_MIN_QUANTIZED_PROGRAMS = 256
"""Likewise, where several programs fit a multiprocessor, and fewer have too few bytes under way."""
_TENSOR_MEMORY_DEPTH = 512


@lru_cache(maxsize=4096)
def choose_linear_config(
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
    config = _LINEAR.choose(facts)
    if has_tensor_memory and config.use_tma and config.block_k > _TENSOR_MEMORY_DEPTH:
        # As much shared memory, a part at a time; in two parts a kernel spilled registers.
        return replace(config, block_k=256, num_stages=config.block_k // 256)
    return config


@lru_cache(maxsize=4096)
def choose_float8_config(num_rows: int, num_columns: int, depth: int, *, split: bool) -> LinearConfig:
    """Return the configuration of a product with a float8 weight, of half precision.

    Args:
        split: activations are sums of two float8 numbers.
    """
    return _FLOAT8_LINEAR.choose({"rows": num_rows, "columns": num_columns, "depth": depth, "split": split})


@lru_cache(maxsize=4096)
def choose_int4_config(
    num_rows: int, num_columns: int, depth: int, *, step: int, exact: bool, has_wgmma: bool
) -> LinearConfig:
    """Return the configuration of a product with an int4 weight.

    Args:
        step: columns between those of a word; four times as many are multiplied at once.
        exact: float32 inputs.
        has_wgmma: tensor cores are asynchronous, and read a factor from shared memory.
    """
    facts = {"rows": num_rows, "columns": num_columns, "depth": depth, "step": step, "exact": exact}
    config = _INT4_LINEAR.choose(facts | {"wgmma": has_wgmma})
    return replace(config, block_k=4 * step)


_INT4_ROWS = 32
"""Rows of the smallest tile used where a product has more rows than that."""


def int4_kind(num_rows: int) -> Hashable:
    """Return what products with int4 weights are compiled for, besides the power of two that rows are rounded up to.

    The more tiles of rows there are, the fewer programs share the depth of each.
    """
    return -(-min(num_rows, MAX_ROWS + 1) // _INT4_ROWS)


def _depth(most: int, facts: Facts, values: Mapping[str, Value], least: int = 1) -> int:
    """Return the depth, rounded up to a power of two: at least ``least``, at most ``most``."""
    return min(max(next_power_of_2(int(facts["depth"])), least), most)


def _whole(most: int, facts: Facts, values: Mapping[str, Value]) -> int:
    return _depth(most, facts, values, least=128)


def _parts(part: int, facts: Facts, values: Mapping[str, Value]) -> int:
    return int(-(-facts["depth"] // part))


def _fill(min_programs: int, least: int, facts: Facts, values: Mapping[str, Value]) -> int:
    """Return how many programs share a tile's depth to make ``min_programs`` of them, of ``least`` each at least.

    No more than scratch memory has room for.
    """
    block_m, block_n = int(values["block_m"]), int(values["block_n"])  # type: ignore[arg-type]
    tiles = LinearConfig(block_m, block_n, 0).num_tiles(facts["rows"], facts["columns"])
    most = MAX_SPLIT_FLOATS // (tiles * block_m * block_n)
    parts = 1
    while tiles * parts < min_programs and facts["depth"] >= 2 * parts * least and 2 * parts <= most:
        parts *= 2
    return parts


def _num_programs(facts: Facts, config: LinearConfig) -> int:
    return config.num_tiles(facts["rows"], facts["columns"]) * config.split_k


def _num_scratch_floats(facts: Facts, config: LinearConfig) -> int:
    if config.split_k == 1:
        return 0
    return _num_programs(facts, config) * config.block_m * config.block_n


_LINEAR = Table(
    "linear",
    LinearConfig,
    ("rows", "columns", "depth", "exact", "tma"),
    rules={"depth": _depth, "whole": _whole, "parts": _parts, "fill": partial(_fill, _MIN_PROGRAMS)},
    results={"programs": _num_programs, "scratch": _num_scratch_floats},
)


_FLOAT8_LINEAR = Table(
    "float8 linear",
    LinearConfig,
    ("rows", "columns", "depth", "split"),
    rules={"fill": partial(_fill, _MIN_QUANTIZED_PROGRAMS)},
    results={},
)


_INT4_LINEAR = Table(
    "int4 linear",
    LinearConfig,
    ("rows", "columns", "depth", "step", "exact", "wgmma"),
    rules={"fill": partial(_fill, _MIN_QUANTIZED_PROGRAMS)},
    results={},
)


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """How one product is divided among programs."""

    block_m: int
    """Pairs of token and expert of a program."""
    block_n: int
    """Columns of the result of a program; of a gated product as many of the gate and of its factor."""
    block_k: int
    """Depth that is loaded at once."""
    num_warps: int = 4
    num_stages: int = 4
    weights_left: bool = False
    """Weights are the left factor, for which tensor cores have taller tiles: for fewer rows than columns."""
    use_tma: bool = False
    """Tiles of the weights are copied by the tensor memory accelerator."""


@lru_cache(maxsize=1024)
def choose_expert_config(
    num_pairs: int, num_experts: int, *, gated: bool, exact: bool, can_use_tma: bool, is_float8: bool = False
) -> ExpertConfig:
    """Return the measured configuration of a product of pairs of token and expert.

    Args:
        num_pairs: tokens of the step times the experts of each.
        exact: float32 inputs, which are multiplied without tensor cores.
        can_use_tma: the GPU has a tensor memory accelerator, and the weights lie as it needs them.
        is_float8: the weights are in 8 bits.
    """
    pairs_per_expert = num_pairs / num_experts
    if is_float8 and not exact:
        return _FLOAT8_EXPERTS.choose({"gated": gated, "pairs_per_expert": pairs_per_expert})
    return _EXPERTS.choose(
        {"exact": exact, "tma": can_use_tma, "gated": gated, "pairs_per_expert": pairs_per_expert}
    )


_EXPERTS = Table("experts", ExpertConfig, ("exact", "tma", "gated", "pairs_per_expert"))
_FLOAT8_EXPERTS = Table("float8 experts", ExpertConfig, ("gated", "pairs_per_expert"))
TUNED_PAIRS_PER_EXPERT = tuple(
    sorted({pairs for table in (_EXPERTS, _FLOAT8_EXPERTS) for pairs in table.borders("pairs_per_expert")})
)
"""Pairs of token and expert, on average over the experts, above which the choice changes, on one GPU or another."""


MAX_QUERY_ELEMENTS = 8192
"""Numbers that one program attends, unless one head's tokens are more: they stay in registers."""


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """How decode attention's work is divided and scheduled."""

    tile: int
    """Cached tokens per iteration, a power of two."""
    min_split: int
    """Tokens below which a row is not split further."""
    num_programs: int
    """Pieces of work wanted over all heads, beyond one per row and head."""
    use_dot: bool
    """Multiply on the matrix units, which needs a 16-bit type to be exact; otherwise lane by lane."""
    num_warps: int
    num_stages: int
    """Tiles in flight at once: through shared memory, or lane by lane into registers, besides the one attended."""
    max_registers: int | None = None
    """Per thread. The assembler's own choice may be a few too few."""
    max_whole: int = 0
    """Tokens up to which a row is never split: adding up would take longer than it saves."""
    fan_in: int = 8
    """Splits whose partial results the last of them adds up; at least 2."""
    kv_heads: int = 1
    """Lane by lane: heads that one program attends where each has one query; a power of two."""
    early_tiles: int = 0
    """With ``use_dot``, 0 or 1: the first tile waits in registers for the query. Short rows take less time; with many
    programs the registers are worth more."""
    early_dependents: bool = True
    """Where launches overlap: the next kernel may start as soon as all programs have. Else not before their last tiles:
    with many rows it and the kernels after it would compete with these for memory."""


@lru_cache(maxsize=4096)
def decode_tuning(
    head_size: int,
    dtype: torch.dtype,
    num_processors: int,
    *,
    cache_dtype: torch.dtype | None = None,
    num_rows: int = 64,
    num_queries: int = 1,
    num_kv_heads: int = 1,
    norms_heads: bool = False,
) -> DecodeTuning:
    """Return what was fastest on an H200 for this shape, or for the nearest that was measured.

    Args:
        dtype: of the query.
        cache_dtype: None is ``dtype``.
        num_queries: query heads times new tokens that one program attends, of those that share a KV head.
        norms_heads: query and key heads are normed.
    """
    num_heads = num_rows * num_kv_heads
    return _DECODE.choose(
        {
            "bits": 8 * dtype.itemsize,
            "cache_bits": 8 * (cache_dtype or dtype).itemsize,
            "head_size": head_size,
            "rows": num_rows,
            "queries": num_queries,
            "even_heads": num_kv_heads % 2 == 0,
            "norms": norms_heads,
            "heads_per_processor": num_heads / num_processors,
            "processors": num_processors,
        }
    )


def _query_warps(least: int, facts: Facts, values: object) -> int:
    """Return the warps of a program, each of which has registers for about 1,024 attended numbers."""
    head_tile = max(next_power_of_2(int(facts["head_size"])), 16)
    numbers: int = next_power_of_2(int(facts["queries"])) * head_tile
    return min(max(numbers // 1024, least), 8)


_DECODE = Table(
    "decode attention",
    DecodeTuning,
    (
        "bits",
        "cache_bits",
        "head_size",
        "rows",
        "queries",
        "even_heads",
        "norms",
        "heads_per_processor",
    ),
    rules={
        "processors": lambda number, facts, values: number * int(facts["processors"]),
        "query_warps": _query_warps,
    },
)


_MOST_AT_ONCE = constants("decode attention in turns")["heads_per_processor"]


def begins_in_turns(num_heads: int, num_processors: int) -> bool:
    """Return whether programs of decode attention, one per KV head and row, are too many to run all at once."""
    return num_heads > _MOST_AT_ONCE * num_processors


def heads_per_program(group: int, num_tokens: int, head_tile: int) -> int:
    """Return how many of the ``group`` query heads of a KV head one program attends; a divisor of ``group``."""
    for heads in range(group, 1, -1):
        query_tile = next_power_of_2(heads * num_tokens)
        if group % heads == 0 and query_tile * head_tile <= MAX_QUERY_ELEMENTS:
            return heads
    return 1


def num_processors(device: torch.device) -> int:
    """Return a CUDA device's multiprocessors, 1 elsewhere."""
    return 1 if device.type == "cpu" else gpu_properties(device).num_processors


def rows_tile(num_rows: int) -> int:
    """Return how many rows a program of decode or prefill attention looks through to find its own.

    Each size is a separate kernel, compiled when it is first needed, and an engine has graphs of dozens of numbers of
    rows. A warp looks at 32 at once.
    """
    return next((size for size in (32, 256, 1024) if size >= num_rows), next_power_of_2(num_rows))


def decode_kind(
    num_rows: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    num_processors: int,
    cache_dtype: torch.dtype | None = None,
    max_query_len: int = 1,
) -> Hashable:
    """Return what decode attention over ``num_rows`` rows is compiled for; equal where the kernels are the same.

    Args:
        num_processors: multiprocessors of the GPU.
        cache_dtype: None is ``dtype``.
    """
    group = heads_per_program(num_heads // num_kv_heads, max_query_len, max(next_power_of_2(head_size), 16))
    tunings = (
        decode_tuning(
            head_size,
            dtype,
            num_processors,
            cache_dtype=cache_dtype,
            num_rows=num_rows,
            num_queries=group * max_query_len,
            num_kv_heads=num_kv_heads,
            norms_heads=norms_heads,
        )
        for norms_heads in (False, True)
    )
    in_turns = begins_in_turns(num_rows * num_kv_heads, num_processors)
    return *tunings, in_turns, num_rows == 1, rows_tile(num_rows)


def row_counts(limit: int, kind: Callable[[int], Hashable] = lambda num_rows: None) -> list[int]:
    """Return numbers of rows up to ``limit``, one for each group that kernels are compiled apart for.

    Groups differ in the power of two that numbers are rounded up to, or in ``kind``. No kernel is specialized for a
    number of rows or tokens itself, nor for what divides it.
    """
    first_of_each: dict[Hashable, int] = {}
    for count in range(1, limit + 1):
        first_of_each.setdefault(((count - 1).bit_length(), kind(count)), count)
    return sorted(first_of_each.values())


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Of prefill attention. Tiles are powers of two of at least 16."""

    query_tile: int
    tile: int
    """Keys per iteration."""
    num_warps: int
    num_stages: int
    by_descriptor: bool
    """Load the chunk's keys and values through tensor descriptors, by the copy engine of compute capability 9.0. Only
    for 16-bit types and heads of a power of two."""
    split: bool
    """Attend the chunk's tiles before the queries' own in a separate loop, without a causal mask."""


@lru_cache(maxsize=1024)
def prefill_tuning(
    mean_query_len: float,
    head_size: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    *,
    is_describable: bool,
) -> PrefillTuning:
    """Return what was fastest on an H200 for this shape; elsewhere what fits the registers.

    Args:
        is_describable: whether tensor descriptors of the chunk's keys and values are possible.
    """
    major, minor = capability
    return _PREFILL.choose(
        {
            "bits": 8 * dtype.itemsize,
            "query_len": mean_query_len,
            "head_size": head_size,
            "capability": 10 * major + minor,
            "describable": is_describable,
        }
    )


_PREFILL = Table(
    "prefill attention", PrefillTuning, ("bits", "query_len", "head_size", "capability", "describable")
)
TUNED_QUERY_LENS = (1, *_PREFILL.steps("query_len"))
"""Mean query lengths from which on the choice changes, for one shape or another."""
