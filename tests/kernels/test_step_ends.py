"""What opens and what closes a decode step: embeddings, and the new token's way into the next step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels import advance_rows, embed_tokens
from rose_backend.kernels.decode_step import steady_decode as gpu_advance
from rose_backend.kernels.pointwise import elementwise as gpu_embed
from tests.kernels.test_small_batch_linear import moments_of
from tests.support.aot import compile_launch, compiles, overlapped, record_launches
from tests.support.interpreter import run_interpreted

LENGTHS = [7, -1, 0, 300, -1]


def state() -> dict[str, torch.Tensor]:
    num_computed = torch.tensor(LENGTHS, dtype=torch.int32)
    positions = num_computed.clamp(min=0).long()
    return {
        "token_ids": torch.tensor([11, 12, 13, 14, 15]),
        "input_ids": torch.zeros(5, dtype=torch.int64),
        "num_computed_tokens": num_computed,
        "positions": positions,
        "draw_positions": positions + 1,
        "history": torch.full((4, 6), -1),
        "step_index": torch.tensor([9]),
    }


def launch_advance(tensors: dict[str, torch.Tensor]) -> None:
    gpu_advance.advance_rows(**tensors)


def launch_embed(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full((len(tensors[0]), tensors[2].shape[1]), float("nan"), dtype=tensors[2].dtype)
    return out, gpu_embed.embed_tokens(*tensors, out)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_advance(implementation: str) -> None:
    tensors = state()
    if implementation == "torch":
        advance_rows(**tensors)
    else:
        run_interpreted(launch_advance, tensors)
    assert tensors["input_ids"].tolist() == [11, 12, 13, 14, 15]
    assert tensors["num_computed_tokens"].tolist() == [8, -1, 1, 301, -1]
    assert tensors["positions"].tolist() == [8, 0, 1, 301, 0]
    assert tensors["draw_positions"].tolist() == [9, 1, 2, 302, 1]
    assert tensors["step_index"].tolist() == [10]
    expected = torch.full((4, 6), -1)
    expected[9 % 4, :5] = tensors["token_ids"]
    assert torch.equal(tensors["history"], expected)


@pytest.mark.parametrize("name", ["num_computed_tokens", "history"])
def test_advance_refuses_other_types(name: str) -> None:
    tensors: dict[str, Any] = copy.copy(state())
    tensors[name] = tensors[name].float()
    with pytest.raises(ShapeError, match=name):
        advance_rows(**tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("id_type", [torch.int64, torch.int32], ids=str)
def test_embed(implementation: str, id_type: torch.dtype, dtype: torch.dtype) -> None:
    # Columns of wider tensors: the ids of the same token of several sequences.
    tokens, positions = torch.tensor([[4, 0, 30, 4], [0, 9, 3, 3]]).t().contiguous().unbind(1)
    wide = torch.randn(31, 50).to(dtype)
    token_embedding, position_embedding = wide[:, :40], torch.randn(10, 40).to(dtype)
    arguments = (tokens.to(id_type), positions, token_embedding, position_embedding)
    expected = token_embedding[tokens] + position_embedding[positions]
    for given, wanted in ((arguments, expected), ((*arguments[:3], None), token_embedding[tokens])):
        actual, moments = (
            embed_tokens(*given) if implementation == "torch" else run_interpreted(launch_embed, *given)
        )
        assert torch.equal(actual, wanted)
        torch.testing.assert_close(moments, moments_of(wanted, 1))


@pytest.mark.parametrize("id_type", [torch.int64, torch.int32], ids=str)
def test_a_negative_id_is_read_as_the_first(id_type: torch.dtype) -> None:
    ids, positions, table = (
        torch.tensor([2, -1]).to(id_type),
        torch.zeros(2, dtype=torch.int64),
        torch.randn(3, 8),
    )
    for embedded, _ in (
        embed_tokens(ids, positions, table),
        run_interpreted(launch_embed, ids, positions, table, None),
    ):
        assert torch.equal(embedded, table[[2, 0]])


def test_embed_refuses_other_ids() -> None:
    ids, table = torch.zeros(2, dtype=torch.int64), torch.randn(3, 8)
    with pytest.raises(
        ShapeError, match=r"input_ids: expected dtype torch.int64 or torch.int32, got torch.int16"
    ):
        embed_tokens(ids.short(), ids, table)


def test_no_tokens() -> None:
    nothing, table = torch.zeros(0, dtype=torch.int64), torch.randn(3, 8)
    for embed in (launch_embed, embed_tokens):
        embedded, moments = run_interpreted(embed, nothing, nothing, table, table)
        assert embedded.shape == (0, 8)
        assert moments.shape == (0, 2, 1)


@compiles("_embed_tokens_kernel", "_advance_rows_kernel")
def test_compiles_without_spills(capability: int) -> None:
    tokens = torch.zeros(256, dtype=torch.int64)
    table = torch.zeros(300, 768, dtype=torch.float16)
    out = torch.empty_like(table[:256])
    with record_launches(gpu_embed, "_embed_tokens_kernel") as launches:
        gpu_embed.embed_tokens(tokens, tokens, table, table, out)
        gpu_embed.embed_tokens(tokens, tokens, table, None, out)
        gpu_embed.embed_tokens(tokens.int(), tokens, table, None, out)
    with record_launches(gpu_advance, "_advance_rows_kernel") as more:
        gpu_advance.advance_rows(
            tokens, tokens, tokens.int(), tokens, tokens, torch.zeros(8, 256, dtype=torch.int64), tokens[:1]
        )
    for launch in [*launches, *more]:
        compile_launch(overlapped(launch, capability), capability)
