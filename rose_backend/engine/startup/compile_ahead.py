"""Compile the kernels of a start in several processes, while the main one loads weights.

Which kernels those are is found by running the start itself on tensors without memory: there is no second list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rose_backend.block_manager import BlockManager
from rose_backend.compile_ahead.ahead import AheadCompilation
from rose_backend.compile_ahead.pool import CompiledKernel, CompleteStarts
from rose_backend.config import EngineConfig, check_int
from rose_backend.engine.execution.model_runner import ModelRunner
from rose_backend.engine.progress import show_progress
from rose_backend.engine.sequence_state import SequenceState
from rose_backend.engine.startup.feature_status import captures_graphs
from rose_backend.engine.startup.kv_pool import allocate_kv_cache, choose_max_model_len
from rose_backend.engine.startup.padding import launch_everything
from rose_backend.errors import ConfigError
from rose_backend.kernels.gpu_properties import GpuProperties, gpu_properties
from rose_backend.kernels.sampling.ops import SAMPLER_KERNELS
from rose_backend.models.base import CausalLM
from rose_backend.models.registry import load_model
from rose_backend.models.weights import CONFIG_FILE, resolve_model_path
from rose_backend.scheduling.token_budget import default_token_budgets

if TYPE_CHECKING:
    from rose_backend.compile_ahead.recorded_launches import KernelSource

_NUM_PROCESSORS = {(8, 0): 108, (9, 0): 132, (10, 0): 148}
"""Of A100, H100 SXM and H200, B200."""
_LOWEST_CAPABILITY = (8, 0)
_NUM_BLOCKS = 1024
"""No kernel depends on how many there are."""
_NO_EFFECT = (
    "model",
    "device",
    "num_blocks",
    "gpu_memory_utilization",
    "cpu_kvcache_space_gib",
    "num_threads",
    "run_ahead",
    "seed",
    "generation_config",
    "max_queue_size",
)
"""Options that choose no kernel."""


@dataclass(frozen=True, slots=True)
class _Start:
    """A start without weights; see ``PaddedModel``."""

    config: EngineConfig
    model: CausalLM
    kv_cache: torch.Tensor


def compile_starts(
    directory: Path, configs: list[EngineConfig], gpu: GpuProperties, *, again: bool = False
) -> AheadCompilation:
    """Begin to compile what starts on a GPU need.

    Args:
        directory: of the checkpoint; without weights, config.json says which there would be.
        configs: options of each start, with ``max_num_batched_tokens`` chosen.
        again: look at every kernel, also where an earlier start has noted that all are there.

    Raises:
        ModelError: the model cannot be loaded.
    """

    def record() -> list[KernelSource]:
        sources: list[KernelSource] = []
        for config in configs:
            sources += [each for each in record_start(directory, config, gpu) if each not in sources]
        return sources

    starts = [CompleteStarts(gpu, *_key(directory, config)) for config in configs]
    return AheadCompilation(starts, record, again=again)


def wait_for_kernels(compilation: AheadCompilation) -> str | None:
    """Wait and show progress; see ``AheadCompilation.wait``."""
    return compilation.wait(_show_progress)


def wait_for_forward_kernels(compilation: AheadCompilation) -> None:
    """Wait for what a forward pass launches, and show progress; the sampler's kernels take longest.

    Raises:
        ConfigError: as ``AheadCompilation.wait``.
    """
    compilation.wait_for_others(*SAMPLER_KERNELS, progress=_show_progress)


def _show_progress(kernels: Iterable[CompiledKernel], total: int) -> Iterator[CompiledKernel]:
    return show_progress("compiling kernels", kernels, total=total)


def record_start(directory: Path, config: EngineConfig, gpu: GpuProperties) -> list[KernelSource]:
    """Return all that a start on a GPU launches; arguments and errors are those of ``compile_starts``."""
    from rose_backend.compile_ahead.recorded_launches import record_launches

    with record_launches(gpu) as recorded:
        meta = torch.device("meta")
        model = load_model(
            directory,
            dtype=config.dtype,
            device=meta.type,
            switches=config,
            max_model_len=config.max_model_len,
        )
        sizes = model.config
        max_model_len = choose_max_model_len(config, sizes.max_position_embeddings)
        kv_cache = allocate_kv_cache(_NUM_BLOCKS, config.block_size, sizes, meta)
        manager = BlockManager(
            num_blocks=_NUM_BLOCKS,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            prefix_cache=False,
        )
        state = SequenceState(config.max_num_seqs, max_model_len, ())
        runner = ModelRunner(model, config, manager, state, kv_cache)
        launch_everything(runner, _Start(config, model, kv_cache), captures_graphs(config, "cuda"))
    return recorded.sources


def _key(directory: Path, config: EngineConfig) -> list[object]:
    options = [
        (field.name, getattr(config, field.name)) for field in fields(config) if field.name not in _NO_EFFECT
    ]
    return [(directory / CONFIG_FILE).read_bytes(), options]


def warm_cache(
    config: EngineConfig, capability: tuple[int, int] | None, num_processors: int | None
) -> tuple[list[CompiledKernel], str | None]:
    """Compile what starts with these options need, online and offline.

    Args:
        capability: of the GPU to compile for; None takes the one that is here.
        num_processors: of that GPU; None takes those of the usual one.

    Returns:
        The kernels, and why some are not compiled; None where all are.

    Raises:
        ConfigError: there is no such GPU, or Triton's cache cannot be written.
        ModelError: the model cannot be loaded.
    """
    from triton import knobs

    if knobs.runtime.interpret:
        raise ConfigError("TRITON_INTERPRET: got 1, with which nothing is compiled; leave it unset")
    device = None
    if capability is None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "compute_capability: there is no GPU here to compile for; name one, such as --compute-capability 9.0 "
                "for H100 and H200"
            )
        device = torch.device("cuda")
        gpu = gpu_properties(device)
    else:
        gpu = _named_gpu(capability, num_processors)
    budgets = (
        default_token_budgets(device)
        if config.max_num_batched_tokens is None
        else [config.max_num_batched_tokens]
    )
    configs = [replace(config, max_num_batched_tokens=budget) for budget in budgets]
    compilation = compile_starts(resolve_model_path(config.model), configs, gpu, again=True)
    failure = wait_for_kernels(compilation)
    return compilation.kernels, failure


def _named_gpu(capability: tuple[int, int], num_processors: int | None) -> GpuProperties:
    if capability < _LOWEST_CAPABILITY:
        got, lowest = (".".join(map(str, version)) for version in (capability, _LOWEST_CAPABILITY))
        raise ConfigError(f"compute_capability: got {got}, allowed are {lowest} and later")
    if num_processors is None:
        if capability not in _NUM_PROCESSORS:
            known = ", ".join(".".join(map(str, version)) for version in _NUM_PROCESSORS)
            raise ConfigError(f"multiprocessors: needed for other compute capabilities than {known}")
        num_processors = _NUM_PROCESSORS[capability]
    check_int("multiprocessors", num_processors, 1, 1024)
    return GpuProperties(capability, num_processors)
