"""The end of a decode step in plain torch."""

from __future__ import annotations

import torch


def advance_rows(
    token_ids: torch.Tensor,  # [R] int64
    input_ids: torch.Tensor,  # [R] int64  written
    num_computed_tokens: torch.Tensor,  # [R] int32  written
    positions: torch.Tensor,  # [R] int64  written
    draw_positions: torch.Tensor,  # [R] int64  written
    history: torch.Tensor,  # [N, S] int64  written
    step_index: torch.Tensor,  # [1] int64  written
) -> None:
    """Twin of ``rose_backend.kernels.advance_rows``."""
    is_row = num_computed_tokens >= 0
    input_ids.copy_(token_ids)
    for lengths in (num_computed_tokens, positions, draw_positions):
        lengths += is_row
    history[int(step_index) % len(history), : len(token_ids)] = token_ids
    step_index += 1
