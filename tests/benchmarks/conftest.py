"""Undoes what benchmarks do to the process that runs them, and runs them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# Some compare with vLLM's own manager, others talk HTTP or read a server's counters.
NEEDS = {
    "test_block_manager.py": ("vllm",),
    "test_online_compare.py": ("aiohttp", "prometheus_client"),
    "test_checkpoint.py": ("aiohttp",),
}
collect_ignore_glob = [file for file, modules in NEEDS.items() if not all(map(find_spec, modules))]


@pytest.fixture(autouse=True)
def same_cores_afterwards() -> Iterator[None]:
    """Give the process its cores back: benchmarks bind it to one."""
    cores = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cores)


@pytest.fixture
def run_benchmark(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that runs a benchmark on a command line and returns the report that it writes."""

    def run(main: Callable[[list[str]], int], arguments: str, *, status: int = 0) -> Any:
        path = tmp_path / "new folder" / "result.json"
        assert main([*arguments.split(), "--json", str(path)]) == status
        return json.loads(path.read_text())

    return run
