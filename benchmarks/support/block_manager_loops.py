"""Decode loops over Rose's block manager and vLLM's: one token per request and step, only the manager's own time taken.

Every loop takes the same steps on the same lengths. A sample belongs to the phase its step is in:

    rolls_over   the token opens a block: every row needs a new one
    inside       the token lands in a block that is there
    fills        the token fills a block, which becomes findable by its hash
    whole_block  mean of ``block_size`` steps in a row, so one of each phase and the rest inside

vLLM hashes full blocks when a request gets its token, outside its manager: that is not counted. Rose's core hashes in
``commit``.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from benchmarks.support.timing import Samples, timed_us
from benchmarks.support.variants import computed_row
from rose_backend.block_manager import BlockManager
from rose_backend.vllm_plugin.kv_cache.manager import RoseKVCacheManager
from rose_backend.vllm_plugin.kv_cache.spec import as_rose_spec

VOCAB_SIZE = 50_257
init_none_hash(sha256)  # vLLM's default algorithm
_SAMPLING = SamplingParams(max_tokens=1_000_000)


@dataclass(frozen=True)
class Setting:
    """What a manager is made from, and what decodes in it."""

    num_blocks: int
    block_size: int
    prompt_len: int
    num_rows: int
    max_model_len: int
    shared: bool = False
    """All rows read one cached prompt, each but its last token."""
    scattered: bool = False
    """Blocks are handed out in random order, all memory touched, as after long use."""


def make_manager(side: str, setting: Setting) -> Any:
    """Return Rose's block manager ("rose_core"), the same behind vLLM's interface ("rose_in_vllm"), or vLLM's."""
    max_num_seqs = setting.num_rows + 1
    if side == "rose_core":
        return BlockManager(
            num_blocks=setting.num_blocks,
            block_size=setting.block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=setting.max_model_len,
        )
    size = setting.block_size
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=64, dtype=torch.float32)
    make: Any = KVCacheManager
    if side == "rose_in_vllm":
        make, spec = functools.partial(RoseKVCacheManager, max_num_seqs=max_num_seqs), as_rose_spec(spec)
    return make(
        kv_cache_config=KVCacheConfig(setting.num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=setting.max_model_len,
        scheduler_block_size=size,
        hash_block_size=size,
    )


def make_request(name: str, prompt: np.ndarray, block_size: int) -> Request:
    """Return a waiting request, its full blocks hashed."""
    hasher = get_request_block_hasher(block_size, sha256)
    return Request(name, prompt.tolist(), _SAMPLING, None, block_hasher=hasher)


def make_equal_request(name: str, other: Request) -> Request:
    """Return a request for the prompt of ``other`` without hashing it again."""
    request = Request(name, other.prompt_token_ids, _SAMPLING, None)
    request.block_hashes = list(other.block_hashes)
    request._block_hasher = other._block_hasher
    return request


def admit(manager: Any, request: Request) -> None:
    """Admit a request, compute its whole prompt and its first token, as the scheduler would."""
    blocks, num_hits, _ = manager.get_computed_blocks(request)
    allocated = manager.allocate_slots(
        request, request.num_tokens - num_hits, num_new_computed_tokens=num_hits, new_computed_blocks=blocks
    )
    if allocated is None:
        raise RuntimeError(f"{request.request_id}: the pool is too small for this scene")
    _, retained = manager.take_kv_cache_block_copies()
    manager.block_pool.free_blocks(retained)
    request.num_computed_tokens = request.num_tokens
    request.status = RequestStatus.RUNNING
    request.append_output_token_ids(1)


class DecodeLoop:
    """Rows in step. ``restart`` frees all and admits as many new ones; ``step`` decodes, and returns microseconds."""

    def __init__(self, side: str, setting: Setting) -> None:
        self._setting, self._rng = setting, np.random.default_rng(0)
        self._manager = make_manager(side, setting)
        inside = {"rose_core": self._manager, "rose_in_vllm": getattr(self._manager, "manager", None)}
        self.core: BlockManager | None = inside.get(side)
        """Rose's block manager inside, if there is one."""
        if setting.scattered:
            _scatter(self.core, self._manager, self._rng)

    def _prompt(self) -> np.ndarray:
        return self._rng.integers(0, VOCAB_SIZE, self._setting.prompt_len).astype(np.int32)


class RoseLoop(DecodeLoop):
    """``BlockManager`` as Rose's own engine calls it: one ``reserve`` and one ``commit`` per step for all rows."""

    def __init__(self, side: str, setting: Setting) -> None:
        super().__init__(side, setting)
        self._rows = np.zeros(0, np.int64)
        self._tokens = np.arange(setting.num_rows, dtype=np.int32)
        self._shared: dict[str, np.ndarray] = {}
        if setting.shared:
            prompt = self._prompt()
            self._shared = {"prompt": prompt, "block_hashes": self._manager.hash_blocks(prompt)}
            computed_row(self._manager, prompt)

    def restart(self) -> None:
        self._manager.free(self._rows)
        prompts = (self._shared or {"prompt": self._prompt()} for _ in self._tokens)
        self._rows = np.array([computed_row(self._manager, **prompt) for prompt in prompts])

    def step(self) -> float:
        manager, rows, tokens = self._manager, self._rows, self._tokens
        return timed_us(lambda: (manager.reserve(rows, 1), manager.commit(rows, 1, tokens)))


class VllmLoop(DecodeLoop):
    """A manager with vLLM's interface as vLLM's scheduler calls it: request by request."""

    def __init__(self, side: str, setting: Setting) -> None:
        super().__init__(side, setting)
        self._requests: list[Request] = []
        self._shared: Request | None = None
        if setting.shared:
            self._shared = make_request("shared", self._prompt(), setting.block_size)
            admit(self._manager, self._shared)

    def restart(self) -> None:
        for request in self._requests:
            self._manager.free(request)
        self._manager.new_step_starts()
        self._requests = []
        for index in range(self._setting.num_rows):
            if self._shared is None:
                request = make_request(f"r{index}", self._prompt(), self._setting.block_size)
            else:
                request = make_equal_request(f"r{index}", self._shared)
            admit(self._manager, request)
            self._requests.append(request)

    def step(self) -> float:
        manager, requests = self._manager, self._requests
        manager.new_step_starts()

        def allocate() -> None:
            for request in requests:
                manager.allocate_slots(request, 1)

        def publish() -> None:
            for request in requests:
                manager.cache_blocks(request, request.num_computed_tokens)

        allocate_us = timed_us(allocate)
        for request in requests:
            request.num_computed_tokens += 1
        publish_us = timed_us(publish)
        for index, request in enumerate(requests):
            request.append_output_token_ids(index)
        return allocate_us + publish_us


def _scatter(core: BlockManager | None, manager: Any, rng: np.random.Generator) -> None:
    """Bring an empty manager into the state of one long in use: free blocks lie in random order.

    The system has provided every page of Rose's arrays, too: NumPy's zeros come page by page on first use, which vLLM's
    block objects have paid for when they were built.
    """
    if core is None:
        pool = manager.block_pool
        blocks = pool.get_new_blocks(pool.get_num_free_blocks())
        pool.free_blocks([blocks[index] for index in rng.permutation(len(blocks))])
        return
    taken = core.pool.take(core.num_usable_blocks)
    assert taken is not None and core.cache is not None
    for chunk in np.array_split(taken[0], 1 + len(taken[0]) // 100_000):
        core.cache.copy_tokens(chunk, chunk)
        core.pool.is_cached[chunk] = False
    core.pool.release(rng.permutation(taken[0]))


LOOPS = {"rose_core": RoseLoop, "rose_in_vllm": VllmLoop, "stock": VllmLoop}


def run_steps(loop: Any, prompt_len: int, block_size: int, num_cycles: int) -> Samples:
    """Restart a loop and let each row fill ``num_cycles`` blocks; microseconds for all rows by phase.

    One more cycle goes before and is not counted: admission has just filled the processor's caches with other things.
    """
    loop.restart()
    for _ in range(block_size):
        loop.step()
    samples: Samples = defaultdict(list)
    for _ in range(num_cycles):
        steps = [loop.step() for _ in range(block_size)]
        for position, us in enumerate(steps, start=prompt_len):
            phase = {0: "rolls_over", block_size - 1: "fills"}.get(position % block_size, "inside")
            samples[phase].append(us)
        samples["whole_block"].append(fmean(steps))
    return samples
