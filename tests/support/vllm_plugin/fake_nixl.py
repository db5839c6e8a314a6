"""Two engines with vLLM's ``NixlConnector``: the second one's worker reads blocks of the first, rather late."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from rose_backend.conformance.block_manager.pretended_model import VOCAB_SIZE, expected_output
from tests.support.vllm_plugin.configs import MakeConfig, connector, rose
from tests.support.vllm_plugin.fake_connector import WRONG
from tests.support.vllm_plugin.fake_worker import FakeWorker
from tests.support.vllm_plugin.simulation import Simulation, make_request, make_simulation
from tests.support.vllm_plugin.traffic import make_hasher

HASHER = make_hasher()


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


@dataclass
class Engines:
    """An engine that computes prompts and one that goes on from there, and what has become of requests."""

    prefill: Simulation
    decode: Simulation
    sender: Sender
    receiver: Receiver
    transfers: dict[str, Any] = field(default_factory=dict)
    """What the first engine has told of the prompts that it has computed, until the second one is asked to go on."""
    requests: dict[str, Any] = field(default_factory=dict)
    """Of the second engine."""
    ended: dict[str, str] = field(default_factory=dict)
    """How requests of the second engine ended that were cut short."""

    @property
    def is_busy(self) -> bool:
        """Whether anything is left to do."""
        is_serving = self.prefill.scheduler.requests or self.decode.scheduler.requests
        return bool(is_serving or self.sender.kept or self.receiver.loading or self.transfers)

    def abort(self, name: str) -> None:
        """Abort a request of the second engine."""
        if not self.requests[name].is_finished():
            loading = name in self.receiver.loading
            self.decode.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.ended[name] = "aborted while it was read" if loading else "aborted"


def make_engines(
    make_config: MakeConfig, depth: int, is_batched: bool, num_decode_blocks: int, share_failing: float
) -> Engines:
    sender = Sender()
    receiver = Receiver(sender, share_failing)
    sides = [
        make_simulation(
            make_config,
            depth=depth,
            connector=worker,
            num_blocks=num_blocks,
            block_size=16,
            max_num_seqs=8,
            **rose(batched_scheduling=is_batched),
            **connector("NixlConnector", kv_role=role),
        )
        for role, worker, num_blocks in (
            ("kv_producer", sender, 100),
            ("kv_consumer", receiver, num_decode_blocks),
        )
    ]
    engines = Engines(*sides, sender, receiver)
    finish = engines.prefill.scheduler.connector.request_finished_all_groups

    def keep_parameters(request: Any, block_ids: Any) -> Any:
        is_kept, parameters = finish(request, block_ids)
        if is_kept:
            engines.transfers[request.request_id] = parameters
        return is_kept, parameters

    engines.prefill.scheduler.connector.request_finished_all_groups = keep_parameters
    return engines


def run_traffic(engines: Engines, num_requests: int = 150) -> dict[str, list[int]]:
    """Have prompts that share beginnings computed here and continued there; abort some of either side."""
    draw, expected = random.Random(3), dict[str, list[int]]()
    stems = [[draw.randrange(VOCAB_SIZE) for _ in range(100)] for _ in range(12)]
    prompts: dict[str, list[int]] = {}
    while len(prompts) < num_requests or engines.is_busy:
        if len(prompts) < num_requests and draw.random() < 0.4:
            name = f"r{len(prompts)}"
            prompts[name] = [*draw.choice(stems)[: draw.randrange(1, 100)], draw.randrange(VOCAB_SIZE)]
            request = make_request(name, prompts[name], 1, block_hasher=HASHER)
            request.kv_transfer_params = {"do_remote_decode": True, "do_remote_prefill": False}
            engines.prefill.scheduler.add_request(request)
        for name in list(engines.transfers):
            if draw.random() < 0.5:
                continue
            max_tokens = draw.randrange(1, 30)
            request = make_request(name, prompts[name], max_tokens, block_hasher=HASHER)
            request.kv_transfer_params = engines.transfers.pop(name)
            expected[name] = expected_output(prompts[name], max_tokens)
            engines.requests[name] = request
            engines.decode.scheduler.add_request(request)
            if draw.random() < 0.1:
                # Before it was ever scheduled.
                engines.abort(name)
        if draw.random() < 0.1 and engines.decode.scheduler.requests:
            engines.abort(draw.choice(engines.receiver.loading or list(engines.decode.scheduler.requests)))
        if draw.random() < 0.02 and engines.prefill.scheduler.running:
            victim = draw.choice(engines.prefill.scheduler.running).request_id
            engines.prefill.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
        engines.prefill.checked_step()
        engines.decode.checked_step()
    return expected
