"""Compare Rose with other engines side by side: decode steps, offline batches, prompts of mixed lengths.

    python -m benchmarks.offline_compare [--backends rose rose-in-vllm vllm sglang] [--json FILE] [--quick]

    rose            the engine of this package
    rose-in-vllm    vLLM with --attention-backend rose
    vllm            vLLM with FLASH_ATTN and no plug-in loaded
    sglang          SGLang

Each engine lives in a process of its own, all of them at the same time, with a KV cache of the same number of tokens.
They take turns, and whose turn it is not is stopped, so that idle ones take no cores (--no-pause lets them run on).
Every turn has prompts that were never seen before. Scenes:

    decode    prompts of 16 tokens, 256 new ones: wall time of one step of the whole engine, from the call to the texts
    offline   prompts of one length at the largest batch
    mixed     prompts of 16 to 512 tokens, 16 to 256 new ones

End-of-text is ignored, so that all engines make the same number of tokens; an engine that does not fails. Engines that
are not installed are named and left out, as are engines that fail; then the status is 1. --compare-SWITCH adds Rose
with that part switched off, --compare-parts what tells the worth of each part inside vLLM. Without --model a random
checkpoint with the shapes of GPT-2 124M is made, or of --shape.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.support import resume
from benchmarks.support.checkpoint import GPT2_124M, ModelFacts, checkpoint, model_facts
from benchmarks.support.compare_options import (
    ROSE_HOSTS,
    add_engine_options,
    engine_options,
    environment,
    set_defaults,
)
from benchmarks.support.compare_parts import PART_SIDES
from benchmarks.support.compare_report import (
    goal_bars,
    inside_vllm_bars,
    losses,
    peer_bars,
    print_comparison,
)
from benchmarks.support.compare_samples import Samples, rows_of, samples_of
from benchmarks.support.compare_scenes import SCENES, Case, cases
from benchmarks.support.pause import only
from benchmarks.support.report import device_name, run_facts, write_json
from benchmarks.support.worker_pool import WorkerError, WorkerPool

BACKENDS = ("rose", "rose-in-vllm", "vllm", "sglang")
SWITCHES = (
    "fused_mlp",
    "fused_sampler",
    "fused_kv_append",
    "fused_add_layernorm",
    "cuda_graph",
    "prefix_cache",
    "token_granular_hits",
    "block_manager",
    "run_ahead",
    "batched_scheduling",
    "mixed_graphs",
)
SWITCHES_INSIDE_VLLM = ("block_manager", "batched_scheduling", "mixed_graphs")


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--batches", type=int, nargs="+", metavar="B", help="default: 1 8 32 128 256")
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="TEXT",
        help="only those with one of these in their names (default: all)",
    )
    parser.add_argument(
        "--offline", type=int, nargs=3, metavar=("N", "IN", "OUT"), help="default: 256 512 128"
    )
    parser.add_argument("--mixed-requests", type=int, metavar="N", help="default: 4096")
    parser.add_argument("--repeats", type=int, default=3, help="turns of every engine (default: %(default)s)")
    parser.add_argument("--mixed-repeats", type=int, help="the same for the mixed scene (default: --repeats)")
    parser.add_argument(
        "--max-seconds", type=float, help="begin no other case after this time, and report what is there"
    )
    resume.add_option(parser)
    add_engine_options(parser, BACKENDS)
    group = parser.add_argument_group("also run Rose with one part switched off")
    for switch in SWITCHES:
        group.add_argument(f"--compare-{switch.replace('_', '-')}", action="store_true")
    group.add_argument(
        "--compare-host",
        choices=ROSE_HOSTS,
        default="rose",
        help=f"where; inside vLLM only: {', '.join(SWITCHES_INSIDE_VLLM)} (default: %(default)s)",
    )
    group.add_argument(
        "--compare-parts",
        action="store_true",
        help="inside vLLM: attention alone, with the block manager only, and each other part off",
    )
    options = parser.parse_args(arguments)
    set_defaults(options)
    quick = options.quick
    options.batches = options.batches or ([1, 4] if quick else [1, 8, 32, 128, 256])
    options.offline = tuple(options.offline or ((8, 32, 8) if quick else (256, 512, 128)))
    if options.mixed_requests is None:
        options.mixed_requests = 16 if quick else 4096
    options.mixed_repeats = options.repeats if options.mixed_repeats is None else options.mixed_repeats
    for name in ("repeats", "mixed_repeats", "mixed_requests"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(options, name)}, at least 1")
    for name in ("batches", "offline"):
        if min(getattr(options, name)) < 1:
            parser.error(f"--{name}: got {list(getattr(options, name))}, each has to be at least 1")
    if not chosen_cases(options):
        parser.error(f"--cases: got {options.cases}, no case is called so")
    return options


def sides_of(options: argparse.Namespace) -> dict[str, tuple[str, list[str]]]:
    """Return side -> backend and switched-off parts."""
    sides: dict[str, tuple[str, list[str]]] = {backend: (backend, []) for backend in options.backends}
    for switch in SWITCHES:
        if getattr(options, f"compare_{switch}"):
            host = "rose-in-vllm" if switch in SWITCHES_INSIDE_VLLM else options.compare_host
            sides[f"{host}, {switch} off"] = (host, [switch])
    if options.compare_parts:
        sides |= {name: ("rose-in-vllm", off) for name, off in PART_SIDES.items()}
    return sides


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """Return what is to be run."""
    found = cases(
        options.scenes,
        options.batches,
        offline=options.offline,
        num_mixed=options.mixed_requests,
        quick=options.quick,
    )
    wanted = options.cases or [""]
    return [case for case in found if any(text in case.name for text in wanted)]


def warm_up(pool: WorkerPool, todo: Sequence[Case]) -> None:
    """Let all engines compile what they need, at the same time."""
    for seed, case in enumerate(todo):
        pool.ask_all("generate", workload=case.warm_up(1_000_000 + seed).as_json())
    pool.ask_all("wake")


def measure(
    pool: WorkerPool, todo: Sequence[Case], options: argparse.Namespace, samples: Samples, deadline: float
) -> int:
    """Add every turn's figures to ``samples``, and return how many turns there was no time for.

    Args:
        samples: by case and side; turns that are there already are not taken again.
        deadline: in ``time.monotonic``'s seconds. An interrupt is one, too: turns that were whole stay.
    """
    num_taken = {case: len(turns) for (case, _), turns in samples.items()}
    repeats = {case: options.mixed_repeats if case.scene == "mixed" else options.repeats for case in todo}
    turns = [
        (repeat, case)
        for repeat in range(max(repeats.values()))
        for case in todo
        if num_taken.get(case, 0) <= repeat < repeats[case]
    ]
    columns = (TextColumn("{task.description:52}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(turns) * len(pool.workers))
        for seed, (repeat, case) in enumerate(turns):
            if time.monotonic() > deadline:
                return len(turns) - seed
            # Nobody is always the first, while the device is cold.
            names = deque(pool.workers)
            names.rotate(-repeat)
            taken: dict[str, Any] = {}
            try:
                for name in list(names):
                    progress.update(task, description=f"{name}: {case.name}"[:52])
                    try:
                        with only(name, pool.workers, pause=options.pause) as worker:
                            taken[name] = case.run(worker, seed)
                    except WorkerError as error:
                        pool.drop(name, error)
                    progress.advance(task)
            except KeyboardInterrupt:
                return len(turns) - seed
            for name, figures in taken.items():
                samples.setdefault((case, name), []).append(figures)
    return 0


def run(options: argparse.Namespace, model: str, facts: ModelFacts, deadline: float) -> dict[str, Any]:
    """Start the engines, let them take turns, and return the report."""
    todo = chosen_cases(options)
    start = time.monotonic()
    facts_of_run = _facts(options, facts)
    earlier = resume.earlier_report(options.resume, facts_of_run)
    samples = samples_of(earlier, todo)
    with WorkerPool("offline", options.logs) as pool:
        for name, (backend, switches_off) in sides_of(options).items():
            pool.add(
                name,
                backend,
                engine_options(options, backend, model, facts, switches_off),
                vocab_size=facts.vocab_size,
                **environment(options, backend),
            )
        with Console(stderr=True).status("starting engines"):
            pool.wait_until_started()
            start_up_s = time.monotonic() - start
            resume.check_engines(earlier, pool.facts)
            warm_up(pool, todo)
        warm_up_s = time.monotonic() - start - start_up_s
        turns_left_out = measure(pool, todo, options, samples, deadline)
    rows = rows_of(samples)
    has_goals = options.device == "cuda" and options.model is None and options.shape == GPT2_124M
    goals = [*goal_bars(rows), *inside_vllm_bars(rows)] if has_goals else []
    report = {
        **facts_of_run,
        "start_up_s": start_up_s,
        "warm_up_s": warm_up_s,
        "backends": pool.facts,
        "missing": pool.missing,
        "failed": pool.failed,
        "turns_left_out": turns_left_out,
        "bars": [*goals, *peer_bars(rows)],
        "losses": losses(rows),
        "rows": rows,
    }
    return resume.with_runs(report, earlier)


def _facts(options: argparse.Namespace, facts: ModelFacts) -> dict[str, Any]:
    """Return what is known before any engine starts."""
    return {
        "benchmark": "offline_compare",
        **run_facts(),
        "device": device_name(options.device),
        "settings": {
            "model": options.model_name,
            "dtype": options.dtype,
            "max_num_seqs": options.max_num_seqs,
            "kv_cache_tokens": options.kv_cache_tokens or options.max_num_seqs * facts.max_model_len,
            "repeats": options.repeats,
            "mixed_repeats": options.mixed_repeats,
            "pause": options.pause,
            "quick": options.quick,
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, write; the status is 1 if an engine failed or none was there."""
    options = parse_options(arguments)
    deadline = time.monotonic() + (options.max_seconds or float("inf"))
    with checkpoint(options.model, options.shape, small=options.quick) as model:
        report = run(options, model, model_facts(model), deadline)
    print_comparison(Console(width=140), report)
    if options.json:
        write_json(options.json, report)
    return int(bool(report["failed"]) or not report["rows"])


if __name__ == "__main__":
    sys.exit(main())
