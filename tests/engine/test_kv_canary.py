"""``kv_canary``: sound engines pass, and each of four planted faults is found."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rose_backend import LLM, SamplingParams
from rose_backend.block_manager.canary import CHECK_INTERVAL
from rose_backend.config import EngineConfig, PluginConfig
from rose_backend.engine.model_runner import Chunks, ModelRunner
from rose_backend.errors import ConfigError, EngineDeadError
from rose_backend.kernels.kv.canary import _token_sums

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Plant = Callable[[ModelRunner], None]


def make(path: Path, mode: str, device: str, **options: Any) -> LLM:
    sizes = {"block_size": 16, "num_blocks": 96, "max_num_seqs": 4, "max_num_batched_tokens": 48}
    return LLM(str(path), device=device, kv_canary=mode, max_model_len=256, **{**sizes, **options})


def serve(llm: LLM, seed: int = 0) -> list[list[int]]:
    tokens = np.random.default_rng(seed).integers(1, 2559, (6, 70))
    prompts = [{"prompt_token_ids": row} for row in tokens.tolist()]
    params = SamplingParams(temperature=0.0, max_tokens=3 * CHECK_INTERVAL, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def plant(monkeypatch: pytest.MonkeyPatch, fault: Plant, *, at_step: int) -> None:
    """Let ``fault`` happen once, after that many passes have run."""
    forward, num_steps = ModelRunner.watch, 0

    def watch(runner: ModelRunner, clones: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == at_step:
            fault(runner)
        forward(runner, clones)

    monkeypatch.setattr(ModelRunner, "watch", watch)


def held_block(runner: ModelRunner) -> int:
    pool = runner._manager.pool
    return int(np.flatnonzero((pool.num_written_tokens == 16) & (pool.ref_counts > 0))[0])


def write(runner: ModelRunner, block: int, token: int) -> None:
    with torch.inference_mode():
        runner._kv_cache[-1, 0, block, token, 0, 0] += 1.0


def write_into_a_held_block(runner: ModelRunner) -> None:
    write(runner, held_block(runner), 3)


def write_into_a_free_block(runner: ModelRunner) -> None:
    block = int(runner._manager.pool.free_blocks()[0])
    assert bool(runner._kv_cache[0, 0, block].isnan().all())
    with torch.inference_mode():
        runner._kv_cache[-1, 1, block, 0, 0, 0] = 1.0


def write_past_a_block(runner: ModelRunner) -> None:
    """Write what comes right after a row's block in memory: the first token of the block with the next id."""
    pool = runner._manager.pool
    written = (pool.num_written_tokens[1:] > 0) & (pool.ref_counts[1:] > 0)
    write(runner, int(np.flatnonzero(written)[0]) + 1, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (write_into_a_held_block, "is committed"),
        (write_past_a_block, "is committed"),
        (write_into_a_free_block, "its block is free"),
    ],
)
def test_writes_that_nobody_may_make(
    tiny_model_path: Path, device: str, fault: Plant, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, fault, at_step=2 * CHECK_INTERVAL + 5)
    with pytest.raises(EngineDeadError, match=rf"KV canary: token \d+ of block \d+ .*{text}"):
        serve(make(tiny_model_path, "raise", device))


@pytest.mark.parametrize("device", DEVICES)
def test_a_free_block_that_is_read(
    tiny_model_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(tiny_model_path, "raise", device)
    serve(llm)  # until free blocks are poisoned
    make_chunks, pool = ModelRunner._make_chunks, llm.core.manager.pool

    def read_free_block(runner: ModelRunner, *args: Any) -> Chunks:
        chunks = make_chunks(runner, *args)
        table, is_later = chunks.inputs.block_table.copy(), chunks.inputs.num_computed_tokens >= 16
        table[is_later, 0] = pool.free_blocks()[0]
        return replace(chunks, inputs=chunks.inputs._replace(block_table=table))

    monkeypatch.setattr(ModelRunner, "_make_chunks", read_free_block)
    with pytest.raises(EngineDeadError, match=r"KV canary: token \d+ of block \d+ holds NaN"):
        serve(llm, seed=100)


@pytest.mark.parametrize("device", DEVICES)
def test_log_goes_on_and_counts(
    tiny_model_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plant(monkeypatch, write_into_a_free_block, at_step=2 * CHECK_INTERVAL + 5)
    with caplog.at_level(logging.ERROR):
        answers = serve(make(tiny_model_path, "log", device))
    assert answers == serve(make(tiny_model_path, "off", device))
    assert "its block is free" in caplog.text and "since start-up" in caplog.text


@pytest.mark.parametrize("device", DEVICES)
def test_sound_engines_pass_and_answer_the_same(tiny_model_path: Path, device: str) -> None:
    answers = []
    for mode in ("raise", "off"):
        llm = make(tiny_model_path, mode, device)
        # Hits, part-filled blocks that are copied, and blocks that were poisoned and cleared. A hit changes the chunks
        # of a prompt, and with them last bits on a GPU: answers are compared with those to the same hits.
        answers.append([serve(llm, seed) for seed in (0, 0, 50)])
        assert llm.core.stats.clones > 0
    assert answers[0] == answers[1]


def test_modes_that_are_none() -> None:
    for make_config in (PluginConfig, lambda **options: EngineConfig(model="m", **options)):
        with pytest.raises(ConfigError, match="kv_canary: got 'on', allowed are off, log, raise"):
            make_config(kv_canary="on")
    drafts = {"method": "eagle3", "model": "head", "num_speculative_tokens": 2}
    with pytest.raises(
        ConfigError, match="kv_canary: got 'log', allowed is off with drafts of an EAGLE head"
    ):
        EngineConfig(model="m", kv_canary="log", speculative_config=drafts)


def test_a_check_copies_no_cache() -> None:
    """A KV pool leaves no room for that. Of half precision torch makes a copy on a CPU alone."""
    cache = torch.randn(512, 16, 4, 32)
    with torch.profiler.profile(profile_memory=True) as profiled:
        _token_sums([cache])
    most = max(event.cpu_memory_usage for event in profiled.key_averages())
    assert 0 < most < cache.nbytes // 8


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_check_copies_no_cache_on_a_gpu(dtype: torch.dtype) -> None:
    cache = torch.randn(4096, 16, 8, 128, device="cuda").to(dtype)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _token_sums([cache])
    assert torch.cuda.max_memory_allocated() - before < cache.nbytes // 8
