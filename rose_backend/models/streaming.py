"""From safetensors files to tensors: several threads read, and on a GPU copies overlap with reading.

A thread reads a piece into one of its two staging buffers, page-locked where the tensor is on a GPU, and converts it on
the device. On a CPU a piece of the right type is read in place. No file is mapped: memory grows by the buffers only.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from rose_backend.errors import ModelError
from rose_backend.models.weight_files import StoredTensor

BUFFER_BYTES = 8 << 20
"""Of one staging buffer, at most."""
BUFFERS_PER_READER = 2
"""One is read into while the other is copied to the device."""
MAX_READERS = 16
"""One thread copies a few GB/s out of the page cache, and a disk is fast with several requests only."""
_MIN_READERS = 4
_SERIAL_ELEMENTS = 1 << 15
"""torch converts no more elements than these in the calling thread: the readers are parallel already."""
_POLL_S = 0.1
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}

ProgressCallback = Callable[[int, int], None]
"""Takes the bytes that were read, and all that will be; called in the thread that loads."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A stored tensor and where it goes."""

    stored: StoredTensor
    destination: torch.Tensor
    """Contiguous, with as many elements, of any type; all of one call are on one device."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a tensor that fits one buffer."""

    stored: StoredTensor
    offset: int
    num_bytes: int
    dtype: torch.dtype
    destination: torch.Tensor  # flat

    @property
    def is_direct(self) -> bool:
        """Whether the file has the very bytes of a destination in host memory."""
        return self.destination.device.type == "cpu" and self.destination.dtype is self.dtype


def stored_dtype(stored: StoredTensor) -> torch.dtype:
    """Return the type of a stored tensor.

    Raises:
        ModelError: it is none that can be read.
    """
    if stored.dtype not in _DTYPES:
        raise ModelError(
            f"model: tensor {stored.name!r} is stored as {stored.dtype}, allowed are {', '.join(_DTYPES)}"
        )
    return _DTYPES[stored.dtype]


def stream(
    copies: Sequence[Copy],
    *,
    on_progress: ProgressCallback | None = None,
    buffer_bytes: int = BUFFER_BYTES,
    num_readers: int | None = None,
) -> None:
    """Fill all destinations, and return when they are filled.

    Args:
        buffer_bytes: of one staging buffer, at least 8; there are ``BUFFERS_PER_READER`` for each reader.
        num_readers: threads; None takes ``usual_num_readers``.

    Raises:
        ModelError: a file cannot be read or was cut short; it names the file and the tensor.
    """
    pieces = deque(piece for copy in _in_file_order(copies) for piece in _cut(copy, buffer_bytes))
    total = sum(piece.num_bytes for piece in pieces)
    num_threads = min(usual_num_readers() if num_readers is None else num_readers, len(pieces))
    with ExitStack() as stack:
        files = {path: _open(path, stack) for path in sorted({copy.stored.path for copy in copies})}
        readers = [_Reader(pieces, files) for _ in range(num_threads)]
        pool = stack.enter_context(ThreadPoolExecutor(max(num_threads, 1), "rose-weights"))
        futures = [pool.submit(reader.run) for reader in readers]
        try:
            while wait(futures, timeout=_POLL_S).not_done:
                if on_progress is not None:
                    on_progress(sum(reader.num_bytes_read for reader in readers), total)
        finally:
            # Interrupted, perhaps: leaving the pool waits for the pieces in hand only.
            pieces.clear()
        for future in futures:
            future.result()
    if on_progress is not None:
        on_progress(total, total)


def usual_num_readers() -> int:
    """Return as many threads as there are cores for this process, within 4 and ``MAX_READERS``."""
    return min(max(len(os.sched_getaffinity(0)), _MIN_READERS), MAX_READERS)


def have_equal_values(left: StoredTensor, right: StoredTensor) -> bool:
    """Whether two stored tensors of one shape have the same values; both are read through small buffers."""
    dtypes, tensors = (stored_dtype(left), stored_dtype(right)), (left, right)
    step = BUFFER_BYTES // max(dtype.itemsize for dtype in dtypes)
    count = left.num_bytes // dtypes[0].itemsize
    with ExitStack() as stack:
        files = [_open(each.path, stack) for each in tensors]
        for begin in range(0, count, step):
            parts = [torch.empty(min(step, count - begin), dtype=dtype) for dtype in dtypes]
            for file, stored, part in zip(files, tensors, parts, strict=True):
                _read_into(part, file, stored, stored.offset + begin * part.itemsize)
            if not bool((parts[0] == parts[1]).all()):
                return False
    return True


class _Reader:
    """One thread's buffers and stream; made in the thread that loads, whose stream the copies come behind.

    Args:
        pieces: of all readers; to clear it stops them.
        files: descriptors.
    """

    def __init__(self, pieces: deque[_Piece], files: dict[Path, int]) -> None:
        self.num_bytes_read = 0
        self._pieces, self._files = pieces, files
        staged = [piece for piece in pieces if not piece.is_direct]
        size = max((piece.num_bytes for piece in staged), default=0)
        device = pieces[0].destination.device
        self._stream = None if device.type == "cpu" else torch.cuda.Stream(device)
        count = BUFFERS_PER_READER if self._stream else 1
        self._buffers = [
            _host_buffer(size, pinned=self._stream is not None) for _ in range(count if size else 0)
        ]
        self._scratch: torch.Tensor | None = None  # on the device, for pieces of another type
        if self._stream is not None:
            self._copied = [torch.cuda.Event() for _ in self._buffers]
            if any(piece.dtype is not piece.destination.dtype for piece in pieces):
                self._scratch = torch.empty(size, dtype=torch.uint8, device=device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._turn = 0

    @torch.inference_mode()  # a thread has its own mode, and destinations may have been made in this one
    def run(self) -> None:
        """Read pieces until none are left."""
        try:
            while True:
                try:
                    piece = self._pieces.popleft()
                except IndexError:
                    return
                self._read(piece)
                self.num_bytes_read += piece.num_bytes
        except BaseException:
            self._pieces.clear()
            raise
        finally:
            if self._stream is not None:
                self._stream.synchronize()

    def _read(self, piece: _Piece) -> None:
        file = self._files[piece.stored.path]
        if piece.is_direct:
            _read_into(piece.destination, file, piece.stored, piece.offset)
            return
        turn, self._turn = self._turn, (self._turn + 1) % len(self._buffers)
        staged = self._buffers[turn][: piece.num_bytes]
        if self._stream is None:
            _read_into(staged, file, piece.stored, piece.offset)
            parts = zip(
                piece.destination.split(_SERIAL_ELEMENTS),
                staged.view(piece.dtype).split(_SERIAL_ELEMENTS),
                strict=True,
            )
            for destination, part in parts:
                destination.copy_(part)
            return
        self._copied[turn].synchronize()
        _read_into(staged, file, piece.stored, piece.offset)
        with torch.cuda.stream(self._stream):
            if piece.dtype is not piece.destination.dtype:
                assert self._scratch is not None, "a piece of another type came late"
                # One is enough: what this stream does next comes behind the conversion.
                staged = self._scratch[: piece.num_bytes].copy_(staged, non_blocking=True)
            piece.destination.copy_(staged.view(piece.dtype), non_blocking=True)
            self._copied[turn].record(self._stream)


def _in_file_order(copies: Sequence[Copy]) -> list[Copy]:
    return sorted(copies, key=lambda copy: (copy.stored.path, copy.stored.offset))


def _cut(copy: Copy, buffer_bytes: int) -> list[_Piece]:
    stored, dtype = copy.stored, stored_dtype(copy.stored)
    flat = copy.destination.view(-1)
    assert flat.numel() * dtype.itemsize == stored.num_bytes, "a destination is of another size"
    step = buffer_bytes // dtype.itemsize
    offset, pieces = stored.offset, []
    for part in flat.split(step) if flat.numel() else ():
        num_bytes = part.numel() * dtype.itemsize
        pieces.append(_Piece(stored, offset, num_bytes, dtype, part))
        offset += num_bytes
    return pieces


def _host_buffer(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)


def _open(path: Path, stack: ExitStack) -> int:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise ModelError(f"model: cannot read {str(path)!r}: {error}") from error
    stack.callback(os.close, file)
    return file


def _read_into(tensor: torch.Tensor, file: int, stored: StoredTensor, offset: int) -> None:
    """Fill a flat tensor in host memory with a part of ``stored``."""
    left = memoryview(tensor.view(torch.uint8).numpy().data)
    try:
        while left:
            count = os.preadv(file, [left], offset)
            if count == 0:
                raise OSError("the file was cut short while it was read")
            left, offset = left[count:], offset + count
    except OSError as error:
        raise ModelError(
            f"model: cannot read tensor {stored.name!r} from {str(stored.path)!r}: {error}"
        ) from error
