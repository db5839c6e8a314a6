"""What the comparisons tell the engines, from their command lines."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from benchmarks.support.checkpoint import ModelFacts
from benchmarks.support.cli import (
    add_engine_options,
    engine_options,
    environment,
    new_parser,
    set_engine_defaults,
)

BACKENDS = ("rose", "rose-in-vllm", "vllm", "sglang")
FACTS = ModelFacts(vocab_size=512, max_model_len=64, kv_elements_per_token=128)


def options_of(*arguments: str) -> argparse.Namespace:
    parser = new_parser("")
    add_engine_options(parser, BACKENDS)
    options = parser.parse_args(arguments)
    set_engine_defaults(options)
    return options


def extra_of(backend: str, *arguments: str) -> dict[str, Any]:
    return engine_options(options_of(*arguments), backend, "model", FACTS, []).extra


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
    assert environment(options_of("--quick"), backend).get(name) == unbound
    assert environment(options_of(), backend).get(name) is None
    said = environment(options_of("--quick", "--env", f"vllm={name}=1"), backend).get(name)
    assert said == ("1" if backend == "vllm" else unbound)
