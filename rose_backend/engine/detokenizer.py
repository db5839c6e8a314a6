"""The text of an answer while its tokens arrive: stop strings wherever token boundaries fall."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from rose_backend.engine.decoding import TextStream


class Detokenizer:
    """The text of one completion while its tokens arrive.

    The result does not depend on how the text falls into tokens: of all stop strings the one whose end comes first
    wins, of several ending there the longest. Each token takes the same time however long the text is.

    Args:
        stream: the text of the tokens.
        stop_strings: strings that end the text.
        keep_stop_string: leave the stop string at the end of the text.
        min_tokens: no stop string ends within the text of this many first tokens.
    """

    def __init__(
        self,
        stream: TextStream,
        *,
        stop_strings: Sequence[str] = (),
        keep_stop_string: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._stream = stream
        self._stops_and_lengths = [(stop, len(stop)) for stop in stop_strings]
        # In order, so that those which begin with some text follow each other.
        self._sorted_stops = sorted(stop_strings)
        self._first_characters = frozenset(stop[0] for stop in stop_strings)
        self._max_uncertain = max(map(len, stop_strings), default=1) - 1
        self._keep_stop_string = keep_stop_string
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._uncertain = ""  # the end of the text, which may become a stop string
        self._pieces: list[str] = []  # text that cannot change any more, not yet taken
        self._closed = False

    @property
    def has_stop_strings(self) -> bool:
        """Whether a string can end the text."""
        return bool(self._sorted_stops)

    def extend(self, token_ids: Sequence[int]) -> str | None:
        """Add tokens; a stop string may end at any of them.

        Returns:
            The stop string that ended the text, or None. After one, nothing more may be added.
        """
        if not self._sorted_stops:
            self._pieces.append(self._stream.extend(token_ids))
            return None
        for token_id in token_ids:
            self._num_tokens += 1
            if (stop_string := self._append(self._stream.extend([token_id]))) is not None:
                return stop_string
        return None

    def close(self) -> str | None:
        """End the text: what was held back as an unfinished character, or as the beginning of a stop string, is shown.

        Returns:
            A stop string that this completed, or None.
        """
        if self._closed:
            return None
        stop_string = self._append(self._stream.close())
        if stop_string is None and not self._keep_stop_string:
            self._pieces.append(self._uncertain)
        self._closed = True
        return stop_string

    def take_delta(self) -> str:
        """Return the text that cannot change any more and that the previous call did not return."""
        delta = "".join(self._pieces)
        self._pieces.clear()
        return delta

    def _append(self, new_text: str) -> str | None:
        old_length = len(self._uncertain)
        text = self._uncertain + new_text
        found = None
        if new_text and self._num_tokens > self._min_tokens:
            found = self._find_stop(text, old_length)
        if found is None:
            num_certain = self._num_certain(text)
            self._uncertain = text[num_certain:]
            self._pieces.append(new_text if self._keep_stop_string else text[:num_certain])
            return None
        end, start, stop = found
        self._pieces.append(text[old_length:end] if self._keep_stop_string else text[:start])
        self._closed = True
        return stop

    def _find_stop(self, text: str, old_length: int) -> tuple[int, int, str] | None:
        """Return end and start of the stop string whose end comes first behind ``old_length``, and the string."""
        best: tuple[int, int, str] | None = None
        for stop, length in self._stops_and_lengths:
            start = text.find(stop, max(old_length - length + 1, 0))
            if start >= 0 and (best is None or (start + length, start) < best[:2]):
                best = (start + length, start, stop)
        return best

    def _num_certain(self, text: str) -> int:
        """Return how much of ``text`` is no part of what may become a stop string."""
        # Each place is tried once: a possible stop string never starts before the place found for the previous piece.
        start = max(len(text) - self._max_uncertain, 0)
        while start < len(text):
            if text[start] in self._first_characters:
                end = text[start:]
                # Stop strings that begin with this sort right behind it.
                place = bisect_right(self._sorted_stops, end)
                if place < len(self._sorted_stops) and self._sorted_stops[place].startswith(end):
                    break
            start += 1
        return start
