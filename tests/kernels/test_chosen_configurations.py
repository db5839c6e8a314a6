"""The same configurations are chosen as before, for each GPU, 1 to 1,024 rows and every model of the benchmarks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rose_backend.kernels.tuning import choices as tuning
from tests.support import chosen_configurations
from tests.support.chosen_configurations import RECORD, choices, packed, unpacked

HOW_TO = f"if these are meant, run: python -m {chosen_configurations.__name__}"


@functools.cache
def recorded() -> dict[str, Any]:
    return unpacked(RECORD.read_text(encoding="utf-8"))


def differences(found: dict[str, Any]) -> list[str]:
    before = recorded()
    return [
        f"{name}: {before.get(name)} -> {found.get(name)}"
        for name in sorted(before.keys() | found.keys())
        if before.get(name) != found.get(name)
    ]


def test_the_same_configurations_are_chosen_as_before() -> None:
    found = choices()
    wrong = differences(found)
    assert not wrong, "\n".join([f"{len(wrong)} cases differ, such as", *wrong[:5], HOW_TO])
    assert unpacked(packed(found)) == found


def test_the_record_covers_all_rows_and_gpus() -> None:
    cases = [case for name, case in recorded().items() if not name.startswith(("for all", "others:"))]
    assert len(cases) > 250
    for case in cases:
        assert sorted(", ".join(case).split(", ")) == sorted(chosen_configurations.GPUS)
        for ranges in case.values():
            ends = [[int(end) for end in rows.split("-")] for rows in ranges if rows != "all"]
            rows = [row for first, *last in ends for row in range(first, (last or [first])[0] + 1)]
            assert not ends or rows == list(range(1, chosen_configurations.MAX_ROWS + 1))


@pytest.mark.parametrize(
    ("part", "module", "name", "is_planted"),
    [
        ("linear", tuning, "choose_linear_config", lambda args: args["num_columns"] == 28_672),
        ("experts", tuning, "choose_expert_config", lambda args: args["gated"]),
        ("decode", tuning, "decode_tuning", lambda args: args["num_rows"] == 77),
        ("prefill", tuning, "prefill_tuning", lambda args: args["capability"] == (10, 0)),
    ],
)
def test_a_planted_change_is_found(
    part: str,
    module: Any,
    name: str,
    is_planted: Callable[[dict[str, Any]], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One choice with another number of stages, and the record no longer agrees."""
    choose = getattr(module, name)

    def planted(*args: Any, **options: Any) -> Any:
        chosen = choose(*args, **options)
        return replace(chosen, num_stages=chosen.num_stages + 1) if is_planted(options) else chosen

    shapes = {
        key: shape
        for key, shape in chosen_configurations.shapes().items()
        if key in ("llama-8b", "qwen3-30b-a3b")
    }
    monkeypatch.setattr(module, name, planted)
    monkeypatch.setattr(chosen_configurations, "shapes", lambda: shapes)
    monkeypatch.setattr(chosen_configurations, "PARTS", {part: chosen_configurations.PARTS[part]})
    monkeypatch.setattr(chosen_configurations, "_unlike_any_model", lambda gpu: ())
    found = choices()
    before = {key: case for key, case in recorded().items() if key in found}
    assert before.keys() == found.keys()
    assert any(before[key] != case for key, case in found.items())
