"""Rose's scheduler with batched steps and without, in lockstep: every step and output is compared field by field."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

from tests.support.vllm_plugin.configs import MakeConfig
from tests.support.vllm_plugin.simulation import Simulation, make_simulation


class Pair:
    """Rose's scheduler with batched steps and without, in lockstep.

    Steps, outputs and the requests that are left must be equal, field by field, block ids included.

    Args:
        make_connector: makes the KV connector of a side.
    """

    def __init__(
        self, make_config: MakeConfig, make_connector: Callable[[], Any] | None = None, **options: Any
    ) -> None:
        self.batched, self.stock = self.sides = tuple(
            make_simulation(
                make_config,
                additional_config=batching(is_batched),
                connector=make_connector and make_connector(),
                **options,
            )
            for is_batched in (True, False)
        )
        self.outputs: dict[str, list[int]] = {}
        self.published: list[list[Any]] = [[], []]
        for side, published in zip(self.sides, self.published, strict=True):
            side.scheduler.kv_event_publisher.publish = lambda batch, p=published: p.extend(batch.events)
        self.num_batched_steps = self.num_split_steps = self.num_tokens = self.num_batched_tokens = 0
        self.num_steps_with_waiting = self.num_batched_with_waiting = 0
        self._count_what_is_batched()

    def _count_what_is_batched(self) -> None:
        scheduler = self.batched.scheduler
        schedule_all, schedule_rest = scheduler._schedule_all, scheduler._schedule_rest
        fast_outputs_of = scheduler._fast_outputs_of

        def counting_all(*args: Any) -> Any:
            self.num_batched_steps += 1
            return schedule_all(*args)

        def counting_rest(*args: Any) -> Any:
            self.num_split_steps += 1
            return schedule_rest(*args)

        scheduler._schedule_all, scheduler._schedule_rest = counting_all, counting_rest
        scheduler._fast_outputs_of = lambda output: self._counting(fast_outputs_of(output))

    def _counting(self, fast_outputs: Any) -> Any:
        """Return the fast path of a step, the same object, which counts its tokens from now on."""
        if fast_outputs is not None and "append_tokens" not in vars(fast_outputs):
            append_tokens = fast_outputs.append_tokens

            def counting(*args: Any) -> Any:
                appended = append_tokens(*args)
                self.num_batched_tokens += sum(appended.counts or [1] * len(appended.request_ids))
                return appended

            fast_outputs.append_tokens = counting
        return fast_outputs

    def step(self) -> None:
        """Schedule on both sides; take over the oldest result once enough steps are in flight."""
        num_batched = self.num_batched_steps + self.num_split_steps
        has_waiting = bool(self.stock.scheduler.waiting)
        outputs = [_schedule(side) for side in self.sides]
        self.num_steps_with_waiting += has_waiting
        is_batched = self.num_batched_steps + self.num_split_steps > num_batched
        self.num_batched_with_waiting += has_waiting and is_batched
        assert_equal(*map(comparable_step, outputs), "SchedulerOutput")
        in_flight = self.batched.in_flight
        was_run = in_flight and in_flight[-1][0] is outputs[0]
        if in_flight and (len(in_flight) >= self.batched.depth or not was_run):
            self._update()
        assert_equal(*(comparable_scheduler(side.scheduler) for side in self.sides), "Scheduler")
        for request_id, request in self.stock.scheduler.requests.items():
            other = self.batched.scheduler.requests[request_id]
            assert_equal(*map(comparable_request, (other, request)), request_id)
        assert self.published[0] == self.published[1]
        # On both sides: asking for the manager releases what has ended, and when that is decides on later blocks.
        for side in self.sides:
            side.manager.check_integrity()

    def _update(self) -> None:
        num_batched, transferred = self.num_batched_tokens, self.batched.in_flight[0][1].kv_connector_output
        results = [side.scheduler.update_from_output(*side.in_flight.popleft()) for side in self.sides]
        if transferred is not None and transferred.invalid_block_ids:
            assert self.num_batched_tokens == num_batched, "tokens of a step whose loads failed"
        for output in (output for result in results[1].values() for output in result.outputs):
            self.outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
            self.num_tokens += len(output.new_token_ids)
        assert_equal(*map(comparable_results, results), "EngineCoreOutputs")

    checked_step = step

    @property
    def scheduler(self) -> Any:
        return self.stock.scheduler

    @property
    def worker(self) -> Any:
        return self.stock.worker

    @property
    def is_busy(self) -> bool:
        return self.stock.is_busy

    def add(self, *makers: Callable[[], Request]) -> Request:
        return [side.add(*makers) for side in self.sides][-1]

    def for_all(self, call: Callable[[Any], Any]) -> None:
        for side in self.sides:
            side.for_all(call)


def batching(is_on: bool) -> dict[str, Any]:
    return {"rose": {"batched_scheduling": is_on}}


def _schedule(side: Simulation) -> Any:
    output = side.scheduler.schedule()
    if (result := side.execute(output)) is not None:
        result.logprobs = _logprobs_of(result.sampled_token_ids)
        if side.scheduler.current_step % 7 == 0:
            # Something that vLLM's code handles for the whole step.
            result.num_nans_in_logits = {}
        side.in_flight.append((output, result))
    return output


def _logprobs_of(sampled: list[list[int]]) -> LogprobsLists:
    rows = [new or [-1] for new in sampled]
    tokens = np.array([token for new in rows for token in new], np.int32).reshape(-1, 1)
    starts = [0, *np.cumsum([len(new) for new in rows]).tolist()]
    # Without drafts a request's row is its index.
    return LogprobsLists(
        tokens, -tokens.astype(np.float32), tokens[:, 0], starts if starts[-1] > len(rows) else None
    )


def assert_equal(batched: dict[str, Any], stock: dict[str, Any], what: str) -> None:
    assert batched.keys() == stock.keys(), what
    for name, value in stock.items():
        assert batched[name] == value, f"{what}.{name}: batched {batched[name]}, vLLM's own {value}"


def comparable_scheduler(scheduler: Any) -> dict[str, Any]:
    fields = {
        name: getattr(scheduler, name)
        for name in (
            *("finished_req_ids", "reset_preempted_req_ids", "prev_step_scheduled_req_ids", "current_step"),
            *("prefill_capacity_bound", "max_num_scheduled_tokens", "max_num_active_reqs"),
            *("sched_step_seq", "processed_step_seq", "finished_recving_kv_req_ids"),
        )
    }
    fields["deferred_frees"] = [fence for fence, _ in scheduler.deferred_frees]
    encoder_cache = scheduler.encoder_cache_manager
    fields["freeable"] = list(encoder_cache.freeable)
    for name in ("cached", "request_cached_ids"):
        fields[name] = {key: sorted(value) for key, value in getattr(encoder_cache, name).items() if value}
    for name in ("running", "waiting", "kv_holding_waiting"):
        fields[name] = [request.request_id for request in getattr(scheduler, name)]
    return fields


def comparable_step(output: Any) -> dict[str, Any]:
    fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    fields["scheduled_cached_reqs"] = dataclasses.asdict(output.scheduled_cached_reqs)
    fields["scheduled_new_reqs"] = [str(new) for new in output.scheduled_new_reqs]
    fields["order"] = list(output.num_scheduled_tokens)
    fields["kv_connector_metadata"] = repr(output.kv_connector_metadata)
    return fields


def comparable_results(results: dict[int, Any]) -> dict[str, Any]:
    """By request: those to which something happens come first in a batched step, and their order says nothing."""
    by_name: dict[str, Any] = {"clients": sorted(results)}
    by_name["stats"] = [r.scheduler_stats for r in results.values() if r.scheduler_stats is not None]
    for stats in by_name["stats"]:
        # Times among them.
        stats.kv_connector_stats = None
    for client, result in results.items():
        by_name[f"finished of {client}"] = result.finished_requests
        for output in result.outputs:
            fields = {name: getattr(output, name) for name in output.__struct_fields__}
            fields["events"] = [event.type for event in output.events or ()]
            fields["new_logprobs"] = str(output.new_logprobs)
            assert by_name.setdefault(f"{client}/{output.request_id}", fields) is fields, "two outputs"
    return by_name


def comparable_request(request: Request) -> dict[str, Any]:
    fields = dict(vars(request))
    for name in ("sampling_params", "structured_output_request", "streaming_queue", "arrival_time"):
        del fields[name]
    # Which step comes next for a request matters with pipeline stages only.
    del fields["next_decode_eligible_step"]
    for name in ("output_token_ids", "all_token_ids"):
        fields[name] = list(fields[name])
    fields["events"] = [event.type for event in request.events]
    return fields
