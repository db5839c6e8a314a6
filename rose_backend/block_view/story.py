"""Copy-on-write step by step: a real block manager's public calls make the story, its arrays fill the pictures.

``terminal`` and ``page`` draw the same frames, each a list of strips of blocks.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rose_backend.block_manager import NULL_BLOCK, BlockManager, ClonePlan
from rose_backend.block_manager.block_pool import NO_WRITER, Int32Array
from rose_backend.config import check_int
from rose_backend.errors import ConfigError

MAX_PROMPT_TOKENS = 96

_SPARE_BLOCKS = 6
_MAX_NEW_TOKENS = 2
# What A and B say next, and what the newcomer C asks; no model runs. Their first tokens must differ.
_CONTINUATIONS = {
    "words": (("and", "so", "on"), ("but", "not"), ("or", "perhaps")),
    "characters": (tuple("! !"), tuple("? "), tuple(", ")),
}

StripKind = Literal["sequence", "source", "cached"]


class BlockState(enum.Enum):
    """State of a block in the picture of the pool: its sign, so that no picture depends on colors, name and meaning."""

    SHARED = ("◆", "shared", "several sequences read it")
    HELD = ("●", "one holder", "one sequence reads it")
    CLONE_SOURCE = ("▲", "being copied", "held until its copy has run")
    CACHED = ("○", "cached", "no sequence reads it, prefix lookups still find it")
    FREE = ("□", "free", "nothing in it")
    NULL = ("∅", "null block", "fills unused table entries, never allocated")

    def __init__(self, mark: str, label: str, meaning: str) -> None:
        self.mark, self.label, self.meaning = mark, label, meaning


class SlotKind(enum.Enum):
    """What one token position of a block is for the sequence that is drawn: name and meaning."""

    COMPUTED = ("computed", "its keys and values are there")
    FOREIGN = ("not read here", "written, but not part of this sequence")
    RESERVED = ("reserved", "this sequence may write it")
    EMPTY = ("not reserved", "this sequence has to reserve it first")

    def __init__(self, label: str, meaning: str) -> None:
        self.label, self.meaning = label, meaning


@dataclass(frozen=True, slots=True)
class Block:
    """One block of the pool."""

    block_id: int
    state: BlockState
    ref_count: int
    writer: str | None
    """Name of the sequence that may append."""
    words: tuple[str, ...]
    """Tokens whose K/V is there."""
    is_findable: bool
    """Whether the lookup of another prompt can find it."""

    @property
    def references(self) -> str:
        """How many hold it."""
        return _count(self.ref_count, "ref")


@dataclass(frozen=True, slots=True)
class Cell:
    """One block as one sequence sees it: a slot is ``(word, kind)``, the word empty where nothing is written."""

    block: Block
    slots: tuple[tuple[str, SlotKind], ...]

    @property
    def fill(self) -> str:
        """Which sequence may write the block."""
        if len(self.block.words) == len(self.slots):
            return "full"
        return f"{self.block.writer} may write" if self.block.writer else "no writer"


@dataclass(frozen=True, slots=True)
class Link:
    """Joins a column of one strip to the same column of the next: the same block, or its copy."""

    kind: Literal["same", "copy"]
    text: str


@dataclass(frozen=True, slots=True)
class Strip:
    """One line of blocks. Equal columns of sequences hold equal positions."""

    kind: StripKind
    name: str
    notes: tuple[str, ...]
    cells: tuple[Cell | None, ...]
    """None leaves a column empty."""
    links: tuple[Link | None, ...]
    """To the strip above, for each column that both have."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One step of the demonstration."""

    title: str
    text: str
    calls: tuple[str, ...]
    """What the engine has just asked of the block manager."""
    strips: tuple[Strip, ...]
    """From top to bottom: sequences, a copy's source just above it if no sequence reads it, the cache."""
    blocks: tuple[Block, ...]
    """The whole pool, in order of the ids."""
    counts: str
    """How the counts of the pool add up."""
    history: str
    """What the manager has counted since the first frame."""


@dataclass(frozen=True, slots=True)
class Story:
    """Frames in order, and what they have in common."""

    block_size: int
    prompt: tuple[str, ...]
    frames: tuple[Frame, ...]


def tell_story(
    prompt: str = "In a garden grows one rose", *, block_size: int = 4, tokens: str = "words"
) -> Story:
    """Run the demonstration.

    Args:
        prompt: what the first sequence asks.
        block_size: tokens per block.
        tokens: what one token is, "words" or "characters".

    Raises:
        ConfigError: ``block_size`` is out of range, or the prompt has no tokens or too many for a picture.
    """
    # A block of one token is never part-filled, so nothing would ever be copied.
    check_int("block_size", block_size, 2, 32)
    pieces = prompt.split() if tokens == "words" else [" " if piece.isspace() else piece for piece in prompt]
    if not 1 <= len(pieces) <= MAX_PROMPT_TOKENS:
        raise ConfigError(
            f"prompt: got {len(pieces)} {tokens}, allowed are 1 to {MAX_PROMPT_TOKENS} in a picture"
        )
    words = tuple("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in p) for p in pieces)
    teller = _Teller(words, block_size, _CONTINUATIONS[tokens])
    return Story(block_size, words, (*teller.copy_on_write(), *teller.hit_inside_a_block()))


class _Teller:
    """Drives one block manager, and yields a frame after each step."""

    def __init__(
        self, prompt: Sequence[str], block_size: int, continuations: Sequence[Sequence[str]]
    ) -> None:
        self._size = block_size
        self._said_by_a, self._said_by_b, self._asked_by_c = continuations
        # A full tail is never copied, so A says one token more before it is forked.
        extra = 1 if len(prompt) % block_size == 0 else 0
        self._shared = [*prompt, *self._said_by_a[:extra]]
        self._said_by_a = self._said_by_a[extra:]
        self._manager = BlockManager(
            num_blocks=1 + -(-len(self._shared) // block_size) + _SPARE_BLOCKS,
            block_size=block_size,
            max_num_seqs=2,
            max_model_len=len(self._shared) + block_size,
        )
        self._observer = _Observer(self._manager)

    def copy_on_write(self) -> Iterator[Frame]:
        manager, frame, ids = self._manager, self._observer.frame, self._ids(self._shared)
        a, _ = self._add("A", ids)
        self._reserve([a], len(ids))
        manager.commit(np.array([a]), len(ids), ids)
        num_blocks = _count(int(manager.num_row_blocks[a]), "block")
        yield frame(
            "A prompt is computed",
            f"Sequence A holds {_count(len(ids), 'token')} in {num_blocks}. Block #{self._tail(a)} is filled in part: "
            "A may go on writing there. Since commit, other prompts can find what is written.",
            ("A = add(prompt)", f"reserve(A, {len(ids)})", f"commit(A, {len(ids)})"),
        )

        children = manager.fork(a, 1)
        assert children is not None, "a row is left"
        b = int(children[0])
        self._observer.names[b] = "B"
        yield frame(
            "Fork: nothing is copied",
            "B continues the same text: parallel sampling, or a beam. It reads every block of A, the part-filled "
            f"#{self._tail(b)} too; only reference counts have changed. A alone may still write.",
            ("B = fork(A)",),
        )

        shared = self._tail(a)
        plan = self._reserve([a, b], 1)
        assert plan is not None, "B gets to a part-filled tail that A writes"
        yield frame(
            "First write: the block is copied",
            f"Both want to write their next token. #{shared} has a writer, A, so B gets its own block "
            f"#{self._tail(b)}. What B reads of #{shared}, {_count(int(plan.num_tokens[0]), 'token')}, is "
            f"copied before the step runs. A writes on in #{shared} and notices nothing. The copy holds #{shared} "
            "until it has run.",
            ("reserve([A, B], 1)", f"take_clone_plan(): {_arrows(plan)}"),
            plan,
        )
        manager.finish_clone_plan(plan)
        manager.commit(np.array([a, b]), 1, self._ids([self._said_by_a[0], self._said_by_b[0]]))
        yield frame(
            "The step has run: two texts, one common past",
            f"A and B differ in #{self._tail(a)} and #{self._tail(b)} only. Everything before is still "
            "stored once. The new tokens can be found from now on, not a moment earlier.",
            ("finish_clone_plan(plan)", "commit([A, B], 1)"),
        )

        manager.free(np.array([a, b]))
        self._observer.names.clear()
        order = ", ".join(f"#{block_id}" for block_id in manager.pool.cached_blocks().tolist())
        yield frame(
            "Both end: what stays findable",
            "No sequence holds a block any more, so all of them can be allocated. Prefix lookups still find what was "
            f"written until a block is reused: free blocks go first, then {order}; tails go before heads.",
            ("free([A, B])",),
        )

    def hit_inside_a_block(self) -> Iterator[Frame]:
        frame = self._observer.frame
        room = self._size - len(self._shared) % self._size
        question = self._asked_by_c[: min(room, _MAX_NEW_TOKENS)]
        ids = self._ids([*self._shared, *question])
        c, hit = self._add("C", ids)
        asked = " ".join([self._shared[-1], *question])
        whole = hit // self._size * self._size
        yield frame(
            "A new prompt: the hit ends inside a block",
            f'C asks "... {asked}": {hit} of its {len(ids)} tokens are found, '
            f"{hit - whole} of them inside #{self._tail(c)}, whose other tokens C does not read. A cache of "
            f"whole blocks would have found {whole}.",
            (f"C = add(prompt): {hit} tokens cached",),
        )

        source, missing = self._tail(c), len(ids) - hit
        plan = self._reserve([c], missing)
        assert plan is not None, "the cache knows more of the tail than C shares"
        yield frame(
            "Its first write: copied from the cache",
            f"C may not write over #{source}: another prompt may still ask for it. So C gets #{self._tail(c)} "
            f"and computes {_count(missing, 'token')} instead of {len(ids)}. When the copy has run, "
            f"#{source} is cached again.",
            (f"reserve(C, {missing})", f"take_clone_plan(): {_arrows(plan)}"),
            plan,
        )

    def _add(self, name: str, ids: Int32Array) -> tuple[int, int]:
        """Return the row of a new sequence, and how many of its tokens are cached."""
        admission = self._manager.add(ids)
        assert admission is not None, "the table is empty"
        self._observer.names[admission.row] = name
        return admission.row, admission.num_cached_tokens

    def _reserve(self, rows: list[int], num_tokens: int) -> ClonePlan | None:
        reservation = self._manager.reserve(np.array(rows), num_tokens)
        assert reservation.ok, "the pool has room for the whole story"
        return self._manager.take_clone_plan()

    def _ids(self, words: Sequence[str]) -> Int32Array:
        """Return token ids; a word that is new gets the next one."""
        known = self._observer.words
        known += [word for word in dict.fromkeys(words) if word not in known]
        return np.array([known.index(word) for word in words], np.int32)

    def _tail(self, row: int) -> int:
        return int(self._manager.block_table[row, self._manager.num_row_blocks[row] - 1])


class _Observer:
    """Takes frames of a block manager with a prefix cache; changes nothing in it."""

    def __init__(self, manager: BlockManager) -> None:
        self.names: dict[int, str] = {}
        """Row to the name of its sequence; the caller keeps it up to date, like ``words``."""
        self.words: list[str] = []
        """Text of each token id."""
        self._manager = manager

    def frame(self, title: str, text: str, calls: tuple[str, ...], plan: ClonePlan | None = None) -> Frame:
        """Return the state of every block and sequence, and the copies of a plan that has not been carried out yet."""
        self._manager.check_integrity()
        pool, stats = self._manager.pool, self._manager.stats
        blocks = tuple(map(self._block, range(pool.num_blocks)))
        copies = {} if plan is None else _copies(plan)
        free, cached = len(pool.free_blocks()), pool.num_cached_blocks
        held = np.count_nonzero(pool.ref_counts)
        return Frame(
            *(title, text, calls, self._strips(blocks, copies), blocks),
            counts=f"free {free} + cached {cached} + held {held} = {free + cached + held} blocks",
            history=f"so far: forks {stats.forks}, copies {stats.clones}, "
            f"prompt tokens found {stats.hit_tokens} of {stats.query_tokens}",
        )

    def _block(self, block_id: int) -> Block:
        manager, pool = self._manager, self._manager.pool
        assert manager.cache is not None, "the pictures read the tokens of a block from the prefix cache"
        ref_count, is_findable = int(pool.ref_counts[block_id]), bool(pool.is_cached[block_id])
        if block_id == NULL_BLOCK:
            state = BlockState.NULL
        elif block_id in manager.clones.held_sources():
            state = BlockState.CLONE_SOURCE
        elif ref_count:
            state = BlockState.SHARED if ref_count > 1 else BlockState.HELD
        else:
            state = BlockState.CACHED if is_findable else BlockState.FREE
        row = int(pool.writers[block_id])
        writer = None if row == NO_WRITER else self.names[row]
        words = tuple(self.words[token_id] for token_id in manager.cache.tokens_of(block_id).tolist())
        return Block(block_id, state, ref_count, writer, words, is_findable)

    def _strips(self, blocks: Sequence[Block], copies: Mapping[tuple[int, int], int]) -> tuple[Strip, ...]:
        manager = self._manager
        strips: list[Strip] = []

        def add(kind: StripKind, name: str, notes: Sequence[str], cells: Sequence[Cell | None]) -> None:
            pairs = zip(strips[-1].cells if strips else (), cells, strict=False)
            links = tuple(_link(above, below, copies) for above, below in pairs)
            strips.append(Strip(kind, name, tuple(notes), tuple(cells), links))

        tables = {
            row: manager.block_table[row, : manager.num_row_blocks[row]].tolist()
            for row in sorted(self.names)
        }
        for row, table in tables.items():
            for source, destination in copies:
                if destination in table and not any(source in other for other in tables.values()):
                    empty = [None] * table.index(destination)
                    add("source", "source", ("held until", "copied"), [*empty, self._cell(blocks[source])])
            num_computed = int(manager.num_computed_tokens[row])
            cells = [
                self._cell(blocks[block_id], num_computed - column * manager.block_size, self.names[row])
                for column, block_id in enumerate(table)
            ]
            num_reserved = sum(kind is SlotKind.RESERVED for cell in cells for _, kind in cell.slots)
            counts = {SlotKind.COMPUTED: num_computed, SlotKind.RESERVED: num_reserved}
            notes = [f"{count} {kind.label}" for kind, count in counts.items() if count]
            add("sequence", self.names[row], notes, cells)
        if cached := manager.pool.cached_blocks().tolist():
            cells = [self._cell(blocks[block_id]) for block_id in cached]
            add("cached", "cache", ("first to go", "at the left"), cells)
        return tuple(strips)

    def _cell(self, block: Block, num_computed: int | None = None, name: str = "") -> Cell:
        """Return a block as sequence ``name`` sees it, which has computed ``num_computed`` of its positions, or as it
        is where no sequence reads it.
        """
        num_read = len(block.words) if num_computed is None else num_computed
        unwritten = SlotKind.RESERVED if block.writer == name else SlotKind.EMPTY
        words = (*block.words, *[""] * (self._manager.block_size - len(block.words)))
        kinds = (
            SlotKind.COMPUTED if offset < num_read else SlotKind.FOREIGN if word else unwritten
            for offset, word in enumerate(words)
        )
        return Cell(block, tuple(zip(words, kinds, strict=True)))


def _link(above: Cell | None, below: Cell | None, copies: Mapping[tuple[int, int], int]) -> Link | None:
    if above is None or below is None:
        return None
    source, destination = above.block.block_id, below.block.block_id
    if source == destination:
        return Link("same", "same block")
    num_tokens = copies.get((source, destination))
    return None if num_tokens is None else Link("copy", f"copy {_count(num_tokens, 'token')}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _copies(plan: ClonePlan) -> dict[tuple[int, int], int]:
    """Return the tokens of each copy, by the ids of its source and destination."""
    pairs = zip(plan.src_block_ids.tolist(), plan.dst_block_ids.tolist(), strict=True)
    return dict(zip(pairs, plan.num_tokens.tolist(), strict=True))


def _arrows(plan: ClonePlan) -> str:
    return ", ".join(f"#{source} -> #{destination}" for source, destination in _copies(plan))
