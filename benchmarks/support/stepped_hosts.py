"""Rose in this process, standalone or inside vLLM, one step after the other under the caller's eyes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.support.engines import EngineOptions, rose_options, vllm_options
from rose_backend.block_manager import PrefixesUnderWay


class SteppedHost(Protocol):
    """Runs requests that all come in before the first step."""

    vocab_size: int

    @property
    def under_way(self) -> PrefixesUnderWay:
        """Decides who waits."""

    @property
    def num_computed_prompt_tokens(self) -> int:
        """Prompt tokens since the start that the prefix cache did not supply."""

    def run(self, prompts: list[list[int]], num_new_tokens: int) -> tuple[float, list[float]]:
        """Return when the first step began, and when each request's first token came; ``time.perf_counter``."""

    def reset_prefix_cache(self) -> None:
        """Forget what was computed. Nothing runs."""

    def facts(self) -> dict[str, Any]:
        """Return version and settings in force."""

    def close(self) -> None:
        """Free the device."""


class SteppedRose:
    """The standalone engine, as for callers that wait for each token."""

    def __init__(self, options: EngineOptions, vocab_size: int) -> None:
        from rose_backend import SamplingParams, __version__
        from rose_backend.config import EngineConfig
        from rose_backend.engine.core import EngineCore

        self.vocab_size = vocab_size
        self._params, self._version = SamplingParams, __version__
        self._core = EngineCore(EngineConfig(**rose_options(options)), is_online=True)

    @property
    def under_way(self) -> PrefixesUnderWay:
        """Decides who waits."""
        return self._core._scheduler._admission._under_way

    @property
    def num_computed_prompt_tokens(self) -> int:
        """Prompt tokens since the start that the prefix cache did not supply."""
        return self._core.stats.prompt_tokens_computed

    def run(self, prompts: list[list[int]], num_new_tokens: int) -> tuple[float, list[float]]:
        """Return when the first step began, and when each request's first token came."""
        core = self._core
        params = self._params(max_tokens=num_new_tokens, temperature=0.0, ignore_eos=True)
        checked = core.factory.check_all(prompts, [params] * len(prompts))
        requests = [core.factory.build(each, is_streaming=True) for each in checked]
        for request in requests:
            core.add(request)
        firsts: dict[str, float] = {}
        start = time.perf_counter()
        while core.num_unfinished:
            for output in core.step():
                firsts.setdefault(output.request_id, time.perf_counter())
        return start, [firsts[request.request_id] for request in requests]

    def reset_prefix_cache(self) -> None:
        """Forget what was computed."""
        if not self._core.manager.reset_prefix_cache():
            raise RuntimeError("requests still hold blocks")

    def facts(self) -> dict[str, Any]:
        """Return version and parts in force."""
        return {"version": self._version, "parts": self._core.parts}

    def close(self) -> None:
        """Check the books and free the device."""
        self._core.check_integrity()
        self._core.close()


class SteppedVllm:
    """vLLM with Rose inside. Its engine core has to be in this process: ``VLLM_ENABLE_V1_MULTIPROCESSING`` is 0."""

    def __init__(self, options: EngineOptions, vocab_size: int) -> None:
        from vllm import LLM, SamplingParams, __version__
        from vllm.sampling_params import RequestOutputKind

        self.vocab_size = vocab_size
        self._params, self._version, self._delta = SamplingParams, __version__, RequestOutputKind.DELTA
        self._engine = LLM(**vllm_options(options, "rose")).llm_engine
        self._manager = self._engine.engine_core.engine_core.scheduler.kv_cache_manager.manager
        self._num_requests = 0

    @property
    def under_way(self) -> PrefixesUnderWay:
        """Decides who waits."""
        return self._engine.engine_core.engine_core.scheduler.kv_cache_manager._under_way

    @property
    def num_computed_prompt_tokens(self) -> int:
        """Prompt tokens since the start that the prefix cache did not supply."""
        return int(self._manager.stats.query_tokens - self._manager.stats.hit_tokens)

    def run(self, prompts: list[list[int]], num_new_tokens: int) -> tuple[float, list[float]]:
        """Return when the first step began, and when each request's first token came."""
        engine = self._engine
        params = self._params(
            max_tokens=num_new_tokens, temperature=0.0, ignore_eos=True, output_kind=self._delta
        )
        ids = [str(self._num_requests + index) for index in range(len(prompts))]
        self._num_requests += len(prompts)
        for request_id, prompt in zip(ids, prompts, strict=True):
            engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        firsts: dict[str, float] = {}
        start = time.perf_counter()
        while engine.has_unfinished_requests():
            for output in engine.step():
                firsts.setdefault(output.request_id, time.perf_counter())
        return start, [firsts[request_id] for request_id in ids]

    def reset_prefix_cache(self) -> None:
        """Forget what was computed."""
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("requests still hold blocks")

    def facts(self) -> dict[str, Any]:
        """Return version and scheduling in force."""
        config = self._engine.vllm_config
        return {
            "version": self._version,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        }

    def close(self) -> None:
        """Check the books and free the device."""
        self._manager.check_integrity()
        self._engine.engine_core.shutdown()


HOSTS: dict[str, Callable[[EngineOptions, int], SteppedHost]] = {
    "rose": SteppedRose,
    "rose-in-vllm": SteppedVllm,
}
