"""The same calls on a CPU and on a CUDA device give the same numbers."""

from __future__ import annotations

import pytest
import torch

from rose_backend import kernels
from tests.support.attention_calls import paged_decode, paged_prefill

pytestmark = pytest.mark.gpu

BLOCK_SIZE, NUM_BLOCKS, NUM_HEADS, HEAD_SIZE = 16, 40, 2, 64
OPTIONS = kernels.AttentionOptions(HEAD_SIZE**-0.5)


def caches(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (2, NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE)
    key, value = torch.randn(shape, generator=generator).to(device)
    return key, value


def on_both(function):
    """Return what ``function(device)`` gives on both devices, as CPU tensors."""
    return [[tensor.cpu() for tensor in function(device)] for device in ("cpu", "cuda")]


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


def test_decode_with_padding_rows() -> None:
    def run(device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(2)
        query, new_key, new_value = torch.randn(3, 5, NUM_HEADS, HEAD_SIZE, generator=generator).to(device)
        table = (1 + torch.randperm(NUM_BLOCKS - 1, generator=generator)[:35].reshape(5, 7)).int().to(device)
        lengths = torch.tensor([0, 15, 16, 100, -1], dtype=torch.int32, device=device)
        key, value = caches(device)
        out = torch.full_like(query, 7.0)
        paged_decode(
            query,
            new_key,
            new_value,
            key,
            value,
            table,
            lengths,
            options=kernels.AttentionOptions(0.125),
            out=out,
        )
        return [out, key, value]

    assert_same(*on_both(run))


def test_prefill_in_chunks() -> None:
    def run(device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        query, new_key, new_value = torch.randn(3, 60, NUM_HEADS, HEAD_SIZE, generator=generator).to(device)
        table = (1 + torch.randperm(NUM_BLOCKS - 1, generator=generator)[:21].reshape(3, 7)).int().to(device)
        start = torch.tensor([0, 1, 20, 60], dtype=torch.int32, device=device)
        lengths = torch.tensor([33, 0, 50], dtype=torch.int32, device=device)
        key, value = caches(device)
        out = torch.empty_like(query)
        paged_prefill(
            query,
            new_key,
            new_value,
            key,
            value,
            table,
            start,
            lengths,
            options=kernels.AttentionOptions(0.125),
            out=out,
        )
        return [out, key, value]

    assert_same(*on_both(run))


def test_clone_of_chains() -> None:
    def run(device: str) -> list[torch.Tensor]:
        key, _ = caches(device)
        src, dst = torch.tensor([[1, 2, 3], [2, 3, 1]], dtype=torch.int32, device=device)
        kernels.block_clone(key, src, dst)
        return [key]

    left, right = on_both(run)
    assert torch.equal(left[0], right[0])


def test_same_seed_draws_the_same_token() -> None:
    def run(device: str) -> list[torch.Tensor]:
        rows = 64
        logits = 3 * torch.randn(rows, 1000, generator=torch.Generator().manual_seed(4))
        params = kernels.SamplingTensors(
            temperature=torch.full((rows,), 0.8, device=device),
            top_k=torch.full((rows,), 50, dtype=torch.int32, device=device),
            top_p=torch.full((rows,), 0.9, device=device),
            min_p=torch.zeros(rows, device=device),
            seed=torch.arange(rows, device=device),
            position=torch.arange(rows, device=device) * 3,
            presence_penalty=torch.zeros(rows, device=device),
            frequency_penalty=torch.zeros(rows, device=device),
            repetition_penalty=torch.ones(rows, device=device),
            prompt_mask=None,
            output_counts=None,
            num_logprobs=2,
        )
        return [kernels.sample(logits.to(device), params).token_ids]

    left, right = on_both(run)
    assert torch.equal(left[0], right[0])
