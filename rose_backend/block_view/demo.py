"""Copy-on-write, told in steps by a real block manager: its public calls make the story, its arrays fill the frames."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rose_backend.block_manager import BlockManager, ClonePlan
from rose_backend.block_manager.array_types import Int32Array
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


def split_prompt(prompt: str, tokens: str) -> tuple[str, ...]:
    """Cut a prompt into the demonstration's tokens; characters that cannot be printed are replaced.

    Args:
        prompt: any text.
        tokens: one of ``TOKEN_KINDS``.

    Raises:
        ConfigError: the prompt has no tokens, or too many for a picture.
    """
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
        ConfigError: an argument is out of range.
    """
    check_int("block_size", block_size, *BLOCK_SIZES)
    words = split_prompt(prompt, tokens)
    teller = _Teller(words, block_size, _CONTINUATIONS[tokens])
    frames = (
        teller.compute_prompt(),
        teller.fork(),
        teller.reserve_first_write(),
        teller.write(),
        teller.free(),
        teller.hit_inside_a_block(),
        teller.copy_from_the_cache(),
    )
    return Story(block_size, words, frames)


class _Teller:
    """Drives one block manager; each method is one step of the story and returns its frame."""

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
        self._plan: ClonePlan | None = None
        self._a = self._b = self._c = -1

    def compute_prompt(self) -> Frame:
        ids = self._ids(self._shared)
        admission = self._manager.add(ids)
        assert admission is not None, "the table is empty"
        self._a = admission.row
        self._names[self._a] = "A"
        self._reserve([self._a], len(ids))
        self._commit([self._a], len(ids), ids)
        tail = self._tail(self._a)
        return self._frame(
            "A prompt is computed",
            f"Sequence A holds {_count(len(ids), 'token')} in {_count(self._num_blocks(self._a), 'block')}. Block "
            f"#{tail} is filled in part: A may go on writing there. Since commit, other prompts can find what is "
            "written.",
            ("A = add(prompt)", f"reserve(A, {len(ids)})", f"commit(A, {len(ids)})"),
        )

    def fork(self) -> Frame:
        children = self._manager.fork(self._a, 1)
        assert children is not None, "a row is left"
        self._b = int(children[0])
        self._names[self._b] = "B"
        return self._frame(
            "Fork: nothing is copied",
            "B continues the same text: parallel sampling, or a beam. It reads every block of A, the part-filled "
            f"#{self._tail(self._b)} too; only reference counts have changed. A alone may still write.",
            ("B = fork(A)",),
        )

    def reserve_first_write(self) -> Frame:
        shared = self._tail(self._a)
        self._reserve([self._a, self._b], 1)
        self._plan = self._manager.take_clone_plan()
        assert self._plan is not None, "B comes to a part-filled tail that A writes"
        return self._frame(
            "First write: the block is copied",
            f"Both want to write their next token. #{shared} has a writer, A, so B gets its own block "
            f"#{self._tail(self._b)}. What B reads of #{shared}, {_count(int(self._plan.num_tokens[0]), 'token')}, is "
            f"copied before the step runs. A writes on in #{shared} and notices nothing. The copy holds #{shared} "
            "until it has run.",
            ("reserve([A, B], 1)", f"take_clone_plan(): {_arrows(self._plan)}"),
        )

    def write(self) -> Frame:
        self._finish_plan()
        self._commit([self._a, self._b], 1, self._ids([self._said_by_a[0], self._said_by_b[0]]))
        return self._frame(
            "The step has run: two texts, one common past",
            f"A and B differ in #{self._tail(self._a)} and #{self._tail(self._b)} only. Everything before is still "
            "stored once. The new tokens can be found from now on, not a moment earlier.",
            ("finish_clone_plan(plan)", "commit([A, B], 1)"),
        )

    def free(self) -> Frame:
        self._manager.free(np.array([self._a, self._b]))
        self._names.clear()
        order = ", ".join(f"#{block_id}" for block_id in self._manager.pool.cached_blocks().tolist())
        return self._frame(
            "Both end: what stays findable",
            "Nobody holds a block any more, so all of them can be handed out. Yet what was written stays findable "
            f"until its room is needed: free blocks go first, then {order}; tails go before heads.",
            ("free([A, B])",),
        )

    def hit_inside_a_block(self) -> Frame:
        room = self._size - len(self._shared) % self._size
        question = self._asked_by_c[: min(room, _MAX_NEW_TOKENS)]
        self._c_ids = self._ids([*self._shared, *question])
        admission = self._manager.add(self._c_ids)
        assert admission is not None, "the table is empty"
        self._c, hit = admission.row, admission.num_cached_tokens
        self._names[self._c] = "C"
        whole = hit // self._size * self._size
        return self._frame(
            "A new prompt: the hit ends inside a block",
            f"C asks {_quote(self._shared[-1], question)}: {hit} of its {len(self._c_ids)} tokens are found, "
            f"{hit - whole} of them inside #{self._tail(self._c)}, whose other tokens C does not read. A cache of "
            f"whole blocks would have found {whole}.",
            (f"C = add(prompt): {hit} tokens cached",),
        )

    def copy_from_the_cache(self) -> Frame:
        source = self._tail(self._c)
        missing = len(self._c_ids) - int(self._manager.num_computed_tokens[self._c])
        self._reserve([self._c], missing)
        self._plan = self._manager.take_clone_plan()
        assert self._plan is not None, "the cache knows more of the tail than C shares"
        return self._frame(
            "Its first write: copied from the cache",
            f"C may not write over #{source}: another prompt may still ask for it. So C gets #{self._tail(self._c)} "
            f"and computes {_count(missing, 'token')} instead of {len(self._c_ids)}. When the copy has run, "
            f"#{source} is cached again.",
            (f"reserve(C, {missing})", f"take_clone_plan(): {_arrows(self._plan)}"),
        )

    def _frame(self, title: str, text: str, calls: tuple[str, ...]) -> Frame:
        self._manager.check_integrity()
        pool = self._observer.pool()
        return Frame(
            title,
            text,
            calls,
            self._observer.rows(pool),
            self._observer.copies(self._plan),
            pool,
            self._manager.stats.as_dict(),
        )

    def _reserve(self, rows: list[int], num_tokens: int) -> None:
        reservation = self._manager.reserve(np.array(rows), num_tokens)
        assert reservation.ok, "the pool has room for the whole story"

    def _commit(self, rows: list[int], num_tokens: int, ids: Int32Array) -> None:
        self._manager.commit(np.array(rows), num_tokens, ids)

    def _finish_plan(self) -> None:
        if self._plan is not None:
            self._manager.finish_clone_plan(self._plan)
            self._plan = None

    def _ids(self, words: Sequence[str]) -> Int32Array:
        """Return token ids; a word that is new gets the next one."""
        for word in words:
            if word not in self._words:
                self._words.append(word)
        return np.array([self._words.index(word) for word in words], np.int32)

    def _num_blocks(self, row: int) -> int:
        return int(self._manager.num_row_blocks[row])

    def _tail(self, row: int) -> int:
        return int(self._manager.block_table[row, self._num_blocks(row) - 1])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _arrows(plan: ClonePlan) -> str:
    pairs = zip(plan.src_block_ids.tolist(), plan.dst_block_ids.tolist(), strict=True)
    return ", ".join(f"#{source} -> #{destination}" for source, destination in pairs)


def _quote(last: str, question: Sequence[str]) -> str:
    return f'"... {" ".join([last, *question])}"'
