"""The ends of a steady decode step in Triton: interpreted on small shapes, compiled for three generations of GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.test_steady_decode import (
    NUM_SLOTS,
    SHAPES,
    Case,
    check_begin,
    check_end,
    make_case,
)
from tests.support.aot import compile_launch, compiles, record_launches
from tests.support.interpreter import run_interpreted


def launch_begin(case: Case) -> None:
    from rose_backend.kernels.gpu import steady_decode as gpu

    gpu.begin_steady_decode(case.slots, case.state, case.inputs, case.block_size, NUM_SLOTS)


def launch_end(case: Case) -> None:
    from rose_backend.kernels.gpu import steady_decode as gpu

    gpu.end_steady_decode(case.slots, case.tokens, case.state)


@pytest.mark.parametrize("counts", [True, False], ids=["counts", "no counts"])
@pytest.mark.parametrize(("num_requests", "num_rows"), [*SHAPES, (2, 200)])
def test_both_ends_of_a_step(num_requests: int, num_rows: int, counts: bool) -> None:
    case = make_case(num_requests, num_rows, counts=counts)
    before = case.copy()
    run_interpreted(launch_begin, case)
    check_begin(before, case)
    before = case.copy()
    run_interpreted(launch_end, case)
    check_end(before, case)


def test_tables_wider_than_a_tile() -> None:
    case = make_case(3, 5)
    table = torch.arange(NUM_SLOTS * 2500, dtype=torch.int32).view(NUM_SLOTS, 2500)
    case.state = replace(case.state, block_table=table)
    case.inputs = replace(case.inputs, block_table=torch.full((7, 2500), 5, dtype=torch.int32))
    case.state.num_computed_tokens[case.slots[:3]] = torch.tensor([1100, 2499, 1024], dtype=torch.int32)
    case.block_size = 1
    before = case.copy()
    run_interpreted(launch_begin, case)
    check_begin(before, case)


@compiles("_begin_kernel", "_end_kernel")
def test_compiles_without_spills(capability: int) -> None:
    from rose_backend.kernels.gpu import steady_decode as gpu

    with record_launches(gpu, "_begin_kernel", "_end_kernel") as launches:
        for num_rows in (4, 7, 300):
            launch_begin(make_case(3, num_rows))
            launch_end(make_case(3, num_rows))
        launch_end(make_case(3, 4, counts=False))
    assert len(launches) == 7
    for recorded in launches:
        compile_launch(recorded, capability)
