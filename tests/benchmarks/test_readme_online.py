"""The published table of whole servers: every latency, the workload, every loss, and nothing that failed."""

from __future__ import annotations

from typing import Any

from benchmarks.online.timeline import METRICS, PERCENTILES
from benchmarks.report import problems
from benchmarks.reports.serving import trace_losses, trace_table


def turn(backend: str, scale: float, value: float, mode: str = "greedy", **changes: float) -> dict[str, Any]:
    figures = {f"p{share}_{metric}_ms": value * share for metric in METRICS for share in PERCENTILES}
    others = {"output_throughput": 1.0, "request_throughput": 1.0, "client_busy": 0.1, "failed": 0}
    return {"backend": backend, "mode": mode, "scale": scale, **figures, **others, **changes}


ROWS = [
    turn("rose", 0.1, 0.1),
    turn("rose", 0.2, 0.1),
    turn("vllm", 0.1, 0.2, p99_itl_ms=0.125),
    turn("vllm", 0.2, 0.2),
    turn("vllm", 0.2, 0.4),
]


ALT = "Latencies of 2 servers over the load"


def result(rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    lengths = {"mean": 100.4, "p50": 69.5, "p90": 300.0, "p99": 808.0}
    return {
        "command": "python -m benchmarks.online_compare",
        "device": "some GPU",
        "settings": {"model": "random weights", "dtype": "float16"},
        "trace": {
            "source": "a made-up trace",
            "num_requests": 1000,
            "seconds": 250.0,
            "length_scale": 0.1,
            "num_left_out": 16,
            "max_model_len": 1024,
            "input_length": lengths,
            "output_length": lengths,
            "best_prefix_hit_ratio": 0.774,
        },
        "backends": {name: {"version": f"of {name}"} for name in dict.fromkeys(r["backend"] for r in rows)},
        "missing": {},
        "failed": {},
        "losses": trace_losses(rows),
        "rows": rows,
        **changes,
    }


def test_every_load_is_shown_with_the_workload() -> None:
    text = trace_table(result(ROWS))
    lines = text.splitlines()
    assert lines[:3] == ["Greedy:", "", f"![{ALT}, greedy](../figures/online_compare_greedy.svg)"]
    assert lines[4] == "| p50 / p90 / p99 in ms |  | Rose | vLLM |"
    assert lines[6] == "| scale 0.2, 20 requests/s | answered/s | 1 | 1 |"
    assert lines[7] == "|  | TTFT | 5 / 9 / 9.9 | 15 / 27 / 29.7 |"
    assert lines[8].startswith("|  | TPOT | ")
    assert lines[11] == "| scale 0.1, 40 requests/s | answered/s | 1 | 1 |"
    assert lines[12] == "|  | TTFT | 5 / 9 / 9.9 | 10 / 18 / 19.8 |"
    assert lines[4 + 2 + 2 * (1 + len(METRICS)) + 3] == "Slower in 1 of 24 comparisons:"
    assert "Medians of 1 to 2 turns, 1,000 requests each, some GPU, " in text
    assert "all lengths times 0.1, 16 requests left out that do not fit 1,024 tokens even so" in text
    assert "input 100 (p50 70, p99 808)" in text and "could supply 77% of the prompt blocks" in text
    assert "random weights" in text and "Rose of rose, vLLM of vllm" in text


def test_losses_of_all_modes_are_named() -> None:
    sampled = [turn(name, 0.1, value, "sampled") for name, value in (("rose", 0.2), ("vllm", 0.25))]
    sampled[0]["p50_ttft_ms"] = 130.0
    text = trace_table(result([*ROWS, *sampled]))
    picture = f"![{ALT}, sampled](../figures/online_compare_sampled.svg)\n"
    assert text.partition(picture)[2].splitlines()[3:5] == [
        "| scale 0.1, 40 requests/s | answered/s | 1 | 1 |",
        "|  | TTFT | 130 / 18 / 19.8 | 12.5 / 22.5 / 24.8 |",
    ]
    assert text.endswith(
        "Slower in 2 of 36 comparisons:\n\n"
        "- greedy, scale 0.1: Rose behind vLLM: ITL p99 9.9 ms against 0.125 ms\n"
        "- sampled, scale 0.1: Rose behind vLLM: TTFT p50 130 ms against 12.5 ms"
    )
    assert trace_table(result(ROWS[3:] + ROWS[1:2])).endswith("No losses in 12 comparisons.")


def test_pictures_have_the_name_of_their_result() -> None:
    assert f"![{ALT}, greedy](../figures/some_trace_greedy.svg)" in trace_table(result(ROWS), "some_trace")


def test_requests_that_failed_are_not_published() -> None:
    assert problems(result([turn("rose", 0.1, 1.0, failed=3)])) == ["3 requests of rose failed"]
