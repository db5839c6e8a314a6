"""benchmarks/waiting.py end to end on the embedded model, and what a threshold makes of the bursts."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import waiting
from rose_backend.block_manager import scheduling_policies

NEEDS_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.mark.parametrize("host", ["rose", pytest.param("rose-in-vllm", marks=NEEDS_VLLM)])
def test_a_quick_run_writes_what_it_promises(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # and taken back
    # vLLM's worker binds its process to cores and puts a function that does nothing in this one's place.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setattr(torch, "set_num_threads", torch.set_num_threads)
    path = tmp_path / "waiting.json"
    threshold = scheduling_policies.MIN_TOKENS_WORTH_WAITING
    assert waiting.main(["--quick", "--host", host, "--json", str(path)]) == 0
    assert threshold == scheduling_policies.MIN_TOKENS_WORTH_WAITING
    report = json.loads(path.read_text())
    assert report["benchmark"] == "waiting" and report["settings"]["threshold_in_force"] == threshold
    assert list(report["backends"]) == [host] and report["device"] == "cpu" and report["sources_digest"]
    rows = {(row["shared"], row["side"]): row for row in report["rows"]}
    assert len(rows) == len(report["rows"]) == 4
    for (shared, side), row in rows.items():
        unshared = 3 * 8 + 4 * 16
        # Only who waits finds what the first has computed.
        assert row["prompt_tokens_computed"] == unshared + shared * (1 if side == "wait" else 3)
        assert 0 < row["ttft_sharing_p50_ms"] <= row["ttft_sharing_p90_ms"] <= row["total_ms"]
        assert 0 < row["ttft_others_p50_ms"] <= row["ttft_others_p90_ms"] <= row["total_ms"]
    assert [row["threshold"] for row in report["thresholds"]] == [16, 40]
    assert "Over waiting never" in capsys.readouterr().out


def test_a_threshold_chooses_a_side_for_each_burst() -> None:
    def row(shared: int, side: str, value: float) -> dict[str, float | str]:
        names = (*waiting.FIGURES, "prompt_tokens_computed")
        burst = {"sharing": 2, "shared": shared, "tail": 8, "others": 1, "other_len": 4}
        return {**burst, "side": side, **dict.fromkeys(names, value)}

    rows = [row(16, "at once", 1.0), row(16, "wait", 4.0), row(64, "at once", 3.0), row(64, "wait", 0.75)]
    small, large = waiting.by_threshold(rows, [16, 64])
    assert (small["threshold"], large["threshold"]) == (16, 64)
    assert small["total_ms"] == pytest.approx(1.0)  # four times in one, a quarter in the other
    assert large["total_ms"] == pytest.approx(0.5)
