"""Steady decode steps of one model runner as three replays: Rose's prologue, vLLM's own decode graph, Rose's epilogue.

The prologue makes the inputs from the requests' state, the epilogue computes logits, samples and moves that state on.
So the CPU only hands over what changed and replays. All state is vLLM's, and complete after every step: steps of both
kinds may alternate.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from rose_backend.errors import IntegrityError
from rose_backend.kernels.arguments import DecodeGroup, DecodeGroups, DecodeInputs, DecodeState
from rose_backend.kernels.captured_graphs import CapturedGraphs
from rose_backend.kernels.decode_step.ops import (
    NO_SLOT,
    begin_steady_decode,
    end_steady_decode,
    write_block_ids,
)
from rose_backend.vllm_plugin.plugin_logger import SAMPLES, STEPS, logger
from rose_backend.vllm_plugin.step_graph.steady_choice import SteadyBatches, why_step_is_not_steady

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

NUM_BUFFERS = 8
"""Steps whose tokens are kept at once. vLLM reads a step's tokens before it schedules the second step after it, with
pipeline stages (which have no step graph) somewhat later. Workers that nobody asks for tokens never read them."""


class OutputBuffers:
    """CPU memory for the tokens of the last steps, in turn.

    Args:
        max_num_rows: of a step.
        device: where the tokens are.
    """

    def __init__(self, max_num_rows: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._tokens = [
            torch.empty(max_num_rows, 1, dtype=torch.int64, pin_memory=is_cuda) for _ in range(NUM_BUFFERS)
        ]
        # As vLLM's: a thread that waits sleeps, rather than holding a lock of the driver.
        self._events: list[Any] = [
            torch.cuda.Event(blocking=True) if is_cuda else None for _ in range(NUM_BUFFERS)
        ]
        self._num_steps = 0

    def copy(self, tokens: torch.Tensor, request_ids: list[str], index_of: dict[str, int]) -> SteadyOutput:
        """Start to copy the tokens of one step, [R] int64, after what has been launched so far.

        The copy is on the stream of the steps: the next one overwrites ``tokens`` only after it.
        """
        step, num_rows = self._num_steps, len(request_ids)
        self._num_steps += 1
        on_cpu = self._tokens[step % NUM_BUFFERS]
        on_cpu[:num_rows].copy_(tokens[:num_rows].view(-1, 1), non_blocking=True)
        event = self._events[step % NUM_BUFFERS]
        if event is not None:
            event.record()
        return SteadyOutput(self, step, request_ids, index_of)

    def read(self, step: int, num_rows: int) -> list[list[int]]:
        """Wait for a step, counted from 0, and return a list for each row, with its token.

        Raises:
            IntegrityError: the tokens were overwritten by those of a later step.
        """
        event = self._events[step % NUM_BUFFERS]
        if event is not None:
            event.synchronize()
        tokens: list[list[int]] = self._tokens[step % NUM_BUFFERS][:num_rows].tolist()
        if self._num_steps > step + NUM_BUFFERS:
            raise IntegrityError(
                f"step graph: tokens of step {step} were asked for after {self._num_steps} steps, and "
                f"{NUM_BUFFERS} are kept"
            )
        return tokens


class SteadyOutput(AsyncModelRunnerOutput):
    """What a replayed step returns to vLLM: one token per request.

    Args:
        buffers: that hold the tokens.
        step: as ``OutputBuffers`` counts.
        request_ids: in the order of the rows; shared between steps, as ``index_of`` is.
        index_of: request id to row.
    """

    def __init__(
        self, buffers: OutputBuffers, step: int, request_ids: list[str], index_of: dict[str, int]
    ) -> None:
        self._buffers, self._step = buffers, step
        self._request_ids, self._index_of = request_ids, index_of

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step, and return its tokens."""
        tokens = self._buffers.read(self._step, len(self._request_ids))
        return ModelRunnerOutput(
            req_ids=self._request_ids, req_id_to_index=self._index_of, sampled_token_ids=tokens
        )

    def get_kv_connector_output(self) -> None:
        """Return None: steps with a KV connector are vLLM's. Asked for from vLLM 0.33 on."""
        return


Part = tuple[str, int]
"""``begin``, or an end, ``greedy`` or ``drawn``; and the number of rows."""


@dataclass(frozen=True)
class ArmedBatch:
    """The requests that the graphs' rows belong to now."""

    request_ids: list[str]
    kind: str
    """``greedy`` or ``drawn``."""
    num_rows: int
    desc: Any
    """vLLM's ``BatchExecutionDescriptor``."""
    slots: dict[str, int]
    index_of: dict[str, int] = field(default_factory=dict)


class SteadySteps:
    """Captures and replays the steady decode steps of one model runner.

    Args:
        runner: vLLM's ``GPUModelRunner`` (V2), its graphs captured, without ``why_engine_is_not_steady``.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._manager = runner.cudagraph_manager
        self._batches = SteadyBatches(runner)
        self._desc_of = _decode_graphs(self._manager, runner.max_num_reqs)
        self._sizes = sorted({desc.num_tokens for desc in self._desc_of.values()}, reverse=True)
        most = max(self._sizes, default=0)
        device = runner.device
        self._slots = torch.full((most,), NO_SLOT, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._state = _state_of(runner)
        self._inputs = _inputs_of(runner, most)
        self._groups = _groups_of(runner)
        self._copies_of_computed_tokens = _copies_of_computed_tokens(runner)
        self._buffers = OutputBuffers(most, device)
        self._graphs = CapturedGraphs[Part](self._compute, capture_error_mode="thread_local")
        self._armed: ArmedBatch | None = None
        self._pending: SteadyOutput | None = None
        self._padded_rows = 0
        self._names_of_weights = [name for name, _ in runner.model.lm_head.named_parameters(recurse=False)]
        self._weights_at = self._addresses_of_weights()
        self._compute_logits = runner.model.compute_logits
        # Products of other sizes round otherwise; so both kinds of steps multiply the same rows.
        runner.model.compute_logits = self._compute_padded_logits

    def capture(self, stream: torch.cuda.Stream) -> None:
        """Capture prologue and epilogue of each of vLLM's decode graphs, which were captured on ``stream``."""
        from vllm.compilation.cudagraph_pool import capture_pool
        from vllm.distributed.parallel_state import graph_capture

        start = time.perf_counter()
        free_before = torch.cuda.mem_get_info()[0]
        runner, manager = self._runner, self._manager
        with (
            graph_capture(device=runner.device),
            # Products have a workspace on each stream.
            torch.cuda.stream(stream),
            capture_pool(manager.pool, runner.vllm_config) as pool,
        ):
            self._graphs.capture(self._parts(), pool, stream)
        # Compiled before steps need it.
        write_block_ids(torch.zeros(2, 0, dtype=torch.int64, device=runner.device), self._groups)
        num_bytes = max(free_before - torch.cuda.mem_get_info()[0], 0)
        logger.info(
            "Rose step graph: decode steps of up to %d requests are replayed whole; %d graphs, %.1f s, %.2f GiB",
            max(self._desc_of, default=0),
            len(self._parts()),
            time.perf_counter() - start,
            num_bytes / (1 << 30),
        )

    def _addresses_of_weights(self) -> tuple[int, ...]:
        """Return where the head's weights are: the epilogues hold these addresses, which vLLM's graphs do not."""
        head = self._runner.model.lm_head
        return tuple(getattr(head, name).data_ptr() for name in self._names_of_weights)

    def _parts(self) -> list[Part]:
        draws = self._batches.replayed
        most_drawn = 0 if draws is None else max(draws.graphs.sizes, default=0)
        ends = [("greedy", size) for size in self._sizes]
        ends += [("drawn", size) for size in self._sizes if size <= most_drawn]
        return [*ends, *(("begin", size) for size in self._sizes)]

    def launch(self, output: SchedulerOutput) -> bool:
        """Run a step if it is steady; else return False, having changed nothing but the count of such steps.

        Raises:
            IntegrityError: nobody asked for the tokens of the step before.
        """
        if self._pending is not None:
            raise IntegrityError("step graph: the step before was never asked for its tokens")
        reason = why_step_is_not_steady(output)
        if reason is None and self._addresses_of_weights() != self._weights_at:
            reason = "a head whose weights have moved"
        cached = output.scheduled_cached_reqs
        if reason is None:
            is_changed = bool(output.finished_req_ids or output.preempted_req_ids)
            if self._armed is not None and not is_changed and cached.req_ids == self._armed.request_ids:
                self._append_blocks(self._armed, cached)
                self._replay(self._armed)
                return True
            batch, reason = self._next_batch(cached)
            if batch is not None:
                self._take_over(output)
                self._arm(batch)
                self._replay(batch)
                return True
        if reason is not None:
            STEPS.count_vllm(reason)
        self._armed = None
        return False

    def take_output(self) -> SteadyOutput | None:
        """Return the output of the step that was launched last; None if that step was vLLM's."""
        output, self._pending = self._pending, None
        return output

    def note_vllm_step(self) -> None:
        """Let vLLM's next product of a decode-only step have as many rows as the epilogue's."""
        self._padded_rows = 0
        state = self._runner.execute_model_state
        if state is None or state.hidden_states is None:
            return
        batch, hidden = state.input_batch, state.hidden_states
        is_replayed = hidden.data_ptr() == self._manager.hidden_states.data_ptr()
        is_decode = batch.num_tokens == batch.num_reqs and batch.num_reqs in self._desc_of
        if is_replayed and is_decode and len(hidden) == self._desc_of[batch.num_reqs].num_tokens:
            self._padded_rows = batch.num_reqs

    def _compute_padded_logits(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        num_rows, self._padded_rows = self._padded_rows, 0
        if num_rows and len(hidden_states) == num_rows and not args and not kwargs:
            size = self._desc_of[num_rows].num_tokens
            return self._compute_logits(self._manager.hidden_states[:size])[:num_rows]
        return self._compute_logits(hidden_states, *args, **kwargs)

    def _next_batch(self, cached: CachedRequestData) -> tuple[ArmedBatch | None, str | None]:
        """Return the batch of a step of decodes only, or None and why its step is vLLM's."""
        request_ids = list(cached.req_ids)
        desc = self._desc_of.get(len(request_ids))
        if desc is None:
            return None, "more requests than full graphs of decodes take"
        slot_of = self._runner.req_states.req_id_to_index
        slots = {request_id: slot_of[request_id] for request_id in request_ids}
        kind, reason = self._batches.kind_of(
            np.fromiter(slots.values(), np.int64, len(slots)), cached.num_computed_tokens, desc.num_tokens
        )
        if kind is None:
            return None, reason
        index_of = {request_id: index for index, request_id in enumerate(request_ids)}
        return ArmedBatch(request_ids, kind, desc.num_tokens, desc, slots, index_of), None

    def _take_over(self, output: SchedulerOutput) -> None:
        """Do what vLLM does with a scheduler output before it looks at the step's tokens."""
        runner = self._runner
        runner.finish_requests(output)
        runner.free_states(output)
        runner.add_requests(output)
        runner.update_requests(output)
        runner.block_tables.apply_staged_writes()

    def _arm(self, batch: ArmedBatch) -> None:
        slots = torch.full((batch.num_rows,), NO_SLOT, dtype=torch.int64, pin_memory=self._slots.is_cuda)
        slots.numpy()[: len(batch.slots)] = list(batch.slots.values())
        # torch keeps pinned memory until the copy has run.
        self._slots[: batch.num_rows].copy_(slots, non_blocking=True)
        self._armed = batch

    def _append_blocks(self, batch: ArmedBatch, cached: CachedRequestData) -> None:
        """Append new blocks to the rows of requests, as vLLM's ``append_block_ids`` and ``apply_staged_writes`` do.

        In a busy engine some request fills a block in almost every step. vLLM stages the writes of each row apart and
        launches a Triton kernel over them: 91 us of the CPU's time for 32 rows of 256 (beside an H200), where one copy
        and two small kernels take 63; with several KV cache groups it is one copy and one kernel. vLLM's own count of
        blocks goes to the device with its next step. Columns that a sliding window has passed stay as they are, as in
        vLLM's steps: attention reads no column before the window.
        """
        if not any(cached.new_block_ids):
            return
        grown = [
            (request_id, batch.slots[request_id], block_ids)
            for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True)
            if block_ids is not None
        ]
        places: list[int] = []
        new_blocks: list[int] = []
        for index, group in enumerate(self._groups.groups):
            num_blocks = self._runner.block_tables.num_blocks.np[index]
            first_entry, width = self._groups.first_entries[index], group.state_table.shape[1]
            for request_id, slot, of_groups in grown:
                block_ids = of_groups[index]
                start = int(num_blocks[slot])
                end = start + len(block_ids)
                if end > width:
                    raise IntegrityError(
                        f"step graph: request {request_id} gets blocks {start} to {end}, a row has {width}"
                    )
                row = first_entry + slot * width
                places.extend(range(row + start, row + end))
                new_blocks.extend(block_ids)
                num_blocks[slot] = end
        # torch keeps pinned memory until the copy has run.
        writes = torch.tensor([places, new_blocks], dtype=torch.int64, pin_memory=self._slots.is_cuda)
        write_block_ids(writes.to(self._slots.device, non_blocking=True), self._groups)

    def _replay(self, batch: ArmedBatch) -> None:
        tables = self._runner.block_tables
        if hasattr(tables, "_num_dirty_rows"):
            # From vLLM 0.33 on: rows of the step's table that its next step clears where they are padding then.
            tables._num_dirty_rows = max(tables._num_dirty_rows, batch.num_rows)
        self._graphs.run(("begin", batch.num_rows))
        self._manager.run_fullgraph(batch.desc)
        self._graphs.run((batch.kind, batch.num_rows))
        self._pending = self._buffers.copy(self._tokens, batch.request_ids, batch.index_of)
        STEPS.count_rose()
        if batch.kind == "drawn":
            SAMPLES.count_rose(len(batch.request_ids))

    def _compute(self, part: Part, _: None) -> None:
        """Run one part of a step; captured once per part."""
        name, size = part
        slots = self._slots[:size]
        if name == "begin":
            padding_slot = self._runner.max_num_reqs
            begin_steady_decode(slots, self._state, self._inputs, self._groups, padding_slot=padding_slot)
            for written, copy in self._copies_of_computed_tokens:
                copy[:size].copy_(written[:size])
            return
        logits = self._compute_logits(self._manager.hidden_states[:size])
        tokens = self._tokens[:size]
        if name == "greedy":
            tokens.copy_(logits.argmax(dim=-1))
        else:
            assert self._batches.replayed is not None
            positions, request_slots = self._inputs.positions[:size], self._inputs.request_slots[:size]
            tokens.copy_(self._batches.replayed.graphs.compute(logits, request_slots, positions))
        end_steady_decode(slots, tokens, self._state)


def _decode_graphs(manager: Any, max_num_reqs: int) -> dict[int, Any]:
    """Return vLLM's descriptor of the full decode graph for each number of requests that has one."""
    from vllm.config import CUDAGraphMode

    found = {}
    for num_requests in range(1, max_num_reqs + 1):
        desc = manager.dispatch(num_requests, num_requests, 1, 0, 1)
        if desc.cg_mode == CUDAGraphMode.FULL and desc.uniform_token_count == 1 and desc in manager.graphs:
            found[num_requests] = desc
    return found


def _state_of(runner: Any) -> DecodeState:
    states = runner.req_states
    return DecodeState(
        num_computed_tokens=states.num_computed_tokens.gpu,
        last_tokens=states.last_sampled_tokens.view(-1),
        total_lens=states.total_len.gpu,
        token_ids=states.all_token_ids.gpu,
        output_counts=runner.sampler.penalties_state.output_bin_counts,
    )


def _inputs_of(runner: Any, num_rows: int) -> DecodeInputs:
    buffers = runner.input_buffers
    return DecodeInputs(
        input_ids=buffers.input_ids,
        positions=buffers.positions,
        seq_lens=buffers.seq_lens,
        query_start_loc=buffers.query_start_loc,
        is_padding=buffers.is_padding,
        request_slots=torch.zeros(num_rows, dtype=torch.int32, device=runner.device),
    )


def _groups_of(runner: Any) -> DecodeGroups:
    """Return the runner's KV cache groups, each with what the first of its metadata builders lets layers read."""
    tables = runner.block_tables
    return DecodeGroups(
        *(
            DecodeGroup(
                state_table=tables.block_tables[index].gpu,
                block_table=tables.input_block_tables[index],
                slot_mapping=tables.slot_mappings[index],
                num_computed_tokens=of_group[0].get_metadata_builder().decode_computed_tokens,
                block_size=tables.block_sizes[index],
            )
            for index, of_group in enumerate(runner.attn_groups)
        )
    )


def _copies_of_computed_tokens(runner: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what the prologue writes for a KV cache group, and what else must hold the same.

    Layers of several shapes in one KV cache group (Gemma 4) have a metadata builder each.
    """
    copies = []
    for of_group in runner.attn_groups:
        first, *others = (each.get_metadata_builder().decode_computed_tokens for each in of_group)
        copies += [(first, other) for other in others]
    return copies
