"""Make the README's tables and figures from the files in benchmarks/results, or check that they agree.

    python -m benchmarks.report [--check]
    python -m benchmarks.report --draw FILE [--out DIR]    the figures of one result, anybody's

A table, with its pictures, stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``. Where there is no
result file yet, it says how to get one, and may be left out. Figures are in benchmarks/figures; each has the digest of
the result it shows.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support import block_manager_figure, online_figure, readme_kernels, readme_online, readme_vllm
from benchmarks.support.figure_files import is_drawn_from
from benchmarks.support.readme_blocks import (
    block_manager_table,
    kv_append_table,
    kv_cow_clone_table,
    streaming_table,
)
from benchmarks.support.readme_compare import (
    ARRIVALS_COMMAND,
    COMPARISON_COMMAND,
    arrivals_table,
    offline_table,
    switches_table,
)

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "benchmarks" / "figures"

Result = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A table of README."""

    file: str
    """Below ``RESULTS``."""
    make: Callable[[Result], str]
    command: str
    """That writes the file."""

    def text(self) -> str:
        """Return the table, or how to get one."""
        result = read(self.file)
        return (
            f"Not published yet: `{self.command}` measures on a GPU." if result is None else self.make(result)
        )


TABLES = {
    "block_manager": Table(
        "cpu/block_manager.json", block_manager_table, "python -m benchmarks.block_manager"
    ),
    "kv_cow_clone": Table(
        "h200/kv_cow_clone_float16.json",
        kv_cow_clone_table,
        "python -m benchmarks.kv_cow_clone --device cuda --dtype float16",
    ),
    "kv_append": Table(
        "h200/kv_append.json", kv_append_table, "python -m benchmarks.kv_append --device cuda --dtype float16"
    ),
    "streaming": Table("h200/streaming.json", streaming_table, "python -m benchmarks.streaming"),
    "kernels": Table("h200/kernels.json", readme_kernels.kernels_table, readme_kernels.COMMAND),
    "offline_compare": Table(
        "h200/offline_compare.json", offline_table, f"{COMPARISON_COMMAND} --scenes decode offline"
    ),
    "offline_mixed": Table("h200/offline_mixed.json", offline_table, f"{COMPARISON_COMMAND} --scenes mixed"),
    "offline_switches": Table(
        "h200/offline_switches.json", switches_table, f"{COMPARISON_COMMAND} --compare-fused-mlp"
    ),
    "arrivals": Table("h200/arrivals.json", arrivals_table, ARRIVALS_COMMAND),
    "vllm_serving": Table("h200/vllm_serving.json", readme_vllm.serving_table, readme_vllm.SERVING_COMMAND),
    "vllm_serving_4_api_servers": Table(
        "h200/vllm_serving_4_api_servers.json",
        readme_vllm.serving_table,
        readme_vllm.FOUR_API_SERVERS_COMMAND,
    ),
    "vllm_serving_host": Table(
        "cpu/vllm_serving_host.json", readme_vllm.serving_table, readme_vllm.HOST_ONLY_COMMAND
    ),
    "vllm_parts": Table("h200/vllm_parts.json", readme_vllm.parts_table, readme_vllm.PARTS_COMMAND),
    "vllm_llama": Table("h200/vllm_llama.json", readme_vllm.llama_table, readme_vllm.LLAMA_COMMAND),
    "online_compare": Table("h200/online_compare.json", readme_online.online_table, readme_online.COMMAND),
}
DRAW = {"block_manager": block_manager_figure.draw, "online_compare": online_figure.draw}
"""Benchmark -> what draws its result into a folder and returns the files."""
DRAWN_RESULTS = ("cpu/block_manager.json", "h200/online_compare.json")


def read(name: str) -> Result | None:
    """Return a result file's content; None where there is none."""
    path = RESULTS / name
    if not path.is_file():
        return None
    result: Result = json.loads(path.read_text())
    return result


def rewritten(text: str) -> str:
    """Return ``text`` with every table made anew."""
    for name, table in TABLES.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end of table -->)"
        found = re.findall(pattern, text, flags=re.DOTALL)
        may_be_absent = read(table.file) is None
        if len(found) != 1 and not (not found and may_be_absent):
            raise SystemExit(f"README.md: table {name}: expected once, found {len(found)} times")
        for begin, end in found:
            # Split, not substitute: a table may hold what a pattern would read.
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}{table.text()}\n{end}{rest.partition(end)[2]}"
    return text


def old_figures() -> list[str]:
    """Return the names of results whose figures are not there or show another result."""
    old = []
    for name in DRAWN_RESULTS:
        result = read(name)
        if result is not None:
            files = figure_files(result)
            old += [] if all(is_drawn_from(FIGURES / file, result) for file in files) else [name]
    return old


def figure_files(result: Result) -> list[str]:
    """Return the names of the files that ``DRAW`` writes for a result."""
    if result["benchmark"] == "online_compare":
        modes = dict.fromkeys(row["mode"] for row in result["rows"])
        names = [online_figure.figure_name(mode) for mode in modes]
    else:
        names = [block_manager_figure.NAME]
    return [f"{name}.{ending}" for name in names for ending in ("png", "svg")]


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
        result = json.loads(options.draw.read_text())
        if result.get("benchmark") not in DRAW:
            parser.error(
                f"--draw: got a result of {result.get('benchmark')}, there are figures of {', '.join(DRAW)}"
            )
        for path in DRAW[result["benchmark"]](result, options.out):
            print(path)
        return 0
    before = README.read_text()
    after, old = rewritten(before), old_figures()
    if options.check:
        if after != before or old:
            print(
                f"README.md or figures differ from benchmarks/results {old}: run python -m benchmarks.report"
            )
        return int(after != before or bool(old))
    # Pictures first: a README whose pictures could not be drawn would name files that are not there.
    for name in old:
        result = read(name)
        assert result is not None
        DRAW[result["benchmark"]](result, options.out)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
