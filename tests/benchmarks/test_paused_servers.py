"""A server that is paused and woken between turns, and that ends while it is paused."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.online import servers
from benchmarks.online.servers import server_counts
from benchmarks.support import worker_pool
from benchmarks.support.engines import EngineOptions
from benchmarks.support.turns import paused
from benchmarks.support.worker_pool import EngineError, Engines
from tests.benchmarks.fake_vllm_server import fake_command
from tests.support.patience import HANG_S


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Engines]:
    """Yield a server that only seems to be Rose's."""
    monkeypatch.setattr(servers, "server_command", fake_command)
    options = EngineOptions("rose", "m", "float32", "cpu", 4, 64, 4096, dict(os.environ))
    with Engines(servers.Server, tmp_path) as started:
        started.start({"rose": options})
        yield started


def test_a_server_is_woken_by_a_token(engines: Engines) -> None:
    server = engines.running["rose"]
    server.wake()
    counts = server_counts(server.url)
    assert (counts["prompt_tokens"], counts["generated_tokens"]) == (4, 1)
    engines.drop("rose", EngineError("it is tired"))
    # Its requests will say so.
    server.wake()


def test_a_paused_server_ends_at_once_and_in_order(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "MAX_STOP_S", HANG_S)
    server = engines.running["rose"]
    with paused([server.pid]):
        engines.drop("rose", EngineError("it is tired"))
    assert server.popen.returncode != -signal.SIGKILL
