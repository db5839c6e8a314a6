"""Steps without drafts as a few replays: Rose's prologue, vLLM's own graph of the layers, Rose's ends.

The prologue makes the inputs from the requests' state. An end computes logits, samples, and updates that state. There
is one end for greedy requests, one for random draws, and one for any mix of requests whose logits are processed first.
A report of log-probabilities follows if a request asks for them. The CPU only uploads what has changed and replays.
All state is vLLM's and complete after every step, so replayed steps and vLLM's own may alternate.

Steady steps only decode, and nothing changes from one to the next. Mixed steps also compute parts of prompts: their
prologue depends on the chunks, so it is launched instead of replayed, and they have one end, for any mix of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import CUDAGraphMode
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids

from rose_backend.kernels.arguments import MixedRows
from rose_backend.kernels.captured_graphs import CapturedGraphs, size_for
from rose_backend.kernels.decode_step.ops import (
    NO_SLOT,
    begin_decode_step,
    end_step,
)
from rose_backend.vllm_plugin.captured_processors import (
    GrammarMasks,
    ReportRecord,
    why_graphs_do_not_report,
)
from rose_backend.vllm_plugin.options import first_reason
from rose_backend.vllm_plugin.plugin_logger import SAMPLES, STEPS
from rose_backend.vllm_plugin.sampler import ReplayedSampling
from rose_backend.vllm_plugin.step_graph.inputs import (
    MixedStep,
    ModelInputs,
    row_inputs,
)
from rose_backend.vllm_plugin.step_graph.outputs import OutputBuffers, ReplayedBatch, ReplayedOutput
from rose_backend.vllm_plugin.step_graph.reasons import (
    FIELDS_OF_CHANGED_BATCHES,
    has_prompts,
    why_step_is_not_replayed,
)
from rose_backend.vllm_plugin.step_graph.whole_steps import End, WholeSteps, decode_graphs

_ENDS_WITH_MASKS = ("processed", "mixed")
_MIXED_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448)
"""Numbers of rows for which a mixed step's end is captured, up to the largest decode graph. There are fewer sizes than
decode graphs have: a closer size only saves rows of the LM head's product, in steps that take longer anyway."""


class StepGraphs(WholeSteps):
    """Steps without drafts, in which each request gets one token or computes part of its prompt.

    Args:
        runner: vLLM's ``GPUModelRunner`` (V2), its graphs captured, for which ``why_engine_is_not_replayed`` is None.
    """

    _replays_prompts = True

    def __init__(self, runner: Any) -> None:
        super().__init__(runner, query_len=1)
        sampler = runner.sampler
        # None: vLLM's sampler draws, so only greedy steps are replayed.
        self._replayed = sampler.sample if isinstance(sampler.sample, ReplayedSampling) else None
        # vLLM captures every decode graph with LoRA products and without.
        self._adapted_desc_of = (
            decode_graphs(self._manager, runner.max_num_reqs, 1, num_adapters=1)
            if self._adapters.is_on
            else {}
        )
        most, device = self._max_num_rows, runner.device
        self._slots = torch.full((most,), NO_SLOT, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._model_inputs = ModelInputs(runner, most)
        self._mixed_sizes: list[int] = []
        self._begins = CapturedGraphs[int](self._begin, capture_error_mode="thread_local")
        parts: tuple[Callable[[End, Any], Any], ...] = (self._end,)
        num_words = 0
        if self._replayed is not None:
            self._processors = self._replayed.whole_steps(most)
            self._masks = GrammarMasks(most, runner.vocab_size, device)
            self._record = ReportRecord(most, runner.vocab_size, device)
            parts, num_words = (self._end, self._report), ReportRecord.NUM_WORDS
            self._num_parts = len(parts)
        if self._replays_prompts and self._replayed is not None and not self._groups.has_states:
            self._mixed_sizes = [*(size for size in _MIXED_SIZES if size < most), *[most] * (most > 0)]
            self._row_inputs = row_inputs(max(most, runner.max_num_reqs), device)
            self._rows = MixedRows(**self._row_inputs.tensors)
            # Hidden states of the rows' last tokens.
            self._last_hidden = torch.zeros_like(self._manager.hidden_states[:most])
        self._ends = CapturedGraphs[End](*parts, capture_error_mode="thread_local")
        self._buffers = OutputBuffers(most, num_words, device)
        self._padded_rows = 0
        self._padded_last_rows = 0

    def _all_ends(self) -> list[End]:
        """Return ``greedy``, ``drawn``, ``processed`` and ``mixed`` ones."""
        kinds = ("greedy",) if self._replayed is None else ("processed", "greedy", "drawn")
        mixed = [("mixed", size) for size in reversed(self._mixed_sizes)]
        return [*((kind, size) for kind in kinds for size in self._sizes), *mixed]

    def _warm_up(self) -> None:
        if self._mixed_sizes:
            self._upload_rows([], [], [], [])
            # One row of padding: Triton would take the null address of an empty tensor for an aligned one, and compile
            # another variant of the kernel.
            self._begin_mixed(1, 1, 1)

    def _run(self, output: SchedulerOutput) -> ReplayedBatch | str:
        run = self._run_mixed_layers if has_prompts(output) else self._run_layers
        return why_step_is_not_replayed(output) or self._why_state_is_not_replayed(output) or run(output)

    def _sample(self, batch: ReplayedBatch, output: SchedulerOutput) -> None:
        if output.has_structured_output_requests:
            self._waiting = batch
            return
        if batch.end in _ENDS_WITH_MASKS:
            # Clear the masks that an earlier step has left.
            self._masks.upload(None, batch.index_of)
        self._replay_end(batch, batch.end)

    def take_output(self, grammar_output: Any) -> ReplayedOutput | None:
        """Return the output of the step that was launched last; sample it first if it has waited for these masks.

        Raises:
            IntegrityError: there are masks for a step that was already sampled, or for requests that are not in it.
        """
        if self._waiting is not None:
            batch, self._waiting = self._waiting, None
            self._masks.upload(grammar_output, batch.index_of)
            self._replay_end(batch, batch.end if batch.end in _ENDS_WITH_MASKS else "processed")
            grammar_output = None
        return super().take_output(grammar_output)

    def _why_state_is_not_replayed(self, output: SchedulerOutput) -> str | None:
        if output.has_structured_output_requests and self._replayed is None:
            return "structured output without Rose's sampler"
        return None

    def _run_layers(self, output: SchedulerOutput) -> ReplayedBatch | str:
        """Run the layers of a step without prompts, and return its batch; or return why the step is vLLM's."""
        batch = self._prepare(output)
        if batch is None:
            return self._run_mixed_layers(output)
        if not isinstance(batch, str):
            self._begins.run(batch.desc.num_tokens)
            self._run_graph_of_layers(batch.desc, batch.desc.num_tokens, output)
        return batch

    def _prepare(self, output: SchedulerOutput) -> ReplayedBatch | str | None:
        """Upload what has changed to the addresses that graphs read, for a step that only decodes.

        Returns:
            The batch; or why the step is vLLM's; or None if it needs the graph of mixed steps, because a prompt ends in
            it or another data-parallel rank has prompts. In the last two cases nothing has changed.
        """
        cached, batch = output.scheduled_cached_reqs, self._loaded_batch
        is_changed = any(getattr(output, name, None) for name in FIELDS_OF_CHANGED_BATCHES)
        is_changed = is_changed or self._adapters.have_moved()
        if batch is not None and not is_changed and cached.req_ids == batch.request_ids:
            if (desc := self._agree(batch.desc, len(batch.request_ids))) is None:
                return None
            if output.new_block_ids_to_zero:
                self._runner.kv_block_zeroer.zero_block_ids(output.new_block_ids_to_zero)
            self._append_blocks(batch, cached)
            return batch if desc is batch.desc else replace(batch, desc=desc)
        request_ids, adapters = list(cached.req_ids), self._adapters.of_step(output)
        desc = (self._adapted_desc_of if adapters else self._desc_of).get(len(request_ids))
        if desc is None:
            return "more requests than full graphs of decodes take"
        slots, slot_array = self._slots_of(request_ids)
        if (np.asarray(cached.num_computed_tokens) < self._prefill_lens[slot_array]).any():
            return None
        reason = self._adapters.why_vllm_loads(adapters) or self._why_vllm_samples(slot_array)
        if reason is not None:
            return reason
        if (agreed := self._agree(desc, len(request_ids))) is None:
            return None
        self._update_requests(output)
        self._adapters.tell_rows(slots, [1] * len(slots))
        # All rows, not only this batch's: a data-parallel rank with more requests may need a larger graph at any step.
        rows = torch.full((len(self._slots),), NO_SLOT, dtype=torch.int64, pin_memory=self._slots.is_cuda)
        rows.numpy()[: len(slots)] = slot_array
        # torch keeps pinned memory until the copy has run.
        self._slots.copy_(rows, non_blocking=True)
        self._model_inputs.take_over(slot_array, len(rows))
        self._loaded_batch = self._batch_of(request_ids, desc, desc.num_tokens)
        return replace(self._loaded_batch, desc=agreed)

    def _agree(self, desc: Any, num_requests: int) -> Any | None:
        """Return the descriptor of the decode graph on which data-parallel ranks agree; None if they agree on another.

        Args:
            desc: descriptor of the graph to replay if there is only one rank.
        """
        if self._runner.dp_size == 1:
            return desc
        # Without adapters: models with experts and adapters are not replayed.
        desc = self.votes.dispatch(num_requests, num_requests, 1, 0, 1)
        is_of_decodes = desc.uniform_token_count == 1 and desc.num_tokens in self._sizes
        return desc if is_of_decodes and desc in self._manager.graphs else None

    def _batch_of(
        self, request_ids: list[str], desc: Any, num_rows_of_end: int, step: MixedStep | None = None
    ) -> ReplayedBatch:
        """Return the batch of some requests of the runner; ``step`` says what they compute in a step with prompts."""
        slots, slot_array = self._slots_of(request_ids)
        draws = bool(self._temperatures[slot_array].any())
        is_processed = self._replayed is not None and bool(self._replayed.is_changed[slot_array].any())
        if step is not None:
            end = "mixed"
        elif is_processed:
            end = "processed"
        else:
            end = "drawn" if draws else "greedy"
        logprobs = self._sampler.get_logprobs_dims(slot_array)
        is_due = () if step is None else step.is_due
        return ReplayedBatch(
            request_ids,
            end=end,
            draws=draws,
            num_logprobs=None if logprobs is None else logprobs[0],
            desc=desc,
            slots=slots,
            index_of={request_id: index for index, request_id in enumerate(request_ids)},
            num_rows_of_end=num_rows_of_end,
            rows_without_token=tuple(row for row, is_row_due in enumerate(is_due) if not is_row_due),
        )

    def _run_mixed_layers(self, output: SchedulerOutput) -> ReplayedBatch | str:
        """Run the layers of a step with prompts, of this or another data-parallel rank, and return its batch.

        If the step is vLLM's, return why, having changed nothing.
        """
        adapters = self._adapters.of_step(output)
        reason = self._adapters.why_vllm_loads(adapters) or self._why_prompts_are_not_replayed(output)
        if reason is not None:
            return reason
        step = self._describe(output)
        num_tokens, uniform = output.total_num_scheduled_tokens, 1 if step.has_single_tokens else None
        # As in vLLM, so that the same graph is chosen: no max_query_len where a row computes part of a prompt.
        longest = max(step.counts)
        max_query_len = None if any(step.is_prompt) else longest
        size = size_for(self._mixed_sizes, len(step.counts))
        if size is None:
            return "more requests than full graphs of decodes take"
        desc = self.votes.dispatch(len(step.counts), num_tokens, uniform, len(adapters), max_query_len)
        if desc.cg_mode != CUDAGraphMode.FULL or desc not in self._manager.graphs:
            return "prompts without a full graph"
        self._loaded_batch = None
        self._update_requests(output)
        batch = self._batch_of(step.request_ids, desc, size, step)
        self._adapters.tell_rows(batch.slots, step.counts)
        self._upload_rows(list(batch.slots.values()), step.counts, step.is_prompt, step.is_due)
        num_rows = desc.num_reqs or desc.num_tokens
        # The captured end may have more rows than the graph of the layers.
        self._begin_mixed(max(num_rows, size), desc.num_tokens, longest)
        self._model_inputs.prepare(self._inputs, step, desc.num_tokens, output)
        self._run_graph_of_layers(desc, num_rows, output)
        return batch

    def _describe(self, output: SchedulerOutput) -> MixedStep:
        slot_of, cached = self._runner.req_states.req_id_to_index, output.scheduled_cached_reqs
        # Of each request: tokens computed before this step, and tokens to prefill.
        lens = {
            request_id: (num_computed, int(self._prefill_lens[slot_of[request_id]]))
            for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        }
        for new in output.scheduled_new_reqs:
            lens[new.req_id] = new.num_computed_tokens, len(new.prefill_token_ids)
        # vLLM's order, so that both kinds of steps compute the same.
        request_ids = sort_batch_req_ids(output.num_scheduled_tokens, {}, self._runner.decode_query_len)
        counts = [output.num_scheduled_tokens[request_id] for request_id in request_ids]
        starts, ends = zip(*(lens[request_id] for request_id in request_ids), strict=True)
        is_prompt = [start < end for start, end in zip(starts, ends, strict=True)]
        return MixedStep(
            request_ids,
            counts,
            num_computed_tokens=list(starts),
            prefill_lens=list(ends),
            is_prompt=is_prompt,
            is_due=[start + count >= end for start, count, end in zip(starts, counts, ends, strict=True)],
            has_single_tokens=max(counts) == 1
            and all(start > 0 for start, is_one in zip(starts, is_prompt, strict=True) if is_one),
        )

    def _why_prompts_are_not_replayed(self, output: SchedulerOutput) -> str | None:
        """Return what a step with prompts has that is vLLM's; None if nothing."""
        if not self._replays_prompts:
            return "prompts beside drafts"
        if self._replayed is None:
            return "prompts without Rose's sampler"
        if self._model_inputs.is_prepared_by_vllm:
            return "prompts of a model audited for decodes only"
        if self._groups.has_states:
            return "prompts of a model with states"
        for new in output.scheduled_new_reqs:
            params = new.sampling_params
            if params is None or new.prefill_token_ids is None:
                return "requests without tokens"
            if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
                return "log-probabilities of prompts"
            num_logprobs = self._runner.vocab_size if params.logprobs == -1 else params.logprobs or 0
            reason = why_graphs_do_not_report(
                self._sampler, num_logprobs, len(params.logprob_token_ids or ())
            )
            if reason is not None and (params.logprobs is not None or params.logprob_token_ids):
                return reason
        cached, slot_of = output.scheduled_cached_reqs, self._runner.req_states.req_id_to_index
        slots = np.fromiter((slot_of[each] for each in cached.req_ids), np.int64, len(cached.req_ids))
        prompts = self._runner.prompt_logprobs_worker
        is_prompt = np.asarray(cached.num_computed_tokens, np.int64) < self._prefill_lens[slots]
        if (prompts.uses_prompt_logprobs[slots] & is_prompt).any() or prompts.token_id_scores:
            return "log-probabilities of prompts"
        return self._why_vllm_samples(slots) if len(slots) else None

    def _upload_rows(
        self, slots: list[int], counts: list[int], is_prompt: list[bool], is_due: list[bool]
    ) -> None:
        """Copy to the device what each row of a mixed step computes; the rows after these become padding."""
        on_cpu, record = self._row_inputs.begin()
        num_rows = len(slots)
        for name, values, padding in (
            ("slots", slots, NO_SLOT),
            ("is_prompt", is_prompt, 0),
            ("is_due", is_due, 0),
        ):
            record[name][:num_rows] = values
            record[name][num_rows:] = padding
        ends = record["query_start_loc"]
        ends[0] = 0
        np.cumsum(counts, out=ends[1 : num_rows + 1])
        ends[num_rows + 1 :] = sum(counts)
        self._row_inputs.send(on_cpu)

    def _begin_mixed(self, num_rows: int, num_tokens: int, max_query_len: int) -> None:
        """Write the inputs of a step with prompts, of ``num_rows`` rows and ``num_tokens`` tokens with padding."""
        self._begin_rows(self._rows.first(num_rows), num_tokens, max_query_len)

    def _why_vllm_samples(self, slots: NDArray[np.int64]) -> str | None:
        """Return why vLLM has to sample the tokens of requests; None if a captured end can."""
        logprobs = self._sampler.get_logprobs_dims(slots)
        if self._replayed is not None:
            return None if logprobs is None else why_graphs_do_not_report(self._sampler, *logprobs)
        reasons = {
            "log-probabilities without Rose's sampler": logprobs is not None,
            "random draws by vLLM's sampler": self._temperatures[slots].any(),
            "logits processors without Rose's sampler": self._sampler.needs_logits_processing[slots].any(),
        }
        return first_reason(reasons)

    def note_vllm_step(self) -> None:
        """See ``WholeSteps.note_vllm_step``."""
        self._padded_rows = self._padded_last_rows = 0
        state = self._runner.execute_model_state
        if state is None or state.hidden_states is None:
            return
        batch, hidden, sync = state.input_batch, state.hidden_states, state.dp_sync_state
        is_replayed = hidden.data_ptr() == self._manager.hidden_states.data_ptr()
        is_decode = batch.num_tokens == batch.num_reqs and batch.num_reqs in self._desc_of
        # A lone last token of a prompt looks like a decode, but its replay ends like any step with prompts.
        if (
            is_replayed
            and is_decode
            and not batch.has_prefill
            # Data-parallel ranks replay graphs of more tokens where others have more requests, or prompts.
            and len(hidden) >= self._desc_of[batch.num_reqs].num_tokens
            and (sync is None or sync.uniform_token_count == 1)
        ):
            self._padded_rows = batch.num_reqs
        elif self._mixed_sizes and batch.num_reqs <= self._mixed_sizes[-1]:
            self._padded_last_rows = batch.num_reqs

    def _compute_padded_logits(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        num_rows, self._padded_rows = self._padded_rows, 0
        num_last_rows, self._padded_last_rows = self._padded_last_rows, 0
        if args or kwargs or len(hidden_states) not in (num_rows, num_last_rows) or not len(hidden_states):
            return self._compute_logits(hidden_states, *args, **kwargs)
        if num_rows:
            size = self._desc_of[num_rows].num_tokens
            return self._compute_logits(self._manager.hidden_states[:size])[:num_rows]
        size = size_for(self._mixed_sizes, num_last_rows)
        self._last_hidden[:num_last_rows].copy_(hidden_states)
        return self._compute_logits(self._last_hidden[:size])[:num_last_rows]

    def _replay_end(self, batch: ReplayedBatch, end: str) -> None:
        has_report = batch.num_logprobs is not None
        self._ends.run((end, batch.num_rows_of_end), 2 if has_report else 1)
        self._pending = self._buffers.copy(
            batch, self._tokens[:, None], self._record.words if has_report else None
        )
        STEPS.count_rose()
        if batch.draws:
            SAMPLES.count_rose(len(batch.request_ids))

    def _begin(self, size: int, _: None) -> None:
        """Write the inputs of a step."""
        slots, padding_slot = self._slots[:size], self._runner.max_num_reqs
        begin_decode_step(slots, self._state, self._inputs, self._groups, padding_slot=padding_slot)
        self._model_inputs.write(self._inputs, size)
        for written, copy in self._copies:
            copy[:size].copy_(written[:size])

    def _end(self, end: End, _: None) -> torch.Tensor:
        """Sample a step and append its tokens; return the logits, [R, V], for the report of log-probabilities."""
        kind, size = end
        inputs, tokens = self._inputs, self._tokens[:size]
        if kind == "mixed":
            rows = self._rows.first(size)
            # Index of each row's last token. Rows of padding read a token of another row.
            last = (rows.query_start_loc[1:] - 1).clamp_(min=0)
            hidden, slots = self._last_hidden[:size], rows.slots
            torch.index_select(self._manager.hidden_states, 0, last, out=hidden)
            positions, input_ids = inputs.positions[last], inputs.input_ids[last]
        else:
            rows, hidden, slots = None, self._manager.hidden_states[:size], self._slots[:size]
            positions, input_ids = inputs.positions[:size], inputs.input_ids[:size]
        logits = self._compute_logits(hidden)
        if kind == "greedy":
            tokens.copy_(logits.argmax(dim=-1))
        else:
            self._draw(logits, tokens, positions, input_ids, is_processed=kind in _ENDS_WITH_MASKS)
        end_step(slots, tokens, self._state, rows)
        return logits

    def _draw(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        input_ids: torch.Tensor,
        *,
        is_processed: bool,
    ) -> None:
        assert self._replayed is not None
        request_slots = self._inputs.request_slots[: len(tokens)]

        def process(logits: torch.Tensor, part: slice) -> None:
            self._processors.apply(logits, request_slots[part], positions[part], input_ids[part])

        if is_processed:
            self._masks.apply(logits)
        self._replayed.graphs.compute(
            logits, request_slots, positions, tokens, process if is_processed else None
        )

    def _report(self, end: End, logits: torch.Tensor) -> None:
        """Report the tokens that a step has sampled from ``logits``."""
        assert self._replayed is not None
        _, size = end
        num_logprobs = self._replayed.graphs.parameters["num_logprobs"]
        of_rows = num_logprobs.index_select(0, self._inputs.request_slots[:size])
        self._record.write(logits, self._tokens[:size], of_rows)
