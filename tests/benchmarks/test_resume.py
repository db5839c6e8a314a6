"""Comparisons that go on where an earlier run was out of time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import offline_compare
from benchmarks.offline_compare import Offline, parse_options
from benchmarks.reports.engines import source
from benchmarks.support import run_facts as resume
from benchmarks.support.checkpoint import ModelFacts
from benchmarks.support.run_facts import run_facts
from benchmarks.support.worker_pool import Engines
from tests.benchmarks.fake_engine import write_fake_sglang

Report = dict[str, Any]


def run(arguments: list[str], folder: Path, name: str) -> Report:
    """Return what a quick comparison of an engine that answers at once writes."""
    site = folder / "site"
    path = str(site) if site.exists() else write_fake_sglang(site)
    result = folder / name
    engine = ["--quick", "--backends", "sglang", "--python-path", f"sglang={path}"]
    assert offline_compare.main([*engine, *arguments, "--json", str(result)]) == 0
    report: Report = json.loads(result.read_text())
    return report


def cut_short(report: Report, path: Path) -> Report:
    """Write ``report`` as if there had been time for the first of two turns only."""
    report = json.loads(json.dumps(report))
    for row in report["rows"]:
        row["turns"] = row["turns"][:1]
    path.write_text(json.dumps(report))
    return report


def test_offline_turns_that_are_there_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--scenes", "offline", "decode", "--batches", "2", "--repeats", "2", "--cases", "greedy"]
    first = run(arguments, tmp_path, "first.json")
    assert "runs" not in first and source(first).startswith("Medians of 2 turns, ")
    short = cut_short(first, tmp_path / "short.json")
    seeds: list[int] = []
    take = offline_compare.Case.run

    def taking(case: Any, worker: Any, seed: int, vocab_size: int) -> dict[str, float]:
        seeds.append(seed)
        return take(case, worker, seed, vocab_size)

    monkeypatch.setattr(offline_compare.Case, "run", taking)
    arguments += ["--resume", str(tmp_path / "short.json")]
    second = run(arguments, tmp_path, "second.json")
    # Of four turns the second ones.
    assert seeds == [3, 4] and len(short["rows"]) == 2
    assert [row["case"] for row in second["rows"]] == [row["case"] for row in first["rows"]]
    for old, new in zip(short["rows"], second["rows"], strict=True):
        assert new["turns"][0] == old["turns"][0] and len(new["turns"]) == 2
        assert new["figures"][new["figure"]]["samples"] == 2
    assert [part["date"] for part in second["runs"]] == [first["date"], second["date"]]
    assert all(part["machine"]["cores"] and part["command"] for part in second["runs"])
    assert source(second).startswith("Medians of 2 turns in 2 runs, ")
    third = resume.with_runs({**second, "date": "later"}, second)
    assert [part["date"] for part in third["runs"]] == [first["date"], second["date"], "later"]


FACTS = {
    "benchmark": "offline_compare",
    "sources_digest": "0123456789abcdef",
    "device": "NVIDIA H200",
    "versions": {"torch": "2.11.0"},
    "settings": {"input_len": (16, 512)},
}
OLD = {
    **FACTS,
    "settings": {"input_len": [16, 512]},
    "backends": {"vllm": {"version": "0.32.0"}},
    "failed": {},
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"benchmark": "arrivals"},
            "--resume: benchmark: this run has 'offline_compare', the file 'arrivals'",
        ),
        ({"sources_digest": "f"}, "--resume: sources_digest: this run has '0123456789abcdef', the file 'f'"),
        ({"device": "cpu"}, "--resume: device: this run has 'NVIDIA H200', the file 'cpu'"),
        ({"versions": {}}, "--resume: versions: this run has {'torch': '2.11.0'}, the file {}"),
        ({"settings": {}}, "--resume: settings: this run has {'input_len': [16, 512]}, the file {}"),
        ({"trace": {"num_requests": 1}}, "--resume: trace: this run has None, the file {'num_requests': 1}"),
        ({"failed": {"vllm": "out of memory"}}, "failed there: vllm"),
    ],
)
def test_turns_of_something_else_are_refused(tmp_path: Path, changed: Report, message: str) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(OLD))
    assert resume.earlier_report(path, FACTS) == OLD
    path.write_text(json.dumps({**OLD, **changed}))
    with pytest.raises(SystemExit) as refusal:
        resume.earlier_report(path, FACTS)
    assert message in str(refusal.value)


def test_other_engines_and_files_that_are_none_are_refused(tmp_path: Path) -> None:
    assert resume.earlier_report(None, FACTS) is None
    with pytest.raises(SystemExit, match="No such file"):
        resume.earlier_report(tmp_path / "none.json", FACTS)
    (tmp_path / "empty.json").write_text("")
    with pytest.raises(SystemExit, match=r"--resume: .*empty\.json: Expecting value"):
        resume.earlier_report(tmp_path / "empty.json", FACTS)
    resume.check_same(OLD, {"backends": {"vllm": {"version": "0.32.0"}}}, ["backends"])
    for backends in ({}, {"vllm": {"version": "0.33.0"}}):
        with pytest.raises(SystemExit, match="--resume: backends: this run has"):
            resume.check_same(OLD, {"backends": backends}, ["backends"])


def test_a_refusal_comes_before_engines_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(OLD))
    monkeypatch.setattr(Engines, "start", lambda *_, **__: pytest.fail("an engine was started"))
    with pytest.raises(SystemExit, match="--resume: sources_digest"):
        offline_compare.main(["--quick", "--backends", "rose", "--resume", str(path)])


def test_a_case_that_is_not_run_is_refused() -> None:
    row = {"case": "step, 3 requests, greedy", "backend": "rose", "turns": []}
    with pytest.raises(SystemExit, match="--resume: case: the file has 'step, 3 requests, greedy'"):
        Offline(parse_options(["--quick"]), ModelFacts(512, 64, 1)).rows_of({"rows": [row]})


def test_every_report_says_which_sources_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = [run_facts()["sources_digest"]]
    monkeypatch.setattr("benchmarks.support.run_facts.PACKAGE", tmp_path)
    for text in ("a = 1\n", "a = 2\n", "a = 2\n"):
        (tmp_path / "a.py").write_text(text)
        digests.append(run_facts()["sources_digest"])
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    digests.append(run_facts()["sources_digest"])
    assert digests[2] == digests[3] and len(set(digests)) == 4
