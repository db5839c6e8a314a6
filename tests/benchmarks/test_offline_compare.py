"""benchmarks/offline_compare.py end to end on the embedded model beside an engine that answers at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import offline_compare
from benchmarks.offline_compare import Case, Offline, parse_options
from benchmarks.reports.engines import (
    HOST,
    ONLY_ATTENTION,
    ONLY_MANAGER,
    PAIRS,
    PART_SIDES,
    PARTS,
    STOCK,
    goal_bars,
    losses,
    source,
)
from benchmarks.support.checkpoint import EAGLE3_HEAD, LLAMA_8B, ModelFacts, write_checkpoint
from benchmarks.support.cli import new_parser
from benchmarks.support.comparison import add_engine_options, engine_options
from benchmarks.support.engines import DRAFTS, EngineOptions, Rose, vllm_options
from benchmarks.support.run_facts import check_same, earlier_report, run_facts, with_runs
from benchmarks.support.worker_pool import Engines
from benchmarks.support.workload import Requests
from rose_backend.config import PluginConfig
from rose_backend.engine.drafts import Drafts
from tests.benchmarks.fake_engine import write_fake_sglang
from tests.conftest import ROOT

FACTS = ModelFacts(vocab_size=512, max_model_len=64, kv_elements_per_token=128)

Report = dict[str, Any]
Run = Callable[..., Report]


@pytest.fixture
def run(run_benchmark: Callable[..., Report], tmp_path: Path) -> Run:
    """Return a function that runs a quick comparison with an engine that answers at once."""
    site = write_fake_sglang(tmp_path / "site")

    def quick(arguments: str, *, status: int = 0, backends: str = "sglang") -> Report:
        engines = f"--quick --backends {backends} --python-path sglang={site}"
        return run_benchmark(offline_compare.main, f"{engines} {arguments}", status=status)

    return quick


def test_a_quick_run_writes_what_it_promises(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--compare-run-ahead --repeats 2 --cases greedy --batches 4"
    report = run(arguments, backends="rose sglang")
    assert report["benchmark"] == "offline_compare"
    assert {"python", "torch"} <= report["versions"].keys()
    assert report["settings"]["model"] == "models/tiny-gpt2"
    assert report["settings"]["pause"] is True
    sides = ["rose", "sglang", "rose, run_ahead off"]
    assert set(report["backends"]) == set(sides)
    assert report["backends"]["rose"]["parts"]["prefix_cache"] == "on"
    assert report["missing"] == report["failed"] == {}
    cases = {row["case"] for row in report["rows"]}
    assert len(cases) == 1 + 1 + 1
    assert {(row["case"], row["backend"]) for row in report["rows"]} == {(c, s) for c in cases for s in sides}
    for row in report["rows"]:
        assert {figure["samples"] for figure in row["figures"].values()} == {2}
        if row["backend"] == "rose":
            assert row["figures"][row["figure"]]["median"] > 0
    assert report["losses"] == losses(report["rows"]) != []
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        f"Slower in {len(report['losses'])} of 3 comparisons:" in printed
        and "Rose behind SGLang: " in printed
    )


def test_an_engine_that_dies_half_way_is_named_and_its_figures_are_kept(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    # Seven calls warm up, three each are for a decode case: it dies in the second one.
    report = run("--repeats 1 --env sglang=FAKE_CALLS=11", status=1)
    assert "the process ended" in report["failed"]["sglang"]
    assert [row["case"] for row in report["rows"]] == ["step, 1 requests, greedy"]
    assert "something terrible" in capsys.readouterr().out


def test_turns_without_time_are_counted(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("--repeats 2 --max-seconds 0.001", status=1)
    assert "out of time: 14 turns were not taken" in capsys.readouterr().out


def fake_row(scene: str, backend: str, value: float, **changes: Any) -> dict[str, Any]:
    figure = "step_ms" if scene == "decode" else "duration"
    row = {
        "case": scene,
        "scene": scene,
        "num_requests": 256,
        "input_len": [512, 512],
        "output_len": [128, 128],
        "mode": "greedy",
        "backend": backend,
        "figure": figure,
        "figures": {figure: {"median": value}},
    }
    return {**row, **changes}


def test_losses_name_every_faster_peer() -> None:
    rows = [
        fake_row("decode", "rose", 2.0),
        fake_row("decode", "vllm", 3.0),
        fake_row("decode", "sglang", 1.0),
        fake_row("mixed", "rose-in-vllm", 4.0),
        fake_row("mixed", "vllm", 2.0),
        fake_row("mixed", "rose, fused_mlp off", 1.0),
    ]
    assert losses(rows) == [
        {"case": "decode", "backend": "rose", "peer": "sglang", "times": 2.0},
        {"case": "mixed", "backend": "rose-in-vllm", "peer": "vllm", "times": 2.0},
    ]


def test_goals_are_those_of_the_standalone_engine() -> None:
    rows = [
        fake_row("decode", "rose", 0.96),
        fake_row("decode", "rose", 1.0, mode="top-k 50, top-p 0.9"),
        fake_row("decode", "vllm", 0.1),
        fake_row("offline", "rose", 0.2),
        fake_row("offline", "rose", 0.1, num_requests=8),
        fake_row("mixed", "rose", 9.0),
        fake_row("mixed", "vllm", 18.1),
        fake_row("mixed", "sglang", 14.0),
    ]
    bars = {goal["name"]: (goal["value"], goal["met"]) for goal in goal_bars(rows)}
    assert bars == {
        "step, 256 requests": (0.96, False),
        "sampling over greedy, 256 requests": (1.0 / 0.96, True),
        "offline, 256 x 512 / 128 new": (0.2, True),
        "rose over vllm, goal: mixed": (9.0 / 18.1, True),
        "rose over sglang, goal: mixed": (9.0 / 14.0, False),
    }


class Clockwork:
    """Takes 2 s for every prompt batch, and 10 ms for each token of the longest answer."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    def run(self, requests: Requests, sampling: Any) -> dict[str, Any]:
        self.prompts.append(requests.prompts[0])
        return {"seconds": 2 + 0.01 * max(requests.output_lens), "output_tokens": 60}


def test_a_step_is_what_one_more_token_takes() -> None:
    worker = Clockwork()
    case = Case("decode", 4, (16, 16), (256, 256), "greedy", short_output_len=16)
    assert case.run(worker, 3, 1000)["step_ms"] == pytest.approx(10.0)
    assert case.run(worker, 4, 1000)["step_ms"] == pytest.approx(10.0)
    assert len(set(map(tuple, worker.prompts))) == 4


def test_throughput_counts_what_was_done() -> None:
    figures = Case("mixed", 6, (5, 5), (100, 100), "greedy").run(Clockwork(), 0, 1000)
    assert figures == {
        "duration": pytest.approx(3.0),
        "request_throughput": pytest.approx(2.0),
        "output_throughput": pytest.approx(20.0),
        "total_token_throughput": pytest.approx(30.0),
    }


def test_the_block_manager_is_switched_off_where_there_is_another() -> None:
    options = offline_compare.parse_options(
        ["--quick", "--backends", "rose", "--compare-block-manager", "--compare-fused-mlp"]
    )
    assert offline_compare.Offline.sides(options) == {
        "rose": ("rose", []),
        "rose, fused_mlp off": ("rose", ["fused_mlp"]),
        "rose-in-vllm, block_manager off": ("rose-in-vllm", ["block_manager"]),
    }


def test_a_scene_longer_than_the_model_is_refused(tiny_model_path: Path) -> None:
    arguments = f"--scenes nano-vllm --backends rose --device cpu --model {tiny_model_path}"
    longest = "--scenes, --offline: the longest request has 2,048 tokens; the model takes 1,024"
    with pytest.raises(SystemExit, match=longest):
        offline_compare.main(arguments.split())


BACKENDS = ("rose", "rose-in-vllm", "vllm", "sglang")


def options_of(backend: str, *arguments: str) -> EngineOptions:
    return engine_options(offline_compare.parse_options(arguments), backend, "model", FACTS, [])


def extra_of(backend: str, *arguments: str) -> dict[str, Any]:
    return options_of(backend, *arguments).extra


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_quick_runs_of_vllm_skip_its_compiler(backend: str) -> None:
    is_vllm = backend.endswith("vllm")
    assert extra_of(backend, "--quick") == ({"enforce_eager": True} if is_vllm else {})
    assert extra_of(backend) == {}


def test_what_the_user_says_of_an_engine_comes_last() -> None:
    said = (
        "--engine-options",
        'vllm={"enforce_eager": false, "seed": 3}',
        "--engine-options",
        'rose={"a": 1}',
    )
    assert extra_of("vllm", "--quick", *said) == {"enforce_eager": False, "seed": 3}
    assert extra_of("rose-in-vllm", "--quick", *said) == {"enforce_eager": True}
    assert extra_of("rose", *said) == {"a": 1}


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_quick_runs_of_vllm_are_bound_to_no_core(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "VLLM_CPU_OMP_THREADS_BIND"
    monkeypatch.delenv(name, raising=False)
    unbound = "nobind" if backend.endswith("vllm") else None
    assert options_of(backend, "--quick").variables.get(name) == unbound
    assert options_of(backend).variables.get(name) is None
    said = options_of(backend, "--quick", "--env", f"vllm={name}=1=2").variables.get(name)
    assert said == ("1=2" if backend == "vllm" else unbound)


def test_stock_vllm_loads_no_plugin_and_engines_may_be_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "here")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    elsewhere = ("--python-path", "sglang=/first", "--python-path", "sglang=/there")
    found = {backend: options_of(backend, *elsewhere).variables for backend in BACKENDS}
    paths = {backend: variables["PYTHONPATH"] for backend, variables in found.items()}
    assert paths == {**dict.fromkeys(BACKENDS, "here"), "sglang": f"/there:{ROOT}"}
    assert [backend for backend in BACKENDS if found[backend].get("VLLM_PLUGINS") == ""] == ["vllm"]


def test_all_engines_have_caches_of_one_size() -> None:
    options = options_of("rose", "--dtype", "float16", "--max-num-seqs", "3")
    # Two bytes for each of the elements of a token.
    assert (options.kv_cache_tokens, options.kv_cache_bytes) == (3 * 64, 3 * 64 * 128 * 2)
    assert options_of("rose", "--kv-cache-tokens", "77").kv_cache_tokens == 77


def test_each_pair_differs_in_its_part_only() -> None:
    off = {**PART_SIDES, HOST: []}
    assert set(off[ONLY_ATTENTION]) == set(PARTS)
    assert PAIRS.keys() == {"attention", *PARTS}
    for part, (without, with_it) in PAIRS.items():
        if part == "attention":
            assert (without, with_it) == (STOCK, ONLY_ATTENTION)
        else:
            assert set(off[without]) ^ set(off[with_it]) == {part}
            assert part in off[without]


def test_compare_parts_adds_every_side_once() -> None:
    options = offline_compare.parse_options(["--backends", HOST, STOCK, "--compare-parts"])
    sides = offline_compare.Offline.sides(options)
    assert list(sides) == [HOST, STOCK, *PART_SIDES]
    assert sides[ONLY_MANAGER] == (HOST, PART_SIDES[ONLY_MANAGER])
    assert {name for pair in PAIRS.values() for name in pair} <= sides.keys()


def made_of(switches_off: list[str]) -> dict[str, object]:
    options = EngineOptions("rose-in-vllm", "m", "float16", "cuda", 8, 1024, 2**20, {}, switches_off)
    return vllm_options(options)


def test_switches_are_said_in_vllms_words() -> None:
    fields = made_of(PART_SIDES[ONLY_ATTENTION])
    switches = fields["additional_config"]["rose"]  # type: ignore[index]
    assert switches == dict.fromkeys((part for part in PARTS if part != "mixed_graphs"), False)
    PluginConfig.from_mapping(switches, source="here")
    assert fields["compilation_config"] == {"cudagraph_mode": "FULL_AND_PIECEWISE"}
    fields = made_of(["fused_mlp"])
    assert fields["additional_config"] == {"rose": {"fused_mlp": False}}
    assert "compilation_config" not in fields
    assert not {"additional_config", "compilation_config"} & made_of([]).keys()


def test_rose_without_drafts_has_all_other_options() -> None:
    asked = {"speculative_config": {"method": "ngram"}, "block_size": 32}
    given = [f"{backend}={json.dumps(asked)}" for backend in (HOST, STOCK)]
    arguments = ["--backends", HOST, STOCK, "--compare-drafts"]
    for text in given:
        arguments += ["--engine-options", text]
    options = offline_compare.parse_options(arguments)
    made = {
        name: vllm_options(engine_options(options, backend, "model", FACTS, switches_off))
        for name, (backend, switches_off) in offline_compare.Offline.sides(options).items()
    }
    without = f"{HOST}, drafts off"
    asked_for = {name: fields.get("speculative_config") for name, fields in made.items()}
    assert asked_for == {HOST: {"method": "ngram"}, STOCK: {"method": "ngram"}, without: None}
    assert made[without] == {name: made[HOST][name] for name in made[without]}
    assert made[without]["block_size"] == 32


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"synthetic_acceptance_length": 2.5}, (1.0, 0.5, 0.0)),
        ({"synthetic_acceptance_rates": [0.9, 0.6, 0.3]}, (0.9, 0.6, 0.3)),
    ],
    ids=["length", "rates"],
)
def test_rose_accepts_as_many_drafts_as_asked_for(
    options: dict[str, Any], rates: tuple[float, ...], tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drafts, "accept", Drafts.accept)
    drafter = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
    } | options
    given = json.dumps({"speculative_config": drafter, "adaptive_drafts": False})
    arguments = ["--backends", "rose", "--device", "cpu", "--dtype", "float32", "--engine-options"]
    asked = parse_options([*arguments, f"rose={given}"])
    engine = Rose(engine_options(asked, "rose", str(tiny_model_path), FACTS, []))
    try:
        engine.generate([[1, 2, 3], [4, 5]] * 8, [40] * 16, {"temperature": 0.0})
        stats = engine._llm.stats
    finally:
        engine.close()
    shares = [
        accepted / stats.spec_decode_num_drafts for accepted in stats.spec_decode_num_accepted_tokens_per_pos
    ]
    assert shares == pytest.approx(rates, abs=0.1), stats


def test_a_head_is_written_beside_random_weights(tmp_path: Path) -> None:
    asked = {"speculative_config": {"method": "eagle3", "model": EAGLE3_HEAD}}
    arguments = ["--backends", HOST, "--engine-options", f"{HOST}={json.dumps(asked)}"]
    options = offline_compare.parse_options([*arguments, "--shape", LLAMA_8B])
    write_checkpoint(tmp_path, LLAMA_8B, small=True)
    made = [engine_options(options, HOST, str(tmp_path), FACTS, []) for _ in range(2)]
    # Reports name no folder of this machine.
    assert made[0].extra == made[1].extra == asked
    (head,) = tmp_path.glob("*/")
    assert vllm_options(made[0])["speculative_config"] == {"method": "eagle3", "model": str(head)}
    width, vocab_size = 256, 1000
    tensors = load_file(head / "model.safetensors")
    assert tensors["fc.weight"].shape == (width, 3 * width)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (width, 2 * width)
    known = tensors["d2t"] + torch.arange(vocab_size // 2)
    assert tensors["t2d"].nonzero().flatten().tolist() == known.tolist()
    options = offline_compare.parse_options([*arguments, "--model", str(tmp_path)])
    with pytest.raises(SystemExit, match="eagle3-head is made for random weights"):
        engine_options(options, HOST, str(tmp_path), FACTS, [])


@pytest.mark.parametrize("switch", ["batched_scheduling", "mixed_graphs"])
def test_what_there_is_inside_vllm_only_is_switched_off_there(switch: str) -> None:
    options = offline_compare.parse_options(["--backends", "rose", f"--compare-{switch.replace('_', '-')}"])
    assert offline_compare.Offline.sides(options)[f"{HOST}, {switch} off"] == (HOST, [switch])


@pytest.mark.parametrize("host", ["rose", HOST])
def test_drafts_are_switched_off_where_rose_is_compared(host: str) -> None:
    options = offline_compare.parse_options(["--backends", host, "--compare-drafts"])
    assert offline_compare.Offline.sides(options)[f"{host}, drafts off"] == (host, [DRAFTS])


def test_cases_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--batches", "1", "128", "--cases", "step, 1 requests, greedy", "offline"]
    names = [case.name for case in offline_compare.chosen_cases(offline_compare.parse_options(arguments))]
    assert names == [
        "step, 1 requests, greedy",
        "offline, 256 x 512 in, 128 out, greedy",
        "offline, 256 x 512 in, 128 out, top-k 50, top-p 0.9",
    ]
    with pytest.raises(SystemExit):
        offline_compare.parse_options(["--cases", "nothing"])
    assert "--cases: got ['nothing'], no case is called so" in capsys.readouterr().err


def cut_short(report: Report, path: Path) -> Report:
    """Write ``report`` as if there had been time for the first of two turns only."""
    report = json.loads(json.dumps(report))
    for row in report["rows"]:
        row["turns"] = row["turns"][:1]
    path.write_text(json.dumps(report))
    return report


def test_offline_turns_that_are_there_are_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = "--scenes offline decode --batches 2 --repeats 2 --cases greedy"
    first = run(arguments)
    assert "runs" not in first and source(first).startswith("Medians of 2 turns, ")
    short = cut_short(first, tmp_path / "short.json")
    seeds: list[int] = []
    take = offline_compare.Case.run

    def taking(case: Any, worker: Any, seed: int, vocab_size: int) -> dict[str, float]:
        seeds.append(seed)
        return take(case, worker, seed, vocab_size)

    monkeypatch.setattr(offline_compare.Case, "run", taking)
    second = run(f"{arguments} --resume {tmp_path / 'short.json'}")
    # Of four turns the second ones.
    assert seeds == [3, 4] and len(short["rows"]) == 2
    assert [row["case"] for row in second["rows"]] == [row["case"] for row in first["rows"]]
    for old, new in zip(short["rows"], second["rows"], strict=True):
        assert new["turns"][0] == old["turns"][0] and len(new["turns"]) == 2
        assert new["figures"][new["figure"]]["samples"] == 2
    assert [part["date"] for part in second["runs"]] == [first["date"], second["date"]]
    assert all(part["machine"]["cores"] and part["command"] for part in second["runs"])
    assert source(second).startswith("Medians of 2 turns in 2 runs, ")
    third = with_runs({**second, "date": "later"}, second)
    assert [part["date"] for part in third["runs"]] == [first["date"], second["date"], "later"]


THIS_RUN = {
    "benchmark": "offline_compare",
    "sources_digest": "0123456789abcdef",
    "device": "NVIDIA H200",
    "versions": {"torch": "2.11.0"},
    "settings": {"input_len": (16, 512)},
}
THAT_RUN = {
    **THIS_RUN,
    "settings": {"input_len": [16, 512]},
    "backends": {"vllm": {"version": "0.32.0"}},
    "failed": {},
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"benchmark": "arrivals"},
            "--resume: benchmark: this run has 'offline_compare', the file 'arrivals'",
        ),
        ({"sources_digest": "f"}, "--resume: sources_digest: this run has '0123456789abcdef', the file 'f'"),
        ({"device": "cpu"}, "--resume: device: this run has 'NVIDIA H200', the file 'cpu'"),
        ({"versions": {}}, "--resume: versions: this run has {'torch': '2.11.0'}, the file {}"),
        ({"settings": {}}, "--resume: settings: this run has {'input_len': [16, 512]}, the file {}"),
        ({"trace": {"num_requests": 1}}, "--resume: trace: this run has None, the file {'num_requests': 1}"),
        ({"failed": {"vllm": "out of memory"}}, "failed there: vllm"),
    ],
)
def test_turns_of_something_else_are_refused(tmp_path: Path, changed: Report, message: str) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(THAT_RUN))
    assert earlier_report(path, THIS_RUN) == THAT_RUN
    path.write_text(json.dumps({**THAT_RUN, **changed}))
    with pytest.raises(SystemExit) as refusal:
        earlier_report(path, THIS_RUN)
    assert message in str(refusal.value)


def test_other_engines_and_files_that_are_none_are_refused(tmp_path: Path) -> None:
    assert earlier_report(None, THIS_RUN) is None
    with pytest.raises(SystemExit, match="No such file"):
        earlier_report(tmp_path / "none.json", THIS_RUN)
    (tmp_path / "empty.json").write_text("")
    with pytest.raises(SystemExit, match=r"--resume: .*empty\.json: Expecting value"):
        earlier_report(tmp_path / "empty.json", THIS_RUN)
    check_same(THAT_RUN, {"backends": {"vllm": {"version": "0.32.0"}}}, ["backends"])
    for backends in ({}, {"vllm": {"version": "0.33.0"}}):
        with pytest.raises(SystemExit, match="--resume: backends: this run has"):
            check_same(THAT_RUN, {"backends": backends}, ["backends"])


def test_a_refusal_comes_before_engines_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(THAT_RUN))
    monkeypatch.setattr(Engines, "start", lambda *_, **__: pytest.fail("an engine was started"))
    with pytest.raises(SystemExit, match="--resume: sources_digest"):
        offline_compare.main(["--quick", "--backends", "rose", "--resume", str(path)])


def test_a_case_that_is_not_run_is_refused() -> None:
    row = {"case": "step, 3 requests, greedy", "backend": "rose", "turns": []}
    with pytest.raises(SystemExit, match="--resume: case: the file has 'step, 3 requests, greedy'"):
        Offline(parse_options(["--quick"]), FACTS).rows_of({"rows": [row]})


def test_every_report_says_which_sources_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = [run_facts()["sources_digest"]]
    monkeypatch.setattr("benchmarks.support.run_facts.PACKAGE", tmp_path)
    for text in ("a = 1\n", "a = 2\n", "a = 2\n"):
        (tmp_path / "a.py").write_text(text)
        digests.append(run_facts()["sources_digest"])
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    digests.append(run_facts()["sources_digest"])
    assert digests[2] == digests[3] and len(set(digests)) == 4


def test_options_of_engines_have_lists_of_their_own() -> None:
    """What a benchmark adds to one of them is nowhere else, such as in a process's PYTHONPATH."""
    parser = new_parser("")
    add_engine_options(parser, ("rose",))
    options = parser.parse_args([])
    options.engine_options.append(("rose", "{}"))
    assert options.python_path == options.env == []
