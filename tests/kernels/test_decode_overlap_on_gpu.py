"""Decode attention on a CUDA device that starts while the kernel in front of it still runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rose_backend.kernels import AttentionOptions, PackedLinear, pack_linear, small_batch_linear
from tests.support.attention_calls import paged_decode
from tests.support.gpu_steps import Shape, as_bits, make_step
from tests.support.paged_inputs import random_rotation, same_bits

pytestmark = pytest.mark.gpu

NUM_LAYERS = 3
LENGTHS = [
    [0, 40, 144, -1, 270, 17, 255, 100],
    [3000, 5, 700, -1],
    [9000],
    [-1, -1],
    [150] * 64,
]


@pytest.mark.parametrize("shape", [(12, 12, 64, 16), (8, 2, 128, 16)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} rows, first {lengths[0]}")
@pytest.mark.parametrize("rotates", [False, True], ids=["plain", "rotates"])
def test_overlap_changes_no_bit(shape: Shape, lengths: list[int], rotates: bool) -> None:
    """Two graphs of the same layers, whose lengths change with every replay, over caches of their own."""
    one_by_one, overlapped = (_Layers(shape, lengths, rotates, overlap=overlap) for overlap in (False, True))
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        one_by_one.graph.replay()
        overlapped.graph.replay()
        different += (as_bits(one_by_one.residual) != as_bits(overlapped.residual)).any()
    assert int(different) == 0
    assert same_bits(one_by_one.caches, overlapped.caches)
    assert one_by_one.residual.isfinite().all()
    assert not same_bits(one_by_one.residual, one_by_one.start)


class _Layers:
    """Products that let the kernel behind them start early, with decode attention between them."""

    def __init__(self, shape: Shape, lengths: list[int], rotates: bool, *, overlap: bool) -> None:
        num_query_heads, num_kv_heads, head_size, _ = shape
        self._heads = [num_query_heads, num_kv_heads, num_kv_heads]
        self._overlap = overlap
        self._rotation = None
        if rotates:
            self._rotation = random_rotation(
                head_size, norms=True, num_positions=max(lengths) + 2, dtype=torch.float16, device="cuda"
            )
        self._step = make_step([n + 1 if n >= 0 else n for n in lengths], shape=shape, layout="tokens first")
        # Padding rows, too, go through the products: no NaN anywhere.
        self.caches = self._step.storage.nan_to_num().repeat(NUM_LAYERS, 1, 1, 1, 1, 1)
        self._lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self._counted = self._lengths.clone()
        self._parity = torch.zeros(1, dtype=torch.int32, device="cuda")
        width = num_query_heads * head_size
        torch.manual_seed(1)
        self._layers = [
            (_random_layer(sum(self._heads) * head_size, width), _random_layer(width, width))
            for _ in range(NUM_LAYERS)
        ]
        self.start = torch.randn(len(lengths), width, dtype=torch.float16, device="cuda")
        self.residual = self.start.clone()
        self._attended = torch.zeros(
            len(lengths), num_query_heads, head_size, dtype=torch.float16, device="cuda"
        )
        self.graph = _capture(self._run)

    def _run(self) -> None:
        # Launched in the ordinary way: the lengths are complete before anything behind starts.
        self._parity.bitwise_xor_(1)
        torch.add(self._lengths, self._parity * (self._lengths >= 0), out=self._counted)
        torch.mul(self.start, 1, out=self.residual)
        for (qkv_layer, out_layer), (key_cache, value_cache) in zip(self._layers, self.caches, strict=True):
            qkv = small_batch_linear(self.residual, qkv_layer)
            query, key, value = qkv.view(len(qkv), sum(self._heads), -1).split(self._heads, dim=1)
            paged_decode(
                query,
                key,
                value,
                key_cache,
                value_cache,
                self._step.block_table,
                self._counted,
                options=AttentionOptions(self._step.scale),
                out=self._attended,
                overlap=self._overlap,
                rotation=self._rotation,
            )
            small_batch_linear(
                self._attended.flatten(1), out_layer, residual=self.residual, out=self.residual
            )


def _random_layer(num_columns: int, depth: int) -> PackedLinear:
    weight, bias = torch.randn(num_columns, depth + 1, device="cuda").half().split([depth, 1], dim=1)
    return pack_linear(weight.contiguous() * depth**-0.5, bias.flatten().contiguous())


def _capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph
