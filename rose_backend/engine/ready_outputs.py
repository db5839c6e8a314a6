"""Outputs on their way from the text thread to the caller of ``EngineCore.step``."""

from __future__ import annotations

from collections import deque

from rose_backend.engine.outputs import RequestOutput


class ReadyOutputs:
    """A queue: the text thread puts in, the step loop takes out."""

    def __init__(self) -> None:
        self._outputs: deque[RequestOutput] = deque()

    def __len__(self) -> int:
        return len(self._outputs)

    def put(self, outputs: list[RequestOutput]) -> None:
        """Append ``outputs``."""
        self._outputs.extend(outputs)

    def take(self) -> list[RequestOutput]:
        """Return all there are, oldest first."""
        # One by one: the other thread may append meanwhile.
        return [self._outputs.popleft() for _ in range(len(self._outputs))]

    def take_last(self, request_id: str) -> RequestOutput | None:
        """Return a request's last output, if it is here, and drop its earlier ones: nobody has seen them, so what was
        new in them is new in the last."""
        outputs = self.take()
        own = [output for output in outputs if output.request_id == request_id]
        if not own or not own[-1].finished:
            self._outputs.extendleft(reversed(outputs))
            return None
        self._outputs.extendleft(output for output in reversed(outputs) if output.request_id != request_id)
        for completion in own[-1].outputs:
            earlier = [output.outputs for output in own if completion.index < len(output.outputs)]
            completion.delta_text = "".join(outputs[completion.index].delta_text for outputs in earlier)
        return own[-1]
