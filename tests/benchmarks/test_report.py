"""benchmarks/report.py: tables and figures of the documents are those that the committed results make."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import block_manager, report
from benchmarks.reports import commits, engines, figures, parts, peers, serving
from tests.benchmarks.test_readme_compare import report as engine_report
from tests.benchmarks.test_readme_compare import row as engine_row


@pytest.mark.parametrize("page", report.pages())
def test_pages_and_results_agree(page: str) -> None:
    assert report.rewritten(page) == (report.ROOT / page).read_text()


def test_figures_and_results_agree() -> None:
    assert report.old_figures() == []


@pytest.mark.parametrize("name", report.TABLES)
def test_every_table_has_its_command_losses_and_sources(name: str) -> None:
    *_, source, verdict, sources = re.sub(r"\n\n- ", "\n- ", report.TABLES[name].text()).split("\n\n")
    assert re.match(r"(Medians|Shares)\b.*; .*`python -m benchmarks\.", source)
    assert re.match(
        r"(Slower\b.* in \d+ of |Fewer hits in \d+ of |No losses in |A gain of 2% or more in )", verdict
    )
    assert re.match(
        r"Source digest: (`[0-9a-f]{16}` \(|not recorded \(result added with )commit [0-9a-f]{7}\), measured on "
        r"[0-9-]{10}; \d+ later commits? up to [0-9a-f]{7} changed the package\.$",
        sources,
    )


@pytest.mark.parametrize("name", report.TABLES)
def test_every_command_can_still_be_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    shown = re.findall(r"`python -m (benchmarks\.\w+)( .*?)?`", report.TABLES[name].text())
    ((module, arguments),) = shown
    importlib.import_module(module).parse_options(shlex.split(arguments))


def test_the_summary_has_both_hosts_and_names_losses() -> None:
    rows = [line for line in report.summary().splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 9 and {row.count("|") for row in rows} == {5}
    assert sum("standalone" in row for row in rows) == 2 and sum("inside vLLM" in row for row in rows) == 5
    slower = [row for row in rows if "(slower)" in row]
    assert slower == [row for row in rows if re.search(r" 0\.\d\dx", row)] != []


def test_the_index_says_which_sources_were_measured() -> None:
    text, files = report.sources(), {name: table.file for name, table in report.TABLES.items()}
    digests = [report.read(file).get("sources_digest") for file in files.values()]
    known = [digest for digest in digests if digest]
    assert (
        f"{len(known)} of {len(digests)} tables record" in text
        and f"{len(set(known))} different states" in text
    )
    lines = dict(re.findall(r"^\| \[(\w+)\]\(\w+\.md\) \| (.*) \|$", text, re.MULTILINE))
    assert list(lines) == list(files)
    for line, digest in zip(lines.values(), digests, strict=True):
        assert line.startswith(
            f"`{digest}` (commit " if digest else "not recorded (result added with commit "
        )


@pytest.fixture(scope="module")
def history() -> Callable[..., str]:
    """Return a function that asks git."""
    if commits.count(report.ROOT, "HEAD") is None:
        pytest.skip("needs the whole history, which a source distribution and a shallow clone do not have")
    return lambda *arguments: commits.git(report.ROOT, *arguments)


def test_later_commits_are_counted_at_a_commit_that_is_a_part_of_the_history(
    history: Callable[..., str],
) -> None:
    noted = commits.read(report.RESULTS / report.LATER_COMMITS)
    assert commits.count(report.ROOT, noted.as_of) == noted
    history("merge-base", "--is-ancestor", noted.as_of, "HEAD")


def test_counts_are_of_commits_that_change_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit(name: str) -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(str(len(shown)))
        commits.git(tmp_path, "add", "--all")
        commits.git(tmp_path, *identity, "commit", "--quiet", "--message", "some")
        shown.append(commits.git(tmp_path, "rev-parse", "--short=7", "HEAD"))
        return shown[-1]

    identity, shown = ("-c", "user.name=a", "-c", "user.email=a@b"), list[str]()
    assert commits.count(tmp_path, "HEAD") is None
    commits.git(tmp_path, "init", "--quiet")
    first = commit("rose_backend/a.py")
    commit("docs/a.md"), commit("rose_backend/README.md"), commit("rose_backend/a.py")
    (tmp_path / "rose_backend/deep").mkdir()
    noted = commit("rose_backend/deep/b.py")
    commit("rose_backend/a.py")
    monkeypatch.setattr(commits, "COMMITS", {"0123": first, "4567": noted})
    assert commits.count(tmp_path, noted) == commits.LaterCommits(noted, {first: 2, noted: 0})
    last = commits.count(tmp_path, "HEAD")
    assert last == commits.LaterCommits(shown[-1], {first: 3, noted: 1})
    assert last.since(noted) == f"1 later commit up to {shown[-1]} changed the package"


def test_no_result_that_was_replaced_has_a_faster_peer(history: Callable[..., str]) -> None:
    """A run on a slow host may replace one on a fast host; then the latter belongs into ``results/earlier``."""
    log = history(
        "log", "--format=", "--raw", "--no-abbrev", "--no-renames", "--", "benchmarks/results/*.json"
    )
    blobs = {line.split()[3]: line.split("\t")[1] for line in log.splitlines() if line.split()[4] in "AM"}
    published, faster = report.published(), []
    for blob, path in blobs.items():
        result = json.loads(history("cat-file", "blob", blob))
        for work, median in peers.fastest([result]).items():
            known = published.get(work, median)
            if peers.better(str(work[-1]), median, known) != known:
                faster.append((path, blob, work, median, known))
    assert len(blobs) > 60 and not faster


def test_a_ratio_is_to_the_fastest_run_of_a_peer_and_names_it() -> None:
    def run(device: str = "some GPU", release: str = "1", **medians: float) -> dict[str, Any]:
        rows = [engine_row("decode, 1", side, median) for side, median in medians.items()]
        versions = {side: {"version": release} for side in medians}
        return {**engine_report(rows), "benchmark": "offline_compare", "device": device, "backends": versions}

    named = run(rose=1.0, vllm=6.0, sglang=5.0)
    others = [
        run(vllm=3.0, sglang=7.0, rose=0.1),
        run(device="another", vllm=2.0),
        run(release="2", vllm=2.0),
    ]
    others.append({**run(vllm=2.0), "settings": {"model": "another", "dtype": "float16"}})
    others.append({**run(vllm=2.0), "settings": {"model": "some model", "dtype": "bfloat16"}})
    text = engines.offline_table(named, peers.fastest([named, *others]))
    assert "| decode, 1 | 1 ms | 6 ms | 5 ms | 3.00x (vLLM 3 ms) |" in text and "Ratios are to" in text
    alone = engines.offline_table(named)
    assert "| decode, 1 | 1 ms | 6 ms | 5 ms | 5.00x |" in alone and "Ratios are to" not in alone


def test_a_load_that_is_a_queue_is_not_summarized() -> None:
    result = report.read("h200/vllm_trace.json")
    assert serving.ttft_at(result, 0.028, peers.NONE).keys() == {"rose-in-vllm", "vllm"}
    with pytest.raises(ValueError, match=r"scale 0\.009: rose-in-vllm answers 82% of the load"):
        serving.ttft_at(result, 0.009, report.published())


def recounted_losses(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the losses that the figures of a result show; from the scripts that write them."""
    count: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "block_manager": lambda: block_manager.losses(result["scenes"]),
        "kv_append": lambda: parts.variant_losses(result["rows"], parts.OURS["kv_append"]),
        "kv_cow_clone": lambda: parts.variant_losses(result["rows"], parts.OURS["kv_cow_clone"]),
        "offline_compare": lambda: engines.losses(result["rows"]),
        "online_compare": lambda: serving.trace_losses(result["rows"]),
    }
    return count[result["benchmark"]]()


@pytest.mark.parametrize("path", report.RESULTS.glob("*/*.json"), ids=lambda path: path.stem)
def test_losses_in_a_result_are_those_that_its_figures_show(path: Path) -> None:
    result = json.loads(path.read_text())
    if "losses" in result:
        assert recounted_losses(result) == result["losses"]


def test_no_result_draws_over_the_pictures_of_another() -> None:
    drawn = []
    for name in report.DRAWN_RESULTS:
        result = report.read(name)
        drawn += figures.DRAW[result["benchmark"]](result, Path(name).stem)
    assert len(set(drawn)) == len(drawn) > len(report.DRAWN_RESULTS)


def test_pictures_and_pages_that_pages_name_are_there() -> None:
    named = set()
    for path in (report.ROOT / "docs" / "performance").glob("*.md"):
        links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
        named |= {(path.parent / link).resolve() for link in links}
    assert report.FIGURES / "block_manager_cost.svg" in named
    assert [path for path in named if not path.is_file()] == []


def test_a_missing_table_is_named(one_result: Path) -> None:
    one_result.write_text(json.dumps(block_manager_result(1)))
    (report.ROOT / "docs/performance/parts.md").write_text("no tables here")
    with pytest.raises(SystemExit, match=r"parts\.md: table some: expected once, found 0 times"):
        report.rewritten("docs/performance/parts.md")


@pytest.fixture
def one_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let one page have one table of a result file that the test writes; return the file."""
    table = report.Table("parts", "cpu/some.json", lambda result: f"| {result['value']} |")
    monkeypatch.setattr(report, "TABLES", {"some": table})
    monkeypatch.setattr(report, "DRAWN_RESULTS", ("cpu/some.json",))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(commits, "COMMITS", {"0123": "abcdef0"})
    commits.write(tmp_path / report.LATER_COMMITS, commits.LaterCommits("fedcba9", {"abcdef0": 1}))
    monkeypatch.setattr(report, "summary", lambda: "in short")
    monkeypatch.setattr(report, "sources", lambda: "of what")
    (tmp_path / "docs/performance").mkdir(parents=True)
    for page, name in (
        ("README", "summary"),
        ("docs/performance/index", "sources"),
        ("docs/performance/parts", "some"),
    ):
        text = f"before\n<!-- table: {name} -->\nold\n<!-- end of table -->\nbehind\n"
        (tmp_path / f"{page}.md").write_text(text)
    (tmp_path / "cpu").mkdir()
    return tmp_path / "cpu" / "some.json"


def block_manager_result(value: int) -> dict[str, Any]:
    microseconds = {"median": 1.0, "p10": 1.0, "p90": 1.0}
    point = {"num_blocks": 1000, "side": "stock", "whole_block_us_per_row": microseconds}
    return {
        "benchmark": "block_manager",
        "value": value,
        "date": "2026-11-21T15:40:18+00:00",
        "sources_digest": "0123",
        "machine": {"cpu": "a processor"},
        "settings": {"rows": 256, "block_size": 16},
        "scenes": {"pool_size": [point], "sequence_length": []},
    }


def test_tables_and_figures_follow_their_result(one_result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib (the bench or dev extra)")
    out, page = ["--out", str(report.FIGURES)], report.ROOT / "docs/performance/parts.md"
    for value in (1, 2):
        one_result.write_text(json.dumps(block_manager_result(value)))
        assert report.main(["--check"]) == 1
        assert "run python -m benchmarks.report" in capsys.readouterr().out
        assert report.main(out) == 0
        sources = (
            "Source digest: `0123` (commit abcdef0), measured on 2026-11-21; "
            "1 later commit up to fedcba9 changed the package."
        )
        marks = "before\n<!-- table: some -->", "<!-- end of table -->\nbehind\n"
        assert page.read_text() == f"\n\n| {value} |\n\n{sources}\n\n".join(marks)
        assert "in short" in (report.ROOT / "README.md").read_text()
        assert report.main(["--check"]) == 0
    page.write_text(page.read_text().replace("| 2 |", "| 3 |"))
    assert report.main(["--check"]) == 1
    assert "docs/performance/parts.md" in capsys.readouterr().out
    (report.FIGURES / "some_cost.svg").unlink()
    assert report.main(["--check"]) == 1
    assert "cpu/some.json" in capsys.readouterr().out


def test_pages_stay_as_they_are_where_a_picture_cannot_be_drawn(
    one_result: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(figures, "draw", draw)
    one_result.write_text(json.dumps(block_manager_result(1)))
    before = {page: (report.ROOT / page).read_text() for page in report.pages()}
    with pytest.raises(OSError, match="no space left"):
        report.main([])
    assert {page: (report.ROOT / page).read_text() for page in report.pages()} == before


def test_a_result_that_is_not_whole_is_not_published(one_result: Path) -> None:
    failed = {**block_manager_result(1), "rows": [], "failed": {"vllm": "it died\nat line 3"}}
    one_result.write_text(json.dumps(failed))
    with pytest.raises(SystemExit, match=r"cpu/some.json: not every engine has run: vllm \(it died\)"):
        report.main(["--check"])


def test_only_results_with_a_figure_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    path.write_text('{"benchmark": "arrivals"}')
    with pytest.raises(SystemExit) as stopped:
        report.main(["--draw", str(path)])
    assert stopped.value.code == 2
    assert "--draw: got a result of arrivals, there are figures of block_manager" in capsys.readouterr().err
