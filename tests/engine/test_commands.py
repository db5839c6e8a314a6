"""What is asked of an engine between two steps: in order, and what is refused comes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rose_backend import LLM
from rose_backend.engine.core import Command
from rose_backend.errors import QueueFullError
from tests.engine.conftest import GREEDY


def test_commands_are_carried_out_in_order_and_refusals_come_back(make_llm: Callable[..., LLM]) -> None:
    core = make_llm(max_queue_size=2, max_num_seqs=1).core
    requests = {name: core.input_processor.make("text", GREEDY, request_id=name) for name in "abcd"}
    commands: deque[Command] = deque(
        [requests["a"], requests["b"], requests["c"], "a", "nobody", requests["d"]]
    )
    ((name, error),) = core.carry_out(commands)
    assert not commands
    # The queue was full for the third; when the first was ended there was room again.
    assert name == "c" and isinstance(error, QueueFullError)
    finished = {}
    while core.num_unfinished:
        finished |= {output.request_id: output.outputs[0].finish_reason for output in core.step()}
    assert finished == {"a": "abort", "b": "length", "d": "length"}
