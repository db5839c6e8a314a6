"""What the comparisons tell the engines, from their command lines."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import offline_compare
from benchmarks.support.checkpoint import ModelFacts
from benchmarks.support.comparison import engine_options
from benchmarks.support.engines import EngineOptions
from tests.conftest import ROOT

BACKENDS = ("rose", "rose-in-vllm", "vllm", "sglang")
FACTS = ModelFacts(vocab_size=512, max_model_len=64, kv_elements_per_token=128)


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
