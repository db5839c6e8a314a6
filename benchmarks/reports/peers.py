"""The fastest median of each peer in all published results, which every ratio to that peer is taken of.

A small model's step waits for the host, and peers wait longer than Rose does: within a run on a slow host a ratio would
say more about the host than about the engines.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

from benchmarks.reports.text import Result, Row, grouped, medians

PEERS = ("vllm", "sglang")
TRACE_FIGURES = ("p50_ttft_ms",)
POISSON_FIGURES = (
    "p50_ttft_ms",
    "p99_ttft_ms",
    "p50_tpot_ms",
    "p99_tpot_ms",
    "output_throughput",
    "prefilled_tokens",
)
"""Of which there are ratios."""
MORE_IS_BETTER = ("output_throughput",)
Fastest = Mapping[Hashable, float]
"""Work of an engine -> the best median that any result has of it."""

NONE: Fastest = {}
"""For a result that is compared within itself, as it is printed after a run."""


def offline_work(result: Result, row: Row) -> Hashable:
    """Return what identifies the work of a row of ``offline_compare``."""
    return (*_engine(result, row["backend"]), row["case"], row["figure"])


def trace_work(result: Result, backend: str, mode: str, scale: float, figure: str) -> Hashable:
    """Return what identifies a figure under a chat trace at one load."""
    trace = result["trace"]
    sent = (trace["source"], trace["num_requests"], trace["seconds"], trace["length_scale"])
    return (*_engine(result, backend), *sent, mode, scale, figure)


def poisson_work(result: Result, backend: str, requests: str, rate: float | None, figure: str) -> Hashable:
    """Return what identifies a figure under Poisson arrivals, or with all requests at once (``rate`` None)."""
    sizes = (result["settings"].get(name) for name in ("requests", "seconds", "step_ms"))
    return (*_engine(result, backend), *sizes, requests, rate, figure)


def fastest(results: Iterable[Result]) -> dict[Hashable, float]:
    """Return the best median of each work of a peer in any of the results."""
    found: dict[Hashable, float] = {}
    for result in results:
        for work, figure, median in _medians(result):
            found[work] = better(figure, median, found.get(work, median))
    return found


def better(figure: str, one: float, other: float) -> float:
    """Return the better one of two values of a figure."""
    return max(one, other) if figure in MORE_IS_BETTER else min(one, other)


def _medians(result: Result) -> Iterator[tuple[Hashable, str, float]]:
    """Yield work, figure and median of all that a result has of peers."""
    rows: list[Row] = result.get("rows", [])
    benchmark = result.get("benchmark")
    if benchmark == "offline_compare":
        for row in rows:
            if row["backend"] in PEERS:
                yield offline_work(result, row), row["figure"], row["figures"][row["figure"]]["median"]
    elif benchmark == "online_compare":
        for (backend, mode, scale), turns in grouped(rows, "backend", "mode", "scale").items():
            for figure, median in medians(turns, TRACE_FIGURES).items() if backend in PEERS else ():
                yield trace_work(result, backend, mode, scale, figure), figure, median
    elif benchmark == "vllm_serving":
        for (backend, requests, rate), turns in grouped(rows, "backend", "set", "rate").items():
            for figure, median in medians(turns, POISSON_FIGURES).items() if backend in PEERS else ():
                yield poisson_work(result, backend, requests, rate, figure), figure, median


def _engine(result: Result, backend: str) -> tuple[Hashable, ...]:
    """Return device, shape, type, engine, release and options: work of others is never compared."""
    settings: dict[str, Any] = result["settings"]
    options = dict((settings.get("engine_options") or {}).get(backend) or {})
    drafter = options.get("speculative_config", {})
    if drafter.get("method") == "ngram_gpu":
        # The same drafts, scheduled otherwise.
        options["speculative_config"] = {**drafter, "method": "ngram"}
    return (
        result["device"],
        settings["model"],
        settings["dtype"],
        backend,
        result["backends"][backend]["version"],
        bool(settings.get("rust_front_end")),
        json.dumps(options, sort_keys=True),
    )
