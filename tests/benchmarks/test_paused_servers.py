"""A server that is paused and woken between turns, and that ends while it is paused."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.online import servers
from benchmarks.online.servers import server_counts
from benchmarks.support import worker_pool
from benchmarks.support.turns import paused
from benchmarks.support.worker_pool import worker_environment
from tests.benchmarks.fake_vllm_server import fake_command
from tests.support.patience import HANG_S


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[servers.Server]:
    """Yield a server that only seems to be vLLM's."""
    monkeypatch.setattr(servers, "server_command", fake_command)
    options: Any = SimpleNamespace(model="m", step_ms=None)
    server = servers.Server("vllm", options, worker_environment("vllm"), tmp_path / "log")
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def test_a_server_is_woken_by_a_token(server: servers.Server) -> None:
    server.wake()
    counts = server_counts(server.url)
    assert (counts["prompt_tokens"], counts["generated_tokens"]) == (4, 1)
    server.stop()
    # Its requests will say so.
    server.wake()


def test_a_paused_server_ends_at_once_and_in_order(
    server: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "MAX_STOP_S", HANG_S)
    with paused([server.pid]):
        server.stop()
    assert server._process.returncode != -signal.SIGKILL
