"""Finding and reading Hugging Face checkpoints: config.json and safetensors files.

Every way in which a checkpoint can be missing or damaged ends in a ``ModelError`` of one sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rose_backend.errors import ModelError
from rose_backend.models.weight_files import StoredTensor, find_tensors, read_json

if TYPE_CHECKING:
    # Only looking for a checkpoint or reading its tokenizer must not wait for torch.
    import torch

    from rose_backend.layers.linear import Linear, Norm
    from rose_backend.models.config import ModelConfig
    from rose_backend.models.streaming import Copy, ProgressCallback

CONFIG_FILE = "config.json"
HEAD = "lm_head.weight"
HEAD_ALIGNMENT = 64
"""Rows of the LM head are padded to a multiple of this: on a GPU, products of an unaligned width such as GPT-2's 50,257
are several times slower."""

_Result = TypeVar("_Result")

_HUB_FILES = ["*.json", "*.safetensors", "merges.txt", "vocab.txt", "*.model", "*.jinja"]
_HUB_PATTERNS: dict[str, Any] = {
    "allow_patterns": _HUB_FILES,
    # Mistral's and Llama's own copies of the weights, beside those that are read.
    "ignore_patterns": ["consolidated*", "original/*"],
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_TIMEOUT_S = 5.0


def resolve_model_path(model: str | Path) -> Path:
    """Return the local directory of a checkpoint, downloading it when ``model`` is a Hugging Face id not in the cache.

    Raises:
        ModelError: neither a directory with a config.json nor an id that is cached or can be reached.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / CONFIG_FILE).is_file():
            raise ModelError(f"model: directory {str(model)!r} has no {CONFIG_FILE}")
        return path
    if path.exists():
        raise ModelError(f"model: {str(model)!r} is a file, a directory or a Hugging Face id is needed")
    name = str(model)
    if not _HUB_ID.fullmatch(name) or len(name) > 96 or ".." in name or "--" in name:
        raise ModelError(f"model: {name!r} is not a directory, nor can it be a Hugging Face id")
    return _resolve_hub_id(name)


def _resolve_hub_id(name: str) -> Path:
    from huggingface_hub import snapshot_download

    # The cache first: a cached model must load without a network.
    try:
        cached = Path(snapshot_download(name, local_files_only=True, **_HUB_PATTERNS))
        if (cached / CONFIG_FILE).is_file() and any(cached.glob("*.safetensors")):
            return cached
    except (OSError, ValueError):
        pass
    try:
        return Path(snapshot_download(name, etag_timeout=_HUB_TIMEOUT_S, **_HUB_PATTERNS))
    except Exception as error:  # the hub client raises its own, its HTTP library's and the system's errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model: {name!r} is neither a directory nor a Hugging Face model that is cached or can be reached"
            f" ({reason})"
        ) from error


class Checkpoint:
    """A checkpoint's config.json, and where its tensors lie in one or several safetensors files.

    Args:
        path: local directory or Hugging Face id.
        on_progress: told of the bytes of weights that were read.
        without_weights: every tensor that is looked for is there, of the type that config.json names: for tensors
            without memory.

    Raises:
        ModelError: there is no such checkpoint, or its config.json is damaged. Looking for tensors also raises it where
            there is no safetensors file, or one that is damaged.
    """

    def __init__(
        self,
        path: str | Path,
        on_progress: ProgressCallback | None = None,
        *,
        without_weights: bool = False,
    ) -> None:
        self.directory = resolve_model_path(path)
        self.config = read_json(self.directory / CONFIG_FILE)
        self.on_progress = on_progress
        self._without_weights = without_weights

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the type in which a tensor is stored."""
        from rose_backend.models.streaming import stored_dtype

        if self._without_weights:
            return self._named_dtype()
        return stored_dtype(self._find(name))

    def find(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Return where a tensor is stored.

        Raises:
            ModelError: the tensor is missing, has another shape, or is of a type that cannot be read.
        """
        if self._without_weights:
            return StoredTensor(name, self.directory, 0, 0, "", shape)
        stored = self._find(name)
        if stored.shape != shape:
            raise ModelError(f"model: tensor {name!r} has shape {list(stored.shape)}, expected {list(shape)}")
        self.dtype_of(name)
        return stored

    @cached_property
    def _tensors(self) -> dict[str, StoredTensor]:
        return {} if self._without_weights else find_tensors(self.directory)

    def _named_dtype(self) -> torch.dtype:
        import torch

        name = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        dtype = getattr(torch, str(name).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ModelError(f"config.json: dtype must be the name of a type, got {name!r}")
        return dtype

    def _find(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise ModelError(f"model: tensor {name!r} is missing from {str(self.directory)!r}")
        return self._tensors[name]


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Makes a model's tensors, in its type and on its device, and reads all of them at the end of ``load``.

    All methods raise what ``Checkpoint.find`` raises.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    prefix: str
    """Of all names but ``HEAD``."""
    device: torch.device | None = None
    """Where tensors are made; None only outside ``load``."""
    copies: list[Copy] = field(default_factory=list)
    """What is to be read."""

    def load(self, build: Callable[[WeightReader], _Result]) -> _Result:
        """Return what ``build`` makes of the tensors that it takes from the reader it is given, filled.

        It is called twice: on device ``meta``, so that every tensor is checked before memory is allocated, and on the
        model's. It must not look at values.
        """
        import torch

        from rose_backend.models.streaming import stream

        planned = build(replace(self, device=torch.device("meta"), copies=[]))
        if self.config.device.type == "meta":
            return planned
        reader = replace(self, device=self.config.device, copies=[])
        weights = build(reader)
        stream(reader.copies, on_progress=self.checkpoint.on_progress)
        return weights

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Return one tensor."""
        tensor = self._empty(*shape)
        self._fill(tensor, self.prefix + name)
        return tensor

    def norm(self, name: str) -> Norm:
        """Return a LayerNorm over the hidden size."""
        from rose_backend.layers.linear import Norm

        width = self.config.hidden_size
        return Norm(
            self.tensor(f"{name}.weight", width), self.tensor(f"{name}.bias", width), self.config.norm_eps
        )

    def linear(self, name: str, fan_in: int, fan_out: int) -> Linear:
        """Return a linear layer with a bias, whose matrix is stored as [fan_in, fan_out]."""
        from rose_backend.layers.linear import Linear

        return Linear(self.tensor(f"{name}.weight", fan_in, fan_out), self.tensor(f"{name}.bias", fan_out))

    def rms_norm(self, name: str) -> Norm:
        """Return an RMSNorm over the hidden size."""
        from rose_backend.layers.linear import Norm

        return Norm(self.tensor(f"{name}.weight", self.config.hidden_size), None, self.config.norm_eps)

    def joined(self, fan_in: int, fan_outs: Mapping[str, int], *, has_bias: bool = False) -> Linear:
        """Return linear layers of one input as one, outputs side by side; matrices are stored as [fan_out, fan_in].

        Args:
            fan_outs: by name, in order.
            has_bias: each has one.
        """
        from rose_backend.layers.linear import Linear

        sizes = list(fan_outs.values())
        matrix = self._empty(sum(sizes), fan_in)
        for name, part in zip(fan_outs, matrix.split(sizes), strict=True):
            self._fill(part, f"{self.prefix}{name}.weight")
        bias = None
        if has_bias:
            bias = self._empty(sum(sizes))
            for name, part in zip(fan_outs, bias.split(sizes), strict=True):
                self._fill(part, f"{self.prefix}{name}.bias")
        return Linear(matrix.t(), bias)

    def stacked(
        self, name: str, parts: Sequence[str], rows: int, columns: int, *, num_experts: int
    ) -> torch.Tensor:
        """Return the matrices of all experts, [num_experts, len(parts) * rows, columns].

        Args:
            name: of the mixture; expert 3's are stored as ``experts.3.part.weight`` below it, [rows, columns] each.
            parts: matrices of each expert, one below the other.
        """
        stack = self._empty(num_experts, len(parts), rows, columns)
        for expert, matrices in enumerate(stack):
            for part, matrix in zip(parts, matrices, strict=True):
                self._fill(matrix, f"{self.prefix}{name}.experts.{expert}.{part}.weight")
        return stack.flatten(1, 2)

    def check_all_read(self, *, unused_suffixes: Collection[str] = ()) -> None:
        """Check that no tensor of the checkpoint was left out: it would be one that the model should compute with.

        Args:
            unused_suffixes: ends of names that no computation needs.
        """
        taken = {copy.stored.name for copy in self.copies} | (
            {HEAD} if self.config.tie_word_embeddings else set()
        )
        left = [
            name
            for name in self.checkpoint
            if name not in taken and not name.endswith(tuple(unused_suffixes))
        ]
        if left:
            others = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelError(
                f"model: tensor {min(left)!r}{others} would not be used; config.json does not fit"
            )

    def embedding_and_head(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token embedding ``name``, [V, E], and the LM head with rows of padding behind it, [V', E].

        Where the two are tied, the embedding is a part of the head.

        Raises:
            ModelError: also where both are stored, are tied, and differ.
        """
        from rose_backend.models.streaming import have_equal_values

        checkpoint, config = self.checkpoint, self.config
        shape = (config.vocab_size, config.hidden_size)
        is_tied = config.tie_word_embeddings
        if is_tied and self._is_checking and HEAD in checkpoint:
            stored = checkpoint.find(self.prefix + name, shape)
            if not have_equal_values(checkpoint.find(HEAD, shape), stored):
                raise ModelError(f"config.json: tie_word_embeddings is on, but {HEAD} differs from {name}")
        embedding = self._padded(self.prefix + name, *shape)
        head = embedding if is_tied else self._padded(HEAD, *shape)
        return embedding[: config.vocab_size], head

    @property
    def _is_checking(self) -> bool:
        """Whether this is the look at all tensors in front of reading them."""
        assert self.device is not None
        return self.device.type == "meta" and self.config.device.type != "meta"

    def _padded(self, name: str, rows: int, width: int) -> torch.Tensor:
        tensor = self._empty(rows + -rows % HEAD_ALIGNMENT, width)
        tensor[rows:].zero_()
        self._fill(tensor[:rows], name)
        return tensor

    def _empty(self, *shape: int) -> torch.Tensor:
        import torch

        assert self.device is not None, "tensors are made inside load only"
        return torch.empty(shape, dtype=self.config.dtype, device=self.device)

    def _fill(self, tensor: torch.Tensor, name: str) -> None:
        from rose_backend.models.streaming import Copy

        self.copies.append(Copy(self.checkpoint.find(name, tuple(tensor.shape)), tensor))
