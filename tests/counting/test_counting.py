"""Requests of the counting model have no wrong number in either host, and mistakes that are planted give some."""

from __future__ import annotations

import asyncio
import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rose_backend.engine import model_runner
from tests.counting.__main__ import HOSTS
from tests.counting.checkpoint import write_counting_gpt2
from tests.counting.hosts import Counts, Settings, can_sample
from tests.counting.traffic import Outcome, Requests, serve

NUM_REQUESTS = 150
IN_VLLM = pytest.param(
    "vllm", marks=pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed")
)


@pytest.fixture(scope="module")
def counting_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_counting_gpt2(tmp_path_factory.mktemp("counting"))


def run(host: str, settings: Settings) -> tuple[Outcome, Counts]:
    requests = Requests(0, samples=can_sample(host, settings.num_drafts))
    send = functools.partial(serve, requests=requests, num_requests=NUM_REQUESTS, concurrency=64)
    return asyncio.run(HOSTS[host](settings, send))


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("host", ["standalone", IN_VLLM])
def test_no_number_is_foreign(
    counting_path: Path, host: str, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Engines of other tests run in the test process.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    # Thread binding would stay behind in the test process.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    outcome, counts = run(host, Settings(counting_path, num_drafts=num_drafts))
    assert outcome.wrong == []
    assert outcome.num_requests == NUM_REQUESTS and outcome.num_aborts > 0
    assert counts["cached tokens"] > 0 and counts["preemptions"] > 0 and counts.get("clones", 1) > 0
    assert (counts["drafts"] > counts["accepted drafts"] > 0) == (num_drafts > 0)


@pytest.mark.parametrize("offset", [None, 1])
def test_copies_to_nowhere_and_to_other_blocks_show(
    counting_path: Path, offset: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = model_runner.block_clone

    def clone_elsewhere(kv_cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, **rest: Any) -> None:
        if offset is not None:
            clone(kv_cache, src, (dst + offset) % kv_cache.shape[2], **rest)

    monkeypatch.setattr(model_runner, "block_clone", clone_elsewhere)
    assert run("standalone", Settings(counting_path))[0].wrong
