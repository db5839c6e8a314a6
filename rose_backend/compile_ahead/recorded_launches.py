"""Record which kernels code would launch, by running it on tensors without memory.

Inside ``record_launches`` tensors on device ``meta`` pass for a GPU's, and a launch of a Triton kernel over them
records what it would compile. Nothing runs, and no GPU is needed. ``settle_cache_keys`` gives kernels the same key in
Triton's cache in every process.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITCallable, JITFunction

import rose_backend.kernels
from rose_backend.kernels.gpu_properties import GpuProperties, meta_stands_for

_PACKAGE = "rose_backend."
_WARP_SIZE = 32
_recording = threading.RLock()
"""One thread records at a time: each restores what it found in Triton."""


@dataclass(frozen=True, slots=True)
class KernelSource:
    """All that Triton's compiler is given for one kernel; can be pickled."""

    module: str
    name: str
    """Of the ``triton.jit`` function in ``module``."""
    signature: dict[str, Any]
    constexprs: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: GPUTarget

    def function(self) -> JITFunction[Any]:
        """Return what is compiled."""
        function: JITFunction[Any] = getattr(importlib.import_module(self.module), self.name)
        return function

    def length(self) -> int:
        """Return the characters of its source and of all that it calls: longer ones take longer to compile."""
        return _length(self.function(), set())


def _length(function: JITCallable, seen: set[int]) -> int:
    called = [each for each in called_functions(function) if id(each) not in seen]
    seen |= set(map(id, called))
    return len(function.src) + sum(_length(each, seen) for each in called)


def settle_cache_keys() -> None:
    """Give each of this package's kernels the key in Triton's cache that it has in every other process.

    Triton 3.6 (``DependenciesFinder._update_hash``) puts the constants of a called function into the caller's key only
    if the key of the called function was computed before. So keys depend on the order of first launches, and what one
    process has compiled another one does not find. Here each function's key is computed after those of all it calls.
    """
    settled: set[int] = set()
    for name in kernel_modules():
        for value in vars(importlib.import_module(name)).values():
            _settle(value, settled)


def kernel_modules() -> list[str]:
    """Return the names of all modules that may define ``triton.jit`` functions."""
    package = rose_backend.kernels
    return [info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]


def called_functions(function: Any) -> list[Any]:
    """Return the ``triton.jit`` functions that another one's source names, each once, Triton's own included."""
    named = (_resolve(node, function.__globals__) for node in ast.walk(function.parse()))
    return list({id(each): each for each in named if isinstance(each, JITCallable)}.values())


def _settle(value: Any, settled: set[int]) -> None:
    # By id: the hash of such a function is its key.
    if isinstance(value, JITCallable) and id(value) not in settled:
        settled.add(id(value))
        for called in called_functions(value):
            _settle(called, settled)
        _ = value.cache_key


def _resolve(node: ast.AST, variables: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return variables.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_resolve(node.value, variables), node.attr, None)
    return None


class _Compilation(NamedTuple):
    """What a launch would compile, and where the launches of ``kernel`` look for it."""

    source: KernelSource
    kernel: JITFunction[Any]
    key: str
    options: Any


@dataclass(slots=True)
class RecordedLaunches:
    """What launches of this package's kernels would compile, each once."""

    target: GPUTarget
    """The GPU as Triton names it."""
    compilations: list[_Compilation] = field(default_factory=list)

    @property
    def sources(self) -> list[KernelSource]:
        """What is compiled, in the order of first launches."""
        return [each.source for each in self.compilations]

    def load(self) -> None:
        """Load each kernel on the current device, from Triton's cache or compiled now.

        Launches like those that were recorded find it from then on: nothing is compiled when they come.
        """
        device = driver.active.get_current_device()
        for each, kernel, key, options in self.compilations:
            if key not in kernel.device_caches[device][0]:
                compiled = kernel._do_compile(
                    key, each.signature, device, each.constexprs, options, each.attributes, True
                )
                if compiled is not None:  # a hook may refuse
                    _ = compiled.run  # which loads it into the device


@contextlib.contextmanager
def record_launches(gpu: GpuProperties) -> Iterator[RecordedLaunches]:
    """Record launches of this thread instead of compiling and launching; other threads are not affected.

    Args:
        gpu: the GPU whose place device ``meta`` takes.
    """
    major, minor = gpu.capability
    recorded = RecordedLaunches(GPUTarget("cuda", major * 10 + minor, _WARP_SIZE))
    with _recording, meta_stands_for(gpu), _take_over(recorded), _MetaAsGpu():
        yield recorded


@contextlib.contextmanager
def _take_over(recorded: RecordedLaunches) -> Iterator[None]:
    """Take the place of Triton's driver and compiler for launches of this thread."""
    device = _RecordingDriver(recorded.target, driver._active)
    do_compile = JITFunction._do_compile
    kernels: list[JITFunction[Any]] = []

    def record(kernel: JITFunction[Any], *args: Any, **named: Any) -> Any:
        key, signature, where, constexprs, options, attributes = args[:6]
        if where is not device:
            return do_compile(kernel, *args, **named)
        kernels.append(kernel)
        module = kernel.__module__
        # vLLM compiles its own.
        if module.startswith(_PACKAGE):
            facts = signature, constexprs, attributes, dict(options.__dict__), recorded.target
            source = KernelSource(module, kernel.fn.__name__, *facts)
            recorded.compilations.append(_Compilation(source, kernel, key, options))
        # As Triton does with a compiled kernel: the next launch of the same finds it.
        kernel.device_caches[where][0][key] = _NotLaunched()
        return kernel.device_caches[where][0][key]

    JITFunction._do_compile = record
    driver.set_active(device)
    try:
        yield
    finally:
        driver.set_active(device.real)
        JITFunction._do_compile = do_compile
        for kernel in kernels:
            kernel.device_caches.pop(device, None)


class _NotLaunched:
    """Takes the place of a compiled kernel."""

    function = packed_metadata = None

    def launch_metadata(self, *args: Any) -> None:
        pass

    def run(self, *args: Any) -> None:
        pass


class _RecordingDriver:
    """Triton's driver and, for the recording thread, the device; other threads get the original driver."""

    def __init__(self, target: GPUTarget, real: Any) -> None:
        self.real = real
        self._target = target
        self._thread = threading.get_ident()

    @property
    def _is_recording(self) -> bool:
        return threading.get_ident() == self._thread

    def get_current_device(self) -> Any:
        return self if self._is_recording else self._other.get_current_device()

    def get_current_stream(self, device: Any) -> Any:
        return 0 if device is self else self._other.get_current_stream(device)

    def get_current_target(self) -> Any:
        return self._target if self._is_recording else self._other.get_current_target()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)

    @property
    def _other(self) -> Any:
        return driver.default if self.real is None else self.real


class _MetaAsGpu(TorchFunctionMode):
    """Makes tensors on ``meta`` pass for a GPU's; copies between them and CPU memory do nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _IS_CUDA:
            return args[0].device.type == "meta"
        if func is torch.Tensor.data_ptr and args[0].device.type == "meta":
            # Triton compiles another variant for addresses that are no multiples of 16, as those of later rows may be.
            return args[0].storage_offset() * args[0].element_size()
        if func is torch.Tensor.copy_ and args[0].device.type == "cpu" and args[1].device.type == "meta":
            return args[0]
        if _writes_in_place(func) and args[0].device.type == "meta":
            return args[0]
        if (shortcut := _SHORTCUTS.get(func)) is not None and "out" not in kwargs and _has_meta(args):
            result = shortcut(*args, **kwargs)
            if result is not None:
                return result
        # Memory cannot be page-locked where there is no GPU.
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


def _writes_in_place(func: Any) -> bool:
    """Whether a method changes the numbers of its tensor and nothing else."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.startswith("_"))


def _has_meta(args: Any) -> bool:
    flat = args[0] if isinstance(args[0], (list, tuple)) else args
    return any(isinstance(each, torch.Tensor) and each.device.type == "meta" for each in flat)


def _meta(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _elementwise(*operands: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    tensors = [each for each in operands if isinstance(each, torch.Tensor)]
    # torch's own imports a solver of equations, which takes as long as all launches.
    shape = np.broadcast_shapes(*(tuple(each.shape) for each in tensors))
    if dtype is None:
        dtype = torch.result_type(*operands)
    # The strides are those of the first operand that has the whole shape, as on a GPU.
    whole = next((each for each in tensors if each.shape == shape), None)
    if whole is None:
        return _meta(shape, dtype)
    made = _like(whole, dtype=dtype)
    return torch.empty_like(whole, dtype=dtype) if made is None else made


def _like(x: torch.Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor | None:
    """Return a tensor without memory like ``x``, if that is all that is asked for."""
    if options:
        return None
    dtype = x.dtype if dtype is None else dtype
    if x.is_contiguous() or (x.ndim == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1]):
        return _meta(x.shape, dtype)
    if x.ndim == 2 and x.t().is_contiguous():
        return _meta(x.t().shape, dtype).t()
    return None


def _new_empty(
    x: torch.Tensor, *size: Any, dtype: torch.dtype | None = None, **options: Any
) -> torch.Tensor | None:
    return None if options else torch.empty(*size, dtype=x.dtype if dtype is None else dtype, device="meta")


def _where(condition: torch.Tensor, this: Any, other: Any) -> torch.Tensor:
    return _elementwise(condition, this, other, dtype=torch.result_type(this, other))


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    sizes = list(tensors[0].shape)
    sizes[dim] = sum(each.shape[dim] for each in tensors)
    return _meta(sizes, functools.reduce(torch.promote_types, (each.dtype for each in tensors)))


def _matmul(
    left: torch.Tensor, right: torch.Tensor, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor | None:
    if left.ndim != 2 or right.ndim > 2:
        return None
    return _meta((left.shape[0], *right.shape[1:]), left.dtype if out_dtype is None else out_dtype)


def _sum(x: torch.Tensor, *dims: int, **options: Any) -> torch.Tensor | None:
    if options or len(dims) != 1 or not isinstance(dims[0], int):
        return None
    shape = list(x.shape)
    del shape[dims[0]]
    return _meta(shape, x.dtype if x.is_floating_point() else torch.int64)


def _index(x: torch.Tensor, index: Any) -> torch.Tensor | None:
    if not isinstance(index, torch.Tensor) or index.dtype not in (torch.int32, torch.int64):
        return None
    return _meta((*index.shape, *x.shape[1:]), x.dtype)


def _named(owner: Any, names: str, shortcut: Callable[..., Any]) -> dict[Any, Callable[..., Any]]:
    return {getattr(owner, name): shortcut for name in names.split()}


# torch computes the shapes of these in Python, which takes a hundred times as long as a launch that is only recorded,
# and seconds at the first time. All others are left to it.
_SHORTCUTS: dict[Any, Callable[..., torch.Tensor | None]] = {
    **_named(torch.Tensor, "add sub mul remainder", _elementwise),
    **_named(torch.Tensor, "eq ne lt le gt ge", functools.partial(_elementwise, dtype=torch.bool)),
    **_named(torch, "addmm _addmm_activation", lambda bias, left, right, **options: _matmul(left, right)),
    **_named(torch, "mm matmul", _matmul),
    torch.bmm: lambda left, right: _meta((*left.shape[:2], right.shape[2]), left.dtype),
    torch.Tensor.matmul: _matmul,
    torch.Tensor.sum: _sum,
    torch.Tensor.gather: lambda x, dim, index: _meta(index.shape, x.dtype),
    torch.Tensor.__getitem__: _index,
    torch.where: _where,
    torch.Tensor.where: lambda this, condition, other: _where(condition, this, other),
    torch.Tensor.clamp: lambda this, *bounds, **named_bounds: _elementwise(this, dtype=this.dtype),
    torch.cat: _cat,
    **_named(torch, "empty_like zeros_like ones_like", _like),
    torch.Tensor.new_empty: _new_empty,
}
