"""Everything that is chosen for speed: asked of the choosing functions for each GPU, number of rows and model.

    python -m tests.support.chosen_configurations

writes ``tests/data/chosen_configurations.json``, which ``tests/kernels/test_chosen_configurations.py`` compares with.
Run it when a choice is meant to change; the difference of the record then lists what changes for whom.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.support import checkpoint
from rose_backend.kernels.gpu_properties import GpuProperties, meta_stands_for
from rose_backend.kernels.linear.small_batch_linear import lines_ahead
from rose_backend.kernels.tuning import choices as tuning
from rose_backend.layers.decoder import max_packed_rows, rotates_inside
from rose_backend.layers.linear import Linear, adds_halves, fewest_halved_rows
from rose_backend.scheduling import default_token_budgets, min_tokens_worth_waiting

RECORD = Path(__file__).parent.parent / "data" / "chosen_configurations.json"
MAX_ROWS = 1024
ALL_ROWS = range(1, MAX_ROWS + 1)
SOME_ROWS = sorted({*range(1, 5), *(count + more for count in (8, 16, 32, 64) for more in (0, 1))})
SOME_ROWS += [count + more for count in range(128, MAX_ROWS, 128) for more in (0, 1)]
GPUS = {
    "A100": GpuProperties((8, 0), 108),
    "H100": GpuProperties((9, 0), 132),
    "H200": GpuProperties((9, 0), 132),
    "B200": GpuProperties((10, 0), 148),
}
CACHE_DTYPES = {"cache as query": None, "float8 cache": torch.float8_e4m3fn}


@dataclasses.dataclass(frozen=True)
class Shape:
    """What kernels are chosen by, of one model."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    mlp_size: int
    is_gated: bool = True
    num_experts: int = 0
    top_k: int = 0

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Columns and depth of each product that every token takes part in."""
        attended = self.num_heads * self.head_size
        projected = attended + 2 * self.num_kv_heads * self.head_size
        found = {"qkv": (projected, self.hidden_size), "attention out": (self.hidden_size, attended)}
        if not self.num_experts:
            up_size = (1 + self.is_gated) * self.mlp_size
            found |= {"up": (up_size, self.hidden_size), "down": (self.hidden_size, self.mlp_size)}
        return found


@functools.cache
def shapes() -> dict[str, Shape]:
    """Return every model that a benchmark can make a checkpoint of."""
    configs = {
        checkpoint.LLAMA_1B: checkpoint.llama_1b_config(),
        checkpoint.LLAMA_8B: checkpoint.llama_8b_config(),
        checkpoint.QWEN3_06B: checkpoint.qwen3_config(),
        checkpoint.GEMMA3_4B: checkpoint.gemma3_config(),
        checkpoint.GPT_OSS_20B: checkpoint.gpt_oss_config(),
        checkpoint.QWEN3_30B: checkpoint.qwen3_moe_config(),
        checkpoint.QWEN35_4B: checkpoint.qwen3_5_config(),
        checkpoint.QWEN3_VL_4B: checkpoint.qwen3_vl_config().get_text_config(),
        checkpoint.QWEN3_8B_FP8: checkpoint.qwen3_8b_config(),
    }
    found = {checkpoint.GPT2_124M: Shape(768, 12, 12, 64, torch.float16, 3072, is_gated=False)}
    for name, config in configs.items():
        num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", 0)
        found[name] = Shape(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            getattr(torch, str(config.dtype).split(".")[-1]),
            getattr(config, "moe_intermediate_size", config.intermediate_size),
            num_experts=num_experts,
            top_k=config.num_experts_per_tok if num_experts else 0,
        )
    as_dense_ones = {checkpoint.LLAMA_8B_FP8, checkpoint.QWEN3_30B_FP8}
    as_dense_ones |= {checkpoint.LLAMA_8B_INT4, checkpoint.LLAMA_8B_AWQ, checkpoint.QWEN3_30B_12_LAYERS}
    int4_alone = {checkpoint.QWEN3_14B_AWQ, checkpoint.QWEN3_32B_AWQ}
    assert set(found) == set(checkpoint.SHAPES) - as_dense_ones - int4_alone
    return found


@functools.cache
def as_text(chosen: Any) -> str:
    """Return a choice in words that do not depend on where its class is defined."""
    if not dataclasses.is_dataclass(chosen):
        return str(chosen)
    return ", ".join(f"{field.name}={getattr(chosen, field.name)}" for field in dataclasses.fields(chosen))


def by_ranges(choose: Callable[[int], Any], rows: Sequence[int] = ALL_ROWS) -> dict[str, str]:
    """Return what is chosen for each range of rows."""
    ranges = {}
    for chosen, group in itertools.groupby(rows, lambda count: as_text(choose(count))):
        first, *rest = group
        ranges[f"{first}-{rest[-1]}" if rest else str(first)] = chosen
    return ranges


def _linear(gpu: GpuProperties, shape: Shape) -> Iterator[tuple[str, dict[str, str]]]:
    for (name, (columns, depth)), exact, is_aligned in itertools.product(
        shape.products.items(), (False, True), (True, False)
    ):
        choose = functools.partial(
            tuning.choose_linear_config,
            num_columns=columns,
            depth=depth,
            exact=exact,
            can_use_tma=is_aligned and gpu.has_large_tma_tiles,
            has_tensor_memory=gpu.has_tensor_memory,
        )
        itemsize = 4 if exact else 2

        @functools.cache
        def with_lines(
            config: Any, columns: int = columns, depth: int = depth, itemsize: int = itemsize
        ) -> str:
            part = triton.cdiv(depth, config.split_k)
            deep = triton.cdiv(part, config.block_k) * config.block_k
            programs = triton.cdiv(columns, config.block_n) * config.split_k
            return f"{as_text(config)}, lines_ahead={lines_ahead(deep * itemsize, config.block_n, programs)}"

        def chosen(rows: int, choose: Any = choose, with_lines: Any = with_lines) -> str:
            return with_lines(choose(rows))

        case = f"{name} {columns} x {depth}, {'exact' if exact else '16 bits'}"
        yield f"{case}, {'aligned' if is_aligned else 'not aligned'}", by_ranges(chosen)
    for name, (columns, depth) in shape.products.items():
        for split in (False, True):
            choose = functools.partial(
                tuning.choose_float8_config, num_columns=columns, depth=depth, split=split
            )
            yield f"{name} {columns} x {depth}, float8{', split' if split else ''}", by_ranges(choose)
        choose = functools.partial(
            tuning.choose_int4_config,
            num_columns=columns,
            depth=depth,
            step=64,
            exact=False,
            has_wgmma=gpu.has_large_tma_tiles,
        )
        yield f"{name} {columns} x {depth}, int4", by_ranges(choose)


def _experts(gpu: GpuProperties, shape: Shape) -> Iterator[tuple[str, dict[str, str]]]:
    if not shape.num_experts:
        return
    for gated, exact, is_aligned in itertools.product((True, False), repeat=3):
        options = {"gated": gated, "exact": exact, "can_use_tma": is_aligned and gpu.has_large_tma_tiles}
        chosen = by_ranges(
            lambda rows, options=options: tuning.choose_expert_config(
                rows * shape.top_k, shape.num_experts, **options
            )
        )
        case = f"{'gate and up' if gated else 'down'}, {'exact' if exact else '16 bits'}"
        yield f"{case}, {'aligned' if is_aligned else 'not aligned'}", chosen
    for gated in (True, False):
        options = {"gated": gated, "exact": False, "can_use_tma": False, "is_float8": True}
        yield (
            f"{'gate and up' if gated else 'down'}, float8",
            by_ranges(
                lambda rows, options=options: tuning.choose_expert_config(
                    rows * shape.top_k, shape.num_experts, **options
                )
            ),
        )


def _decode(gpu: GpuProperties, shape: Shape) -> Iterator[tuple[str, dict[str, str]]]:
    head_tile = max(triton.next_power_of_2(shape.head_size), 16)
    cases = [
        *itertools.product((shape.dtype,), CACHE_DTYPES.items(), (1, 2, 5), (False, True)),
        (torch.float32, ("cache as query", None), 1, False),
    ]
    for dtype, (cache, cache_dtype), query_len, norms_heads in cases:
        group = tuning.heads_per_program(shape.num_heads // shape.num_kv_heads, query_len, head_tile)
        choose = functools.partial(
            tuning.decode_tuning,
            shape.head_size,
            dtype,
            gpu.num_processors,
            cache_dtype=cache_dtype,
            num_queries=group * query_len,
            num_kv_heads=shape.num_kv_heads,
            norms_heads=norms_heads,
        )
        case = f"{dtype}, {cache}, {query_len} tokens, {group} heads{', norms' if norms_heads else ''}"
        yield case, by_ranges(lambda rows, choose=choose: choose(num_rows=rows))
    yield (
        "begins in turns",
        by_ranges(lambda rows: tuning.begins_in_turns(rows * shape.num_kv_heads, gpu.num_processors)),
    )
    for query_len in (1, 5):
        kind = functools.partial(
            tuning.decode_kind,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            dtype=shape.dtype,
            num_processors=gpu.num_processors,
            max_query_len=query_len,
        )
        counts = tuning.row_counts(MAX_ROWS, kind)
        yield f"row counts, {query_len} tokens", {"all": " ".join(map(str, counts))}


def _prefill(gpu: GpuProperties, shape: Shape) -> Iterator[tuple[str, dict[str, str]]]:
    for dtype, is_describable in itertools.product((shape.dtype, torch.float32), (True, False)):
        choose = functools.partial(
            tuning.prefill_tuning,
            head_size=shape.head_size,
            dtype=dtype,
            capability=gpu.capability,
            is_describable=is_describable,
        )
        yield f"{dtype}, {'' if is_describable else 'not '}describable", by_ranges(choose)


def _layer(gpu: GpuProperties, shape: Shape) -> Iterator[tuple[str, dict[str, str]]]:
    size = shape.hidden_size
    yield "packed", by_ranges(lambda rows: rows <= max_packed_rows(size))
    yield "rotates inside", by_ranges(lambda rows: rotates_inside(rows, shape.head_size))
    yield "fewest halved rows", {"all": str(fewest_halved_rows(size, gpu.num_processors))}
    with meta_stands_for(gpu):
        for name, (columns, depth) in shape.products.items():
            product = Linear(torch.empty(depth, columns, dtype=torch.bfloat16, device="meta"), None)
            x = torch.empty(MAX_ROWS, depth, dtype=torch.bfloat16, device="meta")
            yield (
                f"{name} in halves",
                by_ranges(lambda rows, x=x, product=product: adds_halves(x[:rows], product)),
            )


def _unlike_any_model(gpu: GpuProperties) -> Iterator[tuple[str, dict[str, str]]]:
    """Products and heads on both sides of each limit, which no model of the benchmarks may have."""
    sizes = (64, 768, 769, 1024, 1025, 2048, 2049, 2560, 4096, 4097, 5120, 8192, 8193, 12_288, 24_576)
    for columns, depth in itertools.product(sizes, (64, 768, 1024, 1025, 2048, 2049, 4096, 4097, 14_336)):
        choose = functools.partial(
            tuning.choose_linear_config,
            num_columns=columns,
            depth=depth,
            exact=False,
            can_use_tma=gpu.has_large_tma_tiles,
            has_tensor_memory=gpu.has_tensor_memory,
        )
        yield f"product {columns} x {depth}", by_ranges(choose, SOME_ROWS)
    for head_size, num_kv_heads, num_queries in itertools.product(
        (32, 96, 128, 256, 512), (1, 8), (1, 16, 32)
    ):
        options = {"num_queries": num_queries, "num_kv_heads": num_kv_heads}
        decode = functools.partial(
            tuning.decode_tuning, head_size, torch.float16, gpu.num_processors, **options
        )
        case = f"{num_kv_heads} heads of {head_size}, {num_queries} queries"
        yield f"decode, {case}", by_ranges(lambda rows, decode=decode: decode(num_rows=rows), SOME_ROWS)
    for head_size in (32, 96, 256, 512):
        prefill = functools.partial(
            tuning.prefill_tuning,
            head_size=head_size,
            dtype=torch.float16,
            capability=gpu.capability,
            is_describable=True,
        )
        yield f"prefill, heads of {head_size}", by_ranges(prefill)


def _for_all() -> dict[str, str]:
    """Return what no model and no GPU decides."""
    waiting = {name: min_tokens_worth_waiting(torch.device(name)) for name in ("cpu", "cuda")}
    counts = [tuning.rows_tile(rows) for rows in (1, 32, 33, 256, 257, 1024, 1025, 5000)]
    return {
        "rows tiles": str(counts),
        "prefill's query lengths": str(tuning.TUNED_QUERY_LENS),
        "pairs per expert": str(tuning.TUNED_PAIRS_PER_EXPERT),
        "split": f"{tuning.MAX_SPLIT_COLUMNS} {tuning.MAX_SPLIT_FLOATS}",
        "token budgets": f"{default_token_budgets(None)} {default_token_budgets(torch.device('cpu'))}",
        "tokens worth waiting for": str(waiting),
    }


PARTS = {"linear": _linear, "experts": _experts, "decode": _decode, "prefill": _prefill, "layer": _layer}


def choices() -> dict[str, Any]:
    """Return what is chosen now, as ``RECORD`` has it: GPUs with the same choices share an entry."""
    found: dict[str, dict[str, Any]] = {"for all": {"any GPU": _for_all()}}
    for name, shape in shapes().items():
        for part, ask in PARTS.items():
            _add(found, f"{name}: {part}", functools.partial(ask, shape=shape))
    _add(found, "others", _unlike_any_model)
    return found


def _add(
    found: dict[str, dict[str, Any]],
    title: str,
    ask: Callable[[GpuProperties], Iterable[tuple[str, dict[str, str]]]],
) -> None:
    answers = {gpu: dict(ask(gpu)) for gpu in set(GPUS.values())}
    for case in next(iter(answers.values())):
        by_answer: dict[str, list[str]] = {}
        for gpu, properties in GPUS.items():
            by_answer.setdefault(json.dumps(answers[properties][case]), []).append(gpu)
        found[f"{title}: {case}"] = {
            ", ".join(gpus): json.loads(answer) for answer, gpus in by_answer.items()
        }


def packed(found: dict[str, Any]) -> str:
    """Return ``choices()`` as JSON, one case a line, in which each choice is named by its number."""
    numbers: dict[str, int] = {}
    for chosen in (text for case in found.values() for ranges in case.values() for text in ranges.values()):
        numbers.setdefault(chosen, len(numbers))
    lines = [
        f"{json.dumps(name)}: "
        + json.dumps(
            {gpus: {rows: numbers[text] for rows, text in ranges.items()} for gpus, ranges in case.items()}
        )
        for name, case in found.items()
    ]
    chosen, cases = ",\n".join(map(json.dumps, numbers)), ",\n".join(lines)
    return f'{{"chosen": [\n{chosen}\n],\n"cases": {{\n{cases}\n}}}}\n'


def unpacked(text: str) -> dict[str, Any]:
    """Return what ``packed`` was given."""
    record = json.loads(text)
    return {
        name: {
            gpus: {rows: record["chosen"][number] for rows, number in ranges.items()}
            for gpus, ranges in case.items()
        }
        for name, case in record["cases"].items()
    }


if __name__ == "__main__":
    RECORD.write_text(packed(choices()), encoding="utf-8")
