"""End tokens, as config.json and generation_config.json name them. Without torch: processes without it ask, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rose_backend.errors import ModelError


def read_eos_token_ids(fields: Mapping[str, Any], file: str) -> tuple[int, ...]:
    """Return ``eos_token_id`` of a JSON file, one or a list of them.

    Raises:
        ModelError: it is neither.
    """
    value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(each, bool) or not isinstance(each, int) for each in ids):
        raise ModelError(f"{file}: eos_token_id must be one integer, or a list of them, got {value!r}")
    return tuple(ids)
