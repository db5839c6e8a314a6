"""The two ends of a steady decode step on a device, in a replayed graph too."""

from __future__ import annotations

import pytest
import torch

from rose_backend.kernels.steady_decode import end_steady_decode
from tests.kernels.test_steady_decode import SHAPES, check_both_ends, make_case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("counts", [True, False], ids=["counts", "no counts"])
@pytest.mark.parametrize(("num_requests", "num_rows"), [*SHAPES, (9, 512)])
def test_both_ends_of_a_step(num_requests: int, num_rows: int, counts: bool) -> None:
    check_both_ends(make_case(num_requests, num_rows, counts=counts, device="cuda"))


def test_replays_follow_the_slots() -> None:
    """A graph captured without any request serves whatever requests its rows are given later."""
    case = make_case(0, 6, device="cuda")
    case.begin()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.begin()
        end_steady_decode(case.slots, case.tokens, case.state)
    twin = make_case(0, 6)
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
        for actual, expected in ((case.inputs, twin.inputs), (case.state, twin.state)):
            for name, tensor in vars(expected).items():
                assert torch.equal(getattr(actual, name).cpu(), tensor), (slots, name)
