"""Time requests through Rose's own scheduler: how long they wait, until their first token, and for each further one.

    python -m benchmarks.scheduler [--num-requests 256] [--submit-interval-ms 1] [--prompt TEXT --prompt-repeats 32]
                                   [--max-batch-size 256] [--prefill-max-batch-size 8] [--json FILE] [--quick]

All requests have the same prompt, --prompt repeated --prompt-repeats times, and are sent one every
--submit-interval-ms to the engine in this process, without HTTP. Reported at p50, p95 and p99: queue wait (until a
request gets a row), prefill to first token, TTFT (both together), TPOT, ITL, latency; and throughput. Medians of
--repeat-runs runs after --warmup-runs that do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

from rich.console import Console
from rich.progress import track

from benchmarks.online.timeline import Timeline, latencies, play, statistics_ms
from benchmarks.reports.text import Result, command, markdown, percentiles, publish
from benchmarks.support.checkpoint import checkpoint
from benchmarks.support.cli import add_model_options, check_at_least, fill_in, new_parser, set_model_defaults
from benchmarks.support.run_facts import device_name, run_facts
from rose_backend import AsyncEngine, SamplingParams
from rose_backend.engine.sequence_state import SequenceState
from rose_backend.engine.tokenizer import Tokenizer

METRICS = ("queue_wait", "prefill", "ttft", "tpot", "itl", "latency")
PERCENTILES = (50, 95, 99)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = new_parser(__doc__)
    add_model_options(parser)
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--num-requests", type=int, metavar="N", help="of each run (default: 256)")
    add("--submit-interval-ms", type=float, default=0.0, help=f"between two requests {default}")
    add("--max-batch-size", type=int, default=256, help=f"sequences at once, max_num_seqs {default}")
    add("--warmup-runs", type=int, default=1, help=f"not counted {default}")
    add("--repeat-runs", type=int, default=3, help=f"counted {default}")
    add("--prompt", default="Once upon a time ", help="text of a prompt (default: %(default)r)")
    add("--prompt-repeats", type=int, metavar="N", help="so often (default: 32)")
    add("--max-new-tokens", type=int, metavar="N", help="of each request (default: 128)")
    add(
        "--prefill-max-batch-size",
        type=int,
        metavar="N",
        help="prompts that one step may compute beside --max-batch-size running texts: sets max_num_batched_tokens for "
        "prompts of this length (default: the engine's own)",
    )
    add("--no-prefix-cache", action="store_true", help="compute every prompt from its start")
    add("--no-stop-on-eos", action="store_true", help="go on behind the end-of-text token")
    options = parser.parse_args(arguments)
    set_model_defaults(options)
    fill_in(options, num_requests=(256, 8), prompt_repeats=(32, 4), max_new_tokens=(128, 8))
    if options.quick:
        options.max_batch_size = min(options.max_batch_size, 16)
        options.repeat_runs = min(options.repeat_runs, 2)
    check_at_least(
        parser,
        options,
        1,
        "num_requests",
        "max_batch_size",
        "repeat_runs",
        "prompt_repeats",
        "max_new_tokens",
        "prefill_max_batch_size",
    )
    check_at_least(parser, options, 0, "warmup_runs", "submit_interval_ms")
    return options


def engine_options(options: argparse.Namespace, num_prompt_tokens: int) -> dict[str, Any]:
    """Return the engine's options for prompts of ``num_prompt_tokens`` each."""
    chosen: dict[str, Any] = {
        "device": options.device,
        "dtype": options.dtype,
        "max_num_seqs": options.max_batch_size,
        "prefix_cache": not options.no_prefix_cache,
    }
    if options.prefill_max_batch_size is not None:
        prompts = options.prefill_max_batch_size * num_prompt_tokens
        chosen["max_num_batched_tokens"] = options.max_batch_size + prompts
    return chosen


async def serve(
    engine: AsyncEngine, prompts: Sequence[str], params: SamplingParams, interval_s: float
) -> tuple[list[Timeline], float]:
    """Send requests, one every ``interval_s``; return what each saw, and seconds from the start to the last token."""
    served: dict[str, Timeline] = {}
    fill = SequenceState.fill

    def noting(state: SequenceState, row: int, completion: Any) -> None:
        timeline = served.get(completion.request.request_id)
        if timeline is not None and not timeline.queue_wait:
            timeline.queue_wait = time.perf_counter() - timeline.due
        fill(state, row, completion)

    async def send(prompt: str, max_tokens: int, timeline: Timeline) -> None:
        name = f"request-{len(served)}"
        served[name] = timeline
        async for output in engine.generate(prompt, params, request_id=name):
            num_new = sum(len(text.token_ids) for text in output.outputs) - timeline.num_tokens
            if num_new > 0:
                timeline.saw(num_new)

    due = [index * interval_s for index in range(len(prompts))]
    with mock.patch.object(SequenceState, "fill", noting):
        return await play(send, prompts, [params.max_tokens] * len(prompts), due)


def figures(served: Sequence[Timeline], duration: float) -> dict[str, float]:
    """Return mean, median, deviation and percentiles of each metric in milliseconds, and throughput per second.

    queue_wait: from when a request was due until it got a row. prefill: from then to the first token. ttft: both. tpot:
    the rest of the time over the rest of the tokens. itl: gaps between pieces. latency: to the last token.
    """
    values = latencies(served)
    values["latency"] = values.pop("e2el")
    values["queue_wait"] = [timeline.queue_wait for timeline in served]
    values["prefill"] = [timeline.arrivals[0] - timeline.queue_wait for timeline in served]
    total = sum(timeline.num_tokens for timeline in served)
    return {
        "duration": duration,
        "completed": len(served),
        "total_output_tokens": total,
        "request_throughput": len(served) / duration,
        "output_throughput": total / duration,
        **statistics_ms(values, PERCENTILES),
    }


async def run(options: argparse.Namespace, model: str) -> Result:
    """Make the engine, measure, and return the report."""
    text = options.prompt * options.prompt_repeats
    token_ids = Tokenizer(model).encode(text)
    chosen = engine_options(options, len(token_ids))
    params = SamplingParams(
        temperature=0.0, max_tokens=options.max_new_tokens, ignore_eos=options.no_stop_on_eos
    )
    prompts, interval_s = [text] * options.num_requests, options.submit_interval_ms / 1e3
    engine = AsyncEngine(model, **chosen)
    runs = []
    try:
        num_runs = options.warmup_runs + options.repeat_runs
        for _ in track(range(num_runs), "runs", console=Console(stderr=True)):
            runs.append(figures(*await serve(engine, prompts, params, interval_s)))
    finally:
        await engine.shutdown()
    runs = runs[options.warmup_runs :]
    named = (
        "num_requests",
        "submit_interval_ms",
        "max_new_tokens",
        "no_stop_on_eos",
        "warmup_runs",
        "repeat_runs",
        "quick",
    )
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
        "figures": {name: statistics.median(run[name] for run in runs) for name in runs[0]},
        "runs": runs,
    }


def table(report: Result) -> str:
    """Return one line of latencies, and where they come from."""
    settings, found = report["settings"], report["figures"]
    header = ("p50 / p95 / p99 in ms", *METRICS, "requests/s", "tokens/s")
    cells = (percentiles(found, name, PERCENTILES) for name in METRICS)
    speeds = (f"{found['request_throughput']:,.1f}", f"{found['output_throughput']:,.0f}")
    source = (
        f"{report['device']}, {settings['model']}: {settings['num_requests']} requests of "
        f"{settings['prompt_tokens']} tokens, {settings['max_new_tokens']} new; {command(report)}."
    )
    return f"{markdown(header, [('Rose', *cells, *speeds)])}\n\n{source}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = parse_options(arguments)
    with checkpoint(options.model) as model:
        report = asyncio.run(run(options, model))
    publish(report, table(report), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
