"""Arguments that several operations share, or all versions of one."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """How to choose the next token of each row: bias, penalties, temperature, min-p, top-k, top-p, in this order."""

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
    bias_token_ids: torch.Tensor | None = None
    """[R, M] int32 in [0, V): tokens with a bias; after a row's last one, -1. None: no row has any."""
    bias: torch.Tensor | None = None
    """[R, M] float32, finite or minus infinity, which forbids the token: added to the logits of ``bias_token_ids`` in
    the order given, so a token named twice gets both. None with ``bias_token_ids``."""
    num_logprobs: int = -1
    """Alternatives to report for every row; 0 reports the chosen token's log-probability only, -1 nothing."""
    invalid_token_id: int = 0
    """Returned for a row with nothing to choose: after bias and penalties all its logits are NaN or minus infinity."""

    def select(self, rows: torch.Tensor | slice) -> SamplingTensors:
        """Return the entries of ``rows``, indices or a slice, without the penalties' [R, V] tensors."""
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
            bias_token_ids=None if self.bias_token_ids is None else self.bias_token_ids[rows],
            bias=None if self.bias is None else self.bias[rows],
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
class DecodeState:
    """What is kept of requests between steps, by slot. Addresses stay: captured graphs hold them."""

    num_computed_tokens: torch.Tensor  # [MR] int32, of which K/V is in the cache
    last_tokens: torch.Tensor  # [MR] int64, sampled last, not computed yet
    total_lens: torch.Tensor  # [MR] int32, prompt and output
    token_ids: torch.Tensor  # [MR, S] int32, of prompt and output
    output_counts: torch.Tensor | None  # [MR, V] int32, of each token in the output


@dataclass(frozen=True)
class DecodeInputs:
    """What a step reads, by row; tensors may have more rows than the step."""

    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int64
    seq_lens: torch.Tensor  # [T] int32, with the new token
    query_start_loc: torch.Tensor  # [T + 1] int32
    is_padding: torch.Tensor  # [T] bool
    request_slots: torch.Tensor  # [T] int32, ``padding_slot`` without a request


@dataclass(frozen=True)
class DecodeGroup:
    """The blocks of requests in one KV cache group, by slot, and what its layers read in a step, by row."""

    state_table: torch.Tensor  # [MR, MB] int32, the block table of each slot
    block_table: torch.Tensor  # [T, MB] int32
    slot_mapping: torch.Tensor  # [T] int64, KV slot of the new token
    num_computed_tokens: torch.Tensor  # [T] int32, -1 without a request
    block_size: int
    """Tokens per block."""


class DecodeGroups:
    """All KV cache groups of a model, which a step's layers read. Addresses stay: captured graphs hold them.

    Args:
        groups: one or more. Widths of block tables and block sizes may differ.
    """

    def __init__(self, *groups: DecodeGroup) -> None:
        self.groups = groups
        sizes = [group.state_table.numel() for group in groups]
        self.first_entries = [0, *itertools.accumulate(sizes[:-1])]
        """Of each group, where its ``state_table`` begins if all entries of all groups' tables are counted on."""
        layout = [(*_place_of(group), first) for group, first in zip(groups, self.first_entries, strict=True)]
        # Kernels find any number of groups in it.
        self.layout: torch.Tensor = torch.tensor(layout, device=groups[0].state_table.device)  # [G, 9] int64
        """Of each group: address and row stride of ``state_table``, of ``block_table``, its width, the addresses of
        ``slot_mapping`` and ``num_computed_tokens``, the block size, and its first entry. Strides in elements."""


def _place_of(group: DecodeGroup) -> tuple[int, ...]:
    return (
        group.state_table.data_ptr(),
        group.state_table.stride(0),
        group.block_table.data_ptr(),
        group.block_table.stride(0),
        group.block_table.shape[1],
        group.slot_mapping.data_ptr(),
        group.num_computed_tokens.data_ptr(),
        group.block_size,
    )


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
    """[HQ] float32: per-head logit, neither scaled nor capped, that takes part in the softmax and has no value."""
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


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A linear layer, with the norm before it folded in where there is one. Made by ``pack_linear``."""

    weight: torch.Tensor
    """[O, E]; with ``is_gated`` a row of the gate, one of its factor, the next of the gate, and so on."""
    bias: torch.Tensor | None  # [O] float32
    column_sums: torch.Tensor | None  # [O] float32, with LayerNorm: sums of the rows of weight
    eps: float
    has_rms_norm: bool = False
    is_gated: bool = False
    """The result is ``silu(gate) * factor``, half as wide as the product."""

    @property
    def num_outputs(self) -> int:
        """Width of the result."""
        return self.weight.shape[0] // (2 if self.is_gated else 1)


MAX_EXPERTS = 1024
"""Of a layer. On a GPU one program looks at all logits of a token at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """Gated MLPs without biases, and how many of them a token takes."""

    widen: torch.Tensor
    """[X, 2 * I, E], contiguous: of each expert the rows of the gate, then those of the other factor."""
    narrow: torch.Tensor  # [X, E, I] contiguous
    top_k: int
    renormalize: bool
    """A token's weights sum up to 1."""
