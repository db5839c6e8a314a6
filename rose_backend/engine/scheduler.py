"""Decides what the next step computes: which rows, how many tokens of each, who comes in and who has to wait."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rose_backend.block_manager import BlockManager, ClonePlan
from rose_backend.config import EngineConfig
from rose_backend.engine.request import Completion, RequestFactory
from rose_backend.engine.row_state import Int32Array, RowState
from rose_backend.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one forward pass. Rows with one new token lead."""

    rows: Int32Array  # [R]
    num_new_tokens: Int32Array  # [R]
    num_decodes: int
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

    def schedule(self) -> Step | None:
        """Reserve the next step's blocks and return its work; None when there is nothing to do."""
        rows, counts, was_short = self._reserve_running()
        if not was_short and self.waiting:
            rows, counts = self._admit(rows, counts)
        if not len(rows):
            if self.has_work:
                raise IntegrityError("the scheduler has requests but can neither run nor admit one")
            return None
        is_single = counts == 1
        num_decodes = int(np.count_nonzero(is_single))
        if not is_single[:num_decodes].all():
            order = np.argsort(~is_single, kind="stable")
            rows, counts = rows[order], counts[order]
        return Step(rows, counts, num_decodes, self._manager.take_clone_plan())

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
        self._manager.free(rows)
        self._running = self._running[~np.isin(self._running, rows)]
        self._num_promised_rows -= int(self._rows.num_siblings_to_fork[rows].sum())
        self._rows.num_siblings_to_fork[rows] = 0
        return [self._rows.clear(row) for row in rows.tolist()]

    def _reserve_running(self) -> tuple[Int32Array, Int32Array, bool]:
        was_short = False
        while True:
            rows, counts = self._pick_running()
            if not len(rows) or self._manager.reserve(rows, counts).ok:
                return rows, counts, was_short
            if len(self._running) == 1:
                raise IntegrityError("the block pool cannot serve its only sequence")
            self._preempt_newest()
            was_short = True

    def _pick_running(self) -> tuple[Int32Array, Int32Array]:
        running, budget = self._running, self._max_num_batched_tokens
        remaining = self._rows.num_tokens[running] - self._manager.num_computed_tokens[running]
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
        while self.waiting and budget > 0:
            completion = self.waiting[0]
            if self._blocked is not None and not self._may_retry(completion):
                break
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

    def _may_retry(self, completion: Completion) -> bool:
        assert self._blocked is not None
        blocked, num_free_blocks = self._blocked
        if blocked is completion and len(self._running) and self._manager.num_free_blocks <= num_free_blocks:
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
