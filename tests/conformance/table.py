"""The tables of docs/conformance.md, made from reports of the suites.

    python -m tests.conformance.table [REPORT.json ...]

Reports that are named are kept, in place of earlier ones of the same subject and device.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from rose_backend.conformance.report import DIFFERS, FAILED, PASSED, UNSUPPORTED

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results")
PAGE = ROOT / "docs" / "conformance.md"
SECTION = re.compile(r"(<!-- table: (conformance|differences) -->\n).*?(<!-- end of table -->)", re.DOTALL)
WANTED = ("ROSE", "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION")
"""What is to be run on a GPU, whether it has been or not."""


def subject(report: dict[str, Any]) -> str:
    """Return what a report is about: the name of a backend, or of a class."""
    named = [report[key] for key in ("attention_backend", "block_manager") if report[key]]
    return ", ".join(name.rpartition(":")[2] for name in named)


def keep(path: Path) -> None:
    """Put a report among the results."""
    report = json.loads(path.read_text())
    name = re.sub(r"\W+", "_", f"{subject(report)} {report['device']}").strip("_")
    shutil.copyfile(path, RESULTS / f"{name}.json")


def read_results() -> list[dict[str, Any]]:
    """Return all reports, by device and subject."""
    reports = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    return sorted(reports, key=lambda report: (report["device"], subject(report)))


def overview(reports: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each report, and for each backend that no GPU has run yet."""
    outcomes = (PASSED, DIFFERS, UNSUPPORTED, FAILED)
    rows = [("", "Run", *(outcome.capitalize() for outcome in outcomes))]
    for report in reports:
        where = f"{report['device']}, vLLM {report['versions']['vllm']}, {report['date']}"
        rows.append((f"`{subject(report)}`", where, *(str(report["counts"][each]) for each in outcomes)))
    done = {subject(report) for report in reports if not report["device"].startswith("CPU")}
    return rows + [(f"`{name}`", "on a GPU: not yet", *[""] * 4) for name in WANTED if name not in done]


def differences(reports: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each way in which something differs, or fails, and the number of its scenes."""
    rows = [("", "What differs", "Scenes")]
    for report in reports:
        found = Counter(
            ("fails: " if each["outcome"] == FAILED else "") + describe(each)
            for each in report["scenes"]
            if each["outcome"] in (DIFFERS, FAILED)
        )
        name = f"`{subject(report)}`, {'CPU' if report['device'].startswith('CPU') else report['device']}"
        rows += [(name, what.replace("|", "\\|"), str(number)) for what, number in found.items()]
    return rows


def describe(scene: dict[str, str]) -> str:
    """Return what differs in a scene; a scene that asks a question has its own answer."""
    _, test, *parameters = scene["scene"].split(": ", 2)
    detail = scene["detail"].splitlines()[0]
    if test == "the answer is vllms":
        return f"{parameters[0]}: {detail}"
    return detail if scene["outcome"] == DIFFERS else test


def with_tables(page: str, reports: list[dict[str, Any]]) -> str:
    """Return the page's text with the tables in their places."""
    rows = {"conformance": overview(reports), "differences": differences(reports)}

    def table(found: re.Match[str]) -> str:
        head, *rest = rows[found[2]]
        lines = ("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rest))
        return (
            found[1]
            + "\n"
            + "\n".join(lines).replace("|  |", "| |").replace("|  |", "| |")
            + "\n\n"
            + found[3]
        )

    changed, count = SECTION.subn(table, page)
    assert count == 2, f"{PAGE.name} has {count} of 2 tables"
    return changed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", type=Path, nargs="*")
    for each in parser.parse_args().reports:
        keep(each)
    PAGE.write_text(with_tables(PAGE.read_text(), read_results()))
