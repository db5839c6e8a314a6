"""No step of an engine on a GPU launches a kernel that its start has not launched: random steps, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rose_backend.compile_ahead.recorded_launches import RecordedLaunches, record_launches
from rose_backend.config import EngineConfig
from rose_backend.engine import gpu_startup as start_kernels
from rose_backend.engine.drafts import max_drafted_rows
from rose_backend.engine.gpu_startup import launch_everything, record_start
from rose_backend.engine.model_runner import ModelRunner
from rose_backend.engine.scheduler import Step
from rose_backend.kernels.gpu_properties import GpuProperties
from tests.engine.test_compile_ahead import H100, LLAMA_8B, N_GRAMS, QWEN3

NUM_STEPS = 250
SHORT = {"max_position_embeddings": 2048}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 2,
    "n_positions": 1024,
    "torch_dtype": "float16",
    "vocab_size": 50_257,
}
# Numbers of experts for which a step's tokens change the kernel elsewhere than at powers of two.
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
    "hidden_size": 2048,
}
BLOCKS = {
    "quantization_config": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "mlp.gate"],
    }
}
ROWS = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
        "ignore": ["lm_head"],
    }
}
A100 = GpuProperties((8, 0), 108)
# Its directory is the test's.
HEAD = {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
LAYERS = {"num_hidden_layers": 4}
HEAD_FIELDS = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 700,
    "eagle_aux_hidden_state_layer_ids": [1, 2],
}


class RandomSteps:
    """Runs steps of a runner as the engine does, of rows that are random but for what kernels are chosen by.

    Args:
        limits: the engine's options.
    """

    def __init__(self, runner: ModelRunner, limits: EngineConfig) -> None:
        self._runner = runner
        self._manager, self._state = runner._manager, runner._state
        self._manager.finish_clone_plan = lambda plan: None  # type: ignore[method-assign]
        self._state.token_ids[:] = 0
        completion: Any = SimpleNamespace(request=SimpleNamespace())
        self._state.completions[:] = [completion] * len(self._state.completions)
        extras = runner._extras
        extras._fill_masks = lambda slots: np.zeros(  # type: ignore[method-assign]
            (len(slots), extras.masks.num_words), np.int32
        )
        self._limits = limits
        self._rng = np.random.default_rng(5)

    def run(self) -> None:
        """Run one step: decodes, chunks of prompts behind what was computed before, and copies of blocks."""
        rng, num_seqs = self._rng, self._limits.max_num_seqs
        rows = rng.permutation(num_seqs).astype(np.int32)[: self._size(num_seqs)]
        num_decodes = int(rng.integers(0, len(rows) + 1)) if rng.random() < 0.7 else 0
        budget = self._limits.token_budget - num_decodes
        num_chunks = min(len(rows) - num_decodes, max(budget, 0))
        rows = rows[: num_decodes + num_chunks]
        counts = np.ones(len(rows), np.int32)
        if num_chunks:
            num_tokens = num_chunks + self._size(budget - num_chunks + 1) - 1
            counts[num_decodes:] += rng.multinomial(
                num_tokens - num_chunks, np.full(num_chunks, 1 / num_chunks)
            )
        longest = self._state.token_ids.shape[1]
        counts = np.minimum(counts, longest - 1)
        self._manager.num_computed_tokens[rows] = rng.integers(0, longest - counts, len(rows))
        self._state.num_tokens[rows] = self._manager.num_computed_tokens[rows] + 1
        self._state.needs_sampling_extras[rows] = rng.random(len(rows)) < rng.choice([0, 0.1])
        self._state.has_grammar[rows] = rng.random(len(rows)) < rng.choice([0, 0.2])
        self._state.min_num_tokens[rows] = longest
        self._state.num_prompt_tokens[rows] = longest
        asks = rng.random(len(rows)) < rng.choice([0, 0.1, 1])
        self._state.num_prompt_logprobs[rows] = np.where(asks, rng.integers(0, 21, len(rows)), -1)
        if self._limits.enable_lora:
            has_adapter = rng.random(len(rows)) < rng.choice([0, 0.5, 1])
            self._state.lora_slot[rows] = np.where(has_adapter, rng.integers(0, 8, len(rows)), -1)
        num_drafts = self._num_drafts(rows[:num_decodes])
        forwarded = self._runner.forward(
            Step(rows, counts, num_decodes, self._clones(), num_drafts=num_drafts)
        )
        if num_chunks:
            due = np.flatnonzero(rng.random(num_chunks) < 0.7)
            if len(due):
                sources = np.sort(rng.integers(0, len(due), len(due)))
                assert forwarded.hidden is not None
                self._runner.sample(forwarded.hidden, due, rows[num_decodes:][due], sources)

    def _size(self, most: int) -> int:
        """Return 1 to ``most``, small ones, powers of two and their neighbors more often."""
        near = int(2 ** self._rng.uniform(0, np.log2(most + 1)))
        return int(np.clip(self._rng.choice([near, near - 1, near + 1, near // 16 * 16]), 1, most))

    def _num_drafts(self, decodes: np.ndarray) -> int:
        drafts, state = self._runner.decoder.drafts, self._state
        if drafts is None or (state.needs_sampling_extras | state.has_grammar)[decodes].any():
            return 0
        depths = [depth for depth in drafts.depths if 0 < len(decodes) <= max_drafted_rows(depth)]
        return int(self._rng.choice([0, *depths, *depths]))

    def _clones(self) -> Any:
        if self._rng.random() < 0.7:
            return None
        ids = np.zeros(self._size(self._limits.max_num_seqs), np.int32)
        return SimpleNamespace(src_block_ids=ids, dst_block_ids=ids)


# Which model, on which GPU, with which options.
CASES: dict[str, tuple[dict[str, Any], GpuProperties, dict[str, Any]]] = {
    "GPT-2": (GPT2, H100, {}),
    "GPT-2, launched": (GPT2, H100, {"cuda_graph": False, "fused_kv_append": False, "max_num_seqs": 700}),
    "GPT-2, few tokens": (GPT2, A100, {"max_num_batched_tokens": 61, "max_num_seqs": 13}),
    "GPT-2, float32": (GPT2, H100, {"dtype": "float32", "max_num_seqs": 48}),
    "Qwen3, many rows": (QWEN3, H100, {"max_num_seqs": 700}),
    "Llama": (QWEN3 | LLAMA_8B, H100, {}),
    "Llama, drafts": (QWEN3 | LLAMA_8B, H100, {"speculative_config": N_GRAMS, "max_num_seqs": 200}),
    "Qwen3, drafts, launched": (
        QWEN3,
        A100,
        {
            "speculative_config": N_GRAMS | {"num_speculative_tokens": 4},
            "cuda_graph": False,
            "max_num_seqs": 90,
        },
    ),
    "Qwen3, adapters": (QWEN3, H100, {"enable_lora": True}),
    "Llama, adapters, drafts": (
        QWEN3 | LLAMA_8B,
        H100,
        {"enable_lora": True, "speculative_config": N_GRAMS, "max_num_seqs": 200, "max_lora_rank": 64},
    ),
    "Qwen3, adapters, launched": (
        QWEN3,
        A100,
        {"enable_lora": True, "cuda_graph": False, "max_num_seqs": 48, "fused_add_layernorm": False},
    ),
    "float8 rows, adapters": (QWEN3 | LLAMA_8B | ROWS, H100, {"enable_lora": True}),
    "Llama, head": (QWEN3 | LLAMA_8B | LAYERS, H100, {"speculative_config": HEAD, "max_num_seqs": 200}),
    "Qwen3, head, launched": (
        QWEN3 | LAYERS,
        A100,
        {"speculative_config": HEAD, "cuda_graph": False, "fused_kv_append": False, "max_num_seqs": 90},
    ),
    "experts, drafts": (QWEN3 | QWEN3_MOE, H100, {"speculative_config": N_GRAMS, "max_num_seqs": 40}),
    "float8 rows, drafts": (QWEN3 | LLAMA_8B | ROWS, H100, {"speculative_config": N_GRAMS}),
    "Llama, launched": (QWEN3 | LLAMA_8B, A100, {"cuda_graph": False, "max_num_seqs": 300}),
    "experts": (QWEN3 | QWEN3_MOE, H100, {}),
    "experts, few tokens": (
        QWEN3 | QWEN3_MOE,
        H100,
        {"cuda_graph": False, "max_num_batched_tokens": 300, "max_num_seqs": 140},
    ),
    "float8 blocks": (QWEN3 | BLOCKS, H100, {}),
    "float8 rows": (QWEN3 | LLAMA_8B | ROWS, H100, {"cuda_graph": False}),
    "float8 rows, without a product in 8 bits": (QWEN3 | LLAMA_8B | ROWS, A100, {}),
    "float8 experts": (QWEN3 | QWEN3_MOE | BLOCKS, H100, {}),
    "experts, unfused": (QWEN3 | QWEN3_MOE, A100, {"fused_mlp": False, "fused_add_layernorm": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_random_steps_launch_what_the_start_has_launched(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, gpu, options = CASES[case]
    limits = SHORT if "max_position_embeddings" in model else {}
    (tmp_path / "config.json").write_text(json.dumps(model | limits))
    if options.get("speculative_config") is HEAD:
        (tmp_path / "head").mkdir()
        (tmp_path / "head" / "config.json").write_text(json.dumps(model | limits | HEAD_FIELDS))
        options = options | {"speculative_config": HEAD | {"model": str(tmp_path / "head")}}
    num_launched = 0

    @contextmanager
    def record(gpu: GpuProperties) -> Iterator[RecordedLaunches]:
        nonlocal recorded
        with record_launches(gpu) as recorded:
            yield recorded

    def launch_and_serve(runner: ModelRunner, config: EngineConfig, *args: Any) -> None:
        nonlocal num_launched
        launch_everything(runner, config, *args)
        num_launched = len(recorded.sources)
        steps = RandomSteps(runner, config)
        for _ in range(NUM_STEPS):
            steps.run()

    recorded: RecordedLaunches
    monkeypatch.setattr(start_kernels, "record_launches", record)
    monkeypatch.setattr(start_kernels, "launch_everything", launch_and_serve)
    config = EngineConfig(model=str(tmp_path), **{"max_num_batched_tokens": 8192, **options})
    sources = record_start(tmp_path, config, gpu)
    assert num_launched > 20
    names = {each.name for each in sources}
    assert ("_quantize_kernel" in names) == ("float8" in case and gpu is H100)
    assert ("_dequantize_kernel" in names) == ("float8" in case and gpu is not H100)
    assert ("_adapters_expand_kernel" in names) == ("adapters" in case)
    late = [(each.name, each.signature, each.constexprs, each.attributes) for each in sources[num_launched:]]
    assert not late, "\n".join(map(str, late))
