"""Steps of decodes with a head (EAGLE's, an MTP module): after the end, vLLM's graphs of it and what connects them.

vLLM has a graph of the head's first pass, over all tokens of a step, and one of all later passes, of a token each. The
end prepares the first pass: the head's inputs are the hidden states that the layers have left, and the step's tokens,
each a place earlier, with the sampled one after those that were accepted. Between the two graphs vLLM's kernel
prepares the later passes, and after them the drafts go from the head's rows to the requests' slots. Steps without
drafts, where these may be left out, keep the head's K/V current: by the first pass alone, or, with Rose's layer, by
storing K/V without the rest of the pass.

Whatever is written is vLLM's, at the addresses that its own steps use. Its kernels are launched for rows of padding,
too, which vLLM leaves out: such a row has "rejected" -1 tokens, so that its only token lies after all others, where
the batch is padded anyway.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import CUDAGraphMode

from rose_backend.kernels.captured_graphs import CapturedGraphs
from rose_backend.kernels.decode_step.ops import NO_SLOT
from rose_backend.vllm_plugin.models.eagle3 import RoseEagle3LlamaForCausalLM
from rose_backend.vllm_plugin.step_graph.draft_steps import DraftSteps
from rose_backend.vllm_plugin.step_graph.outputs import ReplayedBatch
from rose_backend.vllm_plugin.step_graph.steps import StepGraphs
from rose_backend.vllm_plugin.step_graph.whole_steps import End, WholeSteps


class HeadPasses(NamedTuple):
    """vLLM's descriptors of the graphs of a head's passes."""

    first: Any
    later: Any
    """None if a request has one draft."""


def _first_pass_of(head: Any, num_requests: int, desc: Any, query_len: int) -> Any | None:
    """Return the graph of the first pass that vLLM replays after a step with ``desc``; None if it launches the pass."""
    first = head.prefill_cudagraph_manager.dispatch(num_requests, desc.num_tokens, query_len, 0)
    is_replayed = first.cg_mode == CUDAGraphMode.FULL and first.num_tokens == desc.num_tokens
    return first if is_replayed else None


class PlainHeadSteps(StepGraphs):
    """Steps without drafts, each of whose requests gets one token, which a head of vLLM's passes over, too.

    Args:
        runner: as of ``StepGraphs``.
    """

    _replays_prompts = False

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._head = runner.speculator
        self._first_passes = {
            num_requests: first
            for num_requests, desc in self._desc_of.items()
            if (first := _first_pass_of(self._head, num_requests, desc, 1)) is not None
        }
        self._desc_of = {num_requests: self._desc_of[num_requests] for num_requests in self._first_passes}
        self._num_sampled = torch.ones(self._max_num_rows, dtype=torch.int32, device=runner.device)
        self._num_rejected = torch.zeros_like(self._num_sampled)

    def capture(self, stream: torch.cuda.Stream) -> None:
        """Capture what surrounds vLLM's graphs; see ``WholeSteps.capture``."""
        _begin_a_batch(self)
        super().capture(stream)

    def _end(self, end: End, _: None) -> torch.Tensor:
        """Do what ``StepGraphs`` does, and write the inputs of the head's first pass."""
        logits, size = super()._end(end, None), end[1]
        slots, num_rejected = self._slots[:size], self._num_rejected[:size]
        # -1 in rows of padding, else 0.
        num_rejected.copy_(slots.clamp(max=0))
        _begin_first_pass(self, size, slots.clamp(min=0), self._num_sampled[:size], num_rejected)
        return logits

    def _replay_end(self, batch: ReplayedBatch, end: str) -> None:
        super()._replay_end(batch, end)
        self._head.prefill_cudagraph_manager.run_fullgraph(self._first_passes[len(batch.request_ids)])


class StoringHeadSteps(StepGraphs):
    """Steps without drafts beside an EAGLE-3 head with Rose's layer.

    Args:
        runner: as of ``StepGraphs``.
    """

    _replays_prompts = False

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        (name,) = runner.speculator.draft_attn_layer_names
        groups = runner.kv_cache_config.kv_cache_groups
        (index,) = [index for index, group in enumerate(groups) if name in group.layer_names]
        self._head_slots = runner.block_tables.slot_mappings[index]

    def _end(self, end: End, _: None) -> torch.Tensor:
        """Do what ``StepGraphs`` does, and store the head's keys and values."""
        logits, size = super()._end(end, None), end[1]
        head: RoseEagle3LlamaForCausalLM = self._runner.speculator.model
        head.store(
            self._tokens[:size],
            self._inputs.positions[:size],
            _hidden_states_for_head(self, size),
            self._head_slots[:size],
        )
        return logits


class HeadSteps(DraftSteps):
    """Steps in which every request decodes, with the same number of drafts; a head makes them.

    Args:
        runner, num_drafts: as of ``DraftSteps``.
    """

    def __init__(self, runner: Any, num_drafts: int) -> None:
        super().__init__(runner, num_drafts)
        most, device = self._max_num_rows, runner.device
        self._head = runner.speculator
        self._passes = {
            num_requests: passes
            for num_requests, desc in self._desc_of.items()
            if (passes := self._passes_of(num_requests, desc)) is not None
        }
        self._desc_of = {num_requests: self._desc_of[num_requests] for num_requests in self._passes}
        self._num_rejected = torch.zeros(most, dtype=torch.int32, device=device)
        self._rejected_of_padding = torch.tensor(-1, dtype=torch.int32, device=device)
        self._begins_of_later_passes = CapturedGraphs[int](
            self._begin_later_passes, capture_error_mode="thread_local"
        )
        self._ends_of_passes = CapturedGraphs[int](self._keep_drafts, capture_error_mode="thread_local")

    def _passes_of(self, num_requests: int, desc: Any) -> HeadPasses | None:
        """Return the graphs that vLLM replays after a step with ``desc``; None if it launches some pass instead."""
        head = self._head
        first = _first_pass_of(head, num_requests, desc, self._query_len)
        if first is None or self._num_drafts == 1:
            return first and HeadPasses(first, None)
        manager = head.decode_cudagraph_manager
        later = manager.specialize_spec_tokens(
            manager.dispatch(num_requests, num_requests, 1, 0), self._num_drafts
        )
        return HeadPasses(first, later) if later.cg_mode == CUDAGraphMode.FULL else None

    def _fields_of_rows(self) -> dict[str, tuple[type[np.generic], tuple[int, ...]]]:
        most = self._max_num_rows
        return {
            **super()._fields_of_rows(),
            "is_row": (np.bool_, (most,)),
            # Where the drafts are that a row's slot gets: rows of padding write the first row's again.
            "drafted_rows": (np.int64, (most,)),
            # Of all rows that a graph of the head may have.
            "head_slots": (np.int64, (self._runner.max_num_reqs,)),
        }

    def _describe_rows(self, record: np.void, slots: NDArray[np.int64]) -> None:
        super()._describe_rows(record, slots)
        num_rows = len(slots)
        record["is_row"][:] = np.arange(self._max_num_rows) < num_rows
        record["drafted_rows"][:num_rows] = np.arange(num_rows)
        record["drafted_rows"][num_rows:] = 0
        record["head_slots"][:num_rows] = slots
        record["head_slots"][num_rows:] = NO_SLOT

    def capture(self, stream: torch.cuda.Stream) -> None:
        """Capture what surrounds vLLM's graphs; see ``WholeSteps.capture``."""
        _begin_a_batch(self)
        super().capture(stream)

    def _num_graphs(self) -> int:
        return super()._num_graphs() + (1 + (self._num_drafts > 1)) * len(self._sizes)

    def _capture_drafter(self, pool: Any, stream: torch.cuda.Stream) -> None:
        if self._num_drafts > 1:
            self._begins_of_later_passes.capture(self._sizes, pool, stream)
        self._ends_of_passes.capture(self._sizes, pool, stream)

    def close(self) -> None:
        """Give the graphs back; see ``WholeSteps.close``."""
        super().close()
        self._begins_of_later_passes.release()
        self._ends_of_passes.release()

    def _propose(self, size: int) -> None:
        """Write the inputs of the head's first pass."""
        given = self._row_inputs.tensors
        self._head.idx_mapping.copy_(given["head_slots"])
        num_sampled, num_rejected = self._num_sampled[:size], self._num_rejected[:size]
        torch.where(
            given["is_row"][:size],
            self._query_len - num_sampled,
            self._rejected_of_padding,
            out=num_rejected,
        )
        _begin_first_pass(
            self, size * self._query_len, given["drafted_slots"][:size], num_sampled, num_rejected
        )

    def _replay_drafter(self, batch: ReplayedBatch) -> None:
        head, size = self._head, batch.num_rows_of_end
        passes = self._passes[len(batch.request_ids)]
        head.prefill_cudagraph_manager.run_fullgraph(passes.first)
        if passes.later is not None:
            self._begins_of_later_passes.run(size)
            head.decode_cudagraph_manager.run_fullgraph(passes.later)
        self._ends_of_passes.run(size)

    def _begin_later_passes(self, size: int, _: None) -> None:
        """Write the inputs of the head's second pass; its graph writes those of the passes after it."""
        from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import prepare_decode_inputs

        head = self._head
        prepare_decode_inputs(
            head.draft_tokens[:size, 0],
            self._inputs.seq_lens,
            self._num_rejected,
            head.input_buffers,
            head.sample_src_positions,
            head.max_model_len,
            head.max_num_reqs,
            advance_draft_positions=head.advance_draft_positions,
        )

    def _keep_drafts(self, size: int, _: None) -> None:
        given = self._row_inputs.tensors
        drafts = self._head.draft_tokens[given["drafted_rows"][:size]]
        self._store_drafts(drafts, given["drafted_slots"][:size])


def _begin_a_batch(steps: PlainHeadSteps | HeadSteps) -> None:
    """Begin a step without requests, before vLLM's kernel of a head's inputs is launched for the first time.

    The token that it writes for a row of padding comes after those of the batch that is there now.
    """
    with torch.inference_mode():
        for size in steps._sizes[:1]:
            steps._begin(size, None)


def _begin_first_pass(
    steps: WholeSteps,
    num_tokens: int,
    slots: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
) -> None:
    """Write the inputs of a head's first pass over the tokens of a step.

    Args:
        num_tokens: T, with padding.
        slots: [R], of each row; of rows of padding those of any.
        num_sampled: [R] int32, of rows of padding any number but 0.
        num_rejected: [R] int32, -1 in rows of padding.
    """
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import prepare_prefill_inputs

    runner, inputs = steps._runner, steps._inputs
    head = runner.speculator
    head.hidden_states[:num_tokens].copy_(_hidden_states_for_head(steps, num_tokens))
    # Of vLLM's ``InputBatch``, what is read of it here.
    batch: Any = SimpleNamespace(
        num_reqs=len(slots),
        input_ids=inputs.input_ids,
        positions=inputs.positions,
        idx_mapping=slots,
        query_start_loc=inputs.query_start_loc,
        seq_lens=inputs.seq_lens,
    )
    prepare_prefill_inputs(
        head.last_token_indices,
        head.current_draft_step,
        head.input_buffers,
        batch,
        num_sampled,
        num_rejected,
        runner.req_states.last_sampled_tokens,
        runner.req_states.next_prefill_tokens,
        head.max_num_reqs,
    )


def _hidden_states_for_head(steps: WholeSteps, num_tokens: int) -> torch.Tensor:
    """Return what a head reads of the layers' outputs, [T, H]: the last one's, or that of some, combined."""
    from vllm.v1.worker.gpu.spec_decode.utils import get_drafter_hidden_states

    manager, runner = steps._manager, steps._runner
    if manager.aux_hidden_states:
        side_by_side = torch.cat([each[:num_tokens] for each in manager.aux_hidden_states], dim=-1)
        combined: torch.Tensor = runner.speculator.model.combine_hidden_states(side_by_side)
        return combined
    return get_drafter_hidden_states(runner.model, manager.hidden_states[:num_tokens])
