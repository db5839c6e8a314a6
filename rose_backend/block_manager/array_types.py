"""Array types and two small array tools that every file of this folder uses."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
IntArray: TypeAlias = npt.NDArray[np.signedinteger[Any]]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

NO_BLOCKS: Int32Array = np.zeros(0, np.int32)
NO_BLOCKS.setflags(write=False)


def within_group_index(counts: IntArray) -> Int64Array:
    """Number the members of each group: counts ``[2, 0, 3]`` give ``[0, 1, 0, 1, 2]``."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) - np.repeat(ends - counts, counts)
