"""Which captured pass a prompt step takes, and what its inputs hold. Replays themselves: test_decode_graphs.py."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from rose_backend.engine import prompt_graphs
from rose_backend.engine.prompt_graphs import MAX_CAPTURED_TOKENS, PromptGraphs, prompt_widths


def test_widths_waste_little() -> None:
    assert prompt_widths(50) == (50,)
    assert prompt_widths(1 << 20)[-1] == MAX_CAPTURED_TOKENS
    for limit in (300, 2048, 4096):
        widths = prompt_widths(limit)
        assert widths[-1] == limit and list(widths) == sorted(set(widths))
        assert all(large - small <= 256 for small, large in pairwise(widths))


class EagerGraph:
    """Stands in for a captured graph: runs what would have been captured."""

    def __init__(self, graphs: PromptGraphs, width: int) -> None:
        self.replay = lambda: graphs._run(width)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> tuple[PromptGraphs, list[tuple[torch.Tensor, ...]]]:
    """Return passes over up to 300 tokens on a CPU, and the inputs of each replay."""
    seen: list[tuple[torch.Tensor, ...]] = []
    empty = torch.empty
    # There is no pinned memory without a GPU. What it held before is unknown.
    monkeypatch.setattr(
        prompt_graphs.torch, "empty", lambda *size, pin_memory, **options: empty(*size, **options).fill_(77)
    )

    def forward(ids: torch.Tensor, positions: torch.Tensor, metadata: object) -> torch.Tensor:
        values = (metadata.query_start_loc, metadata.num_computed_tokens, metadata.block_table)  # type: ignore[attr-defined]
        seen.append(tuple(tensor.clone() for tensor in (ids, positions, *values)))
        return ids

    graphs = PromptGraphs(forward, 300, table_width=6, device=torch.device("cpu"))
    for width in graphs._widths:
        graphs._passes[width] = prompt_graphs._Pass(EagerGraph(graphs, width), torch.full((1,), width))  # type: ignore[arg-type]
    return graphs, seen


def replay(graphs: PromptGraphs, counts: list[int]) -> torch.Tensor | None:
    num_tokens = sum(counts)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    computed = np.arange(len(counts), dtype=np.int32)
    tables = np.full((len(counts), 3), 5, np.int32)
    return graphs.run(np.arange(num_tokens) + 1, np.arange(num_tokens) + 9, starts, computed, tables)


@pytest.mark.parametrize(("counts", "width"), [([64], 64), ([3, 62], 128), ([300], 300), ([1], 64)])
def test_inputs_of_the_narrowest_pass_that_fits(
    passes: tuple[PromptGraphs, list[tuple[torch.Tensor, ...]]], counts: list[int], width: int
) -> None:
    graphs, seen = passes
    replay(graphs, [200, 30])  # leaves its traces
    hidden = replay(graphs, counts)
    assert hidden is not None and hidden.item() == width
    ids, positions, starts, computed, tables = seen[-1]
    num_tokens, num_rows = sum(counts), len(counts)
    assert ids.tolist() == [*range(1, num_tokens + 1), *[0] * (width - num_tokens)]
    assert positions.tolist() == [*range(9, num_tokens + 9), *[0] * (width - num_tokens)]
    # Rows without tokens behind the last one, and padding as to their length, too.
    assert starts[: num_rows + 1].tolist() == np.cumsum([0, *counts]).tolist()
    assert starts[num_rows + 1 :].tolist() == [num_tokens] * (len(starts) - num_rows - 1)
    assert computed.tolist() == [*range(num_rows), *[-1] * (len(computed) - num_rows)]
    assert (tables[:num_rows, :3] == 5).all()


def test_what_fits_no_pass_runs_without(
    passes: tuple[PromptGraphs, list[tuple[torch.Tensor, ...]]],
) -> None:
    graphs, seen = passes
    assert replay(graphs, [301]) is None
    assert replay(graphs, [2] * 30) is None
    assert not seen
