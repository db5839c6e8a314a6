"""Kernels over a paged KV cache: decode and prefill attention, the store of new keys and values included, and clones.

Peers of attention are FlashAttention 3 and vLLM's own Triton kernel, each after a separate cache write. Both get the
arguments that vLLM's backends ``FLASH_ATTN`` and ``TRITON_ATTN`` pass within a full CUDA graph. What a backend prepares
once per step for all layers is prepared outside the timed part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.kernel_cases import case
from benchmarks.kernel_cases.case import ROSE, Contest, KernelCase, Launches
from rose_backend.kernels import AttentionOptions, NewTokens, PagedKV, paged_decode, paged_prefill
from rose_backend.kernels.kv.cache_writes import block_clone

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Heads:
    """A model's attention shape."""

    name: str
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype


GPT2 = Heads("GPT-2", 12, 12, 64, torch.float16)
LLAMA_8B = Heads("Llama-8B", 32, 8, 128, torch.bfloat16)


class PagedStep:
    """Requests with ``num_computed`` cached tokens and equally many new ones each.

    Args:
        projected: what a projection gives for the new tokens, ``[T, HQ + 2 * HKV, D]``.
        storage: keys and values of a head side by side, ``[NB, BS, HKV, 2 * D]``.
        block_table: ``[R, MB]`` int32.
    """

    def __init__(
        self,
        heads: Heads,
        projected: torch.Tensor,
        storage: torch.Tensor,
        block_table: torch.Tensor,
        num_computed: int,
    ) -> None:
        self.heads, self.storage, self.block_table = heads, storage, block_table
        self._projected, self._num_computed = projected, num_computed
        widths = [heads.num_query_heads, heads.num_kv_heads, heads.num_kv_heads]
        self.query, self.key, self.value = projected.split(widths, dim=1)
        self.key_cache, self.value_cache = storage.split(heads.head_size, dim=3)
        self.out = torch.empty(self.query.shape, dtype=heads.dtype, device="cuda")
        self.num_rows, self.block_size = len(block_table), storage.shape[1]
        self.query_len = len(projected) // self.num_rows
        self.seq_len = num_computed + self.query_len
        rows = torch.ones(self.num_rows, dtype=torch.int32, device="cuda")
        self.num_computed, self.seq_lens = rows * num_computed, rows * self.seq_len  # [R] int32
        starts = torch.arange(self.num_rows + 1, dtype=torch.int32, device="cuda")
        self.query_start_loc = starts * self.query_len  # [R + 1] int32
        positions = torch.arange(num_computed, self.seq_len, device="cuda")
        blocks = block_table[:, positions // self.block_size].long()
        # Where the new tokens go, [T] int64.
        self.slot_mapping = (blocks * self.block_size + positions % self.block_size).flatten()

    def stored(self) -> torch.Tensor:
        """Return what the cache holds for the new tokens, [T, HKV, 2 * D]."""
        return self.storage.flatten(0, 1)[self.slot_mapping]

    def forget(self) -> None:
        """Overwrite the new tokens in the cache, and the result."""
        self.storage.flatten(0, 1)[self.slot_mapping] = float("nan")
        self.out.fill_(float("nan"))

    def with_block_size(self, block_size: int) -> PagedStep:
        """Return a step over a cache of larger blocks with the same content; it shares the new tokens."""
        content = self.storage[self.block_table.long()]
        storage = content.reshape(-1, block_size, *self.storage.shape[2:])
        table = torch.arange(len(storage), dtype=torch.int32, device="cuda").view(self.num_rows, -1)
        return PagedStep(self.heads, self._projected, storage, table, self._num_computed)


def make_steps(
    heads: Heads, num_rows: int, query_len: int, num_computed: int, num_sets: int
) -> list[PagedStep]:
    """Return ``num_sets`` steps with random content over one cache, their blocks shuffled together."""
    random = functools.partial(torch.randn, dtype=heads.dtype, device="cuda")
    width = -(-(num_computed + query_len) // BLOCK_SIZE)
    storage = random(num_sets * num_rows * width, BLOCK_SIZE, heads.num_kv_heads, 2 * heads.head_size)
    tables = torch.randperm(len(storage), device="cuda").to(torch.int32).view(num_sets, num_rows, width)
    num_heads = heads.num_query_heads + 2 * heads.num_kv_heads
    return [
        PagedStep(
            heads, random(num_rows * query_len, num_heads, heads.head_size), storage, table, num_computed
        )
        for table in tables
    ]


def rose_attention(step: PagedStep) -> Callable[[], torch.Tensor]:
    """Return a launch of attention that stores the new keys and values itself."""
    chosen = {"options": AttentionOptions(step.heads.head_size**-0.5), "out": step.out}
    kv = PagedKV(step.key_cache, step.value_cache, step.block_table, step.num_computed)
    new = NewTokens(step.key, step.value)
    if step.query_len == 1:
        return functools.partial(paged_decode, step.query, new, kv, **chosen)
    kv = kv._replace(query_start_loc=step.query_start_loc)
    return functools.partial(paged_prefill, step.query, new, kv, **chosen)


FLASH = "FlashAttention 3"
TRITON = "vLLM Triton"
FLASH_BLOCK_SIZE = 128
"""FlashAttention 3 loads such blocks with the tensor memory accelerator."""

# vLLM's default sizes of captured batches; AttentionConfig.flash_attn_max_num_splits_for_cuda_graph.
_CAPTURE_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
_FLASH_GRAPH_SPLITS = 32
# MIN_LAUNCH_GRID_SIZE_2D and NUM_PAR_SOFTMAX_SEGMENTS of vLLM's triton_attn.
_TRITON_MIN_GRID, _TRITON_SEGMENTS = 128, 16


def flash_attention(steps: Sequence[PagedStep]) -> Launches:
    """FlashAttention 3 with a block table and a schedule made ahead, after ``reshape_and_cache_flash``."""
    import vllm._custom_ops as operations
    import vllm.vllm_flash_attn as flash

    step, heads = steps[0], steps[0].heads
    num_tokens = step.num_rows * step.query_len
    sizes: dict[str, Any] = {
        "cu_seqlens_q": step.query_start_loc,
        "max_seqlen_q": step.query_len,
        "max_seqlen_k": step.seq_len,
        "num_splits": _FLASH_GRAPH_SPLITS if num_tokens <= _CAPTURE_SIZES[-1] else 0,
    }
    schedule = flash.get_scheduler_metadata(
        batch_size=step.num_rows,
        num_heads_q=heads.num_query_heads,
        num_heads_kv=heads.num_kv_heads,
        headdim=heads.head_size,
        cache_seqlens=step.seq_lens,
        qkv_dtype=heads.dtype,
        page_size=step.block_size,
        causal=True,
        window_size=(-1, -1),
        **sizes,
    )
    attend = functools.partial(
        flash.flash_attn_varlen_func,
        seqused_k=step.seq_lens,
        scheduler_metadata=schedule,
        window_size=[-1, -1],
        fa_version=3,
        **sizes,
    )
    return [stored_and_attended(step, operations.reshape_and_cache_flash, attend) for step in steps]


def triton_attention(steps: Sequence[PagedStep]) -> Launches:
    """vLLM's ``unified_attention`` after its Triton cache write; few rows split their context over programs."""
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    step, heads = steps[0], steps[0].heads
    wanted = _TRITON_MIN_GRID // heads.num_kv_heads
    max_split_rows = min(_CAPTURE_SIZES, key=lambda size: abs(size - wanted))
    scratch = (max_split_rows, heads.num_query_heads, _TRITON_SEGMENTS)
    descale = torch.ones((), dtype=torch.float32, device="cuda").expand(step.num_rows, heads.num_kv_heads)
    attend = functools.partial(
        unified_attention,
        cu_seqlens_q=step.query_start_loc,
        seqused_k=step.seq_lens,
        max_seqlen_q=step.query_len,
        max_seqlen_k=step.seq_len,
        seq_threshold_3D=max_split_rows,
        num_par_softmax_segments=_TRITON_SEGMENTS,
        softmax_segm_output=torch.empty((*scratch, heads.head_size), device="cuda"),
        softmax_segm_max=torch.empty(scratch, device="cuda"),
        softmax_segm_expsum=torch.empty(scratch, device="cuda"),
        window_size=(-1, -1),
        softcap=0,
        q_descale=None,
        k_descale=descale,
        v_descale=descale,
    )
    return [stored_and_attended(step, triton_reshape_and_cache_flash, attend) for step in steps]


def stored_and_attended(
    step: PagedStep, store: Callable[..., object], attend: Callable[..., object]
) -> Callable[[], torch.Tensor]:
    """Return a launch of a separate cache write, then of attention."""
    one = torch.ones((), dtype=torch.float32, device="cuda")

    def run() -> torch.Tensor:
        store(step.key, step.value, step.key_cache, step.value_cache, step.slot_mapping, "auto", one, one)
        attend(
            q=step.query,
            k=step.key_cache,
            v=step.value_cache,
            out=step.out,
            softmax_scale=step.heads.head_size**-0.5,
            causal=True,
            block_table=step.block_table,
        )
        return step.out

    return run


TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


def attention_case(name: str, heads: Heads, num_rows: int, query_len: int, num_computed: int) -> KernelCase:
    """``query_len`` new tokens per row after ``num_computed`` cached ones."""

    def make(num_sets: int) -> Contest:
        steps = make_steps(heads, num_rows, query_len, num_computed, num_sets)
        sides: dict[str, Launches] = {ROSE: [rose_attention(step) for step in steps]}
        case.add_peer(sides, FLASH, lambda: flash_attention(steps))
        case.add_peer(sides, TRITON, lambda: triton_attention(steps))
        first_steps = {}
        if query_len > 1:
            name = f"{FLASH}, blocks of {FLASH_BLOCK_SIZE}"
            large = [step.with_block_size(FLASH_BLOCK_SIZE) for step in steps]
            case.add_peer(sides, name, lambda: flash_attention(large))
            first_steps[name] = large[0]

        def reset() -> None:
            for step in (steps[0], *first_steps.values()):
                step.forget()

        return Contest(
            sides,
            reset=reset,
            observe=lambda side, out: (out, first_steps.get(side, steps[0]).stored()),
            tolerance=TOLERANCE[heads.dtype],
        )

    # Keys and values of old tokens are read, of new ones read and written; queries are read, results written.
    num_vectors = (
        2 * (num_computed + 2 * query_len) * heads.num_kv_heads + 2 * query_len * heads.num_query_heads
    )
    num_bytes = num_rows * num_vectors * heads.head_size * heads.dtype.itemsize
    pairs = query_len * num_computed + query_len * (query_len + 1) // 2
    flops = 4 * num_rows * heads.num_query_heads * pairs * heads.head_size
    return KernelCase(name, num_bytes, make, flops=flops)


def decode_case(heads: Heads, num_rows: int, context: int) -> KernelCase:
    """One new token per row; ``context`` counts it."""
    name = f"decode {heads.name} B={num_rows} context {context:,}"
    return attention_case(name, heads, num_rows, 1, context - 1)


def prefill_case(heads: Heads, num_rows: int, query_len: int, num_computed: int = 0) -> KernelCase:
    """A prompt, or a chunk of it, per row."""
    after = f" after {num_computed:,}" if num_computed else ""
    name = f"prefill {heads.name} {num_rows} x {query_len:,}{after}"
    return attention_case(name, heads, num_rows, query_len, num_computed)


# Of clones: a whole GPT-2 cache, 590 kB per block, all layers, keys and values.
NUM_LAYERS, NUM_BLOCKS, BLOCK_SHAPE = 12, 3000, (16, 12, 64)
BLOCK_BYTES = NUM_LAYERS * 2 * 16 * 12 * 64 * 2
TORCH_CLONE = "torch index_select, index_copy_"


def clone_case(num_pairs: int) -> KernelCase:
    """Copy random blocks over other random blocks; torch gathers and scatters all layers at once."""

    def make(num_sets: int) -> Contest:
        cache = torch.randn(NUM_LAYERS, 2, NUM_BLOCKS, *BLOCK_SHAPE, dtype=torch.float16, device="cuda")
        blocks = [torch.randperm(NUM_BLOCKS, device="cuda")[: 2 * num_pairs].int() for _ in range(num_sets)]
        pairs = [chosen.chunk(2) for chosen in blocks]

        def torch_clone(src: torch.Tensor, dst: torch.Tensor) -> Callable[[], object]:
            return lambda: cache.index_copy_(2, dst, cache.index_select(2, src))

        clone = functools.partial(block_clone, cache, block_dim=2, independent=True)
        sides: dict[str, Launches] = {
            ROSE: [functools.partial(clone, src, dst) for src, dst in pairs],
            TORCH_CLONE: [torch_clone(src, dst.long()) for src, dst in pairs],
        }
        first = pairs[0][1].long()

        def reset() -> None:
            cache[:, :, first] = float("nan")

        return Contest(sides, reset=reset, observe=lambda side, _: (cache[:, :, first],))

    plural = "" if num_pairs == 1 else "s"
    return KernelCase(f"clone {num_pairs} block{plural} of 12 layers", 2 * num_pairs * BLOCK_BYTES, make)


CASES = {
    "decode": [
        *(decode_case(GPT2, rows, context) for context in (512, 1024) for rows in (1, 8, 32, 64, 128, 256)),
        *(decode_case(LLAMA_8B, *sizes) for sizes in ((1, 8192), (1, 32_768), (8, 8192), (64, 4096))),
    ],
    "prefill": [
        prefill_case(GPT2, 32, 512),
        *(
            prefill_case(heads, *sizes)
            for heads in (GPT2, LLAMA_8B)
            for sizes in ((4, 8192), (2, 2048, 6144))
        ),
    ],
    "clone": [clone_case(num_pairs) for num_pairs in (1, 16, 256)],
}
