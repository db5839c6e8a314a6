"""Puts each test through every manager, and looks for leaks after each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

# Without vLLM nothing here can be imported, let alone run.
collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

MakeHost = Callable[..., Any]
MANAGER_NAMES = ("rose", "stock")


@pytest.fixture(params=MANAGER_NAMES)
def manager_name(request: pytest.FixtureRequest) -> str:
    """Return the manager under test; ``-k rose`` or ``-k stock`` chooses one."""
    name: str = request.param
    return name


@pytest.fixture
def make_host(manager_name: str) -> Iterator[MakeHost]:
    """Return a function that builds a ``Host`` around the manager; each is checked for leaks when the test is over."""
    from tests.conformance.block_manager.host import Host
    from tests.conformance.block_manager.managers import MANAGERS

    hosts = []

    def make(*args: Any, **options: Any) -> Host:
        hosts.append(Host(MANAGERS[manager_name], *args, **options))
        return hosts[-1]

    yield make
    for host in hosts:
        host.check_no_leak()


@pytest.fixture
def host(make_host: MakeHost) -> Any:
    """Return a host with the default pool: 12 usable blocks of 16 tokens, sequences of up to 128."""
    return make_host()
