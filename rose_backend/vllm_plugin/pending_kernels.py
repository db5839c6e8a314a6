"""Compiles Rose's kernels in other processes while vLLM loads and compiles the model, and loads them before it serves.

vLLM builds layers before it reads weights, and the first attention layer starts the compilation (``begin``). Which
kernels this engine will launch is found by running its code on tensors of device ``meta``. Code that launches a kernel
early waits for it (``wait_for_kernels``). Before vLLM captures graphs, all kernels are loaded, including those that
only later requests will need, so that no request waits for a compilation.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rose_backend.config import num_usable_cores
from rose_backend.vllm_plugin.plugin_logger import logger
from rose_backend.vllm_plugin.registration import installed_vllm_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from rose_backend.compile_ahead.pool import AheadCompilation
    from rose_backend.compile_ahead.recorded_launches import RecordedLaunches
    from rose_backend.kernels.gpu_properties import GpuProperties

_PACKAGE = "rose_backend.vllm_plugin"
LAUNCHERS = (
    f"{_PACKAGE}.sampler:launch_draws",
    f"{_PACKAGE}.models.recorded_model:launch_model",
)
"""``module:function``; each runs code that launches every kernel an engine may need, given its configuration and an
attention layer."""

_SIZES = (
    *("n_inner", "intermediate_size", "attention_bias", "qkv_bias", "bias", "mlp_bias"),
    "quantization_config",
)
"""Fields of config.json that kernels of Rose's layers depend on."""


@dataclass(frozen=True, slots=True)
class PendingKernels:
    """The kernels that one kind of attention layer launches, and their compilation."""

    compilation: AheadCompilation
    launches: RecordedLaunches


_begun: set[Hashable] = set()
_pending: list[PendingKernels] = []


def begin(vllm_config: VllmConfig, layer: Any, kind: Hashable) -> None:
    """Start to compile for an engine with such a layer, unless this process has started that already.

    Args:
        layer: a ``RoseAttentionImpl``.
        kind: everything that the layer's kernels depend on.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda() or (key := (kind, repr(_key(vllm_config)))) in _begun:
        return
    _begun.add(key)
    try:
        import torch

        from rose_backend.kernels.gpu_properties import gpu_properties

        _pending.append(compile_ahead(vllm_config, layer, kind, gpu_properties(torch.device("cuda"))))
    except Exception as error:  # the start itself has not failed
        _warn(f"{type(error).__name__}: {error}")


def compile_ahead(vllm_config: VllmConfig, layer: Any, kind: Hashable, gpu: GpuProperties) -> PendingKernels:
    """Compile for an engine on ``gpu``; see ``begin``."""
    from rose_backend.compile_ahead.pool import AheadCompilation, CompleteStarts

    start = CompleteStarts(gpu, installed_vllm_version(), kind, *_key(vllm_config))
    # Each worker on this machine has its own processes.
    num_workers = max(vllm_config.parallel_config.local_world_size, 1)
    # Recorded even if nothing is left to compile: the kernels still have to be loaded.
    launches = functools.cache(lambda: record(vllm_config, layer, gpu))
    compilation = AheadCompilation(
        [start],
        lambda: launches().sources,
        num_processes=max(num_usable_cores() // num_workers, 1),
    )
    return PendingKernels(compilation, launches())


def record(vllm_config: VllmConfig, layer: Any, gpu: GpuProperties) -> RecordedLaunches:
    """Return the kernels of Rose that an engine on ``gpu`` launches."""
    import torch

    from rose_backend.compile_ahead.recorded_launches import record_launches

    dtype = torch.get_default_dtype()
    # vLLM builds models with other defaults.
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.inference_mode(), record_launches(gpu) as recorded:
            for launcher in LAUNCHERS:
                module, _, function = launcher.partition(":")
                getattr(import_module(module), function)(vllm_config, layer)
    finally:
        torch.set_default_dtype(dtype)
    return recorded


def wait_for_kernels(*names: str) -> None:
    """Wait until kernels of these names that were begun are compiled; without names, until all are loaded."""
    for pending in _pending:
        if names:
            pending.compilation.wait_for(*names)
            continue
        if (failure := pending.compilation.wait()) is not None:
            _warn(failure)
        try:
            pending.launches.load()
        except Exception as error:  # it may be one that no request needs
            _warn(f"{type(error).__name__}: {error}")
    if not names:
        _pending.clear()


def _warn(why: str) -> None:
    from rose_backend.compile_ahead.pool import COMPILES_ALONE

    logger.warning("Rose: %s: %s", COMPILES_ALONE, why)


def _key(vllm_config: VllmConfig) -> list[object]:
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    speculative, lora = vllm_config.speculative_config, vllm_config.lora_config
    return [
        model.hf_config.architectures,
        model.dtype,
        model.quantization,
        model.max_model_len,
        model.get_hidden_size(),
        model.get_vocab_size(),
        model.enforce_eager,
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        vllm_config.cache_config.block_size,
        vllm_config.compilation_config.cudagraph_mode,
        vllm_config.compilation_config.cudagraph_capture_sizes,
        None if speculative is None else speculative.num_speculative_tokens,
        None if lora is None else lora.max_lora_rank,
        vllm_config.parallel_config.tensor_parallel_size,
        *(getattr(model.hf_text_config, name, None) for name in _SIZES),
        vllm_config.additional_config,
    ]
