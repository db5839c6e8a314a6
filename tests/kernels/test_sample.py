"""The sampler: exact distributions, exact agreement of its two forms, and draws that do not depend on the batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rose_backend.config import (
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)
from rose_backend.errors import ShapeError
from rose_backend.kernels import SamplingTensors, sample, sample_unfused
from rose_backend.kernels.sampling import reference as twin
from rose_backend.kernels.sampling.reference import GREEDY_TEMPERATURE

NUM_DRAWS = 20_000
SIGMAS = 6


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


@pytest.mark.parametrize("draw", [sample, sample_unfused])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.7},
        {"top_p": 0.05},
        {"min_p": 0.1},
        {"top_k": 9, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"top_k": 61},
        {"top_k": 1_000_000, "top_p": 0.95},
    ],
    ids=str,
)
def test_frequencies(draw: Any, filters: dict[str, Any]) -> None:
    logits = heavy_tailed_logits()
    expected = exact_distribution(logits, **{**filters, "top_k": min(filters.get("top_k", 0), len(logits))})
    params = make_params(NUM_DRAWS, **filters)
    token_ids = draw(logits.expand(NUM_DRAWS, -1), params).token_ids
    counts = torch.bincount(token_ids, minlength=len(logits)).tolist()
    for token, probability in enumerate(expected):
        band = SIGMAS * math.sqrt(NUM_DRAWS * probability * (1 - probability))
        if probability == 0.0:
            assert counts[token] == 0, f"token {token} is forbidden"
        assert abs(counts[token] - NUM_DRAWS * probability) <= band, f"token {token}"


def test_draws_over_positions_of_one_seed_are_independent() -> None:
    logits = torch.zeros(NUM_DRAWS, 2)
    params = make_params(NUM_DRAWS, seed=torch.tensor(11), position=torch.arange(NUM_DRAWS))
    token_ids = sample(logits, params).token_ids
    same_as_next = (token_ids[1:] == token_ids[:-1]).double().mean().item()
    assert abs(same_as_next - 0.5) < SIGMAS * 0.5 / math.sqrt(NUM_DRAWS)


def random_case(num_rows: int, vocab_size: int, seed: int) -> tuple[torch.Tensor, SamplingTensors]:
    """Rows with every mix of options, several widths of distribution, and many equal logits."""
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


@pytest.mark.parametrize("vocab_size", [1, 2, 67, 300, 1009, 5003])
def test_fused_and_unfused_choose_the_same(vocab_size: int) -> None:
    for seed in range(2):
        logits, params = random_case(256 if vocab_size <= 1009 else 64, vocab_size, seed)
        if vocab_size < 3:
            params = SamplingTensors(**{**_fields(params), "num_logprobs": 1})
        before = logits.clone()
        fused, unfused = sample(logits, params), sample_unfused(logits, params)
        assert torch.equal(fused.token_ids, unfused.token_ids)
        assert torch.equal(fused.logprob, unfused.logprob)
        assert torch.equal(fused.top_logprobs, unfused.top_logprobs)
        assert torch.equal(logits, before)


def test_candidate_path_is_taken_and_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    full_sorts: list[int] = []
    original = twin._draw_by_full_sort

    def counted(scaled: torch.Tensor, *rest: Any) -> torch.Tensor:
        full_sorts.append(scaled.shape[0])
        return original(scaled, *rest)

    monkeypatch.setattr(twin, "_draw_by_full_sort", counted)
    logits = torch.randn(4, 5003, generator=torch.Generator().manual_seed(0))
    logits[:3] *= 6
    # Row 3 is nearly flat: top-p needs more than the candidates. Row 1 ties over more tokens than there are candidates.
    logits[1] = torch.where(logits[1] > 2, 2.0, logits[1])
    params = make_params(4, top_p=[0.9, 1.0, 0.9, 0.9], top_k=[0, 20, 0, 0])
    expected = sample_unfused(logits, params).token_ids
    assert torch.equal(sample(logits, params).token_ids, expected)
    assert full_sorts == [2]


def test_top_p_counts_ties_of_top_k_beyond_the_candidates() -> None:
    # Of weights 10, 9 and a thousand times 0.02, all within top-k, 30 % is more than the first holds. Of the candidates
    # alone it would be less.
    weights = torch.full((5003,), 1e-4)
    weights[:1002] = 0.02
    weights[500], weights[700] = 10.0, 9.0
    token_ids = sample(weights.log().expand(400, -1), make_params(400, top_k=20, top_p=0.3)).token_ids
    assert set(token_ids.tolist()) == {500, 700}


@pytest.mark.parametrize("vocab_size", [67, 1009])
def test_a_row_draws_the_same_in_any_batch(vocab_size: int) -> None:
    logits, params = random_case(64, vocab_size, seed=9)
    expected = sample(logits, params).token_ids
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    for rows in (order, order[:7], torch.tensor([5, 5, 5]), *order[:16].split(1)):
        chosen = params.select(rows)
        subset = SamplingTensors(
            **{
                **_fields(chosen),
                "prompt_mask": params.prompt_mask[rows],
                "output_counts": params.output_counts[rows],
            }
        )
        assert torch.equal(sample(logits[rows], subset).token_ids, expected[rows])


def test_unfiltered_rows_draw_the_same_across_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(50, 101, generator=torch.Generator().manual_seed(0))
    params = make_params(50)
    expected = sample(logits, params).token_ids
    monkeypatch.setattr(twin, "NOISE_TILE", 300)
    assert torch.equal(sample(logits, params).token_ids, expected)


def test_seed_and_position_matter() -> None:
    logits = torch.zeros(200, 1000)
    base = sample(logits, make_params(200)).token_ids
    assert (base == sample(logits, make_params(200)).token_ids).all()
    other_seed = sample(logits, make_params(200, seed=torch.arange(200) + 10**12)).token_ids
    other_position = sample(logits, make_params(200, position=torch.arange(200) + 99)).token_ids
    high_half_only = sample(logits, make_params(200, seed=torch.arange(200) * 7919 - 5 + (1 << 40))).token_ids
    for other in (other_seed, other_position, high_half_only):
        assert (base == other).sum() < 20


def test_greedy_rows_take_the_first_maximum() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [9.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    params = make_params(3, temperature=0.0, top_k=2, top_p=0.5)
    assert sample(logits, params).token_ids.tolist() == [1, 0, 0]
    assert sample_unfused(logits, params).token_ids.tolist() == [1, 0, 0]


@pytest.mark.parametrize("draw", [sample, sample_unfused])
@pytest.mark.parametrize("filters", [{}, {"top_k": 500}, {"top_p": 0.9999}, {"min_p": 1e-6}], ids=str)
def test_minus_infinity_is_never_drawn(draw: Any, filters: dict[str, Any]) -> None:
    logits = torch.zeros(2000, 600)
    logits[:, ::2] = float("-inf")
    assert (draw(logits, make_params(2000, **filters)).token_ids % 2 == 1).all()


def test_top_k_keeps_ties() -> None:
    logits = torch.tensor([5.0, 4.0, 4.0, 4.0, 1.0]).expand(4000, -1)
    drawn = set(sample(logits, make_params(4000, top_k=2)).token_ids.tolist())
    assert drawn == {0, 1, 2, 3}


def test_top_p_takes_the_fewest_and_the_lower_ids_first() -> None:
    logits = torch.tensor([0.1, 0.3, 0.3, 0.3]).log().expand(4000, -1)
    assert set(sample(logits, make_params(4000, top_p=0.59)).token_ids.tolist()) == {1, 2}
    assert set(sample(logits, make_params(4000, top_p=0.61)).token_ids.tolist()) == {1, 2, 3}
    assert set(sample(logits, make_params(4000, top_p=1e-6)).token_ids.tolist()) == {1}


@pytest.mark.parametrize("draw", [sample, sample_unfused])
def test_logprobs_are_the_models_own(draw: Any) -> None:
    logits, params = random_case(32, 500, seed=4)
    output = draw(logits, params)
    expected = logits.double().log_softmax(-1)
    chosen = expected.gather(1, output.token_ids.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(output.logprob.double(), chosen, rtol=0, atol=1e-5)
    assert output.top_logprobs.shape == output.top_token_ids.shape == (32, 3)
    torch.testing.assert_close(
        output.top_logprobs.double(), expected.sort(descending=True).values[:, :3], rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        output.top_logprobs.double(), expected.gather(1, output.top_token_ids), rtol=0, atol=1e-5
    )
    assert (output.top_logprobs.diff(dim=1) <= 0).all()


def test_logprobs_on_request_only() -> None:
    logits = torch.randn(3, 9)
    none = sample(logits, make_params(3))
    assert (none.logprob, none.top_logprobs, none.top_token_ids) == (None, None, None)
    only_chosen = sample(logits, make_params(3, num_logprobs=0))
    assert only_chosen.logprob.shape == (3,)
    assert only_chosen.top_logprobs.shape == (3, 0)


@pytest.mark.parametrize("draw", [sample, sample_unfused])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_empty_batch(draw: Any, temperature: float) -> None:
    output = draw(torch.zeros(0, 50), make_params(0, temperature=temperature, top_k=3, num_logprobs=2))
    assert output.token_ids.shape == (0,)
    assert output.top_logprobs.shape == (0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": torch.ones(3)}, "temperature: expected R=2, got 3"),
        ({"top_k": torch.ones(2)}, "top_k: expected dtype torch.int32, got torch.float32"),
        ({"output_counts": torch.ones(2, 6, dtype=torch.int32)}, "output_counts: expected V=5, got 6"),
        ({"prompt_mask": torch.ones(2, 5)}, "prompt_mask: expected dtype torch.bool, got torch.float32"),
        (
            {"bias_token_ids": torch.zeros(2, 1, dtype=torch.int32)},
            "bias_token_ids and bias: expected both or neither, got one",
        ),
        (
            {"bias_token_ids": torch.zeros(2, 3, dtype=torch.int32), "bias": torch.zeros(2, 2)},
            "bias: expected M=3, got 2",
        ),
        (
            {"bias_token_ids": torch.zeros(2, 3, dtype=torch.int64), "bias": torch.zeros(2, 3)},
            "bias_token_ids: expected dtype torch.int32, got torch.int64",
        ),
        ({"num_logprobs": 6}, "num_logprobs: expected at most V=5, got 6"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_mismatches_are_named(change: dict[str, Any], message: str) -> None:
    params = SamplingTensors(**{**_fields(make_params(2)), **change})
    for draw in (sample, sample_unfused):
        with pytest.raises(ShapeError, match=message):
            draw(torch.zeros(2, 5), params)


def _fields(params: SamplingTensors) -> dict[str, Any]:
    return {name: getattr(params, name) for name in SamplingTensors.__dataclass_fields__}


def range_ends(num_rows: int, vocab_size: int) -> tuple[torch.Tensor, SamplingTensors]:
    """Logits of +-1e4 under all mixes of the ends of every range that a request may ask for.

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


@pytest.mark.parametrize("vocab_size", [67, 700])
def test_scores_stay_finite_at_the_ends_of_every_range(vocab_size: int) -> None:
    logits, params = range_ends(2000, vocab_size)
    allowed = 3 * vocab_size // 4
    scores = twin.apply_penalties(twin.add_bias(logits, params), params)
    scaled = scores / params.temperature.clamp(min=GREEDY_TEMPERATURE).unsqueeze(1)
    for values in (scores, scaled):
        assert values[:, :allowed].isfinite().all()
        assert (values[:, allowed:] == -math.inf).all()
    drawn = sample(logits, params).token_ids
    assert torch.equal(drawn, sample_unfused(logits, params).token_ids)
    assert drawn.max() < allowed


def beyond_every_range(vocab_size: int) -> tuple[torch.Tensor, SamplingTensors]:
    """Numbers that are 0 or infinite in float32, which no request may ask for, and logits that are NaN.

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


@pytest.mark.parametrize("vocab_size", [67, 700])
def test_no_number_makes_a_forbidden_token(vocab_size: int) -> None:
    logits, params = beyond_every_range(vocab_size)
    drawn = sample(logits, params).token_ids
    assert torch.equal(drawn, sample_unfused(logits, params).token_ids)
    assert drawn.min() >= 5 and drawn.max() <= 7


def test_an_infinite_temperature_draws_any_allowed_token() -> None:
    logits = torch.tensor([-1e4, 3.0, -math.inf, 1e4]).repeat(NUM_DRAWS, 1)
    drawn = sample(logits, make_params(NUM_DRAWS, temperature=math.inf)).token_ids
    counts = torch.bincount(drawn, minlength=4)
    band = SIGMAS * math.sqrt(NUM_DRAWS * 2 / 9)
    assert counts[2] == 0
    assert ((counts[[0, 1, 3]] - NUM_DRAWS / 3).abs() <= band).all()


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_rows_of_nothing_but_nan_take_a_token_of_the_vocabulary(filters: dict[str, Any]) -> None:
    logits = torch.full((6, 300), math.nan)
    for temperature in (0.0, 1.0):
        params = make_params(6, temperature=temperature, **filters)
        assert sample(logits, params).token_ids.tolist() == [0] * 6
        assert sample_unfused(logits, params).token_ids.tolist() == [0] * 6
