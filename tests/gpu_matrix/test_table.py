"""The matrix covers what docs/models.md says works, and its table there says what the latest run found."""

from __future__ import annotations

import json
from pathlib import Path

from tests.gpu_matrix.cases import ARCHITECTURES, CASES
from tests.gpu_matrix.run import report_path
from tests.gpu_matrix.table import PAGE, keep_results, read_results, table, with_table
from tests.gpu_matrix.test_verdict import report, wrong_token
from tests.gpu_matrix.verdict import ROUNDS, judge
from tests.vllm_plugin.test_served_architectures import ROW


def test_every_architecture_that_works_has_a_row() -> None:
    section = PAGE.read_text().partition("### The architectures served most")[2].partition("\n##")[0]
    works = [name for name, inside, _ in ROW.findall(section) if inside.startswith("works")]
    assert [case.name for case in ARCHITECTURES] == works


def test_the_page_has_the_table_of_the_results() -> None:
    page = PAGE.read_text()
    assert with_table(page, read_results()) == page, "run python -m tests.gpu_matrix FOLDER"


def test_rows_of_all_outcomes(tmp_path: Path) -> None:
    equal = judge(report("rose"), report("stock")).as_json()
    broken, unable = report("rose"), report("rose")
    wrong_token(broken)
    unable["not_run"] = "missing: a_module"
    different, not_run = (judge(side, report("stock")).as_json() for side in (broken, unable))
    path = tmp_path / "results.json"
    keep_results({"SmolLM3ForCausalLM": different}, path)
    # A later run of other cases leaves what is known of the rest.
    keep_results({"Qwen3ForCausalLM": equal, "Qwen3MoeForCausalLM": not_run}, path)
    results = read_results(path)
    assert list(results) == ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "SmolLM3ForCausalLM"]
    rows = {line.split("|")[1].strip(): line for line in table(results).splitlines()}
    assert len(rows) == 2 + len(CASES)
    versions = "vLLM 0, a GPU, 2026-01-01"
    num_requests = 60 + 8 * (1 + len(ROUNDS))
    assert (
        f"| equal ({versions}) | {num_requests} | 0 | 1.0e-02 / 1.0e-02 | 3 |" in rows["`Qwen3ForCausalLM`"]
    )
    assert f"| not run: missing: a_module ({versions}) |" in rows["`Qwen3MoeForCausalLM`"]
    assert f"| different ({versions}) |" in rows["`SmolLM3ForCausalLM`"]
    assert "| not yet |" in rows["LoRA"]


def test_a_folder_of_reports_is_judged_without_a_gpu(tmp_path: Path) -> None:
    from tests.gpu_matrix.run import judge_folder

    case = CASES["LlamaForCausalLM"]
    for side in ("rose", "stock"):
        report_path(tmp_path, case, side).write_text(json.dumps(report(side)))
    # Of this one only one side has ended.
    report_path(tmp_path, CASES["LoRA"], "rose").write_text(json.dumps(report("rose")))
    assert {name: verdict["outcome"] for name, verdict in judge_folder(tmp_path).items()} == {
        "LlamaForCausalLM": "equal"
    }
