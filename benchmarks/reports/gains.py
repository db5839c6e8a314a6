"""README's tables: what Rose gains inside vLLM on the models that people run, from results of several benchmarks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from benchmarks.reports import engines, serving
from benchmarks.reports.engines import HOST, STOCK
from benchmarks.reports.peers import Fastest
from benchmarks.reports.text import LABELS, Result, markdown, milliseconds

NOT_MEASURED = "–"


class Model(NamedTuple):
    """A row of the first table."""

    name: str
    steps: str
    """Result of ``offline_compare``."""
    batches: tuple[int, ...] = (1, 32, 256)
    """Requests in a step."""
    streams: str | None = None
    """Result of ``online_compare streams``, for the time to first token."""


MODELS = (
    Model("Qwen3 0.6B", "h200/vllm_qwen3.json", streams="h200/streams_qwen3.json"),
    Model("Llama 3.1 8B", "h200/vllm_llama8b_start_1.json", streams="h200/streams_llama8b.json"),
    Model("Llama 3.1 8B, FP8, a scale per row", "h200/vllm_llama8b_fp8.json", (1, 32, 128)),
    Model("Qwen3 8B, FP8, a scale per 128 x 128 block", "h200/vllm_qwen3_8b_fp8.json", (1, 32, 128)),
    Model("Llama 3.1 8B, INT4 (AWQ)", "h200/vllm_llama8b_awq.json", (1, 32, 128)),
    Model("Qwen3 14B, INT4 (AWQ)", "h200/vllm_qwen3_14b_awq.json", (1, 32)),
    Model("Llama 3.1 8B, 3 n-gram drafts", "h200/vllm_ngram_llama8b.json"),
    Model("Llama 3.1 8B, 3 EAGLE-3 drafts", "h200/vllm_eagle3_llama8b.json"),
)
SERVERS = (
    ("Gemma 3 4B", "h200/vllm_gemma3_serving.json"),
    ("gpt-oss 20B", "h200/vllm_gpt_oss_serving.json"),
)
"""Model -> result of ``online_compare poisson``."""


def tables(read: Callable[[str], Result], published: Fastest) -> str:
    """Return both tables with what they show; ``read`` returns a result by the name of its file."""
    rows = []
    for model in MODELS:
        result = read(model.steps)
        ours, theirs, ratios = _steps(result, model.batches, published)
        requests = " / ".join(map(str, model.batches))
        first = _first_token(read(model.streams)) if model.streams else NOT_MEASURED
        rows.append((model.name, requests, ours, theirs, ratios, _throughput(result, published), first))
    steps = markdown(
        ("model", "requests", "step, Rose (ms)", "step, fastest other (ms)", "step", "throughput", "TTFT"),
        rows,
    )
    servers = markdown(
        ("`vllm serve` over HTTP", "TTFT", "TPOT", "throughput"),
        ((name, *_over_loads(read(file), published)) for name, file in SERVERS),
    )
    return f"{steps}\n\n{_ABOUT_STEPS}\n\n{servers}\n\n{_ABOUT_SERVERS}"


_ABOUT_STEPS = (
    "The last three columns are gains: the other engine's time over Rose's, so above 1x Rose is faster. "
    "*Step*: one decode step of the whole engine; with drafts, the time per token of each request, where "
    "3 tokens a step (EAGLE-3: 2.7) are accepted. *Throughput*: a batch of prompts of 512 tokens with 128 "
    "new tokens each, 256 prompts, or 64 for quantized models. *TTFT*: median time to first token of "
    "4,096-token prompts that arrive beside 32 running streams. –: not measured. NVIDIA H200, vLLM 0.32, "
    "random weights, bfloat16 where no format is named. With 128 x 128 blocks, vLLM ran without DeepGEMM, "
    "which it prefers where that is installed. Another engine's time is its fastest in any published run "
    "of the same work and GPU; Rose's is that of one run."
)
_ABOUT_SERVERS = (
    "Gains in medians, from the smallest to the largest at all loads, with shared prefixes. "
    "[Performance](docs/performance/index.md) has every run, with every case in which Rose is slower."
)


def _steps(result: Result, batches: Iterable[int], published: Fastest) -> tuple[str, str, str]:
    """Return Rose's decode steps, those of the fastest peers with their names, and the gains."""
    of_case = engines.by_case(result["rows"])
    ours, best = [], []
    for batch in batches:
        sides = of_case[f"step, {batch} requests, greedy"]
        ours.append(engines.compared(sides[HOST]))
        peers = engines.fastest_peers(result, sides, published)
        best.append(min((time, LABELS[peer]) for peer, time in peers.items()))
    times, names = zip(*best, strict=True)
    theirs = f"{_joined(times)}, {', '.join(dict.fromkeys(names))}"
    ratios = _gains(peer / rose for peer, rose in zip(times, ours, strict=True))
    return _joined(ours), theirs, ratios


def _throughput(result: Result, published: Fastest) -> str:
    for case, sides in engines.by_case(result["rows"]).items():
        if case.startswith("offline"):
            peer = min(engines.fastest_peers(result, sides, published).values())
            return _gains([peer / engines.compared(sides[HOST])])
    return NOT_MEASURED


def _first_token(result: Result) -> str:
    sides = {row["backend"]: row for row in result["rows"] if row["arrivals"] == "fixed"}
    return _gains([sides[STOCK]["p50_ttft_ms"] / sides[HOST]["p50_ttft_ms"]])


def _over_loads(result: Result, published: Fastest) -> list[str]:
    loads = serving.poisson_times(result, published).values()
    found = []
    for figure in ("p50_ttft_ms", "p50_tpot_ms", "output_throughput"):
        times = [of_load[figure] for of_load in loads]
        gains = times if figure == "output_throughput" else [1 / each for each in times]
        found.append(f"{min(gains):.2f}x to {max(gains):.2f}x")
    return found


def _joined(times: Iterable[float]) -> str:
    return " / ".join(map(milliseconds, times))


def _gains(ratios: Iterable[float]) -> str:
    """Return ratios; those below 1 are rounded down, so that what is slower shows it."""
    shown = [math.floor(100 * ratio) / 100 if ratio < 1 else ratio for ratio in ratios]
    return " / ".join(f"{each:.2f}x" for each in shown) + (" (slower)" if min(shown) < 1 else "")
