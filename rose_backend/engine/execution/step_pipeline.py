"""Steps in flight: the host schedules and starts the next ones before it reads the tokens of the current one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.block_manager import BlockManager
from rose_backend.engine.execution.model_runner import Drawn, Forwarded, ModelRunner, SampledTokens
from rose_backend.engine.output.logprobs import LogprobWords
from rose_backend.engine.scheduling.deferred_commit import DeferredCommits, Int64Array
from rose_backend.engine.scheduling.scheduler import Scheduler, Step
from rose_backend.engine.sequence_state import SequenceState


@dataclass(slots=True)
class _StepInFlight:
    """A step that was started and not read."""

    rows: Int64Array  # [S + D], those that drew behind their prompt, and the decode rows
    decode_rows: Int64Array  # [D]
    decode_slots: Int64Array  # [D]
    decode_step: int
    needs_sampling_extras: bool
    """The decode part drew again for some rows, and has a report of it."""
    drawn: Drawn | None
    generations: Int64Array  # [S + D], when the step was started
    num_cleared: int  # then
    is_over: torch.cuda.Event | None

    def live(self, state: SequenceState) -> NDArray[np.bool_] | None:
        """Return which of ``rows`` still have the completion that they had, ``[S + D]``; None for all."""
        if self.num_cleared == state.num_cleared:
            return None
        return state.generation[self.rows] == self.generations


class StepPipeline:
    """Starts steps and reads them in order.

    A token drawn on the device is the input of the next step there; the host reads it later, so the device never waits
    for the host in steady-state decode. A row that has ended takes part in up to ``depth`` more steps, and what those
    draw for it is dropped. The blocks that such a step writes may have a new owner, whose own writes are enqueued
    behind it.

    Blocks become findable when their tokens are known and every reader is ordered behind their writer: prompts when the
    step is enqueued, drawn tokens when they are read, and at the latest before the next lookup (``DeferredCommits``).

    Args:
        depth: steps that may be in flight behind the one that is read; 0 reads each step before the next is planned.
    """

    def __init__(
        self,
        manager: BlockManager,
        state: SequenceState,
        scheduler: Scheduler,
        runner: ModelRunner,
        commits: DeferredCommits,
        device: torch.device,
        depth: int,
    ) -> None:
        self.counters = scheduler.counters
        self._manager = manager
        self._state = state
        self._scheduler = scheduler
        self._runner = runner
        self._commits = commits
        self._depth = depth
        self._in_flight: deque[_StepInFlight] = deque()
        self._newest: _StepInFlight | None = None
        # A step's event is free again when the step has been read.
        self._events: list[torch.cuda.Event] = []
        if device.type != "cpu":
            self._events = [torch.cuda.Event() for _ in range(depth + 2)]
            self._stream = torch.cuda.current_stream(device)

    @property
    def num_in_flight(self) -> int:
        """Steps that were started and not read."""
        return len(self._in_flight)

    def advance(self, num_unchecked: int = 0) -> tuple[Int64Array, SampledTokens] | None:
        """Start a step if there is one to start, and read the oldest one if more than ``depth`` are in flight.

        Args:
            num_unchecked: completions whose stop check is open: they may have ended at a token that was read before.

        Returns:
            Rows whose next token is known now, and those tokens; None when no step was read.
        """
        in_flight = self._in_flight
        if self._newest is not None and self._scheduler.repeat():
            in_flight.append(self._start_again(self._newest))
        else:
            num_ahead = len(in_flight) + num_unchecked
            self._update_state(num_ahead)
            step = self._scheduler.schedule(num_ahead)
            if step is None:
                if not in_flight:
                    return None
                # All rows wait for a step in flight: committing now saves time then.
                self._commits.flush()
                return self._read(in_flight.popleft())
            self._newest = self._start(step)
            in_flight.append(self._newest)
        # Not while prompts are computed: the device would wait for the host. Tokens go to the output thread last: it
        # competes for the interpreter lock with whatever the host does afterwards.
        if in_flight[-1].drawn is None:
            self._scheduler.top_up()
            self._commits.commit_some()
        return self._read(in_flight.popleft()) if len(in_flight) > self._depth else None

    def drop(self) -> None:
        """Drop the steps in flight: no request is left."""
        self._in_flight.clear()
        self._commits.incremental_detokenization.drop()

    def _update_state(self, num_ahead: int) -> None:
        """Update what scheduling needs: the progress of each row, including that of steps in flight.

        Steady-state decode needs none of it, so it is counted here and not in every step.
        """
        state = self._state
        # With nothing ahead, rows may have to leave for lack of blocks, and would lose what is not committed.
        if not num_ahead:
            self._commits.flush()
        state.num_unread_tokens.fill(0)
        state.num_uncommitted_tokens[:] = state.num_held_tokens
        self._commits.count(state.num_uncommitted_tokens)
        for step in self._in_flight:
            rows, decode_rows = step.rows, step.decode_rows
            is_live = step.live(state)
            if is_live is not None:
                decode_rows = decode_rows[is_live[len(rows) - len(decode_rows) :]]
                rows = rows[is_live]
            state.num_unread_tokens[rows] += 1
            state.num_uncommitted_tokens[decode_rows] += 1

    def _start(self, step: Step) -> _StepInFlight:
        state = self._state
        self._count(step)
        forwarded = self._runner.forward(step)
        rows = forwarded.rows
        all_rows = decode_rows = forwarded.decode_rows.astype(np.int64)
        drawn = None
        if len(rows):
            due = self._note_computed(forwarded)
            if len(due):
                drawn_rows, sources = self._scheduler.fork_siblings(rows[due])
                drawn = self._runner.sample(forwarded, due, drawn_rows, sources)
                all_rows = np.concatenate([drawn_rows, decode_rows])
        return _StepInFlight(
            all_rows,
            decode_rows,
            forwarded.decode_slots,
            forwarded.decode_step,
            len(decode_rows) > 0 and self._runner.decoder.needs_sampling_extras,
            drawn,
            state.generation[all_rows],
            state.num_cleared,
            self._record(),
        )

    def _note_computed(self, forwarded: Forwarded) -> NDArray[np.intp]:
        """Note what a step computes of prompts; returns the indices of rows that have their whole prompt then.

        Their commits are deferred, but for rows whose count must be exact at once: the next chunk of a prompt and
        siblings start at the manager's count, and rows with stop strings hold back generated tokens only.
        """
        rows, counts, state = forwarded.rows, forwarded.num_new_tokens, self._state
        is_due = self._manager.num_computed_tokens[rows] + counts == state.num_tokens[rows]
        can_defer = is_due & (state.num_siblings_to_fork[rows] == 0) & ~state.has_stop_strings[rows]
        self._commits.add(rows[can_defer], counts[can_defer])
        if np.count_nonzero(can_defer) < len(rows):
            is_now = ~can_defer
            token_ids = forwarded.token_ids[np.repeat(is_now, counts)]
            self._manager.commit(rows[is_now], counts[is_now], token_ids)
        return np.flatnonzero(is_due)

    def _start_again(self, last: _StepInFlight) -> _StepInFlight:
        """Start a step that repeats ``last``, in which all rows decode."""
        self.counters.steps += 1
        self.counters.computed_tokens += len(last.rows)
        decode_step = self._runner.decoder.enqueue_again()
        return _StepInFlight(
            last.rows,
            last.decode_rows,
            last.decode_slots,
            decode_step,
            last.needs_sampling_extras,
            None,
            last.generations,
            last.num_cleared,
            self._record(),
        )

    def _record(self) -> torch.cuda.Event | None:
        """Mark this place on the device."""
        if not self._events:
            return None
        event = self._events[self.counters.steps % len(self._events)]
        event.record(self._stream)
        return event

    def _read(self, step: _StepInFlight) -> tuple[Int64Array, SampledTokens]:
        self._wait(step)
        rows, decode_rows, drawn = step.rows, step.decode_rows, step.drawn
        token_ids = self._runner.decoder.tokens(step.decode_step, step.decode_slots)
        if drawn is not None:
            token_ids = np.concatenate([drawn.token_ids.numpy(), token_ids])
        logprobs = self._logprobs(step)
        is_live = step.live(self._state)
        if is_live is not None:
            decode_rows = decode_rows[is_live[len(rows) - len(decode_rows) :]]
            rows, token_ids = rows[is_live], token_ids[is_live]
            if logprobs is not None:
                logprobs = logprobs[is_live]
        if len(decode_rows):
            self._commits.add(decode_rows)
        return rows, SampledTokens(token_ids, logprobs)

    def _logprobs(self, step: _StepInFlight) -> LogprobWords | None:
        drawn = None if step.drawn is None else step.drawn.report
        if drawn is None and not step.needs_sampling_extras:
            return None
        decoded = self._runner.decoder.report(step.decode_step, step.decode_slots)
        if drawn is None:
            drawn = torch.zeros((len(step.rows) - len(step.decode_rows), decoded.shape[1]))
        return np.concatenate([drawn.numpy(), decoded])

    def _wait(self, step: _StepInFlight) -> None:
        if step.is_over is not None:
            step.is_over.synchronize()

    def _count(self, step: Step) -> None:
        rows, counts, counters, state = step.rows, step.num_new_tokens, self.counters, self._state
        counters.steps += 1
        counters.computed_tokens += int(counts.sum())
        start = self._manager.num_computed_tokens[rows] + state.num_uncommitted_tokens[rows]
        # Nearly all rows of nearly all steps compute a token that is neither the prompt's nor lost by a preemption.
        matters = np.flatnonzero(start < state.num_known_before[rows])
        if not len(matters):
            return
        rows, start = rows[matters], start[matters]
        end = start + counts[matters]
        again = np.minimum(end, np.maximum(start, state.num_computed_before[rows]))
        first_time = np.maximum(np.minimum(end, state.num_prompt_tokens[rows]) - again, 0)
        counters.recomputed_tokens += int((again - start).sum())
        counters.prompt_tokens_computed += int(first_time.sum())
