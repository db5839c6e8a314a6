"""What a step reads and writes: vLLM's buffers and request states, by the names that Rose's kernels have for them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.core.sched.output import SchedulerOutput

from rose_backend.kernels.arguments import StateGroup, StepGroup, StepGroups, StepInputs, StepState
from rose_backend.kernels.captured_graphs import FixedInputs
from rose_backend.vllm_plugin.attention.audited_models import find_unaudited
from rose_backend.vllm_plugin.step_graph.reasons import STATE_BUILDERS


@dataclass(frozen=True)
class MixedStep:
    """What a step with prompts computes. Lists have one entry per request, those with the fewest tokens first."""

    request_ids: list[str]
    counts: list[int]
    """Tokens that the step computes."""
    num_computed_tokens: list[int]
    """Tokens computed before the step."""
    prefill_lens: list[int]
    """Tokens to prefill: the prompt, and after a preemption the output so far."""
    is_prompt: list[bool]
    """Whether the step computes some of the tokens to prefill."""
    is_due: list[bool]
    """Whether all of them are computed after the step, so that it samples a token."""
    has_single_tokens: bool
    """Whether vLLM takes this for a step of decodes: every request computes one token, and none its first."""


class ModelInputs:
    """What layers of multimodal models read besides vLLM's input buffers: embeddings and M-RoPE positions.

    Args:
        runner: vLLM's ``GPUModelRunner`` (V2).
        max_num_rows: rows of a step that only decodes, at most.
    """

    def __init__(self, runner: Any, max_num_rows: int) -> None:
        self._runner = runner
        self._has_embeds = runner.model_state.supports_mm_inputs
        self._has_rope = runner.model_state.rope_state is not None
        has_any = self._has_embeds or self._has_rope
        self.is_prepared_by_vllm = has_any and find_unaudited(runner.model_config) is not None
        """Whether steps with prompts are vLLM's: their layers need Python, so no graph can replay them."""
        # A fixed address: vLLM's own tensors of deltas alternate between steps with new requests.
        self._deltas = torch.zeros(max_num_rows, dtype=torch.int32, device=runner.device)

    def take_over(self, slots: NDArray[np.int64], num_rows: int) -> None:
        """Upload the M-RoPE deltas of the requests of the next steps that only decode.

        Args:
            slots: [R] request slots.
            num_rows: rows to write; those after the requests get 0.
        """
        if not self._has_rope:
            return
        deltas = torch.zeros(num_rows, dtype=torch.int32, pin_memory=self._deltas.is_cuda)
        deltas.numpy()[: len(slots)] = self._runner.model_state.rope_state.prefill_delta.np[slots]
        # torch keeps pinned memory until the copy has run.
        self._deltas[:num_rows].copy_(deltas, non_blocking=True)

    def prepare(self, inputs: StepInputs, step: MixedStep, num_tokens: int, output: SchedulerOutput) -> None:
        """Let vLLM write embeddings and positions of a step with prompts, and encode its images.

        Args:
            num_tokens: tokens of the step, padding included.
        """
        if not self._has_embeds and not self._has_rope:
            return
        state, states, num_requests = self._runner.model_state, self._runner.req_states, len(step.request_ids)
        starts = np.cumsum([0, *step.counts])
        # The fields of vLLM's ``InputBatch`` that the two calls below read.
        batch: Any = SimpleNamespace(
            req_ids=step.request_ids,
            idx_mapping=inputs.request_slots[:num_requests],
            num_scheduled_tokens=np.array(step.counts),
            num_tokens=int(starts[-1]),
            num_tokens_after_padding=num_tokens,
            query_start_loc=inputs.query_start_loc[: num_requests + 1],
            query_start_loc_np=starts,
            num_computed_tokens_np=np.array(step.num_computed_tokens),
            prefill_len_np=np.array(step.prefill_lens),
            input_ids=inputs.input_ids,
        )
        if self._has_embeds:
            state.prepare_inputs_embeds(output.scheduled_encoder_inputs, batch, states)
        state.prepare_inputs(batch, states)

    def write(self, inputs: StepInputs, num_rows: int) -> None:
        """Write embeddings and positions of a step that only decodes: text, so all M-RoPE dimensions are equal."""
        state = self._runner.model_state
        if self._has_rope:
            rope = state.rope_state
            positions = inputs.positions[:num_rows].expand(rope.num_dims, num_rows)
            torch.add(positions, self._deltas[:num_rows], out=rope.positions[:, :num_rows])
        if self._has_embeds:
            embeds = self._runner.model.embed_input_ids(inputs.input_ids[:num_rows])
            state.encoder_runner.inputs_embeds[:num_rows].copy_(embeds)


def state_of(runner: Any) -> StepState:
    """Return vLLM's tensors of the requests' state, by request slot, which replayed steps read and update in place."""
    states = runner.req_states
    return StepState(
        num_computed_tokens=states.num_computed_tokens.gpu,
        last_tokens=states.last_sampled_tokens.view(-1),
        total_lens=states.total_len.gpu,
        token_ids=states.all_token_ids.gpu,
        output_counts=runner.sampler.penalties_state.output_bin_counts,
    )


def row_inputs(num_rows: int, device: torch.device) -> FixedInputs:
    """Return fixed device memory, filled from the CPU in one copy, for ``MixedRows`` of up to ``num_rows`` rows."""
    one = (num_rows,)
    return FixedInputs(
        {
            "slots": (np.int64, one),
            "query_start_loc": (np.int32, (num_rows + 1,)),
            "is_prompt": (np.int32, one),
            "is_due": (np.int32, one),
        },
        device,
    )


def inputs_of(runner: Any, num_rows: int) -> StepInputs:
    """Return vLLM's input buffers, which a prologue writes, with request slots for ``num_rows`` rows beside them."""
    buffers = runner.input_buffers
    return StepInputs(
        input_ids=buffers.input_ids,
        positions=buffers.positions,
        seq_lens=buffers.seq_lens,
        query_start_loc=buffers.query_start_loc,
        is_padding=buffers.is_padding,
        request_slots=torch.zeros(num_rows, dtype=torch.int32, device=runner.device),
    )


def groups_of(runner: Any) -> StepGroups:
    """Return the runner's KV cache groups, each with the tensors that its layers read through the metadata.

    A group whose layers differ in shape has several metadata builders: these are the first one's, see ``copies_of``.
    """
    tables = runner.block_tables
    groups: list[StepGroup | StateGroup] = []
    for index, of_group in enumerate(runner.attn_groups):
        builder = of_group[0].get_metadata_builder()
        state_table, block_size = tables.block_tables[index].gpu, tables.block_sizes[index]
        if type(builder) in STATE_BUILDERS:
            last_columns = runner.model_state._mamba_state_idx_gpu
            groups.append(StateGroup(state_table, _state_blocks_of(builder), last_columns, block_size))
            continue
        group = StepGroup(
            state_table=state_table,
            block_table=tables.input_block_tables[index],
            slot_mapping=tables.slot_mappings[index],
            num_computed_tokens=builder.decode_computed_tokens,
            block_size=block_size,
        )
        groups.append(group)
    return StepGroups(*groups)


def _state_blocks_of(builder: Any) -> torch.Tensor:
    """Return the block of each row's state, [T] int32: without drafts a row has one."""
    blocks: torch.Tensor = getattr(builder, STATE_BUILDERS[type(builder)][0])
    return blocks.view(-1)


def copies_of(runner: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of tensors by row: one that the prologue writes, and one to which it must be copied afterwards.

    Layers of several shapes in one KV cache group (Gemma 4) have a metadata builder for each shape.
    """
    copies = []
    for of_group in runner.attn_groups:
        builders = [each.get_metadata_builder() for each in of_group]
        is_state = type(builders[0]) in STATE_BUILDERS
        first, *others = (
            _state_blocks_of(each) if is_state else each.decode_computed_tokens for each in builders
        )
        copies += [(first, other) for other in others]
        for each in builders if is_state else ():
            if (name := STATE_BUILDERS[type(each)][1]) is not None:
                # The first entry stays 0.
                copies.append((runner.input_buffers.query_start_loc[1:], getattr(each, name)[1:]))
    return copies
