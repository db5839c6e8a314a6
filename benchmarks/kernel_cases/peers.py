"""The implementations that Rose is compared with, as far as they are installed."""

from __future__ import annotations

import importlib
from types import ModuleType

MISSING: dict[str, str] = {}
"""Peer -> why it is left out."""


def load(peer: str, *modules: str) -> list[ModuleType] | None:
    """Import what ``peer`` needs; where that is not installed, note why and return None."""
    try:
        return [importlib.import_module(module) for module in modules]
    except ImportError as error:
        MISSING[peer] = str(error)
        return None
