"""Whether a prompt shall wait for the next step because another one computes its beginning in the present one."""

from __future__ import annotations

from rose_backend.block_manager.array_types import Int32Array
from rose_backend.block_manager.block_manager import BlockManager
from rose_backend.block_manager.prefix_cache import PrefixMatch

MIN_TOKENS_WORTH_WAITING = 64
"""A prompt waits for the next step if another one computes so many of its tokens in the present one.

Waiting costs whoever waits one step, and saves every request of the step the computation of these tokens; so it depends
on how many wait, which is not known when the second of them is looked at. ``benchmarks.waiting`` measures both. Llama
1B inside vLLM on an H200, median time to the first token of those that share, waiting / not, in ms: 64 tokens shared by
2 requests 6.6 / 6.3, by 8 8.3 / 8.5, by 32 15 / 20; 256 tokens 7.5 / 7.6, 9.5 / 15, 18 / 43. Prompts that share nothing
gain in each of these cases.
"""


class PrefixesUnderWay:
    """What the prompts that a step admits compute, for those that would compute the same in it.

    Attention stores keys and values as it reads others', so a step cannot read blocks that it writes itself, as it can
    with a write of its own in front. Whoever shares a long prefix that is computed in this step is let in with the next
    one, and finds it. One waits for tokens, not for blocks, as hits end at tokens: the threshold may be less than a
    block, and no multiple of one. How many wait is not asked: prompts are looked at one after the other, and each of
    them pays with its own step only.

    Args:
        manager: finds the prefixes. Without a prefix cache nobody waits.
        min_tokens: how many tokens are worth waiting for; None: ``MIN_TOKENS_WORTH_WAITING``.
    """

    def __init__(self, manager: BlockManager, min_tokens: int | None = None) -> None:
        self.min_tokens = min_tokens
        self._block_size = manager.block_size
        self._cache = manager.cache
        self._begun: set[bytes] = set()

    def new_step_starts(self) -> None:
        """Forget the step before."""
        self._begun.clear()

    @property
    def has_begun(self) -> bool:
        """Whether anything is worth waiting for in this step."""
        return bool(self._begun)

    def is_under_way(self, token_ids: Int32Array, match: PrefixMatch) -> bool:
        """Whether a prompt of this step computes so much behind ``match`` that this prompt shall wait for it.

        Args:
            token_ids: ``[N]`` of the prompt.
            match: what was found of it.
        """
        end = self._end(match)
        # The last token is always computed.
        return self.has_begun and end < len(token_ids) and self._key(token_ids, match, end) in self._begun

    def begin(self, token_ids: Int32Array, match: PrefixMatch, num_new_tokens: int) -> None:
        """Note that a prompt computes ``num_new_tokens`` behind ``match`` in this step."""
        end = self._end(match)
        if self._cache is not None and match.num_tokens + num_new_tokens >= end:
            self._begun.add(self._key(token_ids, match, end))

    def _end(self, match: PrefixMatch) -> int:
        """Return how many tokens of a prompt have to be found in the next step for a wait to be worth it."""
        end = match.num_tokens + (MIN_TOKENS_WORTH_WAITING if self.min_tokens is None else self.min_tokens)
        if self._cache is not None and self._cache.full_blocks_only:
            end += -end % self._block_size
        return end

    def _key(self, token_ids: Int32Array, match: PrefixMatch, end: int) -> bytes:
        """Return what tells the first ``end`` tokens and their namespace from all others.

        Prompts that share some tokens behind a match have the same match, so it is enough to look behind it: the digest
        of its full blocks stands for all in front of them.
        """
        start = match.num_tokens - match.num_tokens % self._block_size
        return match.chain_digest + token_ids[start:end].tobytes()
