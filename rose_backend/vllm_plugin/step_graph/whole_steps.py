"""Base class of steps that are replayed whole: capturing them, and taking over from vLLM's model runner and back.

Called by ``runner_hooks.py``: ``launch`` in place of vLLM's ``execute_model``, then ``take_output`` in place of
``sample_tokens``. A step that ``launch`` declines is vLLM's, from ``execute_model`` to ``sample_tokens``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.compilation import cudagraph_pool
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from rose_backend.errors import IntegrityError
from rose_backend.kernels.arguments import MixedRows
from rose_backend.kernels.captured_graphs import CapturedGraphs
from rose_backend.kernels.decode_step.ops import begin_mixed_step, write_block_ids
from rose_backend.vllm_plugin.plugin_logger import STEPS, logger
from rose_backend.vllm_plugin.step_graph.adapters import StepAdapters
from rose_backend.vllm_plugin.step_graph.inputs import copies_of, groups_of, inputs_of, state_of
from rose_backend.vllm_plugin.step_graph.outputs import ReplayedBatch, ReplayedOutput
from rose_backend.vllm_plugin.step_graph.votes import StepVotes

End = tuple[str, int]
"""Key of a graph that ends a step: how it samples ("greedy", "drawn", ...), and its number of rows."""


class WholeSteps(ABC):
    """Captures and replays the steps of one model runner.

    A step is three replays: a prologue (``_begins``), one of vLLM's graphs of the layers, and an end (``_ends``). A
    subclass captures the prologues and ends of one kind of step, and decides which steps are of that kind.

    Args:
        runner: vLLM's ``GPUModelRunner`` (V2), its graphs captured, for which ``why_engine_is_not_replayed`` is None.
        query_len: tokens of each request in a step that only decodes.
        max_num_tokens: tokens of such a step at most; None: as many as vLLM's graphs take.

    Attributes:
        votes: the data-parallel ranks' vote on the step that ``launch`` was last given.
    """

    _begins: CapturedGraphs[int]
    """By number of rows."""
    _ends: CapturedGraphs[End]
    _num_parts = 1
    """Graphs that make up one end."""

    def __init__(self, runner: Any, query_len: int, max_num_tokens: int | None = None) -> None:
        self._runner = runner
        self._manager = runner.cudagraph_manager
        self.votes = StepVotes(runner)
        self._sampler = runner.sampler
        self._prefill_lens = runner.req_states.prefill_len.np
        self._temperatures = runner.sampler.sampling_states.temperature.np
        self._adapters = StepAdapters(runner)
        self._query_len = query_len
        self._desc_of = {
            num_requests: desc
            for num_requests, desc in decode_graphs(
                self._manager, runner.max_num_reqs, query_len, num_adapters=0
            ).items()
            if max_num_tokens is None or desc.num_tokens <= max_num_tokens
        }
        self._sizes = sorted({desc.num_tokens // query_len for desc in self._desc_of.values()}, reverse=True)
        self._max_num_rows = max(self._sizes, default=0)
        self._state = state_of(runner)
        self._inputs = inputs_of(runner, max(self._max_num_rows, runner.max_num_reqs))
        self._groups = groups_of(runner)
        self._copies = copies_of(runner)
        # The batch whose slots and parameters the graphs' rows hold: a step of the same requests is replayed at once.
        self._loaded_batch: ReplayedBatch | None = None
        # Of a launched step that vLLM has not sampled yet: its batch while it waits for grammar masks, or its output.
        self._waiting: ReplayedBatch | None = None
        self._pending: ReplayedOutput | None = None
        self._finished_req_ids: set[str] = set()
        self._compute_logits = runner.model.compute_logits
        # A product's rounding depends on its number of rows, so vLLM's steps multiply as many rows as replayed ones.
        runner.model.compute_logits = self._compute_padded_logits

    def capture(self, stream: torch.cuda.Stream) -> None:
        """Capture what surrounds vLLM's graphs, which were captured on ``stream``."""
        self.stream = stream
        start = time.perf_counter()
        free_before = torch.cuda.mem_get_info()[0]
        runner, manager = self._runner, self._manager
        # Tensors were just filled on another stream, and captured kernels must not read indices before they are there.
        stream.wait_stream(torch.cuda.current_stream())
        with (
            graph_capture(device=runner.device),
            # cuBLAS has a workspace per stream: the graphs must share one.
            torch.cuda.stream(stream),
            self._adapters.in_one_row(),
            cudagraph_pool.capture_pool(manager.pool, runner.vllm_config) as pool,
        ):
            self._ends.capture(self._all_ends(), pool, stream)
            self._begins.capture(self._sizes, pool, stream)
            self._capture_drafter(pool, stream)
        # Compile these kernels now, not in the first step that needs them.
        write_block_ids(torch.zeros(2, 0, dtype=torch.int64, device=runner.device), self._groups)
        self._warm_up()
        stream.synchronize()
        num_bytes = max(free_before - torch.cuda.mem_get_info()[0], 0)
        logger.info(
            "Rose step graph: steps of up to %d requests%s are replayed whole; %d graphs, %.1f s, %.2f GiB",
            max(self._desc_of, default=0),
            f" with {self._query_len - 1} drafts each" if self._query_len > 1 else "",
            self._num_graphs(),
            time.perf_counter() - start,
            num_bytes / (1 << 30),
        )

    def close(self) -> None:
        """Release the graphs and restore the model's ``compute_logits``. Outputs may still be read.

        Raises:
            IntegrityError: the last step was launched and not sampled.
        """
        self._check_nothing_is_pending()
        self._runner.model.compute_logits = self._compute_logits
        self._begins.release()
        self._ends.release()

    def _check_nothing_is_pending(self) -> None:
        if self._pending is not None or self._waiting is not None:
            raise IntegrityError("step graph: the step before was never asked for its tokens")

    def disarm(self) -> None:
        """Forget which batch the graphs' rows hold: steps of another kind are about to change its requests' state.

        Raises:
            IntegrityError: the last step was launched and not sampled.
        """
        self._check_nothing_is_pending()
        self._loaded_batch = None

    @abstractmethod
    def _all_ends(self) -> list[End]:
        """Return the keys of all ends to capture, the one with the largest logits first."""

    def _num_graphs(self) -> int:
        """Return how many graphs have been captured."""
        return len(self._all_ends()) * self._num_parts + len(self._sizes)

    def _capture_drafter(self, pool: Any, stream: torch.cuda.Stream) -> None:  # noqa: B027
        """Capture what a drafter does after a step's end; nothing here."""

    def _warm_up(self) -> None:  # noqa: B027
        """Compile the kernels that steps launch outside their graphs; nothing here."""

    def launch(self, output: SchedulerOutput) -> bool:
        """Run a step if it can be replayed.

        Returns:
            False if the step is vLLM's: only its reason has been counted, and ``votes`` holds the data-parallel ranks'
            vote if they have voted on it.

        Raises:
            IntegrityError: the step before was launched and not sampled.
        """
        self._check_nothing_is_pending()
        self.votes.begin_step()
        batch = self._run(output)
        if isinstance(batch, str):
            STEPS.count_vllm(batch)
            self._loaded_batch = None
            return False
        self._finished_req_ids = output.finished_req_ids
        self._sample(batch, output)
        return True

    @abstractmethod
    def _run(self, output: SchedulerOutput) -> ReplayedBatch | str:
        """Run the layers of a step, and return its batch; or return why the step is vLLM's, having changed nothing."""

    @abstractmethod
    def _sample(self, batch: ReplayedBatch, output: SchedulerOutput) -> None:
        """Replay the end of a step and set ``_pending`` to its output, or ``_waiting`` if it needs grammar masks."""

    def _slots_of(self, request_ids: list[str]) -> tuple[dict[str, int], NDArray[np.int64]]:
        """Return the slots of requests that the runner knows, by request id and as an array."""
        slot_of = self._runner.req_states.req_id_to_index
        slots = {request_id: slot_of[request_id] for request_id in request_ids}
        return slots, np.fromiter(slots.values(), np.int64, len(slots))

    def _update_requests(self, output: SchedulerOutput) -> None:
        """Do what vLLM does with a scheduler output before it looks at the step's tokens."""
        runner = self._runner
        runner.finish_requests(output)
        runner.free_states(output)
        runner.add_requests(output)
        runner.update_requests(output)
        for request_id, updates in getattr(output, "encoder_input_updates", {}).items():
            runner.encoder_cache.update_encoder_inputs(request_id, updates)
        runner.block_tables.apply_staged_writes()

    def _append_blocks(self, batch: ReplayedBatch, cached: CachedRequestData) -> None:
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
        writes = torch.tensor(
            [places, new_blocks], dtype=torch.int64, pin_memory=self._runner.device.type == "cuda"
        )
        write_block_ids(writes.to(self._runner.device, non_blocking=True), self._groups)

    def _run_graph_of_layers(self, desc: Any, num_rows: int, output: SchedulerOutput) -> None:
        tables, connector = self._runner.block_tables, self._runner.kv_connector
        if hasattr(tables, "_num_dirty_rows"):
            # From vLLM 0.33 on: rows of the step's table that its next step clears where they are padding then.
            tables._num_dirty_rows = max(tables._num_dirty_rows, num_rows)
        # vLLM passes its input batch as well; connectors that do nothing inside layers do not read it.
        connector.pre_forward(output)
        self._manager.run_fullgraph(desc)
        connector.finish_forward()

    def _begin_rows(self, rows: MixedRows, num_tokens: int, max_query_len: int) -> None:
        """Write the inputs of a step with several tokens in a row, ``num_tokens`` of them with padding."""
        first, *others = (
            each.get_metadata_builder().take_computed_tokens()
            for of_group in self._runner.attn_groups
            for each in of_group
        )
        begin_mixed_step(
            rows,
            self._state,
            self._inputs,
            self._groups,
            first,
            num_tokens=num_tokens,
            max_query_len=max_query_len,
            padding_slot=self._runner.max_num_reqs,
        )
        for other in others:
            other.copy_(first)

    def take_output(self, grammar_output: Any) -> ReplayedOutput | None:
        """Return the output of the step that was launched last; None if that step was vLLM's.

        Args:
            grammar_output: vLLM's masks for a step with structured output; None if no request has any.

        Raises:
            IntegrityError: there are masks for a step that was already sampled, or for requests that are not in it.
        """
        if self._pending is not None and grammar_output is not None:
            raise IntegrityError("step graph: a replayed step got a grammar, and was sampled without")
        output, self._pending = self._pending, None
        if output is not None:
            # After everything that the step has launched, as in vLLM: this starts loads, submits stores and polls both.
            output.kv_connector_output = self._runner.kv_connector.post_forward(self._finished_req_ids)
        return output

    @abstractmethod
    def note_vllm_step(self) -> None:
        """Note that the step is vLLM's: its next ``compute_logits`` is padded to the rows that a replayed end has."""

    @abstractmethod
    def _compute_padded_logits(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any: ...


def decode_graphs(manager: Any, max_num_reqs: int, query_len: int, *, num_adapters: int) -> dict[int, Any]:
    """Return vLLM's descriptor of the full decode graph for each number of requests that has one."""
    found = {}
    for num_requests in range(1, max_num_reqs + 1):
        num_tokens = num_requests * query_len
        desc = manager.dispatch(num_requests, num_tokens, query_len, num_adapters, query_len)
        is_full = desc.cg_mode == CUDAGraphMode.FULL and desc.uniform_token_count == query_len
        if is_full and desc in manager.graphs:
            found[num_requests] = desc
    return found
