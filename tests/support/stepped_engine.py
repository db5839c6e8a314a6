"""A vLLM engine of this process, stepped by hand, with Rose's block manager recounted after every step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

MAX_STEPS = 20_000


class SteppedEngine:
    """Drives ``LLMEngine.step``.

    Args:
        llm: a ``vllm.LLM`` that was started with ``VLLM_ENABLE_V1_MULTIPROCESSING=0``.

    Attributes:
        outputs: the latest output of each request since ``forget``, finished or not.
        num_preemptions: since the start.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.outputs: dict[str, Any] = {}
        self.num_preemptions = 0
        preempt = self.scheduler._preempt_request

        def count_preemption(*args: Any, **kwargs: Any) -> None:
            self.num_preemptions += 1
            preempt(*args, **kwargs)

        self.scheduler._preempt_request = count_preemption

    @property
    def manager(self) -> Any:
        """Rose's block manager proper."""
        return self.scheduler.kv_cache_manager.manager

    @property
    def is_busy(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self.engine.has_unfinished_requests())

    def add(
        self,
        name: str,
        prompt: Sequence[int] | dict[str, Any],
        params: Any,
        *,
        salt: str | None = None,
        **options: Any,
    ) -> None:
        """Queue a request, of tokens or of an input as vLLM's; ``options`` go to ``LLMEngine.add_request``."""
        inputs = dict(prompt) if isinstance(prompt, dict) else {"prompt_token_ids": list(prompt)}
        if salt is not None:
            inputs["cache_salt"] = salt
        self.engine.add_request(name, inputs, params, **options)

    def abort(self, name: str) -> None:
        """Abort a request, as a client that disconnects does."""
        self.engine.abort_request([name])
        self.manager.check_integrity()

    def step(self) -> list[Any]:
        """Run one engine step; return its outputs."""
        outputs = self.engine.step()
        self.outputs |= {output.request_id: output for output in outputs}
        self.manager.check_integrity()
        return list(outputs)

    def drain(self) -> dict[str, Any]:
        """Step until nothing is left, check that nothing is held, and return all outputs since the last call."""
        for _ in range(MAX_STEPS):
            if not self.is_busy:
                break
            self.step()
        else:
            raise AssertionError(f"{MAX_STEPS} steps, and requests are still unfinished")
        # An engine that overlaps steps may still have one under way, for requests that have ended meanwhile.
        while getattr(self.core, "batch_queue", None):
            self.step()
        assert self.manager.usage == 0.0 and not len(self.manager.clones.held_sources())
        outputs, self.outputs = self.outputs, {}
        return outputs

    def generate(self, prompts: Sequence[Sequence[int] | dict[str, Any]], params: Any) -> list[Any]:
        """Generate for all prompts at once, ``params`` one for all or one for each."""
        params_list = params if isinstance(params, list) else [params] * len(prompts)
        for index, (prompt, one) in enumerate(zip(prompts, params_list, strict=True)):
            self.add(f"generate-{index}", prompt, one)
        outputs = self.drain()
        return [outputs[f"generate-{index}"] for index in range(len(prompts))]

    def come_and_go(self, prompts: Sequence[Any], params: Any, seed: int) -> dict[int, Any]:
        """Serve prompts that arrive between steps, abort some at random, and preempt all once by a reset.

        Returns:
            The outputs of those that finished, by their index; an aborted one has said something, or nothing.
        """
        choose = random.Random(seed)
        for index, prompt in enumerate(prompts):
            self.add(f"{index}", prompt, params)
            if choose.random() < 0.3:
                self.step()
            if choose.random() < 0.1:
                self.abort(f"{choose.randrange(max(index - 20, 0), index + 1)}")
            if index == 3 * len(prompts) // 5:
                assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
        finished = {int(name): output for name, output in self.drain().items() if output.finished}
        assert 3 * len(prompts) // 4 < len(finished) < len(prompts)
        return finished

    def row_of(self, name: str) -> int:
        """Return the row of the block manager that a running request holds."""
        rows = self.scheduler.kv_cache_manager.running.row_of
        # vLLM appends a random suffix to the ids that callers give.
        (row,) = (row for request_id, row in rows.items() if request_id.startswith(f"{name}-"))
        return int(row)


def tokens_of(output: Any) -> tuple[int, ...]:
    """Return the tokens of an output's first completion."""
    return tuple(output.outputs[0].token_ids)


def overlap_steps_on_cpu(environment: pytest.MonkeyPatch) -> None:
    """Let CPU engines schedule a step before the one before it has delivered, as GPU engines do.

    vLLM switches asynchronous scheduling off on CPUs because it gains nothing there; its scheduler and its runner work
    all the same once the CUDA events are gone that they wait for.
    """
    import torch
    from vllm.platforms.cpu import CpuPlatform

    finish_config = CpuPlatform.check_and_update_config.__func__

    def keep_async_scheduling(cls: Any, vllm_config: Any) -> None:
        finish_config(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    class NoEvent:
        def __init__(self, **options: Any) -> None:
            pass

        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            pass

    environment.setattr(CpuPlatform, "check_and_update_config", classmethod(keep_async_scheduling))
    environment.setattr(torch.cuda, "Event", NoEvent)
    environment.setattr(torch.cuda, "current_stream", lambda: None)
