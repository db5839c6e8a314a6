"""What config.json says of rotary positions, in the layouts of transformers before and since release 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rose_backend.errors import ModelError
from rose_backend.layers.rotary import RotaryOptions

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


def read_rotary_options(
    fields: Mapping[str, Any], *, max_position_embeddings: int, default_theta: float = 10_000.0
) -> RotaryOptions:
    """Read ``rope_parameters``, or ``rope_theta`` with ``rope_scaling``.

    Args:
        max_position_embeddings: of config.json, in tokens.
        default_theta: where ``fields`` do not say.

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
        "rope_theta": given.get("rope_theta") or fields.get("rope_theta") or default_theta,
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
