"""Steps in flight of a server, watched by a ``Pacer``."""

from __future__ import annotations

from rose_backend.engine.late_commits import Int64Array
from rose_backend.engine.model_runner import SampledTokens
from rose_backend.engine.pacing import Pacer, StepLoad
from rose_backend.engine.prompt_cap import PromptCap
from rose_backend.engine.scheduler import Step
from rose_backend.engine.step_pipeline import PipelineParts, StepPipeline, _StepInFlight


class PacedPipeline(StepPipeline):
    """A ``StepPipeline`` that knows how long steps take, and keeps prompts from stalling running texts.

    Args: those of ``StepPipeline``.
    """

    def __init__(self, parts: PipelineParts, depth: int) -> None:
        super().__init__(parts, depth)
        scheduler = parts.scheduler
        self.pacer = Pacer(can_hold=parts.device.type != "cpu")
        self._cap = PromptCap(self.pacer.times, scheduler.token_budget) if scheduler.splits_prompts else None
        self._had_prompts = False

    def advance(self, num_undecided: int = 0) -> tuple[Int64Array, SampledTokens] | None:
        scheduler = self._scheduler
        if self._cap is not None and (scheduler.waiting or self._had_prompts):
            scheduler.token_budget = self._cap.budget(
                len(scheduler.running_rows), scheduler.num_decoding, scheduler.waiting
            )
        elif self._cap is not None:
            scheduler.token_budget = self._cap.most
        return super().advance(num_undecided)

    def drop(self) -> None:
        super().drop()
        self.pacer.forget()

    def _start(self, step: Step) -> _StepInFlight:
        begun_at = self.pacer.clock()
        started = super()._start(step)
        num_prompt_tokens = int(step.num_new_tokens[step.num_decodes :].sum())
        self._had_prompts = num_prompt_tokens > 0
        self._note(StepLoad(step.num_decodes, num_prompt_tokens), begun_at)
        return started

    def _start_again(self, last: _StepInFlight) -> _StepInFlight:
        begun_at = self.pacer.clock()
        started = super()._start_again(last)
        self._had_prompts = False
        self._note(StepLoad(len(last.decode_rows), 0), begun_at)
        return started

    def _note(self, load: StepLoad, begun_at: float) -> None:
        before = self._in_flight[-1].is_over if self._in_flight else None
        self.pacer.started(load, begun_at, is_first=before is None or before.query())

    def _wait(self, step: _StepInFlight) -> None:
        # Without events the device is the host: it has just seen every step end.
        was_over = step.is_over is not None and step.is_over.query()
        super()._wait(step)
        self.pacer.over(was_seen=not was_over)
