"""The figure of what ``online_compare`` measured: TTFT, TPOT, ITL and E2EL of every server over the load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.support.figure_files import save_figure
from benchmarks.support.online_report import points
from benchmarks.support.readme_compare import LABELS

NAME = "online_compare"
PANELS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
COLOURS = {"rose": "tab:red", "rose-in-vllm": "tab:orange", "vllm": "tab:gray", "sglang": "tab:blue"}


def curve(report: dict[str, Any], mode: str, backend: str, name: str) -> tuple[list[float], list[float]]:
    """Return scales and a figure's values at them."""
    figures = points(report["rows"])
    scales = sorted(scale for found, scale, side in figures if (found, side) == (mode, backend))
    return scales, [figures[mode, scale, backend][name] for scale in scales]


def draw(report: dict[str, Any], out: Path) -> list[Path]:
    """Write one figure of 2 x 2 panels for each mode, as PNG and SVG, into ``out``; return their paths."""
    modes = dict.fromkeys(row["mode"] for row in report["rows"])
    return [path for mode in modes for path in _draw_mode(report, mode, out)]


def _draw_mode(report: dict[str, Any], mode: str, out: Path) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    backends = [name for name in LABELS if any(row["backend"] == name for row in report["rows"])]
    ticks = sorted({row["scale"] for row in report["rows"]})
    for panel, (metric, title) in zip(axes.flat, PANELS.items(), strict=True):
        for backend in backends:
            scales, p90 = curve(report, mode, backend, f"p90_{metric}_ms")
            p50, p99 = (curve(report, mode, backend, f"p{share}_{metric}_ms")[1] for share in (50, 99))
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
    trace = report["trace"]
    figure.suptitle(
        f"{trace['num_requests']} requests of {trace['source']}, lengths x {trace['length_scale']:g}, {mode}; "
        f"{report['settings']['model']}; {report['device']}.\n"
        "Line: p90, band: p50 to p90, hollow: p99",
        fontsize=10,
    )
    return save_figure(figure, out, figure_name(mode), report)


def figure_name(mode: str) -> str:
    """Return the files' name without its ending."""
    return NAME if mode == "greedy" else f"{NAME}_{'_'.join(mode.replace(',', '').replace('.', '').split())}"
