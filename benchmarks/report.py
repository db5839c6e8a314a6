"""Make the README's tables and figures from the files in benchmarks/results, or check that they agree.

    python -m benchmarks.report [--check]
    python -m benchmarks.report --draw FILE [--out DIR]    the figures of one result

A table, with its pictures, stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``. Figures are in
benchmarks/figures; each has the digest of the result it shows. A result in which an engine was missing or failed is not
published.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reports import engines, figures, parts, serving
from benchmarks.reports.text import Result, absent_engines

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "benchmarks" / "figures"


def no_problems(result: Result) -> list[str]:
    """Return nothing: all sides of such a benchmark are part of this package."""
    return []


def engine_problems(result: Result) -> list[str]:
    """Return what is missing from a comparison of engines, and requests that failed."""
    absent = absent_engines(result)
    problems = [f"not every engine has run: {'; '.join(absent)}"] if absent else []
    failed = {}
    for row in result["rows"]:
        if count := row.get("failed"):
            failed[row["backend"]] = failed.get(row["backend"], 0) + count
    problems += [f"{count} requests of {backend} failed" for backend, count in failed.items()]
    if not all("times" in row for row in result.get("comparison", ())):
        problems.append("both sides are needed at every load")
    return problems


@dataclass(frozen=True)
class Table:
    """A table of README."""

    file: str
    """Below ``RESULTS``."""
    make: Callable[[Result], str]
    problems: Callable[[Result], list[str]] = engine_problems
    """Why a result cannot be published."""

    def text(self) -> str:
        """Return the table.

        Raises:
            SystemExit: the result cannot be published.
        """
        result = read(self.file)
        if problems := self.problems(result):
            raise SystemExit(f"{self.file}: {'; '.join(problems)}")
        return self.make(result)


TABLES = {
    "block_manager": Table("cpu/block_manager.json", parts.block_manager_table, no_problems),
    "kv_cow_clone": Table("h200/kv_cow_clone_float16.json", parts.kv_cow_clone_table, no_problems),
    "kv_append": Table("h200/kv_append.json", parts.kv_append_table, no_problems),
    "kernels": Table("h200/kernels.json", parts.kernels_table, parts.kernel_problems),
    "offline_compare": Table("h200/offline_compare.json", engines.offline_table),
    "offline_mixed": Table("h200/offline_mixed.json", engines.offline_table),
    "offline_switches": Table("h200/offline_switches.json", engines.switches_table),
    "arrivals": Table("h200/arrivals.json", serving.in_process_table),
    "vllm_serving": Table("h200/vllm_serving.json", serving.poisson_table),
    "vllm_serving_4_api_servers": Table("h200/vllm_serving_4_api_servers.json", serving.poisson_table),
    "vllm_serving_host": Table("cpu/vllm_serving_host.json", serving.poisson_table),
    "vllm_parts": Table("h200/vllm_parts.json", engines.parts_table),
    "vllm_llama": Table("h200/vllm_llama.json", engines.llama_table),
    "online_compare": Table("h200/online_compare.json", serving.trace_table),
}
DRAWN_RESULTS = ("cpu/block_manager.json", "h200/online_compare.json")


def read(name: str) -> Result:
    """Return a result file's content."""
    result: Result = json.loads((RESULTS / name).read_text())
    return result


def rewritten(text: str) -> str:
    """Return ``text`` with every table regenerated."""
    for name, table in TABLES.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end of table -->)"
        found = re.findall(pattern, text, flags=re.DOTALL)
        if len(found) != 1:
            raise SystemExit(f"README.md: table {name}: expected once, found {len(found)} times")
        begin, end = found[0]
        # Split, not substitute: a table may hold what a pattern would read.
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{table.text()}\n{end}{rest.partition(end)[2]}"
    return text


def old_figures() -> list[str]:
    """Return the names of results whose figures are not there or show another result."""
    return [
        name
        for name in DRAWN_RESULTS
        for result in [read(name)]
        if not all(figures.is_drawn_from(FIGURES / file, result) for file in figures.file_names(result))
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check; the status is 1 if README or a figure is not what the results make."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if something is out of date"
    )
    parser.add_argument("--draw", type=Path, metavar="FILE", help="only draw this result (from --json)")
    parser.add_argument("--out", type=Path, default=FIGURES, metavar="DIR", help="folder of figures")
    options = parser.parse_args(arguments)
    if options.draw is not None:
        result, known = json.loads(options.draw.read_text()), ", ".join(figures.DRAW)
        if result.get("benchmark") not in figures.DRAW:
            parser.error(f"--draw: got a result of {result.get('benchmark')}, there are figures of {known}")
        print(*figures.draw(result, options.out), sep="\n")
        return 0
    before = README.read_text()
    after, old = rewritten(before), old_figures()
    is_old = after != before or bool(old)
    if options.check:
        if is_old:
            print(
                f"README.md or figures differ from benchmarks/results {old}: run python -m benchmarks.report"
            )
        return int(is_old)
    # Pictures first: a README whose pictures could not be drawn would name files that are not there.
    for name in old:
        figures.draw(read(name), options.out)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
