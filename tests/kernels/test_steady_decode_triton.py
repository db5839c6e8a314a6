"""The ends of a steady decode step in Triton: interpreted on small shapes, compiled for three generations of GPUs."""

from __future__ import annotations

import pytest
import torch

from rose_backend.kernels.arguments import DecodeGroups
from tests.kernels.test_steady_decode import (
    BLOCK_SIZES,
    NUM_SLOTS,
    SHAPES,
    Case,
    check_begin,
    check_end,
    check_groups,
    copy_of_groups,
    make_case,
    random_writes,
)
from tests.support.aot import compile_launch, compiles, record_launches
from tests.support.interpreter import run_interpreted


def launch_begin(case: Case) -> None:
    from rose_backend.kernels.decode_step import steady_decode as gpu

    # The addresses of this process.
    groups = DecodeGroups(*case.groups.groups)
    gpu.begin_steady_decode(case.slots, case.state, case.inputs, groups, NUM_SLOTS)


def launch_write(writes: torch.Tensor, case: Case) -> None:
    from rose_backend.kernels.decode_step import steady_decode as gpu

    gpu.write_block_ids(writes, DecodeGroups(*case.groups.groups))


def launch_end(case: Case) -> None:
    from rose_backend.kernels.decode_step import steady_decode as gpu

    gpu.end_steady_decode(case.slots, case.tokens, case.state)


@pytest.mark.parametrize("block_sizes", BLOCK_SIZES.values(), ids=BLOCK_SIZES)
@pytest.mark.parametrize(("num_requests", "num_rows"), [*SHAPES, (2, 200)])
def test_both_ends_of_a_step(num_requests: int, num_rows: int, block_sizes: tuple[int, ...]) -> None:
    case = make_case(num_requests, num_rows, block_sizes=block_sizes)
    before = case.copy()
    run_interpreted(launch_begin, case)
    check_begin(before, case)
    before = case.copy()
    run_interpreted(launch_end, case)
    check_end(before, case)


def test_outputs_need_not_be_counted() -> None:
    case = make_case(3, 5, counts=False)
    before = case.copy()
    run_interpreted(launch_end, case)
    check_end(before, case)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_tables_wider_than_a_tile(num_groups: int) -> None:
    case = make_case(3, 5, block_sizes=[16] * num_groups)
    table = torch.arange(NUM_SLOTS * 2500, dtype=torch.int32).view(NUM_SLOTS, 2500)
    step_table = torch.full((7, 2500), 5, dtype=torch.int32)
    case.groups = copy_of_groups(case.groups, state_table=table, block_table=step_table, block_size=1)
    # With tables of its own for each group.
    case.groups = copy_of_groups(case.groups)
    case.state.num_computed_tokens[case.slots[:3]] = torch.tensor([1100, 2499, 1024], dtype=torch.int32)
    before = case.copy()
    run_interpreted(launch_begin, case)
    check_begin(before, case)


@pytest.mark.parametrize("block_sizes", BLOCK_SIZES.values(), ids=BLOCK_SIZES)
@pytest.mark.parametrize("num_writes", [0, 1, 40])
def test_block_ids_go_to_their_groups(num_writes: int, block_sizes: tuple[int, ...]) -> None:
    # Seven groups of 40 are more than a program's.
    case = make_case(2, 3, block_sizes=block_sizes)
    writes, expected = random_writes(case, num_writes)
    run_interpreted(launch_write, writes, case)
    check_groups(case.groups, expected)


@compiles("_begin_kernel", "_end_kernel", "_write_kernel")
def test_compiles_without_spills(capability: int) -> None:
    from rose_backend.kernels.decode_step import steady_decode as gpu

    with record_launches(gpu, "_begin_kernel", "_end_kernel", "_write_kernel") as launches:
        for num_rows in (4, 7, 300):
            launch_begin(make_case(3, num_rows))
            launch_end(make_case(3, num_rows))
        launch_end(make_case(3, 4, counts=False))
        case = make_case(3, 4, block_sizes=(16, 48))
        launch_begin(case)
        launch_write(random_writes(case, 5)[0], case)
    assert len(launches) == 9
    assert [launch.grid for launch in launches if launch.kernel is launches[0].kernel] == [
        (4,),
        (7,),
        (300,),
        (4, 2),
    ]
    for recorded in launches:
        compile_launch(recorded, capability)
