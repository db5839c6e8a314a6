"""What decode steps keep of requests, and what they read: shared by launchers, torch and Triton."""

from __future__ import annotations

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
    block_table: torch.Tensor  # [MR, MB] int32


@dataclass(frozen=True)
class DecodeInputs:
    """What a step reads, by row; tensors may have more rows than the step."""

    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int64
    seq_lens: torch.Tensor  # [T] int32, with the new token
    num_computed_tokens: torch.Tensor  # [T] int32, -1 without a request
    query_start_loc: torch.Tensor  # [T + 1] int32
    is_padding: torch.Tensor  # [T] bool
    block_table: torch.Tensor  # [T, MB] int32
    slot_mapping: torch.Tensor  # [T] int64, KV slot of the new token
    request_slots: torch.Tensor  # [T] int32, ``padding_slot`` without a request
