"""Work in parts, captured for some sizes: in which order it is captured and replayed, and what is not captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rose_backend.kernels.captured_graphs import CapturedGraphs, size_for


class Recorder:
    """Stands in for a device: notes what is computed, captured and replayed."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.capturing: RecordedGraph | None = None
        self.used: set[tuple[Any, Any]] = set()  # pools and streams of captures
        self.graphs = CapturedGraphs[int](self.first, self.second, capture_error_mode="thread_local")

    def first(self, size: int, _: None) -> str:
        self.note(f"first {size}")
        return f"result {size}"

    def second(self, size: int, result: str) -> None:
        assert result == f"result {size}"
        self.note(f"second {size}")

    def note(self, work: str) -> None:
        self.log.append(("captured" if self.capturing else "computed", work))
        if self.capturing:
            self.capturing.work.append(work)


class RecordedGraph:
    def __init__(self, recorder: Recorder) -> None:
        self.work: list[str] = []
        self._recorder = recorder

    def replay(self) -> None:
        self._recorder.log.append(("replayed", *self.work))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()

    @contextlib.contextmanager
    def capture(graph: Any, *, pool: str, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        recorder.used.add((pool, stream))
        recorder.capturing = graph
        yield
        recorder.capturing = None

    pools = iter(["the only pool"])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: recorder.log.append("synchronized"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: RecordedGraph(recorder))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return recorder


def test_each_size_is_computed_before_it_is_captured_in_the_given_order(recorder: Recorder) -> None:
    recorder.graphs.capture([4, 2])
    expected: list[object] = []
    for size in (4, 2):
        expected += [("computed", f"first {size}"), ("computed", f"second {size}"), "synchronized"]
        expected += [("captured", f"first {size}"), ("captured", f"second {size}")]
    assert recorder.log == [*expected, "synchronized"]
    assert recorder.used == {("the only pool", None)}


def test_memory_and_stream_may_be_given(recorder: Recorder) -> None:
    stream: Any = object()
    recorder.graphs.capture([4, 2], "another's pool", stream)
    assert recorder.used == {("another's pool", stream)}


def test_captured_sizes_are_replayed_and_others_computed_each_up_to_the_part_asked_for(
    recorder: Recorder,
) -> None:
    recorder.graphs.capture([4])
    recorder.log.clear()
    for size in (4, 3):
        recorder.graphs.run(size)
        recorder.graphs.run_parts(size, (0, 1), lambda: recorder.log.append("between"))
    first, second = ("replayed", "first 4"), ("replayed", "second 4")
    assert recorder.log[:4] == [first, first, "between", second]
    first, second = ("computed", "first 3"), ("computed", "second 3")
    assert recorder.log[4:] == [first, first, "between", second]


def test_the_least_size_that_is_enough() -> None:
    sizes = (1, 4, 9)
    assert [size_for(sizes, number) for number in (0, 1, 2, 4, 5, 9, 10)] == [1, 1, 4, 4, 9, 9, None]
    assert size_for((), 1) is None


def test_graphs_that_were_given_back_are_computed(recorder: Recorder) -> None:
    recorder.graphs.capture([4])
    recorder.graphs.release()
    recorder.log.clear()
    recorder.graphs.run(4)
    assert recorder.log == [("computed", "first 4")]
