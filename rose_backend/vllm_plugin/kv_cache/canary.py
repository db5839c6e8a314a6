"""``kv_canary`` inside vLLM: the scheduler says with each step what workers look at before they run it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from rose_backend.block_manager.canary import CanaryPlanner
from rose_backend.kernels.kv.canary import KVCanary
from rose_backend.vllm_plugin.options import rose_options
from rose_backend.vllm_plugin.plugin_logger import logger


def add_plan(output: Any, planner: CanaryPlanner) -> None:
    """Add to a ``SchedulerOutput``, which travels to workers, what is due before its step."""
    copied = np.array([each.dst_block_id for each in output.kv_cache_block_copies or ()], np.int64)
    output.rose_kv_canary = planner.plan(copied)


def wrap_execute_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the replacement of ``Worker.execute_model``; see the patch ledger."""

    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        plan = getattr(scheduler_output, "rose_kv_canary", None)
        if plan is not None:
            if "rose_kv_canary" not in vars(self):
                self.rose_kv_canary = _make(self)
            self.rose_kv_canary.before_step(*plan)
        return original(self, scheduler_output, *args, **kwargs)

    return execute_model


def _make(worker: Any) -> KVCanary:
    # Layers that share K/V have one cache.
    caches = {each.data_ptr(): each.transpose(1, 2) for each in worker.model_runner.kv_caches}
    mode = rose_options(worker.vllm_config).kv_canary
    logger.info("Rose KV canary: %s", mode)
    return KVCanary([*caches.values()], logger, raises=mode == "raise")
