"""The README's tables of what is copied and appended."""

from __future__ import annotations

from typing import Any

from benchmarks.kv_append import losses
from benchmarks.support.readme_blocks import kv_append_table, kv_cow_clone_table, streaming_table

SETTINGS = {"dtype": "float16", "num_layers": 12, "block_size": 64, "context": 512}


def result(rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {
        "command": "python -m benchmarks.some",
        "machine": {"device": "some GPU"},
        "settings": SETTINGS,
        "rows": rows,
        **changes,
    }


def figures(total: float, graph: float | None = None) -> dict[str, Any]:
    return {"total": {"median": total}} | ({} if graph is None else {"graph": {"median": graph}})


def test_all_ways_to_clone_are_shown() -> None:
    ways = {"loop": 900.0, "loop_filled": 800.0, "batched_torch": 300.0, "batched": 90.0}
    rows = [{"batch": batch, "variants": {way: figures(us) for way, us in ways.items()}} for batch in (1, 2)]
    losses = [
        {"batch": 1, "variant": way, "us": 80.0, "batched_us": 90.0}
        for way in ("loop_filled", "batched_torch")
    ]
    text = kv_cow_clone_table(result(rows, losses=losses))
    assert (
        "| requests | one by one, layer by layer | one plan, torch copies | one plan, one launch |  |" in text
    )
    assert "| 1 | 900 µs | 300 µs | 90 µs | 10.0x |" in text
    assert "| 2 |" not in text
    assert "Medians, some GPU, float16, 12 layers, blocks of 64; `python -m benchmarks.some`." in text
    lost = "1 request (one plan, torch copies: 80 µs, one plan, one launch: 90 µs)"
    assert text.endswith(f"Losses: {lost}.")
    assert kv_cow_clone_table(result(rows, losses=[])).endswith("Losses: none.")


def test_all_ways_to_append_and_their_losses_are_shown() -> None:
    rows = [
        {"batch": 32, "variants": {"append": figures(5000.0), "reserve_write": figures(400.0, 120.0),
                                   "reserve_fused": figures(500.0, 100.0)}}
    ]  # fmt: skip
    text = kv_append_table(result(rows, losses=losses(rows)))
    assert "| 32 | 5,000 µs | 400 µs | 500 µs | 10.0x | 120 µs | 100 µs |" in text
    assert text.endswith("Losses: 32 sequences (one write a layer: 400 µs, stored by attention: 500 µs).")
    assert kv_append_table(result(rows, losses=[])).endswith("Losses: none.")


def test_scenes_are_shown_before_and_after() -> None:
    figures = {
        f"p{share}_{metric}_ms": share / 2 for metric in ("ttft", "itl", "latency") for share in (50, 95, 99)
    }
    before = {"scene": "rollover", "side": "one by one", **figures, "output_throughput": 12346.6}
    after = {**before, "side": "at once", "p95_itl_ms": 1.234, "output_throughput": 12345.6}
    rows = [before, {**after, "p99_ttft_ms": 49.6}]
    settings = {"repeat_runs": 3, "num_requests": 256, "model": "some model", "dtype": "float16"}
    text = streaming_table({**result(rows), "device": "some GPU", "settings": settings})
    assert "| rollover | at once | 25 / 47.5 / 49.6 | 25 / 1.23 / 49.5 | 25 / 47.5 / 49.5 | 12,346 |" in text
    assert text.endswith(
        "Losses: rollover, TTFT p99 49.6 against 49.5; rollover, tokens/s 12,346 against 12,347."
    )
    assert "Medians of 3 runs, 256 requests at once, some GPU, some model, float16; " in text
