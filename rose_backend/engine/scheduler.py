"""Decides what the next step computes: which rows, how many tokens of each, who comes in and who has to wait."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rose_backend.block_manager import BlockManager, ClonePlan
from rose_backend.config import EngineConfig
from rose_backend.engine.request import Completion, RequestFactory
from rose_backend.engine.row_state import Int32Array, RowState
from rose_backend.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one step. Rows with one new token lead."""

    rows: Int32Array  # [R]
    num_new_tokens: Int32Array  # [R]
    num_decodes: int
    """The first so many rows compute their newest token and draw the next."""
    clone_plan: ClonePlan | None
    is_synchronous: bool
    """A row's draw needs what only the host can make: the step's outcome is read before the next one is planned."""
    is_repeat: bool = False
    """The same rows as in the step before, all of them decodes, with nothing to tell the device."""


@dataclass(slots=True)
class SchedulerCounters:
    """Counted since the start."""

    preemptions: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache supplied when a request first got a row."""


class Scheduler:
    """Continuous batching: decodes first, then prompts in order of arrival, under one token budget.

    Running rows are kept in the order in which they came in. When the pool runs short, the newest row goes back to the
    front of the queue and is computed again later; the oldest therefore always finishes, and nothing can lock up.

    A request with ``n`` completions comes in when ``n`` rows are free for it: the first computes the prompt, the others
    get their rows when it has (``fork_siblings``).
    """

    def __init__(
        self, config: EngineConfig, manager: BlockManager, rows: RowState, factory: RequestFactory
    ) -> None:
        self.waiting: deque[Completion] = deque()
        self.counters = SchedulerCounters()
        self._manager = manager
        self._rows = rows
        self._factory = factory
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._chunked_prefill = config.chunked_prefill
        self._running: Int32Array = np.empty(0, np.int32)
        self._num_promised_rows = 0
        # The last step, and how often it may be handed out again: nobody came or went, and everybody has room.
        self._again: Step | None = None
        self._num_repeats = 0
        # Admission costs a prefix lookup: after a failure it is not tried again before something has been freed.
        self._blocked: tuple[Completion, int] | None = None

    @property
    def running_rows(self) -> Int32Array:
        """Rows in use, oldest first."""
        return self._running

    @property
    def has_work(self) -> bool:
        """Whether anything runs or waits."""
        return bool(len(self._running) or self.waiting)

    def schedule(self, num_in_flight: int = 0) -> Step | None:
        """Reserve the next step's blocks and return its work.

        Args:
            num_in_flight: steps whose outcome has not been read. What they will have done counts as done.

        Returns:
            None when there is nothing to do, or nothing before a step in flight has been read.
        """
        if self._num_repeats > 0 and not self._may_admit():
            self._num_repeats -= 1
            return self._again
        self._num_repeats = 0
        is_synchronous = bool(np.count_nonzero(self._needs_host(self._running)))
        if is_synchronous and num_in_flight:
            return None
        picked = self._reserve_running(may_preempt=not num_in_flight)
        if picked is None:
            return None
        rows, counts, was_short = picked
        if not was_short and self.waiting:
            rows, counts = self._admit(rows, counts)
        if not len(rows):
            if self.has_work and not num_in_flight:
                raise IntegrityError("the scheduler has requests but can neither run nor admit one")
            return None
        step = self._make_step(rows, counts, is_synchronous)
        self._again = replace(step, clone_plan=None, is_repeat=True)
        self._num_repeats = self._count_repeats(step)
        return step

    def fork_siblings(self, rows: Int32Array) -> tuple[Int32Array, NDArray[np.intp]]:
        """Split off the siblings of those rows that have just computed their prompt.

        Args:
            rows: ``[S]`` rows whose next token is due.

        Returns:
            ``[S']`` the rows, followed by the new ones, and ``[S']`` for each the index in ``rows`` it descends from.
        """
        sources = np.arange(len(rows))
        parents = np.flatnonzero(self._rows.num_siblings_to_fork[rows])
        for parent in parents.tolist():
            children = self._fork(int(rows[parent]))
            rows = np.concatenate([rows, children])
            sources = np.concatenate([sources, np.full(len(children), parent)])
        return rows, sources

    def release(self, rows: Int32Array) -> list[Completion]:
        """Free rows; returns their completions, each with the tokens it has so far."""
        self._num_repeats = 0
        self._manager.free(rows)
        self._running = self._running[~np.isin(self._running, rows)]
        self._num_promised_rows -= int(self._rows.num_siblings_to_fork[rows].sum())
        self._rows.num_siblings_to_fork[rows] = 0
        return [self._rows.clear(row) for row in rows.tolist()]

    def _needs_host(self, rows: Int32Array) -> NDArray[np.bool_]:
        state = self._rows
        needs: NDArray[np.bool_] = state.needs_host[rows]
        return needs | (state.num_planned_tokens(rows) < state.min_num_tokens[rows])

    def _make_step(self, rows: Int32Array, counts: Int32Array, is_synchronous: bool) -> Step:
        is_decode = (counts == 1) & (self._num_remaining(rows) == 1)
        # Who comes in with siblings, or needs the host, draws from a distribution that a decode step does not show.
        is_decode &= (self._rows.num_siblings_to_fork[rows] == 0) & ~self._needs_host(rows)
        num_decodes = int(np.count_nonzero(is_decode))
        if num_decodes < len(rows):
            order = np.argsort((counts > 1) * 2 + ~is_decode, kind="stable")
            rows, counts = rows[order], counts[order]
        return Step(rows, counts, num_decodes, self._manager.take_clone_plan(), is_synchronous)

    def _count_repeats(self, step: Step) -> int:
        """Return how many more steps would be planned just as this one if nobody comes or goes."""
        rows = step.rows
        if step.is_synchronous or step.num_decodes < len(self._running):
            return 0
        planned = self._rows.num_planned_tokens(rows)
        room = np.minimum(self._rows.max_num_tokens[rows], self._manager.table.capacity[rows] + 1) - planned
        return int(room.min()) - 1

    def _num_remaining(self, rows: Int32Array) -> Int32Array:
        """Return how many tokens of each row are still to be computed when every step in flight is over."""
        state = self._rows
        num_computed = self._manager.num_computed_tokens[rows] + state.num_uncommitted_tokens[rows]
        remaining: Int32Array = state.num_planned_tokens(rows) - num_computed
        return remaining

    def _reserve_running(self, *, may_preempt: bool) -> tuple[Int32Array, Int32Array, bool] | None:
        was_short = False
        while True:
            rows, counts = self._pick_running()
            ahead = counts + self._rows.num_uncommitted_tokens[rows]
            if not len(rows) or self._manager.reserve(rows, ahead).ok:
                return rows, counts, was_short
            if not may_preempt:
                # A step in flight may end a sequence; whoever is preempted would lose the tokens it draws.
                return None
            if len(self._running) == 1:
                raise IntegrityError("the block pool cannot serve its only sequence")
            self._preempt_newest()
            was_short = True

    def _pick_running(self) -> tuple[Int32Array, Int32Array]:
        running, budget = self._can_go_on(), self._max_num_batched_tokens
        remaining = self._num_remaining(running)
        is_single = remaining == 1
        if is_single.all():
            return running[:budget], remaining[:budget]
        singles = running[is_single][:budget]
        budget -= len(singles)
        chunked, remaining = running[~is_single], remaining[~is_single]
        counts = np.clip(budget - (np.cumsum(remaining) - remaining), 0, remaining).astype(np.int32)
        fits = counts > 0
        counts = np.concatenate([np.ones(len(singles), np.int32), counts[fits]])
        return np.concatenate([singles, chunked[fits]]), counts

    def _can_go_on(self) -> Int32Array:
        """Return the running rows but those that wait for a step in flight to be read."""
        state, running = self._rows, self._running
        if not np.count_nonzero(state.num_unread_tokens[running]):
            return running
        # Either the last token is on its way, or the newest one can be had from nowhere else.
        waits = state.num_planned_tokens(running) >= state.max_num_tokens[running]
        waits |= (state.num_unread_tokens[running] > 0) & ~state.is_on_device[running]
        return running[~waits]

    def _preempt_newest(self) -> None:
        row = self._running[-1:]
        num_computed = int(self._manager.num_computed_tokens[row[0]])
        completion = self.release(row)[0]
        completion.num_computed_before = max(completion.num_computed_before, num_computed)
        self.waiting.appendleft(completion)
        self.counters.preemptions += 1

    def _admit(self, rows: Int32Array, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
        budget = self._max_num_batched_tokens - int(counts.sum())
        new_rows: list[int] = []
        new_counts: list[int] = []
        while budget > 0 and self._may_admit():
            completion = self.waiting[0]
            admitted = self._try_admit(completion, budget)
            if admitted is None:
                break
            self.waiting.popleft()
            new_rows.append(admitted[0])
            new_counts.append(admitted[1])
            budget -= admitted[1]
            self._running = np.append(self._running, np.int32(admitted[0]))
        if not new_rows:
            return rows, counts
        return (
            np.concatenate([rows, np.array(new_rows, np.int32)]),
            np.concatenate([counts, np.array(new_counts, np.int32)]),
        )

    def _may_admit(self) -> bool:
        """Whether it makes sense to look for a row and blocks for the first in the queue."""
        if not self.waiting or not self._manager.num_free_rows:
            return False
        if self._blocked is None:
            return True
        blocked, num_free_blocks = self._blocked
        if (
            blocked is self.waiting[0]
            and len(self._running)
            and self._manager.num_free_blocks <= num_free_blocks
        ):
            return False
        self._blocked = None
        return True

    def _try_admit(self, completion: Completion, budget: int) -> tuple[int, int] | None:
        """Give ``completion`` a row and room for its first chunk, of at most ``budget`` tokens, or change nothing."""
        manager, token_ids = self._manager, completion.token_ids
        if manager.num_free_rows - self._num_promised_rows < 1 + completion.num_siblings_to_fork:
            return None
        match = manager.match(token_ids)
        num_remaining = len(token_ids) - match.num_tokens
        if not self._chunked_prefill and num_remaining > budget:
            return None
        # The whole sequence has to fit, not only its first chunk, or it would be preempted before it is of use.
        spare = manager.num_usable_blocks // 100 if len(self._running) else 0
        if (
            len(self._running)
            and manager.blocks_needed(match, len(token_ids)) + spare > manager.num_free_blocks
        ):
            self._blocked = (completion, manager.num_free_blocks)
            return None
        admission = manager.add(token_ids, match=match)
        if admission is None:
            raise IntegrityError("the block manager has a free row but did not hand it out")
        row, count = admission.row, min(num_remaining, budget)
        if not manager.reserve(np.array([row]), count).ok:
            manager.free(np.array([row]))
            self._blocked = (completion, manager.num_free_blocks)
            return None
        self._num_promised_rows += completion.num_siblings_to_fork
        self._rows.fill(row, completion)
        if completion.request.num_cached_tokens is None:
            completion.request.num_cached_tokens = admission.num_cached_tokens
            self.counters.cached_tokens += admission.num_cached_tokens
        return row, count

    def _fork(self, parent_row: int) -> Int32Array:
        self._num_repeats = 0
        parent = self._rows.completions[parent_row]
        assert parent is not None, f"row {parent_row} holds no completion"
        num_children = int(self._rows.num_siblings_to_fork[parent_row])
        children = self._manager.fork(parent_row, num_children)
        if children is None:
            raise IntegrityError(f"{num_children} rows were set aside for a request but are not free")
        self._rows.num_siblings_to_fork[parent_row] = 0
        parent.num_siblings_to_fork = 0
        self._num_promised_rows -= num_children
        for index, row in enumerate(children.tolist(), start=1):
            sibling = self._factory.make_completion(parent.request, index, parent.seed)
            parent.request.completions.append(sibling)
            self._rows.fill(row, sibling)
        self._running = np.concatenate([self._running, children])
        return children
