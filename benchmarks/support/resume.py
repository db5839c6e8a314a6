"""Go on with a comparison that ran out of time, on the same machine or on another one of the same kind.

A turn is whole: every engine has had it, one after the other, on one machine. So turns of several runs can stand in one
report, as long as the same program was measured in the same way; the report says when and where each run was.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Report = dict[str, Any]

# What has to be the same for turns of two runs to stand in one report.
_SAME = ("benchmark", "sources_digest", "device", "versions", "settings", "trace")
# What is told of each run. Not every benchmark notes all of it.
_OF_A_RUN = ("date", "command", "machine", "start_up_s")


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--resume``."""
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="keep the whole turns of an earlier report of the same sources, device, versions and settings, and take "
        "those that it lacks",
    )


def earlier_report(path: Path | None, facts: Report) -> Report | None:
    """Return the report to go on with, None where none is asked for.

    Args:
        facts: of this run, as far as they are known before any engine starts.

    Raises:
        SystemExit: there is none, or other sources, another device, other versions or settings; the message says which.
    """
    if path is None:
        return None
    try:
        old: Report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"--resume: {path}: {error}") from error
    new = json.loads(json.dumps(facts))  # tuples are lists in a file
    for name in _SAME:
        if old.get(name) != new.get(name):
            raise SystemExit(f"--resume: {name}: this run has {new.get(name)!r}, {path} {old.get(name)!r}")
    if old["failed"]:
        raise SystemExit(f"--resume: {path}: failed there: {', '.join(old['failed'])}")
    return old


def check_engines(old: Report | None, backends: dict[str, Any]) -> None:
    """End the program unless the engines that have started are those of the earlier report.

    Raises:
        SystemExit: another version, another setting, or one more or less.
    """
    new = json.loads(json.dumps(backends))
    if old is not None and old["backends"] != new:
        raise SystemExit(f"--resume: backends: this run has {new!r}, the file {old['backends']!r}")


def with_runs(report: Report, old: Report | None) -> Report:
    """Return ``report`` with the ``runs`` that its turns are from, if there are several."""
    if old is None:
        return report
    runs = old.get("runs") or [_run(old)]
    return {**report, "runs": [*runs, _run(report)]}


def in_runs(result: Report) -> str:
    """Return what to put behind a number of turns: nothing where they are all from one run."""
    return f" in {len(result['runs'])} runs" if "runs" in result else ""


def _run(report: Report) -> dict[str, Any]:
    return {name: report[name] for name in _OF_A_RUN if name in report}
