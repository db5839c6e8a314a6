"""Tables of rotary position embeddings, for the ways in which models stretch their windows.

Computed step by step as transformers does, in float32: angles of far positions are rounded alike, so that greedy tokens
are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryOptions:
    """Fields of a checkpoint's ``rope_parameters``, under their names there."""

    rope_theta: float
    rope_type: str = "default"
    """``default``, ``linear``, ``llama3`` or ``yarn``."""
    factor: float = 1.0
    """How much longer the window is than the one before it was stretched."""
    original_max_position_embeddings: int = 0
    """The window before it was stretched, in tokens; of ``llama3`` and ``yarn``."""
    low_freq_factor: float = 0.0
    """``llama3``: numbers that turn less often within the old window are slowed down by ``factor``."""
    high_freq_factor: float = 0.0
    """``llama3``: numbers that turn more often within the old window stay as they are."""
    beta_fast: float = 32.0
    """``yarn``: as ``high_freq_factor``."""
    beta_slow: float = 1.0
    """``yarn``: as ``low_freq_factor``."""
    truncate: bool = True
    """``yarn``: both bounds are moved outwards to whole numbers of a head."""
    attention_factor: float | None = None
    """``yarn``: queries and keys are multiplied by it; None follows from ``factor``."""


def rotary_table(
    options: RotaryOptions, head_size: int, num_positions: int, device: torch.device
) -> torch.Tensor:
    """Return what ``rotate_query_key`` reads, ``[num_positions, head_size]`` float32: cosines, then as many sines."""
    frequencies = inverse_frequencies(options, head_size)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    if options.rope_type == "yarn":
        table *= _attention_factor(options)
    return table.to(device)


def inverse_frequencies(options: RotaryOptions, head_size: int) -> torch.Tensor:
    """Return by how many radians each pair of numbers turns from one position to the next, [D / 2] float32."""
    periods = options.rope_theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    plain = 1.0 / periods
    if options.rope_type == "default":
        return plain
    if options.rope_type == "linear":
        return plain / options.factor
    if options.rope_type == "llama3":
        return _llama3(options, plain)
    assert options.rope_type == "yarn", f"rope_type {options.rope_type!r} is unknown"
    stretched = 1.0 / (options.factor * periods)
    kept = 1 - _yarn_ramp(options, head_size)
    return stretched * (1 - kept) + plain * kept


def _llama3(options: RotaryOptions, plain: torch.Tensor) -> torch.Tensor:
    window, low, high = (
        options.original_max_position_embeddings,
        options.low_freq_factor,
        options.high_freq_factor,
    )
    wavelengths = 2 * math.pi / plain
    share = (window / wavelengths - low) / (high - low)
    between = (1 - share) * plain / options.factor + share * plain
    slowed = torch.where(wavelengths > window / low, plain / options.factor, between)
    return torch.where(wavelengths < window / high, plain, slowed)


def _yarn_ramp(options: RotaryOptions, head_size: int) -> torch.Tensor:
    """Return how far each pair of numbers is stretched, from 0 to 1, [D / 2]."""

    def place(num_turns: float) -> float:
        """Which number of a head turns that often within the old window."""
        wavelength = options.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return head_size * math.log(wavelength) / (2 * math.log(options.rope_theta))

    first, last = place(options.beta_fast), place(options.beta_slow)
    if options.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_size - 1)
    # A ramp of no length would divide by zero.
    length = last - first if last != first else 0.001
    return ((torch.arange(head_size // 2, dtype=torch.float32) - first) / length).clamp(0, 1)


def _attention_factor(options: RotaryOptions) -> float:
    if options.attention_factor is not None:
        return options.attention_factor
    return 0.1 * math.log(options.factor) + 1.0 if options.factor > 1 else 1.0
