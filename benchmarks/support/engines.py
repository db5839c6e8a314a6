"""The engines that are compared, behind one interface: generate for a list of prompts, or stream for one.

Each class imports its engine when it is made, so that a worker loads one engine only. All engines get the same KV cache
in tokens, the same number of sequences at once and the same number type; everything else is their default, but for what
``extra`` says.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EngineOptions:
    """What a worker makes its engine from."""

    model: str
    dtype: str
    device: str
    max_num_seqs: int
    kv_cache_tokens: int
    kv_cache_bytes: int
    switches_off: list[str] = field(default_factory=list)
    """Rose's switches; ``run_ahead``, and inside vLLM ``mixed_graphs``, are among them here."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Options in the engine's own words."""
    step_ms: float | None = None
    """vLLM's servers only: instead of a device, one that takes so long for any step."""


BLOCK_SIZE = 16


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """Return options as a command line has them: ``max_num_seqs=8`` is --max-num-seqs 8, False is --no-..."""
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def rose_options(options: EngineOptions) -> dict[str, Any]:
    """Return fields of Rose's ``EngineConfig``. One block more: block 0 holds nothing."""
    switches: dict[str, Any] = dict.fromkeys(options.switches_off, False)
    if "run_ahead" in switches:
        switches["run_ahead"] = 0
    return {
        "model": options.model,
        "dtype": options.dtype,
        "device": options.device,
        "max_num_seqs": options.max_num_seqs,
        "block_size": BLOCK_SIZE,
        "num_blocks": -(-options.kv_cache_tokens // BLOCK_SIZE) + 1,
        **switches,
        **options.extra,
    }


def vllm_options(options: EngineOptions, attention_backend: str | None) -> dict[str, Any]:
    """Return vLLM's engine arguments. The size of the KV cache is given, so that nothing is measured at start-up.

    Args:
        attention_backend: None leaves the choice to vLLM.
    """
    switches = [name for name in options.switches_off if name not in ("run_ahead", "mixed_graphs")]
    chosen: dict[str, Any] = {} if attention_backend is None else {"attention_backend": attention_backend}
    if switches:
        chosen["additional_config"] = {"rose": dict.fromkeys(switches, False)}
    if "run_ahead" in options.switches_off:
        chosen["async_scheduling"] = False
    if "mixed_graphs" in options.switches_off:
        # vLLM's own default; Rose keeps a mode that is set explicitly.
        chosen["compilation_config"] = {"cudagraph_mode": "FULL_AND_PIECEWISE"}
    return {
        "model": options.model,
        "dtype": options.dtype,
        "max_num_seqs": options.max_num_seqs,
        "kv_cache_memory_bytes": options.kv_cache_bytes,
        # Only checked against free memory, of which other engines on the same device have taken their part.
        "gpu_memory_utilization": 0.05,
        **chosen,
        **options.extra,
    }


def sglang_options(options: EngineOptions) -> dict[str, Any]:
    """Return SGLang's server arguments."""
    return {
        "model_path": options.model,
        "dtype": options.dtype,
        "device": options.device,
        "max_running_requests": options.max_num_seqs,
        "max_total_tokens": options.kv_cache_tokens,
        # The upper limit is the number of tokens: this one counts what other engines have taken.
        "mem_fraction_static": 0.8,
        "cuda_graph_max_bs_decode": options.max_num_seqs,
        # Faster than its "fa3" for heads of 64.
        "attention_backend": "triton",
        "grammar_backend": "none",
        "log_level": "error",
        **options.extra,
    }


class OfflineEngine:
    """Generates for many prompts in one call."""

    def facts(self) -> dict[str, Any]:
        """Return version and settings in force."""
        raise NotImplementedError

    def generate(self, prompts: list[list[int]], output_lens: list[int], sampling: dict[str, Any]) -> int:
        """Return the number of generated tokens, texts made and end-of-text ignored."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the device, and end the engine's own processes."""
        raise NotImplementedError


class Rose(OfflineEngine):
    """Rose without vLLM."""

    def __init__(self, options: EngineOptions) -> None:
        from rose_backend import LLM, SamplingParams, __version__

        self._params, self._version = SamplingParams, __version__
        self._llm = LLM(**rose_options(options))

    def facts(self) -> dict[str, Any]:
        return {"version": self._version, "parts": self._llm.core.feature_status}

    def generate(self, prompts: list[list[int]], output_lens: list[int], sampling: dict[str, Any]) -> int:
        params = [self._params(max_tokens=length, ignore_eos=True, **sampling) for length in output_lens]
        outputs = self._llm.generate(prompts, params)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def close(self) -> None:
        self._llm.core.check_integrity()
        self._llm.close()


class Vllm(OfflineEngine):
    """vLLM's ``LLM``; Rose inside with the attention backend "rose"."""

    def __init__(self, options: EngineOptions, attention_backend: str | None) -> None:
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        self._llm = LLM(**vllm_options(options, attention_backend))

    def facts(self) -> dict[str, Any]:
        return _vllm_facts(self._llm.llm_engine.vllm_config)

    def generate(self, prompts: list[list[int]], output_lens: list[int], sampling: dict[str, Any]) -> int:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = [self._params(max_tokens=length, ignore_eos=True, **sampling) for length in output_lens]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class Sglang(OfflineEngine):
    """SGLang's ``Engine``."""

    def __init__(self, options: EngineOptions) -> None:
        from sglang import __version__
        from sglang.srt.entrypoints.engine import Engine

        self._version = __version__
        self._options = sglang_options(options)
        self._engine = Engine(**self._options)

    def facts(self) -> dict[str, Any]:
        kept = ("attention_backend", "cuda_graph_max_bs_decode", "mem_fraction_static")
        return {"version": self._version, **{name: self._options.get(name) for name in kept}}

    def generate(self, prompts: list[list[int]], output_lens: list[int], sampling: dict[str, Any]) -> int:
        params = [{"max_new_tokens": length, "ignore_eos": True, **sampling} for length in output_lens]
        outputs = self._engine.generate(input_ids=prompts, sampling_params=params)
        return sum(output["meta_info"]["completion_tokens"] for output in outputs)

    def close(self) -> None:
        self._engine.shutdown()


class StreamingEngine:
    """Generates for one prompt on an event loop."""

    def facts(self) -> dict[str, Any]:
        """Return version and settings in force."""
        raise NotImplementedError

    def stream(self, prompt: list[int], output_len: int, sampling: dict[str, Any]) -> AsyncIterator[int]:
        """Yield the number of new tokens as they come."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Free the device, and end the engine's own processes."""
        raise NotImplementedError


class RoseStreams(StreamingEngine):
    """Rose's ``AsyncEngine``."""

    def __init__(self, options: EngineOptions) -> None:
        from rose_backend import AsyncEngine, SamplingParams, __version__

        self._params, self._version = SamplingParams, __version__
        self._engine = AsyncEngine(**rose_options(options))

    def facts(self) -> dict[str, Any]:
        return {"version": self._version, "parts": self._engine.feature_status}

    async def stream(
        self, prompt: list[int], output_len: int, sampling: dict[str, Any]
    ) -> AsyncIterator[int]:
        params = self._params(max_tokens=output_len, ignore_eos=True, **sampling)
        seen = 0
        async for output in self._engine.generate(prompt, params):
            total = len(output.outputs[0].token_ids)
            yield total - seen
            seen = total

    async def aclose(self) -> None:
        await self._engine.shutdown()


class VllmStreams(StreamingEngine):
    """vLLM's ``AsyncLLM``; Rose inside with the attention backend "rose"."""

    def __init__(self, options: EngineOptions, attention_backend: str | None) -> None:
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM

        self._params, self._delta = SamplingParams, RequestOutputKind.DELTA
        arguments = AsyncEngineArgs(**vllm_options(options, attention_backend))
        self._engine = AsyncLLM.from_engine_args(arguments)
        self._num_requests = 0

    def facts(self) -> dict[str, Any]:
        return _vllm_facts(self._engine.vllm_config)

    async def stream(
        self, prompt: list[int], output_len: int, sampling: dict[str, Any]
    ) -> AsyncIterator[int]:
        params = self._params(max_tokens=output_len, ignore_eos=True, output_kind=self._delta, **sampling)
        self._num_requests += 1
        outputs = self._engine.generate({"prompt_token_ids": prompt}, params, str(self._num_requests))
        async for output in outputs:
            yield len(output.outputs[0].token_ids)

    async def aclose(self) -> None:
        self._engine.shutdown()


def _vllm_facts(config: Any) -> dict[str, Any]:
    from vllm import __version__

    backend = config.attention_config.backend
    return {
        "version": __version__,
        "attention_backend": None if backend is None else backend.name,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "scheduler": str(config.scheduler_config.scheduler_cls or "vLLM's"),
    }


def make_offline(backend: str, options: EngineOptions) -> OfflineEngine:
    """Return the engine that ``generate``s; ImportError where it is not installed."""
    if backend == "rose":
        return Rose(options)
    if backend == "sglang":
        return Sglang(options)
    return Vllm(options, attention_backend_of(backend, options))


def make_streaming(backend: str, options: EngineOptions) -> StreamingEngine:
    """Return the engine that ``stream``s; ImportError where it is not installed."""
    if backend == "rose":
        return RoseStreams(options)
    return VllmStreams(options, attention_backend_of(backend, options))


def attention_backend_of(backend: str, options: EngineOptions) -> str | None:
    """Return what vLLM is told; it has one attention backend for CPUs only, and names that itself."""
    if backend == "rose-in-vllm":
        return "rose"
    return "FLASH_ATTN" if options.device == "cuda" else None


def module_of(backend: str) -> str:
    """Return the package without which ``backend`` counts as not installed."""
    return {"sglang": "sglang", "rose": "rose_backend"}.get(backend, "vllm")
