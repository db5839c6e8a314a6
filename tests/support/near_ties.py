"""Draws that two right computations may decide differently, because the best two tokens are all but equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from rose_backend import SamplingParams, kernels
from tests.support.reference_generation import reference_logits

DISTURBANCE = 1e-4
"""At most so much is added to or taken off each logit. On a GPU, log-probabilities of one prompt,
computed in float32 in several ways, were seen to differ by a third of it."""


def near_ties(
    path: Path,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    outputs: Sequence[list[list[int]]],
) -> list[tuple[int, int, int]]:
    """Return request, completion and position of each draw that transformers' logits, or these with small changes, do
    not give.

    Args:
        outputs: tokens of each completion of each request; requests have a seed and ignore the end of text.
    """
    random = torch.Generator().manual_seed(0)
    found = []
    for request, (prompt, sampling, completions) in enumerate(zip(prompts, params, outputs, strict=True)):
        for completion, tokens in enumerate(completions):
            all_logits = reference_logits(path, prompt + tokens).float()
            logits = all_logits[len(prompt) - 1 : len(prompt) + len(tokens) - 1].clone()
            if sampling.min_tokens:
                logits[: sampling.min_tokens, list(sampling.stop_token_ids or ())] = float("-inf")
            for token_id, bias in (sampling.logit_bias or {}).items():
                logits[:, token_id] += bias
            if sampling.allowed_token_ids:
                is_allowed = torch.zeros(logits.shape[1], dtype=torch.bool)
                is_allowed[list(sampling.allowed_token_ids)] = True
                logits[:, ~is_allowed] = float("-inf")
            for word in bad_words_as_tokens(path, sampling.bad_words or ()):
                for position in range(len(word) - 1, len(tokens)):
                    if tokens[position - len(word) + 1 : position] == word[:-1]:
                        logits[position, word[-1]] = float("-inf")
            tensors = _sampling_tensors(sampling, prompt, tokens, completion, logits.shape[1])
            for disturbance in (0.0, DISTURBANCE, DISTURBANCE, DISTURBANCE):
                noise = (2 * torch.rand(logits.shape, generator=random) - 1) * disturbance
                drawn = kernels.sample(logits + noise, tensors).token_ids
                differs = drawn != torch.tensor(tokens)
                found += [(request, completion, position) for position in differs.nonzero()[:, 0].tolist()]
    return sorted(set(found))


def bad_words_as_tokens(path: Path, words: Sequence[str]) -> list[list[int]]:
    """Return each word's tokens by transformers, and those after a space where they are as many and begin otherwise."""
    tokenizer, found = AutoTokenizer.from_pretrained(path), []
    for word in words:
        bare, spaced = (
            tokenizer.encode(start + word.lstrip(), add_special_tokens=False) for start in ("", " ")
        )
        found += [bare, spaced] if len(spaced) == len(bare) and spaced[:1] != bare[:1] else [bare]
    return found


def _sampling_tensors(
    sampling: SamplingParams, prompt: list[int], tokens: list[int], completion: int, vocab_size: int
) -> kernels.SamplingTensors:
    """Describe the draws of all tokens of one completion, one row each."""
    num_rows = len(tokens)

    def rows(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype)

    one_hot = torch.nn.functional.one_hot(torch.tensor(tokens), vocab_size)
    counts = (one_hot.cumsum(0) - one_hot).to(torch.int32)
    prompt_mask = torch.zeros((num_rows, vocab_size), dtype=torch.bool)
    prompt_mask[:, prompt] = True
    assert sampling.seed is not None, "a draw without a seed cannot be repeated"
    return kernels.SamplingTensors(
        temperature=rows(0.0 if sampling.is_greedy else sampling.temperature),
        top_k=rows(max(sampling.top_k, 0), torch.int32),
        top_p=rows(sampling.top_p),
        min_p=rows(sampling.min_p),
        seed=rows(sampling.seed + completion, torch.int64),
        position=torch.arange(len(prompt), len(prompt) + num_rows),
        presence_penalty=rows(sampling.presence_penalty),
        frequency_penalty=rows(sampling.frequency_penalty),
        repetition_penalty=rows(sampling.repetition_penalty),
        prompt_mask=prompt_mask,
        output_counts=counts,
    )
