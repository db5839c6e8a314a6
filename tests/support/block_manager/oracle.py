"""A second block manager to compare the real one with: plain lists, dicts and sets, slow, and short enough to believe.

After each call of the real manager, the method of the same name is called here with the arguments and the answer. It
works out from the tokens themselves what the answer has to be, raises ``Disagreement`` where it is not, and makes the
same change to its own books. Nothing is hashed. Of the manager's answers it takes over only what may be chosen freely:
which free row or free block was picked, and which of several equal claimants or matches. Each choice is checked first.
It knows one KV cache group that keeps everything; ``simulation`` checks others by trying.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from rose_backend.block_manager import AddedSequence, BlockManager, ClonePlan, PrefixMatch, Reservation

MANY_BLOCKS = 8
"""Up to that many blocks after one prefix the manager compares one by one; more are kept in order."""
FEW_WANTS = 5
"""Up to that many rows, every set of them is tried."""

Prefix = tuple[bytes, tuple[int, ...]]
"""Namespace, and all tokens before a block."""


class Disagreement(AssertionError):
    """The manager's answer is not among those that are right."""


def agree(what: str, got: object, expected: object) -> None:
    """Raise Disagreement unless both are equal."""
    if got != expected:
        raise Disagreement(f"{what}: the manager says {got}, the oracle {expected}")


def longest_match(
    tokens_after: Callable[[Prefix], list[list[int]]],
    wanted: tuple[bytes, list[int]],
    block_size: int,
    full_blocks_only: bool,
) -> int:
    """Return how many leading tokens can be found.

    Args:
        tokens_after: the tokens of each block after a prefix.
        wanted: namespace and tokens.
        block_size: tokens per block.
        full_blocks_only: whether hits end at block boundaries only.
    """
    namespace, prompt = wanted
    found = 0
    while found < len(prompt):
        rest, run = prompt[found : found + block_size], 0
        for tokens in tokens_after((namespace, tuple(prompt[:found]))):
            same = [a == b for a, b in zip(rest, tokens, strict=False)]
            run = max(run, same.index(False) if False in same else len(same))
        if run < block_size:
            return found if full_blocks_only else found + run
        found += run
    return found


@dataclass
class Block:
    """A block that a row holds or a lookup can find."""

    tokens: list[int] = field(default_factory=list)
    """Tokens whose K/V is there once all work queued so far has run."""
    rows: set[int] = field(default_factory=set)
    num_copies: int = 0
    """Pending and in-flight copies that read this block."""
    writer: int | None = None
    prefix: Prefix | None = None
    """Where lookups find it; None while they do not."""

    @property
    def num_holders(self) -> int:
        return len(self.rows) + self.num_copies


@dataclass
class Row:
    namespace: bytes
    tokens: list[int]
    """Computed tokens."""
    blocks: list[int]


@dataclass(frozen=True)
class Want:
    """What one row of a ``reserve`` call needs."""

    row: int
    num_new: int
    tail: int | None
    """Partial block that takes the next token and that the row may not write yet."""
    offset: int


class Oracle:
    """Arguments as for ``BlockManager``. Every question is answered by looking."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        prefix_cache: bool = True,
        full_blocks_only: bool = False,
    ) -> None:
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.prefix_cache = prefix_cache
        self.full_blocks_only = full_blocks_only
        self.free_blocks = set(range(1, num_blocks))
        self.evict_next: dict[int, None] = {}
        """Cached blocks, least recently released first."""
        self.blocks: dict[int, Block] = {}
        """Cached and held blocks."""
        self.findable: dict[Prefix, list[int]] = {}
        self.rows: dict[int, Row] = {}
        self.pending: dict[int, tuple[int, int]] = {}
        """Destination -> (source, tokens) of the copies that the next plan will name."""
        self.in_flight: list[ClonePlan] = []
        self.must_change: set[int] = set()
        """Rows whose table has changed since they were last asked for."""
        self.may_change: set[int] = set()
        """Rows that something was done to since then."""
        self.stats: Counter[str] = Counter()
        self.paths: Counter[str] = Counter()
        """How often each path was taken."""

    def check(self, manager: BlockManager) -> None:
        """What can be read from the manager at any time is what stands here."""
        agree("num_free_blocks", manager.num_free_blocks, len(self.free_blocks) + len(self.evict_next))
        agree("num_free_rows", manager.num_free_rows, self.max_num_seqs - len(self.rows))
        stats = manager.stats.as_dict()
        agree("bytes_cloned", stats["bytes_cloned"], manager.stats.bytes_per_block * self.stats["clones"])
        agree("stats", {name: stats.get(name) for name in self.stats}, dict(self.stats))
        for row, state in self.rows.items():
            table = manager.block_table[row, : manager.num_row_blocks[row]].tolist()
            agree(f"blocks of row {row}", table, state.blocks)
        lengths = {row: length for row, length in enumerate(manager.num_computed_tokens.tolist()) if length}
        agree(
            "lengths", lengths, {row: len(state.tokens) for row, state in self.rows.items() if state.tokens}
        )
        agree("eviction order", manager.pool.cached_blocks().tolist(), list(self.evict_next))
        if manager.cache is not None:
            findable = [block for block, state in self.blocks.items() if state.prefix is not None]
            agree("findable blocks", sorted(manager.cache.cached_blocks().tolist()), sorted(findable))

    # ---------------------------------------------------------------- lookups

    def longest_match(self, prompt: list[int], namespace: bytes, limit: int) -> int:
        """Return how many leading tokens of a prompt can be found."""
        return longest_match(
            lambda prefix: [self.blocks[block].tokens for block in self.findable.get(prefix, ())],
            (namespace, prompt[:limit]),
            self.block_size,
            self.full_blocks_only,
        )

    def is_match(self, prompt: list[int], namespace: bytes, block_ids: list[int], num_tokens: int) -> bool:
        """Whether these blocks can be found now and hold the first ``num_tokens`` of the prompt."""
        if len(block_ids) != -(-num_tokens // self.block_size):
            return False
        for column, block_id in enumerate(block_ids):
            start = column * self.block_size
            wanted = prompt[start : min(start + self.block_size, num_tokens)]
            block = self.blocks.get(block_id, Block())
            if block.prefix != (namespace, tuple(prompt[:start])) or block.tokens[: len(wanted)] != wanted:
                return False
        return True

    def match(self, prompt: list[int], namespace: bytes, limit: int, answer: PrefixMatch) -> None:
        agree("match", answer.num_tokens, self.longest_match(prompt, namespace, limit))
        if not self.is_match(prompt, namespace, answer.block_ids.tolist(), answer.num_tokens):
            raise Disagreement(f"match: blocks {answer.block_ids} do not hold the {answer.num_tokens} tokens")
        rest = answer.num_tokens % self.block_size
        self.paths["miss"] += not answer.num_tokens
        self.paths["full hit"] += bool(answer.num_tokens and not rest)
        prefix = (namespace, tuple(prompt[: answer.num_tokens - rest]))
        self.paths["partial hit among many blocks"] += bool(rest) and len(self.findable[prefix]) > MANY_BLOCKS

    def blocks_needed(self, match: PrefixMatch, num_tokens: int, answer: int) -> None:
        """``match`` must be up to date, and shorter than ``num_tokens``."""
        held = {block: self.blocks[block].num_holders for block in match.block_ids.tolist()}
        expected = max(-(-num_tokens // self.block_size) - len(held), 0)
        expected += list(held.values()).count(0)
        if offset := match.num_tokens % self.block_size:
            tail = match.block_ids.tolist()[-1]
            expected += bool(held[tail]) and not self._is_claimable(tail, offset)
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
        if not self._check_new_rows(None if answer is None else [answer.row], 1):
            return
        assert answer is not None
        num_tokens = answer.num_cached_tokens
        allowed = {self.longest_match(prompt, namespace, len(prompt) - 1)}
        if given is not None:
            is_valid = self.is_match(prompt, namespace, given.block_ids.tolist(), given.num_tokens)
            self.paths["match still valid" if is_valid else "stale match"] += 1
            if is_valid:
                allowed.add(given.num_tokens)
        if num_tokens not in allowed or not self.is_match(prompt, namespace, table, num_tokens):
            raise Disagreement(f"add: {num_tokens} tokens in blocks {table}, the oracle found {allowed}")
        self._new_row(answer.row, Row(namespace, prompt[:num_tokens], list(table)))
        if self.prefix_cache:
            self.stats["queries"] += 1
            self.stats["query_tokens"] += len(prompt)
            self.stats["hit_tokens"] += num_tokens
            self.stats["reported_hit_tokens"] += num_tokens - num_tokens % max(self.block_size, 16)
            self.stats["partial_hits"] += num_tokens % self.block_size != 0

    def fork(self, row: int, num_children: int, answer: list[int] | None) -> None:
        if not self._check_new_rows(answer, num_children):
            return
        parent = self.rows[row]
        shared = parent.blocks[: -(-len(parent.tokens) // self.block_size)]
        for child in answer or []:
            self._new_row(child, Row(parent.namespace, list(parent.tokens), list(shared)))
        self.stats["forks"] += num_children
        self.paths["fork of a partial tail"] += len(parent.tokens) % self.block_size != 0

    def _check_new_rows(self, rows: list[int] | None, num_wanted: int) -> bool:
        """Whether rows are to be made: those wanted are, or as None too few are free."""
        free = set(range(self.max_num_seqs)) - set(self.rows)
        if num_wanted > len(free):
            agree("new rows without as many free ones", rows, None)
            self.paths["no free row"] += 1
            return False
        if rows is None or len(set(rows)) != num_wanted or not set(rows) <= free:
            raise Disagreement(f"got rows {rows}, expected {num_wanted} of {sorted(free)}")
        return True

    def _new_row(self, row: int, state: Row) -> None:
        self.rows[row] = state
        for block_id in state.blocks:
            self.blocks[block_id].rows.add(row)
            self.evict_next.pop(block_id, None)
        self.must_change.add(row)
        self.may_change.add(row)

    def free(self, rows: list[int]) -> None:
        for row in rows:
            self._forget_redundant_tail(row)
        called_off: list[int] = []
        for row in rows:
            for block_id in reversed(self.rows.pop(row).blocks):
                block = self.blocks[block_id]
                block.rows.remove(row)
                if block.writer == row:
                    block.writer = None
                called_off += self._let_go(block_id)
            self.must_change.discard(row)
            self.may_change.discard(row)
        self._release_sources(called_off)
        self.paths["free while a plan is in flight"] += bool(rows and self.in_flight)
        self.paths["free while a clone is pending"] += bool(rows and self.pending)
        self.paths["free of several rows"] += len(rows) > 1

    def _forget_redundant_tail(self, row: int) -> None:
        """A partial block without another holder is dropped if another block starts with all its tokens."""
        state = self.rows[row]
        if not state.tokens:
            return
        tail = state.blocks[(len(state.tokens) - 1) // self.block_size]
        block = self.blocks[tail]
        if block.prefix is None or len(block.tokens) == self.block_size or block.num_holders > 1:
            return
        for other in self.findable[block.prefix]:
            if other != tail and self.blocks[other].tokens[: len(block.tokens)] == block.tokens:
                self._unpublish(tail)
                self.paths["redundant tail dropped"] += 1
                return

    # ---------------------------------------------------------------- reserve

    def num_writable(self, row: int) -> int:
        """Tokens after the computed ones that a row may write now."""
        state = self.rows[row]
        column, offset = divmod(len(state.tokens), self.block_size)
        if offset and self.blocks[state.blocks[column]].writer != row:
            return 0
        return min(len(state.blocks) * self.block_size, self.max_model_len) - len(state.tokens)

    def reserve(
        self, rows: list[int], counts: list[int], answer: Reservation, tables: list[list[int]]
    ) -> list[int]:
        """``tables``: blocks of each row after the call. Returns the blocks whose content is now undefined.

        For each row there is a new block, the shared tail itself, or a copy of it.
        """
        num_free = len(self.free_blocks) + len(self.evict_next)
        self.may_change |= {
            row for row, count in zip(rows, counts, strict=True) if count > self.num_writable(row)
        }
        wants = [self._want(row, count) for row, count in zip(rows, counts, strict=True)]
        is_short = self._cost(wants, is_short=False) > num_free
        cost = self._cost(wants, is_short=is_short)
        agree("reserve: ok", answer.ok, cost <= num_free)
        agree("reserve: num_new_blocks", answer.num_new_blocks, cost if answer.ok else 0)
        if not answer.ok:
            self._check_shortage(wants, answer, num_free)
            return []
        agree("reserve: servable", answer.servable.all(), True)
        in_place, copies, taken = self._read_tables(wants, tables)
        self._check_tails(wants, in_place, is_short)
        self._take(taken)
        for want in in_place:
            self._take_over(want)
        for want, copy in copies:
            self._clone(want, copy)
        for want, table in zip(wants, tables, strict=True):
            state = self.rows[want.row]
            for block_id in table[len(state.blocks) :]:
                self.blocks[block_id] = Block(rows={want.row}, writer=want.row)
            if table != state.blocks:
                self.must_change.add(want.row)
            state.blocks = list(table)
        return taken

    def _want(self, row: int, count: int) -> Want:
        state = self.rows[row]
        column, offset = divmod(len(state.tokens), self.block_size)
        num_new = max(-(-(len(state.tokens) + count) // self.block_size) - len(state.blocks), 0)
        is_foreign = offset and count and self.blocks[state.blocks[column]].writer != row
        return Want(row, num_new, state.blocks[column] if is_foreign else None, offset)

    def _is_claimable(self, block_id: int, offset: int) -> bool:
        """Nobody has written, or may write, after the first ``offset`` tokens."""
        block = self.blocks[block_id]
        return block.writer is None and len(block.tokens) <= offset

    def _is_alone(self, block_id: int) -> bool:
        return self.blocks[block_id].writer is None and self.blocks[block_id].num_holders == 1

    def _cost(self, wants: Sequence[Want], *, is_short: bool) -> int:
        """Return the blocks that rows take together: of those that may claim a tail, the first does."""
        claimed: set[int | None] = set()
        total = 0
        for want in wants:
            total += want.num_new
            if want.tail is not None:
                is_claimable = self._is_claimable(want.tail, want.offset)
                may_keep = is_claimable or (is_short and self._is_alone(want.tail))
                total += want.tail in claimed or not may_keep
                claimed |= {want.tail} if is_claimable else set()
        return total

    def _most_servable(self, wants: list[Want], num_free: int) -> int:
        """Return how many rows fit together.

        Of the claimants of one tail the first costs a block less than it otherwise would, whichever it is; so the
        cheapest goes first, and serving the cheapest first cannot be beaten. For a few rows that is tried.
        """
        served: list[Want] = []
        while len(served) < len(wants):
            left = [want for want in wants if want not in served]
            best = min(left, key=lambda want: self._cost([*served, want], is_short=True))
            if self._cost([*served, best], is_short=True) > num_free:
                break
            served.append(best)
        for better in combinations(wants, len(served) + 1) if len(wants) <= FEW_WANTS else ():
            assert self._cost(better, is_short=True) > num_free, "more rows fit than the cheapest"
        return len(served)

    def _check_shortage(self, wants: list[Want], answer: Reservation, num_free: int) -> None:
        """``servable`` is empty if the call does not name the rows that fit."""
        self.paths["shortage"] += 1
        if not len(answer.servable):
            return
        served = [want for want, fits in zip(wants, answer.servable.tolist(), strict=True) if fits]
        agree("reserve: number of servable rows", len(served), self._most_servable(wants, num_free))
        if self._cost(served, is_short=True) > num_free:
            raise Disagreement(f"reserve: {served} do not fit into {num_free} blocks")
        self.paths["some rows servable"] += 0 < len(served) < len(wants)

    def _read_tables(
        self, wants: list[Want], tables: list[list[int]]
    ) -> tuple[list[Want], list[tuple[Want, int]], list[int]]:
        """Split new tables into tails kept in place, tails replaced by a copy, and all fresh blocks."""
        in_place: list[Want] = []
        copies: list[tuple[Want, int]] = []
        taken: list[int] = []
        for want, table in zip(wants, tables, strict=True):
            expected = list(self.rows[want.row].blocks)
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
            may_keep = self._is_claimable(tail, offset) or (is_short and self._is_alone(tail))
            agree(f"reserve: how many of {num_wanted} rows keep tail {tail}", given[tail, offset], may_keep)
            self.paths["several rows want one tail"] += num_wanted > 1 and may_keep

    def _take_over(self, want: Want) -> None:
        assert want.tail is not None
        block = self.blocks[want.tail]
        self.stats["claims" if self._is_claimable(want.tail, want.offset) else "overwrites"] += 1
        self.paths["overwrite of a full block"] += len(block.tokens) == self.block_size
        block.writer = want.row
        del block.tokens[want.offset :]
        if self.full_blocks_only and block.prefix is not None:
            self._unpublish(want.tail)

    def _clone(self, want: Want, copy: int) -> None:
        assert want.tail is not None
        tail = self.blocks[want.tail]
        source, _ = self.pending.get(want.tail, (want.tail, 0))
        self.blocks[copy] = Block(tail.tokens[: want.offset], {want.row}, writer=want.row)
        self.blocks[source].num_copies += 1
        self.pending[copy] = (source, want.offset)
        state = self.rows[want.row]
        state.blocks[state.blocks.index(want.tail)] = copy
        tail.rows.remove(want.row)
        self.must_change.add(want.row)
        self._release_sources(self._let_go(want.tail))
        self.stats["clones"] += 1

    # ----------------------------------------------------------------- blocks

    def _take(self, block_ids: list[int]) -> None:
        """Check that these were the right blocks to hand out: free ones, then the least recently released."""
        num_evicted = max(len(block_ids) - len(self.free_blocks), 0)
        evicted = list(self.evict_next)[:num_evicted]
        if not num_evicted:
            agree("handed out, but not free", set(block_ids) - self.free_blocks, set())
        else:
            agree("blocks handed out", sorted(block_ids), sorted([*self.free_blocks, *evicted]))
        for block_id in evicted:
            del self.evict_next[block_id]
            self._unpublish(block_id)
            del self.blocks[block_id]
        self.free_blocks -= set(block_ids)
        self.stats["evictions"] += num_evicted
        self.paths["eviction of several blocks, others staying"] += bool(num_evicted > 1 and self.evict_next)

    def _let_go(self, block_id: int) -> list[int]:
        """Deal with a block that has lost a holder. Returns the source of its pending copy if that is called off."""
        block = self.blocks[block_id]
        if block.num_holders:
            return []
        block.writer = None
        if block.prefix is None:
            del self.blocks[block_id]
            self.free_blocks.add(block_id)
        else:
            self.evict_next[block_id] = None
        return [self.pending.pop(block_id)[0]] if block_id in self.pending else []

    def _release_sources(self, sources: list[int]) -> None:
        """Let go of blocks that copies have read, or will not read."""
        for source in sources:
            self.blocks[source].num_copies -= 1
            self._release_sources(self._let_go(source))

    def _unpublish(self, block_id: int) -> None:
        prefix = self.blocks[block_id].prefix
        assert prefix is not None
        self.blocks[block_id].prefix = None
        self.findable[prefix].remove(block_id)
        if not self.findable[prefix]:
            del self.findable[prefix]

    # ----------------------------------------------------------- other calls

    def commit(self, rows: list[int], counts: list[int], token_ids: list[int]) -> None:
        remaining = iter(token_ids)
        for row, count in zip(rows, counts, strict=True):
            for _ in range(count):
                self._append(row, next(remaining))

    def _append(self, row: int, token: int) -> None:
        state = self.rows[row]
        column, offset = divmod(len(state.tokens), self.block_size)
        block_id = state.blocks[column]
        block = self.blocks[block_id]
        agree(f"writer of block {block_id}", row, block.writer)
        agree(f"tokens in block {block_id} before row {row} appends", offset, len(block.tokens))
        block.tokens.append(token)
        is_full = len(block.tokens) == self.block_size
        if self.prefix_cache and block.prefix is None and (is_full or not self.full_blocks_only):
            block.prefix = (state.namespace, tuple(state.tokens[: column * self.block_size]))
            self.findable.setdefault(block.prefix, []).append(block_id)
        if block.prefix is not None and is_full:
            others = [self.blocks[other] for other in self.findable[block.prefix]]
            if any(other is not block and other.tokens == block.tokens for other in others):
                self._unpublish(block_id)
                self.paths["full block known already"] += 1
        state.tokens.append(token)

    def take_clone_plan(self, answer: ClonePlan | None) -> None:
        plan: dict[int, tuple[int, int]] = {}
        if answer is not None:
            sources = zip(answer.src_block_ids.tolist(), answer.num_tokens.tolist(), strict=True)
            plan = dict(zip(answer.dst_block_ids.tolist(), sources, strict=True))
            self.in_flight.append(answer)
            self.paths["several plans in flight"] += len(self.in_flight) > 1
        agree("take_clone_plan", plan, self.pending)
        self.pending.clear()

    def finish_clone_plan(self, plan: ClonePlan) -> None:
        index = next(i for i, other in enumerate(self.in_flight) if other is plan)
        self.paths["plan finished out of order"] += index > 0
        del self.in_flight[index]
        self._release_sources(plan.src_block_ids.tolist())

    def take_changed_rows(self, answer: list[int]) -> None:
        if not self.must_change <= set(answer) <= self.may_change or sorted(set(answer)) != answer:
            raise Disagreement(
                f"take_changed_rows: got {answer}, the tables of {sorted(self.must_change)} have changed, "
                f"at most those of {sorted(self.may_change)}"
            )
        self.must_change.clear()
        self.may_change.clear()

    def reset_prefix_cache(self) -> None:
        self.free_blocks |= set(self.evict_next)
        self.evict_next.clear()
        self.blocks.clear()
        self.findable.clear()
