"""Triton kernels for the MLP of a mixture of experts, in four launches.

1. ``_choose_experts_kernel``: each token's experts and their weights, each expert's tokens.
2. ``_expert_product_kernel`` with the gate and its factor: ``silu(gate) * factor`` of each pair of token and expert.
3. The same kernel with ``down``: each pair's result, times its weight.
4. ``_add_experts_kernel``: a token's experts, added in the order of their weights, and a residual; and what the norm
   after it needs.

A program of a product has the rows of one expert, as many as fit a tile. How many tiles each expert has is known on the
GPU only, so there are as many programs as there could be tiles; those beyond the last tile end at once.

The second product does not wait for the first one's last programs, which leave memory idle (programmatic dependent
launch): its own start in the processors that become free, and each waits for the programs of its expert only, which
have counted themselves.

Weights in 8 bits have a scale for each block. A tile lies in one block: its products are multiplied by one number
before they are added up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from rose_backend.errors import ShapeError
from rose_backend.kernels.arguments import (
    MAX_EXPERTS,
    SCALED_BLOCK,
    Experts,
    Float8Experts,
    NormInput,
    PackedNorm,
)
from rose_backend.kernels.gpu_properties import can_use_tma, current_workspace, has_dependent_launch
from rose_backend.kernels.linear.float8 import from_float8
from rose_backend.kernels.linear.small_batch_linear import (
    MAX_REGISTERS,
    NormAfter,
    add_tile,
    block_scale,
    load_moments,
    load_norm_weight,
    load_tile,
    norm_after,
)
from rose_backend.kernels.sampling.sampler import ordered_key, value_of_key
from rose_backend.kernels.tuning.choices import ExpertConfig, choose_expert_config

_EXPERT_MASK = tl.constexpr(MAX_EXPERTS - 1)
_SCALED_BLOCK = tl.constexpr(SCALED_BLOCK)


@triton.jit
def _keys(logits, experts, ARE_WIDE: tl.constexpr):
    """Map logits, as float32, and their experts to integers in the order of logits; of equals the first is larger.

    An integer has the expert in its last bits. Logits of 16 bits leave them free in float32, so that 32 bits are
    enough, of which a warp finds the largest in one instruction.
    """
    keys = ordered_key(logits)
    if ARE_WIDE:
        keys = keys.to(tl.int64) * (_EXPERT_MASK + 1)
    return (keys & (-1 - _EXPERT_MASK)) + (_EXPERT_MASK - experts)


@triton.jit
def _logit(key, ARE_WIDE: tl.constexpr):
    """Return the logit of one of ``_keys``."""
    if ARE_WIDE:
        ordered = ((key - (key & _EXPERT_MASK)) // (_EXPERT_MASK + 1)).to(tl.int32)
    else:
        # Of negative numbers, the bits that were free are ones in ``ordered_key``.
        ordered = tl.where(key < 0, key | _EXPERT_MASK, key & (-1 - _EXPERT_MASK))
    return value_of_key(ordered)


@triton.jit(do_not_specialize=["num_tokens"])
def _choose_experts_kernel(
    logits_ptr,  # [T, X]
    weights_ptr,  # [T, A] float32 contiguous, written
    counts_ptr,  # [X] int32, zero before: tokens of each expert, written
    pairs_ptr,  # [X, T] int32: of each expert its pairs, token * A + place, written
    num_tokens,
    logits_stride,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,  # the next power of two
    TOP_K: tl.constexpr,  # A
    PLACES: tl.constexpr,  # the next power of two
    RENORMALIZE: tl.constexpr,
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
    logits = tl.load(row + experts, mask=in_experts, other=float("-inf"))
    # Below all numbers are only experts that are taken or do not exist: no token takes one twice, also with NaN.
    LOWEST: tl.constexpr = -3.4e38
    ARE_WIDE: tl.constexpr = logits.dtype == tl.float32
    TAKEN: tl.constexpr = -(2**50) if ARE_WIDE else -(2**31)
    wide = logits.to(tl.float32)
    keys = _keys(tl.where(wide >= LOWEST, wide, float("-inf")), experts, ARE_WIDE)
    keys = tl.where(in_experts, keys, TAKEN)
    peak = tl.maximum(_logit(tl.max(keys, 0), ARE_WIDE), LOWEST)
    total = tl.sum(tl.exp(wide - peak), 0)
    chosen = tl.zeros([PLACES], tl.int32)
    weights = tl.zeros([PLACES], tl.float32)
    for place in tl.static_range(TOP_K):
        largest = tl.max(keys, 0)
        chosen = tl.where(places == place, _EXPERT_MASK - (largest & _EXPERT_MASK).to(tl.int32), chosen)
        weights = tl.where(
            places == place, tl.exp(tl.maximum(_logit(largest, ARE_WIDE), LOWEST) - peak) / total, weights
        )
        keys = tl.where(keys == largest, TAKEN, keys)
    if RENORMALIZE:
        weights /= tl.sum(weights, 0)
    pairs = token * TOP_K + places
    tl.store(weights_ptr + pairs, weights, mask=in_places)
    before = tl.atomic_add(counts_ptr + chosen, 1, mask=in_places, sem="relaxed")
    tl.store(pairs_ptr + chosen.to(tl.int64) * num_tokens + before, pairs, mask=in_places)


def choose_experts(
    router_logits: torch.Tensor,  # [T, X]
    weights: torch.Tensor,  # [T * A] float32  written
    counts: torch.Tensor,  # int32, X at least, zeros  written
    pairs: torch.Tensor,  # [X, T] int32  written
    *,
    top_k: int,
    renormalize: bool,
    use_pdl: bool,
) -> None:
    """Launch the choice; arguments as the kernel's, with ``A = top_k``."""
    num_tokens, num_experts = router_logits.shape
    _choose_experts_kernel[(num_tokens,)](
        router_logits,
        weights,
        counts,
        pairs,
        num_tokens,
        router_logits.stride(0),
        NUM_EXPERTS=num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        TOP_K=top_k,
        PLACES=triton.next_power_of_2(top_k),
        RENORMALIZE=renormalize,
        PDL=use_pdl,
        num_warps=1 if num_experts <= 256 else 4,
        launch_pdl=use_pdl,
    )


SUM_TILE = 512


@triton.jit
def _add_experts_kernel(
    outputs_ptr,  # [T, A, E] contiguous
    residual_ptr,  # [T, E], with RESIDUAL
    out_ptr,  # [T, E], written
    after,  # NormAfter
    counts_ptr,  # [NUM_COUNTS] int32, zero afterwards, written
    residual_stride,
    out_stride,
    NUM_COUNTS: tl.constexpr,  # a power of two
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (token, ``TILE`` columns)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * TILE + tl.arange(0, TILE)
    mask = columns < WIDTH
    if after.weight is not None:
        norm_weight = load_norm_weight(after, columns, mask)
    if PDL:
        # Only the norm's weight is constant.
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([TILE], tl.float32)
    for place in tl.static_range(TOP_K):
        output = outputs_ptr + (token * TOP_K + place) * WIDTH + columns
        total += tl.load(output, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual_ptr + token * residual_stride + columns, mask=mask, other=0.0).to(
            tl.float32
        )
    result = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * out_stride + columns, result, mask=mask)
    wide = result.to(tl.float32)
    if after.moments is not None:
        tl.store(after.moments + token * (2 * PARTS) + part, tl.sum(wide, 0))
        tl.store(after.moments + token * (2 * PARTS) + PARTS + part, tl.sum(wide * wide, 0))
    if after.weight is not None:
        tl.store(after.scaled + token * WIDTH + columns, (wide * norm_weight).to(result.dtype), mask=mask)
    # Nobody reads them any more: both products have ended.
    if (token == 0) & (part == 0):
        tl.store(counts_ptr + tl.arange(0, NUM_COUNTS), tl.zeros([NUM_COUNTS], tl.int32))


def num_parts(width: int) -> int:
    """Return how many parts the moments of rows of ``width`` columns have."""
    return triton.next_power_of_2(triton.cdiv(width, SUM_TILE))


def add_experts(
    outputs: torch.Tensor,  # [T * A, E] contiguous
    residual: torch.Tensor | None,  # [T, E]
    out: torch.Tensor,  # [T, E]  written
    after: NormAfter,  # with ``num_parts`` parts  written
    counts: torch.Tensor,  # int32  written, zeros
    *,
    top_k: int,
    use_pdl: bool,
) -> None:
    """Launch the sum of what all experts have made of each token, and set the counters back."""
    num_tokens, width = out.shape
    parts = num_parts(width)
    _add_experts_kernel[(num_tokens, parts)](
        outputs,
        outputs if residual is None else residual,
        out,
        after,
        counts,
        0 if residual is None else residual.stride(0),
        out.stride(0),
        NUM_COUNTS=counts.numel(),
        TOP_K=top_k,
        WIDTH=width,
        TILE=SUM_TILE,
        PARTS=parts,
        RESIDUAL=residual is not None,
        PDL=use_pdl,
        num_warps=4,
        launch_pdl=use_pdl,
    )


@triton.jit
def _work_of(
    counts_ptr,
    program,
    TILES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Return a program's expert, its number of rows, and the indices of the program's row tile and column tile.

    The expert is ``EXPERTS`` or more after the last tile. Experts come one after the other, so that each is finished
    early, and of an expert's programs those that share weights.
    """
    experts = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    ends = tl.cumsum(tl.cdiv(counts, BLOCK_M), 0) * TILES
    expert = tl.sum((ends <= program).to(tl.int32), 0)
    begin = tl.max(tl.where(experts < expert, ends, 0), 0)
    count = tl.sum(tl.where(experts == expert, counts, 0), 0)
    num_row_tiles = tl.maximum(tl.cdiv(count, BLOCK_M), 1)
    place = program - begin
    return expert, count, place % num_row_tiles, place // num_row_tiles


@triton.jit
def _wait_for(finished_ptr, needed):
    """Wait until ``needed`` programs have counted themselves; then what they have stored can be read."""
    while tl.atomic_add(finished_ptr, 0, sem="acquire", scope="gpu") < needed:
        pass
    tl.debug_barrier()


@triton.jit
def _end_after_first(program):
    """Let the second product not end before the first: the next kernel waits for the second only.

    One program is enough. All of them would keep processors that the others of the second product need.
    """
    if program == tl.num_programs(0) - 1:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _add_weights(
    x, weight, acc, scale, WEIGHTS_LEFT: tl.constexpr, EXACT: tl.constexpr, BY_ASSEMBLER: tl.constexpr
):
    """Return ``acc`` and a tile's products; weights in 8 bits have a scale, others None."""
    if scale is not None:
        weight = from_float8(weight, x.dtype, BY_ASSEMBLER)
        acc += scale * add_tile(x, weight, tl.zeros_like(acc), not EXACT, WEIGHTS_LEFT, EXACT)
    else:
        acc = add_tile(x, weight, acc, not EXACT, WEIGHTS_LEFT, EXACT)
    return acc


@triton.jit
def _multiply(
    weight_desc,
    x_ptr,
    weight_ptr,
    block_scales_ptr,
    x_rows,
    in_rows,
    x_stride,
    expert,
    column_tile,
    columns,
    NUM_COLUMNS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTS_LEFT: tl.constexpr,
    TMA: tl.constexpr,
    GATED: tl.constexpr,
    BY_ASSEMBLER: tl.constexpr,
):
    """Return products of rows of ``x`` with an expert's columns, and with ``GATED`` with the gate's factor."""
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    in_columns = columns < NUM_COLUMNS
    OUTPUTS: tl.constexpr = 2 * NUM_COLUMNS if GATED else NUM_COLUMNS
    first_output = expert * OUTPUTS + column_tile * BLOCK_N
    of_expert = weight_ptr + expert.to(tl.int64) * (OUTPUTS * K)
    if EXACT:
        # One sum over the whole depth would round more than twice as much as torch's product.
        acc = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], tl.float32)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M] if WEIGHTS_LEFT else [BLOCK_M, BLOCK_N], tl.float32)
    factor_acc = acc
    scale, factor_scale = None, None
    if block_scales_ptr is not None:
        # Of the gate and its factor apart, whose last blocks may be smaller.
        ACROSS: tl.constexpr = (K + _SCALED_BLOCK - 1) // _SCALED_BLOCK
        DOWN: tl.constexpr = (NUM_COLUMNS + _SCALED_BLOCK - 1) // _SCALED_BLOCK
        first_row = expert.to(tl.int64) * (OUTPUTS // NUM_COLUMNS * DOWN)
        scales = (block_scales_ptr + first_row * ACROSS, ACROSS, 1)
        factor_scales = (block_scales_ptr + (first_row + DOWN) * ACROSS, ACROSS, 1)
        scale = block_scale(scales, column_tile * BLOCK_N, 0, K)
        if GATED:
            factor_scale = block_scale(factor_scales, column_tile * BLOCK_N, 0, K)
    for start in range(0, K, BLOCK_K):
        x = load_tile(x_ptr, x_rows, in_rows, x_stride, start, K, BLOCK_K, 1)
        if TMA:
            weight = weight_desc.load([first_output, start])
        else:
            weight = load_tile(of_expert, columns, in_columns, K, start, K, BLOCK_K, 1)
        acc = _add_weights(x, weight, acc, scale, WEIGHTS_LEFT, EXACT, BY_ASSEMBLER)
        if GATED:
            if TMA:
                factor = weight_desc.load([first_output + NUM_COLUMNS, start])
            else:
                factor = load_tile(of_expert, columns + NUM_COLUMNS, in_columns, K, start, K, BLOCK_K, 1)
            factor_acc = _add_weights(x, factor, factor_acc, factor_scale, WEIGHTS_LEFT, EXACT, BY_ASSEMBLER)
        if block_scales_ptr is not None:
            # A turn before they are used.
            scale = block_scale(scales, column_tile * BLOCK_N, start + BLOCK_K, K)
            if GATED:
                factor_scale = block_scale(factor_scales, column_tile * BLOCK_N, start + BLOCK_K, K)
    if EXACT:
        acc, factor_acc = tl.sum(acc, 2), tl.sum(factor_acc, 2)
    elif WEIGHTS_LEFT:
        acc, factor_acc = tl.trans(acc), tl.trans(factor_acc)
    return acc, factor_acc


@triton.jit(do_not_specialize=["num_tokens"])
def _expert_product_kernel(
    weight_desc,  # of weight as [X * O, E], with TMA
    x_ptr,  # [T, E], or [T * A, E] where PAIRS_PER_ROW is 1
    weight,  # [X, O, E] contiguous, and ``Float8Experts.scales`` if these are uint8, else None
    counts_ptr,  # [X] int32
    finished_ptr,  # [X] int32: programs of the gated product that have stored; zero before it, which counts
    pairs_ptr,  # [X, T] int32
    before,  # with X_PARTS moments [T, 2, X_PARTS] and scale [1] float32, the scale None unless x is float16
    scale_ptr,  # [T * A] float32, without GATED
    out_ptr,  # [T * A, NUM_COLUMNS] contiguous, written
    num_tokens,
    x_stride,
    eps,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,  # O, with GATED O / 2
    K: tl.constexpr,  # E
    PAIRS_PER_ROW: tl.constexpr,  # that have a row of x in common
    FIRST_TILES: tl.constexpr,  # of columns, of the gated product
    FIRST_BLOCK_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTS_LEFT: tl.constexpr,
    TMA: tl.constexpr,
    GATED: tl.constexpr,  # the first product, else the second
    X_PARTS: tl.constexpr,  # of an RMSNorm in front, else 0
    BY_ASSEMBLER: tl.constexpr,  # see ``from_float8``
    PDL: tl.constexpr,
):
    """One program per (expert, tile of its rows, tile of columns)."""
    program = tl.program_id(0)
    if PDL:
        if GATED:
            # Only then: the second product knows the experts when it starts.
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    TILES: tl.constexpr = (NUM_COLUMNS + BLOCK_N - 1) // BLOCK_N
    expert, count, row_tile, column_tile = _work_of(counts_ptr, program, TILES, NUM_EXPERTS, EXPERTS, BLOCK_M)
    if expert < NUM_EXPERTS:
        rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        in_rows = rows < count
        pairs = tl.load(pairs_ptr + expert.to(tl.int64) * num_tokens + rows, mask=in_rows, other=0)
        if not GATED:
            _wait_for(finished_ptr + expert, tl.cdiv(count, FIRST_BLOCK_M) * FIRST_TILES)
        x_rows = pairs // PAIRS_PER_ROW
        columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        in_columns = columns < NUM_COLUMNS
        acc, factor_acc = _multiply(
            weight_desc, x_ptr, weight[0], weight[1], x_rows, in_rows, x_stride, expert, column_tile, columns,
            NUM_COLUMNS, K, BLOCK_M, BLOCK_N, BLOCK_K, WEIGHTS_LEFT, TMA, GATED, BY_ASSEMBLER,
        )  # fmt: skip
        if X_PARTS > 0:
            _, squares = load_moments(before[0], x_rows, num_tokens, X_PARTS)
            norm = tl.rsqrt(tl.sum(squares, 1) / K + eps)
            if before[1] is not None:
                norm *= tl.load(before[1])
            acc, factor_acc = acc * norm[:, None], factor_acc * norm[:, None]
        if GATED:
            acc = acc * tl.sigmoid(acc) * factor_acc
        else:
            acc *= tl.load(scale_ptr + pairs, mask=in_rows, other=0.0)[:, None]
        out_ptrs = out_ptr + pairs.to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])
        if GATED:
            # All of the program's stores come before it counts.
            tl.debug_barrier()
            tl.atomic_add(finished_ptr + expert, 1, sem="release", scope="gpu")
    if PDL and not GATED:
        _end_after_first(program)


def _counts_on(device: torch.device) -> torch.Tensor:
    """Return the workspace's counters by expert, of tokens and of programs that have finished; zero between calls.

    Four launches use them: in between, no other call may. They are as many as any model needs.
    """

    def make() -> tuple[torch.Tensor]:
        return (torch.zeros(2 * MAX_EXPERTS, dtype=torch.int32, device=device),)

    return current_workspace().tensors("expert_mlp", device, None, make)[0]


def expert_mlp(
    x: torch.Tensor | NormInput,  # [T, E]
    router_logits: torch.Tensor,  # [T, X]
    experts: Experts,
    *,
    residual: torch.Tensor | None,  # [T, E]
    out: torch.Tensor,  # [T, E]  written
    next_norm: PackedNorm | None,
    configs: tuple[ExpertConfig, ExpertConfig] | None = None,
) -> NormInput | None:
    """Launch the kernels; arguments as checked by ``rose_backend.kernels.experts.ops``.

    Args:
        configs: of both products; None takes the measured choice.

    Returns:
        What ``out`` leaves to the norm after it, if there is one.
    """
    x, before = (x.scaled, x) if isinstance(x, NormInput) else (x, None)
    num_tokens, width = x.shape
    num_experts = router_logits.shape[1]
    num_pairs = num_tokens * experts.top_k
    if configs is None:
        configs = _choose_configs(x, experts)
    after = norm_after(next_norm, out, num_parts(width))
    if num_tokens == 0:
        return after.result(next_norm, out)
    use_pdl = has_dependent_launch(x.device)
    scales = x.new_empty(num_pairs, dtype=torch.float32)
    lists = (_counts_on(x.device), x.new_empty((num_experts, num_tokens), dtype=torch.int32))
    inner = experts.down.values.shape[3] if isinstance(experts.down, Float8Experts) else experts.down.shape[2]
    activated = x.new_empty((num_pairs, inner))
    outputs = x.new_empty((num_pairs, width))
    try:
        choose_experts(
            router_logits,
            scales,
            *lists,
            top_k=experts.top_k,
            renormalize=experts.renormalize,
            use_pdl=use_pdl,
        )
        _product(x, experts.gate_up, configs, lists, before, None, activated, use_pdl)
        _product(activated, experts.down, configs, lists, None, scales, outputs, use_pdl)
        add_experts(outputs, residual, out, after, lists[0], top_k=experts.top_k, use_pdl=use_pdl)
    except BaseException:
        # A kernel that could not be loaded, say: the next call counts from zero all the same.
        lists[0].zero_()
        raise
    return after.result(next_norm, out)


def _choose_configs(x: torch.Tensor, experts: Experts) -> tuple[ExpertConfig, ExpertConfig]:
    first, second = (
        choose_expert_config(
            len(x) * experts.top_k,
            len(_stored(weight)[0]),
            gated=weight is experts.gate_up,
            exact=x.dtype == torch.float32,
            can_use_tma=can_use_tma(_stored(weight)[0].flatten(0, -2)),
            is_float8=isinstance(weight, Float8Experts),
        )
        for weight in (experts.gate_up, experts.down)
    )
    return first, second


def _stored(weight: torch.Tensor | Float8Experts) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a weight as the kernel reads it, and the scales of its blocks if it has some."""
    if isinstance(weight, Float8Experts):
        return weight.values.view(torch.uint8), weight.scales
    return weight, None


Lists = tuple[torch.Tensor, torch.Tensor]
"""Counters (``_counts_on``), and each expert's pairs of token and expert [X, T]; all int32."""


def _product(
    x: torch.Tensor,  # [T, E] or [T * A, E]
    weight: torch.Tensor | Float8Experts,  # [X, O, E]
    configs: tuple[ExpertConfig, ExpertConfig],
    lists: Lists,
    before: NormInput | None,  # whose scaled states x is, with an RMSNorm before the first product
    scales: torch.Tensor | None,  # [T * A] float32, of the second product
    out: torch.Tensor,  # [T * A, O] or, of the first product, [T * A, O / 2]  written
    use_pdl: bool,
) -> None:
    counts, pairs = lists
    num_experts, num_tokens = pairs.shape
    num_pairs, num_columns = out.shape
    values, block_scales = _stored(weight)
    depth = values.shape[-1]
    first, second = configs
    config = first if scales is None else second
    if block_scales is not None and (SCALED_BLOCK % config.block_n or SCALED_BLOCK % config.block_k):
        raise ShapeError(f"configs: expected tiles that divide blocks of {SCALED_BLOCK}, got {config}")
    # Each expert has at most one tile that is not full.
    row_tiles = min(num_pairs, num_pairs // config.block_m + num_experts)
    descriptor = None
    if config.use_tma:
        descriptor = TensorDescriptor.from_tensor(values.flatten(0, -2), [config.block_n, config.block_k])
    _expert_product_kernel[(row_tiles * triton.cdiv(num_columns, config.block_n),)](
        descriptor,
        x,
        (values, block_scales),
        counts,
        counts[MAX_EXPERTS:],
        pairs,
        (None, None) if before is None else (before.moments, before.norm.scale),
        x if scales is None else scales,
        out,
        num_tokens,
        x.stride(0),
        0.0 if before is None else before.norm.eps,
        NUM_EXPERTS=num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        NUM_COLUMNS=num_columns,
        K=depth,
        PAIRS_PER_ROW=num_pairs // len(x),
        FIRST_TILES=triton.cdiv(num_columns if scales is None else depth, first.block_n),
        FIRST_BLOCK_M=first.block_m,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        WEIGHTS_LEFT=config.weights_left,
        TMA=config.use_tma,
        GATED=scales is None,
        X_PARTS=0 if before is None else before.moments.shape[2],
        BY_ASSEMBLER=not triton.knobs.runtime.interpret,
        PDL=use_pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=None if block_scales is None else MAX_REGISTERS,
        launch_pdl=use_pdl,
    )
