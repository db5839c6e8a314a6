"""Copy-on-write step by step, by a real block manager: its public calls make the story, its arrays fill the frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rose_backend.block_manager import BlockManager, ClonePlan
from rose_backend.block_manager.block_pool import Int32Array
from rose_backend.block_view.view_model import Frame, Observer, Story
from rose_backend.config import check_int
from rose_backend.errors import ConfigError

DEFAULT_PROMPT = "In a garden grows one rose"
DEFAULT_BLOCK_SIZE = 4
TOKEN_KINDS = ("words", "characters")
MAX_PROMPT_TOKENS = 96
# A block of one token is never part-filled, so nothing would ever be copied.
BLOCK_SIZES = (2, 32)

_SPARE_BLOCKS = 6
_MAX_NEW_TOKENS = 2
# What A and B say next, and what the newcomer C asks; no model runs. Their first tokens must differ.
_CONTINUATIONS = {
    "words": (("and", "so", "on"), ("but", "not"), ("or", "perhaps")),
    "characters": (tuple("! !"), tuple("? "), tuple(", ")),
}


def _split_prompt(prompt: str, tokens: str) -> tuple[str, ...]:
    """Cut a prompt into tokens; characters that cannot be printed are replaced."""
    pieces = prompt.split() if tokens == "words" else [" " if piece.isspace() else piece for piece in prompt]
    if not 1 <= len(pieces) <= MAX_PROMPT_TOKENS:
        raise ConfigError(
            f"prompt: got {len(pieces)} {tokens}, allowed are 1 to {MAX_PROMPT_TOKENS} in a picture"
        )
    return tuple("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in p) for p in pieces)


def tell_story(
    prompt: str = DEFAULT_PROMPT, *, block_size: int = DEFAULT_BLOCK_SIZE, tokens: str = "words"
) -> Story:
    """Run the demonstration.

    Args:
        prompt: what the first sequence asks.
        block_size: tokens per block.
        tokens: what one token is, one of ``TOKEN_KINDS``.

    Raises:
        ConfigError: ``block_size`` is out of range, or the prompt has no tokens or too many for a picture.
    """
    check_int("block_size", block_size, *BLOCK_SIZES)
    words = _split_prompt(prompt, tokens)
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
        self._words: list[str] = []
        self._names: dict[int, str] = {}
        self._manager = BlockManager(
            num_blocks=1 + -(-len(self._shared) // block_size) + _SPARE_BLOCKS,
            block_size=block_size,
            max_num_seqs=2,
            max_model_len=len(self._shared) + block_size,
        )
        self._observer = Observer(self._manager, self._names, self._words.__getitem__)

    def copy_on_write(self) -> Iterator[Frame]:
        manager, ids = self._manager, self._ids(self._shared)
        a, _ = self._add("A", ids)
        self._reserve([a], len(ids))
        manager.commit(np.array([a]), len(ids), ids)
        num_blocks = _count(int(manager.num_row_blocks[a]), "block")
        yield self._frame(
            "A prompt is computed",
            f"Sequence A holds {_count(len(ids), 'token')} in {num_blocks}. Block #{self._tail(a)} is filled in part: "
            "A may go on writing there. Since commit, other prompts can find what is written.",
            ("A = add(prompt)", f"reserve(A, {len(ids)})", f"commit(A, {len(ids)})"),
        )

        children = manager.fork(a, 1)
        assert children is not None, "a row is left"
        b = int(children[0])
        self._names[b] = "B"
        yield self._frame(
            "Fork: nothing is copied",
            "B continues the same text: parallel sampling, or a beam. It reads every block of A, the part-filled "
            f"#{self._tail(b)} too; only reference counts have changed. A alone may still write.",
            ("B = fork(A)",),
        )

        shared = self._tail(a)
        plan = self._reserve([a, b], 1)
        assert plan is not None, "B gets to a part-filled tail that A writes"
        yield self._frame(
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
        yield self._frame(
            "The step has run: two texts, one common past",
            f"A and B differ in #{self._tail(a)} and #{self._tail(b)} only. Everything before is still "
            "stored once. The new tokens can be found from now on, not a moment earlier.",
            ("finish_clone_plan(plan)", "commit([A, B], 1)"),
        )

        manager.free(np.array([a, b]))
        self._names.clear()
        order = ", ".join(f"#{block_id}" for block_id in manager.pool.cached_blocks().tolist())
        yield self._frame(
            "Both end: what stays findable",
            "No sequence holds a block any more, so all of them can be allocated. Prefix lookups still find what was "
            f"written until a block is reused: free blocks go first, then {order}; tails go before heads.",
            ("free([A, B])",),
        )

    def hit_inside_a_block(self) -> Iterator[Frame]:
        room = self._size - len(self._shared) % self._size
        question = self._asked_by_c[: min(room, _MAX_NEW_TOKENS)]
        ids = self._ids([*self._shared, *question])
        c, hit = self._add("C", ids)
        asked = " ".join([self._shared[-1], *question])
        whole = hit // self._size * self._size
        yield self._frame(
            "A new prompt: the hit ends inside a block",
            f'C asks "... {asked}": {hit} of its {len(ids)} tokens are found, '
            f"{hit - whole} of them inside #{self._tail(c)}, whose other tokens C does not read. A cache of "
            f"whole blocks would have found {whole}.",
            (f"C = add(prompt): {hit} tokens cached",),
        )

        source, missing = self._tail(c), len(ids) - hit
        plan = self._reserve([c], missing)
        assert plan is not None, "the cache knows more of the tail than C shares"
        yield self._frame(
            "Its first write: copied from the cache",
            f"C may not write over #{source}: another prompt may still ask for it. So C gets #{self._tail(c)} "
            f"and computes {_count(missing, 'token')} instead of {len(ids)}. When the copy has run, "
            f"#{source} is cached again.",
            (f"reserve(C, {missing})", f"take_clone_plan(): {_arrows(plan)}"),
            plan,
        )

    def _frame(self, title: str, text: str, calls: tuple[str, ...], plan: ClonePlan | None = None) -> Frame:
        self._manager.check_integrity()
        return self._observer.frame(title, text, calls, plan)

    def _add(self, name: str, ids: Int32Array) -> tuple[int, int]:
        """Return the row of a new sequence, and how many of its tokens are cached."""
        admission = self._manager.add(ids)
        assert admission is not None, "the table is empty"
        self._names[admission.row] = name
        return admission.row, admission.num_cached_tokens

    def _reserve(self, rows: list[int], num_tokens: int) -> ClonePlan | None:
        reservation = self._manager.reserve(np.array(rows), num_tokens)
        assert reservation.ok, "the pool has room for the whole story"
        return self._manager.take_clone_plan()

    def _ids(self, words: Sequence[str]) -> Int32Array:
        """Return token ids; a word that is new gets the next one."""
        for word in words:
            if word not in self._words:
                self._words.append(word)
        return np.array([self._words.index(word) for word in words], np.int32)

    def _tail(self, row: int) -> int:
        return int(self._manager.block_table[row, self._manager.num_row_blocks[row] - 1])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _arrows(plan: ClonePlan) -> str:
    pairs = zip(plan.src_block_ids.tolist(), plan.dst_block_ids.tolist(), strict=True)
    return ", ".join(f"#{source} -> #{destination}" for source, destination in pairs)
