"""What the sampler takes and what it returns, one entry per row of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """How to choose the next token of each row: bias, penalties, temperature, min-p, top-k, top-p, in this order."""

    temperature: torch.Tensor
    """[R] float32; 0 takes the most likely token; above 1e20 it counts as 1e20: any token that no filter drops."""
    top_k: torch.Tensor
    """[R] int32; only so many most likely tokens, and whatever ties with the last of them; 0 is off."""
    top_p: torch.Tensor
    """[R] float32 in (0, 1]; the fewest most likely tokens that hold this probability together, at least one;
    1 is off."""
    min_p: torch.Tensor
    """[R] float32 in [0, 1]; only tokens at least so probable, relative to the most likely one; 0 is off."""
    seed: torch.Tensor
    """[R] int64, any bits."""
    position: torch.Tensor
    """[R] int64: position of the token to draw. The same seed and position draw the same token in any batch."""
    presence_penalty: torch.Tensor
    """[R] float32, subtracted once from tokens that were generated before; 0 is off."""
    frequency_penalty: torch.Tensor
    """[R] float32, subtracted for each time a token was generated before; 0 is off."""
    repetition_penalty: torch.Tensor
    """[R] float32; logits of tokens in prompt or output are divided by it if positive, else multiplied; 1 is off, and
    what is not between 1e-20 and 1e20 is clamped to them."""
    prompt_mask: torch.Tensor | None = None
    """[R, V] bool: the token is in the row's prompt. None: no row's penalty asks for it."""
    output_counts: torch.Tensor | None = None
    """[R, V] int32: how often the row generated the token. None: no row's penalty asks for it."""
    bias_token_ids: torch.Tensor | None = None
    """[R, M] int32 in [0, V): tokens with a bias; after a row's last one, -1. None: no row has any."""
    bias: torch.Tensor | None = None
    """[R, M] float32, finite or minus infinity, which forbids the token: added to the logits of ``bias_token_ids`` in
    the order given, so a token named twice gets both. None with ``bias_token_ids``."""
    num_logprobs: int = -1
    """Alternatives to report for every row; 0 reports the chosen token's log-probability only, -1 nothing."""
    invalid_token_id: int = 0
    """Returned for a row with nothing to choose: after bias and penalties all its logits are NaN or minus infinity."""

    def select(self, rows: torch.Tensor | slice) -> SamplingTensors:
        """Return the entries of ``rows``, indices or a slice, without the penalties' [R, V] tensors."""
        return SamplingTensors(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            position=self.position[rows],
            presence_penalty=self.presence_penalty[rows],
            frequency_penalty=self.frequency_penalty[rows],
            repetition_penalty=self.repetition_penalty[rows],
            bias_token_ids=None if self.bias_token_ids is None else self.bias_token_ids[rows],
            bias=None if self.bias is None else self.bias[rows],
            num_logprobs=self.num_logprobs,
            invalid_token_id=self.invalid_token_id,
        )


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """The chosen tokens, with log-probabilities where they were asked for.

    Log-probabilities are those of the model itself: log-softmax of the logits before bias, penalties and temperature.
    """

    token_ids: torch.Tensor
    """[R] int64, in [0, V) or ``invalid_token_id``."""
    logprob: torch.Tensor | None
    """[R] float32, of the chosen tokens; None with ``num_logprobs`` -1."""
    top_logprobs: torch.Tensor | None
    """[R, K] float32, falling; None with ``num_logprobs`` -1."""
    top_token_ids: torch.Tensor | None
    """[R, K] int64; None with ``num_logprobs`` -1."""
