"""Speculative decoding over Rose's block manager: drafts are written, kept or rejected, and never shared unverified."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.config import VllmConfig

from tests.support.vllm_plugin.configs import MakeConfig
from tests.support.vllm_plugin.simulation import (
    MAX_MODEL_LEN,
    make_request,
    make_simulation,
    run_random_traffic,
)

NUM_DRAFTS = 4
NGRAM = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_max": 3}
# What the fake worker's drafter does; the engine's own drafters do not run here.
DRAFTERS: dict[str, dict[str, Any]] = {
    "without a cache": {},
    "with a cache": {"num_lookahead": NUM_DRAFTS},
    "that reads a token ahead": {"num_lookahead": NUM_DRAFTS, "drafter_reads_ahead": True},
}


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    ("block_size", "num_blocks", "max_num_seqs"),
    [(16, 26, 8), (32, 10, 4)],
    ids=["blocks of 16", "blocks of 32"],
)
def test_drafts_change_no_output_and_are_never_found(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    depth: int,
    drafter: str,
    block_size: int,
    num_blocks: int,
    max_num_seqs: int,
) -> None:
    worker_options = {"num_drafts": NUM_DRAFTS, **DRAFTERS[drafter]}
    for name, value in (
        ("num_lookahead_tokens", worker_options.get("num_lookahead", 0)),
        ("num_prefill_lookahead_tokens", int(worker_options.get("drafter_reads_ahead", False))),
    ):
        monkeypatch.setattr(VllmConfig, name, value)
    simulation = make_simulation(
        make_config,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        depth=depth,
        speculative_config=NGRAM,
        max_num_batched_tokens=64,
        worker_options=worker_options,
    )
    run_random_traffic(simulation)
    worker, stats = simulation.worker, simulation.manager.stats
    assert min(worker.num_accepted, worker.num_rejected) > 500 and simulation.num_preemptions > 5
    assert min(stats.hit_tokens, stats.partial_hits, stats.clones, stats.evictions) > 0, stats


def test_speculation_reaches_the_longest_sequence(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VllmConfig, "num_lookahead_tokens", NUM_DRAFTS)
    simulation = make_simulation(
        make_config,
        num_blocks=1 + MAX_MODEL_LEN // 16,
        block_size=16,
        max_num_seqs=2,
        speculative_config=NGRAM,
        max_num_batched_tokens=64,
        worker_options={"num_drafts": NUM_DRAFTS, "num_lookahead": NUM_DRAFTS},
    )
    simulation.scheduler.add_request(make_request("a", list(range(100)), MAX_MODEL_LEN))
    while simulation.scheduler.has_unfinished_requests():
        simulation.step()
    assert len(simulation.outputs["a"]) == MAX_MODEL_LEN - 100


def test_a_drafted_decode_inside_its_blocks_asks_the_block_manager_nothing(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = make_simulation(
        make_config,
        num_blocks=20,
        block_size=128,
        max_num_seqs=2,
        speculative_config=NGRAM,
        max_num_batched_tokens=64,
        worker_options={"num_drafts": NUM_DRAFTS},
    )
    simulation.scheduler.add_request(make_request("a", list(range(20)), 100))
    simulation.step()

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("the block manager was asked")

    for name in ("reserve", "commit", "match", "add"):
        monkeypatch.setattr(simulation.manager, name, fail)
    for _ in range(10):
        simulation.step()
    assert simulation.worker.num_accepted > 5 and len(simulation.outputs["a"]) > 15
