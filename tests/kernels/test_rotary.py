"""Rotary positions and head norms against complex float64 products, within twice the error of transformers' modules."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from rose_backend.errors import ShapeError
from rose_backend.kernels import HeadRotation, rotate_query_key
from tests.support.error_budget import assert_within_budget

EPS = 1e-5
TABLE_ROWS = 300
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Query heads, key heads, head size, rotated part.
HEADS = [(4, 2, 64, 64), (3, 1, 80, 32), (1, 1, 6, 2), (2, 2, 96, 96)]


@dataclass
class Case:
    """Query and key side by side in one projection, with values behind them, as a model has them."""

    projected: torch.Tensor  # [T, (HQ + 2 * HKV) * D + 5]
    num_heads: int
    num_kv_heads: int
    head_size: int
    positions: torch.Tensor
    cos_sin: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None

    def query_key(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the projection, [T, HQ, D] and [T, HKV, D]."""
        heads, size = self.num_heads + self.num_kv_heads, self.head_size
        both = self.projected[:, : heads * size].unflatten(1, (heads, size))
        return both[:, : self.num_heads], both[:, self.num_heads :]

    def rotation(self, eps: float = EPS) -> HeadRotation:
        return HeadRotation(self.cos_sin, *(self.norms or (None, None)), eps)

    def rest(self) -> torch.Tensor:
        """Return what lies behind query and key in each row."""
        return self.projected[:, (self.num_heads + self.num_kv_heads) * self.head_size :]

    def copy(self) -> Case:
        return replace(self, projected=self.projected.clone())

    def exact(self) -> list[torch.Tensor]:
        """Compute in float64: a pair is a complex number, and its rotation a product with one."""
        half = self.cos_sin.shape[1] // 2
        angles = self.cos_sin[self.positions].double()[:, None]
        turns = torch.complex(angles[..., :half], angles[..., half:])
        results = []
        for x, norm in zip(self.query_key(), self.norms or (None, None), strict=True):
            x = x.double()
            if norm is not None:
                x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
            turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turns
            results.append(torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1))
        return results

    def transformers(self) -> list[torch.Tensor]:
        """Compute with transformers' functions in the projection's dtype."""
        size, width = self.head_size, self.cos_sin.shape[1]
        cos, sin = self.cos_sin[self.positions].to(self.projected.dtype).chunk(2, 1)
        pair = [x.clone() for x in self.query_key()]
        for index, weight in enumerate(self.norms or ()):
            norm = Qwen3RMSNorm(size, EPS).to(device=weight.device, dtype=weight.dtype)
            norm.weight.data.copy_(weight)
            pair[index] = norm(pair[index]).detach()
        turned = apply_rotary_pos_emb(
            pair[0][..., :width],
            pair[1][..., :width],
            torch.cat((cos, cos), 1),
            torch.cat((sin, sin), 1),
        )
        return [torch.cat((new, x[..., width:]), -1) for new, x in zip(turned, pair, strict=True)]

    def check(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """Hold results for this case's inputs to the budget."""
        for actual, exact, same_dtype in zip((query, key), self.exact(), self.transformers(), strict=True):
            assert_within_budget(actual, exact, same_dtype)


def make_case(
    num_tokens: int,
    heads: tuple[int, int, int, int],
    dtype: torch.dtype = torch.float32,
    *,
    norms: bool = False,
    device: str = "cpu",
) -> Case:
    num_heads, num_kv_heads, size, rotated = heads
    generator = torch.Generator().manual_seed(num_tokens * 1000 + size)
    config = LlamaConfig(hidden_size=rotated, num_attention_heads=1, head_dim=rotated)
    table = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(TABLE_ROWS)[None])
    cos, sin = (each[0, :, : rotated // 2] for each in table)
    weights = torch.randn(2, size, generator=generator) * 0.3 + 1
    return Case(
        projected=torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * size + 5, generator=generator).to(
            device, dtype
        ),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=size,
        # Not in order, the first and the last of the table among them.
        positions=torch.randint(0, TABLE_ROWS, (num_tokens,), generator=generator)
        .index_fill_(0, torch.arange(min(num_tokens, 1)), TABLE_ROWS - 1)
        .index_fill_(0, torch.arange(1, max(num_tokens, 1))[:1], 0)
        .to(device),
        cos_sin=torch.cat((cos, sin), 1).to(device),
        norms=tuple(weights.to(device, dtype)) if norms else None,
    )


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_query_and_key_turn_in_place(
    num_tokens: int, heads: tuple[int, int, int, int], dtype: torch.dtype, norms: bool
) -> None:
    case = make_case(num_tokens, heads, dtype, norms=norms)
    before = case.copy()
    unwritten = [case.rest(), case.positions, case.cos_sin, *(case.norms or ())]
    copies = [tensor.clone() for tensor in unwritten]
    query, key = case.query_key()
    assert rotate_query_key(query, key, case.positions, case.rotation()) is None
    before.check(query, key)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(unwritten, copies, strict=True))


def test_position_zero_and_what_is_not_rotated_stay_as_they_are() -> None:
    case = make_case(4, (2, 1, 16, 8), torch.bfloat16)
    before, size = case.copy(), case.cos_sin.shape[1]
    rotate_query_key(*case.query_key(), torch.zeros_like(case.positions), case.rotation())
    assert torch.equal(case.projected, before.projected)
    rotate_query_key(*case.query_key(), case.positions, case.rotation())
    for now, then in zip(case.query_key(), before.query_key(), strict=True):
        assert torch.equal(now[..., size:], then[..., size:])
        assert not torch.equal(now[..., :size], then[..., :size])


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_half_types_round_once(dtype: torch.dtype, norms: bool) -> None:
    case = make_case(2, (2, 1, 64, 32), dtype, norms=norms)
    exact = [each.to(dtype) for each in case.exact()]
    query, key = case.query_key()
    rotate_query_key(query, key, case.positions, case.rotation())
    assert torch.equal(query, exact[0]) and torch.equal(key, exact[1])


def test_eps_counts() -> None:
    case = make_case(3, HEADS[0], norms=True)
    tiny, larger = case.copy(), case.copy()
    for each, eps in ((tiny, 1e-9), (larger, 3.0)):
        rotate_query_key(*each.query_key(), each.positions, each.rotation(eps))
    assert larger.query_key()[0].norm() < 0.6 * tiny.query_key()[0].norm()


def test_bad_input_is_named() -> None:
    case = make_case(3, (4, 2, 16, 8), norms=True)
    query, key = case.query_key()
    norm = case.norms[0]
    positions, table = case.positions, case.cos_sin
    for match, arguments in (
        (r"key: expected D=16, got 15", (query, key[..., :15], positions, table)),
        (r"positions: expected T=3, got 2", (query, key, positions[:2], table)),
        (r"positions: expected dtype torch.int64", (query, key, positions.int(), table)),
        (r"cos_sin: expected dtype torch.float32", (query, key, positions, table.half())),
        (r"cos_sin: expected an even DR of at most D=16, got DR=7", (query, key, positions, table[:, 1:])),
        (r"DR=18", (query, key, positions, torch.zeros(9, 18))),
        (r"key: expected dtype torch.float32 as query", (query, key.half(), positions, table)),
        (
            r"query: expected an innermost stride of 1, got 2",
            (query[..., ::2], key[..., :8], positions, table),
        ),
    ):
        with pytest.raises(ShapeError, match=match):
            rotate_query_key(*arguments[:3], HeadRotation(arguments[3]))
    for match, norms in (
        ("both or neither, got one", {"query_norm": norm}),
        ("both or neither, got one", {"key_norm": norm}),
        ("key_norm: expected D=16, got 15", {"query_norm": norm, "key_norm": norm[1:]}),
        ("key_norm: expected dtype", {"query_norm": norm, "key_norm": norm.half()}),
    ):
        with pytest.raises(ShapeError, match=match):
            rotate_query_key(query, key, positions, HeadRotation(table, **norms))
