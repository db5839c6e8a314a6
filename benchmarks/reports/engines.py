"""Goals, losses and tables of ``offline_compare``: whole engines, one part switched off, each part inside vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.reports.text import Result, Row, command, in_runs, listed, markdown, milliseconds
from benchmarks.support.run_facts import bar

LABELS = {"rose": "Rose", "rose-in-vllm": "Rose in vLLM", "vllm": "vLLM", "sglang": "SGLang"}
ROSE_HOSTS, PEERS = ("rose", "rose-in-vllm"), ("vllm", "sglang")
HOST, STOCK = "rose-in-vllm", "vllm"

# Wall time of one decode step of the standalone engine, GPT-2 124M on one H200.
STEP_LIMITS_MS = {1: 0.25, 8: 0.27, 32: 0.34, 128: 0.60, 256: 0.95}
MAX_SAMPLING_SHARE = 1.08
MAX_OFFLINE_S = 0.30
# The standalone engine's time over a peer's, where more prompts than fit have many lengths.
MIXED_TIMES = {"vllm": 1 / 2, "sglang": 1 / 1.6}
# Rose inside vLLM over vLLM's own time, the same model and GPU.
INSIDE_VLLM_STEP_TIMES = {1: 0.95, 128: 0.6, 256: 0.5}
INSIDE_VLLM_OFFLINE_TIMES = 1 / 1.4

# Of Rose's switches inside vLLM; the others are vLLM's own options under another name.
PARTS = (
    "block_manager",
    "batched_scheduling",
    "fused_kv_append",
    "fused_mlp",
    "fused_add_layernorm",
    "fused_sampler",
    "mixed_graphs",
)
ONLY_ATTENTION = f"{HOST}, only attention"
ONLY_MANAGER = f"{HOST}, only attention and block_manager"
# Without the block manager, parts that need it would be off as well.
_SINGLE_PARTS = [part for part in PARTS if part != "block_manager"]
PART_SIDES = {
    ONLY_ATTENTION: list(PARTS),
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
NOISE = 0.02
"""Share of a time by which two sides may differ without a reason: a part within it neither pays nor costs."""


def by_case(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Return case -> backend -> row."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row["case"], {})[row["backend"]] = row
    return cases


def compared(row: Row) -> float:
    """Return the median of the figure that is compared; less is better."""
    median: float = row["figures"][row["figure"]]["median"]
    return median


def losses(rows: Iterable[Row]) -> list[Row]:
    """Return every case in which Rose, in either host, took longer than a peer."""
    return [
        {"case": case, "backend": rose, "peer": peer, "times": compared(sides[rose]) / compared(sides[peer])}
        for case, sides in by_case(rows).items()
        for rose in ROSE_HOSTS
        for peer in PEERS
        if rose in sides and peer in sides and compared(sides[rose]) > compared(sides[peer])
    ]


def goal_bars(rows: Sequence[Row]) -> list[Row]:
    """Return the standalone engine's own goals; they are for GPT-2 124M on one H200 and the default sizes."""
    rose = [row for row in rows if row["backend"] == "rose"]
    steps = {(row["num_requests"], row["mode"]): compared(row) for row in rose if row["scene"] == "decode"}
    bars = []
    for batch, limit in STEP_LIMITS_MS.items():
        greedy, drawn = steps.get((batch, "greedy")), steps.get((batch, "top-k 50, top-p 0.9"))
        if greedy is not None:
            bars.append(bar(f"step, {batch} requests", greedy, limit, "ms"))
        if greedy is not None and drawn is not None:
            name = f"sampling over greedy, {batch} requests"
            bars.append(bar(name, drawn / greedy, MAX_SAMPLING_SHARE, "x"))
    for row in filter(_is_usual_offline, rose):
        bars.append(bar("offline, 256 x 512 / 128 new", compared(row), MAX_OFFLINE_S, "s"))
    for case, sides in by_case(row for row in rows if row["scene"] == "mixed").items():
        for peer, limit in MIXED_TIMES.items():
            if {"rose", peer} <= sides.keys():
                times = compared(sides["rose"]) / compared(sides[peer])
                bars.append(bar(f"rose over {peer}, goal: {case}", times, limit, "x"))
    return bars


def inside_vllm_bars(rows: Iterable[Row]) -> list[Row]:
    """Return the goals of Rose inside vLLM beyond being no slower, over vLLM's own time in the same run; greedy."""
    bars = []
    for case, sides in by_case(rows).items():
        if not {HOST, STOCK} <= sides.keys():
            continue
        row = sides[HOST]
        limit = INSIDE_VLLM_OFFLINE_TIMES if _is_usual_offline(row) else None
        if row["scene"] == "decode" and row["mode"] == "greedy":
            limit = INSIDE_VLLM_STEP_TIMES.get(row["num_requests"])
        if limit is not None:
            bars.append(bar(f"{HOST}, goal: {case}", compared(row) / compared(sides[STOCK]), limit, "x"))
    return bars


def _is_usual_offline(row: Row) -> bool:
    sizes = (row["num_requests"], row["input_len"], row["output_len"])
    return row["scene"] == "offline" and row["mode"] == "greedy" and sizes == (256, [512, 512], [128, 128])


def offline_table(result: Result, ours: str = "rose", ratio_name: str = "best peer / Rose") -> str:
    """Return every case with all engines, and every loss.

    Args:
        ours: the backend that the best peer is compared with.
    """
    cases = by_case(result["rows"])
    # With switched-off sides beside them when it is printed; published comparisons of engines have none.
    backends = [*(name for name in LABELS if name in result["backends"])]
    backends += [name for name in result["backends"] if name not in LABELS]
    rows = []
    for case, sides in cases.items():
        peers = [compared(sides[peer]) for peer in PEERS if peer in sides]
        ratio = f"{min(peers) / compared(sides[ours]):.2f}x" if peers and ours in sides else ""
        rows.append((case, *(_cell(sides.get(name)) for name in backends), ratio))
    header = ("", *(LABELS.get(name, name) for name in backends), ratio_name)
    return "\n\n".join((markdown(header, rows), source(result), _losses_line(result, len(cases))))


def switches_table(result: Result) -> str:
    """Return how much longer Rose takes with one part switched off, for every case."""
    cases = by_case(result["rows"])
    rows, costs = [], []
    for variant in (name for name in result["backends"] if name.endswith(" off")):
        host, switch = variant.removesuffix(" off").split(", ")
        times = {case: compared(sides[variant]) / compared(sides[host]) for case, sides in cases.items()}
        rows.append((LABELS[host], f"`{switch}`", *(f"{share:.2f}x" for share in times.values())))
        costs += [f"`{switch}` in {case} ({share:.3f}x)" for case, share in times.items() if share < 1.0]
    table = markdown(("time without / with", "", *cases), rows)
    return "\n\n".join((table, source(result), listed("Faster without", costs)))


def parts_table(result: Result) -> str:
    """Return what each part is worth in every case, and which does not pay where."""
    cases = by_case(result["rows"])
    rows = [
        (f"{LABELS[side]}, all of it", *(_cell(sides[side]) for sides in cases.values()))
        for side in (STOCK, HOST)
    ]
    idle, harmful = [], []
    for part, (without, with_it) in PAIRS.items():
        worth = {case: compared(sides[without]) / compared(sides[with_it]) for case, sides in cases.items()}
        rows.append((f"`{part}`", *(f"{times:.2f}x" for times in worth.values())))
        idle += [f"`{part}` in {case}" for case, times in worth.items() if abs(times - 1) <= NOISE]
        harmful += [
            f"`{part}` in {case} ({times:.2f}x)" for case, times in worth.items() if times < 1 - NOISE
        ]
    verdict = (
        listed(f"No difference (within {NOISE:.0%})", idle, "nowhere"),
        listed("Slower with the part", harmful, "nowhere"),
    )
    table = markdown(("time without / with the part", *cases), rows)
    return "\n\n".join((table, source(result), " ".join(verdict)))


def llama_table(result: Result) -> str:
    """Return every case of Rose inside vLLM beside vLLM, and every loss."""
    return offline_table(result, HOST, "vLLM / Rose in vLLM")


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
    settings, turns = result["settings"], _turns(result["rows"]) + in_runs(result)
    where = f"{result['device']}, {settings['model']}, {settings['dtype']}"
    return f"Medians of {turns}, {where}; {versions(result)}; {command(result)}."


def versions(result: Result) -> str:
    """Return each engine and its version."""
    return ", ".join(
        f"{LABELS[name]} {facts['version']}" for name, facts in result["backends"].items() if name in LABELS
    )


def _turns(rows: list[Row]) -> str:
    counts: dict[str, set[int]] = {}
    for row in rows:
        num = len(row["turns"]) if "turns" in row else row["figures"][row["figure"]]["samples"]
        counts.setdefault(row["scene"], set()).add(num)
    everywhere = set().union(*counts.values())
    if len(everywhere) <= 1:
        return f"{next(iter(everywhere), 0)} turns"
    spans = (
        f"{scene}: {' to '.join(str(count) for count in sorted({min(found), max(found)}))}"
        for scene, found in counts.items()
    )
    return f"turns ({', '.join(spans)})"


def _losses_line(result: Result, num_cases: int) -> str:
    lost = (
        f"{LABELS[loss['backend']]} takes {loss['times']:.2f} x {LABELS[loss['peer']]}'s time in {loss['case']}"
        for loss in result["losses"]
    )
    return listed(f"Losses in {num_cases} cases", lost)
