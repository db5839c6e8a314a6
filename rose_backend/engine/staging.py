"""Small arrays to the device and back without waiting for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 16


def upload(device: torch.device, *arrays: NDArray[Any]) -> list[torch.Tensor]:
    """Return a tensor of each array on ``device``; on a GPU all of them travel in one asynchronous copy.

    The copy starts from pinned memory, which torch keeps until the copy has run. A copy from ordinary memory could wait
    for everything that was enqueued before.

    Args:
        arrays: contiguous. On a CPU the tensors share their memory, so they must not be persistent buffers.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = []
    num_bytes = 0
    for array in arrays:
        starts.append(num_bytes)
        num_bytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    raw = pinned.numpy()
    for start, array in zip(starts, arrays, strict=True):
        raw[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    arrived = pinned.to(device, non_blocking=True)
    return [
        arrived[start : start + array.nbytes].view(torch_dtype(array.dtype)).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def download(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, which is complete when what was enqueued so far has run."""
    if tensor.device.type == "cpu":
        return tensor
    arrived = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return arrived.copy_(tensor, non_blocking=True)


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Return torch's name for one of the types that travel."""
    return _TORCH_DTYPES[dtype.char]


_TORCH_DTYPES = {
    np.dtype(kind).char: torch.from_numpy(np.zeros(0, kind)).dtype
    for kind in (np.bool_, np.int32, np.int64, np.float32)
}
