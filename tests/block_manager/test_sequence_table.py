"""Concatenated ranges against the plain loop that they stand for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_backend.block_manager.sequence_table import concatenate_ranges

RANGES = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 9)), max_size=12)
EQUAL_RANGES = st.builds(
    lambda starts, count: [(start, count) for start in starts],
    st.lists(st.integers(0, 100), max_size=12),
    st.integers(0, 9),
)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@given(ranges=RANGES | EQUAL_RANGES)
def test_ranges_one_behind_the_other(dtype: type, ranges: list[tuple[int, int]]) -> None:
    starts, counts = (np.array([pair[place] for pair in ranges], dtype) for place in (0, 1))
    numbers = concatenate_ranges(starts, counts)
    assert numbers.dtype == np.int64
    assert numbers.tolist() == [start + n for start, count in ranges for n in range(count)]


@pytest.mark.parametrize("counts", [[2, 2], [2, 3]])
def test_ranges_behind_two_to_the_31(counts: list[int]) -> None:
    starts = np.array([2**31 - 1, 2**32 + 5])
    expected = [start + n for start, count in zip(starts.tolist(), counts, strict=True) for n in range(count)]
    assert concatenate_ranges(starts, np.array(counts, np.int32)).tolist() == expected
