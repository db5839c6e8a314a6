"""Softmax attention over keys and values that lie gathered in one place: what decode and prefill share."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rose_backend.kernels.arguments import AttentionOptions


def attend(
    query: torch.Tensor,  # [R, H, Q, D]
    key: torch.Tensor,  # [R, H, S, D]
    value: torch.Tensor,  # [R, H, S, D]
    bias: torch.Tensor | None,
    *,
    scale: float,
    is_causal: bool = False,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``softmax(cap(scale * q k^T) + bias) v`` as [R, H, Q, D] in the query's dtype, accumulated in float32.

    Args:
        bias: added to the scaled products, float32 or the query's dtype, broadcast to [R, H, Q, S]; minus infinity
            hides a position. At least one position per query must stay visible.
        is_causal: query i sees keys 0..i; only together with ``bias=None``.
        logits_soft_cap: products become ``cap * tanh(product / cap)`` before the bias is added.
        sinks: logits, broadcast to [R, H, Q], that take part in the softmax and attend to nothing. Neither scaled nor
            capped.
    """
    if logits_soft_cap is None and sinks is None and (bias is None or bias.dtype == query.dtype):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, is_causal=is_causal, scale=scale
        )
    scores = (query.float() @ key.float().transpose(-1, -2)) * scale
    if logits_soft_cap is not None:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        sink_scores = sinks.float().expand(scores.shape[:-1]).unsqueeze(-1)
        weights = torch.cat((scores, sink_scores), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return (weights @ value.float()).to(query.dtype)


def position_bias(
    query_positions: torch.Tensor,  # [..., Q]
    key_positions: torch.Tensor,  # [..., S]
    *,
    dtype: torch.dtype,
    num_kv_heads: int,
    options: AttentionOptions,
) -> torch.Tensor:
    """Return the mask and the ALiBi bias: minus infinity for hidden keys, and ALiBi where asked for.

    A key is hidden when it lies after the query, or ``options.sliding_window`` or more positions before it.

    Args:
        dtype: of the result without slopes. With slopes it is float32: half types would round far distances.
        num_kv_heads: ``options.alibi_slopes`` [HQ] is read as [HKV, HQ / HKV].

    Returns:
        [..., 1, 1, Q, S] without slopes, [..., HKV, HQ / HKV, Q, S] with them.
    """
    distance = (key_positions.unsqueeze(-2) - query_positions.unsqueeze(-1)).unsqueeze(-3).unsqueeze(-3)
    hidden = distance > 0
    if options.sliding_window is not None:
        hidden = hidden | (distance <= -options.sliding_window)
    if options.alibi_slopes is None:
        bias = torch.zeros(distance.shape, dtype=dtype, device=distance.device)
    else:
        slopes = options.alibi_slopes.to(torch.float32).view(num_kv_heads, -1, 1, 1)
        bias = slopes * distance
    return bias.masked_fill_(hidden, float("-inf"))
