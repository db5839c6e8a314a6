"""benchmarks/support/step_bytes.py: counts agree with those made by hand, and with a loaded engine."""

from __future__ import annotations

import pytest

from benchmarks import step_profile
from benchmarks.support.checkpoint import (
    GPT_OSS_20B,
    LLAMA_8B,
    LLAMA_8B_AWQ,
    QWEN3_06B,
    QWEN3_8B_FP8,
    QWEN3_30B,
    QWEN3_30B_FP8,
    QWEN35_4B,
    checkpoint,
    config_of,
)
from benchmarks.support.step_bytes import bytes_of_config, bytes_of_shape, expert_share
from rose_backend import LLM

# Numbers of a layer's products: query, key, value and output; gate, up and down.
LLAMA_8B_PRODUCTS = (2 * 4096 + 2 * 1024) * 4096 + 3 * 4096 * 14_336
QWEN3_8B_PRODUCTS = (2 * 4096 + 2 * 1024) * 4096 + 3 * 4096 * 12_288
QWEN3_30B_ATTENTION = (2 * 4096 + 2 * 512) * 2048
QWEN3_30B_EXPERT = 3 * 2048 * 768
LLAMA_8B_HEAD, QWEN3_8B_HEAD, QWEN3_30B_HEAD = 128_256 * 4096, 151_936 * 4096, 151_936 * 2048


def test_a_dense_model_reads_products_norms_and_head() -> None:
    counted = bytes_of_shape(LLAMA_8B, "bfloat16")
    norms = (2 * 32 + 1) * 4096
    assert counted.weights == 2 * (32 * LLAMA_8B_PRODUCTS + norms + LLAMA_8B_HEAD)
    assert (counted.experts, counted.state_bytes) == (0, 0)
    # Eight heads of keys and values.
    assert counted.of(3, 100) == counted.weights + 3 * 100 * 32 * 2 * 8 * 128 * 2


def test_a_table_that_is_the_head_too_counts_once() -> None:
    products = (2 * 2048 + 2 * 1024) * 1024 + 3 * 1024 * 3072
    norms = 28 * (2 * 1024 + 2 * 128) + 1024
    assert bytes_of_shape(QWEN3_06B, "bfloat16").weights == 2 * (28 * products + norms + 151_936 * 1024)


def test_float8_weights_have_a_scale_for_each_block() -> None:
    scales = 2 * QWEN3_8B_PRODUCTS // 128**2
    norms = 2 * (36 * (2 * 4096 + 2 * 128) + 4096)
    counted = bytes_of_shape(QWEN3_8B_FP8, "bfloat16")
    assert counted.weights == 36 * (QWEN3_8B_PRODUCTS + scales) + norms + 2 * QWEN3_8B_HEAD


def test_int4_weights_have_scales_and_zeros() -> None:
    codes, scales, zeros = (
        LLAMA_8B_PRODUCTS // 2,
        2 * LLAMA_8B_PRODUCTS // 128,
        LLAMA_8B_PRODUCTS // 128 // 2,
    )
    norms = 2 * (2 * 32 + 1) * 4096
    counted = bytes_of_shape(LLAMA_8B_AWQ, "bfloat16")
    assert counted.weights == 32 * (codes + scales + zeros) + norms + 2 * LLAMA_8B_HEAD


def test_a_step_reads_the_experts_that_its_tokens_draw() -> None:
    counted, float8 = (bytes_of_shape(shape, "bfloat16") for shape in (QWEN3_30B, QWEN3_30B_FP8))
    router, norms = 128 * 2048, 2 * 2048 + 2 * 128
    assert counted.weights == 2 * (48 * (QWEN3_30B_ATTENTION + router + norms) + 2048 + QWEN3_30B_HEAD)
    assert counted.experts == 2 * 48 * 128 * QWEN3_30B_EXPERT
    assert float8.experts == 48 * 128 * (QWEN3_30B_EXPERT + 2 * QWEN3_30B_EXPERT // 128**2)
    # One token takes 8 of 128; of a second one's 8 experts, 8 * 120 / 128 are new on average.
    assert counted.of(1, 0) == counted.weights + counted.experts * 8 / 128
    assert 128 * expert_share(128, 8, 2) == pytest.approx(8 + 8 * 120 / 128)


def test_a_layer_reads_no_more_tokens_than_its_window_and_writes_its_state() -> None:
    windows = bytes_of_shape(GPT_OSS_20B, "bfloat16")
    assert windows.of(1, 1000) - windows.of(1, 100) == 2 * 8 * 64 * 2 * (12 * 900 + 12 * 28)
    states = bytes_of_shape(QWEN35_4B, "bfloat16")
    # Of each head of values a matrix, and three inputs of the convolution.
    state = 24 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)) * 2
    assert states.of(2, 10) == states.weights + 2 * (2 * state + 10 * 8 * 2 * 4 * 256 * 2)


@pytest.mark.usefixtures("serves_nobody")
@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN3_30B])
def test_an_engine_has_loaded_what_is_counted(shape: str) -> None:
    counted = bytes_of_config(config_of(shape, small=True), "float32", None)
    with checkpoint(None, shape, small=True) as model, LLM(model, device="cpu", dtype="float32") as llm:
        weights = llm.core._runner._model.weights
        head, norm = weights.padded_lm_head, 4 * weights.padded_lm_head.shape[1]
        padding = head.nbytes - 4 * 1000 * head.shape[1]
        for batch in (1, 3):
            loaded = step_profile.step_bytes(llm, batch, batch * 7)
            assert loaded - padding == pytest.approx(counted.of(batch, 7) - norm, abs=1)
