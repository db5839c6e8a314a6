"""The workers' sides of vLLM's ``NixlConnector`` in two engines: the second reads blocks of the first, rather late."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.outputs import KVConnectorOutput

from tests.support.vllm_plugin.fake_connector import WRONG
from tests.support.vllm_plugin.fake_worker import FakeWorker


class Sender:
    """The engine that computes prompts. It keeps the blocks of each until the other one has read them."""

    def __init__(self) -> None:
        self.kept: set[str] = set()
        self._read: set[str] = set()

    def follow(self, worker: FakeWorker) -> None:
        """Let others read from a worker."""
        self.worker = worker

    is_busy = True
    """Engines also run steps without tokens."""

    def note_read(self, request_id: str) -> None:
        """Note that blocks are no longer needed; that may come before the scheduler has said that they are kept."""
        self._read.add(request_id)

    def load(self, metadata: Any) -> KVConnectorOutput:
        """Take note of a step; return whose blocks have been read."""
        self.kept |= set(metadata.reqs_to_send)
        done = self.kept & self._read
        self.kept -= done
        self._read -= done
        return KVConnectorOutput(finished_sending=done, finished_recving=set())


@dataclass
class _Read:
    request_id: str
    local: list[int]
    remote: list[int]
    sender_id: str
    num_steps_left: int
    fails: bool


class Receiver:
    """The engine that goes on from there.

    Args:
        sender: that it reads from.
        share_failing: of reads.
    """

    def __init__(self, sender: Sender, share_failing: float = 0.0) -> None:
        self._sender, self._share_failing = sender, share_failing
        self._random = random.Random(9)
        self._reads: dict[str, _Read] = {}
        self.counts = dict.fromkeys(("reads", "parts", "nothing to read", "failed"), 0)

    def follow(self, worker: FakeWorker) -> None:
        """Write into a worker."""
        self.worker = worker

    @property
    def loading(self) -> list[str]:
        """Requests whose blocks are being read."""
        return list(self._reads)

    is_busy = True
    """Engines also run steps without tokens."""

    def load(self, metadata: Any) -> KVConnectorOutput:
        """Begin the reads of a step and go on with others; return which are done."""
        for request_id, request in metadata.reqs_to_recv.items():
            local = [block for group in request.local_block_ids for block in group]
            if not local:
                self.counts["nothing to read"] += 1
                self._sender.note_read(request.remote.request_id)
                continue
            (remote,) = request.remote.block_ids
            self.counts["reads"] += 1
            self.counts["parts"] += len(local) < len(remote)
            fails = self._random.random() < self._share_failing
            # Of a prompt that begins with cached blocks only the end is read. Nobody may see it meanwhile.
            self.worker.memory[local] = WRONG
            self._reads[request_id] = _Read(
                request_id,
                local,
                remote[-len(local) :],
                request.remote.request_id,
                self._random.randrange(8),
                fails,
            )
        output = KVConnectorOutput(finished_sending=set(), finished_recving=set())
        for read in list(self._reads.values()):
            read.num_steps_left -= 1
            if read.num_steps_left < 0:
                self._finish(read, output)
        return output

    def _finish(self, read: _Read, output: KVConnectorOutput) -> None:
        del self._reads[read.request_id]
        if read.fails:
            self.counts["failed"] += 1
            output.failed_recving.add(read.request_id)
        else:
            self.worker.memory[read.local] = np.array(self._sender.worker.memory[read.remote])
        output.finished_recving.add(read.request_id)
        self._sender.note_read(read.sender_id)
