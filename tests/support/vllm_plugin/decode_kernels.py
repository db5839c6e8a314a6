"""Both ends of a step by vLLM's own kernels, to be interpreted."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.decode_steps import NUM_SLOTS, Case, MixedCase

KERNELS = {
    "vllm.v1.worker.gpu.input_batch": (
        "_prepare_prefill_inputs_kernel",
        "_prepare_pos_seq_lens_kernel",
        "_combine_sampled_and_draft_tokens_kernel",
        "_post_update_kernel",
    ),
    "vllm.v1.worker.gpu.buffer_utils": ("_load_ptr",),
    "vllm.v1.worker.gpu.mm.rope": ("_prepare_rope_positions_kernel",),
    "vllm.v1.worker.gpu.block_table": ("_gather_block_tables_kernel", "_compute_slot_mappings_kernel"),
}


def vllm_modules() -> tuple[Any, Any, Any]:
    """Return vLLM's modules of inputs, block tables and M-RoPE positions, with kernels: its CPU build has none."""
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
    return modules["input_batch"], modules["block_table"], modules["rope"]


def _plain(function: Any) -> Any:
    return getattr(function, "fn", function)


def begin_as_vllm(case: Case, num_requests: int) -> None:
    """Write the inputs of a step as vLLM's runner does: requests, and padding up to the graph's rows."""
    inputs_of, tables_of, _ = vllm_modules()
    state, inputs, num_rows = case.state, case.inputs, len(case.slots)
    slots = case.slots[:num_requests].clone()
    starts = torch.full((num_rows + 1,), num_requests, dtype=torch.int32)
    starts[: num_requests + 1] = torch.arange(num_requests + 1)
    prefill_lens, num_tokens = torch.zeros(NUM_SLOTS, dtype=torch.int32), num_rows
    if isinstance(case, MixedCase):
        starts, num_tokens = case.rows.query_start_loc, case.num_tokens
        ends = state.num_computed_tokens[slots] + starts.diff()[:num_requests]
        # Of a part of a prompt that is not its last one there is more.
        ends += 3 * (1 - case.rows.is_due[:num_requests])
        prefill_lens[slots] = ends * case.rows.is_prompt[:num_requests]
    inputs.query_start_loc[: num_rows + 1] = starts
    drafts = (
        torch.zeros(NUM_SLOTS, 0, dtype=torch.int64) if state.draft_tokens is None else state.draft_tokens
    )
    num_logits = torch.ones(num_requests, dtype=torch.int32)
    if isinstance(case, MixedCase) and state.draft_tokens is not None:
        counts = starts.diff()[:num_requests]
        num_logits = torch.where(case.rows.is_prompt[:num_requests] == 0, counts, num_logits)
    ends_of_logits = torch.zeros(num_requests + 1, dtype=torch.int32)
    ends_of_logits[1:] = num_logits.cumsum(0)
    seq_lens = inputs.seq_lens[:num_rows]
    inputs_of.prepare_prefill_inputs(
        inputs.input_ids,
        torch.zeros(1, NUM_SLOTS, dtype=torch.int32),
        slots,
        starts,
        state.token_ids,
        prefill_lens,
        state.num_computed_tokens,
    )
    inputs_of.prepare_pos_seq_lens(slots, starts, state.num_computed_tokens, inputs.positions, seq_lens)
    inputs_of.combine_sampled_and_draft_tokens(
        inputs.input_ids,
        slots,
        state.last_tokens,
        starts,
        seq_lens,
        prefill_lens,
        drafts,
        ends_of_logits,
        int(ends_of_logits[-1]),
    )
    groups = case.groups.groups
    last = state.num_computed_tokens.clone()
    last[slots] += starts.diff()[:num_requests] - 1
    if state.draft_tokens is not None:
        # vLLM's scheduler makes room for a drafter's own steps, too.
        last += state.draft_tokens.shape[1]
    num_blocks = [(last // group.block_size + 1).clamp(max=group.state_table.shape[1]) for group in groups]
    tables = SimpleNamespace(
        num_kv_cache_groups=len(groups),
        input_block_tables=[group.block_table for group in groups],
        input_block_table_ptrs=_pointers([group.block_table for group in groups]),
        block_table_ptrs=_pointers([group.state_table for group in groups]),
        block_table_strides=torch.tensor([group.state_table.stride(0) for group in groups]),
        num_blocks=SimpleNamespace(gpu=torch.stack(num_blocks)),
        block_sizes_tensor=torch.tensor([group.block_size for group in groups], dtype=torch.int32),
        slot_mapping_enabled=torch.tensor([True] * len(groups)),
        dcp_sharded=torch.tensor([True] * len(groups)),
        slot_mappings=torch.stack([group.slot_mapping for group in groups]),
        cp_rank=0,
        cp_size=1,
        cp_interleave=1,
        # From vLLM 0.33 on.
        has_sliding_window_groups=False,
        sliding_window_reach=torch.zeros(len(groups), dtype=torch.int32),
        _num_dirty_rows=0,
    )
    tables_of.BlockTables.gather_block_tables(tables, slots, num_rows)
    tables_of.BlockTables.compute_slot_mappings(tables, slots, starts, inputs.positions, num_tokens)
    for group, slot_mapping in zip(groups, tables.slot_mappings, strict=True):
        group.slot_mapping.copy_(slot_mapping)


def _pointers(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def positions_as_vllm(rope: Any, case: Case, num_requests: int) -> None:
    """Write M-RoPE positions of a step that only decodes as vLLM's ``RopeState`` does."""
    _, _, rope_of = vllm_modules()
    rope_of.RopeState.prepare_positions(
        rope,
        case.slots[:num_requests].clone(),
        torch.arange(num_requests + 1, dtype=torch.int32),
        torch.zeros(NUM_SLOTS, dtype=torch.int32),
        case.state.num_computed_tokens,
    )


def end_drafts_as_vllm(
    case: MixedCase, num_requests: int, tokens: torch.Tensor, num_sampled: torch.Tensor
) -> None:
    """Move the state of rows with drafts on as vLLM's runner does."""
    inputs_of, _, _ = vllm_modules()
    state, starts = case.state, case.rows.query_start_loc[: num_requests + 1]
    inputs_of.post_update(
        case.slots[:num_requests].clone(),
        state.num_computed_tokens,
        state.last_tokens,
        state.output_counts,
        tokens[:num_requests].clone(),
        num_sampled[:num_requests],
        starts.diff() - num_sampled[:num_requests],
        starts,
        state.token_ids,
        state.total_lens,
    )


def end_as_vllm(case: Case, num_requests: int) -> None:
    """Move the state on as vLLM's runner does."""
    inputs_of, _, _ = vllm_modules()
    state, ones = case.state, torch.ones(num_requests, dtype=torch.int32)
    starts, num_sampled = torch.arange(num_requests + 1, dtype=torch.int32), ones
    if isinstance(case, MixedCase):
        starts, num_sampled = case.rows.query_start_loc[: num_requests + 1], case.rows.is_due[:num_requests]
    inputs_of.post_update(
        case.slots[:num_requests].clone(),
        state.num_computed_tokens,
        state.last_tokens,
        state.output_counts,
        case.tokens[:num_requests, None].clone(),
        num_sampled,
        torch.zeros_like(ones),
        starts,
        state.token_ids,
        state.total_lens,
    )
