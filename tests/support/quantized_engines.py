"""What engines of vLLM with quantized weights answer in float32, and their linear layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
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
    """Return what ``linears_of`` does of an engine's model."""
    return [(module, linear) for _, module, linear in linears_of(runner_of(llm).model)]


def linears_of(model: Any) -> list[tuple[str, Any, Any]]:
    """Return the names of linear layers of a ``RoseDecoder``, vLLM's modules, and Rose's layers made of them."""
    found = []
    for layer, module in zip(model._layers, model.model.layers, strict=True):
        attention, mlp = module.self_attn, module.mlp
        modules = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        made = (layer.qkv, layer.attn_out, layer.mlp.gate_up, layer.mlp.down)
        found += [(each.prefix, each, linear) for each, linear in zip(modules, made, strict=True)]
    return found


def meant(tensors: dict[str, torch.Tensor], module: Any) -> torch.Tensor:
    """Return the matrix of a module in a dense checkpoint, [O, E] float64."""
    prefix, _, name = module.prefix.rpartition(".")
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    names = parts.get(name, (name,))
    return torch.cat([tensors[f"{prefix}.{part}.weight"] for part in names]).double()


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest error of a product or matrix, as a part of its largest number."""
    return float((got.double() - exact).abs().max() / exact.abs().max())
