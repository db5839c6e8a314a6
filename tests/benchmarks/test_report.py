"""benchmarks/report.py: tables, figures and sentences of the documents are those that the committed results make."""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import block_manager, report
from benchmarks.reports import commits, engines, figures, gains, parts, peers, serving
from benchmarks.reports.engines import HOST, STOCK, by_case, compared, fastest_peers
from benchmarks.reports.figures import is_drawn_from
from benchmarks.reports.other_runs import OTHER_RUNS, Run, start_up
from benchmarks.reports.text import grouped, milliseconds
from benchmarks.support import run_facts, timing


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


def test_the_summary_has_every_model_and_names_losses() -> None:
    rows = [line for line in report.summary().splitlines() if line.startswith("| ")]
    steps = [row for row in rows if row.count("|") == 8][2:]
    servers = [row for row in rows if row.count("|") == 5][2:]
    assert (len(steps), len(servers)) == (len(gains.MODELS), len(gains.SERVERS))
    slower = [row for row in steps if "(slower)" in row]
    assert slower == [row for row in steps if re.search(r" 0\.\d\dx", row)] != []


def test_gains_are_of_peers_over_rose_and_never_rounded_up_to_even(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(case: str, backend: str, value: float) -> dict[str, Any]:
        return {"case": case, "backend": backend, "figure": "s", "figures": {"s": {"median": value}}}

    step, offline = "step, 1 requests, greedy", "offline, 1 x 1 in, 1 out, greedy"
    steps = [
        row(step, HOST, 1.0),
        row(step, STOCK, 0.999),
        row(offline, HOST, 1.0),
        row(offline, STOCK, 1.25),
    ]
    streams = [
        {"arrivals": kind, "backend": side, "p50_ttft_ms": time}
        for kind, side, time in (("fixed", HOST, 2.0), ("fixed", STOCK, 3.0), ("poisson", HOST, 9.0))
    ]
    results = {"steps": {"rows": steps}, "streams": {"rows": streams}}
    monkeypatch.setattr(gains, "MODELS", (gains.Model("A", "steps", (1,), "streams"),))
    monkeypatch.setattr(gains, "SERVERS", ())
    text = gains.tables(results.__getitem__, peers.NONE)
    assert "| A | 1 | 1 | 0.999, vLLM | 0.99x (slower) | 1.25x | 1.50x |" in text


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


def test_pages_have_at_most_twenty_tables() -> None:
    pages = (report.ROOT / "docs/performance").glob("*.md")
    shown = [name for page in pages for name in re.findall(r"<!-- table: (\w+) -->", page.read_text())]
    assert sorted(shown) == sorted([*report.TABLES, "floors", "sources"])
    assert len(report.TABLES) + 1 <= 20


def test_a_result_with_a_loss_to_a_peer_has_a_table() -> None:
    beside_itself = ("h200/offline_switches", "h200/kv_cow_clone", "cpu/kv_cow_clone", "h200/kv_append")
    lines = (line for line in report.other_runs().splitlines() if re.search("Slower|Fewer hits", line))
    assert [
        line for line in lines if not line.startswith(tuple(f"- `{file}" for file in beside_itself))
    ] == []


def test_every_result_has_a_table_or_a_line() -> None:
    files = [path.relative_to(report.RESULTS).as_posix() for path in report.RESULTS.glob("*/*.json")]
    shown = [*(table.file for table in report.TABLES.values()), *OTHER_RUNS]
    assert sorted(shown) == sorted(file for file in files if not file.startswith("earlier/"))
    assert [file for file in OTHER_RUNS if f"- `{file}` (20" not in report.sources()] == []


def test_a_result_that_is_not_whole_has_no_line(one_result: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_result.write_text(json.dumps({**block_manager_result(1), "failed": {"vllm": "it died"}}))
    monkeypatch.setattr(report, "OTHER_RUNS", {"cpu/some.json": Run("some", start_up)})
    with pytest.raises(SystemExit, match=r"cpu/some.json: not every engine has run: vllm \(it died\)"):
        report.other_runs()


def test_a_peer_is_as_fast_as_in_any_result_with_a_table_or_without() -> None:
    published, slower = report.published(), []
    for path in report.RESULTS.glob("*/*.json"):
        for work, median in peers.fastest([json.loads(path.read_text())]).items():
            if (
                work not in published
                or peers.better(str(work[-1]), median, published[work]) != published[work]
            ):
                slower.append((path.name, work))
    assert slower == []
    in_tables = peers.fastest(report.read(table.file) for table in report.TABLES.values())
    assert any(published[work] != median for work, median in in_tables.items()), "of results without a table"


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
    for name, result in report.drawn().items():
        drawn += figures.DRAW[result["benchmark"]](result, name)
    assert len(set(drawn)) == len(drawn) > len(report.DRAWN_RESULTS)


def test_pictures_of_several_results_show_the_newest_published_ones() -> None:
    files = [*(table.file for table in report.TABLES.values()), *OTHER_RUNS]
    shown = [file for files in report.DRAWN_TOGETHER.values() for file in files]
    assert set(shown) <= set(files)
    assert {file for file in files if file.startswith("h200/start_up_")} <= set(shown)

    def cases(result: dict[str, Any]) -> set[tuple[str, str]]:
        decode = (row for row in result["rows"] if (row["scene"], row["mode"]) == ("decode", "greedy"))
        return {(row["case"], row["backend"]) for row in decode}

    results = {file: report.read(file) for file in files if file.startswith("h200/")}
    for file in report.DRAWN_TOGETHER["tokens_per_s"]:
        newer = [
            name
            for name, result in results.items()
            if result.get("benchmark") == "offline_compare"
            and result["settings"]["model"] == results[file]["settings"]["model"]
            and result["date"] > results[file]["date"]
            and "speculative_config" not in str(result["settings"])
            and cases(results[file]) <= cases(result)
        ]
        assert newer == []


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
    monkeypatch.setattr(report, "DRAWN_TOGETHER", {})
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(commits, "COMMITS", {"0123": "abcdef0"})
    commits.write(tmp_path / report.LATER_COMMITS, commits.LaterCommits("fedcba9", {"abcdef0": 1}))
    monkeypatch.setattr(report, "summary", lambda: "in short")
    monkeypatch.setattr(report, "sources", lambda: "of what")
    monkeypatch.setattr(report, "floors_table", lambda: "how near")
    (tmp_path / "docs/performance").mkdir(parents=True)
    for page, name in (
        ("README", "summary"),
        ("docs/performance/index", "sources"),
        ("docs/performance/floors", "floors"),
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
    assert "some: run python" in capsys.readouterr().out


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


Result = dict[str, Any]
STEPS = [f"step, {num_requests} requests, greedy" for num_requests in (1, 8, 32, 128, 256)]


def medians(name: str) -> dict[str, dict[str, float]]:
    """Return case -> side -> median of a result."""
    cases = by_case(report.read(name)["rows"])
    return {case: {side: compared(row) for side, row in sides.items()} for case, sides in cases.items()}


def turns(name: str, case: str, side: str) -> list[float]:
    row = by_case(report.read(name)["rows"])[case][side]
    return sorted(turn[row["figure"]] for turn in row["turns"])


def span(values: list[float], form: str = ".2f") -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def shares(name: str) -> str:
    """Return the range of Rose's greedy steps inside vLLM over vLLM's fastest published ones."""
    result = report.read(name)
    cases = {case: sides for case, sides in by_case(result["rows"]).items() if case in STEPS}
    fastest = {case: fastest_peers(result, sides, report.published())[STOCK] for case, sides in cases.items()}
    return span([compared(sides[HOST]) / fastest[case] for case, sides in cases.items()])


def first_token(name: str, scale: float, side: str) -> list[float]:
    rows = grouped(report.read(name)["rows"], "mode", "scale", "backend")["greedy", scale, side]
    return [row["p50_ttft_ms"] for row in rows]


def answered(name: str, scale: float, side: str) -> str:
    figures = serving.points(report.read(name)["rows"])["greedy", scale][side]
    return f"{figures['request_throughput']:.0f}"


def at_a_glance() -> str:
    qwen3, llama, float8 = (
        shares(f"h200/{name}.json") for name in ("vllm_qwen3", "vllm_llama8b_start_1", "vllm_llama8b_fp8")
    )
    return (
        f"a decode step inside vLLM takes {qwen3} of the fastest time that we measured for vLLM with Qwen3 0.6B, "
        f"{llama} with Llama 3.1 8B, and {float8} with its weights in float8."
    )


def attention_alone() -> str:
    cases = medians("h200/vllm_parts.json")
    worth = [cases[case][STOCK] / cases[case][f"{HOST}, only attention"] for case in STEPS if case in cases]
    slower, faster = 1 - min(worth), max(worth) - 1
    return f"switched on alone inside vLLM they make a step {slower:.0%} slower to {faster:.0%} faster"


def gained(model: str) -> tuple[list[str], str]:
    """Return what README says that a model gains in a step, by numbers of requests, and in a batch."""
    rows = (line.strip("| ").split(" | ") for line in report.summary().splitlines())
    (row,) = (row for row in rows if row[0] == model)
    return row[4].removesuffix(" (slower)").split(" / "), row[5]


FORMATS = ("Llama 3.1 8B", "Llama 3.1 8B, FP8, a scale per row", "Llama 3.1 8B, INT4 (AWQ)")


def in_short() -> str:
    """Return the gains of a step and of a batch with Llama 3.1 8B, in three formats."""
    steps, batches = zip(*map(gained, FORMATS), strict=True)
    bf16, fp8, int4 = (f"{min(of_format)} to {max(of_format)}" for of_format in steps)
    return (
        f"a step is {bf16} as fast in bfloat16, {fp8} in FP8 and {int4} in INT4; a whole batch gains less: "
        f"{batches[0]}, {batches[1]} and {batches[2]}"
    )


def batches() -> str:
    found = [gained(model.name)[1] for model in gains.MODELS]
    percent = [100 * float(batch.rstrip("x")) - 100 for batch in found if batch != gains.NOT_MEASURED]
    return f"with 128 new tokens each gained {min(percent):.0f} to {max(percent):.0f} %"


def float8_gains(model: str) -> str:
    steps, batch = gained(model)
    return f"{min(steps)} to {max(steps)} per decode step, {batch} in the throughput of a batch"


def int4_gains() -> str:
    (*few, most), batch = gained(FORMATS[-1])
    steps = f"{min(few)} to {max(few)} per decode step with up to 32 requests, {most} with 128"
    return f"{steps}; {batch} in the throughput"


def experts_in_float8() -> str:
    (line,) = (
        each
        for each in report.other_runs().splitlines()
        if each.startswith("- `h200/qwen3_30b_a3b_fp8.json`")
    )
    (times,) = re.findall(r"vLLM / Rose: (\S+ to \S+x)\.", line)
    return f"steps of 1 and 8 requests are {times} as fast as vLLM's"


def draft_gains(model: str) -> str:
    steps, _ = gained(model)
    return f"with Llama 3.1 8B: {min(steps)} to {max(steps)} per token"


def over_no_drafts(name: str) -> str:
    cases = medians(name)
    one, some = (
        cases[case][f"{HOST}, drafts off"] / cases[case][HOST]
        for case in (f"step, {batch} requests, greedy" for batch in (1, 32))
    )
    return f"{one:.1f}x with 1 request, {some:.1f}x with 32"


def adapters() -> str:
    (line,) = (
        each
        for each in report.other_runs().splitlines()
        if each.startswith("- `h200/vllm_adapters_qwen3.json`")
    )
    (ours, theirs) = re.findall(r"vLLM ([\d. /]+) ms", line)
    return f"takes {ours} ms with 1 / 32 / 256 requests, and {theirs} ms with vLLM"


def mend() -> str:
    result = report.read("h200/standalone_before_after.json")
    worth = [each["after / before"] for each in result["medians"].values()]
    return f"takes {span(worth)} of that engine's time"


def fast_run() -> str:
    cases = medians("earlier/h200_offline_compare_0363667.json")
    one, most = (cases[f"step, {count} requests, greedy"] for count in (1, 256))
    return (
        f"SGLang took {one['sglang']:.2f} ms with one request and {most['sglang']:.2f} ms with 256, Rose standalone "
        f"{one['rose']:.3f} and {most['rose']:.3f}"
    )


def drawn_and_greedy() -> str:
    cases = medians("h200/qwen3_modes.json")
    drawn = [
        cases[case.replace("greedy", "top-k 50, top-p 0.9")]["rose"] / cases[case]["rose"] for case in STEPS
    ]
    one, eight, some, more, most = (f"{share:.2f}" for share in drawn)
    assert (one, some) == (eight, more)
    return (
        f"takes {one} of a greedy step's time with 1 or 8 requests, {some} with 32 or 128 and {most} with 256"
    )


def experts() -> str:
    cases = medians("h200/vllm_gpt_oss.json")
    gains = [cases[case][STOCK] / cases[case][HOST] - 1 for case in STEPS[1:]]
    return f"with 8 requests and more: there Rose is ahead by {min(gains):.0%} to {max(gains):.0%}."


def sglang_turns() -> str:
    first, second, third = turns("h200/vllm_qwen3.json", STEPS[-1], "sglang")
    return f"SGLang's three turns at 256 requests were {first:.2f}, {second:.2f} and {third:.2f} ms"


def nano_vllm_turns() -> str:
    name = "h200/vllm_qwen3.json"
    case = next(case for case in medians(name) if case.startswith("nano-vllm"))
    of = {side: span(turns(name, case, side)) for side in ("rose", HOST, STOCK, "sglang")}
    return (
        f"The turns are {of['rose']} s without vLLM, {of[HOST]} s inside vLLM, {of[STOCK]} s for vLLM "
        f"and {of['sglang']} s for SGLang."
    )


def saturated() -> str:
    result = report.read("h200/vllm_trace.json")
    sent, (alone, rose) = (
        serving.requests_per_s(result, 0.014),
        (answered("h200/vllm_trace.json", 0.014, side) for side in (STOCK, HOST)),
    )
    return f"of {sent:.0f} requests a second it answers {alone}; with Rose it answers {rose}."


def first_tokens_of_turns(name: str, scale: float) -> str:
    rose, alone = (span(first_token(name, scale, side), ".0f") for side in (HOST, STOCK))
    return f"the median TTFT of single turns was {rose} ms with Rose and {alone} ms without"


def light_load() -> str:
    result = report.read("h200/vllm_trace.json")
    sides = serving.points(result["rows"])["greedy", 0.028]
    (rose_first, first), (rose, alone) = (
        [milliseconds(sides[side][figure]) for side in (HOST, STOCK)]
        for figure in ("p50_ttft_ms", "p50_e2el_ms")
    )
    return (
        f"at {serving.requests_per_s(result, 0.028):.0f} requests a second of GPT-2, the median TTFT is {rose_first} "
        f"ms, without Rose {first} ms, and the median answer takes {rose} ms, without Rose {alone} ms"
    )


def no_losses_in_other_runs(claim: str, *files: str) -> str:
    starts = tuple(f"- `{file}.json` " for file in files)
    lines = [line for line in report.other_runs().splitlines() if line.startswith(starts)]
    assert len(lines) == len(files) and all("No losses in " in line for line in lines)
    return claim


def behind(name: str, scale: float | None = None) -> int:
    losses = report.read(name)["losses"]
    return sum(
        loss["backend"] == HOST and scale in (None, loss["scale"]) and loss["mode"] == "greedy"
        for loss in losses
    )


def one_behind() -> str:
    (loss,) = (each for each in report.read("h200/online_compare.json")["losses"] if each["scale"] > 0.01)
    return f"but for one median that is {loss['rose'] - loss['peers']:.1f} ms behind."


def int4_even() -> str:
    gains = {
        batch: sides[STOCK] / sides[HOST]
        for batch in (1, 8, 32, 64, 128)
        if (sides := medians("h200/vllm_llama8b_awq.json")[f"step, {batch} requests, greedy"])
    }
    (batch,) = (batch for batch, gain in gains.items() if gain < 1.1)
    assert gains[batch] == pytest.approx(1, abs=0.03)
    return f"With {batch} requests in int4 neither is ahead"


def gemma_starts() -> str:
    newest = figures.starts([report.read(file) for file in report.DRAWN_TOGETHER["start_up"]])
    for caches in ("cold", "warm"):
        assert newest[caches, "Gemma 3 4B", "Rose in vLLM"] > newest[caches, "Gemma 3 4B", "vLLM"]
    before = figures.starts([report.read("h200/start_up_gemma3_before.json")])
    rose, alone = (before["cold", "Gemma 3 4B", side] for side in ("Rose in vLLM", "vLLM"))
    run = "In the older run, which has vLLM's starts, a cold start"
    return f"{run} took {rose:.0f} s with Rose and {alone:.0f} s without."


OTHER_MODELS = (
    *(f"h200/vllm_gpt2_start_{number}" for number in (1, 2, 3)),
    *("h100/sglang_gpt2", "h200/vllm_llama", "h100/vllm_qwen3", "h100/vllm_gemma3", "h200/vllm_gpt_oss"),
    *("h200/vllm_qwen3_vl", "h200/vllm_qwen3_5", "h200/vllm_experts_2_ranks", "h200/vllm_adapters_qwen3"),
)
CLAIMS = {
    "README.md": [
        in_short,
        lambda: float8_gains("Qwen3 8B, FP8, a scale per 128 x 128 block"),
        attention_alone,
    ],
    "docs/lora.md": [adapters],
    "docs/rose_or_not.md": [batches],
    "docs/quantization.md": [
        lambda: float8_gains(FORMATS[1]),
        lambda: float8_gains("Qwen3 8B, FP8, a scale per 128 x 128 block"),
        int4_gains,
        experts_in_float8,
    ],
    "docs/speculative_decoding.md": [
        lambda: draft_gains("Llama 3.1 8B, 3 n-gram drafts"),
        lambda: draft_gains("Llama 3.1 8B, 3 EAGLE-3 drafts"),
        lambda: over_no_drafts("h200/vllm_ngram_llama8b.json"),
        lambda: over_no_drafts("h200/vllm_eagle3_llama8b.json"),
    ],
    "docs/performance/index.md": [at_a_glance, int4_even, gemma_starts, mend],
    "docs/performance/engines.md": [fast_run, drawn_and_greedy],
    "docs/performance/inside_vllm.md": [
        at_a_glance,
        experts,
        sglang_turns,
        nano_vllm_turns,
        lambda: no_losses_in_other_runs("has a line for each, with its losses; none has any:", *OTHER_MODELS),
    ],
    "docs/performance/servers.md": [
        one_behind,
        light_load,
        saturated,
        lambda: no_losses_in_other_runs(
            "Rose is behind in none of their figures.",
            *(f"h200/vllm_{name}serving" for name in ("", "gemma3_", "gpt_oss_")),
            *("h200/vllm_serving_4_api_servers", "h200/arrivals"),
        ),
        lambda: no_losses_in_other_runs(
            "Rose is ahead in every figure at every load (`benchmarks/results/h200/vllm_trace_rust.json`",
            "h200/vllm_trace_rust",
        ),
        lambda: first_tokens_of_turns("h200/online_compare.json", 0.009),
        lambda: first_tokens_of_turns("h200/vllm_trace.json", 0.006),
        lambda: f"Rose is behind in {behind('h200/vllm_trace.json')} of the 48 figures",
        lambda: f"it is behind vLLM in {behind('h200/online_compare.json', 0.009)} of 12 figures",
    ],
}
"""Page -> what makes each of its sentences, or parts of sentences, from the results."""


@pytest.mark.parametrize("page", CLAIMS)
def test_sentences_and_results_agree(page: str) -> None:
    text = " ".join((report.ROOT / page).read_text().split())
    assert [claim for make in CLAIMS[page] if (claim := make()) not in text] == []


def test_rose_is_ahead_where_it_is_said_to_be_ahead_everywhere() -> None:
    result = report.read("h200/offline_compare.json")
    for sides in by_case(result["rows"]).values():
        peer = min(fastest_peers(result, sides, report.published()).values())
        assert all(compared(sides[host]) < peer for host in ("rose", HOST))
    trace = serving.points(report.read("h200/online_compare.json")["rows"])
    for sides in trace.values():
        assert all(
            sides["rose"][f] < sides[peer][f] for peer in (STOCK, "sglang") for f in serving.FIGURES
        ), "`rose serve` is ahead of both peers in every figure"


def test_a_spread_is_of_the_samples() -> None:
    assert timing.spread([3.0, 1.0, 2.0, 5.0, 4.0]) == {
        "median": 3.0,
        "p10": pytest.approx(1.4),
        "p90": pytest.approx(4.6),
        "min": 1.0,
        "samples": 5,
    }


def test_sides_take_turns() -> None:
    order: list[str] = []

    def side(name: str) -> Any:
        def run() -> dict[str, list[float]]:
            order.append(name)
            return {"us": [float(len(order))]}

        return run

    samples = timing.alternate({"a": side("a"), "b": side("b")}, 3)
    assert order == ["a", "b"] * 3
    assert samples == {"a": {"us": [1.0, 3.0, 5.0]}, "b": {"us": [2.0, 4.0, 6.0]}}


def test_garbage_waits_and_the_process_stays_on_one_core() -> None:
    with timing.no_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    core = timing.pin_to_one_core()
    assert os.sched_getaffinity(0) == {core}
    assert run_facts.run_facts(core)["machine"]["pinned_to_core"] == core


@pytest.mark.parametrize(
    ("value", "at_least", "met"), [(40, False, True), (41, False, False), (40, True, True), (39, True, False)]
)
def test_a_goal_is_met_at_its_limit(value: float, at_least: bool, met: bool) -> None:
    assert run_facts.bar("a", value, 40, "us", at_least=at_least)["met"] is met


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/some/where/a.py", "--quick", "--json", "/tmp/out.json", "--rows", "3"], "--quick --rows 3"),
        (["a.py", "--json", "out.json"], ""),
        (["a.py", "--dtype", "float16"], "--dtype float16"),
        (["a.py", "--proofs", "/tmp/proofs", "--prove", "--commit", "1ca9133"], "--prove"),
    ],
)
def test_the_command_can_be_repeated_anywhere(arguments: list[str], expected: str) -> None:
    assert run_facts.repeatable_command(arguments) == f"python -m benchmarks.a {expected}".strip()


def a_report() -> dict[str, Any]:
    def point(axis: str, value: int, side: str, median: float) -> dict[str, Any]:
        figure = {"median": median, "p10": median - 1, "p90": median + 1}
        return {axis: value, "side": side, "whole_block_us_per_row": figure}

    skipped = {"num_blocks": 10_000, "side": "stock", "skipped": "needs more memory"}
    return {
        "benchmark": "block_manager",
        "machine": {"cpu": "a processor"},
        "settings": {"rows": 256, "block_size": 16},
        "scenes": {
            "pool_size": [
                point("num_blocks", 10_000, "rose_core", 3.0),
                point("num_blocks", 1000, "rose_core", 2.0),
                point("num_blocks", 1000, "stock", 9.0),
                skipped,
            ],
            "sequence_length": [point("num_tokens", 16, "rose_in_vllm", 4.0)],
        },
    }


def test_curves_are_sorted_and_leave_out_what_was_skipped() -> None:
    stock = figures.cost_curve(a_report(), "pool_size", "stock")
    assert (stock["x"], stock["median"]) == ([1000], [9.0])
    core = figures.cost_curve(a_report(), "pool_size", "rose_core")
    assert (core["x"], core["median"]) == ([1000, 10_000], [2.0, 3.0])
    assert (core["p10"], core["p90"]) == ([1.0, 2.0], [3.0, 4.0])
    in_vllm = figures.cost_curve(a_report(), "sequence_length", "rose_in_vllm")
    assert in_vllm["x"] == [16]


def test_pictures_are_drawn_on_a_light_ground_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib (the bench or dev extra)")
    (path,) = figures.draw(a_report(), "managers", tmp_path / "figures")
    text = path.read_text()
    assert "</svg>" in text and path.name == "managers_cost.svg"
    # The whole picture's rectangle comes first.
    assert re.findall(r"style=\"fill: (\S+)\"", text)[0] == figures.GROUND
    assert is_drawn_from(path, a_report())
    assert not is_drawn_from(path, {**a_report(), "settings": {"rows": 255}})


def test_throughput_is_of_greedy_decode_steps() -> None:
    def row(batch: int, median: float, **changes: str) -> dict[str, Any]:
        figures = {"step_ms": {"median": median, "p10": median / 2, "p90": median * 2}}
        row = {
            "scene": "decode",
            "mode": "greedy",
            "backend": "rose",
            "num_requests": batch,
            "figures": figures,
        }
        return row | changes

    rows = [row(8, 4.0), row(1, 2.0), row(1, 1.0, mode="drawn"), row(1, 1.0, backend="vllm")]
    rows.append(row(4, 1.0, scene="offline"))
    assert figures.throughput_curve({"rows": rows}, "rose") == {
        "x": [1, 8],
        "line": [500, 2000],
        "low": [250, 1000],
        "high": [1000, 4000],
    }


def a_start(model: str, date: str, **ready_s: float) -> dict[str, Any]:
    rows = [
        {"backend": side, "caches": "cold", "ready_s": seconds, "first_token_s": 0, "kv_cache_tokens": 0}
        for side, seconds in ready_s.items()
    ]
    settings = {"model": f"random weights, {model}'s shapes"}
    return {
        "benchmark": "start_up",
        "date": date,
        "device": "a device",
        "settings": settings,
        "rows": rows,
    }


def test_starts_are_the_newest_of_each_side(tmp_path: Path) -> None:
    starts = [a_start("B", "2", vllm=9.0, rose=8.0), a_start("A", "1", rose=1.0), a_start("B", "1", rose=7.0)]
    assert list(figures.starts(starts).items()) == [
        (("cold", "B", "Rose"), 8.0),
        (("cold", "B", "vLLM"), 9.0),
        (("cold", "A", "Rose"), 1.0),
    ]
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib (the bench or dev extra)")
    together = {"benchmark": "start_up", "results": starts}
    (path,) = figures.draw(together, "starts", tmp_path)
    assert path.name == "starts.svg" and is_drawn_from(path, together)
