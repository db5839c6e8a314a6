"""Compilations by Triton are counted, and other listeners are still called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITCallable

from rose_backend.compile_ahead.pool import watch_compilations
from rose_backend.compile_ahead.recorded_launches import called_functions, settle_cache_keys
from rose_backend.kernels.pointwise import elementwise as gpu
from tests.support.aot import Launch, compile_launch, record_launches


def launch() -> Launch:
    table, ids = torch.empty(8, 16), torch.empty(4, dtype=torch.int64)
    with record_launches(gpu, "_embed_tokens_kernel") as launches:
        gpu.embed_tokens(ids, ids, table, table, torch.empty(4, 16))
    return launches[0]


def test_compilations_are_seen_inside_the_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, src, **details: heard.append(src.name))
    with watch_compilations() as seen:
        compile_launch(launch(), 90)
    assert seen.names == heard == ["_embed_tokens_kernel"]
    assert seen.compiled == seen.names and 0 < seen.seconds < 100
    compile_launch(launch(), 80)
    assert len(seen.names) == 1 and len(heard) == 2


def test_keys_of_called_functions_are_computed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, order = JITCallable.cache_key.fget, []

    def compute_and_note(function: JITCallable) -> str:
        order.append(function)
        return compute(function)

    monkeypatch.setattr(JITCallable, "cache_key", property(compute_and_note))
    settle_cache_keys()
    first = {id(function): place for place, function in reversed([*enumerate(order)])}
    calls = [(id(caller), id(called)) for caller in order for called in called_functions(caller)]
    assert len(calls) > 100
    assert all(first[called] < first[caller] for caller, called in calls)


def test_what_comes_from_the_disk_is_told_apart(tmp_path: Path) -> None:
    recorded = launch()
    kinds = {"constexpr": "constexpr", torch.int64: "*i64", torch.float32: "*fp32"}
    signature: dict[str, Any] = {}
    for param in recorded.kernel.params:
        value = recorded.arguments[param.name]
        is_tensor = isinstance(value, torch.Tensor)
        signature[param.name] = (
            "constexpr" if param.is_constexpr else kinds[value.dtype] if is_tensor else "i32"
        )
    constants = {
        (index,): recorded.arguments[param.name]
        for index, param in enumerate(recorded.kernel.params)
        if param.is_constexpr
    }
    with knobs.cache.scope(), watch_compilations() as seen:
        knobs.cache.dir = str(tmp_path)
        for _ in range(2):
            triton.compile(
                ASTSource(recorded.kernel, signature, constants, {}), target=GPUTarget("cuda", 90, 32)
            )
    assert len(seen.names) == 2 and seen.compiled == seen.names[:1]
