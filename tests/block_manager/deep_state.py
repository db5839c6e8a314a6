"""The whole state of an object, to show that a refused call has changed nothing."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np


def state_of(thing: Any, seen: set[int] | None = None) -> Any:
    """Return all that can be reached from ``thing``, each object once, to be compared; scratch memory is left out."""
    seen = set() if seen is None else seen
    if isinstance(thing, np.ndarray):
        return (thing.dtype.str, thing.shape, thing.tobytes())
    if isinstance(thing, dict):
        return [(key, state_of(value, seen)) for key, value in thing.items()]
    if isinstance(thing, list | tuple | set | frozenset | deque):
        return [state_of(item, seen) for item in thing]
    names = getattr(thing, "__dict__", None) or getattr(type(thing), "__slots__", ())
    if not names:
        return thing
    if id(thing) in seen:
        return None
    seen.add(id(thing))
    return {name: state_of(getattr(thing, name), seen) for name in names if "scratch" not in name}
