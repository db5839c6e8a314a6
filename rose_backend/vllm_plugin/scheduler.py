"""vLLM's schedulers with Rose's block manager. All scheduling decisions stay vLLM's."""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from rose_backend.vllm_plugin.kv_cache_manager import RoseKVCacheManager
from rose_backend.vllm_plugin.patch_ledger import swapped


class RoseScheduler(Scheduler):
    """Scheduler of engines that wait for each step."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        with swapped("block_manager_class", _manager_factory(vllm_config)):
            super().__init__(vllm_config, *args, **kwargs)


class RoseAsyncScheduler(AsyncScheduler):
    """Scheduler of engines that schedule the next step while one is running."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        with swapped("block_manager_class", _manager_factory(vllm_config)):
            super().__init__(vllm_config, *args, **kwargs)


def _manager_factory(vllm_config: Any) -> functools.partial[RoseKVCacheManager]:
    scheduler_config = vllm_config.scheduler_config
    return functools.partial(RoseKVCacheManager, max_num_seqs=scheduler_config.max_num_seqs)
