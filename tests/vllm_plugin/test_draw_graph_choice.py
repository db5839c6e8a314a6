"""Which engines with model runner V2 replay their draws, and for how many rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform

from rose_backend.vllm_plugin import sampler as rose_sampler
from rose_backend.vllm_plugin.sampler import (
    MAX_LOGITS_BYTES,
    ReplayedSampling,
    captures_draws,
    draw_graph_sizes,
)
from tests.support.vllm_plugin.configs import MakeConfig
from tests.vllm_plugin.test_sampler import NGRAM


def test_sizes_rise_to_what_fits() -> None:
    assert draw_graph_sizes(1, 100) == (1,)
    assert draw_graph_sizes(24, 512) == (1, 2, 4, 8, 16, 24)
    assert draw_graph_sizes(256, 50257)[-3:] == (192, 224, 256)
    for vocab_size in (50257, 151936):
        sizes = draw_graph_sizes(1024, vocab_size)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] * vocab_size * 4 <= MAX_LOGITS_BYTES < (sizes[-1] + 1) * vocab_size * 4
    assert draw_graph_sizes(8, MAX_LOGITS_BYTES) == ()


def test_graphs_are_captured_unless_they_are_switched_off(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not captures_draws(make_config())
    config = make_config()
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    config.model_config.enforce_eager = False
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    assert captures_draws(config)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    assert not captures_draws(config)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    for name in ("enforce_eager", "enable_sleep_mode"):
        monkeypatch.setattr(config.model_config, name, True)
        assert not captures_draws(config), name
        monkeypatch.setattr(config.model_config, name, False)
    config.additional_config = {"rose": {"cuda_graph": False}}
    assert not captures_draws(config)


def test_samplers_replay_where_rose_may_draw_for_everybody(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[Any] = []

    class Graphs:
        def __init__(self, states: Any) -> None:
            captured.append(states)
            self.is_captured = False

        def capture(self) -> None:
            self.is_captured = True

    def sampler_of(**options: Any) -> Any:
        sampler = SimpleNamespace(
            sampling_states=SimpleNamespace(temperature=SimpleNamespace(np=np.zeros(3))),
            logits_processors=[],
            thinking_budget_state=SimpleNamespace(add_request=None),
            sample=None,
            add_request=None,
            apply_staged_writes=None,
            apply_sampling_params=None,
            _sample_random=None,
        )
        made = options.pop("made", {})
        wrap_init = rose_sampler.wrap_sampler_v2_init(lambda self, vllm_config, **kwargs: None)
        wrap_init(sampler, make_config(**options), **made)
        return sampler

    monkeypatch.setattr(rose_sampler, "DrawGraphs", Graphs)
    monkeypatch.setattr(rose_sampler, "captures_draws", lambda config: True)
    sampler = sampler_of()
    assert isinstance(sampler.sample, ReplayedSampling) and captured == [sampler.sampling_states]
    assert sampler.sample.graphs.is_captured
    off = {"additional_config": {"rose": {"fused_sampler": False}}}
    for options in (off, {"speculative_config": NGRAM}, {"made": {"custom_logits_processors": ["one"]}}):
        assert sampler_of(**options).sample is None, options
    for name, answer in (
        ("why_vllm_draws", "float64 noise"),
        ("is_watermarked", True),
        ("captures_draws", False),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(rose_sampler, name, lambda config, answer=answer: answer)
            assert sampler_of().sample is None, name
    assert len(captured) == 1
