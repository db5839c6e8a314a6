"""Pictures of the block manager's cost and of latencies over the load, on a light ground for pages of any colour."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from benchmarks.online.timeline import METRICS
from benchmarks.reports.serving import figure_name, front_end, points, requests_per_s
from benchmarks.reports.text import LABELS, Result, grouped

COST_PANELS = {
    "pool_size": ("num_blocks", "blocks in the pool"),
    "sequence_length": ("num_tokens", "tokens of each"),
}
COST_SIDES = {"stock": "vLLM", "rose_in_vllm": "Rose in vLLM", "rose_core": "Rose"}
COST_FIGURE = "whole_block_us_per_row"
GROUND = "#f7f7f4"
COLOURS = {"Rose": "tab:red", "Rose in vLLM": "tab:orange", "vLLM": "tab:gray", "SGLang": "tab:blue"}

Panel = tuple[dict[str, str], dict[str, dict[str, list[float]]]]
"""Labels and scale of the axes; for each curve ``x``, the line, the edges of a band and, maybe, dots."""


def is_drawn_from(path: Path, result: Result) -> bool:
    """Return whether a figure exists and shows this result."""
    return path.is_file() and f"result {_digest(result)}".encode() in path.read_bytes()


def _digest(result: Result) -> str:
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()[:32]


def are_drawn(result: Result, name: str, folder: Path) -> bool:
    """Return whether all figures of a result, whose file is called ``name``, are in a folder."""
    return all(
        is_drawn_from(folder / f"{figure}.svg", result) for figure in DRAW[result["benchmark"]](result, name)
    )


def draw(result: Result, name: str, out: Path) -> list[Path]:
    """Write a result's pictures, with its digest, into ``out``; return their paths.

    They are called after ``name``, that of the result's file.
    KeyError where there is no picture of such a result.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    # Not in the style of whoever draws.
    style = {**matplotlib.rcParamsDefault, "axes.facecolor": GROUND, "axes.grid": True, "grid.alpha": 0.3}
    pictures = DRAW[result["benchmark"]](result, name)
    for picture, (title, panels) in pictures.items():
        with matplotlib.rc_context(style):
            rows = len(panels) // 2
            figure, axes = plt.subplots(rows, 2, figsize=(11, 1 + 3.4 * rows), layout="constrained")
            for axis, panel in zip(axes.flat, panels, strict=True):
                _draw_panel(axis, panel)
            figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
            figure.suptitle(title, fontsize=10)
            metadata = {"Description": f"result {_digest(result)}", "Date": None}
            figure.savefig(out / f"{picture}.svg", facecolor=GROUND, metadata=metadata)
            plt.close(figure)
    return [out / f"{picture}.svg" for picture in pictures]


def _draw_panel(axis: Any, panel: Panel) -> None:
    labels, curves = panel
    for name, curve in curves.items():
        x, line, low, high, *dots = curve.values()
        axis.plot(x, line, "o-", color=COLOURS[name], label=name)
        axis.fill_between(x, low, high, color=COLOURS[name], alpha=0.2)
        for values in dots:
            axis.plot(x, values, "o", color=COLOURS[name], markerfacecolor="none")
    axis.set(**{"yscale": "log", **labels})


def cost_curve(result: Result, scene: str, side: str) -> dict[str, list[float]]:
    """Return ``x`` and, in microseconds per row, ``median``, ``p10`` and ``p90``; skipped points are left out."""
    axis, _ = COST_PANELS[scene]
    found = [point for point in result["scenes"][scene] if point["side"] == side and COST_FIGURE in point]
    found.sort(key=lambda point: point[axis])
    curve = {name: [point[COST_FIGURE][name] for point in found] for name in ("median", "p10", "p90")}
    return {"x": [point[axis] for point in found], **curve}


def _costs(result: Result, name: str) -> dict[str, tuple[str, list[Panel]]]:
    """Return decode cost per row over pool size and over sequence length: medians, bands from p10 to p90."""
    settings, panels = result["settings"], []
    for scene, (_, label) in COST_PANELS.items():
        found = {label: cost_curve(result, scene, side) for side, label in COST_SIDES.items()}
        curves = {label: curve for label, curve in found.items() if curve["x"]}
        panels.append(
            ({"xlabel": label, "xscale": "log", "ylabel": "µs per request and decode step"}, curves)
        )
    title = (
        f"Block manager, {settings['rows']} requests, blocks of {settings['block_size']}, "
        f"mean over whole blocks; {result['machine']['cpu']}, one core\nLine: median, band: p10 to p90"
    )
    return {f"{name}_cost": (title, panels)}


def latency_curve(result: Result, mode: str, backend: str, metric: str) -> dict[str, list[float]]:
    """Return ``x`` in requests per second, and in milliseconds p90, a band from p50 to p90, and p99."""
    loads = sorted(points(result["rows"]).items(), reverse=True)
    found = [(scale, sides[backend]) for (of, scale), sides in loads if of == mode and backend in sides]
    names = {"line": "p90", "low": "p50", "high": "p90", "dots": "p99"}
    curve = {part: [side[f"{name}_{metric}_ms"] for _, side in found] for part, name in names.items()}
    return {"x": [requests_per_s(result, scale) for scale, _ in found], **curve}


def _latencies(result: Result, name: str) -> dict[str, tuple[str, list[Panel]]]:
    """Return TTFT, TPOT, ITL and E2EL of every server over the load, for each mode."""
    trace, found = result["trace"], {}
    for mode in dict.fromkeys(row["mode"] for row in result["rows"]):
        panels = []
        for metric in METRICS:
            sides = (side for side in LABELS if side in result["backends"])
            curves = {LABELS[side]: latency_curve(result, mode, side, metric) for side in sides}
            panels.append(
                ({"title": metric.upper(), "ylabel": "ms", "xlabel": "requests per second"}, curves)
            )
        heading = (
            f"{trace['num_requests']} requests of {trace['source']}, lengths x {trace['length_scale']:g}, "
            f"{mode}{front_end(result)}; {result['settings']['model']}; {result['device']}.\n"
            "Line: p90, band: p50 to p90, hollow: p99"
        )
        found[figure_name(name, mode)] = (heading, panels)
    return found


def _state_hits(result: Result, name: str) -> dict[str, tuple[str, list[Panel]]]:
    """Return the share of prompt tokens that both managers found over the size of the pool, for each trace."""
    panels = []
    for trace, cases in grouped(result["points"], "trace").items():
        curves = {}
        for label, side in {"Rose": "rose", "vLLM": "vllm"}.items():
            line = [100 * case[side]["hit_tokens"] / case["prompt_tokens"] for case in cases]
            curves[label] = {
                "x": [100 * case["share"] for case in cases],
                "line": line,
                "low": line,
                "high": line,
            }
        labels = {"title": trace, "xlabel": "% of the blocks that vLLM fills", "ylabel": "% of prompt tokens"}
        panels.append((labels | {"yscale": "linear"}, curves))
    title = "Prefix hits with Qwen3.5's KV cache groups: one of attention, three of states"
    return {name: (title, panels)}


DRAW = {"block_manager": _costs, "online_compare": _latencies, "state_hits": _state_hits}
