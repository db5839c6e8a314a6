"""Triton kernels for the MLP of a mixture of experts, in four launches, or three with few tokens.

1. ``_choose_experts_kernel``, one program per token: the largest logits and their weights. Unless tokens are few it
   also lists the tokens of each expert, in an order that depends on which program came first; no result depends on it.
2. ``_expert_product_kernel`` with the gate and its factor: ``silu(gate) * factor`` of each pair of token and expert.
3. The same kernel with ``narrow``: each pair's result, times its weight.
4. The sum over a token's experts, always in the order of their weights, plus the residual: see ``expert_sum``, whose
   kernel for few tokens is 3 and 4 in one.

A program of a product has the rows of one expert, as many as fit a tile. How many tiles each expert has is known on the
GPU only, so there are as many programs as there could be tiles; those beyond the last tile end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from rose_backend.kernels.gpu.expert_sum import add_experts, combine_experts, num_parts
from rose_backend.kernels.gpu.expert_tuning import (
    CombineConfig,
    ExpertConfig,
    are_apart,
    choose_combine_config,
    choose_config,
)
from rose_backend.kernels.gpu.linear_tile import add_tile, load_moments, load_tile
from rose_backend.kernels.gpu.small_batch_linear import can_use_tma, has_dependent_launch
from rose_backend.kernels.reference.expert_mlp import MAX_EXPERTS


@triton.jit(do_not_specialize=["num_tokens"])
def _choose_experts_kernel(
    logits_ptr,  # [T, X]
    expert_ids_ptr,  # [T, A] int32 contiguous, written
    weights_ptr,  # [T, A] float32 contiguous, written
    counts_ptr,  # [X] int32, zero before, with GROUPED: tokens of each expert, written
    pairs_ptr,  # [X, T] int32, with GROUPED: of each expert its pairs, token * A + place, written
    num_tokens,
    logits_stride,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,  # the next power of two
    TOP_K: tl.constexpr,  # A
    PLACES: tl.constexpr,  # the next power of two
    RENORMALIZE: tl.constexpr,
    GROUPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0)
    experts, places = tl.arange(0, EXPERTS), tl.arange(0, PLACES)
    in_experts, in_places = experts < NUM_EXPERTS, places < TOP_K
    row = logits_ptr + token.to(tl.int64) * logits_stride
    logits = tl.load(row + experts, mask=in_experts, other=float("-inf")).to(tl.float32)
    # Below all numbers are only experts that are taken or do not exist: no token takes one twice, also with NaN.
    LOWEST: tl.constexpr = -3.4e38
    left = tl.where(logits >= LOWEST, logits, LOWEST)
    left = tl.where(in_experts, left, float("-inf"))
    peak = tl.max(left, 0)
    total = tl.sum(tl.exp(logits - peak), 0)
    chosen = tl.zeros([PLACES], tl.int32)
    weights = tl.zeros([PLACES], tl.float32)
    for place in tl.static_range(TOP_K):
        largest, index = tl.max(left, 0, return_indices=True)
        chosen = tl.where(places == place, index, chosen)
        weights = tl.where(places == place, tl.exp(largest - peak) / total, weights)
        left = tl.where(experts == index, float("-inf"), left)
    if RENORMALIZE:
        weights /= tl.sum(weights, 0)
    pairs = token * TOP_K + places
    tl.store(expert_ids_ptr + pairs, chosen, mask=in_places)
    tl.store(weights_ptr + pairs, weights, mask=in_places)
    if GROUPED:
        before = tl.atomic_add(counts_ptr + chosen, 1, mask=in_places, sem="relaxed")
        tl.store(pairs_ptr + chosen.to(tl.int64) * num_tokens + before, pairs, mask=in_places)


@triton.jit
def _rows_of_tile(counts_ptr, tile, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the expert of a tile of rows, ``EXPERTS`` behind the last, its first row and how many it has of them."""
    experts = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    ends = tl.cumsum(tl.cdiv(counts, BLOCK_M), 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    begin = tl.max(tl.where(experts < expert, ends, 0), 0)
    count = tl.sum(tl.where(experts == expert, counts, 0), 0)
    return expert, (tile - begin) * BLOCK_M, count


@triton.jit(do_not_specialize=["num_tokens", "num_row_tiles"])
def _expert_product_kernel(
    weight_desc,  # of weight as [X * O, E], with TMA
    x_ptr,  # [T, E], or [T * A, E] where PAIRS_PER_ROW is 1
    weight_ptr,  # [X, O, E] contiguous
    expert_ids_ptr,  # [T * A] int32
    counts_ptr,  # [X] int32, with GROUPED
    pairs_ptr,  # [X, T] int32, with GROUPED
    x_moments_ptr,  # [T, 2, X_PARTS] float32, with X_PARTS
    scale_ptr,  # [T * A] float32, with SCALED
    out_ptr,  # [T * A, NUM_COLUMNS] contiguous, written
    num_tokens,
    num_row_tiles,
    x_stride,
    eps,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,  # O, with GATED O / 2
    K: tl.constexpr,  # E
    PAIRS_PER_ROW: tl.constexpr,  # that have a row of x in common
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTS_LEFT: tl.constexpr,
    TMA: tl.constexpr,
    GROUPED: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    X_PARTS: tl.constexpr,  # of an RMSNorm in front, else 0
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (tile of rows, tile of columns); those that share weights are neighbours."""
    tile, column_tile = tl.program_id(0) % num_row_tiles, tl.program_id(0) // num_row_tiles
    if PDL:
        # Only then: the kernel behind knows the experts when it starts.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if GROUPED:
        expert, first, count = _rows_of_tile(counts_ptr, tile, NUM_EXPERTS, EXPERTS, BLOCK_M)
    else:
        expert, first, count = tl.load(expert_ids_ptr + tile), 0, 1
    if expert < NUM_EXPERTS:
        rows = first + tl.arange(0, BLOCK_M)
        in_rows = rows < count
        if GROUPED:
            pairs = tl.load(pairs_ptr + expert.to(tl.int64) * num_tokens + rows, mask=in_rows, other=0)
        else:
            pairs = rows + tile
        x_rows = pairs // PAIRS_PER_ROW
        columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        in_columns = columns < NUM_COLUMNS
        OUTPUTS: tl.constexpr = 2 * NUM_COLUMNS if GATED else NUM_COLUMNS
        first_output = expert * OUTPUTS + column_tile * BLOCK_N
        of_expert = weight_ptr + expert.to(tl.int64) * (OUTPUTS * K)
        if EXACT:
            # One sum over the whole depth would round more than twice as far as torch's product.
            acc = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], tl.float32)
        else:
            acc = tl.zeros([BLOCK_N, BLOCK_M] if WEIGHTS_LEFT else [BLOCK_M, BLOCK_N], tl.float32)
        factor_acc = acc
        for start in range(0, K, BLOCK_K):
            x = load_tile(x_ptr, x_rows, in_rows, x_stride, start, K, BLOCK_K, 1)
            if TMA:
                weight = weight_desc.load([first_output, start])
            else:
                weight = load_tile(of_expert, columns, in_columns, K, start, K, BLOCK_K, 1)
            acc = add_tile(x, weight, acc, not EXACT, WEIGHTS_LEFT, EXACT)
            if GATED:
                if TMA:
                    factor = weight_desc.load([first_output + NUM_COLUMNS, start])
                else:
                    factor = load_tile(of_expert, columns + NUM_COLUMNS, in_columns, K, start, K, BLOCK_K, 1)
                factor_acc = add_tile(x, factor, factor_acc, not EXACT, WEIGHTS_LEFT, EXACT)
        if EXACT:
            acc, factor_acc = tl.sum(acc, 2), tl.sum(factor_acc, 2)
        elif WEIGHTS_LEFT:
            acc, factor_acc = tl.trans(acc), tl.trans(factor_acc)
        if X_PARTS > 0:
            _, squares = load_moments(x_moments_ptr, x_rows, num_tokens, X_PARTS)
            norm = tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
            acc, factor_acc = acc * norm, factor_acc * norm
        if GATED:
            acc = acc * tl.sigmoid(acc) * factor_acc
        if SCALED:
            acc *= tl.load(scale_ptr + pairs, mask=in_rows, other=0.0)[:, None]
        out_ptrs = out_ptr + pairs.to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


Configs = tuple[ExpertConfig, ExpertConfig | CombineConfig]

_counts: dict[torch.device, torch.Tensor] = {}


def _counts_of(device: torch.device) -> torch.Tensor:
    """Return the device's counters of tokens by expert, which are zero between calls.

    One stream at a time may use them: calls of one stream follow each other. They are as many as any model needs, and
    stay where they are: captured graphs hold their address.
    """
    if device not in _counts:
        _counts[device] = torch.zeros(MAX_EXPERTS, dtype=torch.int32, device=device)
    return _counts[device]


def expert_mlp(
    x: torch.Tensor,  # [T, E]
    router_logits: torch.Tensor,  # [T, X]
    widen: torch.Tensor,  # [X, 2 * I, E] contiguous
    narrow: torch.Tensor,  # [X, E, I] contiguous
    residual: torch.Tensor | None,  # [T, E]
    out: torch.Tensor,  # [T, E]  written
    *,
    top_k: int,
    renormalize: bool,
    rms_eps: float | None,
    x_moments: torch.Tensor | None,  # [T, 2, P] float32, with rms_eps
    configs: Configs | None = None,
    use_pdl: bool | None = None,
) -> torch.Tensor:
    """Launch the kernels; arguments as checked by ``rose_backend.kernels.expert_mlp``, whose moments are returned.

    Args:
        configs: of both products, the second a ``CombineConfig`` where ``are_apart``; None takes the measured choice.
        use_pdl: as in ``small_batch_linear``.
    """
    num_tokens, width = x.shape
    num_experts = router_logits.shape[1]
    grouped = not are_apart(num_tokens, top_k)
    num_pairs = num_tokens * top_k
    if configs is None:
        configs = _choose_configs(x, widen, narrow, top_k, grouped=grouped)
    first, second = configs
    parts = num_parts(width, second if isinstance(second, CombineConfig) else None)
    moments = x.new_empty((num_tokens, 2, parts), dtype=torch.float32)
    if num_tokens == 0:
        return moments
    if use_pdl is None:
        use_pdl = has_dependent_launch(x.device)
    scales = x.new_empty(num_pairs, dtype=torch.float32)
    lists = (
        x.new_empty(num_pairs, dtype=torch.int32),
        _counts_of(x.device),
        x.new_empty(num_experts * num_tokens if grouped else 1, dtype=torch.int32),
    )
    activated = x.new_empty((num_pairs, narrow.shape[2]))
    outputs = x.new_empty((num_pairs if grouped else 0, width))
    experts = {
        "NUM_EXPERTS": num_experts,
        "EXPERTS": triton.next_power_of_2(num_experts),
        "GROUPED": grouped,
        "PDL": use_pdl,
        "launch_pdl": use_pdl,
    }
    try:
        _choose(router_logits, scales, lists, top_k, renormalize, experts)
        _product(x, widen, first, lists, x_moments, None, activated, num_tokens, rms_eps, experts)
        if isinstance(second, CombineConfig):
            combine_experts(
                activated, narrow, lists[0], scales, residual, out, moments, second, use_pdl=use_pdl
            )
        else:
            _product(activated, narrow, second, lists, None, scales, outputs, num_tokens, None, experts)
            add_experts(outputs, residual, out, moments, lists[1], top_k=top_k, use_pdl=use_pdl)
    except BaseException:
        # A kernel that could not be loaded, say: the next call counts from zero all the same.
        lists[1].zero_()
        raise
    return moments


def _choose_configs(
    x: torch.Tensor, widen: torch.Tensor, narrow: torch.Tensor, top_k: int, *, grouped: bool
) -> Configs:
    exact = x.dtype == torch.float32
    num_pairs, num_experts = len(x) * top_k, len(widen)
    first_tma, second_tma = can_use_tma(widen.flatten(0, 1)), can_use_tma(narrow.flatten(0, 1))
    first = choose_config(
        num_pairs, num_experts, grouped=grouped, gated=True, exact=exact, can_use_tma=first_tma
    )
    if not grouped:
        return first, choose_combine_config(top_k, exact=exact, can_use_tma=second_tma)
    return first, choose_config(
        num_pairs, num_experts, grouped=True, gated=False, exact=exact, can_use_tma=second_tma
    )


Lists = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The experts of tokens [T * A], how many tokens each expert has [X], and its pairs [X, T]; all int32."""


def _choose(
    router_logits: torch.Tensor,  # [T, X]
    scales: torch.Tensor,  # [T * A] float32  written
    lists: Lists,  # written
    top_k: int,
    renormalize: bool,
    experts: dict[str, int | bool],
) -> None:
    num_tokens, num_experts = router_logits.shape
    expert_ids, counts, pairs = lists
    _choose_experts_kernel[(num_tokens,)](
        router_logits,
        expert_ids,
        scales,
        counts,
        pairs,
        num_tokens,
        router_logits.stride(0),
        TOP_K=top_k,
        PLACES=triton.next_power_of_2(top_k),
        RENORMALIZE=renormalize,
        num_warps=1 if num_experts <= 256 else 4,
        **experts,
    )


def _product(
    x: torch.Tensor,  # [T, E] or [T * A, E]
    weight: torch.Tensor,  # [X, O, E]
    config: ExpertConfig,
    lists: Lists,
    x_moments: torch.Tensor | None,
    scale: torch.Tensor | None,  # [T * A] float32
    out: torch.Tensor,  # [T * A, O] or, gated, [T * A, O / 2]  written
    num_tokens: int,
    rms_eps: float | None,
    experts: dict[str, int | bool],
) -> None:
    num_pairs, num_columns = out.shape
    num_experts, num_outputs, depth = weight.shape
    # Each expert has at most one tile that is not full.
    row_tiles = num_pairs
    if experts["GROUPED"]:
        row_tiles = min(num_pairs, num_pairs // config.block_m + num_experts)
    descriptor = None
    if config.use_tma:
        descriptor = TensorDescriptor.from_tensor(weight.flatten(0, 1), [config.block_n, config.block_k])
    expert_ids, counts, pairs = lists
    _expert_product_kernel[(row_tiles * triton.cdiv(num_columns, config.block_n),)](
        descriptor,
        x,
        weight,
        expert_ids,
        counts,
        pairs,
        x if x_moments is None else x_moments,
        x if scale is None else scale,
        out,
        num_tokens,
        row_tiles,
        x.stride(0),
        0.0 if rms_eps is None else rms_eps,
        NUM_COLUMNS=num_columns,
        K=depth,
        PAIRS_PER_ROW=num_pairs // len(x),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        WEIGHTS_LEFT=config.weights_left,
        TMA=config.use_tma,
        GATED=num_outputs != num_columns,
        SCALED=scale is not None,
        X_PARTS=0 if rms_eps is None or x_moments is None else x_moments.shape[2],
        EXACT=x.dtype == torch.float32,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **experts,
    )
