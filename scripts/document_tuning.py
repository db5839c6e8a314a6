"""Write docs/performance/tuning.md from ``rose_backend/kernels/tuning/measured.txt``, or check that they agree.

    python scripts/document_tuning.py [--check]

Everything from the first section on is generated; the text above it is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from document_options import table

from rose_backend.kernels.tuning.measured import Row, sections

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance" / "tuning.md"
HEAD = ("Conditions", "Choice", "Measured on", "us", "Commit")


def tables() -> str:
    """Return a section for each operation: comments of the file, and tables of the rows below them."""
    lines = []
    for section in sections().values():
        lines += [f"## {section.operation.capitalize()}", f"<!-- measured: {section.operation} -->"]
        for comment, rows in section.parts:
            lines += [comment] if comment else []
            lines += [table(HEAD, map(_cells, rows))] if rows else []
        lines.append("<!-- end of measured -->")
    return "\n\n".join(lines)


def _cells(row: Row) -> list[str]:
    conditions, choice, *measured = row.cells
    readable = re.sub(r" (\S+)-(?=,|$)", r" ≥ \1", re.sub(r" -(\S+?)(?=,|$)", r" ≤ \1", conditions))
    readable = re.sub(r"(\d)-(\d)", r"\1 to \2", readable)
    return [readable or "always", f"`{choice}`", *measured, *[""] * (3 - len(measured))]


def rewritten(text: str) -> str:
    """Return ``text`` with all of its sections replaced."""
    head, _, _ = text.partition("\n## ")
    return f"{head.rstrip()}\n\n{tables()}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check; the status is 1 if the page differs from the measured choices."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the page differs")
    options = parser.parse_args(arguments)
    before = PAGE.read_text(encoding="utf-8")
    after = rewritten(before)
    if options.check:
        if after != before:
            print("docs/performance/tuning.md differs from measured.txt: run make docs", file=sys.stderr)
        return int(after != before)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
