"""benchmarks/block_manager.py and prefix_hits.py end to end: phases of steps, hits, and losses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import block_manager, prefix_hits
from benchmarks.reports.parts import prefix_hits_table, state_hits_table
from benchmarks.support import prefix_traces
from benchmarks.support.block_manager_loops import DecodeLoop, Setting, run_steps
from benchmarks.support.prefix_traces import STATE_TRACES

PHASES = {"inside", "fills", "rolls_over", "whole_block"}
SIDES = ["rose_core", "rose_in_vllm", "stock"]


@pytest.fixture(scope="module")
def quick_report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the report of one quick run with few rows."""
    path = tmp_path_factory.mktemp("report") / "block_manager.json"
    assert block_manager.main(["--quick", "--rows", "32", "--repeats", "3", "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_a_quick_run_writes_what_it_promises(quick_report: Any) -> None:
    assert quick_report["benchmark"] == "block_manager"
    assert quick_report["settings"] == {"rows": 32, "block_size": 16, "repeats": 3, "quick": True}
    assert {"cpu", "cores", "pinned_to_core", "load_at_start"} <= quick_report["machine"].keys()
    assert {"python", "numpy", "torch"} <= quick_report["versions"].keys()
    assert quick_report["command"].startswith("python -m benchmarks.")


def test_decode_scenes_have_every_phase_of_every_side(quick_report: Any) -> None:
    scenes = quick_report["scenes"]
    assert list(scenes["steady_decode"]) == SIDES
    for figures in scenes["steady_decode"].values():
        assert figures.keys() == PHASES
        assert figures["rolls_over"]["samples"] == figures["fills"]["samples"] == 3
        assert figures["inside"]["samples"] == 3 * 14
    assert scenes["copy_on_write"]["samples"] == 12


def test_curves_have_a_point_for_every_size_and_side(quick_report: Any) -> None:
    scenes = quick_report["scenes"]
    for name, axis, values in (
        ("pool_size", "num_blocks", [1000, 10_000]),
        ("sequence_length", "num_tokens", [16, 1024]),
    ):
        points = [(point[axis], point["side"]) for point in scenes[name]]
        assert points == [(value, side) for value in values for side in SIDES]
        for point in scenes[name]:
            assert "skipped" in point or point["whole_block_us_per_row"]["median"] > 0


def test_lookups_found_what_is_cached(quick_report: Any) -> None:
    scenes = quick_report["scenes"]
    assert scenes["long_prompt"]["hit_tokens"] == dict.fromkeys(SIDES, 4096)
    assert {"match", "hash_blocks"} <= scenes["long_prompt"]["rose_core"].keys()
    assert "hash_request" in scenes["long_prompt"]["stock"]
    many = scenes["among_many"]
    assert [point["num_prompts"] for point in many] == [10, 10, 100, 100]
    # Four full blocks for both, and at least half of the fifth for Rose.
    assert [point["hit_tokens"] >= 72 for point in many] == [True, False, True, False]


def test_steps_are_sorted_into_phases() -> None:
    class CountingLoop(DecodeLoop):
        """Step n takes n microseconds."""

        def restart(self) -> None:
            self.count = 0

        def step(self) -> float:
            self.count += 1
            return float(self.count)

    samples = run_steps(
        CountingLoop("stock", Setting(8, 4, 5, 1, 16)), prompt_len=5, block_size=4, num_cycles=2
    )
    # Positions 5 to 16; the first cycle is not counted: steps 5 to 12 write positions 9 to 16.
    assert samples["rolls_over"] == [8.0, 12.0]
    assert samples["fills"] == [7.0, 11.0]
    assert samples["inside"] == [5.0, 6.0, 9.0, 10.0]
    assert samples["whole_block"] == [6.5, 10.5]


def test_losses_are_exactly_where_rose_took_longer(quick_report: Any) -> None:
    scenes = quick_report["scenes"]
    for entry in block_manager.losses(scenes):
        assert entry["rose_us"] > entry["stock_us"]
    before = {(entry["name"], entry["side"]) for entry in block_manager.losses(scenes)}
    stock = scenes["steady_decode"]["stock"]["inside"]
    kept, stock["median"] = stock["median"], 0.001
    after = {(entry["name"], entry["side"]) for entry in block_manager.losses(scenes)}
    stock["median"] = kept
    name = "steady_decode: inside"
    assert after - before == {(name, "rose_core"), (name, "rose_in_vllm")} - before != set()


@pytest.mark.parametrize("name", STATE_TRACES)
def test_a_trace_is_made_of_its_seed(name: str) -> None:
    first, again = STATE_TRACES[name](0.1), STATE_TRACES[name](0.1)
    assert first == again and len(first) > 8
    starts = [request.prompt[:16] for request in first]
    assert len(set(starts)) < len(starts), "nobody shares anything"


def test_both_sides_get_the_same_requests_and_blocks(
    monkeypatch: pytest.MonkeyPatch, run_benchmark: Callable[..., Any]
) -> None:
    monkeypatch.setattr(prefix_hits, "WINDOWS", (256,))
    monkeypatch.setattr(prefix_hits, "SHARES", (0.5, 1.0))
    result = run_benchmark(prefix_hits.main, "--quick")
    points = result["points"]
    assert [point["trace"] for point in points[::2]] == list(prefix_traces.TRACES)
    for point in points:
        assert 0 < point["rose"]["hit_tokens"] < point["prompt_tokens"]
        assert 0 < point["vllm"]["hit_tokens"] < point["prompt_tokens"]
        assert point["vllm"]["hit_tokens"] % 16 == 0, "vLLM's hits end at blocks"
    assert any(point["rose"]["hit_tokens"] % 16 for point in points)
    assert "| chat | 256 |" in prefix_hits_table(result)


def test_losses_are_named() -> None:
    point = {"trace": "chat", "window": 128, "share": 0.5, "prompt_tokens": 1000}
    better = {**point, "share": 1.0, "rose": {"hit_tokens": 700}, "vllm": {"hit_tokens": 600}}
    worse = {**point, "rose": {"hit_tokens": 300}, "vllm": {"hit_tokens": 400}}
    facts = {"versions": {"vllm": "0"}, "command": "python -m benchmarks.prefix_hits"}
    text = prefix_hits_table({"points": [worse, better], **facts})
    assert "| chat | 128 | 30.0% / 40.0% | 70.0% / 60.0% |" in text
    assert "chat 1.000" in text and "- chat, window of 128: 50%: 300 of 400" in text


def test_states_are_counted_beside_vllms(
    monkeypatch: pytest.MonkeyPatch, run_benchmark: Callable[..., Any]
) -> None:
    monkeypatch.setattr(prefix_hits, "SHARES", (0.5, 1.0))
    monkeypatch.setattr(prefix_traces, "STATE_TRACES", {"short heads": prefix_traces.short_heads})
    result = run_benchmark(prefix_hits.main, "--quick --states")
    for point in result["points"]:
        assert point["vllm"]["hit_tokens"] == 0, "heads are shorter than a block"
        assert 0 < point["rose"]["shared_hit_tokens"] <= point["shared_tokens"] < point["prompt_tokens"]
        assert point["rose"]["shared_hit_tokens"] <= point["rose"]["hit_tokens"]
    assert result["points"][1]["rose"]["shared_hit_tokens"] > 0.9 * result["points"][1]["shared_tokens"]
    assert "| short heads | 100% |" in state_hits_table(result)
