"""The engine itself, without threads or event loops: take requests, run one step at a time, hand out outputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from rose_backend.block_manager import BlockManager
from rose_backend.config import EngineConfig
from rose_backend.engine.engine_stats import EngineLoad, EngineStats
from rose_backend.engine.late_commits import Int64Array, LateCommits
from rose_backend.engine.late_stops import LateStops
from rose_backend.engine.model_runner import ModelRunner, SampledTokens
from rose_backend.engine.output_processor import Abort, OutputProcessor
from rose_backend.engine.outputs import RequestOutput
from rose_backend.engine.paced_pipeline import PacedPipeline
from rose_backend.engine.ready_outputs import ReadyOutputs
from rose_backend.engine.request import PromptLists, Request
from rose_backend.engine.request_factory import RequestFactory
from rose_backend.engine.row_state import RowState
from rose_backend.engine.scheduler import Scheduler
from rose_backend.engine.start_up import LoadedModel, load
from rose_backend.engine.step_pipeline import PipelineParts, StepPipeline
from rose_backend.engine.text_worker import OutputSink, TextWorker
from rose_backend.engine.token_budget import min_tokens_worth_waiting
from rose_backend.engine.token_reader import TokenReader
from rose_backend.engine.warm_up import warm_up
from rose_backend.errors import EngineDeadError, IntegrityError, QueueFullError, RequestError, kind_and_text


class EngineCore:
    """One model, one KV pool, one queue. Not thread-safe: one thread calls it.

    Texts are made in a thread of their own; ``step`` knows tokens only, and hears of stop strings later.

    Args:
        config: checked options; loading starts here.
        is_online: somebody waits for each token; decides options that were left open.
        sink: where outputs go; None: ``step`` returns them.

    Raises:
        ConfigError: the options do not fit the model or the machine.
        ModelError: the model cannot be loaded.
    """

    def __init__(
        self, config: EngineConfig, *, is_online: bool = False, sink: OutputSink | None = None
    ) -> None:
        loaded = load(config, is_online=is_online)
        self.config = config = loaded.config
        self.max_model_len = loaded.max_model_len
        self.num_blocks = loaded.num_blocks
        self.tokenizer = loaded.tokenizer
        self.parts = loaded.parts
        self._threads: Callable[[], AbstractContextManager[None]]
        self._threads = nullcontext if loaded.cpu_threads is None else loaded.cpu_threads.in_force
        self.factory = RequestFactory(
            loaded.tokenizer,
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            max_num_seqs=config.max_num_seqs,
            seed=config.seed,
        )
        self._build(loaded, is_online)
        self._ready = ReadyOutputs()
        self._returns_outputs = sink is None
        self._texts = TextWorker(OutputProcessor(loaded.tokenizer), sink or OutputSink(self._ready.put))
        self._commits.early_texts.tell = self._texts.post
        weakref.finalize(self, self._texts.stop)  # where nobody calls close
        self._requests: dict[str, Request] = {}
        self._prompt_lists = PromptLists()
        self._is_stalled = False
        self._generated_tokens = 0
        self._failure: BaseException | None = None

    @property
    def num_waiting(self) -> int:
        """Requests that have no row yet, preempted ones included."""
        return len(self._scheduler.waiting)

    @property
    def num_unfinished(self) -> int:
        """Requests whose last output has not been handed out."""
        return len(self._requests)

    @property
    def can_step(self) -> bool:
        """False while ``step`` would do nothing until there are requests, or texts are made."""
        return self._texts.has_news or (bool(self._requests) and not self._is_stalled)

    @property
    def hold_s(self) -> float:
        """For how long the next step can wait for requests until the device needs it; 0 without pacing."""
        return self._pipeline.pacer.hold() if isinstance(self._pipeline, PacedPipeline) else 0.0

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
            generated_tokens=self._generated_tokens - self._late_stops.num_dropped_tokens,
            cached_tokens=counters.cached_tokens,
            prefix_cache_queries=self.manager.stats.query_tokens,
            prefix_cache_hits=self.manager.stats.hit_tokens,
            reported_prefix_cache_hits=self.manager.stats.reported_hit_tokens,
            preemptions=counters.preemptions,
            clones=self.manager.stats.clones,
        )

    @property
    def load(self) -> EngineLoad:
        """What is in use now."""
        return EngineLoad(len(self._scheduler.running_rows), self.num_waiting, self.manager.usage)

    def add(self, request: Request) -> None:
        """Queue a request made by ``factory``.

        Raises:
            QueueFullError: as many requests wait as may; nothing has changed.
            RequestError: another unfinished request has the same id; nothing has changed.
            EngineDeadError: the engine has failed before.
        """
        self._check_alive()
        num_waiting, allowed = self.num_waiting, self.config.max_queue_size
        if num_waiting >= allowed:
            raise QueueFullError(
                f"queue: got a request while {num_waiting} wait, allowed are {allowed} (max_queue_size)"
            )
        if request.request_id in self._requests:
            self._guarded(self._take_news)
        if request.request_id in self._requests:
            message = f"request_id: got {request.request_id!r}, which an unfinished request has"
            raise RequestError(message, parameter="request_id")
        self._requests[request.request_id] = request
        self._prompt_lists.add(request)
        self._is_stalled = False
        self._scheduler.waiting.append(request.completions[0])

    def end(self, request_id: str) -> bool:
        """End a request and free all it holds; other requests do not notice. Its last output comes like any other.

        Returns:
            False for an unknown id.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._is_stalled = False
        completions = request.completions
        for completion in completions:
            if not completion.has_ended and completion in self._scheduler.waiting:
                self._scheduler.waiting.remove(completion)
            completion.has_ended = True
        self._late_stops.forget(completions)
        rows = [completion.row for completion in completions if completion.row >= 0]
        if rows:
            self._scheduler.release(np.array(rows, np.int32))
        self._texts.post(Abort(request))
        return True

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request as ``end`` does, and wait for its last output. For engines whose ``step`` returns outputs.

        Returns:
            Its last output, with ``finish_reason`` "abort" where a completion had not finished; None for an unknown id.

        Raises:
            EngineDeadError: the text thread failed.
        """
        if not self.end(request_id):
            return None
        while (output := self._ready.take_last(request_id)) is None:
            self._texts.wait()
            self._guarded(self._take_news)
        del self._requests[request_id]
        return output

    def step(self) -> list[RequestOutput]:
        """Start one step, and take in what an earlier one has drawn; without run-ahead, this one.

        Waits for texts when there is nothing else to do, unless outputs go to a sink.

        Returns:
            An output for each request that has finished, and for each new token of a streaming one, as far as texts
            are made; nothing if outputs go to a sink.

        Raises:
            EngineDeadError: the step or the text thread failed, now or before; the cause is chained. The engine serves
                nothing more.
        """
        self._check_alive()
        with self._threads():
            self._guarded(self._advance)
        outputs = self._ready.take()
        # In this order: what is said about a text precedes its last output, so whoever gets that finds its rows free.
        self._guarded(self._take_news)
        self._forget([output.request_id for output in outputs if output.finished])
        return outputs

    def close(self) -> None:
        """End the text thread; nothing is served after that. Outputs that are not made yet are lost."""
        self._failure = self._failure or EngineDeadError("it was closed")
        self._texts.stop()
        self._texts.join()

    def check_integrity(self) -> None:
        """Recount the block manager's invariants, and that an idle engine holds nothing.

        Raises:
            IntegrityError: names what is broken.
        """
        self.manager.check_integrity()
        if not self._requests and self.manager.num_free_blocks != self.manager.num_usable_blocks:
            held = self.manager.num_usable_blocks - self.manager.num_free_blocks
            raise IntegrityError(f"no request is left, but {held} blocks are held")

    def _build(self, loaded: LoadedModel, is_online: bool) -> None:
        config = self.config
        self.manager = BlockManager(
            num_blocks=loaded.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=loaded.max_model_len,
            prefix_cache=config.prefix_cache,
            full_blocks_only=not config.token_granular_hits,
            bytes_per_block=loaded.kv_cache.nbytes // loaded.num_blocks,
        )
        self._rows = RowState(config.max_num_seqs, loaded.max_model_len, loaded.eos_token_ids)
        self._commits = commits = LateCommits(self.manager, self._rows)
        scheduled = (config, self.manager, self._rows, commits, self.factory)
        self._scheduler = Scheduler(
            *scheduled,
            prompts_first=not is_online,
            min_tokens_worth_waiting=min_tokens_worth_waiting(loaded.device),
        )
        self._runner = ModelRunner(loaded.model, config, self.manager, self._rows, loaded.kv_cache)
        self.start_up = warm_up(self._runner, loaded)
        make_pipeline = PacedPipeline if is_online and config.pacing else StepPipeline
        parts = PipelineParts(self.manager, self._rows, self._scheduler, self._runner, commits, loaded.device)
        self._pipeline = make_pipeline(parts, loaded.run_ahead)
        self._reader = TokenReader(self._rows, loaded.eos_token_ids)
        self._late_stops = LateStops(self._rows, self._scheduler, commits)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._failure = error
            where = "its text thread" if error is self._texts.failure else self._where()
            raise EngineDeadError(f"the engine stopped in {where}: {kind_and_text(error)}") from error
        except BaseException as error:
            # Ctrl-C, too, can leave rows and reservations half-way: going on could give wrong text.
            self._failure = error
            raise

    def _advance(self) -> None:
        self._take_news()
        read = self._pipeline.advance(self._late_stops.num_undecided)
        self._is_stalled = read is None and not self._pipeline.num_in_flight
        if read is not None:
            self._see(*read)
            self._prompt_lists.make_some()
        elif self._is_stalled and self._returns_outputs and self._requests and not self._ready:
            self._texts.wait()

    def _see(self, rows: Int64Array, sampled: SampledTokens) -> None:
        self._generated_tokens += len(rows)
        ended_rows, news = self._reader.apply(rows, sampled)
        if news is None:
            return
        self._late_stops.hand_over(rows)
        self._late_stops.leave(ended_rows)
        # Behind the release: the tokens of rows that nobody followed are in their completions by now.
        self._texts.post(news, is_urgent=news.begins_texts)

    def _take_news(self) -> None:
        if not self._texts.has_news:  # as in most steps
            return
        news = self._texts.take()
        self._is_stalled &= not news.judgements
        self._late_stops.judge(news.judgements)
        if not self._returns_outputs:
            self._forget(news.finished)

    def _forget(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self._requests[request_id]
        if request_ids and not self._requests:
            self._pipeline.drop()
            self._prompt_lists = PromptLists()

    def _where(self) -> str:
        """Say which step it is and whom it served, for the one report of a failure."""
        num_rows, newest = len(self._scheduler.running_rows), ", ".join(list(self._requests)[-3:])
        return f"step {self._pipeline.counters.steps} with {num_rows} rows, newest requests {newest}"

    def _check_alive(self) -> None:
        if (error := self._failure) is not None:
            raise EngineDeadError(f"the engine stopped earlier: {kind_and_text(error)}") from error
