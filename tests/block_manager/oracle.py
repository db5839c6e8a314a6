"""A second block manager to compare the real one with: plain lists, dicts and sets, slow, and short enough to believe.

After each call of the real manager, the method of the same name is called here with the arguments and the answer. It
works out from the tokens themselves what the answer has to be, raises ``Disagreement`` where it is not, and makes the
same change to its own books. Nothing is hashed. Of the manager's answers it takes over only what may be chosen freely:
which free row or free block was picked, and which of several equal claimants or matches. Each choice is checked first.
"""

from __future__ import annotations

from collections.abc import Sequence

from rose_backend.block_manager import AddedSequence, ClonePlan, PrefixMatch, Reservation
from tests.block_manager.oracle_books import Block, Books, Disagreement, Row, agree
from tests.block_manager.oracle_reserve import ReserveOracle


def length_in_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many leading items are equal."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


MANY_BLOCKS = 8
"""Up to that many blocks behind one prefix the manager compares one by one; more are kept in order."""


class Oracle:
    """Arguments as for ``BlockManager``."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        prefix_cache: bool = True,
        full_blocks_only: bool = False,
    ) -> None:
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.full_blocks_only = full_blocks_only
        self.books = Books(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            full_blocks_only=full_blocks_only,
        )
        self._reserve = ReserveOracle(self.books)
        self.in_flight: list[ClonePlan] = []

    # ---------------------------------------------------------------- lookups

    def longest_match(self, prompt: list[int], namespace: bytes, max_tokens: int | None = None) -> int:
        """Return how many leading tokens of a prompt can be found."""
        limit = len(prompt) - 1 if max_tokens is None else min(len(prompt) - 1, max_tokens)
        found = 0
        while found < limit:
            wanted = prompt[found : min(found + self.block_size, limit)]
            candidates = self.books.findable.get((namespace, tuple(prompt[:found])), [])
            runs = [length_in_common(wanted, self.books.blocks[block].tokens) for block in candidates]
            run = max(runs, default=0)
            if run < self.block_size:
                return found if self.full_blocks_only else found + run
            found += run
        return found

    def is_match(self, prompt: list[int], namespace: bytes, block_ids: list[int], num_tokens: int) -> bool:
        """Whether these blocks can be found now and hold the first ``num_tokens`` of the prompt."""
        if len(block_ids) != -(-num_tokens // self.block_size):
            return False
        for column, block_id in enumerate(block_ids):
            start = column * self.block_size
            wanted = prompt[start : min(start + self.block_size, num_tokens)]
            block = self.books.blocks.get(block_id, Block())
            if block.prefix != (namespace, tuple(prompt[:start])) or block.tokens[: len(wanted)] != wanted:
                return False
        return True

    def match(self, prompt: list[int], namespace: bytes, max_tokens: int | None, answer: PrefixMatch) -> None:
        agree("match", answer.num_tokens, self.longest_match(prompt, namespace, max_tokens))
        if not self.is_match(prompt, namespace, answer.block_ids.tolist(), answer.num_tokens):
            raise Disagreement(f"match: blocks {answer.block_ids} do not hold the {answer.num_tokens} tokens")
        whole = answer.num_tokens % self.block_size == 0
        self.books.paths["miss" if not answer.num_tokens else "full hit" if whole else "partial hit"] += 1
        prefix = (namespace, tuple(prompt[: answer.num_tokens - answer.num_tokens % self.block_size]))
        self.books.paths["partial hit among many blocks"] += (
            not whole and len(self.books.findable[prefix]) > MANY_BLOCKS
        )

    def blocks_needed(self, match: PrefixMatch, num_tokens: int, answer: int) -> None:
        """``match`` must be up to date, and shorter than ``num_tokens``."""
        held = {block: self.books.blocks[block].num_holders for block in match.block_ids.tolist()}
        expected = max(-(-num_tokens // self.block_size) - len(held), 0)
        expected += list(held.values()).count(0)
        offset = match.num_tokens % self.block_size
        if offset:
            tail = match.block_ids.tolist()[-1]
            expected += bool(held[tail]) and not self._reserve.is_claimable(tail, offset)
        agree("blocks_needed", answer, expected)

    # ------------------------------------------------------------------- rows

    def add(
        self,
        prompt: list[int],
        namespace: bytes,
        given: PrefixMatch | None,
        answer: AddedSequence | None,
        table: list[int],
    ) -> None:
        """``table``: blocks of the new row."""
        if not self.books.num_free_rows:
            agree("add without a free row", answer, None)
            self.books.paths["no free row"] += 1
            return
        self._check_free_rows([] if answer is None else [answer.row], 1)
        assert answer is not None
        allowed = {self.longest_match(prompt, namespace)}
        if given is not None:
            is_valid = self.is_match(prompt, namespace, given.block_ids.tolist(), given.num_tokens)
            self.books.paths["match still valid" if is_valid else "stale match"] += 1
            if is_valid:
                allowed.add(given.num_tokens)
        if answer.num_cached_tokens not in allowed:
            raise Disagreement(f"add: found {answer.num_cached_tokens} tokens, the oracle {sorted(allowed)}")
        if not self.is_match(prompt, namespace, table, answer.num_cached_tokens):
            raise Disagreement(f"add: blocks {table} do not hold the {answer.num_cached_tokens} tokens")
        self.books.new_row(answer.row, Row(namespace, prompt[: answer.num_cached_tokens], list(table)))
        if self.prefix_cache:
            self.books.stats["queries"] += 1
            self.books.stats["query_tokens"] += len(prompt)
            self.books.stats["hit_tokens"] += answer.num_cached_tokens
            self.books.stats["partial_hits"] += answer.num_cached_tokens % self.block_size != 0

    def fork(self, row: int, num_children: int, answer: list[int] | None) -> None:
        if num_children > self.books.num_free_rows:
            agree("fork without free rows", answer, None)
            self.books.paths["no free row"] += 1
            return
        self._check_free_rows(answer or [], num_children)
        parent = self.books.rows[row]
        shared = parent.blocks[: -(-len(parent.tokens) // self.block_size)]
        for child in answer or []:
            self.books.new_row(child, Row(parent.namespace, list(parent.tokens), list(shared)))
        self.books.stats["forks"] += num_children
        self.books.paths["fork of a partial tail"] += len(parent.tokens) % self.block_size != 0

    def _check_free_rows(self, rows: list[int], num_expected: int) -> None:
        free = set(range(self.books.max_num_seqs)) - set(self.books.rows)
        if len(set(rows)) != num_expected or not set(rows) <= free:
            raise Disagreement(f"got rows {rows}, expected {num_expected} of {sorted(free)}")

    def free(self, rows: list[int]) -> None:
        for row in rows:
            self._forget_redundant_tail(row)
        called_off: list[int] = []
        for row in rows:
            for block_id in reversed(self.books.rows.pop(row).blocks):
                block = self.books.blocks[block_id]
                block.rows.remove(row)
                if block.writer == row:
                    block.writer = None
                called_off += self.books.let_go(block_id)
            self.books.must_change.discard(row)
            self.books.may_change.discard(row)
        self.books.release_sources(called_off)
        self.books.paths["free while a plan is in flight"] += bool(rows and self.in_flight)
        self.books.paths["free while a clone is pending"] += bool(rows and self.books.pending)
        self.books.paths["free of several rows"] += len(rows) > 1

    def _forget_redundant_tail(self, row: int) -> None:
        """A partial block without another holder is dropped if another block starts with all its tokens."""
        state = self.books.rows[row]
        if not state.tokens:
            return
        tail = state.blocks[(len(state.tokens) - 1) // self.block_size]
        block = self.books.blocks[tail]
        if block.prefix is None or len(block.tokens) == self.block_size or block.num_holders > 1:
            return
        for other in self.books.findable[block.prefix]:
            if other != tail and self.books.blocks[other].tokens[: len(block.tokens)] == block.tokens:
                self.books.unpublish(tail)
                self.books.paths["redundant tail dropped"] += 1
                return

    def reserve(
        self, rows: list[int], counts: list[int], answer: Reservation, tables: list[list[int]]
    ) -> list[int]:
        """``tables``: blocks of each row after the call. Returns the blocks handed out."""
        return self._reserve.reserve(rows, counts, answer, tables)

    # ----------------------------------------------------------------- commit

    def commit(self, rows: list[int], counts: list[int], token_ids: list[int]) -> None:
        remaining = iter(token_ids)
        for row, count in zip(rows, counts, strict=True):
            for _ in range(count):
                self._append(row, next(remaining))

    def _append(self, row: int, token: int) -> None:
        state = self.books.rows[row]
        column, offset = divmod(len(state.tokens), self.block_size)
        block_id = state.blocks[column]
        block = self.books.blocks[block_id]
        agree(f"writer of block {block_id}", row, block.writer)
        agree(f"tokens in block {block_id} before row {row} appends", offset, len(block.tokens))
        block.tokens.append(token)
        is_full = len(block.tokens) == self.block_size
        if self.prefix_cache and block.prefix is None and (is_full or not self.full_blocks_only):
            prefix = (state.namespace, tuple(state.tokens[: column * self.block_size]))
            self.books.publish(block_id, prefix)
        if block.prefix is not None and is_full:
            others = [self.books.blocks[other] for other in self.books.findable[block.prefix]]
            if any(other is not block and other.tokens == block.tokens for other in others):
                self.books.unpublish(block_id)
                self.books.paths["full block known already"] += 1
        state.tokens.append(token)

    # ----------------------------------------------------------------- clones

    def take_clone_plan(self, answer: ClonePlan | None) -> None:
        if answer is None:
            agree("take_clone_plan", {}, self.books.pending)
            return
        destinations = answer.dst_block_ids.tolist()
        sources = zip(answer.src_block_ids.tolist(), answer.num_tokens.tolist(), strict=True)
        agree("take_clone_plan: different destinations", len(set(destinations)), len(destinations))
        agree("take_clone_plan: contiguous", answer.src_block_ids.flags.c_contiguous, True)
        agree("take_clone_plan", dict(zip(destinations, sources, strict=True)), self.books.pending)
        if not destinations:
            raise Disagreement("take_clone_plan: got an empty plan, expected None")
        self.books.pending.clear()
        self.in_flight.append(answer)
        self.books.paths["several plans in flight"] += len(self.in_flight) > 1

    def finish_clone_plan(self, plan: ClonePlan) -> None:
        index = next(i for i, other in enumerate(self.in_flight) if other is plan)
        self.books.paths["plan finished out of order"] += index > 0
        del self.in_flight[index]
        self.books.release_sources(plan.src_block_ids.tolist())

    # ------------------------------------------------------------------ others

    def take_changed_rows(self, answer: list[int]) -> None:
        if (
            not self.books.must_change <= set(answer) <= self.books.may_change
            or sorted(set(answer)) != answer
        ):
            raise Disagreement(
                f"take_changed_rows: got {answer}, the tables of {sorted(self.books.must_change)} have changed, "
                f"at most those of {sorted(self.books.may_change)}"
            )
        self.books.must_change.clear()
        self.books.may_change.clear()

    def reset_prefix_cache(self, answer: bool) -> None:
        is_in_use = bool(self.books.rows or self.books.pending or self.in_flight)
        agree("reset_prefix_cache", answer, not is_in_use)
        self.books.paths["reset refused" if is_in_use else "reset"] += 1
        if answer:
            self.books.free_blocks |= set(self.books.evict_next)
            self.books.evict_next.clear()
            self.books.blocks.clear()
            self.books.findable.clear()
