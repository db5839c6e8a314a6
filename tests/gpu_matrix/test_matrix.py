"""The matrix: its rule, its harness on a CPU, and its table in docs/models.md."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_matrix.cases import ARCHITECTURES, CASES
from tests.gpu_matrix.reference import add_exact
from tests.gpu_matrix.run import SIDES, Run, report_path
from tests.gpu_matrix.table import PAGE, keep_results, read_results, table, with_table
from tests.gpu_matrix.traffic import NUM_FIRST, NUM_MIXED, Ask, first_asks, mixed_asks
from tests.gpu_matrix.verdict import ROUNDS, Report, judge
from tests.support.random_checkpoints import VOCAB_SIZE
from tests.vllm_plugin.test_served_architectures import ROW

R = 0.01
"""Stock's largest error in these reports."""
LEAD = 1.0


def report(side: str) -> Report:
    """Return what a side could have written: every lead is ``LEAD``, every error R, but for a sign."""
    asks = {ask.name: ask for ask in (*first_asks(False), *mixed_asks(False))}
    asks |= {f"{prefix}{ask.name}": ask for ask in first_asks(False) for prefix in ROUNDS}
    counts = {"mixed_steps": 9, "chunked_steps": 9, "cached_tokens": 900, "preemptions": 3}
    return {
        "case": "LlamaForCausalLM",
        "side": side,
        "date": "2026-01-01",
        "versions": {"vllm": "0", "device": "a GPU"},
        "seconds": {},
        "counts": counts | {"drafted": 0, "accepted": 0, "loaded_tokens": 0},
        "answers": {name: _answer(ask) for name, ask in asks.items()},
    }


def _answer(ask: Ask) -> dict[str, Any]:
    has_logprobs = ask.kind in ("logprobs", "prompt_logprobs")
    exact = [-1.0 - step % 3 for step in range(ask.max_tokens)]
    completion = {
        "text": f"text of {ask.name}",
        "tokens": list(range(ask.max_tokens)),
        "logprobs": [value + R * (-1) ** step for step, value in enumerate(exact)] if has_logprobs else None,
        "top": [[value, value - LEAD] for value in exact] if ask.kind == "logprobs" else [],
        "exact_logprobs": exact,
        "exact_leads": [LEAD] * ask.max_tokens,
        "exact_bounds": [value - LEAD for value in exact],
    }
    has_prompt = ask.kind == "prompt_logprobs"
    return {
        "ask": {"kind": ask.kind, "is_greedy": ask.is_greedy},
        "prompt_logprobs": [-7.0 + R] * 20 if has_prompt else None,
        "exact_prompt_logprobs": [-7.0] * 20,
        "completions": [copy.deepcopy(completion) for _ in range(3 if ask.kind == "n" else 1)],
    }


def of_kind(side: Report, kind: str, start: str = "mixed-") -> dict[str, Any]:
    """Return the first answer of a kind."""
    return next(
        answer
        for name, answer in side["answers"].items()
        if name.startswith(start) and answer["ask"]["kind"] == kind
    )


def test_equal_reports_are_equal() -> None:
    verdict = judge(report("rose"), report("stock"))
    assert (verdict.outcome, verdict.complaints, verdict.num_parted) == ("equal", [], 0)
    assert verdict.rounding == pytest.approx(R) and verdict.num_requests == 60 + (1 + len(ROUNDS)) * 8
    assert verdict.is_exact == {"rose": True, "stock": True}


def part(rose: Report, gap: float, kind: str = "plain") -> None:
    """Let an answer leave stock's at its fourth token, for one that float32 puts ``gap`` behind."""
    completion = of_kind(rose, kind)["completions"][0]
    completion["tokens"][3:] = [900 + token for token in completion["tokens"][3:]]
    completion["text"] = "another text"
    completion["exact_logprobs"][3] -= gap
    completion["exact_leads"][3] = -gap


@pytest.mark.parametrize("kind", ["plain", "logprobs", "structured"])
def test_texts_may_part_at_a_near_tie(kind: str) -> None:
    rose = report("rose")
    part(rose, 1.9 * R, kind)
    if kind == "logprobs":
        completion = of_kind(rose, kind)["completions"][0]
        completion["logprobs"][3] = completion["exact_logprobs"][3] + R
    verdict = judge(rose, report("stock"))
    assert (verdict.outcome, verdict.complaints, verdict.num_parted) == ("equal", [], 1)


def wrong_token(rose: Report) -> None:
    part(rose, 2.1 * R)


def wrong_allowed_token(rose: Report) -> None:
    part(rose, 2.1 * R, "structured")


def wrong_token_behind_a_tie(rose: Report) -> None:
    part(rose, R)
    of_kind(rose, "plain")["completions"][0]["exact_leads"][-1] = -2.1 * R


def wrong_again(rose: Report, prefix: str = "again-") -> None:
    # Stock says the same: this is a difference to the first time alone.
    completion = rose["answers"][f"{prefix}first-0"]["completions"][0]
    completion["tokens"][5] = 1234
    completion["exact_logprobs"][5] -= 2.1 * R


def wrong_third(rose: Report) -> None:
    wrong_again(rose, "third-")


def wrong_fourth(rose: Report) -> None:
    wrong_again(rose, "fourth-")


def other_text(rose: Report) -> None:
    of_kind(rose, "plain")["completions"][0]["text"] += "."


def short_text(rose: Report) -> None:
    completion = of_kind(rose, "plain")["completions"][0]
    for values in (completion["tokens"], completion["exact_logprobs"], completion["exact_leads"]):
        values.pop()


def wrong_logprob(rose: Report) -> None:
    of_kind(rose, "logprobs")["completions"][0]["logprobs"][2] += 2 * R


def wrong_prompt_logprob(rose: Report) -> None:
    of_kind(rose, "prompt_logprobs")["prompt_logprobs"][-1] += 2 * R


def no_number(rose: Report) -> None:
    of_kind(rose, "logprobs")["completions"][0]["logprobs"][2] = math.nan


def wrong_likeliest(rose: Report) -> None:
    of_kind(rose, "logprobs")["completions"][0]["top"][1][1] -= 2.1 * R


def missing_likeliest(rose: Report) -> None:
    of_kind(rose, "logprobs")["completions"][0]["top"][1].pop()


def coarser_everywhere(rose: Report) -> None:
    for answer in rose["answers"].values():
        for completion in answer["completions"]:
            if completion["logprobs"]:
                completion["logprobs"] = [value - 1.5 * R for value in completion["exact_logprobs"]]


def forbidden_draw(rose: Report) -> None:
    completion = of_kind(rose, "draws")["completions"][0]
    completion["exact_logprobs"][1] = completion["exact_bounds"][1] - 2.1 * R


def missing_completion(rose: Report) -> None:
    of_kind(rose, "n")["completions"].pop()


def other_bits(rose: Report) -> None:
    rose["answers"]["afresh-first-1"]["completions"][0]["logprobs"][0] += 1e-6


def no_preemption(rose: Report) -> None:
    rose["counts"]["preemptions"] = 0


def no_hits(rose: Report) -> None:
    rose["counts"]["cached_tokens"] = 10


def no_drafts(rose: Report) -> None:
    rose["case"] = "EAGLE head"


def missing_answer(rose: Report) -> None:
    del rose["answers"]["mixed-3"]


PLANTED: dict[Callable[[Report], None], str] = {
    wrong_token: "behind another one",
    wrong_allowed_token: "float32 puts 2.10e-02 between them",
    wrong_token_behind_a_tie: "behind another one",
    wrong_again: "(the first time)",
    wrong_third: "third-first-0: token 5 is 1234",
    wrong_fourth: "fourth-first-0: token 5 is 1234",
    other_text: "other text",
    short_text: "tokens, not",
    wrong_logprob: "a log-probability is wrong by 3.00e-02",
    wrong_prompt_logprob: "a log-probability is wrong by 3.00e-02",
    no_number: "a log-probability is wrong by inf",
    wrong_likeliest: "likeliest tokens 1",
    missing_likeliest: "likeliest tokens 1",
    coarser_everywhere: "on average",
    forbidden_draw: "below those allowed",
    missing_completion: "completions of",
    other_bits: "bit by bit",
    no_preemption: "preemptions: 0, at least 1",
    no_hits: "cached_tokens: 10",
    no_drafts: "accepted: 0, at least 20",
    missing_answer: "not asked the same",
}
TOO_LITTLE = (no_preemption, no_hits, no_drafts)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_difference_is_found(plant: Callable[[Report], None]) -> None:
    rose = report("rose")
    plant(rose)
    verdict = judge(rose, report("stock"))
    assert verdict.outcome == ("too little traffic" if plant in TOO_LITTLE else "different")
    assert any(PLANTED[plant] in line for line in verdict.complaints), verdict.complaints


def test_bits_need_not_repeat_where_stocks_do_not() -> None:
    rose, stock = report("rose"), report("stock")
    other_bits(rose)
    other_bits(stock)
    assert judge(rose, stock).outcome == "equal"


def test_stock_itself_may_not_be_wrong() -> None:
    stock = report("stock")
    part(stock, 2.1 * R)
    verdict = judge(report("rose"), stock)
    assert any(line.startswith("stock, mixed-0: a token is 2.10e-02 behind") for line in verdict.complaints)


def test_flat_logits_tell_nothing() -> None:
    rose, stock = report("rose"), report("stock")
    for side in (rose, stock):
        for answer in side["answers"].values():
            for completion in answer["completions"]:
                completion["exact_leads"] = [R] * len(completion["exact_leads"])
    assert any(line.startswith("cannot tell: 2 R is 2.00e-02") for line in judge(rose, stock).complaints)


def embeddings(side: str) -> Report:
    """Return a side's report of a pooling model."""
    pooled = report(side)
    pooled["case"] = "pooling"
    for answer in pooled["answers"].values():
        exact = [0.1, -0.2, 0.3]
        answer |= {"embedding": [value + R for value in exact], "exact": exact}
        del answer["completions"]
    return pooled


def test_embeddings() -> None:
    rose, stock = embeddings("rose"), embeddings("stock")
    assert judge(rose, stock).outcome == "equal"
    rose["answers"]["mixed-7"]["embedding"][1] += 2 * R
    assert judge(rose, stock).outcome == "different"


def test_what_was_not_run_is_never_equal() -> None:
    rose, stock = report("rose"), report("stock")
    rose["not_run"] = "operators missing: a module"
    verdict = judge(rose, stock)
    assert (verdict.outcome, verdict.complaints) == ("not run", ["operators missing: a module"])


needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
# Rose's layers; experts, sinks and windows in a KV cache group of their own.
NAMES = ("Qwen2ForCausalLM", "GptOssForCausalLM")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def run(folder: Path) -> Iterator[Run]:
    cases = Run(NAMES, folder, folder / "checkpoints")
    yield cases
    cases.close()


def reports(folder: Path, name: str) -> tuple[Report, Report]:
    rose, stock = (json.loads(report_path(folder, CASES[name], side).read_text()) for side in SIDES)
    return rose, stock


@needs_vllm
@pytest.mark.parametrize("name", NAMES)
def test_rose_says_what_stock_says(run: Run, folder: Path, name: str) -> None:
    verdict = run.verdict(name)
    assert verdict["outcome"] == "equal", verdict["complaints"]
    assert verdict["num_requests"] == 3 * NUM_FIRST + NUM_MIXED
    rose, stock = reports(folder, name)
    for answer in [*rose["answers"].values(), *stock["answers"].values()]:
        assert {len(each["tokens"]) for each in answer["completions"]} != {0}


@needs_vllm
@pytest.mark.parametrize("place", [0, 7])
def test_a_broken_token_is_found(run: Run, folder: Path, place: int) -> None:
    run.verdict(NAMES[0])
    rose, stock = reports(folder, NAMES[0])
    answer = copy.deepcopy(rose["answers"]["mixed-0"])
    tokens = answer["completions"][0]["tokens"]
    tokens[place] = (tokens[place] + 1) % VOCAB_SIZE
    add_exact(NAMES[0], folder / "checkpoints" / NAMES[0], {"mixed-0": answer})
    verdict = judge(rose | {"answers": rose["answers"] | {"mixed-0": answer}}, stock)
    assert verdict.outcome == "different"
    assert any(f"mixed-0: token {place} is" in line for line in verdict.complaints), verdict.complaints


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
