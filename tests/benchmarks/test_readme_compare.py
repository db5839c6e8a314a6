"""Tables of whole engines: what they show, what they admit, and when there are none."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.report import problems
from benchmarks.reports.engines import losses, offline_table, parts_table
from benchmarks.reports.serving import in_process_table


def row(case: str, backend: str, value: float) -> dict[str, Any]:
    scene = case.split(",")[0]
    figure = "step_ms" if scene == "decode" else "duration"
    figures = {
        figure: {"median": value, "samples": 2 if scene == "mixed" else 3},
        "output_throughput": {"median": 1e5 / value},
    }
    return {"case": case, "scene": scene, "backend": backend, "figure": figure, "figures": figures}


def report(rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    backends = dict.fromkeys(row["backend"] for row in rows)
    return {
        "benchmark": "some",
        "command": "python -m benchmarks.some --repeats 3",
        "device": "some GPU",
        "settings": {"model": "some model", "dtype": "float16"},
        "backends": {name: {"version": f"of {name}"} for name in backends},
        "missing": {},
        "failed": {},
        "losses": losses(row for row in rows if "case" in row),
        "rows": rows,
        **changes,
    }


ROWS = [
    row("decode, 1", "rose", 0.25),
    row("decode, 1", "vllm", 1.0),
    row("decode, 1", "sglang", 0.75),
    row("mixed", "rose", 5.0),
    row("mixed", "vllm", 10.0),
    row("mixed", "sglang", 4.0),
]


def test_every_engine_and_every_loss_is_shown() -> None:
    text = offline_table(report(ROWS))
    assert "|  | Rose | vLLM | SGLang | best peer / Rose |" in text
    assert "| decode, 1 | 0.25 ms | 1 ms | 0.75 ms | 3.00x |" in text
    assert "| mixed | 5.00 s, 20 k tok/s | 10.00 s, 10 k tok/s | 4.00 s, 25 k tok/s | 0.80x |" in text
    assert "Medians of 2 to 3 turns, some GPU, some model, float16; " in text
    assert "; Rose of rose, vLLM of vllm, SGLang of sglang; `python -m" in text
    assert text.endswith("Slower in 1 of 4 comparisons:\n\n- Rose behind SGLang: mixed (1.25x its time)")
    assert offline_table(report(ROWS[:3])).endswith("No losses in 2 comparisons.")


def test_a_version_that_was_not_yet_raised_is_not_shown_as_a_release() -> None:
    text = offline_table(report(ROWS, backends={"rose": {"version": "0.1.0"}, "vllm": {"version": "0.1.0"}}))
    assert "; Rose 0.2.0 development, vLLM 0.1.0; " in text


def test_switches_are_compared_with_their_own_host() -> None:
    rows = [
        row("decode, 1", "rose", 0.25),
        row("decode, 1", "rose, fused_mlp off", 0.5),
        row("decode, 1", "rose-in-vllm", 1.0),
        row("decode, 1", "rose-in-vllm, block_manager off", 1.5),
    ]
    text = parts_table(report(rows))
    assert "| Rose, all of it | 0.25 ms |" in text and "| Rose in vLLM, all of it | 1 ms |" in text
    assert "| `fused_mlp` | 2.00x |" in text
    assert "| `block_manager` | 1.50x |" in text
    assert text.endswith("A gain of 2% or more in 2 cases.")
    rows[1] = row("decode, 1", "rose, fused_mlp off", 0.249)
    some = "Slower with the part, or no gain above 2%, in 1 of 2 cases:\n\n- `fused_mlp`: decode, 1 (0.996x)"
    assert parts_table(report(rows)).endswith(some)


def test_latencies_and_losses_at_the_same_load_are_shown() -> None:
    figures = {f"p{p}_{m}_ms": float(p) for p in (50, 90, 99) for m in ("ttft", "tpot", "itl", "e2el")}
    same: dict[str, Any] = {"scene": "same load", "request_rate": 1234.5, "turns": [1] * 4, **figures}
    rows = [
        {"scene": "capacity", "backend": "rose", "request_rate": None, "turns": [1] * 4, **figures},
        {**same, "backend": "rose", "p50_itl_ms": 0.12345},
    ]
    text = in_process_table(report(rows, losses=[]))
    latencies = "50 / 90 / 99 | 50 / 90 / 99 | 0.123 / 90 / 99 | 50 / 90 / 99"
    assert f"| same load, 1,234 requests/s | Rose | {latencies} |" in text
    assert "capacity" not in text
    assert "Medians of 4 turns, some GPU" in text
    assert text.endswith("No losses in 0 comparisons.")
    vllm = {**same, "backend": "vllm", "p99_ttft_ms": 98.0, "p50_itl_ms": 0.1, "p90_itl_ms": 91.0}
    own = {**vllm, "scene": "own load", "backend": "rose", "p90_ttft_ms": 1000.0}
    text = in_process_table(report([*rows, vllm, own], losses=[]))
    lost = "- same load: Rose behind vLLM: TTFT p99 99 ms against 98 ms; ITL p50 0.123 ms against 0.1 ms"
    assert text.endswith(f"Slower in 2 of 12 comparisons:\n\n{lost}")


@pytest.mark.parametrize("label", ["missing", "failed"])
def test_a_comparison_that_lacks_an_engine_is_not_published(label: str) -> None:
    assert problems(report(ROWS)) == []
    result = report(ROWS, **{label: {"sglang": "no module\nsecond line"}})
    assert problems(result) == ["not every engine has run: sglang (no module)"]


def test_a_command_that_has_moved_is_shown_as_it_is_today() -> None:
    result = report(ROWS, command="python -m benchmarks.arrivals --share 1")
    today = "`python -m benchmarks.online_compare in-process --share 1` (at the time `benchmarks.arrivals`)."
    assert today in offline_table(result)
