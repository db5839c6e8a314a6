"""Checks and completes vLLM's configuration when ROSE is selected; does nothing with any other backend.

Also makes vLLM's CPU platform use ROSE when it is selected, as the CUDA platform does.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rose_backend.errors import ConfigError
from rose_backend.vllm_plugin.attention.mixed_graphs import choose_mixed_graphs, leaves_graphs_to_vllm
from rose_backend.vllm_plugin.models.model_choice import choose_model_class, forget_compilation_mode
from rose_backend.vllm_plugin.options import (
    ASYNC_SCHEDULER_CLASS,
    SCHEDULER_CLASS,
    has_rust_front_end,
    is_rose_selected,
    needs_one_group,
    rose_options,
)
from rose_backend.vllm_plugin.patch_ledger import apply_patch
from rose_backend.vllm_plugin.plugin_logger import logger
from rose_backend.vllm_plugin.refusals import check_supported
from rose_backend.vllm_plugin.registration import is_rose
from rose_backend.vllm_plugin.start_up_log import describe_parts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from rose_backend.config import PluginConfig


def wrap_post_init(original: Callable[..., None]) -> Callable[..., None]:
    """Build the replacement of ``VllmConfig.__post_init__``; see the patch ledger."""

    @functools.wraps(original)
    def __post_init__(self: VllmConfig, *args: Any, **kwargs: Any) -> None:
        model_config = self.model_config
        if not is_rose_selected(self) or (model_config is not None and model_config.is_submodel_config):
            return original(self, *args, **kwargs)
        try:
            options = rose_options(self)
            _switch_off_vllm_parts(self, options)
            is_open = options.block_manager and self.scheduler_config.disable_hybrid_kv_cache_manager is None
            if is_open and needs_one_group(self):
                # One group of blocks for all layers. A copy that is finished again finds it, or what the user has set.
                self.scheduler_config.disable_hybrid_kv_cache_manager = True
            leaves_graphs = leaves_graphs_to_vllm(self)
            forget_compilation_mode(self)
            original(self, *args, **kwargs)
            check_supported(self, options)
            if leaves_graphs:
                choose_mixed_graphs(self)
            choice = choose_model_class(self, options)
        except ConfigError as error:
            # vLLM wraps the error in several lines; this one is complete.
            logger.error("Cannot start with --attention-backend rose: %s", error)
            raise
        if options.block_manager:
            _choose_scheduler(self)
        if not has_rust_front_end(self):
            # The process that makes the configuration is the one that receives the engines' outputs.
            apply_patch("output_statistics")
            if options.joined_outputs:
                apply_patch("merged_outputs")
        keep_compiled_kernels()
        _log_once(describe_parts(self, options, choice))
        return None

    return __post_init__


@functools.lru_cache(maxsize=8)
def _log_once(line: str) -> None:
    # Engine core and workers finish copies of the same configuration; vLLM copies it within a process, too.
    if multiprocessing.parent_process() is None:
        logger.info(line)


def keep_compiled_kernels() -> None:
    """Give Triton one cache for all starts, unless the user has chosen one.

    vLLM's compiler sets it in the middle of a start: to one folder where it compiles the model, to another where it
    finds the model compiled. Rose's kernels, which are compiled later, would be compiled again in the second start.
    """
    from vllm import envs
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        # Engine core and workers inherit it.
        os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(envs.VLLM_CACHE_ROOT, "rose_triton_cache"))


def _switch_off_vllm_parts(vllm_config: VllmConfig, options: PluginConfig) -> None:
    if not options.prefix_cache:
        vllm_config.cache_config.enable_prefix_caching = False
    if not options.cuda_graph:
        from vllm.config import CUDAGraphMode

        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    if not options.chunked_prefill:
        scheduler_config = vllm_config.scheduler_config
        scheduler_config.enable_chunked_prefill = False
        model_config = vllm_config.model_config
        if model_config is not None and scheduler_config.max_num_batched_tokens < model_config.max_model_len:
            raise ConfigError(
                f"chunked_prefill: false needs --max-num-batched-tokens of at least max_model_len "
                f"{model_config.max_model_len}, got {scheduler_config.max_num_batched_tokens}"
            )


def _choose_scheduler(vllm_config: VllmConfig) -> None:
    # The class must match the mode: only a subclass of AsyncScheduler overlaps steps.
    is_async = vllm_config.scheduler_config.async_scheduling
    vllm_config.scheduler_config.scheduler_cls = ASYNC_SCHEDULER_CLASS if is_async else SCHEDULER_CLASS


def wrap_get_attn_backend_cls(original: Callable[..., str]) -> Callable[..., str]:
    """Build the replacement of ``CpuPlatform.get_attn_backend_cls``; see the patch ledger."""

    @functools.wraps(original)
    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> str:
        if not is_rose(selected_backend):
            return original(cls, selected_backend, attn_selector_config, *args, **kwargs)
        reasons = selected_backend.get_class().validate_configuration(
            device_capability=None, **attn_selector_config._asdict()
        )
        if reasons:
            raise ConfigError(
                f"--attention-backend {selected_backend.name} does not support this model or setting: "
                f"{', '.join(reasons)}; choose another attention backend"
            )
        path: str = selected_backend.get_path()
        return path

    return get_attn_backend_cls
