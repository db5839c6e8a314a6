"""Tables of whole engines: what they show, what they admit, and when there are none."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.report import engine_problems
from benchmarks.reports.engines import losses, offline_table, switches_table
from benchmarks.reports.serving import in_process_table
from benchmarks.support.run_facts import bar


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
    assert "Medians of turns (decode: 3, mixed: 2), some GPU, some model, float16; " in text
    assert "; Rose of rose, vLLM of vllm, SGLang of sglang; `python -m" in text
    assert text.endswith("Losses in 2 cases: Rose takes 1.25 x SGLang's time in mixed.")
    assert offline_table(report(ROWS[:3])).endswith("Losses in 1 cases: none.")


def test_switches_are_compared_with_their_own_host() -> None:
    rows = [
        row("decode, 1", "rose", 0.25),
        row("decode, 1", "rose, fused_mlp off", 0.5),
        row("decode, 1", "rose-in-vllm", 1.0),
        row("decode, 1", "rose-in-vllm, block_manager off", 1.5),
    ]
    text = switches_table(report(rows))
    assert "| Rose | `fused_mlp` | 2.00x |" in text
    assert "| Rose in vLLM | `block_manager` | 1.50x |" in text
    assert text.endswith("Faster without: none.")
    rows[1] = row("decode, 1", "rose, fused_mlp off", 0.249)
    assert switches_table(report(rows)).endswith("Faster without: `fused_mlp` in decode, 1 (0.996x).")


def test_latencies_and_missed_goals_are_shown() -> None:
    figures = {f"p{p}_{m}_ms": float(p) for p in (50, 90, 99) for m in ("ttft", "tpot", "itl", "e2el")}
    rows = [
        {"scene": "capacity", "backend": "rose", "request_rate": None, "turns": [1] * 4, **figures},
        {
            "scene": "same load",
            "backend": "rose",
            "request_rate": 1234.5,
            "turns": [1] * 4,
            **figures,
            "p50_itl_ms": 0.12345,
        },
    ]
    bars = [bar("good", 1.0, 2.0, "x"), bar("bad", 3.456, 3.0, "x")]
    text = in_process_table(report(rows, bars=bars, losses=[]))
    latencies = "50 / 90 / 99 | 50 / 90 / 99 | 0.123 / 90 / 99 | 50 / 90 / 99"
    assert f"| same load, 1,234 requests/s | Rose | {latencies} |" in text
    assert "capacity" not in text
    assert "Medians of 4 turns, some GPU" in text
    assert "Goals missed: bad (3.46 x, at most 3), of 2." in text
    assert text.endswith("Losses at the same load, in ms: none.")
    vllm = {"scene": "same load", "backend": "vllm", "request_rate": 1.0, "turns": [1] * 4, **figures}
    vllm |= {"p99_ttft_ms": 98.0, "p50_itl_ms": 0.1, "p90_itl_ms": 91.0}
    own = {**vllm, "scene": "own load", "backend": "rose", "p90_ttft_ms": 1000.0}
    text = in_process_table(report([*rows, vllm, own], bars=bars, losses=[]))
    lost = "Rose behind vLLM, TTFT p99 99 against 98; Rose behind vLLM, ITL p50 0.123 against 0.1."
    assert text.endswith(f"Losses at the same load, in ms: {lost}")


@pytest.mark.parametrize("label", ["missing", "failed"])
def test_a_comparison_that_lacks_an_engine_is_not_published(label: str) -> None:
    assert engine_problems(report(ROWS)) == []
    result = report(ROWS, **{label: {"sglang": "no module\nsecond line"}})
    assert engine_problems(result) == ["not every engine has run: sglang (no module)"]


def test_a_command_that_has_moved_says_which_sources_it_ran_with() -> None:
    result = report(ROWS, command="python -m benchmarks.arrivals --share 1", sources_digest="0123")
    today = "today `python -m benchmarks.online_compare in-process`)."
    assert f"`python -m benchmarks.arrivals --share 1` (sources: 0123; {today}" in offline_table(result)
    del result["sources_digest"]
    assert "(sources: not recorded; today " in offline_table(result)
