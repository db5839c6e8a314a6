"""Choosing the next token of every row. Plain torch where there is no GPU."""

from __future__ import annotations

from types import ModuleType

import torch

import rose_backend.kernels.sampling.reference as reference
from rose_backend.errors import ShapeError
from rose_backend.kernels.arguments import SampleOutput, SamplingTensors, check_tensors

SAMPLER_KERNELS = ("_choose_kernel", "_scan_kernel")
"""All that ``sample`` launches on a GPU."""


def sample(
    logits: torch.Tensor,  # [R, V] float32
    params: SamplingTensors,
) -> SampleOutput:
    """Choose the next token of every row, in two launches on a GPU; work that no row asks for is skipped.

    In this order, as vLLM: bias, penalties, temperature, min-p, top-k, top-p, draw. Top-k keeps every token that ties
    with the k-th most likely one. Top-p keeps tokens, most likely first (of equal ones the lower id), until they hold
    the probability asked for; at least one. A token that a filter drops is never drawn, nor is one with a logit of
    minus infinity unless all have it: then the row's token is ``invalid_token_id``. After bias and penalties NaN counts
    as minus infinity.

    The draw depends on nothing but the row's own logits, parameters, seed and position. Its random bits are those of
    Philox4x32-10 with the seed as key and (token id // 4, position, 0, 0) as counter, word ``token id % 4``.

    Args:
        logits: stay as they are.

    Raises:
        ShapeError: shapes or dtypes disagree, only one of the bias's tensors is given, or more alternatives are asked
            for than there are tokens.
    """
    _check(logits, params)
    return _implementation(logits).sample(logits, params)


def sample_unfused(
    logits: torch.Tensor,  # [R, V] float32
    params: SamplingTensors,
) -> SampleOutput:
    """Choose the same tokens as ``sample`` by separate operations over the whole vocabulary (``fused_sampler`` off).

    Raises:
        ShapeError: as ``sample``.
    """
    _check(logits, params)
    return reference.sample_unfused(logits, params)


def _implementation(logits: torch.Tensor) -> ModuleType:
    if not logits.is_cuda:
        return reference
    import rose_backend.kernels.sampling.sampler as gpu

    return gpu


def _check(logits: torch.Tensor, params: SamplingTensors) -> None:
    sizes = check_tensors(
        logits=(logits, "R V", torch.float32),
        temperature=(params.temperature, "R", torch.float32),
        top_k=(params.top_k, "R", torch.int32),
        top_p=(params.top_p, "R", torch.float32),
        min_p=(params.min_p, "R", torch.float32),
        seed=(params.seed, "R", torch.int64),
        position=(params.position, "R", torch.int64),
        presence_penalty=(params.presence_penalty, "R", torch.float32),
        frequency_penalty=(params.frequency_penalty, "R", torch.float32),
        repetition_penalty=(params.repetition_penalty, "R", torch.float32),
    )
    if params.prompt_mask is not None:
        check_tensors(logits=(logits, "R V"), prompt_mask=(params.prompt_mask, "R V", torch.bool))
    if params.output_counts is not None:
        check_tensors(logits=(logits, "R V"), output_counts=(params.output_counts, "R V", torch.int32))
    if params.bias_token_ids is not None and params.bias is not None:
        check_tensors(
            logits=(logits, "R V"),
            bias_token_ids=(params.bias_token_ids, "R M", torch.int32),
            bias=(params.bias, "R M", torch.float32),
        )
    elif params.bias_token_ids is not params.bias:
        raise ShapeError("bias_token_ids and bias: expected both or neither, got one")
    if params.num_logprobs > sizes["V"]:
        raise ShapeError(f"num_logprobs: expected at most V={sizes['V']}, got {params.num_logprobs}")
