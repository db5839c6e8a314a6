"""The tables that benchmarks/block_manager.py prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

_NAMES = {"rose_core": "Rose, own engine", "rose_in_vllm": "Rose in vLLM", "stock": "vLLM"}


def _cell(figure: dict[str, float], digits: int = 1) -> str:
    return f"{figure['median']:,.{digits}f} ({figure['p10']:,.{digits}f} - {figure['p90']:,.{digits}f})"


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Print all scenes, the goals and the losses."""
    scenes, rows = report["scenes"], report["settings"]["rows"]
    for name, title in (
        ("steady_decode", f"One decode step of {rows} requests, us: median (p10 - p90)"),
        ("decode_evicting", "The same, every new block pushes a cached one out"),
        ("decode_with_lookups", "The same, one waiting request looked up in every step"),
    ):
        console.print(_phases(title, scenes[name]))
    console.print(_hashing(scenes["steady_decode"], rows))
    copies = _cell(scenes["copy_on_write"])
    console.print(f"Every row copies on write, reserve + take_clone_plan, {rows} rows: {copies} us\n")
    for name, axis, title in (
        ("pool_size", "num_blocks", "Decode cost per row over the size of the pool"),
        ("sequence_length", "num_tokens", "Decode cost per row over the length of the sequences"),
    ):
        console.print(_curve(f"{title}, us, mean over whole blocks", axis, scenes[name]))
    console.print(_long_prompt(scenes["long_prompt"]))
    console.print(_among_many(scenes["among_many"]))
    console.print(_memory(scenes["memory_per_block"]))
    console.print(_bars(report["bars"]))
    console.print(_losses(report["losses"]))


def _phases(title: str, sides: dict[str, Any]) -> Table:
    table = Table("phase", *(_NAMES[side] for side in sides), "vLLM / Rose", title=title)
    for phase in ("inside", "fills", "rolls_over", "whole_block", "whole_block_and_hashing"):
        stock = sides["stock"][phase]["median"]
        ratios = " and ".join(
            f"{stock / sides[side][phase]['median']:.1f}" for side in sides if side != "stock"
        )
        table.add_row(phase, *(_cell(figures[phase]) for figures in sides.values()), ratios)
    for part in ("reserve", "commit", "allocate_slots", "cache_blocks"):
        cells = [
            _cell(figures[f"inside.{part}"]) if f"inside.{part}" in figures else ""
            for figures in sides.values()
        ]
        if any(cells):
            table.add_row(f"  inside: {part}", *cells, "")
    return table


def _hashing(sides: dict[str, Any], rows: int) -> str:
    hashing = _cell(sides["stock"]["fills.hashing"])
    return (
        f"hashing: vLLM hashes filled blocks in Request.append_output_token_ids, for {rows} requests {hashing} us; "
        f"Rose's core hashes in commit, Rose in vLLM when a lookup follows or the request ends.\n"
    )


def _curve(title: str, axis: str, points: list[dict[str, Any]]) -> Table:
    sides = list(dict.fromkeys(point["side"] for point in points))
    table = Table(axis, "rows", *(_NAMES[side] for side in sides), title=title)
    for value in dict.fromkeys(point[axis] for point in points):
        row = {point["side"]: point for point in points if point[axis] == value}
        cells = [
            _cell(row[side]["whole_block_us_per_row"], 3)
            if "skipped" not in row[side]
            else row[side]["skipped"]
            for side in sides
        ]
        table.add_row(f"{value:,}", str(row[sides[0]]["rows"]), *cells)
    return table


def _long_prompt(scene: dict[str, Any]) -> Table:
    table = Table("lookup", "us", title=f"Lookup of a prompt, {scene['hit_tokens']['stock']:,} tokens cached")
    for side, figures in scene.items():
        if side != "hit_tokens":
            for name, figure in figures.items():
                table.add_row(f"{_NAMES[side]}: {name}", _cell(figure))
    return table


def _among_many(points: list[dict[str, Any]]) -> Table:
    table = Table("cached prompts", "side", "us", "hit tokens", title="Lookup among prompts that start alike")
    for point in points:
        cells = (f"{point['num_prompts']:,}", _NAMES[point["side"]], _cell(point["lookup_us"]))
        table.add_row(*cells, str(point["hit_tokens"]))
    return table


def _memory(scene: dict[str, Any]) -> Table:
    table = Table("side", "empty", "all cached", title="Memory of the books, bytes per block")
    for side, figures in scene.items():
        table.add_row(_NAMES[side], f"{figures['empty']:.0f}", f"{figures['all_cached']:.0f}")
    return table


def _bars(bars: list[dict[str, Any]]) -> Table:
    table = Table("goal", "measured", "limit", "met", title="Goals")
    for entry in bars:
        sign = "≥" if entry["at_least"] else "≤"
        limit = f"{sign} {entry['limit']} {entry['unit']}"
        table.add_row(entry["name"], f"{entry['value']:.1f}", limit, "yes" if entry["met"] else "NO")
    return table


def _losses(losses: list[dict[str, Any]]) -> Table:
    table = Table(
        "comparison", "side", "Rose us", "vLLM us", title="Where Rose took longer than vLLM's manager"
    )
    for entry in losses:
        cells = (f"{entry['rose_us']:.2f}", f"{entry['stock_us']:.2f}")
        table.add_row(entry["name"], _NAMES[entry["side"]], *cells)
    return table
