"""Triton products of a few rows with a weight matrix: LayerNorm in front, GELU or a residual behind, in one launch.

At 1 to 64 rows such a product is as long as its weights take to arrive, so everything else is arranged around them:

- A program owns ``BLOCK_N`` output columns. It asks for its weights before it waits for the kernel that makes ``x``
  (programmatic dependent launch), so they travel while that kernel still runs.
- LayerNorm costs no pass of its own. With the norm's weight folded into ``W`` and its bias into ``b``::

      norm(x) @ W.T + b = (x @ W.T - mean(x) * sum(W, 1)) / std(x) + b

  and both moments of ``x`` are summed up while its tiles pass by on their way to the product.
- Where there are too few columns to fill the GPU the depth is split over programs. The last program of a column tile to
  arrive adds the parts in their order, so that the result does not depend on who was last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from rose_backend.errors import ShapeError


@triton.jit
def _prefetch_to_l2(pointers):
    # One request per 128-byte line; the asm's result only gives the operation a value to hang on.
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _gelu_tanh(x):
    # 0.5 x (1 + tanh(u)) is x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(2.0 * u)


@triton.jit
def _load_weight(weight_ptrs, columns_inside, ks, K: tl.constexpr):
    return tl.load(weight_ptrs, mask=columns_inside[:, None] & (ks < K)[None, :], other=0.0)


@triton.jit
def small_batch_linear_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N] float32
    column_sum_ptr,  # [N] float32, with NORM
    residual_ptr,  # [M, N], with RESIDUAL
    out_ptr,  # [M, N]  written
    partial_ptr,  # [tiles, SPLIT_K, BLOCK_M, BLOCK_N] float32, scratch
    arrivals_ptr,  # [tiles] int32, zero before and after
    num_rows,
    num_columns,
    x_stride,
    residual_stride,
    out_stride,
    eps,
    K: tl.constexpr,
    DEPTH: tl.constexpr,  # columns of x that a program takes: K / SPLIT_K, rounded up to BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    USE_DOT: tl.constexpr,
    NORM: tl.constexpr,
    GELU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EXACT: tl.constexpr,
    PREFETCH: tl.constexpr,  # 128-byte lines per column to ask for ahead, a power of two
    PDL: tl.constexpr,
):
    """One program per (tile of ``BLOCK_N`` columns, part of the depth)."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = part * DEPTH + tl.arange(0, BLOCK_K)
    wide_rows = rows.to(tl.int64)
    in_rows = rows < num_rows
    in_columns = columns < num_columns
    inside = in_rows[:, None] & in_columns[None, :]
    weight_ptrs = weight_ptr + columns[:, None].to(tl.int64) * K + ks[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # What is constant is asked for before the wait.
    WHOLE: tl.constexpr = DEPTH == BLOCK_K
    if WHOLE:
        weight = _load_weight(weight_ptrs, in_columns, ks, K)
    elif PREFETCH > 0:
        LINE: tl.constexpr = 128 // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
        lines = tl.minimum(part * DEPTH + tl.arange(0, PREFETCH) * LINE, K - 1)
        known = tl.minimum(columns, num_columns - 1).to(tl.int64)
        _prefetch_to_l2(weight_ptr + known[:, None] * K + lines[None, :])
    bias = tl.load(bias_ptr + columns, mask=in_columns, other=0.0)
    if NORM:
        column_sum = tl.load(column_sum_ptr + columns, mask=in_columns, other=0.0)
    if PDL:
        # Everything below reads or overwrites what earlier kernels made or read.
        tl.extra.cuda.gdc_wait()
    if RESIDUAL:
        residual = tl.load(
            residual_ptr + wide_rows[:, None] * residual_stride + columns[None, :], mask=inside, other=0.0
        )
    x_ptrs = x_ptr + wide_rows[:, None] * x_stride + ks[None, :]
    if NORM:
        total = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
        squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    if USE_DOT:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        products = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, DEPTH, BLOCK_K):
        x = tl.load(x_ptrs + start, mask=in_rows[:, None] & (ks + start < K)[None, :], other=0.0)
        if not WHOLE:
            weight = _load_weight(weight_ptrs + start, in_columns, ks + start, K)
        if NORM:
            wide = x.to(tl.float32)
            total += wide
            squares += wide * wide
        if USE_DOT:
            acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee" if EXACT else "tf32")
        else:
            products += x[:, None, :].to(tl.float32) * weight[None, :, :].to(tl.float32)
    if not USE_DOT:
        acc = tl.sum(products, 2)
    is_last = True
    if SPLIT_K > 1:
        slots = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        parts = partial_ptr + tile.to(tl.int64) * (SPLIT_K * BLOCK_M * BLOCK_N) + slots
        tl.store(parts + part * (BLOCK_M * BLOCK_N), acc)
        # All of the program's stores come before its arrival counts.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLIT_K - 1
        if is_last:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for index in range(SPLIT_K):
                acc += tl.load(parts + index * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
            tl.store(arrivals_ptr + tile, 0)
    if is_last:
        if NORM:
            mean = tl.sum(total, 1) / K
            variance = tl.sum(squares, 1) / K - mean * mean
            acc = (acc - mean[:, None] * column_sum[None, :]) * tl.rsqrt(variance + eps)[:, None]
        acc += bias[None, :]
        if GELU:
            acc = _gelu_tanh(acc)
        if RESIDUAL:
            acc += residual.to(tl.float32)
        out_ptrs = out_ptr + wide_rows[:, None] * out_stride + columns[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """How one product is cut into programs; ``split_k`` above 1 only without a norm in front."""

    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int
    use_dot: bool


MAX_SPLIT_COLUMNS = 4096


@lru_cache(maxsize=256)
def choose_config(block_m: int, num_columns: int, depth: int, *, has_norm: bool, exact: bool) -> LinearConfig:
    """Return the cut for ``block_m`` rows (a power of two); measured by ``benchmarks.tune_small_batch_linear``.

    Args:
        exact: float32 inputs, which are multiplied without tensor cores.
    """
    whole = triton.next_power_of_2(depth)
    if exact:
        return LinearConfig(2, min(whole, 4096 // block_m), 1, 8, 2, False)
    if block_m <= 2:
        if depth > 1024:
            return LinearConfig(2 * block_m, min(whole, 4096), 1, 8, 3, False)
        block_n = 4 * block_m if num_columns <= 1024 else 2 if num_columns <= 2560 else 2 * block_m
        return LinearConfig(block_n, whole, 1, 2, 3, False)
    if has_norm:
        if block_m == 64 or depth > 1024:
            return LinearConfig(32, min(whole, 128), 1, 8, 5, True)
        return LinearConfig(32, whole, 1, 8 if block_m == 32 else 4, 3, True)
    if num_columns > MAX_SPLIT_COLUMNS:
        # So many columns fill the GPU without a split.
        return LinearConfig(32, min(whole, 256), 1, 4, 3, True)
    if depth > 1024:
        split_k, block_k = (4, 256) if block_m == 64 else (8, min(whole // 8, 512))
        return LinearConfig(32, block_k, split_k, 4, 3, True)
    if block_m <= 16:
        return LinearConfig(32, min(whole, 256), 4 if depth > 256 else 1, 4, 3, True)
    return LinearConfig(16, min(whole, 256), 1, 4, 3, True)


@lru_cache(maxsize=16)
def has_dependent_launch(device: torch.device) -> bool:
    """Whether kernels on ``device`` may start before the one in front has ended (compute capability 9.0 and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


_scratch: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
_SCRATCH_FLOATS = MAX_SPLIT_COLUMNS * 8 * 64
"""Parts of the widest product that is split: columns, parts, rows."""
_SCRATCH_TILES = 1 << 14


def scratch_of(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the device's buffer for parts and its arrival counters, which are zero between launches.

    One stream at a time may use them: launches of one stream follow each other.
    """
    if device not in _scratch:
        _scratch[device] = (
            torch.empty(_SCRATCH_FLOATS, dtype=torch.float32, device=device),
            torch.zeros(_SCRATCH_TILES, dtype=torch.int32, device=device),
        )
    return _scratch[device]


def small_batch_linear(
    x: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [O, E]
    bias: torch.Tensor,  # [O] float32
    column_sums: torch.Tensor | None,  # [O] float32
    residual: torch.Tensor | None,  # [T, O]
    out: torch.Tensor,  # [T, O]  written
    *,
    eps: float,
    gelu: bool,
    config: LinearConfig | None = None,
    use_pdl: bool | None = None,
) -> torch.Tensor:
    """Launch the kernel; arguments as checked by ``rose_backend.kernels.small_batch_linear``.

    Args:
        config: None takes the measured choice.
        use_pdl: start while the kernel in front still runs, and allow the same to the next one; None does where the
            device can. ``weight``, ``bias`` and ``column_sums`` must not be what the kernel in front writes.
    """
    num_rows, depth = x.shape
    num_columns = weight.shape[0]
    if num_rows == 0:
        return out
    block_m = triton.next_power_of_2(num_rows)
    if config is None:
        has_norm, exact = column_sums is not None, x.dtype == torch.float32
        config = choose_config(block_m, num_columns, depth, has_norm=has_norm, exact=exact)
    if use_pdl is None:
        use_pdl = has_dependent_launch(x.device)
    if config.use_dot:
        block_m = max(block_m, 16)
    tiles = triton.cdiv(num_columns, config.block_n)
    num_floats = tiles * config.split_k * block_m * config.block_n
    if config.split_k > 1 and (num_floats > _SCRATCH_FLOATS or tiles > _SCRATCH_TILES):
        raise ShapeError(
            f"config: {config} needs {num_floats} floats for the parts of {num_rows} x {num_columns} results, "
            f"allowed are {_SCRATCH_FLOATS}"
        )
    partial, arrivals = scratch_of(x.device)
    deep = triton.cdiv(triton.cdiv(depth, config.split_k), config.block_k) * config.block_k
    small_batch_linear_kernel[(tiles, config.split_k)](
        x,
        weight,
        bias,
        bias if column_sums is None else column_sums,
        x if residual is None else residual,
        out,
        partial,
        arrivals,
        num_rows,
        num_columns,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        eps,
        K=depth,
        DEPTH=deep,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLIT_K=config.split_k,
        USE_DOT=config.use_dot,
        NORM=column_sums is not None,
        GELU=gelu,
        RESIDUAL=residual is not None,
        EXACT=x.dtype == torch.float32,
        PREFETCH=triton.next_power_of_2(triton.cdiv(deep * weight.element_size(), 128)) if use_pdl else 0,
        PDL=use_pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=use_pdl,
    )
    return out
