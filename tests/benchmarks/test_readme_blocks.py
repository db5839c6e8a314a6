"""Published tables of the block manager, and of what is copied and appended."""

from __future__ import annotations

from typing import Any

from benchmarks.reports.parts import (
    OURS,
    block_manager_table,
    variant_losses,
    variants_table,
)

SETTINGS = {"dtype": "float16", "num_layers": 12, "block_size": 64, "context": 512}


def result(rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {
        "benchmark": "kv_append",
        "command": "python -m benchmarks.some",
        "machine": {"device": "some GPU"},
        "versions": {"torch": "2", "python": "3"},
        "settings": SETTINGS,
        "rows": rows,
        **changes,
    }


def figures(total: float, graph: float | None = None) -> dict[str, Any]:
    return {"total": {"median": total}} | ({} if graph is None else {"graph": {"median": graph}})


def test_all_ways_to_clone_are_shown() -> None:
    ways = {"loop": 900.0, "loop_filled": 80.0, "batched_torch": 85.0, "batched": 90.0}
    rows = [{"batch": batch, "variants": {way: figures(us) for way, us in ways.items()}} for batch in (1, 2)]
    lost = variant_losses(rows[:1], OURS["kv_cow_clone"])
    text = variants_table(result(rows, losses=lost, benchmark="kv_cow_clone", settings=SETTINGS))
    assert (
        "| requests | one by one, layer by layer | one by one, filled part only | one plan, torch copies "
        "| one plan, one launch |" in text
    )
    assert "| 1 | 900 µs | 80 µs | 85 µs | 90 µs |" in text and "\n| 2 | 900 µs |" in text
    assert "Medians, some GPU, float16, 12 layers, blocks of 64, 512 tokens each; torch 2; `python -m" in text
    filled = "80 µs (one by one, filled part only)"
    assert text.endswith(
        "Slower in 3 of 10 comparisons:\n\n"
        f"- one plan, torch copies: batch of 1: 85 µs against {filled}\n"
        f"- one plan, one launch: batch of 1: 90 µs against {filled}; "
        "batch of 1: 90 µs against 85 µs (one plan, torch copies)"
    )
    none = variants_table(result(rows, losses=[], benchmark="kv_cow_clone"))
    assert none.endswith("No losses in 10 comparisons.")


def test_ways_to_append_are_shown_alone_and_in_a_graph() -> None:
    rows = [
        {
            "batch": 32,
            "variants": {
                "append": figures(300.0),
                "reserve_write": figures(400.0, 90.0),
                "reserve_fused": figures(200.0, 95.0),
            },
        }
    ]
    text = variants_table(result(rows, losses=variant_losses(rows, OURS["kv_append"])))
    assert "| 32 | 300 µs | 400 µs | 200 µs | 90 µs | 95 µs |" in text
    assert text.endswith(
        "Slower in 2 of 4 comparisons:\n\n"
        "- reserve, one write a layer: batch of 32: 400 µs against 300 µs (append one by one)\n"
        "- reserve, stored by attention, in a graph: batch of 32: 95 µs against 90 µs (reserve, one write a layer)"
    )


def test_losses_of_the_block_manager_are_shown() -> None:
    median = {"median": 10.0}
    lookups = {"get_computed_blocks.again": median, "match": median}
    sides = ("rose_core", "rose_in_vllm", "stock")
    scenes = {
        "steady_decode": {side: {"inside": median, "rolls_over": median} for side in sides},
        "long_prompt": dict.fromkeys(sides, lookups),
        "copy_on_write": median,
    }
    lost = [{"name": "some lookup", "side": "rose_in_vllm", "rose_us": 30.0, "stock_us": 20.0}]
    facts = {"scenes": scenes, "machine": {"cpu": "some processor"}, "versions": {"vllm": "1"}}
    text = block_manager_table(result([], losses=lost, **facts))
    of = "the comparisons with vLLM's manager"
    lookup = "- Rose behind vLLM's interface: some lookup: 30 µs against 20 µs"
    assert text.endswith(f"Slower in 1 of {of}:\n\n{lookup}")
    assert block_manager_table(result([], losses=[], **facts)).endswith(f"No losses in {of}.")


def test_a_loss_is_every_variant_of_rose_that_one_before_it_beats() -> None:
    variants = {"loop": figures(3.0), "slower": figures(7.0), "write": figures(4.0, 2.0)}
    rows: list[dict[str, Any]] = [
        {"batch": 1, "variants": {**variants, "fused": figures(5.0, 1.0)}},
        {"batch": 2, "variants": {**variants, "fused": figures(2.0, 2.5)}},
    ]
    found = variant_losses(rows, ("write", "fused"))
    assert [(loss["batch"], loss["figure"], loss["variant"], loss["faster"]) for loss in found] == [
        (1, "total", "write", "loop"),
        (1, "total", "fused", "loop"),
        (1, "total", "fused", "write"),
        (2, "total", "write", "loop"),
        (2, "graph", "fused", "write"),
    ]
    assert (found[0]["us"], found[0]["faster_us"]) == (4.0, 3.0)
