"""Arguments that several operations share, or all versions of one, and the checks of their shapes and dtypes.

A launcher writes down each tensor with its shape in symbols, ``check_tensors(query=(query, "R HQ D"), ...)``. A symbol
takes the size of the first tensor that has it; every later tensor must agree. The letters are listed in
``rose_backend.kernels``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from rose_backend.errors import ShapeError
from rose_backend.kernels.gpu_properties import gpu_properties

CACHE_DTYPE = WEIGHT_DTYPE = torch.float8_e4m3fn
"""4 bits of exponent, 3 of mantissa; no infinities. The only 8-bit type that caches and weights may have."""

FLOAT8_CAPABILITY = (8, 9)
"""Compute capability from which on a GPU converts to and from 8-bit types."""

MAX_ROWS = 256
"""More rows are better served by a library's matrix product."""

SCALED_BLOCK = 128
"""Rows and columns of a block of a float8 weight that has a scale for each block."""

LARGEST_FLOAT8 = 448.0
LEAST_ROW_SCALE, LEAST_OF_GROUP = 1 / (LARGEST_FLOAT8 * 512), 1e-10
"""Of activations that vLLM's kernels quantize: a row's least scale, and a group's least largest magnitude."""
INT4_GROUPS = (32, 64, 128)
"""Columns of an int4 weight that may share a scale; all of a row's may, too."""
INT4_ZERO = 8
"""The code of 0 in a symmetric int4 weight."""
INT4_SCALE_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

_FLOAT8_VALUE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Spec = tuple[torch.Tensor, str] | tuple[torch.Tensor, str, torch.dtype]


def check_tensors(**tensors: Spec | tuple[Weight, str]) -> dict[str, int]:
    """Compare every tensor with its symbolic shape, and with its dtype where one is given.

    Args:
        tensors: name to ``(tensor, shape)`` or ``(tensor, shape, dtype)``; a quantized weight is taken for a matrix. A
            shape is a list of symbols separated by spaces; ``R+1`` means one more than ``R``, which an earlier
            dimension must have set.

    Returns:
        Symbol to size.

    Raises:
        ShapeError: names the tensor, the dimension's symbol, the size expected and the size got.
    """
    sizes: dict[str, int] = {}
    for name, spec in tensors.items():
        shape = spec[0].shape
        dims = _parse_shape(spec[1])
        if len(shape) != len(dims):
            raise ShapeError(f"{name}: expected shape [{spec[1]}], got {len(shape)} dimensions {list(shape)}")
        for dim, (symbol, extra) in enumerate(dims):
            got = shape[dim]
            known = sizes.get(symbol)
            if known is None:
                sizes[symbol] = got - extra
            elif got != known + extra:
                raise ShapeError(_mismatch_message(name, spec[1], dim, known + extra, shape))
        if len(spec) == 3 and spec[0].dtype is not spec[2]:
            raise ShapeError(f"{name}: expected dtype {spec[2]}, got {spec[0].dtype}")
    return sizes


def check_same_dtype(**tensors: torch.Tensor) -> None:
    """Require one dtype and one device of all tensors.

    Raises:
        ShapeError: names the tensor that differs from the first one.
    """
    first_name, first = next(iter(tensors.items()))
    dtype, device = first.dtype, first.device
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise ShapeError(f"{name}: expected dtype {dtype} as {first_name}, got {tensor.dtype}")
        if tensor.device != device:
            raise ShapeError(f"{name}: expected device {device} as {first_name}, got {tensor.device}")


def check_head_groups(num_query_heads: int, num_kv_heads: int) -> None:
    """Require that each key/value head serves the same number of query heads.

    Raises:
        ShapeError: the query heads cannot be divided.
    """
    if num_kv_heads == 0 or num_query_heads % num_kv_heads:
        raise ShapeError(f"query: HQ must be a multiple of HKV={num_kv_heads}, got HQ={num_query_heads}")


def check_cache_dtype(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    **values: torch.Tensor,
) -> None:
    """Require caches of one dtype and device: that of ``values``, or float8 beside a usual dtype of ``values``.

    Args:
        key_scale, value_scale: float32 of one element; only with float8 caches.
        values: query, output and new keys and values by name; one dtype and device.

    Raises:
        ShapeError: a dtype, device or scale is another. On a GPU also: it cannot convert float8.
    """
    check_same_dtype(**values)
    name, first = next(iter(values.items()))
    is_float8 = key_cache.dtype == CACHE_DTYPE and first.dtype in _FLOAT8_VALUE_DTYPES
    if not is_float8 and key_cache.dtype != first.dtype:
        raise ShapeError(
            f"key_cache: expected dtype {first.dtype} as {name}, or {CACHE_DTYPE} beside float32, float16 or "
            f"bfloat16, got {key_cache.dtype}"
        )
    check_same_dtype(key_cache=key_cache, value_cache=value_cache)
    if key_cache.device != first.device:
        raise ShapeError(f"key_cache: expected device {first.device} as {name}, got {key_cache.device}")
    for scale_name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale is not None:
            _check_scale(scale_name, scale, key_cache, is_float8)
    if is_float8 and key_cache.is_cuda:
        check_float8_capability(gpu_properties(key_cache.device).capability)


def check_float8_capability(capability: tuple[int, int]) -> None:
    """Require a GPU that converts to and from 8-bit types.

    Raises:
        ShapeError: names its compute capability.
    """
    if capability < FLOAT8_CAPABILITY:
        needed, got = (".".join(map(str, version)) for version in (FLOAT8_CAPABILITY, capability))
        raise ShapeError(f"key_cache: {CACHE_DTYPE} needs compute capability {needed}, this GPU has {got}")


def check_sinks(sinks: torch.Tensor | None, query: torch.Tensor) -> None:
    """Require one logit per query head of ``query`` [..., HQ, D], on its device.

    Raises:
        ShapeError: another shape, dtype or device.
    """
    if sinks is None:
        return
    check_tensors(query=(query, "T HQ D"), sinks=(sinks, "HQ"))
    if not sinks.is_floating_point():
        raise ShapeError(f"sinks: expected a floating-point dtype, got {sinks.dtype}")
    if sinks.device != query.device:
        raise ShapeError(f"sinks: expected device {query.device} as query, got {sinks.device}")


def _check_scale(name: str, scale: torch.Tensor, key_cache: torch.Tensor, is_float8: bool) -> None:
    if not is_float8:
        raise ShapeError(f"{name}: expected None with caches of {key_cache.dtype}, got a tensor")
    if scale.dtype != torch.float32 or scale.numel() != 1 or scale.dim() > 1:
        got = f"{scale.dtype} {list(scale.shape)}"
        raise ShapeError(f"{name}: expected torch.float32 of one element, got {got}")
    if scale.device != key_cache.device:
        raise ShapeError(f"{name}: expected device {key_cache.device} as key_cache, got {scale.device}")


@lru_cache(maxsize=256)
def _parse_shape(shape: str) -> tuple[tuple[str, int], ...]:
    dims = []
    for word in shape.split():
        symbol, _, extra = word.partition("+")
        dims.append((symbol, int(extra or 0)))
    return tuple(dims)


def _mismatch_message(name: str, spec: str, dim: int, expected: int, shape: torch.Size) -> str:
    symbol = spec.split()[dim]
    return f"{name}: expected {symbol}={expected}, got {shape[dim]} (shape {list(shape)}, expected [{spec}])"


class TokenLimits(NamedTuple):
    """Which tokens may be drawn, by entry of tables; a list ends at its first -1, if not before."""

    lengths: torch.Tensor
    """[N, 2] int32: tokens of the prompt, and tokens before which no stop token may be drawn, prompt included."""
    stop_token_ids: torch.Tensor
    """[N, any] int32 in [0, V)."""
    allowed_token_ids: torch.Tensor
    """[N, any] int32 in [0, V); without any, all tokens are allowed."""
    bad_word_ends: torch.Tensor
    """[N, any] int32, rising: where each bad word ends in ``bad_word_token_ids``."""
    bad_word_token_ids: torch.Tensor
    """[N, P] int32 in [0, V), word after word. The last token of a word is not drawn after the ones before it."""
    drawn_token_ids: torch.Tensor
    """[N or more, P] int64: the token at position ``p`` is in column ``p % P``; a prompt's are not looked at."""


class LogitsProcessors(NamedTuple):
    """What is done to logits before penalties, by entry of tables."""

    entries: torch.Tensor
    """[R] int32: each row's; -1 leaves a row as it is."""
    bitmask: torch.Tensor
    """[N, V / 32, rounded up] int32: bit ``i % 32`` of word ``i // 32`` allows token ``i``, as in xgrammar."""
    bias_token_ids: torch.Tensor
    """[N, M] int32, rising, in [0, V); after an entry's last one, 2**31 - 1. M is a power of two."""
    bias: torch.Tensor
    """[N, M] float32, finite: added to the logits of ``bias_token_ids``."""


NOT_DRAWN = -2
"""In place of a token after the last one that a row gets in a step with drafts."""


class DraftedRows(NamedTuple):
    """Rows of a decode step that may have drafts, and the tokens of the requests in them."""

    slots: torch.Tensor
    """[R] int64: row of ``token_ids`` that has the request's tokens. Padding rows have one that no request has."""
    token_ids: torch.Tensor
    """[MR, S] int32: prompt and output of each request; those that the row has, its newest one included, are known."""
    input_ids: torch.Tensor
    """[R] int64: each row's newest token."""
    num_computed_tokens: torch.Tensor
    """[R] int32: tokens before the newest one; negative in padding rows."""
    positions: torch.Tensor
    """[R] int64: of the newest token."""
    draw_positions: torch.Tensor
    """[R] int64: of the token after it."""

    def first(self, num_rows: int) -> DraftedRows:
        """Return the first rows."""
        return DraftedRows(self.slots[:num_rows], self.token_ids, *(each[:num_rows] for each in self[2:]))


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """How to choose the next token of each row: logits processors, penalties, temperature, min-p, top-k, top-p, in this
    order.
    """

    temperature: torch.Tensor
    """[R] float32; 0 takes the most likely token; above 1e20 it counts as 1e20: any token that no filter drops."""
    top_k: torch.Tensor
    """[R] int32; only that many most likely tokens, and whatever ties with the last of them; 0 is off."""
    top_p: torch.Tensor
    """[R] float32 in (0, 1]; the fewest most likely tokens that hold this probability together, at least one;
    1 is off."""
    min_p: torch.Tensor
    """[R] float32 in [0, 1]; only tokens at least so probable, relative to the most likely one; 0 is off."""
    seed: torch.Tensor
    """[R] int64, any bits."""
    position: torch.Tensor
    """[R] int64: position of the token to draw. The same seed and position draw the same token in any batch."""
    presence_penalty: torch.Tensor
    """[R] float32, subtracted once from tokens that were generated before; 0 is off."""
    frequency_penalty: torch.Tensor
    """[R] float32, subtracted for each time a token was generated before; 0 is off."""
    repetition_penalty: torch.Tensor
    """[R] float32; logits of tokens in prompt or output are divided by it if positive, else multiplied; 1 is off, and
    what is not between 1e-20 and 1e20 is clamped to them."""
    prompt_mask: torch.Tensor | None = None
    """[R, V] bool: the token is in the row's prompt. None: no row's penalty asks for it."""
    output_counts: torch.Tensor | None = None
    """[R, V] int32: how often the row generated the token. None: no row's penalty asks for it."""
    processors: LogitsProcessors | None = None
    """Tokens that rows may not draw, and their bias. None: no row has any."""
    num_logprobs: int = -1
    """Alternatives to report for every row; 0 reports the chosen token's log-probability only, -1 nothing."""
    invalid_token_id: int = 0
    """Returned for a row with nothing to choose: after all but temperature and filters, its logits are NaN or minus
    infinity."""

    def select(self, rows: torch.Tensor | slice) -> SamplingTensors:
        """Return the entries of ``rows``, indices or a slice, without processors and the penalties' [R, V] tensors."""
        return SamplingTensors(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            position=self.position[rows],
            presence_penalty=self.presence_penalty[rows],
            frequency_penalty=self.frequency_penalty[rows],
            repetition_penalty=self.repetition_penalty[rows],
            num_logprobs=self.num_logprobs,
            invalid_token_id=self.invalid_token_id,
        )


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """The chosen tokens, with log-probabilities where they were asked for.

    Log-probabilities are those of the model itself: log-softmax of the logits before bias, penalties and temperature.
    """

    token_ids: torch.Tensor
    """[R] int64, in [0, V) or ``invalid_token_id``."""
    logprob: torch.Tensor | None
    """[R] float32, of the chosen tokens; None with ``num_logprobs`` -1."""
    top_logprobs: torch.Tensor | None
    """[R, K] float32, falling; None with ``num_logprobs`` -1."""
    top_token_ids: torch.Tensor | None
    """[R, K] int64; None with ``num_logprobs`` -1."""


class LogprobReport(NamedTuple):
    """Log-probabilities of each row's chosen token and of its most likely ones, in memory that may have any strides."""

    token_ids: torch.Tensor
    """[R, 1 + K] int64: the chosen token, then the most likely ones, falling; ties in any fixed order."""
    logprobs: torch.Tensor
    """[R, 1 + K] float32, of these tokens."""
    ranks: torch.Tensor
    """[R] int64: how many tokens are at least as likely as the chosen one, itself included."""


@dataclass(frozen=True)
class StepState:
    """What is kept of requests between steps, by slot. Addresses stay: captured graphs hold them."""

    num_computed_tokens: torch.Tensor  # [MR] int32, of which K/V is in the cache
    last_tokens: torch.Tensor  # [MR] int64, sampled last, not computed yet
    total_lens: torch.Tensor  # [MR] int32, prompt and output
    token_ids: torch.Tensor  # [MR, S] int32, of prompt and output
    output_counts: torch.Tensor | None  # [MR, V] int32, of each token in the output
    draft_tokens: torch.Tensor | None = (
        None  # [MR, N] int64, proposed after the last token; None without drafts
    )


@dataclass(frozen=True)
class StepInputs:
    """What a step reads, by row; tensors may have more rows than the step."""

    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int64
    seq_lens: torch.Tensor  # [T] int32, with the new token
    query_start_loc: torch.Tensor  # [T + 1] int32
    is_padding: torch.Tensor  # [T] bool
    request_slots: torch.Tensor  # [T] int32, ``padding_slot`` without a request


@dataclass(frozen=True, slots=True)
class MixedRows:
    """What a step with prompts computes, by row. Rows without a request come last, and have no tokens."""

    slots: torch.Tensor  # [R] int64, -1 without a request
    query_start_loc: torch.Tensor  # [R + 1] int32
    is_prompt: (
        torch.Tensor
    )  # [R] int32, 1: its tokens are known already; 0: its last token, and drafts after it
    is_due: torch.Tensor  # [R] int32, 1: it gets a new token, as nothing known remains to be computed

    def first(self, num_rows: int) -> MixedRows:
        """Return the first rows."""
        rows = slice(num_rows)
        query_start_loc = self.query_start_loc[: num_rows + 1]
        return MixedRows(self.slots[rows], query_start_loc, self.is_prompt[rows], self.is_due[rows])


@dataclass(frozen=True)
class StepGroup:
    """The blocks of requests in one KV cache group, by slot, and what its layers read in a step, by row."""

    state_table: torch.Tensor  # [MR, MB] int32, the block table of each slot
    block_table: torch.Tensor  # [T, MB] int32
    slot_mapping: torch.Tensor  # [T] int64, KV slot of the new token
    num_computed_tokens: torch.Tensor  # [T] int32, -1 without a request
    block_size: int
    """Tokens per block."""


@dataclass(frozen=True)
class StateGroup:
    """A KV cache group of layers that keep a state of each request in one block, in place of K/V of every token."""

    state_table: torch.Tensor  # [MR, MB] int32
    """The block table of each slot, which has its state's block in every column."""
    state_blocks: torch.Tensor  # [T] int32
    """What layers read: the block of each row's state, 0 without a request."""
    last_columns: torch.Tensor  # [MR] int32
    """Of each slot, the column of the token computed last."""
    block_size: int
    """Tokens per column."""


class StepGroups:
    """All KV cache groups of a model, which a step's layers read. Addresses stay: captured graphs hold them.

    Args:
        groups: one or more. Widths of block tables and block sizes may differ.
    """

    def __init__(self, *groups: StepGroup | StateGroup) -> None:
        self.groups = groups
        self.has_states = any(isinstance(group, StateGroup) for group in groups)
        sizes = [group.state_table.numel() for group in groups]
        self.first_entries = [0, *itertools.accumulate(sizes[:-1])]
        """Of each group, where its ``state_table`` begins if all entries of all groups' tables are counted on."""
        layout = [(*_place_of(group), first) for group, first in zip(groups, self.first_entries, strict=True)]
        # Kernels find any number of groups in it.
        self.layout: torch.Tensor = torch.tensor(layout, device=groups[0].state_table.device)  # [G, 9] int64
        """Of each group: address and row stride of ``state_table``, of ``block_table``, its width, the addresses of
        ``slot_mapping`` and ``num_computed_tokens``, the block size, and its first entry. Strides in elements. A
        group with states has no ``block_table``, and ``state_blocks`` and ``last_columns`` in the other two places."""


def _place_of(group: StepGroup | StateGroup) -> tuple[int, ...]:
    table = (group.state_table.data_ptr(), group.state_table.stride(0))
    if isinstance(group, StateGroup):
        written = (0, 0, 0, group.state_blocks.data_ptr(), group.last_columns.data_ptr())
    else:
        written = (
            group.block_table.data_ptr(),
            group.block_table.stride(0),
            group.block_table.shape[1],
            group.slot_mapping.data_ptr(),
            group.num_computed_tokens.data_ptr(),
        )
    return (*table, *written, group.block_size)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of the softmax, and the scales of a float8 cache."""

    scale: float
    """Factor on query-key products, usually ``D ** -0.5``."""
    sliding_window: int | None = None
    """A query sees at most this many tokens, itself included."""
    alibi_slopes: torch.Tensor | None = None
    """[HQ]: per-head slope of a linear penalty on distance."""
    logits_soft_cap: float | None = None
    """Scaled products become ``cap * tanh(product / cap)``."""
    sinks: torch.Tensor | None = None
    """[HQ], floats: per-head logit, neither scaled nor capped, that takes part in the softmax and has no value."""
    key_scale: torch.Tensor | None = None
    """One float32, only with float8 caches; None is 1. A cached number times this is the key. What is stored is divided
    by it, limited to +-448 and rounded to the nearest, ties to even; new tokens are attended as they are stored."""
    value_scale: torch.Tensor | None = None
    """As ``key_scale``, of the values."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadRotation:
    """How heads of queries and keys are rotated by their positions, each after an RMSNorm where a model has one."""

    cos_sin: torch.Tensor
    """[P, DR] float32: ``DR / 2`` cosines and then as many sines of each position; ``DR`` is even and at most ``D``."""
    query_norm: torch.Tensor | None = None  # [D]
    key_norm: torch.Tensor | None = None  # [D]; both or neither
    eps: float = 0.0
    """Of the norms."""
    by_token: bool = False
    """``cos_sin`` has a row for each token of a step in place of each position, as where a token has several positions
    or another one than its place in the request (M-RoPE)."""


class NewTokens(NamedTuple):
    """Keys and values that a step has computed and attention stores."""

    key: torch.Tensor
    """[T, HKV, D]"""
    value: torch.Tensor
    """[T, HKV, D]"""


class PagedKV(NamedTuple):
    """The KV cache of a layer, and what of it each request of a step attends to."""

    key_cache: torch.Tensor
    """[NB, BS, HKV, D], any strides with an innermost one of 1."""
    value_cache: torch.Tensor
    """[NB, BS, HKV, D], likewise."""
    block_table: torch.Tensor
    """[R, MB] int32. Entries past the block of a row's last position are never used."""
    num_computed_tokens: torch.Tensor
    """[R] int32: tokens already stored, without the new ones. A negative value marks a padding row: nothing is read or
    written for it."""
    query_start_loc: torch.Tensor | None = None
    """[R + 1] int32: tokens ``query_start_loc[r] .. query_start_loc[r + 1] - 1`` are request ``r``'s, and tokens after
    the last row's are padding that is left alone. None: token ``r`` is request ``r``'s (``T = R``)."""
    max_query_len: int = 1
    """Of ``paged_decode``: new tokens that a row may have. More than 1 needs ``query_start_loc``."""


@dataclass(frozen=True, slots=True)
class InputQuantization:
    """How a product takes its activations: e4m3 numbers, each to be multiplied by the scale of its row or group.

    Scales and numbers are those of vLLM's kernels, bit for bit: of ``dynamic_per_token_scaled_fp8_quant`` by rows, of
    ``per_token_group_fp8_quant`` by groups.
    """

    by_group: bool = False
    """A scale is of ``SCALED_BLOCK`` columns of a row, not of the row."""
    powers_of_two: bool = False
    """Scales of groups are rounded up to powers of two (UE8M0)."""
    aligned_scales: bool = False
    """A group's scales begin at a multiple of 4 rows, as TMA reads them; memory is allocated up to that multiple."""

    def empty(self, num_rows: int, width: int, like: torch.Tensor) -> QuantizedActivations:
        """Return memory for activations that would have the device and the type of ``like``."""
        num_groups = width // SCALED_BLOCK if self.by_group else 1
        rows = -(-num_rows // 4) * 4 if self.aligned_scales else num_rows
        shape, strides = (rows, num_groups), (1, rows if self.by_group else 1)
        return QuantizedActivations(
            torch.empty((rows, width), dtype=WEIGHT_DTYPE, device=like.device)[:num_rows],
            torch.empty_strided(shape, strides, dtype=torch.float32, device=like.device)[:num_rows],
            self,
            like.dtype,
        )


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedActivations:
    """Activations in 8 bits."""

    values: torch.Tensor
    """[T, E] of ``WEIGHT_DTYPE``, contiguous."""
    scales: torch.Tensor
    """Float32, [T, 1] or [T, E / 128]: those of a group lie side by side."""
    quantization: InputQuantization
    dtype: torch.dtype
    """That they had, and that a product of them has."""


@dataclass(frozen=True, slots=True, eq=False)
class Float8Weight:
    """A matrix in 8 bits, with what its numbers are multiplied by."""

    values: torch.Tensor
    """[O, E] of ``WEIGHT_DTYPE``, contiguous, without NaN."""
    scales: torch.Tensor
    """Float32, any strides: [O, 1], or one for each block of ``SCALED_BLOCK`` rows and columns, those at the edges
    included."""

    @property
    def shape(self) -> torch.Size:
        """[O, E]."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.values.device

    @property
    def has_blocks(self) -> bool:
        """Whether scales are of blocks, not of rows."""
        return self.scales.shape != (self.shape[0], 1)

    def check(self) -> None:
        """Check types, devices and shapes.

        Raises:
            ShapeError: names what is wrong.
        """
        check_tensors(values=(self.values, "O E", WEIGHT_DTYPE), scales=(self.scales, "N M", torch.float32))
        num_rows, depth = self.shape
        allowed = [(num_rows, 1), (-(-num_rows // SCALED_BLOCK), -(-depth // SCALED_BLOCK))]
        if self.scales.shape not in allowed:
            raise ShapeError(
                f"scales: expected shape {allowed[0]} or {allowed[1]}, got {tuple(self.scales.shape)}"
            )
        if not self.values.is_contiguous():
            raise ShapeError(f"values: expected a contiguous tensor, got strides {self.values.stride()}")
        if self.scales.device != self.device:
            raise ShapeError(f"scales: expected device {self.device} as values, got {self.scales.device}")

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix, [O, E], each number rounded once from float32."""
        scales = self.scales
        if self.has_blocks:
            num_rows, depth = self.shape
            scales = scales.repeat_interleave(SCALED_BLOCK, 0)[:num_rows]
            scales = scales.repeat_interleave(SCALED_BLOCK, 1)[:, :depth]
        return (self.values.float() * scales).to(dtype)


def int4_step(group_size: int) -> int:
    """Return how many columns are between those of a word of an ``Int4Weight``."""
    return 32 if group_size == INT4_GROUPS[0] else 64


def int4_words(num_columns: int, step: int) -> int:
    """Return how many words a row of an ``Int4Weight`` has: those of whole chunks."""
    return -(-num_columns // (4 * step)) * step


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """A matrix in 4 bits. A number is its code, 0 to 15, less a zero, times a scale.

    Columns are in chunks of four times ``step``. Word ``j`` of a chunk has the codes of its columns ``j``,
    ``j + step``, ``j + 2 * step`` and ``j + 3 * step``, the first in its lowest bits. So neighboring words become four
    tiles of neighboring columns.
    """

    words: torch.Tensor
    """[O, M] int16, contiguous: four codes each. The last chunk is whole, whatever is in it past the last column."""
    scales: torch.Tensor
    """[N, O], contiguous, float32 or half precision: of ``N`` groups of neighboring columns, equally many each."""
    zeros: torch.Tensor | None
    """[N, O] uint8, contiguous; None: all are ``INT4_ZERO``."""
    num_columns: int
    """E"""

    @staticmethod
    def empty(
        num_rows: int,
        num_columns: int,
        group_size: int,
        *,
        has_zeros: bool,
        scales_dtype: torch.dtype,
        device: torch.device,
    ) -> Int4Weight:
        """Return memory for a matrix [O, E]. ``group_size`` divides its columns."""
        num_words = int4_words(num_columns, int4_step(group_size))
        words = torch.empty((num_rows, num_words), dtype=torch.int16, device=device)
        scales = torch.empty((num_columns // group_size, num_rows), dtype=scales_dtype, device=device)
        zeros = torch.empty_like(scales, dtype=torch.uint8) if has_zeros else None
        return Int4Weight(words, scales, zeros, num_columns)

    @property
    def shape(self) -> torch.Size:
        """[O, E]."""
        return torch.Size((self.words.shape[0], self.num_columns))

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.words.device

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""
        return self.num_columns // self.scales.shape[0]

    @property
    def step(self) -> int:
        """Columns between those of a word."""
        return int4_step(self.group_size)

    def check(self) -> None:
        """Check types, devices and shapes.

        Raises:
            ShapeError: names what is wrong.
        """
        sizes = check_tensors(words=(self.words, "O M", torch.int16), scales=(self.scales, "N O"))
        if self.zeros is not None:
            check_tensors(scales=(self.scales, "N O"), zeros=(self.zeros, "N O", torch.uint8))
        if self.scales.dtype not in INT4_SCALE_DTYPES:
            raise ShapeError(f"scales: expected float32 or half precision, got {self.scales.dtype}")
        num_groups, depth = sizes["N"], self.num_columns
        if num_groups < 1 or depth % num_groups or (num_groups > 1 and self.group_size not in INT4_GROUPS):
            raise ShapeError(
                f"scales: expected one for {INT4_GROUPS} or all of {depth} columns, got {num_groups} in each row"
            )
        if sizes["M"] != int4_words(depth, self.step):
            raise ShapeError(f"words: expected M={int4_words(depth, self.step)}, got {sizes['M']}")
        for name, tensor in (("words", self.words), ("scales", self.scales), ("zeros", self.zeros)):
            if tensor is not None and not tensor.is_contiguous():
                raise ShapeError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
            if tensor is not None and tensor.device != self.device:
                raise ShapeError(f"{name}: expected device {self.device} as words, got {tensor.device}")

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix, [O, E], each number rounded once from float32."""
        words = self.words.unflatten(1, (-1, 1, self.step)).int()
        shifts = torch.arange(0, 16, 4, device=self.device, dtype=torch.int32)[:, None]
        codes = ((words >> shifts) & 15).flatten(1)[:, : self.num_columns]
        scales = self.scales.float().t().repeat_interleave(self.group_size, 1)
        zeros = INT4_ZERO if self.zeros is None else self.zeros.t().repeat_interleave(self.group_size, 1)
        return ((codes - zeros).float() * scales).to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Float8Experts:
    """Matrices of all experts in 8 bits, with a scale for each block of ``SCALED_BLOCK`` rows and columns of each."""

    values: torch.Tensor
    """[X, P, O, E] of ``WEIGHT_DTYPE``, contiguous, without NaN: P matrices of each expert."""
    scales: torch.Tensor
    """[X, P, blocks of O, blocks of E] float32, contiguous; blocks at the edges are included."""

    def check(self, name: str) -> None:
        """Check types, devices and shapes.

        Raises:
            ShapeError: names what is wrong.
        """
        sizes = check_tensors(
            **{f"{name}.values": (self.values, "X P O E", WEIGHT_DTYPE)},
            **{f"{name}.scales": (self.scales, "X P N M", torch.float32)},
        )
        blocks = tuple(-(-sizes[letter] // SCALED_BLOCK) for letter in "OE")
        if self.scales.shape[2:] != blocks:
            raise ShapeError(f"{name}.scales: expected {blocks} blocks, got {tuple(self.scales.shape[2:])}")
        if not self.values.is_contiguous() or not self.scales.is_contiguous():
            raise ShapeError(f"{name}: expected contiguous tensors, got others")
        if self.scales.device != self.values.device:
            raise ShapeError(f"{name}.scales: expected device {self.values.device}, got {self.scales.device}")

    def dequantized(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an expert's matrices below each other, [P * O, E], each number rounded once from float32."""
        parts = zip(self.values[expert], self.scales[expert], strict=True)
        return torch.cat([Float8Weight(*part).dequantized(dtype) for part in parts])


QuantizedWeight = Float8Weight | Int4Weight
Weight = torch.Tensor | QuantizedWeight


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A linear layer, with the LayerNorm before it folded in if there is one. Made by ``pack_linear``."""

    weight: Weight
    """[O, E]. With ``is_gated``, rows of gate and up alternate in a 16-bit weight; a quantized weight stays as it is
    stored, with all rows of gate first."""
    bias: torch.Tensor | None  # [O], with LayerNorm float32
    column_sums: torch.Tensor | None  # [O] float32, with LayerNorm: sums of the rows of weight
    is_gated: bool = False
    """The result is ``silu(gate) * up``, half as wide as the product."""

    @property
    def alternates(self) -> bool:
        """Whether rows of gate and up alternate in the weight of a gated MLP. Quantized weights keep their order."""
        return self.is_gated and isinstance(self.weight, torch.Tensor)

    @property
    def num_outputs(self) -> int:
        """Width of the result."""
        return self.weight.shape[0] // (2 if self.is_gated else 1)


@dataclass(frozen=True, slots=True, eq=False)
class Adapters:
    """The adapters in the LoRA slots of a linear layer, which has one to three slices, such as query, key and value."""

    lora_a: tuple[torch.Tensor, ...]
    """Of each slice, [U, Z, E] contiguous: zeros where an adapter has no weights, and past its rank."""
    lora_b: tuple[torch.Tensor, ...]
    """Of each slice, [U, O, Z] contiguous, with the adapter's scale."""


class AdapterRows(NamedTuple):
    """A step's rows in the order of their adapters; the same for all its layers. Made by ``adapter_rows``."""

    rows: torch.Tensor
    """[T] int64: all rows."""
    slots: torch.Tensor
    """[T] int64, rising: the LoRA slot of each of these rows. Any other number means no adapter."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedNorm:
    """The norm before a packed layer: its weight is multiplied in by the kernel that writes the hidden states.

    The layer divides by their root mean square. So a matrix is as it was loaded, and a norm may change alone.
    """

    weight: torch.Tensor | None
    """[E] of RMSNorm; None: a LayerNorm, which is folded into the layer."""
    eps: float
    scale: torch.Tensor | None = None
    """[1] float32, of a weight in float16: a power of two, not below any number of the weight. Hidden states times the
    weight are stored divided by it, and cannot overflow. A tensor, so that captured graphs see it change."""

    def update_scale(self) -> None:
        """Choose the scale again after the weight has changed."""
        if self.scale is None or self.weight is None:
            return
        bits = self.weight.abs().amax().float().view(torch.int32)
        # Rounded up in its exponent: exactly a power of two, as no logarithm is.
        power = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        self.scale.copy_(torch.where(power == 0, 1.0, power))


class NormInput(NamedTuple):
    """What a kernel that writes hidden states leaves to the norm and the packed layer after it."""

    scaled: torch.Tensor
    """[T, E]: hidden states times the norm's weight over its scale; without a weight the hidden states themselves."""
    moments: torch.Tensor
    """[T, 2, P] float32, contiguous, ``P`` a power of two: sums of each row of the hidden states and of its squares,
    each in ``P`` parts that have to be added."""
    norm: PackedNorm


MAX_EXPERTS = 1024
"""Of a layer. On a GPU one program looks at all logits of a token at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """Gated MLPs without biases, and how many of them a token takes."""

    gate_up: torch.Tensor | Float8Experts
    """[X, 2 * I, E], contiguous: of each expert the rows of the gate, then those of the other factor. ``Float8Experts``
    are [X, 2, I, E]."""
    down: torch.Tensor | Float8Experts
    """[X, E, I], contiguous. ``Float8Experts`` are [X, 1, E, I]."""
    top_k: int
    renormalize: bool
    """A token's weights sum up to 1."""

    def matrices(self, expert: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an expert's ``gate_up``, [2 * I, E], and ``down``, [E, I]; those in 8 bits are dequantized."""
        first, second = (
            each.dequantized(expert, dtype) if isinstance(each, Float8Experts) else each[expert].to(dtype)
            for each in (self.gate_up, self.down)
        )
        return first, second


def empty_rows(like: torch.Tensor, num_rows: int, *sizes: int) -> torch.Tensor:
    """Return an uninitialized tensor [num_rows, *sizes] whose products are as fast as those of the next power of two.

    After it is memory for the rows that a product's last tile of rows has beyond it: the tensor memory accelerator
    takes longer to leave out a row than to copy it.
    """
    padding = 0 if num_rows > MAX_ROWS else (1 << max(num_rows - 1, 0).bit_length()) - num_rows
    return like.new_empty((num_rows + padding, *sizes))[:num_rows]


def row_moments(
    x: torch.Tensor,  # [T, E]
) -> torch.Tensor:
    """Return the sums of each row and of its squares, float32 [T, 2, 1]."""
    wide = x.float()
    return torch.stack([wide.sum(1), wide.square().sum(1)], 1).unsqueeze(2)


def norm_input_of(
    hidden: torch.Tensor,  # [T, E]
    norm: PackedNorm,
) -> NormInput:
    """Return in plain torch what kernels leave of the hidden states that they write."""
    scaled = hidden
    if norm.weight is not None:
        wide = hidden.float() * norm.weight.float()
        scaled = (wide if norm.scale is None else wide / norm.scale).to(hidden.dtype)
    return NormInput(scaled, row_moments(hidden), norm)


def normed_of(x: torch.Tensor | NormInput) -> torch.Tensor:
    """Return in plain torch, float32, what is multiplied: ``norm(x)``, of LayerNorm without what is folded in."""
    if not isinstance(x, NormInput):
        return x.float()
    wide, eps = x.scaled.float(), x.norm.eps
    if x.norm.weight is None:
        return F.layer_norm(wide, wide.shape[-1:], eps=eps)
    wide = wide * torch.rsqrt(x.moments[:, 1].sum(1, keepdim=True) / wide.shape[1] + eps)
    return wide if x.norm.scale is None else wide * x.norm.scale


def check_norm(
    hidden: torch.Tensor,  # [T, E]
    norm: PackedNorm,
) -> None:
    """Require a norm that belongs to ``hidden``.

    Raises:
        ShapeError: another width or dtype, or a scale that is missing or not wanted.
    """
    if norm.weight is None:
        return
    check_tensors(hidden=(hidden, "T E"), norm_weight=(norm.weight, "E"))
    check_same_dtype(hidden=hidden, norm_weight=norm.weight)
    if not norm.weight.is_contiguous():
        raise ShapeError(f"norm_weight: expected a contiguous tensor, got strides {norm.weight.stride()}")
    if (norm.scale is not None) != (norm.weight.dtype is torch.float16):
        raise ShapeError(f"norm_scale: expected one with torch.float16 only, got {norm.weight.dtype}")


def check_norm_input(before: NormInput) -> None:
    """Require what a kernel leaves to a norm.

    Raises:
        ShapeError: shapes, dtypes or layouts disagree.
    """
    check_tensors(x=(before.scaled, "T E"), x_moments=(before.moments, "T 2 P", torch.float32))
    _, kinds, parts = before.moments.shape
    if kinds != 2 or parts & (parts - 1) or not before.moments.is_contiguous():
        raise ShapeError(
            f"x_moments: expected contiguous [T, 2, P], P a power of two, got {list(before.moments.shape)}"
        )
    check_norm(before.scaled, before.norm)


class AttentionStrides(NamedTuple):
    """Strides of rows and heads; of the caches those of blocks, tokens and heads."""

    out: tuple[int, ...]
    query: tuple[int, ...]
    new_key: tuple[int, ...]
    new_value: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]


def attention_strides(
    out: torch.Tensor,  # [T, HQ, D]
    query: torch.Tensor,  # [T, HQ, D]
    new: NewTokens | None,
    kv: PagedKV,
) -> AttentionStrides:
    """Return the strides that kernels need; zeros for what is not there."""
    return AttentionStrides(
        out.stride()[:2],
        query.stride()[:2],
        (0, 0) if new is None else new.key.stride()[:2],
        (0, 0) if new is None else new.value.stride()[:2],
        kv.key_cache.stride()[:3],
        kv.value_cache.stride()[:3],
    )
