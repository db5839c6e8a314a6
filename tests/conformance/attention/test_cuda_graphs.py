"""A graph captured from dummy requests serves requests of any length, fewer of them, and again after others."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.attention.batch import parse_batch
from tests.conformance.attention.cases import DRAFTS, Case
from tests.conformance.attention.conftest import MakeHost
from tests.conformance.attention.test_output import assert_conforms

pytestmark = pytest.mark.gpu

CASES = {
    "plain": Case(),
    "bfloat16, 32/8 heads": Case(heads=32, kv_heads=8, head_size=128, dtype=torch.bfloat16),
    "window": Case(sliding_window=9),
    "sinks": Case(sinks=True),
    "float8": Case(cache_dtype="fp8", key_scale=0.05, value_scale=0.11),
    "drafts": DRAFTS,
    "drafts, float8": Case(num_speculative_tokens=4, cache_dtype="fp8"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
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
