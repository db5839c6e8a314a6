"""Between loading and the first request: capture CUDA graphs, compile every kernel that a step can launch."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator

import torch

from rose_backend.compile_ahead.compilations import watch_compilations
from rose_backend.compile_ahead.pool import COMPILES_ALONE
from rose_backend.engine.execution.model_runner import ModelRunner
from rose_backend.engine.process_settings import take_imports
from rose_backend.engine.startup.compile_ahead import wait_for_forward_kernels, wait_for_kernels
from rose_backend.engine.startup.load import LoadedModel
from rose_backend.engine.startup.padding import launch_everything
from rose_backend.engine.startup.report import MemoryUse, StartUpReport

logger = logging.getLogger(__name__)


def warm_up(runner: ModelRunner, loaded: LoadedModel) -> StartUpReport:
    """Make ``runner`` ready to serve, so that no step waits for a kernel to be compiled."""
    config, device, seconds = loaded.config, loaded.device, {**take_imports(), **loaded.seconds}
    taken = {"decode graphs": 0, "prompt graphs": 0}

    @contextlib.contextmanager
    def part(name: str) -> Iterator[None]:
        start, reserved = time.perf_counter(), torch.cuda.memory_reserved(device)
        yield
        torch.cuda.synchronize(device)
        # Blocks that the allocator has cached but no tensor uses do not count.
        torch.cuda.empty_cache()
        seconds[name] = time.perf_counter() - start
        taken[name] = torch.cuda.memory_reserved(device) - reserved

    def wait_for_others() -> None:
        start = time.perf_counter()
        failure = None if loaded.compilation is None else wait_for_kernels(loaded.compilation)
        if failure is not None:
            logger.warning("%s: %s", COMPILES_ALONE, failure)
        seconds["compilation"] += time.perf_counter() - start

    compiled = contextlib.nullcontext() if device.type == "cpu" else watch_compilations()
    with compiled as compilations:
        if device.type != "cpu":
            start = time.perf_counter()
            if loaded.compilation is not None:
                wait_for_forward_kernels(loaded.compilation)
            seconds["compilation"] = time.perf_counter() - start
            launch_everything(runner, loaded, loaded.captures_graphs, part, wait_for_others)
    report = StartUpReport(
        memory=_memory_use(loaded, taken),
        num_blocks=loaded.num_blocks,
        block_size=config.block_size,
        max_model_len=loaded.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.token_budget,
        cpu_threads=None if loaded.cpu_threads is None else str(loaded.cpu_threads),
        seconds=seconds,
    )
    if compilations is not None:
        num_kernels, kernel_seconds = len(compilations.names), compilations.seconds
        report = dataclasses.replace(report, num_kernels=num_kernels, kernel_seconds=kernel_seconds)
    report.log()
    return report


def _memory_use(loaded: LoadedModel, taken: dict[str, int]) -> MemoryUse:
    """Account for the device's memory; ``taken``: bytes that the allocator reserved in each part of the warm-up."""
    decode_graphs, prompt_graphs = taken["decode graphs"], taken["prompt graphs"]
    known = MemoryUse(
        weights=loaded.weight_bytes,
        packed_copies=loaded.packed_bytes,
        kv_pool=loaded.kv_cache.nbytes,
        decode_graphs=decode_graphs,
        prompt_graphs=prompt_graphs,
    )
    if loaded.device.type == "cpu":
        return known
    free, total = torch.cuda.mem_get_info(loaded.device)
    workspace = min(max(loaded.reserve_bytes - decode_graphs - prompt_graphs, 0), free)
    other = total - free - sum(num_bytes for _, num_bytes in known.parts())
    return dataclasses.replace(known, workspace=workspace, other=other, free=free - workspace, total=total)
