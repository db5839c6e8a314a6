"""The engine itself, without threads or event loops: queues requests, runs one step at a time, returns outputs."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np

from rose_backend.block_manager import BlockManager
from rose_backend.config import EngineConfig
from rose_backend.engine.adapters import AdapterTable
from rose_backend.engine.grammars import Grammar, GrammarCompiler
from rose_backend.engine.model_runner import ModelRunner
from rose_backend.engine.output_thread import (
    Abort,
    IncrementalDetokenization,
    OutputHandler,
    OutputProcessor,
    OutputQueue,
    OutputThread,
)
from rose_backend.engine.outputs import Counters, EngineLoad, EngineStats, RequestOutput
from rose_backend.engine.request import InputProcessor, Request, UnloadAdapter, check_request_id
from rose_backend.engine.scheduler import Scheduler
from rose_backend.engine.sequence_state import DeferredCommits, Int64Array, SequenceState
from rose_backend.engine.startup import LoadedModel, feature_status, load, warm_up
from rose_backend.engine.step_pipeline import SampledTokens, StepPipeline, TokenReader
from rose_backend.engine.tokenizer_loading import PendingTokenizer
from rose_backend.errors import EngineDeadError, IntegrityError, QueueFullError, RequestError, kind_and_text
from rose_backend.kernels.gpu_properties import Workspace
from rose_backend.scheduling import min_tokens_worth_waiting

logger = logging.getLogger(__name__)

_LISTS_PER_STEP = 2
"""Two lists of 512 tokens take the host about as long as a steady-state decode step."""

Command = Request | str | UnloadAdapter
"""A request to serve, the id of one to end, or an adapter to unload."""


class EngineCore:
    """One model, one KV pool, one queue. Not thread-safe: one thread calls it.

    Detokenization happens in the output thread; ``step`` handles token ids only, and is sent stop checks later.

    Args:
        config: checked options; loading starts here.
        output_handler: where outputs go, to clients that read tokens as they come, which decides options that were left
            open; None: ``step`` returns them.
        tokenizer: of the model, if something else loads it.

    Raises:
        ConfigError: the options do not fit the model or the machine.
        ModelError: the model cannot be loaded.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        output_handler: OutputHandler | None = None,
        tokenizer: PendingTokenizer | None = None,
    ) -> None:
        self._returns_outputs = output_handler is None
        loaded = load(config, is_online=not self._returns_outputs, tokenizer=tokenizer)
        self.config = config = loaded.config
        self.token_budget = config.token_budget
        """Tokens that a step computes at most."""
        self.num_blocks = loaded.num_blocks
        self.feature_status = feature_status(config, loaded.kv_cache.device.type)
        """Every switch, and whether its part is in effect."""
        self._threads: Callable[[], AbstractContextManager[None]]
        self._threads = nullcontext if loaded.cpu_threads is None else loaded.cpu_threads.in_force
        self.input_processor = InputProcessor(
            loaded.tokenizer,
            vocab_size=loaded.model.config.vocab_size,
            max_model_len=loaded.max_model_len,
            max_num_seqs=config.max_num_seqs,
            seed=config.seed,
            eos_token_ids=loaded.eos_token_ids,
        )
        self.adapters = None if loaded.lora_slots is None else AdapterTable(loaded.lora_slots)
        """None: there are none."""
        # Another engine's launches may come between this one's.
        self._workspace = Workspace()
        self._outputs = OutputQueue()
        self._build(loaded, output_handler or OutputHandler(self._outputs.put))
        weakref.finalize(self, self._output_thread.stop)  # in case close is never called
        self._requests: dict[str, Request] = {}
        self._compiling: dict[Request, Future[None]] = {}
        self._refused: list[tuple[str, RequestError]] = []
        # Of outputs, made in advance, while the device is busy: many requests may end at once. A stream needs its list
        # with the first token.
        self._without_prompt_list: deque[Request] = deque()
        self._is_stalled = False
        self._generated_tokens = 0
        self._num_failed_completions = 0
        self._failure: BaseException | None = None

    @property
    def num_waiting(self) -> int:
        """Requests that have no request slot yet, preempted ones and those whose grammar is compiled included."""
        return len(self._scheduler.waiting) + len(self._compiling)

    @property
    def num_unfinished(self) -> int:
        """Requests whose last output has not been returned."""
        return len(self._requests)

    @property
    def can_step(self) -> bool:
        """False while ``step`` would do nothing until there are requests or a report of the output thread."""
        has_news = self._output_thread.has_report or bool(self._refused)
        return has_news or (bool(self._requests) and not self._is_stalled)

    @property
    def is_alive(self) -> bool:
        """False once a step has failed."""
        return self._failure is None

    @property
    def stats(self) -> EngineStats:
        """Counters since the start."""
        cache = self.manager.stats
        return replace(
            self._scheduler.counters,
            generated_tokens=self._generated_tokens - self._reader.num_dropped_tokens,
            prefix_cache_queries=cache.query_tokens,
            prefix_cache_hits=cache.hit_tokens,
            reported_prefix_cache_hits=cache.reported_hit_tokens,
            clones=cache.clones,
        )

    @property
    def load(self) -> EngineLoad:
        """What is in use now."""
        return EngineLoad(len(self._scheduler.running_slots), self.num_waiting, self.manager.usage)

    @property
    def counters(self) -> Counters:
        """Both, as of some moment during the latest step where another thread asks."""
        return Counters(self.stats, self.load)

    def check_queue(self, num_coming: int = 0) -> None:
        """Raise QueueFullError if the queue is full (max_queue_size). Any thread may ask.

        Args:
            num_coming: requests that were not added yet, but come before the next one.
        """
        num_waiting = self.num_waiting + num_coming
        if num_waiting >= self.config.max_queue_size:
            raise QueueFullError(
                f"queue: got a request while {num_waiting} wait, allowed are {self.config.max_queue_size} "
                "(max_queue_size)"
            )

    def add(self, request: Request) -> None:
        """Queue a request made by ``input_processor``.

        Raises:
            QueueFullError: the queue is full (max_queue_size); nothing has changed.
            RequestError: another unfinished request has the same id, its adapter is not loaded, or its grammar is not
                valid, if ``step`` returns outputs; nothing has changed.
            EngineDeadError: the engine has failed before.
        """
        self._check_alive()
        self.check_queue()
        has_grammar = request.params.structured_outputs is not None
        if has_grammar and self._returns_outputs:
            request.use_grammar(self.grammars.compile(request.params))
        if request.request_id in self._requests:
            self._guarded(self._take_report)
        check_request_id(request.request_id, self._requests)
        if request.lora_id:
            self.adapter_table().admit(request)
        self._requests[request.request_id] = request
        if not request.is_streaming:
            self._without_prompt_list.append(request)
        self._is_stalled = False
        if has_grammar and not self._returns_outputs:
            report = partial(self._output_thread.report_compiled, request)
            self._compiling[request] = self.grammars.start(request.params, report, request.tenant)
        else:
            self._scheduler.waiting.append(request.completions[0])

    def adapter_table(self) -> AdapterTable:
        """Return ``adapters``.

        Raises:
            RequestError: the engine takes none.
        """
        if self.adapters is None:
            raise RequestError(
                "lora_request: got one, allowed is none without enable_lora", parameter="lora_request"
            )
        return self.adapters

    def end(self, request_id: str) -> bool:
        """End a request and free all it holds; its last output comes like any other. False for an unknown id."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._is_stalled = False
        completions = request.completions
        for completion in completions:
            if not completion.has_ended and completion in self._scheduler.waiting:
                self._scheduler.waiting.remove(completion)
            completion.has_ended = True
        if (compilation := self._compiling.pop(request, None)) is not None:
            compilation.cancel()
        self._reader.forget(completions)
        slots = [completion.slot for completion in completions if completion.slot >= 0]
        if slots:
            self._scheduler.release(np.array(slots, np.int32))
        self._output_thread.post(Abort(request))
        return True

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and return its last output; None for an unknown id. For engines whose ``step`` returns outputs.

        Raises:
            EngineDeadError: the output thread failed.
        """
        if not self.end(request_id):
            return None
        while (output := self._outputs.take_last(request_id)) is None:
            self._output_thread.wait()
            self._guarded(self._take_report)
        # With the last request go the steps in flight.
        self._forget([request_id])
        return output

    def carry_out(self, commands: deque[Command]) -> list[tuple[str, RequestError]]:
        """Process ``commands`` in order, and empty the queue.

        Returns:
            The id and error of each refused request: a preemption may have filled the queue since it was submitted, or
            a grammar is not valid.

        Raises:
            EngineDeadError: the engine has failed before.
        """
        refused, self._refused = self._refused, []
        while commands:
            command = commands.popleft()
            if isinstance(command, str):
                self.end(command)
                continue
            if isinstance(command, UnloadAdapter):
                self.adapter_table().unload(command.lora_id)
                continue
            try:
                self.add(command)
            except RequestError as error:
                refused.append((command.request_id, error))
        return refused

    def step(self) -> list[RequestOutput]:
        """Start one step, and read the tokens of an earlier one; without run-ahead, its own.

        Waits for the output thread when there is nothing else to do, unless there is an output handler.

        Returns:
            The detokenized outputs: one per finished request, and one per new token of a streaming one with what is
            new; none with an output handler.

        Raises:
            EngineDeadError: the step or the output thread failed, now or before; the cause is chained.
        """
        self._check_alive()
        with self._threads(), self._workspace:
            self._guarded(self._advance)
        outputs = self._outputs.take()
        # In this order: the stop check of a text precedes its last output, so a caller that has it finds its slot free.
        self._guarded(self._take_report)
        self._forget([output.request_id for output in outputs if output.finished])
        return outputs

    def close(self) -> None:
        """End the output thread; nothing is served after that. Outputs that are not made yet are lost."""
        self._failure = self._failure or EngineDeadError("it was closed")
        self.grammars.close()
        self._output_thread.stop()
        self._output_thread.join()

    def check_integrity(self) -> None:
        """Recount the block manager's invariants, and that an idle engine holds nothing.

        Raises:
            IntegrityError: names what is broken.
        """
        self.manager.check_integrity()
        if not self._requests and self.manager.num_free_blocks != self.manager.num_usable_blocks:
            held = self.manager.num_usable_blocks - self.manager.num_free_blocks
            raise IntegrityError(f"no request is left, but {held} blocks are held")

    def _build(self, loaded: LoadedModel, output_handler: OutputHandler) -> None:
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
        self._state = SequenceState(config.max_num_seqs, loaded.max_model_len, loaded.eos_token_ids)
        self._runner = ModelRunner(
            loaded.model, config, self.manager, self._state, loaded.kv_cache, loaded.head
        )
        vocab_size = loaded.model.config.vocab_size
        self.grammars = GrammarCompiler(loaded.tokenizer, vocab_size, loaded.eos_token_ids)
        preparation = None if self._returns_outputs else self.grammars.prepare()
        with self._workspace:
            self.start_up = warm_up(self._runner, loaded)
        if preparation is not None:
            preparation.exception()  # waits; the first request with a grammar is told
        self._output_thread = OutputThread(OutputProcessor(loaded.tokenizer), output_handler)
        incremental_detokenization = IncrementalDetokenization(self._state, self._output_thread.post)
        commits = DeferredCommits(self.manager, self._state, incremental_detokenization.put)
        self._commits = commits
        self._scheduler = Scheduler(
            config,
            self.manager,
            self._state,
            commits,
            self.input_processor,
            prompts_first=self._returns_outputs,
            may_overlap=None if self._returns_outputs else self._runner.can_overlap,
            min_tokens_worth_waiting=min_tokens_worth_waiting(loaded.kv_cache.device),
        )
        self._pipeline = StepPipeline(
            self.manager,
            self._state,
            self._scheduler,
            self._runner,
            commits,
            incremental_detokenization,
            loaded.kv_cache.device,
            loaded.run_ahead,
        )
        self._reader = TokenReader(self._state, self._scheduler, commits)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._failure = error
            num_slots = len(self._scheduler.running_slots)
            where = f"step {self._pipeline.counters.steps} with {num_slots} request slots"
            if error is self._output_thread.failure:
                where = "its output thread"
            # Not in the error's text, which every caller gets.
            logger.error("the newest requests in %s: %s", where, ", ".join(list(self._requests)[-3:]))
            raise EngineDeadError(f"the engine stopped in {where}: {kind_and_text(error)}") from error
        except BaseException as error:
            # Ctrl-C, too, can leave slots and reservations inconsistent: further steps could give wrong text.
            self._failure = error
            raise

    def _advance(self) -> None:
        self._take_report()
        read = self._pipeline.advance(self._reader.num_unchecked)
        self._is_stalled = read is None and not self._pipeline.num_in_flight
        if read is not None:
            for sampled in read:
                self._process_tokens(sampled)
            for _ in range(min(_LISTS_PER_STEP, len(self._without_prompt_list))):
                self._without_prompt_list.popleft().prompt_list()
        elif self._is_stalled and self._returns_outputs and self._requests and not self._outputs:
            self._output_thread.wait()

    def _process_tokens(self, sampled: SampledTokens) -> None:
        if sampled.prompts is not None:
            self._output_thread.post(sampled.prompts)
        slots = sampled.batch.slots
        has_token = sampled.token_ids >= 0
        num_tokens = int(np.count_nonzero(has_token))
        self._generated_tokens += num_tokens
        ended_slots, message = self._reader.apply(sampled)
        if message is None:
            return
        if num_tokens < len(slots):
            self._note_failed_slots(slots[~has_token])
            slots = slots[has_token]
        self._reader.note_sent(slots)
        self._reader.leave(ended_slots)
        # After the release, which has put the tokens of completed requests into their completions.
        self._output_thread.post(message, is_urgent=message.has_first_tokens)

    def _note_failed_slots(self, slots: Int64Array) -> None:
        """Handle request slots whose logits allowed no token: requests with the same prompt compute it again."""
        self._commits.flush(slots)
        for slot in slots.tolist():
            if (grammar := self._state.completion(slot).grammar) is not None and grammar.error is not None:
                logger.warning("%s", grammar.error)
                continue
            num_blocks = -(-int(self.manager.num_computed_tokens[slot]) // self.config.block_size)
            self.manager.uncache(self.manager.block_table[slot, :num_blocks])
            self._num_failed_completions += 1
            # Fewer lines the more there are: broken weights fail every request.
            if self._num_failed_completions & (self._num_failed_completions - 1) == 0:
                logger.error(
                    "request %s ends with an error: its logits are all NaN or minus infinity (%d since start-up)",
                    self._state.completion(slot).request.request_id,
                    self._num_failed_completions,
                )

    def _take_report(self) -> None:
        if not self._output_thread.has_report:  # in most steps
            return
        report = self._output_thread.take()
        self._is_stalled &= not report.stop_checks and not report.compiled
        for request, outcome in report.compiled:
            self._take_compiled(request, outcome)
        self._reader.apply_stop_checks(report.stop_checks)
        if not self._returns_outputs:
            self._forget(report.finished)

    def _take_compiled(self, request: Request, outcome: Grammar | RequestError) -> None:
        if request not in self._compiling:  # aborted meanwhile
            return
        del self._compiling[request]
        if isinstance(outcome, RequestError):
            self._refused.append((request.request_id, outcome))
            self._forget([request.request_id])
            return
        request.use_grammar(outcome)
        self._scheduler.waiting.append(request.completions[0])

    def _forget(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            request = self._requests.pop(request_id)
            if self.adapters is not None and request.lora_id:
                self.adapters.release(request)
        if request_ids and not self._requests:
            self._pipeline.drop()
            self._without_prompt_list.clear()

    def _check_alive(self) -> None:
        if (error := self._failure) is not None:
            raise EngineDeadError(f"the engine stopped earlier: {kind_and_text(error)}") from error
