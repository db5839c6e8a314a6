"""Decides what the next step computes: which rows, how many tokens of each, who comes in and who has to wait."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rose_backend.block_manager import BlockManager, ClonePlan
from rose_backend.config import EngineConfig
from rose_backend.engine.admission import Admission
from rose_backend.engine.late_commits import LateCommits
from rose_backend.engine.request import Completion
from rose_backend.engine.request_factory import RequestFactory
from rose_backend.engine.row_state import Int32Array, RowState
from rose_backend.engine.spare_blocks import TOP_UP_STEPS, reserve_ahead, top_up
from rose_backend.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one step. Rows with one new token lead."""

    rows: Int32Array  # [R]
    num_new_tokens: Int32Array  # [R]
    num_decodes: int
    """The first so many rows compute their newest token and draw the next."""
    clone_plan: ClonePlan | None


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

    With ``prompts_first``, for where nobody waits for single tokens, decodes sit out steps full of prompts. The more
    rows begin together, the fewer steps have only some of them: at the start, and, as texts end together, at the end.

    A request with ``n`` completions comes in when ``n`` rows are free for it: the first computes the prompt, the others
    get their rows when it has (``fork_siblings``).
    """

    def __init__(
        self,
        config: EngineConfig,
        manager: BlockManager,
        rows: RowState,
        commits: LateCommits,
        factory: RequestFactory,
        *,
        prompts_first: bool = False,
        min_tokens_worth_waiting: int | None = None,
    ) -> None:
        self.counters = SchedulerCounters()
        self._admission = Admission(config, manager, rows, commits, min_tokens_worth_waiting)
        self.waiting = self._admission.waiting
        self._manager = manager
        self._rows = rows
        self._commits = commits
        self._factory = factory
        self.splits_prompts = config.chunked_prefill
        self._prompts_first = prompts_first
        self.token_budget = config.token_budget
        """Tokens that the next step may compute; may be changed between steps."""
        self._running: Int32Array = np.empty(0, np.int32)
        # How many steps may be just like the last one: nobody came or went, and everybody has room.
        self._num_repeats = 0
        self._may_be_short = True  # of blocks, some row when the last one is over

    @property
    def running_rows(self) -> Int32Array:
        """Rows in use, oldest first."""
        return self._running

    @property
    def num_decoding(self) -> int:
        """Running rows whose text has begun."""
        state, running = self._rows, self._running
        return int(np.count_nonzero(state.num_tokens[running] > state.num_prompt_tokens[running]))

    @property
    def has_work(self) -> bool:
        """Whether anything runs or waits."""
        return bool(len(self._running) or self.waiting)

    def repeat(self) -> bool:
        """Whether the next step is just like the last one: the same rows, all of them decodes, nothing else to know."""
        if self._num_repeats <= 0 or self._admission.may_admit(len(self._running)):
            self._num_repeats = 0
            return False
        self._num_repeats -= 1
        return True

    def top_up(self) -> None:
        """Take some blocks that running rows will soon need. Call it in every step, right before the host waits."""
        if self._may_be_short and 0 < self._num_repeats <= TOP_UP_STEPS:
            self._may_be_short = top_up(self._manager, self._rows, self._running, self._num_repeats)

    def schedule(self, num_in_flight: int = 0) -> Step | None:
        """Reserve the next step's blocks and return its work. What was read is committed.

        Args:
            num_in_flight: steps whose outcome has not been read, and texts that may turn out to have ended. What
                those steps will have done counts as done.

        Returns:
            None when there is nothing to do, or nothing before a step in flight has been read.
        """
        picked = self._reserve_running(may_preempt=not num_in_flight)
        if picked is None:
            return None
        rows, counts, was_short = picked
        if not was_short and self.waiting:
            rows, counts = self._let_in(rows, counts)
        if not len(rows):
            if self.has_work and not num_in_flight:
                raise IntegrityError("the scheduler has requests but can neither run nor admit one")
            return None
        if self._prompts_first:
            rows, counts = self._let_decodes_sit_out(rows, counts)
        step = self._make_step(rows, counts)
        self._num_repeats = self._count_repeats(step)
        self._may_be_short = True
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

    def set_aside(self, rows: Int32Array) -> None:
        """Run these rows no more. They keep what they hold until ``release``; tokens in flight for them are dropped."""
        self._num_repeats = 0
        self._running = self._running[~np.isin(self._running, rows)]
        self._rows.generation[rows] += 1
        self._rows.num_cleared += len(rows)

    def release(self, rows: Int32Array) -> list[Completion]:
        """Free rows; returns their completions, each with the tokens it has so far."""
        self._num_repeats = 0
        self._commits.flush(rows)
        self._manager.free(rows)
        self._running = self._running[~np.isin(self._running, rows)]
        self._admission.num_promised_rows -= int(self._rows.num_siblings_to_fork[rows].sum())
        self._rows.num_siblings_to_fork[rows] = 0
        return self._rows.clear(rows)

    def _let_decodes_sit_out(self, rows: Int32Array, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Leave decodes out of a step half of whose tokens, or more, are prompts'."""
        is_decode = self._is_decode(rows, counts)
        if 2 * int(counts[~is_decode].sum()) < self.token_budget:
            return rows, counts
        return rows[~is_decode], counts[~is_decode]

    def _is_decode(self, rows: Int32Array, counts: Int32Array) -> NDArray[np.bool_]:
        """Return which of ``rows`` add a token to a text that has begun."""
        has_begun = self._rows.num_planned_tokens(rows) > self._rows.num_prompt_tokens[rows]
        return (counts == 1) & has_begun

    def _budget_left(self, rows: Int32Array, counts: Int32Array) -> int:
        """Return how many more prompt tokens fit into a step of these.

        Decodes that may sit out take no room: prompts fill half of the step, or there is some for both.
        """
        budget = self.token_budget - int(counts.sum())
        if self._prompts_first:
            num_decodes = int(np.count_nonzero(self._is_decode(rows, counts)))
            budget += num_decodes if 2 * num_decodes <= self.token_budget else 0
        return budget

    def _make_step(self, rows: Int32Array, counts: Int32Array) -> Step:
        is_decode = (counts == 1) & (self._num_remaining(rows) == 1)
        # Siblings draw from the same distribution, which a decode step does not keep.
        is_decode &= self._rows.num_siblings_to_fork[rows] == 0
        num_decodes = int(np.count_nonzero(is_decode))
        if num_decodes < len(rows):
            order = np.argsort((counts > 1) * 2 + ~is_decode, kind="stable")
            rows, counts = rows[order], counts[order]
        return Step(rows, counts, num_decodes, self._manager.take_clone_plan())

    def _count_repeats(self, step: Step) -> int:
        """Return how many more steps would be planned just as this one if nobody comes or goes."""
        rows = step.rows
        if step.num_decodes < len(self._running):
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
            if not len(rows) or reserve_ahead(self._manager, self._rows, rows, ahead):
                return rows, counts, was_short
            if not may_preempt:
                # A step in flight may end a sequence; whoever is preempted would lose the tokens it draws.
                return None
            if len(self._running) == 1:
                raise IntegrityError("the block pool cannot serve its only sequence")
            self._preempt_newest()
            was_short = True

    def _pick_running(self) -> tuple[Int32Array, Int32Array]:
        running, remaining = self._can_go_on()
        budget = self.token_budget
        is_single = remaining == 1
        if is_single.all():
            return running[:budget], remaining[:budget]
        singles = running[is_single][:budget]
        ones = np.ones(len(singles), np.int32)
        budget = self._budget_left(singles, ones)
        chunked, remaining = running[~is_single], remaining[~is_single]
        counts = np.clip(budget - (np.cumsum(remaining) - remaining), 0, remaining).astype(np.int32)
        fits = counts > 0
        counts = np.concatenate([ones, counts[fits]])
        return np.concatenate([singles, chunked[fits]]), counts

    def _can_go_on(self) -> tuple[Int32Array, Int32Array]:
        """Return the running rows but those that wait for a step in flight to be read, and what remains of each."""
        state, running = self._rows, self._running
        is_unread = state.num_unread_tokens[running] > 0
        remaining = self._num_remaining(running)
        if not np.count_nonzero(is_unread):
            return running, remaining
        # Either the last token is on its way, or the newest one can be had from nowhere else.
        waits = is_unread & ~state.is_on_device[running]
        waits |= state.num_planned_tokens(running) >= state.max_num_tokens[running]
        if not np.count_nonzero(waits):
            return running, remaining
        return running[~waits], remaining[~waits]

    def _preempt_newest(self) -> None:
        row = self._running[-1:]
        num_computed = int(self._manager.num_computed_tokens[row[0]])
        completion = self.release(row)[0]
        completion.num_computed_before = max(completion.num_computed_before, num_computed)
        self.waiting.appendleft(completion)
        self.counters.preemptions += 1

    def _let_in(self, rows: Int32Array, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
        budget = self._budget_left(rows, counts)
        new_rows, new_counts, num_cached = self._admission.admit(budget, len(self._running))
        self.counters.cached_tokens += num_cached
        self._running = np.concatenate([self._running, new_rows])
        return np.concatenate([rows, new_rows]), np.concatenate([counts, new_counts])

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
        self._admission.num_promised_rows -= num_children
        for index, row in enumerate(children.tolist(), start=1):
            sibling = self._factory.make_completion(parent.request, index, parent.seed)
            parent.request.completions.append(sibling)
            self._rows.fill(row, sibling)
        self._running = np.concatenate([self._running, children])
        return children
