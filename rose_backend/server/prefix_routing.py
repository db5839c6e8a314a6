"""Prefix-aware routing of prompts to replicas: the one that has computed the longest prefix, unless it is too busy.

``PrefixMap`` is the policy. ``PrefixRouter`` applies it; Ray Serve calls it once per request, in the process that
serves HTTP.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from rose_backend.engine.request import ProcessedInput

_BLOCK_TOKENS = 32
"""A prompt's prefixes are hashed every 32 tokens, and past 512 tokens at steps of an eighth of the length so far. A
prompt of 131,072 tokens has 60 such prefixes, so that no prompt holds up the event loop."""
_MAX_PREFIXES = 1 << 16
"""Prefixes to remember; the least recently used are forgotten first."""
_MAX_EXTRA_REQUESTS = 8
_MAX_EXTRA_SHARE = 0.5
"""A replica is too busy for a prompt whose prefix it knows if it has more requests under way than the least busy one:
more than 8 more, and more than half of the mean more."""

Replica = TypeVar("Replica", bound=Hashable)


class PrefixMap(Generic[Replica]):
    """Remembers which replicas have computed which prefixes of prompts.

    Args:
        max_prefixes: prefixes to remember.
    """

    def __init__(self, max_prefixes: int = _MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        # The replicas that have computed a prefix, by its digest; the most recently used one is last.
        self._owners: OrderedDict[bytes, set[Replica]] = OrderedDict()
        # Prompts that each replica has got, which breaks ties.
        self._num_prompts: Counter[Replica] = Counter()

    def choose(self, prompt: ProcessedInput, loads: Mapping[Replica, int]) -> Replica:
        """Return the replica for a prompt, and remember that it has the prompt's prefixes from now on.

        Args:
            loads: requests under way on each replica that may be chosen; at least one replica.
        """
        keys = _prefix_digests(prompt)
        extra = max(_MAX_EXTRA_REQUESTS, _MAX_EXTRA_SHARE * sum(loads.values()) / len(loads))
        limit = min(loads.values()) + extra
        chosen = min(
            (each for each in loads if loads[each] <= limit),
            key=lambda each: (-self._num_known(keys, each), loads[each], self._num_prompts[each]),
        )
        self._num_prompts[chosen] += 1
        for key in keys:
            self._owners.setdefault(key, set()).add(chosen)
            self._owners.move_to_end(key)
        while len(self._owners) > self._max_prefixes:
            self._owners.popitem(last=False)
        return chosen

    def forget(self, replica: Replica) -> None:
        """Remove a replica that has ended, and with it its prefix cache."""
        self._num_prompts.pop(replica, None)
        for key in [key for key, owners in self._owners.items() if replica in owners]:
            self._owners[key].discard(replica)
            if not self._owners[key]:
                del self._owners[key]

    def _num_known(self, keys: Sequence[bytes], replica: Replica) -> int:
        """Return how many of the prefixes ``keys``, shortest first, a replica has computed without a gap."""
        for count, key in enumerate(keys):
            if replica not in self._owners.get(key, ()):
                return count
        return len(keys)


def _prefix_digests(prompt: ProcessedInput) -> list[bytes]:
    """Return the digests of a prompt's prefixes, the shortest first; see ``_BLOCK_TOKENS``."""
    # The engine's prefix cache shares prefixes only within a namespace and an adapter.
    digest = blake2b(b"%d %s" % (prompt.lora_id, prompt.namespace), digest_size=16)
    keys, start, end = [], 0, _BLOCK_TOKENS
    while end <= len(prompt.token_ids):
        digest.update(prompt.token_ids[start:end].tobytes())
        keys.append(digest.digest())
        num_blocks = max(end // (8 * _BLOCK_TOKENS), 1)
        start, end = end, end + num_blocks * _BLOCK_TOKENS
    return keys


class PrefixRouter(RequestRouter):
    """Ray Serve's router for calls with a keyword argument ``prompt``, a ``ProcessedInput``.

    Calls without it go to the least busy replica.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Start with an empty map; Ray Serve calls this instead of a constructor."""
        self._prefixes: PrefixMap[ReplicaID] = PrefixMap()
        # Requests under way, by replica.
        self._loads: Counter[ReplicaID] = Counter()
        self._lock = asyncio.Lock()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidates in separate ranks, the best one first."""
        async with self._lock:
            # Let the request that was routed before this one be sent first, so that it is in the counts.
            await asyncio.sleep(0)
            present = self.curr_replicas
            by_id = {each.replica_id: each for each in candidate_replicas if each.replica_id in present}
            ranked = sorted(by_id, key=lambda each: self._loads[each])
            prompt = None if pending_request is None else pending_request.kwargs.get("prompt")
            if prompt is not None and by_id:
                best = self._prefixes.choose(prompt, {each: self._loads[each] for each in by_id})
                ranked.sort(key=lambda each: each != best)
        if pending_request is not None:
            # Without it Ray asks again without a pause while no replica accepts the request.
            pending_request.routing_context.should_backoff = True
        return [[by_id[each]] for each in ranked]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a request as under way."""
        super().on_send_request(replica_id)
        self._loads[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request as ended, whether it succeeded or not."""
        super().on_request_completed(replica_id, internal_request_id)
        # The replica may have been forgotten in the meantime.
        if replica_id in self._loads:
            self._loads[replica_id] -= 1

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that has died."""
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget replicas that Ray Serve has stopped."""
        gone = set(self.curr_replicas) - {each.replica_id for each in replicas}
        super().update_replicas(replicas)
        for replica_id in gone:
            self._forget(replica_id)

    def _forget(self, replica_id: ReplicaID) -> None:
        self._prefixes.forget(replica_id)
        self._loads.pop(replica_id, None)
