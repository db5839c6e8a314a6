"""Steps in flight: the host schedules and starts the next ones before it reads the tokens of the current one.

``StepPipeline`` starts and reads steps, and ``TokenReader`` appends the tokens that were read and ends completions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.block_manager import BlockManager
from rose_backend.engine.drafts import AdaptiveDrafts
from rose_backend.engine.model_runner import Chunks, Drawn, Hidden, ModelRunner, SideStream
from rose_backend.engine.output_thread import (
    Ending,
    IncrementalDetokenization,
    LogprobWords,
    NewTokens,
    PromptReport,
    StopCheck,
)
from rose_backend.engine.prompt_logprobs import PendingReport
from rose_backend.engine.request import Completion
from rose_backend.engine.scheduler import Scheduler, Step
from rose_backend.engine.sequence_state import Batch, DeferredCommits, Int32Array, Int64Array, SequenceState
from rose_backend.kernels.arguments import NOT_DRAWN

_NO_SLOTS: Int32Array = np.zeros(0, np.int32)
_NO_ROWS: Int64Array = np.zeros(0, np.int64)
_STEPS_BESIDE_PASS, _PASS_TOKENS_PER_STEP = 16, 64
"""At most 16 decode steps, and one for every 64 tokens of the pass, start beside a side pass; later ones wait for it.
Many decodes could fill the GPU, and a pass of low priority would hardly progress. On an H100 (2026-11-28, 2831f47),
beside 32 decodes with a context of 2,048, a pass of 4,096 tokens is over after 5 steps of Qwen3 0.6B or 16 of Llama 8B;
the limit is 80. Nothing was measured with more decodes."""
_AT_LENGTH, _AT_EOS, _AT_ERROR = Ending("length", None), Ending("stop", None), Ending("error", None)


class TokenReader:
    """Appends one step's tokens to all request slots at once; handles single completions only where one may have ended.

    Without ``needs_each_token``, tokens stay in the slot's buffers until the completion ends or they are committed.

    It knows tokens and lengths only: the output thread finds stop strings one or more steps later. Meanwhile such a
    request continues to decode. Unchecked tokens count as those of a step in flight, which no prefix lookup finds. A
    request that has ended in another way waits, without further steps, for the check of its last token.
    """

    def __init__(self, state: SequenceState, scheduler: Scheduler, commits: DeferredCommits) -> None:
        self.num_dropped_tokens = 0
        """Tokens drawn after a stop string that had not been found yet."""
        self._state = state
        self._scheduler = scheduler
        self._commits = commits
        self._unchecked: set[Completion] = set()

    def apply(self, sampled: SampledTokens) -> tuple[Int32Array, NewTokens | None]:
        """Append one token to each slot of a batch; a slot that has none (``INVALID_TOKEN_ID``) ends.

        Returns:
            The slots whose completion has ended, and what the output thread needs of this step; None for nothing.
        """
        state, batch, token_ids = self._state, sampled.batch, sampled.token_ids
        slots, is_full = batch.slots, state.append(batch, token_ids)
        is_invalid = token_ids < 0
        if np.count_nonzero(is_invalid):
            state.take_back(slots[is_invalid])
        elif self._only_lengths_matter(batch) and not np.count_nonzero(is_full):
            return _NO_SLOTS, None
        # np.isin sorts; there are one or two of them.
        is_eos = np.zeros(len(slots), np.bool_)
        for eos_token_id in state.eos_token_ids:
            is_eos |= token_ids == eos_token_id
        # In most steps no request has ended.
        if not np.count_nonzero(is_eos | is_full | is_invalid | state.needs_token_check[slots]):
            return _NO_SLOTS, None
        is_eos &= state.stops_at_eos[slots]
        is_stop = self._stop_tokens(slots, token_ids)
        ended = np.flatnonzero(is_eos | is_stop | is_full | is_invalid)
        followed = np.flatnonzero(state.needs_each_token[slots])
        ended_slots = slots[ended].astype(np.int32)
        if not len(ended) and not len(followed):
            return ended_slots, None
        endings: dict[Completion, Ending] = {}
        for index, slot in zip(ended.tolist(), ended_slots.tolist(), strict=True):
            completion, ending = self._state.completion(slot), _AT_LENGTH
            completion.has_ended = True
            if is_invalid[index]:
                grammar = completion.grammar
                ending = _AT_ERROR if grammar is None else Ending("error", grammar.error)
            elif is_eos[index]:
                ending = _AT_EOS
            elif is_stop[index]:
                ending = Ending("stop", int(token_ids[index]))
            endings[completion] = ending
        message = NewTokens(
            completions=self._completions_of(batch, followed),
            token_ids=token_ids[followed].tolist(),
            indices=followed,
            logprobs=sampled.logprobs,
            endings=endings,
            has_first_tokens=bool(
                np.count_nonzero(state.num_tokens[slots] == state.num_prompt_tokens[slots] + 1)
            ),
        )
        return ended_slots, message

    def _only_lengths_matter(self, batch: Batch) -> bool:
        """Whether no token can end any slot of ``batch``, and none is sent to the output thread in its own step."""
        if not batch.only_lengths_matter:
            state, slots = self._state, batch.slots
            batch.only_lengths_matter = not np.count_nonzero(
                state.needs_token_check[slots] | state.stops_at_eos[slots]
            )
        return batch.only_lengths_matter

    def _completions_of(self, batch: Batch, followed: NDArray[np.intp]) -> list[Completion]:
        if batch.completions is None:
            batch.completions = [self._state.completion(slot) for slot in batch.slots[followed].tolist()]
        return batch.completions

    def _stop_tokens(self, slots: Int64Array, token_ids: Int64Array) -> NDArray[np.bool_]:
        is_stop = np.zeros(len(slots), np.bool_)
        for index in np.flatnonzero(self._state.has_stop_tokens[slots]).tolist():
            params = self._state.completion(int(slots[index])).request.params
            is_stop[index] = int(token_ids[index]) in (params.stop_token_ids or ())
        return is_stop

    @property
    def num_unchecked(self) -> int:
        """Completions with tokens that the output thread has not checked."""
        return len(self._unchecked)

    def note_sent(self, slots: Int64Array) -> None:
        """Note that the output thread gets one more token of each of these; only slots with stop strings count."""
        for slot in slots[self._state.has_stop_strings[slots]].tolist():
            completion = self._state.completion(slot)
            completion.num_sent_tokens += 1
            self._unchecked.add(completion)

    def leave(self, slots: Int32Array) -> None:
        """Release slots that take no further token; with stop strings, after the check of their last token."""
        waits = self._state.has_stop_strings[slots]
        if waits.any():
            # One that failed has sent no token, and is checked all the same.
            self._unchecked.update(self._state.completion(slot) for slot in slots[waits].tolist())
            self._scheduler.suspend(slots[waits])
            slots = slots[~waits]
        if len(slots):
            self._scheduler.release(slots)

    def forget(self, completions: Iterable[Completion]) -> None:
        """Expect no more stop checks of these completions."""
        self._unchecked.difference_update(completions)

    def apply_stop_checks(self, stop_checks: Mapping[Completion, StopCheck]) -> None:
        """Confirm tokens before any stop string, and end the completions that hit one."""
        leaving: list[int] = []
        for completion, (num_tokens, is_stopped) in stop_checks.items():
            is_decided = is_stopped or num_tokens == completion.num_sent_tokens
            if is_decided:
                self._unchecked.discard(completion)
            if is_stopped:
                completion.has_ended = True
                self.num_dropped_tokens += completion.num_sent_tokens - num_tokens
            slot = completion.slot
            if slot < 0:  # aborted meanwhile
                continue
            num_tokens += int(self._state.num_prompt_tokens[slot])
            # The last of them has been drawn, but the step that computes it may not be over.
            self._commits.confirm(slot, num_tokens - 1)
            if is_decided and completion.has_ended:
                leaving.append(slot)
        if leaving:
            self._scheduler.release(np.array(leaving, np.int32))


@dataclass(slots=True)
class _StepInFlight:
    """A step that was started and not read."""

    batch: Batch
    decode_rows: Int64Array  # [D]
    decode_step: int
    needs_sampling_extras: bool
    """The decode part drew again for some slots, and has a report of it."""
    drawn: Drawn | None
    is_over: torch.cuda.Event | None
    report: PendingReport | None = None
    """Log-probabilities of prompts, whether or not these are whole."""
    num_drafts: int = 0
    """That each decode has."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One new token for each slot of a batch."""

    batch: Batch
    token_ids: Int64Array  # [S + D]
    logprobs: LogprobWords | None
    """None when no request asked for any."""
    prompts: PromptReport | None = None
    """Log-probabilities of prompts; they come no later than the first token."""


class StepPipeline:
    """Starts steps and reads them in order.

    ``advance`` is the whole loop: repeat the newest step or start a scheduled one, use the time until the oldest is
    over (blocks, commits, detokenization in portions), read the oldest.

    A pass over prompts beside decode steps (``Step.has_side_pass``) stays in flight for several steps, on the device's
    other stream. ``advance`` looks whether it is over before it starts a step. Once it is, when there is nothing
    else to do, or when as many steps ran with it as its size allows, the main stream waits for it. First tokens are
    drawn after the steps in flight then, and the next step takes them as input.

    A token drawn on the device is the input of the next step there; the host reads it later, so the device never waits
    for the host in steady-state decode. A request that has ended takes part in up to ``depth`` more steps, and what
    those draw for it is dropped. The blocks that such a step writes may have a new owner, whose own writes are enqueued
    after it.

    Blocks become findable when their tokens are known and every reader is ordered after their writer: prompts when the
    step is enqueued, or when a side pass is over; drawn tokens when they are read, and at the latest before the next
    lookup (``DeferredCommits``).

    Args:
        depth: steps that may be in flight after the one that is read; 0 reads each step before the next is planned.
    """

    def __init__(
        self,
        manager: BlockManager,
        state: SequenceState,
        scheduler: Scheduler,
        runner: ModelRunner,
        commits: DeferredCommits,
        incremental_detokenization: IncrementalDetokenization,
        device: torch.device,
        depth: int,
    ) -> None:
        self.counters = scheduler.counters
        self._manager = manager
        self._state = state
        self._scheduler = scheduler
        self._runner = runner
        drafts = runner.decoder.drafts
        self._adaptive_drafts = None if drafts is None else drafts.adaptive
        self._commits = commits
        self._incremental_detokenization = incremental_detokenization
        runner.follow_tokens(self._tokens_ahead)
        self._depth = depth
        self._in_flight: deque[_StepInFlight] = deque()
        self._newest: _StepInFlight | None = None
        # The side pass in flight, and how many more steps may start before it ends.
        self._chunks: Chunks | None = None
        self._num_steps_beside = 0
        # A step's event is free again when the step has been read; the draws that follow a pass have one, too.
        self._events: list[torch.cuda.Event] = []
        self._num_recorded = 0
        if device.type != "cpu":
            self._events = [torch.cuda.Event() for _ in range(depth + 3)]
            self._stream = torch.cuda.current_stream(device)

    @property
    def num_in_flight(self) -> int:
        """Steps that were started and not read."""
        return len(self._in_flight)

    def advance(self, num_unchecked: int = 0) -> Iterator[SampledTokens] | None:
        """Start a step if there is one to start, and read the oldest one if more than ``depth`` are in flight.

        Args:
            num_unchecked: completions whose stop check is open: they may have ended at a token that was read before.

        Returns:
            What the oldest step drew, a token of each slot at a time: drafts may have given some of them further
            ones, which count only for slots that have not ended before. None when no step was read.
        """
        in_flight = self._in_flight
        if len(in_flight) > self._depth:
            # The draws that followed a pass are one more than usual, and the device has a step to compute.
            return self._read(in_flight.popleft())
        started = self._start_next(num_unchecked)
        if started is None:
            if in_flight:
                return self._read(in_flight.popleft())
            if self._adaptive_drafts is not None:
                self._adaptive_drafts.note_other_step()
            return None
        in_flight.append(started)
        # Not while prompts are computed: the device would wait for the host. Tokens go to the output thread last: it
        # competes for the interpreter lock with whatever the host does afterwards.
        if started.drawn is None:
            self._scheduler.top_up()
            if self._adaptive_drafts is not None and not self._scheduler.num_drafts_wanted:
                self._adaptive_drafts.look(self._scheduler.running_slots)
            if self._commits.commit_some():
                self._incremental_detokenization.send_next()
        return self._read(in_flight.popleft()) if len(in_flight) > self._depth else None

    def _start_next(self, num_unchecked: int) -> _StepInFlight | None:
        """Repeat the newest step, or start a scheduled one; None when there is nothing to do now."""
        if self._chunks is not None and self._is_pass_due():
            self._end_pass()
        if self._adaptive_drafts is not None and (num_running := len(self._scheduler.running_slots)):
            self._scheduler.num_drafts_wanted = self._adaptive_drafts.choose(num_running)
        if self._newest is not None and self._scheduler.repeat():
            self._num_steps_beside -= 1
            return self._start_again(self._newest)
        step = self._schedule(num_unchecked)
        if step is None and self._chunks is not None and not self._in_flight:
            self._end_pass()
            step = self._schedule(num_unchecked)
        if step is not None:
            self._num_steps_beside -= 1
            self._newest = self._start(step)
            return self._newest
        if self._in_flight:
            # All requests wait for a step in flight: committing now saves time then.
            self._commits.flush()
        return None

    def _schedule(self, num_unchecked: int) -> Step | None:
        num_ahead = len(self._in_flight) + (self._chunks is not None) + num_unchecked
        self._update_state(num_ahead)
        return self._scheduler.schedule(num_ahead)

    def drop(self) -> None:
        """Drop the steps in flight: no request is left."""
        if self._chunks is not None:
            self._end_pass()
        self._in_flight.clear()
        self._incremental_detokenization.drop()

    def _update_state(self, num_ahead: int) -> None:
        """Update what scheduling needs: the progress of each request, including that of steps in flight.

        Steady-state decode needs none of it, so it is counted here and not in every step.
        """
        state = self._state
        # With nothing ahead, requests may have to leave for lack of blocks, and would lose what is not committed.
        if not num_ahead:
            self._commits.flush()
        state.num_unread_tokens.fill(0)
        state.num_drafts_ahead.fill(0)
        state.num_uncommitted_tokens[:] = state.num_held_tokens
        self._commits.count(state.num_uncommitted_tokens)
        for step in self._in_flight:
            is_live = step.batch.live()
            batch = step.batch if is_live is None else step.batch.only(is_live)
            state.num_unread_tokens[batch.slots] += 1
            state.num_uncommitted_tokens[batch.decode_slots] += 1
            state.num_drafts_ahead[batch.decode_slots] += step.num_drafts

    def _start(self, step: Step) -> _StepInFlight:
        self._count(step)
        forwarded = self._runner.forward(step)
        all_slots = decode_slots = forwarded.decode_slots.astype(np.int64)
        drawn, chunks = None, forwarded.chunks
        if step.has_side_pass:
            self._chunks = chunks
            num_tokens = int(step.num_new_tokens[step.num_decodes :].sum())
            self._num_steps_beside = _STEPS_BESIDE_PASS + num_tokens // _PASS_TOKENS_PER_STEP
        elif chunks is not None:
            assert forwarded.hidden is not None, "a pass on the main stream has an outcome"
            every = np.arange(len(chunks.slots))
            drawn_slots, drawn = self._draw_first(chunks, every, forwarded.hidden)
            all_slots = np.concatenate([drawn_slots, decode_slots])
        return _StepInFlight(
            Batch.of(self._state, all_slots, len(decode_slots)),
            forwarded.decode_rows,
            forwarded.decode_step,
            len(decode_slots) > 0 and self._runner.decoder.needs_sampling_extras,
            drawn,
            self._record(),
            forwarded.report,
            step.num_drafts,
        )

    @property
    def _side(self) -> SideStream:
        assert self._runner.side is not None, "there is one stream only"
        return self._runner.side

    def _is_pass_due(self) -> bool:
        """Return whether the side pass is over, or later steps wait for it."""
        return self._num_steps_beside <= 0 or self._side.is_over()

    def _end_pass(self) -> None:
        """Let the main stream wait for the side pass, then draw first tokens."""
        chunks, self._chunks = self._chunks, None
        assert chunks is not None, "no pass is in flight"
        hidden = self._side.join()
        live = np.flatnonzero(self._scheduler.end_pass())
        slots, drawn = self._draw_first(chunks, live, hidden)
        if drawn is not None:
            batch = Batch.of(self._state, slots.astype(np.int64), 0)
            self._in_flight.append(_StepInFlight(batch, _NO_ROWS, 0, False, drawn, self._record()))

    def _draw_first(
        self, chunks: Chunks, live: NDArray[np.intp], hidden: Hidden
    ) -> tuple[Int32Array, Drawn | None]:
        """Note what a pass has computed, and draw for slots that have all their tokens.

        Args:
            live: ``[L]`` indices in ``chunks`` of the slots that have their completion.

        Returns:
            ``[S]`` the slots that draw, and what they draw; None for nothing.
        """
        due = live[self._note_computed(chunks, live)]
        if not len(due):
            return _NO_SLOTS, None
        slots, sources = self._scheduler.fork_siblings(chunks.slots[due])
        return slots, self._runner.sample(hidden, due, slots, sources)

    def _note_computed(self, chunks: Chunks, live: NDArray[np.intp]) -> NDArray[np.intp]:
        """Note what a pass computes of ``live`` prompts; returns the indices in ``live`` of those that are whole then.

        Their commits are deferred, but for slots whose count must be exact at once: the next chunk of a prompt and
        siblings start at the manager's count, and slots with stop strings hold back generated tokens only.
        """
        slots, counts, state = chunks.slots[live], chunks.num_new_tokens[live], self._state
        is_due = self._manager.num_computed_tokens[slots] + counts == state.num_tokens[slots]
        can_defer = is_due & (state.num_siblings_to_fork[slots] == 0) & ~state.has_stop_strings[slots]
        self._commits.add(slots[can_defer], counts[can_defer])
        state.version += 1  # A batch may add to its own commits only.
        if np.count_nonzero(can_defer) < len(slots):
            is_now = ~can_defer
            is_of_now = np.zeros(len(chunks.slots), np.bool_)
            is_of_now[live[is_now]] = True
            token_ids = chunks.token_ids[np.repeat(is_of_now, chunks.num_new_tokens)]
            self._manager.commit(slots[is_now], counts[is_now], token_ids)
        return np.flatnonzero(is_due)

    def _start_again(self, last: _StepInFlight) -> _StepInFlight:
        """Start a step that repeats ``last``, in which all requests decode."""
        self.counters.steps += 1
        self.counters.computed_tokens += len(last.batch.slots) * (last.num_drafts + 1)
        self._runner.watch(None)
        decode_step = self._runner.decoder.enqueue_again()
        return _StepInFlight(
            last.batch,
            last.decode_rows,
            decode_step,
            last.needs_sampling_extras,
            None,
            self._record(),
            num_drafts=last.num_drafts,
        )

    def _record(self) -> torch.cuda.Event | None:
        """Mark this place on the device."""
        if not self._events:
            return None
        event = self._events[self._num_recorded % len(self._events)]
        self._num_recorded += 1
        event.record(self._stream)
        return event

    def _tokens_ahead(self, slots: Int32Array) -> list[list[int]]:
        """Wait for the steps in flight that draw for ``slots``; return what each of them has drawn there."""
        ahead: dict[int, list[int]] = {slot: [] for slot in slots.tolist()}
        for step in self._in_flight:
            batch = step.batch
            is_due = np.isin(batch.slots, slots) & (self._state.generation[batch.slots] == batch.generations)
            if np.count_nonzero(is_due):
                token_ids = self._wait_for_tokens(step)[is_due].tolist()
                for slot, token_id in zip(batch.slots[is_due].tolist(), token_ids, strict=True):
                    # Where no token could be drawn, the completion ends.
                    ahead[slot] += [token_id] if token_id >= 0 else []
        return list(ahead.values())

    def _wait_for_tokens(self, step: _StepInFlight) -> Int64Array:
        """Wait for a step; return what it drew, ``[S + D]``."""
        self._wait(step)
        token_ids = self._runner.decoder.tokens(step.decode_step, step.decode_rows)
        return token_ids if step.drawn is None else np.concatenate([step.drawn.token_ids.numpy(), token_ids])

    def _read(self, step: _StepInFlight) -> Iterator[SampledTokens]:
        batch, token_ids = step.batch, self._wait_for_tokens(step)
        logprobs = self._logprobs(step)
        if self._adaptive_drafts is not None:
            self._note_time(step, self._adaptive_drafts)
        is_live = batch.live()
        if is_live is not None:
            batch, token_ids = batch.only(is_live), token_ids[is_live]
            if logprobs is not None:
                logprobs = logprobs[is_live]
        if batch.is_steady:
            self._commits.add_again()
        elif len(batch.decode_slots):
            self._commits.add(batch.decode_slots)
        prompts = None if step.report is None else step.report.read()
        if not step.num_drafts:
            yield SampledTokens(batch, token_ids, logprobs, prompts)
            return
        num_decodes = len(step.batch.decode_slots)
        columns = self._runner.decoder.tokens_after_drafts(
            step.decode_step, step.decode_rows, step.num_drafts
        )
        is_drawn = columns != NOT_DRAWN
        if is_live is not None:
            is_drawn[:, ~is_live[len(is_live) - num_decodes :]] = False
        self._count_drafts(is_drawn, len(batch.decode_slots))
        yield SampledTokens(batch, token_ids, logprobs, prompts)
        slots, generations = step.batch.decode_slots, step.batch.generations[-num_decodes:]
        for token_ids, has_token in zip(columns, is_drawn, strict=True):
            # With the tokens before it a request may have ended.
            live = np.flatnonzero(has_token & (self._state.generation[slots] == generations))
            if not len(live):
                return
            batch = Batch.of(self._state, slots[live], len(live))
            self._commits.add(batch.decode_slots)
            yield SampledTokens(batch, token_ids[live], None)

    def _note_time(self, step: _StepInFlight, adaptive: AdaptiveDrafts) -> None:
        """Note the time of a step that was read, unless it did more than to decode in the plain way."""
        is_plain = step.drawn is None and self._chunks is None and not step.needs_sampling_extras
        if is_plain and not np.count_nonzero(self._state.has_grammar[step.batch.slots]):
            adaptive.note_step(step.num_drafts, len(step.batch.slots))
        else:
            adaptive.note_other_step()

    def _count_drafts(self, is_accepted: NDArray[np.bool_], num_requests: int) -> None:
        """Count the drafts, ``[N, D]``, of ``num_requests`` of ``D``; others have none that is accepted."""
        counters, num_drafts = self.counters, len(is_accepted)
        by_place = np.count_nonzero(is_accepted, axis=1).tolist()
        before = counters.spec_decode_num_accepted_tokens_per_pos
        if self._adaptive_drafts is not None and num_requests:
            self._adaptive_drafts.note_accepted([num / num_requests for num in by_place])
        counters.spec_decode_num_drafts += num_requests
        counters.spec_decode_num_draft_tokens += num_drafts * num_requests
        counters.spec_decode_num_accepted_tokens += sum(by_place)
        counters.spec_decode_num_accepted_tokens_per_pos = tuple(
            sum(each) for each in zip_longest(before, by_place, fillvalue=0)
        )

    def _logprobs(self, step: _StepInFlight) -> LogprobWords | None:
        drawn = None if step.drawn is None else step.drawn.report
        if drawn is None and not step.needs_sampling_extras:
            return None
        decoded = self._runner.decoder.extras.report(step.decode_step, step.decode_rows)
        if drawn is None:
            num_drawn = len(step.batch.slots) - len(step.batch.decode_slots)
            drawn = torch.zeros((num_drawn, decoded.shape[1]))
        return np.concatenate([drawn.numpy(), decoded])

    def _wait(self, step: _StepInFlight) -> None:
        if step.is_over is not None:
            step.is_over.synchronize()

    def _count(self, step: Step) -> None:
        slots, counts, counters, state = step.slots, step.num_new_tokens, self.counters, self._state
        counters.steps += 1
        counters.computed_tokens += int(counts.sum()) + step.num_decodes * step.num_drafts
        start = self._manager.num_computed_tokens[slots] + state.num_uncommitted_tokens[slots]
        # Nearly all requests of nearly all steps compute a token that is neither the prompt's nor lost by a preemption.
        matters = np.flatnonzero(start < state.num_known_before[slots])
        if not len(matters):
            return
        slots, start = slots[matters], start[matters]
        end = start + counts[matters]
        again = np.minimum(end, np.maximum(start, state.num_computed_before[slots]))
        first_time = np.maximum(np.minimum(end, state.num_prompt_tokens[slots]) - again, 0)
        counters.recomputed_tokens += int((again - start).sum())
        counters.prompt_tokens_computed += int(first_time.sum())
