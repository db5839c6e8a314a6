"""Head and sampler in one: the tokens that ``sample`` chooses from the logits, interpreted and in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels import SamplingTensors, lm_head_sample, sample
from tests.kernels.test_sample import make_params
from tests.support.aot import compile_launch, compiles, record_launches
from tests.support.interpreter import run_interpreted


def whole_numbers(
    num_rows: int, vocab_size: int, depth: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return factors whose product is exact in any order of summation and full of ties, and how to draw from it."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randint(-2, 3, (num_rows, depth), generator=generator).float()
    lm_head = torch.randint(-1, 2, (vocab_size, depth), generator=generator).float()
    temperature = torch.tensor([0.0, 1.0, 2.5, 0.0, 30.0])[torch.arange(num_rows) % 5]
    return (
        hidden,
        lm_head,
        {
            "temperature": temperature,
            "seed": torch.randint(-(2**62), 2**62, (num_rows,), generator=generator),
            "position": torch.randint(0, 1000, (num_rows,), generator=generator),
        },
    )


def expected_tokens(
    hidden: torch.Tensor, lm_head: torch.Tensor, draws: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Return what the sampler chooses from the logits, wherever these are."""
    logits = torch.nn.functional.linear(hidden, lm_head).float()
    params = make_params(len(hidden), **{name: value.cpu() for name, value in draws.items()})
    fields = {name: getattr(params, name) for name in params.__dataclass_fields__}
    on_device = {
        name: value.to(hidden.device) if isinstance(value, torch.Tensor) else value
        for name, value in fields.items()
    }
    return sample(logits, SamplingTensors(**on_device)).token_ids


def call(hidden: torch.Tensor, lm_head: torch.Tensor, draws: dict[str, torch.Tensor]) -> torch.Tensor:
    from rose_backend.kernels.gpu.lm_head import lm_head_sample as launch

    return launch(hidden, lm_head, **draws)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_reference_is_head_then_sampler(dtype: torch.dtype) -> None:
    hidden, lm_head, draws = whole_numbers(25, 301, 24)
    hidden, lm_head = hidden.to(dtype), lm_head.to(dtype)
    assert torch.equal(lm_head_sample(hidden, lm_head, **draws), expected_tokens(hidden, lm_head, draws))


# One tile, several, a last one with a single token; a depth that the tiles do not divide; blocks of 16, 32 and 64 rows.
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "depth", "dtype"),
    [
        (1, 3, 16, torch.float32),
        (16, 257, 64, torch.float16),
        (17, 301, 72, torch.float16),
        (40, 385, 48, torch.float32),
    ],
    ids=str,
)
def test_interpreted_tokens_are_those_of_the_reference(
    num_rows: int, vocab_size: int, depth: int, dtype: torch.dtype
) -> None:
    hidden, lm_head, draws = whole_numbers(num_rows, vocab_size, depth, seed=vocab_size)
    hidden, lm_head = hidden.to(dtype), lm_head.to(dtype)
    actual = run_interpreted(call, hidden, lm_head, draws)
    assert torch.equal(actual, expected_tokens(hidden, lm_head, draws))


def test_interpreted_logits_are_rounded_to_the_models_type() -> None:
    # 2049 is 2048 in float16: tokens 1 and 3 tie.
    lm_head = torch.zeros(5, 16, dtype=torch.float16)
    lm_head[[1, 3], 0], lm_head[3, 1] = 2048.0, 1.0
    hidden = torch.ones(1, 16, dtype=torch.float16)
    _, _, draws = whole_numbers(1, 1, 1)
    assert run_interpreted(call, hidden, lm_head, draws).tolist() == [1]
    assert lm_head_sample(hidden, lm_head, **draws).tolist() == [1]


def far_from_zero(
    num_rows: int, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return equal scores of 300,000, where float32 steps are 0.03: it cannot tell some winners from the second."""
    _, _, draws = whole_numbers(num_rows, 1, 1)
    draws["temperature"] = torch.full((num_rows,), 1e-4)
    return torch.full((num_rows, 16), 15.0), torch.full((vocab_size, 16), 0.125), draws


def test_interpreted_races_that_float32_cannot_decide() -> None:
    hidden, lm_head, draws = far_from_zero(192, 64)
    actual = run_interpreted(call, hidden, lm_head, draws)
    assert torch.equal(actual, expected_tokens(hidden, lm_head, draws))


def test_interpreted_infinities_and_padded_rows() -> None:
    hidden, lm_head, draws = whole_numbers(10, 150, 16)
    lm_head[:, 0], hidden[:, 0] = 0.0, 1.0
    lm_head[::2, 0] = -torch.inf
    # Rows 1 and 6 find infinity twice, rows 2 and 7 find nothing.
    lm_head[:, 1] = 0.0
    lm_head[[131, 140], 1] = 1e30
    hidden[:, 1] = 0.0
    hidden[[1, 6], 1] = 1e30
    lm_head[1::2, 2], hidden[[2, 7], 2] = 1e30, -1e30
    lm_head[::2, 2], hidden[[0, 1, 3, 4, 5, 6, 8, 9], 2] = 0.0, 0.0
    wide = torch.full((10, 20), torch.nan)
    wide[:, :16] = hidden
    actual = run_interpreted(call, wide[:, :16], lm_head, draws)
    assert torch.equal(actual, expected_tokens(hidden, lm_head, draws))
    assert actual[[1, 2, 6, 7]].tolist() == [131, 0, 131, 0]
    assert (actual[[0, 3, 4, 5, 8, 9]] % 2 == 1).all()


def test_rows_do_not_depend_on_their_batch() -> None:
    hidden, lm_head, draws = whole_numbers(20, 301, 24)
    whole = run_interpreted(call, hidden, lm_head, draws)
    rows = torch.tensor([19, 3, 3])
    part = run_interpreted(call, hidden[rows], lm_head, {name: value[rows] for name, value in draws.items()})
    assert torch.equal(part, whole[rows])


def test_no_rows() -> None:
    hidden, lm_head, draws = whole_numbers(0, 9, 8)
    assert lm_head_sample(hidden, lm_head, **draws).shape == (0,)
    assert run_interpreted(call, hidden, lm_head, draws).shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head": torch.zeros(5, 7)}, "lm_head: expected E=8, got 7"),
        ({"lm_head": torch.zeros(5, 8).half()}, "lm_head: expected dtype torch.float32 as hidden, got"),
        ({"lm_head": torch.zeros(8, 5).T}, "lm_head: expected innermost stride 1, got 5"),
        ({"hidden": torch.zeros(8, 2).T}, "hidden: expected innermost stride 1, got 2"),
        ({"temperature": torch.zeros(3)}, "temperature: expected R=2, got 3"),
        ({"seed": torch.zeros(2)}, "seed: expected dtype torch.int64, got torch.float32"),
        ({"position": torch.zeros(2).int()}, "position: expected dtype torch.int64, got torch.int32"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_mismatches_are_named(change: dict[str, Any], message: str) -> None:
    hidden, lm_head, draws = whole_numbers(2, 5, 8)
    arguments = {"hidden": hidden, "lm_head": lm_head, **draws, **change}
    with pytest.raises(ShapeError, match=message):
        lm_head_sample(arguments.pop("hidden"), arguments.pop("lm_head"), **arguments)


@compiles("_draw_from_tiles_kernel", "_draw_from_all_kernel")
def test_compiles_without_spills(capability: int) -> None:
    from rose_backend.kernels.gpu import lm_head as gpu

    lm_head = torch.zeros(50_257, 768).half()
    with record_launches(gpu, "_draw_from_tiles_kernel", "_draw_from_all_kernel") as launches:
        for num_rows in (8, 64, 128):
            gpu.lm_head_sample(torch.zeros(num_rows, 768).half(), lm_head, **whole_numbers(num_rows, 1, 1)[2])
    assert len(launches) == 6
    # The second launch takes one row at a time: it is the same for any number.
    for recorded in (*launches[:3], launches[4]):
        compile_launch(recorded, capability)
