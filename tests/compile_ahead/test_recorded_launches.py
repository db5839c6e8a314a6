"""Launches on tensors without memory are written down, and what the pool compiles of them is what launches look for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITCallable, JITFunction

from rose_backend import kernels
from rose_backend.compile_ahead import recorded_launches
from rose_backend.compile_ahead.pool import CompilationPool, watch_compilations
from rose_backend.compile_ahead.recorded_launches import called_functions, record_launches, settle_cache_keys
from rose_backend.kernels.gpu_properties import GpuProperties, is_recording, meta_stands_for

H100 = GpuProperties((9, 0), 132)


class CompilingDriver:
    """Of a GPU that is not there, each of another one: enough to compile for it."""

    _devices = itertools.count()

    def __init__(self) -> None:
        self._device = next(self._devices)

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def compiling_launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let launches compile as they do on a GPU, and then launch nothing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", CompilingDriver())
    run = JITFunction.run
    monkeypatch.setattr(
        JITFunction, "run", lambda self, *args, warmup, **kwargs: run(self, *args, warmup=True, **kwargs)
    )
    with meta_stands_for(H100), recorded_launches._MetaAsGpu():
        yield


def launch_some() -> None:
    """Launch kernels with descriptors of tensors, tuples, unaligned pointers and launch options."""
    hidden, weight = (torch.empty(size, dtype=torch.float16, device="meta") for size in ((3, 64), (192, 64)))
    norm = torch.empty(64, dtype=torch.float16, device="meta")
    packed, packed_norm = kernels.pack_linear(weight), kernels.pack_norm(norm, 1e-6)
    kernels.small_batch_linear(kernels.norm_input_of(hidden, packed_norm), packed)
    kernels.rms_norm(hidden[:, 1:33], norm[:32], 1e-6)
    cache = torch.empty((2, 2, 50, 4, 1, 64), dtype=torch.float16, device="meta")
    ids = torch.empty(3, dtype=torch.int32, device="meta")
    kernels.block_clone(cache, ids, ids, block_dim=2)
    table = torch.empty((9, 64), dtype=torch.float16, device="meta")
    kernels.embed_tokens(ids.long(), ids.long(), table)
    # With a limit of registers, and numbers among tensors.
    values = torch.empty((4, 2, 128, 64), dtype=torch.float8_e4m3fn, device="meta")
    scales = torch.empty((4, 2, 1, 1), device="meta")
    kernels.small_batch_linear(hidden, kernels.pack_linear(kernels.Float8Weight(values[0, 0], scales[0, 0])))
    words = torch.empty((192, 64), dtype=torch.int16, device="meta")
    codes = kernels.Int4Weight(words, torch.empty((1, 192), dtype=torch.float16, device="meta"), None, 64)
    kernels.small_batch_linear(hidden, kernels.pack_linear(codes))
    experts = kernels.Experts(
        kernels.Float8Experts(values, scales),
        kernels.Float8Experts(values.view(4, 1, 64, 256)[..., :128].contiguous(), scales[:, :1].contiguous()),
        2,
        True,
    )
    kernels.expert_mlp(hidden, hidden[:, :4], experts)


NAMES = [
    *("_add_experts_kernel", "_block_clone_kernel", "_choose_experts_kernel", "_embed_tokens_kernel"),
    *("_expert_product_kernel", "_expert_product_kernel", "_norm_kernel"),
    *("small_batch_linear_kernel", "small_batch_linear_kernel", "small_batch_linear_kernel"),
]


def test_launches_find_what_the_pool_has_compiled(compiling_launches: None) -> None:
    with record_launches(H100) as recorded:
        launch_some()
    with watch_compilations() as seen:
        pool = CompilationPool(num_processes=2)
        pool.submit(recorded.sources)
        finished = list(pool.finished())
        pool.close()
    assert pool.failure is None and not seen.names
    assert [(kernel.error, kernel.was_cached) for kernel in finished] == [(None, False)] * len(NAMES)
    with watch_compilations() as seen:
        launch_some()
    assert sorted(seen.names) == sorted(kernel.source.name for kernel in finished) == NAMES
    assert seen.compiled == []
    # As a proof that the cache tells kernels apart.
    with watch_compilations() as seen:
        ids = torch.empty(3, dtype=torch.int64, device="meta")
        kernels.embed_tokens(ids, ids, torch.empty((9, 72), dtype=torch.float16, device="meta"))
    assert len(seen.names) == 1 and seen.compiled == seen.names


def test_what_is_loaded_is_not_compiled_again(
    compiling_launches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_code: list[str] = []
    monkeypatch.setattr(CompiledKernel, "run", property(lambda self: with_code.append(self.name)))
    with record_launches(H100) as recorded:
        launch_some()
    with watch_compilations() as seen:
        recorded.load()
    # Nothing of it is on disk: it is compiled now.
    assert sorted(seen.compiled) == sorted(with_code) == NAMES
    with watch_compilations() as seen:
        launch_some()
        recorded.load()
    assert not seen.names and len(with_code) == len(NAMES)


def test_each_kernel_is_recorded_once_and_nothing_is_left_behind() -> None:
    before, do_compile = driver._active, JITFunction._do_compile
    with record_launches(H100) as recorded:
        launch_some()
        num_sources = len(recorded.sources)
        launch_some()
    assert len(recorded.sources) == num_sources == len(NAMES)
    assert driver._active is before and JITFunction._do_compile is do_compile and not is_recording()
    for source in recorded.sources:
        assert source.target.arch == 90 and source.length() > 1000
        assert not any(isinstance(device, type(driver)) for device in source.function().device_caches)
    with record_launches(GpuProperties((8, 0), 108)) as older:
        launch_some()
    assert {source.target.arch for source in older.sources} == {80}
    assert not any(source.options["launch_pdl"] for source in older.sources)
    assert any(source.options["launch_pdl"] for source in recorded.sources)


def test_other_threads_launch_as_ever(compiling_launches: None) -> None:
    seen: list[Any] = []

    def look() -> None:
        seen.append(driver.active.get_current_device())
        seen.append(driver.active.get_current_target().arch)
        seen.append(is_recording())

    with record_launches(GpuProperties((8, 0), 108)):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert driver.active.get_current_target().arch == 80
    assert seen == [driver.active.get_current_device(), 90, False]


def operations() -> list[Callable[..., torch.Tensor]]:
    return [
        lambda wide, row, flags: wide + row,
        lambda wide, row, flags: wide.t() * 2.5,
        lambda wide, row, flags: 1 - wide,
        lambda wide, row, flags: wide.float() * row,
        lambda wide, row, flags: row[:, None] * wide.t(),
        lambda wide, row, flags: row.int() - 1,
        lambda wide, row, flags: row < wide,
        lambda wide, row, flags: (row >= 0) & (row != 1),
        lambda wide, row, flags: torch.where(flags, row, -1),
        lambda wide, row, flags: row.where(flags, 0.5),
        lambda wide, row, flags: row.int().where(flags, -1),
        lambda wide, row, flags: row.clamp(min=0),
        lambda wide, row, flags: torch.cat((row[:, None], wide.t()), dim=1),
        lambda wide, row, flags: torch.cat([row.int(), flags]),
        lambda wide, row, flags: torch.addmm(row, wide, wide.t() @ wide),
        lambda wide, row, flags: wide @ row,
        lambda wide, row, flags: wide @ wide.t(),
        lambda wide, row, flags: torch.mm(wide.double(), wide.t().double()),
        lambda wide, row, flags: torch.bmm(
            wide.unflatten(1, (2, -1)).transpose(0, 1), wide.t().unflatten(0, (2, -1))
        ),
        lambda wide, row, flags: wide.new_empty((3, 2)),
        lambda wide, row, flags: wide.new_empty(3, dtype=torch.int32),
        lambda wide, row, flags: torch.empty_like(wide.t()),
        lambda wide, row, flags: torch.zeros_like(wide[:, 1:], dtype=torch.int32),
        lambda wide, row, flags: torch.ones_like(row),
        lambda wide, row, flags: wide.sum(1),
        lambda wide, row, flags: (wide > 0).sum(-1),
        lambda wide, row, flags: wide.sum(),
        lambda wide, row, flags: wide.gather(1, flags.long()[None, :2]),
        lambda wide, row, flags: row[flags.long()],
        lambda wide, row, flags: wide[flags.int()[:, None]],
        lambda wide, row, flags: wide[1:, 2],
        lambda wide, row, flags: row.int().scatter_add_(0, flags.long(), row.int()),
        lambda wide, row, flags: row.index_copy_(0, flags.long()[:1], 2 * row[:1]),
    ]


@pytest.mark.parametrize("index", range(len(operations())))
def test_shapes_are_those_that_torch_computes(index: int) -> None:
    operation = operations()[index]
    wide, row = torch.ones(4, 6), torch.ones(6)
    expected = operation(wide, row, row > 0)
    with meta_stands_for(H100), recorded_launches._MetaAsGpu():
        got = operation(wide.to("meta"), row.to("meta"), (row > 0).to("meta"))
        assert got.is_cuda and not wide.is_cuda
    assert (got.shape, got.dtype, got.stride()) == (expected.shape, expected.dtype, expected.stride())


def test_what_shapes_do_not_show() -> None:
    with meta_stands_for(H100), recorded_launches._MetaAsGpu():
        # A product may be wider than its factors: of torch's own, too, but on a GPU only.
        half = torch.empty(4, 6, dtype=torch.float16, device="meta")
        assert torch.mm(half, half.t(), out_dtype=torch.float32).dtype == torch.float32
        # CPU memory stays as it is.
        host = torch.zeros(3, pin_memory=True)
        host.copy_(torch.empty(3, device="meta"))
        assert host.tolist() == [0.0, 0.0, 0.0]


def test_recordings_of_two_threads_leave_triton_as_it_was() -> None:
    compile_one, active = JITFunction._do_compile, driver._active
    first_is_in, second_is_there = threading.Event(), threading.Event()
    seen: list[type] = []

    def first() -> None:
        with record_launches(H100):
            first_is_in.set()
            second_is_there.wait()

    def second() -> None:
        first_is_in.wait()
        second_is_there.set()
        with record_launches(H100):
            # The other one has ended, and left nothing behind.
            seen.append(type(driver._active))
            seen.append(type(driver._active.real))

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [recorded_launches._RecordingDriver, type(active)]
    assert JITFunction._do_compile is compile_one and driver._active is active


def test_keys_of_called_functions_are_computed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, order = JITCallable.cache_key.fget, []

    def compute_and_note(function: JITCallable) -> str:
        order.append(function)
        return compute(function)

    monkeypatch.setattr(JITCallable, "cache_key", property(compute_and_note))
    settle_cache_keys()
    first = {id(function): place for place, function in reversed([*enumerate(order)])}
    calls = [(id(caller), id(called)) for caller in order for called in called_functions(caller)]
    assert len(calls) > 100
    assert all(first[called] < first[caller] for caller, called in calls)
