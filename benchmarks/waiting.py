"""Measure what it is worth to wait for a prefix that another request computes in the same step.

    python -m benchmarks.waiting [--host rose | rose-in-vllm] [--shape llama-1b] [--json FILE] [--quick]

Bursts come in at one moment: --sharing requests with --shared tokens in common and a tail of their own, and between
them prompts that share nothing. Each burst is played twice, on an empty prefix cache: those that share wait for the
first of them ("wait"), or all compute what they share ("at once"). Sides are alternated; the engine runs in this
process, one step after the other, and time counts from the first step to the first token as the caller sees it.

TTFT is given for those that share and for the others, with the time of the whole burst and the prompt tokens that were
computed. A threshold chooses a side for each burst: wait if at least so many tokens are shared. Per threshold the
report has the geometric mean of each figure over all bursts, over that of waiting never.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.reports.text import command, markdown, publish
from benchmarks.support.checkpoint import GPT2_124M, SHAPES, checkpoint, model_facts
from benchmarks.support.cli import (
    QUICK_MODEL,
    add_device_options,
    check_at_least,
    engine_options,
    fill_in,
    new_parser,
    set_device_defaults,
)
from benchmarks.support.engines import EngineOptions, rose_options, vllm_options
from benchmarks.support.run_facts import device_name, run_facts
from benchmarks.support.workload import random_prompts
from rose_backend.block_manager.scheduling_policies import MIN_TOKENS_WORTH_WAITING

NEVER = 1 << 30
THRESHOLDS = (16, 32, 48, 64, 100, 128, 256)
FIGURES = (
    "ttft_sharing_p50_ms",
    "ttft_sharing_p90_ms",
    "ttft_others_p50_ms",
    "ttft_others_p90_ms",
    "total_ms",
    "prompt_tokens_computed",
)
SIDES = ("wait", "at once")
MAX_NUM_SEQS = 64
NUM_OTHERS, NEW_TOKENS = 4, 4
OTHER_LEN, QUICK_OTHER_LEN = 128, 16
TAILS, QUICK_TAILS = (32, 512), (8,)


class SteppedRose:
    """The standalone engine in this process, as for callers that wait for each token."""

    def __init__(self, options: EngineOptions) -> None:
        from rose_backend import SamplingParams, __version__
        from rose_backend.config import EngineConfig
        from rose_backend.engine.core import EngineCore

        self._core = core = EngineCore(EngineConfig(**rose_options(options)), is_online=True)
        self._params = SamplingParams
        self.facts: dict[str, Any] = {"version": __version__, "parts": core.feature_status}
        self.manager, self.step = core.manager, core.step
        self.under_way = core._scheduler._admission._in_flight_prefixes
        """Decides which requests wait."""
        self.has_unfinished: Callable[[], bool] = lambda: core.num_unfinished > 0
        self.reset_prefix_cache: Callable[[], bool] = core.manager.reset_prefix_cache

    def add(self, prompts: list[list[int]], num_new_tokens: int) -> list[str]:
        """Queue requests that stream; return their ids."""
        params = self._params(max_tokens=num_new_tokens, temperature=0.0, ignore_eos=True)
        checked = self._core.input_processor.process_all(prompts, [params] * len(prompts))
        requests = [self._core.input_processor.build(each, is_streaming=True) for each in checked]
        for request in requests:
            self._core.add(request)
        return [request.request_id for request in requests]

    def close(self) -> None:
        """Check the books and free the device."""
        self._core.check_integrity()
        self._core.close()


class SteppedVllm:
    """vLLM with Rose inside. Its engine core has to be in this process: ``VLLM_ENABLE_V1_MULTIPROCESSING`` is 0."""

    def __init__(self, options: EngineOptions) -> None:
        from vllm import LLM, SamplingParams, __version__
        from vllm.sampling_params import RequestOutputKind

        self._params, self._delta = SamplingParams, RequestOutputKind.DELTA
        self._engine = engine = LLM(**vllm_options(options, "rose")).llm_engine
        scheduling = engine.vllm_config.scheduler_config
        self.facts: dict[str, Any] = {
            "version": __version__,
            "async_scheduling": scheduling.async_scheduling,
            "max_num_batched_tokens": scheduling.max_num_batched_tokens,
            "cudagraph_mode": str(engine.vllm_config.compilation_config.cudagraph_mode),
        }
        rose = engine.engine_core.engine_core.scheduler.kv_cache_manager
        self.manager, self.under_way = rose.manager, rose._in_flight_prefixes
        self.step, self.has_unfinished = engine.step, engine.has_unfinished_requests
        self.reset_prefix_cache: Callable[[], bool] = engine.reset_prefix_cache
        self._num_requests = 0

    def add(self, prompts: list[list[int]], num_new_tokens: int) -> list[str]:
        """Queue requests that stream; return their ids."""
        params = self._params(
            max_tokens=num_new_tokens, temperature=0.0, ignore_eos=True, output_kind=self._delta
        )
        ids = [str(self._num_requests + index) for index in range(len(prompts))]
        self._num_requests += len(prompts)
        for request_id, prompt in zip(ids, prompts, strict=True):
            self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        return ids

    def close(self) -> None:
        """Check the books and free the device."""
        self.manager.check_integrity()
        self._engine.engine_core.shutdown()


HOSTS: dict[str, Callable[[EngineOptions], Any]] = {"rose": SteppedRose, "rose-in-vllm": SteppedVllm}


@dataclass(frozen=True)
class Burst:
    """Requests that come in together: those that share come in turns with those that do not, sharing ones first."""

    sharing: int
    shared: int
    """Tokens."""
    tail: int
    others: int
    other_len: int

    def prompts(self, vocab_size: int, seed: int) -> tuple[list[list[int]], list[bool]]:
        """Return token ids, and which of them share."""
        (stem,) = random_prompts(1, self.shared, vocab_size, seed)
        tails = random_prompts(self.sharing, self.tail, vocab_size, seed + 1)
        others = random_prompts(self.others, self.other_len, vocab_size, seed + 2)
        queue: list[tuple[list[int], bool]] = []
        for index in range(max(self.sharing, self.others)):
            queue += [(stem + tail, True) for tail in tails[index : index + 1]]
            queue += [(other, False) for other in others[index : index + 1]]
        return [prompt for prompt, _ in queue], [is_sharing for _, is_sharing in queue]


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--host", choices=HOSTS, default="rose", help="(default: %(default)s)")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--model", help="checkpoint; default: random weights")
    weights.add_argument("--shape", choices=SHAPES, default=GPT2_124M, help="(default: %(default)s)")
    add_device_options(parser)
    add("--sharing", type=int, nargs="+", metavar="N", help="default: 2 8 32")
    add("--shared", type=int, nargs="+", metavar="TOKENS", help="default: 16 to 256")
    add("--repeats", type=int, help="of each burst (default: 20; quick: 1)")
    add("--max-seconds", type=float, help="begin no other round of bursts after this time")
    parser.set_defaults(max_num_seqs=MAX_NUM_SEQS, kv_cache_tokens=None, engine_options=[])
    options = parser.parse_args(arguments)
    set_device_defaults(options)
    if options.quick:
        options.model = options.model or QUICK_MODEL
    fill_in(
        options,
        sharing=([2, 8, 32], [3]),
        shared=(list(THRESHOLDS), [16, 40]),
        repeats=(20, 1),
    )
    check_at_least(parser, options, 2, "sharing")
    check_at_least(parser, options, 1, "shared", "repeats")
    if max(options.sharing) + NUM_OTHERS > MAX_NUM_SEQS:
        got = f"got {max(options.sharing)}, at most {MAX_NUM_SEQS - NUM_OTHERS}"
        parser.error(f"--sharing: {got}")
    return options


def play(host: Any, burst: Burst, side: str, vocab_size: int, seed: int) -> dict[str, Any]:
    """Return what one burst took, milliseconds, and the prompt tokens that the prefix cache did not supply."""
    prompts, is_sharing = burst.prompts(vocab_size, seed)
    host.under_way.min_tokens = burst.shared if side == "wait" else NEVER
    if not host.reset_prefix_cache():
        raise RuntimeError("requests still hold blocks")
    stats = host.manager.stats
    before = stats.query_tokens - stats.hit_tokens
    ids = host.add(prompts, NEW_TOKENS)
    firsts: dict[str, float] = {}
    start = time.perf_counter()
    while host.has_unfinished():
        for output in host.step():
            firsts.setdefault(output.request_id, time.perf_counter())
    total_ms = (time.perf_counter() - start) * 1e3
    ttft_ms = (np.array([firsts[request_id] for request_id in ids]) - start) * 1e3
    stats = host.manager.stats
    return {
        "sharing": ttft_ms[is_sharing].tolist(),
        "others": ttft_ms[np.logical_not(is_sharing)].tolist(),
        "total_ms": total_ms,
        "prompt_tokens_computed": int(stats.query_tokens - stats.hit_tokens - before),
    }


def measure(
    host: Any, bursts: list[Burst], vocab_size: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return one row for each burst and side."""
    deadline = time.monotonic() + (options.max_seconds or float("inf"))
    runs: dict[tuple[Burst, str], list[dict[str, Any]]] = {}
    # The first round compiles and captures what the others need.
    for repeat in track(range(-1, options.repeats), console=Console(stderr=True)):
        if repeat > 0 and time.monotonic() > deadline:
            break
        for index, burst in enumerate(bursts):
            seed = 1000 * (1000 * (repeat + 1) + 10 * index)
            for side in SIDES if repeat % 2 else SIDES[::-1]:
                run = play(host, burst, side, vocab_size, seed)
                if repeat >= 0:
                    runs.setdefault((burst, side), []).append(run)
    return [{**asdict(burst), "side": side, **summed_up(found)} for (burst, side), found in runs.items()]


def summed_up(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return percentiles over the requests of all runs, and medians over the runs."""
    figures: dict[str, Any] = {"runs": len(runs)}
    for kind, share in product(("sharing", "others"), (50, 90)):
        values = [value for run in runs for value in run[kind]]
        figures[f"ttft_{kind}_p{share}_ms"] = float(np.percentile(values, share))
    figures["total_ms"] = float(np.median([run["total_ms"] for run in runs]))
    figures["prompt_tokens_computed"] = int(np.median([run["prompt_tokens_computed"] for run in runs]))
    return figures


def by_burst(rows: list[dict[str, Any]]) -> dict[tuple[int, ...], dict[str, dict[str, Any]]]:
    """Return burst -> side -> row."""
    found: dict[tuple[int, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in Burst.__annotations__), {})[row["side"]] = row
    return found


def by_threshold(rows: list[dict[str, Any]], shared: Sequence[int]) -> list[dict[str, Any]]:
    """Return each threshold's figures over those of waiting never, geometric means over all bursts."""
    results = []
    for threshold in sorted(shared):
        logs = [
            [
                np.log((sides["wait"] if base["shared"] >= threshold else base)[name] / base[name])
                for name in FIGURES
            ]
            for sides in by_burst(rows).values()
            for base in [sides["at once"]]
        ]
        means = np.exp(np.mean(logs, 0)).tolist()
        results.append({"threshold": threshold, **dict(zip(FIGURES, means, strict=True))})
    return results


def table(report: dict[str, Any]) -> str:
    """Return wait over at once for each burst, then the thresholds over waiting never."""
    rows = [
        (
            *map(str, burst[:3]),
            *(f"{sides['wait'][name]:.2f} / {sides['at once'][name]:.2f}" for name in FIGURES),
        )
        for burst, sides in by_burst(report["rows"]).items()
    ]
    bursts = markdown(("sharing", "shared", "tail", *FIGURES), rows)
    rows = [
        (f"{row['threshold']} tokens", *(f"{row[name]:.3f}" for name in FIGURES))
        for row in report["thresholds"]
    ]
    settings = report["settings"]
    source = (
        f"wait / at once: {report['device']}, {settings['model']}, {settings['host']}; {command(report)}."
    )
    means = "Over waiting never, geometric means:"
    return "\n\n".join((bursts, source, means, markdown(("wait for", *FIGURES), rows)))


def run(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """Start the engine, measure, and return the report."""
    facts = model_facts(model)
    host = HOSTS[options.host](engine_options(options, options.host, model, facts, []))
    tails, other_len = (QUICK_TAILS, QUICK_OTHER_LEN) if options.quick else (TAILS, OTHER_LEN)
    sizes = product(options.sharing, options.shared, tails)
    bursts = [Burst(*each, NUM_OTHERS, other_len) for each in sizes]
    chosen = host.under_way.min_tokens or MIN_TOKENS_WORTH_WAITING
    try:
        rows = measure(host, bursts, facts.vocab_size, options)
    finally:
        host.close()
    kept = ("host", "dtype", "repeats", "quick")
    return {
        "benchmark": "waiting",
        **run_facts(),
        "device": device_name(options.device),
        "settings": {
            "model": options.model or f"random weights, {SHAPES[options.shape]}'s shapes",
            "threshold_in_force": chosen,
            **{name: getattr(options, name) for name in kept},
        },
        "backends": {options.host: host.facts},
        "thresholds": by_threshold(rows, options.shared),
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = parse_options(arguments)
    # vLLM's engine core stays in this process, where the threshold can be set.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with checkpoint(options.model, options.shape) as model:
        report = run(options, model)
    publish(report, table(report), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
