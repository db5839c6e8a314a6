"""Time requests through Rose's own scheduler: how long they wait, until their first token, and for each further one.

    python -m benchmarks.scheduler [--num-requests 256] [--submit-interval-ms 1] [--prompt TEXT --prompt-repeats 32]
                                   [--max-batch-size 256] [--prefill-max-batch-size 8] [--json FILE] [--quick]

All requests have the same prompt, --prompt repeated --prompt-repeats times, and are sent one every
--submit-interval-ms to the engine in this process, without HTTP. Reported at p50, p95 and p99: queue wait (until a
request gets a row), prefill to first token, TTFT (both together), TPOT, ITL, latency; and throughput. Medians of
--repeat-runs runs after --warmup-runs that do not count. See also benchmarks/streaming.py, which runs three scenes of
its own, and benchmarks/online_compare.py, which compares servers.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.support.checkpoint import checkpoint
from benchmarks.support.report import device_name, run_facts, write_json
from benchmarks.support.served_requests import RunOptions, figures, serve
from benchmarks.support.serving_report import add_run_options, medians, print_figures, set_run_defaults
from rose_backend import AsyncEngine, SamplingParams
from rose_backend.engine.tokenizer import Tokenizer

POLICIES = {"paced": True, "eager": False}
"""--prefill-admission-policy -> the engine's ``pacing``."""


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_options(parser, num_requests=256)
    parser.add_argument(
        "--prompt", default="Once upon a time ", help="text of a prompt (default: %(default)r)"
    )
    parser.add_argument("--prompt-repeats", type=int, metavar="N", help="so often (default: 32)")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="of each request (default: 128)")
    parser.add_argument(
        "--prefill-max-batch-size",
        type=int,
        metavar="N",
        help="prompts that one step may compute beside --max-batch-size running texts: sets max_num_batched_tokens for "
        "prompts of this length (default: the engine's own)",
    )
    parser.add_argument(
        "--prefill-admission-policy",
        choices=list(POLICIES),
        help="paced: no more prompt tokens beside running texts than these can stand without stalling; eager: as many "
        "as a step may compute (default: the engine's own)",
    )
    parser.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt from its start")
    parser.add_argument("--no-stop-on-eos", action="store_true", help="go on behind the end-of-text token")
    parser.add_argument("--pretok", action="store_true", help="make token ids before the clock starts")
    parser.add_argument(
        "--tokenize-workers",
        type=int,
        default=0,
        metavar="N",
        help="threads that make them while requests come; 0: the engine does (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    set_run_defaults(parser, options)
    options.prompt_repeats = options.prompt_repeats or (4 if options.quick else 32)
    options.max_new_tokens = options.max_new_tokens or (8 if options.quick else 128)
    for name in ("prompt_repeats", "max_new_tokens", "prefill_max_batch_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')}: got {value}, at least 1")
    if options.tokenize_workers < 0:
        parser.error(f"--tokenize-workers: got {options.tokenize_workers}, at least 0")
    if options.pretok and options.tokenize_workers:
        parser.error("--tokenize-workers: has nothing to do with --pretok")
    return options


def engine_options(options: argparse.Namespace, num_prompt_tokens: int) -> dict[str, Any]:
    """Return the engine's options.

    Args:
        num_prompt_tokens: of each prompt.
    """
    chosen: dict[str, Any] = {
        "device": options.device,
        "dtype": options.dtype,
        "max_num_seqs": options.max_batch_size,
        "prefix_cache": not options.no_prefix_cache,
    }
    if options.prefill_max_batch_size is not None:
        prompts = options.prefill_max_batch_size * num_prompt_tokens
        chosen["max_num_batched_tokens"] = options.max_batch_size + prompts
    if options.prefill_admission_policy is not None:
        chosen["pacing"] = POLICIES[options.prefill_admission_policy]
    return chosen


async def measure(
    engine: AsyncEngine, options: argparse.Namespace, token_ids: list[int]
) -> list[dict[str, float]]:
    """Return the figures of each run that counts."""
    prompt: Any = token_ids if options.pretok else options.prompt * options.prompt_repeats
    params = SamplingParams(
        temperature=0.0, max_tokens=options.max_new_tokens, ignore_eos=options.no_stop_on_eos
    )
    run_options = RunOptions(options.submit_interval_ms / 1e3, options.tokenize_workers)
    runs = []
    num_runs = options.warmup_runs + options.repeat_runs
    for index in track(range(num_runs), "runs", console=Console(stderr=True)):
        count = options.num_requests
        served, duration = await serve(engine, [prompt] * count, [params] * count, run_options)
        if index >= options.warmup_runs:
            runs.append(figures(served, duration))
    return runs


async def run(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """Make the engine, measure, and return the report."""
    token_ids = Tokenizer(model).encode(options.prompt * options.prompt_repeats)
    chosen = engine_options(options, len(token_ids))
    engine = AsyncEngine(model, **chosen)
    try:
        runs = await measure(engine, options, token_ids)
    finally:
        await engine.shutdown()
    named = ("num_requests", "submit_interval_ms", "max_new_tokens", "pretok", "tokenize_workers",
             "no_stop_on_eos", "warmup_runs", "repeat_runs", "quick")  # fmt: skip
    return {
        "benchmark": "scheduler",
        **run_facts(),
        "device": device_name(options.device),
        "settings": {
            "model": options.model_name,
            "prompt_tokens": len(token_ids),
            **{name: getattr(options, name) for name in named},
            "engine": chosen,
        },
        "figures": medians(runs),
        "runs": runs,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = parse_options(arguments)
    with checkpoint(options.model) as model:
        report = asyncio.run(run(options, model))
    settings = report["settings"]
    title = (
        f"{report['device']}, {settings['model']}: {settings['num_requests']} requests of "
        f"{settings['prompt_tokens']} tokens, {settings['max_new_tokens']} new; milliseconds"
    )
    print_figures(Console(width=220), title, [("Rose", report["figures"])])
    if options.json:
        write_json(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
