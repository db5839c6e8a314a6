"""Greedy generation by transformers in float32: the yardstick for both engines.

Prompts of one length are generated as one batch, so no padding enters the arithmetic. Every token comes with its
lead over the runner-up: where a comparison fails, a lead below 1e-4 means a tie that either side may win, anything
else a bug.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

NUM_PROMPTS = 64
NUM_NEW_TOKENS = 64
SAFE_LEAD = 2e-4
"""Rounding differs by about 1e-5 between two ways of computing a logit in float32."""

Prompts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class GreedyReference:
    """What transformers generates greedily, one entry per prompt in the order given."""

    token_ids: tuple[tuple[int, ...], ...]
    leads: tuple[tuple[float, ...], ...]
    """Logit of each token minus the largest other logit."""

    def explain_difference(self, index: int, actual: list[int]) -> str:
        """Say where ``actual`` leaves the reference and by how little the reference token had won there."""
        expected = self.token_ids[index]
        for position, (want, got) in enumerate(zip(expected, actual, strict=False)):
            if want != got:
                lead = self.leads[index][position]
                return f"prompt {index}: token {position} is {got}, expected {want} (lead {lead:.2e})"
        return f"prompt {index}: {len(actual)} tokens, expected {len(expected)}"


def prompt_lengths(block_size: int = 16) -> tuple[int, ...]:
    """Lengths around a block boundary, and two that take several blocks and chunks."""
    return (1, block_size - 1, block_size, block_size + 1, 200, 900)


def parity_prompts(vocab_size: int, *, block_size: int = 16, seed: int = 0) -> Prompts:
    """Return 64 random prompts of all ``prompt_lengths``, the two long ones rarer, lengths mixed in order.

    Args:
        vocab_size: ids are drawn from ``[1, vocab_size)``, so that the end-of-text token can be left out.
        seed: change it when two likeliest tokens tie somewhere, see ``GreedyReference.leads``.
    """
    random = np.random.default_rng(seed)
    *short, long, longest = prompt_lengths(block_size)
    lengths = [longest] * 3 + [long] * 5
    lengths += [short[index % len(short)] for index in range(NUM_PROMPTS - len(lengths))]
    random.shuffle(lengths)
    return tuple(tuple(random.integers(1, vocab_size, length).tolist()) for length in lengths)


@lru_cache(maxsize=4)
def tie_free_case(
    model_path: str | Path, vocab_size: int, *, block_size: int = 16
) -> tuple[Prompts, GreedyReference]:
    """Return the first ``parity_prompts`` for which no two likeliest tokens are close, and what follows them.

    Looks at one model only, the reference: that the other side agrees is still to be shown.
    """
    for seed in range(64):
        prompts = parity_prompts(vocab_size, block_size=block_size, seed=seed)
        reference = greedy_reference(model_path, prompts)
        if min(min(leads) for leads in reference.leads) > SAFE_LEAD:
            return prompts, reference
    raise AssertionError(f"{model_path}: every seed has a tie")


@lru_cache(maxsize=64)
def greedy_reference(
    model_path: str | Path, prompts: Prompts, num_new_tokens: int = NUM_NEW_TOKENS
) -> GreedyReference:
    """Generate ``num_new_tokens`` for every prompt, past any end-of-text token. Computed once per process."""
    model = load_reference_model(model_path)
    token_ids: list[tuple[int, ...]] = [()] * len(prompts)
    leads: list[tuple[float, ...]] = [()] * len(prompts)
    for indices in _by_length(prompts):
        batch = torch.tensor([prompts[index] for index in indices])
        batch_tokens, batch_leads = _generate_batch(model, batch, num_new_tokens)
        for row, index in enumerate(indices):
            token_ids[index] = tuple(batch_tokens[row].tolist())
            leads[index] = tuple(batch_leads[row].tolist())
    return GreedyReference(tuple(token_ids), tuple(leads))


def tie_free_answer(model_path: str | Path, prompt: Sequence[int], num_new_tokens: int) -> tuple[int, ...]:
    """Return the greedy continuation of one prompt; fails where two likeliest tokens are close."""
    reference = greedy_reference(model_path, (tuple(prompt),), num_new_tokens)
    assert min(reference.leads[0]) > SAFE_LEAD, "choose another prompt: two tokens are equally likely"
    return reference.token_ids[0]


@torch.inference_mode()
def greedy_differences(model_path: str | Path, prompts: Prompts, outputs: list[list[int]]) -> list[str]:
    """Check outputs of one length against greedy generation with one forward pass per prompt length.

    When every output token is the likeliest one behind its prompt and the output before it, the output is what greedy
    generation gives. For models that are too slow to generate a reference with.

    Returns:
        One line for each output that differs, with the lead of the expected token.
    """
    model = load_reference_model(model_path)
    num_new_tokens = len(outputs[0])
    differences = []
    for indices in _by_length(prompts):
        batch = torch.tensor([[*prompts[index], *outputs[index]] for index in indices])
        logits = model(batch, use_cache=False, logits_to_keep=num_new_tokens + 1).logits[:, :-1].float()
        chosen = batch[:, -num_new_tokens:]
        shortfall = logits.amax(-1) - logits.gather(-1, chosen[..., None])[..., 0]
        for row, index in enumerate(indices):
            wrong = torch.nonzero(logits[row].argmax(-1) != chosen[row]).flatten().tolist()
            if wrong:
                lead = float(shortfall[row, wrong[0]])
                differences.append(f"prompt {index}: token {wrong[0]} is not the likeliest (by {lead:.2e})")
    return differences


@lru_cache(maxsize=2)
def load_reference_model(model_path: str | Path) -> torch.nn.Module:
    """Load a checkpoint with transformers in float32."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(str(model_path), dtype=torch.float32)
    return model.eval()


@torch.inference_mode()
def reference_logits(model_path: str | Path, token_ids: list[int]) -> torch.Tensor:
    """Return float32 logits ``[len(token_ids), V]``, row ``i`` predicting token ``i + 1``."""
    return load_reference_model(model_path)(torch.tensor([token_ids])).logits[0].float()


def _by_length(prompts: Prompts) -> list[list[int]]:
    indices: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        indices[len(prompt)].append(index)
    return list(indices.values())


@torch.inference_mode()
def _generate_batch(
    model: torch.nn.Module, input_ids: torch.Tensor, num_new_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, leads, cache = [], [], None
    with _threads_for(model):
        for _ in range(num_new_tokens):
            result = model(input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = result.past_key_values
            top = result.logits[:, -1].float().topk(2, dim=-1)
            tokens.append(top.indices[:, 0])
            leads.append(top.values[:, 0] - top.values[:, 1])
            input_ids = tokens[-1][:, None]
    return torch.stack(tokens, 1), torch.stack(leads, 1)


@contextlib.contextmanager
def _threads_for(model: torch.nn.Module) -> Iterator[None]:
    """Use one thread for a small model: on a busy machine waking a second one takes longer than its share."""
    before = torch.get_num_threads()
    if sum(parameter.numel() for parameter in model.parameters()) < 10_000_000:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
