"""Puts each scene through the manager under test, and looks for leaks after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

MakeHost = Callable[..., Any]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Without the option, put scenes through Rose's and vLLM's manager."""
    if "manager_name" in metafunc.fixturenames and not metafunc.config.getoption(
        "conformance_block_manager", None
    ):
        metafunc.parametrize("manager_name", ["rose", "stock"])


@pytest.fixture
def manager_name(pytestconfig: pytest.Config) -> str:
    """Return the manager under test."""
    return str(pytestconfig.getoption("conformance_block_manager"))


@pytest.fixture
def make_host(manager_name: str) -> Iterator[MakeHost]:
    """Return a function that builds a ``Host`` around the manager; each is checked for leaks when the test is over."""
    from rose_backend.conformance.block_manager.host import Host
    from rose_backend.conformance.block_manager.managers import find_manager

    hosts = []

    def make(*args: Any, **options: Any) -> Host:
        hosts.append(Host(find_manager(manager_name), *args, **options))
        return hosts[-1]

    yield make
    for host in hosts:
        host.check_no_leak()


@pytest.fixture
def host(make_host: MakeHost) -> Any:
    """Return a host with the default pool: 12 usable blocks of 16 tokens, sequences of up to 128."""
    return make_host()
