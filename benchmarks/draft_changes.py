"""Time decode steps of a batch whose text changes its kind: drafts of n-grams are right, then wrong, then right again.

    python -m benchmarks.draft_changes [--shape qwen3-0.6b] [--requests 32] [--steps 600] [--json FILE] [--quick]

Rose without vLLM decodes with three drafts for each request: chosen step by step, in all steps, and in none. As random
weights say nothing that could be looked up, drafts are accepted at given rates, and so is what is looked up without
drafts. Each kind of text lasts as many steps.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest import mock

from benchmarks.reports.text import markdown, publish
from benchmarks.support.checkpoint import SHAPES, checkpoint, model_facts
from benchmarks.support.cli import DEFAULT, add_device_options, at_least, new_parser, set_device_defaults
from benchmarks.support.engines import accept_at
from benchmarks.support.run_facts import device_name, run_facts
from benchmarks.support.timing import no_garbage_collection

NUM_DRAFTS = 3
RATES = ((0.81, 0.656, 0.531), (0.05, 0.02, 0.01), (0.81, 0.656, 0.531))
"""How often a request's first, second and third draft is accepted: in copied text, in prose, in copied text."""
SIDES = {"chosen": True, "all": False, "none": None}
"""Drafts of a side's steps, and ``adaptive_drafts``; None: no drafts are asked for."""
WINDOW = 10
"""Steps that a point is the mean of."""
PROMPT_TOKENS = 16


@contextmanager
def accepting(device: str) -> Iterator[Callable[[Sequence[float]], None]]:
    """Yield a function that sets the rates at which drafts of engines that are made meanwhile are accepted."""
    import torch

    from rose_backend.draft_depth import ShadowDrafts
    from rose_backend.engine.drafts import Drafts

    # On the device for captured steps, which read them there.
    on_device, on_host, rng = torch.zeros(NUM_DRAFTS, device=device), [0.0] * NUM_DRAFTS, random.Random(0)

    def look(self: ShadowDrafts[int], requests: Sequence[int]) -> list[bool]:
        chance = rng.random()
        return [chance < rate for rate in on_host]

    def accept(rates: Sequence[float]) -> None:
        on_host[:] = rates
        on_device.copy_(torch.tensor(rates))

    with mock.patch.object(Drafts, "accept", Drafts.accept), mock.patch.object(ShadowDrafts, "look", look):
        accept_at(on_device)
        yield accept


def run(
    llm: Any, options: argparse.Namespace, accept: Callable[[Sequence[float]], None]
) -> list[dict[str, float]]:
    """Return a point for every ``WINDOW`` steps: its first step, tokens per second, drafts of a request in a step."""
    from rose_backend import SamplingParams

    core, depth = llm.core, None
    drafts = core._runner.decoder.drafts
    if drafts is not None and drafts.adaptive is not None:
        depth = drafts.adaptive
    most = PROMPT_TOKENS + len(RATES) * options.steps * (NUM_DRAFTS + 1)
    params = SamplingParams(max_tokens=most - PROMPT_TOKENS, ignore_eos=True, temperature=0.0)
    prompts = [[1 + index, *range(1, PROMPT_TOKENS)] for index in range(options.requests)]
    requests = [core.input_processor.make(prompt, params) for prompt in prompts]
    for request in requests:
        core.add(request)
    while core.stats.generated_tokens < 3 * options.requests:
        core.step()
    points = []
    with no_garbage_collection():
        for of_kind in RATES:
            accept(of_kind)
            for _ in range(options.steps // WINDOW):
                start, tokens, num_drafted = time.perf_counter(), core.stats.generated_tokens, 0
                for _ in range(WINDOW):
                    core.step()
                    if drafts is not None:
                        num_drafted += NUM_DRAFTS if depth is None else depth._chosen
                seconds = time.perf_counter() - start
                points.append(
                    {
                        "step": len(points) * WINDOW,
                        "tokens_per_s": (core.stats.generated_tokens - tokens) / seconds,
                        "drafts": num_drafted / WINDOW,
                    }
                )
    for request in requests:
        core.abort(request.request_id)
    return points


def steps_to_change(points: Sequence[dict[str, float]], num_steps: int) -> list[int | None]:
    """Return after how many steps of each kind of text but the first most drafts, or few, are in use for good.

    For good: in most windows that follow. None: it never is.
    """
    found: list[int | None] = []
    per_kind = num_steps // WINDOW
    for kind in range(1, len(RATES)):
        wants_drafts = RATES[kind][0] > 0.5
        of_kind = points[kind * per_kind : (kind + 1) * per_kind]
        is_right = [(point["drafts"] > NUM_DRAFTS / 2) == wants_drafts for point in of_kind]
        settled = (
            index
            for index in range(per_kind)
            if is_right[index] and sum(is_right[index:]) >= 0.8 * (per_kind - index)
        )
        first = next(settled, None)
        found.append(None if first is None else first * WINDOW)
    return found


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = new_parser(__doc__)
    add_device_options(parser)
    number = at_least(1)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help=f"of random weights {DEFAULT}")
    parser.add_argument("--requests", type=number, help="default: 32")
    parser.add_argument("--steps", type=at_least(WINDOW), help="of each kind of text (default: 600)")
    options = parser.parse_args(arguments)
    set_device_defaults(options)
    options.requests = options.requests or (4 if options.quick else 32)
    options.steps = options.steps or (30 if options.quick else 600)
    return options


def table(report: dict[str, Any]) -> str:
    """Return medians of each side and kind of text, and when the number of drafts followed."""
    per_kind = report["settings"]["steps"] // WINDOW
    rows = []
    for kind, rates in enumerate(RATES):
        of_kind = slice(kind * per_kind, (kind + 1) * per_kind)
        found = [median(each["tokens_per_s"] for each in report["sides"][side][of_kind]) for side in SIDES]
        settled = "" if kind == 0 else str(report["steps_to_change"][kind - 1])
        rows.append((f"{sum(rates):.2f} of 3 accepted", *(f"{each:,.0f}" for each in found), settled))
    return markdown(("text", *(f"{side}, tokens/s" for side in SIDES), "steps until chosen"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all sides, print, write."""
    from rose_backend import LLM

    options = parse_options(arguments)
    sides: dict[str, list[dict[str, float]]] = {}
    with checkpoint(None, options.shape, small=options.quick) as model, accepting(options.device) as accept:
        facts = model_facts(model)
        longest = PROMPT_TOKENS + len(RATES) * options.steps * (NUM_DRAFTS + 1)
        if longest > facts.max_model_len:
            raise SystemExit(
                f"--steps: a request has {longest:,} tokens; the model takes {facts.max_model_len:,}"
            )
        drafter = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_max": 3}
        for side, adaptive in SIDES.items():
            chosen = {} if adaptive is None else {"speculative_config": drafter, "adaptive_drafts": adaptive}
            with LLM(
                model,
                dtype=options.dtype,
                device=options.device,
                max_num_seqs=options.requests,
                max_model_len=longest,
                **chosen,
            ) as llm:
                sides[side] = run(llm, options, accept)
    report = {
        "benchmark": "draft_changes",
        **run_facts(),
        "device": device_name(options.device),
        "settings": {
            "model": options.shape,
            "dtype": options.dtype,
            "requests": options.requests,
            "steps": options.steps,
            "quick": options.quick,
        },
        "rates": RATES,
        "steps_to_change": steps_to_change(sides["chosen"], options.steps),
        "sides": sides,
    }
    publish(report, table(report), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
