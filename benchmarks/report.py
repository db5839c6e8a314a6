"""Make the tables and figures of docs/performance, and README's, from the files in benchmarks/results.

    python -m benchmarks.report [--check] [--as-of COMMIT]
    python -m benchmarks.report --draw FILE [--out DIR]    the figures of one result

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``. Figures are in docs/figures; each has the
digest of the result it shows. Results without a table have a line each (benchmarks/reports/other_runs.py). A result in
which an engine was missing or failed is not published.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.reports import commits, engines, figures, floors, gains, parts, serving
from benchmarks.reports.other_runs import OTHER_RUNS
from benchmarks.reports.peers import Fastest, fastest
from benchmarks.reports.text import Result, grouped, markdown

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "docs" / "figures"
LATER_COMMITS = "later_commits.json"
DRAWN_RESULTS = (
    "cpu/block_manager.json",
    "cpu/state_hits.json",
    "h200/online_compare.json",
    "h200/vllm_trace.json",
    "h200/vllm_trace_rust.json",
)
DRAWN_TOGETHER = {
    "tokens_per_s": (
        "h200/offline_compare.json",
        "h200/vllm_qwen3.json",
        "h200/vllm_llama8b_start_2.json",
        "h200/vllm_llama8b_fp8.json",
        "h200/vllm_llama8b_awq.json",
        "h200/qwen3_30b_a3b.json",
    ),
    "start_up": (
        "h200/start_up_gpt2.json",
        "h200/start_up_qwen3.json",
        "h200/start_up_llama8b_fp8.json",
        "h200/start_up_gemma3_before.json",
        "h200/start_up_gemma3.json",
    ),
}
"""Picture -> results of one benchmark; of starts of one model the newest of each side is shown."""


def problems(result: Result) -> list[str]:
    """Return why a result cannot be published: what is missing or failed, and what is unproved."""
    absent = {**result.get("missing", {}), **result.get("failed", {})}
    reasons = "; ".join(f"{name} ({why.splitlines()[0]})" for name, why in absent.items())
    found = [f"not every engine has run: {reasons}"] if absent else []
    failed = (row for row in result.get("rows", ()) if row.get("failed"))
    for backend, rows in grouped(failed, "backend").items():
        found.append(f"{sum(row['failed'] for row in rows)} requests of {backend} failed")
    if not all("times" in row for row in result.get("comparison", ())):
        found.append("both sides are needed at every load")
    return found + (parts.kernel_problems(result) if "families" in result else [])


def read(name: str) -> Result:
    """Return a result file's content."""
    result: Result = json.loads((RESULTS / name).read_text())
    return result


@functools.cache
def published() -> Fastest:
    """Return each peer's fastest median of every work, of all committed results."""
    return fastest(json.loads(path.read_text()) for path in sorted(RESULTS.glob("*/*.json")))


def _offline_table(result: Result) -> str:
    return engines.offline_table(result, published())


def _poisson_table(result: Result) -> str:
    return serving.poisson_table(result, published())


class Table(NamedTuple):
    """A table of one result: its page in docs/performance, and its file in benchmarks/results."""

    page: str
    file: str
    make: Callable[[Result], str]

    def text(self) -> str:
        """Return the table with its losses and sources, or exit with why it cannot be published."""
        result = read(self.file)
        if found := problems(result):
            raise SystemExit(f"{self.file}: {'; '.join(found)}")
        return f"{self.make(result)}\n\nSource digest: {self.sources()}."

    def sources(self) -> str:
        """Return digest, commit and date of what was measured, and how many later commits changed it."""
        result = read(self.file)
        digest = result.get("sources_digest")
        commit = commits.COMMITS.get(digest or self.file)
        if commit is None:
            raise SystemExit(
                f"{self.file}: the commit of its sources is not in benchmarks/reports/commits.py"
            )
        known = (
            f"`{digest}` (commit {commit})" if digest else f"not recorded (result added with commit {commit})"
        )
        later = commits.read(RESULTS / LATER_COMMITS)
        return f"{known}, measured on {result['date'][:10]}; {later.since(commit)}"


TABLES = {
    "online_compare": Table("servers", "h200/online_compare.json", serving.trace_table),
    "vllm_trace": Table(
        "servers", "h200/vllm_trace.json", functools.partial(serving.trace_table, name="vllm_trace")
    ),
    "vllm_serving_host": Table("servers", "cpu/vllm_serving_host.json", _poisson_table),
    "vllm_serving_host_rust": Table("servers", "cpu/vllm_serving_host_rust.json", _poisson_table),
    "streams_llama8b": Table("servers", "h200/streams_llama8b.json", serving.streams_table),
    "offline_compare": Table("engines", "h200/offline_compare.json", _offline_table),
    "qwen3_30b_a3b": Table("engines", "h200/qwen3_30b_a3b.json", _offline_table),
    "vllm_qwen3": Table("inside_vllm", "h200/vllm_qwen3.json", _offline_table),
    "vllm_llama8b_start_1": Table("inside_vllm", "h200/vllm_llama8b_start_1.json", _offline_table),
    "vllm_llama8b_fp8": Table("inside_vllm", "h200/vllm_llama8b_fp8.json", _offline_table),
    "vllm_llama8b_awq": Table("inside_vllm", "h200/vllm_llama8b_awq.json", _offline_table),
    "vllm_ngram_llama8b": Table("inside_vllm", "h200/vllm_ngram_llama8b.json", _offline_table),
    "vllm_request_kinds_qwen3": Table(
        "inside_vllm", "h200/vllm_request_kinds_qwen3.json", engines.request_kinds_table
    ),
    "vllm_parts": Table("inside_vllm", "h200/vllm_parts.json", engines.parts_table),
    "block_manager": Table("parts", "cpu/block_manager.json", parts.block_manager_table),
    "prefix_hits": Table("parts", "cpu/prefix_hits.json", parts.prefix_hits_table),
    "kernels": Table("parts", "h200/kernels.json", parts.kernels_table),
    "kernels_int4": Table("parts", "h200/kernels_int4.json", parts.kernels_table),
    "kernels_float8_rows": Table("parts", "h200/kernels_float8_rows.json", parts.kernels_table),
}


_OTHER_RUNS = """### Other runs

Results in `benchmarks/results` that no table shows. Ratios of engines and servers are to a peer's fastest median in
any published run, as in the tables, from the smallest of a result's cases to the largest; losses are counted within
the run. Each file holds all cases, the versions and the command."""


def other_runs() -> str:
    """Return a line for each result that no table shows, or exit with why one cannot be published."""
    lines = []
    for file, run in OTHER_RUNS.items():
        result = read(file)
        if run.say is not None and (found := problems(result)):
            raise SystemExit(f"{file}: {'; '.join(found)}")
        commit = commits.COMMITS.get(result.get("sources_digest", file))
        when = result["date"][:10] + (f", commit {commit}" if commit else "")
        figures = f" {run.say(result, published())}" if run.say else ""
        lines.append(f"- `{file}` ({when}): {run.what}.{figures}")
    return "\n".join(lines)


def sources() -> str:
    """Return which table was measured on which sources, and the results without a table."""
    digests = [digest for table in TABLES.values() if (digest := read(table.file).get("sources_digest"))]
    rows = [(f"[{name}]({table.page}.md)", table.sources()) for name, table in TABLES.items()]
    text = (
        f"{len(digests)} of {len(rows)} tables record on which sources of the package they were measured: "
        f"{len(set(digests))} different states. The other results are older than the digest.\n\n"
    )
    return f"{text}{markdown(('table', 'source digest'), rows)}\n\n{_OTHER_RUNS}\n\n{other_runs()}"


def floors_table() -> str:
    """Return decode steps of Rose in all published results beside the time that their bytes take."""
    files = [*(table.file for table in TABLES.values()), *OTHER_RUNS]
    return floors.table({file: read(file) for file in files})


def summary() -> str:
    """Return README's tables."""
    return gains.tables(read, published())


def pages() -> dict[str, dict[str, Callable[[], str]]]:
    """Return what makes each table, by page and name."""
    found = {
        "README.md": {"summary": summary},
        "docs/performance/index.md": {"sources": sources},
        "docs/performance/floors.md": {"floors": floors_table},
    }
    for name, table in TABLES.items():
        found.setdefault(f"docs/performance/{table.page}.md", {})[name] = table.text
    return found


def rewritten(page: str) -> str:
    """Return a page's text with every table regenerated."""
    text = (ROOT / page).read_text()
    for name, make in pages()[page].items():
        found = re.findall(rf"(<!-- table: {name} -->\n).*?(<!-- end of table -->)", text, flags=re.DOTALL)
        if len(found) != 1:
            raise SystemExit(f"{page}: table {name}: expected once, found {len(found)} times")
        begin, end = found[0]
        # Split, not substitute: a table may hold what a pattern would read.
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{make()}\n\n{end}{rest.partition(end)[2]}"
    return text


def drawn() -> dict[str, Result]:
    """Return what figures show, one result or several, by what they are called."""
    found = {Path(file).stem: read(file) for file in DRAWN_RESULTS}
    for name, files in DRAWN_TOGETHER.items():
        results = [read(file) for file in files]
        found[name] = {"benchmark": results[0]["benchmark"], "results": results}
    return found


def old_figures() -> list[str]:
    """Return the names of figures that are not there or show another result."""
    return [name for name, result in drawn().items() if not figures.are_drawn(result, name, FIGURES)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check; the status is 1 if a page or a figure is not what the results make."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--check", action="store_true", help="only say what is out of date; exit 1 if there is")
    add(
        "--as-of",
        default="HEAD",
        metavar="COMMIT",
        help="count commits after those of the results up to this one",
    )
    add("--draw", type=Path, metavar="FILE", help="only draw this result (from --json), named after it")
    add("--out", type=Path, default=FIGURES, metavar="DIR", help="folder of figures")
    options = parser.parse_args(arguments)
    if options.draw is not None:
        result, known = json.loads(options.draw.read_text()), ", ".join(figures.DRAW)
        if result.get("benchmark") not in figures.DRAW:
            parser.error(f"--draw: got a result of {result.get('benchmark')}, there are figures of {known}")
        print(*figures.draw(result, options.draw.stem, options.out), sep="\n")
        return 0
    if not options.check:
        later = commits.count(ROOT, options.as_of)
        if later is None:
            print("no whole history here: the numbers of later commits stay as they are")
        else:
            commits.write(RESULTS / LATER_COMMITS, later)
    texts = {page: rewritten(page) for page in pages()}
    changed = {path: text for path, text in texts.items() if text != (ROOT / path).read_text()}
    undrawn = old_figures()
    if options.check:
        if old := [*changed, *undrawn]:
            print(f"not what benchmarks/results make: {', '.join(old)}: run python -m benchmarks.report")
        return int(bool(old))
    # Pictures first: a page whose pictures could not be drawn would name files that are not there.
    for name in undrawn:
        figures.draw(drawn()[name], name, options.out)
    for path, text in changed.items():
        (ROOT / path).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
