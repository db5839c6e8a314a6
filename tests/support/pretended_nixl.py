"""NIXL's agent as far as vLLM's connector uses it, between engines of one process: a transfer copies memory.

It is what the package ``nixl`` would bring. Copies are made as late as they may be, some of them fail where a test
wants that, and every address must lie in memory that its owner has registered.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np


@dataclass
class _Transfer:
    is_read: bool
    local: Any  # uint64 [N, 3]: address, bytes, device
    remote: Any
    owner: str
    notification: bytes
    num_polls_left: int
    fails: bool


class PretendedAgent:
    """One engine's agent.

    Args:
        name: of the agent, by which others find it.
    """

    agents: ClassVar[dict[str, PretendedAgent]] = {}
    num_polls: ClassVar[int] = 3
    """How often a transfer is asked for before it is done."""
    fails_every: ClassVar[int] = 0
    """Every which transfer fails; 0 for none."""
    num_bytes: ClassVar[int] = 0
    """Copied by all agents."""
    num_transfers: ClassVar[int] = 0

    def __init__(self, name: str, config: Any = None) -> None:
        self.name = name
        self._registered: list[tuple[int, int]] = []
        self._lists: dict[int, tuple[str, Any]] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._notifications: dict[str, list[bytes]] = defaultdict(list)
        self._num_handles = 0
        self.agents[name] = self

    @classmethod
    def forget_all(cls) -> None:
        """Begin a test."""
        cls.agents.clear()
        cls.num_polls, cls.fails_every, cls.num_bytes, cls.num_transfers = 3, 0, 0, 0

    def _new_handle(self) -> int:
        self._num_handles += 1
        return self._num_handles

    # Memory

    def get_reg_descs(self, ranges: list[tuple[int, int, int, str]], mem_type: str) -> Any:
        """Return ranges of memory as ``register_memory`` takes them."""
        assert mem_type == "DRAM"
        return [(start, start + length) for start, length, _, _ in ranges]

    def register_memory(self, ranges: Any, backends: Any = None) -> None:
        """Let others read and write ranges."""
        self._registered += ranges

    def deregister_memory(self, ranges: Any) -> None:
        """Take ranges back."""
        for each in ranges:
            self._registered.remove(each)

    # Other agents

    def get_agent_metadata(self) -> bytes:
        """Return what ``add_remote_agent`` of another one takes."""
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        """Return the name of another agent."""
        return self.agents[metadata.decode()].name

    def remove_remote_agent(self, name: str) -> None:
        """Do nothing."""

    def send_notif(self, name: str, notif_msg: bytes) -> None:
        """Send bytes to another agent."""
        self.agents[name]._notifications[self.name].append(notif_msg)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Return what others have sent since the last call."""
        new, self._notifications = self._notifications, defaultdict(list)
        return new

    # Transfers

    def get_xfer_descs(self, blocks: Any, mem_type: str) -> Any:
        """Return pieces of memory, uint64 ``[N, 3]``."""
        return np.asarray(blocks, np.uint64).copy()

    def prep_xfer_dlist(self, name: str, blocks: Any) -> int:
        """Return a handle of pieces of this agent's memory, or of another one's."""
        owner = self if name == "NIXL_INIT_AGENT" else self.agents[name]
        for start, length, _ in blocks.tolist():
            assert any(low <= start and start + length <= high for low, high in owner._registered), (
                "not registered"
            )
        handle = self._new_handle()
        self._lists[handle] = owner.name, blocks
        return handle

    def release_dlist_handle(self, handle: int) -> None:
        """Forget such a handle."""
        del self._lists[handle]

    def make_prepped_xfer(
        self, operation: str, local: int, local_ids: Any, remote: int, remote_ids: Any, notif_msg: bytes = b""
    ) -> int:
        """Return a handle of a transfer of some pieces, which has not begun."""
        owner, remote_blocks = self._lists[remote]
        _, local_blocks = self._lists[local]
        here, there = local_blocks[np.asarray(local_ids)], remote_blocks[np.asarray(remote_ids)]
        assert (here[:, 1] == there[:, 1]).all(), "pieces of different lengths"
        cls = type(self)
        cls.num_transfers += 1
        fails = bool(cls.fails_every) and cls.num_transfers % cls.fails_every == 0
        handle = self._new_handle()
        self._transfers[handle] = _Transfer(
            operation == "READ", here, there, owner, notif_msg, cls.num_polls, fails
        )
        return handle

    def transfer(self, handle: int) -> str:
        """Begin a transfer."""
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        """Return whether a transfer is done; it is made when that is said."""
        each = self._transfers[handle]
        each.num_polls_left -= 1
        if each.num_polls_left > 0:
            return "PROC"
        if each.fails:
            # What a transfer leaves that was broken off.
            for address, length, _ in each.local.tolist():
                ctypes.memset(address, 0x7F, length // 2)
            return "ERR"
        for (here, length, _), (there, _, _) in zip(each.local.tolist(), each.remote.tolist(), strict=True):
            ctypes.memmove(*((here, there) if each.is_read else (there, here)), length)
            type(self).num_bytes += length
        if each.notification:
            self.send_notif(each.owner, each.notification)
        return "DONE"

    def get_xfer_telemetry(self, handle: int) -> Any:
        """Return counts of a transfer that is done."""
        blocks = self._transfers[handle].local
        num_bytes = int(blocks[:, 1].sum())
        return SimpleNamespace(xferDuration=1, postDuration=1, totalBytes=num_bytes, descCount=len(blocks))

    def release_xfer_handle(self, handle: int) -> None:
        """Forget a transfer."""
        del self._transfers[handle]
