"""LMCache's multi-process connector, with LMCache's own server, in engines with Rose's block manager.

CI does not install the package ``lmcache``.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state

from benchmarks.online.servers import free_port
from tests.e2e.conftest import MakeEngine
from tests.support.half_precision import mixed_prompts
from tests.support.reference_generation import NUM_NEW_TOKENS, tie_free_case
from tests.support.stepped_engine import overlap_steps_on_cpu
from tests.support.vllm_engines import assert_greedy, generate, manager_of, scheduler_of

pytestmark = pytest.mark.skipif(
    find_spec("lmcache") is None, reason="needs the package lmcache, which CI does not install"
)

CHUNK_SIZE = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)


@contextlib.contextmanager
def lmcache_server(log_path: Path) -> Iterator[KVTransferConfig]:
    """Run LMCache's server; yield the configuration of engines that use it."""
    port = free_port()
    options = f"--port {port} --chunk-size {CHUNK_SIZE} --l1-size-gb 1 --eviction-policy LRU --disable-observability"
    command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", *options.split()]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--supported-transfer-mode", "auto"],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LMCACHE_TRACK_USAGE": "false"},
        )
    try:
        while b"cache server is running..." not in log_path.read_bytes():
            assert process.poll() is None, log_path.read_text()
            time.sleep(0.1)
        yield KVTransferConfig(
            kv_connector="LMCacheMPConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "lmcache.mp.host": "tcp://localhost",
                "lmcache.mp.port": port,
                # Also what is generated: every step counts.
                "lmcache.mp.save_decode_cache": True,
            },
        )
    finally:
        process.terminate()
        process.wait()


class Moved:
    """Counts the blocks that LMCache's worker is asked to store and to load."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_stored = self.num_loaded = 0
        adapter = kv_transfer_state._KV_CONNECTOR_AGENT.worker_adapter
        store, load = adapter.batched_submit_store_requests, adapter.batched_submit_retrieve_requests

        def count_stored(request_ids: Any, operations: Any, *args: Any, **kwargs: Any) -> None:
            self.num_stored += sum(operation.end - operation.start for operation in operations)
            store(request_ids, operations, *args, **kwargs)

        def count_loaded(request_ids: Any, operations: Any, *args: Any, **kwargs: Any) -> None:
            self.num_loaded += sum(operation.end - operation.start for operation in operations)
            load(request_ids, operations, *args, **kwargs)

        monkeypatch.setattr(adapter, "batched_submit_store_requests", count_stored)
        monkeypatch.setattr(adapter, "batched_submit_retrieve_requests", count_loaded)


def finish_stores(llm: Any) -> None:
    """Step until nothing is being stored any more, so that no block is held."""
    while scheduler_of(llm).requests:
        llm.llm_engine.step()


@pytest.mark.parametrize("steps", ["awaited", "overlapped"])
@pytest.mark.parametrize("num_blocks", [None, 200], ids=["roomy", "tight"])
def test_prompts_come_back_from_the_server(
    make_engine: MakeEngine,
    tiny_model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: str,
    num_blocks: int | None,
) -> None:
    if steps == "overlapped":
        overlap_steps_on_cpu(monkeypatch)
    # With prompts of whole chunks, of which everything is stored: their last token is computed again.
    prompts, reference = tie_free_case(tiny_model_path, vocab_size=2559)
    with (
        lmcache_server(tmp_path / "server.log") as connector,
        make_engine(kv_transfer_config=connector, num_gpu_blocks_override=num_blocks) as llm,
    ):
        scheduler, moved = scheduler_of(llm), Moved(monkeypatch)
        for _ in range(3):
            assert_greedy(generate(llm, prompts, GREEDY), reference)
            finish_stores(llm)
            scheduler.kv_cache_manager.manager.check_integrity()
            assert llm.reset_prefix_cache()
        # Prompts are stored once. Of what is generated the connector does not know that it is there; it stores what
        # is known when a step is scheduled.
        num_known = NUM_NEW_TOKENS - (2 if steps == "overlapped" else 1)
        in_prompts, in_all = (
            sum((len(prompt) + count) // CHUNK_SIZE * CHUNK_SIZE for prompt in prompts)
            for count in (0, num_known)
        )
        assert moved.num_loaded >= 2 * in_prompts
        if num_blocks is None:
            assert moved.num_stored == in_all + 2 * (in_all - in_prompts)


def test_as_many_tokens_move_as_behind_vllms_own_block_manager(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, _ = mixed_prompts(2559, max_len=400)
    moved = []
    for block_manager in (True, False):
        rose = {"rose": {"block_manager": block_manager}}
        with (
            lmcache_server(tmp_path / f"{block_manager}.log") as connector,
            make_engine(kv_transfer_config=connector, additional_config=rose) as llm,
        ):
            counter, counts = Moved(monkeypatch), []
            for turn in range(3):
                # One after the other: what those that come together find depends on how fast the server answers.
                for prompt in prompts[turn : 40 + turn : 2]:
                    generate(llm, [prompt], GREEDY)
                    finish_stores(llm)
                    counts.append((counter.num_stored, counter.num_loaded))
                assert llm.reset_prefix_cache()
        moved.append(counts)
    assert moved[0] == moved[1]
    assert min(moved[0][-1]) > 100


def test_what_failed_to_load_is_computed(
    make_engine: MakeEngine, tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not vLLM's default policy, with which LMCache reports a request twice and the engine ends, without Rose, too.
    from lmcache.v1.multiprocess.transfer_context import worker_transfer

    scatter, num_loads = worker_transfer.scatter_cpu_to_paged_kv, 0

    def fail_every_third(*args: Any, **kwargs: Any) -> None:
        nonlocal num_loads
        num_loads += 1
        if num_loads % 3 == 0:
            raise RuntimeError("a load that fails")
        scatter(*args, **kwargs)

    prompts, reference = tie_free_case(tiny_model_path, vocab_size=2559)
    with lmcache_server(tmp_path / "server.log") as connector:
        connector.kv_load_failure_policy = "recompute"
        with make_engine(kv_transfer_config=connector) as llm:
            assert_greedy(generate(llm, prompts, GREEDY), reference)
            finish_stores(llm)
            assert llm.reset_prefix_cache()
            monkeypatch.setattr(worker_transfer, "scatter_cpu_to_paged_kv", fail_every_third)
            # Nothing of a failed load is found the second time.
            for _ in range(2):
                assert_greedy(generate(llm, prompts, GREEDY), reference)
                finish_stores(llm)
            assert num_loads >= 3
            manager_of(llm).check_integrity()
