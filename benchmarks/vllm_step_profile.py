"""Show where a step inside vLLM goes: wall time, the device's share of it, kernels, and what the host does.

    python -m benchmarks.vllm_step_profile [--backend rose-in-vllm] [--shape qwen3-0.6b] [--batches 1 32 256] [--quick]

One engine, in one process with its front end, so that profilers see all of it. For each number of requests it decodes
behind 16-token prompts; then it takes prompts of --prompt-tokens, each of which gets one token. With --chunks, steps
also compute so many tokens of one prompt beside 32 decodes with a context of the same length. Requests give their
output when it is complete, as those of LLM.generate do. Each is run three times: timed, under torch's profiler for the
device, and under cProfile for the host, which makes Python slower: what its figures say is where the time goes. "idle"
is the wall time of a step less the time in which the device works.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reports.text import markdown, publish
from benchmarks.support.checkpoint import ModelFacts, checkpoint, model_facts
from benchmarks.support.cli import DEFAULT, at_least, new_parser
from benchmarks.support.comparison import add_engine_options, chosen, engine_options, set_engine_defaults
from benchmarks.support.engines import vllm_options
from benchmarks.support.run_facts import device_name, run_facts
from benchmarks.support.timing import no_garbage_collection, timed_us
from benchmarks.support.workload import MODES, RandomRequests

BACKENDS = ("rose-in-vllm", "vllm")
PROMPT_TOKENS = 16
WARM_UP_STEPS = 24
MAX_FUNCTIONS = 40
DECODES_BESIDE_CHUNKS = {False: 32, True: 2}
"""With ``--quick`` fewer."""


class Engine:
    """vLLM's engine, one step at a time."""

    def __init__(self, options: argparse.Namespace, model: str, facts: ModelFacts) -> None:
        wanted = engine_options(options, options.backend, model, facts, [])
        # Before vLLM is imported: the engine in this process, with or without plug-ins.
        os.environ |= wanted.variables | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._params, self.llm = SamplingParams, LLM(**vllm_options(wanted))
        self._output_kind = RequestOutputKind.FINAL_ONLY
        self.engine, self._vocab_size, self._seed = self.llm.llm_engine, facts.vocab_size, 0
        self.adapters: list[Any] = []
        """vLLM's ``LoRARequest``s, which requests have in turns."""

    def add(
        self, num_requests: int, prompt_tokens: int, max_tokens: int, *sampling: Mapping[str, Any]
    ) -> list[str]:
        """Queue requests whose prompts were never seen before, with ``sampling`` in turns; return their ids."""
        self._seed += 1
        lengths = (prompt_tokens, prompt_tokens), (max_tokens, max_tokens)
        prompts = RandomRequests(num_requests, *lengths, self._seed).requests(self._vocab_size).prompts
        for index, prompt in enumerate(prompts):
            params = self._params(
                max_tokens=max_tokens,
                ignore_eos=True,
                output_kind=self._output_kind,
                **sampling[index % len(sampling)],
            )
            adapter = self.adapters[index % len(self.adapters)] if self.adapters else None
            self.engine.add_request(
                f"{self._seed}-{index}", {"prompt_token_ids": prompt}, params, lora_request=adapter
            )
        return [f"{self._seed}-{index}" for index in range(num_requests)]

    def run(self, num_steps: int | None = None) -> int:
        """Take so many steps, or all that there are; return how many."""
        taken = 0
        while taken != num_steps and self.engine.has_unfinished_requests():
            self.engine.step()
            taken += 1
        return taken

    def close(self) -> None:
        """End the engine."""
        self.engine.engine_core.shutdown()


def profile_decoding(engine: Engine, batch: int, mode: str, num_steps: int) -> dict[str, Any]:
    """Return what a steady decode step of ``batch`` requests consists of."""
    engine.add(batch, PROMPT_TOKENS, WARM_UP_STEPS + 4 * num_steps, MODES[mode])
    engine.run(WARM_UP_STEPS)
    found = _profiles(lambda: None, lambda: engine.run(num_steps), num_steps)
    engine.run()
    return {"scene": "decode", "num_requests": batch, **found}


def profile_prompts(engine: Engine, num_requests: int, prompt_tokens: int, mode: str) -> dict[str, Any]:
    """Return what a step of prompts consists of, of so many requests that wait at once."""

    def queue() -> None:
        engine.add(num_requests, prompt_tokens, 1, MODES[mode])

    queue()
    num_steps = engine.run()  # what has to be compiled is compiled now
    sizes = {"num_requests": num_requests, "prompt_tokens": prompt_tokens, "num_steps": num_steps}
    return {"scene": "prompts", **sizes, **_profiles(queue, engine.run, num_steps)}


def profile_chunks(
    engine: Engine, num_decodes: int, prompt_tokens: int, chunk: int, mode: str
) -> dict[str, Any]:
    """Return what a step of ``num_decodes`` requests and ``chunk`` tokens of a prompt consists of."""
    scheduler = engine.engine.engine_core.engine_core.scheduler
    num_steps, limit = -(-prompt_tokens // chunk), scheduler.max_num_scheduled_tokens
    decodes = engine.add(num_decodes, prompt_tokens, 4 * (num_steps + WARM_UP_STEPS), MODES[mode])
    engine.run(WARM_UP_STEPS)
    scheduler.max_num_scheduled_tokens = num_decodes + chunk

    def queue() -> None:
        # What is left of the one before, whose tokens are read late, is computed first.
        engine.run(2)
        engine.add(1, prompt_tokens, 1, MODES[mode])

    queue()
    engine.run(num_steps)  # what has to be compiled is compiled now
    found = _profiles(queue, lambda: engine.run(num_steps), num_steps)
    scheduler.max_num_scheduled_tokens = limit
    engine.engine.abort_request(decodes)
    engine.run()
    sizes = {"num_requests": num_decodes, "prompt_tokens": prompt_tokens, "num_steps": num_steps}
    return {"scene": f"decodes beside {chunk} tokens of a prompt", "chunk": chunk, **sizes, **found}


def _profiles(queue: Callable[[], object], run: Callable[[], object], num_steps: int) -> dict[str, Any]:
    """Return figures of a step; ``queue`` comes before each ``run`` and does not count."""
    # Late: it imports the standalone engine, which a process of stock vLLM would not have.
    from benchmarks.step_profile import kernel_times

    queue()
    with no_garbage_collection():
        step_us = timed_us(run) / num_steps
    queue()
    kernels, busy_us = kernel_times(run, num_steps)
    queue()
    profiler = cProfile.Profile()
    profiler.runcall(run)
    stats: Any = pstats.Stats(profiler)
    functions = [
        {
            # Built-in ones have a name in angle brackets, and no file.
            "function": name.strip("<>") if file == "~" else f"{Path(file).name}:{line}({name})",
            "calls": calls / num_steps,
            "own_us": own / num_steps * 1e6,
            "us": total / num_steps * 1e6,
        }
        for (file, line, name), (_, calls, own, total, _) in stats.stats.items()
    ]
    functions.sort(key=lambda function: -function["us"])
    return {
        "step_us": step_us,
        "busy_us": busy_us,
        "idle_us": step_us - busy_us,
        "launches": sum(kernel["launches"] for kernel in kernels),
        "kernels": kernels[:MAX_FUNCTIONS],
        "host": functions[: 2 * MAX_FUNCTIONS],
    }


def table(report: dict[str, Any]) -> str:
    """Return a line for each scene, its longest kernels, and where its host time goes."""
    from benchmarks.step_profile import kernel_table

    parts = []
    for step in report["profiles"]:
        parts.append(
            "{scene}, {num_requests} requests: step {step_us:,.0f} us = device {busy_us:,.0f} + idle {idle_us:,.0f}; "
            "{launches:.0f} launches".format(**step)
        )
        parts.append(kernel_table(step["kernels"], max(step["busy_us"], 1e-9)))
        rows = [
            (each["function"], f"{each['calls']:.1f}", f"{each['own_us']:,.0f}", f"{each['us']:,.0f}")
            for each in step["host"][:MAX_FUNCTIONS]
        ]
        parts.append(markdown(("host, under cProfile", "calls a step", "own us", "us"), rows))
    return "\n\n".join(parts)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = new_parser(__doc__)
    number = at_least(1)
    parser.add_argument("--batches", type=number, nargs="+", help="of decode steps (default: 1 32 256)")
    parser.add_argument("--steps", type=number, help="decode steps that each run has (default: 64)")
    parser.add_argument("--prompts", type=number, help="requests of prompt steps (default: 256)")
    parser.add_argument("--prompt-tokens", type=number, help="of each of them (default: 512)")
    text = "of a prompt in steps that decode, too (default: no such steps)"
    parser.add_argument("--chunks", type=number, nargs="+", default=[], metavar="TOKENS", help=text)
    parser.add_argument("--mode", choices=list(MODES), default="greedy", help=DEFAULT)
    add_engine_options(parser, BACKENDS)
    options = parser.parse_args(arguments)
    options.kv_cache_tokens = None
    if options.backends is not None and len(options.backends) > 1:
        parser.error(f"--backends: got {' '.join(options.backends)}, allowed is one")
    set_engine_defaults(options, BACKENDS[:1])
    (options.backend,) = options.backends
    usual = ([1, 4], 4, 8, 32) if options.quick else ([1, 32, 256], 64, 256, 512)
    for name, value in zip(("batches", "steps", "prompts", "prompt_tokens"), usual, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def check_lengths(options: argparse.Namespace, facts: ModelFacts) -> None:
    """Exit where a request would have more tokens than the model takes."""
    decode = PROMPT_TOKENS + WARM_UP_STEPS + 4 * options.steps
    most_steps = max((-(-options.prompt_tokens // chunk) for chunk in options.chunks), default=0)
    prompt = options.prompt_tokens + (4 * (most_steps + WARM_UP_STEPS) if options.chunks else 1)
    for name, length in (("--steps", decode), ("--prompt-tokens, --chunks", prompt)):
        if length > facts.max_model_len:
            raise SystemExit(
                f"{name}: the longest request has {length:,} tokens; the model takes {facts.max_model_len:,}"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile, print, write."""
    options = parse_options(arguments)
    with checkpoint(options.model, options.shape, small=options.quick) as model:
        facts = model_facts(model)
        check_lengths(options, facts)
        engine = Engine(options, model, facts)
        profiles = [profile_decoding(engine, batch, options.mode, options.steps) for batch in options.batches]
        profiles.append(profile_prompts(engine, options.prompts, options.prompt_tokens, options.mode))
        num_decodes = DECODES_BESIDE_CHUNKS[options.quick]
        profiles += [
            profile_chunks(engine, num_decodes, options.prompt_tokens, chunk, options.mode)
            for chunk in options.chunks
        ]
        engine.close()
    report = {
        "benchmark": "vllm_step_profile",
        **run_facts(),
        "device": device_name(options.device),
        "backend": options.backend,
        "settings": {
            "model": options.model_name,
            **chosen(options, "dtype", "max_num_seqs", "mode", "quick"),
        },
        "profiles": profiles,
    }
    publish(report, table(report), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
