"""``kv_canary`` inside vLLM: sound engines pass, and planted faults are found, whatever runs the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from rose_backend.block_manager.canary import CHECK_INTERVAL
from rose_backend.errors import IntegrityError
from rose_backend.kernels.kv.canary import KVCanary
from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadataBuilder
from tests.e2e.conftest import MakeEngine
from tests.support.vllm_engines import generate, manager_of, random_tokens

SIZES: dict[str, Any] = {"num_gpu_blocks_override": 96, "max_num_seqs": 4, "max_num_batched_tokens": 64}
PARAMS = SamplingParams(temperature=0.0, max_tokens=3 * CHECK_INTERVAL, ignore_eos=True)


def serve(llm: Any, seed: int) -> list[list[int]]:
    prompts = [random_tokens(70, seed + index) for index in range(6)]
    return [list(output.outputs[0].token_ids) for output in generate(llm, prompts, PARAMS)]


def options(mode: str) -> dict[str, Any]:
    return {**SIZES, "additional_config": {"rose": {"kv_canary": mode}}}


def test_sound_engines_pass_and_answer_the_same(make_engine: MakeEngine) -> None:
    answers = []
    for mode in ("raise", "off"):
        with make_engine(**options(mode)) as llm:
            answers.append([serve(llm, 0), serve(llm, 0), serve(llm, 50)])
            assert manager_of(llm).stats.hit_tokens > 0
    assert answers[0] == answers[1]


def held(pool: Any) -> int:
    return int(np.flatnonzero((pool.num_written_tokens == 16) & (pool.ref_counts > 0))[0])


def free(pool: Any) -> int:
    return int(pool.free_blocks()[0])


@pytest.mark.parametrize(
    ("block_of", "text"), [(held, "although it is committed"), (free, "although its block is free")]
)
def test_writes_that_nobody_may_make(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, block_of: Callable[[Any], int], text: str
) -> None:
    with make_engine(**options("raise")) as llm:
        serve(llm, 0)
        before_step, num_steps = KVCanary.before_step, 0

        def write_once(canary: KVCanary, *plan: Any) -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 2 * CHECK_INTERVAL + 5:
                with torch.inference_mode():
                    canary._caches[-1][block_of(manager_of(llm).pool), 3, 0, 0] = 7.0
            before_step(canary, *plan)

        monkeypatch.setattr(KVCanary, "before_step", write_once)
        with pytest.raises(IntegrityError, match=rf"KV canary: token 3 of block \d+ was written {text}"):
            serve(llm, 100)


@pytest.mark.skipif(torch.cuda.is_available(), reason="graphs read block tables without a call in Python")
def test_a_free_block_that_is_read(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(**options("raise")) as llm:
        serve(llm, 0)
        build = RoseAttentionMetadataBuilder.build

        def read_free_block(*args: Any, **kwargs: Any) -> Any:
            metadata = build(*args, **kwargs)
            metadata.block_table[: metadata.num_decodes, 0] = free(manager_of(llm).pool)
            return metadata

        monkeypatch.setattr(RoseAttentionMetadataBuilder, "build", read_free_block)
        with pytest.raises(IntegrityError, match=r"KV canary: token \d+ of block \d+ holds NaN"):
            serve(llm, 100)
