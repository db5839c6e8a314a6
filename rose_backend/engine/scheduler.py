"""Decides what the next step computes: which request slots, how many tokens of each, which requests are admitted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rose_backend.block_manager import BlockManager, ClonePlan, PrefixMatch
from rose_backend.config import EngineConfig
from rose_backend.engine.drafts import max_drafted_rows
from rose_backend.engine.outputs import EngineStats
from rose_backend.engine.request import Completion, InputProcessor
from rose_backend.engine.sequence_state import DeferredCommits, Int32Array, SequenceState
from rose_backend.engine.turns import (
    Shortage,
    WaitingQueue,
    choose_victims,
    counts_as_overtaking,
    num_held_with,
    split_tokens,
)
from rose_backend.errors import IntegrityError
from rose_backend.scheduling import (
    MAX_PROMPT_TOKENS_AMONG_DECODES,
    TOP_UP_STEPS,
    InFlightPrefixes,
    reserve_ahead,
    top_up,
)

_ARRIVALS_PER_SLOT = 1 / 32
"""Share of all request slots that must be free before a long queue is admitted; see ``Admission.may_admit``."""


class _Candidate(NamedTuple):
    """A completion about to be admitted: it has a request slot and its cached blocks, but no new blocks yet."""

    completion: Completion
    slot: int
    num_tokens: int
    """Tokens that its first step computes."""
    num_cached_tokens: int
    num_new_blocks: int
    """Blocks that its whole sequence needs in addition."""


class _Deferred(NamedTuple):
    """What is kept free for a completion that waits for a prefix which another prompt of this step computes."""

    num_slots: int
    num_blocks: int


class _Turn(NamedTuple):
    """A completion whose tenant is next, and those to be preempted to make room for it."""

    completion: Completion
    victims: list[Completion]


class Admission:
    """First come, first served: no request overtakes one that waits for slots or blocks.

    Where several tenants wait or hold slots, they take turns instead, see ``turns.py``.

    A request is deferred to the next step when another one in this step computes a prefix that both share. Its slot and
    blocks stay reserved while later requests are admitted.
    """

    def __init__(
        self,
        config: EngineConfig,
        manager: BlockManager,
        state: SequenceState,
        commits: DeferredCommits,
        min_tokens_worth_waiting: int | None = None,
    ) -> None:
        self.waiting = WaitingQueue()
        self.num_held: Counter[bytes] = Counter()
        """Request slots of each tenant that has any, with those that are reserved for siblings."""
        self.num_reserved_slots = 0
        """Free slots that are reserved for siblings of running completions."""
        self._manager = manager
        self._state = state
        self._commits = commits
        self._chunked_prefill = config.chunked_prefill
        self._has_head = config.drafts is not None and config.drafts.has_head
        self._max_num_seqs = config.max_num_seqs
        self._min_arrivals = int(config.max_num_seqs * _ARRIVALS_PER_SLOT)
        # Admission costs a prefix lookup: after a failure it is not tried again before something has been freed.
        self._blocked: tuple[Completion, int] | None = None
        # ``_resources`` when last no tenant could take a turn: it is not tried again before they have changed.
        self._no_turns: tuple[int, int, int] | None = None
        # The tenant that would have had a turn in the last step if others had left it tokens.
        self._left_out: bytes | None = None
        self._in_flight_prefixes = InFlightPrefixes(manager, min_tokens_worth_waiting)

    @property
    def is_shared(self) -> bool:
        """Whether several tenants wait or hold slots."""
        return self.waiting.has_several and len(self.waiting.tenants | self.num_held.keys()) > 1

    def hold(self, completion: Completion, sign: int = 1) -> None:
        """Note that a completion takes its slots, or with a ``sign`` of -1 that it leaves them."""
        tenant = completion.request.tenant
        self.num_held[tenant] += sign * completion.num_slots
        if not self.num_held[tenant]:
            del self.num_held[tenant]

    def note_fork(self) -> None:
        """Note that a completion was split into several, of which each may be preempted for others' turns."""
        self._no_turns = None

    def may_admit(self, num_running: int) -> bool:
        """Whether to look for slots and blocks for the first in the queue.

        Where more requests wait than there are slots, several are admitted together: a pass over one short prompt takes
        the device half as long as one over eight.
        """
        if self.is_shared:
            return self._may_take_turn(num_running)
        min_free_slots = min(self._min_arrivals, len(self.waiting))
        if self._manager.num_free_rows < min_free_slots and num_running:
            return False
        return self._may_admit_one(num_running)

    def _may_take_turn(self, num_running: int) -> bool:
        """``may_admit`` for several tenants, where completions of one may be preempted for another."""
        if not self.waiting or not num_running:
            return bool(self.waiting)
        now = self._resources()
        if (last := self._no_turns) is not None:
            if now[0] == last[0] and now[1] <= last[1] and now[2] <= last[2]:
                return False
            self._no_turns = None
        if now[1] < min(self._min_arrivals, len(self.waiting)):
            # Few slots are free: a tenant that would hold the most waits until several can be admitted together.
            first = self._in_turn()[0]
            return num_held_with(first, self.num_held) <= max(self.num_held.values())
        return True

    def _resources(self) -> tuple[int, int, int]:
        """Return the number of changes of the queue, free slots, and free blocks."""
        return self.waiting.num_changes, self._manager.num_free_rows, self._manager.num_free_blocks

    def _in_turn(self) -> list[Completion]:
        """Return the completions that may be next, in turn; a tenant that was left without tokens comes first."""
        turns = self.waiting.in_turn(self.num_held, self._max_num_seqs)
        if self._left_out is not None:
            turns.sort(key=lambda each: each.request.tenant != self._left_out)
        return turns

    def _may_admit_one(self, num_running: int) -> bool:
        if not self.waiting or not self._manager.num_free_rows:
            return False
        if self._blocked is None:
            return True
        blocked, num_free_blocks = self._blocked
        is_oldest = blocked is self.waiting.oldest
        if is_oldest and num_running and self._manager.num_free_blocks <= num_free_blocks:
            return False
        self._blocked = None
        return True

    def find_turn(self, running_slots: Int32Array, num_blocks: int, num_tokens: int) -> _Turn | None:
        """Return the next completion that lacks room, and whom to preempt for it.

        None if the next one has room, or if no preemption can make room for any.

        Args:
            running_slots: ``[R]``, oldest first.
            num_blocks: blocks that running completions may take in the next step.
            num_tokens: tokens of that step that are left for prompts.
        """
        manager, state = self._manager, self._state
        running = [state.completion(slot) for slot in running_slots.tolist()]
        for completion in self._in_turn():
            match = self._look_up(completion)
            num_remaining = len(completion.token_ids) - match.num_tokens
            num_needed = manager.blocks_needed(match, len(completion.token_ids)) + self._num_spare_blocks()
            shortage = Shortage(
                completion.num_slots + self.num_reserved_slots - manager.num_free_rows,
                num_needed + num_blocks - manager.num_free_blocks,
                (1 if self._chunked_prefill else num_remaining) - num_tokens,
            )
            if max(shortage) <= 0:
                return None
            victims = choose_victims(
                completion,
                running,
                self.num_held,
                shortage,
                lambda victims, kept=match.block_ids: manager.blocks_freed_with(  # type: ignore[misc]
                    np.array([each.slot for each in victims], np.int64), kept
                ),
            )
            if victims:
                return _Turn(completion, victims)
        return None

    def place(self, completion: Completion) -> tuple[Int32Array, int]:
        """Admit a completion for which ``find_turn`` has named victims and these have been preempted.

        Returns:
            The slot, ``[1]``, and how many tokens the prefix cache has supplied.
        """
        self._in_flight_prefixes.new_step_starts()
        picked = self._pick(completion, len(completion.token_ids), 0, 0, is_first=False)
        if not isinstance(picked, _Candidate):
            raise IntegrityError("others were preempted for a request that cannot be admitted")
        self._take(completion)
        slots, _, num_cached = self._assign_slots([picked])
        return slots, num_cached

    def _take(self, completion: Completion) -> None:
        """Move a completion out of the queue, into the slots that its tenant holds."""
        if counts_as_overtaking(completion, self.waiting.oldest, self.num_held):
            self.waiting.oldest.num_overtaken += 1
        self.waiting.remove(completion)
        self.hold(completion)

    def _put_back(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            self.hold(completion, -1)
        self.waiting.put_back(completions)

    def admit(
        self, budget: int, num_running: int, num_lent: int = 0, prompting: Set[bytes] = frozenset()
    ) -> tuple[Int32Array, Int32Array, int]:
        """Admit as many requests as there is room for.

        Args:
            budget: tokens that they may compute in the next step.
            num_running: slots in use.
            num_lent: further tokens, for tenants that are not in ``prompting``.
            prompting: tenants whose prompts are computed in that step.

        Returns:
            ``[N]`` the new slots, ``[N]`` how many tokens of each the next step computes, and how many tokens the
            prefix cache has supplied to requests that got their first slot.
        """
        candidates: list[_Candidate] = []
        deferred: list[Completion] = []
        self._in_flight_prefixes.new_step_starts()
        num_reserved_blocks = num_reserved_slots = 0
        is_shared = self.is_shared
        if not self.may_admit(num_running):
            budget = num_lent = 0
        while budget + num_lent > 0 and (
            self.waiting if is_shared else self._may_admit_one(num_running + len(candidates))
        ):
            is_first = not num_running and not candidates
            picked = None
            for completion in self._in_turn():
                most = budget if completion.request.tenant in prompting else budget + num_lent
                if most > 0:
                    picked = self._pick(
                        completion, most, num_reserved_blocks, num_reserved_slots, is_first=is_first
                    )
                if picked is not None:
                    break
            if picked is None:
                break
            self._take(completion)
            if isinstance(picked, _Deferred):
                deferred.append(completion)
                num_reserved_blocks += picked.num_blocks
                num_reserved_slots += picked.num_slots
                continue
            candidates.append(picked)
            budget -= picked.num_tokens
            num_reserved_blocks += picked.num_new_blocks
        self._left_out = None
        if is_shared and candidates:
            tenants = {each.completion.request.tenant for each in candidates} | prompting
            self._left_out = self._who_is_left_out(tenants, budget + num_lent)
        elif is_shared and not prompting:
            self._no_turns = self._resources()
        served = self._reserve_first_chunks(candidates)
        self._put_back([*(each.completion for each in candidates[len(served) :]), *deferred])
        return self._assign_slots(served)

    def _who_is_left_out(self, served: Set[bytes], num_tokens: int) -> bytes | None:
        """Return which tenant others than ``served`` has slots for its turn, but ``num_tokens`` are too few for it."""
        num_slots = self._manager.num_free_rows - self.num_reserved_slots
        for each in self._in_turn() if self.waiting else ():
            num_wanted = 1 if self._chunked_prefill else len(each.token_ids)
            if each.request.tenant not in served and each.num_slots <= num_slots and num_wanted > num_tokens:
                return each.request.tenant
        return None

    def _pick(
        self,
        completion: Completion,
        budget: int,
        num_reserved_blocks: int,
        num_reserved_slots: int,
        *,
        is_first: bool,
    ) -> _Candidate | _Deferred | None:
        """Give ``completion`` a slot for a first chunk of at most ``budget`` tokens, or change nothing.

        Args:
            num_reserved_blocks: free blocks that others are going to take.
            num_reserved_slots: free slots that are kept for those that were passed over.
            is_first: no request runs, so waiting would free nothing.

        Returns:
            None: neither it nor any later request can be admitted.
        """
        manager, token_ids, num_slots = self._manager, completion.token_ids, completion.num_slots
        if manager.num_free_rows - self.num_reserved_slots - num_reserved_slots < num_slots:
            return None
        namespace, reports_prompt = completion.request.namespace, completion.request.reports_prompt
        match = self._look_up(completion)
        num_remaining = len(token_ids) - match.num_tokens
        # No half prompt overtakes a deferred request: the rest of it would delay that one in later steps.
        if num_remaining > budget and (num_reserved_slots or not self._chunked_prefill):
            return None
        # The whole sequence has to fit, not only its first chunk, or it would be preempted before it is of use.
        spare = 0 if is_first else self._num_spare_blocks()
        num_free_blocks = manager.num_free_blocks
        num_needed = manager.blocks_needed(match, len(token_ids))
        fits = is_first or num_needed + spare <= num_free_blocks - num_reserved_blocks
        if not reports_prompt and self._in_flight_prefixes.cover(token_ids, match):
            # In the next step the cache may supply the blocks it lacks now.
            return _Deferred(num_slots, num_needed) if fits else None
        if not fits:
            self._blocked = (completion, num_free_blocks - num_reserved_blocks)
            return None
        self._in_flight_prefixes.add(token_ids, match, min(num_remaining, budget))
        admission = manager.add(token_ids, namespace=namespace, match=match, counts_lookup=not reports_prompt)
        if admission is None:
            raise IntegrityError("the block manager has a free request slot but did not hand it out")
        self.num_reserved_slots += completion.num_siblings_to_fork
        return _Candidate(
            completion,
            admission.row,
            min(num_remaining, budget),
            admission.num_cached_tokens,
            num_needed - (num_free_blocks - manager.num_free_blocks),
        )

    def _look_up(self, completion: Completion) -> PrefixMatch:
        """Return what the prefix cache has of its tokens."""
        token_ids, request = completion.token_ids, completion.request
        self._commits.flush_for(token_ids, request.namespace)
        # Log-probabilities of a prompt come from all of its tokens. What it computes is cached for others.
        most = 0 if request.reports_prompt else None
        match = self._manager.match(token_ids, namespace=request.namespace, max_tokens=most)
        if self._has_head and match.num_tokens:
            return self._without_last_token(match, token_ids, request.namespace)
        return match

    def _without_last_token(self, match: PrefixMatch, token_ids: Int32Array, namespace: bytes) -> PrefixMatch:
        """Return a hit that is a token shorter, in the same blocks.

        What a head keeps of each token depends on the one after it, too: that of the last one may be another here, as
        may that of the last one in other blocks, which hold the same tokens but for the last.
        """
        end, size = match.num_tokens - 1, self._manager.block_size
        shorter = self._manager.match(token_ids, namespace=namespace, max_tokens=end)
        if shorter.num_tokens < end:  # hits end at block borders only
            return shorter
        return replace(shorter, block_ids=match.block_ids[: -(-end // size)])

    def _num_spare_blocks(self) -> int:
        """Return how many blocks are left free where others run."""
        return self._manager.num_usable_blocks // 100

    def _reserve_first_chunks(self, candidates: list[_Candidate]) -> list[_Candidate]:
        """Reserve the blocks of all first chunks at once; where they are short, the newest have to go back.

        Those that share a block may need more than each of them alone: whoever writes into it first has to copy it.
        """
        num_served = len(candidates)
        while num_served and not self._reserve(candidates[:num_served]):
            num_served -= 1
            candidate = candidates[num_served]
            self._manager.free(np.array([candidate.slot]))
            self.num_reserved_slots -= candidate.completion.num_siblings_to_fork
            self._blocked = (candidate.completion, self._manager.num_free_blocks)
        return candidates[:num_served]

    def _reserve(self, candidates: list[_Candidate]) -> bool:
        slots = np.array([candidate.slot for candidate in candidates])
        return self._manager.reserve(slots, np.array([each.num_tokens for each in candidates])).ok

    def _assign_slots(self, candidates: list[_Candidate]) -> tuple[Int32Array, Int32Array, int]:
        num_cached_tokens, now = 0, time.monotonic()
        for candidate in candidates:
            self._state.fill(candidate.slot, candidate.completion)
            request = candidate.completion.request
            if request.num_cached_tokens is None:
                request.num_cached_tokens = candidate.num_cached_tokens
                request.scheduled_s = now
                num_cached_tokens += candidate.num_cached_tokens
        slots = np.array([candidate.slot for candidate in candidates], np.int32)
        return (
            slots,
            np.array([candidate.num_tokens for candidate in candidates], np.int32),
            num_cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one step. Decodes come first."""

    slots: Int32Array  # [R]
    num_new_tokens: Int32Array  # [R]
    num_decodes: int
    """This many first slots compute their newest token and draw the next."""
    clone_plan: ClonePlan | None
    has_side_pass: bool = False
    """The other slots' pass runs beside this and later steps, until ``Scheduler.end_pass``."""
    num_drafts: int = 0
    """That each decode has, whose positions are reserved."""


class Scheduler:
    """Continuous batching: decodes first, then prompts in order of arrival, under one token budget.

    Running requests are kept in the order of their admission. When the pool runs short, the newest one is preempted, of
    several tenants that of the one that holds the most slots: it goes back to the front of the queue and is computed
    again later. The oldest therefore always finishes: no deadlock.

    Several tenants take turns, see ``turns.py``: others may be preempted for a request that has just come, and each
    tenant whose prompts are computed in a step has the same part of its tokens.

    With ``prompts_first``, for offline use, decodes are left out of steps that are full of prompts: requests that begin
    together also end together, so fewer steps are part-filled.

    With ``may_overlap``, which is given numbers of decodes, prompt tokens and prompts, the prompt chunks of a step with
    decodes are a *side pass*, which runs beside this and later steps. Until it is over (``end_pass``) they only decode;
    no request is admitted or preempted, and slots of the pass that are released keep their blocks: it may still write
    to them. Prompts are computed before the next decodes instead where they are short, see
    ``MAX_PROMPT_TOKENS_AMONG_DECODES``, and while further requests wait: a pass takes longer beside decodes, so fewer
    requests would decode at once.

    Decodes have drafts where none of them needs sampling extras or a grammar, and where there is room for all. What is
    planned for a slot is what it has at least, as if no draft were accepted; what is reserved is for the most.

    A request with ``n`` completions is admitted when ``n`` slots are free for it: the first computes the prompt, the
    others get their slots then (``fork_siblings``).
    """

    def __init__(
        self,
        config: EngineConfig,
        manager: BlockManager,
        state: SequenceState,
        commits: DeferredCommits,
        input_processor: InputProcessor,
        *,
        prompts_first: bool = False,
        may_overlap: Callable[[int, int, int], bool] | None = None,
        min_tokens_worth_waiting: int | None = None,
    ) -> None:
        num_drafts = 0 if config.drafts is None else config.drafts.num_speculative_tokens
        self.counters = EngineStats(spec_decode_num_accepted_tokens_per_pos=(0,) * num_drafts)
        """What the scheduler and the step pipeline count."""
        self._admission = Admission(config, manager, state, commits, min_tokens_worth_waiting)
        self.waiting = self._admission.waiting
        self._manager = manager
        self._state = state
        self._commits = commits
        self._input_processor = input_processor
        self._prompts_first = prompts_first
        self._may_overlap = may_overlap
        self._slots_in_pass: Int32Array = np.empty(0, np.int32)
        self._token_budget, self._chunked_prefill = config.token_budget, config.chunked_prefill
        self._num_drafts = self.num_drafts_wanted = num_drafts
        """Of each decode in the next step, one of ``Drafts.depths`` or 0."""
        self.running_slots: Int32Array = np.empty(0, np.int32)
        """Request slots in use, oldest first."""
        # How many more steps can repeat the last one: no request joins or leaves, and all have room in their blocks.
        self._num_repeats = 0
        self._repeated_slots: Int32Array = np.empty(0, np.int32)
        self._num_repeated_drafts = self._num_drafts_planned = 0
        self._may_be_short = True  # some slot may lack blocks after the last repeat

    def repeat(self) -> bool:
        """Whether the next step repeats the last one (steady-state decode): the same slots, all of them decodes."""
        if self._num_repeats <= 0 or self.num_drafts_wanted != self._num_drafts_planned or self._may_admit():
            self._num_repeats = 0
            return False
        self._num_repeats -= 1
        return True

    def top_up(self) -> None:
        """Take some blocks that running requests will soon need. Call it in every step, right before the host waits."""
        if self._may_be_short and 0 < self._num_repeats <= TOP_UP_STEPS:
            slots, state = self._repeated_slots, self._state
            num_tokens = state.num_planned_tokens(slots) + state.num_drafts_ahead[slots]
            num_tokens += (self._num_repeats + 1) * (self._num_repeated_drafts + 1)
            self._may_be_short = top_up(self._manager, slots, num_tokens, state.max_num_tokens)

    def schedule(self, num_in_flight: int = 0) -> Step | None:
        """Reserve the next step's blocks and return its work. What was read is committed.

        Args:
            num_in_flight: steps whose outcome has not been read, a side pass included, and completions whose stop
                check is open. What those steps compute counts as computed.

        Returns:
            None when there is nothing to do, or nothing until a step in flight has been read.
        """
        if self.waiting.has_several and not self._give_turns(num_in_flight):
            return None
        picked = self._reserve_running(may_preempt=not num_in_flight)
        if picked is None:
            return None
        slots, counts, was_short = picked
        if not was_short and self.waiting and not len(self._slots_in_pass):
            slots, counts = self._admit(slots, counts)
        if not len(slots):
            if (len(self.running_slots) or self.waiting) and not num_in_flight:
                raise IntegrityError("the scheduler has requests but can neither run nor admit one")
            return None
        if self._prompts_first:
            slots, counts = self._defer_decodes(slots, counts)
        step = self._make_step(slots, counts)
        self._num_repeats = self._count_repeats(step)
        self._may_be_short = True
        return step

    def end_pass(self) -> NDArray[np.bool_]:
        """Note that the side pass is over, or that all later work follows it on the device.

        Its slots take part in further steps.

        Returns:
            ``[R]`` which of its slots still have their completion.
        """
        slots, self._slots_in_pass = self._slots_in_pass, self._slots_in_pass[:0]
        self._num_repeats = 0
        is_left = np.array([self._state.completions[slot] is None for slot in slots.tolist()], np.bool_)
        if np.count_nonzero(is_left):
            self._manager.free(slots[is_left])
        return ~is_left

    def fork_siblings(self, slots: Int32Array) -> tuple[Int32Array, NDArray[np.intp]]:
        """Split off the siblings of those slots that have just computed their prompt.

        Args:
            slots: ``[S]`` slots whose next token is due.

        Returns:
            ``[S']`` the slots, followed by the new ones, and ``[S']`` for each the index in ``slots`` it descends from.
        """
        sources = np.arange(len(slots))
        parents = np.flatnonzero(self._state.num_siblings_to_fork[slots])
        for parent in parents.tolist():
            children = self._fork(int(slots[parent]))
            slots = np.concatenate([slots, children])
            sources = np.concatenate([sources, np.full(len(children), parent)])
        return slots, sources

    def suspend(self, slots: Int32Array) -> None:
        """Take slots out of further steps. They keep their blocks until ``release``; tokens in flight are dropped."""
        self._num_repeats = 0
        self.running_slots = self.running_slots[~np.isin(self.running_slots, slots)]
        self._state.generation[slots] += 1
        self._state.num_cleared += len(slots)

    def release(self, slots: Int32Array) -> list[Completion]:
        """Free slots, those of a side pass once it is over; returns their completions, with the tokens so far."""
        self._num_repeats = 0
        self._commits.flush(slots)
        self._manager.free(slots[~np.isin(slots, self._slots_in_pass)])
        self.running_slots = self.running_slots[~np.isin(self.running_slots, slots)]
        self._admission.num_reserved_slots -= int(self._state.num_siblings_to_fork[slots].sum())
        self._state.num_siblings_to_fork[slots] = 0
        completions = self._state.clear(slots)
        for completion in completions:
            self._admission.hold(completion, -1)
        return completions

    def _defer_decodes(self, slots: Int32Array, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Leave decodes out of a step if at least half of its tokens are prompt tokens."""
        is_decode = self._is_decode(slots, counts)
        if 2 * int(counts[~is_decode].sum()) < self._token_budget:
            # After a preemption some are decodes again in their first step; of too many, the newest wait a step.
            fits = np.cumsum(counts) <= self._token_budget
            return slots[fits], counts[fits]
        return slots[~is_decode], counts[~is_decode]

    def _is_decode(self, slots: Int32Array, counts: Int32Array) -> NDArray[np.bool_]:
        """Return which of ``slots`` decode: they have generated a token before."""
        has_begun = self._state.num_planned_tokens(slots) > self._state.num_prompt_tokens[slots]
        return (counts == 1) & has_begun

    def _budget_left(self, slots: Int32Array, counts: Int32Array) -> int:
        """Return how many more prompt tokens fit into a step of these, the first of which decode one token each.

        Decodes that may be left out take no room: prompts fill half of the step, or there is room for both. Others
        take room for their drafts, too.
        """
        budget = self._token_budget - int(counts.sum())
        num_decodes = int(np.count_nonzero(self._is_decode(slots, counts)))
        if self._prompts_first and 2 * num_decodes <= self._token_budget:
            return budget + num_decodes
        num_drafts = num_decodes * self.num_drafts_wanted
        if not self._chunked_prefill and self._admission.is_shared:
            num_drafts = 0  # whose turn it is needs room for all of its prompt
        return budget - num_drafts if num_drafts < budget else budget

    def _make_step(self, slots: Int32Array, counts: Int32Array) -> Step:
        is_decode = (counts == 1) & (self._num_remaining(slots) == 1)
        # Siblings draw from the same distribution, which a decode step does not keep.
        is_decode &= self._state.num_siblings_to_fork[slots] == 0
        num_decodes = int(np.count_nonzero(is_decode))
        if num_decodes < len(slots):
            order = np.argsort((counts > 1) * 2 + ~is_decode, kind="stable")
            slots, counts = slots[order], counts[order]
        has_side_pass = self._has_side_pass(num_decodes, slots[num_decodes:], counts[num_decodes:])
        if has_side_pass:
            self._slots_in_pass = slots[num_decodes:]
        num_drafts = self._draft(slots[:num_decodes], int(counts.sum()))
        return Step(slots, counts, num_decodes, self._manager.take_clone_plan(), has_side_pass, num_drafts)

    def _draft(self, slots: Int32Array, num_tokens: int) -> int:
        """Return how many drafts each of ``slots``, which decode, has in a step of ``num_tokens`` without them.

        Their positions are reserved then.
        """
        num_drafts, state = self.num_drafts_wanted, self._state
        self._num_drafts_planned = num_drafts
        if (
            not num_drafts
            or not 0 < len(slots) <= max_drafted_rows(num_drafts)
            or num_tokens + len(slots) * num_drafts > self._token_budget
            or np.count_nonzero(state.has_grammar[slots])
            or state.needs_extras_now(slots)
        ):
            return 0
        ahead = self._num_ahead(slots, np.ones(len(slots), np.int32), num_drafts)
        return num_drafts if reserve_ahead(self._manager, slots, ahead, state.max_num_tokens) else 0

    def _num_ahead(self, slots: Int32Array, counts: Int32Array, num_drafts: int) -> Int32Array:
        """Return how many tokens after the committed ones a step may need room for that computes ``counts``.

        Args:
            num_drafts: of each slot in that step.
        """
        state = self._state
        ahead = counts + state.num_uncommitted_tokens[slots]
        if not self._num_drafts:
            return ahead
        # The last token is never computed, and drafts from there on need no room: they are not accepted.
        most = state.max_num_tokens[slots] - 1 - self._manager.num_computed_tokens[slots]
        return np.maximum(np.minimum(ahead + state.num_drafts_ahead[slots] + num_drafts, most), ahead)

    def _has_side_pass(self, num_decodes: int, slots: Int32Array, counts: Int32Array) -> bool:
        """Return whether prompt chunks of ``counts`` tokens of ``slots`` run beside ``num_decodes``."""
        num_tokens = int(counts.sum())
        return (
            self._may_overlap is not None
            and num_decodes > 0
            and num_tokens > MAX_PROMPT_TOKENS_AMONG_DECODES
            and not self.waiting
            # A captured pass keeps what log-probabilities of prompts are made of to itself.
            and not np.count_nonzero(self._state.num_prompt_logprobs[slots] >= 0)
            and self._may_overlap(num_decodes, num_tokens, len(counts))
        )

    def _count_repeats(self, step: Step) -> int:
        """Return how many more steps repeat this one if no request joins or leaves."""
        self._repeated_slots = slots = step.slots[: step.num_decodes]
        self._num_repeated_drafts = num_drafts = step.num_drafts
        if len(slots) < len(self._running_beside_pass()):
            return 0
        state, capacity = self._state, self._manager.table.capacity[slots]
        planned, most = state.num_planned_tokens(slots), state.max_num_tokens[slots]
        if not self._num_drafts:
            return int((np.minimum(most, capacity + 1) - planned).min()) - 1
        # Every repeat may take as many positions as it has tokens, until all that are ever needed are there.
        room = (capacity + 1 - planned - state.num_drafts_ahead[slots]) // (num_drafts + 1)
        room = np.where(capacity >= most - 1, most - planned, np.minimum(room, most - planned))
        return int(room.min()) - 1

    def _num_remaining(self, slots: Int32Array) -> Int32Array:
        """Return how many tokens of each slot are still to be computed when every step in flight is over."""
        state = self._state
        num_computed = self._manager.num_computed_tokens[slots] + state.num_uncommitted_tokens[slots]
        remaining: Int32Array = state.num_planned_tokens(slots) - num_computed
        return remaining

    def _reserve_running(self, *, may_preempt: bool) -> tuple[Int32Array, Int32Array, bool] | None:
        was_short = False
        while True:
            slots, counts = self._pick_running()
            ahead = self._num_ahead(slots, counts, 0)
            if not len(slots) or reserve_ahead(self._manager, slots, ahead, self._state.max_num_tokens):
                return slots, counts, was_short
            if not may_preempt:
                # A step in flight may end a sequence, and a preempted request would lose the tokens it draws.
                return None
            if len(self.running_slots) == 1:
                raise IntegrityError("the block pool cannot serve its only sequence")
            self._preempt_newest()
            was_short = True

    def _pick_running(self) -> tuple[Int32Array, Int32Array]:
        running, remaining = self._runnable()
        budget = self._token_budget
        is_single = remaining == 1
        if is_single.all():
            return running[:budget], remaining[:budget]
        singles = running[is_single][:budget]
        ones = np.ones(len(singles), np.int32)
        budget = self._budget_left(singles, ones)
        chunked, remaining = running[~is_single], remaining[~is_single]
        if self._chunked_prefill and self._admission.is_shared:
            counts = self._split(budget, chunked, remaining)
        else:
            counts = np.clip(budget - (np.cumsum(remaining) - remaining), 0, remaining).astype(np.int32)
        fits = counts > 0
        counts = np.concatenate([ones, counts[fits]])
        return np.concatenate([singles, chunked[fits]]), counts

    def _runnable(self) -> tuple[Int32Array, Int32Array]:
        """Return the running slots that need not wait until a step in flight is read, and what remains of each."""
        state, running = self._state, self._running_beside_pass()
        is_unread = state.num_unread_tokens[running] > 0
        remaining = self._num_remaining(running)
        if not np.count_nonzero(is_unread):
            return running, remaining
        # Either the slot's last token is in flight, or its newest one is not where a decode step finds it.
        waits = is_unread & ~state.is_on_device[running]
        waits |= state.num_planned_tokens(running) >= state.max_num_tokens[running]
        if not np.count_nonzero(waits):
            return running, remaining
        return running[~waits], remaining[~waits]

    def _running_beside_pass(self) -> Int32Array:
        """Return the running slots, beside a side pass only those that decode."""
        slots = self.running_slots
        if not len(self._slots_in_pass):
            return slots
        slots = slots[~np.isin(slots, self._slots_in_pass)]
        return slots[(self._num_remaining(slots) == 1) & (self._state.num_siblings_to_fork[slots] == 0)]

    def _may_admit(self) -> bool:
        return not len(self._slots_in_pass) and self._admission.may_admit(len(self.running_slots))

    def _give_turns(self, num_in_flight: int) -> bool:
        """Give slots to requests in whose turn there is no room, after others were preempted for them.

        Returns:
            False where somebody has to be preempted and a step is in flight, whose tokens it would lose. Nothing has
            changed then.
        """
        admission = self._admission
        while admission.is_shared and self._may_admit():
            slots, counts = self._pick_running()
            num_blocks = self._manager.blocks_to_reserve(slots, self._num_ahead(slots, counts, 0))
            remaining = self._num_remaining(self.running_slots)
            if self._chunked_prefill:
                remaining = remaining[remaining == 1]  # other prompts leave a part of their tokens
            num_tokens = self._token_budget - int(remaining.sum())
            turn = admission.find_turn(self.running_slots, num_blocks, num_tokens)
            if turn is None:
                return True
            if num_in_flight:
                return False
            for victim in turn.victims:
                self._preempt(victim.slot)
                victim.num_turns_given += 1
            new_slots, num_cached = admission.place(turn.completion)
            self.counters.cached_tokens += num_cached
            self.running_slots = np.concatenate([self.running_slots, new_slots])
        return True

    def _preempt_newest(self) -> None:
        """Preempt the newest one of those tenants that hold the most slots; never the oldest of all."""
        slot, num_held = int(self.running_slots[-1]), self._admission.num_held
        if len(num_held) > 1:
            newest_first = self.running_slots[:0:-1].tolist()
            slot = max(newest_first, key=lambda each: num_held[self._tenant(each)])
        self._preempt(slot)

    def _preempt(self, slot: int) -> None:
        num_computed = int(self._manager.num_computed_tokens[slot])
        completion = self.release(np.array([slot], np.int32))[0]
        completion.num_computed_before = max(completion.num_computed_before, num_computed)
        self.waiting.prepend(completion)
        self.counters.preemptions += 1

    def _tenant(self, slot: int) -> bytes:
        return self._state.completion(slot).request.tenant

    def _split(self, num_tokens: int, slots: Int32Array, wanted: Int32Array) -> Int32Array:
        """Return how many of a step's prompt tokens each of ``slots`` gets, ``[N]``, see ``split_tokens``."""
        tenants = [self._tenant(slot) for slot in slots.tolist()]
        return np.array(split_tokens(num_tokens, wanted.tolist(), tenants), np.int32)

    def _admit(self, slots: Int32Array, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
        budget, num_running = self._budget_left(slots, counts), len(self.running_slots)
        if self._admission.is_shared:
            is_prompt = self._num_remaining(slots) > 1
            prompting = {self._tenant(slot) for slot in slots[is_prompt].tolist()}
            num_lent = self._num_lent(budget, int(counts[is_prompt].sum()), prompting)
            new_slots, new_counts, num_cached = self._admission.admit(
                budget, num_running, num_lent, prompting
            )
            if (num_taken := int(new_counts.sum()) - budget) > 0:
                num_left = int(counts[is_prompt].sum()) - num_taken
                counts[is_prompt] = self._split(num_left, slots[is_prompt], counts[is_prompt])
                slots, counts = slots[counts > 0], counts[counts > 0]
        else:
            new_slots, new_counts, num_cached = self._admission.admit(budget, num_running)
        self.counters.cached_tokens += num_cached
        self.running_slots = np.concatenate([self.running_slots, new_slots])
        return np.concatenate([slots, new_slots]), np.concatenate([counts, new_counts])

    def _num_lent(self, budget: int, num_prompt_tokens: int, prompting: Set[bytes]) -> int:
        """Return how many of their prompt tokens ``prompting`` leave to tenants that have none in this step.

        Args:
            budget: tokens that are left in any case.
            num_prompt_tokens: of ``prompting``.
        """
        num_others = len(self.waiting.tenants - prompting)
        if not num_others or not self._chunked_prefill:
            return 0
        part = (budget + num_prompt_tokens) * num_others // (num_others + len(prompting))
        return max(part - budget, 0)

    def _fork(self, parent_slot: int) -> Int32Array:
        self._num_repeats = 0
        parent = self._state.completion(parent_slot)
        num_children = int(self._state.num_siblings_to_fork[parent_slot])
        children = self._manager.fork(parent_slot, num_children)
        if children is None:
            raise IntegrityError(
                f"{num_children} request slots were set aside for a request but are not free"
            )
        self._state.num_siblings_to_fork[parent_slot] = 0
        parent.num_siblings_to_fork = 0
        self._admission.num_reserved_slots -= num_children
        self._admission.note_fork()
        for index, slot in enumerate(children.tolist(), start=1):
            sibling = self._input_processor.make_completion(parent.request, index, parent.seed)
            parent.request.completions.append(sibling)
            self._state.fill(slot, sibling)
        self.running_slots = np.concatenate([self.running_slots, children])
        return children
