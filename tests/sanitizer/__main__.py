"""Run every kernel on small inputs under one of compute-sanitizer's tools; the status is 1 if it finds anything.

    python -m tests.sanitizer memcheck|racecheck|initcheck|none [--match decode] [--planted]

Each tensor is an allocation of its own, of exactly its size and with a gap behind it, so that an access past its end is
an error and not its neighbour. Results are compared with those of the CPU. ``--planted`` adds a kernel with the mistake
that the tool is there to find: such a run must fail. ``none`` runs the same without a tool.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys

from tests.conftest import ROOT

TOOLS = ("memcheck", "racecheck", "initcheck")
GAP_BYTES = 1024


def sanitizer_command(tool: str, cases: list[str]) -> list[str]:
    """Return the command line that runs ``cases``, options of this program, under ``tool``."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
    command += ["--target-processes", "application-only", "--print-limit", "20"]
    if tool == "memcheck":
        command += ["--padding", str(GAP_BYTES), "--report-api-errors", "no"]
    return [*command, sys.executable, "-m", "tests.sanitizer", "none", *cases]


def main(arguments: list[str] | None = None) -> int:
    """Return what the tool returns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tool", choices=(*TOOLS, "none"))
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--planted", nargs="?", const="", choices=(*TOOLS, ""), help="add a mistake to find")
    options = parser.parse_args(arguments)
    if options.tool == "none":
        from tests.sanitizer.runs import run_cases

        return run_cases(options.match, options.planted)
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer: not found; it is part of the CUDA toolkit", file=sys.stderr)
        return 2
    cases = ["--match", options.match]
    if options.planted is not None:
        cases += ["--planted", options.tool]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(
        sanitizer_command(options.tool, cases), cwd=ROOT, env=environment, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
