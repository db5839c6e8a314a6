"""Small cases on a CPU, where Rose's operations are plain torch: sides do the same work, their speed means nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from benchmarks.kernel_cases import case, kv_cache, layer, quantized, sampler
from benchmarks.kernel_cases.case import KernelCase, Launches
from benchmarks.kernel_cases.kv_cache import Heads
from rose_backend.kernels.kv import ops

HEADS = Heads("small", 4, 2, 16, torch.float16)


def small_cases(family: str) -> list[KernelCase]:
    """Return the cases of a family; call this, make and run them within ``on_cpu``."""
    if family == "sampler":
        return [sampler.sampler_case(name, 3) for name in sampler.FILTERS]
    return {
        "decode": [kv_cache.decode_case(HEADS, 3, 40)],
        "prefill": [kv_cache.prefill_case(HEADS, 2, 32, 32)],
        "clone": [kv_cache.clone_case(3)],
        "linear": [layer.layer_case(3), layer.layer_case(3, layer.QWEN3_06B)],
        "float8": [
            quantized.float8_case(256, 512, kind, rows) for kind in quantized.KINDS for rows in (3, 40)
        ],
        "int4": [quantized.int4_case(256, 512, rows) for rows in (3, 300)],
    }[family]


class _OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on a CUDA device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def _clone(cache: torch.Tensor, *pairs: torch.Tensor, block_dim: int, independent: bool) -> None:
    ops._block_clone(cache, *pairs, block_dim=block_dim)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Put tensors on the CPU, shrink what cases share, and leave out peers but torch: the others need a GPU."""
    smaller = (
        (case, "MISSING", {}),
        (case, "add_peer", lambda sides, peer, make: case.MISSING.setdefault(peer, "needs a GPU")),
        (kv_cache, "block_clone", _clone),
        (kv_cache, "NUM_BLOCKS", 20),
        (sampler, "VOCAB_SIZE", 5003),
        (kv_cache, "FLASH_BLOCK_SIZE", 32),
    )
    with contextlib.ExitStack() as stack:
        for module, name, value in smaller:
            stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(_OnCpu())
        yield


class LaunchLoop:
    """All input sets of one side, one after the other: what ``LaunchGraph`` is without a GPU."""

    def __init__(self, launches: Launches) -> None:
        self._launches = launches
        self.sample()

    def sample(self) -> float:
        """Return microseconds per launch."""
        start = time.perf_counter()
        for launch in self._launches:
            launch()
        return (time.perf_counter() - start) / len(self._launches) * 1e6


def copy_bandwidth() -> float:
    """Return bytes read and written per second by a copy in memory, for the "of copy" column."""
    source = torch.ones(1 << 24, dtype=torch.uint8)
    target = torch.empty_like(source)
    loop = LaunchLoop([lambda: target.copy_(source)])
    return 2 * source.nbytes / loop.sample() * 1e6
