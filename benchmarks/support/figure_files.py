"""Writing a figure for README: the same formats and the same names for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_figure(figure: Any, out: Path, name: str) -> list[Path]:
    """Write a matplotlib figure as ``name.png`` and ``name.svg`` into ``out``, close it, and return both paths."""
    from matplotlib import pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}.{ending}" for ending in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    plt.close(figure)
    return paths
