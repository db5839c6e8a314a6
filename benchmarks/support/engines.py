"""The engines that are compared: run requests in one call, or as streams at their times.

Each class imports its engine when it is made, so that a worker loads one engine only. All engines get the same KV cache
in tokens, the same number of sequences at once and the same number type; everything else is their default, but for what
``extra`` says. Texts are made, and end-of-text is ignored. ``facts`` are version and settings in force.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.online.streams import hold_streams
from benchmarks.online.timeline import play, sender, summary
from benchmarks.support.checkpoint import EAGLE3_HEAD
from benchmarks.support.workload import HeldStreams, Requests

Sampling = Mapping[str, Any]

MODULES = {"rose": "rose_backend", "rose-in-vllm": "vllm", "vllm": "vllm", "sglang": "sglang"}
"""Backend -> the package without which it counts as not installed."""
BLOCK_SIZE = 16
STEP_BUDGET = "step_budget"
"""The limit of a step's time while prompts arrive: an option of Rose that is off by default, and "auto" of a side."""
ACCEPTANCE_FIELDS = ("rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length")
"""Of vLLM's ``speculative_config``; see ``accept_at``."""
DRAFTS = "drafts"
"""Speculative decoding, as the engine options ask for it."""
STEP_MS = "ROSE_BENCHMARK_STEP_MS"
"""Variable of the environment that tells ``host_only_server`` how long a step takes."""


@dataclass(frozen=True)
class EngineOptions:
    """What a process makes its engine from."""

    backend: str
    model: str
    dtype: str
    device: str
    max_num_seqs: int
    kv_cache_tokens: int
    """Size of the KV cache, of which ``kv_cache_bytes`` are the bytes; 0: the engine chooses, from free memory."""
    kv_cache_bytes: int
    variables: dict[str, str]
    """The environment of its process."""
    switches_off: list[str] = field(default_factory=list)
    """Rose's switches, and ``run_ahead``; inside vLLM also ``mixed_graphs``, ``drafts``, and ``step_budget``, which is
    off by default and switched on."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Options in the engine's own words."""


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
    chosen: dict[str, Any] = dict.fromkeys(options.switches_off, False)
    if "run_ahead" in chosen:
        chosen["run_ahead"] = 0
    if options.kv_cache_tokens:
        chosen["num_blocks"] = -(-options.kv_cache_tokens // BLOCK_SIZE) + 1
    chosen.pop(DRAFTS, None)
    extra = dict(options.extra)
    if drafter := _drafter(options, extra):
        extra["speculative_config"] = {
            name: value for name, value in drafter.items() if name not in ACCEPTANCE_FIELDS
        }
    return {
        "model": options.model,
        "dtype": options.dtype,
        "device": options.device,
        "max_num_seqs": options.max_num_seqs,
        "block_size": BLOCK_SIZE,
        **chosen,
        **extra,
    }


def _drafter(options: EngineOptions, extra: dict[str, Any]) -> dict[str, Any] | None:
    """Take ``speculative_config`` out of ``extra``, with the path of a head that is written here; None: no drafts."""
    drafter: dict[str, Any] | None = extra.pop("speculative_config", None)
    if drafter is None or DRAFTS in options.switches_off:
        return None
    is_written_here = drafter.get("model") == EAGLE3_HEAD
    return drafter | ({"model": str(Path(options.model, EAGLE3_HEAD))} if is_written_here else {})


def acceptance_rates(drafter: Mapping[str, Any]) -> list[float] | None:
    """Return how often the draft in each place is to be accepted, as vLLM reads it; None: where it is right."""
    if drafter.get("rejection_sample_method") != "synthetic":
        return None
    if (rates := drafter.get("synthetic_acceptance_rates")) is not None:
        return list(rates)
    mean = drafter["synthetic_acceptance_length"] - 1
    return [min(max(mean - place, 0.0), 1.0) for place in range(drafter["num_speculative_tokens"])]


def accept_at(rates: Iterable[Any]) -> None:
    """Let engines of Rose without vLLM accept drafts at ``rates``, whatever they are, as vLLM's ``synthetic`` does.

    Args:
        rates: of each place; numbers, or a tensor on the engines' device, to which others may be written later.
    """
    import torch

    from rose_backend.engine.drafts import Drafts

    accept = Drafts.accept

    def accept_at_rates(self: Drafts, drawn: Any, drafts: Any, rows: Any, *rest: Any) -> None:
        if drafts.shape[1]:
            # A hash of 32 bits of each position of each slot, so that a replayed step decides anew.
            mixed = rows.positions * 0x9E3779B1 + rows.slots * 0x85EBCA77 & 0xFFFFFFFF
            mixed = (mixed ^ mixed >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
            chance = (mixed ^ mixed >> 12) / 2**32
            is_right = torch.stack([chance < rate for rate in islice(rates, drafts.shape[1])], 1)
            drafts = torch.where(is_right, drawn.view(len(drafts), -1)[:, :-1], -1)
        accept(self, drawn, drafts, rows, *rest)

    Drafts.accept = accept_at_rates  # type: ignore[method-assign]


def vllm_options(options: EngineOptions) -> dict[str, Any]:
    """Return vLLM's engine arguments. Where the size of the KV cache is given, nothing is measured at start-up."""
    chosen: dict[str, Any] = {}
    if options.backend == "rose-in-vllm":
        chosen["attention_backend"] = "rose"
    elif options.device == "cuda":  # for CPUs vLLM has one only, and names it itself
        chosen["attention_backend"] = "FLASH_ATTN"
    switches = [name for name in options.switches_off if name not in ("run_ahead", "mixed_graphs", DRAFTS)]
    extra = dict(options.extra)
    if drafter := _drafter(options, extra):
        extra["speculative_config"] = drafter
    if switches:
        changed = {name: "auto" if name == STEP_BUDGET else False for name in switches}
        # Here, too.
        given = extra.pop("additional_config", {})
        chosen["additional_config"] = {**given, "rose": {**given.get("rose", {}), **changed}}
    if "run_ahead" in options.switches_off:
        chosen["async_scheduling"] = False
    if "mixed_graphs" in options.switches_off:
        # vLLM's own default; Rose keeps a mode that is set explicitly.
        chosen["compilation_config"] = {"cudagraph_mode": "FULL_AND_PIECEWISE"}
    if options.kv_cache_bytes:
        chosen["kv_cache_memory_bytes"] = options.kv_cache_bytes
        # Only checked against free memory, of which other engines on the same device have taken their part.
        chosen["gpu_memory_utilization"] = 0.05
    return {
        "model": options.model,
        "dtype": options.dtype,
        "max_num_seqs": options.max_num_seqs,
        **chosen,
        **extra,
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


def _check_output(num_tokens: int, requests: Requests) -> None:
    """Raise unless every token that was asked for has come."""
    if num_tokens != sum(requests.output_lens):
        raise RuntimeError(f"got {num_tokens} new tokens, {sum(requests.output_lens)} were asked for")


@dataclass(frozen=True)
class Answer:
    """To one prompt."""

    token_ids: list[int]
    logprobs: list[dict[int, float]]
    """Of each token and the most likely ones in its place."""
    num_cached_tokens: int
    """Of the prompt, as the engine reports them."""


class Offline:
    """Takes all prompts in one call. A subclass's ``generate`` returns the number of new tokens."""

    facts: dict[str, Any]
    generate: Any
    _llm: Any
    _params: Any

    def run(self, requests: Requests, sampling: Sampling) -> dict[str, Any]:
        """Return seconds and the number of new tokens."""
        start = time.perf_counter()
        output_tokens = self.generate(requests.prompts, requests.output_lens, sampling)
        seconds = time.perf_counter() - start
        _check_output(output_tokens, requests)
        return {"seconds": seconds, "output_tokens": output_tokens}

    def answer(self, prompt: list[int], salt: str, num_tokens: int, sampling: Sampling) -> Answer:
        """Return the answer to one prompt that shares cached prefixes with prompts of the same salt, of Rose or vLLM.

        ``sampling`` asks for log-probabilities.
        """
        params = self._params(max_tokens=num_tokens, ignore_eos=True, **sampling)
        (output,) = self._llm.generate([{"prompt_token_ids": prompt, "cache_salt": salt}], [params])
        completion = output.outputs[0]
        logprobs = [{token: each.logprob for token, each in at.items()} for at in completion.logprobs]
        return Answer(list(completion.token_ids), logprobs, int(output.num_cached_tokens))


class Rose(Offline):
    """Rose without vLLM."""

    def __init__(self, options: EngineOptions) -> None:
        from rose_backend import LLM, SamplingParams, __version__

        rates = acceptance_rates(options.extra.get("speculative_config") or {})
        if rates is not None:
            accept_at(rates)
        self._params, self._llm = SamplingParams, LLM(**rose_options(options))
        self.facts = {"version": __version__, "parts": self._llm.core.feature_status}

    def generate(self, prompts: list[list[int]], output_lens: list[int], sampling: Sampling) -> int:
        params = [self._params(max_tokens=length, ignore_eos=True, **sampling) for length in output_lens]
        outputs = self._llm.generate(prompts, params)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def kv_cache_tokens(self) -> int:
        """Return how many tokens the KV cache holds."""
        return int(self._llm.core.num_blocks - 1) * BLOCK_SIZE

    def close(self) -> None:
        self._llm.core.check_integrity()
        self._llm.close()


class Vllm(Offline):
    """vLLM's ``LLM``; Rose inside with the attention backend "rose"."""

    def __init__(self, options: EngineOptions) -> None:
        from vllm import LLM, SamplingParams

        self._params, self._llm = SamplingParams, LLM(**vllm_options(options))
        self.facts = _vllm_facts(self._llm.llm_engine.vllm_config)

    def generate(self, prompts: list[list[int]], output_lens: list[int], sampling: Sampling) -> int:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = [self._params(max_tokens=length, ignore_eos=True, **sampling) for length in output_lens]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def kv_cache_tokens(self) -> int:
        """Return how many tokens the KV cache holds."""
        cache = self._llm.llm_engine.vllm_config.cache_config
        return int(cache.num_gpu_blocks - 1) * int(cache.block_size)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class Sglang(Offline):
    """SGLang's ``Engine``."""

    def __init__(self, options: EngineOptions) -> None:
        from sglang import __version__
        from sglang.srt.entrypoints.engine import Engine

        fields = sglang_options(options)
        kept = ("attention_backend", "cuda_graph_max_bs_decode", "mem_fraction_static")
        self.facts = {"version": __version__, **{name: fields.get(name) for name in kept}}
        self._engine = Engine(**fields)

    def generate(self, prompts: list[list[int]], output_lens: list[int], sampling: Sampling) -> int:
        params = [{"max_new_tokens": length, "ignore_eos": True, **sampling} for length in output_lens]
        outputs = self._engine.generate(input_ids=prompts, sampling_params=params)
        return sum(output["meta_info"]["completion_tokens"] for output in outputs)

    def close(self) -> None:
        self._engine.shutdown()


class Streaming:
    """Serves many callers on one event loop, where subclasses ``make`` and ``shut_down`` their engine.

    Their ``stream`` yields numbers of new tokens as they come.
    """

    facts: dict[str, Any]
    make: Any
    shut_down: Any
    stream: Any
    new_runner: Any = asyncio.Runner

    def __init__(self, options: EngineOptions) -> None:
        self._runner = self.new_runner()
        self._run(self.make(options))

    async def rest(self) -> None:
        """Return when the event loop may stand still until the next command."""

    def _run(self, job: Coroutine[Any, Any, Any]) -> Any:
        async def job_and_rest() -> Any:
            answer = await job
            await self.rest()
            return answer

        return self._runner.run(job_and_rest())

    def run(self, requests: Requests, sampling: Sampling) -> dict[str, Any]:
        """Return figures as ``vllm bench serve`` names them."""
        send = sender(partial(self.stream, sampling=sampling))
        timelines, duration = self._run(play(send, requests))
        _check_output(sum(timeline.num_tokens for timeline in timelines), requests)
        return summary(timelines, duration)

    def hold(self, streams: HeldStreams, sampling: Sampling) -> dict[str, Any]:
        """Return what callers saw of streams and of what arrived meanwhile; see ``hold_streams``."""
        answer: dict[str, Any] = self._run(hold_streams(partial(self.stream, sampling=sampling), streams))
        return answer

    def close(self) -> None:
        self._runner.run(self.shut_down())
        self._runner.close()


class RoseStreams(Streaming):
    """Rose's ``AsyncEngine``."""

    async def make(self, options: EngineOptions) -> None:
        from rose_backend import AsyncEngine, SamplingParams, __version__

        self._params, self._engine = SamplingParams, AsyncEngine(**rose_options(options))
        self.facts = {"version": __version__, "parts": self._engine.feature_status}

    async def stream(
        self, prompt: list[int], output_len: int, sampling: Sampling
    ) -> AsyncGenerator[int, None]:
        params = self._params(max_tokens=output_len, ignore_eos=True, **sampling)
        seen = 0
        async for output in self._engine.generate(prompt, params):
            total = len(output.outputs[0].token_ids)
            yield total - seen
            seen = total

    async def shut_down(self) -> None:
        await self._engine.shutdown()


def _server_runner() -> asyncio.Runner:
    """Return what runs the event loop that both servers have, uvloop's."""
    import uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def _server_facts(max_num_batched_tokens: int) -> dict[str, Any]:
    loop = type(asyncio.get_running_loop()).__module__
    return {"max_num_batched_tokens": max_num_batched_tokens, "event_loop": loop}


class RoseServing(Streaming):
    """Rose's ``RemoteEngine``, as ``rose serve`` has it: the engine in a process of its own, answers as what is new."""

    new_runner = staticmethod(_server_runner)

    async def make(self, options: EngineOptions) -> None:
        from rose_backend import EngineConfig, SamplingParams, __version__
        from rose_backend.engine.remote_engine import RemoteEngine

        config = EngineConfig.from_mapping(rose_options(options), source="benchmark")
        self._params, self._engine = SamplingParams, RemoteEngine(config, lambda tokenizer: None)
        await self._engine.start()
        self.facts = {"version": __version__, **_server_facts(self._engine.config.token_budget)}

    async def stream(
        self, prompt: list[int], output_len: int, sampling: Sampling
    ) -> AsyncGenerator[int, None]:
        params = self._params(max_tokens=output_len, ignore_eos=True, **sampling)
        checked = self._engine.input_processor.process(prompt, params)
        async with aclosing(self._engine.generate_deltas(checked, request_id=None)) as outputs:
            async for output in outputs:
                yield len(output.outputs[0].token_ids)

    async def rest(self) -> None:
        # A heartbeat that the loop sends and does not read would make the engine look stalled later on. This answer
        # comes behind the heartbeat's.
        await self._engine.counters()

    async def shut_down(self) -> None:
        await self._engine.shutdown()


class VllmStreams(Streaming):
    """vLLM's ``AsyncLLM``; Rose inside with the attention backend "rose"."""

    usage = "ENGINE_CONTEXT"
    """vLLM's name of what it is used for, by which it chooses how many tokens a step may have."""

    async def make(self, options: EngineOptions) -> None:
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        self._params, self._delta = SamplingParams, RequestOutputKind.DELTA
        arguments = AsyncEngineArgs(**vllm_options(options))
        self._engine = AsyncLLM.from_engine_args(arguments, usage_context=UsageContext[self.usage])
        self._num_requests = 0
        self.facts = _vllm_facts(self._engine.vllm_config)

    async def stream(
        self, prompt: list[int], output_len: int, sampling: Sampling
    ) -> AsyncGenerator[int, None]:
        params = self._params(max_tokens=output_len, ignore_eos=True, output_kind=self._delta, **sampling)
        self._num_requests += 1
        generate = self._engine.generate({"prompt_token_ids": prompt}, params, str(self._num_requests))
        async with aclosing(generate) as outputs:
            async for output in outputs:
                yield len(output.outputs[0].token_ids)

    async def shut_down(self) -> None:
        self._engine.shutdown()


class VllmRanks(VllmStreams):
    """Several engines with requests shared out among them (data parallel), which vLLM's ``LLM`` has not."""

    def run(self, requests: Requests, sampling: Sampling) -> dict[str, Any]:
        """Return seconds and the number of new tokens, as ``Offline`` does."""
        figures = super().run(requests, sampling)
        return {"seconds": figures["duration"], "output_tokens": figures["total_output_tokens"]}


def _offline_vllm(options: EngineOptions) -> Vllm | VllmRanks:
    return (VllmRanks if options.extra.get("data_parallel_size", 1) > 1 else Vllm)(options)


class VllmServing(VllmStreams):
    """The same with the steps and the event loop of ``vllm serve``."""

    usage = "OPENAI_API_SERVER"
    new_runner = staticmethod(_server_runner)

    async def make(self, options: EngineOptions) -> None:
        await super().make(options)
        self.facts |= _server_facts(self._engine.vllm_config.scheduler_config.max_num_batched_tokens)


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


ENGINES: dict[str, dict[str, Callable[[EngineOptions], Any]]] = {
    "offline": {"rose": Rose, "rose-in-vllm": _offline_vllm, "vllm": _offline_vllm, "sglang": Sglang},
    "streaming": {"rose": RoseStreams, "rose-in-vllm": VllmStreams, "vllm": VllmStreams},
    "serving": {"rose": RoseServing, "rose-in-vllm": VllmServing, "vllm": VllmServing},
}
