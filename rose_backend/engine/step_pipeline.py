"""Steps in flight: the host plans and starts the next ones before it reads what the present one has drawn."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.block_manager import BlockManager
from rose_backend.engine.model_runner import Drawn, Forwarded, ModelRunner, SampledTokens
from rose_backend.engine.row_state import Int32Array, RowState
from rose_backend.engine.scheduler import Scheduler, Step


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """A step that was started and not read."""

    forwarded: Forwarded
    drawn_rows: Int32Array  # [S], drew behind their prompt
    drawn: Drawn | None
    rows: Int32Array  # [S + D], drawn_rows and the decode rows
    generations: NDArray[np.int64]  # [S + D], when the step was started
    num_cleared: int  # then
    is_over: torch.cuda.Event | None


@dataclass(slots=True)
class StepCounters:
    """Counted since the start; names as in ``EngineStats``."""

    steps: int = 0
    computed_tokens: int = 0
    prompt_tokens_computed: int = 0
    recomputed_tokens: int = 0


class StepPipeline:
    """Starts steps and reads them in order.

    A token drawn on the device is the input of the next step there; the host reads it later. So the device never waits
    for the host while everybody just goes on. What the host decides late takes effect late, but exactly: a row that
    has ended at some token takes part in up to ``depth`` more steps, and nothing those draw for it is shown, committed
    or found by a lookup. The blocks that such a step writes are free by then and may have a new owner, whose own writes
    are enqueued behind it.

    Blocks become findable when their tokens are known and every reader is ordered behind their writer: prompts when the
    step is enqueued, drawn tokens when they are read.

    Args:
        depth: steps that may be in flight behind the one that is read; 0 reads each step before the next is planned.
    """

    def __init__(
        self,
        manager: BlockManager,
        state: RowState,
        scheduler: Scheduler,
        runner: ModelRunner,
        device: torch.device,
        depth: int,
    ) -> None:
        self.counters = StepCounters()
        self._manager = manager
        self._state = state
        self._scheduler = scheduler
        self._runner = runner
        self._has_events = device.type != "cpu"
        self._depth = depth
        self._in_flight: deque[_StepInFlight] = deque()

    def advance(self) -> tuple[Int32Array, SampledTokens] | None:
        """Start a step if there is one to start, and read the oldest one if it is its turn.

        Returns:
            Rows whose next token is known now, and those tokens; None when no step was read.
        """
        step = self._scheduler.schedule(len(self._in_flight))
        if step is not None:
            self._in_flight.append(self._start(step))
            if len(self._in_flight) <= self._depth and not step.is_synchronous:
                return None
        return self._read(self._in_flight.popleft()) if self._in_flight else None

    def drop(self) -> None:
        """Forget the steps in flight: nobody is left whom they concern."""
        self._in_flight.clear()

    def _start(self, step: Step) -> _StepInFlight:
        state, manager = self._state, self._manager
        self._count(step)
        forwarded = self._runner.forward(step)
        rows = forwarded.rows
        drawn_rows, drawn = np.empty(0, np.int32), None
        if len(rows):
            manager.commit(rows, forwarded.num_new_tokens, forwarded.token_ids)
            due = np.flatnonzero(manager.num_computed_tokens[rows] == state.num_tokens[rows])
            if len(due):
                drawn_rows, sources = self._scheduler.fork_siblings(rows[due])
                drawn = self._runner.sample(forwarded, due, drawn_rows, sources)
        decode_rows = forwarded.decode_rows
        all_rows = np.concatenate([drawn_rows, decode_rows]) if len(drawn_rows) else decode_rows
        state.num_unread_tokens[all_rows] += 1
        state.num_uncommitted_tokens[decode_rows] += 1
        is_over = None
        if self._has_events:
            is_over = torch.cuda.Event()
            is_over.record()
        generations = state.generation[all_rows]
        return _StepInFlight(forwarded, drawn_rows, drawn, all_rows, generations, state.num_cleared, is_over)

    def _read(self, step: _StepInFlight) -> tuple[Int32Array, SampledTokens]:
        self._wait(step)
        state, forwarded, drawn_rows, drawn = self._state, step.forwarded, step.drawn_rows, step.drawn
        decode_rows = forwarded.decode_rows
        token_ids = np.empty(0, np.int64)
        if len(decode_rows):
            token_ids = self._runner.decoder.tokens(forwarded.decode_step, forwarded.decode_slots)
        if drawn is not None:
            token_ids = np.concatenate([drawn.token_ids.numpy(), token_ids])
        rows, logprobs = step.rows, None if drawn is None else drawn.logprobs
        if step.num_cleared != state.num_cleared:
            is_live = state.generation[rows] == step.generations
            decode_rows = decode_rows[is_live[len(drawn_rows) :]]
            rows, token_ids = rows[is_live], token_ids[is_live]
            if logprobs is not None:
                logprobs = logprobs.select(is_live[: len(drawn_rows)])
        if len(decode_rows):
            num_computed = self._manager.num_computed_tokens[decode_rows]
            self._manager.commit(decode_rows, 1, state.token_ids[decode_rows, num_computed])
            state.num_uncommitted_tokens[decode_rows] -= 1
        state.num_unread_tokens[rows] -= 1
        return rows, SampledTokens(token_ids, logprobs)

    def _wait(self, step: _StepInFlight) -> None:
        if step.is_over is not None:
            step.is_over.synchronize()

    def _count(self, step: Step) -> None:
        rows, counters, state = step.rows, self.counters, self._state
        counters.steps += 1
        if step.is_repeat:
            counters.computed_tokens += len(rows)
            return
        start = self._manager.num_computed_tokens[rows] + state.num_uncommitted_tokens[rows]
        end = start + step.num_new_tokens
        again = np.minimum(end, np.maximum(start, state.num_computed_before[rows]))
        first_time = np.maximum(np.minimum(end, state.num_prompt_tokens[rows]) - again, 0)
        counters.computed_tokens += int(step.num_new_tokens.sum())
        counters.recomputed_tokens += int((again - start).sum())
        counters.prompt_tokens_computed += int(first_time.sum())
