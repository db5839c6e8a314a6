"""Decode loops over Rose's block manager and vLLM's: one token per request and step, only the manager's own time taken.

Every loop takes the same steps on the same lengths. A sample belongs to the phase its step is in:

    rolls_over   the token opens a block: every row needs a new one
    inside       the token lands in a block that is there
    fills        the token fills a block, which becomes findable by its hash
    whole_block  mean of ``block_size`` steps in a row, so one of each phase and the rest inside

vLLM hashes full blocks when a request gets its token, outside its manager: ``hashing`` is apart, and
``whole_block_and_hashing`` has both. Rose's core hashes in ``commit``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from rose_backend.block_manager import BlockManager
from rose_backend.vllm_plugin.kv_cache.manager import RoseKVCacheManager
from rose_backend.vllm_plugin.kv_cache.spec import as_rose_spec

init_none_hash(sha256)  # vLLM's default algorithm
_SAMPLING = SamplingParams(max_tokens=1_000_000)


def make_manager(
    side: str, *, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int
) -> Any:
    """Return vLLM's manager (``side`` "stock") or Rose's behind vLLM's interface ("rose_in_vllm"), caching on."""
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float32)
    make: Callable[..., Any] = KVCacheManager
    if side == "rose_in_vllm":
        make, spec = functools.partial(RoseKVCacheManager, max_num_seqs=max_num_seqs), as_rose_spec(spec)
    return make(
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=max_model_len,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
    )


def make_request(name: str, prompt: list[int], block_size: int) -> Request:
    """Return a waiting request, its full blocks hashed."""
    return Request(name, prompt, _SAMPLING, None, block_hasher=get_request_block_hasher(block_size, sha256))


def make_equal_request(name: str, other: Request) -> Request:
    """Return a request for the prompt of ``other`` without hashing it again."""
    request = Request(name, other.prompt_token_ids, _SAMPLING, None)
    request.block_hashes = list(other.block_hashes)
    request._block_hasher = other._block_hasher
    return request


def hash_request(request: Request) -> None:
    """Rehash a request's blocks, as the engine core does when it arrives."""
    request.block_hashes = []
    request.update_block_hashes()


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


def compute(manager: BlockManager, prompt: np.ndarray, max_hit: int | None = None) -> int:
    """Compute a prompt in Rose's block manager; return its row."""
    admission = manager.add(prompt, match=manager.match(prompt, max_tokens=max_hit))
    assert admission is not None
    row, count = np.array([admission.row]), len(prompt) - admission.num_cached_tokens
    assert manager.reserve(row, count).ok, "the pool is too small for this scene"
    manager.commit(row, count, prompt[admission.num_cached_tokens :])
    return admission.row


@dataclass(frozen=True)
class Setting:
    """What a loop decodes in."""

    num_blocks: int
    block_size: int
    prompt_lens: Sequence[int]
    """Tokens of each row's prompt."""
    max_model_len: int
    shared: bool = False
    """All rows read one cached prompt, each but its last token."""
    scattered: bool = False
    """Blocks are handed out in random order, all memory touched, as after long use."""

    def limits(self) -> dict[str, int]:
        """Return what managers are made from."""
        return {
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "max_num_seqs": len(self.prompt_lens) + 1,
            "max_model_len": self.max_model_len,
        }


class DecodeLoop:
    """Rows in step, and a way to time one step."""

    manager: Any
    core: BlockManager | None
    """Rose's block manager inside, if there is one."""

    def restart(self) -> None:
        """Free all rows and admit as many new ones."""
        raise NotImplementedError

    def step(self) -> dict[str, float]:
        """Take one decode step; microseconds by part."""
        raise NotImplementedError


class RoseCore(DecodeLoop):
    """``BlockManager`` as Rose's own engine calls it: one ``reserve`` and one ``commit`` per step for all rows."""

    def __init__(self, setting: Setting) -> None:
        self.manager = self.core = BlockManager(**setting.limits())
        self._prompt_lens, self._shared = setting.prompt_lens, setting.shared
        self._rng = np.random.default_rng(0)
        self._rows = np.zeros(0, np.int64)
        self._tokens = np.arange(len(setting.prompt_lens), dtype=np.int32)
        if setting.scattered:
            _age(self.manager, self._rng)
        if setting.shared:
            self._prompt = self._rng.integers(0, 50_257, setting.prompt_lens[0]).astype(np.int32)
            self._hashes = self.manager.hash_blocks(self._prompt)
            compute(self.manager, self._prompt)

    def restart(self) -> None:
        self.manager.free(self._rows)
        if self._shared:
            match = self.manager.match(self._prompt, block_hashes=self._hashes)
            admissions = [self.manager.add(self._prompt, match=match) for _ in self._prompt_lens]
            self._rows = np.array([admission.row for admission in admissions if admission is not None])
            last = np.full(len(self._rows), self._prompt[-1])
            assert self.manager.reserve(self._rows, 1).ok
            self.manager.commit(self._rows, 1, last)
            return
        prompts = [self._rng.integers(0, 50_257, length).astype(np.int32) for length in self._prompt_lens]
        self._rows = np.array([compute(self.manager, prompt) for prompt in prompts])

    def step(self) -> dict[str, float]:
        manager, rows, tokens = self.manager, self._rows, self._tokens
        reserve = timed_us(lambda: manager.reserve(rows, 1))
        commit = timed_us(lambda: manager.commit(rows, 1, tokens))
        return {"reserve": reserve, "commit": commit}


class VllmManager(DecodeLoop):
    """A manager with vLLM's interface ("rose_in_vllm" or "stock") as vLLM's scheduler calls it: request by request."""

    def __init__(self, side: str, setting: Setting) -> None:
        self.manager = make_manager(side, **setting.limits())
        self.core = self.manager.manager if side == "rose_in_vllm" else None
        self._prompt_lens, self._block_size = setting.prompt_lens, setting.block_size
        self._rng = np.random.default_rng(0)
        self._requests: list[Any] = []
        self._num_made = 0
        self._shared: Any = None
        if setting.scattered and self.core is not None:
            _age(self.core, self._rng)
        elif setting.scattered:
            pool = self.manager.block_pool
            blocks = pool.get_new_blocks(setting.num_blocks - 1)
            pool.free_blocks([blocks[index] for index in self._rng.permutation(len(blocks))])
        if setting.shared:
            self._shared = self._new_request(setting.prompt_lens[0])
            admit(self.manager, self._shared)

    def _new_request(self, length: int) -> Any:
        self._num_made += 1
        prompt = self._rng.integers(0, 50_257, length).tolist()
        return make_request(f"r{self._num_made}", prompt, self._block_size)

    def restart(self) -> None:
        for request in self._requests:
            self.manager.free(request)
        self.manager.new_step_starts()
        self._requests = []
        for length in self._prompt_lens:
            if self._shared is None:
                request = self._new_request(length)
            else:
                self._num_made += 1
                request = make_equal_request(f"r{self._num_made}", self._shared)
            admit(self.manager, request)
            self._requests.append(request)

    def step(self) -> dict[str, float]:
        manager, requests = self.manager, self._requests
        manager.new_step_starts()

        def allocate() -> None:
            for request in requests:
                manager.allocate_slots(request, 1)

        def publish() -> None:
            for request in requests:
                manager.cache_blocks(request, request.num_computed_tokens)

        def generate() -> None:
            for index, request in enumerate(requests):
                request.append_output_token_ids(index)

        parts = {"allocate_slots": timed_us(allocate)}
        for request in requests:
            request.num_computed_tokens += 1
        parts["cache_blocks"] = timed_us(publish)
        # vLLM hashes full blocks here, outside its manager, with Rose's manager too.
        parts["hashing"] = timed_us(generate)
        return parts


def _age(manager: BlockManager, rng: np.random.Generator) -> None:
    """Bring an empty block manager into the state of one long in use.

    Free blocks lie in random order, and the system has provided every page of the arrays: NumPy's zeros come page by
    page on first use, which vLLM's block objects have paid for when they were built.
    """
    taken = manager.pool.take(manager.num_usable_blocks)
    assert taken is not None and manager.cache is not None
    for chunk in np.array_split(taken[0], 1 + len(taken[0]) // 100_000):
        manager.cache.copy_tokens(chunk, chunk)
        manager.pool.is_cached[chunk] = False
    manager.pool.release(rng.permutation(taken[0]))


def run_steps(loop: DecodeLoop, prompt_len: int, block_size: int, num_cycles: int) -> Samples:
    """Restart a loop and let each row fill ``num_cycles`` blocks; microseconds for all rows by phase and part.

    One more cycle goes before and is not counted: admission has just filled the processor's caches with other things.
    """
    samples: Samples = {}
    loop.restart()
    for cycle in range(num_cycles + 1):
        totals = {"whole_block": 0.0, "whole_block_and_hashing": 0.0}
        for index in range(block_size):
            parts = loop.step()
            if cycle == 0:
                continue
            hashing = parts.pop("hashing", 0.0)
            step = sum(parts.values())
            totals["whole_block"] += step / block_size
            totals["whole_block_and_hashing"] += (step + hashing) / block_size
            offset = (prompt_len + index) % block_size
            phase = {0: "rolls_over", block_size - 1: "fills"}.get(offset, "inside")
            named = {phase: step, f"{phase}.hashing": hashing}
            for name, value in {**named, **{f"{phase}.{part}": us for part, us in parts.items()}}.items():
                samples.setdefault(name, []).append(value)
        if cycle:
            for name, value in totals.items():
                samples.setdefault(name, []).append(value)
    return samples
