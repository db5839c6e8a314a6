"""Scheduling policies that every host of the block manager shares: in-flight prefixes and block look-ahead.

In-flight prefixes: a prompt is deferred to the next step if another prompt computes enough of its prefix in this one.
Block look-ahead: where blocks are plenty, running rows reserve blocks for more steps than the next.
"""

from __future__ import annotations

import numpy as np

from rose_backend.block_manager.block_manager import BlockManager
from rose_backend.block_manager.block_pool import Int32Array, IntArray
from rose_backend.block_manager.prefix_cache import PrefixMatch

MIN_TOKENS_WORTH_WAITING = 64
"""A prompt waits for the next step if another one computes so many of its tokens in the present one.

Waiting costs the prompt one step and saves the step these tokens; the more prompts wait, the more it saves.
``benchmarks.waiting`` of commit 29b54d5 measured both: Llama 1B inside vLLM on an H200, median ms to the first token of
prompts that share, waiting / not: 64 tokens shared by 2 requests 6.6 / 6.3, by 8 8.3 / 8.5, by 32 15 / 20; 256 tokens
7.5 / 7.6, 9.5 / 15, 18 / 43. Prompts that share nothing gain in each of these cases.
"""

_BLOCKS_PER_SPARE_BLOCK = 16
"""Free blocks that must remain for each block that is reserved ahead."""
_MAX_SPARE_BLOCKS = 2
"""Blocks reserved ahead per row. Planning a step costs the host about ten times as much as repeating a steady-state
decode step, and allocating blocks about as much as planning."""
TOP_UP_STEPS = 16
"""``top_up`` starts so many steps before the first row is full."""
_ROWS_PER_TOP_UP = 128
"""A call costs the host about as much as the blocks of 32 rows, and those of 128 fit beside a step."""


class InFlightPrefixes:
    """The prefixes that the prompts of the present step compute.

    Attention stores keys and values while it reads those of other requests, so a step cannot read blocks that it writes
    itself. A prompt that shares a long prefix with a prompt of this step is therefore admitted with the next step, and
    finds the prefix in the cache. The threshold counts tokens, not blocks, as hits end at tokens.

    Args:
        manager: finds the prefixes. Without a prefix cache no prompt waits.
        min_tokens: how many tokens are worth waiting for; None: ``MIN_TOKENS_WORTH_WAITING``.
    """

    def __init__(self, manager: BlockManager, min_tokens: int | None = None) -> None:
        self.min_tokens = min_tokens
        self._block_size = manager.block_size
        self._cache = manager.cache
        self._keys: set[bytes] = set()

    def new_step_starts(self) -> None:
        """Forget the prefixes of the step before."""
        self._keys.clear()

    def __bool__(self) -> bool:
        """Whether any prompt of this step computes a prefix worth waiting for."""
        return bool(self._keys)

    def cover(self, token_ids: Int32Array, match: PrefixMatch) -> bool:
        """Whether a prompt of this step computes enough tokens behind ``match`` that this prompt is to wait for them.

        Args:
            token_ids: int32 ``[P]`` of the prompt.
            match: its cached prefix.
        """
        end = self._end(match)
        # The last token is always computed.
        return bool(self._keys) and end < len(token_ids) and self._key(token_ids, match, end) in self._keys

    def add(self, token_ids: Int32Array, match: PrefixMatch, num_new_tokens: int) -> None:
        """Note that a prompt computes ``num_new_tokens`` behind ``match`` in this step."""
        end = self._end(match)
        if self._cache is not None and match.num_tokens + num_new_tokens >= end:
            self._keys.add(self._key(token_ids, match, end))

    def _end(self, match: PrefixMatch) -> int:
        """Return how many tokens of a prompt the next step must find for a wait to be worth it."""
        end = match.num_tokens + (MIN_TOKENS_WORTH_WAITING if self.min_tokens is None else self.min_tokens)
        if self._cache is not None and self._cache.full_blocks_only:
            end += -end % self._block_size
        return end

    def _key(self, token_ids: Int32Array, match: PrefixMatch, end: int) -> bytes:
        """Return a key of the first ``end`` tokens and their namespace.

        Prompts that share tokens behind a match have the same match, so the digest of its full blocks stands for all
        tokens before them.
        """
        start = match.num_tokens - match.num_tokens % self._block_size
        return match.chain_digest + token_ids[start:end].tobytes()


def reserve_ahead(
    manager: BlockManager, rows: IntArray, num_tokens: Int32Array, max_num_tokens: Int32Array
) -> bool:
    """Reserve ``num_tokens`` for each of ``rows``, all or none; where blocks are plenty, for further steps, too.

    Rows fill their blocks at different steps: without look-ahead, nearly every step would allocate a few blocks.

    Args:
        rows: ``[N]``.
        num_tokens: ``[N]``, behind what is committed.
        max_num_tokens: int32 ``[max_num_seqs]``, of every row: tokens that it may hold in the end.

    Returns:
        False when blocks are short; nothing has changed then.
    """
    num_computed = manager.num_computed_tokens[rows]
    if np.count_nonzero(manager.table.capacity[rows] < num_computed + num_tokens) == 0:
        return True
    num_spare = _num_spare_blocks(manager, len(rows))
    if num_spare:
        # The last token of a row is never computed.
        longest = max_num_tokens[rows] - 1 - num_computed
        further = np.minimum(num_tokens + num_spare * manager.block_size, longest)
        if manager.reserve(rows, np.maximum(num_tokens, further)).ok:
            return True
    return manager.reserve(rows, num_tokens).ok


def top_up(manager: BlockManager, rows: IntArray, num_tokens: Int32Array, max_num_tokens: Int32Array) -> bool:
    """Reserve for some decoding rows, while the host waits for the device, what ``reserve_ahead`` would later.

    There it would be all rows at once, which for 256 rows takes longer than their step.

    Args:
        rows: ``[N]``.
        num_tokens: ``[N]``, tokens that each row will need when ``reserve_ahead`` is called next.
        max_num_tokens: see ``reserve_ahead``.

    Returns:
        Whether other rows may still be short.
    """
    num_spare = _num_spare_blocks(manager, len(rows))
    if not num_spare:
        return False
    wanted = np.minimum(num_tokens + num_spare * manager.block_size, max_num_tokens[rows] - 1)
    short = np.flatnonzero(manager.table.capacity[rows] < wanted)[:_ROWS_PER_TOP_UP]
    if not len(short):
        return False
    rows = rows[short]
    return manager.reserve(rows, wanted[short] - manager.num_computed_tokens[rows]).ok


def _num_spare_blocks(manager: BlockManager, num_rows: int) -> int:
    return min(manager.num_free_blocks // (num_rows * _BLOCKS_PER_SPARE_BLOCK), _MAX_SPARE_BLOCKS)
