"""What decode steps keep of requests, and what they read: shared by launchers, torch and Triton."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch


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
