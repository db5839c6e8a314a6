"""Rows into which a KV connector loads keys and values: nobody may find them before they have arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


class ExternalLoads:
    """Which rows wait for a connector.

    A load that its step waits for has arrived when the outcome of that step is known: a token that the step computed
    behind the loaded ones is then no longer in flight. Any other load has arrived when vLLM says so. Its counts do not
    tell: of a prompt that was loaded to its end vLLM computes the last token again, and counts no token behind it.
    """

    def __init__(self) -> None:
        # Tokens up to the last loaded one, and whether no step waits for them.
        self._loads: dict[int, tuple[int, bool]] = {}

    def add(self, row: int, num_tokens: int, *, is_async: bool) -> None:
        """Note that what lies below ``num_tokens`` of a row, and is not cached here, is loaded."""
        self._loads[row] = num_tokens, is_async

    def arrive(self, row: int) -> None:
        """Note that what no step waits for has arrived, as far as the row's request counts tokens as computed."""
        if self._loads.get(row, (0, False))[1]:
            del self._loads[row]

    def end(self, row: int) -> None:
        """Note that a row is given back."""
        self._loads.pop(row, None)

    def cover(self, row: int, request: Request) -> bool:
        """Whether a row waits for something."""
        if row not in self._loads:
            return False
        num_tokens, is_async = self._loads[row]
        if is_async or request.num_computed_tokens - request.num_in_flight_tokens <= num_tokens:
            return True
        del self._loads[row]
        return False
