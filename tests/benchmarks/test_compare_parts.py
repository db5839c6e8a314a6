"""What each part is worth inside vLLM: the sides of a comparison, and what they start their engine with."""

from __future__ import annotations

import pytest

from benchmarks import offline_compare
from benchmarks.reports.engines import (
    HOST,
    ONLY_ATTENTION,
    ONLY_MANAGER,
    PAIRS,
    PART_SIDES,
    PARTS,
    STOCK,
)
from benchmarks.support.engines import EngineOptions, vllm_options
from rose_backend.config import PluginConfig


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


@pytest.mark.parametrize("switch", ["batched_scheduling", "mixed_graphs"])
def test_what_there_is_inside_vllm_only_is_switched_off_there(switch: str) -> None:
    options = offline_compare.parse_options(["--backends", "rose", f"--compare-{switch.replace('_', '-')}"])
    assert offline_compare.Offline.sides(options)[f"{HOST}, {switch} off"] == (HOST, [switch])


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
