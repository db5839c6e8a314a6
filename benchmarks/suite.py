"""Run the published benchmarks one after the other, each into a file of its own, within a limit of time.

    python -m benchmarks.suite [--steps kernels offline_compare] [--max-seconds 1800] [--results DIR] [--quick]
                               [--python-path vllm=DIR] [--env sglang=NAME=VALUE]

Steps begin in the order of --list, or of --steps. One that is still at it when the time is up is interrupted; then
comparisons write the turns that were whole. Steps for which no time is left are named. Random checkpoints are made
once, in a folder that all steps share, so that vLLM compiles once. --python-path and --env go to the steps that compare
engines. With --resume, comparisons keep the turns that the files in --results hold, and take those that are missing.
The status is 1 if a step failed or was left out.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.support.checkpoint import KEPT_IN
from benchmarks.support.engines import as_flags

ROOT = Path(__file__).resolve().parent.parent
MIN_SECONDS = 20.0
"""A step does not begin with less time."""

GRACE_SECONDS = 45.0
"""From the interrupt until a step that does not end is killed."""

_CAN_RESUME = ("benchmarks.offline_compare", "benchmarks.online_compare")
_SWITCHES = (
    "fused_mlp",
    "fused_sampler",
    "fused_kv_append",
    "fused_add_layernorm",
    "cuda_graph",
    "prefix_cache",
    "run_ahead",
)


@dataclass(frozen=True)
class Step:
    """A benchmark with its options."""

    module: str
    arguments: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    """Engines that it compares, and that may be installed elsewhere."""
    workload: tuple[str, ...] = ()
    """First argument, with ``--quick`` too."""

    def command(self, options: argparse.Namespace, result: Path) -> list[str]:
        """Return the command line that writes ``result``."""
        own = ("--quick",) if options.quick else self.arguments
        elsewhere = [
            part
            for name in ("python_path", "env")
            for text in getattr(options, name)
            if text.partition("=")[0] in self.backends
            for part in as_flags({name: text})
        ]
        earlier = ("--resume", str(result)) if self.resumes(options, result) else ()
        command = [sys.executable, "-m", self.module, *self.workload, *own]
        return [*command, *elsewhere, *earlier, "--json", str(result)]

    def resumes(self, options: argparse.Namespace, result: Path) -> bool:
        """Whether it goes on from what is in ``result``."""
        return options.resume and self.module in _CAN_RESUME and result.is_file()


_ENGINES = ("rose", "rose-in-vllm", "vllm", "sglang")
_INSIDE_VLLM = ("rose-in-vllm", "vllm")
_ON_GPU = ("--device", "cuda", "--dtype", "float16")
_FOUR_API_SERVERS = tuple(
    part for backend in _INSIDE_VLLM for part in ("--engine-options", f'{backend}={{"api_server_count": 4}}')
)
STEPS = {
    "kernels": Step("benchmarks.kernels", ("--prove",)),
    "kv_cow_clone_float16": Step("benchmarks.kv_cow_clone", _ON_GPU),
    "kv_append": Step("benchmarks.kv_append", _ON_GPU),
    "offline_compare": Step("benchmarks.offline_compare", ("--scenes", "decode", "offline"), _ENGINES),
    "offline_mixed": Step("benchmarks.offline_compare", ("--scenes", "mixed"), _ENGINES),
    "arrivals": Step("benchmarks.online_compare", (), _ENGINES[:3], ("in-process",)),
    "offline_switches": Step(
        "benchmarks.offline_compare",
        (
            "--backends",
            "rose",
            "--scenes",
            "decode",
            "offline",
            "--batches",
            "1",
            "256",
            *(f"--compare-{name.replace('_', '-')}" for name in _SWITCHES),
        ),
        backends=("rose",),
    ),
    "online_compare": Step("benchmarks.online_compare", backends=_ENGINES),
    "vllm_serving": Step("benchmarks.online_compare", (), _INSIDE_VLLM, ("poisson",)),
    "vllm_serving_4_api_servers": Step(
        "benchmarks.online_compare", _FOUR_API_SERVERS, _INSIDE_VLLM, ("poisson",)
    ),
    "vllm_parts": Step(
        "benchmarks.offline_compare", ("--backends", *_INSIDE_VLLM, "--compare-parts"), _INSIDE_VLLM
    ),
    "vllm_llama": Step("benchmarks.offline_compare", ("--shape", "llama-1b"), _INSIDE_VLLM),
}
"""Name of a result file -> what writes it; most wanted first."""


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", nargs="+", choices=list(STEPS), default=list(STEPS), metavar="STEP")
    parser.add_argument("--list", action="store_true", help="print the steps' commands and end")
    parser.add_argument("--max-seconds", type=float, default=float("inf"), help="for all steps together")
    parser.add_argument(
        "--results", type=Path, default=Path("build/suite"), metavar="DIR", help="(default: %(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="keep turns that comparisons in --results hold")
    parser.add_argument("--quick", action="store_true", help="each step with its --quick, on a CPU, too")
    for option, value in (("--python-path", "BACKEND=DIR"), ("--env", "BACKEND=NAME=VALUE")):
        parser.add_argument(option, action="append", default=[], metavar=value, help="for comparisons")
    options = parser.parse_args(arguments)
    if options.max_seconds <= 0:
        parser.error(f"--max-seconds: got {options.max_seconds}, has to be above 0")
    return options


def run_step(command: list[str], log: Path, environment: dict[str, str], seconds: float) -> str:
    """Run a command in a session of its own, interrupted after ``seconds``; return how it ended."""
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            status = process.wait(None if seconds == float("inf") else seconds)
            return "done" if status == 0 else f"ended with status {status}"
        except subprocess.TimeoutExpired:
            # Only the benchmark itself: what it has started it ends itself.
            process.send_signal(signal.SIGINT)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait(GRACE_SECONDS)
            raise
        try:
            process.wait(GRACE_SECONDS)
            return "interrupted"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "killed"


def run(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Run all steps; return for each its name, how it ended, its seconds and whether there is a result."""
    deadline = time.monotonic() + options.max_seconds
    folder = options.results.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory() as checkpoints:
        environment = {**os.environ, KEPT_IN: os.environ.get(KEPT_IN, checkpoints)}
        for name in options.steps:
            left = deadline - time.monotonic()
            result = folder / f"{name}.json"
            if not STEPS[name].resumes(options, result):
                result.unlink(missing_ok=True)
            start = time.monotonic()
            if left < MIN_SECONDS:
                outcome = "no time left"
            else:
                console.print(f"{name}: {folder / name}.log")
                command = STEPS[name].command(options, result)
                outcome = run_step(command, folder / f"{name}.log", environment, left)
            seconds = time.monotonic() - start
            rows.append(
                {"step": name, "outcome": outcome, "seconds": seconds, "has_result": result.is_file()}
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite and say how each step ended."""
    options = parse_options(arguments)
    console = Console(soft_wrap=True)
    if options.list:
        for name in options.steps:
            command = STEPS[name].command(options, options.results / f"{name}.json")
            console.print(f"{name}: python {subprocess.list2cmdline(command[1:])}", markup=False)
        return 0
    # Steps inherit it if interrupts are ignored here, as in a background job of a shell script.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rows = run(options, console)
    table = Table("step", "outcome", "seconds", "result")
    for row in rows:
        table.add_row(
            row["step"], row["outcome"], f"{row['seconds']:.0f}", "yes" if row["has_result"] else "no"
        )
    console.print(table)
    return int(any(row["outcome"] != "done" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
