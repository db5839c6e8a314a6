"""``vllm serve`` on a device that takes the same time for every step and draws made-up tokens: the host's work remains.

For servers on a machine without a GPU, where a real model's steps would hide what the API server and the scheduler can
do. Everything but the model runs as it does on a GPU: HTTP, checks, scheduler, block manager, messages, texts. Needs
vLLM's CPU build. ``servers.server_command`` starts it; the environment says how long a step takes.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from benchmarks.support.engines import STEP_MS

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_FIRST_TOKEN, _NUM_TOKENS = 300, 2000
"""Drawn in turn, of any vocabulary: ordinary words, as the first few hundred are bytes and the last may be special."""


class ConstantDevice:
    """Knows how many tokens each request has: one more is drawn in a step that computes all of them."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._num_known: dict[str, int] = {}

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Return the tokens of a step when its time is over."""
        start = time.perf_counter()
        for request_id in step.finished_req_ids:
            self._num_known.pop(request_id, None)
        running = step.scheduled_cached_reqs
        computed = dict(zip(running.req_ids, running.num_computed_tokens, strict=True))
        for new in step.scheduled_new_reqs:
            self._num_known[new.req_id] = len(new.prompt_token_ids or ())
            computed[new.req_id] = new.num_computed_tokens
        token_ids: list[list[int]] = []
        for request_id, count in step.num_scheduled_tokens.items():
            end = computed[request_id] + count
            is_due = end == self._num_known[request_id]
            self._num_known[request_id] += is_due
            token_ids.append([_FIRST_TOKEN + end % _NUM_TOKENS] if is_due else [])
        if step.num_scheduled_tokens:
            time.sleep(max(self._step_s - (time.perf_counter() - start), 0.0))
        request_ids = list(step.num_scheduled_tokens)
        index = {request_id: index for index, request_id in enumerate(request_ids)}
        return ModelRunnerOutput(req_ids=request_ids, req_id_to_index=index, sampled_token_ids=token_ids)


# At import, and not below: the engine's own process is spawned, and imports this module before anything else.
_device = ConstantDevice(float(os.environ.get(STEP_MS, "1")) * 1e-3)
CPUWorker.execute_model = lambda worker, step: _device.run(step)  # type: ignore[method-assign]

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
