"""vLLM's schedulers with Rose's block manager and batched scheduling of decodes.

Scheduling decisions stay vLLM's. Running requests that decode (one token each, or one and all drafts) need no decision,
so they are scheduled in one pass (``DecodeBatch``); sampled tokens without side effects (no stop, no grammar) are
appended and sent in one pass (``FastOutputs``). All other requests go through vLLM's own ``schedule`` and
``update_from_output``, which see only those. Any step may switch between the two: all state is vLLM's, and complete
after each step.

Two choices are Rose's: how many prompt tokens join decodes (``StepBudget``), and whether a step has drafts
(``DraftDepth``).
"""

from __future__ import annotations

import copy
import functools
import time
from collections import deque
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from rose_backend.block_manager.canary import CanaryPlanner
from rose_backend.draft_depth import DraftDepth, ShadowDrafts
from rose_backend.scheduling import MAX_WAITING_LOOKED_AT, StepBudget
from rose_backend.vllm_plugin.kv_cache.canary import add_plan
from rose_backend.vllm_plugin.kv_cache.manager import RoseKVCacheManager
from rose_backend.vllm_plugin.options import (
    NGRAM_METHODS,
    adapts_drafts,
    batches_decode_steps,
    has_kv_connector,
    offloads_whole_blocks,
    rose_options,
    why_steps_are_not_split,
    why_steps_have_no_budget,
)
from rose_backend.vllm_plugin.patch_ledger import swapped
from rose_backend.vllm_plugin.plugin_logger import LogInterval, logger
from rose_backend.vllm_plugin.scheduler.decode_batch import (
    DecodeBatch,
    FastOutputs,
    NewBlockIds,
    RequestConstants,
)

_ROWS_WITH_CONNECTOR = 4
"""Rows of the block manager per running request with a KV connector: requests that are being loaded or sent also hold
blocks. When rows run out, a request waits until others have been sent."""


class StepInFlight(NamedTuple):
    """A step whose output is outstanding."""

    output: SchedulerOutput
    fast_outputs: FastOutputs
    """Its requests on the fast path."""
    scheduled_s: float
    """When it was scheduled, by ``time.perf_counter``."""
    num_prompt_tokens: int | None
    """Prompt tokens that it computes besides decodes; None for a step whose duration is not used."""


class BatchedScheduling(Scheduler):
    """Base class of both schedulers."""

    running: list[Request]
    finished_req_ids: set[str]
    reset_preempted_req_ids: set[str]

    _num_placeholders = 0
    """``num_output_placeholders`` that scheduling a decode adds, per token."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        options = rose_options(vllm_config)
        max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        make_manager = functools.partial(
            RoseKVCacheManager,
            max_num_seqs=max_num_seqs * (_ROWS_WITH_CONNECTOR if has_kv_connector(vllm_config) else 1),
            full_blocks_only=not options.token_granular_hits,
            exact_cached_tokens=options.exact_cached_tokens,
        )
        with swapped("block_manager_class", make_manager):
            super().__init__(vllm_config, *args, **kwargs)
        has_canary = options.kv_canary != "off"
        self._canary = CanaryPlanner(self.kv_cache_manager.manager) if has_canary else None
        self._set_num_drafts(self.num_spec_tokens)
        self.kv_cache_manager.running.num_lookahead_tokens = self.num_lookahead_tokens
        self._batches_decode_steps = batches_decode_steps(vllm_config)
        # vLLM's offloading stores a block once its tokens are known, and spends some microseconds on each request that
        # it is told of. So it is told only of the requests that have just filled a block.
        self._tells_of_filled_blocks_only = offloads_whole_blocks(vllm_config)
        self._max_num_batched_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
        drafts = vllm_config.speculative_config
        # Inputs that a draft model has per request in addition to the step's tokens.
        self._num_draft_slots: int = 0 if drafts is None else drafts.max_num_new_slots_for_drafting
        self._may_split = why_steps_are_not_split(vllm_config) is None
        has_budget = why_steps_have_no_budget(vllm_config) is None
        self._step_budget = StepBudget.of(options.step_budget) if has_budget else None
        # Whether prompts were waiting under the last limit and none could use it, because a part cannot be split.
        self._is_limit_too_small = False
        self._last_update_s = 0.0
        self._budget_log = LogInterval()
        # Constants of the decodes of the last step that vLLM's code scheduled.
        self._known_constants: dict[Request, RequestConstants] = {}
        self._batch: DecodeBatch | None = None
        # The batch and its part of the step, while vLLM's code schedules the requests after it.
        self._ahead_of_rest: tuple[DecodeBatch, CachedRequestData] | None = None
        self._in_flight: deque[StepInFlight] = deque()
        # Number of calls that may have changed running requests in unusual ways, such as an abort or a preemption.
        self._num_interventions = 0
        # Tokens that each request on the fast path got, until the step's statistics are made; None without drafts.
        self._fast_counts: list[int] | None = None
        self._num_fast_drafts = 0
        self._draft_depth: DraftDepth | None = None
        self._shadow_drafts: ShadowDrafts[Request] | None = None
        self._next_num_drafts, self._drafts_log = self.num_spec_tokens, LogInterval()
        # Requests with a seed and a temperature: their texts must be repeatable.
        self._seeded_ids: set[str] = set()
        # Drafts per decode in the step whose output came last; None unless that step only decoded.
        self._last_depth: int | None = None
        if adapts_drafts(vllm_config):
            self._adapt_drafts(vllm_config)

    def _adapt_drafts(self, vllm_config: Any) -> None:
        """Set up the choice of drafts step by step."""
        self._draft_depth = DraftDepth(self.num_spec_tokens)
        speculative = vllm_config.speculative_config
        # Synthetic acceptance ignores the texts, so looking drafts up in them would predict nothing.
        if speculative.method in NGRAM_METHODS and speculative.rejection_sample_method != "synthetic":
            bounds = speculative.prompt_lookup_min, speculative.prompt_lookup_max
            self._shadow_drafts = ShadowDrafts(self.num_spec_tokens, *bounds, tokens_of=_tokens_of_running)
        self._draft_next(self.num_spec_tokens)

    def _draft_next(self, num_drafts: int) -> None:
        """Make this many drafts for each decode in the next step that is scheduled."""
        self._next_num_drafts = num_drafts
        # vLLM's table of drafts by number of requests, here the same for all.
        self.dynamic_sd_lookup = [num_drafts] * (self.max_num_running_reqs + 1)

    def _set_num_drafts(self, num_drafts: int) -> None:
        """Note that each decode in the next step to be scheduled verifies this many drafts, made in the step before."""
        self._num_drafts = num_drafts
        self.kv_cache_manager.running.tokens_per_decode = 1 + num_drafts

    def add_request(self, request: Request) -> None:
        """Queue a request, or continue its streaming session."""
        params = request.sampling_params
        if (
            self._draft_depth is not None
            and params is not None
            and params.seed is not None
            and params.temperature > 0
        ):
            self._seeded_ids.add(request.request_id)
        super().add_request(request)

    def _choose_drafts(self, depth: DraftDepth) -> None:
        """Choose how many drafts the step to be scheduled makes for the next one.

        With drafts, vLLM samples other tokens than without. Drafts stay on while there is a request with a seed, so
        that the seed gives the same text again.
        """
        if self._seeded_ids:
            self._seeded_ids &= self.requests.keys()
        # While nothing runs: as many as will run if there is room for all that wait.
        num_requests = len(self.running) or min(len(self.requests), self.max_num_running_reqs)
        chosen = depth.num_drafts if self._seeded_ids else depth.choose(num_requests)
        if chosen != self._next_num_drafts:
            self._draft_next(chosen)
            if self._drafts_log.is_over():
                logger.info("Rose adaptive drafts: %d for each request from now on; %s", chosen, depth)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule the next step."""
        batches, output = self._batches_decode_steps, None
        if self._draft_depth is not None:
            self._choose_drafts(self._draft_depth)
        if batches and self._pause_state == PauseState.UNPAUSED and not throttle_prefills:
            output = self._schedule_batched()
        if output is None:
            self._batch = None
            output = super().schedule(throttle_prefills)
            if batches:
                self._note_decodes(output)
            if output.num_scheduled_tokens and self._num_drafts != output.num_spec_tokens_to_schedule:
                self._set_num_drafts(output.num_spec_tokens_to_schedule)
        if not self.use_v2_model_runner:
            # vLLM does not send the data of multimodal items that a prefix hit covers. Model runner V1 does not get it
            # later either, when the request is resumed after a preemption. If the blocks were evicted in between, the
            # items have to be computed again, and the engine would fail without their data. So all items are sent.
            for new in output.scheduled_new_reqs:
                if new.mm_features:
                    new.mm_features = self.requests[new.req_id].mm_features
        if self._canary is not None:
            add_plan(output, self._canary)
        return output

    def _note_decodes(self, output: SchedulerOutput) -> None:
        """Prepare the fast path for the requests that decode, with all drafts if any, in a step that vLLM scheduled."""
        num_drafts, drafts = self._num_drafts, output.scheduled_spec_decode_tokens
        decodes = [
            self.requests[id]
            for id, count in output.num_scheduled_tokens.items()
            # A chunk of a prompt may have the same number of tokens, but has no drafts.
            if count == 1 + num_drafts and (not num_drafts or len(drafts.get(id, ())) == num_drafts)
        ]
        if decodes:
            known, limit = self._known_constants, self.max_model_len
            constants = [known.get(request) or RequestConstants.of(request, limit) for request in decodes]
            self._known_constants = dict(zip(decodes, constants, strict=True))
            fast_outputs = FastOutputs(decodes, constants, 1 + num_drafts)
            self._in_flight.append(StepInFlight(output, fast_outputs, 0.0, None))

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Whether a waiting request may be admitted in this step; vLLM continues with the next one if not."""
        ready: bool = super()._handle_blocked_waiting_request(request)
        return ready and not self.kv_cache_manager.defers(request)

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Cut a chunk of a prompt where a checkpoint is due; vLLM cuts at the ends of blocks."""
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        stop = self.kv_cache_manager.checkpoints.next_stop(request, start)
        return min(stop - start, num_new_tokens) if stop else num_new_tokens

    def _schedule_batched(self) -> SchedulerOutput | None:
        """Schedule decodes at once, the rest by vLLM's code. None if that is impossible; nothing has changed then."""
        if self._num_drafts != self._next_num_drafts:
            # The number of drafts changes: vLLM's code gives every request the new number of placeholders.
            return None
        batch = self._next_batch()
        if batch is None:
            return None
        num_tokens = batch.total_num_scheduled_tokens
        num_inputs = self._num_inputs(batch)
        if num_tokens > self.max_num_scheduled_tokens or num_inputs > self._max_num_batched_tokens:
            return None
        may_admit = self._may_admit()
        is_all = len(batch.running) == len(self.running) and not may_admit
        if not is_all and not self._may_split:
            return None
        if may_admit and self._may_pad_prompt(self.running[len(batch.running) :]):
            # Leave one decode to vLLM, which gives a prompt drafts only if it schedules a decode itself.
            batch = self._batch_of(batch.before_last_decode(), batch)
            if batch is None:
                return None
        self.kv_cache_manager.new_step_starts()
        new_block_ids = batch.allocate_slots()
        if new_block_ids is None:
            return None
        self._batch = batch
        now, num_prompt_tokens = time.perf_counter(), 0
        if is_all:
            output = self._schedule_all(batch, new_block_ids)
        else:
            output, num_prompt_tokens = self._schedule_rest(batch, new_block_ids)
        self._in_flight.append(StepInFlight(output, batch.fast_outputs, now, num_prompt_tokens))
        return output

    def _num_inputs(self, batch: DecodeBatch) -> int:
        """Return how much of ``max_num_batched_tokens`` a step of the batch uses."""
        return batch.total_num_scheduled_tokens + self._num_draft_slots * len(batch.request_ids)

    def _next_batch(self) -> DecodeBatch | None:
        batch = self._batch
        if batch is not None and batch.is_at_head_of(self.running):
            return batch
        batch = self._batch_of(self.running, batch)
        if batch is None:
            return None
        # Model runner V1 needs all tokens of a request that was not in the step before.
        seen = self.prev_step_scheduled_req_ids
        return batch if self.use_v2_model_runner or seen.issuperset(batch.request_ids) else None

    def _batch_of(self, running: list[Request], last: DecodeBatch | None) -> DecodeBatch | None:
        """Return the batch at the head of ``running``, if any; see ``DecodeBatch.at_head_of``."""
        holders = self.kv_cache_manager.running
        return DecodeBatch.at_head_of(running, self._known_constants, holders, self.max_model_len, last)

    def _may_pad_prompt(self, others: list[Request]) -> bool:
        """Whether vLLM may admit a waiting prompt of a single token, to which it would give drafts, as to a decode.

        vLLM takes waiting requests in order while rows are free. Each request that it admits, loads or defers takes a
        row; those that it may skip take none. After many of the latter the answer is True without looking further.

        Args:
            others: running requests after the batch. If one of them is a prompt, vLLM gives no waiting prompt drafts.
        """
        if not self.num_spec_tokens or self.dynamic_sd_lookup is not None:
            return False
        # A prompt with multimodal items does not count: it may have to wait for room in the encoder cache.
        if any(request.is_prefill_chunk and not request.has_encoder_inputs for request in others):
            return False
        if any(request.num_tokens == 1 for request in self.kv_holding_waiting):
            return True
        holders = self.kv_cache_manager.running
        num_rows, num_passed = len(holders.capacity) - len(holders.requests), 0
        for request in self.waiting:
            if num_rows == 0:
                return False
            if request.num_tokens == 1 or num_passed == MAX_WAITING_LOOKED_AT:
                return True
            if (
                self._is_blocked_waiting_status(request.status)
                or request.num_stale_output_tokens
                # A connector may need another step to say how much of a prompt it has.
                or self.connector is not None
            ):
                num_passed += 1
            else:
                num_rows -= 1
        return False

    def _may_admit(self) -> bool:
        """Whether vLLM would try to admit a waiting request."""
        num_running = len(self.running) + self.num_waiting_for_streaming_input
        return bool(self.waiting or self.kv_holding_waiting) and num_running < self.max_num_active_reqs

    def _schedule_all(self, batch: DecodeBatch, new_block_ids: NewBlockIds) -> SchedulerOutput:
        """Schedule a step of the batch only."""
        self._is_limit_too_small = False
        self.current_step += 1
        self.prefill_capacity_bound = self.get_request_counts()[1] > len(self.deferred_waiting)
        if len(self.prev_step_scheduled_req_ids) > len(batch.request_ids):
            # A superset of the batch: keep the requests of this step only.
            self.prev_step_scheduled_req_ids.intersection_update(batch.request_ids)
        copies, retained = self.kv_cache_manager.take_kv_cache_block_copies()
        if copies:
            self._free_cow_retained_blocks(retained, self.sched_step_seq + 1)
        output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=batch.data_of_next_step(new_block_ids),
            num_scheduled_tokens=batch.num_scheduled_tokens,
            total_num_scheduled_tokens=batch.total_num_scheduled_tokens,
            scheduled_spec_decode_tokens=batch.drafts_of_next_step(),
            scheduled_encoder_inputs={},
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
            has_structured_output_requests=batch.has_grammar,
            pending_structured_output_tokens=batch.lacks_grammar_tokens,
            kv_cache_block_copies=copies or None,
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
            num_spec_tokens_to_schedule=self._num_drafts,
            ec_manager_metadata=self.encoder_cache_manager.get_manager_metadata(),
        )
        if self._skips_drafts(batch):
            output.skip_drafts = True
        self._add_encoded_items(batch, output)
        if self.connector is not None:
            output.kv_connector_block_state = KVConnectorBlockState(
                req_ids=set(batch.request_ids),
                resolve_block_ids=self.kv_cache_manager.get_block_ids,
                boundary_state_offloads={},
            )
            told = output
            if self._tells_of_filled_blocks_only:
                told = _with_rows(batch.rows_with_other_blocks(new_block_ids, self.block_size), output)
            output.kv_connector_metadata = self._build_kv_connector_meta(self.connector, told)
            output.kv_connector_block_state = None
        self._advance(batch, is_new_step=True)
        self.finished_req_ids = set()
        self.reset_preempted_req_ids = set()
        return output

    def _advance(self, batch: DecodeBatch, *, is_new_step: bool) -> None:
        """Count the batch's tokens as scheduled. Call it last: everything before reads its requests as they were.

        Args:
            is_new_step: whether vLLM has not counted the step itself (it counts steps to which it has given tokens).
        """
        if self.defer_block_free and is_new_step:
            self.sched_step_seq += 1
        batch.advance(self._num_placeholders, self.sched_step_seq if self.defer_block_free else None)

    def _skips_drafts(self, batch: DecodeBatch) -> bool:
        """Whether an EAGLE head need not draft because every request ends with the next step; from vLLM 0.33 on."""
        can_skip: bool = getattr(self, "can_skip_drafts", False)
        return can_skip and batch.has_no_use_for_drafts(self._drafts_unused)

    def _add_encoded_items(self, batch: DecodeBatch, output: SchedulerOutput) -> None:
        """Tell workers which multimodal items of a batch they may drop, as vLLM does from 0.33 on."""
        if any(getattr(self, "_pending_encoder_input_ids", {}).values()):
            updates = self._get_encoder_input_updates(batch.num_scheduled_tokens, [], {})
            output.encoder_input_updates = (output.encoder_input_updates or {}) | updates

    def _schedule_rest(self, batch: DecodeBatch, new_block_ids: NewBlockIds) -> tuple[SchedulerOutput, int]:
        """Let vLLM schedule the requests after the batch, with each limit reduced by the batch's share.

        Returns:
            The step, and how many of its tokens are prompts'.
        """
        num_tokens, num_requests = batch.total_num_scheduled_tokens, len(batch.running)
        tokens_per_decode = 1 + self.num_spec_tokens
        self.running = self.running[num_requests:]
        decode_ids = [request.request_id for request in self.running if not request.is_prefill_chunk]
        num_begun = len(self.running) - len(decode_ids)
        limit, max_chunk = self._max_prompt_tokens(), 0
        if limit is not None:
            if decode_ids:
                # Cap each chunk, so that prompts leave tokens for the decodes after them; at least a decode's tokens.
                max_chunk = max(limit // max(num_begun, 1), tokens_per_decode)
                limit = max(limit, num_begun * max_chunk)
            num_kept = limit + len(decode_ids) * tokens_per_decode
            num_tokens = max(num_tokens, self.max_num_scheduled_tokens - num_kept)
        data = batch.data_of_next_step(new_block_ids)
        self._ahead_of_rest = batch, data
        self.scheduler_config.long_prefill_token_threshold = max_chunk
        self.max_num_scheduled_tokens -= num_tokens
        self.scheduler_config.max_num_batched_tokens -= self._num_inputs(batch)
        self.max_num_active_reqs -= num_requests
        try:
            output = super().schedule()
        finally:
            self._ahead_of_rest = None
            # Its value before: why_steps_are_not_split excludes any other.
            self.scheduler_config.long_prefill_token_threshold = 0
            self.running = batch.running + self.running
            self.max_num_scheduled_tokens += num_tokens
            self.scheduler_config.max_num_batched_tokens = self._max_num_batched_tokens
            self.max_num_active_reqs += num_requests
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.update(batch.request_ids)
        self._add_encoded_items(batch, output)
        output.has_structured_output_requests |= batch.has_grammar
        output.pending_structured_output_tokens |= batch.lacks_grammar_tokens
        num_scheduled = output.num_scheduled_tokens
        num_prompt_tokens = output.total_num_scheduled_tokens - sum(
            num_scheduled.get(id, 0) for id in decode_ids
        )
        # Only prompts that have begun count: a waiting one may be waiting for something else.
        self._is_limit_too_small = limit is not None and num_begun > 0 and not num_prompt_tokens
        self._note_prompts(output, num_prompt_tokens)
        is_new_step = not output.total_num_scheduled_tokens
        # vLLM does not set this where it schedules nothing itself.
        output.num_spec_tokens_to_schedule = self._num_drafts
        if getattr(output, "skip_drafts", False) and not self._skips_drafts(batch):
            # vLLM has judged by its own requests; those of the batch still need drafts.
            output.skip_drafts = False
        _put_first(batch, data, output)
        output.scheduled_spec_decode_tokens = (
            batch.drafts_of_next_step() | output.scheduled_spec_decode_tokens
        )
        self._advance(batch, is_new_step=is_new_step)
        return output, num_prompt_tokens

    def _max_prompt_tokens(self) -> int | None:
        """Return how many prompt tokens the step may have besides its decodes; None: no limit.

        Call it while ``running`` lacks the batch. There is no limit right after one that no begun prompt could use.
        """
        budget = self._step_budget
        if budget is None or not budget.new_step_starts() or self._is_limit_too_small:
            return None
        begun = [
            request.num_tokens - request.num_computed_tokens
            for request in self.running
            if request.is_prefill_chunk
        ]
        # Requests in ``kv_holding_waiting`` have computed some of their tokens.
        queue = islice(chain(self.kv_holding_waiting, self.waiting), MAX_WAITING_LOOKED_AT + 1)
        waiting = [request.num_tokens - request.num_computed_tokens for request in queue]
        if not begun and not waiting:
            return None
        return budget.max_prompt_tokens(begun, waiting)

    def _note_prompts(self, output: SchedulerOutput, num_prompt_tokens: int) -> None:
        """Tell the step budget which prompts begin in a step that does not contain the batch yet.

        Args:
            num_prompt_tokens: prompt tokens that the step computes.
        """
        budget = self._step_budget
        if budget is None:
            return
        if num_prompt_tokens:
            budget.count_step()
            if (budget.num_limited or budget.num_given_up) and self._budget_log.is_over():
                logger.info("Rose step budget, steps with prompts since start-up: %s", budget)
        for new in output.scheduled_new_reqs:
            budget.note_prompt(self.requests[new.req_id].num_tokens, new.num_computed_tokens)

    def _note_time(self, step: StepInFlight | None) -> None:
        """Note how long a step took whose output has arrived.

        It began when the output of the step before arrived, or when it was scheduled if that was later.

        Args:
            step: None for a step without a fast path.
        """
        now, last_depth = time.perf_counter(), self._last_depth
        start_s, self._last_update_s, self._last_depth = self._last_update_s, now, None
        if step is None or step.num_prompt_tokens is None:
            return
        seconds, budget = now - max(start_s, step.scheduled_s), self._step_budget
        if step.num_prompt_tokens:
            if budget is not None:
                budget.note_mixed_step(step.num_prompt_tokens, seconds)
            return
        if budget is not None:
            budget.note_decode_step(seconds)
        if self._draft_depth is not None:
            counts = step.output.num_scheduled_tokens
            numbers = set(counts.values())
            # Not where some have more drafts than others.
            if len(numbers) == 1:
                self._last_depth = depth = numbers.pop() - 1
                if depth == last_depth:
                    self._draft_depth.note_time(depth, len(counts), seconds)

    def _build_kv_connector_meta(self, connector: Any, scheduler_output: SchedulerOutput) -> Any:
        """Tell a KV connector of the whole step; vLLM's code only knows of the requests after the batch."""
        if self._ahead_of_rest is not None:
            scheduler_output = copy.copy(scheduler_output)
            _put_first(*self._ahead_of_rest, scheduler_output)
            scheduler_output.kv_connector_block_state.req_ids.update(self._ahead_of_rest[0].request_ids)
        return super()._build_kv_connector_meta(connector, scheduler_output)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Process the sampled tokens of a step; return the outputs by front end, first tokens of requests first."""
        fast_outputs = self._fast_outputs_of(scheduler_output)
        loads = model_runner_output.kv_connector_output
        has_failed_loads = loads is not None and bool(loads.invalid_block_ids or loads.failed_recving)
        if has_failed_loads:
            # vLLM resets requests to before the failed load, possibly requests of the batch, too.
            self._batch = None
        if fast_outputs is None or has_failed_loads or _concerns_more_than_tokens(model_runner_output):
            self._num_interventions += 1
            self._note_rejected(None)
            self._note_accepted(scheduler_output, model_runner_output, [])
            results = super().update_from_output(scheduler_output, model_runner_output)
            _put_first_tokens_first(results)
            return results
        appended = fast_outputs.append_tokens(
            model_runner_output,
            self._num_placeholders,
            self._num_interventions,
            self._holds_encoder_outputs,
        )
        request_ids, outputs = appended.request_ids, appended.outputs
        self._note_rejected(appended.counts, fast_outputs, len(request_ids))
        self._note_accepted(scheduler_output, model_runner_output, appended.counts or [])
        if len(request_ids) == len(scheduler_output.num_scheduled_tokens) and self._reports_stats_only():
            return self._report(outputs, model_runner_output)
        # vLLM's code does the rest: requests off the fast path, and what is reported once per step.
        rest = copy.copy(scheduler_output)
        rest.num_scheduled_tokens = {}
        if len(request_ids) < len(scheduler_output.num_scheduled_tokens):
            taken = set(request_ids)
            rest.num_scheduled_tokens = {
                request_id: count
                for request_id, count in scheduler_output.num_scheduled_tokens.items()
                if request_id not in taken
            }
        results = super().update_from_output(rest, model_runner_output)
        _put_first_tokens_first(results)
        for client_index, client_outputs in outputs.items():
            # None of them is a first token.
            results.setdefault(client_index, EngineCoreOutputs()).outputs += client_outputs
        _move_stats(results)
        return results

    def _note_rejected(
        self, counts: list[int] | None, fast_outputs: FastOutputs | None = None, num_requests: int = 0
    ) -> None:
        """Tell the batch how many of its drafts a step's output has rejected.

        Args:
            counts: tokens that each request on the fast path got; None without drafts, or if vLLM's code processes all.
            fast_outputs: the step's fast path, if there is one.
            num_requests: requests that took it.
        """
        self._fast_counts, batch = counts, self._batch
        if not self.num_spec_tokens:
            return
        if fast_outputs is not None:
            self._num_fast_drafts = fast_outputs.num_tokens - 1
        if batch is not None:
            is_of_batch = fast_outputs is batch.fast_outputs
            is_whole = is_of_batch and num_requests == len(batch.request_ids)
            if not is_whole and (counts is not None or not is_of_batch):
                batch.note_tokens(None)
            elif counts is not None:
                batch.note_tokens(counts)

    def _note_accepted(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput, counts: list[int]
    ) -> None:
        """Note how many drafts a step has accepted or, if it had none, would have accepted.

        Args:
            counts: tokens that each request on the fast path got. If that is not every request, all counts are read
                from ``output`` instead. Call it before vLLM's code cuts tokens off.
        """
        depth, drafted = self._draft_depth, scheduler_output.scheduled_spec_decode_tokens
        if depth is None:
            return
        if drafted and output.sampled_token_ids:
            if len(counts) < len(drafted):
                index, sampled = output.req_id_to_index, output.sampled_token_ids
                counts = [max(len(sampled[index[request_id]]), 1) for request_id in drafted]
            # Rows that end have fewer drafts.
            num_drafts = max(map(len, drafted.values()))
            depth.note_accepted([num / len(counts) for num in _num_accepted_by_place(counts, num_drafts)])
        elif self._shadow_drafts is not None and self._num_drafts == 0:
            are_right = self._shadow_drafts.look(self.running)
            if are_right is not None:
                depth.note_accepted(are_right)

    def make_stats(
        self, spec_decoding_stats: SpecDecodingStats | None = None, *args: Any, **kwargs: Any
    ) -> SchedulerStats | None:
        """Return a step's statistics, with the drafts of requests on the fast path."""
        counts = self._fast_counts
        if counts and self.log_stats:
            self._fast_counts = None
            spec_decoding_stats = spec_decoding_stats or SpecDecodingStats.new(self.num_spec_tokens)
            observe_drafts(spec_decoding_stats, counts, self._num_fast_drafts)
        return super().make_stats(spec_decoding_stats, *args, **kwargs)

    def _holds_encoder_outputs(self, request: Request) -> bool:
        return bool(self.encoder_cache_manager.get_cached_input_ids(request))

    def _reports_stats_only(self) -> bool:
        """Whether a step without special requests ends with nothing but outputs and statistics.

        Utilization metrics turn batched scheduling off.
        """
        return not (
            self.connector is not None
            or self.enable_kv_cache_events
            or self.finished_req_ids_dict
            or self.grammar_compile_error_reqs
            or self.encoder_cache_mismatch_reqs
        )

    def _report(
        self, outputs: dict[int, list[EngineCoreOutput]], model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Return a step's outputs and statistics as vLLM would, where ``_reports_stats_only``."""
        results = {
            client: EngineCoreOutputs(outputs=client_outputs) for client, client_outputs in outputs.items()
        }
        stats = self.make_stats(cudagraph_stats=model_runner_output.cudagraph_stats)
        if stats is not None:
            # vLLM sends them to one front end only.
            next(iter(results.values())).scheduler_stats = stats
        return results

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Finish requests from outside of the scheduler."""
        self._num_interventions += 1
        return super().finish_requests(*args, **kwargs)

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        """Preempt a running request."""
        self._num_interventions += 1
        super()._preempt_request(*args, **kwargs)

    def _fast_outputs_of(self, scheduler_output: SchedulerOutput) -> FastOutputs | None:
        """Return a step's fast path, None if it has none. Earlier steps are dropped: their outputs will not come."""
        for position, step in enumerate(self._in_flight):
            if step.output is scheduler_output:
                for _ in range(position + 1):
                    self._in_flight.popleft()
                self._note_time(step)
                return step.fast_outputs
        self._note_time(None)
        return None


class RoseScheduler(BatchedScheduling, Scheduler):
    """Scheduler of engines that wait for each step's output before they schedule the next one."""


class RoseAsyncScheduler(BatchedScheduling, AsyncScheduler):
    """Scheduler of engines that schedule the next step while one is running."""

    _num_placeholders = 1


def _put_first(batch: DecodeBatch, first: CachedRequestData, output: SchedulerOutput) -> None:
    """Add a batch to a step before its other requests, as in ``running``. The step's own lists are not changed."""
    rest = output.scheduled_cached_reqs
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=first.req_ids + rest.req_ids,
        resumed_req_ids=rest.resumed_req_ids,
        new_token_ids=first.new_token_ids + rest.new_token_ids,
        all_token_ids=rest.all_token_ids,
        new_block_ids=first.new_block_ids + rest.new_block_ids,
        num_computed_tokens=first.num_computed_tokens + rest.num_computed_tokens,
        num_output_tokens=first.num_output_tokens + rest.num_output_tokens,
    )
    output.num_scheduled_tokens = batch.num_scheduled_tokens | output.num_scheduled_tokens
    output.total_num_scheduled_tokens += batch.total_num_scheduled_tokens


def _with_rows(rows: list[int], output: SchedulerOutput) -> SchedulerOutput:
    """Return a copy of a step of decodes that has only some of its requests.

    Args:
        rows: their positions.
    """
    data, part = output.scheduled_cached_reqs, copy.copy(output)
    part.scheduled_cached_reqs = CachedRequestData.make_empty()
    if rows:
        part.scheduled_cached_reqs = CachedRequestData(
            req_ids=[data.req_ids[row] for row in rows],
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[data.new_block_ids[row] for row in rows],
            num_computed_tokens=[data.num_computed_tokens[row] for row in rows],
            num_output_tokens=[data.num_output_tokens[row] for row in rows],
        )
    part.num_scheduled_tokens = dict.fromkeys(part.scheduled_cached_reqs.req_ids, 1)
    part.total_num_scheduled_tokens = len(rows)
    return part


def _tokens_of_running(request: Request) -> list[int] | None:
    tokens: list[int] = request._all_token_ids
    return tokens if request.status is RequestStatus.RUNNING else None


def observe_drafts(stats: SpecDecodingStats, counts: list[int], num_drafts: int) -> None:
    """Count drafts, ``num_drafts`` of each request, as ``observe_draft`` does one by one.

    Args:
        counts: tokens that each request got.
    """
    num_requests = len(counts)
    stats.num_drafts += num_requests
    stats.num_draft_tokens += num_requests * num_drafts
    stats.num_accepted_tokens += sum(counts) - num_requests
    for place, num_accepted in enumerate(_num_accepted_by_place(counts, num_drafts)):
        stats.num_accepted_tokens_per_pos[place] += num_accepted
        stats.num_draft_tokens_per_pos[place] += num_requests


def _num_accepted_by_place(counts: list[int], num_drafts: int) -> list[int]:
    """Return of each draft in how many requests it was accepted, given how many tokens these got."""
    # For each number of tokens, how many requests got at least that many.
    num_reached: list[int] = np.bincount(counts, minlength=num_drafts + 2)[::-1].cumsum()[::-1].tolist()
    return num_reached[2 : num_drafts + 2]


def _put_first_tokens_first(results: dict[int, EngineCoreOutputs]) -> None:
    """Reorder each front end's outputs, at most one per request, so that it makes first texts before all others.

    A front end handles outputs in their order, and pauses to send texts within a long list: a first token at its end,
    where vLLM's order has it, waits for all running requests.
    """
    for result in results.values():
        if any(output.prefill_stats is not None for output in result.outputs):
            result.outputs.sort(key=lambda output: output.prefill_stats is None)


def _move_stats(results: dict[int, EngineCoreOutputs]) -> None:
    """Move the step's statistics to a front end that gets tokens; vLLM adds an entry of statistics only."""
    first = results.get(0)
    if first is not None and not first.outputs and first.finished_requests is None and len(results) > 1:
        del results[0]
        next(iter(results.values())).scheduler_stats = first.scheduler_stats


def _concerns_more_than_tokens(output: ModelRunnerOutput) -> bool:
    """Whether a worker's output has parts that vLLM's own code handles request by request."""
    return (
        not output.sampled_token_ids
        or bool(output.prompt_logprobs_dict or output.prompt_token_id_logprobs_dict or output.pooler_output)
        or output.num_nans_in_logits is not None
    )
