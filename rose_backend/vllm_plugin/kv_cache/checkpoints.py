"""Where checkpoints of states are due in the prompts of running requests.

Recurrent layers have the state of one length at a time, so a later request can only start where a copy was made. Copies
are made at the end of a prompt, where an answer or the next turn of a conversation follows; where a prompt leaves what
others have computed before it (a *junction*), as more may share that much; and on the way through long prompts. A
request that ends leaves its last state behind without a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from rose_backend.block_manager import PrefixMatch

MIN_TOKENS_WORTH_A_CHECKPOINT = 64
"""A checkpoint so few tokens behind the one before would save no more than them. It takes the memory of hundreds."""
TOKENS_BETWEEN_CHECKPOINTS = 4_096
"""In long prompts, at the end of the first chunk that is so far behind the last one."""


def junction_of(match: PrefixMatch) -> int:
    """Return how many leading tokens others have computed of a prompt, without a state at their end; 0 if too few."""
    num_known = match.num_known_tokens
    return num_known if num_known - match.num_tokens >= MIN_TOKENS_WORTH_A_CHECKPOINT else 0


class DueCheckpoints:
    """The requests whose prompts are being computed, by row."""

    def __init__(self) -> None:
        self._prefills: dict[int, _Prefill] = {}

    def add(self, row: int, request: Request, match: PrefixMatch) -> None:
        """Note a request that was just admitted."""
        self._prefills[row] = _Prefill(request, request.num_tokens, match.num_tokens, junction_of(match))

    def remove(self, row: int) -> None:
        """Forget a request that has ended."""
        self._prefills.pop(row, None)

    def take_due(self) -> list[int]:
        """Return the rows whose computed tokens end where a checkpoint is due, each once."""
        due = []
        for row, prefill in list(self._prefills.items()):
            num_computed = prefill.request.num_computed_tokens
            if prefill.is_due(num_computed):
                due.append(row)
                prefill.last = num_computed
            if num_computed >= prefill.end:
                del self._prefills[row]
        return due


class _Prefill:
    """A request with the tokens that were known when it was admitted, its last checkpoint and its junction."""

    __slots__ = ("end", "junction", "last", "request")

    def __init__(self, request: Request, end: int, last: int, junction: int) -> None:
        self.request, self.end, self.last, self.junction = request, end, last, junction

    def is_due(self, num_computed: int) -> bool:
        distance = num_computed - self.last
        if num_computed > self.end or distance < MIN_TOKENS_WORTH_A_CHECKPOINT:
            return False
        return num_computed in (self.end, self.junction) or distance >= TOKENS_BETWEEN_CHECKPOINTS
