"""Choosing the next token of every row. Plain torch where there is no GPU."""

from __future__ import annotations

from types import ModuleType

import torch

import rose_backend.kernels.sampling.reference as reference
from rose_backend.errors import ShapeError
from rose_backend.kernels.arguments import (
    LogitsProcessors,
    LogprobReport,
    SampleOutput,
    SamplingTensors,
    TokenLimits,
    check_tensors,
)

SAMPLER_KERNELS = ("_choose_kernel", "_scan_kernel")
"""All that ``sample`` launches on a GPU."""
REPORT_KERNELS = ("_report_kernel", "_summarize_kernel")
"""All that ``report_logprobs`` launches on a GPU."""
MASK_KERNELS = ("_mask_kernel",)
"""All that ``mask_logits`` launches on a GPU."""


def sample(
    logits: torch.Tensor,  # [R, V] float32
    params: SamplingTensors,
) -> SampleOutput:
    """Choose the next token of every row, in two launches on a GPU; work that no row asks for is skipped.

    In this order, as vLLM: bitmask and bias, penalties, temperature, min-p, top-k, top-p, draw. Top-k keeps every token
    that ties with the k-th most likely one. Top-p keeps tokens, most likely first (of equal ones the lower id), until
    they hold the probability asked for; at least one. A token that a filter drops is never drawn, nor is one with a
    logit of minus infinity unless all have it: then the row's token is ``invalid_token_id``. After penalties NaN counts
    as minus infinity.

    The draw depends on nothing but the row's own logits, parameters, seed and position. Its random bits are those of
    Philox4x32-10 with the seed as key and (token id // 4, position, 0, 0) as counter, word ``token id % 4``.

    Args:
        logits: stay as they are.

    Raises:
        ShapeError: shapes or dtypes disagree, or more alternatives are asked for than there are tokens.
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


def report_logprobs(
    logits: torch.Tensor,  # [R, V] float32, float16 or bfloat16
    token_ids: torch.Tensor,  # [R] int64 in [0, V)
    num_logprobs: torch.Tensor,  # [R] int32
    report: LogprobReport,  # written
) -> None:
    """Report tokens that were chosen elsewhere: log-softmax of the logits, computed in float32.

    Args:
        num_logprobs: most likely tokens to report of each row, at most ``K`` of the report; 0 reports the chosen token
            only. Where a row asks for fewer than ``K``, the other columns are token 0 with minus infinity. A row with
            a negative number is left as it is, and its logits are not read.

    Raises:
        ShapeError: shapes or dtypes disagree, or the report has more columns than there are tokens.
    """
    sizes = check_tensors(
        logits=(logits, "R V", _float_dtype(logits)),
        token_ids=(token_ids, "R", torch.int64),
        num_logprobs=(num_logprobs, "R", torch.int32),
        reported_token_ids=(report.token_ids, "R K1", torch.int64),
        logprobs=(report.logprobs, "R K1", torch.float32),
        ranks=(report.ranks, "R", torch.int64),
    )
    if not 1 <= sizes["K1"] <= sizes["V"] + 1:
        raise ShapeError(f"report: expected 1 to V + 1={sizes['V'] + 1} columns, got {sizes['K1']}")
    if logits.is_cuda:
        from rose_backend.kernels.sampling.sampler import report_logprobs as launch

        launch(logits, token_ids, num_logprobs, report)
    else:
        reference.report_logprobs(logits, token_ids, num_logprobs, report)


def mask_logits(
    logits: torch.Tensor,  # [R, V] float32, float16 or bfloat16  written
    bitmask: torch.Tensor,  # [N, V / 32, rounded up] int32
    mask_rows: torch.Tensor,  # [R] int32 below N
) -> None:
    """Set the logits of tokens that a row's mask does not allow to minus infinity.

    Args:
        logits: with neighboring tokens beside each other.
        bitmask: bit ``i % 32`` of word ``i // 32`` allows token ``i``, as in xgrammar.
        mask_rows: of the bitmask, for each row; -1 leaves a row as it is.

    Raises:
        ShapeError: shapes, dtypes or strides disagree.
    """
    sizes = check_tensors(
        logits=(logits, "R V", _float_dtype(logits)),
        bitmask=(bitmask, "N W", torch.int32),
        mask_rows=(mask_rows, "R", torch.int32),
    )
    _check_words(sizes)
    if logits.stride(1) != 1 or bitmask.stride(1) != 1:
        raise ShapeError("logits and bitmask: expected a last stride of 1")
    if logits.is_cuda:
        from rose_backend.kernels.sampling.sampler import mask_logits as launch

        launch(logits, bitmask, mask_rows)
    else:
        reference.mask_logits(logits, bitmask, mask_rows)


def write_bitmask(
    bitmask: torch.Tensor,  # [N, V / 32, rounded up] int32  written
    entries: torch.Tensor,  # [R] int32 below N, different ones; -1 writes nothing
    position: torch.Tensor,  # [R] int64, of the token to draw
    limits: TokenLimits,
) -> None:
    """Write which tokens the rows' next draws allow, by entry; bits past the vocabulary may be anything.

    Raises:
        ShapeError: shapes, dtypes or strides disagree.
    """
    check_tensors(
        bitmask=(bitmask, "N W", torch.int32),
        entries=(entries, "R", torch.int32),
        position=(position, "R", torch.int64),
        lengths=(limits.lengths, "N 2", torch.int32),
        stop_token_ids=(limits.stop_token_ids, "N S", torch.int32),
        allowed_token_ids=(limits.allowed_token_ids, "N A", torch.int32),
        bad_word_ends=(limits.bad_word_ends, "N B", torch.int32),
        bad_word_token_ids=(limits.bad_word_token_ids, "N P", torch.int32),
        drawn_token_ids=(limits.drawn_token_ids, "D P", torch.int64),
    )
    if not all(each.is_contiguous() for each in (bitmask, *limits)):
        raise ShapeError("bitmask and limits: expected contiguous tensors")
    if bitmask.is_cuda:
        from rose_backend.kernels.sampling.bitmask import write_bitmask as launch

        launch(bitmask, entries, position, limits)
    else:
        reference.write_bitmask(bitmask, entries, position, limits)


def _check_words(sizes: dict[str, int]) -> None:
    num_words = -(-sizes["V"] // 32)
    if sizes["W"] != num_words:
        raise ShapeError(f"bitmask: expected {num_words} words for V={sizes['V']}, got {sizes['W']}")


def _float_dtype(logits: torch.Tensor) -> torch.dtype:
    return logits.dtype if logits.dtype in (torch.float16, torch.bfloat16) else torch.float32


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
    if params.processors is not None:
        _check_processors(logits, params.processors)
    if params.num_logprobs > sizes["V"]:
        raise ShapeError(f"num_logprobs: expected at most V={sizes['V']}, got {params.num_logprobs}")


def _check_processors(logits: torch.Tensor, processors: LogitsProcessors) -> None:
    sizes = check_tensors(
        logits=(logits, "R V"),
        entries=(processors.entries, "R", torch.int32),
        bitmask=(processors.bitmask, "N W", torch.int32),
        bias_token_ids=(processors.bias_token_ids, "N M", torch.int32),
        bias=(processors.bias, "N M", torch.float32),
    )
    _check_words(sizes)
    if sizes["M"] & (sizes["M"] - 1) or not sizes["M"]:
        raise ShapeError(f"bias: expected a power of two for M, got {sizes['M']}")
    if not all(each.is_contiguous() for each in processors):
        raise ShapeError("processors: expected contiguous tensors")
