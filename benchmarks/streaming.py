"""Time streams that exercise block management, before and after: blocks handled one request at a time, or all at once.

    python -m benchmarks.streaming [--scenes prefix_hit shared_tail rollover] [--num-requests 256] [--json FILE]
                                   [--quick]

    prefix_hit    prompts that continue a cached one inside a block: a prefix hit and a clone each, one new token
    shared_tail   prompts of 65 tokens, four texts each: they share the tail block of one token, and all but the last to
                  write get a clone; two new tokens
    rollover      prompts of 16 tokens, 256 new ones: every stream needs a new block every 16 steps

Blocks have 16 tokens. Each scene runs on two engines in this process that take turns: "one by one" asks the block
manager about one request after the other and copies block by block, layer by layer, as engines with a loop over
requests do; "at once" is Rose. Both must count the clones and prefix hits that the scene is about. Figures as in
benchmarks/scheduler.py.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.support.checkpoint import checkpoint, model_facts
from benchmarks.support.one_by_one import block_management, make_engine
from benchmarks.support.report import device_name, run_facts, write_json
from benchmarks.support.served_requests import RunOptions, figures, serve
from benchmarks.support.serving_report import add_run_options, medians, print_figures, set_run_defaults
from rose_backend import SamplingParams
from rose_backend.engine.engine_stats import EngineStats

QUICK_NEW_TOKENS = 24
SIDES = {"one by one": True, "at once": False}
BLOCK_SIZE, SHARED_TOKENS, OWN_TOKENS, TEXTS = 16, 100, 4, 4
CONTINUED_FIRST = 1
"""First token of the prompt that others continue, and of no other."""


@dataclass(frozen=True)
class Scene:
    """One preset. ``prompts`` takes a turn, a number of requests and the vocabulary's size."""

    max_new_tokens: int
    prompts: Callable[[int, int, int], list[list[int]]]
    num_texts: int = 1
    clones_per_request: int = 0
    cached_tokens_per_request: int = 0


def _continuing(turn: int, count: int, vocab_size: int) -> list[list[int]]:
    rest = np.random.default_rng(1).integers(1, vocab_size, SHARED_TOKENS - 1).tolist()
    # No two continuations begin alike, or a hit would be longer.
    nexts = [1 + (turn * count + index) % (vocab_size - 1) for index in range(count)]
    return [[CONTINUED_FIRST, *rest, *[following] * OWN_TOKENS] for following in nexts]


def _unshared(length: int, half: int) -> Callable[[int, int, int], list[list[int]]]:
    """Return prompts of which no two begin with the same token, as one token in common is a prefix hit.

    Args:
        half: of the vocabulary, 0 or 1, that first tokens are from; another scene has the other one.
    """

    def prompts(turn: int, count: int, vocab_size: int) -> list[list[int]]:
        rng = np.random.default_rng([length, turn])
        num_firsts = (vocab_size - CONTINUED_FIRST - 1) // 2
        first = CONTINUED_FIRST + 1 + half * num_firsts
        tokens: list[list[int]] = rng.integers(1, vocab_size, (count, length)).tolist()
        for index, prompt in enumerate(tokens):
            prompt[0] = first + (turn * count + index) % num_firsts
        return tokens

    return prompts


SCENES = {
    "prefix_hit": Scene(1, _continuing, clones_per_request=1, cached_tokens_per_request=SHARED_TOKENS),
    "shared_tail": Scene(2, _unshared(65, half=0), num_texts=TEXTS, clones_per_request=TEXTS - 1),
    "rollover": Scene(256, _unshared(16, half=1)),
}


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenes", nargs="+", choices=list(SCENES), default=list(SCENES))
    add_run_options(parser, num_requests=256)
    options = parser.parse_args(arguments)
    set_run_defaults(parser, options)
    if options.max_batch_size < TEXTS:
        parser.error(f"--max-batch-size: got {options.max_batch_size}, shared_tail needs {TEXTS}")
    return options


class Contest:
    """Two engines that take turns."""

    def __init__(self, model: str, options: argparse.Namespace) -> None:
        facts = model_facts(model)
        self._vocab_size, self._options = facts.vocab_size, options
        # Twice what all sequences of a full batch can hold: nothing is evicted before it has been used.
        num_blocks = 2 * options.max_batch_size * -(-facts.max_model_len // BLOCK_SIZE) + 1
        settings = {"device": options.device, "dtype": options.dtype, "max_num_seqs": options.max_batch_size,
                    "block_size": BLOCK_SIZE, "num_blocks": num_blocks}  # fmt: skip
        self._engines = {
            side: make_engine(model, one_by_one=one_by_one, **settings) for side, one_by_one in SIDES.items()
        }

    async def run(self, name: str, progress: Callable[[], None]) -> list[dict[str, Any]]:
        """Let both engines take turns at a scene; return one row for each.

        Args:
            progress: called after every turn.
        """
        options = self._options
        await self._begin(SCENES[name])
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for index in range(options.warmup_runs + options.repeat_runs):
            for side in SIDES:
                found = await self._turn(name, side, index)
                if index >= options.warmup_runs:
                    runs[side].append(found)
            progress()
        return [
            {"scene": name, "side": side, **medians(found), "runs": found} for side, found in runs.items()
        ]

    async def close(self) -> None:
        """Stop both engines."""
        for engine in self._engines.values():
            await engine.shutdown()

    async def _begin(self, scene: Scene) -> None:
        """Cache what the prompts of a scene continue."""
        params = [SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)]
        for engine in self._engines.values():
            await serve(engine, scene.prompts(0, 1, self._vocab_size), params, RunOptions())

    async def _turn(self, name: str, side: str, index: int) -> dict[str, float]:
        """Run a scene on one engine, with prompts that it has never seen before."""
        scene, options, engine = SCENES[name], self._options, self._engines[side]
        prompts = scene.prompts(1 + index, options.num_requests, self._vocab_size)
        params = SamplingParams(
            temperature=0.0 if scene.num_texts == 1 else 1.0,
            max_tokens=self._max_new_tokens(scene),
            ignore_eos=True,
            n=scene.num_texts,
            seed=index,
        )
        before = engine.stats
        with block_management(one_by_one=SIDES[side]):
            served, duration = await serve(
                engine, prompts, [params] * len(prompts), RunOptions(options.submit_interval_ms / 1e3)
            )
        self._check(name, side, before, engine.stats)
        return figures(served, duration)

    def _max_new_tokens(self, scene: Scene) -> int:
        return min(scene.max_new_tokens, QUICK_NEW_TOKENS) if self._options.quick else scene.max_new_tokens

    def _check(self, name: str, side: str, before: EngineStats, after: EngineStats) -> None:
        scene, count = SCENES[name], self._options.num_requests
        expected = {
            "clones": count * scene.clones_per_request,
            "cached_tokens": count * scene.cached_tokens_per_request,
            "generated_tokens": count * scene.num_texts * self._max_new_tokens(scene),
        }
        got = {field: getattr(after, field) - getattr(before, field) for field in expected}
        if got != expected:
            raise RuntimeError(f"{name}, {side}: got {got}, the scene is {expected}")


async def measure(options: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """Return one row per scene and side: medians, and the runs."""
    contest = Contest(model, options)
    num_turns = (options.warmup_runs + options.repeat_runs) * len(options.scenes)
    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows = []
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("", total=num_turns)
            for name in options.scenes:
                progress.update(task, description=name)
                rows += await contest.run(name, lambda: progress.advance(task))
    finally:
        await contest.close()
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = parse_options(arguments)
    with checkpoint(options.model) as model:
        rows = asyncio.run(measure(options, model))
    named = (
        "dtype",
        "num_requests",
        "submit_interval_ms",
        "max_batch_size",
        "warmup_runs",
        "repeat_runs",
        "quick",
    )
    report = {
        "benchmark": "streaming",
        **run_facts(),
        "device": device_name(options.device),
        "settings": {"model": options.model_name, **{name: getattr(options, name) for name in named}},
        "rows": rows,
    }
    title = f"{report['device']}, {options.model_name}, {options.num_requests} requests; milliseconds"
    print_figures(Console(width=230), title, [(f"{row['scene']}, {row['side']}", row) for row in rows])
    if options.json:
        write_json(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
