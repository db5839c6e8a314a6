"""Where checkpoints of states are due in the prompts of running requests.

Recurrent layers have the state of one length at a time, so a later request can only start where a copy was made. Copies
are made at the end of a prompt, where an answer or the next turn of a conversation follows; where a prompt leaves what
others have computed before it (a *junction*), as more may share that much; and on the way through long prompts, at
their last block's end, too, as vLLM does, for what only a question follows. A request that ends leaves its last state
there without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.request import Request

from rose_backend.block_manager import PrefixMatch
from rose_backend.vllm_plugin.kv_cache.prompt_hashes import HashedPrompt

MIN_TOKENS_WORTH_A_CHECKPOINT = 64
"""A checkpoint saves recomputing the tokens since the previous one; copying it costs as much as this few."""
TOKENS_BETWEEN_CHECKPOINTS = 2_048
"""In long prompts, at the end of the first chunk that is this far past the last one."""
_SHARE_OF_SIZE = 4
"""Where nobody has shown yet that a checkpoint is of use, it has to save a quarter of the tokens whose K/V would fit
into its blocks. Questions on one document, for example, would fill the pool with states that nothing follows."""


def junction_of(match: PrefixMatch) -> int:
    """Return how many leading tokens others have computed of a prompt, without a state at their end; 0 if too few."""
    num_known = match.num_known_tokens
    return num_known if num_known - match.num_tokens >= MIN_TOKENS_WORTH_A_CHECKPOINT else 0


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt that is being computed."""

    request: Request
    prompt: HashedPrompt
    junction: int
    ends: tuple[int, int]
    """Where else a checkpoint may be due: the ends of the last block and of the prompt."""
    waiting: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Requests that wait for a checkpoint of this one: where it is due, and the blocks that are kept for them."""


class DueCheckpoints:
    """Where running requests are to leave checkpoints, by row.

    Args:
        block_size: tokens per block.
        num_groups: with states.
        full_blocks_only: whether lookups find checkpoints at the ends of blocks only.
    """

    def __init__(self, block_size: int, num_groups: int, full_blocks_only: bool) -> None:
        self._block_size, self._full_blocks_only = block_size, full_blocks_only
        self._granularity = block_size if full_blocks_only else 1
        self._min_tokens_kept = num_groups * block_size // _SHARE_OF_SIZE
        self._min_tokens = max(MIN_TOKENS_WORTH_A_CHECKPOINT, self._min_tokens_kept)
        self._last: dict[int, int] = {}
        """Length of each row's last checkpoint, the one that it started from or 0."""
        self._prefills: dict[int, Prefill] = {}

    def __bool__(self) -> bool:
        """Whether a prompt is being computed."""
        return bool(self._prefills)

    def next_stop(self, request: Request, start: int) -> int:
        """Return where a step that computes a request from ``start`` has to end at the latest; 0 for anywhere."""
        stops = (request.shared_prefix_boundary, self._last_block_end(request))
        return min((stop for stop in stops if stop > start), default=0)

    def _last_block_end(self, request: Request) -> int:
        """Return the end of the last block of a request's known tokens; 0 if a step after it is not worth it."""
        num_tokens = request.num_tokens
        end: int = (num_tokens - 1) // self._block_size * self._block_size
        is_apart = self._full_blocks_only or num_tokens - end >= MIN_TOKENS_WORTH_A_CHECKPOINT
        return end if is_apart and end >= self._min_tokens else 0

    def blocks_kept_for(self, request_id: str) -> int | None:
        """Return the blocks that are kept for a request that ``wait``ed and still has to; None if it has not to.

        Until then, or until there is another checkpoint, it is not looked up in the cache again, which takes a
        millisecond for 100,000 tokens.
        """
        for prefill in self._prefills.values():
            end, num_blocks = prefill.waiting.get(request_id, (0, 0))
            if prefill.request.num_computed_tokens < end:
                return num_blocks
        return None

    def wait(self, request_id: str, prompt: HashedPrompt, match: PrefixMatch, num_blocks: int) -> bool:
        """Let a request wait for a checkpoint that it could start from, if a running one is about to reach it.

        It would compute the same tokens as that request, which has reached the end of the match at least, and get there
        no earlier.

        Args:
            num_blocks: that are to be kept for it.
        """
        found = self.coming_for(prompt, match)
        if found is None:
            return False
        prefill, end = found
        prefill.waiting[request_id] = end, num_blocks
        return True

    def coming_for(self, prompt: HashedPrompt, match: PrefixMatch) -> tuple[Prefill, int] | None:
        """Return the running request that is about to reach a checkpoint that a waiting prompt could start from, and
        where that is; None if there is none.
        """
        nearest = match.num_tokens + MIN_TOKENS_WORTH_A_CHECKPOINT
        farthest = min(len(prompt.token_ids) - 1, prompt.num_shareable)
        for row, prefill in self._prefills.items():
            end = self._next_checkpoint(row, prefill)
            is_ahead = match.num_tokens <= prefill.request.num_computed_tokens
            if is_ahead and nearest <= end <= farthest and prompt.begins_like(prefill.prompt, end):
                return prefill, end
        return None

    def _next_checkpoint(self, row: int, prefill: Prefill) -> int:
        """Return where the next checkpoint of a row is due at the earliest, perhaps past its prompt."""
        last = self._last[row]
        ends = [end for end in prefill.ends if end - last >= self._min_tokens]
        places = (prefill.junction, *ends, last + TOKENS_BETWEEN_CHECKPOINTS)
        start = prefill.request.num_computed_tokens
        return min((place for place in places if place > start and not place % self._granularity), default=0)

    def add(self, row: int, request: Request, prompt: HashedPrompt, match: PrefixMatch) -> None:
        """Note a request that was just admitted."""
        self._last[row] = match.num_tokens
        ends = self._last_block_end(request), request.num_tokens
        self._prefills[row] = Prefill(request, prompt, junction_of(match), ends)

    def remove(self, row: int, num_computed: int) -> bool:
        """Forget a request that has ended; return whether its last state, of that many tokens, is worth keeping."""
        self._prefills.pop(row, None)
        return num_computed - self._last.pop(row) >= self._min_tokens_kept

    def take_due(self) -> list[int]:
        """Return the rows whose computed tokens end where a checkpoint is due, each once."""
        due = []
        for row, prefill in list(self._prefills.items()):
            num_computed, ends = prefill.request.num_computed_tokens, prefill.ends
            distance = num_computed - self._last[row]
            is_end = num_computed in ends and distance >= self._min_tokens
            is_due = is_end or num_computed == prefill.junction or distance >= TOKENS_BETWEEN_CHECKPOINTS
            if is_due and distance > 0 and num_computed <= ends[-1]:
                due.append(row)
                self._last[row] = num_computed
            if num_computed >= ends[-1]:
                del self._prefills[row]
        if due:
            for prefill in self._prefills.values():
                prefill.waiting.clear()
        return due
