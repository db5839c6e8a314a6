"""What float32 says of tokens that were generated greedily in half precision.

Two right computations in half precision part where two tokens are almost equally likely. How close that is, is measured
on the side that is trusted: by how much its log-probabilities differ from float32's behind the same tokens.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.reference_generation import Prompts, load_reference_model

NUM_PROMPTS = 200


@dataclass(frozen=True)
class Judged:
    """Tokens of one output in float32's eyes, each behind the prompt and the tokens before it."""

    token_ids: tuple[int, ...]
    logprobs: torch.Tensor  # [N] float32
    leads: torch.Tensor  # [N] float32
    """Logit of each token minus the largest other one: below 0, float32 prefers another."""


@torch.inference_mode()
def judge(
    model_path: str | Path,
    prompts: Prompts,
    outputs: Sequence[Sequence[int]],
    *,
    change: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
) -> list[Judged]:
    """Run prompts and outputs through transformers in float32, on a GPU where there is one.

    Args:
        change: makes another model of a copy, which is run in its place.
    """
    model = _reference_model(model_path)
    if change is not None:
        model = change(copy.deepcopy(model))
    device = model.device
    alike = defaultdict(list)
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        alike[len(prompt), len(output)].append(index)
    judged: dict[int, Judged] = {}
    for (_, num_new), indices in alike.items():
        batch = torch.tensor([[*prompts[index], *outputs[index]] for index in indices], device=device)
        logits = model(batch, use_cache=False, logits_to_keep=num_new + 1).logits[:, :-1].float()
        chosen = batch[:, -num_new:, None]
        logprobs = logits.log_softmax(-1).gather(-1, chosen)[..., 0]
        own = logits.gather(-1, chosen)[..., 0]
        leads = own - logits.scatter(-1, chosen, float("-inf")).amax(-1)
        for row, index in enumerate(indices):
            judged[index] = Judged(tuple(outputs[index]), logprobs[row].cpu(), leads[row].cpu())
    return [judged[index] for index in range(len(prompts))]


def logprob_errors(judged: Sequence[Judged], completions: Sequence[Any]) -> torch.Tensor:
    """Return by how much the log-probabilities that vLLM gave differ from float32's, of all tokens together.

    Args:
        completions: vLLM's ``CompletionOutput``s of requests with ``logprobs=0`` or more.
    """
    errors = []
    for exact, completion in zip(judged, completions, strict=True):
        steps = zip(completion.token_ids, completion.logprobs, strict=True)
        got = torch.tensor([step[token].logprob for token, step in steps])
        errors.append((got - exact.logprobs).abs())
    return torch.cat(errors)


def wrong_tokens(judged: Sequence[Judged], tolerance: float) -> list[str]:
    """Return one line for each output with a token that float32 puts more than ``tolerance`` behind another one."""
    lines = []
    for index, output in enumerate(judged):
        behind = (output.leads < -tolerance).nonzero().flatten().tolist()
        if behind:
            by = -float(output.leads[behind[0]])
            lines.append(f"prompt {index}: token {behind[0]} of {len(output.leads)} is behind by {by:.2e}")
    return lines


def num_disputed(judged: Sequence[Judged]) -> int:
    """Return how many tokens float32 would have chosen otherwise."""
    return sum(int((output.leads < 0).sum()) for output in judged)


def first_differences(ours: Sequence[Judged], theirs: Sequence[Judged]) -> list[tuple[int, int]]:
    """Return prompt and place where two sides part, for each prompt for which they do."""
    found = []
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        pairs = zip(one.token_ids, other.token_ids, strict=True)
        place = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if place is not None:
            found.append((index, place))
    return found


def mixed_prompts(vocab_size: int, *, max_len: int = 900, seed: int = 0) -> tuple[Prompts, list[int]]:
    """Return 200 prompts and numbers of new tokens.

    Half of the prompts begin with one of five texts that end inside a block of 16 tokens; lengths go from 1 to
    ``max_len``, short ones more often.
    """
    random = np.random.default_rng(seed)
    texts = [random.integers(1, vocab_size, length).tolist() for length in (37, 90, 203, 330, 501)]
    lengths = np.exp(random.uniform(0, np.log(max_len), NUM_PROMPTS)).astype(int)
    prompts = []
    for index, length in enumerate(lengths.tolist()):
        shared = texts[index // 2 % len(texts)] if index % 2 else []
        own = random.integers(1, vocab_size, max(1, length - len(shared))).tolist()
        prompts.append((*shared, *own))
    order = random.permutation(NUM_PROMPTS)
    return tuple(prompts[index] for index in order), random.integers(8, 49, NUM_PROMPTS).tolist()


@lru_cache(maxsize=1)
def _reference_model(model_path: str | Path) -> torch.nn.Module:
    # A copy: others want theirs on the CPU.
    model = copy.deepcopy(load_reference_model(model_path))
    return model.to("cuda" if torch.cuda.is_available() else "cpu")
