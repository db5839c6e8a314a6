"""Draw what benchmarks/online_compare.py measured: TTFT, TPOT, ITL and E2EL of every server over the load.

    python -m benchmarks.plot_online benchmarks/results/h200/online_compare.json [--out benchmarks/figures]

Writes online_compare.png and .svg. Solid lines are medians, broken ones the 99th percentile; with several turns at a
scale, the median over them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.figure_files import save_figure

HERE = Path(__file__).resolve().parent
PANELS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
STYLES = {50: "o-", 99: "o--"}
COLOURS = {"rose": "tab:red", "rose-in-vllm": "tab:orange", "vllm": "tab:gray", "sglang": "tab:blue"}
LABELS = {"rose": "Rose", "rose-in-vllm": "Rose in vLLM", "vllm": "vLLM", "sglang": "SGLang"}


def curve(report: dict[str, Any], backend: str, name: str) -> tuple[list[float], list[float]]:
    """Return scales and a figure's values at them."""
    by_scale: dict[float, list[float]] = {}
    for row in report["rows"]:
        if row["backend"] == backend:
            by_scale.setdefault(row["scale"], []).append(row[name])
    scales = sorted(by_scale)
    return scales, [statistics.median(by_scale[scale]) for scale in scales]


def draw(report: dict[str, Any], out: Path) -> list[Path]:
    """Write both files into ``out`` and return their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    backends = [name for name in LABELS if any(row["backend"] == name for row in report["rows"])]
    for panel, (metric, title) in zip(axes.flat, PANELS.items(), strict=True):
        for backend in backends:
            for share, style in STYLES.items():
                scales, values = curve(report, backend, f"p{share}_{metric}_ms")
                label = LABELS[backend] if share == 50 else None
                panel.plot(scales, values, style, color=COLOURS[backend], label=label)
        panel.set(title=title, yscale="log", xlabel="scale of sending times (left: more load)", ylabel="ms")
        panel.grid(True, alpha=0.3)
    axes[0, 0].legend()
    trace = report["trace"]
    figure.suptitle(
        f"{trace['num_requests']} requests of {trace['source']}, lengths x {trace['length_scale']:g}; "
        f"{report['settings']['model']}; {report['device']}. Solid: median, broken: 99th percentile",
        fontsize=10,
    )
    return save_figure(figure, out, "online_compare")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("json", type=Path, help="file that --json has written")
    parser.add_argument("--out", type=Path, default=HERE / "figures", help="folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    for path in draw(json.loads(options.json.read_text()), options.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
