"""Token ids to text, one token at a time: whole characters only, stop strings wherever token boundaries fall."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from rose_backend.engine.tokenizer import Tokenizer, whole_characters

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_UNFINISHED = 3
"""An unfinished UTF-8 character is at most three bytes, and decoders show at most one U+FFFD for each."""


class Detokenizer:
    """The text of one completion while its tokens arrive.

    The result does not depend on how the text falls into tokens: of all stop strings the one whose end comes first
    wins, of several ending there the longest.

    Args:
        stop_strings: strings that end the text.
        keep_stop_string: leave the stop string at the end of the text.
        min_tokens: no stop string ends within the text of this many first tokens.
        context: tokens in front of the text, see ``Tokenizer.decoding_context``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_strings: Sequence[str] = (),
        keep_stop_string: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        self._stops_and_lengths = [(stop, len(stop)) for stop in self._stop_strings]
        # In order, so that those which begin with some text follow each other.
        self._sorted_stops = sorted(self._stop_strings)
        self._first_characters = frozenset(stop[0] for stop in self._stop_strings)
        self._max_held_back = max(map(len, self._stop_strings), default=1) - 1
        self._keep_stop_string = keep_stop_string
        self._min_tokens = min_tokens
        self._skip_special_tokens = skip_special_tokens
        self._num_tokens = 0
        # Tokens decoded together: some whose text is out already (context for decoders that look back), then the rest.
        self._window = list(context)
        self._num_context_tokens = len(self._window)
        # Characters of the window's text that are part of self._text, or of the context's.
        self._num_emitted = len(whole_characters(self._decode(self._window))) if context else 0
        self._text = ""
        self._num_certain = 0  # characters of the text that are no part of what may become a stop string
        self._num_delivered = 0
        self._closed = False

    @property
    def has_stop_strings(self) -> bool:
        """Whether a string can end the text."""
        return bool(self._stop_strings)

    @property
    def visible_text(self) -> str:
        """Text that cannot change any more."""
        return self._text[: self._num_visible()]

    def extend(self, token_ids: Sequence[int]) -> str | None:
        """Add tokens; a stop string may end at any of them.

        Returns:
            The stop string that ended the text, or None. After one, nothing more may be added.
        """
        self._num_tokens += len(token_ids)
        self._window.extend(token_ids)
        decoded = self._decode(self._window)
        stripped = decoded.rstrip(_REPLACEMENT)
        certain = decoded[: max(len(stripped), len(decoded) - _MAX_UNFINISHED)]
        stop_string = self._append(certain[self._num_emitted :])
        self._num_emitted = max(self._num_emitted, len(certain))
        if len(certain) == len(decoded) and certain:
            self._slide_window()
        return stop_string

    def close(self) -> str | None:
        """End the text: what was held back as an unfinished character becomes visible.

        Returns:
            A stop string that this completed, or None.
        """
        stop_string = None
        if not self._closed:
            stop_string = self._append(self._decode(self._window)[self._num_emitted :])
        self._closed = True
        return stop_string

    def take_delta(self) -> str:
        """Return the visible text that the previous call did not return."""
        start, self._num_delivered = self._num_delivered, self._num_visible()
        return self._text[start : self._num_delivered]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _slide_window(self) -> None:
        del self._window[: self._num_context_tokens]
        self._num_context_tokens = len(self._window)
        self._num_emitted = len(self._decode(self._window))

    def _append(self, new_text: str) -> str | None:
        old_length = len(self._text)
        self._text += new_text
        if not new_text or not self._stop_strings:
            return None
        found = None if self._num_tokens <= self._min_tokens else self._find_stop(old_length)
        if found is None:
            self._note_certain()
            return None
        end, start, stop = found
        self._text = self._text[: end if self._keep_stop_string else start]
        self._closed = True
        return stop

    def _find_stop(self, old_length: int) -> tuple[int, int, str] | None:
        """Return end and start of the stop string whose end comes first behind ``old_length``, and the string."""
        text, num_certain = self._text, self._num_certain
        best: tuple[int, int, str] | None = None
        for stop, length in self._stops_and_lengths:
            # The part of it that was there before is held back, so it cannot start before that.
            first = old_length - length + 1
            start = text.find(stop, first if first > num_certain else num_certain)
            if start >= 0 and (best is None or (start + length, start) < best[:2]):
                best = (start + length, start, stop)
        return best

    def _note_certain(self) -> None:
        """Find what has to be held back. Each place of the text is tried once: a possible stop string never starts
        before the place found for the previous piece."""
        text, length, stops = self._text, len(self._text), self._sorted_stops
        start = max(self._num_certain, length - self._max_held_back)
        while start < length:
            if text[start] in self._first_characters:
                end = text[start:]
                # Stop strings that begin with this sort right behind it.
                place = bisect_right(stops, end)
                if place < len(stops) and stops[place].startswith(end):
                    break
            start += 1
        self._num_certain = start

    def _num_visible(self) -> int:
        if self._closed or self._keep_stop_string or not self._stop_strings:
            return len(self._text)
        return self._num_certain
