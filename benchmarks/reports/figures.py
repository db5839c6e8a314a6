"""Pictures of costs, latencies, throughput and starts, on a light ground for pages of any colour.

Sides differ by their markers, too, and bars have their names and values beside them: nobody has to tell colours apart.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.online.timeline import METRICS
from benchmarks.reports.engines import START_UP
from benchmarks.reports.serving import figure_name, front_end, points, requests_per_s
from benchmarks.reports.text import LABELS, Result, grouped, medians

COST_PANELS = {
    "pool_size": ("num_blocks", "blocks in the pool"),
    "sequence_length": ("num_tokens", "tokens of each"),
}
COST_SIDES = {"stock": "vLLM", "rose_in_vllm": "Rose in vLLM", "rose_core": "Rose"}
COST_FIGURE = "whole_block_us_per_row"
GROUND = "#f7f7f4"
DRAFT_SIDES = {"chosen": "drafts where they pay", "all": "drafts in all steps", "none": "no drafts"}
COLOURS = {"Rose": "tab:red", "Rose in vLLM": "tab:orange", "vLLM": "tab:gray", "SGLang": "tab:blue"}
COLOURS |= dict(zip(DRAFT_SIDES.values(), ("tab:red", "tab:orange", "tab:gray"), strict=True))
MARKERS = {"Rose": "o", "Rose in vLLM": "s", "vLLM": "^", "SGLang": "D"}
MARKERS |= dict(zip(DRAFT_SIDES.values(), ("o", "s", "^"), strict=True))

Panel = tuple[dict[str, Any], dict[str, dict[str, list[float]]]]
"""Labels and scale of the axes; for each curve ``x``, the line, the edges of a band and, maybe, dots."""


class Bars(NamedTuple):
    """A panel of horizontal bars."""

    title: str
    bars: list[tuple[str, str, float]]
    """Model, side and seconds, from the top."""


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
            rows = (len(panels) + 1) // 2
            figure, axes = plt.subplots(
                rows, 2, figsize=(11, 1 + 3.4 * rows), layout="constrained", squeeze=False
            )
            legend: dict[str, Any] = {}
            for axis, panel in itertools.zip_longest(axes.flat, panels):
                if panel is None:
                    axis.set_visible(False)
                elif isinstance(panel, Bars):
                    _draw_bars(axis, panel)
                else:
                    _draw_panel(axis, panel)
                    handles, labels = axis.get_legend_handles_labels()
                    legend |= dict(zip(labels, handles, strict=True))
            if legend:
                figure.legend(legend.values(), legend, loc="outside lower center", ncols=4)
            figure.suptitle(title, fontsize=10)
            metadata = {"Description": f"result {_digest(result)}", "Date": None}
            figure.savefig(out / f"{picture}.svg", facecolor=GROUND, metadata=metadata)
            plt.close(figure)
    return [out / f"{picture}.svg" for picture in pictures]


def _draw_panel(axis: Any, panel: Panel) -> None:
    labels, curves = panel
    for name, curve in curves.items():
        x, line, low, high, *dots = curve.values()
        axis.plot(x, line, marker=MARKERS[name], color=COLOURS[name], label=name)
        axis.fill_between(x, low, high, color=COLOURS[name], alpha=0.2)
        for values in dots:
            axis.plot(x, values, MARKERS[name], color=COLOURS[name], markerfacecolor="none")
    axis.set(**{"yscale": "log", **labels})


def _draw_bars(axis: Any, panel: Bars) -> None:
    names = [f"{model}, {side}" for model, side, _ in panel.bars]
    drawn = axis.barh(
        names, [value for *_, value in panel.bars], color=[COLOURS[side] for _, side, _ in panel.bars]
    )
    axis.bar_label(drawn, fmt="%.1f", padding=3)
    axis.margins(x=0.2)
    axis.invert_yaxis()
    axis.set(title=panel.title, xlabel="seconds")


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


def model_name(result: Result) -> str:
    """Return what people call the model of a result."""
    name: str = result["settings"]["model"].removeprefix("random weights, ").removesuffix("'s shapes")
    return name.partition(",")[0]


def throughput_curve(result: Result, backend: str) -> dict[str, list[float]]:
    """Return ``x`` in requests, and in tokens per second the median and p10 to p90 of greedy decode steps."""
    rows = [
        row
        for row in result["rows"]
        if (row["scene"], row["mode"], row["backend"]) == ("decode", "greedy", backend)
    ]
    rows.sort(key=lambda row: row["num_requests"])
    curve: dict[str, list[float]] = {"x": [row["num_requests"] for row in rows]}
    # The shorter a step, the more tokens in a second.
    for part, figure in {"line": "median", "low": "p90", "high": "p10"}.items():
        curve[part] = [1e3 * row["num_requests"] / row["figures"]["step_ms"][figure] for row in rows]
    return curve


def _throughput(result: Result, name: str) -> dict[str, tuple[str, list[Panel | Bars]]]:
    """Return tokens per second over the number of requests that a step decodes, for each model."""
    panels: list[Panel | Bars] = []
    for each in _results(result):
        curves = {
            label: throughput_curve(each, side) for side, label in LABELS.items() if side in each["backends"]
        }
        batches = sorted({row["num_requests"] for row in each["rows"] if row["scene"] == "decode"})
        labels = {"title": f"{model_name(each)}, {each['device']}", "xscale": "log", "xticks": batches}
        labels |= {"xticklabels": batches, "xlabel": "requests in a step", "ylabel": "tokens per second"}
        panels.append((labels, curves))
    return {
        name: ("Greedy decode steps of whole engines\nLine: median, band: p10 to p90 of the turns", panels)
    }


def starts(results: Sequence[Result]) -> dict[tuple[str, str, str], float]:
    """Return the median seconds until an engine is ready, by caches, model and side: of the newest result that has it.

    Models are in the order of ``results``.
    """
    found = {}
    for result in sorted(results, key=lambda each: each["date"]):
        for (backend, caches), rows in grouped(result["rows"], "backend", "caches").items():
            found[caches, model_name(result), LABELS[backend]] = medians(rows, START_UP)["ready_s"]
    models, sides = list(map(model_name, results)), list(LABELS.values())
    order = sorted(found, key=lambda key: (key[0], models.index(key[1]), sides.index(key[2])))
    return {key: found[key] for key in order}


def _starts(result: Result, name: str) -> dict[str, tuple[str, list[Panel | Bars]]]:
    """Return how long engines take to be ready, with empty caches and with filled ones."""
    results = _results(result)
    found = starts(results)
    panels: list[Panel | Bars] = [
        Bars(
            f"{caches} caches",
            [(model, side, found[key]) for key in found for of, model, side in [key] if of == caches],
        )
        for caches in dict.fromkeys(caches for caches, *_ in found)
    ]
    devices = ", ".join(dict.fromkeys(each["device"] for each in results))
    return {name: (f"Seconds until an engine is ready, {devices}, medians", panels)}


def _draft_changes(result: Result, name: str) -> dict[str, tuple[str, list[Panel]]]:
    """Return tokens per second, and the drafts of a request, over the steps of a batch that changes its kind."""
    settings, panels = result["settings"], []
    for figure, label in {
        "tokens_per_s": "tokens per second",
        "drafts": "drafts per request and step",
    }.items():
        curves = {}
        for side, of_side in DRAFT_SIDES.items():
            line = [point[figure] for point in result["sides"][side]]
            steps = [point["step"] for point in result["sides"][side]]
            curves[of_side] = {"x": steps, "line": line, "low": line, "high": line}
        panels.append(({"xlabel": "decode step", "ylabel": label, "yscale": "linear"}, curves))
    accepted = ", then ".join(f"{sum(rates):.1f}" for rates in result["rates"])
    title = (
        f"{settings['requests']} requests whose text changes every {settings['steps']} steps: of 3 drafts "
        f"{accepted} are accepted\n{model_name(result)}, {result['device']}"
    )
    return {name: (title, panels)}


def _results(result: Result) -> list[Result]:
    """Return the results that are drawn together, or the only one."""
    together: list[Result] = result.get("results", [result])
    return together


DRAW: dict[str, Callable[[Result, str], dict[str, tuple[str, Any]]]] = {
    "block_manager": _costs,
    "draft_changes": _draft_changes,
    "offline_compare": _throughput,
    "online_compare": _latencies,
    "start_up": _starts,
    "state_hits": _state_hits,
}
"""Benchmark -> what makes the titles and panels of its pictures, by their names."""
