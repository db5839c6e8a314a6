"""The size of the KV pool, and its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_backend.config import SWITCH_NAMES, EngineConfig, Switches
from rose_backend.engine.kv_pool import KVShape, allocate_kv_cache, choose_num_blocks, gpu_reserve_bytes
from rose_backend.engine.parts import parts_in_force
from rose_backend.errors import ConfigError

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_size=64, dtype=torch.float32)
GPT2_124M = KVShape(num_layers=12, num_kv_heads=12, head_size=64, dtype=torch.float16)


def choose(shape: KVShape = SHAPE, device: str = "cpu", **options: Any) -> int:
    return choose_num_blocks(
        EngineConfig(model="m", **options),
        shape,
        max_model_len=1024,
        vocab_size=512,
        width=128,
        device=torch.device(device),
    )


def test_never_more_than_all_sequences_can_use() -> None:
    assert choose(max_num_seqs=3) == 3 * 64 + 1


def test_cpu_space_is_the_limit() -> None:
    assert SHAPE.block_bytes(16) == 2 * 2 * 16 * 2 * 64 * 4
    assert choose(cpu_kvcache_space_gib=0.125) == (1 << 27) // SHAPE.block_bytes(16)


def test_given_number_is_taken_as_it_is() -> None:
    assert choose(num_blocks=65) == 65
    with pytest.raises(ConfigError, match=r"num_blocks: a pool of 64 blocks .* needs num_blocks 65 "):
        choose(num_blocks=64)


def test_gpu_pool_leaves_room_for_what_is_used_and_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    total, free = 10 << 30, 9 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    options: dict[str, Any] = {"max_num_seqs": 10_000, "max_num_batched_tokens": 4096}
    reserve = gpu_reserve_bytes(
        EngineConfig(model="m", **options), vocab_size=512, width=128, shape=GPT2_124M
    )
    logits, penalties = 4096 * 512 * 24, (10_000 + 4096) * 512 * 5
    assert reserve == 2 * 4096 * 128 * 11 * 2 + logits + penalties + (256 << 20)
    expected = (int(total * 0.5) - (total - free) - reserve) // GPT2_124M.block_bytes(16)
    assert choose(GPT2_124M, "cuda", gpu_memory_utilization=0.5, **options) == expected
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization: a pool of 0 blocks"):
        choose(GPT2_124M, "cuda", gpu_memory_utilization=0.05, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_pool_is_zero(dtype: torch.dtype) -> None:
    shape = KVShape(2, 3, 8, dtype)
    pool = allocate_kv_cache(5, 4, shape, torch.device("cpu"))
    assert pool.shape == (2, 2, 5, 4, 3, 8)
    assert pool.dtype == dtype
    assert pool.nbytes == 5 * shape.block_bytes(4)
    assert not pool.any()


def test_parts_in_force_are_told_honestly() -> None:
    assert parts_in_force(Switches(), "cpu")["cuda_graph"] == "not in force (device is cpu)"
    assert parts_in_force(Switches(), "cuda")["cuda_graph"] == "on"
    unfused = parts_in_force(Switches(fused_sampler=False), "cuda")
    assert unfused["cuda_graph"] == "not in force (fused_sampler is off)"
    uncached = parts_in_force(Switches(prefix_cache=False), "cpu")
    assert uncached["token_granular_hits"] == "not in force (prefix_cache is off)"
    for name in SWITCH_NAMES:
        parts = parts_in_force(Switches(**{name: False}), "cuda")
        assert set(parts) == set(SWITCH_NAMES)
        assert [other for other in SWITCH_NAMES if parts[other] == "off"] == [name]
