"""Compare answers to prompts that are computed whole with answers after a prefix hit that ends at a random token.

    python -m benchmarks.hit_differences [--shape qwen3-0.6b] [--backends rose rose-in-vllm vllm] [--prompts 5000]

One request at a time, greedy, with log-probabilities. Each prompt is computed whole, whole again, which shows what
differs without a hit, and after a request that left a random part of it in the cache. Log-probabilities are compared up
to the first token that differs: later ones are of other texts. Stock vLLM's hits end at whole blocks. Why answers
differ is in docs/how_it_works/kernels.md, "Order of sums".
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median

import numpy as np
from rich.console import Console

from benchmarks.reports.text import LABELS, Row, markdown, publish
from benchmarks.support.checkpoint import ModelFacts, checkpoint, model_facts
from benchmarks.support.cli import at_least, new_parser
from benchmarks.support.comparison import add_engine_options, chosen, engine_options, set_engine_defaults
from benchmarks.support.engines import Answer, EngineOptions
from benchmarks.support.run_facts import device_name, run_facts
from benchmarks.support.worker_pool import EngineError, Engines, Worker
from benchmarks.support.workload import RandomRequests

BACKENDS = ("rose", "rose-in-vllm", "vllm")
KINDS = {"again": "computed again", "hit": "after a hit"}
SAMPLING = {"temperature": 0.0, "logprobs": 5}
MIN_HIT_TOKENS = 4
"""Rose's block manager inside vLLM ignores shorter hits."""


def difference(one: Answer, other: Answer) -> Row:
    """Return how two answers to a prompt differ.

    Returns:
        ``changed_at``: index of the first token that differs, None if none does; ``largest``: largest difference of a
        log-probability that both answers report, up to that place; ``first``: the same at the first place alone.
    """
    places = zip(one.token_ids, other.token_ids, strict=True)
    changed_at = next((index for index, (mine, theirs) in enumerate(places) if mine != theirs), None)
    largest = []
    for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
        largest.append(max(abs(mine[token] - theirs[token]) for token in mine.keys() & theirs.keys()))
        if len(largest) - 1 == changed_at:
            break
    return {"changed_at": changed_at, "largest": max(largest), "first": largest[0]}


def compare(worker: Worker, prompts: Sequence[list[int]], options: argparse.Namespace) -> list[Row]:
    """Return for each prompt its length, the tokens that were to be found and were, and a difference for each kind."""
    rng = np.random.default_rng([options.seed, 1])
    rows = []

    def answer(prompt: list[int], salt: str, num_tokens: int) -> Answer:
        worker.send("answer", prompt, salt, num_tokens, SAMPLING)
        got: Answer = worker.receive()
        return got

    with Console(stderr=True).status("") as status:
        for number, prompt in enumerate(prompts):
            status.update(f"prompt {number + 1} of {len(prompts)}")
            cold, again = (
                answer(prompt, f"{kind}-{number}", options.answer_tokens) for kind in ("cold", "again")
            )
            cut = int(rng.integers(MIN_HIT_TOKENS, len(prompt)))
            # What follows is another token, so that no more of the prompt is found.
            answer([*prompt[:cut], prompt[cut] - 1 or 2], f"hit-{number}", 1)
            hit = answer(prompt, f"hit-{number}", options.answer_tokens)
            if cold.num_cached_tokens or again.num_cached_tokens:
                raise RuntimeError(f"prompt {number} was to be computed whole, but tokens were found")
            differences = {"again": difference(cold, again), "hit": difference(cold, hit)}
            sizes = {"prompt_tokens": len(prompt), "cut": cut, "hit_tokens": hit.num_cached_tokens}
            rows.append({**sizes, **differences})
    return rows


def summary(rows: Sequence[Row]) -> Row:
    """Return what the report says of an engine's prompts; those without a hit count for nothing."""
    hits = [row for row in rows if row["hit_tokens"]]
    found: Row = {
        "prompts": len(rows),
        "hits": len(hits),
        "hits_to_the_token": sum(row["hit_tokens"] == row["cut"] for row in hits),
        "mean_prompt_tokens": mean(row["prompt_tokens"] for row in rows),
        "mean_hit_tokens": mean(row["hit_tokens"] for row in hits) if hits else None,
    }
    for kind in KINDS if hits else ():
        differences = [row[kind] for row in hits]
        changes = [each["changed_at"] for each in differences if each["changed_at"] is not None]
        found[kind] = {
            "bit_equal": sum(each["largest"] == 0.0 and each["changed_at"] is None for each in differences),
            "answers_changed": len(changes),
            "median_changed_at": median(changes) if changes else None,
            "largest_difference": max(each["largest"] for each in differences),
            "median_difference": median(each["largest"] for each in differences),
            "largest_first_difference": max(each["first"] for each in differences),
        }
    return found


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--prompts", type=at_least(1), help="(default: 5000)")
    lengths = "shortest and longest prompt, in tokens (default: 64 960)"
    add("--prompt-tokens", type=at_least(MIN_HIT_TOKENS + 1), nargs=2, metavar=("LOW", "HIGH"), help=lengths)
    add("--answer-tokens", type=at_least(1), help="(default: 32)")
    add("--seed", type=at_least(0), default=0, help="of prompts and of where hits end (default: %(default)s)")
    add_engine_options(parser, BACKENDS)
    options = parser.parse_args(arguments)
    options.kv_cache_tokens = None
    set_engine_defaults(options, BACKENDS)
    usual = (4, [8, 80], 6) if options.quick else (5_000, [64, 960], 32)
    for name, value in zip(("prompts", "prompt_tokens", "answer_tokens"), usual, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    low, high = options.prompt_tokens
    if low > high:
        parser.error(f"--prompt-tokens: got {low} {high}, the first has to be the smaller one")
    return options


def side_options(options: argparse.Namespace, backend: str, model: str, facts: ModelFacts) -> EngineOptions:
    """Return what a process makes its engine from."""
    wanted = engine_options(options, backend, model, facts, [])
    if backend != "rose-in-vllm":
        return wanted
    return replace(
        wanted, extra={"additional_config": {"rose": {"exact_cached_tokens": True}}, **wanted.extra}
    )


def table(report: Row) -> str:
    """Return a row for each engine and kind of second answer."""
    rows = []
    for of_engine in report["rows"]:
        num = of_engine["hits"]
        if not num:
            rows.append((LABELS[of_engine["backend"]], "no hits", *[""] * 4))
            continue
        for kind, label in KINDS.items():
            found = of_engine[kind]
            rows.append(
                (
                    LABELS[of_engine["backend"]],
                    label,
                    f"{found['bit_equal']:,} of {num:,}",
                    f"{found['largest_difference']:.2g}",
                    f"{found['median_difference']:.2g}",
                    f"{found['answers_changed'] / num:.2%}",
                )
            )
    header = ("engine", "second answer", "bit-equal", "largest difference", "median", "answers that change")
    return markdown(header, rows)


def measure(options: argparse.Namespace, model: str) -> tuple[list[Row], dict[str, str]]:
    """Return the summary of each engine that ran, and what went wrong with others."""
    facts = model_facts(model)
    longest = options.prompt_tokens[1] + options.answer_tokens
    if longest > facts.max_model_len:
        raise SystemExit(
            f"--prompt-tokens: a request has {longest:,} tokens; the model takes {facts.max_model_len:,}"
        )
    lengths = tuple(options.prompt_tokens), (options.answer_tokens,) * 2
    prompts = RandomRequests(options.prompts, *lengths, options.seed).requests(facts.vocab_size).prompts
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for backend in options.backends:
        with (
            tempfile.TemporaryDirectory() as logs,
            Engines(partial(Worker, "offline"), Path(logs)) as engines,
        ):
            engines.start({backend: side_options(options, backend, model, facts)})
            failed |= engines.missing | engines.failed
            for worker in engines.running.values():
                try:
                    found = summary(compare(worker, prompts, options))
                except EngineError as error:
                    failed[backend] = str(error)
                else:
                    rows.append({"backend": backend, **found, "facts": engines.facts[backend]})
    return rows, failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, write; the status is 1 if an engine was missing or failed."""
    options = parse_options(arguments)
    with checkpoint(options.model, options.shape, small=options.quick) as model:
        rows, failed = measure(options, model)
    for backend, reason in failed.items():
        print(f"{backend}: {reason}", file=sys.stderr)
    report = {
        "benchmark": "hit_differences",
        **run_facts(),
        "device": device_name(options.device),
        "settings": {
            "model": options.model_name,
            **chosen(
                options, "dtype", "backends", "prompts", "prompt_tokens", "answer_tokens", "seed", "quick"
            ),
        },
        "rows": rows,
        "failed": failed,
    }
    publish(report, table(report), options.json)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
