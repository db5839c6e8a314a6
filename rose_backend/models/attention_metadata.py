"""What one step's attention needs to know about its requests."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Lengths and block tables of the requests of one step, decodes first. Shape letters: ``rose_backend.kernels``."""

    query_start_loc: torch.Tensor | None
    """[R + 1] int32: tokens of request ``r`` are ``query_start_loc[r] .. query_start_loc[r + 1] - 1`` of the step.
    None is enough where all take the decode path."""
    num_computed_tokens: torch.Tensor
    """[R] int32: tokens stored before this step. Negative marks a padding row among the decodes."""
    block_table: torch.Tensor
    """[R, MB] int32."""
    slot_mapping: torch.Tensor | None
    """[T] int64: block id * BS + offset of each token, -1 for padding. Read only with ``fused_kv_append`` off."""
    num_decodes: int
    """The first so many requests have one token each and take the decode path, the rest take the prefill path."""
    mean_query_len: float | None = None
    """Tokens per request on the prefill path, for the choice of tiles; None: what the shapes say, padding included."""
    last_tokens_only: bool = False
    """Of a step without decodes, only the hidden state of each request's last token is wanted."""
