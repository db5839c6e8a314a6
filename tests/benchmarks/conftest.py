"""Undoes what benchmarks do to the process that runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

# Compares with vLLM's own manager.
collect_ignore_glob = [] if find_spec("vllm") else ["test_block_manager_benchmark.py"]


@pytest.fixture(autouse=True)
def same_cores_afterwards() -> Iterator[None]:
    """Give the process its cores back: benchmarks bind it to one."""
    cores = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cores)
