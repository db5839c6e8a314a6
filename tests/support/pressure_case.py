"""Two hundred greedy requests that overlap in every way, and what transformers makes of each of them alone.

A third continue one of a few stems, most of them from inside a block; a fifth ask exactly what others ask; the rest
have nothing in common with anybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from tests.support.reference_generation import SAFE_LEAD, Prompts, greedy_reference

MAX_NUM_NEW_TOKENS = 48
NUM_REQUESTS = 200
NUM_COPIES = 4
"""How often an equal prompt is asked."""

_STEM_LENGTH = 200
_CUTS = (20, 37, 64, 95, 128, 151, 200)
"""Where a request leaves its stem: inside blocks of 16 tokens but for two."""
_TAILS = (1, 7, 16, 30)
_EQUAL_LENGTHS = (5, 33, 64, 100, 180)
_FRESH_LENGTHS = (1, 15, 16, 17, 50, 90, 130, 250)


@dataclass(frozen=True)
class PressureCase:
    """Requests in the order in which they arrive, entry ``i`` of each field belonging to request ``i``."""

    prompts: Prompts
    max_tokens: tuple[int, ...]
    expected: Prompts
    """Greedy tokens of each request, cut to its ``max_tokens``."""
    kinds: tuple[str, ...]
    """"stem", "equal" or "fresh"."""

    def num_blocks_needed(self, block_size: int) -> int:
        """Return the blocks that all requests hold at once; what prompts share in full blocks counts once."""
        shared = set()
        num_own = 0
        for prompt, max_tokens in zip(self.prompts, self.max_tokens, strict=True):
            num_full = len(prompt) // block_size
            shared.update(prompt[: (index + 1) * block_size] for index in range(num_full))
            num_own += -(-(len(prompt) + max_tokens - 1) // block_size) - num_full
        return len(shared) + num_own

    def sample(self, count: int) -> list[int]:
        """Return ``count`` indices spread over the list."""
        return [index * len(self.prompts) // count for index in range(count)]


@lru_cache(maxsize=4)
def pressure_case(model_path: str | Path, vocab_size: int, num_requests: int = NUM_REQUESTS) -> PressureCase:
    """Return ``num_requests`` requests for one model.

    Prompts after which two likeliest tokens are close are left out, as ``tie_free_case`` does: rounding may decide
    there. Only the reference is looked at.

    Args:
        vocab_size: ids are drawn from ``[1, vocab_size)``.
    """
    random = np.random.default_rng(0)
    num_stem, num_distinct_equal = num_requests * 2 // 5, num_requests // 5 // NUM_COPIES
    num_fresh = num_requests - num_stem - num_distinct_equal * NUM_COPIES
    wanted = {"stem": num_stem, "equal": num_distinct_equal, "fresh": num_fresh}
    groups = {
        "stem": _stem_prompts(random, vocab_size, num_stem * 3 // 2),
        "equal": _prompts(random, vocab_size, _EQUAL_LENGTHS, num_distinct_equal * 2),
        "fresh": _prompts(random, vocab_size, _FRESH_LENGTHS, num_fresh * 3 // 2),
    }
    candidates = tuple(prompt for group in groups.values() for prompt in group)
    reference = greedy_reference(model_path, candidates, MAX_NUM_NEW_TOKENS)
    answer_to = {
        prompt: answer
        for prompt, answer, leads in zip(candidates, reference.token_ids, reference.leads, strict=True)
        if min(leads) > SAFE_LEAD
    }
    chosen: list[tuple[str, tuple[int, ...]]] = []
    for kind, group in groups.items():
        clear = [prompt for prompt in group if prompt in answer_to][: wanted[kind]]
        assert len(clear) == wanted[kind], f"{kind}: only {len(clear)} prompts have no ties"
        chosen += [(kind, prompt) for prompt in clear] * (NUM_COPIES if kind == "equal" else 1)
    random.shuffle(chosen)
    max_tokens = tuple(random.integers(MAX_NUM_NEW_TOKENS // 2, MAX_NUM_NEW_TOKENS + 1, len(chosen)).tolist())
    prompts = tuple(prompt for _, prompt in chosen)
    expected = tuple(answer_to[prompt][:count] for prompt, count in zip(prompts, max_tokens, strict=True))
    return PressureCase(prompts, max_tokens, expected, tuple(kind for kind, _ in chosen))


def _prompts(random: np.random.Generator, vocab_size: int, lengths: tuple[int, ...], count: int) -> Prompts:
    return tuple(
        tuple(random.integers(1, vocab_size, lengths[index % len(lengths)]).tolist())
        for index in range(count)
    )


def _stem_prompts(random: np.random.Generator, vocab_size: int, count: int) -> Prompts:
    stems = _prompts(random, vocab_size, (_STEM_LENGTH,), 5)
    prompts = []
    for index in range(count):
        tail = random.integers(1, vocab_size, _TAILS[index % len(_TAILS)]).tolist()
        prompts.append((*stems[index % len(stems)][: _CUTS[index % len(_CUTS)]], *tail))
    return tuple(prompts)
