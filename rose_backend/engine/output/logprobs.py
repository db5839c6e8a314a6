"""Log-probabilities of chosen and of most likely tokens."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.engine.outputs import Logprob
from rose_backend.engine.token_texts import TokenTexts
from rose_backend.kernels import SampleOutput

LogprobWords = NDArray[np.float32]
"""``[S, 2 + 2K]``, of the rows sampled in a step: log-probability and rank of the sampled token (1 = most likely), then
the K largest log-probabilities, falling, and their tokens. Rank and tokens are the bits of int32 numbers."""


def logprobs_entry(
    words: LogprobWords, token_id: int, num_logprobs: int, texts: TokenTexts, before: list[int]
) -> dict[int, Logprob]:
    """Return the dictionary of one row, ``[2 + 2K]``: its sampled token and its ``num_logprobs`` most likely ones.

    Args:
        before: tokens in front, see ``TokenTexts.text``.
    """
    numbers = words.view(np.int32)
    first_token = 1 + len(words) // 2
    top_logprobs = words[2:first_token][:num_logprobs].tolist()
    top_tokens = numbers[first_token:][:num_logprobs].tolist()
    entry = {token_id: Logprob(float(words[0]), int(numbers[1]), texts.text(token_id, before))}
    for rank, (candidate, logprob) in enumerate(zip(top_tokens, top_logprobs, strict=True), start=1):
        if candidate != token_id:
            entry[candidate] = Logprob(logprob, rank, texts.text(candidate, before))
    return entry


def num_words(num_logprobs: int) -> int:
    """Return the columns of ``LogprobWords``."""
    return 2 + 2 * num_logprobs


def pack_logprobs(logits: torch.Tensor, drawn: SampleOutput) -> torch.Tensor:
    """Return ``LogprobWords`` of a draw with log-probabilities, on its device, without waiting for it.

    They are those of the model's own distribution, before anything a request asked for changed it.

    Args:
        logits: float32 ``[S, V]``, which was drawn from.
    """
    assert drawn.logprob is not None and drawn.top_logprobs is not None and drawn.top_token_ids is not None
    # A row without a token to choose has a negative one. It ends there, and reports nothing.
    token_ids = drawn.token_ids.clamp(min=0)
    rank = (logits > logits.gather(1, token_ids[:, None])).sum(-1) + 1
    numbers = [rank[:, None], drawn.top_token_ids]
    rank_bits, token_bits = (each.to(torch.int32).view(torch.float32) for each in numbers)
    return torch.cat([drawn.logprob[:, None], rank_bits, drawn.top_logprobs, token_bits], dim=1)
