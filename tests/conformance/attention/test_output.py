"""Each row's output against attention in float64, within the error budget, and the cache afterwards, byte by byte."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.attention.batch import parse_batch
from tests.conformance.attention.cases import (
    BATCHES,
    CASES,
    DRAFTED_BATCHES,
    DRAFTS,
    LONG_BATCHES,
    LONG_DRAFTED_BATCHES,
    MIXED,
    Case,
)
from tests.conformance.attention.conftest import MakeHost
from tests.conformance.attention.host import Host
from tests.conformance.attention.scene import Scene
from tests.support.error_budget import assert_within_budget

HAS_GPU = torch.cuda.is_available()
BATCHES_HERE = {**BATCHES, **(LONG_BATCHES if HAS_GPU else {})}
DRAFTED_BATCHES_HERE = {**DRAFTED_BATCHES, **(LONG_DRAFTED_BATCHES if HAS_GPU else {})}


def assert_conforms(host: Host, scene: Scene, outputs: list[torch.Tensor]) -> None:
    """Compare row by row: a long row's small numbers must not hide behind a short row's large errors."""
    exact = scene.attention(torch.float64, host.seen_query(scene))
    plain = scene.attention(scene.case.dtype, host.seen_query(scene).to(scene.case.dtype))
    for row, output, row_exact, row_plain in zip(scene.rows, outputs, exact, plain, strict=True):
        try:
            assert_within_budget(output, row_exact, row_plain)
        except AssertionError as error:
            raise AssertionError(f"{row}: {error}") from error


def run_and_check(host: Host, batch: str, **options: float) -> None:
    scene = host.scene(parse_batch(batch), **options)
    expected = scene.expected_cache()
    outputs = host.step(scene)
    assert_conforms(host, scene, outputs)
    host.assert_cache(scene, expected)


@pytest.mark.parametrize("batch", BATCHES_HERE.values(), ids=BATCHES_HERE)
def test_batches(make_host: MakeHost, batch: str) -> None:
    run_and_check(make_host(Case(), batch), batch)


@pytest.mark.parametrize("batch", DRAFTED_BATCHES_HERE.values(), ids=DRAFTED_BATCHES_HERE)
def test_batches_with_drafts(make_host: MakeHost, batch: str) -> None:
    run_and_check(make_host(DRAFTS, batch), batch)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_layers(make_host: MakeHost, case: Case) -> None:
    run_and_check(make_host(case, MIXED), MIXED)


@pytest.mark.parametrize("case", [case for name, case in CASES.items() if case != Case()], ids=str)
def test_layers_with_drafts(make_host: MakeHost, case: Case) -> None:
    from dataclasses import replace

    batch = DRAFTED_BATCHES["and prefills"]
    run_and_check(make_host(replace(case, num_speculative_tokens=4), batch), batch)


def test_every_layout(make_host: MakeHost, backend: type) -> None:
    from vllm.v1.kv_cache_interface import KVCacheLayout

    layouts = backend.supported_kv_cache_layouts() or tuple(KVCacheLayout)
    for layout in layouts:
        run_and_check(make_host(Case(heads=10), MIXED, layout=layout.name), MIXED)


def test_garbage_that_is_not_a_number_is_never_read(make_host: MakeHost) -> None:
    run_and_check(make_host(Case(), MIXED), MIXED, garbage=float("nan"))


def test_float8_garbage_that_is_not_a_number_is_never_read(make_host: MakeHost) -> None:
    run_and_check(make_host(Case(cache_dtype="fp8"), MIXED), MIXED, garbage=float("nan"))
