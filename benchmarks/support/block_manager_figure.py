"""The figure of what ``block_manager`` measured: decode cost per row over pool size and over sequence length.

Lines are medians, bands the 10th to 90th percentile.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.figure_files import save_figure

NAME = "block_manager_cost"
PANELS = {
    "pool_size": ("num_blocks", "blocks in the pool"),
    "sequence_length": ("num_tokens", "tokens of each sequence"),
}
LABELS = {"stock": "vLLM's KVCacheManager", "rose_in_vllm": "Rose in vLLM", "rose_core": "Rose's own engine"}
COLOURS = {"stock": "tab:gray", "rose_in_vllm": "tab:orange", "rose_core": "tab:red"}
FIGURE = "whole_block_us_per_row"


@dataclass(frozen=True)
class Curve:
    """One side of one panel; microseconds per row."""

    side: str
    x: list[int]
    median: list[float]
    low: list[float]
    high: list[float]


def curves(report: dict[str, Any], scene: str) -> list[Curve]:
    """Return the curves of a scene, slowest label first; points that were skipped are left out."""
    axis, _ = PANELS[scene]
    found = []
    for side in LABELS:
        points = [p for p in report["scenes"][scene] if p["side"] == side and FIGURE in p]
        points.sort(key=lambda point: point[axis])
        columns = [[point[FIGURE][name] for point in points] for name in ("median", "p10", "p90")]
        if points:
            found.append(Curve(side, [point[axis] for point in points], *columns))
    return found


def draw(report: dict[str, Any], out: Path) -> list[Path]:
    """Write both files into ``out`` and return their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for panel, (scene, (_, label)) in zip(axes, PANELS.items(), strict=True):
        for curve in curves(report, scene):
            colour = COLOURS[curve.side]
            panel.plot(curve.x, curve.median, "o-", color=colour, label=LABELS[curve.side])
            panel.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.2)
        panel.set(xscale="log", yscale="log", xlabel=label)
        panel.grid(True, alpha=0.3)
    axes[0].set_ylabel("µs per request and decode step")
    axes[0].legend()
    machine, settings = report["machine"], report["settings"]
    figure.suptitle(
        f"Block manager, {settings['rows']} requests, blocks of {settings['block_size']}, "
        f"mean over whole blocks; {machine['cpu']}, one core",
        fontsize=10,
    )
    return save_figure(figure, out, NAME, report)
