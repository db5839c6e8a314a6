"""Rotary tables are transformers', number for number; what config.json may say of them, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rose_backend.errors import ModelError
from rose_backend.models.rope import read_rotary_options, rotary_table

HEAD_SIZE, WINDOW = 64, 4096
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "llama3-whole-window": {**LLAMA3, "original_max_position_embeddings": None},
    "yarn": YARN,
    "yarn-own-attention-factor": {**YARN, "attention_factor": 1.3},
    "yarn-other-bounds": {**YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn-untruncated": {**YARN, "truncate": False},
    "yarn-no-ramp": {**YARN, "beta_fast": 1e-9, "beta_slow": 1e-9},
}


@pytest.mark.parametrize("theta", [10_000.0, 5_000_000])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_are_those_of_transformers(name: str, theta: float) -> None:
    scaling = {key: value for key, value in (SCALINGS[name] or {}).items() if value is not None}
    config = LlamaConfig(
        hidden_size=4 * HEAD_SIZE,
        num_attention_heads=4,
        max_position_embeddings=WINDOW,
        rope_parameters={"rope_theta": theta, "rope_type": "default", **scaling},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(WINDOW)[None])
    half = HEAD_SIZE // 2
    expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
    layouts: list[dict[str, Any]] = [
        {"rope_theta": theta, "rope_scaling": scaling or None},
        {"rope_parameters": {"rope_theta": theta, **scaling}},
    ]
    for fields in layouts:
        options = read_rotary_options(fields, max_position_embeddings=WINDOW)
        table = rotary_table(options, HEAD_SIZE, WINDOW, torch.device("cpu"))
        assert table.dtype == torch.float32 and table.shape == (WINDOW, HEAD_SIZE)
        # Bit for bit but for cosines of other vector lanes.
        torch.testing.assert_close(table, expected, rtol=0, atol=2e-7)


def test_older_and_emptier_configs() -> None:
    def theta_and_type(fields: dict[str, Any]) -> tuple[float, str]:
        options = read_rotary_options(fields, max_position_embeddings=WINDOW)
        return options.rope_theta, options.rope_type

    assert theta_and_type({}) == (10_000.0, "default")
    assert theta_and_type({"rope_scaling": {"type": "linear", "factor": 2}}) == (10_000.0, "linear")
    assert theta_and_type({"rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}}) == (
        7.0,
        "default",
    )
    both = {"rope_scaling": YARN, "rope_parameters": YARN}
    assert theta_and_type(both) == (10_000.0, "yarn")
    old_window = read_rotary_options(
        {"rope_scaling": YARN, "original_max_position_embeddings": 2048}, max_position_embeddings=WINDOW
    ).original_max_position_embeddings
    assert old_window == 2048


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling.rope_type='dynamic' is not supported",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}},
            "rope_parameters.rope_type='longrope' is not supported, allowed are default, linear, llama3, yarn",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "rope_scaling.low_freq_factor is missing"),
        (
            {"rope_scaling": {**YARN, "mscale": 1.0}},
            "rope_scaling.mscale is not supported with rope_type 'yarn'",
        ),
        (
            {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
            "high_freq_factor must be above low_freq_factor",
        ),
        ({"rope_scaling": {**YARN, "factor": "4"}}, "rope_scaling.factor must be a number above 0, got '4'"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "rope_scaling.truncate must be true or false, got 1"),
        ({"rope_theta": -1.0}, "rope_theta must be a number above 1, got -1.0"),
        ({"rope_scaling": {**YARN, "factor": 1e300}}, "rope_scaling.factor must be below 1e+12, got 1e+300"),
        ({"rope_theta": 10**400}, "rope_theta must be below 1e+12, got 1000"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type=['yarn'] is not supported"),
        ({"rope_scaling": YARN, "rope_parameters": LLAMA3}, "rope_parameters and rope_scaling differ"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object, got 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not supported"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters.full_attention, rotation by kind of layer, is not supported",
        ),
    ],
)
def test_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_rotary_options(fields, max_position_embeddings=WINDOW)
    assert message in str(caught.value)
