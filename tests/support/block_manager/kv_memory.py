"""Simulated K/V memories that the block manager's answers are applied to.

The K/V of a token depends on all tokens before it, so a token's value is a number made of the whole prefix.
"""

from __future__ import annotations

import numpy as np
import torch

from rose_backend.kernels import block_clone, write_kv

_MULTIPLIER = 6_364_136_223_846_793_005
_MASK = 2**63 - 1


def kv_values(namespace: bytes, tokens: list[int], earlier: list[int]) -> list[int]:
    """Return the values of ``tokens``, which follow the tokens that have the values ``earlier``."""
    value = earlier[-1] if earlier else int.from_bytes(b"\1" + namespace)
    values = []
    for token in tokens:
        value = (value * _MULTIPLIER + 2 * token + 1) & _MASK
        values.append(value)
    return values


class NumberMemory:
    """One number per token."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._values = np.full((num_blocks, block_size), -1, np.int64)

    def copy(self, src_block_ids: np.ndarray, dst_block_ids: np.ndarray) -> None:
        """Copy whole blocks; all sources are read first."""
        self._values[dst_block_ids] = self._values[src_block_ids]

    def write(self, block_ids: np.ndarray, offsets: np.ndarray, values: np.ndarray) -> None:
        self._values[block_ids, offsets] = values

    def holds(self, block_ids: np.ndarray, values: np.ndarray) -> bool:
        """Whether the blocks, one after the other, begin with exactly this K/V."""
        return bool((self._values[block_ids].reshape(-1)[: len(values)] == values).all())

    def spoil(self, block_ids: np.ndarray) -> None:
        """Make the content of blocks that were handed out anew different from everything valid."""
        self._values[block_ids] = -1


class TensorMemory:
    """A float32 K/V pool of two layers, written and copied by the package's own kernels; compared bit by bit."""

    NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE = 2, 2, 4

    def __init__(self, num_blocks: int, block_size: int) -> None:
        per_token = (self.NUM_KV_HEADS, self.HEAD_SIZE)
        self._pool = torch.full((self.NUM_LAYERS, 2, num_blocks, block_size, *per_token), -1.0)
        # One odd factor per number of a token, so that no two layers, heads or K and V hold the same.
        count = self.NUM_LAYERS * 2 * self.NUM_KV_HEADS * self.HEAD_SIZE
        self._factors = (2 * torch.arange(count) + 1).view(self.NUM_LAYERS, 2, 1, *per_token)

    def _numbers(self, values: np.ndarray) -> torch.Tensor:
        """Return ``[layers, 2, T, heads, head size]``: finite positive floats whose bits come from the values."""
        bits = torch.from_numpy(values >> 24).view(1, 1, -1, 1, 1) * self._factors
        return (bits & 0x3FFF_FFFF).to(torch.int32).view(torch.float32)

    def copy(self, src_block_ids: np.ndarray, dst_block_ids: np.ndarray) -> None:
        block_clone(self._pool, torch.from_numpy(src_block_ids), torch.from_numpy(dst_block_ids), block_dim=2)

    def write(self, block_ids: np.ndarray, offsets: np.ndarray, values: np.ndarray) -> None:
        slots = torch.from_numpy(block_ids.astype(np.int64) * self._pool.shape[3] + offsets)
        for layer, (key, value) in zip(self._pool, self._numbers(values), strict=True):
            write_kv(key, value, layer[0], layer[1], slots)

    def holds(self, block_ids: np.ndarray, values: np.ndarray) -> bool:
        stored = self._pool[:, :, torch.from_numpy(block_ids.copy())].flatten(2, 3)[:, :, : len(values)]
        return torch.equal(stored.view(torch.int32), self._numbers(values).view(torch.int32))

    def spoil(self, block_ids: np.ndarray) -> None:
        self._pool[:, :, torch.from_numpy(block_ids)] = -1.0
