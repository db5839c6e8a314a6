"""The end of a decode step: every row's new token becomes its next input, and its lengths move on."""

from __future__ import annotations

import torch

from rose_backend.kernels.reference import advance_rows as reference
from rose_backend.kernels.tensor_checks import check_tensors


def advance_rows(
    token_ids: torch.Tensor,  # [R] int64
    input_ids: torch.Tensor,  # [R] int64  written
    num_computed_tokens: torch.Tensor,  # [R] int32  written
    positions: torch.Tensor,  # [R] int64  written
    draw_positions: torch.Tensor,  # [R] int64  written
    history: torch.Tensor,  # [N, S] int64  written
    step_index: torch.Tensor,  # [1] int64  written
) -> None:
    """Make ``token_ids`` the next input and count every length up by one, but for padding rows.

    Also writes the tokens into row ``step_index % N`` of ``history``, which may be pinned host memory, and counts
    ``step_index`` up. Nothing here depends on a number that only the host knows: one captured launch serves every step.

    Args:
        num_computed_tokens: a negative value marks a padding row, whose lengths stay as they are.
        history: ``S`` is at least ``R``; entries past ``R`` stay as they are.

    Raises:
        ShapeError: shapes or dtypes disagree.
    """
    check_tensors(
        token_ids=(token_ids, "R", torch.int64),
        input_ids=(input_ids, "R", torch.int64),
        num_computed_tokens=(num_computed_tokens, "R", torch.int32),
        positions=(positions, "R", torch.int64),
        draw_positions=(draw_positions, "R", torch.int64),
        history=(history, "N S", torch.int64),
        step_index=(step_index, "1", torch.int64),
    )
    tensors = (token_ids, input_ids, num_computed_tokens, positions, draw_positions, history, step_index)
    if token_ids.is_cuda:
        from rose_backend.kernels.gpu import advance_rows as gpu

        gpu.advance_rows(*tensors)
    else:
        reference.advance_rows(*tensors)
