"""Streams from an engine on a GPU: steps run ahead, requests come at any time; the same text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose_backend import LLM, AsyncEngine, RequestOutput
from tests.support.crowd import crowd

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "num_blocks": 3000, "max_num_seqs": 64}
NUM_REQUESTS = 120


@pytest.fixture(scope="module")
def expected(tiny_model_path: Path) -> Iterator[list[RequestOutput]]:
    with LLM(str(tiny_model_path), **OPTIONS) as llm:
        yield llm.generate(*crowd(NUM_REQUESTS, seed=21))


@pytest.mark.parametrize("options", [{}, {"run_ahead": 0}, {"run_ahead": 3}, {"num_blocks": 200}], ids=str)
def test_streams_of_a_crowd(
    tiny_model_path: Path, expected: list[RequestOutput], options: dict[str, Any]
) -> None:
    prompts, params = crowd(NUM_REQUESTS, seed=21)

    async def one(engine: AsyncEngine, index: int) -> list[RequestOutput]:
        await asyncio.sleep(0.003 * index)
        return [output async for output in engine.generate(prompts[index], params[index])]

    async def body() -> list[list[RequestOutput]]:
        engine = AsyncEngine(str(tiny_model_path), **{**OPTIONS, **options})
        streams = await asyncio.gather(*(one(engine, index) for index in range(NUM_REQUESTS)))
        while engine._core.num_unfinished:
            await asyncio.sleep(0.01)
        engine._core.check_integrity()
        assert engine._core.manager.num_free_blocks == engine._core.manager.num_usable_blocks
        counted = engine.stats.generated_tokens
        await engine.shutdown()
        shown = [completion.token_ids for stream in streams for completion in stream[-1].outputs]
        assert counted == sum(map(len, shown))
        return streams

    for stream, final in zip(asyncio.run(body()), expected, strict=True):
        for index, completion in enumerate(final.outputs):
            last = stream[-1].outputs[index]
            assert (last.token_ids, last.text) == (completion.token_ids, completion.text)
            assert (last.finish_reason, last.stop_reason) == (
                completion.finish_reason,
                completion.stop_reason,
            )
            pieces = [output.outputs[index] for output in stream if len(output.outputs) > index]
            assert "".join(piece.delta_text for piece in pieces) == completion.text
