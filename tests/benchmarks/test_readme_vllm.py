"""Tables of Rose inside vLLM: what they show, what they admit, and when there are none."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.report import engine_problems
from benchmarks.reports.engines import (
    HOST,
    ONLY_ATTENTION,
    ONLY_MANAGER,
    PART_SIDES,
    STOCK,
    inside_vllm_bars,
    llama_table,
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


def test_servers_are_shown_at_every_load_with_goals_that_were_missed() -> None:
    text = poisson_table(serving_report(SERVED))
    assert "| random, all at once | Rose in vLLM | 13.5 / 13.5 ms | 13.5 / 13.5 ms | 14 | 14 |" in text
    assert "|  | vLLM | 10 / 10 ms | 10 / 10 ms | 10 | 10 |" in text
    assert "|  | Rose / vLLM | 1.35x / 1.35x | 1.35x / 1.35x | 1.35x |  |" in text
    assert "| shared-prefix, 38 requests/s | Rose in vLLM | 5 / 5 ms |" in text
    assert "Medians of 2 to 3 turns, 512 requests at once or 3.5 s of Poisson arrivals, some GPU, " in text
    assert (
        "; Rose in vLLM 1, vLLM 2; start-up Rose in vLLM 21.0 s, vLLM 20.0 s; busiest client process 25% "
        in text
    )
    assert "Goals missed: shared-prefix, 38.5 a second: p50_ttft_ms (1.25 x, at most 1); " in text
    assert "fewer tokens prefilled (-1.00 tokens, at least 1), of 7.\n\nLosses of Rose in vLLM: " in text
    lost = text.rpartition("Losses of Rose in vLLM: ")[2].removesuffix(".").split("; ")
    assert "random, all at once: TTFT p50 13.5 ms against 10 ms (vLLM)" in lost
    assert "shared-prefix, 38 requests/s: prefilled tokens 5 against 4 (vLLM)" in lost
    assert len(lost) == 10 and not any("output tokens/s" in entry for entry in lost)


def test_a_server_with_a_part_off_and_servers_without_a_model_say_so() -> None:
    rows = [*SERVED, turn("random", None, OUTPUTS_APART, 7.0)]
    settings = {**serving_report(rows)["settings"], "step_ms": 1.5}
    text = poisson_table(serving_report(rows, settings=settings))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[3].startswith("|  | the same, `joined_outputs` off | 7 / 7 ms |")
    assert lines[4].startswith("|  | vLLM |") and "no model, 1.5 ms a step" in text
    assert "random, all at once: TTFT p99 13.5 ms against 7 ms (the same, `joined_outputs` off)" in text


def test_losses_of_a_server_are_all_its_figures_that_are_worse_and_no_other() -> None:
    slow = turn("random", None, STOCK, 2.0, output_throughput=1.0)
    even = serving_report([turn("random", None, HOST, 2.0, output_throughput=1.0), slow])
    assert poisson_table(even).endswith("Losses of Rose in vLLM: none.")
    less = serving_report([turn("random", None, HOST, 1.0, output_throughput=0.4), slow])
    lost = "random, all at once: output tokens/s 0 against 1 (vLLM)"
    assert poisson_table(less).endswith(f"Losses of Rose in vLLM: {lost}.")


def test_a_server_that_failed_is_not_published() -> None:
    failed = [*SERVED, turn("random", None, HOST, 3.0, failed=2)]
    assert engine_problems(serving_report(failed)) == ["2 requests of rose-in-vllm failed"]
    alone = [row for row in SERVED if row["backend"] == HOST]
    assert engine_problems(serving_report(alone)) == ["both sides are needed at every load"]


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
        "No difference (within 2%): `fused_mlp` in decode, 1. "
        "Slower with the part: `fused_sampler` in decode, 1 (0.90x)."
    )
    assert parts_table(parts_report()).endswith("(within 2%): nowhere. Slower with the part: nowhere.")


def test_another_model_is_set_against_vllm() -> None:
    rows = [row("decode, 1", HOST, 0.5), row("decode, 1", STOCK, 1.0), row("mixed", HOST, 6.0)]
    rows.append(row("mixed", STOCK, 3.0))
    text = llama_table(report(rows))
    assert "| decode, 1 | 0.5 ms | 1 ms | 2.00x |" in text
    assert text.endswith("Losses in 2 cases: Rose in vLLM takes 2.00 x vLLM's time in mixed.")


def test_goals_inside_vllm_are_shares_of_its_time() -> None:
    def case(scene: str, count: int, side: str, value: float, mode: str = "greedy") -> dict[str, Any]:
        figures = {"num_requests": count, "mode": mode, "input_len": [512, 512], "output_len": [128, 128]}
        return {**row(f"{scene}, {count}, {mode}", side, value), "scene": scene, **figures}

    rows = [
        *(case("decode", count, STOCK, 4.0) for count in (1, 8, 128, 256)),
        *(case("decode", count, HOST, 2.1) for count in (1, 8, 128, 256)),
        *(case("decode", 256, side, 1.0, "drawn") for side in (HOST, STOCK)),
        case("offline", 256, STOCK, 1.4),
        case("offline", 256, HOST, 1.0),
        case("offline", 8, STOCK, 1.0),
        case("offline", 8, HOST, 1.0),
        case("decode", 1, "rose", 1.0),
    ]
    found = {goal["name"]: (goal["value"], goal["limit"], goal["met"]) for goal in inside_vllm_bars(rows)}
    assert found == {
        "rose-in-vllm, goal: decode, 1, greedy": (0.525, 0.95, True),
        "rose-in-vllm, goal: decode, 128, greedy": (0.525, 0.6, True),
        "rose-in-vllm, goal: decode, 256, greedy": (0.525, 0.5, False),
        "rose-in-vllm, goal: offline, 256, greedy": (pytest.approx(1 / 1.4), 1 / 1.4, True),
    }
