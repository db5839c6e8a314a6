"""What ``config.json`` says of a mixture of experts, in the words of Qwen3's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rose_backend.errors import ModelError
from rose_backend.kernels.experts.reference import MAX_EXPERTS
from rose_backend.models.config import ExpertsConfig, read_size


def read_experts(fields: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    """Read the sizes of the experts, and which layers have them; transformers' defaults hold for what is missing.

    Raises:
        ModelError: a field has a value that no model can have; the message names it.
    """
    # transformers 5 writes the second name.
    name = "num_experts" if fields.get("num_local_experts") is None else "num_local_experts"
    num_experts, top_k = read_size(fields, name, 128), read_size(fields, "num_experts_per_tok", 8)
    if num_experts > MAX_EXPERTS:
        raise ModelError(f"config.json: {name} must be at most {MAX_EXPERTS}, got {num_experts}")
    if top_k > num_experts:
        raise ModelError(
            f"config.json: num_experts_per_tok must be at most {name}={num_experts}, got {top_k}"
        )
    return ExpertsConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=read_size(fields, "moe_intermediate_size", 768),
        renormalize=bool(fields.get("norm_topk_prob", False)),
        sparse_layers=_sparse_layers(fields, num_layers),
    )


def _sparse_layers(fields: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    step, dense = read_size(fields, "decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        raise ModelError(f"config.json: mlp_only_layers must be a list of integers, got {dense!r}")
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(num_layers))
