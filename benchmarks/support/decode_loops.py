"""Decode loops over the block managers: 256 requests, one token each per step, only the manager's own time taken.

Every loop takes the same steps on the same lengths. A sample belongs to the phase its step is in:

    rolls_over   the token opens a block: every row needs a new one
    inside       the token lands in a block that is there
    fills        the token fills a block, which becomes findable by its hash
    whole_block  mean of ``block_size`` steps in a row, so one of each phase and the rest inside

vLLM hashes full blocks when a request gets its token, outside its manager: ``hashing`` is apart, and
``whole_block_and_hashing`` has both. Rose's core hashes in ``commit``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from benchmarks.support import stock_vllm
from benchmarks.support.timing import Samples, timed_us
from rose_backend.block_manager import BlockManager


class DecodeLoop(Protocol):
    """Rows in step, and a way to time one step."""

    manager: Any

    def restart(self) -> None:
        """Free all rows and admit as many anew."""

    def step(self) -> dict[str, float]:
        """Take one decode step; microseconds by part."""


class RoseCore:
    """``BlockManager`` as Rose's own engine calls it: one ``reserve`` and one ``commit`` per step for all rows.

    Args:
        prompt_lens: tokens of each row's prompt.
        shared: all rows read one cached prompt, each but its last token.
        scattered: hand out blocks in random order, all memory touched, as after long use.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        prompt_lens: Sequence[int],
        max_model_len: int,
        shared: bool = False,
        scattered: bool = False,
    ) -> None:
        self.manager = BlockManager(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=len(prompt_lens) + 1,
            max_model_len=max_model_len,
        )
        self._prompt_lens, self._shared = prompt_lens, shared
        self._rng = np.random.default_rng(0)
        self._rows = np.zeros(0, np.int64)
        self._tokens = np.arange(len(prompt_lens), dtype=np.int32)
        if scattered:
            _age(self.manager, self._rng)
        if shared:
            self._prompt = self._rng.integers(0, 50_257, prompt_lens[0]).astype(np.int32)
            self._hashes = self.manager.hash_blocks(self._prompt)
            self._admit(self._prompt)

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
        self._rows = np.array([self._admit(prompt) for prompt in prompts])

    def _admit(self, prompt: np.ndarray) -> int:
        admission = self.manager.add(prompt)
        assert admission is not None
        row, count = np.array([admission.row]), len(prompt) - admission.num_cached_tokens
        assert self.manager.reserve(row, count).ok, "the pool is too small for this scene"
        self.manager.commit(row, count, prompt[admission.num_cached_tokens :])
        return admission.row

    def step(self) -> dict[str, float]:
        manager, rows, tokens = self.manager, self._rows, self._tokens
        reserve = timed_us(lambda: manager.reserve(rows, 1))
        commit = timed_us(lambda: manager.commit(rows, 1, tokens))
        return {"reserve": reserve, "commit": commit}


class VllmManager:
    """A manager with vLLM's interface as vLLM's scheduler calls it: request by request.

    Args:
        side: "rose_in_vllm" or "stock".
        lookup: look a waiting request up in every step, which makes Rose commit what it has put off.
        others: see ``RoseCore``.
    """

    def __init__(
        self,
        side: str,
        *,
        num_blocks: int,
        block_size: int,
        prompt_lens: Sequence[int],
        max_model_len: int,
        shared: bool = False,
        scattered: bool = False,
        lookup: bool = False,
    ) -> None:
        self.manager = stock_vllm.make_manager(
            side,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=len(prompt_lens) + 1,
            max_model_len=max_model_len,
        )
        self._prompt_lens, self._block_size = prompt_lens, block_size
        self._rng = np.random.default_rng(0)
        self._requests: list[Any] = []
        self._num_made = 0
        self._waiting = self._new_request(4 * block_size + 1) if lookup else None
        self._shared: Any = None
        if scattered:
            if side == "stock":
                stock_vllm.shuffle_free_blocks(self.manager, self._rng.permutation(num_blocks - 1))
            else:
                _age(self.manager.manager, self._rng)
        if shared:
            self._shared = self._new_request(prompt_lens[0])
            stock_vllm.admit(self.manager, self._shared)

    def _new_request(self, length: int) -> Any:
        self._num_made += 1
        prompt = self._rng.integers(0, 50_257, length).tolist()
        return stock_vllm.make_request(f"r{self._num_made}", prompt, self._block_size)

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
                request = stock_vllm.make_equal_request(f"r{self._num_made}", self._shared)
            stock_vllm.admit(self.manager, request)
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
        if self._waiting is not None:
            parts["lookup"] = timed_us(lambda: manager.get_computed_blocks(self._waiting))
        for request in requests:
            request.num_computed_tokens += 1
        parts["cache_blocks"] = timed_us(publish)
        # vLLM hashes full blocks here, outside its manager, whoever manages the blocks.
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
