"""Find the fastest tile configurations of a decode layer's kernels on this GPU, attention and four products together.

    python -m benchmarks.tune_decode_layer [--shape qwen3-0.6b] [--rows 1 8 32 128 256] [--contexts 144 100-1100]
                                           [--parts attention 4096x1024] [--layers N] [--json FILE]

A kernel's best tile configuration depends on what its neighbors leave free, so each candidate is timed in a CUDA graph
of all layers of a model with random weights, or of so many that the L2 cache cannot hold them, with the best known
configurations of the other kernels. The search starts with those in use. Before they are timed, configurations are
compiled in several processes and their hidden states are compared there, over two layers, with those of library
products: one is dropped if its error is more than twice that of the configurations in use.
The fastest ones are printed as rows for ``rose_backend/kernels/tuning/measured.txt``.

Rows of a range of contexts are of lengths drawn from it. What is fastest for equal rows can be slow there: a step waits
for its longest row.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from itertools import islice, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

from benchmarks.kernel_cases.case import LaunchGraph
from benchmarks.support.checkpoint import GPT2_124M, QUANTIZED_FORMATS, SHAPES, config_of
from benchmarks.support.run_facts import run_facts, write_json
from rose_backend.kernels.arguments import MAX_ROWS, SCALED_BLOCK, Float8Weight, Int4Weight, Weight
from rose_backend.kernels.attention import paged_decode as decode_gpu
from rose_backend.kernels.gpu_properties import gpu_properties
from rose_backend.kernels.linear import small_batch_linear as linear_gpu
from rose_backend.kernels.tuning.choices import (
    MAX_SPLIT_FLOATS,
    DecodeTuning,
    LinearConfig,
    choose_float8_config,
    choose_int4_config,
    choose_linear_config,
    decode_tuning,
)
from rose_backend.layers.attention import AttentionMetadata
from rose_backend.layers.linear import SparseMlp
from rose_backend.models.base import load_model

MAX_SHARED_BYTES = 220_000
BLOCK_SIZE = 16
NUM_SAMPLES = 5
PROGRAMS = (1, 2, 3, 4, 6, 8, 12, 15, 18)
"""Pieces of attention's work that are wanted, for each processor."""
MIN_PROGRAMS, MAX_PROGRAMS = 90, 800
"""Of a product with a quantized weight."""
ATTENTION = "attention"


Context = tuple[int, int]
"""Tokens in the cache of a row, at least and at most."""


@dataclass(frozen=True)
class Cuts:
    """How each kernel of a layer is cut."""

    attention: DecodeTuning
    products: dict[tuple[int, int], LinearConfig] = field(default_factory=dict)
    """By columns and depth."""

    def changed(self, part: str, cut: Any) -> Cuts:
        """Return these with another cut of one kernel."""
        if part == ATTENTION:
            return replace(self, attention=cut)
        return replace(self, products={**self.products, _sizes(part): cut})

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Let the kernels be cut so."""

        def choose(rows: int, columns: int, depth: int, **_: object) -> LinearConfig:
            return self.products[columns, depth]

        with (
            mock.patch.object(linear_gpu, "choose_linear_config", choose),
            mock.patch.object(linear_gpu, "choose_float8_config", choose),
            mock.patch.object(linear_gpu, "choose_int4_config", choose),
            mock.patch.object(decode_gpu, "decode_tuning", lambda *_, **__: self.attention),
        ):
            yield


class Step:
    """A decode step of a model: all layers behind the embedding, and the norm behind them."""

    def __init__(self, model: Any, rows: int, context: Context) -> None:
        self.model, self.context = model, context
        config = model.config
        generator = torch.Generator("cuda").manual_seed(1)
        lengths = torch.randint(
            context[0], context[1] + 1, (rows,), generator=generator, device="cuda", dtype=torch.int32
        )
        counts = lengths // BLOCK_SIZE + 1
        num_blocks = int(counts.sum())
        shape = (config.num_layers, 2, num_blocks + 1, BLOCK_SIZE, config.num_kv_heads, config.head_size)
        self.cache = torch.empty(shape, dtype=config.dtype, device="cuda")
        for layer in self.cache:
            layer.normal_(generator=generator)
        blocks = torch.randperm(num_blocks, generator=generator, device="cuda").int() + 1
        table = torch.zeros((rows, int(counts.max())), dtype=torch.int32, device="cuda")
        table[torch.arange(table.shape[1], device="cuda") < counts[:, None]] = blocks
        self.metadata = AttentionMetadata(None, lengths, table, None, rows)
        self.positions = lengths.long()
        self.ids = torch.randint(config.vocab_size, (rows,), generator=generator, device="cuda")

    @torch.inference_mode()
    def run(self) -> torch.Tensor:
        """Return the hidden states behind the final norm."""
        hidden: torch.Tensor = self.model.forward(self.ids, self.positions, self.cache, self.metadata)
        return hidden

    def by_library(self) -> Any:
        """Return a context in which a library multiplies."""
        return mock.patch.object(self.model, "_decoder", replace(self.model._decoder, max_packed_rows=0))

    @functools.cached_property
    def weights(self) -> dict[tuple[int, int], Weight]:
        """The matrices of the first layer, by columns and depth; of experts the router alone."""
        layer = self.model.weights.layers[0]
        mlp = layer.mlp
        of_mlp = (mlp.router,) if isinstance(mlp, SparseMlp) else (mlp.gate_up, mlp.down)
        packed = (linear.packed.weight for linear in (layer.qkv, layer.attn_out, *of_mlp))
        return {(weight.shape[0], weight.shape[1]): weight for weight in packed}

    def splits(self, columns: int, depth: int) -> bool:
        """Whether activations of a product are sums of two float8 numbers."""
        x = torch.empty(0, depth, dtype=self.model.config.dtype, device=self.ids.device)
        return isinstance(self.weights[columns, depth], Float8Weight) and linear_gpu.can_split(x)

    def config_in_use(self, columns: int, depth: int) -> LinearConfig:
        """Return the cut of a product."""
        weight, rows = self.weights[columns, depth], len(self.ids)
        if isinstance(weight, Int4Weight):
            has_wgmma = gpu_properties(self.ids.device).has_large_tma_tiles
            return choose_int4_config(
                rows, columns, depth, step=weight.step, exact=False, has_wgmma=has_wgmma
            )
        if isinstance(weight, Float8Weight):
            return choose_float8_config(rows, columns, depth, split=self.splits(columns, depth))
        has_tensor_memory = gpu_properties(self.ids.device).has_tensor_memory
        return choose_linear_config(
            rows, columns, depth, exact=False, can_use_tma=True, has_tensor_memory=has_tensor_memory
        )

    def candidates(self, columns: int, depth: int) -> list[LinearConfig]:
        """Return cuts of a product worth timing."""
        weight, rows = self.weights[columns, depth], len(self.ids)
        if isinstance(weight, Int4Weight):
            return int4_candidates(rows, columns, depth, step=weight.step)
        if isinstance(weight, Float8Weight):
            return float8_candidates(rows, columns, depth, split=self.splits(columns, depth))
        return product_candidates(rows, columns, depth)

    def cuts_in_use(self) -> Cuts:
        """Return the cut of each kernel."""
        config, rows = self.model.config, len(self.ids)
        layer = self.model.weights.layers[0]
        products = {sizes: self.config_in_use(*sizes) for sizes in self.weights}
        attention = decode_tuning(
            config.head_size,
            config.dtype,
            decode_gpu.num_processors(self.ids.device),
            num_rows=rows,
            num_queries=config.num_attention_heads // config.num_kv_heads,
            num_kv_heads=config.num_kv_heads,
            norms_heads=layer.query_norm is not None,
        )
        return Cuts(attention, products)


def as_context(text: str) -> Context:
    """Return the context that ``144`` or ``100-1100`` stands for."""
    low, _, high = text.partition("-")
    if not (low.isdecimal() and (high or low).isdecimal() and 0 < int(low) <= int(high or low)):
        raise argparse.ArgumentTypeError(f"got {text}, allowed: N, or N-N with the larger one last, from 1")
    return int(low), int(high or low)


def as_text(context: Context) -> str:
    """Return what ``as_context`` takes."""
    return str(context[0]) if context[0] == context[1] else f"{context[0]}-{context[1]}"


def attention_candidates(cut: DecodeTuning, num_processors: int) -> list[DecodeTuning]:
    """Return other cuts of decode attention worth timing."""
    found = [replace(cut, early_dependents=not cut.early_dependents)]
    found += [replace(cut, num_programs=share * num_processors) for share in PROGRAMS]
    if cut.use_dot:
        # Two programs of 8 warps fit a processor with 128 registers a thread.
        warps_and_registers = ((1, None), (2, None), (4, None), (8, None), (8, 128))
        splits = ((64, 0), (128, 0), (256, 0), (128, 512))
        shapes = product((16, 32, 64), warps_and_registers, (2, 3), (0, 1), splits)
        found += [
            replace(
                cut,
                tile=tile,
                num_warps=warps,
                max_registers=registers,
                num_stages=stages,
                early_tiles=early,
                min_split=split,
                max_whole=whole,
            )
            for tile, (warps, registers), stages, early, (split, whole) in shapes
        ]
    return [each for each in found if each != cut]


def product_candidates(rows: int, columns: int, depth: int) -> list[LinearConfig]:
    """Return cuts of a product worth timing."""
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
        for tile_m, block_n, split_k in product(row_tiles, (32, 64, 128), (1, 2, 3, 4, 6)):
            whole = triton.next_power_of_2(triton.cdiv(depth, split_k))
            is_used = whole >= 256 and whole * split_k < 2 * depth
            if is_used and (tile_m + block_n) * whole * 2 <= MAX_SHARED_BYTES:
                num_warps = 8 if block_n == 128 else 4
                found.append(
                    LinearConfig(
                        tile_m,
                        block_n,
                        whole,
                        split_k,
                        num_warps=num_warps,
                        weights_left=True,
                        use_tma=True,
                    )
                )
    if rows <= 2:
        for block_n, block_k, num_warps in product((2, 4), (1024, 2048, 4096), (4, 8)):
            if block_k <= depth:
                found.append(LinearConfig(block_m, block_n, block_k, num_warps=num_warps, use_dot=False))
    tiles = ((max(block_m, 8),) if rows <= 32 else (64, 128), (32, 64, 128, 256), (64, 128, 256), (1, 2, 4))
    for tile_m, block_n, block_k, split_k in product(*tiles):
        programs = triton.cdiv(columns, block_n) * triton.cdiv(rows, tile_m) * split_k
        if tile_m > max(block_m, 32) or (split_k > 1 and (depth <= 1024 or programs > 400)):
            continue
        if split_k > 1 and programs * tile_m * block_n > MAX_SPLIT_FLOATS:
            continue
        num_stages = min(MAX_SHARED_BYTES // ((tile_m + block_n) * block_k * 2), 12)
        num_warps = 8 if tile_m * block_n >= 128 * 128 else 4
        if num_stages > 1:
            config = LinearConfig(
                tile_m,
                block_n,
                block_k,
                split_k,
                1,
                num_warps,
                num_stages,
                weights_left=rows <= 32,
                use_tma=True,
            )
            found.append(config)
    found += [replace(config, is_early=not config.is_early) for config in found]
    return list(dict.fromkeys(found))


def float8_candidates(rows: int, columns: int, depth: int, *, split: bool) -> list[LinearConfig]:
    """Return configurations of a product with a float8 weight worth timing: several programs to a multiprocessor.

    Args:
        split: activations are sums of two float8 numbers.
    """
    block_m = min(max(triton.next_power_of_2(rows), 8), 64)
    left = functools.partial(LinearConfig, block_k=SCALED_BLOCK, weights_left=True)
    right = functools.partial(LinearConfig, block_k=SCALED_BLOCK)
    if split:
        heights = (block_m,) if rows <= 32 else (32, 64)
        cuts = ((64, 4, 4), (64, 4, 5), (64, 4, 6), (128, 4, 3), (128, 4, 4), (128, 8, 3), (128, 8, 4))
        tiles = [
            left(height, width, num_warps=warps, num_stages=stages)
            for height, (width, warps, stages) in product(heights, cuts)
            if height * width < 64 * 128 or warps == 8
        ]
    elif rows <= 16:
        tiles = [
            left(block_m, 64, num_warps=2, num_stages=5),
            left(block_m, 32, num_warps=1, num_stages=8),
            left(block_m, 32, num_warps=2, num_stages=6),
            left(block_m, 16, num_warps=1, num_stages=8),
            left(block_m, 64, num_warps=4, num_stages=5, warp_split=4),
            left(block_m, 32, num_warps=4, num_stages=6, warp_split=4),
            left(block_m, 64, num_warps=2, num_stages=5, use_tma=True),
        ]
    elif rows <= 32:
        tiles = [
            left(32, 64, num_warps=2, num_stages=4),
            left(32, 32, num_warps=1, num_stages=6),
            left(32, 32, num_warps=2, num_stages=6),
            left(16, 64, num_warps=2, num_stages=5),
            left(16, 32, num_warps=2, num_stages=6),
            left(32, 64, num_warps=4, num_stages=4, warp_split=4),
        ]
    else:
        tiles = [
            right(64, 64, num_warps=8, num_stages=3),
            right(64, 128, num_warps=8, num_stages=3),
            left(32, 64, num_warps=2, num_stages=4),
            left(32, 32, num_warps=2, num_stages=6),
            left(64, 32, num_warps=2, num_stages=4),
            left(64, 64, num_warps=2, num_stages=4),
        ]
    tiles.append(replace(tiles[0], is_early=False))
    return _divided(tiles, rows, columns, depth, (1, 2, 4, 8) if rows <= 16 or split else (1, 2, 4))


def int4_candidates(rows: int, columns: int, depth: int, *, step: int) -> list[LinearConfig]:
    """Return configurations of a product with an int4 weight worth timing.

    Args:
        step: columns between those of a word.
    """
    block_m = min(max(triton.next_power_of_2(rows), 8), 64)
    cuts = [(64, 2, 3), (64, 2, 4), (64, 2, 6), (32, 1, 4), (32, 1, 6), (32, 2, 4), (128, 4, 3), (128, 4, 4)]
    cuts += [(16, 1, 6), (64, 4, 3), (64, 4, 4)]
    if rows > 16:
        cuts = [(64, 4, 3), (64, 4, 4), (64, 2, 3), (128, 4, 2), (128, 4, 3), (128, 8, 2), (128, 8, 3)]
    heights = (block_m,) if rows <= 16 else (block_m // 2, block_m)
    tiles = [
        LinearConfig(height, width, 4 * step, num_warps=warps, num_stages=stages, weights_left=True)
        for height, (width, warps, stages) in product(heights, cuts)
    ]
    tiles += [replace(tile, is_early=False) for tile in tiles[:2]]
    return _divided(tiles, rows, columns, depth, (1, 2, 4, 8) if rows <= 32 else (1, 2, 4))


def _divided(
    tiles: Sequence[LinearConfig], rows: int, columns: int, depth: int, parts: Sequence[int]
) -> list[LinearConfig]:
    """Return tiles with their depth in each number of parts that leaves no multiprocessor idle, nor is too many."""
    found = []
    for tile, split_k in product(tiles, parts):
        programs = tile.num_tiles(rows, columns) * split_k
        fits_scratch = programs * tile.block_m * tile.block_n <= MAX_SPLIT_FLOATS
        if split_k == 1 or (programs <= MAX_PROGRAMS and depth >= 512 * split_k and fits_scratch):
            found.append(replace(tile, split_k=split_k))
    return [each for each in found if each.num_tiles(rows, columns) * each.split_k >= MIN_PROGRAMS]


def _load(path: str) -> Any:
    """Return a model whose layers' own kernels multiply any number of rows."""
    model = load_model(path, device="cuda")
    model._decoder = replace(model._decoder, max_packed_rows=MAX_ROWS)
    return model


_model: Any = None


def _start_worker(path: str) -> None:
    """Keep a model of two layers in this process."""
    global _model
    _model = _load(path)


@functools.cache
def _small_step(rows: int, context: Context) -> tuple[Step, torch.Tensor, float]:
    """Return a step of two layers, its hidden states by library products, and how far those of cuts in use are."""
    step = Step(_model, rows, context)
    with step.by_library():
        library = step.run().float()
    with step.cuts_in_use().in_force():
        error = float((step.run().float() - library).norm() / library.norm())
    return step, library, error


def _try(rows: int, context: Context, cuts: Cuts) -> str | None:
    """Compile a step's kernels and run them; return what is wrong with the cuts."""
    step, library, usual_error = _small_step(rows, context)
    try:
        with cuts.in_force():
            hidden = step.run().float()
        torch.cuda.synchronize()
    except Exception as failure:
        return f"{type(failure).__name__}: {str(failure)[:100]}"
    error = float((hidden - library).norm() / library.norm())
    return None if error <= 2 * usual_error else f"error {error:.2e}, usual is {usual_error:.2e}"


def _sizes(part: str) -> tuple[int, int]:
    columns, depth = part.split("x")
    return int(columns), int(depth)


class Search:
    """The best cuts so far of one step."""

    def __init__(self, step: Step, pool: ProcessPoolExecutor) -> None:
        self._step = step
        self._pool = pool
        self._try = functools.partial(_try, len(step.ids), step.context)
        self.num_layers = step.model.config.num_layers
        self.best = step.cuts_in_use()
        pool.submit(self._try, self.best).result()
        self.in_use_us = self.fastest_us = self.time(self.best)
        with step.by_library():
            self.library_us = self._time()
        self.wrong: list[str] = []
        self.tried: dict[str, list[tuple[float, str]]] = {}

    def time(self, cuts: Cuts) -> float:
        """Return microseconds per layer, what is in front of and behind all layers shared out: a median."""
        with cuts.in_force():
            return self._time()

    def _time(self) -> float:
        graph = LaunchGraph([self._step.run])
        return statistics.median(graph.sample() for _ in range(NUM_SAMPLES)) / self.num_layers

    def check(self, candidates: Mapping[str, list[Any]]) -> dict[str, list[str | None]]:
        """Compile other cuts of kernels, all at once, and return what is wrong with each."""
        changed = [self.best.changed(part, cut) for part, found in candidates.items() for cut in found]
        problems = self._pool.map(self._try, changed)
        return {part: list(islice(problems, len(found))) for part, found in candidates.items()}

    def improve(self, part: str, found: list[Any], problems: list[str | None]) -> None:
        """Time other cuts of one kernel."""
        changed = [self.best.changed(part, cut) for cut in found]
        self.wrong += [
            f"{part} {cut}: {problem}" for cut, problem in zip(found, problems, strict=True) if problem
        ]
        timed = [
            (self.time(cuts), cuts) for cuts, problem in zip(changed, problems, strict=True) if not problem
        ]
        pairs = zip(found, problems, strict=True)
        names = [str(cut) for cut, problem in pairs if not problem]
        self.tried[part] = sorted(zip((us for us, _ in timed), names, strict=True))
        us, cuts = min(timed, key=lambda each: each[0], default=(self.fastest_us, self.best))
        if us < self.fastest_us and self.time(cuts) < self.fastest_us:
            self.fastest_us, self.best = us, cuts
            print(f"  {part}: {found[changed.index(cuts)]}")
        print(f"  {part}: {len(timed)} of {len(found)} timed, fastest {self.fastest_us:.2f} us", flush=True)


def search(step: Step, pool: ProcessPoolExecutor, wanted: Sequence[str] | None) -> dict[str, Any]:
    """Return the fastest cuts that were found, and microseconds per layer."""
    found, rows = Search(step, pool), len(step.ids)
    print(
        f"{rows} rows, {as_text(step.context)} tokens each: in use {found.in_use_us:.2f} us a layer, "
        f"by library products {found.library_us:.2f}",
        flush=True,
    )
    parts = [ATTENTION, *(f"{columns}x{depth}" for columns, depth in found.best.products)]
    candidates: dict[str, list[Any]] = {}
    for part in [part for part in parts if wanted is None or part in wanted]:
        if part == ATTENTION:
            num_processors = gpu_properties(step.ids.device).num_processors
            candidates[part] = attention_candidates(found.best.attention, num_processors)
        else:
            candidates[part] = step.candidates(*_sizes(part))
    problems = found.check(candidates)
    for part, others in candidates.items():
        found.improve(part, others, problems[part])
    best = {
        ATTENTION: asdict(found.best.attention),
        **{f"{columns}x{depth}": asdict(cut) for (columns, depth), cut in found.best.products.items()},
    }
    for part in best:
        print(f"    {row_of(step, found, part)}", flush=True)
    times = {
        "in_use_us": found.in_use_us,
        "library_us": found.library_us,
        "fastest_us": found.fastest_us,
    }
    return {
        "rows": rows,
        "context": as_text(step.context),
        **times,
        "fastest": best,
        "table_rows": {part: row_of(step, found, part) for part in best},
        "tried": found.tried,
        "wrong": found.wrong,
    }


def row_of(step: Step, found: Search, part: str) -> str:
    """Return the fastest cut of one kernel as a row for ``rose_backend/kernels/tuning/measured.txt``.

    Its conditions are this case alone: widen them as far as other cases allow. The time is that of the whole layer.
    """
    rows, config = len(step.ids), step.model.config
    gpu = torch.cuda.get_device_name().removeprefix("NVIDIA ")
    if part != ATTENTION:
        columns, depth = _sizes(part)
        shape: dict[str, object] = {"rows": rows, "columns": columns, "depth": depth}
        weight = step.weights[columns, depth]
        if isinstance(weight, Float8Weight):
            shape["split"] = step.splits(columns, depth)
        elif not isinstance(weight, Int4Weight):
            shape["tma"] = True
        return as_line(shape, found.best.products[columns, depth], gpu, found.fastest_us)
    heads = {
        "head_size": config.head_size,
        "queries": config.num_attention_heads // config.num_kv_heads,
        "cache_bits": 8 * config.dtype.itemsize,
        "norms": step.model.weights.layers[0].query_norm is not None,
        "rows": rows,
    }
    cut, num_processors = found.best.attention, gpu_properties(step.ids.device).num_processors
    line = as_line(heads, cut, gpu, found.fastest_us)
    share, rest = divmod(cut.num_programs, num_processors)
    # As many for each multiprocessor, where that is what was tried.
    return line if rest else line.replace(f"programs={cut.num_programs}", f"programs=processors:{share}")


def as_line(conditions: Mapping[str, object], config: Any, gpu: str, microseconds: float) -> str:
    """Return a line of ``measured.txt`` for a configuration that was measured.

    Args:
        conditions: ranges by fact, as the file has them, or single numbers.
        config: a dataclass; fields that have their default are left out.
    """
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    written = {
        field.name: _as_text(values[field.name])
        for field in fields(config)
        if field.default is MISSING or values[field.name] != field.default
    }
    cells = (
        ", ".join(f"{name} {_as_text(limits)}" for name, limits in conditions.items()),
        ", ".join(f"{name}={text}" for name, text in written.items()),
    )
    return " | ".join((*cells, gpu, f"{microseconds:.1f}")).rstrip(" |")


def _as_text(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _write_model(folder: Path, shape: str, num_layers: int | None) -> None:
    """Write a checkpoint of random weights with the layers of a shape, all or some, and few tokens."""
    from transformers import AutoModelForCausalLM, GPT2Config

    from tests.support.quantized_checkpoints import quantize

    config = GPT2Config() if shape == GPT2_124M else config_of(shape)
    config.num_hidden_layers = num_layers = num_layers or config.num_hidden_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    config.vocab_size, config.bos_token_id, config.eos_token_id = 1024, 0, 0
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    model.save_pretrained(folder)
    if shape in QUANTIZED_FORMATS:
        quantize(folder, QUANTIZED_FORMATS[shape], device="cuda")


def main(arguments: Sequence[str] | None = None) -> int:
    """Search for each number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    add("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    add(
        "--contexts",
        type=as_context,
        nargs="+",
        default=[(144, 144)],
        metavar="N or N-N",
        help="tokens in the cache, of each row, or at least and at most (default: 144)",
    )
    add(
        "--parts",
        nargs="*",
        help=f"{ATTENTION}, COLUMNSxDEPTH; none: only time the cuts in use (default: all)",
    )
    add("--layers", type=int, help="of the model, few of which are written soon (default: all)")
    add("--processes", type=int, default=14, help="that compile (default: %(default)s)")
    add("--json", type=Path)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(f"needs a CUDA device; torch {torch.__version__} sees none", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as path, tempfile.TemporaryDirectory() as small_path:
        _write_model(Path(path), options.shape, options.layers)
        _write_model(Path(small_path), options.shape, 2)
        model = _load(path)
        with ProcessPoolExecutor(
            options.processes, get_context("spawn"), _start_worker, (small_path,)
        ) as pool:
            results = [
                search(Step(model, rows, context), pool, options.parts)
                for context in options.contexts
                for rows in options.rows
            ]
    if options.json:
        facts = {
            **run_facts(),
            "device": torch.cuda.get_device_name(),
            "shape": options.shape,
        }
        write_json(options.json, {**facts, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
