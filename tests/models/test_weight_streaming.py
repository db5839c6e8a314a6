"""Weights are read in parallel, through little memory, into exactly the values that the files have."""

from __future__ import annotations

import json
import logging
import threading
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rose_backend.config import Switches
from rose_backend.engine.progress import LoadingProgress
from rose_backend.errors import ModelError
from rose_backend.models import streaming, weights
from rose_backend.models.base import load_model
from rose_backend.models.streaming import Copy, have_equal_values, stream
from rose_backend.models.weights import ProgressCallback, find_tensors
from tests.support.llama_checkpoints import write_checkpoint

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((), (0,), (3, 0), (1,), (7,), (13, 11), (3, 5, 7), (61, 33))


def write(directory: Path, tensors: dict[str, torch.Tensor], *, num_files: int = 1) -> Path:
    """Write a checkpoint without config.json; with several files tensors go round."""
    directory.mkdir(exist_ok=True)
    if num_files == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {name: f"{index % num_files}.safetensors" for index, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    write_index(directory, weight_map)
    return directory


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def read_all(
    directory: Path,
    dtype: torch.dtype | None = None,
    *,
    num_readers: int | None = None,
    buffer_bytes: int = streaming.BUFFER_BYTES,
    on_progress: ProgressCallback | None = None,
) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint, in their own type or another one."""
    copies = {
        name: Copy(stored, torch.empty(stored.shape, dtype=dtype or streaming.stored_dtype(stored)))
        for name, stored in find_tensors(directory).items()
    }
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(streaming, "BUFFER_BYTES", buffer_bytes)
        if num_readers is not None:
            patches.setattr(streaming, "usual_num_readers", lambda: num_readers)
        stream(list(copies.values()), on_progress)
    return {name: copy.destination for name, copy in copies.items()}


def random_tensors() -> dict[str, torch.Tensor]:
    return {f"{dtype}{shape}": torch.randn(shape).to(dtype) for dtype in FLOATS for shape in SHAPES}


# Every two values of these meet.
GRID = [
    (buffer_bytes, num_readers, 1 + 2 * ((row + column) % 2))
    for row, buffer_bytes in enumerate((8, 24, 1000, streaming.BUFFER_BYTES))
    for column, num_readers in enumerate((1, 5, None))
]


@pytest.mark.parametrize(("buffer_bytes", "num_readers", "num_files"), GRID)
def test_values_are_those_of_the_library(
    tmp_path: Path, num_files: int, num_readers: int | None, buffer_bytes: int
) -> None:
    tensors = random_tensors()
    directory = write(tmp_path, tensors, num_files=num_files)
    for dtype in (None, torch.float32, torch.bfloat16):
        read = read_all(directory, dtype, num_readers=num_readers, buffer_bytes=buffer_bytes)
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(read[name], tensor.to(dtype or tensor.dtype)), name


def test_every_type(tmp_path: Path) -> None:
    values = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0])
    tensors = {name: values.to(getattr(torch, dtype)) for name, dtype in weights._DTYPES.items()}
    read = read_all(write(tmp_path, tensors), torch.float32, buffer_bytes=16)
    assert {entry.dtype for entry in find_tensors(tmp_path).values()} == set(weights._DTYPES)
    assert all(torch.equal(read[name], values) for name in tensors)


def test_a_type_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"spin": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(ModelError, match=r"tensor 'spin' is stored as C64, allowed are BOOL, U8"):
        read_all(tmp_path, torch.float32)


@pytest.mark.parametrize("tensors_of", [1, 4])
def test_slices_of_larger_tensors_are_filled_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors_of: int
) -> None:
    parts = {str(index): torch.randn(5 + index, 9) for index in range(tensors_of)}
    stored = find_tensors(write(tmp_path, parts))
    whole = torch.full((2 + sum(len(part) for part in parts.values()), 9), 7.0)
    row, copies = 1, []
    for name, part in parts.items():
        copies.append(Copy(stored[name], whole[row : row + len(part)]))
        row += len(part)
    monkeypatch.setattr(streaming, "BUFFER_BYTES", 64)
    stream(copies)
    assert torch.equal(whole[1:-1], torch.cat(list(parts.values())))
    assert bool((whole[0] == 7).all()) and bool((whole[-1] == 7).all())


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Return the bytes of each staging buffer that is made from now on, and whether it is page-locked."""
    made: list[tuple[int, bool]] = []
    original = streaming._host_buffer

    def noted(num_bytes: int, *, pinned: bool) -> torch.Tensor:
        made.append((num_bytes, pinned))
        return original(num_bytes, pinned=pinned)

    monkeypatch.setattr(streaming, "_host_buffer", noted)
    return made


def test_buffers_do_not_grow_with_the_files(tmp_path: Path, buffers: list[tuple[int, bool]]) -> None:
    write(tmp_path, {str(index): torch.randn(100, 100) for index in range(8)})
    read_all(tmp_path, torch.bfloat16, num_readers=3, buffer_bytes=4096)
    assert buffers == [(4096, False)] * 3
    buffers.clear()
    read_all(tmp_path, num_readers=3, buffer_bytes=4096)
    assert buffers == [], "a tensor of the right type is read in place"
    assert streaming.MAX_READERS * streaming.BUFFERS_PER_READER * streaming.BUFFER_BYTES <= 256 << 20


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = random_tensors()
    write(tmp_path, tensors)
    original = streaming.os.preadv
    monkeypatch.setattr(
        streaming.os, "preadv", lambda file, views, offset: original(file, [views[0][:5]], offset)
    )
    read = read_all(tmp_path, torch.float32)
    assert all(torch.equal(read[name], tensor.float()) for name, tensor in tensors.items())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["in place", "converted"])
def test_a_failing_reader_names_file_and_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None
) -> None:
    write(tmp_path, {f"tensor {index}": torch.randn(100) for index in range(20)})
    bad = find_tensors(tmp_path)["tensor 13"]
    original = streaming.os.preadv

    def preadv(file: int, views: list[memoryview], offset: int) -> int:
        if bad.offset <= offset < bad.offset + bad.num_bytes:
            raise OSError(5, "Input/output error")
        return original(file, views, offset)

    monkeypatch.setattr(streaming.os, "preadv", preadv)
    with pytest.raises(ModelError, match=r"cannot read tensor 'tensor 13' from .*model.safetensors.*error"):
        read_all(tmp_path, dtype, num_readers=4, buffer_bytes=64)
    assert not [each for each in threading.enumerate() if each.name.startswith("rose-weights")]


def test_a_file_that_is_cut_short_after_its_check(tmp_path: Path) -> None:
    write(tmp_path, {"first": torch.randn(10), "second": torch.randn(10)})
    found = find_tensors(tmp_path)
    last = max(found.values(), key=lambda stored: stored.offset)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(last.offset + 4)
    with pytest.raises(ModelError, match=f"tensor '{last.name}' .* was cut short"):
        stream([Copy(stored, torch.empty(10)) for stored in found.values()])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"cannot read '.*model.safetensors'"):
        stream([Copy(last, torch.empty(10))])


def test_an_interrupt_stops_the_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {str(index): torch.randn(100) for index in range(50)})
    read, interrupted = [], threading.Event()
    original = streaming.os.preadv

    def preadv(file: int, views: list[memoryview], offset: int) -> int:
        read.append(offset)
        assert interrupted.wait(60), "nobody interrupted it"
        return original(file, views, offset)

    def interrupt(num_bytes: int, total: int) -> None:
        # Readers go on only once what ends them is on its way up.
        threading.Timer(0.5, interrupted.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(streaming.os, "preadv", preadv)
    with pytest.raises(KeyboardInterrupt):
        read_all(tmp_path, num_readers=2, on_progress=interrupt)
    assert len(read) <= 2
    assert not [each for each in threading.enumerate() if each.name.startswith("rose-weights")]


def test_an_index_that_does_not_fit_its_files(tmp_path: Path) -> None:
    tensors = {name: torch.randn(4) for name in "abcd"}
    write(tmp_path, tensors, num_files=2)
    files = {"a": "0.safetensors", "b": "1.safetensors", "c": "0.safetensors", "d": "1.safetensors"}
    assert find_tensors(tmp_path).keys() == tensors.keys()
    write_index(tmp_path, {**files, "c": "1.safetensors"})
    with pytest.raises(ModelError, match=r"has tensor 'c' in '1.safetensors', which is without it"):
        find_tensors(tmp_path)
    write_index(tmp_path, {**files, "e": "1.safetensors"})
    with pytest.raises(ModelError, match=r"has tensor 'e' in '1.safetensors', which is without it"):
        find_tensors(tmp_path)
    write_index(tmp_path, files)
    save_file({name: tensors[name] for name in "abd"}, tmp_path / "1.safetensors")
    with pytest.raises(ModelError, match=r"tensor 'a' is both in '0.safetensors' and in '1.safetensors'"):
        find_tensors(tmp_path)


def test_equal_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "BUFFER_BYTES", 64)
    values = torch.randn(100).half()
    other = values.clone()
    other[-1] += 1
    found = find_tensors(write(tmp_path, {"left": values, "right": values.float(), "other": other}))
    assert have_equal_values(found["left"], found["right"])
    assert not have_equal_values(found["left"], found["other"])


def test_nothing_is_allocated_or_read_for_a_checkpoint_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", "llama")
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]  # what a Llama asks for last
    save_file(tensors, path)
    made: list[Any] = []
    original = torch.empty

    def empty(*args: Any, **options: Any) -> torch.Tensor:
        made.append(torch.device(options.get("device") or "cpu").type)
        return original(*args, **options)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(streaming, "stream", lambda *args, **options: pytest.fail("it reads"))
    with pytest.raises(ModelError, match=r"'model.norm.weight' is missing"):
        load_model(checkpoint)
    assert set(made) == {"meta"}


def test_layers_are_packed_once_their_weights_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", "llama")
    plain = load_model(checkpoint).weights.layers
    monkeypatch.setattr("rose_backend.models.base.packs_layers", lambda switches, device: True)
    packed = load_model(checkpoint).weights.layers
    assert len(packed) == len(plain)
    for ours, theirs in zip(packed, plain, strict=True):
        assert ours.mlp.down.packed is not None and ours.qkv.packed is not None
        assert torch.equal(ours.mlp.down.weight, theirs.mlp.down.weight)
        assert torch.equal(ours.qkv.weight, theirs.qkv.weight)
        assert torch.equal(ours.attn_norm.weight, theirs.attn_norm.weight)
        assert ours.attn_norm.packed is not None and ours.attn_norm.packed.weight is ours.attn_norm.weight


@pytest.mark.gpu
@pytest.mark.parametrize("buffer_bytes", [1 << 16, streaming.BUFFER_BYTES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_several_hundred_megabytes_on_a_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    buffers: list[tuple[int, bool]],
    dtype: torch.dtype,
    buffer_bytes: int,
) -> None:
    tensors = {str(index): torch.randn(4099, 4096).bfloat16() for index in range(10)}
    tensors |= {f"norm {index}": torch.randn(4097).bfloat16() for index in range(10)}
    found = find_tensors(write(tmp_path, tensors, num_files=3))
    whole = torch.full((4099 * 10 + 2, 4096), 7.0, dtype=dtype, device="cuda")
    matrices = whole[1:-1].split(4099)
    # Work that is still under way on the memory that the copies write.
    whole.copy_((whole.float() @ torch.eye(4096, device="cuda")).to(dtype))
    places = {str(index): matrices[index] for index in range(10)}
    places |= {f"norm {index}": torch.empty(4097, dtype=dtype, device="cuda") for index in range(10)}
    monkeypatch.setattr(streaming, "BUFFER_BYTES", buffer_bytes)
    stream([Copy(found[name], place) for name, place in places.items()])
    for name, place in places.items():
        assert torch.equal(place.cpu(), tensors[name].to(dtype)), name
    assert bool((whole[0] == 7).all()) and bool((whole[-1] == 7).all())
    assert all(pinned for _, pinned in buffers), "a copy from pageable memory waits for the device"
    assert max(size for size, _ in buffers) <= buffer_bytes
    assert len(buffers) <= streaming.MAX_READERS * streaming.BUFFERS_PER_READER


@pytest.mark.gpu
def test_a_whole_model_on_a_gpu_is_the_one_of_the_cpu(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", "llama")
    switches = Switches(fused_mlp=False)  # or layers are packed, whose matrices have another layout
    models = [
        load_model(checkpoint, dtype="float16", device=device, switches=switches)
        for device in ("cpu", "cuda")
    ]
    left, right = (model.weights for model in models)
    assert torch.equal(left.padded_lm_head, right.padded_lm_head.cpu())
    for ours, theirs in zip(left.layers, right.layers, strict=True):
        for name in ("qkv.weight", "attn_out.weight", "mlp.gate_up.weight", "mlp.down.weight"):
            assert torch.equal(attrgetter(name)(ours), attrgetter(name)(theirs).cpu()), name


def test_progress_counts_all_bytes_that_are_read(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", "llama")
    told: list[tuple[int, int]] = []
    load_model(checkpoint, on_progress=lambda done, total: told.append((done, total)))
    size = sum(stored.num_bytes for stored in find_tensors(checkpoint).values())
    assert told[-1] == (size, size)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_progress_is_logged_now_and_then_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    caplog.set_level(logging.INFO, "rose_backend.engine.progress")
    with LoadingProgress() as progress:
        for moment, done in ((109.0, 1), (112.0, 3), (113.0, 4), (116.0, 8), (116.0, 8)):
            now = moment
            progress.update(done * 10**9, 8 * 10**9)
    assert caplog.messages == [
        "loading weights: 3.00 GB of 8.00 GB, 250.00 MB/s",
        "loading weights: 8.00 GB of 8.00 GB, 500.00 MB/s",
    ]


def test_a_tiny_models_weights_are_more_than_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rose_backend.engine.progress")
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    with LoadingProgress() as progress:
        now = 0.5
        progress.update(2_900_000, 2_900_000)
    assert caplog.messages == ["loading weights: 2.90 MB of 2.90 MB, 5.80 MB/s"]


def test_progress_is_a_bar_at_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with LoadingProgress() as progress:
        progress.update(4 * 10**9, 8 * 10**9)
    output = capsys.readouterr()
    assert "loading weights" in output.err and "4.0/8.0 GB" in output.err and not output.out
