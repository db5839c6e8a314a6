"""vLLM's KVCacheManager or Rose's in its place, driven by a list of requests as a scheduler drives it; no model."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from benchmarks.support.prefix_traces import PrefixRequest
from rose_backend.vllm_plugin.kv_cache.manager import RoseKVCacheManager
from rose_backend.vllm_plugin.kv_cache.spec import as_rose_spec
from rose_backend.vllm_plugin.scheduler.scheduler import RoseScheduler

BLOCK_SIZE = 16
MAX_REQUESTS = 16
TOKENS_AT_ONCE = 2_048
OUTPUTS_AT_ONCE = 16
"""Of a request in a step: few steps, which change no hit but those of requests that come in the same step."""
SIDES = ("rose", "vllm")
STATE_BLOCK_SIZE = 528
"""Of Qwen3.5: a state of its layers takes as many bytes as the K/V of so many tokens."""
NUM_STATE_GROUPS = 3
"""Of Qwen3.5: three of four layers keep a state, so there are three groups of them for one of attention."""

Split = Callable[[Request, int, int], int]
"""Returns how many of the next tokens of a request a step computes, behind so many that were just found."""


def make_manager(
    side: str, num_blocks: int, window: int, max_model_len: int, num_window_groups: int = 1
) -> Any:
    """Return a manager of one group that keeps everything, and groups with a window."""
    shape: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    full = FullAttentionSpec(block_size=BLOCK_SIZE, **shape)
    windowed = SlidingWindowSpec(block_size=BLOCK_SIZE, sliding_window=window, **shape)
    return _make_manager(side, num_blocks, full, [windowed] * num_window_groups, max_model_len)


def make_state_manager(side: str, num_blocks: int, max_model_len: int) -> Any:
    """Return a manager of Qwen3.5's groups: one that keeps everything, and those with a state."""
    size = STATE_BLOCK_SIZE
    full = FullAttentionSpec(block_size=size, num_kv_heads=2, head_size=256, dtype=torch.bfloat16)
    state = MambaSpec(
        block_size=size,
        shapes=((full.page_size_bytes // 4,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
    )
    return _make_manager(side, num_blocks, full, [state] * NUM_STATE_GROUPS, max_model_len)


def split_of(side: str, manager: Any) -> Split:
    """Return where a side's scheduler cuts the chunks of prompts, for models with states."""
    parts = SimpleNamespace(
        kv_cache_manager=manager,
        cache_config=SimpleNamespace(block_size=STATE_BLOCK_SIZE),
        block_size=STATE_BLOCK_SIZE,
        hash_block_size=STATE_BLOCK_SIZE,
        mamba_partial_cache_hit=False,
        mamba_shared_prefix_checkpoint=False,
        mamba_has_prefill_checkpoint_blocks=False,
        mamba_prefill_checkpoint_alignment=None,
        use_eagle_block_drop=False,
        max_num_scheduled_tokens=TOKENS_AT_ONCE,
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
    )
    scheduler: Any = RoseScheduler if side == "rose" else Scheduler
    return lambda request, num_new, num_found: scheduler._mamba_block_aligned_split(
        parts, request, num_new, num_found
    )


def _make_manager(side: str, num_blocks: int, full: Any, others: list[Any], max_model_len: int) -> Any:
    specs = [as_rose_spec(full) if side == "rose" else full, *others]
    groups = [KVCacheGroupSpec([f"layer {index}"], spec) for index, spec in enumerate(specs)]
    arguments: dict[str, Any] = {
        "kv_cache_config": KVCacheConfig(num_blocks, [], groups),
        "max_model_len": max_model_len,
        "max_in_flight_tokens": TOKENS_AT_ONCE,
        "scheduler_block_size": full.block_size,
        "hash_block_size": full.block_size,
        "enable_caching": True,
    }
    if side == "rose":
        return RoseKVCacheManager(max_num_seqs=MAX_REQUESTS, **arguments)
    return KVCacheManager(**arguments)


@dataclass
class PrefixHost:
    """First come, first served; the last running request is preempted where blocks are short."""

    manager: Any
    block_size: int = BLOCK_SIZE
    split: Split = lambda request, num_new, num_found: num_new
    hit_tokens: int = 0
    shared_tokens: int = 0
    """Of the given heads of prompts, from the third with the same head on."""
    shared_hit_tokens: int = 0
    prompt_tokens: int = 0
    num_preemptions: int = 0
    most_blocks: int = 0
    """Of the pool, held at once."""
    _running: list[Request] = field(default_factory=list)
    _admitted: set[str] = field(default_factory=set)
    _num_shared: dict[str, int] = field(default_factory=dict)
    _num_with_head: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def run(self, requests: list[PrefixRequest]) -> None:
        """Compute all requests to their last token."""
        init_none_hash(sha256)
        hasher = get_request_block_hasher(self.block_size, sha256)
        self._num_shared = {str(index): one.num_shared for index, one in enumerate(requests)}
        waiting = deque(
            Request(
                str(index),
                list(one.prompt),
                SamplingParams(max_tokens=one.num_outputs, ignore_eos=True),
                None,
                block_hasher=hasher,
            )
            for index, one in enumerate(requests)
        )
        while waiting or self._running:
            self.manager.new_step_starts()
            advanced = self._go_on(waiting)
            advanced |= self._admit(waiting)
            if not advanced:
                raise RuntimeError(f"the pool is too small for request {waiting[0].request_id}")
            self._finish_step(advanced)

    def _go_on(self, waiting: deque[Request]) -> dict[str, int]:
        advanced: dict[str, int] = {}
        for request in list(self._running):
            while request in self._running:
                num_new = min(request.num_tokens - request.num_computed_tokens, TOKENS_AT_ONCE)
                num_new = self.split(request, num_new, 0)
                if self.manager.allocate_slots(request, num_new) is not None:
                    advanced[request.request_id] = num_new
                    break
                last = self._running.pop()
                advanced.pop(last.request_id, None)
                self.manager.free(last)
                last.num_computed_tokens, last.status = 0, RequestStatus.PREEMPTED
                waiting.appendleft(last)
                self.num_preemptions += 1
        return advanced

    def _admit(self, waiting: deque[Request]) -> dict[str, int]:
        advanced: dict[str, int] = {}
        while waiting and len(self._running) < MAX_REQUESTS:
            request = waiting[0]
            blocks, num_hits, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
            num_new = self.split(request, min(request.num_tokens - num_hits, TOKENS_AT_ONCE), num_hits)
            allocated = self.manager.allocate_slots(
                request,
                num_new,
                num_new_computed_tokens=num_hits,
                new_computed_blocks=blocks,
                full_sequence_must_fit=True,
            )
            if allocated is None:
                break
            waiting.popleft()
            request.num_computed_tokens, request.status = num_hits, RequestStatus.RUNNING
            self._running.append(request)
            advanced[request.request_id] = num_new
            if request.request_id not in self._admitted:
                self._admitted.add(request.request_id)
                self.hit_tokens += num_hits
                self.prompt_tokens += request.num_prompt_tokens
                self._count_shared(request, num_hits)
        return advanced

    def _count_shared(self, request: Request, num_hits: int) -> None:
        if num_shared := self._num_shared[request.request_id]:
            head = tuple(request.prompt_token_ids[:num_shared])
            if self._num_with_head[head] >= 2:
                self.shared_tokens += num_shared
                self.shared_hit_tokens += min(num_hits, num_shared)
            self._num_with_head[head] += 1

    def _finish_step(self, advanced: dict[str, int]) -> None:
        self.manager.take_new_block_ids()
        _, held = self.manager.take_kv_cache_block_copies()
        if held:
            self.manager.block_pool.free_blocks(held)
        self.most_blocks = max(self.most_blocks, round(self.manager.usage * 1_000_000))
        for request in list(self._running):
            request.num_computed_tokens += advanced.get(request.request_id, 0)
            if request.num_computed_tokens < request.num_tokens:
                continue
            left = request.max_tokens - request.num_output_tokens
            if left <= 0:
                self._running.remove(request)
                self.manager.free(request)
            else:
                # What is generated is nobody's prompt, and the same on both sides.
                first = int(request.request_id) * 7_919 + request.num_output_tokens
                count = min(left, OUTPUTS_AT_ONCE)
                request.append_output_token_ids([(first + place) % 50_000 for place in range(count)])
