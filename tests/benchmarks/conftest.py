"""Undoes what benchmarks do to the process that runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

# One compares with vLLM's own manager, the others talk HTTP or read a server's counters.
NEEDS = {
    "test_block_manager_benchmark.py": "vllm",
    "test_online_compare.py": "aiohttp",
    "test_poisson.py": "prometheus_client",
    "test_resume.py": "aiohttp",
    "test_paused_servers.py": "prometheus_client",
    "test_checkpoint.py": "aiohttp",
}
collect_ignore_glob = [file for file, module in NEEDS.items() if not find_spec(module)]


@pytest.fixture(autouse=True)
def same_cores_afterwards() -> Iterator[None]:
    """Give the process its cores back: benchmarks bind it to one."""
    cores = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cores)
