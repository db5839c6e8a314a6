"""The queue of requests, and which of them are admitted: prefix lookup, a row, room for the first chunk."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import numpy as np

from rose_backend.block_manager import BlockManager
from rose_backend.config import EngineConfig
from rose_backend.engine.request import Completion
from rose_backend.engine.scheduling.deferred_commit import DeferredCommits
from rose_backend.engine.sequence_state import Int32Array, SequenceState
from rose_backend.errors import IntegrityError
from rose_backend.scheduling.in_flight_prefixes import InFlightPrefixes

_ARRIVALS_PER_ROW = 1 / 32
"""Share of all rows that must be free before requests of a long queue are admitted; see ``Admission.may_admit``."""


class _Candidate(NamedTuple):
    """Has a row and the blocks that the prefix cache supplies, but no new ones yet."""

    completion: Completion
    row: int
    num_tokens: int
    """That its first step computes."""
    num_cached_tokens: int
    num_new_blocks: int
    """That its whole sequence needs."""


class _Deferred(NamedTuple):
    """Waits for a prefix that another prompt of this step computes. Its rows and blocks are kept for it."""

    num_rows: int
    num_blocks: int


class Admission:
    """First come, first served: no request overtakes one that waits for rows or blocks.

    A request is deferred to the next step when another one in this step computes a prefix that both share. Its row and
    blocks stay reserved while requests behind it are admitted.
    """

    def __init__(
        self,
        config: EngineConfig,
        manager: BlockManager,
        rows: SequenceState,
        commits: DeferredCommits,
        min_tokens_worth_waiting: int | None = None,
    ) -> None:
        self.waiting: deque[Completion] = deque()
        self.num_reserved_rows = 0
        """Free rows that are reserved for siblings of running completions."""
        self._manager = manager
        self._rows = rows
        self._commits = commits
        self._chunked_prefill = config.chunked_prefill
        self._min_arrivals = int(config.max_num_seqs * _ARRIVALS_PER_ROW)
        # Admission costs a prefix lookup: after a failure it is not tried again before something has been freed.
        self._blocked: tuple[Completion, int] | None = None
        self._in_flight_prefixes = InFlightPrefixes(manager, min_tokens_worth_waiting)

    def may_admit(self, num_running: int) -> bool:
        """Whether to look for rows and blocks for the first in the queue.

        Where more requests wait than there are rows, several are admitted together: a pass over one short prompt takes
        the device half as long as one over eight.
        """
        min_free_rows = min(self._min_arrivals, len(self.waiting))
        if self._manager.num_free_rows < min_free_rows and num_running:
            return False
        return self._may_admit_one(num_running)

    def _may_admit_one(self, num_running: int) -> bool:
        if not self.waiting or not self._manager.num_free_rows:
            return False
        if self._blocked is None:
            return True
        blocked, num_free_blocks = self._blocked
        if blocked is self.waiting[0] and num_running and self._manager.num_free_blocks <= num_free_blocks:
            return False
        self._blocked = None
        return True

    def admit(self, budget: int, num_running: int) -> tuple[Int32Array, Int32Array, int]:
        """Admit as many requests as there is room for.

        Args:
            budget: tokens that they may compute in the next step.
            num_running: rows in use.

        Returns:
            ``[N]`` the new rows, ``[N]`` how many tokens of each the next step computes, and how many tokens the prefix
            cache has supplied to requests that got their first row.
        """
        candidates: list[_Candidate] = []
        deferred: list[Completion] = []
        self._in_flight_prefixes.new_step_starts()
        num_reserved_blocks = num_reserved_rows = 0
        if not self.may_admit(num_running):
            budget = 0
        while budget > 0 and self._may_admit_one(num_running + len(candidates)):
            is_first = not num_running and not candidates
            picked = self._pick(
                self.waiting[0], budget, num_reserved_blocks, num_reserved_rows, is_first=is_first
            )
            if picked is None:
                break
            completion = self.waiting.popleft()
            if isinstance(picked, _Deferred):
                deferred.append(completion)
                num_reserved_blocks += picked.num_blocks
                num_reserved_rows += picked.num_rows
                continue
            candidates.append(picked)
            budget -= picked.num_tokens
            num_reserved_blocks += picked.num_new_blocks
        served = self._reserve_first_chunks(candidates)
        self.waiting.extendleft(reversed(deferred))
        return self._assign_rows(served)

    def _pick(
        self,
        completion: Completion,
        budget: int,
        num_reserved_blocks: int,
        num_reserved_rows: int,
        *,
        is_first: bool,
    ) -> _Candidate | _Deferred | None:
        """Give ``completion`` a row for a first chunk of at most ``budget`` tokens, or change nothing.

        Args:
            num_reserved_blocks: free blocks that others are going to take.
            num_reserved_rows: free rows that are kept for those that were passed over.
            is_first: no row runs, so waiting would free nothing.

        Returns:
            None: neither it nor any request behind it can be admitted.
        """
        manager, token_ids = self._manager, completion.token_ids
        num_rows = 1 + completion.num_siblings_to_fork
        if manager.num_free_rows - self.num_reserved_rows - num_reserved_rows < num_rows:
            return None
        namespace = completion.request.namespace
        self._commits.flush_for(token_ids, namespace)
        match = manager.match(token_ids, namespace=namespace)
        num_remaining = len(token_ids) - match.num_tokens
        # No half prompt overtakes a deferred request: the rest of it would delay that one in later steps.
        if num_remaining > budget and (num_reserved_rows or not self._chunked_prefill):
            return None
        # The whole sequence has to fit, not only its first chunk, or it would be preempted before it is of use.
        spare = 0 if is_first else manager.num_usable_blocks // 100
        num_free_blocks = manager.num_free_blocks
        num_needed = manager.blocks_needed(match, len(token_ids))
        fits = is_first or num_needed + spare <= num_free_blocks - num_reserved_blocks
        if self._in_flight_prefixes.cover(token_ids, match):
            # In the next step the cache may supply the blocks it lacks now.
            return _Deferred(num_rows, num_needed) if fits else None
        if not fits:
            self._blocked = (completion, num_free_blocks - num_reserved_blocks)
            return None
        self._in_flight_prefixes.add(token_ids, match, min(num_remaining, budget))
        admission = manager.add(token_ids, namespace=namespace, match=match)
        if admission is None:
            raise IntegrityError("the block manager has a free row but did not hand it out")
        self.num_reserved_rows += completion.num_siblings_to_fork
        return _Candidate(
            completion,
            admission.row,
            min(num_remaining, budget),
            admission.num_cached_tokens,
            num_needed - (num_free_blocks - manager.num_free_blocks),
        )

    def _reserve_first_chunks(self, candidates: list[_Candidate]) -> list[_Candidate]:
        """Reserve the blocks of all first chunks at once; requests without blocks go back to the front of the queue."""
        if not candidates or self._reserve(candidates):
            return candidates
        num_served = 0
        while num_served < len(candidates) and self._reserve(candidates[num_served : num_served + 1]):
            num_served += 1
        for candidate in reversed(candidates[num_served:]):
            self._manager.free(np.array([candidate.row]))
            self.num_reserved_rows -= candidate.completion.num_siblings_to_fork
            self.waiting.appendleft(candidate.completion)
        self._blocked = (self.waiting[0], self._manager.num_free_blocks)
        return candidates[:num_served]

    def _reserve(self, candidates: list[_Candidate]) -> bool:
        rows = np.array([candidate.row for candidate in candidates])
        return self._manager.reserve(rows, np.array([each.num_tokens for each in candidates])).ok

    def _assign_rows(self, candidates: list[_Candidate]) -> tuple[Int32Array, Int32Array, int]:
        num_cached_tokens, now = 0, time.monotonic()
        for candidate in candidates:
            self._rows.fill(candidate.row, candidate.completion)
            request = candidate.completion.request
            if request.num_cached_tokens is None:
                request.num_cached_tokens = candidate.num_cached_tokens
                request.scheduled_s = now
                num_cached_tokens += candidate.num_cached_tokens
        rows = np.array([candidate.row for candidate in candidates], np.int32)
        return rows, np.array([candidate.num_tokens for candidate in candidates], np.int32), num_cached_tokens
