"""Results that no table of docs/performance shows, each in a line: what it shows, its main figures and every loss."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.reports import engines, parts
from benchmarks.reports.engines import HOST, STOCK
from benchmarks.reports.peers import Fastest
from benchmarks.reports.text import LABELS, Result, grouped, medians, milliseconds


class Run(NamedTuple):
    """A result without a table."""

    what: str
    say: Callable[[Result, Fastest], str] | None = None
    """Return sentences with figures of the result; ratios are to the fastest published medians."""


def verdict_of(table: Callable[[Result], str]) -> Callable[[Result, Fastest], str]:
    """Return what says the losses of a result, as the table that ``table`` makes of it would."""

    def say(result: Result, _: Fastest) -> str:
        found = re.search(r"\n\n(?:Medians|Shares)\b[^\n]*\n\n(.*)\Z", table(result), re.DOTALL)
        if found is None:
            raise ValueError(f"{table}: no losses below the table")
        return found[1].replace(":\n\n- ", ": ").replace("\n- ", "; ").removesuffix(".") + "."

    return say


def offline(result: Result, published: Fastest) -> str:
    """Return how many times Rose's time the fastest peer takes, from the smallest to the largest, and losses."""
    times = [best.times for best in engines.best_peers(result, published).values()]
    of = f"{engines.ratio_label(result)}: {min(times):.2f}x to {max(times):.2f}x. "
    return of + verdict_of(engines.offline_table)(result, published)


def request_kinds(result: Result, published: Fastest) -> str:
    """Return plain steps of both sides, and losses."""
    steps = {
        key: milliseconds(statistics.median(row["step_ms"] for row in rows))
        for key, rows in grouped(result["rows"], "scene", "backend", "num_requests").items()
    }
    batches = dict.fromkeys(batch for _, _, batch in steps)
    sides = (
        f"{LABELS[side]} {' / '.join(steps[engines.PLAIN, side, batch] for batch in batches)} ms"
        for side in (HOST, STOCK)
    )
    of = f"A step of {' / '.join(map(str, batches))} requests: {', '.join(sides)}. "
    return of + verdict_of(engines.request_kinds_table)(result, published)


def start_up(result: Result, _: Fastest) -> str:
    """Return seconds until an engine is ready, and the tokens that its KV cache holds."""
    sides = []
    for (backend, caches), rows in grouped(result["rows"], "backend", "caches").items():
        median = medians(rows, engines.START_UP)
        ready, room = f"ready after {median['ready_s']:.1f} s", f"{median['kv_cache_tokens']:,.0f} tokens"
        sides.append(f"{LABELS[backend]}, {caches}: {ready}, room for {room}")
    return "; ".join(sides) + "."


_copies = verdict_of(parts.variants_table)
_GONE = "; commit 29b54d5 was the last with the script"
_WAITING = "what it is worth to wait for a prefix that another request computes, {}" + _GONE
OTHER_RUNS: dict[str, Run] = {
    "h200/qwen3_modes.json": Run("steps of Qwen3 0.6B without vLLM, greedy and drawn"),
    "h200/standalone_before_after.json": Run(
        "the standalone engine before and after a redesign, with the script that compared them"
    ),
    "h200/start_up_gpt2.json": Run("starts without vLLM, GPT-2", start_up),
    "h200/start_up_qwen3.json": Run("starts without vLLM, Qwen3 0.6B", start_up),
    "h100/start_up_gpt2.json": Run("starts without vLLM, GPT-2", start_up),
    "h100/start_up_qwen3.json": Run("starts without vLLM, Qwen3 0.6B", start_up),
    "h200/start_up_gemma3_before.json": Run(
        "starts inside vLLM, Gemma 3 4B, before logits lay in the memory of the graphs' activations", start_up
    ),
    "h200/start_up_gemma3.json": Run("starts inside vLLM, Gemma 3 4B, since then", start_up),
    "h200/kv_cow_clone_float32.json": Run("copies of KV blocks in float32", _copies),
    "cpu/kv_cow_clone.json": Run("copies of KV blocks on a CPU", _copies),
    "h100/loading.json": Run("how fast 16 GB of weights reach the GPU"),
    "h200/vllm_step_profile_gpt2_vllm.json": Run("where steps of GPT-2 go in vLLM without Rose"),
    "h100/vllm_step_profile_gpt2_rose.json": Run("where steps of GPT-2 go inside vLLM with Rose"),
    "h100/vllm_step_profile_qwen3_rose.json": Run("where steps of Qwen3 0.6B go inside vLLM with Rose"),
    "h100/step_profile_qwen3.json": Run("where a decode step of Qwen3 0.6B goes without vLLM"),
    "h200/step_profile_llama8b.json": Run(
        "where a decode step of Llama 8B goes without vLLM, before attention took less time with 50 requests and more"
    ),
    "h100/tune_decode_layer_qwen3.json": Run(
        "the search for tile configurations of Qwen3 0.6B's kernels at 32 rows"
    ),
    "h100/sampler.json": Run("the sampler, with its rare searches called"),
    "h100/sampler_inlined.json": Run("the sampler, with its rare searches inlined"),
    "cpu/vllm_scheduler.json": Run("vLLM's scheduler beside Rose's" + _GONE),
    "h200/waiting.json": Run(_WAITING.format("without vLLM")),
    "h200/waiting_in_vllm_llama.json": Run(_WAITING.format("inside vLLM")),
    "h200/streaming.json": Run("streams" + _GONE),
}
"""File in benchmarks/results -> what it shows."""
