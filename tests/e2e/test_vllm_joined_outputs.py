"""An API server that cannot keep up with its engine: the same texts from fewer outputs, in a real AsyncLLM."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models import registry
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from rose_backend.vllm_plugin.scheduler import merged_outputs
from tests.support.reference_generation import greedy_differences

NUM_STREAMS, NUM_TOKENS = 12, 60
PROMPTS = tuple(tuple(range(30 + index, 60 + 2 * index)) for index in range(NUM_STREAMS))
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)


def test_streams_of_a_busy_front_end(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # vLLM looks at each kind of model in a process of its own, which imports all of vLLM.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    arguments = AsyncEngineArgs(
        model=str(tiny_model_path),
        attention_backend="rose",
        dtype="float32",
        max_model_len=512,
        block_size=16,
        enforce_eager=True,
        distributed_executor_backend="uni",
    )

    async def with_and_without() -> list[tuple[list[list[int]], int]]:
        engine = AsyncLLM.from_engine_args(arguments)
        try:
            joined = await stream_all(engine)
            monkeypatch.setitem(merged_outputs._MERGES_OUTPUTS, engine.engine_core, False)
            return [joined, await stream_all(engine)]
        finally:
            engine.shutdown()

    (tokens, num_outputs), (tokens_apart, num_outputs_apart) = asyncio.run(with_and_without())
    assert [len(each) for each in tokens] == [NUM_TOKENS] * NUM_STREAMS
    assert greedy_differences(tiny_model_path, PROMPTS, tokens) == []
    assert tokens_apart == tokens
    assert num_outputs < num_outputs_apart == NUM_STREAMS * NUM_TOKENS


async def stream_all(engine: AsyncLLM) -> tuple[list[list[int]], int]:
    """Return the tokens of every stream, and how many outputs vLLM made texts of.

    The front end asks for outputs late, twice: not before several messages of the engine are there.
    """
    process, counts = engine.output_processor.process_outputs, list[int]()
    client = engine.engine_core
    get_output, late = client.get_output_async, {5, 10}

    def count(outputs: list[Any], *rest: Any, **options: Any) -> Any:
        counts.append(len(outputs))
        return process(outputs, *rest, **options)

    async def get_output_late() -> Any:
        if len(counts) in late:
            late.remove(len(counts))
            # The engine has more than 40 steps to go, so these messages are sure to come.
            while client.outputs_queue.qsize() < 4 and not client.resources.engine_dead:
                await asyncio.sleep(0)
        return await get_output()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.output_processor, "process_outputs", count)
        patch.setattr(client, "get_output_async", get_output_late)
        tokens = await asyncio.gather(*(stream(engine, index) for index in range(NUM_STREAMS)))
    return tokens, sum(counts)


async def stream(engine: AsyncLLM, index: int) -> list[int]:
    prompt: Any = {"prompt_token_ids": list(PROMPTS[index])}
    tokens: list[int] = []
    async for output in engine.generate(prompt, PARAMS, request_id=f"{index} of {uuid.uuid4()}"):
        tokens += output.outputs[0].token_ids
    return tokens
