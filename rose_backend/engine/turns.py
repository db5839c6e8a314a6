"""Who is next where tenants, the holders of API keys, share request slots, blocks and the tokens of a step.

A tenant *holds* the slots of its running completions, and those kept for siblings that are split off later. One rule:

    Next is the request whose tenant will hold the fewest slots, counting the request's own; ties go to the one that has
    waited longest. It takes its turn only if it can be placed now, in free slots and blocks, or in those of preempted
    completions of tenants that still hold at least as many slots afterwards. No request overtakes one whose tenant
    would hold as few slots.

``in_turn`` makes the order, ``choose_victims`` names all completions to preempt before anything is changed. With one
tenant the order is that of arrival, and none is preempted for a turn.

No request starves: it is overtaken only by tenants that hold no more slots than its own tenant does without it, so it
is next, at the latest, when its tenant's running requests have ended. A request for several slots may be overtaken by
others as well, while it waits for the slots to be free together: the oldest request by at most ``max_num_seqs`` of
them, or ``PATIENCE`` times as many if it wants more than its tenant's equal share, since slots kept free for it are
idle.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from rose_backend.engine.request import Completion

MAX_TURNS_GIVEN = 3
"""A completion is preempted for others' turns at most this often. Without the prefix cache, or where its blocks were
evicted meanwhile, each time costs the computation of all its tokens again."""
MAX_VICTIMS = 32
"""Completions that are preempted for one request at most: a long prompt may not cost hundreds of others their slots."""
PATIENCE = 32
"""With it, requests for all slots, aborted as soon as they run, leave a tenant of short requests beside one of long
ones three quarters of what it has without them (8 slots, ``tests/engine/test_turns.py``); with 1 a seventh."""
_place = attrgetter("place")


class WaitingQueue:
    """Completions that wait for a request slot, in order of arrival, with the oldest of each tenant at hand."""

    def __init__(self) -> None:
        self.num_changes = 0
        """Grows with each completion that comes or leaves."""
        self.has_several = False
        """Several tenants have sent something since the start."""
        self._queues: dict[bytes, deque[Completion]] = {}  # none is empty
        self._heads: list[Completion] = []  # the oldest of each tenant, in order of arrival
        self._first_place, self._last_place = 0, 0
        self._num_waiting = 0
        self._tenant_seen: bytes | None = None

    def __len__(self) -> int:
        return self._num_waiting

    def __contains__(self, completion: Completion) -> bool:
        return completion in self._queues.get(completion.request.tenant, ())

    def __iter__(self) -> Iterator[Completion]:
        """Yield them in order of arrival."""
        return merge(*self._queues.values(), key=_place)

    @property
    def tenants(self) -> set[bytes]:
        """Those that wait."""
        return set(self._queues)

    @property
    def oldest(self) -> Completion:
        """The one that waits longest."""
        return self._heads[0]

    def append(self, completion: Completion) -> None:
        """Add one that has just arrived."""
        tenant = completion.request.tenant
        self.has_several = self.has_several or self._tenant_seen not in (None, tenant)
        self._tenant_seen = tenant
        self._last_place += 1
        completion.place = self._last_place
        queue = self._queue_of(completion)
        queue.append(completion)
        if len(queue) == 1:
            self._heads.append(completion)

    def prepend(self, completion: Completion) -> None:
        """Add one that was preempted: it is the oldest now."""
        self._first_place -= 1
        completion.place = self._first_place
        self._put_first(completion)

    def put_back(self, completions: Iterable[Completion]) -> None:
        """Give those that were removed, each older than whoever of its tenant waits, the places that they had."""
        for completion in sorted(completions, key=_place, reverse=True):
            self._put_first(completion)

    def remove(self, completion: Completion) -> None:
        """Take out one that waits.

        Raises:
            ValueError: it does not.
        """
        queue = self._queues[completion.request.tenant]
        first = queue[0]
        queue.remove(completion)
        self._num_waiting -= 1
        self.num_changes += 1
        if first is completion:
            self._remove_head(first)
            if queue:
                insort(self._heads, queue[0], key=_place)
        if not queue:
            del self._queues[completion.request.tenant]

    def in_turn(self, num_held: Counter[bytes], max_num_seqs: int) -> list[Completion]:
        """Return the oldest of each tenant that may be next, the first in turn first; see the module's docstring.

        Args:
            num_held: slots of each tenant.
        """
        oldest = self._heads[0]
        turns, fewest = [oldest], num_held_with(oldest, num_held)
        max_overtakes = max_num_seqs
        if oldest.num_slots * len(self._queues.keys() | num_held.keys()) > max_num_seqs:
            max_overtakes *= PATIENCE
        is_overtaken_enough = oldest.num_overtaken >= max_overtakes
        for each in islice(self._heads, 1, None):
            if fewest == 1:  # of a tenant that holds nothing: nobody comes before it
                break
            num_with = num_held_with(each, num_held)
            if num_with < fewest and not (
                is_overtaken_enough and counts_as_overtaking(each, oldest, num_held)
            ):
                turns.append(each)
                fewest = num_with
        return turns[::-1]

    def _put_first(self, completion: Completion) -> None:
        """Put one before all of its tenant."""
        queue = self._queue_of(completion)
        if queue:
            self._remove_head(queue[0])
        queue.appendleft(completion)
        insort(self._heads, completion, key=_place)

    def _remove_head(self, completion: Completion) -> None:
        del self._heads[bisect_left(self._heads, completion.place, key=_place)]

    def _queue_of(self, completion: Completion) -> deque[Completion]:
        self._num_waiting += 1
        self.num_changes += 1
        return self._queues.setdefault(completion.request.tenant, deque())


def num_held_with(completion: Completion, num_held: Counter[bytes]) -> int:
    """Return how many slots the tenant of ``completion`` holds once this one has its own."""
    return num_held[completion.request.tenant] + completion.num_slots


def counts_as_overtaking(completion: Completion, oldest: Completion, num_held: Counter[bytes]) -> bool:
    """Whether ``completion`` goes before ``oldest`` though its tenant then holds more than the other one's holds."""
    return completion is not oldest and num_held_with(completion, num_held) > num_held[oldest.request.tenant]


class Shortage(NamedTuple):
    """What a request lacks to be placed; nothing where a number is 0 or less."""

    num_slots: int
    num_blocks: int
    num_tokens: int
    """Of the next step; each victim leaves one."""


def choose_victims(
    completion: Completion,
    running: Sequence[Completion],
    num_held: Counter[bytes],
    shortage: Shortage,
    num_blocks_of: Callable[[Sequence[Completion]], int],
) -> list[Completion]:
    """Return which running completions are preempted for ``completion``, newest first; none where that is not enough.

    Each is the newest of the tenant that then holds the most slots, and leaves it at least as many as the tenant of
    ``completion`` holds with it. None has given up ``MAX_TURNS_GIVEN`` slots before, and they are ``MAX_VICTIMS`` at
    most.

    Args:
        running: oldest first.
        num_held: slots of each tenant.
        num_blocks_of: how many blocks are freed with these.
    """
    held, num_after = Counter(num_held), num_held_with(completion, num_held)
    others = [each for each in reversed(running) if each.num_turns_given < MAX_TURNS_GIVEN]
    victims: list[Completion] = []

    def are_enough(victims: Sequence[Completion]) -> bool:
        return (
            sum(each.num_slots for each in victims) >= shortage.num_slots
            and len(victims) >= shortage.num_tokens
            and (shortage.num_blocks <= 0 or num_blocks_of(victims) >= shortage.num_blocks)
        )

    while not are_enough(victims):
        others = [each for each in others if held[each.request.tenant] - each.num_slots >= num_after]
        if not others or len(victims) == MAX_VICTIMS:
            return []
        victim = max(others, key=lambda each: held[each.request.tenant])  # of equals, the newest
        others.remove(victim)
        held[victim.request.tenant] -= victim.num_slots
        victims.append(victim)
    for victim in victims.copy():
        # A later one may have given more blocks.
        if are_enough(rest := [each for each in victims if each is not victim]):
            victims = rest
    return victims


def split_tokens(num_tokens: int, wanted: Sequence[int], tenants: Sequence[bytes]) -> list[int]:
    """Split a step's prompt tokens: an equal part for each tenant, or what it wants; its oldest prompts go first.

    Args:
        wanted: tokens of each prompt, oldest first, ``[N]``.
        tenants: of each prompt, ``[N]``.

    Returns:
        The tokens of each prompt, ``[N]``.
    """
    totals: Counter[bytes] = Counter()
    for tenant, count in zip(tenants, wanted, strict=True):
        totals[tenant] += count
    parts, num_left = {}, max(num_tokens, 0)
    for index, (tenant, total) in enumerate(sorted(totals.items(), key=lambda item: item[1])):
        parts[tenant] = min(total, num_left // (len(totals) - index))
        num_left -= parts[tenant]
    counts = []
    for tenant, count in zip(tenants, wanted, strict=True):
        counts.append(min(count, parts[tenant]))
        parts[tenant] -= counts[-1]
    return counts
