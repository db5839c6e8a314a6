"""Padding as vLLM adds it: tokens and rows of full CUDA graphs, longer tensors of piecewise ones, slots of -1."""

from __future__ import annotations

import pytest

from tests.conformance.attention.batch import parse_batch
from tests.conformance.attention.cases import DRAFTS, MIXED, Case
from tests.conformance.attention.conftest import MakeHost
from tests.conformance.attention.test_output import assert_conforms


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
    # A drafter with a cache of its own passes such tokens. Their output is never used.
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
