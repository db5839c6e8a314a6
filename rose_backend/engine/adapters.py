"""Which LoRA adapter is in which slot of the model, and which requests use it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from rose_backend.engine.process_settings import CpuThreads
from rose_backend.engine.request import LoRARequest, Request
from rose_backend.errors import ModelError, RequestError, kind_and_text
from rose_backend.models.adapters import AdapterSlots

logger = logging.getLogger(__name__)
_ONE_THREAD = CpuThreads(1, "beside steps")
_WAIT_S = 10.0
"""Longest wait of a load for slots of adapters that leave."""
_NAMESPACE = b"lora\0"
"""No salt has a NUL, so no prompt without an adapter has a namespace that begins so."""


@dataclass(slots=True)
class _Loaded:
    """An adapter from the moment in which it gets its slot until the slot is free again."""

    lora: LoRARequest
    slot: int
    namespace: bytes
    """Of cached prefixes that were computed with it. Unlike its id, no other adapter gets it, nor does it when it is
    loaded again: its files may have changed."""
    is_ready: bool = False
    is_leaving: bool = False
    """It is unloaded, or will be when what was submitted before has been added."""
    is_unloaded: bool = False
    num_users: int = 1
    """Requests, and who loads or holds it."""


class AdapterTable:
    """The adapters of an engine. Any thread may load and unload them, while the step loop takes and returns requests.

    An adapter keeps its slot until it is unloaded and the last request that uses it has ended. So weights are only
    written to a slot that no request uses.
    """

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots
        self._loading, self._lock = threading.Lock(), threading.Condition()
        # Guarded by the second lock; those that were unloaded and are still in use, too.
        self._held: list[_Loaded] = []
        self._numbers = itertools.count()

    def load(self, lora: LoRARequest) -> None:
        """Load an adapter, if it is not loaded already, and return when requests may use it.

        Adapters that are being unloaded are waited for: all slots may be theirs, or the id.

        Raises:
            RequestError: no slot is free, another adapter has this id, or ``AdapterSlots.load`` refuses its files.
        """
        with self._lock:
            self._lock.wait_for(lambda: not self._has_to_wait(lora), _WAIT_S)
        with self.held(lora, None):
            pass

    def has(self, lora: LoRARequest) -> bool:
        """Return whether a request that is submitted now may use this very adapter."""
        with self._lock:
            entry = self._find(lora.lora_int_id)
            return entry is not None and entry.lora == lora and entry.is_ready and not entry.is_leaving

    @contextlib.contextmanager
    def held(self, lora: LoRARequest, kept: Collection[int] | None) -> Iterator[None]:
        """Load an adapter, if it is not loaded already, and let it keep its slot until the end of the block.

        Args:
            kept: if all slots are in use, the adapter that was loaded first among those that nothing uses may be
                unloaded, unless its id is here; None: none may.

        Raises:
            RequestError: as for ``load``.
        """
        entry = self._take(lora, kept)
        try:
            yield
        finally:
            with self._lock:
                self._leave(entry)

    def _take(self, lora: LoRARequest, kept: Collection[int] | None) -> _Loaded:
        """Return the loaded adapter, with the caller as a user."""
        # One after the other: who asks for one that is being loaded waits for it.
        with self._loading:
            with self._lock:
                if (known := self._find(lora.lora_int_id)) is not None:
                    if known.lora != lora:
                        raise RequestError(
                            f"lora_int_id: got {lora.lora_int_id} for {lora.lora_name!r} from {lora.lora_path!r}, "
                            f"allowed is {known.lora.lora_name!r} from {known.lora.lora_path!r}, which is loaded",
                            parameter="lora_int_id",
                        )
                    known.num_users += 1
                    return known
                is_full = len(self._held) == self._slots.num_slots
            if is_full and kept is not None:
                # Check the files first: an adapter that does not fit must not evict another one.
                with _refusing():
                    self._slots.check(Path(lora.lora_path))
            with self._lock:
                entry = self._take_slot(lora, kept)
            self._fill(entry)
        logger.info("loaded LoRA adapter %r into slot %d", lora.lora_name, entry.slot)
        return entry

    def _fill(self, entry: _Loaded) -> None:
        try:
            with _refusing(), _ONE_THREAD.in_force():
                self._slots.load(entry.slot, Path(entry.lora.lora_path))
            entry.is_ready = True
        except RequestError:
            with self._lock:
                entry.is_leaving = entry.is_unloaded = True
                self._leave(entry)
            raise

    def announce_unload(self, lora_id: int) -> None:
        """Let loads from now on wait until the adapter has been unloaded."""
        with self._lock:
            if (entry := self._find(lora_id)) is not None:
                entry.is_leaving = True

    def unload(self, lora_id: int) -> None:
        """Let no further request use an adapter; its slot is free when those that do have ended."""
        with self._lock:
            if (entry := self._find(lora_id)) is not None:
                entry.is_leaving = entry.is_unloaded = True
                self._free_unused(entry)
                self._lock.notify_all()

    def admit(self, request: Request) -> None:
        """Note that a request with an adapter uses it, and give the request what the adapter has.

        Raises:
            RequestError: the adapter is not loaded, or was unloaded meanwhile.
        """
        with self._lock:
            entry = self._find(request.lora_id)
            if entry is None or not entry.is_ready:
                raise RequestError(
                    "model: got a LoRA adapter that is not loaded, allowed are those that are",
                    parameter="model",
                )
            entry.num_users += 1
            request.lora_slot = entry.slot
            request.namespace = entry.namespace + request.namespace

    def release(self, request: Request) -> None:
        """Note that an admitted request has ended."""
        with self._lock:
            self._leave(next(each for each in self._held if each.slot == request.lora_slot))

    # With the lock held.

    def _find(self, lora_id: int) -> _Loaded | None:
        entries = (each for each in self._held if each.lora.lora_int_id == lora_id and not each.is_unloaded)
        return next(entries, None)

    def _leave(self, entry: _Loaded) -> None:
        entry.num_users -= 1
        self._free_unused(entry)

    def _free_unused(self, entry: _Loaded) -> None:
        if entry.is_unloaded and not entry.num_users:
            self._held.remove(entry)
            self._lock.notify_all()

    def _has_to_wait(self, lora: LoRARequest) -> bool:
        if (known := self._find(lora.lora_int_id)) is not None:
            return known.is_leaving
        return len(self._held) == self._slots.num_slots and any(each.is_leaving for each in self._held)

    def _take_slot(self, lora: LoRARequest, kept: Collection[int] | None) -> _Loaded:
        num_slots = self._slots.num_slots
        if len(self._held) == num_slots and kept is not None:
            idle = (each for each in self._held if not each.num_users and each.lora.lora_int_id not in kept)
            if (oldest := next(idle, None)) is not None:
                self._held.remove(oldest)
        taken = {each.slot for each in self._held}
        if len(taken) == num_slots:
            num_leaving = sum(each.is_unloaded for each in self._held)
            leaving = f"; {num_leaving} of them until requests under way have ended" if num_leaving else ""
            raise RequestError(
                f"lora_name: got {lora.lora_name[:200]!r}, allowed are {num_slots} adapters at once (max_loras), which "
                f"are loaded{leaving}",
                parameter="lora_name",
            )
        slot = min(set(range(num_slots)) - taken)
        namespace = _NAMESPACE + next(self._numbers).to_bytes(8, "little")
        entry = _Loaded(lora, slot, namespace)
        self._held.append(entry)
        return entry


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turn any error in the files of an adapter into a refusal of its path."""
    try:
        yield
    except Exception as error:
        reason = str(error).removeprefix("model: ") if isinstance(error, ModelError) else kind_and_text(error)
        raise RequestError(f"lora_path: {reason}", parameter="lora_path") from error
