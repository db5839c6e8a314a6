"""What a thread that runs an engine's steps does, whoever it serves."""

from __future__ import annotations

import time
from collections import deque

from rose_backend.engine.core import EngineCore
from rose_backend.engine.request import Request
from rose_backend.errors import RequestError

Command = Request | str
"""A request to serve, or the id of one to end."""


def carry_out(core: EngineCore, commands: deque[Command]) -> list[tuple[str, RequestError]]:
    """Carry out ``commands`` in their order, and take each out.

    Returns:
        The id of each request that the engine refuses, and why: a preemption may have filled the queue since whoever
        asked was let in.

    Raises:
        EngineDeadError: the engine has failed before.
    """
    refused: list[tuple[str, RequestError]] = []
    while commands:
        command = commands.popleft()
        if isinstance(command, str):
            core.end(command)
            continue
        try:
            core.add(command)
        except RequestError as error:
            refused.append((command.request_id, error))
    return refused


def step_and_hold(core: EngineCore) -> None:
    """Run a step, then let requests come in while the device is busy for some time yet.

    Raises:
        EngineDeadError: see ``EngineCore.step``.
    """
    core.step()
    if hold_s := core.hold_s:
        time.sleep(hold_s)
