"""Finds writes of the KV pool that nobody may make, and reads of what nobody may read (``--kv-canary``).

Sums of each token's bits are compared from check to check, in plain torch on any device. A block that is free is filled
with NaN: what is computed of it is NaN, too, and is stored so by every layer but the first.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.errors import IntegrityError
from rose_backend.kernels.captured_graphs import download, upload

_ODD = 6_364_136_223_846_793_005
"""By which sums of layers are multiplied, so that no two are exchanged for each other."""
_NULL_BLOCK = 0
_POISON = float("nan")
_FAULTS = (
    "was written although it is committed",
    "was written although its block is free",
    "holds NaN: it was computed from a free block, or from weights that are not finite",
)


class _Pending(NamedTuple):
    """A check whose outcome may not be there yet."""

    counts: (
        torch.Tensor
    )  # int64 [2 * len(_FAULTS)], in host memory: how many tokens, and the slot of the first
    is_over: torch.cuda.Event | None


class KVCanary:
    """Checks one KV pool. Nothing here waits for the device, but for a check that is still open when the next is due.

    Args:
        caches: ``[NB, BS, HKV, D]`` each, of float32, float16 or bfloat16: keys and values of every layer. Rows of D
            are contiguous, whole multiples of 8 bytes.
        logger: gets a line, with a count, for each check that finds something.
        raises: an error instead.
    """

    def __init__(self, caches: Sequence[torch.Tensor], logger: logging.Logger, *, raises: bool) -> None:
        self.num_faults = 0
        """Checks that have found something."""
        self._caches = caches
        self._logger = logger
        self._raises = raises
        self._device = caches[0].device
        self._block_size = caches[0].shape[1]
        self._sums = _token_sums(caches)[0]
        poisoned = [torch.full_like(each[:1, :1], _POISON) for each in caches]
        self._poisoned_sum = _token_sums(poisoned)[0]
        self._pending: _Pending | None = None

    @torch.inference_mode()
    def before_step(
        self, clear: NDArray[np.int64], num_settled: NDArray[np.int32] | None, poison: NDArray[np.int64]
    ) -> None:
        """Do what a ``CanaryPlan`` asks for.

        Args:
            clear: ``[N]`` blocks to fill with zeros.
            num_settled: ``[NB]`` for a check: leading tokens of each block that nobody may have written since the last
                one, or -1 for one that was poisoned.
            poison: ``[N]`` blocks to fill with NaN.

        Raises:
            IntegrityError: with ``raises``, a check before this step has found something; on a CPU also this step's.
        """
        self._look(waits=num_settled is not None)
        self._fill(clear, 0.0)
        if num_settled is not None:
            self._check(num_settled)
        self._fill(poison, _POISON)
        if self._device.type == "cpu":
            self._look()

    def _check(self, num_settled: NDArray[np.int32]) -> None:
        (settled,) = upload(self._device, num_settled)
        sums, has_nan = _token_sums(self._caches)
        has_nan[_NULL_BLOCK] = False  # what padding leaves there is read by nobody
        offsets = torch.arange(self._block_size, device=self._device)
        is_settled = offsets < settled[:, None]
        faults = torch.stack(
            (
                is_settled & (sums != self._sums),
                (settled[:, None] < 0) & (sums != self._poisoned_sum),
                # Also what a request has left that ended with it.
                (settled[:, None] >= 0) & has_nan,
            )
        ).flatten(1)
        outcome = torch.cat((faults.sum(1), faults.int().argmax(1)))
        counts, is_over = download(outcome), None
        if self._device.type == "cuda":
            is_over = torch.cuda.Event()
            is_over.record()
        self._pending = _Pending(counts, is_over)
        self._sums = sums

    def _look(self, *, waits: bool = False) -> None:
        """Report what the last check has found, if it is over, or wait for it."""
        if self._pending is None:
            return
        counts, is_over = self._pending
        if is_over is not None and not is_over.query():
            if not waits:
                return
            is_over.synchronize()
        self._pending = None
        num_tokens, slots = counts.view(2, -1).tolist()
        found = [
            f"token {slot % self._block_size} of block {slot // self._block_size} {text} ({number} such tokens)"
            for number, slot, text in zip(num_tokens, slots, _FAULTS, strict=True)
            if number
        ]
        if not found:
            return
        self.num_faults += 1
        if self._raises:
            raise IntegrityError(f"KV canary: {'; '.join(found)}")
        self._logger.error("KV canary: %s; fault %d since start-up", "; ".join(found), self.num_faults)

    def _fill(self, blocks: NDArray[np.int64], value: float) -> None:
        if not len(blocks):
            return
        (index,) = upload(self._device, blocks)
        for cache in self._caches:
            cache.index_fill_(0, index, value)


def _token_sums(caches: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 and bool ``[NB, BS]``: a sum of the bits of each token, and whether one of its numbers is NaN."""
    sums = torch.zeros(caches[0].shape[:2], dtype=torch.int64, device=caches[0].device)
    has_nan = torch.zeros_like(sums, dtype=torch.bool)
    for cache in caches:
        # As numbers of the sum's own type, and below half precision to float32: others torch converts in a copy first,
        # for which a KV pool leaves no room.
        sums.mul_(_ODD).add_(cache.view(torch.int64).sum(dim=(2, 3)))
        has_nan |= cache.sum(dim=(2, 3), dtype=torch.float32).isnan()
    return sums, has_nan
