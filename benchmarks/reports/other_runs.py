"""Results that no table of docs/performance shows, each in a line: what it shows, its main figures and every loss."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.reports import engines, parts, serving
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
    """Return how many times Rose's time the fastest peer takes, and losses."""
    times = [best.times for best in engines.best_peers(result, published).values()]
    of = f"Times, {engines.ratio_label(result)}: {_span(times)}. "
    return of + verdict_of(engines.offline_table)(result, published)


def drafts(result: Result, published: Fastest) -> str:
    """Return how long Rose's steps take with drafts over those without, and the same beside vLLM."""
    return f"{drafts_alone(result, published)} {offline(result, published)}"


def drafts_alone(result: Result, _: Fastest) -> str:
    """Return how long Rose's steps take with drafts over those without."""
    times = [
        engines.compared(sides[HOST]) / engines.compared(sides[f"{HOST}, drafts off"])
        for sides in engines.by_case(result["rows"]).values()
    ]
    return f"Times, Rose in vLLM with drafts / without: {_span(times)}."


def hosts(result: Result, published: Fastest) -> str:
    """Return how long Rose's steps take without vLLM over those inside it, and with drafts over those without."""
    times = [
        engines.compared(sides["rose"]) / engines.compared(sides[HOST])
        for sides in engines.by_case(result["rows"]).values()
    ]
    return f"Times, Rose without vLLM / inside it: {_span(times)}. {drafts_alone(result, published)}"


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


def poisson(result: Result, published: Fastest) -> str:
    """Return Rose's figures over vLLM's, from the smallest to the largest of all loads, and losses."""
    loads = serving.poisson_times(result, published).values()
    sides = (
        f"{serving.COMPARED[figure]} {_span([of_load[figure] for of_load in loads])}"
        for figure in ("p50_ttft_ms", "p50_tpot_ms", "output_throughput")
    )
    return f"Rose / vLLM: {', '.join(sides)}. " + verdict_of(serving.poisson_table)(result, published)


def streams(result: Result, published: Fastest) -> str:
    """Return gaps of streams and waits for first tokens of each engine, and losses."""
    rows = {(row["arrivals"], row["backend"]): row for row in result["rows"]}
    sides = (
        f"{arrivals} arrivals, {LABELS[side]}: gap p99 {milliseconds(row['p99_gap_ms'])} ms, TTFT p50 "
        f"{milliseconds(row['p50_ttft_ms'])} ms"
        for arrivals in dict.fromkeys(arrivals for arrivals, _ in rows)
        for side in LABELS
        if (row := rows.get((arrivals, side)))
    )
    of = "; ".join(sides)
    return f"{of[0].upper()}{of[1:]}. {verdict_of(serving.streams_table)(result, published)}"


def start_up(result: Result, _: Fastest) -> str:
    """Return seconds until an engine is ready, and the tokens that its KV cache holds."""
    sides = []
    for (backend, caches), rows in grouped(result["rows"], "backend", "caches").items():
        median = medians(rows, engines.START_UP)
        ready, room = f"ready after {median['ready_s']:.1f} s", f"{median['kv_cache_tokens']:,.0f} tokens"
        sides.append(f"{LABELS[backend]}, {caches}: {ready}, room for {room}")
    return "; ".join(sides) + "."


def _span(times: Sequence[float]) -> str:
    """Return the smallest and the largest ratio."""
    return " to ".join(dict.fromkeys(f"{each:.2f}x" for each in (min(times), max(times))))


_copies = verdict_of(parts.variants_table)
_GONE = "; commit 29b54d5 was the last with the script"
_WAITING = "the gain from waiting for a prefix that another request computes, {}" + _GONE
OTHER_RUNS: dict[str, Run] = {
    "h200/vllm_trace_rust.json": Run(
        "`vllm serve` with its API server in Rust under the chat trace, GPT-2",
        verdict_of(serving.trace_table),
    ),
    "h200/vllm_serving.json": Run("`vllm serve` at rising loads, GPT-2", poisson),
    "h200/vllm_serving_4_api_servers.json": Run("the same with four API processes", poisson),
    "h200/vllm_gemma3_serving.json": Run(
        "`vllm serve` at rising loads, shared prefixes, Gemma 3 4B", poisson
    ),
    "h200/vllm_gpt_oss_serving.json": Run(
        "`vllm serve` at rising loads, shared prefixes, gpt-oss 20B", poisson
    ),
    "h200/arrivals.json": Run(
        "streams to callers in the engine's process, without HTTP, GPT-2",
        verdict_of(serving.in_process_table),
    ),
    "h200/streams_qwen3.json": Run("prompts of 4,096 tokens beside 32 streams, Qwen3 0.6B", streams),
    # The first start compiled everything, and its time was up before it reached the largest cases.
    **{
        f"h200/vllm_gpt2_start_{number}.json": Run(
            f"steps of GPT-2 inside vLLM, start {number} of 3", offline
        )
        for number in (1, 2, 3)
    },
    "h100/sglang_gpt2.json": Run("steps of GPT-2 inside vLLM beside SGLang", offline),
    "h200/vllm_llama.json": Run("steps of a Llama of 1B inside vLLM, grouped heads of 64 elements", offline),
    **{
        f"h200/vllm_qwen3_start_{number}.json": Run("steps of Qwen3 0.6B, an earlier run", offline)
        for number in (2, 3)
    },
    "h100/vllm_qwen3.json": Run(
        "steps of Qwen3 0.6B inside vLLM, before tile sizes were tuned again", offline
    ),
    "h200/vllm_llama8b_start_2.json": Run("steps of Llama 8B, on another machine and newer sources", offline),
    "h200/vllm_ngram_qwen3.json": Run("three n-gram drafts for each request of Qwen3 0.6B", drafts),
    "h200/vllm_ngram_gpu_llama8b.json": Run(
        "three n-gram drafts for each request of Llama 8B in vLLM without Rose, scheduled ahead (`ngram_gpu`)"
    ),
    "h200/vllm_ngram_7_drafts_llama8b.json": Run(
        "seven n-gram drafts for each request of Llama 8B, three tokens a step", offline
    ),
    "h200/vllm_ngram_1_draft_llama8b.json": Run(
        "one of these drafts in vLLM without Rose, scheduled one step after the other (`ngram`)"
    ),
    "h200/vllm_eagle3_qwen3.json": Run(
        "three drafts of an EAGLE-3 head for each request of Qwen3 0.6B", drafts
    ),
    "h200/vllm_eagle3_llama8b.json": Run(
        "three drafts of an EAGLE-3 head for each request of Llama 8B", drafts
    ),
    "h200/vllm_eagle3_7_drafts_llama8b.json": Run(
        "seven drafts of an EAGLE-3 head for each request of Llama 8B, each as likely to be right as the last",
        offline,
    ),
    "h200/vllm_eagle3_never_right_llama8b.json": Run(
        "three drafts of an EAGLE-3 head for each request of Llama 8B, all wrong", drafts_alone
    ),
    "h200/eagle3_llama8b.json": Run(
        "three drafts of an EAGLE-3 head for each request of Llama 8B, each as likely to be right as the last, "
        "without vLLM and inside it",
        hosts,
    ),
    "h100/vllm_gemma3.json": Run("steps of Gemma 3 4B inside vLLM, sliding windows", offline),
    "h200/vllm_gpt_oss.json": Run(
        "steps of gpt-oss 20B in bfloat16 inside vLLM, windows and experts", offline
    ),
    "h200/vllm_qwen3_8b_fp8.json": Run(
        "steps of Qwen3 8B in float8 with a scale for each block, beside vLLM without DeepGEMM", offline
    ),
    "h200/vllm_qwen3_14b_awq.json": Run("steps of Qwen3 14B in int4 with zeros", offline),
    "h200/vllm_llama8b_int4.json": Run("steps of Llama 8B in int4 without zeros", offline),
    "h200/vllm_llama8b_int4_machete.json": Run(
        "steps of Llama 8B in int4, with vLLM's layers (Machete) around the rest of Rose as a third side",
        offline,
    ),
    "h200/qwen3_30b_a3b_fp8.json": Run("steps of Qwen3 30B-A3B in float8 without vLLM", offline),
    "h200/vllm_adapters_qwen3.json": Run(
        "requests of Qwen3 0.6B with eight LoRA adapters of rank 16 in turns, which adapt all products of the layers",
        request_kinds,
    ),
    "h200/vllm_qwen3_vl.json": Run("text alone to Qwen3-VL 4B inside vLLM", request_kinds),
    "h200/vllm_qwen3_5.json": Run("Qwen3.5 4B inside vLLM, most layers with states", request_kinds),
    "h200/vllm_experts_2_ranks.json": Run(
        "12 layers of Qwen3 30B-A3B inside two vLLM engines on two GPUs that share the experts", offline
    ),
    "h200/offline_mixed.json": Run("batches of more prompts than fit, GPT-2", offline),
    "h200/offline_switches.json": Run(
        "parts of the standalone engine, each switched off alone, GPT-2", verdict_of(engines.parts_table)
    ),
    "cpu/state_hits.json": Run(
        "prefix hits with states of hybrid models", verdict_of(parts.state_hits_table)
    ),
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
    "h200/start_up_llama8b_fp8.json": Run("starts without vLLM, Llama 8B in float8", start_up),
    "h200/kernels_float8_blocks.json": Run(
        "products with Llama 8B's weights in float8 by blocks, 1 to 8,192 rows, without DeepGEMM, which did not load"
    ),
    "h200/kv_cow_clone_float16.json": Run("copies of KV blocks", _copies),
    "h200/kv_cow_clone_float32.json": Run("copies of KV blocks in float32", _copies),
    "h200/kv_append.json": Run("new tokens in the KV cache, with attention", _copies),
    "cpu/kv_cow_clone.json": Run("copies of KV blocks on a CPU", _copies),
    "h100/loading.json": Run("how fast 16 GB of weights reach the GPU"),
    "h200/vllm_step_profile_gpt2_vllm.json": Run("where steps of GPT-2 go in vLLM without Rose"),
    "h100/vllm_step_profile_gpt2_rose.json": Run("where steps of GPT-2 go inside vLLM with Rose"),
    "h100/vllm_step_profile_qwen3_rose.json": Run("where steps of Qwen3 0.6B go inside vLLM with Rose"),
    "h100/step_profile_qwen3.json": Run("where a decode step of Qwen3 0.6B goes without vLLM"),
    "h200/step_profile_qwen3_30b_a3b_fp8.json": Run(
        "where a decode step of Qwen3 30B-A3B in float8 goes without vLLM, before four products got other tiles"
    ),
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
