"""Head and sampler in plain torch, one after the other."""

from __future__ import annotations

import torch

from rose_backend.kernels.reference.sampler import sample
from rose_backend.kernels.sampling_tensors import SamplingTensors


def lm_head_sample(
    hidden: torch.Tensor,  # [R, E]
    lm_head: torch.Tensor,  # [V, E]
    temperature: torch.Tensor,  # [R]
    seed: torch.Tensor,  # [R]
    position: torch.Tensor,  # [R]
) -> torch.Tensor:
    """Twin of ``rose_backend.kernels.lm_head_sample``."""
    logits = torch.nn.functional.linear(hidden, lm_head).float()
    zeros, ones = torch.zeros_like(temperature), torch.ones_like(temperature)
    params = SamplingTensors(
        temperature=temperature,
        top_k=zeros.int(),
        top_p=ones,
        min_p=zeros,
        seed=seed,
        position=position,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        repetition_penalty=ones,
    )
    return sample(logits, params).token_ids
