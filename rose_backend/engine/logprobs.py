"""Log-probabilities of chosen and of most likely tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.engine.outputs import Logprob
from rose_backend.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """What one step knows about the candidates of each sampled row."""

    logprob: NDArray[np.float32]  # [S], of the sampled token
    rank: NDArray[np.int64]  # [S], 1 = most likely
    top_logprobs: NDArray[np.float32]  # [S, K], falling
    top_token_ids: NDArray[np.int64]  # [S, K]

    def select(self, rows: NDArray[np.bool_]) -> StepLogprobs:
        """Return the entries of some rows."""
        return StepLogprobs(
            self.logprob[rows], self.rank[rows], self.top_logprobs[rows], self.top_token_ids[rows]
        )

    def entry(self, index: int, token_id: int, num_logprobs: int, tokenizer: Tokenizer) -> dict[int, Logprob]:
        """Return the dictionary of row ``index``: its sampled token and its ``num_logprobs`` most likely ones."""
        entry = {
            token_id: Logprob(
                float(self.logprob[index]), int(self.rank[index]), tokenizer.decode_token(token_id)
            )
        }
        top = zip(self.top_token_ids[index].tolist(), self.top_logprobs[index].tolist(), strict=True)
        for rank, (candidate, logprob) in enumerate(list(top)[:num_logprobs], start=1):
            if candidate != token_id:
                entry[candidate] = Logprob(logprob, rank, tokenizer.decode_token(candidate))
        return entry


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> StepLogprobs:
    """Measure the model's own distribution, before anything a request asked for changed it.

    Args:
        logits: float32 ``[S, V]``.
        token_ids: int64 ``[S]``, the sampled tokens.
        num_top: K, may be 0.
    """
    chosen = logits.gather(1, token_ids[:, None])
    log_normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    rank = (logits > chosen).sum(-1) + 1
    top = logits.topk(num_top, dim=-1)
    return StepLogprobs(
        logprob=_to_numpy((chosen - log_normaliser)[:, 0]),
        rank=_to_numpy(rank),
        top_logprobs=_to_numpy(top.values - log_normaliser),
        top_token_ids=_to_numpy(top.indices),
    )


def _to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.cpu().numpy()
    return array
