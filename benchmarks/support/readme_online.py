"""The README's table of whole servers, from what ``online_compare`` wrote."""

from __future__ import annotations

from typing import Any

from benchmarks.support.markdown import markdown, milliseconds
from benchmarks.support.online_figure import figure_name
from benchmarks.support.online_report import FIGURES, points
from benchmarks.support.readme_compare import LABELS, versions
from benchmarks.support.resume import in_runs
from benchmarks.support.streaming import METRICS, PERCENTILES

COMMAND = "python -m benchmarks.online_compare"


def online_table(result: dict[str, Any]) -> str:
    """Return, for each mode, its picture and every latency at every load; then the workload, and every loss.

    Raises:
        SystemExit: a server was missing, or one or a request failed; such a comparison is not published.
    """
    figures = points(result["rows"])
    failed = [
        f"{name} ({why.splitlines()[0]})"
        for label in ("missing", "failed")
        for name, why in result[label].items()
    ]
    failed += [
        f"{row['failed']} requests of {backend} ({mode}, scale {scale:g})"
        for (mode, scale, backend), row in figures.items()
        if row["failed"]
    ]
    if failed:
        raise SystemExit(f"online_compare.json: not everything has run: {'; '.join(failed)}")
    parts = []
    for mode in dict.fromkeys(mode for mode, _, _ in figures):
        alt = f"Latencies of {len(result['backends'])} servers over the load, {mode}"
        parts += [
            f"{mode.capitalize()}:",
            f"![{alt}](benchmarks/figures/{figure_name(mode)}.svg)",
            _latencies(result, figures, mode),
        ]
    return "\n\n".join((*parts, _source(result, figures), _losses(result, figures)))


def _latencies(result: dict[str, Any], figures: dict[Any, Any], mode: str) -> str:
    """Return a table of one mode, from light load to heavy."""
    backends = [name for name in LABELS if name in result["backends"]]
    rows = []
    for scale in sorted({scale for found, scale, _ in figures if found == mode}, reverse=True):
        rate = result["trace"]["num_requests"] / (result["trace"]["seconds"] * scale)
        points_of = [figures[mode, scale, name] for name in backends]
        answered = (f"{point['request_throughput']:,.0f}" for point in points_of)
        rows.append((f"scale {scale:g}, {rate:,.0f} requests/s", "answered/s", *answered))
        for metric in METRICS:
            cells = (
                " / ".join(milliseconds(point[f"p{p}_{metric}_ms"]) for p in PERCENTILES)
                for point in points_of
            )
            rows.append(("", metric.upper(), *cells))
    return markdown(("p50 / p90 / p99 in ms", "", *(LABELS[name] for name in backends)), rows)


def _source(result: dict[str, Any], figures: dict[Any, Any]) -> str:
    trace, settings = result["trace"], result["settings"]
    counts = {row["turns"] for row in figures.values()}
    turns = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    lengths = ", ".join(
        f"{name} {trace[key]['mean']:.0f} (p50 {trace[key]['p50']:.0f}, p99 {trace[key]['p99']:.0f})"
        for name, key in (("input", "input_length"), ("output", "output_length"))
    )
    return (
        f"Medians of {turns} turns{in_runs(result)} of {trace['num_requests']:,} requests each. {result['device']}, "
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
