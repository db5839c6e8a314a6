"""The batch grammar: what it reads, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_backend.conformance.attention.batch import Row, parse_batch


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("q1s1", [Row(1, 1)]),
        ("q33", [Row(33, 33)]),
        ("2q5s40", [Row(5, 40)] * 2),
        ("8q1s1k,2q256s512", [Row(1, 1024)] * 8 + [Row(256, 512)] * 2),
        ("q2k", [Row(2048, 2048)]),
        ("q1ks4k, q7", [Row(1024, 4096), Row(7, 7)]),
    ],
)
def test_reads(text: str, rows: list[Row]) -> None:
    assert list(parse_batch(text)) == rows


@pytest.mark.parametrize(
    "text", ["", "q", "1s5", "q5s", "q1s1,", "q1 s5", "x2q1s1", "q-1", "q1s2m", "q1.5s2"]
)
def test_refuses_what_is_not_in_the_grammar(text: str) -> None:
    with pytest.raises(ValueError, match="does not read"):
        parse_batch(text)


@pytest.mark.parametrize("text", ["0q1s1", "q0", "q0s5", "q5s4", "q1ks1"])
def test_refuses_impossible_lengths(text: str) -> None:
    with pytest.raises(ValueError, match="1 <= q <= s"):
        parse_batch(text)


lengths = st.tuples(st.integers(1, 5), st.integers(1, 3000), st.integers(0, 3000))


@given(st.lists(lengths, min_size=1, max_size=5))
def test_reads_back_what_is_written(groups: list[tuple[int, int, int]]) -> None:
    text = ",".join(f"{count}q{query}s{query + computed}" for count, query, computed in groups)
    rows = [Row(query, query + computed) for count, query, computed in groups for _ in range(count)]
    assert list(parse_batch(text)) == rows
    assert [row.num_computed_tokens for row in rows] == [c for count, _, c in groups for _ in range(count)]
