"""What is kept in a step for waiting requests that were deferred to later ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rose_backend.block_manager import BlockManager


class DeferredRequests:
    """Rows and blocks that requests behind the deferred ones may not take.

    Args:
        manager: whose rows and blocks they are.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self.new_step_starts()

    def new_step_starts(self) -> None:
        """Forget the last step's: the scheduler asks for each waiting request again."""
        self.num_rows = self.num_blocks = 0
        self.until_next_step = False
        """Whether a request is deferred to the very next step, not to one behind it."""

    def keep(self, num_blocks: int, *, until_next_step: bool = False) -> bool:
        """Keep a row and blocks for one more request; return False, having changed nothing, if there are none."""
        has_row = self._manager.num_free_rows > self.num_rows
        if not has_row or num_blocks > self._manager.num_free_blocks - self.num_blocks:
            return False
        self.num_rows += 1
        self.num_blocks += num_blocks
        self.until_next_step |= until_next_step
        return True
