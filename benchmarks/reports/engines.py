"""Goals, losses and tables of whole engines, of one part switched off, of each part inside vLLM, and of what requests
ask for there."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.reports.peers import NONE, PEERS, Fastest, better, offline_work
from benchmarks.reports.text import (
    LABELS,
    Result,
    Row,
    caption,
    grouped,
    markdown,
    medians,
    milliseconds,
    verdict,
)
from benchmarks.support.run_facts import bar

ROSE_HOSTS = ("rose", "rose-in-vllm")
HOST, STOCK = "rose-in-vllm", "vllm"

# Wall time of one decode step of the standalone engine, GPT-2 124M on one H200.
STEP_LIMITS_MS = {1: 0.25, 8: 0.27, 32: 0.34, 128: 0.60, 256: 0.95}
MAX_SAMPLING_SHARE, MAX_OFFLINE_S = 1.08, 0.30
# The standalone engine's time over a peer's, where more prompts than fit have many lengths.
MIXED_TIMES = {"vllm": 1 / 2, "sglang": 1 / 1.6}
# Rose inside vLLM over vLLM's own time, the same model and GPU.
INSIDE_VLLM_TIMES = {f"step, {n} requests, greedy": share for n, share in ((1, 0.95), (128, 0.6), (256, 0.5))}
INSIDE_VLLM_TIMES["offline, 256 x 512 in, 128 out, greedy"] = 1 / 1.4

# Seconds by which Rose inside vLLM may start later than vLLM alone, and the share of its KV cache.
START_UP_LATER_S, MIN_KV_CACHE_SHARE = {"cold": 10.0, "warm": 3.0}, 0.99
# The rate at which weights reach a GPU over that of reading their files, and how host memory may grow meanwhile.
MIN_LOADING_SHARE, MAX_LOADING_BYTES = 0.80, 2e9

# Of Rose's switches inside vLLM; the others are vLLM's own options under another name.
_FUSED = ["fused_kv_append", "fused_mlp", "fused_add_layernorm", "fused_sampler"]
_SINGLE_PARTS = ["batched_scheduling", *_FUSED, "mixed_graphs"]
PARTS = ("block_manager", *_SINGLE_PARTS)
ONLY_ATTENTION = f"{HOST}, only attention"
ONLY_MANAGER = f"{HOST}, only attention and block_manager"
PART_SIDES = {
    ONLY_ATTENTION: list(PARTS),
    # Without the block manager, parts that need it would be off as well.
    ONLY_MANAGER: _SINGLE_PARTS,
    **{f"{HOST}, {part} off": [part] for part in _SINGLE_PARTS},
}
"""Side -> parts that are switched off. Attention is what ``--attention-backend rose`` chooses: it is always on."""
PAIRS = {
    "attention": (STOCK, ONLY_ATTENTION),
    "block_manager": (ONLY_ATTENTION, ONLY_MANAGER),
    **{part: (f"{HOST}, {part} off", HOST) for part in _SINGLE_PARTS},
}
"""Part -> the side without and the side with it; they differ in nothing else."""
START_UP = ("ready_s", "first_token_s", "kv_cache_tokens")
RATIOS = (
    " Ratios are to a peer's best median in any published run of this work, model, dtype, release and GPU{}; losses "
    "are counted within this run."
)
PLAIN = "plain"
"""Steps of requests that ask for nothing."""
NOISE = 0.02
"""Share of a time by which two sides may differ without a reason: a part within it neither pays nor costs."""


def by_case(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Return case -> backend -> row."""
    return {case: {row["backend"]: row for row in sides} for case, sides in grouped(rows, "case").items()}


def compared(row: Row) -> float:
    """Return the median of the figure that is compared; less is better."""
    median: float = row["figures"][row["figure"]]["median"]
    return median


def _comparisons(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield Rose's time over a peer's for each case, host and peer."""
    for case, sides in by_case(rows).items():
        for rose in filter(sides.get, ROSE_HOSTS):
            for peer in filter(sides.get, PEERS):
                times = compared(sides[rose]) / compared(sides[peer])
                yield {"case": case, "backend": rose, "peer": peer, "times": times}


def losses(rows: Iterable[Row]) -> list[Row]:
    """Return every case in which Rose, in either host, took longer than a peer."""
    return [found for found in _comparisons(rows) if found["times"] > 1]


def goal_bars(rows: Sequence[Row]) -> list[Row]:
    """Return the standalone engine's own goals; they are for GPT-2 124M on one H200 and the default sizes."""
    rose = [row for row in rows if row["backend"] == "rose"]
    steps = {(row["num_requests"], row["mode"]): compared(row) for row in rose if row["scene"] == "decode"}
    bars = []
    for batch, limit in STEP_LIMITS_MS.items():
        greedy, drawn = steps.get((batch, "greedy")), steps.get((batch, "top-k 50, top-p 0.9"))
        if greedy is not None:
            bars.append(bar(f"step, {batch} requests", greedy, limit, "ms"))
            if drawn is not None:
                name = f"sampling over greedy, {batch} requests"
                bars.append(bar(name, drawn / greedy, MAX_SAMPLING_SHARE, "x"))
    for row in rose:
        sizes = (row["num_requests"], row["input_len"], row["output_len"])
        if (row["scene"], row["mode"], *sizes) == ("offline", "greedy", 256, [512, 512], [128, 128]):
            bars.append(bar("offline, 256 x 512 / 128 new", compared(row), MAX_OFFLINE_S, "s"))
    for pair in _comparisons(row for row in rows if row["scene"] == "mixed"):
        if pair["backend"] == "rose":
            name = f"rose over {pair['peer']}, goal: {pair['case']}"
            bars.append(bar(name, pair["times"], MIXED_TIMES[pair["peer"]], "x"))
    return bars


def inside_vllm_bars(rows: Iterable[Row]) -> list[Row]:
    """Return the goals of Rose inside vLLM beyond being no slower, over vLLM's own time in the same run; greedy."""
    return [
        bar(
            f"{HOST}, goal: {case}",
            compared(sides[HOST]) / compared(sides[STOCK]),
            INSIDE_VLLM_TIMES[case],
            "x",
        )
        for case, sides in by_case(rows).items()
        if case in INSIDE_VLLM_TIMES and {HOST, STOCK} <= sides.keys()
    ]


def fastest_peers(result: Result, sides: dict[str, Row], published: Fastest) -> dict[str, float]:
    """Return each peer's figure at one case: its fastest published median, or this result's where none is faster."""
    found = {peer: compared(sides[peer]) for peer in PEERS if peer in sides}
    for peer, own in found.items() if published else ():
        row = sides[peer]
        found[peer] = better(row["figure"], own, published.get(offline_work(result, row), own))
    return found


class BestPeer(NamedTuple):
    """The fastest peer at one case."""

    peer: str
    figure: float
    """Its fastest published median, or that of the result."""
    times: float
    """Its figure over Rose's; Rose's standalone where that is in the result."""


def best_peers(result: Result, published: Fastest) -> dict[str, BestPeer]:
    """Return the fastest peer of each case that has one."""
    found, ours = {}, _ours(result)
    for case, sides in by_case(result["rows"]).items():
        if ours in sides and (peers := fastest_peers(result, sides, published)):
            best = min(peers, key=lambda peer: peers[peer])
            found[case] = BestPeer(best, peers[best], peers[best] / compared(sides[ours]))
    return found


def ratio_label(result: Result) -> str:
    """Return what the ratios of a result are of."""
    theirs = [LABELS[name] for name in LABELS if name in PEERS and name in result["backends"]]
    return f"{theirs[0] if len(theirs) == 1 else 'best peer'} / {LABELS.get(_ours(result), '')}"


def _ours(result: Result) -> str:
    return next((host for host in ROSE_HOSTS if host in result["backends"]), "")


_NAMED = ", given in brackets where it is not this run's"


def offline_table(result: Result, published: Fastest = NONE) -> str:
    """Return every case with all engines, and every loss.

    Args:
        published: what ratios are taken of, beside the result's own figures.
    """
    # With switched-off sides beside them when it is printed; published comparisons of engines have none.
    backends = sorted(result["backends"], key=lambda name: [*LABELS, name].index(name))
    rows, best_of = [], best_peers(result, published)
    for case, sides in by_case(result["rows"]).items():
        ratio = ""
        if best := best_of.get(case):
            ratio = f"{best.times:.2f}x"
            if best.figure != compared(sides[best.peer]):
                unit = "ms" if sides[best.peer]["scene"] == "decode" else "s"
                ratio += f" ({LABELS[best.peer]} {milliseconds(best.figure)} {unit})"
        rows.append((case, *(_cell(sides.get(name)) for name in backends), ratio))
    labels = [LABELS.get(name, name) for name in backends]
    lost = (
        (
            f"{LABELS[loss['backend']]} behind {LABELS[loss['peer']]}",
            f"{loss['case']} ({loss['times']:.2f}x its time)",
        )
        for loss in result["losses"]
    )
    of = f"{sum(1 for _ in _comparisons(result['rows']))} comparisons"
    header = ("", *labels, ratio_label(result))
    return markdown(
        header, rows, source(result) + (RATIOS.format(_NAMED) if published else ""), verdict(lost, of)
    )


def parts_table(result: Result) -> str:
    """Return how much longer each case takes without each part, and every case in which a part does not pay."""
    off = {name: name.split(", ") for name in result["backends"] if name.endswith(" off")}
    switches = {switch.removesuffix(" off"): (name, host) for name, (host, switch) in off.items()}
    pairs = PAIRS if ONLY_ATTENTION in result["backends"] else switches
    cases, idle = by_case(result["rows"]), []
    rows = [
        (f"{LABELS[name]}, all of it", *(_cell(sides[name]) for sides in cases.values()))
        for name in LABELS
        if name in result["backends"]
    ]
    for part, (without, with_it) in pairs.items():
        worth = {case: compared(sides[without]) / compared(sides[with_it]) for case, sides in cases.items()}
        rows.append((f"`{part}`", *(f"{times:.2f}x" for times in worth.values())))
        idle += [
            (f"`{part}`", f"{case} ({times:.3f}x)") for case, times in worth.items() if times < 1 + NOISE
        ]
    some, none = f"Slower with the part, or no gain above {NOISE:.0%},", f"A gain of {NOISE:.0%} or more"
    found = verdict(idle, f"{len(pairs) * len(cases)} cases", some=some, none=none)
    return markdown(("time without / with the part", *cases), rows, source(result), found)


def request_kinds_table(result: Result) -> str:
    """Return steps by what requests ask for, ratios to the plain step of the same start, and every loss."""
    settings, rows, lost = result["settings"], [], []
    points = {
        point: {
            side: [row["step_ms"] for row in of_side] for side, of_side in grouped(found, "backend").items()
        }
        for point, found in grouped(result["rows"], "scene", "num_requests").items()
    }
    for (scene, batch), sides in points.items():
        cells = [scene, str(batch)]
        for side, steps in sides.items():
            times = (step / plain for step, plain in zip(steps, points[PLAIN, batch][side], strict=True))
            cells += [milliseconds(statistics.median(steps)), f"{statistics.median(times):.2f}x"]
        rows.append(cells)
        ours, theirs = (statistics.median(sides.get(side, [0.0])) for side in (HOST, STOCK))
        if ours > theirs > 0:
            lost.append(
                (f"{batch} requests", f"{scene} {milliseconds(ours)} ms against {milliseconds(theirs)} ms")
            )
    header = [name for side in settings["backends"] for name in (f"{LABELS[side]}, ms", "over plain")]
    facts = (result["device"], settings["model"], settings["dtype"])
    how = caption(result, *facts, f"{settings['starts']} starts of each engine")
    return markdown(
        ("requests ask for", "requests", *header), rows, how, verdict(lost, f"{len(rows)} comparisons")
    )


def _cell(row: Row | None) -> str:
    """Return a step in milliseconds, or seconds and throughput of a batch."""
    if row is None:
        return ""
    if row["scene"] == "decode":
        return milliseconds(compared(row)) + " ms"
    tokens = row["figures"]["output_throughput"]["median"]
    return f"{compared(row):.2f} s, {tokens / 1e3:,.0f} k tok/s"


def source(result: Result) -> str:
    """Return what was run, where, how often, and the command that repeats it."""
    turns = (
        len(row["turns"]) if "turns" in row else row["figures"][row["figure"]]["samples"]
        for row in result["rows"]
    )
    return caption(result, turns=turns)


def start_up_bars(rows: Sequence[Row]) -> list[Row]:
    """Return the goals of Rose inside vLLM: how much later than vLLM it is ready, and how large its KV cache is."""
    found = {side: medians(group, START_UP) for side, group in grouped(rows, "backend", "caches").items()}
    bars = []
    for caches, later in START_UP_LATER_S.items():
        ours, stock = found.get((HOST, caches)), found.get((STOCK, caches))
        if ours and stock:
            bars.append(
                bar(f"{caches} start, later than vLLM", ours["ready_s"] - stock["ready_s"], later, "s")
            )
            share = ours["kv_cache_tokens"] / stock["kv_cache_tokens"]
            bars.append(bar(f"KV cache, {caches} start", share, MIN_KV_CACHE_SHARE, "x", at_least=True))
    return bars


def start_up_table(result: Result) -> str:
    """Return seconds to an engine that is ready and to its first token, and the size of the KV cache."""
    rows = []
    for (backend, caches), group in grouped(result["rows"], "backend", "caches").items():
        median, ready = medians(group, START_UP), sorted(row["ready_s"] for row in group)
        cells = (f"{median['ready_s']:.1f} s", f"{ready[0]:.1f} to {ready[-1]:.1f} s")
        rows.append(
            (
                f"{LABELS[backend]}, {caches}",
                *cells,
                f"{median['first_token_s']:.1f} s",
                f"{median['kv_cache_tokens']:,.0f}",
            )
        )
    counts = [len(group) for group in grouped(result["rows"], "backend", "caches").values()]
    header = ("", "ready after", "range", "first token after", "KV cache, tokens")
    return markdown(header, rows, caption(result, turns=counts))


def loading_bars(rows: Sequence[Row]) -> list[Row]:
    """Return the goals of loading weights."""
    bars = []
    for row in rows:
        share = row["load_bytes_per_s"]["median"] / row["read_bytes_per_s"]["median"]
        name = f"loading over reading, {row['caches']} page cache"
        bars.append(bar(name, share, MIN_LOADING_SHARE, "x", at_least=True))
    growth = max((row["memory_growth_max_bytes"] for row in rows), default=0.0)
    return [*bars, bar("host memory that loading takes", growth / 1e9, MAX_LOADING_BYTES / 1e9, "GB")]


def loading_table(result: Result) -> str:
    """Return the rates of reading a checkpoint's files and of loading it, and the host memory that loading takes."""
    rows = []
    for row in result["rows"]:
        read, load = row["read_bytes_per_s"], row["load_bytes_per_s"]
        rates = (f"{each['median'] / 1e9:.2f} GB/s" for each in (read, load))
        share = f"{load['median'] / read['median']:.2f}"
        rows.append((row["caches"], *rates, share, f"{row['memory_growth_max_bytes'] / 1e9:.2f} GB"))
    facts = (f"{result['rows'][0]['num_bytes'] / 1e9:.1f} GB", result["settings"]["model"], result["device"])
    header = ("page cache", "reading the files", "loading", "loading / reading", "host memory")
    return markdown(header, rows, caption(result, *facts, turns=[result["settings"]["repeats"]]))
