"""What every test can count on: no network, few threads, fixed seeds, and the embedded model's path."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch, transformers or vllm is imported by any test module.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
# One thread each: threads of OpenMP and numba spin while they wait, for minutes where others have the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import numpy as np
import pytest
from hypothesis import settings

pytest_plugins = ["tests.support.resource_report"]
ROOT = Path(__file__).resolve().parent.parent

# Machines that run tests are shared and slow at times: a deadline per example would fail at random.
settings.register_profile("rose", deadline=None, print_blob=True)
settings.load_profile("rose")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return what ``-n auto`` means, as in ``make test``: two processes, but one, without workers, beside a GPU.

    Two engines of vLLM fit into small machines; two sessions on one GPU would be in each other's way.
    """
    import torch

    return 0 if torch.cuda.is_available() else 2


def pytest_configure() -> None:
    """Keep bytecode, for all processes that tests start: compiling vLLM takes twice as long as importing it."""
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import all test modules, vLLM among them, without looking for garbage meanwhile: there is none to speak of."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where torch sees no CUDA device."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason=f"needs a CUDA device; torch {torch.__version__} sees none"))


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Give each test the same random numbers whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def tiny_model_path() -> Path:
    """Return the directory of the embedded model, models/tiny-gpt2."""
    path = ROOT / "models" / "tiny-gpt2"
    assert (path / "config.json").is_file(), f"{path} is incomplete; it is part of the repository"
    return path


@pytest.fixture
def serves_nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start as a process does that serves nobody: other tests' servers may live in this one."""
    from rose_backend.engine import process_settings

    interval = sys.getswitchinterval()
    monkeypatch.setattr(process_settings, "_num_short_intervals", 0)
    sys.setswitchinterval(5e-3)
    yield
    sys.setswitchinterval(interval)
