"""Each row's output against attention in float64, and the cache afterwards: plain, padded, and from CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rose_backend.conformance.attention.batch import parse_batch
from rose_backend.conformance.attention.cases import (
    BATCHES,
    CASES,
    DRAFTED_BATCHES,
    DRAFTS,
    LONG_BATCHES,
    LONG_DRAFTED_BATCHES,
    MIXED,
    Case,
)
from rose_backend.conformance.attention.conftest import MakeHost
from rose_backend.conformance.attention.host import Host
from rose_backend.conformance.attention.scene import Scene
from rose_backend.conformance.error_budget import assert_within_budget

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


BATCHES_OR_ROWS = {
    "decodes": (Case(), "4q1s300,q1s17,q1s900,2q1s64"),
    "mixed": (Case(), MIXED),
    "mixed, bfloat16": (Case(dtype=torch.bfloat16, heads=8, head_size=128), MIXED),
    "drafts": (DRAFTS, DRAFTED_BATCHES["of several lengths"]),
}


@pytest.mark.parametrize(("case", "batch"), BATCHES_OR_ROWS.values(), ids=BATCHES_OR_ROWS)
def test_rows_of_a_batch_are_as_alone(
    make_host: MakeHost, case: Case, batch: str, record_property: Callable[[str, object], None]
) -> None:
    # Batch invariance is more than vLLM asks for, so rows that are not the same are reported; they must be right.
    host = make_host(case, batch)
    scene = host.scene(parse_batch(batch))
    differences = []
    for index, output in enumerate(host.step(scene)):
        alone = scene.row(index)
        (other,) = host.step(alone)
        assert_conforms(host, alone, [other])
        if not torch.equal(output, other):
            differences.append((output.double() - other.double()).abs().max().item())
    if differences:
        rows = f"{len(differences)} of {len(scene.rows)} rows"
        record_property(
            "differs",
            f"not batch invariant: {rows} differ from the same alone, by {max(differences):.1e} at most",
        )


def test_every_layout(make_host: MakeHost, backend: Any) -> None:
    from vllm.v1.kv_cache_interface import KVCacheLayout

    layouts = backend.supported_kv_cache_layouts() or tuple(KVCacheLayout)
    for layout in layouts:
        run_and_check(make_host(Case(heads=10), MIXED, layout=layout.name), MIXED)


def test_garbage_that_is_not_a_number_is_never_read(make_host: MakeHost) -> None:
    run_and_check(make_host(Case(), MIXED), MIXED, garbage=float("nan"))


def test_float8_garbage_that_is_not_a_number_is_never_read(make_host: MakeHost) -> None:
    run_and_check(make_host(Case(cache_dtype="fp8"), MIXED), MIXED, garbage=float("nan"))


@pytest.mark.parametrize(
    ("case", "batch", "padded_rows"),
    [(Case(), "3q1s40,q1s1", 4), (Case(), "q1s33", 7), (DRAFTS, "3q5s40", 5)],
    ids=["decodes", "one decode", "drafts"],
)
def test_rows_and_tokens_of_full_graphs(
    make_host: MakeHost, case: Case, batch: str, padded_rows: int
) -> None:
    rows = parse_batch(batch)
    padded_tokens = padded_rows * rows[0].query_len
    host = make_host(case, batch, extra_rows=padded_rows, extra_tokens=padded_tokens)
    scene = host.scene(rows)
    expected = scene.expected_cache()
    outputs = host.step(scene, padded_rows=padded_rows, padded_tokens=padded_tokens)
    assert_conforms(host, scene, outputs)
    host.assert_cache(scene, expected)


@pytest.mark.parametrize("batch", [MIXED, "5q1s20", "q9,q20"], ids=["mixed", "decodes", "prefills"])
def test_longer_tensors_of_piecewise_graphs(make_host: MakeHost, batch: str) -> None:
    host = make_host(Case(), batch, extra_tokens=11)
    scene = host.scene(parse_batch(batch))
    expected = scene.expected_cache()
    outputs = host.step(scene, padded_tokens=11, counts_padding=False)
    assert_conforms(host, scene, outputs)
    host.assert_cache(scene, expected)


def test_tokens_without_a_slot_are_not_stored(make_host: MakeHost, request: pytest.FixtureRequest) -> None:
    # A drafter with a separate cache passes such tokens. Their output is never used.
    if "stores K/V itself" in request.node.name:
        pytest.skip(
            "attention stores at a request's next position; vLLM passes such tokens to a separate write only"
        )
    host = make_host(Case(), MIXED)
    scene = host.scene(parse_batch(MIXED))
    slots = scene.slot_mapping.clone()
    slots[::3] = -1
    expected = scene.expected_cache(slots)
    host.step(scene, slot_mapping=slots)
    host.assert_cache(scene, expected)


GRAPH_CASES = {
    "plain": Case(),
    "bfloat16, 32/8 heads": Case(heads=32, kv_heads=8, head_size=128, dtype=torch.bfloat16),
    "window": Case(sliding_window=9),
    "sinks": Case(sinks=True),
    "float8": Case(cache_dtype="fp8", key_scale=0.05, value_scale=0.11),
    "drafts": DRAFTS,
    "drafts, float8": Case(num_speculative_tokens=4, cache_dtype="fp8"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", GRAPH_CASES.values(), ids=GRAPH_CASES)
def test_replay_with_other_lengths_than_captured(make_host: MakeHost, case: Case) -> None:
    from vllm.v1.attention.backend import AttentionCGSupport

    query_len, num_rows = 1 + case.num_speculative_tokens, 8
    batches = [
        f"8q{query_len}s40",
        f"q{query_len}s1000",
        f"3q{query_len}s17,2q{query_len}s300",
        f"7q{query_len}s6",
    ]
    host = make_host(case, *batches, extra_rows=8, extra_tokens=64)
    needed = (
        AttentionCGSupport.UNIFORM_BATCH if query_len > 1 else AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    if host.graph_support.value < needed.value:
        pytest.skip(f"{host.backend.get_name()} declares {host.graph_support.name}")
    graph = host.capture(num_rows, query_len)
    for seed, batch in enumerate(batches + batches[:1]):
        scene = host.scene(parse_batch(batch), seed=seed)
        expected = scene.expected_cache()
        outputs = host.replay(graph, scene, num_rows=num_rows, query_len=query_len)
        assert_conforms(host, scene, outputs)
        host.assert_cache(scene, expected)
