"""Which model class serves a checkpoint."""

from __future__ import annotations

import importlib
from pathlib import Path

from rose_backend.config import Switches
from rose_backend.errors import ModelError
from rose_backend.models.base import CausalLM
from rose_backend.models.weights import Checkpoint, ProgressCallback, has_weights, resolve_model_path

MODEL_CLASSES = {
    "GPT2LMHeadModel": "rose_backend.models.gpt2:GPT2",
    "LlamaForCausalLM": "rose_backend.models.llama:Llama",
    "MistralForCausalLM": "rose_backend.models.llama:Mistral",
    "Qwen2ForCausalLM": "rose_backend.models.llama:Qwen2",
    "Qwen3ForCausalLM": "rose_backend.models.llama:Qwen3",
    "Qwen3MoeForCausalLM": "rose_backend.models.llama:Qwen3Moe",
    "SmolLM3ForCausalLM": "rose_backend.models.llama:SmolLM3",
}
"""Architecture as in config.json, and ``module:class`` of its ``CausalLM``, which is imported when it is used."""


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    switches: Switches | None = None,
    max_model_len: int | None = None,
    on_progress: ProgressCallback | None = None,
) -> CausalLM:
    """Load the model that a checkpoint's config.json asks for.

    Args:
        path: local directory or Hugging Face id.
        dtype: ``auto`` is float32 on a CPU, the checkpoint's own type elsewhere; for float32 bfloat16, as in vLLM.
        device: ``cpu`` or ``cuda``; or ``meta`` for a model without memory, where config.json is enough.
        switches: None has everything on.
        max_model_len: no request is longer, in tokens: a sliding window of that length is none. None: the model's.
        on_progress: told of the bytes of weights that were read.

    Raises:
        ModelError: the checkpoint is missing, damaged, or of an architecture that is not supported.
    """
    directory = resolve_model_path(path)
    without_weights = device == "meta" and not has_weights(directory)
    checkpoint = Checkpoint(directory, on_progress, without_weights=without_weights)
    architectures = checkpoint.config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ModelError(f"config.json: architectures must be a list of names, got {architectures!r}")
    for name in architectures:
        if name in MODEL_CLASSES:
            module, _, class_name = MODEL_CLASSES[name].partition(":")
            model_class: type[CausalLM] = getattr(importlib.import_module(module), class_name)
            return model_class.load(
                checkpoint,
                dtype=dtype,
                device=device,
                switches=switches or Switches(),
                max_model_len=max_model_len,
            )
    raise ModelError(
        f"model: {str(path)!r} is of architecture {', '.join(map(str, architectures)) or 'unknown'},"
        f" supported are {', '.join(MODEL_CLASSES)}"
    )
