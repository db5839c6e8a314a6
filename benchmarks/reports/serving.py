"""Medians, goals, losses and tables of ``online_compare``: a chat trace, Poisson arrivals at servers and in process."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from benchmarks.online.timeline import METRICS, PERCENTILES
from benchmarks.reports.engines import HOST, LABELS, PEERS, ROSE_HOSTS, STOCK, source, versions
from benchmarks.reports.text import (
    Result,
    Row,
    command,
    in_runs,
    listed,
    markdown,
    milliseconds,
    missed_goals,
    percentiles,
    turns_text,
)
from benchmarks.support.run_facts import bar

FIGURES = tuple(f"p{share}_{metric}_ms" for metric in METRICS for share in PERCENTILES)
"""Latencies of a chat trace and of arrivals in process."""

COMPARED = {
    **{f"p{share}_{name}_ms": f"{name.upper()} p{share}" for name in ("ttft", "tpot") for share in (50, 99)},
    "output_throughput": "output tokens/s",
    "prefilled_tokens": "prefilled tokens",
}
"""Figures of ``vllm serve`` with and without Rose, and what README calls them."""
OUTPUTS_APART = "rose-in-vllm, joined_outputs off"
"""Name of the server that tells what ``joined_outputs`` is worth."""
_SERVED = {HOST: LABELS[HOST], OUTPUTS_APART: "the same, `joined_outputs` off", STOCK: LABELS[STOCK]}
MIN_THROUGHPUT_TIMES = 1.3
MAX_EXTRA_START_UP_S = 5.0

CAPACITY, SAME_LOAD, OWN_LOAD = "capacity", "same load", "own load"
MAX_ITL_TAIL = 3.0
MAX_TTFT_SHARE = 1 / 3

Point = tuple[str, float, str]
"""Mode, scale and backend."""


def _behind(figure: str) -> str:
    percentile, metric, _ = figure.split("_")
    return f"{metric.upper()} {percentile}"


def points(rows: Iterable[Row]) -> dict[Point, Row]:
    """Return every figure's median over the turns of a point, and the number of ``turns``."""
    by_point: dict[Point, list[Row]] = {}
    for row in rows:
        by_point.setdefault((row["mode"], row["scale"], row["backend"]), []).append(row)
    names = (*FIGURES, "output_throughput", "request_throughput", "client_busy")
    return {
        point: {
            "turns": len(turns),
            "failed": sum(turn["failed"] for turn in turns),
            **{name: statistics.median(turn[name] for turn in turns) for name in names},
        }
        for point, turns in by_point.items()
    }


def trace_losses(rows: Iterable[Row]) -> list[Row]:
    """Return every figure at which Rose, in either host, was behind a peer."""
    figures = points(rows)
    return [
        {
            "mode": mode,
            "scale": scale,
            "backend": backend,
            "peer": peer,
            "figure": name,
            "rose": rose[name],
            "peers": figures[mode, scale, peer][name],
        }
        for (mode, scale, backend), rose in figures.items()
        for peer in (PEERS if backend in ROSE_HOSTS else ())
        if (mode, scale, peer) in figures
        for name in FIGURES
        if rose[name] > figures[mode, scale, peer][name]
    ]


def figure_name(mode: str) -> str:
    """Return the name of a mode's picture without its ending."""
    words = "_".join(mode.replace(",", "").replace(".", "").split())
    return "online_compare" if mode == "greedy" else f"online_compare_{words}"


def trace_table(result: Result) -> str:
    """Return, for each mode, its picture and every latency at every load; then the workload, and every loss."""
    figures = points(result["rows"])
    parts = []
    for mode in dict.fromkeys(mode for mode, _, _ in figures):
        alt = f"Latencies of {len(result['backends'])} servers over the load, {mode}"
        picture = f"![{alt}](benchmarks/figures/{figure_name(mode)}.svg)"
        parts += [f"{mode.capitalize()}:", picture, _latencies(result, figures, mode)]
    return "\n\n".join((*parts, _trace_source(result, figures), _trace_losses(result, figures)))


def _latencies(result: Result, figures: Mapping[Point, Row], mode: str) -> str:
    """Return a table of one mode, from light load to heavy."""
    backends = [name for name in LABELS if name in result["backends"]]
    rows = []
    for scale in sorted({scale for found, scale, _ in figures if found == mode}, reverse=True):
        rate = result["trace"]["num_requests"] / (result["trace"]["seconds"] * scale)
        of_backends = [figures[mode, scale, name] for name in backends]
        answered = (f"{point['request_throughput']:,.0f}" for point in of_backends)
        rows.append((f"scale {scale:g}, {rate:,.0f} requests/s", "answered/s", *answered))
        for metric in METRICS:
            cells = (percentiles(point, metric, PERCENTILES) for point in of_backends)
            rows.append(("", metric.upper(), *cells))
    return markdown(("p50 / p90 / p99 in ms", "", *(LABELS[name] for name in backends)), rows)


def _trace_source(result: Result, figures: Mapping[Point, Row]) -> str:
    trace, settings = result["trace"], result["settings"]
    lengths = ", ".join(
        f"{name} {trace[key]['mean']:.0f} (p50 {trace[key]['p50']:.0f}, p99 {trace[key]['p99']:.0f})"
        for name, key in (("input", "input_length"), ("output", "output_length"))
    )
    turns = turns_text(row["turns"] for row in figures.values()) if figures else "0"
    return (
        f"Medians of {turns} turns{in_runs(result)} of {trace['num_requests']:,} requests each. {result['device']}, "
        f"{settings['model']}, {settings['dtype']}; {versions(result)}. Workload: {trace['source']}; all lengths times "
        f"{trace['length_scale']:g}, {trace['num_left_out']} requests left out because they do not fit "
        f"{trace['max_model_len']:,} tokens even so; then tokens on average: {lengths}; an endless prefix cache would "
        f"supply {trace['best_prefix_hit_ratio']:.0%} of the prompt blocks. {command(result)}."
    )


def _trace_losses(result: Result, figures: Mapping[Point, Row]) -> str:
    by_pair: dict[tuple[str, str, str, float], list[str]] = {}
    for loss in result["losses"]:
        key = (loss["backend"], loss["peer"], loss["mode"], loss["scale"])
        values = f"{milliseconds(loss['rose'])} against {milliseconds(loss['peers'])}"
        by_pair.setdefault(key, []).append(f"{_behind(loss['figure'])} {values}")
    count = sum(backend == "rose" for _, _, backend in figures) * len(FIGURES)
    lost = (
        f"{LABELS[rose]} behind {LABELS[peer]}, {mode}, scale {scale:g}: {', '.join(found)}"
        for (rose, peer, mode, scale), found in by_pair.items()
    )
    return listed(f"Losses, of {count} figures of each peer, in ms", lost)


def compare(rows: Iterable[Row]) -> list[Row]:
    """Return a row for each set of requests and rate.

    It has the median of each of ``COMPARED`` for each backend, and under "times" Rose's median over vLLM's where both
    took part.
    """
    turns: dict[tuple[str, float | None], dict[str, list[Row]]] = {}
    for row in rows:
        turns.setdefault((row["set"], row["rate"]), {}).setdefault(row["backend"], []).append(row)
    found = []
    for (name, rate), sides in turns.items():
        medians = {
            side: {figure: statistics.median(row[figure] for row in of_side) for figure in COMPARED}
            for side, of_side in sides.items()
        }
        row: Row = {"set": name, "rate": rate, "medians": medians}
        if {HOST, STOCK} <= medians.keys():
            rose, stock = medians[HOST], medians[STOCK]
            row["times"] = {name: rose[name] / stock[name] if stock[name] else None for name in COMPARED}
        found.append(row)
    return found


def poisson_bars(comparison: Iterable[Row], start_up_s: Mapping[str, float]) -> list[Row]:
    """Return every goal of Rose inside vLLM that was measured: nothing slower, and more throughput at saturation."""
    found = []
    for row in comparison:
        if "times" not in row:
            continue
        name, times, medians = row["set"], row["times"], row["medians"]
        if row["rate"] is None:
            goal, throughput = f"{name}, all at once: throughput", times["output_throughput"]
            found.append(bar(goal, throughput, MIN_THROUGHPUT_TIMES, "x", at_least=True))
        else:
            found += [
                bar(f"{name}, {row['rate']:.1f} a second: {figure}", times[figure], 1.0, "x")
                for figure in COMPARED
                if figure.endswith("_ms") and times[figure] is not None
            ]
        if name == "shared-prefix":
            saved = medians[STOCK]["prefilled_tokens"] - medians[HOST]["prefilled_tokens"]
            found.append(bar(f"{name}: fewer tokens prefilled", saved, 1, "tokens", at_least=True))
    if start_up_s.keys() >= {HOST, STOCK}:
        extra = start_up_s[HOST] - start_up_s[STOCK]
        found.append(bar("start-up, longer than vLLM's", extra, MAX_EXTRA_START_UP_S, "s"))
    return found


def poisson_losses(comparison: Iterable[Row]) -> list[Row]:
    """Return every figure of ``COMPARED`` in which Rose's median is worse than that of another server.

    Returns:
        For each: ``set``, ``rate``, ``figure``, ``peer``, and the medians ``rose`` and ``peers``.
    """
    found = []
    for row in comparison:
        rose = row["medians"].get(HOST, {})
        for peer in (STOCK, OUTPUTS_APART):
            for figure in COMPARED if rose and peer in row["medians"] else ():
                ours, theirs = rose[figure], row["medians"][peer][figure]
                if ours < theirs if figure == "output_throughput" else ours > theirs:
                    loss = {"set": row["set"], "rate": row["rate"], "figure": figure, "peer": peer}
                    found.append({**loss, "rose": ours, "peers": theirs})
    return found


def poisson_table(result: Result) -> str:
    """Return latencies, throughput and prefilled tokens at every load, every goal that was missed and every loss."""
    rows = []
    for row in result["comparison"]:
        present = [side for side in _SERVED if side in row["medians"]]
        for side in present:
            medians = row["medians"][side]
            latencies = (percentiles(medians, name, (50, 99)) + " ms" for name in ("ttft", "tpot"))
            counts = (f"{medians[name]:,.0f}" for name in ("output_throughput", "prefilled_tokens"))
            rows.append((_load(row) if side == present[0] else "", _SERVED[side], *latencies, *counts))
        if times := row.get("times"):
            ratios = (
                " / ".join(f"{times[f'p{share}_{name}_ms'] or 0:.2f}x" for share in (50, 99))
                for name in ("ttft", "tpot")
            )
            rows.append(("", "Rose / vLLM", *ratios, f"{times['output_throughput']:.2f}x", ""))
    header = ("", "", "TTFT p50 / p99", "TPOT p50 / p99", "output tokens/s", "prefilled tokens")
    lost = (
        f"{_load(loss)}: {COMPARED[loss['figure']]} {_figure(loss, 'rose')} against {_figure(loss, 'peers')} "
        f"({_SERVED[loss['peer']]})"
        for loss in poisson_losses(result["comparison"])
    )
    parts = (_poisson_source(result), missed_goals(result), listed("Losses of Rose in vLLM", lost))
    return "\n\n".join((markdown(header, rows), *parts))


def _load(row: Row) -> str:
    rate = "all at once" if row["rate"] is None else f"{row['rate']:.0f} requests/s"
    return f"{row['set']}, {rate}"


def _figure(loss: Row, side: str) -> str:
    return f"{milliseconds(loss[side])} ms" if loss["figure"].endswith("_ms") else f"{loss[side]:,.0f}"


def _poisson_source(result: Result) -> str:
    settings, start_up = result["settings"], result["start_up_s"]
    turns: dict[tuple[str, float | None, str], int] = {}
    for row in result["rows"]:
        key = (row["set"], row["rate"], row["backend"])
        turns[key] = turns.get(key, 0) + 1
    busiest = max((row["client_busy"] for row in result["rows"]), default=0.0)
    step_ms = settings.get("step_ms")
    device = result["device"] if step_ms is None else f"no model, {step_ms:g} ms a step"
    starts = ", ".join(f"{LABELS[side]} {start_up[side]:.1f} s" for side in (HOST, STOCK) if side in start_up)
    return (
        f"Medians of {turns_text(turns.values() or [0])} turns, {settings['requests']} requests at once or "
        f"{settings['seconds']:g} s of Poisson arrivals, {device}, {settings['model']}, {settings['dtype']}; "
        f"{versions(result)}; start-up {starts}; busiest client process {busiest:.0%} of a core; {command(result)}."
    )


def in_process_bars(rows: Iterable[Row]) -> list[Row]:
    """Return Rose's goals: an even stream under its own load, and a quick first token under vLLM's."""
    by_key = {(row["scene"], row["backend"]): row for row in rows}
    bars = []
    own = by_key.get((OWN_LOAD, "rose"))
    if own is not None:
        tail = own["p99_itl_ms"] / own["p50_itl_ms"]
        bars.append(bar("ITL p99 over its median, own load", tail, MAX_ITL_TAIL, "x"))
    rose, vllm = by_key.get((SAME_LOAD, "rose")), by_key.get((SAME_LOAD, STOCK))
    if rose is not None and vllm is not None:
        for name in FIGURES:
            limit = MAX_TTFT_SHARE if name == "p50_ttft_ms" else 1.0
            bars.append(bar(f"{_behind(name)} over vLLM's, same load", rose[name] / vllm[name], limit, "x"))
    return bars


def in_process_table(result: Result) -> str:
    """Return latencies of both loads, which goals were missed, and every loss at the same load."""
    rows = [
        (
            f"{row['scene']}, {row['request_rate']:,.0f} requests/s",
            LABELS[row["backend"]],
            *(percentiles(row, metric, PERCENTILES) for metric in METRICS),
        )
        for row in result["rows"]
        if row["scene"] != CAPACITY
    ]
    header = ("p50 / p90 / p99 in ms", "", *(metric.upper() for metric in METRICS))
    sides = {row["backend"]: row for row in result["rows"] if row["scene"] == SAME_LOAD}
    lost = (
        f"{LABELS[rose]} behind {LABELS[peer]}, {_behind(name)} "
        f"{milliseconds(sides[rose][name])} against {milliseconds(sides[peer][name])}"
        for rose in ROSE_HOSTS
        for peer in PEERS
        if rose in sides and peer in sides
        for name in FIGURES
        if sides[rose][name] > sides[peer][name]
    )
    verdicts = (missed_goals(result), listed("Losses at the same load, in ms", lost))
    return "\n\n".join((markdown(header, rows), source(result), *verdicts))
