"""The README's table of whole servers, from what ``online_compare`` wrote."""

from __future__ import annotations

from typing import Any

from benchmarks.support.markdown import markdown, milliseconds
from benchmarks.support.online_report import FIGURES, points
from benchmarks.support.readme_compare import LABELS, versions
from benchmarks.support.streaming import METRICS, PERCENTILES

COMMAND = "python -m benchmarks.online_compare"
MODE = "greedy"


def online_table(result: dict[str, Any]) -> str:
    """Return every latency at every load, the workload, and every loss in any mode.

    Raises:
        SystemExit: a server or a request failed; such a comparison is not published.
    """
    figures = points(result["rows"])
    failed = [f"{name} ({why.splitlines()[0]})" for name, why in result["failed"].items()]
    failed += [
        f"{row['failed']} requests of {backend} ({mode}, scale {scale:g})"
        for (mode, scale, backend), row in figures.items()
        if row["failed"]
    ]
    if failed:
        raise SystemExit(f"online_compare.json: not everything has run: {'; '.join(failed)}")
    backends = [name for name in LABELS if name in result["backends"]]
    rows = []
    for scale in sorted({scale for _, scale, _ in figures}, reverse=True):
        rate = result["trace"]["num_requests"] / (result["trace"]["seconds"] * scale)
        for metric in METRICS:
            cells = (
                " / ".join(milliseconds(figures[MODE, scale, name][f"p{p}_{metric}_ms"]) for p in PERCENTILES)
                for name in backends
            )
            load = f"scale {scale:g}, {rate:,.0f} requests/s" if metric == METRICS[0] else ""
            rows.append((load, metric.upper(), *cells))
    header = ("p50 / p90 / p99 in ms", "", *(LABELS[name] for name in backends))
    return "\n\n".join((markdown(header, rows), _source(result, figures), _losses(result, figures)))


def _source(result: dict[str, Any], figures: dict[Any, Any]) -> str:
    trace, settings = result["trace"], result["settings"]
    counts = {row["turns"] for row in figures.values()}
    turns = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    lengths = ", ".join(
        f"{name} {trace[key]['mean']:.0f} (p50 {trace[key]['p50']:.0f}, p99 {trace[key]['p99']:.0f})"
        for name, key in (("input", "input_length"), ("output", "output_length"))
    )
    return (
        f"Greedy; medians of {turns} turns of {trace['num_requests']:,} requests each. {result['device']}, "
        f"{settings['model']}, {settings['dtype']}; {versions(result)}. Workload: {trace['source']}; all lengths times "
        f"{trace['length_scale']:g}, {trace['num_left_out']} requests left out because they do not fit "
        f"{trace['max_model_len']:,} tokens even so; then tokens on average: {lengths}; an endless prefix cache would "
        f"supply {trace['best_prefix_hit_ratio']:.0%} of the prompt blocks. `{result['command']}`."
    )


def _losses(result: dict[str, Any], figures: dict[Any, Any]) -> str:
    by_pair: dict[tuple[str, str, str, float], list[str]] = {}
    for loss in result["losses"]:
        key = (loss["backend"], loss["peer"], loss["mode"], loss["scale"])
        percentile, metric, _ = loss["figure"].split("_")
        values = f"{milliseconds(loss['rose'])} against {milliseconds(loss['peers'])}"
        by_pair.setdefault(key, []).append(f"{metric.upper()} {percentile} {values}")
    count = sum(backend == "rose" for _, _, backend in figures) * len(FIGURES)
    lost = [
        f"{LABELS[rose]} behind {LABELS[peer]}, {mode}, scale {scale:g}: {', '.join(found)}"
        for (rose, peer, mode, scale), found in by_pair.items()
    ]
    return f"Losses, of {count} figures of each peer, in ms: {'; '.join(lost) if lost else 'none'}."
