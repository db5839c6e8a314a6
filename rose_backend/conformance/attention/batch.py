"""A batch of requests in a few characters: ``8q1s1k,2q256s512``. The grammar is in README.md, one folder up."""

from __future__ import annotations

import re
from dataclasses import dataclass

_GROUP = re.compile(r"(?P<count>\d+)?q(?P<query>\d+)(?P<query_k>k)?(?:s(?P<seq>\d+)(?P<seq_k>k)?)?")


@dataclass(frozen=True)
class Row:
    """One request of a step."""

    query_len: int
    """Tokens that the step computes."""
    seq_len: int
    """Tokens of the request after the step, the new ones included."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that earlier steps computed."""
        return self.seq_len - self.query_len


def parse_batch(text: str) -> tuple[Row, ...]:
    """Parse the rows of a batch, in order.

    Raises:
        ValueError: names the group that does not follow the grammar, or whose lengths cannot be.
    """
    rows: list[Row] = []
    for group in text.split(","):
        match = _GROUP.fullmatch(group.strip())
        if match is None:
            raise ValueError(
                f"batch {text!r}: group {group!r} does not read [count]q<length>[k][s<length>[k]]"
            )
        count = int(match["count"] or 1)
        query_len = _length(match["query"], match["query_k"])
        seq_len = query_len if match["seq"] is None else _length(match["seq"], match["seq_k"])
        if count == 0 or not 0 < query_len <= seq_len:
            raise ValueError(
                f"batch {text!r}: group {group!r} needs a count of at least 1 and 1 <= q <= s, "
                f"got count {count}, q {query_len}, s {seq_len}"
            )
        rows += [Row(query_len, seq_len)] * count
    return tuple(rows)


def _length(digits: str, k: str | None) -> int:
    return int(digits) * (1024 if k else 1)
