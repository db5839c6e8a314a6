"""vLLM's scheduler in a loop of its own: steps of running requests, with made-up tokens instead of a model.

As in an engine with asynchronous scheduling, a step is scheduled before the output of the one before it is taken over.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from transformers import GPT2Config
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.support.block_manager_loops import VOCAB_SIZE, kv_cache_config, make_request
from benchmarks.support.timing import Samples, timed_us
from rose_backend import vllm_plugin
from rose_backend.vllm_plugin.scheduler.scheduler import RoseAsyncScheduler

SIDES = ("rose", "rose_unbatched", "stock")
"""Rose with batched scheduling and without, and vLLM with its own block manager."""

MAX_MODEL_LEN = 1024
LIFETIME = 128
"""Steps that a request lives on average where requests come and go."""
_PROMPT_LEN = 32
_NUM_WARM_UP_STEPS = 4


class SchedulerLoop:
    """One scheduler and its requests.

    Args:
        side: one of ``SIDES``.
        block_size: tokens per block.
        max_num_seqs: running requests at most.
        folder: an empty one, for a model configuration.
    """

    def __init__(self, side: str, block_size: int, max_num_seqs: int, folder: Path) -> None:
        vllm_plugin.register()
        GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(folder)
        options: dict[str, Any] = {}
        if side != "stock":
            rose = {"batched_scheduling": side == "rose"}
            options = {"attention_backend": "rose", "additional_config": {"rose": rose}}
        config = EngineArgs(
            model=str(folder),
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            # All prompts fit into one step.
            max_num_batched_tokens=max_num_seqs * MAX_MODEL_LEN,
            block_size=block_size,
            enforce_eager=True,
            skip_tokenizer_init=True,
            **options,
        ).create_engine_config()
        config.scheduler_config.async_scheduling = True
        num_blocks = max_num_seqs * (MAX_MODEL_LEN // block_size + 2) + 1
        config.cache_config.num_gpu_blocks = num_blocks
        scheduler_class = AsyncScheduler if side == "stock" else RoseAsyncScheduler
        self.scheduler = scheduler_class(
            vllm_config=config,
            kv_cache_config=kv_cache_config(num_blocks, block_size, for_rose=side != "stock"),
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            log_stats=True,
        )
        self._block_size = block_size
        self._rng = np.random.default_rng(0)
        self._num_added = 0
        self._in_flight: deque[tuple[Any, Any]] = deque()

    def run(self, num_requests: int, num_steps: int, scene: str) -> Samples:
        """Decode ``num_requests`` requests at once, which reach the ends of their blocks one after the other.

        Args:
            num_requests: that run at once.
            num_steps: timed steps.
            scene: "steady"; "turnover": one of ``LIFETIME`` requests leaves in each step, and another one comes; or
                "saturated": as many requests wait as run, each makes ``LIFETIME`` tokens on average, and a
                finished request makes room for the next.

        Returns: microseconds per step by part, schedule, update_from_output and both: of each step, or their mean where
            steps differ.
        """
        is_saturated = scene == "saturated"
        if is_saturated:
            self.scheduler.max_num_active_reqs = num_requests
        for _ in range(num_requests):
            self._add(scene)
        for _ in range(_NUM_WARM_UP_STEPS):
            self._step()
        steps = []
        for index in range(num_steps):
            if scene == "turnover":
                for _ in range((index + 1) * num_requests // LIFETIME - index * num_requests // LIFETIME):
                    self._replace_one()
            while is_saturated and len(self.scheduler.waiting) < num_requests:
                self._add(scene)
            steps.append(self._step())
        assert is_saturated or len(self.scheduler.running) == num_requests, "the pool is too small"
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        while self._in_flight:
            self.scheduler.update_from_output(*self._in_flight.popleft())
        self.scheduler.max_num_active_reqs = self.scheduler.max_num_running_reqs
        samples = {name: [step[name] for step in steps] for name in steps[0]}
        samples["both"] = [sum(step.values()) for step in steps]
        return samples if scene == "steady" else {name: [fmean(values)] for name, values in samples.items()}

    def _replace_one(self) -> None:
        running = self.scheduler.running
        leaving = running[self._num_added % len(running)].request_id
        self.scheduler.finish_requests(leaving, RequestStatus.FINISHED_ABORTED)
        self._add("turnover")

    def _add(self, scene: str) -> None:
        length = _PROMPT_LEN + self._num_added % self._block_size
        max_tokens = MAX_MODEL_LEN - length
        if scene == "saturated":
            max_tokens = int(self._rng.integers(1, 2 * LIFETIME))
        prompt = self._rng.integers(0, VOCAB_SIZE, length)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add_request(make_request(f"{self._num_added}", prompt, self._block_size, params))
        self._num_added += 1

    def _step(self) -> dict[str, float]:
        start = time.perf_counter()
        output = self.scheduler.schedule()
        times = {"schedule": (time.perf_counter() - start) * 1e6}
        request_ids = list(output.num_scheduled_tokens)
        index = {request_id: position for position, request_id in enumerate(request_ids)}
        tokens = [[token] for token in self._rng.integers(0, VOCAB_SIZE, len(request_ids)).tolist()]
        self._in_flight.append((output, ModelRunnerOutput(request_ids, index, tokens)))
        if len(self._in_flight) == 2:
            oldest = self._in_flight.popleft()
            times["update_from_output"] = timed_us(lambda: self.scheduler.update_from_output(*oldest))
        return times
