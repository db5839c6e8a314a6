"""Head and sampler in one on a device: the tokens of ``sample``, exact distributions, no dependence on the batch."""

from __future__ import annotations

import pytest
import torch

from rose_backend.kernels import lm_head_sample
from tests.kernels.test_lm_head import expected_tokens, far_from_zero, whole_numbers

pytestmark = pytest.mark.gpu

SIGMAS = 6


def random_case(
    num_rows: int, vocab_size: int, depth: int = 768, dtype: torch.dtype = torch.float16, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    _, _, draws = whole_numbers(num_rows, 1, 1, seed)
    hidden = torch.randn(num_rows, depth, device="cuda", dtype=dtype)
    lm_head = torch.randn(vocab_size, depth, device="cuda", dtype=dtype) * 0.1
    return hidden, lm_head, {name: value.cuda() for name, value in draws.items()}


def select(draws: dict[str, torch.Tensor], rows: torch.Tensor | slice) -> dict[str, torch.Tensor]:
    return {name: value[rows] for name, value in draws.items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab_size", [3, 301, 50_257])
@pytest.mark.parametrize("num_rows", [1, 16, 31, 64, 100, 256])
def test_exact_products_give_the_tokens_of_the_sampler(
    num_rows: int, vocab_size: int, dtype: torch.dtype
) -> None:
    # Of 120 products of up to 2, no sum is above 240: exact in bfloat16 too.
    hidden, lm_head, draws = whole_numbers(num_rows, vocab_size, 120, seed=num_rows)
    hidden, lm_head = hidden.to("cuda", dtype), lm_head.to("cuda", dtype)
    draws = {name: value.cuda() for name, value in draws.items()}
    actual = lm_head_sample(hidden, lm_head, **draws)
    assert torch.equal(actual, expected_tokens(hidden, lm_head, draws))


def test_races_that_float32_cannot_decide() -> None:
    hidden, lm_head, draws = far_from_zero(256, 301)
    hidden, lm_head = hidden.half().cuda(), lm_head.half().cuda()
    draws = {name: value.cuda() for name, value in draws.items()}
    actual = lm_head_sample(hidden, lm_head, **draws)
    assert torch.equal(actual, expected_tokens(hidden, lm_head, draws))


@pytest.mark.parametrize("vocab_size", [32_000, 128_256, 151_936])
def test_rounded_products_give_nearly_all_tokens_of_the_sampler(vocab_size: int) -> None:
    hidden, lm_head, draws = random_case(256, vocab_size)
    actual = lm_head_sample(hidden, lm_head, **draws)
    expected = expected_tokens(hidden, lm_head, draws)
    logits = torch.nn.functional.linear(hidden, lm_head).float()
    assert (actual != expected).sum() <= 10
    # Where greedy rows differ, the logits of both tokens are within two steps of float16.
    greedy = draws["temperature"] == 0
    chosen = logits.gather(1, actual[:, None])[greedy, 0]
    best = logits.gather(1, expected[:, None])[greedy, 0]
    assert ((best - chosen) <= 2 * 2.0**-10 * best.abs()).all()


def test_a_row_draws_the_same_in_any_batch() -> None:
    hidden, lm_head, draws = random_case(256, 50_257)
    whole = lm_head_sample(hidden, lm_head, **draws)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1)).cuda()
    # Blocks of 16, 32, 64 and 128 rows, one and two of them.
    for rows in (
        order,
        order[:130],
        order[:128],
        order[:70],
        order[:64],
        order[:33],
        order[:32],
        order[:16],
        *order.split(1),
    ):
        part = lm_head_sample(hidden[rows], lm_head, **select(draws, rows))
        assert torch.equal(part, whole[rows])


def test_frequencies() -> None:
    num_draws, vocab_size = 200_000, 301
    # Logit i is -1.2 log(rank of i), heavy-tailed; the first column of the head holds all of it.
    ranks = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(3)) + 1
    lm_head = torch.zeros(vocab_size, 64)
    lm_head[:, 0] = -1.2 * ranks.log()
    lm_head = lm_head.half().cuda()
    hidden = torch.zeros(num_draws, 64, dtype=torch.float16, device="cuda")
    hidden[:, 0] = 1.0
    for temperature in (1.0, 0.7):
        tokens = lm_head_sample(
            hidden,
            lm_head,
            temperature=torch.full((num_draws,), temperature, device="cuda"),
            seed=torch.arange(num_draws, device="cuda") * 7919 - 5,
            position=torch.arange(num_draws, device="cuda") % 13,
        )
        expected = (lm_head[:, 0].double() / temperature).softmax(0).cpu()
        counts = torch.bincount(tokens.cpu(), minlength=vocab_size).double()
        band = SIGMAS * (num_draws * expected * (1 - expected)).sqrt() + 1
        assert ((counts - num_draws * expected).abs() <= band).all()


def test_a_thousand_runs_agree_bit_for_bit() -> None:
    hidden, lm_head, draws = random_case(70, 50_257)
    first = lm_head_sample(hidden, lm_head, **draws)
    for _ in range(1000):
        assert torch.equal(lm_head_sample(hidden, lm_head, **draws), first)


def test_replayed_graphs_read_their_inputs_anew() -> None:
    hidden, lm_head, draws = random_case(20, 50_257)
    others = random_case(20, 50_257, seed=5)
    lm_head_sample(hidden, lm_head, **draws)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = lm_head_sample(hidden, lm_head, **draws)
    graph.replay()
    assert torch.equal(tokens, lm_head_sample(hidden, lm_head, **draws))
    hidden.copy_(others[0])
    for name, value in others[2].items():
        draws[name].copy_(value)
    graph.replay()
    assert torch.equal(tokens, lm_head_sample(others[0], lm_head, **others[2]))


def test_weights_past_two_to_the_31() -> None:
    vocab_size, depth = 300_001, 7168
    assert vocab_size * depth > 2**31
    lm_head = torch.zeros(vocab_size, depth, dtype=torch.float16, device="cuda")
    lm_head[-1] = 1.0
    _, _, draws = whole_numbers(40, 1, 1)
    hidden = torch.full((40, depth), 0.5, dtype=torch.float16, device="cuda")
    tokens = lm_head_sample(hidden, lm_head, **{name: value.cuda() for name, value in draws.items()})
    assert (tokens == vocab_size - 1).all()
