"""Both ends of a steady step against what vLLM's own kernels leave, interpreted, on random states."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rose_backend.kernels.steady_decode import end_steady_decode
from tests.kernels.test_steady_decode import NUM_SLOTS, Case, make_case
from tests.support.interpreter import run_interpreted

KERNELS = {
    "vllm.v1.worker.gpu.input_batch": (
        "_prepare_pos_seq_lens_kernel",
        "_combine_sampled_and_draft_tokens_kernel",
        "_post_update_kernel",
    ),
    "vllm.v1.worker.gpu.buffer_utils": ("_load_ptr",),
    "vllm.v1.worker.gpu.block_table": ("_gather_block_tables_kernel", "_compute_slot_mappings_kernel"),
}


def vllm_modules() -> tuple[Any, Any]:
    """Return vLLM's modules of inputs and of block tables, with kernels to interpret: its CPU build has none."""
    from importlib import import_module

    import triton

    modules = {}
    for name, kernels in KERNELS.items():
        module: Any = import_module(name)
        modules[name.rpartition(".")[2]] = module
        module.triton, module.tl = triton, triton.language
        for kernel in kernels:
            function = getattr(module, kernel)
            setattr(module, kernel, function if hasattr(function, "run") else triton.jit(_plain(function)))
    modules["block_table"]._load_ptr = modules["buffer_utils"]._load_ptr
    return modules["input_batch"], modules["block_table"]


def _plain(function: Any) -> Any:
    return getattr(function, "fn", function)


def begin_as_vllm(case: Case, num_requests: int) -> None:
    """Write the inputs of a decode step as vLLM's runner does: requests, and padding up to the graph's rows."""
    inputs_of, tables_of = vllm_modules()
    state, inputs, num_rows = case.state, case.inputs, len(case.slots)
    slots = case.slots[:num_requests].clone()
    starts = torch.full((num_rows + 1,), num_requests, dtype=torch.int32)
    starts[: num_requests + 1] = torch.arange(num_requests + 1)
    inputs.query_start_loc[: num_rows + 1] = starts
    seq_lens = inputs.seq_lens[:num_rows]
    inputs_of.prepare_pos_seq_lens(slots, starts, state.num_computed_tokens, inputs.positions, seq_lens)
    inputs_of.combine_sampled_and_draft_tokens(
        inputs.input_ids,
        slots,
        state.last_tokens,
        starts,
        seq_lens,
        torch.zeros(NUM_SLOTS, dtype=torch.int32),
        torch.zeros(NUM_SLOTS, 0, dtype=torch.int64),
        torch.arange(num_requests + 1, dtype=torch.int32),
        num_requests,
    )
    tables = SimpleNamespace(
        num_kv_cache_groups=1,
        input_block_tables=[inputs.block_table],
        input_block_table_ptrs=_pointers(inputs.block_table),
        block_table_ptrs=_pointers(state.block_table),
        block_table_strides=torch.tensor([state.block_table.stride(0)]),
        num_blocks=SimpleNamespace(gpu=(state.num_computed_tokens // case.block_size + 1)[None]),
        block_sizes_tensor=torch.tensor([case.block_size], dtype=torch.int32),
        slot_mapping_enabled=torch.tensor([True]),
        dcp_sharded=torch.tensor([True]),
        slot_mappings=inputs.slot_mapping[None],
        cp_rank=0,
        cp_size=1,
        cp_interleave=1,
    )
    tables_of.BlockTables.gather_block_tables(tables, slots, num_rows)
    tables_of.BlockTables.compute_slot_mappings(tables, slots, starts, inputs.positions, num_rows)


def _pointers(tensor: torch.Tensor) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr()], dtype=torch.uint64)


def end_as_vllm(case: Case, num_requests: int) -> None:
    """Move the state on as vLLM's runner does."""
    inputs_of, _ = vllm_modules()
    state, ones = case.state, torch.ones(num_requests, dtype=torch.int32)
    inputs_of.post_update(
        case.slots[:num_requests].clone(),
        state.num_computed_tokens,
        state.last_tokens,
        state.output_counts,
        case.tokens[:num_requests, None].clone(),
        ones,
        torch.zeros_like(ones),
        torch.arange(num_requests + 1, dtype=torch.int32),
        state.token_ids,
        state.total_lens,
    )


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize(("num_requests", "num_rows"), [(1, 1), (3, 4), (5, 8), (8, 8)])
def test_a_step_leaves_what_vllms_leaves(num_requests: int, num_rows: int, block_size: int) -> None:
    case = make_case(num_requests, num_rows, block_size=block_size)
    theirs = case.copy()
    case.begin()
    run_interpreted(begin_as_vllm, theirs, num_requests)
    rows, requests = slice(num_rows), slice(num_requests)
    for name, part in (
        ("input_ids", requests),
        ("positions", requests),
        ("seq_lens", rows),
        ("query_start_loc", slice(num_rows + 1)),
        ("block_table", rows),
        ("slot_mapping", rows),
    ):
        ours, wanted = getattr(case.inputs, name)[part], getattr(theirs.inputs, name)[part]
        assert torch.equal(ours, wanted), name
    # What attention is told of a request: computed tokens, and none in rows of padding.
    assert torch.equal(case.inputs.num_computed_tokens[rows], theirs.inputs.seq_lens[rows] - 1)
    end_steady_decode(case.slots, case.tokens, case.state)
    run_interpreted(end_as_vllm, theirs, num_requests)
    for each in fields(case.state):
        assert torch.equal(getattr(case.state, each.name), getattr(theirs.state, each.name)), each.name
