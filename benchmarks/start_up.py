"""Time how engines start: with empty caches, then again with what the first start left there.

    python -m benchmarks.start_up [--backends rose rose-in-vllm vllm] [--repeats 2] [--json FILE] [--quick]

An engine starts alone on the machine, in a process with a home folder of its own, where compiled kernels and compiled
models are kept: new for a cold start, that of the cold start before for a warm one. Seconds count from the process to
an engine that takes requests, and to its first token. Engines choose the size of their KV cache from free memory, as
they do when they serve; what Rose takes for graphs shows there. An interrupt ends it: what was measured is reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import site
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.reports.engines import start_up_bars, start_up_table
from benchmarks.reports.text import Result, Row, publish
from benchmarks.support.checkpoint import checkpoint, model_facts
from benchmarks.support.cli import DEFAULT, above_zero, at_least, new_parser
from benchmarks.support.comparison import add_engine_options, chosen, engine_options, set_engine_defaults
from benchmarks.support.engines import EngineOptions
from benchmarks.support.run_facts import device_name, run_facts
from benchmarks.support.worker_pool import EngineError, Engines, Worker

BACKENDS = ("rose", "rose-in-vllm", "vllm")
CACHES = ("cold", "warm")
_CACHE_VARIABLES = {
    *("TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH"),
}
"""Of the environment: they would name a folder outside of the home folder."""


def at_home(options: EngineOptions, home: Path) -> EngineOptions:
    """Return options whose process keeps everything that it caches below ``home``."""
    temporary = home / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    variables = {name: value for name, value in options.variables.items() if name not in _CACHE_VARIABLES}
    # Packages may be installed in the real home folder.
    packages = {"PYTHONUSERBASE": options.variables.get("PYTHONUSERBASE", site.getuserbase())}
    own = {"HOME": str(home), "TMPDIR": str(temporary)}
    return dataclasses.replace(options, variables={**variables, **packages, **own})


def start(name: str, options: EngineOptions, logs: Path) -> tuple[Row, Row]:
    """Start an engine, let it make a token, end it; return what was measured, and what the engine says of itself.

    Raises:
        EngineError: it is not installed, did not start or did not answer.
    """
    with Engines(partial(Worker, "offline"), logs) as engines:
        ready_s = engines.start({name: options}).get(name)
        if ready_s is None:
            raise EngineError((engines.missing | engines.failed)[name])
        worker, begin = engines.running[name], time.monotonic()
        worker.wake()
        first_token_s = ready_s + time.monotonic() - begin
        worker.send("kv_cache_tokens")
        row = {"ready_s": ready_s, "first_token_s": first_token_s, "kv_cache_tokens": worker.receive()}
        return row, engines.facts[name]


def measure(options: argparse.Namespace, model: str, folder: Path) -> Row:
    """Return the rows of all starts, facts by engine, and which engines failed."""
    deadline = time.monotonic() + (options.max_seconds or float("inf"))
    facts: Row = {}
    failed: dict[str, str] = {}
    rows: list[Row] = []
    found = {"backends": facts, "failed": failed, "rows": rows, "turns_left_out": 0}
    sizes = model_facts(model)
    turns = [
        (repeat, options.backends[(repeat + place) % len(options.backends)])
        for repeat in range(options.repeats)
        for place in range(len(options.backends))
    ]
    with Console(stderr=True).status("") as status:
        for number, (repeat, name) in enumerate(turns):
            if name in failed:
                continue
            if time.monotonic() > deadline:
                return {**found, "turns_left_out": len(turns) - number}
            wanted = engine_options(options, name, model, sizes, [])
            if not options.quick:
                wanted = dataclasses.replace(wanted, kv_cache_tokens=0, kv_cache_bytes=0)
            try:
                for caches in CACHES:
                    status.update(f"start {number + 1} of {len(turns)}: {name}, {caches}")
                    logs = (options.logs or folder / "logs") / f"{caches}-{repeat}"
                    row, facts[name] = start(name, at_home(wanted, folder / f"{name}-{repeat}"), logs)
                    rows.append({"backend": name, "caches": caches, "repeat": repeat, **row})
            except EngineError as error:
                failed[name] = str(error)
            except KeyboardInterrupt:
                return {**found, "turns_left_out": len(turns) - number}
    return found


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit with what is wrong with them."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "--repeats", type=at_least(1), default=2, help=f"of a cold and a warm start {DEFAULT}"
    )
    parser.add_argument(
        "--max-seconds", type=above_zero, help="begin no other pair of starts after this time"
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep what the engines print here")
    add_engine_options(parser, BACKENDS)
    options = parser.parse_args(arguments)
    options.kv_cache_tokens = None
    set_engine_defaults(options, BACKENDS)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Start, print, write; the status is 1 if an engine failed or none started."""
    options = parse_options(arguments)
    with (
        checkpoint(options.model, options.shape, small=options.quick) as model,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
    ):
        known: dict[str, Any] = {
            "benchmark": "start_up",
            **run_facts(),
            "device": device_name(options.device),
        }
        settings = {
            "model": options.model_name,
            **chosen(options, "dtype", "max_num_seqs", "repeats", "quick"),
        }
        report: Result = {**known, "settings": settings, **measure(options, model, Path(folder))}
    report["bars"] = start_up_bars(report["rows"])
    publish(report, start_up_table(report), options.json)
    return int(bool(report["failed"]) or not report["rows"])


if __name__ == "__main__":
    sys.exit(main())
