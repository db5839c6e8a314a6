"""Qwen2.5-VL and Qwen3-VL for vLLM with Rose's layers in their language model, which is a Qwen2 or a Qwen3.

The encoder of images stays vLLM's, and so do the embeddings that images are merged into. This is a separate module
because vLLM's needs torchvision.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.sequence import IntermediateTensors

from rose_backend.vllm_plugin.models.decoder import RoseDecoder


class _RoseVisionDecoder(RoseDecoder):
    """Mixed into vLLM's class of a model that takes images, which calls the decoder inside its language model."""

    language_model: Any

    @property
    def model(self) -> Any:
        """vLLM's module with the decoder layers, of the language model."""
        return self.language_model.model

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor | None,  # [T] int32 or int64
        positions: torch.Tensor,  # [3, T] int64
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,  # [T, E]
        **kwargs: object,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Return what ``RoseDecoder.forward`` does. ``kwargs`` are the encoder's, which has run."""
        num_tokens = positions.shape[-1]
        deepstack: tuple[torch.Tensor, ...] = ()
        # Qwen3-VL's alone. vLLM writes them before a step with images, of one token that is an image's, too.
        has_features = getattr(self, "deepstack_input_embeds_num_tokens", 0) > 0
        if has_features:
            features = self._get_deepstack_input_embeds(num_tokens)  # type: ignore[attr-defined]
            deepstack = tuple(features.tensors.values())
        hidden = super().forward(input_ids, positions, inputs_embeds=inputs_embeds, deepstack=deepstack)
        if has_features:
            self._clear_deepstack_input_embeds(num_tokens)  # type: ignore[attr-defined]
        return hidden


class RoseQwen2_5_VLForConditionalGeneration(_RoseVisionDecoder, Qwen2_5_VLForConditionalGeneration):  # type: ignore[misc]
    """Qwen2.5-VL."""


class RoseQwen3VLForConditionalGeneration(_RoseVisionDecoder, Qwen3VLForConditionalGeneration):  # type: ignore[misc]
    """Qwen3-VL."""
