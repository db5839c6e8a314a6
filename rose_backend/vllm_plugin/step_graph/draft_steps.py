"""Steps of decodes with drafts as replays: a prologue, vLLM's own graph of the layers, an end, and the drafter's.

Each request computes its last token and all its drafts. The prologue takes both from the requests' state. The end has
the logits of every token, and vLLM's own rejection sampler, which accepts some of the drafts and samples a token after
them; it moves the state on. Then vLLM's own drafter proposes the next drafts, which stay where the next prologue finds
them: a lookup of n-grams within the end, a head in further replays (``head_steps.py``). So the device
knows how far each request is, while vLLM's scheduler runs ahead as if all drafts were accepted, and learns of the
others when it reads the tokens. All state is vLLM's, and complete after every step.

vLLM's kernels are captured as they are. What they need of each request (temperature, seed) takes turns in vLLM's
memory, so it is copied to fixed addresses when the batch changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.core.sched.output import SchedulerOutput

from rose_backend.kernels.arguments import MixedRows
from rose_backend.kernels.captured_graphs import CapturedGraphs, FixedInputs
from rose_backend.kernels.decode_step.ops import NO_SLOT, end_step
from rose_backend.vllm_plugin.captured_processors import RequestParameters, sampling_arrays
from rose_backend.vllm_plugin.options import first_reason
from rose_backend.vllm_plugin.plugin_logger import SAMPLES, STEPS
from rose_backend.vllm_plugin.sampler import MAX_LOGITS_BYTES
from rose_backend.vllm_plugin.step_graph.outputs import OutputBuffers, ReplayedBatch, ReplayedOutput
from rose_backend.vllm_plugin.step_graph.reasons import (
    FIELDS_OF_CHANGED_BATCHES,
    why_drafts_are_not_replayed,
)
from rose_backend.vllm_plugin.step_graph.votes import StepVotes
from rose_backend.vllm_plugin.step_graph.whole_steps import End, WholeSteps

_MAX_HEAD_BYTES = 512 << 20
"""Limit on the logits of a step, in the model's dtype: 441 requests with 3 drafts each, of Qwen3 in bfloat16."""


def max_num_logits(runner: Any, query_len: int) -> int:
    """Return for how many tokens at most the ends of replayed steps compute logits, ``query_len`` of each request."""
    if query_len == 1:
        return int(runner.max_num_reqs)
    most = _MAX_HEAD_BYTES // (runner.vocab_size * runner.dtype.itemsize)
    return min(int(runner.max_num_reqs) * query_len, most)


class DraftSteps(WholeSteps):
    """Steps in which every request decodes, with the same number of drafts; they are n-grams.

    Args:
        runner: vLLM's ``GPUModelRunner`` (V2) with drafts, its graphs captured, without
            ``why_engine_is_not_replayed``.
        num_drafts: of each request, from 1 to what is asked for.
    """

    def __init__(self, runner: Any, num_drafts: int) -> None:
        super().__init__(runner, 1 + num_drafts, max_num_logits(runner, 1 + num_drafts))
        most, query_len, device = self._max_num_rows, self._query_len, runner.device
        self._num_drafts = num_drafts
        self._drafts = runner.req_states.draft_tokens
        self._state = replace(self._state, draft_tokens=self._drafts)
        self._parameters = RequestParameters(sampling_arrays(self._sampler.sampling_states), device)
        self._row_inputs = FixedInputs(self._fields_of_rows(), device)
        self._upload_rows(np.zeros(0, np.int64))
        given, none = self._row_inputs.tensors, torch.zeros(most, dtype=torch.int32, device=device)
        self._rows = MixedRows(given["slots"], given["query_start_loc"], is_prompt=none, is_due=none)
        # Index of each row's first logits, [R + 1]; and for each row of logits, its position within its request.
        self._logit_starts = torch.arange(most + 1, dtype=torch.int32, device=device) * query_len
        self._places = torch.arange(query_len, dtype=torch.int32, device=device).repeat(most)
        # Requests whose random draws are computed at once: float32 logits of a whole batch would take too much memory.
        row_bytes = 4 * runner.vocab_size * query_len
        self._num_drawn = min(most, max(MAX_LOGITS_BYTES // row_bytes, 1))
        self._tokens = torch.zeros(most, query_len, dtype=torch.int64, device=device)
        self._num_sampled = torch.zeros(most, dtype=torch.int32, device=device)
        self._begins = CapturedGraphs[int](self._begin, capture_error_mode="thread_local")
        self._ends = CapturedGraphs[End](self._end, capture_error_mode="thread_local")
        self._buffers = OutputBuffers(most, 0, device, max_num_tokens=query_len)
        self._padded_rows = 0

    def _all_ends(self) -> list[End]:
        """Return "greedy" ends, and "drawn" ones for batches in which some request is not greedy."""
        return [(kind, size) for kind in ("greedy", "drawn") for size in self._sizes]

    def _run(self, output: SchedulerOutput) -> ReplayedBatch | str:
        batch = why_drafts_are_not_replayed(output, self._num_drafts) or self._prepare(output)
        if not isinstance(batch, str):
            size = batch.num_rows_of_end
            self._begins.run(size)
            self._run_graph_of_layers(batch.desc, size, output)
        return batch

    def _prepare(self, output: SchedulerOutput) -> ReplayedBatch | str:
        """Upload what has changed to the addresses that graphs read, and return the step's batch.

        If the step is vLLM's, return why instead; nothing has changed then.
        """
        cached, batch = output.scheduled_cached_reqs, self._loaded_batch
        is_changed = any(getattr(output, name, None) for name in FIELDS_OF_CHANGED_BATCHES)
        if batch is not None and not is_changed and cached.req_ids == batch.request_ids:
            if output.new_block_ids_to_zero:
                self._runner.kv_block_zeroer.zero_block_ids(output.new_block_ids_to_zero)
            self._append_blocks(batch, cached)
            return batch
        request_ids = list(cached.req_ids)
        desc = self._desc_of.get(len(request_ids))
        if desc is None:
            return "more requests than full graphs of decodes take"
        slots, slot_array = self._slots_of(request_ids)
        if (np.asarray(cached.num_computed_tokens) < self._prefill_lens[slot_array]).any():
            return "prompts beside drafts"
        if (reason := self._why_vllm_samples(slot_array)) is not None:
            return reason
        self._update_requests(output)
        self._upload_rows(slot_array)
        self._parameters.take()
        draws = bool(self._temperatures[slot_array].any())
        self._loaded_batch = ReplayedBatch(
            request_ids,
            end="drawn" if draws else "greedy",
            draws=draws,
            num_logprobs=None,
            desc=desc,
            slots=slots,
            index_of={request_id: index for index, request_id in enumerate(request_ids)},
            num_rows_of_end=desc.num_tokens // self._query_len,
        )
        return self._loaded_batch

    def _why_vllm_samples(self, slots: NDArray[np.int64]) -> str | None:
        """Return why vLLM has to sample the tokens of requests; None if a captured end can."""
        sampler, states = self._sampler, self._sampler.sampling_states
        bias, penalties, bad_words = sampler.logits_processors
        thinking = sampler.thinking_budget_state
        is_random = self._temperatures[slots] != 0
        is_filtered = (
            (states.top_k.np[slots] != self._runner.vocab_size)
            | (states.top_p.np[slots] != 1)
            | (states.min_p.np[slots] != 0)
        )
        is_processed = (
            bias.use_logit_bias[slots]
            | penalties.use_penalty[slots]
            | (bad_words.num_bad_words.np[slots] > 0)
        )
        reasons = {
            "log-probabilities beside drafts": sampler.get_logprobs_dims(slots) is not None,
            "logits processors beside drafts": is_processed.any()
            or (thinking.enabled and thinking.use_thinking_budget[slots].any()),
            # vLLM's filters use memory whose address changes, so a graph cannot hold them. (vLLM itself refuses min-p
            # beside drafts unless it is close to 0.)
            "top-k, top-p or min-p beside drafts": (is_random & is_filtered).any(),
        }
        return first_reason(reasons)

    def _fields_of_rows(self) -> dict[str, tuple[type[np.generic], tuple[int, ...]]]:
        most = self._max_num_rows
        return {
            "slots": (np.int64, (most,)),
            # Rows of padding repeat the first request: they write the same drafts to its slot once more.
            "drafted_slots": (np.int64, (most,)),
            "query_start_loc": (np.int32, (most + 1,)),
        }

    def _upload_rows(self, slots: NDArray[np.int64]) -> None:
        """Copy to the device which request is in each row; the rows after these become padding."""
        on_cpu, record = self._row_inputs.begin()
        self._describe_rows(record, slots)
        self._row_inputs.send(on_cpu)

    def _describe_rows(self, record: np.void, slots: NDArray[np.int64]) -> None:
        num_rows = len(slots)
        for name, padding in (("slots", NO_SLOT), ("drafted_slots", slots[0] if num_rows else 0)):
            record[name][:num_rows] = slots
            record[name][num_rows:] = padding
        starts = record["query_start_loc"]
        np.minimum(np.arange(len(starts)), num_rows, out=starts)
        starts *= self._query_len

    def _sample(self, batch: ReplayedBatch, output: SchedulerOutput) -> None:
        self._ends.run((batch.end, batch.num_rows_of_end))
        self._pending = self._buffers.copy(batch, self._tokens, num_sampled=self._num_sampled)
        self._replay_drafter(batch)
        # Without asynchronous scheduling vLLM asks for drafts after each step. It is told only how many there are.
        self._runner.draft_tokens_handler.set_draft_tokens(
            SimpleNamespace(req_ids=batch.request_ids, has_structured_output_reqs=False), self._drafts
        )
        STEPS.count_rose()
        if batch.draws:
            SAMPLES.count_vllm("drafts", len(batch.request_ids))

    def _begin(self, size: int, _: None) -> None:
        """Write the inputs of a step."""
        self._begin_rows(self._rows.first(size), size * self._query_len, self._query_len)

    def _end(self, end: End, _: None) -> None:
        """Sample a step, append its tokens, and propose the next drafts; an EAGLE head only begins to here."""
        kind, size = end
        logits = self._compute_logits(self._manager.hidden_states[: size * self._query_len])
        num_rows = self._num_drawn if kind == "drawn" else size
        for start in range(0, size, num_rows):
            self._verify(kind, logits, start, min(start + num_rows, size))
        end_step(
            self._rows.slots[:size], self._tokens[:size], self._state, num_sampled=self._num_sampled[:size]
        )
        self._propose(size)

    def _verify(self, kind: str, logits: torch.Tensor, start: int, end: int) -> None:
        """Sample the tokens of some rows by vLLM's rejection sampler."""
        from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

        num_rows, query_len = end - start, self._query_len
        of_logits = slice(start * query_len, end * query_len)
        logits = logits[of_logits]
        slots = self._inputs.request_slots[start:end]
        slot_of_logit = slots.repeat_interleave(query_len)
        of, rejection = self._parameters, self._runner.rejection_sampler
        if kind == "drawn":
            # A copy in the graphs' memory pool, which was estimated when the KV cache was sized.
            logits = logits.to(torch.float32, copy=True)
            apply_temperature(logits, slot_of_logit, of["temperature"])
        tokens, num_sampled = rejection_sample(
            logits,
            None,
            self._inputs.input_ids[of_logits],
            self._logit_starts[: num_rows + 1],
            self._inputs.positions[of_logits],
            slots,
            slot_of_logit,
            self._places[: len(logits)],
            of["temperature"],
            of["seeds"],
            self._num_drafts,
            rejection.synthetic_conditional_rates,
            use_fp64=self._sampler.use_fp64_gumbel,
            use_block_verification=rejection.use_block_verification,
        )
        self._tokens[start:end].copy_(tokens)
        self._num_sampled[start:end].copy_(num_sampled)

    def _propose(self, size: int) -> None:
        """Let vLLM's n-gram lookup propose the next drafts."""
        drafted = self._row_inputs.tensors["drafted_slots"][:size]
        batch: Any = SimpleNamespace(num_reqs=size, idx_mapping=drafted)
        nothing: Any = None
        drafts: torch.Tensor = self._runner.speculator.propose(
            batch,
            nothing,
            nothing,
            nothing,
            nothing,
            self._num_sampled[:size],
            nothing,
            self._runner.req_states.last_sampled_tokens,
            nothing,
            nothing,
            nothing,
        )
        self._store_drafts(drafts, drafted)

    def _store_drafts(self, drafts: torch.Tensor, slots: torch.Tensor) -> None:
        """Write ``drafts`` to where the next prologue, or vLLM's next step, finds those of ``slots``.

        Args:
            drafts: [R, K] int64, with what is beyond the drafts of these steps.
            slots: [R] int64.
        """
        if self._num_drafts < drafts.shape[1]:
            # As vLLM has it.
            beyond = torch.arange(drafts.shape[1], device=drafts.device) >= self._num_drafts
            drafts = drafts.masked_fill(beyond, -1)
        self._drafts.index_put_((slots,), drafts)

    def _replay_drafter(self, batch: ReplayedBatch) -> None:
        """Replay what the drafter does after a step's end: nothing, as the lookup is part of the end."""

    def note_vllm_step(self) -> None:
        """See ``WholeSteps.note_vllm_step``; here for steps in which every request has all drafts."""
        self._padded_rows = 0
        state = self._runner.execute_model_state
        if state is None or state.hidden_states is None:
            return
        batch, hidden = state.input_batch, state.hidden_states
        desc = self._desc_of.get(batch.num_reqs)
        if (
            desc is not None
            and batch.num_draft_tokens == batch.num_reqs * self._num_drafts
            and batch.num_tokens == batch.num_reqs * self._query_len
            and hidden.data_ptr() == self._manager.hidden_states.data_ptr()
            and len(hidden) >= desc.num_tokens
        ):
            self._padded_rows = batch.num_reqs

    def _compute_padded_logits(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        num_rows, self._padded_rows = self._padded_rows, 0
        num_logits = num_rows * self._query_len
        if args or kwargs or not num_rows or len(hidden_states) != num_logits:
            return self._compute_logits(hidden_states, *args, **kwargs)
        return self._compute_logits(self._manager.hidden_states[: self._desc_of[num_rows].num_tokens])[
            :num_logits
        ]


class AdaptiveSteps:
    """Steps with more or fewer drafts, one by one, as the scheduler chooses. A step between two numbers is vLLM's.

    Args:
        by_depth: steps by the number of drafts, rising, and made in that order: each kind wraps the product with the
            model's head that the one before has wrapped.

    Attributes:
        stream: that all kinds were captured on.
    """

    def __init__(self, by_depth: Mapping[int, WholeSteps]) -> None:
        self._by_depth = by_depth
        # The largest logits first.
        self._kinds = list(by_depth.values())[::-1]
        self._last = self._kinds[0]

    @property
    def votes(self) -> StepVotes:
        """Those of the steps that ran last. (Nobody votes here: adaptive drafts exclude data parallelism.)"""
        return self._last.votes

    def capture(self, stream: torch.cuda.Stream) -> None:
        """See ``WholeSteps.capture``. Steps with drafts come first, as they have the largest logits."""
        self.stream = stream
        for steps in self._kinds:
            steps.capture(stream)

    def close(self) -> None:
        """Give the graphs of all kinds back; see ``WholeSteps.close``."""
        for steps in self._kinds:
            steps.close()

    def launch(self, output: SchedulerOutput) -> bool:
        """Run a step if it can be replayed; see ``WholeSteps.launch``."""
        # A step between two numbers is given to one that it is not of, and so left to vLLM.
        depth = output.num_spec_tokens_to_schedule
        is_last = not depth and bool(output.scheduled_spec_decode_tokens)
        steps = self._kinds[0] if is_last else self._by_depth[depth]
        if steps is not self._last:
            self._last.disarm()
            self._last = steps
        return steps.launch(output)

    def take_output(self, grammar_output: Any) -> ReplayedOutput | None:
        """Return the output of the step that was launched last; see ``WholeSteps.take_output``."""
        return self._last.take_output(grammar_output)

    def note_vllm_step(self) -> None:
        """Let vLLM's next product of a step's last tokens have as many rows as an end's."""
        for steps in self._kinds:
            steps.note_vllm_step()
