"""Plant mistakes in block manager, scheduler and commits, one at a time, and see whether the simulation finds them.

    python -m tests.simulation.mutants --out results.json [--seed N] [--count N] [--by-hand] [--minutes N] [--jobs N]

Without ``--by-hand`` a seed chooses among the small changes of ``tests.support.breaks``, at most one of a line; with it
they are those of ``PLANTED``. Each is made in a copy of this tree, where both hosts are simulated over a fixed
number of engine steps. Results are written after each; the same command goes on where it was interrupted. With
``--tests``, where the simulation finds nothing, the tests that are closest to a change are run, as by
``tests.support.breaks``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import ROOT
from tests.support.breaks import Break, Finder, applied, describe, look_for

FILES = (
    *(f"block_manager/{name}.py" for name in ("block_manager", "block_pool", "books", "prefix_cache")),
    *(f"block_manager/{name}.py" for name in ("prefix_index", "reservation", "sequence_table")),
    *(f"engine/{name}.py" for name in ("scheduler", "step_pipeline", "sequence_state")),
)
STEPS = {"standalone": 20_000, "vllm": 6_000}
LIMIT_S = 240
"""For one host; what takes longer hangs, and is found."""


class Planted(NamedTuple):
    """A mistake that somebody could make; see ``planted.toml``."""

    file: str
    old: str
    new: str
    why: str


PLANTED = tuple(
    Planted(**each)
    for each in tomllib.loads((Path(__file__).parent / "planted.toml").read_text(encoding="utf-8"))["mistake"]
)
"""Chosen by hand."""


def candidates() -> list[Break]:
    """Return every change that may be made; errors that callers' mistakes raise are left alone."""
    found: dict[tuple[str, int], list[Break]] = {}
    for file in FILES:
        source = (ROOT / "rose_backend" / file).read_text(encoding="utf-8")
        for each, _, _ in Finder(source, file).found:
            if (
                not each.line.startswith("raise")
                and "check_" not in each.function
                and "check_" not in each.line
            ):
                found.setdefault((file, each.number), []).append(each)
    return [each for line in found.values() for each in line]


def choose(seed: int, count: int) -> list[Break]:
    """Return ``count`` changes of different lines."""
    rng, chosen = random.Random(seed), {}
    shuffled = candidates()
    rng.shuffle(shuffled)
    for each in shuffled:
        chosen.setdefault((each.file, each.number), each)
    return list(chosen.values())[:count]


def simulate(tree: Path) -> dict[str, Any]:
    """Simulate both hosts in a tree; return which found something, and what."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    begin = time.monotonic()
    for host, steps in STEPS.items():
        if host == "vllm" and not find_spec("vllm"):
            continue
        command = [sys.executable, "-m", "tests.simulation", "--host", host, "--steps", str(steps)]
        try:
            done = subprocess.run(
                command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return {"result": "found", "host": host, "by": f"not over in {LIMIT_S} s"}
        if done.returncode:
            lines = [
                line
                for line in (done.stderr + done.stdout).splitlines()
                if "Error" in line or "Foreign" in line
            ]
            seconds = round(time.monotonic() - begin, 1)
            by = (lines or [f"exit code {done.returncode}"])[-1].strip()[:200]
            return {"result": "found", "host": host, "by": by, "seconds": seconds}
    return {"result": "missed", "seconds": round(time.monotonic() - begin, 1)}


@contextmanager
def planted(mistake: Planted, package: Path) -> Iterator[None]:
    """Make a mistake in a package, and mend it again."""
    path = package / mistake.file
    source = path.read_text(encoding="utf-8")
    assert source.count(mistake.old) == 1, (
        f"{mistake.file}: {mistake.old!r} occurs {source.count(mistake.old)} times"
    )
    path.write_text(source.replace(mistake.old, mistake.new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(source, encoding="utf-8")


def copy_tree(tree: Path) -> None:
    """Copy what the simulation and tests need of this tree."""
    left_out = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=left_out)


def look(mistake: Break | Planted, trees: list[Path], runs_tests: bool) -> dict[str, Any]:
    """Return the result of one mistake."""
    tree = trees.pop()
    try:
        made = planted if isinstance(mistake, Planted) else applied
        with made(mistake, tree / "rose_backend"):  # type: ignore[operator]
            result = simulate(tree)
        if runs_tests and result["result"] == "missed" and isinstance(mistake, Break):
            looked = look_for(mistake, tree, 120)
            if looked["result"] == "found":
                result = {
                    "result": "found",
                    "by": looked["test"],
                    "seconds": result["seconds"] + looked["seconds"],
                }
    finally:
        trees.append(tree)
    return (mistake._asdict() if isinstance(mistake, Planted) else asdict(mistake)) | result


def main(arguments: list[str] | None = None) -> int:
    """Return 1 if a mistake is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--by-hand", action="store_true", help="those of PLANTED")
    parser.add_argument("--out", type=Path, required=True, help="where results go, and what is not repeated")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none afterwards")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--tests", action="store_true", help="run tests, too, for what is missed")
    options = parser.parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes
    mistakes: list[Any] = list(PLANTED) if options.by_hand else choose(options.seed, options.count)
    results: list[dict[str, Any]] = []
    if options.out.exists():
        results = json.loads(options.out.read_text(encoding="utf-8"))
    keys = ("file", "old") if options.by_hand else ("file", "number", "change")
    done = {tuple(each[key] for key in keys) for each in results}

    def run(mistake: Any) -> None:
        if tuple(getattr(mistake, key) for key in keys) in done or time.monotonic() > end:
            return
        result = look(mistake, trees, options.tests)
        results.append(result)
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        what = mistake.why if isinstance(mistake, Planted) else describe(result)
        print(f"{result['result']}: {what}; {result.get('by', '')}", flush=True)

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [Path(folder) / str(number) for number in range(options.jobs)]
        for tree in trees:
            copy_tree(tree)
        with ThreadPoolExecutor(options.jobs) as threads:
            list(threads.map(run, mistakes))
    missed = [each for each in results if each["result"] == "missed"]
    print(f"{len(results) - len(missed)} of {len(results)} are found")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
