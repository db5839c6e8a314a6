"""Medians, goals, losses and tables of ``online_compare``: a chat trace, Poisson arrivals at servers and in process,
and prompts that arrive beside streams."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

from benchmarks.online.timeline import METRICS, PERCENTILES
from benchmarks.reports import text
from benchmarks.reports.engines import HOST, RATIOS, ROSE_HOSTS, STOCK, source
from benchmarks.reports.peers import NONE, PEERS, Fastest, better, poisson_work, trace_work
from benchmarks.reports.text import LABELS, Result, Row, percentiles
from benchmarks.support.run_facts import bar

FIGURES = {f"p{share}_{name}_ms": f"{name.upper()} p{share}" for name in METRICS for share in PERCENTILES}
"""Latencies of a chat trace and of arrivals in process, and what documents call them."""
COMPARED = {
    **{name: FIGURES[name] for name in ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms")},
    "output_throughput": "output tokens/s",
    "prefilled_tokens": "prefilled tokens",
}
"""Figures of ``vllm serve`` with and without Rose."""
OUTPUTS_APART = "rose-in-vllm, joined_outputs off"
"""Name of the server that tells what ``joined_outputs`` is worth."""
_SERVED = {HOST: LABELS[HOST], OUTPUTS_APART: "the same, `joined_outputs` off", **LABELS}
MIN_THROUGHPUT_TIMES, MAX_EXTRA_START_UP_S = 1.3, 5.0

MIN_ANSWERED_SHARE = 0.95
"""Of the requests that are sent in a second. At a light load, less than all only because the last answers come late."""

CAPACITY, SAME_LOAD, OWN_LOAD = "capacity", "same load", "own load"
MAX_ITL_TAIL, MAX_TTFT_SHARE = 3.0, 1 / 3

FIXED, POISSON = "fixed", "poisson"
"""Arrivals of prompts beside streams."""
GAPS = {
    **{f"p{share}_gap_ms": f"gap p{share}" for share in PERCENTILES},
    "max_gap_ms": "longest gap",
    "gap_tail": "gap p99 / p50",
    **{f"p{share}_ttft_ms": f"TTFT p{share}" for share in (50, 99)},
    "output_throughput": "output tokens/s",
}
"""Figures of streams and of the prompts that arrive meanwhile; output tokens are those of both."""
BUDGET_AUTO = f"{HOST}, step_budget auto"
"""Name of the engine that tells what ``step_budget`` is worth."""
_STREAMED = {
    "rose": LABELS["rose"],
    HOST: LABELS[HOST],
    BUDGET_AUTO: "the same, `step_budget` auto",
    STOCK: LABELS[STOCK],
}
MAX_GAP_TAIL = {FIXED: 1.8}
MAX_TTFT_TIMES = {FIXED: {"p50_ttft_ms": 1.15, "p99_ttft_ms": 1.15}, POISSON: {"p99_ttft_ms": 1.4}}


def _pairs(sides: Mapping[str, Row], peers: Iterable[str], names: Iterable[str]) -> Iterator[Row]:
    """Yield every figure of Rose, in either host, and the same of each peer, at one load."""
    for rose, peer in itertools.product(ROSE_HOSTS, peers):
        for name in names if rose in sides and peer in sides else ():
            pair = {"backend": rose, "peer": peer, "figure": name}
            yield {**pair, "rose": sides[rose][name], "peers": sides[peer][name]}


def _is_loss(pair: Row) -> bool:
    more, less = ("rose", "peers") if pair["figure"] != "output_throughput" else ("peers", "rose")
    return bool(pair[more] > pair[less])


def _shown(figure: str, value: float) -> str:
    if figure == "gap_tail":
        return f"{value:.2f}x"
    return f"{text.milliseconds(value)} ms" if figure.endswith("_ms") else f"{value:,.0f}"


def _verdict(pairs: Iterable[tuple[str, Row]]) -> str:
    """Return every loss among pairs, each with what its load is called."""
    pairs, lost = list(pairs), []
    for load, pair in (found for found in pairs if _is_loss(found[1])):
        ours, theirs = (_shown(pair["figure"], pair[side]) for side in ("rose", "peers"))
        who = f"{load}: {LABELS[pair['backend']]} behind {_SERVED[pair['peer']]}"
        lost.append((who, f"{(FIGURES | COMPARED | GAPS)[pair['figure']]} {ours} against {theirs}"))
    return text.verdict(lost, f"{len(pairs)} comparisons")


def _by_backend(rows: Iterable[Row], names: Iterable[str]) -> dict[str, Row]:
    return {side: text.medians(turns, names) for side, turns in text.grouped(rows, "backend").items()}


def points(rows: Iterable[Row]) -> dict[tuple[str, float], dict[str, Row]]:
    """Return, for each mode and scale of a trace and each backend, every figure's median over its turns."""
    names = (*FIGURES, "request_throughput")
    return {load: _by_backend(turns, names) for load, turns in text.grouped(rows, "mode", "scale").items()}


def _trace_pairs(rows: Iterable[Row]) -> Iterator[Row]:
    for (mode, scale), sides in points(rows).items():
        yield from ({"mode": mode, "scale": scale, **pair} for pair in _pairs(sides, PEERS, FIGURES))


def trace_losses(rows: Iterable[Row]) -> list[Row]:
    """Return every figure at which Rose, in either host, was behind a peer."""
    return list(filter(_is_loss, _trace_pairs(rows)))


def figure_name(name: str, mode: str) -> str:
    """Return the name of a mode's picture in the result ``name``, without its ending."""
    return "_".join((name, *mode.replace(",", "").replace(".", "").split()))


def requests_per_s(result: Result, scale: float) -> float:
    """Return how many requests a second a trace sends at a scale of its sending times."""
    return float(result["trace"]["num_requests"] / (result["trace"]["seconds"] * scale))


def ttft_at(result: Result, scale: float, published: Fastest) -> dict[str, float]:
    """Return each engine's median TTFT in milliseconds under a greedy trace: a peer's fastest published, Rose's own.

    Raises:
        ValueError: the fastest or Rose answer less than ``MIN_ANSWERED_SHARE`` of what is sent: a queue is measured.
    """
    sides, figure = points(result["rows"])["greedy", scale], "p50_ttft_ms"
    found = {}
    for side, figures in sides.items():
        value = figures[figure]
        best = published.get(trace_work(result, side, "greedy", scale, figure), value)
        found[side] = better(figure, value, best)
    compared = [side for side in ROSE_HOSTS if side in sides] + [
        min(filter(sides.get, PEERS), key=found.__getitem__)
    ]
    for side in compared:
        share = sides[side]["request_throughput"] / requests_per_s(result, scale)
        if share < MIN_ANSWERED_SHARE:
            raise ValueError(
                f"scale {scale:g}: {side} answers {share:.0%} of the load, which then is a queue"
            )
    return found


def trace_table(result: Result, name: str = "online_compare") -> str:
    """Return, for each mode, its picture and every latency at every load; then the workload, and every loss.

    ``name`` is what the result's file is called: pictures are named after it.
    """
    backends = [name for name in LABELS if name in result["backends"]]
    figures, parts = points(result["rows"]), []
    for mode in dict.fromkeys(mode for mode, _ in figures):
        rows = []
        for scale in sorted((scale for found, scale in figures if found == mode), reverse=True):
            sides = [figures[mode, scale][name] for name in backends]
            load = f"scale {scale:g}, {requests_per_s(result, scale):,.0f} requests/s"
            rows.append((load, "answered/s", *(f"{side['request_throughput']:,.0f}" for side in sides)))
            for metric in METRICS:
                rows.append(("", metric.upper(), *(percentiles(side, metric, PERCENTILES) for side in sides)))
        alt = f"Latencies of {len(backends)} servers over the load, {mode}{front_end(result)}"
        header = ("p50 / p90 / p99 in ms", "", *(LABELS[name] for name in backends))
        picture = f"![{alt}](../figures/{figure_name(name, mode)}.svg)"
        parts += [f"{mode.capitalize()}:", picture, text.markdown(header, rows)]
    pairs = ((f"{pair['mode']}, scale {pair['scale']:g}", pair) for pair in _trace_pairs(result["rows"]))
    return "\n\n".join((*parts, _trace_source(result), _verdict(pairs)))


def front_end(result: Result) -> str:
    """Return what is told of vLLM's API server where it is not the usual one."""
    return ", vLLM's API server in Rust" if result["settings"].get("rust_front_end") else ""


def _trace_source(result: Result) -> str:
    trace = result["trace"]
    lengths = (
        f"{name} {trace[key]['mean']:.0f} (p50 {trace[key]['p50']:.0f}, p99 {trace[key]['p99']:.0f})"
        for name, key in (("input", "input_length"), ("output", "output_length"))
    )
    turns = map(len, text.grouped(result["rows"], "mode", "scale", "backend").values())
    how = text.caption(result, f"{trace['num_requests']:,} requests each{front_end(result)}", turns=turns)
    return (
        f"{how} Workload: {trace['source']}; all lengths times {trace['length_scale']:g}, {trace['num_left_out']} "
        f"requests left out that do not fit {trace['max_model_len']:,} tokens even so; then tokens on average: "
        f"{', '.join(lengths)}; prefix hits could supply {trace['best_prefix_hit_ratio']:.0%} of the prompt blocks."
    )


def compare(rows: Iterable[Row]) -> list[Row]:
    """Return a row for each set of requests and rate: each backend's medians, and "times", Rose's over vLLM's."""
    found = []
    for (name, rate), turns in text.grouped(rows, "set", "rate").items():
        sides = _by_backend(turns, COMPARED)
        row: Row = {"set": name, "rate": rate, "medians": sides}
        if {HOST, STOCK} <= sides.keys():
            rose, vllm = sides[HOST], sides[STOCK]
            row["times"] = {name: rose[name] / vllm[name] if vllm[name] else None for name in COMPARED}
        found.append(row)
    return found


def poisson_bars(comparison: Iterable[Row], start_up_s: Mapping[str, float]) -> list[Row]:
    """Return every goal of Rose inside vLLM that was measured: nothing slower, and more throughput at saturation."""
    found = []
    for row in (row for row in comparison if "times" in row):
        name, times, sides = row["set"], row["times"], row["medians"]
        if row["rate"] is None:
            goal, throughput = f"{name}, all at once: throughput", times["output_throughput"]
            found.append(bar(goal, throughput, MIN_THROUGHPUT_TIMES, "x", at_least=True))
        else:
            latencies = (figure for figure in COMPARED if figure in FIGURES and times[figure] is not None)
            load = f"{name}, {row['rate']:.1f} a second"
            found += [bar(f"{load}: {figure}", times[figure], 1.0, "x") for figure in latencies]
        if name == "shared-prefix":
            saved = sides[STOCK]["prefilled_tokens"] - sides[HOST]["prefilled_tokens"]
            found.append(bar(f"{name}: fewer tokens prefilled", saved, 1, "tokens", at_least=True))
    if start_up_s.keys() >= {HOST, STOCK}:
        extra = start_up_s[HOST] - start_up_s[STOCK]
        found.append(bar("start-up, longer than vLLM's", extra, MAX_EXTRA_START_UP_S, "s"))
    return found


def poisson_times(result: Result, published: Fastest) -> dict[str, dict[str, float]]:
    """Return, for each load that both sides have, every figure of Rose inside vLLM over vLLM's fastest published."""
    found = {}
    for row in result["comparison"]:
        if "times" in row:
            ours, vllm = (row["medians"][side] for side in (HOST, STOCK))
            best = {
                name: better(
                    name,
                    value,
                    published.get(poisson_work(result, STOCK, row["set"], row["rate"], name), value),
                )
                for name, value in vllm.items()
            }
            found[_load(row)] = {name: ours[name] / best[name] if best[name] else 0.0 for name in COMPARED}
    return found


def _load(row: Row) -> str:
    rate = "all at once" if row["rate"] is None else f"{row['rate']:.0f} requests/s"
    return f"{row['set']}, {rate}"


def poisson_table(result: Result, published: Fastest = NONE) -> str:
    """Return latencies, throughput and prefilled tokens at every load, and every loss.

    Args:
        published: what ratios are taken of, beside the result's own figures.
    """
    rows, pairs, of_vllm = [], [], poisson_times(result, published)
    for row in result["comparison"]:
        load, sides = _load(row), row["medians"]
        for side in filter(sides.get, _SERVED):
            rows.append((load, _SERVED[side], *(_shown(name, sides[side][name]) for name in COMPARED)))
        if times := of_vllm.get(load):
            rows.append((load, "Rose / vLLM", *(f"{times[name]:.2f}x" for name in COMPARED)))
        pairs += [(load, pair) for pair in _pairs(sides, (STOCK, OUTPUTS_APART), COMPARED)]
    how = _poisson_source(result) + (RATIOS.format("") if published else "")
    return text.markdown(("", "", *COMPARED.values()), rows, how, _verdict(pairs))


def _poisson_source(result: Result) -> str:
    settings, start_up = result["settings"], result["start_up_s"]
    turns = map(len, text.grouped(result["rows"], "set", "rate", "backend").values())
    busiest = max((row["client_busy"] for row in result["rows"]), default=0.0)
    starts = ", ".join(f"{LABELS[side]} {start_up[side]:.1f} s" for side in (HOST, STOCK) if side in start_up)
    sent = f"{settings['requests']} requests at once or {settings['seconds']:g} s of Poisson arrivals"
    if settings.get("step_ms") is not None:
        sent += f", no model ({settings['step_ms']:g} ms a step)"
    how = text.caption(result, sent + front_end(result), turns=turns)
    return f"{how} Start-up: {starts}; busiest client process: {busiest:.0%} of a core."


def in_process_bars(rows: Iterable[Row]) -> list[Row]:
    """Return Rose's goals: an even stream under its own load, and a quick first token under vLLM's."""
    scenes = text.grouped(rows, "scene").items()
    at = {scene: {row["backend"]: row for row in of_scene} for scene, of_scene in scenes}
    bars = []
    if own := at.get(OWN_LOAD, {}).get("rose"):
        tail = own["p99_itl_ms"] / own["p50_itl_ms"]
        bars.append(bar("ITL p99 over its median, own load", tail, MAX_ITL_TAIL, "x"))
    for pair in _pairs(at.get(SAME_LOAD, {}), (STOCK,), FIGURES):
        if pair["backend"] == "rose":
            name, times = FIGURES[pair["figure"]], pair["rose"] / pair["peers"]
            limit = MAX_TTFT_SHARE if name == "TTFT p50" else 1.0
            bars.append(bar(f"{name} over vLLM's, same load", times, limit, "x"))
    return bars


def in_process_table(result: Result) -> str:
    """Return latencies of both loads, and every loss at the same load."""
    rows = []
    for row in result["rows"]:
        if row["scene"] != CAPACITY:
            load = f"{row['scene']}, {row['request_rate']:,.0f} requests/s"
            latencies = (percentiles(row, metric, PERCENTILES) for metric in METRICS)
            rows.append((load, LABELS[row["backend"]], *latencies))
    header = ("p50 / p90 / p99 in ms", "", *(metric.upper() for metric in METRICS))
    sides = {row["backend"]: row for row in result["rows"] if row["scene"] == SAME_LOAD}
    lost = _verdict((SAME_LOAD, pair) for pair in _pairs(sides, PEERS, FIGURES))
    return text.markdown(header, rows, source(result), lost)


def streams_bars(rows: Iterable[Row]) -> list[Row]:
    """Return Rose's goals: even streams while prompts arrive, and first tokens that are hardly later than vLLM's."""
    found = []
    for arrivals, of_arrivals in text.grouped(rows, "arrivals").items():
        sides = {row["backend"]: row for row in of_arrivals}
        named = {host: LABELS[host] for host in ROSE_HOSTS}
        named[BUDGET_AUTO] = f"{LABELS[HOST]}, step budget"
        for side in filter(sides.get, named):
            name = f"{arrivals} arrivals, {named[side]}"
            if arrivals in MAX_GAP_TAIL:
                tail, limit = sides[side]["gap_tail"], MAX_GAP_TAIL[arrivals]
                found.append(bar(f"{name}: gaps, p99 over their median", tail, limit, "x"))
            for figure, limit in MAX_TTFT_TIMES[arrivals].items() if STOCK in sides else ():
                times = sides[side][figure] / sides[STOCK][figure]
                found.append(bar(f"{name}: {GAPS[figure]} over vLLM's", times, limit, "x"))
    return found


def streams_table(result: Result) -> str:
    """Return gaps of streams and TTFT of prompts for each kind of arrivals, ratios to vLLM, and every loss."""
    rows, pairs = [], []
    for arrivals, of_arrivals in text.grouped(result["rows"], "arrivals").items():
        sides, what = {row["backend"]: row for row in of_arrivals}, f"{arrivals} arrivals"
        for side in filter(sides.get, _STREAMED):
            rows.append((what, _STREAMED[side], *(_shown(name, sides[side][name]) for name in GAPS)))
        for side in (side for side in _STREAMED if STOCK in sides and side in sides and side != STOCK):
            times = (sides[side][name] / sides[STOCK][name] for name in GAPS)
            label = f"{_STREAMED[side] if side in ROSE_HOSTS else side} / vLLM"
            rows.append((what, label, *(f"{each:.2f}x" for each in times)))
        pairs += [(what, pair) for pair in _pairs(sides, (STOCK,), GAPS)]
    return text.markdown(("", "", *GAPS.values()), rows, _streams_source(result), _verdict(pairs))


def _streams_source(result: Result) -> str:
    settings, rows = result["settings"], result["rows"]
    sent = (
        f"{settings['streams']} streams of up to {settings['stream_tokens']:,} tokens and, for each engine, "
        f"{settings['prompts']} prompts of {settings['prompt_tokens']:,}, {settings['interval']:g} s apart"
    )
    how = text.caption(result, sent, turns=(len(row["turns"]) for row in rows))
    busiest = max((row["client_busy"] for row in rows), default=0.0)
    joined = max((row["tokens_per_piece"] for row in rows), default=0.0)
    return (
        f"{how} Of the gaps the longest is that of all turns, TTFT is of all prompts together. Busiest client: "
        f"{busiest:.0%} of a core; at most {joined:.2f} tokens in a piece on average."
    )
