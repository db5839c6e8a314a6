"""Rows into which a KV connector loads keys and values: nobody may find them before they have arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


class ExternalLoads:
    """Which rows wait for a connector.

    A load that its step waits for has arrived when the outcome of that step is known: a token that the step computed
    behind the loaded ones is then no longer in flight. Any other load has arrived when vLLM says so.
    """

    def __init__(self) -> None:
        # Tokens up to the last loaded one; None where vLLM tells the end of the load.
        self._num_tokens: dict[int, int | None] = {}

    def add(self, row: int, num_tokens: int, *, is_async: bool) -> None:
        """Note that what lies below ``num_tokens`` of a row, and is not cached here, is loaded."""
        self._num_tokens[row] = None if is_async else num_tokens

    def end(self, row: int) -> None:
        """Note that what a row waited for has arrived, or that the row is given back."""
        self._num_tokens.pop(row, None)

    def cover(self, row: int, request: Request) -> bool:
        """Whether a row waits for something."""
        if row not in self._num_tokens:
            return False
        num_tokens = self._num_tokens[row]
        if num_tokens is None or request.num_computed_tokens - request.num_in_flight_tokens <= num_tokens:
            return True
        del self._num_tokens[row]
        return False
