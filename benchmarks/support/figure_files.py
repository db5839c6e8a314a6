"""Writing a figure for README: the same formats and names for all of them, and which result each was drawn from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def digest(report: dict[str, Any]) -> str:
    """Return what tells a result from any other."""
    return hashlib.sha256(json.dumps(report, sort_keys=True).encode()).hexdigest()[:32]


def save_figure(figure: Any, out: Path, name: str, report: dict[str, Any]) -> list[Path]:
    """Write a matplotlib figure as ``name.png`` and ``name.svg`` into ``out``, close it, and return both paths.

    The digest of ``report``, which it shows, is part of each file; ``is_drawn_from`` finds it.
    """
    from matplotlib import pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}.{ending}" for ending in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Description": f"result {digest(report)}"})
    plt.close(figure)
    return paths


def is_drawn_from(path: Path, report: dict[str, Any]) -> bool:
    """Return whether a figure exists and shows this result."""
    return path.is_file() and f"result {digest(report)}".encode() in path.read_bytes()
