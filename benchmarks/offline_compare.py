"""Compare Rose with other engines side by side: decode steps, offline batches, prompts of mixed lengths.

    python -m benchmarks.offline_compare [--backends rose rose-in-vllm vllm sglang] [--json FILE] [--quick]

rose-in-vllm is vLLM with --attention-backend rose; vllm has FLASH_ATTN and no plug-in loaded. Each engine lives in a
process of its own, all of them at the same time, with a KV cache of the same number of tokens. They take turns, and the
others are stopped meanwhile, so that idle engines take no cores (--no-pause lets them run). Every turn has prompts that
were never seen before. Scenes:

    decode    prompts of 16 tokens, 256 new ones: wall time of one step of the whole engine, from the call to the texts
    offline   prompts of one length at the largest batch
    mixed     prompts of 16 to 512 tokens, 16 to 256 new ones
    nano-vllm the workload of nano-vllm's bench.py, temperature 0.6: 256 prompts of 100 to 1,024 tokens, 133,966 new
              ones; not without being asked for

End-of-text is ignored, so that all engines make the same number of tokens; an engine that does not fails. Engines that
are not installed are named and left out, as are engines that fail; then the status is 1. --compare-SWITCH adds Rose
with that part switched off, --compare-parts what tells the worth of each part inside vLLM. Without --model a random
checkpoint with the shapes of GPT-2 124M is made, or of --shape.

Drafts are engine options, and --compare-drafts adds Rose without them, inside vLLM, or as --compare-host says where
that is not compared. Random weights repeat nothing, so engines are told how often to accept the draft in each place.
Below, steps give three tokens on average, as where an answer copies the prompt; zeros are a text in which nothing is
found:

    D='{"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3,
    "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.81, 0.656, 0.531]}}'
    python -m benchmarks.offline_compare --shape qwen3-0.6b --dtype bfloat16 --backends rose-in-vllm vllm
    --scenes decode --batches 1 32 256 --cases greedy --compare-drafts --engine-options "rose-in-vllm=$D"
    --engine-options "vllm=$D"

A step of the scene decode is then what one more token of each request takes. With --shape llama-8b, and 2.7 tokens a
step, as are published for chat, a random EAGLE-3 head is written beside the random weights for

    D='{"speculative_config": {"method": "eagle3", "model": "eagle3-head", "num_speculative_tokens": 3,
    "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.7415, 0.5498, 0.4077]}}'
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.reports import engines as tables
from benchmarks.reports.text import Result
from benchmarks.support.checkpoint import GPT2_124M, ModelFacts
from benchmarks.support.cli import DEFAULT, at_least
from benchmarks.support.comparison import (
    Kind,
    Sides,
    Workload,
    chosen,
    compare,
    kv_cache_tokens,
    parse_comparison,
)
from benchmarks.support.engines import DRAFTS
from benchmarks.support.timing import spread
from benchmarks.support.turns import Row, Turn
from benchmarks.support.worker_pool import Engines, Worker
from benchmarks.support.workload import MODES, NANO_VLLM_MODE, SAMPLING, NanoVllmRequests, RandomRequests

SWITCHES_INSIDE_VLLM = (
    *("block_manager", "batched_scheduling", "mixed_graphs", "step_graph", "quantized_layers", DRAFTS),
)
SWITCHES = (
    "fused_mlp",
    "fused_sampler",
    "fused_kv_append",
    "fused_add_layernorm",
    "cuda_graph",
    "prefix_cache",
    "token_granular_hits",
    "run_ahead",
    *SWITCHES_INSIDE_VLLM,
)
NANO_VLLM = "nano-vllm"
SCENES = ("decode", "offline", "mixed", NANO_VLLM)
WARM_UP_REQUESTS = 256


@dataclass(frozen=True)
class Case:
    """One thing to time."""

    scene: str
    num_requests: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    mode: str
    short_output_len: int | None = None
    """Decode steps are timed as the difference to a run of so many new tokens."""

    @property
    def name(self) -> str:
        """How people call it."""
        if self.scene == "decode":
            return f"step, {self.num_requests} requests, {self.mode}"
        lengths = f"{_span(self.input_len)} in, {_span(self.output_len)} out"
        return f"{self.scene}, {self.num_requests:,} x {lengths}, {self.mode}"

    @property
    def figure(self) -> str:
        """The figure that is compared; less is better."""
        return "step_ms" if self.scene == "decode" else "duration"

    def workload(self, seed: int) -> RandomRequests | NanoVllmRequests:
        """Return the requests; those of different seeds share no prefix."""
        if self.scene == NANO_VLLM:
            return NanoVllmRequests(self.num_requests, self.input_len[1], seed)
        return RandomRequests(self.num_requests, self.input_len, self.output_len, seed)

    def run(self, worker: Any, seed: int, vocab_size: int) -> dict[str, float]:
        """Return the figures of one run, under the names of ``vllm bench`` where it has one.

        ``step_ms`` is wall time of one decode step of the whole engine, from the call to the texts: the time of a run
        to ``output_len`` tokens less that of a run to ``short_output_len``, over the difference in tokens. Prompts, the
        start and the end of a run cancel out.
        """
        requests, sampling = self.workload(2 * seed).requests(vocab_size), SAMPLING[self.mode]
        long = worker.run(requests, sampling)
        if self.short_output_len is not None:
            fewer = self.workload(2 * seed + 1).shortened(self.num_requests, self.short_output_len)
            short = worker.run(fewer.requests(vocab_size), sampling)
            steps = self.output_len[0] - self.short_output_len
            return {"step_ms": (long["seconds"] - short["seconds"]) / steps * 1e3}
        seconds, tokens = long["seconds"], long["output_tokens"]
        return {
            "duration": seconds,
            "request_throughput": self.num_requests / seconds,
            "output_throughput": tokens / seconds,
            "total_token_throughput": (tokens + sum(map(len, requests.prompts))) / seconds,
        }


def _span(lengths: tuple[int, int]) -> str:
    low, high = lengths
    return str(low) if low == high else f"{low} to {high}"


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """Return what is to be run."""
    prompt, new, short = (8, 24, 4) if options.quick else (16, 256, 16)
    num_prompts, input_len, output_len = options.offline
    mixed_in, mixed_out = ((4, 32), (4, 16)) if options.quick else ((16, 512), (16, 256))
    inputs, outputs = (prompt, prompt), (new, new)
    cases = [
        Case("decode", batch, inputs, outputs, mode, short) for batch in options.batches for mode in MODES
    ]
    inputs, outputs = (input_len, input_len), (output_len, output_len)
    cases += [Case("offline", num_prompts, inputs, outputs, mode) for mode in MODES]
    cases.append(Case("mixed", options.mixed_requests, mixed_in, mixed_out, "greedy"))
    longest = 16 if options.quick else 1024
    span = (min(100, longest), longest)
    cases.append(Case(NANO_VLLM, 16 if options.quick else 256, span, span, NANO_VLLM_MODE))
    wanted = options.cases or [""]
    return [
        case for case in cases if case.scene in options.scenes and any(text in case.name for text in wanted)
    ]


class Offline(Workload):
    """Engines that get all prompts of a case in one call."""

    benchmark = "offline_compare"
    backends = ("rose", "rose-in-vllm", "vllm", "sglang")
    table = staticmethod(tables.offline_table)
    summed_by = ("case",)

    @staticmethod
    def add_options(parser: argparse.ArgumentParser, *, quick: bool) -> None:
        add, number = parser.add_argument, at_least(1)
        batches, mixed = ([1, 4], 16) if quick else ([1, 8, 32, 128, 256], 4096)
        sizes = (8, 32, 8) if quick else (256, 512, 128)
        add("--scenes", nargs="+", choices=SCENES, default=[scene for scene in SCENES if scene != NANO_VLLM])
        add("--batches", type=number, nargs="+", default=batches, metavar="B", help=DEFAULT)
        add("--cases", nargs="+", metavar="TEXT", help="only those with one of these in their names")
        add("--offline", type=number, nargs=3, default=sizes, metavar=("N", "IN", "OUT"), help=DEFAULT)
        add("--mixed-requests", type=number, default=mixed, metavar="N", help=DEFAULT)
        group = parser.add_argument_group("also run Rose with one part switched off")
        for switch in SWITCHES:
            group.add_argument(f"--compare-{switch.replace('_', '-')}", action="store_true")
        where = f"where; inside vLLM only: {', '.join(SWITCHES_INSIDE_VLLM)} {DEFAULT}"
        group.add_argument("--compare-host", choices=tables.ROSE_HOSTS, default="rose", help=where)
        parts = "inside vLLM: attention alone, with the block manager only, and each other part off"
        group.add_argument("--compare-parts", action="store_true", help=parts)

    @staticmethod
    def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        if not chosen_cases(options):
            parser.error(f"--cases: got {options.cases}, no case is called so")

    @staticmethod
    def sides(options: argparse.Namespace) -> Sides:
        sides = Workload.sides(options)
        for switch in SWITCHES:
            if getattr(options, f"compare_{switch}"):
                host = "rose-in-vllm" if switch in SWITCHES_INSIDE_VLLM else options.compare_host
                if switch == DRAFTS and host not in options.backends:
                    host = options.compare_host
                sides[f"{host}, {switch} off"] = (host, [switch])
        if options.compare_parts:
            sides |= {name: ("rose-in-vllm", off) for name, off in tables.PART_SIDES.items()}
        return sides

    def __init__(self, options: argparse.Namespace, facts: ModelFacts) -> None:
        super().__init__(options, facts)
        self._cases = {case.name: case for case in chosen_cases(options)}
        longest = max(case.input_len[1] + case.output_len[1] for case in self._cases.values())
        if longest > facts.max_model_len:
            raise SystemExit(
                f"--scenes, --offline: the longest request has {longest:,} tokens; "
                f"the model takes {facts.max_model_len:,}"
            )
        self.settings = {"kv_cache_tokens": kv_cache_tokens(options, facts), **chosen(options, "repeats")}

    def open(self, logs: Path) -> Engines:
        return Engines(partial(Worker, "offline"), logs)

    def rows_of(self, earlier: Result) -> list[Row]:
        for row in earlier["rows"]:
            if row["case"] not in self._cases:
                raise SystemExit(f"--resume: case: the file has {row['case']!r}, this run has not")
        return super().rows_of(earlier)

    def warm_up(self, engines: Engines) -> None:
        for seed, case in enumerate(self._cases.values(), 1_000_000):
            few = case.workload(seed).shortened(WARM_UP_REQUESTS, case.short_output_len or 8)
            engines.run_all(few.requests(self.vocab_size), SAMPLING[case.mode])

    def phases(self) -> list[list[Kind]]:
        return [[(name, {"case": name}) for name in self._cases]]

    def take(self, worker: Worker, name: str, turn: Turn) -> Row:
        return self._cases[turn.label].run(worker, turn.seed, self.vocab_size)

    def findings(self, start_up_s: dict[str, float]) -> Row:
        rows = [self._with_figures(row) for row in self.summed_up()]
        options = self.options
        has_goals = options.device == "cuda" and options.model is None and options.shape == GPT2_124M
        goals = [*tables.goal_bars(rows), *tables.inside_vllm_bars(rows)] if has_goals else []
        return {
            "start_up_s": max(start_up_s.values(), default=0.0),
            "bars": goals,
            "losses": tables.losses(rows),
            "rows": rows,
        }

    def _with_figures(self, row: Row) -> Row:
        """Return a row with what it is about, and each figure's spread over its turns."""
        case, turns = self._cases[row["case"]], row["turns"]
        return {
            "case": case.name,
            "scene": case.scene,
            "num_requests": case.num_requests,
            "input_len": list(case.input_len),
            "output_len": list(case.output_len),
            "mode": case.mode,
            "backend": row["backend"],
            "figure": case.figure,
            "figures": {name: spread([turn[name] for turn in turns]) for name in turns[0]},
            "turns": turns,
        }


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    return parse_comparison(__doc__, arguments, Offline)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, write; the status is 1 if an engine failed or none was there."""
    return compare(parse_options(arguments))


if __name__ == "__main__":
    sys.exit(main())
