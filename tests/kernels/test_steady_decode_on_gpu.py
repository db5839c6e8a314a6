"""The two ends of a steady decode step on a device, in a replayed graph too."""

from __future__ import annotations

import pytest
import torch

from rose_backend.kernels.decode_step.ops import end_steady_decode, write_block_ids
from tests.kernels.test_steady_decode import (
    BLOCK_SIZES,
    SHAPES,
    check_both_ends,
    check_groups,
    make_case,
    random_writes,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("block_sizes", BLOCK_SIZES.values(), ids=BLOCK_SIZES)
@pytest.mark.parametrize("counts", [True, False], ids=["counts", "no counts"])
@pytest.mark.parametrize(("num_requests", "num_rows"), [*SHAPES, (9, 512)])
def test_both_ends_of_a_step(
    num_requests: int, num_rows: int, counts: bool, block_sizes: tuple[int, ...]
) -> None:
    check_both_ends(make_case(num_requests, num_rows, block_sizes=block_sizes, counts=counts, device="cuda"))


@pytest.mark.parametrize("block_sizes", BLOCK_SIZES.values(), ids=BLOCK_SIZES)
@pytest.mark.parametrize("num_writes", [0, 1, 40])
def test_block_ids_go_to_their_groups(num_writes: int, block_sizes: tuple[int, ...]) -> None:
    case = make_case(2, 3, block_sizes=block_sizes, device="cuda")
    writes, expected = random_writes(case, num_writes)
    write_block_ids(writes, case.groups)
    check_groups(case.groups, expected)


@pytest.mark.parametrize("block_sizes", BLOCK_SIZES.values(), ids=BLOCK_SIZES)
def test_replays_follow_the_slots(block_sizes: tuple[int, ...]) -> None:
    """A graph captured without any request serves whatever requests its rows are given later."""
    case = make_case(0, 6, block_sizes=block_sizes, device="cuda")
    case.begin()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.begin()
        end_steady_decode(case.slots, case.tokens, case.state)
    twin = make_case(0, 6, block_sizes=block_sizes)
    twin.begin()
    for each in (case, twin):
        each.state.num_computed_tokens.clamp_(max=100)
        each.state.total_lens.clamp_(max=101)
    for slots in ([3, 1, -1, -1, -1, -1], [3, 1, 7, 0, 8, 2], [1, -1, -1, -1, -1, -1]):
        for each in (case, twin):
            each.slots.copy_(torch.tensor(slots))
        graph.replay()
        twin.begin()
        end_steady_decode(twin.slots, twin.tokens, twin.state)
        replayed = case.tensors()
        for name, tensor in twin.tensors().items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(replayed[name].cpu(), tensor), (slots, name)
