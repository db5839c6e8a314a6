"""Kernels over a paged KV cache: decode and prefill attention, the store of new keys and values included, and clones.

Peers of attention are FlashAttention 3 and vLLM's own Triton kernel, each after a separate cache write. Both get the
arguments that vLLM's backends ``FLASH_ATTN`` and ``TRITON_ATTN`` pass within a full CUDA graph. What a backend prepares
once per step for all layers is prepared outside the timed part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import kernel_cases
from benchmarks.kernel_cases.case import ROSE, Contest, KernelCase, Launches
from rose_backend.kernels import AttentionOptions, paged_decode, paged_prefill
from rose_backend.kernels.gpu.block_clone import block_clone

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Heads:
    """A model's attention shape."""

    name: str
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def scale(self) -> float:
        """Factor on query-key products."""
        return self.head_size**-0.5

    @property
    def token_bytes(self) -> int:
        """One token's keys and values."""
        return 2 * self.num_kv_heads * self.head_size * self.dtype.itemsize

    @property
    def query_bytes(self) -> int:
        """One token's query."""
        return self.num_query_heads * self.head_size * self.dtype.itemsize


GPT2 = Heads("GPT-2", 12, 12, 64, torch.float16)
LLAMA_8B = Heads("Llama-8B", 32, 8, 128, torch.bfloat16)


@dataclass(frozen=True)
class PagedStep:
    """``num_rows`` requests with ``num_computed`` cached and ``query_len`` new tokens each."""

    heads: Heads
    query: torch.Tensor  # [T, HQ, D], with key and value views of one projection's output
    key: torch.Tensor  # [T, HKV, D]
    value: torch.Tensor  # [T, HKV, D]
    storage: torch.Tensor  # [NB, BS, HKV, 2 * D]: keys and values of a head side by side
    block_table: torch.Tensor  # [R, MB] int32
    num_computed: int
    query_len: int

    @property
    def num_rows(self) -> int:
        """Requests."""
        return self.block_table.shape[0]

    @property
    def seq_len(self) -> int:
        """Tokens of a request, the new ones included."""
        return self.num_computed + self.query_len

    @property
    def key_cache(self) -> torch.Tensor:
        """Return [NB, BS, HKV, D]."""
        return self.storage[..., : self.heads.head_size]

    @property
    def value_cache(self) -> torch.Tensor:
        """Return [NB, BS, HKV, D]."""
        return self.storage[..., self.heads.head_size :]

    def per_row(self, value: int) -> torch.Tensor:
        """Return [R] int32, all ``value``."""
        return torch.full((self.num_rows,), value, dtype=torch.int32, device="cuda")

    def query_start_loc(self) -> torch.Tensor:
        """Return [R + 1] int32."""
        starts = torch.arange(self.num_rows + 1, dtype=torch.int32, device="cuda")
        return starts * self.query_len

    def slot_mapping(self) -> torch.Tensor:
        """Return [T] int64: where the new tokens go."""
        block_size = self.storage.shape[1]
        positions = torch.arange(self.num_computed, self.seq_len, device="cuda")
        blocks = self.block_table[:, positions // block_size].long()
        return (blocks * block_size + positions % block_size).flatten()

    def new_out(self) -> torch.Tensor:
        """Return room for what attention gives, [T, HQ, D]."""
        return torch.empty(self.query.shape, dtype=self.heads.dtype, device="cuda")

    def stored(self) -> torch.Tensor:
        """Return what the cache holds for the new tokens, [T, HKV, 2 * D]."""
        return self.storage.flatten(0, 1)[self.slot_mapping()]

    def forget(self) -> None:
        """Overwrite the new tokens in the cache."""
        self.storage.flatten(0, 1)[self.slot_mapping()] = float("nan")

    def with_block_size(self, block_size: int) -> PagedStep:
        """Return a step over a cache of larger blocks with the same content; it shares the new tokens."""
        content = self.storage[self.block_table.long()]
        storage = content.reshape(-1, block_size, *self.storage.shape[2:])
        table = torch.arange(len(storage), dtype=torch.int32, device="cuda").view(self.num_rows, -1)
        return PagedStep(
            self.heads, self.query, self.key, self.value, storage, table, self.num_computed, self.query_len
        )


def make_steps(
    heads: Heads, num_rows: int, num_computed: int, query_len: int, num_sets: int
) -> list[PagedStep]:
    """Return ``num_sets`` steps with random content over one cache, their blocks shuffled together."""
    width = -(-(num_computed + query_len) // BLOCK_SIZE)
    shape = (num_sets * num_rows * width, BLOCK_SIZE, heads.num_kv_heads, 2 * heads.head_size)
    storage = torch.randn(shape, dtype=heads.dtype, device="cuda")
    tables = torch.randperm(shape[0], device="cuda").to(torch.int32).view(num_sets, num_rows, width)
    widths = [heads.num_query_heads, heads.num_kv_heads, heads.num_kv_heads]
    steps = []
    for table in tables:
        projected = torch.randn(
            num_rows * query_len, sum(widths), heads.head_size, dtype=heads.dtype, device="cuda"
        )
        query, key, value = projected.split(widths, dim=1)
        steps.append(PagedStep(heads, query, key, value, storage, table, num_computed, query_len))
    return steps


FLASH = "FlashAttention 3"
TRITON = "vLLM Triton"

# vLLM's default sizes of captured batches; AttentionConfig.flash_attn_max_num_splits_for_cuda_graph.
_CAPTURE_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
_FLASH_GRAPH_SPLITS = 32
# MIN_LAUNCH_GRID_SIZE_2D and NUM_PAR_SOFTMAX_SEGMENTS of vLLM's triton_attn.
_TRITON_MIN_GRID, _TRITON_SEGMENTS = 128, 16


def attention_peers(steps: Sequence[PagedStep]) -> dict[str, Launches]:
    """Return the launches of every peer that is installed."""
    sides: dict[str, Launches] = {}
    for name, make in ((FLASH, flash_attention), (TRITON, triton_attention)):
        launches = make(name, steps)
        if launches is not None:
            sides[name] = launches
    return sides


def flash_attention(name: str, steps: Sequence[PagedStep]) -> Launches | None:
    """FlashAttention 3 with a block table and a schedule made ahead, after ``reshape_and_cache_flash``."""
    modules = kernel_cases.load_peer(name, "vllm.vllm_flash_attn", "vllm._custom_ops")
    if modules is None:
        return None
    flash, operations = modules
    heads, step = steps[0].heads, steps[0]
    num_tokens = step.num_rows * step.query_len
    shared: dict[str, Any] = {
        "cu_seqlens_q": step.query_start_loc(),
        "seqused_k": step.per_row(step.seq_len),
        "max_seqlen_q": step.query_len,
        "max_seqlen_k": step.seq_len,
        "num_splits": _FLASH_GRAPH_SPLITS if num_tokens <= _CAPTURE_SIZES[-1] else 0,
    }
    shared["scheduler_metadata"] = flash.get_scheduler_metadata(
        batch_size=step.num_rows,
        max_seqlen_q=step.query_len,
        max_seqlen_k=step.seq_len,
        num_heads_q=heads.num_query_heads,
        num_heads_kv=heads.num_kv_heads,
        headdim=heads.head_size,
        cache_seqlens=shared["seqused_k"],
        qkv_dtype=heads.dtype,
        cu_seqlens_q=shared["cu_seqlens_q"],
        page_size=step.storage.shape[1],
        causal=True,
        window_size=(-1, -1),
        num_splits=shared["num_splits"],
    )
    attend = functools.partial(flash.flash_attn_varlen_func, window_size=[-1, -1], fa_version=3, **shared)
    return [stored_and_attended(step, operations.reshape_and_cache_flash, attend) for step in steps]


def stored_and_attended(
    step: PagedStep, store: Callable[..., object], attend: Callable[..., object]
) -> Callable[[], torch.Tensor]:
    """Return a launch of a separate cache write, then of attention."""
    key_cache, value_cache, slots = step.key_cache, step.value_cache, step.slot_mapping()
    out, one = step.new_out(), torch.ones((), dtype=torch.float32, device="cuda")

    def run() -> torch.Tensor:
        store(step.key, step.value, key_cache, value_cache, slots, "auto", one, one)
        attend(
            q=step.query,
            k=key_cache,
            v=value_cache,
            out=out,
            softmax_scale=step.heads.scale,
            causal=True,
            block_table=step.block_table,
        )
        return out

    return run


def triton_attention(name: str, steps: Sequence[PagedStep]) -> Launches | None:
    """vLLM's ``unified_attention`` after its Triton cache write; few rows split their context over programs."""
    modules = kernel_cases.load_peer(
        name,
        "vllm.v1.attention.ops.triton_unified_attention",
        "vllm.v1.attention.ops.triton_reshape_and_cache_flash",
    )
    if modules is None:
        return None
    attention, cache_write = modules
    heads, step = steps[0].heads, steps[0]
    wanted = _TRITON_MIN_GRID // heads.num_kv_heads
    max_split_rows = min(_CAPTURE_SIZES, key=lambda size: abs(size - wanted))
    scratch = (max_split_rows, heads.num_query_heads, _TRITON_SEGMENTS)
    descale = torch.ones((), dtype=torch.float32, device="cuda").expand(step.num_rows, heads.num_kv_heads)
    shared: dict[str, Any] = {
        "cu_seqlens_q": step.query_start_loc(),
        "seqused_k": step.per_row(step.seq_len),
        "max_seqlen_q": step.query_len,
        "max_seqlen_k": step.seq_len,
        "seq_threshold_3D": max_split_rows,
        "num_par_softmax_segments": _TRITON_SEGMENTS,
        "softmax_segm_output": torch.empty((*scratch, heads.head_size), device="cuda"),
        "softmax_segm_max": torch.empty(scratch, device="cuda"),
        "softmax_segm_expsum": torch.empty(scratch, device="cuda"),
        "k_descale": descale,
        "v_descale": descale,
    }

    attend = functools.partial(
        attention.unified_attention, window_size=(-1, -1), softcap=0, q_descale=None, **shared
    )
    return [stored_and_attended(step, cache_write.triton_reshape_and_cache_flash, attend) for step in steps]


TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


def decode_case(heads: Heads, num_rows: int, context: int) -> KernelCase:
    """One new token per row; ``context`` counts it."""

    def launch(step: PagedStep) -> Callable[[], torch.Tensor]:
        inputs = (step.query, step.key, step.value, step.key_cache, step.value_cache, step.block_table)
        lengths, out = step.per_row(step.num_computed), step.new_out()
        return lambda: paged_decode(*inputs, lengths, options=AttentionOptions(heads.scale), out=out)

    def make(num_sets: int) -> Contest:
        steps = make_steps(heads, num_rows, context - 1, 1, num_sets)
        return Contest(
            {ROSE: [launch(step) for step in steps], **attention_peers(steps)},
            reset=steps[0].forget,
            observe=lambda side, out: (out, steps[0].stored()),
            tolerance=TOLERANCE[heads.dtype],
        )

    row_bytes = (context + 1) * heads.token_bytes + 2 * heads.query_bytes
    return KernelCase(f"decode {heads.name} B={num_rows} context {context:,}", num_rows * row_bytes, make)


def decode_cases() -> Iterator[KernelCase]:
    """Yield the cases that the table shows."""
    for context in (512, 1024):
        for num_rows in (1, 8, 32, 64, 128, 256):
            yield decode_case(GPT2, num_rows, context)
    for num_rows, context in ((1, 8192), (1, 32_768), (8, 8192), (64, 4096)):
        yield decode_case(LLAMA_8B, num_rows, context)


FLASH_BLOCK_SIZE = 128
"""FlashAttention 3 loads such blocks with the tensor memory accelerator."""


def prefill_case(heads: Heads, num_rows: int, query_len: int, num_computed: int = 0) -> KernelCase:
    """``query_len`` new tokens per row after ``num_computed`` cached ones."""

    def launch(step: PagedStep) -> Callable[[], torch.Tensor]:
        inputs = (step.query, step.key, step.value, step.key_cache, step.value_cache, step.block_table)
        starts, lengths, out = step.query_start_loc(), step.per_row(num_computed), step.new_out()
        return lambda: paged_prefill(*inputs, starts, lengths, options=AttentionOptions(heads.scale), out=out)

    def make(num_sets: int) -> Contest:
        steps = make_steps(heads, num_rows, num_computed, query_len, num_sets)
        sides = {ROSE: [launch(step) for step in steps], **attention_peers(steps)}
        large = [step.with_block_size(FLASH_BLOCK_SIZE) for step in steps]
        large_name = f"{FLASH}, blocks of {FLASH_BLOCK_SIZE}"
        launches = flash_attention(large_name, large)
        if launches is not None:
            sides[large_name] = launches

        def reset() -> None:
            steps[0].forget()
            large[0].forget()

        return Contest(
            sides,
            reset=reset,
            observe=lambda side, out: (out, (large if side == large_name else steps)[0].stored()),
            tolerance=TOLERANCE[heads.dtype],
        )

    row_bytes = (num_computed + 2 * query_len) * heads.token_bytes + 2 * query_len * heads.query_bytes
    pairs = query_len * num_computed + query_len * (query_len + 1) // 2
    flops = 4 * num_rows * heads.num_query_heads * pairs * heads.head_size
    after = f" after {num_computed:,}" if num_computed else ""
    name = f"prefill {heads.name} {num_rows} x {query_len:,}{after}"
    return KernelCase(name, num_rows * row_bytes, make, flops=flops)


def prefill_cases() -> Iterator[KernelCase]:
    """Yield the cases that the table shows."""
    yield prefill_case(GPT2, 32, 512)
    for heads in (GPT2, LLAMA_8B):
        yield prefill_case(heads, 4, 8192)
        yield prefill_case(heads, 2, 2048, 6144)


# Of clones: a whole GPT-2 cache, 590 kB per block, all layers, keys and values.
NUM_LAYERS, NUM_BLOCKS, BLOCK_SHAPE = 12, 3000, (16, 12, 64)
BLOCK_BYTES = NUM_LAYERS * 2 * 16 * 12 * 64 * 2
TORCH_CLONE = "torch index_select, index_copy_"

Pairs = tuple[torch.Tensor, torch.Tensor]


def torch_clone(cache: torch.Tensor, pairs: Pairs) -> Callable[[], object]:
    """Gather and scatter all layers at once."""
    src, dst = pairs[0], pairs[1].long()
    return lambda: cache.index_copy_(2, dst, cache.index_select(2, src))


def clone_case(num_pairs: int) -> KernelCase:
    """Copy random blocks over other random blocks."""

    def make(num_sets: int) -> Contest:
        cache = torch.randn(NUM_LAYERS, 2, NUM_BLOCKS, *BLOCK_SHAPE, dtype=torch.float16, device="cuda")
        sets = [
            tuple(torch.randperm(NUM_BLOCKS, device="cuda")[: 2 * num_pairs].int().chunk(2))
            for _ in range(num_sets)
        ]

        def rose(pairs: Pairs) -> Callable[[], object]:
            return lambda: block_clone(cache, *pairs, block_dim=2, independent=True)

        sides = {
            ROSE: [rose(pairs) for pairs in sets],
            TORCH_CLONE: [torch_clone(cache, pairs) for pairs in sets],
        }
        dst = sets[0][1].long()

        def reset() -> None:
            cache[:, :, dst] = float("nan")

        return Contest(sides, reset=reset, observe=lambda side, _: (cache[:, :, dst],))

    plural = "" if num_pairs == 1 else "s"
    return KernelCase(f"clone {num_pairs} block{plural} of 12 layers", 2 * num_pairs * BLOCK_BYTES, make)


def clone_cases() -> Iterator[KernelCase]:
    """Yield the cases that the table shows."""
    for num_pairs in (1, 16, 256):
        yield clone_case(num_pairs)
