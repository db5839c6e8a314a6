"""Rows of logits, parameters of their draws, and the exact distributions to draw from."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch

from rose_backend.config import (
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)
from rose_backend.kernels import SamplingTensors
from rose_backend.kernels.arguments import LogitsProcessors, LogprobReport, TokenLimits
from rose_backend.kernels.sampling.reference import GREEDY_TEMPERATURE


def fields_of(params: SamplingTensors) -> dict[str, Any]:
    """Return the parameters by name."""
    return {name: getattr(params, name) for name in SamplingTensors.__dataclass_fields__}


def chosen_rows(params: SamplingTensors, rows: Any = slice(None), device: str = "cpu") -> SamplingTensors:
    """Return the parameters of some rows on a device, masks and counts too."""
    fields = {
        name: value[rows].to(device) if isinstance(value, torch.Tensor) else value
        for name, value in fields_of(params).items()
    }
    if params.processors is not None:
        entries, *tables = params.processors
        fields["processors"] = LogitsProcessors(
            entries[rows].to(device), *(table.to(device) for table in tables)
        )
    return SamplingTensors(**fields)


def make_processors(vocab_size: int, *biases: dict[int, float] | None, width: int = 4) -> LogitsProcessors:
    """Return the processors of rows with these biases, minus infinity for a token that is not allowed; None for a row
    without any.

    Rows' entries are in reverse order, behind one that is nobody's and allows nothing.
    """
    shape = (len(biases) + 1, width)
    entries = [-1 if each is None else len(biases) - row for row, each in enumerate(biases)]
    token_ids, bias = torch.full(shape, 2**31 - 1, dtype=torch.int32), torch.full(shape, 99.0)
    is_allowed = torch.zeros(len(biases) + 1, -(-vocab_size // 32) * 32, dtype=torch.int64)
    is_allowed[1:] = 1
    for entry, given in zip(entries, biases, strict=True):
        finite = sorted((token, each) for token, each in (given or {}).items() if each > -math.inf)
        if finite:
            token_ids[entry, : len(finite)] = torch.tensor([token for token, _ in finite])
            bias[entry, : len(finite)] = torch.tensor([each for _, each in finite])
        for token in (given or {}).keys() - dict(finite).keys():
            is_allowed[entry, token] = 0
    words = (is_allowed.view(len(is_allowed), -1, 32) << torch.arange(32)).sum(2)
    # The highest bit is the sign.
    bitmask = ((words + (1 << 31)) % (1 << 32) - (1 << 31)).int()
    return LogitsProcessors(torch.tensor(entries, dtype=torch.int32), bitmask, token_ids, bias)


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
        processors=make_processors(vocab_size, *random_biases(num_rows, vocab_size, generator)),
        num_logprobs=3,
    )
    return logits, params


class Limited(NamedTuple):
    """What may limit the tokens that a row draws."""

    tokens: list[int]
    """Prompt and output."""
    min_tokens: int
    stops: list[int]
    allowed: list[int]
    bad_words: list[list[int]]
    num_prompt_tokens: int = 0

    def is_allowed(self, token: int) -> bool:
        """Return by definition whether a token may be drawn next."""
        output = self.tokens[self.num_prompt_tokens :]
        return not (
            (self.allowed and token not in self.allowed)
            or (len(output) < self.min_tokens and token in self.stops)
            or any(
                word[-1] == token and word[:-1] == output[len(output) - len(word) + 1 :]
                for word in self.bad_words
                if len(word) <= len(output) + 1
            )
        )


def make_limits(rows: list[Limited], sizes: tuple[int, ...] = (5, 8, 6, 20)) -> TokenLimits:
    """Return tables with an entry for each row; ``sizes``: stop tokens, allowed tokens, bad words and their tokens."""

    def table(lists: list[list[int]], width: int) -> torch.Tensor:
        return torch.tensor([each + [-1] * (width - len(each)) for each in lists], dtype=torch.int32)

    drawn = torch.full((len(rows) + 1, sizes[3]), -7)
    for row, limited in enumerate(rows):
        for position, token in enumerate(limited.tokens):
            drawn[row, position % sizes[3]] = token
    return TokenLimits(
        table([[each.num_prompt_tokens, each.num_prompt_tokens + each.min_tokens] for each in rows], 2),
        table([each.stops for each in rows], sizes[0]),
        table([each.allowed for each in rows], sizes[1]),
        table([list(itertools.accumulate(map(len, each.bad_words))) for each in rows], sizes[2]),
        table([list(itertools.chain(*each.bad_words)) for each in rows], sizes[3]),
        drawn,
    )


def random_biases(
    num_rows: int, vocab_size: int, generator: torch.Generator
) -> list[dict[int, float] | None]:
    """Return a few biases of each row; a third of the rows have none."""
    token_ids = torch.randint(0, vocab_size, (num_rows, 4), generator=generator).tolist()
    choices = torch.tensor([2.5, -3.0, 0.7, -math.inf])
    biases = choices[torch.randint(4, (num_rows, 4), generator=generator)].tolist()
    counts = torch.randint(0, 3, (num_rows,), generator=generator).tolist()
    return [
        None if count == 0 else dict(zip(tokens[: 2 * count], values, strict=False))
        for tokens, values, count in zip(token_ids, biases, counts, strict=True)
    ]


def range_ends(num_rows: int, vocab_size: int) -> tuple[torch.Tensor, SamplingTensors]:
    """Return logits of +-1e4 under all mixes of the ends of every range that a request may ask for.

    Tokens from ``3 * vocab_size // 4`` on are forbidden, the last two by their bitmask. Counts reach 131,072, the
    longest window there is.
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
    forbidden = {vocab_size - 2: -math.inf, vocab_size - 1: -math.inf}
    return logits, make_params(
        num_rows,
        **columns,
        prompt_mask=torch.rand(num_rows, vocab_size, generator=generator) < 0.5,
        output_counts=counts,
        processors=make_processors(vocab_size, *[forbidden] * num_rows),
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


def new_report(num_rows: int, num_logprobs: int, device: str) -> LogprobReport:
    """Return views of one poisoned record per row, as graphs have them."""
    record = torch.full((num_rows, 3 * num_logprobs + 8), -77, dtype=torch.int64, device=device)
    values = record[:, num_logprobs + 2 :].view(torch.float32)[:, : num_logprobs + 1]
    return LogprobReport(record[:, : num_logprobs + 1], values, record[:, num_logprobs + 1])
