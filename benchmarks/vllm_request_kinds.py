"""Compare decode steps by what their requests ask for: penalties, log-probabilities, grammars, inside vLLM.

    python -m benchmarks.vllm_request_kinds [--shape qwen3-0.6b] [--batches 1 32 256] [--starts 3] [--quick]

With --adapters, requests have so many LoRA adapters in turns, of --adapter-rank and with random weights, that adapt all
products of the layers (Llama's and Qwen's shapes).

Each start of each backend is a process of its own; backends take turns, with --start-at-once after all have started.
It decodes batches in which all requests, or one of them, ask for something, and times the engine's steps: scheduling,
the model, sampling and what becomes of the tokens, without the front end. A ratio is to the plain step of the same
start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.reports.engines import PLAIN, request_kinds_table
from benchmarks.reports.text import publish
from benchmarks.support.checkpoint import checkpoint, model_facts, one_checkpoint, write_adapters
from benchmarks.support.cli import DEFAULT, at_least, new_parser
from benchmarks.support.comparison import add_engine_options, chosen, set_engine_defaults
from benchmarks.support.run_facts import device_name, run_facts
from benchmarks.support.timing import no_garbage_collection
from benchmarks.vllm_step_profile import BACKENDS, PROMPT_TOKENS, WARM_UP_STEPS, Engine

SCHEMA = {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}}}}
KINDS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "bias": {"logit_bias": {token: -2.0 for token in range(300, 330)}},
    "bad words": {"bad_words": ["he", "she said"]},
    "min_tokens": {"min_tokens": 4000, "stop_token_ids": [5, 6, 7]},
    "5 log-probabilities": {"logprobs": 5},
    "JSON schema": {"structured_outputs": {"json": SCHEMA}},
    "top-k, top-p": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "penalties, top-p and log-probabilities": {
        **{"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5, "logprobs": 5},
    },
}
"""What a request asks for, besides being greedy."""


def sampling_of(kind: str) -> dict[str, Any]:
    """Return the arguments of a request's ``SamplingParams``."""
    from vllm.sampling_params import StructuredOutputsParams

    options: dict[str, Any] = {"temperature": 0.0, **KINDS[kind]}
    if "structured_outputs" in options:
        options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
    return options


def time_steps(engine: Engine, sampling: Sequence[Mapping[str, Any]], batch: int, num_steps: int) -> float:
    """Return the median time of a decode step of ``batch`` requests, in milliseconds."""
    core = engine.engine.engine_core.engine_core
    ids = engine.add(batch, PROMPT_TOKENS, 4096 - PROMPT_TOKENS - 1, *sampling)
    _run_until_all_decode(core, batch)
    times = []
    with no_garbage_collection():
        for _ in range(WARM_UP_STEPS + num_steps):
            start = time.perf_counter()
            outputs, is_executed = core.step_fn()
            core.post_step(is_executed)
            times.append(time.perf_counter() - start)
    produced = _num_outputs(outputs)
    if produced != batch:
        raise RuntimeError(f"the last step had {produced} requests, not {batch}: some ended before")
    engine.engine.abort_request(ids)
    while core.scheduler.has_requests() or core.batch_queue:
        core.post_step(core.step_fn()[1])
    return 1e3 * statistics.median(times[WARM_UP_STEPS:])


def _run_until_all_decode(core: Any, batch: int) -> None:
    """Step until one step has an output of each of ``batch`` requests: grammars are compiled in another thread."""
    produced = 0
    while produced != batch:
        outputs, is_executed = core.step_fn()
        core.post_step(is_executed)
        produced = _num_outputs(outputs)
        left = core.scheduler.get_num_unfinished_requests()
        if left != batch:
            raise RuntimeError(f"{left} requests of {batch} are left: some ended before all were decoded")


def _num_outputs(outputs: Any) -> int:
    """Return how many requests have an output in a step's ``outputs``."""
    return sum(len(each.outputs) for each in (outputs or {}).values())


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the steps of one start of one backend."""
    rows = []
    with (
        checkpoint(options.model, options.shape, small=options.quick) as model,
        tempfile.TemporaryDirectory() as folder,
    ):
        adapters = []
        if options.adapters:
            adapters = write_adapters(model, Path(folder), options.adapters, options.adapter_rank)
            lora = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": options.adapter_rank}
            # What is given goes over it.
            options.engine_options = [(options.backend, json.dumps(lora)), *options.engine_options]
        engine = Engine(options, model, model_facts(model))
        wait_for_turn(options)
        if adapters:
            from vllm.lora.request import LoRARequest

            engine.adapters = [LoRARequest(path, number + 1, path) for number, path in enumerate(adapters)]
        for batch in options.batches:
            plain = sampling_of(PLAIN)
            scenes = {kind: [sampling_of(kind)] for kind in options.kinds}
            if batch > 1:
                scenes |= {
                    f"one of {batch}: {kind}": [sampling_of(kind), *[plain] * (batch - 1)]
                    for kind in options.kinds
                    if kind != PLAIN
                }
            for name, sampling in scenes.items():
                step_ms = time_steps(engine, sampling, batch, options.steps)
                rows.append({"scene": name, "num_requests": batch, "step_ms": step_ms})
                print(
                    f"{options.backend}: {name}, {batch} requests: {step_ms:.3f} ms",
                    file=sys.stderr,
                    flush=True,
                )
        engine.close()
    return rows


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = new_parser(__doc__)
    number = at_least(1)
    parser.add_argument("--batches", type=number, nargs="+", help="of decode steps (default: 1 32 256)")
    parser.add_argument("--steps", type=number, help="that are timed of each scene (default: 96)")
    parser.add_argument("--starts", type=number, help="of each backend (default: 3)")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument(
        "--adapters", type=at_least(0), default=0, help=f"that requests have in turns {DEFAULT}"
    )
    parser.add_argument("--adapter-rank", type=int, choices=[8, 16, 32, 64], default=16, help=DEFAULT)
    parser.add_argument(
        "--start-at-once",
        action="store_true",
        help="all engines first, and time them in turns; the device must hold them all",
    )
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # of one start, in a process of its own
    add_engine_options(parser, BACKENDS)
    options = parser.parse_args(arguments)
    options.kv_cache_tokens = None
    set_engine_defaults(options, BACKENDS)
    usual = ([1, 4], 4, 1) if options.quick else ([1, 32, 256], 96, 3)
    for name, value in zip(("batches", "steps", "starts"), usual, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.kinds[0] != PLAIN:
        options.kinds = [PLAIN, *(kind for kind in options.kinds if kind != PLAIN)]
    return options


class Start:
    """One start of one backend: a process of its own that runs ``module``, and measures when it is told so."""

    def __init__(self, module: str, arguments: Sequence[str], backend: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name, "rows.json")
        command = [sys.executable, "-m", module, *arguments, "--rows", str(self._path), "--backends", backend]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)

    def wait_until_ready(self) -> None:
        """Wait until its engine has started.

        Raises:
            CalledProcessError: the process has ended.
        """
        while not _ready(self._path).exists():
            if self._process.poll() is not None:
                raise subprocess.CalledProcessError(self._process.returncode, self._process.args)
            time.sleep(0.1)

    def rows(self) -> list[dict[str, Any]]:
        """Let it measure, and return the rows.

        Raises:
            CalledProcessError: the process has failed.
        """
        self._process.communicate(b"\n")
        if self._process.returncode:
            raise subprocess.CalledProcessError(self._process.returncode, self._process.args)
        rows: list[dict[str, Any]] = json.loads(self._path.read_text())
        return rows

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def _ready(rows: Path) -> Path:
    return rows.with_suffix(".ready")


def wait_for_turn(options: argparse.Namespace) -> None:
    """Say that the engine has started, and wait until it is measured.

    Raises:
        EOFError: who started this process has ended.
    """
    _ready(options.rows).touch()
    if not sys.stdin.readline():
        raise EOFError("the process that would collect the figures has ended")


def run_starts(
    module: str, arguments: Sequence[str], backends: Sequence[str], *, at_once: bool
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each backend with the rows of its start. ``at_once``: all of them start, then measure in turns."""
    with ExitStack() as stack:

        def begin(backend: str) -> Start:
            start = Start(module, arguments, backend)
            stack.callback(start.close)
            return start

        begun = [begin(backend) for backend in backends] if at_once else []
        for start in begun:
            start.wait_until_ready()
        for number, backend in enumerate(backends):
            yield backend, (begun[number] if at_once else begin(backend)).rows()


def is_one_start(
    options: argparse.Namespace, measure: Callable[[argparse.Namespace], list[dict[str, Any]]]
) -> bool:
    """Whether this process is a start of one backend; if so, measure, and write the rows for ``Start``."""
    if options.rows is None:
        return False
    (options.backend,) = options.backends
    options.rows.write_text(json.dumps(measure(options)))
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_options(arguments)
    if is_one_start(options, measure):
        return 0
    num = len(options.backends)
    turns = [
        options.backends[(start + place) % num] for start in range(options.starts) for place in range(num)
    ]
    with one_checkpoint(options.model, options.shape, small=options.quick):
        found = run_starts("benchmarks.vllm_request_kinds", arguments, turns, at_once=options.start_at_once)
        rows = [
            {"start": number // num, "backend": backend, **row}
            for number, (backend, of_start) in enumerate(found)
            for row in of_start
        ]
    report = {
        "benchmark": "vllm_request_kinds",
        **run_facts(),
        "device": device_name(options.device),
        "settings": {
            "model": options.model_name,
            **chosen(
                options, "dtype", "max_num_seqs", "steps", "starts", "start_at_once", "backends", "quick"
            ),
            **(chosen(options, "adapters", "adapter_rank") if options.adapters else {}),
        },
        "rows": rows,
    }
    publish(report, request_kinds_table(report), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
