"""What ``RoseKVCacheManager`` knows about requests.

These are the requests that hold blocks, the rows that a KV connector loads into, and rows kept for deferred requests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from vllm.v1.request import Request

from rose_backend.block_manager import BlockManager
from rose_backend.vllm_plugin.kv_cache.groups import RoseBlocks, RoseGroups


class ExternalLoads:
    """Rows into which a KV connector loads keys and values. Lookups must not find them before they have arrived.

    If a step waits for the load, it has arrived when the outcome of that step is known: then a token that the step has
    computed after the loaded ones is no longer in flight. An asynchronous load has arrived when vLLM says so. Token
    counts do not show it: if a prompt was loaded to its end, vLLM recomputes the last token and counts no new one.
    """

    def __init__(self) -> None:
        self.of_row: dict[int, tuple[int, bool]] = {}
        """Of each row that is loading: the length up to the last loaded token, and whether the load is asynchronous."""

    def add(self, row: int, num_tokens: int, *, is_async: bool) -> None:
        """Note that those of a row's first ``num_tokens`` tokens that are not cached here are being loaded."""
        self.of_row[row] = num_tokens, is_async

    def arrive(self, row: int) -> None:
        """Note that a row's asynchronous load, if there is one, has arrived."""
        if self.of_row.get(row, (0, False))[1]:
            del self.of_row[row]

    def end(self, row: int) -> None:
        """Note that a row is freed."""
        self.of_row.pop(row, None)

    def is_pending(self, row: int, request: Request) -> bool:
        """Whether some of a row's tokens may not have arrived yet."""
        if row not in self.of_row:
            return False
        num_tokens, is_async = self.of_row[row]
        if is_async or request.num_computed_tokens - request.num_in_flight_tokens <= num_tokens:
            return True
        del self.of_row[row]
        return False


class DeferredRequests:
    """Rows and blocks kept for requests that were deferred to later steps, so that later requests do not take them.

    Args:
        manager: whose rows and blocks they are.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self.new_step_starts()

    def new_step_starts(self) -> None:
        """Keep nothing: the scheduler asks again for each waiting request in every step."""
        self.num_rows = self.num_blocks = 0
        self.until_next_step = False
        """Whether some request is deferred to exactly the next step, not to an unknown later one."""

    def keep(self, num_blocks: int, *, until_next_step: bool = False) -> bool:
        """Keep a row and blocks for one more request; return False, having changed nothing, if there are none."""
        has_row = self._manager.num_free_rows > self.num_rows
        if not has_row or num_blocks > self._manager.num_free_blocks - self.num_blocks:
            return False
        self.num_rows += 1
        self.num_blocks += num_blocks
        self.until_next_step |= until_next_step
        return True


@dataclass(slots=True, eq=False)
class RunningRequests:
    """Requests between admission and ``free``, by row. Blocks are only ever appended to a row.

    The fields that every decode reads in every step are here, in ``__slots__``: Python reads attributes of an ordinary
    object more slowly once it has more than 30 of them, and ``RoseKVCacheManager`` has nearly as many.
    """

    _manager: BlockManager
    groups: RoseGroups
    """The model's KV cache groups, in vLLM's order."""
    num_at_once: int
    """Maximum tokens of a request that are scheduled and not yet processed."""
    _commit: Callable[[list[int]], None]
    """Commits the computed tokens of rows. With sliding windows it is called before blocks are reserved, so that the
    blocks that windows have passed can be released."""
    tokens_per_decode: int = 1
    """Tokens that a decode computes in a step: 1, plus the number of drafts."""
    num_lookahead_tokens: int = 0
    """KV slots that vLLM reserves after these tokens, for a drafter that has its own K/V."""
    row_of: dict[str, int] = field(default_factory=dict)
    """The row of each request, by its id."""
    requests: dict[int, Request] = field(default_factory=dict)
    """The request of each row, in order of admission."""
    capacity: list[int] = field(init=False)
    """Tokens that fit into the blocks of each row. A list: a decode costs one lookup per request and step."""
    num_reported: list[int] = field(init=False)
    """Number of each row's blocks that vLLM knows. Blocks that were allocated together with another row's become known
    when vLLM asks for this row's."""
    _num_admitted: int = 0
    _num_admitted_before: list[int] = field(init=False)
    """Position of each row in the order of ``requests``."""
    _publish_from: list[int] = field(init=False)
    """Number of computed tokens at which a commit of the row would let lookups find more of it."""
    _has_extended_full_rows: bool = False
    """Whether full rows were extended together in this step."""
    _has_windows: bool = field(init=False)

    def __post_init__(self) -> None:
        num_rows, self._has_windows = len(self._manager.num_row_blocks), self.groups.has_windows
        self.capacity, self.num_reported = [0] * num_rows, [0] * num_rows
        self._num_admitted_before, self._publish_from = [0] * num_rows, [0] * num_rows

    def new_step_starts(self) -> None:
        """Let the next full row that asks for a block allocate for all full rows again."""
        self._has_extended_full_rows = False

    def add(self, row: int, request: Request, num_published: int) -> None:
        """Note a request that was just admitted, of whose blocks vLLM knows none yet.

        Args:
            num_published: length of its cached prefix.
        """
        self.row_of[request.request_id] = row
        self.requests[row] = request
        self._num_admitted_before[row] = self._num_admitted
        self._num_admitted += 1
        self.num_reported[row] = 0
        self.note_published([row], [num_published])

    def remove(self, request: Request) -> int | None:
        """Forget a request that finished or was preempted; return the row that it had, None if it had none."""
        row = self.row_of.pop(request.request_id, None)
        if row is not None:
            del self.requests[row]
            self.capacity[row] = 0
        return row

    def worth_publishing(self) -> list[int]:
        """Return the rows of which lookups would find more after a commit.

        These have finished their prompt or filled a block since their last commit.
        """
        publish_from = self._publish_from
        return [
            row for row, request in self.requests.items() if request.num_computed_tokens >= publish_from[row]
        ]

    def note_published(self, rows: list[int], num_tokens: list[int]) -> None:
        """Note how many tokens of each row are committed."""
        block_size = self._manager.block_size
        for row, published in zip(rows, num_tokens, strict=True):
            next_block = published - published % block_size + block_size
            prompt_len = self.requests[row].num_prompt_tokens
            self._publish_from[row] = min(next_block, prompt_len) if published < prompt_len else next_block

    def extend(self, row: int, target: int, reserved_blocks: int) -> RoseBlocks | None:
        """Make room for ``target`` tokens in one row.

        Returns:
            The blocks that are new to vLLM, or None when blocks are short; then nothing has changed.
        """
        target = min(target, self._manager.max_model_len)
        needed = -(-target // self._manager.block_size) - self._manager.num_row_blocks.item(row)
        if needed > 0:
            others = [] if self._has_extended_full_rows else self._other_full_rows(row)
            self._release_passed([row, *others])
            per_column = self._manager.blocks_per_column
            num_spare = self._manager.num_free_blocks - reserved_blocks - needed * per_column
            if num_spare < 0:
                return None
            self._has_extended_full_rows = True
            if not self.reserve([row, *others] if len(others) * per_column <= num_spare else [row], target):
                return None
        return self.report(row)

    def _release_passed(self, rows: list[int]) -> None:
        if self._has_windows:
            self._commit(rows)
            self._manager.release_passed_blocks(np.array(rows))

    def allocate_next_blocks(self, rows: list[int], num_decoding: int) -> list[tuple[list[int], ...]] | None:
        """Allocate the next block of each of ``rows``, which all need it, as ``extend`` would one after the other.

        Args:
            num_decoding: requests among which ``rows`` are all that need a block.

        Returns:
            The block that is new to vLLM, row by row, as ``CachedRequestData.new_block_ids`` has them; or None when
            blocks are short, and nothing has changed then.
        """
        row_array, num_row_blocks = np.array(rows), self._manager.num_row_blocks
        counts = num_row_blocks[row_array].tolist()
        needy = [row for row, count in zip(rows, counts, strict=True) if self.num_reported[row] == count]
        if needy:
            if len(self.requests) > num_decoding:
                needy[1:] = self._other_full_rows(needy[0])
            else:
                needy[1:] = sorted(needy[1:], key=self._num_admitted_before.__getitem__)
            self._release_passed(needy)
            if not self._manager.reserve_next_blocks(np.array(needy)):
                return None
            self._has_extended_full_rows = True
        # Rows are extended by a block at a time, and only if vLLM knows all they have: exactly one is new.
        counts = num_row_blocks[row_array].tolist()
        for row, count in zip(rows, counts, strict=True):
            self._note_reported(row, count)
        if len(self.groups) == 1:
            block_at = self._manager.block_table.item
            return [([block_at(row, count - 1)],) for row, count in zip(rows, counts, strict=True)]
        blocks = self.groups.blocks_at(self._manager, row_array, np.array(counts) - 1)
        return [
            tuple([block] for block in of_row)
            for of_row in zip(*(each.tolist() for each in blocks), strict=True)
        ]

    def _other_full_rows(self, row: int) -> list[int]:
        """Return the other rows without room for a decode and its look-ahead, which need their next block, too.

        One call serves all.
        """
        capacity, num_reported = self.capacity, self.num_reported
        num_tokens = self.tokens_per_decode + self.num_lookahead_tokens
        num_row_blocks = self._manager.num_row_blocks
        return [
            other
            for other, request in self.requests.items()
            if request.num_computed_tokens + num_tokens > capacity[other]
            and num_reported[other] == num_row_blocks[other]
            and other != row
        ]

    def reserve(self, rows: list[int], target: int) -> bool:
        """Reserve ``target`` tokens for the first of ``rows``, and the next block for each other one."""
        manager, row_array = self._manager, np.array(rows)
        size = manager.block_size
        # To the end of the last block: it takes the same blocks, and steps inside it need no further call.
        target = min(-(-target // size) * size, manager.max_model_len)
        if len(rows) == 1:
            return manager.reserve(row_array, target - int(manager.num_computed_tokens[rows[0]])).ok
        targets = np.minimum((manager.num_row_blocks[row_array] + 1) * size, manager.max_model_len)
        targets[0] = target
        return manager.reserve(row_array, targets - manager.num_computed_tokens[row_array]).ok

    def report(self, row: int) -> RoseBlocks:
        """Return the blocks of a row that vLLM does not know yet, and count them as known."""
        manager = self._manager
        old_count, new_count = self.num_reported[row], manager.num_row_blocks.item(row)
        self._note_reported(row, new_count)
        return RoseBlocks(self.groups.blocks_of(manager, row, old_count, new_count))

    def _note_reported(self, row: int, num_blocks: int) -> None:
        self.num_reported[row] = num_blocks
        # Only look-ahead slots reach beyond max_model_len, and vLLM never writes to those.
        capacity = num_blocks * self._manager.block_size
        self.capacity[row] = capacity if capacity < self._manager.max_model_len else sys.maxsize
