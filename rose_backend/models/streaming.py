"""A model's tensors, made and filled from a checkpoint's safetensors files.

``WeightReader`` makes them for ``load_weights``, ``stream`` fills them: several threads read, and on a GPU copies
overlap with reading. A thread reads a piece into one of its two staging buffers, page-locked where the tensor is on a
GPU, and converts it on the device. On a CPU a piece of the right type is read in place. No file is mapped: memory
grows by the buffers only.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from rose_backend.errors import ModelError
from rose_backend.kernels import Float8Experts, Float8Weight, Int4Weight, library_quantization
from rose_backend.kernels.arguments import (
    INT4_SCALE_DTYPES,
    SCALED_BLOCK,
    WEIGHT_DTYPE,
    QuantizedWeight,
    Weight,
)
from rose_backend.kernels.linear.int4_formats import Int4Format, StoredInt4, store_int4
from rose_backend.layers.decoder import max_packed_int4_rows
from rose_backend.layers.linear import Linear, Norm, int4_product
from rose_backend.models.config import ModelConfig
from rose_backend.models.quantization import (
    UNUSED_SUFFIXES,
    Float8Quantization,
    Int4Quantization,
    Quantization,
)
from rose_backend.models.weights import Checkpoint, ProgressCallback, StoredTensor, stored_dtype

HEAD = "lm_head.weight"
HEAD_ALIGNMENT = 64
"""Rows of the LM head are padded to a multiple of this: on a GPU, products of an unaligned width such as GPT-2's 50,257
are several times slower."""

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
_MAX_LISTED = 3
"""Names that a message has one by one."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Copy:
    """A stored tensor and where it goes."""

    stored: StoredTensor
    destination: torch.Tensor
    """Contiguous, with as many elements, of any type; all of one call are on one device."""


def load_weights(
    checkpoint: Checkpoint, config: ModelConfig, prefix: str, build: Callable[[WeightReader], _Result]
) -> _Result:
    """Return what ``build`` makes of the tensors that it takes from the reader it is given, filled.

    It is called twice: on device ``meta``, so that every tensor is checked before memory is allocated, and on the
    model's. It must not look at values.

    Args:
        prefix: of all names but ``HEAD``.

    Raises:
        ModelError: as ``Checkpoint.find`` and ``stream``, or by ``build``.
    """
    planned = build(WeightReader(checkpoint, config, prefix, torch.device("meta")))
    if config.device.type == "meta":
        return planned
    reader = WeightReader(checkpoint, config, prefix, config.device)
    weights = build(reader)
    stream(reader.copies, checkpoint.on_progress)
    for finish in reader.afterwards:
        finish()
    _check_finite(reader.quantized_weights)
    return weights


def _check_finite(weights: Mapping[str, QuantizedWeight | Float8Experts]) -> None:
    """Check that quantized weights have only numbers: kernels take a NaN in 8 bits for a number.

    Raises:
        ModelError: names the first matrices that have something else.
    """
    if not weights:
        return
    # One matrix at a time; read together, so that no check waits for its result.
    are_wrong = []
    for each in weights.values():
        is_wrong = ~each.scales.isfinite().all()
        if not isinstance(each, Int4Weight):
            is_wrong |= ((each.values.view(torch.uint8) & 0x7F) == 0x7F).any()
        are_wrong.append(is_wrong)
    wrong = [name for name, each in zip(weights, torch.stack(are_wrong).tolist(), strict=True) if each]
    if wrong:
        raise ModelError(f"model: {wrong[0]} has weights or scales that are not numbers")


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Makes a model's tensors, in its type, and notes what is read into them; see ``load_weights``.

    All methods raise what ``Checkpoint.find`` raises.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    prefix: str
    """Of all names but ``HEAD``."""
    device: torch.device
    """Where tensors are made."""
    copies: list[Copy] = field(default_factory=list)
    """What is to be read."""
    afterwards: list[Callable[[], object]] = field(default_factory=list)
    """What is to be done when all has been read."""
    quantized_weights: dict[str, QuantizedWeight | Float8Experts] = field(default_factory=dict)
    """By the names of their parts."""

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Return one tensor."""
        tensor = self._empty(*shape)
        self._fill(tensor, self.prefix + name)
        return tensor

    def norm(self, name: str) -> Norm:
        """Return a LayerNorm over the hidden size."""
        width = self.config.hidden_size
        return Norm(
            self.tensor(f"{name}.weight", width), self.tensor(f"{name}.bias", width), self.config.norm_eps
        )

    def linear(self, name: str, fan_in: int, fan_out: int) -> Linear:
        """Return a linear layer with a bias, whose matrix is stored as [fan_in, fan_out]."""
        return Linear(self.tensor(f"{name}.weight", fan_in, fan_out), self.tensor(f"{name}.bias", fan_out))

    def rms_norm(self, name: str) -> Norm:
        """Return an RMSNorm over the hidden size."""
        return Norm(self.tensor(f"{name}.weight", self.config.hidden_size), None, self.config.norm_eps)

    def joined(self, fan_in: int, fan_outs: Mapping[str, int], *, has_bias: bool = False) -> Linear:
        """Return linear layers of one input as one, outputs side by side; matrices are stored as [fan_out, fan_in].

        Args:
            fan_outs: by name, in order.
            has_bias: each has one.
        """
        sizes = list(fan_outs.values())
        quantization = self._quantization_of(list(fan_outs))
        weight: Weight
        input_quantization = None
        if quantization is None:
            matrix = self._empty(sum(sizes), fan_in)
            for name, part in zip(fan_outs, matrix.split(sizes), strict=True):
                self._fill(part, f"{self.prefix}{name}.weight")
            weight = matrix.t()
        elif isinstance(quantization, Int4Quantization):
            weight = self._int4(fan_in, fan_outs, quantization)
        else:
            weight = self._float8(fan_in, fan_outs, quantization)
            input_quantization = library_quantization(weight, self.config.dtype)
        bias = None
        if has_bias:
            bias = self._empty(sum(sizes))
            for name, part in zip(fan_outs, bias.split(sizes), strict=True):
                self._fill(part, f"{self.prefix}{name}.bias")
        elif isinstance(quantization, Int4Quantization):
            for name, size in fan_outs.items():
                self._expect_zeros(f"{self.prefix}{name}.bias", size)
        if isinstance(weight, Int4Weight):
            return Linear(weight, bias, many_rows=int4_product(weight, bias, max_packed_int4_rows()))
        return Linear(weight, bias, quantization=input_quantization)

    def _expect_zeros(self, name: str, size: int) -> None:
        """Read a bias that should not be there: GPTQ may store zeros for layers that have none."""
        if name not in self.checkpoint.tensors:
            return
        bias = self._empty(size)
        self._fill(bias, name)

        def check() -> None:
            if bool(bias.any()):
                raise ModelError(f"model: tensor {name!r} is a bias that config.json leaves out, and not 0")

        self.afterwards.append(check)

    def _quantization_of(self, names: Sequence[str]) -> Quantization | None:
        """Return how linear layers that are joined are quantized; None if they are not.

        Raises:
            ModelError: some are and some are not.
        """
        quantization, checkpoint = self.config.quantization, self.checkpoint
        if quantization is None:
            return None
        if checkpoint.lacks_weights:
            found = {not quantization.ignores(self.prefix + name) for name in names}
        else:
            found = {self._is_quantized(f"{self.prefix}{name}", quantization) for name in names}
        if len(found) > 1:
            listed = ", ".join(names) if len(names) <= _MAX_LISTED else f"{names[0]} to {names[-1]}"
            raise ModelError(f"model: {listed} are computed together: all must be quantized, or none")
        return quantization if True in found else None

    def _is_quantized(self, module: str, quantization: Quantization) -> bool:
        if isinstance(quantization, Int4Quantization):
            return f"{module}.{quantization.form.codes.name}" in self.checkpoint.tensors
        return self.checkpoint.dtype_of(f"{module}.weight") is WEIGHT_DTYPE

    def _int4(self, fan_in: int, fan_outs: Mapping[str, int], quantization: Int4Quantization) -> Int4Weight:
        form, group_size = quantization.form, quantization.group_size or fan_in
        if fan_in % group_size:
            raise ModelError(
                f"model: {', '.join(fan_outs)} have {fan_in} columns, no multiple of {group_size} that share a scale"
            )
        weight = self.quantized_weights[", ".join(fan_outs)] = Int4Weight.empty(
            sum(fan_outs.values()),
            fan_in,
            group_size,
            has_zeros=quantization.has_zeros,
            scales_dtype=self._scales_dtype(fan_outs, form),
            device=self.device,
        )
        first_row = 0
        for name, fan_out in fan_outs.items():
            self._fill_int4(weight, slice(first_row, first_row + fan_out), f"{self.prefix}{name}", form)
            first_row += fan_out
        return weight

    def _scales_dtype(self, names: Iterable[str], form: Int4Format) -> torch.dtype:
        """Return the type that the scales of some matrices are kept in: as they are stored, if all alike."""
        dtypes = {self.checkpoint.dtype_of(f"{self.prefix}{name}.{form.scales_name}") for name in names}
        return dtypes.pop() if len(dtypes) == 1 and dtypes <= INT4_SCALE_DTYPES else torch.float32

    def _fill_int4(self, weight: Int4Weight, rows: slice, module: str, form: Int4Format) -> None:
        """Note what is read into some rows of a weight, and is brought into their form afterwards."""
        words, num_groups = weight.words[rows], weight.scales.shape[0]
        num_rows, num_columns = words.shape[0], weight.num_columns
        shape = form.codes.shape(num_rows, num_columns)
        # Codes are read to where their words will be: what is in both forms at once is one matrix.
        codes = words.view(-1).view(torch.int32)[: shape[0] * shape[1]].view(shape)
        self._fill(codes, f"{module}.{form.codes.name}")
        sizes = (num_groups, num_rows) if form.zeros.is_transposed else (num_rows, num_groups)
        scales = torch.empty(sizes, dtype=weight.scales.dtype, device=self.device)
        self._fill(scales, f"{module}.{form.scales_name}")
        of_groups = form.zeros.shape(num_rows, num_groups)
        zeros = self._int32(f"{module}.{form.zeros.name}", *of_groups, is_needed=weight.zeros is not None)
        order = None
        if form.order_name is not None:
            order = self._int32(f"{module}.{form.order_name}", num_columns, is_needed=False)
        stored = StoredInt4(codes, scales, zeros, order)
        self.afterwards.append(lambda: store_int4(weight, rows, form, stored, module))

    def ids(self, name: str, size: int) -> torch.Tensor:
        """Return token ids, or differences of some, int64 ``[size]``."""
        tensor = torch.empty(size, dtype=torch.int64, device=self.device)
        self._fill(tensor, self.prefix + name)
        return tensor

    def _int32(self, name: str, *shape: int, is_needed: bool) -> torch.Tensor | None:
        """Return a tensor that is read if it is there, or needed."""
        if not is_needed and name not in self.checkpoint.tensors:
            return None
        tensor = torch.empty(shape, dtype=torch.int32, device=self.device)
        self._fill(tensor, name)
        return tensor

    def _float8(
        self, fan_in: int, fan_outs: Mapping[str, int], quantization: Float8Quantization
    ) -> Float8Weight:
        sizes = list(fan_outs.values())
        values = torch.empty((sum(sizes), fan_in), dtype=WEIGHT_DTYPE, device=self.device)
        blocks = [-(-size // SCALED_BLOCK) for size in sizes]
        if quantization.scales == "blocks":
            if any(size % SCALED_BLOCK for size in sizes[:-1]):
                raise ModelError(
                    f"model: {', '.join(fan_outs)} have {sizes} rows, and all but the last must have a multiple of "
                    f"{SCALED_BLOCK}, as blocks have"
                )
            shape = sum(blocks), -(-fan_in // SCALED_BLOCK)
        else:
            shape = sum(sizes), 1
        scales = torch.empty(shape, dtype=torch.float32, device=self.device)
        of_parts = scales.split(blocks if quantization.scales == "blocks" else sizes)
        for name, part, scales_of_part in zip(fan_outs, values.split(sizes), of_parts, strict=True):
            self._fill(part, f"{self.prefix}{name}.weight")
            scale = f"{self.prefix}{name}.{quantization.scale_name}"
            if quantization.scales == "tensor":
                self._fill_with_one(scales_of_part, scale)
            else:
                self._fill(scales_of_part, scale)
        weight = self.quantized_weights[", ".join(fan_outs)] = Float8Weight(values, scales)
        return weight

    def stacked(
        self, name: str, parts: Sequence[str], rows: int, columns: int, *, num_experts: int
    ) -> torch.Tensor | Float8Experts:
        """Return the matrices of all experts, [num_experts, len(parts) * rows, columns], or those in 8 bits.

        Args:
            name: of the mixture; expert 3's are stored as ``experts.3.part.weight`` below it, [rows, columns] each.
            parts: matrices of each expert, one below the other.
        """
        names = [[f"{name}.experts.{expert}.{part}" for part in parts] for expert in range(num_experts)]
        all_names = list(itertools.chain.from_iterable(names))
        quantization = self._quantization_of(all_names[:1] if self.checkpoint.lacks_weights else all_names)
        if quantization is not None:
            return self._float8_experts(f"{name}.experts", names, rows, columns, quantization)
        stack = self._empty(num_experts, len(parts), rows, columns)
        for matrix_name, matrix in zip(all_names, stack.flatten(0, 1), strict=True):
            self._fill(matrix, f"{self.prefix}{matrix_name}.weight")
        return stack.flatten(1, 2)

    def _float8_experts(
        self, title: str, names: Sequence[Sequence[str]], rows: int, columns: int, quantization: Quantization
    ) -> Float8Experts:
        if isinstance(quantization, Int4Quantization):
            raise ModelError(f"model: {title} in 4 bits are not supported")
        if quantization.scales != "blocks":
            raise ModelError(
                f"model: {title} in 8 bits with scales of {quantization.scales} are not supported, allowed are blocks"
            )
        shape = len(names), len(names[0])
        blocks = -(-rows // SCALED_BLOCK), -(-columns // SCALED_BLOCK)
        values = torch.empty((*shape, rows, columns), dtype=WEIGHT_DTYPE, device=self.device)
        scales = torch.empty((*shape, *blocks), dtype=torch.float32, device=self.device)
        for name, matrix, scales_of_matrix in zip(
            itertools.chain.from_iterable(names), values.flatten(0, 1), scales.flatten(0, 1), strict=True
        ):
            self._fill(matrix, f"{self.prefix}{name}.weight")
            self._fill(scales_of_matrix, f"{self.prefix}{name}.{quantization.scale_name}")
        weight = self.quantized_weights[f"{names[0][0]} to {names[-1][-1]}"] = Float8Experts(values, scales)
        return weight

    def check_all_read(self, unused_suffixes: tuple[str, ...]) -> None:
        """Check that no tensor of the checkpoint was left out: it would be one that the model should compute with.

        Args:
            unused_suffixes: ends of names that no computation needs.
        """
        taken = {copy.stored.name for copy in self.copies}
        unused_scales = UNUSED_SUFFIXES if self.config.quantization is not None else ()
        if self.config.tie_word_embeddings:
            taken.add(HEAD)
        left = [
            name
            for name in self.checkpoint.tensors
            if name not in taken and not name.endswith((*unused_suffixes, *unused_scales))
        ]
        if left:
            others = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelError(
                f"model: tensor {min(left)!r}{others} would not be used; config.json does not fit"
            )

    def embedding_and_head(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token embedding ``name``, [V, E], and the LM head with rows of padding after it, [V', E].

        Where the two are tied, the embedding is a part of the head.

        Raises:
            ModelError: also where both are stored, are tied, and differ.
        """
        checkpoint, config = self.checkpoint, self.config
        shape = (config.vocab_size, config.hidden_size)
        is_tied = config.tie_word_embeddings
        is_checking = self.device.type == "meta" and config.device.type != "meta"
        if is_tied and is_checking and HEAD in checkpoint.tensors:
            stored = checkpoint.find(self.prefix + name, shape)
            if not have_equal_values(checkpoint.find(HEAD, shape), stored):
                raise ModelError(f"config.json: tie_word_embeddings is on, but {HEAD} differs from {name}")
        embedding = self.padded(self.prefix + name, *shape)
        head = embedding if is_tied else self.padded(HEAD, *shape)
        return embedding[: config.vocab_size], head

    def padded(self, name: str, rows: int, width: int) -> torch.Tensor:
        """Return a matrix with rows of padding after its own, see ``HEAD_ALIGNMENT``; ``name`` has its prefix."""
        tensor = self._empty(rows + -rows % HEAD_ALIGNMENT, width)
        tensor[rows:].zero_()
        self._fill(tensor[:rows], name)
        return tensor

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.config.dtype, device=self.device)

    def _fill(self, tensor: torch.Tensor, name: str) -> None:
        stored = self.checkpoint.find(name, tuple(tensor.shape))
        if (
            self.config.quantization is not None
            and tensor.dtype is not WEIGHT_DTYPE
            and not self.checkpoint.lacks_weights
            and stored_dtype(stored) is WEIGHT_DTYPE
        ):
            raise ModelError(
                f"model: tensor {name!r} is stored as {stored.dtype}, which only linear layers of attention "
                "and MLPs may be"
            )
        kind = {torch.int32: "I32", torch.int64: "I64"}.get(tensor.dtype)
        if kind is not None and not self.checkpoint.lacks_weights and stored.dtype != kind:
            raise ModelError(f"model: tensor {name!r} is stored as {stored.dtype}, expected {kind}")
        self.copies.append(Copy(stored, tensor))

    def _fill_with_one(self, tensor: torch.Tensor, name: str) -> None:
        """Fill a tensor with a number that is stored as a scalar, or as a vector of one."""
        number = tensor.new_empty(1)
        shape = () if self.checkpoint.lacks_weights else self.checkpoint.shape_of(name)
        self.copies.append(Copy(self.checkpoint.find(name, shape if shape == () else (1,)), number))
        self.afterwards.append(lambda: tensor.copy_(number))


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


def stream(copies: Sequence[Copy], on_progress: ProgressCallback | None = None) -> None:
    """Fill all destinations, and return when they are filled.

    Raises:
        ModelError: a file cannot be read or was cut short; it names the file and the tensor.
    """
    in_file_order = sorted(copies, key=lambda copy: (copy.stored.path, copy.stored.offset))
    pieces = deque(piece for copy in in_file_order for piece in _cut(copy))
    total = sum(piece.num_bytes for piece in pieces)
    num_threads = min(usual_num_readers(), len(pieces))
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
    """One thread's buffers and stream; made in the thread that loads, whose stream the copies wait for.

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
                # One is enough: what this stream does next waits for the conversion.
                staged = self._scratch[: piece.num_bytes].copy_(staged, non_blocking=True)
            piece.destination.copy_(staged.view(piece.dtype), non_blocking=True)
            self._copied[turn].record(self._stream)


def _cut(copy: Copy) -> list[_Piece]:
    stored, dtype = copy.stored, stored_dtype(copy.stored)
    flat = copy.destination.view(-1)
    assert flat.numel() * dtype.itemsize == stored.num_bytes, "a destination is of another size"
    step = BUFFER_BYTES // dtype.itemsize
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
