"""Which captured pass a prompt step takes, and what its inputs hold. Replays themselves: test_decode_graphs.py."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from rose_backend.engine import prompt_graphs
from rose_backend.engine.prompt_graphs import MAX_CAPTURED_TOKENS, PassShape, PromptGraphs, pass_shapes
from rose_backend.models.attention_metadata import AttentionMetadata

MAX_TOKENS, WIDTH = 300, 5


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


class EagerGraph:
    """Stands in for a captured graph: runs what would have been captured."""

    def __init__(self, graphs: PromptGraphs, shape: PassShape) -> None:
        self.shape = shape
        self.compute = lambda: graphs._compute(shape)
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        self.compute()


Seen = list[tuple[torch.Tensor, ...]]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> tuple[PromptGraphs, Seen]:
    """Return passes over up to 300 tokens on a CPU, and the inputs of each replay."""
    seen: Seen = []
    empty = torch.empty

    def forward(ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        assert metadata.query_start_loc is not None and metadata.num_decodes == 0
        values = (metadata.query_start_loc, metadata.num_computed_tokens, metadata.block_table)
        assert metadata.mean_query_len in (128, 32) and metadata.last_tokens_only
        seen.append(tuple(tensor.clone() for tensor in (ids, positions, *values)))
        return ids

    graphs = PromptGraphs(forward, MAX_TOKENS, table_width=6, device=torch.device("cpu"))
    # There is no pinned memory without a GPU. What it held before is unknown.
    monkeypatch.setattr(
        prompt_graphs.torch, "empty", lambda *size, pin_memory, **options: empty(*size, **options).fill_(77)
    )
    graphs._hidden = torch.arange(MAX_TOKENS * WIDTH).view(MAX_TOKENS, WIDTH)
    for shape in graphs._shapes:
        graphs._graphs[shape] = EagerGraph(graphs, shape)  # type: ignore[assignment]
    return graphs, seen


def replay(graphs: PromptGraphs, counts: list[int]) -> tuple[PassShape, torch.Tensor] | None:
    """Return the shape of the pass that was replayed and its hidden states."""
    num_tokens = sum(counts)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    computed = np.arange(len(counts), dtype=np.int32)
    tables = np.full((len(counts), 3), 5, np.int32)
    for graph in graphs._graphs.values():
        graph.num_replays = 0  # type: ignore[attr-defined]
    hidden = graphs.run(np.arange(num_tokens) + 1, np.arange(num_tokens) + 9, starts, computed, tables)
    replayed = [shape for shape, graph in graphs._graphs.items() if graph.num_replays]  # type: ignore[attr-defined]
    if hidden is None:
        assert not replayed
        return None
    (shape,) = replayed
    return shape, hidden


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
    replay(graphs, [200, 30])  # leaves its traces
    replayed = replay(graphs, counts)
    assert replayed is not None and replayed[0][:2] == shape
    ids, positions, starts, computed, tables = seen[-1]
    num_tokens, num_rows = sum(counts), len(counts)
    assert torch.equal(replayed[1], graphs._hidden[:num_rows])
    assert (len(ids), len(computed), len(tables)) == (shape[0], shape[1], shape[1])
    assert ids.tolist() == [*range(1, num_tokens + 1), *[0] * (shape[0] - num_tokens)]
    assert positions.tolist() == [*range(9, num_tokens + 9), *[0] * (shape[0] - num_tokens)]
    # Rows without tokens behind the last one, and padding as to their length, too.
    assert starts[: num_rows + 1].tolist() == np.cumsum([0, *counts]).tolist()
    assert starts[num_rows + 1 :].tolist() == [num_tokens] * (len(starts) - num_rows - 1)
    assert computed.tolist() == [*range(num_rows), *[-1] * (len(computed) - num_rows)]
    assert (tables[:num_rows, :3] == 5).all()


def test_what_fits_no_pass_runs_without(passes: tuple[PromptGraphs, Seen]) -> None:
    graphs, seen = passes
    assert replay(graphs, [301]) is None
    assert replay(graphs, [2] * 19) is None
    assert not seen
