"""The size of the KV pool, and its memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rose_backend.config import SWITCH_NAMES, EngineConfig, Switches
from rose_backend.engine.kv_pool import (
    allocate_kv_cache,
    block_bytes,
    choose_num_blocks,
    gpu_reserve_bytes,
)
from rose_backend.engine.startup import feature_status
from rose_backend.errors import ConfigError
from rose_backend.models.config import ModelConfig
from rose_backend.models.quantization import Float8Quantization


def model_config(layers: int, heads: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> ModelConfig:
    fields = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * head_size,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
    }
    return ModelConfig.from_hf(fields, names={"norm_eps": "norm_eps"}, dtype=dtype, device="cpu")


MODEL = model_config(2, 2, 2, 64, torch.float32)
GPT2_124M = model_config(12, 12, 12, 64, torch.float16)
GROUPED = model_config(2, 6, 3, 8, torch.bfloat16)


def choose(model: ModelConfig = MODEL, device: str = "cpu", **options: Any) -> int:
    return choose_num_blocks(
        EngineConfig(model="m", **options),
        model,
        max_model_len=1024,
        device=torch.device(device),
    )


def test_never_more_than_all_sequences_can_use() -> None:
    assert choose(max_num_seqs=3) == 3 * 64 + 1


def test_cpu_space_is_the_limit() -> None:
    assert block_bytes(MODEL, 16) == 2 * 2 * 16 * 2 * 64 * 4
    assert choose(cpu_kvcache_space_gib=0.125) == (1 << 27) // block_bytes(MODEL, 16)


def test_given_number_is_taken_as_it_is() -> None:
    assert choose(num_blocks=65) == 65
    with pytest.raises(ConfigError, match=r"num_blocks: a pool of 64 blocks .* needs num_blocks 65 "):
        choose(num_blocks=64)


def test_gpu_pool_leaves_room_for_what_is_used_and_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    total, free = 10 << 30, 9 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    options: dict[str, Any] = {"max_num_seqs": 10_000, "max_num_batched_tokens": 4096}
    reserve = gpu_reserve_bytes(EngineConfig(model="m", **options), GPT2_124M)
    logits, penalties = 4096 * 512 * 24, (10_000 + 4096) * 512 * 5
    processors = 10_000 * ((26 << 10) + 512 // 4)
    assert reserve == 2 * 4096 * 768 * 11 * 2 + logits + penalties + processors + (256 << 20)
    quantized = replace(GPT2_124M, quantization=Float8Quantization("rows", "weight_scale"))
    assert gpu_reserve_bytes(EngineConfig(model="m", **options), quantized) == reserve + (64 << 20)
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    of_head = {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
    looked_up, asked = (
        gpu_reserve_bytes(EngineConfig(model="m", speculative_config=each, **options), GPT2_124M)
        for each in (drafts, of_head)
    )
    assert asked - looked_up == (2 * 4096 * 16 + 10_001) * 768 * 2
    expected = (int(total * 0.5) - (total - free) - reserve) // block_bytes(GPT2_124M, 16)
    assert choose(GPT2_124M, "cuda", gpu_memory_utilization=0.5, **options) == expected
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization: a pool of 0 blocks"):
        choose(GPT2_124M, "cuda", gpu_memory_utilization=0.05, **options)


@pytest.mark.parametrize("model", [MODEL, GROUPED], ids=["float32", "grouped heads"])
def test_cpu_pool_is_zero(model: ModelConfig) -> None:
    pool = allocate_kv_cache(5, 4, model, torch.device("cpu"))
    assert pool.shape == (2, 2, 5, 4, model.num_kv_heads, model.head_size)
    assert pool.dtype == model.dtype
    assert pool.nbytes == 5 * block_bytes(model, 4)
    assert not pool.any()


def test_feature_status_are_told_honestly() -> None:
    assert feature_status(Switches(), "cpu")["cuda_graph"] == "unavailable (device is cpu)"
    assert feature_status(Switches(), "cuda")["cuda_graph"] == "on"
    unfused = feature_status(Switches(fused_sampler=False), "cuda")
    assert unfused["cuda_graph"] == "unavailable (fused_sampler is off)"
    uncached = feature_status(Switches(prefix_cache=False), "cpu")
    assert uncached["token_granular_hits"] == "unavailable (prefix_cache is off)"
    for name in SWITCH_NAMES:
        parts = feature_status(Switches(**{name: False}), "cuda")
        assert set(parts) == set(SWITCH_NAMES)
        assert [other for other in SWITCH_NAMES if parts[other] == "off"] == [name]
