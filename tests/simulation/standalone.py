"""The standalone engine on one thread over a ``Device``: one seed makes options, traffic and the order of all events.

Real are ``EngineCore``, scheduler, block manager, deferred commits, step pipeline, decode rows, output processing and
tokenizer. In place of others are the device's work (``device.py``), the output thread's loop, whose turns come at
random, and loading.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from rose_backend.block_manager.prefix_cache import PrefixMatch
from rose_backend.config import EngineConfig
from rose_backend.engine import core as core_module
from rose_backend.engine import model_runner, output_thread, scheduler, sequence_state, step_pipeline
from rose_backend.engine.core import EngineCore
from rose_backend.engine.output_thread import OutputHandler, OutputThread
from rose_backend.engine.outputs import GrowingCompletions, RequestOutput
from rose_backend.engine.request import Completion, Request
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.engine.scheduler import Scheduler, Step
from rose_backend.engine.startup import LoadedModel
from rose_backend.engine.step_pipeline import SampledTokens, StepPipeline
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.engine.turns import MAX_TURNS_GIVEN, PATIENCE, counts_as_overtaking
from rose_backend.errors import EngineDeadError
from tests.conftest import ROOT
from tests.simulation.device import Answer, Device, Event, ForeignContent, SimulatedRunner, chain

EOS = 2559
MAX_TURNS = 20_000
"""Of one seed: what takes longer hangs."""


@cache
def tokenizer() -> Tokenizer:
    """Return the embedded model's."""
    return Tokenizer(ROOT / "models" / "tiny-gpt2")


def bytes_of(token_ids: list[int]) -> bytes:
    """Return the text of tokens, without special ones."""
    decoder: Any = tokenizer().decoder(skip_special_tokens=True)
    data: bytes = decoder.bytes_of(token_ids)
    return data


@dataclass(frozen=True)
class Settings:
    """Which options and events a seed has, and how frequent they are."""

    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_cache: bool
    token_granular_hits: bool
    chunked_prefill: bool
    run_ahead: int
    max_queue_size: int
    is_online: bool
    """An output handler gets outputs; otherwise ``step`` returns them."""
    has_side_passes: bool
    widths: tuple[int, ...]
    tokens_per_commit: int
    prompt_tokens_among_decodes: int
    tokens_worth_waiting: int
    vocabulary: tuple[int, ...]
    share_run: float
    """Steps in which the device works before anybody waits for it."""
    share_delivered: float
    """Steps before which the output thread has a turn, and readers that take what it delivers."""
    arrival_rate: float
    burst: int
    num_requests: int
    abort_rate: float
    reset_rate: float
    restart_rate: float
    kinds: tuple[str, ...]
    """What requests may ask for, see ``_params``."""
    num_drafts: int = 0
    tenants: tuple[bytes, ...] = (b"",)
    """Whose requests come, as often as they are named."""

    @classmethod
    def draw(cls, rng: random.Random) -> Settings:
        """Draw the settings of a seed: each is on, off or extreme in some seeds, whatever the others are."""
        block_size = rng.choice((1, 2, 4, 4, 8, 16))
        max_model_len = rng.choice((12, 30, 30, 60, 120))
        per_sequence = -(-max_model_len // block_size)
        max_num_seqs = rng.choice((1, 2, 3, 4, 8, 16))
        budget = rng.choice((1, 2, 5, 13, 40, 200))
        chunked = budget < max_model_len or rng.random() < 0.7
        # From what one sequence needs to what all of them do.
        num_blocks = 1 + int(per_sequence * rng.choice((1, 1, 1.3, 2, 4, max_num_seqs)))
        kinds = (
            "n",
            "stop",
            "stop_token",
            "eos",
            "streaming",
            "salt",
            "single",
            "failing",
            "repeat",
            "follow",
        )
        settings = cls(
            block_size=block_size,
            num_blocks=min(max(num_blocks, per_sequence + 1), 400),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            prefix_cache=rng.random() < 0.9,
            token_granular_hits=rng.random() < 0.85,
            chunked_prefill=chunked,
            run_ahead=rng.randrange(5),
            max_queue_size=rng.choice((3, 10_000, 10_000)),
            is_online=rng.random() < 0.6,
            has_side_passes=rng.random() < 0.6,
            widths=rng.choice(((), (2, 5), (1, 2, 4, 8, 16), (3,))),
            tokens_per_commit=rng.choice((1, 3, 8, 32)),
            prompt_tokens_among_decodes=rng.choice((0, 3, 20)),
            tokens_worth_waiting=rng.choice((1, 1, 8, 10_000)),
            vocabulary=tuple(rng.sample(range(EOS), rng.choice((1, 2, 5, 40)))) + (EOS,) * rng.randrange(2),
            share_run=rng.choice((0.0, 0.1, 0.5, 1.0)),
            share_delivered=rng.choice((0.05, 0.3, 0.8, 1.0)),
            arrival_rate=rng.choice((0.02, 0.1, 0.3, 0.8)),
            burst=rng.choice((1, 2, 6)),
            num_requests=rng.choice((20, 60, 60, 120)),
            abort_rate=rng.choice((0.0, 0.0, 0.02, 0.15)),
            reset_rate=rng.choice((0.0, 0.05)),
            restart_rate=rng.choice((0.0, 0.0, 0.003)),
            kinds=tuple(kind for kind in kinds if rng.random() < 0.55),
        )
        if rng.random() < 0.6:
            return settings
        # Nobody waits, so that prompts are computed beside decodes; who is computed may leave meanwhile.
        return replace(
            settings,
            num_blocks=min(1 + per_sequence * 16, 400),
            max_num_seqs=16,
            max_num_batched_tokens=rng.choice((40, 200)) if chunked else 200,
            is_online=True,
            has_side_passes=True,
            prompt_tokens_among_decodes=rng.choice((0, 3)),
            share_run=rng.choice((0.0, 0.02, 0.1)),
            arrival_rate=rng.choice((0.1, 0.2)),
            burst=rng.choice((1, 1, 2)),
            abort_rate=rng.choice((0.02, 0.15, 0.15)),
        )


class _IdleThread:
    """In place of ``threading.Thread``: somebody else does what it would do."""

    def __init__(self, **options: Any) -> None:
        pass

    def start(self) -> None:
        pass

    def join(self) -> None:
        pass


class SteppedOutputThread(OutputThread):
    """Its messages are processed in the only thread, in ``turn``."""

    def wait(self) -> None:
        self.turn(len(self._inbox))
        assert self.has_report, "the engine waits for a report that does not come"

    def turn(self, num_messages: int) -> None:
        """Process the oldest messages, and deliver to readers that are ready."""
        is_ready = self._handler.is_ready
        messages = [self._inbox.popleft() for _ in range(min(num_messages, len(self._inbox)))]
        if is_ready is None:
            for message in messages:
                self._process([message])
                self._deliver(list(self._waiting))
        else:
            self._process(messages)
            self._deliver([each for each in self._waiting if each.is_finished or is_ready(each.request_id)])


@dataclass
class Visit:
    """A request, and what it has been given so far."""

    name: str
    answers: list[Answer]
    expected: list[tuple[list[int], str]]
    """Tokens and finish reason of each completion."""
    outputs: GrowingCompletions = field(default_factory=GrowingCompletions)
    is_aborted: bool = False

    def take(self, output: RequestOutput) -> None:
        """Add an output; compare all of them with what was expected once it is the last."""
        self.outputs.add(output.outputs)
        if not output.finished:
            return
        got = self.outputs.take()
        if not self.is_aborted:
            assert len(got) == len(self.expected), f"{self.name}: {len(got)} completions"
        for completion in got:
            tokens, reason = self.expected[completion.index]
            what = f"{self.name}.{completion.index}: got {completion.token_ids} ({completion.finish_reason})"
            if completion.finish_reason == "abort":
                assert self.is_aborted and completion.token_ids == tokens[: len(completion.token_ids)], what
            else:
                assert (completion.token_ids, completion.finish_reason) == (tokens, reason), (
                    f"{what}, expected {tokens} ({reason})"
                )


def expected_end(answer: Answer, params: SamplingParams) -> tuple[list[int], str]:
    """Return the tokens of a completion, up to what ends it, and the finish reason."""
    text = b""
    for count, token in enumerate(answer.output, start=1):
        tokens = answer.output[:count]
        if token < 0:
            return tokens[:-1], "error"
        if (token == EOS and not params.ignore_eos) or token in (params.stop_token_ids or ()):
            return tokens, "stop"
        text += bytes_of([token])
        if any(stop.encode() in text for stop in params.stop_strings):
            return tokens, "stop"
    return answer.output, "length"


class Simulation:
    """One seed.

    Attributes:
        states: hashes of the states that the scheduler was in.
        digest: of all that happened, in order.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rng = rng = random.Random(seed)
        # Of its own, so that all else of a seed is as without drafts.
        num_drafts = random.Random(f"drafts of {seed}").choice((0, 0, 1, 3, 7))
        self._turns_rng = turns_rng = random.Random(f"tenants of {seed}")
        tenants = turns_rng.choice(((b"",), (b"a", b"b"), (b"a",) * 8 + (b"b",), (b"a", b"a", b"b", b"c")))
        settings = replace(Settings.draw(rng), num_drafts=num_drafts)
        # Only servers have tenants.
        self.settings = replace(settings, tenants=tenants) if settings.is_online else settings
        self.states: set[int] = set()
        self.digest = 0
        self._is_giving_turns = False
        self.num_steps = self.num_rows = 0
        self._visits: dict[str, Visit] = {}
        self._prompts: list[tuple[list[int], str | None]] = []
        self._num_added = 0
        self._delivered: list[RequestOutput] = []
        self._stems = [
            [self._token() for _ in range(self.settings.max_model_len)] for _ in range(rng.choice((1, 2, 4)))
        ]

    def run(self) -> None:
        """Serve all requests of the seed.

        Raises:
            AssertionError, RoseError: something is wrong; the text says what.
        """
        with replaced_parts(self.settings):
            self._start()
            settings, rng = self.settings, self._rng
            for turn in itertools.count():
                assert turn < MAX_TURNS, "requests are still unfinished"
                while self._num_added < settings.num_requests and (
                    not self._visits or rng.random() < settings.arrival_rate
                ):
                    self._arrive()
                self._interfere()
                if self._num_added >= settings.num_requests and not self._visits:
                    break
                self._turn()
                if turn % 4 == 0:
                    self._core.check_integrity()
                    self._check_accounts()
            self.check_end()

    def check_end(self) -> None:
        """Check that an engine that has served all requests holds nothing, and close it."""
        self._core.check_integrity()
        state, manager, admission = self._core._state, self._core.manager, self._core._scheduler._admission
        assert manager.num_free_rows == self.settings.max_num_seqs and not any(state.completions)
        assert manager.usage == 0.0 and not len(manager.clones.held_blocks())
        assert admission.num_reserved_slots == 0 and not admission.num_held and not admission.waiting
        self._core.close()

    def _start(self) -> None:
        settings = self.settings
        self.device = Device(
            self._rng, settings.num_blocks, settings.block_size, settings.vocabulary, settings.share_run
        )
        names = ("block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
        names += ("prefix_cache", "token_granular_hits", "chunked_prefill", "run_ahead", "max_queue_size")
        # Where a head makes the drafts, hits are shorter.
        drafts: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": settings.num_drafts}
        if settings.num_drafts == 3:
            drafts |= {"method": "eagle3", "model": "simulated"}
        config = EngineConfig(
            model="simulated",
            speculative_config=drafts if settings.num_drafts else None,
            **{name: getattr(settings, name) for name in names},
        )
        handler = OutputHandler(self._delivered.extend, lambda name: self._rng.random() < 0.6)
        loaded = LoadedModel(
            config=config,
            model=SimpleNamespace(config=SimpleNamespace(vocab_size=EOS + 1)),  # type: ignore[arg-type]
            tokenizer=tokenizer(),
            max_model_len=settings.max_model_len,
            eos_token_ids=(EOS,),
            num_blocks=settings.num_blocks,
            kv_cache=self.device,  # type: ignore[arg-type]
            run_ahead=settings.run_ahead,
            cpu_threads=None,
            weight_bytes=0,
            packed_bytes=0,
            compilation=None,
            seconds={},
        )
        cuda = SimpleNamespace(Event=Event, current_stream=lambda _: self.device.main)
        with (
            patch.object(core_module, "load", lambda *_, **__: loaded),
            patch.object(core_module, "warm_up", lambda *_: None),
            patch.object(step_pipeline, "torch", SimpleNamespace(cuda=cuda)),
        ):
            self._core = EngineCore(config, output_handler=handler if settings.is_online else None)
        self.device.answer_of = self._answer_of
        self._watch_turns(self._core._scheduler)
        self._watch_steps(self._core._pipeline)
        self._match = self._core.manager.match
        self._core.manager.match = self._checked_match  # type: ignore[method-assign]

    def _checked_match(self, token_ids: Any, *, namespace: bytes, max_tokens: int | None) -> PrefixMatch:
        """Look a prompt up, and check that nothing is pending that it could find."""
        core, last = self._core, len(token_ids) - 1
        state, computed = core._state, core.manager.num_computed_tokens
        for slot in np.flatnonzero(core._commits._pending()).tolist():
            end = int(computed[slot]) + 1
            is_found = end <= last and np.array_equal(token_ids[:end], state.token_ids[slot, :end])
            assert not (
                is_found
                and core.manager.table.namespaces[slot] == namespace
                and not state.has_stop_strings[slot]
            ), (
                f"a prompt of {last + 1} tokens is looked up before position {end - 1} of slot {slot} is committed"
            )
        return self._match(token_ids, namespace=namespace, max_tokens=max_tokens)

    def _watch_turns(self, scheduler: Scheduler) -> None:
        """Check, whenever somebody gets or loses a slot, that it is its turn; and that nobody waits for one in vain."""
        admission = scheduler._admission
        take, preempt, schedule = admission._take, scheduler._preempt, scheduler.schedule
        holders: dict[
            bytes, int
        ] = {}  # that were preempted for a turn, and how many slots they are left with

        def take_and_check(completion: Completion) -> None:
            num_held, tenant = admission.num_held, completion.request.tenant
            num_after = num_held[tenant] + completion.num_slots
            firsts = {each.request.tenant: each for each in reversed(list(admission.waiting))}
            assert firsts.pop(tenant) is completion, "a tenant's requests keep their order"
            for other in firsts.values():
                num_with = num_held[other.request.tenant] + other.num_slots
                assert other.place > completion.place or num_after < num_with, "it is not its turn"
            assert all(num_left >= num_after for num_left in holders.values()), "holders are left with less"
            oldest, most = admission.waiting.oldest, self.settings.max_num_seqs
            if oldest.num_slots * len(admission.waiting.tenants | num_held.keys()) > most:
                most *= PATIENCE
            if counts_as_overtaking(completion, oldest, num_held):
                assert oldest.num_overtaken < most, "overtaken too often"
            take(completion)
            holders.clear()

        def preempt_and_check(slot: int) -> None:
            tenant = core_state.completion(slot).request.tenant
            assert not self._core._pipeline.num_in_flight, "tokens that are being drawn are lost"
            preempt(slot)
            if self._is_giving_turns:
                holders[tenant] = admission.num_held[tenant]

        def give_turns_and_check(num_in_flight: int) -> bool:
            self._is_giving_turns = True
            are_given = give_turns(num_in_flight)
            self._is_giving_turns = False
            assert not holders, "somebody was preempted in vain"
            return are_given

        def schedule_and_check(num_in_flight: int = 0) -> Step | None:
            self._check_what_is_ahead()
            step = schedule(num_in_flight)
            if step is not None and not num_in_flight:
                self._check_that_turns_come(scheduler)
            return step

        core_state, give_turns = self._core._state, scheduler._give_turns
        admission._take = take_and_check  # type: ignore[method-assign]
        scheduler._preempt = preempt_and_check  # type: ignore[method-assign]
        scheduler._give_turns = give_turns_and_check  # type: ignore[method-assign]
        scheduler.schedule = schedule_and_check  # type: ignore[method-assign]

    def _check_what_is_ahead(self) -> None:
        """Count again, slot by slot, the tokens and drafts of steps in flight."""
        state, num_tokens, num_drafts = self._core._state, Counter[int](), Counter[int]()
        for step in self._core._pipeline._in_flight:
            batch = step.batch
            slots = batch.slots[state.generation[batch.slots] == batch.generations].tolist()
            num_tokens.update(slots)
            decodes = set(batch.decode_slots.tolist()) & set(slots)
            num_drafts.update(dict.fromkeys(decodes, step.num_drafts))
        for slot in self._core._scheduler.running_slots.tolist():
            assert state.num_unread_tokens[slot] == num_tokens[slot], "tokens of steps in flight"
            assert state.num_drafts_ahead[slot] == num_drafts[slot], "drafts of steps in flight"

    def _watch_steps(self, pipeline: StepPipeline) -> None:
        """Check that as many steps are in flight as may be, and one more only where first tokens follow a pass."""
        advance, depth = pipeline.advance, self.settings.run_ahead

        def advance_and_check(num_unchecked: int = 0) -> Iterator[SampledTokens] | None:
            was_full, num_steps = pipeline.num_in_flight > depth, pipeline.counters.steps
            tokens = advance(num_unchecked)
            if pipeline.counters.steps > num_steps:
                assert not was_full, "a step too many is started"
                assert tokens is None or pipeline.num_in_flight >= depth, "a step is read too early"
            return tokens

        pipeline.advance = advance_and_check  # type: ignore[method-assign]

    def _check_that_turns_come(self, scheduler: Scheduler) -> None:
        """Check that no tenant waits without a slot where another one has slots to give, and blocks are plenty."""
        admission, state, settings = scheduler._admission, self._core._state, self.settings
        manager, num_held = self._core.manager, admission.num_held
        if len(scheduler._slots_in_pass) or settings.max_num_batched_tokens < 2 * settings.max_model_len:
            return
        if admission._in_flight_prefixes:  # It may wait a step for one.
            return
        if manager.num_free_blocks <= 2 * -(-settings.max_model_len // settings.block_size):
            return
        givers = [
            each
            for each in (state.completion(slot) for slot in scheduler.running_slots.tolist())
            if each.num_turns_given < MAX_TURNS_GIVEN and num_held[each.request.tenant] > each.num_slots
        ]
        firsts = {each.request.tenant: each for each in reversed(list(admission.waiting))}
        for tenant, completion in firsts.items():
            if completion.num_slots == 1 and not num_held[tenant]:
                assert not [each for each in givers if each.request.tenant != tenant], (
                    "its turn does not come"
                )

    def _answer_of(self, slot: int) -> Answer:
        completion = self._core._state.completion(slot)
        return self._visits[completion.request.request_id].answers[completion.index]

    def _turn(self) -> None:
        core, settings, rng = self._core, self.settings, self._rng
        self.device.progress()
        if rng.random() < settings.share_delivered:
            thread = core._output_thread
            thread.turn(rng.choice((1, 2, len(thread._inbox))))  # type: ignore[attr-defined]
        num_rows = self.device.num_rows
        if core.can_step:
            self.num_steps += 1
            for output in core.step():
                self._take(output)
        self.num_rows += self.device.num_rows - num_rows
        while self._delivered:
            self._take(self._delivered.pop(0))
        self._note_state()

    def _take(self, output: RequestOutput) -> None:
        visit = self._visits[output.request_id]
        visit.take(output)
        self.digest = hash((self.digest, int(output.request_id), output.finished))
        if output.finished:
            del self._visits[output.request_id]

    def _arrive(self) -> None:
        rng, settings = self._rng, self.settings
        for _ in range(rng.randrange(settings.burst) + 1):
            name = str(self._num_added)
            self._num_added += 1
            prompt, salt, params, fails_at = self._ask()
            tenant = self._turns_rng.choice(settings.tenants)
            is_streaming = "streaming" in settings.kinds and rng.random() < 0.4
            processor = self._core.input_processor
            checked = processor.process({"prompt_token_ids": prompt, "cache_salt": salt}, params)
            request = processor.build(
                checked._replace(tenant=tenant), request_id=name, is_streaming=is_streaming
            )
            answers = self._send(request, fails_at)
            if fails_at is None:
                self._prompts.append((prompt + answers[0].output, salt))

    def _send(self, request: Request, fails_at: int | None = None) -> list[Answer]:
        """Give the engine a request; return what its completions are going to say."""
        settings, params, name = self.settings, request.params, request.request_id
        prompt = request.prompt_token_ids.tolist()
        contents, content = [], sum(request.namespace) + 1
        for token in prompt:
            content = chain(content, token)
            contents.append(content)
        assert params.seed is not None and params.max_tokens is not None
        answers = [
            Answer(
                f"{name}.{index}",
                prompt,
                contents,
                seed=params.seed + index,
                max_tokens=params.max_tokens,
                vocabulary=settings.vocabulary,
                width=(settings.max_model_len // settings.block_size + 1) * settings.block_size,
                fails_at=fails_at,
            )
            for index in range(params.n)
        ]
        visit = Visit(name, answers, [expected_end(answer, params) for answer in answers])
        if not self._core.carry_out(deque([request])):
            self._visits[name] = visit
        return answers

    def _ask(self) -> tuple[list[int], str | None, SamplingParams, int | None]:
        """Return the prompt, salt and parameters of a request, and the output token that there is none for."""
        rng, settings = self._rng, self.settings

        def is_kind(kind: str, share: float) -> bool:
            return kind in settings.kinds and rng.random() < share

        salt = rng.choice((None, "a", "b")) if is_kind("salt", 0.5) else None
        longest = settings.max_model_len - 1
        if self._prompts and is_kind("repeat", 0.4):
            # A follow-up of what somebody said, or of part of it.
            prompt, salt = rng.choice(self._prompts[-8:])
            if not is_kind("follow", 0.5):
                prompt = prompt[: rng.randrange(1, len(prompt) + 1)]
        else:
            prompt = rng.choice(self._stems)[: rng.randrange(1, longest + 1)]
        prompt = (prompt[:longest] + [self._token() for _ in range(rng.randrange(3))])[:longest]
        room = settings.max_model_len - len(prompt)
        options: dict[str, Any] = {"max_tokens": 1 if is_kind("single", 0.3) else rng.randrange(1, room + 1)}
        options["ignore_eos"] = not is_kind("eos", 0.6)
        if is_kind("n", 0.4):
            options["n"] = rng.randrange(1, min(settings.max_num_seqs, 4) + 1)
        if is_kind("stop", 0.4):
            options["stop"] = self._stop_strings()
        if is_kind("stop_token", 0.3):
            options["stop_token_ids"] = [rng.choice(settings.vocabulary)]
        fails_at = rng.randrange(options["max_tokens"]) if is_kind("failing", 0.1) else None
        return prompt, salt, SamplingParams(seed=rng.randrange(4), **options), fails_at

    def _token(self) -> int:
        return self._rng.choice(self.settings.vocabulary)

    def _stop_strings(self) -> list[str]:
        rng = self._rng
        texts = [bytes_of([token]).decode("ascii", "ignore") for token in self.settings.vocabulary]
        text = rng.choice([text for text in texts if text] or ["never said"])
        return [text[: rng.randrange(1, len(text) + 1)]]

    def _interfere(self) -> None:
        core, settings, rng = self._core, self.settings, self._rng
        if self._visits and rng.random() < settings.abort_rate:
            visit = self._visits[rng.choice(list(self._visits))]
            visit.is_aborted = True
            if settings.is_online:
                core.carry_out(deque([visit.name]))
            elif (output := core.abort(visit.name)) is not None:
                self._take(output)
        if rng.random() < settings.reset_rate:
            was_used = core.manager.table.is_active.any() or len(core.manager.clones.held_blocks())
            assert core.manager.reset_prefix_cache() == (not was_used)
        if rng.random() < settings.restart_rate:
            core.close()
            try:
                core.step()
            except EngineDeadError:
                self._visits.clear()
                self._delivered.clear()
                self._start()
            else:
                raise AssertionError("a closed engine takes a step")

    def _note_state(self) -> None:
        """Note what state the scheduler is in: what all its requests have, whichever they are."""
        core = self._core
        state, manager, pipeline = core._state, core.manager, core._pipeline
        slots = core._scheduler.running_slots
        computed, held = manager.num_computed_tokens[slots], manager.table.capacity[slots]
        bits = (
            (state.num_siblings_to_fork[slots] > 0) * 1
            + state.is_on_device[slots] * 2
            + state.has_stop_strings[slots] * 4
            + (computed < state.num_prompt_tokens[slots]) * 8
        )
        about = np.stack(
            [held, state.num_unread_tokens[slots], state.num_tokens[slots] - computed, bits], axis=1
        )
        requests = about[np.lexsort(about.T)].tobytes()
        shared = int(np.count_nonzero(manager.pool.ref_counts > 1))
        whole = (requests, shared, min(core.num_waiting, 3), pipeline.num_in_flight, pipeline._chunks is None)
        self.states.add(hash(whole))
        self.digest = hash((self.digest, *whole[1:4], int(held.sum()), int(computed.sum())))

    def _check_accounts(self) -> None:
        """Check that whoever has not ended either waits or holds a slot, and that nobody else holds one."""
        core = self._core
        state, waiting = core._state, core._scheduler.waiting
        holders = [each for each in state.completions if each is not None]
        in_pass = [
            slot for slot in core._scheduler._slots_in_pass.tolist() if state.completions[slot] is None
        ]
        assert core.manager.num_free_rows == self.settings.max_num_seqs - len(holders) - len(in_pass)
        assert core.num_waiting == len(set(waiting))
        for request in core._requests.values():
            for completion in request.completions:
                is_in_slot = completion in holders
                assert not (is_in_slot and completion in waiting)
                assert completion.has_ended or is_in_slot or completion in waiting, "a request is lost"
        reserved = sum(int(state.num_siblings_to_fork[each.slot]) for each in holders)
        assert core._scheduler._admission.num_reserved_slots == reserved, "slots kept for siblings"
        held = Counter(tenant for each in holders for tenant in [each.request.tenant] * each.num_slots)
        assert core._scheduler._admission.num_held == held, "slots of each tenant"
        assert all(each.num_turns_given <= MAX_TURNS_GIVEN for each in (*holders, *waiting))


@contextmanager
def replaced_parts(settings: Settings) -> Iterator[None]:
    """Put the simulation's parts in place of threads, kernels and limits that small engines do not reach."""
    threading = SimpleNamespace(
        Thread=_IdleThread, Event=output_thread.threading.Event, Condition=output_thread.threading.Condition
    )
    runner = type(
        "Runner",
        (SimulatedRunner,),
        {"widths": settings.widths, "has_side_stream": settings.has_side_passes},
    )
    with ExitStack() as stack:
        for module, name, value in (
            (output_thread, "threading", threading),
            (core_module, "OutputThread", SteppedOutputThread),
            (core_module, "ModelRunner", runner),
            (core_module, "min_tokens_worth_waiting", lambda _: settings.tokens_worth_waiting),
            (model_runner, "upload", lambda _, *arrays: arrays),
            (model_runner, "block_clone", lambda device, src, dst, block_dim: device.clone(src, dst)),
            (scheduler, "MAX_PROMPT_TOKENS_AMONG_DECODES", settings.prompt_tokens_among_decodes),
            (sequence_state, "_TOKENS_PER_COMMIT", settings.tokens_per_commit),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield


__all__ = ["ForeignContent", "Settings", "Simulation", "replaced_parts"]
