"""The engines that serve the counting model: Rose's own, and vLLM with Rose inside."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.counting.checkpoint import MAX_MODEL_LEN
from tests.counting.traffic import CountingRequest, Generate, Outcome

BLOCK_SIZE = 16
Counts = dict[str, int]


@dataclass(frozen=True)
class Settings:
    """Of an engine."""

    model: Path
    num_seqs: int = 32
    num_blocks: int = 80
    """Of the KV pool: too few for so many sequences."""
    num_drafts: int = 0
    """Of a request in a step, looked up by single tokens, so that they are often wrong."""
    rose: Mapping[str, Any] = field(default_factory=dict)
    """Further options of Rose's."""

    def __str__(self) -> str:
        return f"{self.num_seqs} sequences, {self.num_blocks} blocks, {self.num_drafts} drafts, {dict(self.rose)}"

    @property
    def shared_options(self) -> dict[str, Any]:
        """Those that both hosts call alike."""
        options: dict[str, Any] = {
            "model": str(self.model),
            "block_size": BLOCK_SIZE,
            "max_num_seqs": self.num_seqs,
            # Prompts are split, and every sequence that decodes fits with its drafts.
            "max_num_batched_tokens": max(256, 2 * self.num_seqs * (self.num_drafts + 1)),
        }
        if self.num_drafts:
            lookup = {"prompt_lookup_max": 1, "prompt_lookup_min": 1}
            drafts = {"method": "ngram", "num_speculative_tokens": self.num_drafts, **lookup}
            options["speculative_config"] = drafts
        return options


def can_sample(host: str, num_drafts: int) -> bool:
    """Whether an engine of "standalone" or "vllm" answers sampled requests as their probabilities say.

    vLLM accepts drafts of sampled requests that it should reject on CPUs, with its own attention backend, too (0.32).
    """
    import torch

    return host == "standalone" or num_drafts == 0 or torch.cuda.is_available()


Serve = Callable[[Generate], Awaitable[Outcome]]
"""Sends requests to an engine that runs."""


async def run_standalone(settings: Settings, serve: Serve) -> tuple[Outcome, Counts]:
    """Start ``rose_backend.AsyncEngine``, serve, and return what came of it and what the engine has counted."""
    from rose_backend import AsyncEngine, SamplingParams

    own = {"num_blocks": settings.num_blocks, "adaptive_drafts": False}
    engine = AsyncEngine(**{**settings.shared_options, **own, **settings.rose})

    async def generate(request: CountingRequest) -> list[list[int]]:
        params = SamplingParams(
            n=request.n, temperature=request.temperature, max_tokens=request.max_tokens, ignore_eos=True
        )
        prompt: Any = {"prompt_token_ids": request.prompt}
        return await _last_tokens(engine.generate(prompt, params))

    try:
        outcome = await serve(generate)
        stats = engine.stats
    finally:
        await engine.shutdown()
    return outcome, {
        "cached tokens": stats.prefix_cache_hits,
        "clones": stats.clones,
        "preemptions": stats.preemptions,
        "drafts": stats.spec_decode_num_draft_tokens,
        "accepted drafts": stats.spec_decode_num_accepted_tokens,
    }


async def run_in_vllm(settings: Settings, serve: Serve) -> tuple[Outcome, Counts]:
    """Do the same with vLLM's ``AsyncLLM`` and ROSE; vLLM counts no clones."""
    import torch
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.reader import get_metrics_snapshot

    arguments = AsyncEngineArgs(
        **settings.shared_options,
        attention_backend="rose",
        num_gpu_blocks_override=settings.num_blocks,
        max_model_len=MAX_MODEL_LEN,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 30,
        additional_config={"rose": {"adaptive_drafts": False, **settings.rose}},
        # vLLM compares it with what is free, although the size of the cache is given.
        gpu_memory_utilization=0.05,
        # On a CPU vLLM takes bfloat16, and compiles.
        **({} if torch.cuda.is_available() else {"dtype": "float32", "enforce_eager": True}),
    )
    engine = AsyncLLM.from_engine_args(arguments)
    numbers = itertools.count()

    async def generate(request: CountingRequest) -> list[list[int]]:
        params = SamplingParams(
            n=request.n,
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt: Any = {"prompt_token_ids": request.prompt}
        return await _last_tokens(engine.generate(prompt, params, str(next(numbers))))

    before = _values(get_metrics_snapshot())
    try:
        outcome = await serve(generate)
        after = _values(get_metrics_snapshot())
    finally:
        engine.shutdown()
    names = {
        "cached tokens": "prefix_cache_hits",
        "preemptions": "num_preemptions",
        "drafts": "spec_decode_num_draft_tokens",
        "accepted drafts": "spec_decode_num_accepted_tokens",
    }
    return outcome, {name: after.get(of, 0) - before.get(of, 0) for name, of in names.items()}


async def _last_tokens(outputs: AsyncIterator[Any]) -> list[list[int]]:
    """Return the tokens of each completion in the last output; the request is aborted if the caller is cancelled."""
    answers: list[list[int]] = []
    async with contextlib.aclosing(outputs) as each_output:  # type: ignore[type-var]
        async for output in each_output:
            answers = [list(each.token_ids) for each in output.outputs]
    return answers


def _values(metrics: list[Any]) -> Counts:
    return {each.name.removeprefix("vllm:"): int(getattr(each, "value", 0)) for each in metrics}
