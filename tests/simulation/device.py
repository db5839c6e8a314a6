"""A device that computes a function in place of a model: streams of deferred work over a pool of content hashes.

An entry of the pool stands for the K/V of a position: a hash of the tokens up to it and of the prefix cache's
namespace. Whatever reads positions compares all of them with what they must be, so that a block that was freed, shared,
copied or published at the wrong time is found in the step that reads it. The next token is a hash of the last entry.

Work is only queued when the engine starts it. It runs when the engine waits for it, or at any time before: as late as
on the slowest device, or as early as on the fastest.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from rose_backend.block_manager import NULL_BLOCK
from rose_backend.draft_depth import draft_depths
from rose_backend.engine import decode_runner
from rose_backend.engine.decode_runner import HISTORY_STEPS, DecodeBuffers, DecodeRunner
from rose_backend.engine.model_runner import Chunks, Drawn, Forwarded, Hidden, ModelRunner, PassInputs
from rose_backend.engine.scheduler import Step
from rose_backend.engine.sequence_state import INVALID_TOKEN_ID
from rose_backend.kernels.arguments import NOT_DRAWN

_MASK, _WORDS = (1 << 63) - 1, (1 << 64) - 1
_FACTOR, _TOKEN_FACTOR, _SEED_FACTOR, _MIX = (
    0x5851F42D4C957F2D,
    0x2545F4914F6CDD1D,
    0x9E3779B97F4A7C15,
    0xBF58476D1CE4E5B9,
)
_UNWRITTEN, _OF_WRONG_DRAFTS = -1, -2


class ForeignContent(AssertionError):
    """Something was read that is not what the request's own tokens make."""


def chain(content: int, token_id: int) -> int:
    """Return the content of the position that follows one with ``content``."""
    return (content * _FACTOR + (token_id + 2) * _TOKEN_FACTOR + 12345) & _MASK


def draw(content: int, seed: int, num_choices: int) -> int:
    """Return which token follows."""
    return (((content ^ (seed * _SEED_FACTOR)) * _MIX & _WORDS) >> 33) % num_choices


def draw_all(contents: Any, seeds: Any, num_choices: int) -> Any:
    """Return ``draw`` of int64 arrays ``[N]``."""
    mixed = (contents.astype(np.uint64) ^ (seeds.astype(np.uint64) * np.uint64(_SEED_FACTOR))) * np.uint64(
        _MIX
    )
    return ((mixed >> np.uint64(33)) % np.uint64(num_choices)).astype(np.int64)


class Answer:
    """What a completion must say and leave in the pool, computed of its own tokens alone.

    Args:
        contents: of the prompt's positions.
        width: positions that there is room for.
        fails_at: output token in whose place there is none; None: there always is one.
    """

    def __init__(
        self,
        name: str,
        prompt: Sequence[int],
        contents: Sequence[int],
        *,
        seed: int,
        max_tokens: int,
        vocabulary: Sequence[int],
        width: int,
        fails_at: int | None,
    ) -> None:
        self.name, self.num_prompt_tokens, self.seed, self.fails_at = name, len(prompt), seed, fails_at
        tokens, states = list(prompt), list(contents)
        for index in range(max_tokens):
            token = vocabulary[draw(states[-1], seed, len(vocabulary))]
            tokens.append(INVALID_TOKEN_ID if index == fails_at else token)
            states.append(chain(states[-1], tokens[-1]))
        self.output = tokens[len(prompt) :]
        self.num_tokens = len(tokens)
        self.token_ids, self.contents = np.full((2, width), -5, np.int64)
        self.token_ids[: len(tokens)], self.contents[: len(states)] = tokens, states


class Stream:
    """Work in order."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self.num_queued = self.num_run = 0

    def enqueue(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        self.num_queued += 1

    def run_until(self, number: int) -> None:
        """Run until ``number`` pieces of work have run since the start."""
        while self.num_run < number:
            self.num_run += 1
            self._work.popleft()()


class Event:
    """In place of ``torch.cuda.Event``."""

    def record(self, stream: Stream) -> None:
        self._stream, self._number = stream, stream.num_queued

    def synchronize(self) -> None:
        self._stream.run_until(self._number)


class SideStream:
    """In place of ``model_runner.SideStream``."""

    def __init__(self, device: Device) -> None:
        self._device, self._stream = device, device.side
        self._start = self._end = 0
        self._hidden: Hidden | None = None

    def mark(self) -> None:
        self._start = self._device.main.num_queued

    def begin(self, compute: Callable[[], Hidden]) -> None:
        assert self._hidden is None, "the pass before was not joined"
        self._stream.enqueue(partial(self._device.main.run_until, self._start))
        self._device.current = self._stream
        self._hidden = compute()
        self._device.current = self._device.main
        self._end = self._stream.num_queued

    def is_over(self) -> bool:
        return self._stream.num_run >= self._end

    def join(self) -> Hidden:
        self._device.main.enqueue(partial(self._stream.run_until, self._end))
        hidden, self._hidden = self._hidden, None
        assert hidden is not None, "no pass was started"
        return hidden


class Device:
    """The pool, two streams, and the answers of those whose work they do.

    Args:
        rng: decides when work runs.
        vocabulary: tokens that can be drawn.
        share_run: of steps in which some work runs before anybody waits for it.
    """

    device = SimpleNamespace(type="simulated")

    def __init__(
        self,
        rng: random.Random,
        num_blocks: int,
        block_size: int,
        vocabulary: Sequence[int],
        share_run: float,
    ) -> None:
        self.pool = np.full((num_blocks, block_size), _UNWRITTEN, np.int64)
        self.nbytes = self.pool.nbytes
        self.vocabulary = np.array(vocabulary, np.int64)
        self.block_size = block_size
        self.main, self.side = Stream(), Stream()
        self.current = self.main
        self.answer_of: Callable[[int], Answer]
        """Returns the answer of the completion that holds a request slot."""
        self.num_rows = 0
        """Computed so far, over all steps."""
        self.draft_rng = np.random.default_rng(7)
        """Decides which drafts are right: no other decision of a seed depends on them."""
        self._rng = rng
        self._share_run = share_run
        self._positions = np.arange(max(num_blocks * block_size, 1))

    def progress(self) -> None:
        """Run some of the queued work, or none."""
        rng = self._rng
        if rng.random() < self._share_run:
            for _ in range(rng.choice((1, 1, 2, 8))):
                stream = self.main if rng.random() < 0.6 else self.side
                stream.run_until(min(stream.num_run + 1, stream.num_queued))

    def clone(self, sources: Any, destinations: Any) -> None:
        """Copy whole blocks; the ids are read now."""
        sources, destinations = sources.copy(), destinations.copy()

        def copy() -> None:
            self.pool[destinations] = self.pool[sources]

        self.main.enqueue(copy)

    def check_reads(self, answers: list[Answer], expected: Any, tables: Any, num_computed: Any) -> None:
        """Compare the first ``num_computed``, ``[R]``, positions of each row with ``expected``, ``[R, M]``.

        Raises:
            ForeignContent: names request, position and block.
        """
        width = -(-int(num_computed.max()) // self.block_size)
        found = self.pool[tables[:, :width]].reshape(len(answers), width * self.block_size)
        wrong = (found != expected[:, : found.shape[1]]) & (
            self._positions[: found.shape[1]] < num_computed[:, None]
        )
        if wrong.any():
            row, position = np.argwhere(wrong)[0].tolist()
            block = int(tables[row, position // self.block_size])
            raise ForeignContent(
                f"{answers[row].name}: position {position} of {num_computed[row]}, in block {block}, holds "
                f"{found[row, position]}, not {expected[row, position]}"
            )

    def write(self, answers: list[Answer], rows: Any, positions: Any, tables: Any, expected: Any) -> None:
        """Write the contents of positions, ``[T]``, of rows of ``tables``."""
        blocks = tables[rows, positions // self.block_size]
        if (blocks == NULL_BLOCK).any():
            first = int(np.flatnonzero(blocks == NULL_BLOCK)[0])
            name = answers[rows[first]].name
            raise ForeignContent(f"{name}: position {positions[first]} would be written to the null block")
        self.pool[blocks, positions % self.block_size] = expected[rows, positions]

    def check_inputs(self, answers: list[Answer], rows: Any, positions: Any, token_ids: Any) -> None:
        """Check that a step is given tokens of its requests."""
        known = np.stack([answer.token_ids for answer in answers])
        differs = known[rows, positions] != token_ids
        if differs.any():
            first = int(np.flatnonzero(differs)[0])
            row, position = int(rows[first]), int(positions[first])
            raise ForeignContent(
                f"{answers[row].name}: position {position} is computed of token {token_ids[first]}, not "
                f"{known[row, position]}"
            )

    def next_tokens(self, answers: list[Answer], contents: Any, positions: Any, seeds: Any) -> Any:
        """Return what follows ``positions``, ``[R]``, with ``contents``."""
        drawn = self.vocabulary[draw_all(contents, seeds, len(self.vocabulary))]
        for row, answer in enumerate(answers):
            if (
                answer.fails_at is not None
                and positions[row] + 1 == answer.num_prompt_tokens + answer.fails_at
            ):
                drawn[row] = INVALID_TOKEN_ID
        return drawn


class _Change:
    """In place of ``SizedGraphs``: queues a change of the decode buffers, of copies of its inputs."""

    def __init__(self, device: Device, change: Callable[[dict[str, Any]], None]) -> None:
        self._device, self._change = device, change

    def run(self, **inputs: Any) -> None:
        copies = {name: np.array(values) for name, values in inputs.items()}
        self._device.main.enqueue(partial(self._change, copies))


class Buffers(DecodeBuffers):
    """``DecodeBuffers`` in NumPy; what they are given is written when its turn comes."""

    def __init__(
        self, num_rows: int, table_width: int, device: Device, depths: tuple[int, ...], spare_columns: int
    ) -> None:
        self.tokens = np.zeros((2, num_rows), np.int64)
        self.input_ids, self.first_tokens = self.tokens
        self.longs = np.zeros((num_rows, 4), np.int64)  # position, draw position, seed, slot of the adapter
        self.num_computed_tokens = np.full(num_rows, -1, np.int64)
        self.block_table = np.zeros((num_rows, table_width + spare_columns), np.int64)
        self.drawn = np.full((HISTORY_STEPS, depths[-1] + 1, num_rows), -7, np.int64)
        self.history = SimpleNamespace(numpy=lambda: self.drawn)
        self.num_steps = 0
        self._row_changes = _Change(device, self._change_rows)
        self._table_changes = _Change(device, self._change_tables)

    def _change_rows(self, inputs: dict[str, Any]) -> None:
        rows, sources, longs = inputs["rows"], inputs["sources"], inputs["longs"]
        known = self.tokens.reshape(-1)[np.maximum(sources, 0)]
        self.input_ids[rows] = np.where(sources >= 0, known, longs[:, 0])
        # A row that moves with drafts in flight is as far as the device knows.
        moves = (sources >= 0) & (sources < len(self.input_ids))
        lengths = self.longs[sources[moves], :2], self.num_computed_tokens[sources[moves]]
        self.longs[rows] = longs[:, 1:]
        self.num_computed_tokens[rows] = inputs["words"][:, 0]
        self.longs[rows[moves], :2], self.num_computed_tokens[rows[moves]] = lengths

    def _change_tables(self, inputs: dict[str, Any]) -> None:
        tables = inputs["tables"]
        self.block_table[inputs["rows"], : tables.shape[1]] = tables


class SimulatedDecoder(DecodeRunner):
    """``DecodeRunner`` whose steps are work of a ``Device``.

    Of the drafts of a row a random number is right. The others leave in their places what nobody may read.
    """

    def __init__(
        self, device: Device, manager: Any, state: Any, widths: tuple[int, ...], num_drafts: int
    ) -> None:
        drafts: Any = None
        if num_drafts:
            depths = draft_depths(num_drafts)
            chooser = SimpleNamespace(
                # Some steps with one number come after each other.
                choose=lambda _: depths[int(device.draft_rng.random() * 1.4 * len(depths)) % len(depths)],
                **dict.fromkeys(("look", "note_step", "note_other_step", "note_accepted"), lambda *_: None),
            )
            drafts = SimpleNamespace(depths=depths[1:], write_rows=lambda *_: None, adaptive=chooser)
        with patch.object(decode_runner, "DecodeBuffers", Buffers):
            super().__init__(
                lambda *_: None, SimpleNamespace(is_in_use=False), manager, state, device, widths, drafts
            )
        self._graphs = SimpleNamespace(run_parts=lambda width, *_: self._queue(width, 0))
        self._draft_graphs = SimpleNamespace(run=lambda step: self._queue(*step))
        self._max_model_len = state.token_ids.shape[1]
        self._step_of: tuple[list[Answer], Any, Any] = ([], None, None)

    def _place(self, slots: Any) -> Any:
        rows = super()._place(slots)
        answers = [self._device.answer_of(slot) for slot in slots.tolist()]
        self._step_of = answers, np.stack([answer.contents for answer in answers]), rows
        return rows

    def _queue(self, width: int, num_drafts: int) -> None:
        self._device.num_rows += len(self._step_of[0])
        self._device.main.enqueue(partial(self._compute_step, width, num_drafts, *self._step_of))

    def _compute_step(
        self, width: int, num_drafts: int, answers: list[Answer], expected: Any, rows: Any
    ) -> None:
        device, buffers = self._device, self.buffers
        is_active = buffers.num_computed_tokens[:width] >= 0
        assert int(is_active.sum()) == len(rows) and is_active[rows].all(), (
            "other rows than the step's decode"
        )
        computed = buffers.num_computed_tokens[rows]
        assert (buffers.longs[rows, 0] == computed).all() and (
            buffers.longs[rows, 1] == computed + 1
        ).all(), "positions are not those of the tokens"
        # Those past their length draw what nobody takes.
        last = np.array([answer.num_tokens - 2 for answer in answers])
        counts = np.ones(len(rows), np.int64)
        drawn = np.full((num_drafts + 1, len(rows)), NOT_DRAWN, np.int64)
        drawn[0] = device.vocabulary[0]
        if (goes_on := np.flatnonzero(computed <= last)).size:
            answers = [answers[index] for index in goes_on.tolist()]
            drawn[:, goes_on], counts[goes_on] = self._compute_rows(
                num_drafts, answers, expected[goes_on], rows[goes_on], last[goes_on]
            )
        where = buffers.num_steps % HISTORY_STEPS
        buffers.drawn[where, : num_drafts + 1, rows] = drawn.T
        buffers.num_steps += 1
        buffers.input_ids[rows] = drawn[counts - 1, np.arange(len(rows))]
        counts = np.minimum(counts, self._max_model_len - 1 - computed)
        buffers.num_computed_tokens[rows] += counts
        buffers.longs[rows, :2] += counts[:, None]

    def _compute_rows(
        self, num_drafts: int, answers: list[Answer], expected: Any, rows: Any, last: Any
    ) -> tuple[Any, Any]:
        """Return what is drawn, ``[num_drafts + 1, R]``, and how many of it count, ``[R]``."""
        device, buffers, each = self._device, self.buffers, np.arange(len(rows))
        first, tables = buffers.num_computed_tokens[rows], buffers.block_table[rows]
        device.check_inputs(answers, each, first, buffers.input_ids[rows])
        device.check_reads(answers, expected, tables, first)
        drawn = np.full((num_drafts + 1, len(rows)), NOT_DRAWN, np.int64)
        counts, goes_on = np.zeros(len(rows), np.int64), np.ones(len(rows), bool)
        num_right = device.draft_rng.integers(0, num_drafts + 1, len(rows))
        for place in range(num_drafts + 1):
            positions = first + place
            goes_on &= place <= num_right
            # A draft past the length is stored where there is a block for it, or nowhere.
            blocks = tables[each, positions // device.block_size]
            stored = np.flatnonzero((positions <= last) | (blocks != NULL_BLOCK))
            contents = np.where(goes_on[:, None], expected, _OF_WRONG_DRAFTS)
            device.write(answers, stored, positions[stored], tables, contents)
            now = np.flatnonzero(goes_on & (positions <= last))
            chosen = [answers[index] for index in now.tolist()]
            seeds = buffers.longs[rows[now], 2]
            drawn[place, goes_on] = device.vocabulary[0]
            drawn[place, now] = device.next_tokens(
                chosen, expected[now, positions[now]], positions[now], seeds
            )
            counts += goes_on
            goes_on &= drawn[place] >= 0
        return drawn, counts


class SimulatedRunner(ModelRunner):
    """``ModelRunner`` whose passes are work of a ``Device``."""

    widths: tuple[int, ...] = ()
    has_side_stream = False

    def __init__(self, model: Any, config: Any, manager: Any, state: Any, device: Any, head: None) -> None:
        self._manager, self._state, self._device = manager, state, device
        self._kv_cache, self._block_size = device, config.block_size
        self._budget = config.token_budget
        self.prompts, self.first_draws, self._canary = None, None, None
        num_drafts = 0 if config.drafts is None else config.drafts.num_speculative_tokens
        self.decoder = SimulatedDecoder(device, manager, state, self.widths, num_drafts)
        self.side = SideStream(device) if self.has_side_stream else None  # type: ignore[assignment]

    def forward(self, step: Step) -> Forwarded:
        """Check the step's size and copies, then queue it."""
        num_tokens = step.num_new_tokens.sum() + step.num_decodes * step.num_drafts
        assert step.num_new_tokens.min() > 0 and num_tokens <= self._budget, "the token budget"
        if step.clone_plan is not None:
            copies = step.clone_plan.dst_block_ids
            assert len(np.unique(copies)) == len(copies), "two copies into one block"
            assert (self._manager.pool.ref_counts[copies] > 0).all(), "a copy into a block that nobody holds"
        return super().forward(step)

    def follow_tokens(self, tokens_ahead: Any) -> None:
        """No simulated request has a grammar."""

    def can_overlap(self, num_decodes: int, num_tokens: int, num_prompts: int) -> bool:
        return self.side is not None

    def _make_chunks(self, slots: Any, counts: Any) -> Chunks:
        self._answers = [self._device.answer_of(slot) for slot in slots.tolist()]
        return super()._make_chunks(slots, counts)

    def _forward_chunks(self, inputs: PassInputs) -> Hidden:
        answers, device = self._answers, self._device
        device.num_rows += len(answers)
        last: list[Any] = []

        def compute() -> None:
            expected = np.stack([answer.contents for answer in answers])
            counts = np.diff(inputs.query_start_loc)
            rows = np.repeat(np.arange(len(answers)), counts)
            device.check_inputs(answers, rows, inputs.positions, inputs.input_ids)
            if (inputs.num_computed_tokens > 0).any():
                device.check_reads(answers, expected, inputs.block_table, inputs.num_computed_tokens)
            device.write(answers, rows, inputs.positions, inputs.block_table, expected)
            last.append(expected[np.arange(len(answers)), inputs.num_computed_tokens + counts - 1])

        device.current.enqueue(compute)
        return Hidden(last, False)  # type: ignore[arg-type]

    def sample(self, hidden: Hidden, due: Any, slots: Any, sources: Any) -> Drawn:
        first_tokens, state, device = self.decoder.take_first_tokens(slots), self._state, self._device
        answers = [device.answer_of(slot) for slot in slots.tolist()]
        positions, seeds = state.num_tokens[slots] - 1, state.seed[slots]
        drawn = np.full(len(slots), -7, np.int64)

        def compute() -> None:
            (last,) = hidden.states
            contents = last[due[sources]]
            expected = np.array([answer.contents[at] for answer, at in zip(answers, positions, strict=True)])
            if (wrong := np.flatnonzero(contents != expected)).size:
                name = answers[wrong[0]].name
                raise ForeignContent(f"{name}: its first token is drawn from the end of another prompt")
            first_tokens[:] = drawn[:] = device.next_tokens(answers, contents, positions, seeds)

        device.main.enqueue(compute)
        return Drawn(SimpleNamespace(numpy=drawn.copy), None)  # type: ignore[arg-type]
