"""The operations of ``gpt2_ops.py`` on tensors without memory: their kernels are recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rose_backend.vllm_plugin.models.model_choice import MODEL_CLASSES

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def launch_operations(vllm_config: VllmConfig, layer: Any) -> None:
    """Launch all of them for a few tokens and for many, if the engine's model is Rose's GPT-2."""
    import torch

    from rose_backend import kernels

    model = vllm_config.model_config
    if not set(MODEL_CLASSES) & set(model.hf_config.architectures or ()):
        return
    width = model.get_hidden_size()
    inner = (model.hf_config.n_inner or 4 * width) // vllm_config.parallel_config.tensor_parallel_size
    for num_tokens in (1, 15, 16, 4096):
        narrow, wide = (
            torch.empty((num_tokens, size), dtype=model.dtype, device="meta") for size in (width, inner)
        )
        kernels.layer_norm(narrow, narrow[0], narrow[0], 1e-5)
        kernels.add_layer_norm(narrow, narrow, narrow[0], narrow[0], 1e-5)
        kernels.bias_gelu(wide, wide[0])
        kernels.bias_residual(narrow, narrow[0], narrow)
