"""The count of prefix hits: requests are made of their seeds, both sides get the same, and losses are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import prefix_hits
from benchmarks.reports.parts import prefix_hits_table, state_hits_table
from benchmarks.support import prefix_traces
from benchmarks.support.prefix_traces import STATE_TRACES

pytest.importorskip("vllm")


@pytest.mark.parametrize("name", STATE_TRACES)
def test_a_trace_is_made_of_its_seed(name: str) -> None:
    first, again = STATE_TRACES[name](0.1), STATE_TRACES[name](0.1)
    assert first == again and len(first) > 8
    starts = [request.prompt[:16] for request in first]
    assert len(set(starts)) < len(starts), "nobody shares anything"


def test_both_sides_get_the_same_requests_and_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(prefix_hits, "WINDOWS", (256,))
    monkeypatch.setattr(prefix_hits, "SHARES", (0.5, 1.0))
    path = tmp_path / "hits.json"
    assert prefix_hits.main(["--quick", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
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


def test_states_are_counted_beside_vllms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(prefix_hits, "SHARES", (0.5, 1.0))
    monkeypatch.setattr(prefix_traces, "STATE_TRACES", {"short heads": prefix_traces.short_heads})
    path = tmp_path / "hits.json"
    assert prefix_hits.main(["--quick", "--states", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    for point in result["points"]:
        assert point["vllm"]["hit_tokens"] == 0, "heads are shorter than a block"
        assert 0 < point["rose"]["shared_hit_tokens"] <= point["shared_tokens"] < point["prompt_tokens"]
        assert point["rose"]["shared_hit_tokens"] <= point["rose"]["hit_tokens"]
    assert result["points"][1]["rose"]["shared_hit_tokens"] > 0.9 * result["points"][1]["shared_tokens"]
    assert "| short heads | 100% |" in state_hits_table(result)
