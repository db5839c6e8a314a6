"""Tables of Rose inside vLLM: what they show, what they admit, and when there are none."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.report import TABLES, problems, read
from benchmarks.reports.engines import (
    HOST,
    INSIDE_VLLM_TIMES,
    ONLY_ATTENTION,
    ONLY_MANAGER,
    PART_SIDES,
    STOCK,
    inside_vllm_bars,
    offline_table,
    parts_table,
)
from benchmarks.reports.serving import COMPARED, OUTPUTS_APART, compare, poisson_bars, poisson_table
from tests.benchmarks.test_readme_compare import report, row


def turn(name: str, rate: float | None, backend: str, value: float, **changes: Any) -> dict[str, Any]:
    figures = {**dict.fromkeys(COMPARED, value), "failed": 0, "client_busy": 0.25}
    return {"set": name, "rate": rate, "backend": backend, **figures, **changes}


def serving_report(rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    comparison, start_up_s = compare(rows), {HOST: 21.0, STOCK: 20.0}
    return {
        "benchmark": "vllm_serving",
        "command": "python -m benchmarks.vllm_serving --repeats 3",
        "device": "some GPU",
        "settings": {"model": "some model", "dtype": "float16", "requests": 512, "seconds": 3.5},
        "backends": {HOST: {"version": "1"}, STOCK: {"version": "2"}},
        "start_up_s": start_up_s,
        "comparison": comparison,
        "bars": poisson_bars(comparison, start_up_s),
        "rows": rows,
        **changes,
    }


SERVED = [
    *(turn("random", None, HOST, value) for value in (3.0, 13.5, 90.0)),
    *(turn("random", None, STOCK, 10.0) for _ in range(3)),
    *(turn("shared-prefix", 38.5, HOST, 5.0) for _ in range(2)),
    *(turn("shared-prefix", 38.5, STOCK, 4.0) for _ in range(2)),
]


def test_servers_are_shown_at_every_load_with_every_loss() -> None:
    text = poisson_table(serving_report(SERVED))
    figures = "13.5 ms | 13.5 ms | 13.5 ms | 13.5 ms | 14 | 14"
    assert f"| random, all at once | Rose in vLLM | {figures} |" in text
    assert "| random, all at once | vLLM | 10 ms | 10 ms | 10 ms | 10 ms | 10 | 10 |" in text
    assert "| random, all at once | Rose / vLLM | 1.35x | 1.35x | 1.35x | 1.35x | 1.35x | 1.35x |" in text
    assert "| shared-prefix, 38 requests/s | Rose in vLLM | 5 ms | 5 ms |" in text
    assert "Medians of 2 to 3 turns, 512 requests at once or 3.5 s of Poisson arrivals, some GPU, " in text
    assert "; Rose in vLLM 1, vLLM 2; " in text
    assert "Start-up: Rose in vLLM 21.0 s, vLLM 20.0 s; busiest client process: 25% of a core." in text
    _, verdict, lost = text.rpartition("Slower in 10 of 12 comparisons:\n\n")
    assert verdict and len(lost.splitlines()) == 2 and "output tokens/s" not in lost
    assert "- random, all at once: Rose in vLLM behind vLLM: TTFT p50 13.5 ms against 10 ms; " in lost
    assert lost.endswith("; prefilled tokens 5 against 4")


def test_a_server_with_a_part_off_and_servers_without_a_model_say_so() -> None:
    rows = [*SERVED, turn("random", None, OUTPUTS_APART, 7.0)]
    settings = {**serving_report(rows)["settings"], "step_ms": 1.5, "rust_front_end": True}
    text = poisson_table(serving_report(rows, settings=settings))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[3].startswith("| random, all at once | the same, `joined_outputs` off | 7 ms | 7 ms |")
    assert lines[4].startswith("| random, all at once | vLLM |") and ", no model (1.5 ms a step), " in text
    assert " arrivals, no model (1.5 ms a step), vLLM's API server in Rust, " in text
    behind = "- random, all at once: Rose in vLLM behind the same, `joined_outputs` off: TTFT p50 13.5 ms against 7 ms"
    assert behind in text


def test_losses_of_a_server_are_all_its_figures_that_are_worse_and_no_other() -> None:
    slow = turn("random", None, STOCK, 2.0, output_throughput=1.0)
    even = serving_report([turn("random", None, HOST, 2.0, output_throughput=1.0), slow])
    assert poisson_table(even).endswith("No losses in 6 comparisons.")
    less = serving_report([turn("random", None, HOST, 1.0, output_throughput=0.4), slow])
    lost = "- random, all at once: Rose in vLLM behind vLLM: output tokens/s 0 against 1"
    assert poisson_table(less).endswith(f"Slower in 1 of 6 comparisons:\n\n{lost}")


def test_a_server_that_failed_is_not_published() -> None:
    failed = [*SERVED, turn("random", None, HOST, 3.0, failed=2)]
    assert problems(serving_report(failed)) == ["2 requests of rose-in-vllm failed"]
    alone = [row for row in SERVED if row["backend"] == HOST]
    assert problems(serving_report(alone)) == ["both sides are needed at every load"]


def parts_report(**times: float) -> dict[str, Any]:
    values = {STOCK: 4.0, ONLY_ATTENTION: 3.0, ONLY_MANAGER: 2.0, HOST: 1.0}
    rows = [
        row("decode, 1", side, values.get(side, times.get(side.removeprefix(f"{HOST}, ").split()[0], 1.5)))
        for side in (STOCK, HOST, *PART_SIDES)
    ]
    return report(rows)


def test_parts_are_compared_with_the_side_that_lacks_nothing_else() -> None:
    text = parts_table(parts_report(fused_mlp=1.01, fused_sampler=0.9))
    assert "| time without / with the part | decode, 1 |" in text
    assert "| vLLM, all of it | 4 ms |" in text and "| Rose in vLLM, all of it | 1 ms |" in text
    assert "| `attention` | 1.33x |" in text
    assert "| `block_manager` | 1.50x |" in text
    assert "| `batched_scheduling` | 1.50x |" in text
    assert text.endswith(
        "Slower with the part, or no gain above 2%, in 2 of 8 cases:\n\n"
        "- `fused_mlp`: decode, 1 (1.010x)\n- `fused_sampler`: decode, 1 (0.900x)"
    )
    assert parts_table(parts_report()).endswith("A gain of 2% or more in 8 cases.")


def test_another_model_is_set_against_vllm() -> None:
    rows = [row("decode, 1", HOST, 0.5), row("decode, 1", STOCK, 1.0), row("mixed", HOST, 6.0)]
    rows.append(row("mixed", STOCK, 3.0))
    text = offline_table(report(rows))
    assert "|  | Rose in vLLM | vLLM | vLLM / Rose in vLLM |" in text
    assert "| decode, 1 | 0.5 ms | 1 ms | 2.00x |" in text
    assert text.endswith(
        "Slower in 1 of 2 comparisons:\n\n- Rose in vLLM behind vLLM: mixed (2.00x its time)"
    )


def test_goals_inside_vllm_are_shares_of_its_time() -> None:
    steps = [f"step, {count} requests, greedy" for count in (1, 8, 128, 256)]
    offline = "offline, 256 x 512 in, 128 out, greedy"
    rows = [
        *(row(name, side, value) for name in steps for side, value in ((STOCK, 4.0), (HOST, 2.1))),
        *(row("step, 256 requests, drawn", side, 1.0) for side in (HOST, STOCK)),
        *(row(offline, side, value) for side, value in ((STOCK, 1.4), (HOST, 1.0))),
        *(row("offline, 8 x 512 in, 128 out, greedy", side, 1.0) for side in (HOST, STOCK)),
        row("step, 1 requests, greedy", "rose", 1.0),
    ]
    found = {goal["name"]: (goal["value"], goal["limit"], goal["met"]) for goal in inside_vllm_bars(rows)}
    assert found == {
        "rose-in-vllm, goal: step, 1 requests, greedy": (0.525, 0.95, True),
        "rose-in-vllm, goal: step, 128 requests, greedy": (0.525, 0.6, True),
        "rose-in-vllm, goal: step, 256 requests, greedy": (0.525, 0.5, False),
        f"rose-in-vllm, goal: {offline}": (pytest.approx(1 / 1.4), 1 / 1.4, True),
    }


def test_goals_inside_vllm_are_for_cases_that_there_are() -> None:
    cases = {row["case"] for row in read(TABLES["offline_compare"].file)["rows"]}
    assert INSIDE_VLLM_TIMES.keys() <= cases
