"""Which completion gets the next request slot: holders of API keys take turns by what they hold."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from rose_backend.engine.request import Completion


class WaitingQueue:
    """Completions that wait for a request slot, in a queue for each tenant.

    The next one is of the tenant that holds the fewest slots; between tenants that hold as many, of the one that waits
    longest. So whoever sends few requests does not wait for all of another tenant's, and a single tenant has what came
    first. What it costs grows with the number of tenants, which are API keys, not with that of requests.
    """

    def __init__(self) -> None:
        self._queues: dict[
            bytes, deque[Completion]
        ] = {}  # none is empty; the one that waits longest is first
        self._num_held: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __contains__(self, completion: Completion) -> bool:
        return completion in self._queues.get(completion.request.tenant, ())

    def __iter__(self) -> Iterator[Completion]:
        """Yield the completions of each tenant in their order."""
        for queue in self._queues.values():
            yield from queue

    @property
    def first(self) -> Completion:
        """The next one; there has to be one."""
        return self._queues[self._next_tenant()][0]

    @property
    def first_has_nothing(self) -> bool:
        """Whether the tenant of the next one holds no slot, while another tenant holds several."""
        num_held = self._num_held
        if not self._queues or not num_held or num_held[self._next_tenant()]:
            return False
        return max(num_held.values()) > 1

    @property
    def largest_holder(self) -> bytes:
        """The tenant that holds the most slots; there has to be one that holds any."""
        return max(self._num_held, key=self._num_held.__getitem__)

    def num_held(self, tenant: bytes) -> int:
        """Return how many slots a tenant holds."""
        return self._num_held[tenant]

    def append(self, completion: Completion) -> None:
        """Add a new one after its tenant's others."""
        self._queues.setdefault(completion.request.tenant, deque()).append(completion)

    def put_back(self, completions: Iterable[Completion]) -> None:
        """Let some wait that hold no slot any more, before their tenants' others; the last one before all."""
        for completion in completions:
            self._queues.setdefault(completion.request.tenant, deque()).appendleft(completion)

    def take(self) -> Completion:
        """Remove the next one, which holds a slot from now on."""
        tenant = self._next_tenant()
        queue = self._queues[tenant]
        completion = queue.popleft()
        # Of those that hold as many, the others come first now.
        del self._queues[tenant]
        if queue:
            self._queues[tenant] = queue
        self._num_held[tenant] += 1
        return completion

    def remove(self, completion: Completion) -> None:
        """Remove one that waits."""
        tenant = completion.request.tenant
        queue = self._queues[tenant]
        queue.remove(completion)
        if not queue:
            del self._queues[tenant]

    def hold(self, tenant: bytes, num_slots: int) -> None:
        """Note that a tenant holds more slots, or fewer."""
        self._num_held[tenant] += num_slots
        if not self._num_held[tenant]:
            del self._num_held[tenant]

    def _next_tenant(self) -> bytes:
        queues = self._queues
        if len(queues) == 1:
            return next(iter(queues))
        return min(queues, key=self._num_held.__getitem__)
