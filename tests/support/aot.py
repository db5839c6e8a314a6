"""Compile Triton kernels for GPUs that are not there, and read what they cost from the assembler's report.

with record_launches(gpu_module, "_some_kernel") as launches:
    gpu_module.some_function(...)  # tensors on the CPU; nothing runs
resources = compile_launch(launches[0], capability=90)
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

CAPABILITIES = (80, 90, 100)
"""Compute capabilities that every kernel must compile for: A100, H100 and H200, B200."""

SHARED_BYTES = 99 << 10
"""Shared memory that a program may use on every GPU of these generations: 8.6, 8.9 and 12.0 have the least."""

COMPILED: list[tuple[Launch, int, Resources]] = []
"""What ``compile_launch`` has compiled in this process: launch, capability, resources."""

COMPILING_TESTS: dict[str, str] = {}
"""Names of kernels, and of the test that compiles each for all capabilities that can run it."""

_LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "enable_fp_fusion")
_POINTER_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@dataclass(frozen=True)
class Launch:
    """One recorded kernel launch."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Resources:
    """What one program of a compiled kernel takes."""

    registers: int
    """Per thread."""
    shared_bytes: int
    spill_bytes: int
    """Spill stores and loads of one thread."""
    stack_bytes: int
    ptx: str

    def summary(self) -> str:
        """Return one line for people."""
        return (
            f"{self.registers} registers, {self.shared_bytes} bytes shared, {self.stack_bytes} bytes stack, "
            f"{self.spill_bytes} bytes spilled"
        )


@contextlib.contextmanager
def record_launches(module: ModuleType, *kernel_names: str) -> Iterator[list[Launch]]:
    """Replace kernels of ``module`` so that launches are only written down, in order."""
    launches: list[Launch] = []
    kernels = {name: getattr(module, name) for name in kernel_names}
    for name, kernel in kernels.items():
        setattr(module, name, _Recorder(kernel, launches))
    try:
        yield launches
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)


class _Recorder:
    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            names = [param.name for param in self.kernel.params]
            arguments = dict(zip(names, args, strict=False))
            options = {name: kwargs.pop(name) for name in _LAUNCH_OPTIONS if name in kwargs}
            arguments.update(kwargs)
            sizes = grid(arguments) if callable(grid) else grid
            self.launches.append(Launch(self.kernel, tuple(sizes), arguments, options))

        return launch


def overlapped(launch: Launch, capability: int) -> Launch:
    """Return the launch as on a device of ``capability``, where those of 9.0 and later may start before it is due."""
    can_overlap = capability >= 90
    return replace(
        launch,
        arguments=launch.arguments | {"PDL": can_overlap},
        options=launch.options | {"launch_pdl": can_overlap},
    )


def compile_launch(launch: Launch, capability: int) -> Resources:
    """Compile as the launch would on a device of ``capability`` (90 is 9.0), specialised on the same arguments."""
    signature: dict[str, Any] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def specialise(value: Any, param: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, tuple) and not param.is_constexpr:
            kinds = [specialise(item, param, (*path, index)) for index, item in enumerate(value)]
            return type(value)(*kinds) if hasattr(value, "_fields") else tuple(kinds)
        kind = "constexpr" if param.is_constexpr or value is None else _argument_type(value, param)
        if kind == "constexpr":
            constexprs[path] = value
        elif _is_aligned(value, param):
            attributes[path] = [["tt.divisibility", 16]]
        return kind

    for index, param in enumerate(launch.kernel.params):
        value = launch.arguments.get(param.name, param.default)
        signature[param.name] = specialise(value, param, (index,))
    source = ASTSource(launch.kernel, signature, constexprs, attributes)
    log = io.StringIO()
    nvidia, cache = triton.knobs.nvidia, triton.knobs.cache
    # A fresh cache: the assembler's report is printed only while compiling.
    with tempfile.TemporaryDirectory() as folder, nvidia.scope(), cache.scope():
        nvidia.dump_ptxas_log, cache.dir = True, folder
        with contextlib.redirect_stdout(log):
            compiled = triton.compile(
                source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options)
            )
    resources = _read_report(log.getvalue(), compiled)
    COMPILED.append((_without_memory(launch), capability, resources))
    return resources


def _without_memory(launch: Launch) -> Launch:
    """Return the launch with empty tensors: what is noted of a run's compilations would be gigabytes."""
    constants = {param.name for param in launch.kernel.params if param.is_constexpr}
    arguments = {
        name: value.new_empty(0) if isinstance(value, torch.Tensor) else value
        for name, value in launch.arguments.items()
        if isinstance(value, torch.Tensor) or name in constants
    }
    return replace(launch, arguments=arguments)


def compiles(
    *kernel_names: str, capabilities: tuple[int, ...] = CAPABILITIES
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for each of ``capabilities``, its argument ``capability``, as the one that compiles these kernels.

    It fails unless all of them were compiled for that capability, and if anything that it compiles spills registers.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        COMPILING_TESTS.update(dict.fromkeys(kernel_names, test.__name__))

        @pytest.mark.parametrize("capability", capabilities)
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            start = len(COMPILED)
            test(**arguments)
            names = set()
            for launch, capability, resources in COMPILED[start:]:
                names.add(launch.kernel.__name__)
                assert capability == arguments["capability"]
                assert resources.spill_bytes == 0, f"{launch.kernel.__name__}: {resources.summary()}"
            assert names >= set(kernel_names), f"not compiled: {set(kernel_names) - names}"

        return run

    return decorate


def _argument_type(value: Any, param: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTER_TYPES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        if value == 1 and not param.do_not_specialize:
            return "constexpr"
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_POINTER_TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
    raise TypeError(f"{param.name}: no kernel argument type for {type(value).__name__}")


def _is_aligned(value: Any, param: Any) -> bool:
    if param.do_not_specialize or param.do_not_specialize_on_alignment:
        return False
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


def _read_report(log: str, compiled: Any) -> Resources:
    registers = re.search(r"Used (\d+) registers", log)
    # Of the kernel and of each function that it calls.
    stacks = re.findall(r"(\d+) bytes stack frame", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    assert registers and stacks and len(spills) == 2 * len(stacks), (
        f"the assembler's report cannot be read: {log!r}"
    )
    return Resources(
        registers=int(registers.group(1)),
        shared_bytes=compiled.metadata.shared,
        spill_bytes=sum(map(int, spills)),
        stack_bytes=sum(map(int, stacks)),
        ptx=compiled.asm["ptx"],
    )
