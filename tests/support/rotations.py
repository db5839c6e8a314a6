"""Query and key with their rotary positions, and what a rotation makes of them, twice by other means."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from rose_backend.conformance.error_budget import assert_within_budget
from rose_backend.kernels import HeadRotation

EPS = 1e-5
TABLE_ROWS = 300
Heads = tuple[int, int, int, int]
"""Query heads, key heads, head size, rotated part."""

# Llama 3 8B, Qwen3, Phi-4-mini with a part of each head rotated, and heads that no vector divides.
MODEL_HEADS: list[Heads] = [(32, 8, 128, 128), (16, 8, 128, 128), (24, 8, 128, 96), (3, 1, 80, 80)]


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
    heads: Heads,
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
