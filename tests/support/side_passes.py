"""A stand-in for the device's other stream: passes over prompts that are over when a test says so."""

from __future__ import annotations

from collections.abc import Callable

from rose_backend import LLM
from rose_backend.engine.core import EngineCore
from rose_backend.engine.model_runner import Hidden


class SideSteps:
    """Takes the place of ``SideStream`` on a CPU.

    Attributes:
        num_begun: passes so far.
        num_looks: how often somebody looked whether the one in flight is over.

    Args:
        is_over: whether a pass is over, looked at for the ``num_looks``-th time.
        is_late: compute a pass when it is joined, as late as a device could; False: when it begins.
    """

    def __init__(self, is_over: Callable[[int], bool], *, is_late: bool = True) -> None:
        self.num_begun = self.num_looks = 0
        self.is_marked = False
        self._is_over, self._is_late = is_over, is_late
        self._compute: Callable[[], Hidden] | None = None

    def mark(self) -> None:
        self.is_marked = True

    def begin(self, compute: Callable[[], Hidden]) -> None:
        assert self.is_marked and self._compute is None, "one pass at a time"
        self.is_marked, self.num_looks = False, 0
        self.num_begun += 1
        if not self._is_late:
            hidden = compute()
            self._compute = lambda: hidden
        else:
            self._compute = compute

    def is_over(self) -> bool:
        self.num_looks += 1
        return self._is_over(self.num_looks)

    def join(self) -> Hidden:
        assert self._compute is not None, "no pass was begun"
        compute, self._compute = self._compute, None
        return compute()

    @property
    def is_busy(self) -> bool:
        """Whether a pass is in flight."""
        return self._compute is not None


def serve_with_side_passes(llm: LLM, side: SideSteps) -> EngineCore:
    """Let an engine on a CPU compute prompts beside decodes as a server on a GPU does; return its core."""
    core = llm.core
    core._runner.side = side  # type: ignore[assignment]
    core._scheduler._may_overlap = lambda *_: True
    core._scheduler._prompts_first = False
    return core
