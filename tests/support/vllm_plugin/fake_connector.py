"""A KV connector whose other side has computed every prompt already, up to a length of its choice.

It loads in the step that needs the tokens, or meanwhile for some steps; some loads fail. Some requests are sent when
they have finished, and their blocks are read some steps later. It writes into, and reads from, the slots of a
``FakeWorker``, and checks what it is told of blocks.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from rose_backend.conformance.block_manager.pretended_model import chain, with_contents
from tests.support.vllm_plugin.fake_worker import FakeWorker

WRONG = -9
"""What a failed load leaves behind."""


@dataclass
class Transfer:
    """One load or send: token positions ``first`` to ``last``, in blocks of a request."""

    request: Request = field(repr=False)
    block_ids: list[int]
    first: int
    last: int
    states: list[int]
    num_steps_left: int = 0
    fails: bool = False


@dataclass
class Loads(KVConnectorMetadata):
    """What a step has to load before it runs."""

    now: list[Transfer] = field(default_factory=list)


class FakeConnector(KVConnectorBase_V1):
    """Both sides of it, scheduler's and worker's.

    Args:
        share_failing: of loads.
        share_sent: of requests that finish.
        is_async: whether steps do not wait for loads; None: some do.
        num_send_steps: how long a request is being sent; None: 2 to 7 steps.
    """

    def __init__(
        self,
        *,
        share_failing: float = 0.0,
        share_sent: float = 0.4,
        is_async: bool | None = None,
        num_send_steps: int | None = None,
    ) -> None:  # not the base's, which wants a configuration
        self._share_sent, self._is_async, self._num_send_steps = share_sent, is_async, num_send_steps
        self._random = random.Random(5)
        self._share_failing = share_failing
        self._looked_up: dict[str, tuple[int, bool]] = {}
        self._to_load: list[Transfer] = []
        self._loading: dict[str, Transfer] = {}
        self._waited_for: dict[str, int] = {}
        """Last token of each request's last load that a step waits for."""
        self._sending: dict[str, Transfer] = {}
        self._requests: dict[str, Request] = {}
        self._tables: dict[str, list[int]] = {}
        self.counts = dict.fromkeys(("loads", "async loads", "failed", "sends", "ended while loading"), 0)

    @property
    def loading(self) -> list[str]:
        """Requests whose loads no step waits for."""
        return list(self._loading)

    @property
    def is_busy(self) -> bool:
        """Whether a transfer is under way."""
        return bool(self._to_load or self._loading or self._sending)

    # The scheduler's side

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many more tokens of the prompt the other side has, the same for each call."""
        self._requests[request.request_id] = request
        draw = random.Random(zlib.crc32(request.request_id.encode()))
        is_async, num_prompt_tokens = draw.random() < 0.5, request.num_prompt_tokens
        if self._is_async is not None:
            is_async = self._is_async
        # The last token is computed here, or again if its load is not waited for by a step.
        is_whole = is_async and draw.random() < 0.4
        # vLLM takes the last token back. Of a prompt of one token nothing is left, and it would ask again for ever.
        limit = num_prompt_tokens if is_whole and num_prompt_tokens > 1 else num_prompt_tokens - 1
        num_remote = draw.randrange(limit + 1)
        if num_remote < num_prompt_tokens:
            num_remote -= num_remote % self.block_size
        num_tokens = max(num_remote - num_computed_tokens, 0)
        self._looked_up[request.request_id] = num_computed_tokens, is_async and num_tokens > 0
        return num_tokens, is_async and num_tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Begin a load into the blocks behind those that were found here."""
        if not num_external_tokens:
            return
        first, is_async = self._looked_up.pop(request.request_id)
        (block_ids,) = blocks.get_block_ids()
        num_found = first // self.block_size
        assert first % self.block_size == 0, "a load would begin inside a block"
        assert blocks.get_unhashed_block_ids() == block_ids[num_found:]
        (handles,) = blocks.blocks
        assert [each.block_hash is None for each in handles] == [
            index >= num_found for index in range(len(block_ids))
        ]
        last = first + num_external_tokens
        load = Transfer(request, block_ids, first, last, states_of(request, last))
        load.fails = self._random.random() < self._share_failing
        if is_async:
            load.num_steps_left = self._random.randrange(5)
            self._loading[request.request_id] = load
        else:
            self._to_load.append(load)
            self._waited_for[request.request_id] = last
        self.counts["async loads" if is_async else "loads"] += 1
        self.counts["failed"] += load.fails

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return the only group."""
        return (0,)

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        """Hand over what the step needs, and check that it tells of all requests, as they are before it."""
        self._follow_step(scheduler_output)
        now, self._to_load = self._to_load, []
        return Loads(now)

    def _follow_step(self, output: Any) -> None:
        for request_id in output.finished_req_ids:
            self._tables.pop(request_id, None)
        cached = output.scheduled_cached_reqs
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
        for request_id, new_ids, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = []
            self._tables[request_id] += new_ids[0] if new_ids else []
            assert self._requests[request_id].num_computed_tokens == num_computed
        names = [*cached.req_ids, *(new.req_id for new in output.scheduled_new_reqs)]
        assert sorted(names) == sorted(output.num_scheduled_tokens)
        assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())
        for name in names:
            assert output.kv_connector_block_state.get_block_ids(name) == (self._tables[name],)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Forget loads whose end the scheduler has heard of."""
        for request_id in connector_output.finished_recving or ():
            del self._loading[request_id]

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        """Send the blocks of some requests; they are read later, and must not change meanwhile."""
        if request.request_id in self._loading:
            self.counts["ended while loading"] += 1
            return False, None
        num_tokens = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens)
        # Whether a load has failed that a step waits for is known with the token that the step computes behind it.
        num_loaded = self._waited_for.pop(request.request_id, 0)
        if request.status == RequestStatus.FINISHED_ERROR or num_tokens <= num_loaded:
            return False, None
        if self._random.random() >= self._share_sent:
            return False, None
        states = states_of(request, num_tokens)
        self._sending[request.request_id] = Transfer(
            request,
            list(block_ids),
            0,
            num_tokens,
            states,
            self._num_send_steps or self._random.randrange(2, 8),
        )
        self.counts["sends"] += 1
        return True, None

    # The worker's side

    @property
    def block_size(self) -> int:
        """Tokens per block of the worker."""
        return self.worker.block_size

    def follow(self, worker: FakeWorker) -> None:
        """Load into, and read from, a worker."""
        self.worker = worker

    def load(self, metadata: Loads) -> KVConnectorOutput:
        """Do what a step waits for and go on with the rest; return what has come of it."""
        output = KVConnectorOutput(finished_sending=set(), finished_recving=set())
        for load in metadata.now:
            self._arrive(load, output)
        for request_id, load in self._loading.items():
            load.num_steps_left -= 1
            if load.num_steps_left == -1:
                self._arrive(load, output)
                output.finished_recving.add(request_id)
        for request_id, send in list(self._sending.items()):
            send.num_steps_left -= 1
            if send.num_steps_left < 0:
                del self._sending[request_id]
                blocks, offsets = self._slots(send)
                sent = self.worker.memory[blocks, offsets].tolist()
                assert sent == send.states, f"{request_id}: blocks changed while they were sent"
                output.finished_sending.add(request_id)
        return output

    def _arrive(self, load: Transfer, output: KVConnectorOutput) -> None:
        blocks, offsets = self._slots(load)
        self.worker.memory[blocks, offsets] = WRONG if load.fails else load.states[load.first :]
        if load.fails:
            if load.request.request_id not in self._loading:
                # Its step runs all the same.
                self.worker.broken.add(load.request.request_id)
            output.invalid_block_ids.update(int(block) for block in blocks)

    def _slots(self, transfer: Transfer) -> tuple[Any, Any]:
        positions = np.arange(transfer.first, transfer.last)
        return np.array(transfer.block_ids)[positions // self.block_size], positions % self.block_size

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


def states_of(request: Request, num_tokens: int) -> list[int]:
    """Return what the first slots of a request hold."""
    states: list[int] = []
    for token in with_contents(request._all_token_ids[:num_tokens], request.mm_features):
        states.append(chain(states[-1] if states else 0, token))
    return states


class FakeOffloading:
    """The worker's side of vLLM's ``OffloadingConnector``: chunks of blocks, copied as late as it may.

    Args:
        max_steps: that a copy takes at most, unless the scheduler has it waited for.
    """

    def __init__(self, max_steps: int = 12) -> None:
        self._random, self._max_steps = random.Random(3), max_steps
        self._chunks: dict[int, Any] = {}
        self._unsubmitted: dict[int, Any] = {}
        self._under_way: dict[int, tuple[Any, bool, int]] = {}
        self.num_stored = self.num_loaded = self.num_waited_for = 0

    def follow(self, worker: FakeWorker) -> None:
        """Load into, and store from, a worker."""
        self.worker = worker

    @property
    def is_busy(self) -> bool:
        """Whether a copy is under way."""
        return bool(self._unsubmitted or self._under_way)

    def load(self, metadata: OffloadingConnectorMetadata) -> KVConnectorOutput:
        """Go on at the beginning of a step; return what is done."""
        done = OffloadingWorkerMetadata()
        output = KVConnectorOutput(finished_recving=set(), kv_connector_worker_meta=done)
        # Blocks of these jobs are about to be written.
        flushed = {
            job_id: metadata.store_jobs.pop(job_id)
            for job_id in metadata.jobs_to_flush or ()
            if job_id in metadata.store_jobs
        }
        for job_id, job in {**self._unsubmitted, **flushed}.items():
            self._begin(job_id, job, is_load=False)
        for job_id in metadata.jobs_to_flush or ():
            if job_id in self._under_way:
                self.num_waited_for += 1
                self._finish(job_id, output, done)
        for job_id, job in metadata.load_jobs.items():
            self._begin(job_id, job, is_load=True)
        self._unsubmitted = dict(metadata.store_jobs)
        for job_id, (job, is_load, num_steps) in list(self._under_way.items()):
            if num_steps == 0:
                self._finish(job_id, output, done)
            else:
                self._under_way[job_id] = job, is_load, num_steps - 1
        return output

    def _begin(self, job_id: int, job: TransferJob, *, is_load: bool) -> None:
        self._under_way[job_id] = job, is_load, self._random.randrange(self._max_steps)

    def _finish(self, job_id: int, output: KVConnectorOutput, done: OffloadingWorkerMetadata) -> None:
        job, is_load, _ = self._under_way.pop(job_id)
        memory = self.worker.memory
        here, there = (job.dst_spec, job.src_spec) if is_load else (job.src_spec, job.dst_spec)
        for block_id, chunk_id in zip(here.block_ids.tolist(), there.block_ids.tolist(), strict=True):
            if is_load:
                memory[block_id] = self._chunks[chunk_id]
            else:
                self._chunks[chunk_id] = memory[block_id].copy()
        self.num_loaded += is_load
        self.num_stored += not is_load
        done.mark_completed(job_id)
        if is_load:
            output.finished_recving.add(job.req_id)
