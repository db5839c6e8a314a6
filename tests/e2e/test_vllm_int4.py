"""Int4 checkpoints inside vLLM with Rose's layers, on a CPU: vLLM's methods load them, Rose's layers multiply."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from rose_backend.kernels import Int4Weight
from rose_backend.vllm_plugin.models import decoder
from tests.e2e.conftest import MakeEngine
from tests.support.half_precision import judge, logprob_errors, wrong_tokens
from tests.support.llama_checkpoints import VOCAB_SIZE
from tests.support.moments import record_moments
from tests.support.quantized_checkpoints import INT4_FORMATS, KEPT, write_pair
from tests.support.reference_generation import Prompts, parity_prompts
from tests.support.vllm_engines import generate, runner_of
from tests.support.vllm_plugin.int4_on_cpu import take_int4_on_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_vllm_gpu_int4.py is for GPUs")

ROUNDING = 1e-4
"""Of log-probabilities, between two ways of computing in float32."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
LOADED = [form for form in INT4_FORMATS if not (form.startswith("gptq") and "zeros" in form)]
"""vLLM takes GPTQ's symmetric checkpoints only."""


@pytest.fixture(autouse=True)
def int4_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    take_int4_on_cpu(monkeypatch)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Pack layers as on a GPU; return what is noted of products that sum up the moments for the next one."""
    monkeypatch.setattr(decoder, "packs_layers", lambda switches, device: True)
    yield record_moments(monkeypatch)


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return parity_prompts(VOCAB_SIZE)[:10]


def complete(llm: Any, prompts: Prompts) -> list[Any]:
    return [output.outputs[0] for output in generate(llm, prompts, GREEDY)]


def assert_right(path: Path, prompts: Prompts, completions: list[Any]) -> None:
    judged = judge(path, prompts, [list(completion.token_ids) for completion in completions])
    assert wrong_tokens(judged, ROUNDING) == []
    assert float(logprob_errors(judged, completions).max()) < ROUNDING


def linears(llm: Any) -> list[tuple[Any, Any]]:
    """Return vLLM's modules, and Rose's layers made of them."""
    model = runner_of(llm).model
    found = []
    for layer, module in zip(model._layers, model.model.layers, strict=True):
        attention, mlp = module.self_attn, module.mlp
        modules = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        found += zip(modules, (layer.qkv, layer.attn_out, layer.mlp.gate_up, layer.mlp.down), strict=True)
    return found


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *(("qwen3", form) for form in LOADED),
        *(("llama-biases", LOADED[0]), ("qwen2", LOADED[2]), ("mistral", LOADED[6])),
    ],
)
def test_few_and_many_rows_are_multiplied_by_what_the_checkpoint_says(
    make_engine: MakeEngine, tmp_path: Path, prompts: Prompts, packed: list[Any], family: str, form: str
) -> None:
    # vLLM's Qwen2 divides the width by the number of heads.
    path, dense = write_pair(tmp_path, family, form, **({"head_dim": 96} if family == "qwen2" else {}))
    for rows in (None, 0):
        packed.clear()
        options = {"additional_config": {"rose": {"max_quantized_rows": rows}}}
        with make_engine(model=str(path), **options) as llm:
            pairs = linears(llm)
            assert_right(dense, prompts, complete(llm, prompts))
        assert bool(packed) == (rows is None)
        is_int4 = [isinstance(linear.weight, Int4Weight) for _, linear in pairs]
        assert is_int4 == [True] * 7 + [False] and "layers.1.mlp.down_proj" in KEPT
        for module, linear in pairs[:7]:
            assert linear.packed.weight is linear.weight
            # In memory once.
            tensors = {each.data_ptr() for each in module.parameters(recurse=False)}
            weight = linear.weight
            kept = (weight.words, weight.scales, weight.zeros, linear.bias)
            assert tensors == {each.data_ptr() for each in kept if each is not None}
