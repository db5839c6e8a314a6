"""The engine itself, without threads or event loops: take requests, run one step at a time, hand out outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rose_backend.block_manager import BlockManager
from rose_backend.config import EngineConfig
from rose_backend.engine.model_runner import ModelRunner
from rose_backend.engine.output_processor import OutputProcessor
from rose_backend.engine.outputs import RequestOutput
from rose_backend.engine.request import Completion, Request, RequestFactory
from rose_backend.engine.row_state import RowState
from rose_backend.engine.scheduler import Scheduler
from rose_backend.engine.start_up import LoadedModel, load
from rose_backend.engine.step_pipeline import StepPipeline
from rose_backend.errors import EngineDeadError, IntegrityError, RequestError


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counted since the engine started."""

    steps: int
    computed_tokens: int
    """Tokens that went through the model, of whatever kind."""
    prompt_tokens_computed: int
    """Prompt tokens computed for the first time; a prompt with ``n`` completions counts once."""
    recomputed_tokens: int
    """Tokens computed again after a preemption."""
    generated_tokens: int
    cached_tokens: int
    """Prompt tokens supplied by the prefix cache."""
    preemptions: int
    clones: int
    """Blocks copied because a sequence wrote behind a shared part-filled block."""


class EngineCore:
    """One model, one KV pool, one queue. Not thread-safe: one thread calls it.

    Args:
        config: checked options; loading starts here.

    Raises:
        ConfigError: the options do not fit the model or the machine.
        ModelError: the model cannot be loaded.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        loaded = load(config)
        self.max_model_len = loaded.max_model_len
        self.num_blocks = loaded.num_blocks
        self.tokenizer = loaded.tokenizer
        self.parts = loaded.parts
        self.factory = RequestFactory(
            loaded.tokenizer,
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            max_num_seqs=config.max_num_seqs,
            seed=config.seed,
        )
        self._build(loaded)
        self._requests: dict[str, Request] = {}
        self._generated_tokens = 0
        self._failure: BaseException | None = None

    @property
    def num_waiting(self) -> int:
        """Requests that have no row yet, preempted ones included."""
        return len(self._scheduler.waiting)

    @property
    def num_unfinished(self) -> int:
        """Requests that run or wait."""
        return len(self._requests)

    @property
    def is_alive(self) -> bool:
        """False once a step has failed."""
        return self._failure is None

    @property
    def stats(self) -> EngineStats:
        """Counters since the start."""
        counters, steps = self._scheduler.counters, self._pipeline.counters
        return EngineStats(
            steps=steps.steps,
            computed_tokens=steps.computed_tokens,
            prompt_tokens_computed=steps.prompt_tokens_computed,
            recomputed_tokens=steps.recomputed_tokens,
            generated_tokens=self._generated_tokens,
            cached_tokens=counters.cached_tokens,
            preemptions=counters.preemptions,
            clones=self.manager.stats.clones,
        )

    def add(self, request: Request) -> None:
        """Queue a request made by ``factory``.

        Raises:
            RequestError: the queue is full, or another unfinished request has the same id; nothing has changed.
            EngineDeadError: the engine has failed before.
        """
        self._check_alive()
        if self.num_waiting >= self.config.max_queue_size:
            raise RequestError(
                f"queue: got a request while {self.num_waiting} wait, allowed are {self.config.max_queue_size} "
                "(max_queue_size)"
            )
        if request.request_id in self._requests:
            raise RequestError(
                f"request_id: got {request.request_id!r}, which an unfinished request has",
                parameter="request_id",
            )
        self._requests[request.request_id] = request
        self._scheduler.waiting.append(request.completions[0])

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and free all it holds; other requests do not notice.

        Returns:
            Its last output, with ``finish_reason`` "abort" where a completion had not finished; None for an unknown id.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        unfinished = [completion for completion in request.completions if not completion.is_finished]
        self._release([completion for completion in unfinished if completion.row >= 0])
        queued = [completion for completion in unfinished if completion in self._scheduler.waiting]
        for completion in queued:
            self._scheduler.waiting.remove(completion)
        for completion in unfinished:
            self._outputs.close(completion, "abort")
        output = self._outputs.request_output(request)
        output.finished = True
        return output

    def step(self) -> list[RequestOutput]:
        """Start one step, and take in what an earlier one has drawn; without run-ahead, this one.

        Returns:
            An output for each request that has finished, and for each streaming one with a new token.

        Raises:
            EngineDeadError: the step failed, now or before; its cause is chained. The engine serves nothing more.
        """
        self._check_alive()
        try:
            return self._advance()
        except Exception as error:
            self._failure = error
            raise EngineDeadError(f"the engine stopped in {self._where()}: {_describe(error)}") from error
        except BaseException as error:
            # Ctrl-C, too, can leave rows and reservations half-way: going on could give wrong text.
            self._failure = error
            raise

    def check_integrity(self) -> None:
        """Recount the block manager's invariants, and that an idle engine holds nothing.

        Raises:
            IntegrityError: names what is broken.
        """
        self.manager.check_integrity()
        if not self._requests and self.manager.num_free_blocks != self.manager.num_usable_blocks:
            held = self.manager.num_usable_blocks - self.manager.num_free_blocks
            raise IntegrityError(f"no request is left, but {held} blocks are held")

    def _build(self, loaded: LoadedModel) -> None:
        config = self.config
        self.manager = BlockManager(
            num_blocks=loaded.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=loaded.max_model_len,
            prefix_cache=config.prefix_cache,
            bytes_per_block=loaded.kv_cache.nbytes // loaded.num_blocks,
        )
        self._rows = RowState(config.max_num_seqs, loaded.max_model_len)
        self._scheduler = Scheduler(config, self.manager, self._rows, self.factory)
        self._runner = ModelRunner(
            loaded.model, config, self.manager, self._rows, loaded.kv_cache, loaded.eos_token_ids
        )
        if loaded.captures_graphs:
            self._runner.capture()
        self._pipeline = StepPipeline(
            self.manager, self._rows, self._scheduler, self._runner, loaded.device, loaded.run_ahead
        )
        self._outputs = OutputProcessor(self._rows, loaded.tokenizer, loaded.eos_token_ids)

    def _advance(self) -> list[RequestOutput]:
        read = self._pipeline.advance()
        if read is None:
            return []
        rows, sampled = read
        self._generated_tokens += len(rows)
        finished_rows, news = self._outputs.apply(rows, sampled)
        if len(finished_rows):
            self._scheduler.release(finished_rows)
        outputs = self._collect(news)
        if not self._requests:
            self._pipeline.drop()
        return outputs

    def _where(self) -> str:
        """Say which step it is and whom it served, for the one report of a failure."""
        rows = self._scheduler.running_rows
        newest = list(self._requests)[-3:]
        return (
            f"step {self._pipeline.counters.steps} with {len(rows)} rows, newest requests {', '.join(newest)}"
        )

    def _collect(self, news: Iterable[Completion]) -> list[RequestOutput]:
        outputs = []
        for request in dict.fromkeys(completion.request for completion in news):
            if request.is_finished:
                del self._requests[request.request_id]
            if request.is_finished or request.is_streaming:
                outputs.append(self._outputs.request_output(request))
        return outputs

    def _release(self, completions: list[Completion]) -> None:
        if completions:
            self._scheduler.release(np.array([completion.row for completion in completions], np.int32))

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(
                f"the engine stopped earlier: {_describe(self._failure)}"
            ) from self._failure


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
