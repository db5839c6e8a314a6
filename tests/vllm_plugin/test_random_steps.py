"""No step of an engine inside vLLM launches a kernel of Rose that was not found at its start: random steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config

from rose_backend.compile_ahead.recorded_launches import record_launches
from rose_backend.kernels.gpu_properties import GpuProperties
from rose_backend.vllm_plugin import pending_kernels
from rose_backend.vllm_plugin.attention import flash_attention
from rose_backend.vllm_plugin.attention.backend import RoseAttentionImpl
from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadata, RoseAttentionMetadataBuilder
from rose_backend.vllm_plugin.models.recorded_model import (
    RecordedAttention,
    RecordedDecoder,
    projections,
    recorded_step,
)
from rose_backend.vllm_plugin.sampler import draw, why_vllm_draws
from tests.support.llama_checkpoints import write_checkpoint
from tests.support.vllm_plugin.configs import MakeConfig
from tests.vllm_plugin.test_pending_kernels import N_GRAMS, on_a_gpu

__all__ = ["on_a_gpu"]

NUM_STEPS = 300
META = torch.device("meta")
H100, A100 = GpuProperties((9, 0), 132), GpuProperties((8, 0), 108)
APART = {"rose": {"fused_kv_append": False}}
NOTHING: dict[str, Any] = {}

# Query and KV heads, their size, the GPU; further options of the layer, and of the engine.
Case = tuple[tuple[int, int, int], GpuProperties, dict[str, Any], dict[str, Any]]
LAYERS: dict[str, Case] = {
    "heads of 64": ((12, 12, 64), H100, NOTHING, NOTHING),
    "Llama 8B": ((32, 8, 128), H100, NOTHING, {"max_num_seqs": 256}),
    "Llama 8B, one request at a time": ((32, 8, 128), H100, NOTHING, {"max_num_seqs": 1}),
    "Llama 8B on an A100": ((32, 8, 128), A100, NOTHING, {"max_num_seqs": 700}),
    "FlashAttention": ((32, 8, 128), H100, {"may_use_flash": True}, {"max_num_seqs": 48}),
    "drafts": ((32, 8, 128), H100, NOTHING, {"speculative_config": N_GRAMS}),
    "float8": ((16, 4, 128), H100, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8"}),
    "stored apart": ((8, 1, 256), H100, NOTHING, {"additional_config": APART}),
    "window and sinks": ((64, 8, 64), H100, {"sliding_window": 128, "sinks": torch.zeros(64)}, NOTHING),
    "heads of 72": ((5, 5, 72), H100, {"alibi_slopes": [0.5] * 5, "logits_soft_cap": 30.0}, NOTHING),
}


@pytest.fixture
def gpu_config(make_config: MakeConfig) -> Callable[..., Any]:
    def make(**options: Any) -> Any:
        defaults = {
            "dtype": "float16",
            "enforce_eager": False,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 8192,
        }
        config = make_config(**{**defaults, **options})
        config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
        config.compilation_config.cudagraph_capture_sizes = [
            1,
            2,
            4,
            *range(8, 513, 8),
            *range(576, 1089, 64),
        ]
        return config

    return make


@contextmanager
def on_cuda() -> Iterator[None]:
    """Let vLLM believe in a GPU, on which FlashAttention 3 does nothing; the write in front of it is Rose's."""
    module = SimpleNamespace(flash_attn_varlen_func=lambda **arguments: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.platforms.current_platform.is_cuda", lambda: True)
        patch.setitem(sys.modules, "vllm.vllm_flash_attn", module)
        patch.setattr(flash_attention, "_schedule", lambda *arguments: None)
        yield


class RandomSteps:
    """Describes steps as vLLM does: decodes, with drafts or without, prompts and parts of prompts; launched, or as they
    are captured.
    """

    def __init__(self, config: Any, layer: Any) -> None:
        self.rng = np.random.default_rng(3)
        self._config = config
        self._builder = RoseAttentionMetadataBuilder(None, ["layer"], config, META)
        self._builder._uses_flash = layer.may_use_flash

    def next(self) -> RoseAttentionMetadata:
        scheduler, rng = self._config.scheduler_config, self.rng
        num_rows = self._size(min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens))
        num_decodes = int(rng.choice([num_rows, num_rows - 1, 0, rng.integers(0, num_rows + 1)]))
        query_lens = rng.integers(1, self._builder.reorder_batch_threshold + 1, num_decodes)
        num_prompts = num_rows - num_decodes
        most = scheduler.max_num_batched_tokens - int(query_lens.sum())
        if num_prompts and most > num_prompts:
            shares = np.full(num_prompts, 1 / num_prompts)
            prompts = 1 + rng.multinomial(self._size(most - num_prompts), shares)
            if rng.random() < 0.2:
                prompts[:] = 1
                prompts[-1] = self._size(most - num_prompts)
            query_lens = np.concatenate([query_lens, np.sort(prompts)])
        if len(query_lens) == 0:
            return self.next()
        common = recorded_step(self._config, query_lens.tolist())
        if rng.random() < 0.3:
            return self._builder.build_for_cudagraph_capture(common)
        return self._builder.build(0, common)

    def _size(self, most: int) -> int:
        """Return 1 to ``most``, small ones, powers of two and their neighbors more often."""
        near = int(2 ** self.rng.uniform(0, np.log2(most + 1)))
        return int(np.clip(self.rng.choice([near, near - 1, near + 1, near // 16 * 16]), 1, most))


def run_random_steps(
    config: Any, layer: Any, gpu: GpuProperties, run: Callable[[RoseAttentionMetadata], None]
) -> None:
    """Run steps on tensors without memory, behind what a start records; compare their kernels."""
    with on_cuda():
        at_start = {each.key for each in pending_kernels.record(config, layer, gpu).compilations}
    assert len(at_start) > 5
    vocab_size = config.model_config.get_vocab_size()
    with on_cuda(), torch.inference_mode(), record_launches(gpu) as recorded:
        steps = RandomSteps(config, layer)
        for _ in range(NUM_STEPS):
            metadata = steps.next()
            run(metadata)
            if why_vllm_draws(config) is not None:
                continue
            num_rows = len(metadata.query_start_loc) - 1
            width = vocab_size + int(steps.rng.choice([0, -vocab_size % 64]))
            logits = torch.empty((num_rows, width), device=META)[:, :vocab_size]
            values = torch.empty(num_rows, device=META)
            top_k = values.to(torch.int64) if steps.rng.random() < 0.5 else None
            draw(logits, values, top_k, None if top_k is None else values, values.long(), values.long())
    late = [
        (source.name, source.signature, source.constexprs, source.attributes)
        for source, each in zip(recorded.sources, recorded.compilations, strict=True)
        if each.key not in at_start
    ]
    assert not late, "\n".join(map(str, late))


@pytest.mark.parametrize("case", LAYERS)
def test_attention_of_random_steps(gpu_config: Callable[..., Any], case: str) -> None:
    (heads, kv_heads, head_size), gpu, options, engine = LAYERS[case]
    config = gpu_config(**engine)
    with set_current_vllm_config(config):
        layer = RoseAttentionImpl(
            heads,
            head_size,
            head_size**-0.5,
            kv_heads,
            **{name: value for name, value in options.items() if name != "may_use_flash"},
        )
    layer.may_use_flash = "may_use_flash" in options
    attend = RecordedAttention(config, layer)
    turn = 0

    def run(metadata: RoseAttentionMetadata) -> None:
        nonlocal turn
        layouts = list(projections(config, layer, metadata.num_actual_tokens))
        turn += 1
        query, key, value = layouts[turn % len(layouts)]
        attend.metadata = metadata
        attend(0, query, key, value)

    run_random_steps(config, layer, gpu, run)


@pytest.mark.parametrize(
    ("case", "gpu", "options"),
    [
        ("llama-biases", H100, {"max_num_seqs": 256}),
        ("qwen3", H100, {"max_num_seqs": 600, "dtype": "bfloat16"}),
        ("qwen2", A100, {"max_num_batched_tokens": 300}),
        ("mistral", H100, {"tensor_parallel_size": 2}),
        ("qwen3", H100, {"additional_config": {"rose": {"fused_mlp": False}}}),
    ],
)
def test_layers_of_random_steps(
    gpu_config: Callable[..., Any], tmp_path: Path, case: str, gpu: GpuProperties, options: dict[str, Any]
) -> None:
    path = write_checkpoint(tmp_path / case, case, hidden_size=1024)
    config = gpu_config(model=str(path), **options)
    with set_current_vllm_config(config):
        layer = RoseAttentionImpl(16, 128, 128**-0.5, 8)
    run_random_steps(config, layer, gpu, RecordedDecoder(config, layer).run)
