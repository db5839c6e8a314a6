"""What engines of vLLM with quantized weights answer in float32, and their linear layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm import SamplingParams

from tests.support.half_precision import judge, logprob_errors, wrong_tokens
from tests.support.reference_generation import Prompts
from tests.support.vllm_engines import generate, runner_of

ROUNDING = 1e-4
"""Of log-probabilities, between two ways of computing in float32."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)


def complete(llm: Any, prompts: Prompts) -> list[Any]:
    """Return greedy completions."""
    return [output.outputs[0] for output in generate(llm, prompts, GREEDY)]


def assert_right(dense: Path, prompts: Prompts, completions: list[Any]) -> None:
    """Compare completions with a checkpoint that has the same numbers in float32."""
    judged = judge(dense, prompts, [list(completion.token_ids) for completion in completions])
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
