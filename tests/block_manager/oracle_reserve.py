"""What ``reserve`` has to answer: for each row a new block, the shared tail itself, or a copy of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rose_backend.block_manager import Reservation
from tests.block_manager.oracle_books import Block, Books, Disagreement, agree


@dataclass(frozen=True)
class Want:
    """What one row of a ``reserve`` call needs."""

    row: int
    num_new: int
    tail: int | None
    """Part-filled block that takes the next token and that the row may not write yet."""
    offset: int


class ReserveOracle:
    """Works on the books; holds nothing itself."""

    def __init__(self, books: Books) -> None:
        self.books = books

    def reserve(
        self, rows: list[int], counts: list[int], answer: Reservation, tables: list[list[int]]
    ) -> list[int]:
        """``tables``: blocks of each row after the call. Returns the blocks whose content is now undefined."""
        wants = [self._want(row, count) for row, count in zip(rows, counts, strict=True)]
        is_short = self._cost(wants, is_short=False) > self.books.num_free_blocks
        cost = self._cost(wants, is_short=is_short)
        if cost > self.books.num_free_blocks:
            self._check_shortage(wants, answer)
            return []
        agree("reserve: ok", answer.ok, True)
        agree("reserve: servable", answer.servable.tolist(), [True] * len(rows))
        agree("reserve: num_new_blocks", answer.num_new_blocks, cost)
        in_place, copies, taken = self._read_tables(wants, tables)
        self._check_tails(wants, in_place, is_short)
        self.books.take(taken)
        for want in in_place:
            self._take_over(want)
        for want, copy in copies:
            self._clone(want, copy)
        for want, table in zip(wants, tables, strict=True):
            state = self.books.rows[want.row]
            for block_id in table[len(state.blocks) :]:
                self.books.blocks[block_id] = Block(rows={want.row}, writer=want.row)
            if table != state.blocks:
                self.books.must_change.add(want.row)
            self.books.may_change.add(want.row)
            state.blocks = list(table)
        return taken

    def _want(self, row: int, count: int) -> Want:
        state = self.books.rows[row]
        column, offset = divmod(len(state.tokens), self.books.block_size)
        num_new = max(-(-(len(state.tokens) + count) // self.books.block_size) - len(state.blocks), 0)
        is_foreign = offset and count and self.books.blocks[state.blocks[column]].writer != row
        return Want(row, num_new, state.blocks[column] if is_foreign else None, offset)

    def is_claimable(self, block_id: int, offset: int) -> bool:
        """Nobody has written, or may write, behind the first ``offset`` tokens."""
        block = self.books.blocks[block_id]
        return block.writer is None and len(block.tokens) <= offset

    def _is_alone(self, block_id: int) -> bool:
        return self.books.blocks[block_id].writer is None and self.books.blocks[block_id].num_holders == 1

    def _cost_after(self, want: Want, claimed: set[int | None], is_short: bool) -> int:
        """Blocks that one row takes, once the tails ``claimed`` have been given away."""
        if want.tail is None:
            return want.num_new
        if self.is_claimable(want.tail, want.offset):
            return want.num_new + (want.tail in claimed)
        return want.num_new + (not (is_short and self._is_alone(want.tail)))

    def _claim(self, want: Want, claimed: set[int | None]) -> None:
        if want.tail is not None and self.is_claimable(want.tail, want.offset):
            claimed.add(want.tail)

    def _cost(self, wants: list[Want], *, is_short: bool) -> int:
        claimed: set[int | None] = set()
        total = 0
        for want in wants:
            total += self._cost_after(want, claimed, is_short)
            self._claim(want, claimed)
        return total

    def most_servable(self, wants: list[Want]) -> int:
        """Return how many rows fit together: again and again the one that adds least.

        Of the claimants of one tail the first costs a block less than it otherwise would, whichever it is; so the
        cheapest goes first, and serving the cheapest first cannot be beaten.
        """
        left, claimed, total = list(wants), set[int | None](), 0
        while left:
            best = min(left, key=lambda want: self._cost_after(want, claimed, True))
            total += self._cost_after(best, claimed, True)
            if total > self.books.num_free_blocks:
                break
            self._claim(best, claimed)
            left.remove(best)
        return len(wants) - len(left)

    def _check_shortage(self, wants: list[Want], answer: Reservation) -> None:
        self.books.paths["shortage"] += 1
        agree("reserve: ok", answer.ok, False)
        agree("reserve: num_new_blocks", answer.num_new_blocks, 0)
        served = [want for want, fits in zip(wants, answer.servable.tolist(), strict=True) if fits]
        agree("reserve: number of servable rows", len(served), self.most_servable(wants))
        if self._cost(served, is_short=True) > self.books.num_free_blocks:
            raise Disagreement(f"reserve: {served} do not fit into {self.books.num_free_blocks} blocks")
        self.books.paths["some rows servable"] += 0 < len(served) < len(wants)

    def _read_tables(
        self, wants: list[Want], tables: list[list[int]]
    ) -> tuple[list[Want], list[tuple[Want, int]], list[int]]:
        """Split new tables into tails kept in place, tails replaced by a copy, and all fresh blocks."""
        in_place: list[Want] = []
        copies: list[tuple[Want, int]] = []
        taken: list[int] = []
        for want, table in zip(wants, tables, strict=True):
            expected = list(self.books.rows[want.row].blocks)
            agree(f"reserve: number of blocks of row {want.row}", len(table), len(expected) + want.num_new)
            if want.tail is not None:
                column = expected.index(want.tail)
                if table[column] == want.tail:
                    in_place.append(want)
                else:
                    copies.append((want, table[column]))
                    taken.append(table[column])
                    expected[column] = table[column]
            agree(f"reserve: earlier blocks of row {want.row}", table[: len(expected)], expected)
            taken += table[len(expected) :]
        return in_place, copies, taken

    def _check_tails(self, wants: list[Want], in_place: list[Want], is_short: bool) -> None:
        """One claimant of each tail gets it; a lone reader does where blocks are short; all others get a copy."""
        given = Counter((want.tail, want.offset) for want in in_place)
        wanted = Counter((want.tail, want.offset) for want in wants if want.tail is not None)
        for (tail, offset), num_wanted in wanted.items():
            assert tail is not None
            may_keep = self.is_claimable(tail, offset) or (is_short and self._is_alone(tail))
            agree(
                f"reserve: how many of {num_wanted} rows keep tail {tail}", given[tail, offset], int(may_keep)
            )
            self.books.paths["several rows want one tail"] += num_wanted > 1 and may_keep

    def _take_over(self, want: Want) -> None:
        assert want.tail is not None
        block = self.books.blocks[want.tail]
        path = "claims" if self.is_claimable(want.tail, want.offset) else "overwrites"
        self.books.stats[path] += 1
        self.books.paths["overwrite of a full block"] += len(block.tokens) == self.books.block_size
        block.writer = want.row
        del block.tokens[want.offset :]
        if self.books.full_blocks_only and block.prefix is not None:
            self.books.unpublish(want.tail)

    def _clone(self, want: Want, copy: int) -> None:
        assert want.tail is not None
        tail = self.books.blocks[want.tail]
        source, _ = self.books.pending.get(want.tail, (want.tail, 0))
        self.books.paths["chain of clones"] += source != want.tail
        self.books.blocks[copy] = Block(tail.tokens[: want.offset], {want.row}, writer=want.row)
        self.books.blocks[source].num_copies += 1
        self.books.pending[copy] = (source, want.offset)
        state = self.books.rows[want.row]
        state.blocks[state.blocks.index(want.tail)] = copy
        tail.rows.remove(want.row)
        self.books.must_change.add(want.row)
        self.books.release_sources(self.books.let_go(want.tail))
        self.books.stats["clones"] += 1
