"""Which captured pass a prompt step takes, and what its inputs hold. Replays themselves: test_decode_graphs.py."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from rose_backend.engine.model_runner import (
    MAX_CAPTURED_TOKENS,
    PassInputs,
    PassShape,
    PromptGraphs,
    pass_shapes,
)
from rose_backend.kernels import captured_graphs
from rose_backend.layers.attention import AttentionMetadata

MAX_TOKENS = 300


def test_shapes_waste_little() -> None:
    assert {shape.num_tokens for shape in pass_shapes(50)} == {50}
    assert pass_shapes(1 << 20)[-1].num_tokens == MAX_CAPTURED_TOKENS
    for limit in (300, 2048, 4096, 8192, 16_384, 10_000):
        shapes = pass_shapes(limit)
        widths = sorted({shape.num_tokens for shape in shapes})
        assert widths[-1] == limit and list(shapes) == sorted(set(shapes))
        assert all(large - small <= max(128, small // 4) for small, large in pairwise(widths))
        assert {shape.num_tokens for shape in shapes if shape.mean_query_len >= 128} == set(widths)
        # A prompt in each row of a step of short ones finds a pass, too.
        for num_rows in range(1, min(limit, 4096) // 16 + 1):
            assert any(shape.num_rows >= num_rows for shape in shapes if shape.num_tokens >= 16 * num_rows)


def test_few_rows_are_tuned_for_long_chunks() -> None:
    shapes = pass_shapes(16_384)
    assert [shape for shape in shapes if shape.num_tokens in (4096, 8192)] == [
        PassShape(4096, 32, 128),
        PassShape(4096, 256, 32),
        PassShape(8192, 64, 128),
    ]


Seen = list[tuple[torch.Tensor, ...]]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> tuple[PromptGraphs, Seen]:
    """Return passes over up to 300 tokens on a CPU, and the inputs of each pass."""
    seen: Seen = []
    empty = torch.empty

    def forward(
        ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, *others: torch.Tensor | None
    ) -> torch.Tensor:
        assert metadata.query_start_loc is not None and metadata.num_decodes == 0
        values = (metadata.query_start_loc, metadata.num_computed_tokens, metadata.block_table)
        assert metadata.mean_query_len in (128, 32) and metadata.last_tokens_only
        tensors = (each for each in (ids, positions, *values, *others) if each is not None)
        seen.append(tuple(tensor.clone() for tensor in tensors))
        # Of the last token of each row, its id and its row.
        rows = torch.arange(len(metadata.num_computed_tokens))
        return torch.stack([ids[metadata.query_start_loc[1:].long() - 1], rows], dim=1)

    graphs = PromptGraphs(forward, MAX_TOKENS, table_width=6, device=torch.device("cpu"))
    # What host memory held before is unknown.
    monkeypatch.setattr(
        captured_graphs.torch, "empty", lambda *size, **options: empty(*size, **options).fill_(77)
    )
    return graphs, seen


def compute(graphs: PromptGraphs, counts: list[int]) -> torch.Tensor | None:
    """Return the hidden states of a pass over rows of so many tokens."""
    num_tokens = sum(counts)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    computed = np.arange(len(counts), dtype=np.int32)
    tables = np.full((len(counts), 3), 5, np.int32)
    tokens = np.arange(num_tokens)
    rows = np.arange(len(counts))
    return graphs.run(PassInputs(tokens + 1, tokens + 9, starts, computed, tables, rows + 3, rows + 5))


@pytest.mark.parametrize(
    ("counts", "shape"),
    [
        ([64], (64, 4)),
        ([3, 62], (128, 4)),
        ([300], (300, 4)),
        ([1], (64, 4)),
        ([20] * 5, (128, 8)),
        ([20] * 9, (256, 16)),
        ([2] * 17, (300, 18)),
    ],
)
def test_inputs_of_the_narrowest_pass_that_fits(
    passes: tuple[PromptGraphs, Seen], counts: list[int], shape: tuple[int, int]
) -> None:
    graphs, seen = passes
    compute(graphs, [200, 30])  # leaves its traces
    hidden = compute(graphs, counts)
    assert len(seen) == 2
    ids, positions, starts, computed, tables, next_ids, slots = seen[-1]
    num_tokens, num_rows = sum(counts), len(counts)
    assert hidden is not None and hidden.tolist() == [
        [last, row] for row, last in enumerate(np.cumsum(counts))
    ]
    assert (len(ids), len(computed), len(tables)) == (shape[0], shape[1], shape[1])
    assert ids.tolist() == [*range(1, num_tokens + 1), *[0] * (shape[0] - num_tokens)]
    assert positions.tolist() == [*range(9, num_tokens + 9), *[0] * (shape[0] - num_tokens)]
    # Rows without tokens behind the last one, and padding as to their length, too.
    assert starts[: num_rows + 1].tolist() == np.cumsum([0, *counts]).tolist()
    assert starts[num_rows + 1 :].tolist() == [num_tokens] * (len(starts) - num_rows - 1)
    assert computed.tolist() == [*range(num_rows), *[-1] * (len(computed) - num_rows)]
    assert (tables[:num_rows, :3] == 5).all()
    assert next_ids.tolist() == [*range(3, num_rows + 3), *[0] * (len(next_ids) - num_rows)]
    assert slots.tolist() == [*range(5, num_rows + 5), *[-1] * (len(slots) - num_rows)]


def test_passes_with_adapters_know_the_slot_of_each_token() -> None:
    seen: list[list[int] | None] = []

    def forward(ids: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.append(None if others[-1] is None else others[-1].tolist())
        return torch.zeros((len(others[1].num_computed_tokens), 2))

    graphs = PromptGraphs(forward, MAX_TOKENS, 6, torch.device("cpu"), takes_adapters=True)
    for lora_slots in (np.full(70, 3), None, np.array([*[2] * 30, *[-1] * 20])):
        num_tokens = 60 if lora_slots is None else len(lora_slots)
        tokens, row = np.arange(num_tokens), np.zeros(1, np.int64)
        starts, tables = np.array([0, num_tokens], np.int32), np.zeros((1, 3), np.int32)
        graphs.run(PassInputs(tokens, tokens, starts, row.astype(np.int32), tables, row, row, lora_slots))
    assert seen == [[*[3] * 70, *[-1] * 58], None, [*[2] * 30, *[-1] * 34]]


def test_what_fits_no_pass_runs_without(passes: tuple[PromptGraphs, Seen]) -> None:
    graphs, seen = passes
    assert compute(graphs, [301]) is None
    assert compute(graphs, [2] * 19) is None
    assert not seen
