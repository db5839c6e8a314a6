"""Rotary positions: what config.json says of them, in the layouts of transformers before and since release 5, and the
tables of their cosines and sines.

Tables are computed step by step as transformers does, in float32: angles of far positions are rounded alike, so that
greedy tokens are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rose_backend.errors import ModelError

_OLD_WINDOW = "original_max_position_embeddings"
# By ``rope_type``: fields that must be there, and fields that may.
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (_OLD_WINDOW,)),
    "yarn": (("factor",), (_OLD_WINDOW, "attention_factor", "beta_fast", "beta_slow", "truncate")),
}
_MAX_NUMBER = 1e12
"""Above every number that a checkpoint has a use for."""
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


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


def read_rotary_options(fields: Mapping[str, Any], *, max_position_embeddings: int) -> RotaryOptions:
    """Read ``rope_parameters``, or ``rope_theta`` with ``rope_scaling``.

    Args:
        max_position_embeddings: of config.json, in tokens.

    Raises:
        ModelError: something is not supported, or missing; the message names it.
    """
    name, given = _parameters(fields)
    rope_type = given.get("rope_type", given.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in _FIELDS:
        raise ModelError(
            f"config.json: {name}.rope_type={rope_type!r} is not supported, allowed are {', '.join(_FIELDS)}"
        )
    required, optional = _FIELDS[rope_type]
    # Left in by tools that switch scaling off: transformers does not read them either.
    ignored = ("factor", _OLD_WINDOW) if rope_type == "default" else ()
    for field in given:
        if field not in (*_COMMON, *required, *optional, *ignored) and given[field] is not None:
            raise ModelError(f"config.json: {name}.{field} is not supported with rope_type {rope_type!r}")
    for holder in (given, fields):
        if holder.get("partial_rotary_factor") not in (None, 1.0):
            share = holder["partial_rotary_factor"]
            raise ModelError(f"config.json: partial_rotary_factor={share!r} is not supported")
    options: dict[str, Any] = {
        "rope_type": rope_type,
        "rope_theta": given.get("rope_theta") or fields.get("rope_theta") or 10_000.0,
    }
    for field in (*required, *optional):
        if given.get(field) is not None:
            options[field] = given[field]
        elif field in required:
            raise ModelError(f"config.json: {name}.{field} is missing, rope_type {rope_type!r} needs it")
    if _OLD_WINDOW in optional:
        # The field beside the others is Phi's; transformers prefers it.
        options[_OLD_WINDOW] = fields.get(_OLD_WINDOW) or options.get(_OLD_WINDOW) or max_position_embeddings
    _check_numbers(options, name)
    return RotaryOptions(**options)


def _parameters(fields: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the content of the field that describes the rotation."""
    new, old = fields.get("rope_parameters"), fields.get("rope_scaling")
    if new and old and new != old:
        raise ModelError("config.json: rope_parameters and rope_scaling differ, one of them is needed")
    name, given = ("rope_parameters", new) if new else ("rope_scaling", old or {})
    if not isinstance(given, Mapping):
        raise ModelError(f"config.json: {name} must be an object, got {given!r}")
    for field, value in given.items():
        if isinstance(value, Mapping):
            raise ModelError(f"config.json: {name}.{field}, rotation by kind of layer, is not supported")
    return name, given


def _check_numbers(options: Mapping[str, Any], name: str) -> None:
    for field, value in options.items():
        if field == "rope_type":
            continue
        if field == "truncate":
            is_right, needed = isinstance(value, bool), "true or false"
        else:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            low = 1 if field == "rope_theta" else 0
            is_right, needed = is_number and value > low, f"a number above {low}"
            if is_right and value >= _MAX_NUMBER:
                is_right, needed = False, f"below {_MAX_NUMBER:g}"
        if not is_right:
            raise ModelError(f"config.json: {name}.{field} must be {needed}, got {value!r}")
    if options["rope_type"] == "llama3" and options["high_freq_factor"] <= options["low_freq_factor"]:
        raise ModelError(f"config.json: {name}.high_freq_factor must be above low_freq_factor")


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
