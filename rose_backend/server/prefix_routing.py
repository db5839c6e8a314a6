"""Which replica gets a prompt: one that has computed its beginning before, unless others have much less to do.

``PrefixMap`` is the policy; ``PrefixRouter`` is where Ray Serve asks for it, once per request, in the process that
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
"""Beginnings are compared in whole blocks of this many tokens, and from 512 tokens on at each further eighth of their
length: 60 places in a prompt of 131,072 tokens, so that no prompt holds the event loop up."""
_MAX_BLOCKS = 1 << 16
"""Beginnings whose replicas are known; those that no prompt had for longest are forgotten."""
_MAX_EXTRA_REQUESTS = 8
_MAX_EXTRA_SHARE = 0.5
"""A replica that knows a prompt may have this many requests, or this share of the mean, more than the least busy."""

Replica = TypeVar("Replica", bound=Hashable)


class PrefixMap(Generic[Replica]):
    """Remembers which replicas have had which beginnings of prompts."""

    def __init__(self, max_blocks: int = _MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        # By the digest of a beginning; the one that was used last is at the end.
        self._owners: OrderedDict[bytes, set[Replica]] = OrderedDict()
        self._num_prompts: Counter[Replica] = Counter()

    def choose(self, prompt: ProcessedInput, loads: Mapping[Replica, int]) -> Replica:
        """Return the replica for a prompt, and remember that it has its beginning from now on.

        Args:
            loads: requests under way, of each replica that may be chosen; at least one.
        """
        keys = _block_keys(prompt)
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
        while len(self._owners) > self._max_blocks:
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
        """Return how many of the beginnings a replica has had, from the shortest on."""
        for count, key in enumerate(keys):
            if replica not in self._owners.get(key, ()):
                return count
        return len(keys)


def _block_keys(prompt: ProcessedInput) -> list[bytes]:
    """Return digests of a prompt's beginnings, the shortest first."""
    # Prefixes are shared within a namespace, and with the same adapter, only.
    digest = blake2b(b"%d %s" % (prompt.lora_id, prompt.namespace), digest_size=16)
    keys, start, end = [], 0, _BLOCK_TOKENS
    while end <= len(prompt.token_ids):
        digest.update(prompt.token_ids[start:end].tobytes())
        keys.append(digest.digest())
        num_blocks = max(end // (8 * _BLOCK_TOKENS), 1)
        start, end = end, end + num_blocks * _BLOCK_TOKENS
    return keys


class PrefixRouter(RequestRouter):
    """Ray Serve's router for calls whose keyword argument ``prompt`` is a ``ProcessedInput``; others go to the least
    busy replica."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Begin without knowing any prompt."""
        self._prefixes: PrefixMap[ReplicaID] = PrefixMap()
        self._loads: Counter[ReplicaID] = Counter()
        self._turn = asyncio.Lock()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidates, each as a separate rank, the best one first."""
        async with self._turn:
            # The request before has been chosen for; now it is sent, and counted.
            await asyncio.sleep(0)
            present = self.curr_replicas
            by_id = {each.replica_id: each for each in candidate_replicas if each.replica_id in present}
            ranked = sorted(by_id, key=lambda each: self._loads[each])
            prompt = None if pending_request is None else pending_request.kwargs.get("prompt")
            if prompt is not None and by_id:
                best = self._prefixes.choose(prompt, {each: self._loads[each] for each in by_id})
                ranked.sort(key=lambda each: each != best)
        if pending_request is not None:
            # Else Ray asks again at once while no replica takes the request.
            pending_request.routing_context.should_backoff = True
        return [[by_id[each]] for each in ranked]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a request that is sent."""
        super().on_send_request(replica_id)
        self._loads[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count it as ended, however it ended."""
        super().on_request_completed(replica_id, internal_request_id)
        # Not of a replica that has been forgotten meanwhile.
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
