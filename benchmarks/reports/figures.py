"""README's pictures: the block manager's cost per row, and latencies of servers over the load."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from benchmarks.reports.engines import LABELS
from benchmarks.reports.serving import figure_name, points
from benchmarks.reports.text import Result

COST_NAME = "block_manager_cost"
COST_PANELS = {
    "pool_size": ("num_blocks", "blocks in the pool"),
    "sequence_length": ("num_tokens", "tokens of each sequence"),
}
COST_SIDES = {
    "stock": ("vLLM's KVCacheManager", "tab:gray"),
    "rose_in_vllm": ("Rose in vLLM", "tab:orange"),
    "rose_core": ("Rose's own engine", "tab:red"),
}
COST_FIGURE = "whole_block_us_per_row"
LATENCY_PANELS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
COLOURS = {"rose": "tab:red", "rose-in-vllm": "tab:orange", "vllm": "tab:gray", "sglang": "tab:blue"}


def is_drawn_from(path: Path, result: Result) -> bool:
    """Return whether a figure exists and shows this result."""
    return path.is_file() and f"result {_digest(result)}".encode() in path.read_bytes()


def _digest(result: Result) -> str:
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()[:32]


def file_names(result: Result) -> list[str]:
    """Return the names of the files that ``draw`` writes for a result."""
    names = [COST_NAME]
    if result["benchmark"] == "online_compare":
        names = [figure_name(mode) for mode in dict.fromkeys(row["mode"] for row in result["rows"])]
    return [f"{name}.{ending}" for name in names for ending in ("png", "svg")]


def draw(result: Result, out: Path) -> list[Path]:
    """Write a result's pictures as PNG and SVG into ``out``; return their paths.

    The digest of the result is part of each file; ``is_drawn_from`` finds it.

    Raises:
        KeyError: there is no picture of such a result.
    """
    import matplotlib

    matplotlib.use("Agg")
    return DRAW[result["benchmark"]](result, out)


def _save(figure: Any, out: Path, name: str, result: Result) -> list[Path]:
    from matplotlib import pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}.{ending}" for ending in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Description": f"result {_digest(result)}"})
    plt.close(figure)
    return paths


def cost_curve(result: Result, scene: str, side: str) -> dict[str, list[float]]:
    """Return ``x`` and, in microseconds per row, ``median``, ``p10`` and ``p90``; skipped points are left out."""
    axis, _ = COST_PANELS[scene]
    found = [point for point in result["scenes"][scene] if point["side"] == side and COST_FIGURE in point]
    found.sort(key=lambda point: point[axis])
    curve = {name: [point[COST_FIGURE][name] for point in found] for name in ("median", "p10", "p90")}
    return {"x": [point[axis] for point in found], **curve}


def _draw_cost(result: Result, out: Path) -> list[Path]:
    """Draw decode cost per row over pool size and over sequence length: medians, bands from p10 to p90."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for panel, (scene, (_, label)) in zip(axes, COST_PANELS.items(), strict=True):
        for side, (name, colour) in COST_SIDES.items():
            curve = cost_curve(result, scene, side)
            if not curve["x"]:
                continue
            panel.plot(curve["x"], curve["median"], "o-", color=colour, label=name)
            panel.fill_between(curve["x"], curve["p10"], curve["p90"], color=colour, alpha=0.2)
        panel.set(xscale="log", yscale="log", xlabel=label)
        panel.grid(True, alpha=0.3)
    axes[0].set_ylabel("µs per request and decode step")
    axes[0].legend()
    settings = result["settings"]
    figure.suptitle(
        f"Block manager, {settings['rows']} requests, blocks of {settings['block_size']}, "
        f"mean over whole blocks; {result['machine']['cpu']}, one core",
        fontsize=10,
    )
    return _save(figure, out, COST_NAME, result)


def latency_curve(result: Result, mode: str, backend: str, name: str) -> tuple[list[float], list[float]]:
    """Return scales and a figure's values at them."""
    figures = points(result["rows"])
    scales = sorted(scale for found, scale, side in figures if (found, side) == (mode, backend))
    return scales, [figures[mode, scale, backend][name] for scale in scales]


def _draw_latencies(result: Result, out: Path) -> list[Path]:
    """Draw TTFT, TPOT, ITL and E2EL of every server over the load, a figure of 2 x 2 panels for each mode."""
    modes = dict.fromkeys(row["mode"] for row in result["rows"])
    return [path for mode in modes for path in _draw_mode(result, mode, out)]


def _draw_mode(result: Result, mode: str, out: Path) -> list[Path]:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    backends = [name for name in LABELS if any(row["backend"] == name for row in result["rows"])]
    ticks = sorted({row["scale"] for row in result["rows"]})
    for panel, (metric, title) in zip(axes.flat, LATENCY_PANELS.items(), strict=True):
        for backend in backends:
            scales, p90 = latency_curve(result, mode, backend, f"p90_{metric}_ms")
            p50, p99 = (latency_curve(result, mode, backend, f"p{p}_{metric}_ms")[1] for p in (50, 99))
            colour = COLOURS[backend]
            panel.plot(scales, p90, "o-", color=colour, label=LABELS[backend])
            panel.fill_between(scales, p50, p90, color=colour, alpha=0.2)
            panel.plot(scales, p99, "o", color=colour, markerfacecolor="none")
        panel.set(title=title, xscale="log", yscale="log", ylabel="ms")
        panel.set_xticks(ticks, [f"{scale:g}" for scale in ticks])
        panel.minorticks_off()
        panel.set_xlabel("scale of sending times (left: more load)")
        panel.grid(True, alpha=0.3)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(backends))
    trace = result["trace"]
    figure.suptitle(
        f"{trace['num_requests']} requests of {trace['source']}, lengths x {trace['length_scale']:g}, {mode}; "
        f"{result['settings']['model']}; {result['device']}.\n"
        "Line: p90, band: p50 to p90, hollow: p99",
        fontsize=10,
    )
    return _save(figure, out, figure_name(mode), result)


DRAW = {"block_manager": _draw_cost, "online_compare": _draw_latencies}
