"""Rows of logits, parameters of their draws, and the exact distributions to draw from."""

from __future__ import annotations

import math
from typing import Any

import torch

from rose_backend.config import (
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)
from rose_backend.kernels import SamplingTensors
from rose_backend.kernels.sampling.reference import GREEDY_TEMPERATURE


def fields_of(params: SamplingTensors) -> dict[str, Any]:
    """Return the parameters by name."""
    return {name: getattr(params, name) for name in SamplingTensors.__dataclass_fields__}


def chosen_rows(params: SamplingTensors, rows: Any = slice(None), device: str = "cpu") -> SamplingTensors:
    """Return the parameters of some rows on a device, masks and counts too."""
    return SamplingTensors(
        **{
            name: value[rows].to(device) if isinstance(value, torch.Tensor) else value
            for name, value in fields_of(params).items()
        }
    )


def make_params(num_rows: int, **values: Any) -> SamplingTensors:
    """Build parameters from scalars or lists; what is not given is off. Seeds and positions differ by row."""

    def column(name: str, off: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.as_tensor(values.pop(name, off)).to(dtype).expand(num_rows).clone()

    params = {
        "temperature": column("temperature", 1.0),
        "top_k": column("top_k", 0, torch.int32),
        "top_p": column("top_p", 1.0),
        "min_p": column("min_p", 0.0),
        "seed": torch.as_tensor(values.pop("seed", torch.arange(num_rows) * 7919 - 5))
        .expand(num_rows)
        .clone(),
        "position": torch.as_tensor(values.pop("position", torch.arange(num_rows) % 13))
        .expand(num_rows)
        .clone(),
        "presence_penalty": column("presence_penalty", 0.0),
        "frequency_penalty": column("frequency_penalty", 0.0),
        "repetition_penalty": column("repetition_penalty", 1.0),
    }
    return SamplingTensors(**params, **values)


def rows_without_a_token(vocab_size: int) -> tuple[torch.Tensor, list[int | None]]:
    """Return rows of logits that allow no token or only one, and that token, None where there is none."""
    nan, infinity = float("nan"), float("inf")
    logits = torch.full((6, vocab_size), nan)
    logits[1] = -infinity
    logits[2, ::2] = -infinity
    logits[3, vocab_size - 1] = -1e30
    logits[4, 1] = infinity
    logits[5] = -infinity
    logits[5, 7] = 0.0
    return logits, [None, None, None, vocab_size - 1, 1, 7]


def heavy_tailed_logits(vocab_size: int = 61) -> torch.Tensor:
    """Return one row, a power law over shuffled tokens."""
    ranks = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(3)) + 1
    return -1.2 * ranks.float().log()


def exact_distribution(
    logits: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """Return the distribution to draw from, step by step as defined, token by token."""
    weights = [math.exp(value / temperature) for value in logits.tolist()]
    kept = [weight >= min_p * max(weights) for weight in weights]
    if top_k:
        threshold = sorted(weights, reverse=True)[:top_k][-1]
        kept = [keep and weight >= threshold for keep, weight in zip(kept, weights, strict=True)]
    total = sum(weight for weight, keep in zip(weights, kept, strict=True) if keep)
    mass = 0.0
    for token in sorted(range(len(weights)), key=lambda token: -weights[token]):
        if not kept[token]:
            continue
        if top_p < 1.0 and mass >= top_p * total:
            kept[token] = False
        mass += weights[token]
    total = sum(weight for weight, keep in zip(weights, kept, strict=True) if keep)
    return [weight / total if keep else 0.0 for weight, keep in zip(weights, kept, strict=True)]


def random_case(num_rows: int, vocab_size: int, seed: int) -> tuple[torch.Tensor, SamplingTensors]:
    """Return rows with every mix of options, several widths of distribution, and many equal logits."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices: float) -> torch.Tensor:
        return torch.tensor(choices)[torch.randint(len(choices), (num_rows,), generator=generator)]

    logits = torch.randn(num_rows, vocab_size, generator=generator) * pick(0.1, 1.0, 4.0).unsqueeze(1)
    coarse = pick(0, 1).bool().unsqueeze(1)
    logits = torch.where(coarse, (logits * 2).round() / 2, logits)
    counts = torch.randint(0, 3, (num_rows, vocab_size), generator=generator, dtype=torch.int32)
    params = make_params(
        num_rows,
        temperature=pick(0.0, 0.5, 1.0, 1.5),
        top_k=pick(0, 0, 1, 5, 40, vocab_size, vocab_size + 9),
        top_p=pick(1.0, 1.0, 0.3, 0.9, 0.999),
        min_p=pick(0.0, 0.0, 0.02, 0.5),
        presence_penalty=pick(0.0, 0.5, -0.5),
        frequency_penalty=pick(0.0, 0.3),
        repetition_penalty=pick(1.0, 1.3, 0.8),
        prompt_mask=torch.rand(num_rows, vocab_size, generator=generator) < 0.2,
        output_counts=counts,
        bias_token_ids=torch.where(
            torch.arange(4) < pick(0, 2, 4).unsqueeze(1),
            torch.randint(0, vocab_size, (num_rows, 4), generator=generator),
            -1,
        ).int(),
        bias=torch.stack(
            [pick(2.5, -3.0), pick(-1.0, 0.7), pick(-math.inf, 0.1), pick(-math.inf, 4.0)], dim=1
        ),
        num_logprobs=3,
    )
    return logits, params


def range_ends(num_rows: int, vocab_size: int) -> tuple[torch.Tensor, SamplingTensors]:
    """Return logits of +-1e4 under all mixes of the ends of every range that a request may ask for.

    Tokens from ``3 * vocab_size // 4`` on are forbidden, the last two by their bias. Counts reach 131,072, the longest
    window there is.
    """
    ends: dict[str, tuple[float, ...]] = {
        "temperature": (0.0, 9.9e-6, GREEDY_TEMPERATURE, 1.0, MAX_TEMPERATURE),
        "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
        "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
        "top_k": (0, 1, vocab_size),
        # The least that a float64 holds is 0 in float32.
        "top_p": (5e-324, 1e-45, 1.0),
        "min_p": (0.0, 5e-324, 1e-45, 1.0),
    }
    generator = torch.Generator().manual_seed(vocab_size)
    columns = {
        name: torch.tensor(values, dtype=torch.float64)[
            torch.randint(len(values), (num_rows,), generator=generator)
        ]
        for name, values in ends.items()
    }
    logits = (torch.rand(num_rows, vocab_size, generator=generator) * 2 - 1) * 1e4
    logits[::2] = logits[::2].sign() * 1e4
    counts = torch.randint(0, 2, (num_rows, vocab_size), generator=generator, dtype=torch.int32) * 131_072
    logits[:, 3 * vocab_size // 4 : vocab_size - 2] = -math.inf
    forbidden = torch.arange(vocab_size - 2, vocab_size, dtype=torch.int32).expand(num_rows, -1)
    return logits, make_params(
        num_rows,
        **columns,
        prompt_mask=torch.rand(num_rows, vocab_size, generator=generator) < 0.5,
        output_counts=counts,
        bias_token_ids=forbidden,
        bias=torch.full(forbidden.shape, -math.inf),
    )


def beyond_every_range(vocab_size: int) -> tuple[torch.Tensor, SamplingTensors]:
    """Return numbers that are 0 or infinite in float32, which no request may ask for, and logits that are NaN.

    Only tokens 5, 6 and 7 are allowed. All are in the prompt.
    """
    options = [
        (temperature, repetition, top_k, top_p)
        for temperature in (0.0, 1.0, 1e39, math.inf)
        for repetition in (1.0, 1e-46, 1e-38, 1e39)
        for top_k in (0, 2)
        for top_p in (0.0, 0.7)
    ]
    temperature, repetition, top_k, top_p = zip(*options, strict=True)
    logits = torch.full((len(options), vocab_size), -math.inf)
    logits[:, 5], logits[:, 6], logits[:, 7] = -1e4, 0.0, 1e4
    logits[::2, 2:5], logits[::3, 60:] = math.nan, math.nan
    return logits, make_params(
        len(options),
        temperature=torch.tensor(temperature, dtype=torch.float64),
        repetition_penalty=torch.tensor(repetition, dtype=torch.float64),
        top_k=list(top_k),
        top_p=list(top_p),
        prompt_mask=torch.ones(len(options), vocab_size, dtype=torch.bool),
    )
