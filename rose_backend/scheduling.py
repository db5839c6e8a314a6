"""Scheduling policies that the standalone engine and the vLLM plug-in have in common.

They ask the block manager and decide; the schedulers are ``engine/scheduler.py`` and vLLM's own. A policy keeps no
request and no row: what it needs comes as arguments, or is forgotten at the start of a step. A threshold says what it
was measured with, and at what cost on either side of it.

- In-flight prefixes, of both engines: a prompt waits one step for a prefix that another prompt computes in this step.
- Look-ahead: where blocks are plenty, running rows reserve blocks for more steps than the next one. Rows fill their
  blocks at different steps: without look-ahead, nearly every step would allocate a few blocks. vLLM allocates block by
  block, so the plug-in extends all full rows together instead (``vllm_plugin/kv_cache/``).
- Token counts that depend on the device: the budget of a step, which vLLM has already, and the prefix that a prompt
  waits for.
- Step budget, of the plug-in: how many prompt tokens a step may compute beside decodes, so that these go on in time.
  The standalone engine computes long prompts on a second stream instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rose_backend.block_manager import BlockManager, PrefixMatch
from rose_backend.block_manager.block_pool import Int32Array, IntArray

if TYPE_CHECKING:
    import torch

MIN_TOKENS_WORTH_WAITING = 64
"""A prompt waits for the next step if another prompt computes at least this many of its tokens in the current step.

Waiting costs the prompt one step and saves the step these tokens; the more prompts wait, the more it saves. Llama 1B
inside vLLM on an H200, median ms to the first token of prompts that share, waiting / not: 64 tokens shared by 2
requests 6.6 / 6.3, by 8 8.3 / 8.5, by 32 15 / 20; 256 tokens 7.5 / 7.6, 9.5 / 15, 18 / 43. Prompts that share nothing
gain in each of these cases.
"""


class InFlightPrefixes:
    """The prefixes that the prompts of the current step compute.

    Attention stores keys and values while it reads those of other requests, so a step cannot read blocks that it writes
    itself. A prompt that shares a long prefix with a prompt of this step is therefore admitted in the next step, and
    finds the prefix in the cache. The threshold counts tokens, not blocks, because hits end at tokens.

    Args:
        manager: finds the prefixes. Without a prefix cache no prompt waits.
        min_tokens: tokens that are worth waiting for; None: ``MIN_TOKENS_WORTH_WAITING``.
    """

    def __init__(self, manager: BlockManager, min_tokens: int | None = None) -> None:
        self.min_tokens = min_tokens
        self._block_size = manager.block_size
        self._cache = manager.cache
        self._keys: set[bytes] = set()

    def new_step_starts(self) -> None:
        """Forget the prefixes of the previous step."""
        self._keys.clear()

    def __bool__(self) -> bool:
        """Whether any prompt of this step computes a prefix worth waiting for."""
        return bool(self._keys)

    def cover(self, token_ids: Int32Array, match: PrefixMatch) -> bool:
        """Whether a prompt of this step computes enough tokens after ``match`` for this prompt to wait for them.

        Args:
            token_ids: int32 ``[P]`` of the prompt.
            match: its cached prefix.
        """
        end = self._end(match)
        # The last token is always computed.
        return bool(self._keys) and end < len(token_ids) and self._key(token_ids, match, end) in self._keys

    def add(self, token_ids: Int32Array, match: PrefixMatch, num_new_tokens: int) -> None:
        """Note that a prompt computes ``num_new_tokens`` after ``match`` in this step."""
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

        Prompts that share tokens after a match have the same match, so the digest of its full blocks covers all tokens
        before them.
        """
        start = match.num_tokens - match.num_tokens % self._block_size
        return match.chain_digest + token_ids[start:end].tobytes()


_CPU = 2048
"""A CPU is no faster with more, and a step delays running sequences."""
_SMALL_GPU = {"offline": 8192, "online": 2048}
_LARGE_GPU = {"offline": 16_384, "online": 8192}
"""vLLM's defaults for such GPUs. On an H200 a pass of GPT-2 124M takes 6.4 ms for 16,384 tokens, 3.1 ms for 8,192 and
1.0 ms for 2,048: larger ones delay running sequences, smaller ones take less than the CPU's 2 ms per step."""
_LARGE_GPU_BYTES = 70 << 30
_WORTH_WAITING_ON_A_GPU = 1024
"""For GPT-2 124M on an H200, where waiting costs a step of about 2 ms. Median ms to the first token, waiting / not: 128
tokens shared by 2 requests 3.7 / 2.1, by 8 5.2 / 2.7, by 32 7.5 / 4.9; 768 tokens 4.6 / 2.2, 5.5 / 5.1, 8.4 / 9.3. To
be measured again for larger models."""


def default_token_budget(device: torch.device, *, is_online: bool) -> int:
    """Return ``max_num_batched_tokens``; ``is_online``: clients read tokens while they are generated."""
    if device.type == "cpu":
        return _CPU
    import torch

    is_large = torch.cuda.get_device_properties(device).total_memory >= _LARGE_GPU_BYTES
    return (_LARGE_GPU if is_large else _SMALL_GPU)["online" if is_online else "offline"]


def default_token_budgets(device: torch.device | None) -> list[int]:
    """Return all that ``default_token_budget`` may return for ``device``; None: for any GPU."""
    if device is not None:
        return sorted({default_token_budget(device, is_online=each) for each in (False, True)})
    return sorted({*_SMALL_GPU.values(), *_LARGE_GPU.values()})


def min_tokens_worth_waiting(device: torch.device) -> int:
    """Return how many tokens of a prompt another one must compute in a step for it to wait for the next step."""
    return _WORTH_WAITING_ON_A_GPU if device.type == "cuda" else MIN_TOKENS_WORTH_WAITING


MAX_PROMPT_TOKENS_AMONG_DECODES = 512
"""More prompt tokens than these are computed beside decode steps, if the device can and no further request waits.

Others are computed before the next decode step.

On an H100 (2026-11-28; Poisson arrivals and saturation 3b227bd, the rest 2831f47 with a later order of prompt tiles),
beside 32 decodes with a context of 2,048, in ms: Qwen3 0.6B's decode steps take 3.4; with 512 prompt tokens before it
one takes 5.8, beside them it takes 3.9 and the prompt 10.6; with 4,096 tokens 14.5, 5.3 and 28. Llama 8B's 8.5; 22, 11
and 49; 110, 14 and 222. With Poisson arrivals of prompts of 512 tokens at 0.6 of Qwen3's capacity, first tokens take
9.3 in the median where prompts come before decodes, 19 beside them; the 99th percentile of gaps is 8.4 and 6.1. At
saturation, where requests wait all the while, passes beside decodes cost 12 % of the throughput.
"""

TOP_UP_STEPS = 16
"""``top_up`` starts this many steps before the first row is full."""
_BLOCKS_PER_SPARE_BLOCK = 16
"""Free blocks that must remain for each block that is reserved ahead."""
_MAX_SPARE_BLOCKS = 2
"""Blocks reserved ahead per row. Planning a step costs the CPU about ten times as much as repeating a steady-state
decode step, and allocating blocks about as much as planning."""
_ROWS_PER_TOP_UP = 128
"""A call costs the CPU about as much as the blocks of 32 rows; those of 128 fit into the time of a step."""


def reserve_ahead(
    manager: BlockManager, rows: IntArray, num_tokens: Int32Array, max_num_tokens: Int32Array
) -> bool:
    """Reserve ``num_tokens`` for each of ``rows``, all or none; where blocks are plenty, for further steps, too.

    Args:
        rows: ``[N]``.
        num_tokens: ``[N]``, counted from what is committed.
        max_num_tokens: int32 ``[max_num_seqs]``, of every row: its length limit.

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
    """Reserve for some decoding rows, while the CPU waits for the device, what ``reserve_ahead`` would reserve later.

    It would do so for all rows at once, which for 256 rows takes longer than their step.

    Args:
        rows: ``[N]``.
        num_tokens: ``[N]``, tokens that each row will need at the next ``reserve_ahead``.
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


MAX_WAITING_LOOKED_AT = 64
"""With more prompts waiting than these, a step has no budget: what counts then is how many are served."""
_FACTORS = (1.5, 2.0, 2.5, 3.0)
"""Times a plain decode step that a step with prompts may take. All these numbers were chosen in the simulations of
``tests/test_step_budget.py``."""
_MAX_SLOWDOWN, _MAX_DELAY_IN_STEPS = 0.5, 1
"""A factor is too small if prompts are over later than without a budget by more than this share of the first prompt's
own time and this many decode steps. Simulated with the times of steps on an H100 (2026-11-28), prompts of 4,096 tokens
beside 32 decodes: Llama 8B's first tokens come after 159 ms with gaps of 20 ms, without a budget after 114 ms with one
gap of 110 ms; Qwen3 0.6B's after 26 ms with gaps of 8.8 ms, without after 16 ms with one of 15 ms."""
_SHARE_FOR_LESS = 1 / 4
"""Of that delay, for a smaller factor than that of the step before: otherwise each step would grant what is left of a
prompt the whole delay again."""
_RARE_PROMPTS, _RARE_STEPS = 10, 2000
"""Fewer than 10 prompts in 2,000 steps are at most 0.5 % of the gaps: the 99th percentile does not see them."""
_MIN_PROMPT_TOKENS = 32
"""A step with less of a prompt takes as long as one with this, and every step streams the weights again."""
_PROMPT_TOKENS_UNIT = 16
"""Budgets are multiples of it, the usual size of a block. They grow by half where a step of 32 tokens takes no longer
than a decode step, so a unit of 32 would hold them there for ever."""
_FIRST_PROMPT_TOKENS = 512
"""Of the first steps under a fixed number of milliseconds, before anything is known."""
_NUM_GAPS, _GAPS_PER_MEDIAN = 64, 16
"""Plain decode steps in the median, and after how many more it is computed again."""
_NEW_SHARE, _NEW_SHARE_OF_CACHED = 1 / 4, 1 / 8
"""Weight of a new rate, and of what a new prompt had left to compute, in the average of all before it."""
_MIN_SECONDS = 1e-6
_NUM_OVERHEADS = 5
"""Small steps that the median of the overhead is of."""
_KEPT_OVERHEAD = 1 - 1 / 128
"""After a step long enough to tell the rate, until the next small one: where small steps cost too much, none is
tried until then."""


class StepBudget:
    """How many prompt tokens a step may compute beside decodes so that it takes little longer than a plain decode step.

    Every client that reads tokens waits for the whole step. Smaller steps take a prompt longer, because each of them
    pays for what a step costs whatever its size: a factor of 1.5 is tried first, and larger ones, then no limit, where
    prompts would wait too long, see ``max_prompt_tokens``.

    It learns from the steps' times, which the caller measures: the median ``d`` of plain decode steps; the rate of
    prompt tokens in large steps; and the overhead, what a small step takes beyond its tokens at that rate. Its budget
    ``(1.5 * d - overhead) * rate`` converges to the tokens whose step takes ``1.5 * d``, whatever the curve between is.

    Args:
        seconds: that a step with prompts may take. None: as many as follow from the plain decode steps.

    Attributes:
        num_limited: steps whose prompts did not fit into their budget.
        num_raised: those of them with a larger budget than the smallest factor's.
        num_given_up: steps that had no limit because prompts would have waited too long.
    """

    @classmethod
    def of(cls, option: str | float) -> StepBudget | None:
        """Return that of an option, ``auto``, ``off`` or milliseconds; None if it is off."""
        if option == "off":
            return None
        return cls(None if option == "auto" else float(option) / 1e3)

    def __init__(self, seconds: float | None = None) -> None:
        self.num_limited = self.num_raised = self.num_given_up = 0
        self._seconds = seconds
        self._gaps: deque[float] = deque(maxlen=_NUM_GAPS)
        self._num_steps = 0
        self._decode_s = 0.0
        self._largest = 0
        self._rate = self._overhead_s = 0.0
        self._overheads: deque[float] = deque(maxlen=_NUM_OVERHEADS)
        self._limit = 0
        # Of the factor of the step before; 0 after a step without prompts.
        self._last_index = 0
        self._is_limited = self._is_raised = self._is_given_up = False
        self._share_computed = 1.0
        # The steps in which the last prompts began.
        self._begins: deque[int] = deque(maxlen=_RARE_PROMPTS)

    def __str__(self) -> str:
        return (
            f"{self.num_limited} with fewer prompt tokens than there were, {self.num_raised} of these longer than "
            f"{_FACTORS[0]:g} decode steps; {self.num_given_up} without a limit because prompts would have waited too "
            "long"
        )

    def note_decode_step(self, seconds: float) -> None:
        """Note the time of a step that only decodes, from the end of the one before to its own."""
        self._num_steps += 1
        self._last_index = 0
        self._gaps.append(seconds)
        if not self._num_steps % _GAPS_PER_MEDIAN:
            self._note_median()

    def note_mixed_step(self, num_prompt_tokens: int, seconds: float) -> None:
        """Note the time of a step with decodes and, in addition, ``num_prompt_tokens`` of prompts, at least 1."""
        self._num_steps += 1
        if not self._num_steps % _GAPS_PER_MEDIAN:
            self._note_median()
        # It takes no less than its decodes alone. It seems to where the step before was read late.
        seconds = max(seconds, self._decode_s, _MIN_SECONDS)
        if not self._rate:
            self._rate, self._largest = num_prompt_tokens / seconds, num_prompt_tokens
            return
        self._largest = max(self._largest, num_prompt_tokens)
        rate = num_prompt_tokens / seconds
        if 2 * num_prompt_tokens >= self._largest or rate > self._rate:
            self._rate += (min(rate, 2 * self._rate) - self._rate) * _NEW_SHARE
            self._overhead_s *= _KEPT_OVERHEAD
            self._overheads.clear()
        elif 2 * num_prompt_tokens >= self._limit:
            # The end of a prompt is smaller than its budget; it takes the time of the decodes and tells nothing.
            overhead_s = max(seconds - num_prompt_tokens / self._rate, 0.0)
            # More leaves no room for prompts in any budget, whether a little or much more.
            self._overheads.append(min(overhead_s, max(_FACTORS[-1] * self._decode_s, self._seconds or 0.0)))
            # A pause of the process is one of several.
            self._overhead_s = sorted(self._overheads)[len(self._overheads) // 2]

    def note_prompt(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Note that a prompt of ``num_tokens`` has begun; the prefix cache has supplied ``num_cached_tokens``."""
        self._begins.append(self._num_steps)
        share = 1 - min(num_cached_tokens / max(num_tokens, 1), 1)
        self._share_computed += (share - self._share_computed) * _NEW_SHARE_OF_CACHED

    def new_step_starts(self) -> bool:
        """Forget the limit of the step before.

        Returns:
            Whether this one may get a limit if it has decodes and prompts, whatever these are.
        """
        self._limit = 0
        self._is_limited = self._is_raised = self._is_given_up = False
        if self._seconds is not None:
            return True
        begins = self._begins
        is_often = len(begins) == _RARE_PROMPTS and begins[0] > self._num_steps - _RARE_STEPS
        return is_often and self._rate > 0.0 and self._decode_s > 0.0

    def max_prompt_tokens(self, begun: Sequence[int], waiting: Sequence[int]) -> int | None:
        """Return how many prompt tokens the next step may compute beside its decodes; None: no limit.

        The smallest factor with which the prompts that are known are over soon enough; none where all take too long,
        or where even the largest leaves no room for prompt tokens.

        Args:
            begun: of each prompt that has begun, the tokens that are not computed, first come first.
            waiting: of prompts that have not begun, all tokens, first come first; more than ``MAX_WAITING_LOOKED_AT``
                need not be given.
        """
        if not self.new_step_starts():
            return None
        waiting_tokens = sum(waiting) * self._share_computed
        backlog = sum(begun) + waiting_tokens
        if self._seconds is not None:
            limit = self._fixed_limit(self._seconds)
        elif len(waiting) > MAX_WAITING_LOOKED_AT:
            self._is_given_up = True
            return None
        else:
            first = begun[0] if begun else waiting_tokens / max(len(waiting), 1)
            factor = self._factor(backlog, first)
            if factor is None:
                self._is_given_up = True
                return None
            limit = self._limit_of(factor * self._decode_s)
            self._is_raised = factor > _FACTORS[0] and limit < backlog
        self._is_limited = limit < backlog
        self._limit = limit
        return limit

    def count_step(self) -> None:
        """Count the step that was last asked about, once it is known to compute prompt tokens."""
        self.num_limited += self._is_limited
        self.num_raised += self._is_raised
        self.num_given_up += self._is_given_up

    def _fixed_limit(self, seconds: float) -> int:
        return max(self._limit_of(seconds), _MIN_PROMPT_TOKENS) if self._rate else _FIRST_PROMPT_TOKENS

    def _factor(self, backlog: float, first: float) -> float | None:
        allowed_s = _MAX_SLOWDOWN * first / self._rate + _MAX_DELAY_IN_STEPS * self._decode_s
        for index, factor in enumerate(_FACTORS):
            step_s = factor * self._decode_s
            limit = self._limit_of(step_s)
            if limit < _MIN_PROMPT_TOKENS:
                continue
            delay_s = 0.0 if limit >= backlog else backlog / limit * step_s - backlog / self._rate
            if delay_s <= (allowed_s if index >= self._last_index else allowed_s * _SHARE_FOR_LESS):
                self._last_index = index
                return factor
        self._last_index = len(_FACTORS)
        return None

    def _limit_of(self, seconds: float) -> int:
        limit = int((seconds - self._overhead_s) * self._rate)
        return limit - limit % _PROMPT_TOKENS_UNIT

    def _note_median(self) -> None:
        if self._gaps:
            self._decode_s = sorted(self._gaps)[len(self._gaps) // 2]
