"""``online_compare poisson`` end to end against servers that only seem to be vLLM's, and its parts."""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import online_compare
from benchmarks.online import servers, workloads
from benchmarks.online.servers import parse_counts
from benchmarks.reports.serving import COMPARED, OUTPUTS_APART, compare, poisson_bars
from benchmarks.support import worker_pool
from benchmarks.support.checkpoint import ModelFacts
from benchmarks.support.comparison import engine_options
from benchmarks.support.engines import BLOCK_SIZE, STEP_MS, EngineOptions
from benchmarks.support.worker_pool import Engines
from benchmarks.support.workload import RandomRequests, request_sets
from tests.benchmarks.fake_vllm_server import FAKES, METRICS, fake_command
from tests.benchmarks.sleepers import Sleeper, is_stopped

FACTS = ModelFacts(vocab_size=1000, max_model_len=64, kv_elements_per_token=2)


def test_a_quick_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "server_command", fake_command)
    # What a machine's clock ticks count of so short a turn says nothing: each look finds a quarter of a second more.
    looks = itertools.count()
    monkeypatch.setattr(workloads, "processor_seconds", lambda pid: {"server": next(looks) / 4})
    path = tmp_path / "serving.json"
    arguments = ["--quick", "--requests", "24", "--seconds", "0.25", "--rates", "80", "--json", str(path)]
    assert online_compare.main(["poisson", *arguments, "--logs", str(tmp_path)]) == 0
    report = json.loads(path.read_text())

    turns = [(row["set"], row["rate"]) for row in report["rows"]][::2]
    assert turns == [(name, rate) for name in workloads.SETS for rate in (None, 80.0)]
    backends = [row["backend"] for row in report["rows"]]
    # Who begins changes from turn to turn.
    assert backends[:4] == ["rose-in-vllm", "vllm", "vllm", "rose-in-vllm"]
    for first, second in zip(report["rows"][::2], report["rows"][1::2], strict=True):
        assert first["total_input_tokens"] == second["total_input_tokens"]
        assert first["completed"] == {None: 24, 80.0: 20}[first["rate"]] and not first["failed"]
    for row in report["rows"]:
        assert row["prefilled_tokens"] + row["cached_tokens"] == row["total_input_tokens"]
        # No turn meets prompts of another one.
        assert (row["set"] == "shared-prefix") == (row["cached_tokens"] > BLOCK_SIZE)
        if row["rate"]:
            assert row["duration"] > 0.7 * row["completed"] / row["rate"]
        assert row["client_busy"] > 0
        assert row["server_busy"]["server"] * row["duration"] == pytest.approx(0.25)

    assert [(row["set"], row["rate"]) for row in report["comparison"]] == turns
    for row in report["comparison"]:
        for backend, (_, delay_ms) in FAKES.items():
            assert row["medians"][backend]["p50_ttft_ms"] >= float(delay_ms)
        assert (row["set"] == "shared-prefix") == (row["times"]["prefilled_tokens"] < 0.99)
    assert report["start_up_s"].keys() == FAKES.keys()
    assert report["turns_left_out"] == 0
    assert report["backends"].keys() == report["settings"]["engine_options"].keys() == FAKES.keys()
    assert len(report["bars"]) == 1 + 4 + 1 + 4 + 2 + 1
    assert "all at once" in capsys.readouterr().out


def measured(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[dict[str, Any]]:
    """Return rows of servers that are asked nothing; vLLM's own ends 40 requests a second, later fewer."""
    speeds = {
        "vllm": itertools.chain([40.0], itertools.repeat(7.0)),
        "rose-in-vllm": itertools.repeat(1000.0),
    }

    def counted(self: Any, server: Any, requests: Any) -> dict[str, Any]:
        return {"request_throughput": next(speeds[server]), "asked": len(requests.prompts)}

    monkeypatch.setattr(workloads.Poisson, "counted", counted)
    poisson = workloads.Poisson(online_compare.parse_options(["poisson", "--quick", *arguments]), FACTS)
    for turn in poisson.turns_left():
        poisson.rows += [
            {"backend": name, "first": turn.first, **turn.columns, **poisson.take(name, name, turn)}  # type: ignore[arg-type]
            for name in FAKES
        ]
    return poisson.rows


def test_loads_are_shares_of_what_saturates_vllms_own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--sets", "random", "--loads", "0.5", "1.5", "--repeats", "3", "--requests", "9")
    rows = measured(monkeypatch, *arguments)[::2]
    assert [row["rate"] for row in rows] == [None, 20.0, 60.0] * 3
    assert [row["repeat"] for row in rows][::3] == [0, 1, 2]
    # Half a second of arrivals each.
    assert [row["asked"] for row in rows] == [9, 10, 30] * 3


@pytest.mark.parametrize("num_rates", [1, 2])
def test_each_server_begins_in_every_other_turn_of_a_kind(
    monkeypatch: pytest.MonkeyPatch, num_rates: int
) -> None:
    loads = [str(0.5 + number) for number in range(num_rates)]
    kinds: dict[Any, list[int]] = {}
    for row in measured(monkeypatch, "--repeats", "4", "--loads", *loads)[::2]:
        kinds.setdefault((row["set"], row["number"]), []).append(row["first"] % 2)
    assert len(kinds) == 2 * (1 + num_rates)
    assert all(firsts in ([0, 1, 0, 1], [1, 0, 1, 0]) for firsts in kinds.values())


def test_turns_that_an_earlier_run_has_taken_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measured(monkeypatch, "--repeats", "2", "--loads", "0.5", "1.0")
    options = online_compare.parse_options(["poisson", "--quick", "--repeats", "2", "--loads", "0.5", "1.0"])
    poisson = workloads.Poisson(options, FACTS)
    left = []
    for count in (12, 0, 1, 4):
        poisson.rows = rows[: 2 * count]
        left = poisson.turns_left()
        assert len(left) == 12 - count
    assert left[0].seed == 5
    assert {(turn.columns["set"], turn.columns["repeat"]) for turn in left} == {
        ("shared-prefix", 0),
        ("random", 1),
        ("shared-prefix", 1),
    }


class SlowServer(Sleeper):
    """Is ready when it is looked at for the third time; notes who was there and who was stopped meanwhile."""

    made: list[Sleeper]
    seen: list[list[tuple[str, bool]]]

    def __init__(self, options: EngineOptions, log: Path) -> None:
        super().__init__(options.backend, looks=0)
        self.made.append(self)

    def facts_if_ready(self) -> dict[str, str] | None:
        self.looks += 1
        if self.looks < 3:
            return None
        self.seen.append([(other.name, is_stopped(other.pid)) for other in self.made if other is not self])
        return {"version": "1"}


@pytest.mark.parametrize("in_turn", [True, False])
def test_servers_start_together_or_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_turn: bool
) -> None:
    SlowServer.made, SlowServer.seen = [], []
    wanted = {
        name: EngineOptions(name, "model", "float32", "cpu", 8, 64, 64, dict(os.environ)) for name in FAKES
    }
    monkeypatch.setattr(worker_pool, "is_installed", lambda options: True)
    with Engines(SlowServer, tmp_path, in_turn=in_turn) as engines:
        start_up_s = engines.start(wanted)
        assert list(engines.running) == list(start_up_s) == list(engines.facts) == list(FAKES)
        first, second = FAKES
        together = [[(second, False)], [(first, False)]]
        assert SlowServer.seen == ([[], [(first, True)]] if in_turn else together)
        assert not any(is_stopped(server.pid) for server in SlowServer.made)
    assert all(server.ended for server in SlowServer.made)


def test_a_part_that_is_off_has_a_server_of_its_own() -> None:
    arguments = ["poisson", "--quick", "--compare-joined-outputs", "--step-ms", "2", "--device", "cpu"]
    sides = workloads.Poisson.sides(online_compare.parse_options(arguments))
    assert list(sides) == [*FAKES, OUTPUTS_APART]
    assert sides[OUTPUTS_APART] == ("rose-in-vllm", ["joined_outputs"])
    assert sides["rose-in-vllm"] == ("rose-in-vllm", [])


def test_a_server_without_a_model_is_another_program() -> None:
    parsed = online_compare.parse_options(["poisson", "--step-ms", "2", "--device", "cpu"])
    options = engine_options(parsed, "rose-in-vllm", "model", FACTS, ["joined_outputs"])
    assert options.variables[STEP_MS] == "2.0"
    command = servers.server_command(options, 1)
    assert servers.HOST_ONLY_SERVER in command and "vllm.entrypoints.cli.main" not in command
    assert '{"rose": {"joined_outputs": false, "exact_cached_tokens": true}}' in command
    with_model = engine_options(online_compare.parse_options(["poisson"]), "vllm", "model", FACTS, [])
    assert "vllm.entrypoints.cli.main" in servers.server_command(with_model, 1)
    assert STEP_MS not in with_model.variables


@pytest.mark.parametrize("workload", ["trace", "poisson"])
def test_both_sides_stand_behind_the_front_end_that_is_asked_for(
    workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, expected, otherwise in (([], {"0"}, "1"), (["--rust-front-end"], {"1"}, "0")):
        monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", otherwise)
        parsed = online_compare.parse_options([workload, *arguments])
        sides = (engine_options(parsed, backend, "model", FACTS, []) for backend in FAKES)
        assert {side.variables.get("VLLM_USE_RUST_FRONTEND") for side in sides} == expected
        assert parsed.workload(parsed, FACTS).settings["rust_front_end"] is bool(arguments)
    monkeypatch.delenv("VLLM_USE_RUST_FRONTEND")
    rose = engine_options(parsed, "rose", "model", FACTS, [])
    assert "VLLM_USE_RUST_FRONTEND" not in rose.variables


def test_a_server_that_does_not_start_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = [sys.executable, "-c", "raise SystemExit('no such backend')"]
    monkeypatch.setattr(servers, "server_command", lambda *arguments: fails)
    assert online_compare.main(["poisson", "--quick", "--logs", str(tmp_path)]) == 1
    assert "no such backend" in capsys.readouterr().out


SETS = request_sets(200, quick=False)


@pytest.mark.parametrize("request_set", SETS.values(), ids=SETS)
def test_prompts_of_a_turn_are_its_own(request_set: RandomRequests) -> None:
    turns = [replace(request_set, seed=seed).requests(50_000) for seed in (1, 2)]
    starts = [{tuple(prompt[:12]) for prompt in turn.prompts} for turn in turns]
    assert not starts[0] & starts[1]
    assert len(starts[0]) == (request_set.num_prefixes or 200)
    lengths = {len(prompt) - request_set.prefix_len for prompt in turns[0].prompts}
    assert (min(lengths), max(lengths)) == request_set.input_len
    assert turns[0].output_lens == [128] * 200 and turns[0].due == [0.0] * 200


def test_shared_prefixes_end_inside_a_block() -> None:
    prompts = SETS["shared-prefix"].requests(50_000).prompts
    assert len({tuple(prompt[:500]) for prompt in prompts}) == 8
    assert len({tuple(prompt[:501]) for prompt in prompts}) > 100
    assert 500 % BLOCK_SIZE != 0


def test_quick_sets_are_short() -> None:
    quick = request_sets(200, quick=True)
    assert quick.keys() == SETS.keys() == set(workloads.SETS)
    for name, short in quick.items():
        long = SETS[name]
        assert [16 * length for length in short.input_len] == list(long.input_len)
        assert [16 * length for length in short.output_len] == list(long.output_len)
        assert short.prefix_len == long.prefix_len // 16 and short.num_prefixes == long.num_prefixes


def test_counters_are_read_and_summed_over_engines() -> None:
    page = METRICS.format(prompt=10, hits=4, generated=7)
    second = page.replace('engine="0"', 'engine="1"')
    assert parse_counts(page + "\n".join(line for line in second.splitlines() if line[0] != "#") + "\n") == {
        "prompt_tokens": 20,
        "cached_tokens": 8,
        "generated_tokens": 14,
        "preemptions": 0,
    }
    with pytest.raises(KeyError, match="does not count vllm:prefix_cache_hits_total"):
        parse_counts(page.replace("prefix_cache_hits", "other"))


def test_medians_are_compared() -> None:
    def row(backend: str, value: float) -> dict[str, Any]:
        return {"set": "random", "rate": 3.0, "backend": backend, **dict.fromkeys(COMPARED, value)}

    rows = [row("vllm", value) for value in (1.0, 4.0, 90.0)]
    (alone,) = compare(rows)
    assert "times" not in alone
    (both,) = compare(rows + [row("rose-in-vllm", value) for value in (50.0, 2.0, 0.0)])
    assert both["medians"]["vllm"]["p99_ttft_ms"] == 4.0
    assert both["times"] == dict.fromkeys(COMPARED, 0.5)


def test_goals_are_checked() -> None:
    def row(name: str, rate: float | None, times: float, prefilled: int) -> dict[str, Any]:
        medians = {"vllm": {"prefilled_tokens": 100}, "rose-in-vllm": {"prefilled_tokens": prefilled}}
        return {"set": name, "rate": rate, "medians": medians, "times": dict.fromkeys(COMPARED, times)}

    comparison = [
        row("random", None, 1.31, 100),
        row("random", 5.0, 1.01, 100),
        row("shared-prefix", None, 1.29, 100),
        row("shared-prefix", 5.0, 1.0, 99),
    ]
    goals = poisson_bars(comparison, {"vllm": 20.0, "rose-in-vllm": 24.9})
    missed = [goal["name"] for goal in goals if not goal["met"]]
    latencies = [figure for figure in COMPARED if figure.endswith("_ms")]
    assert missed == [
        *(f"random, 5.0 a second: {figure}" for figure in latencies),
        "shared-prefix, all at once: throughput",
        "shared-prefix: fewer tokens prefilled",
    ]
    assert len(goals) == len(missed) + 1 + len(latencies) + 2
    assert not poisson_bars(comparison, {"vllm": 20.0, "rose-in-vllm": 25.1})[-1]["met"]
    assert poisson_bars([{"set": "random", "rate": None, "medians": {}}], {"vllm": 1.0}) == []
