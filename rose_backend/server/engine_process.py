"""The process that runs the engine, so that HTTP and JSON never take the interpreter lock from its step loop.

Started by ``EngineClient``. The main thread runs the steps, one thread reads commands, and the engine's text thread
sends what is new in all streams as one message.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections import deque
from typing import BinaryIO

import numpy as np

from rose_backend.config import EngineConfig
from rose_backend.engine.core import EngineCore
from rose_backend.engine.interpreter import begin_serving
from rose_backend.engine.outputs import CompletionOutput, RequestOutput
from rose_backend.engine.step_loop import Command, carry_out, step_and_hold
from rose_backend.engine.text_worker import OutputSink, Readers
from rose_backend.errors import EngineDeadError, RequestError, RoseError
from rose_backend.server import engine_messages as messages
from rose_backend.server.engine_messages import Counters, Round, Update, encode, read_message
from rose_backend.server.settings import LOG_FORMAT

logger = logging.getLogger(__name__)

EXIT_DEAD = 1
_MAX_UNSEEN_ROUNDS = 2
"""One that the API process works on, one on its way. Texts that are made meanwhile wait and come in one piece."""


class Outgoing:
    """What the API process has been told about one request."""

    __slots__ = ("_done", "_num_sent", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._num_sent: dict[int, int] = {}
        self._done: set[int] = set()

    def update(self, output: RequestOutput) -> Update:
        """Return what ``output`` says beyond earlier ones."""
        pieces = [self._piece(completion) for completion in output.outputs if self._has_news(completion)]
        return self.number, output.num_cached_tokens, output.finished, pieces

    def _has_news(self, completion: CompletionOutput) -> bool:
        if completion.index in self._done:
            return False
        has_more = len(completion.token_ids) > self._num_sent.get(completion.index, 0)
        return has_more or completion.finish_reason is not None

    def _piece(self, completion: CompletionOutput) -> tuple[object, ...]:
        index = completion.index
        start = self._num_sent.get(index, 0)
        self._num_sent[index] = len(completion.token_ids)
        if completion.finish_reason is not None:
            self._done.add(index)
        # In the order of messages.Piece.
        return (
            index,
            completion.delta_text,
            completion.token_ids[start:],
            None if completion.logprobs is None else completion.logprobs[start:],
            completion.cumulative_logprob,
            completion.finish_reason,
            completion.stop_reason,
        )


class EngineProcess:
    """An engine that takes commands from one connection and sends its outputs there.

    Args:
        connection: to the API process.
        commands: what it sends, behind its first message. When that ends, so does this process, at any time.

    Raises:
        ConfigError: the options do not fit the model or the machine.
        ModelError: the model cannot be loaded.
    """

    def __init__(self, config: EngineConfig, connection: socket.socket, commands: BinaryIO) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()
        self._changed = threading.Condition()
        # Both guarded by the condition above.
        self._inbox: deque[Command] = deque()
        self._is_stopping = False
        # Each is changed by one thread alone: the text thread, the reader.
        self._num_rounds = 0
        self._num_seen = 0
        self._outgoing: dict[str, Outgoing] = {}
        self._request_ids: dict[int, str] = {}
        readers = Readers(self._is_ready, lambda: None)
        sink = OutputSink(self._deliver, readers, self._changed)
        threading.Thread(target=self._read, args=(commands,), name="rose-commands", daemon=True).start()
        self._core = EngineCore(config, is_online=True, sink=sink)

    def run(self) -> None:
        """Serve until told to stop.

        Raises:
            EngineDeadError: a step failed; the API process has been told.
        """
        core = self._core
        begin_serving()
        self._send(
            messages.Ready(
                config=core.config,
                vocab_size=core.factory.vocab_size,
                max_model_len=core.max_model_len,
                num_blocks=core.num_blocks,
                parts=core.parts,
                counters=Counters(core.stats, core.load),
            )
        )
        try:
            while self._take_commands():
                step_and_hold(core)
        except EngineDeadError as death:
            self._send(messages.Dead(str(death)))
            raise
        finally:
            core.close()

    def _take_commands(self) -> bool:
        """Carry out what was asked for, waiting while there is nothing to do. False: stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopping or self._inbox or self._core.can_step)
            commands, self._inbox = self._inbox, deque()
        for request_id, error in carry_out(self._core, commands):
            self._refuse(request_id, error)
        return not self._is_stopping

    def _refuse(self, request_id: str, error: RequestError) -> None:
        number = self._outgoing.pop(request_id).number
        self._request_ids.pop(number, None)
        self._send(messages.Refused(number, error))

    def _send(self, message: object) -> None:
        content = encode(message)
        with self._send_lock:
            self._connection.sendall(content)

    # In the text thread.

    def _is_ready(self, request_id: str) -> bool:
        return self._num_rounds - self._num_seen < _MAX_UNSEEN_ROUNDS

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        if not outputs:
            return
        updates = []
        for output in outputs:
            outgoing = self._outgoing[output.request_id]
            updates.append(outgoing.update(output))
            if output.finished:
                del self._outgoing[output.request_id]
                self._request_ids.pop(outgoing.number, None)
        self._num_rounds += 1
        self._send(Round(updates))

    # In the reader's thread.

    def _read(self, commands: BinaryIO) -> None:
        try:
            while (command := read_message(commands)) is not None:
                self._obey(command)
        except BaseException:
            logger.exception("the engine process cannot read its commands")
        # The API process has gone, however it did, or would wait for ever. Nothing here is worth a tidy end.
        os._exit(EXIT_DEAD)

    def _obey(self, command: object) -> None:
        if isinstance(command, messages.Seen):
            self._num_seen += 1
        elif isinstance(command, messages.Add):
            self._outgoing[command.request_id] = Outgoing(command.number)
            self._request_ids[command.number] = command.request_id
            ids = np.frombuffer(command.prompt_token_ids, np.int32).tolist()
            request = self._core.factory.make(
                ids, command.params, request_id=command.request_id, is_streaming=True
            )
            request.namespace = command.namespace
            self._tell(request)
        elif isinstance(command, messages.Abort):
            # It may have ended meanwhile.
            if (request_id := self._request_ids.get(command.number)) is not None:
                self._tell(request_id)
        elif isinstance(command, messages.AskCounters):
            self._send(Counters(self._core.stats, self._core.load))
        elif isinstance(command, messages.Stop):
            with self._changed:
                self._is_stopping = True
                self._changed.notify()

    def _tell(self, command: Command) -> None:
        with self._changed:
            self._inbox.append(command)
            self._changed.notify()


def main() -> int:
    """Run the engine on the socket whose number is the first argument; return the exit code."""
    # Whoever stops a server may signal all of its processes; the engine ends with the API process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    commands = connection.makefile("rb")
    start_up = read_message(commands)
    if not isinstance(start_up, messages.StartUp):
        return EXIT_DEAD
    logging.basicConfig(format=LOG_FORMAT, stream=sys.stderr)
    logging.getLogger("rose_backend").setLevel(start_up.log_level)
    try:
        engine = EngineProcess(start_up.config, connection, commands)
    except RoseError as error:
        connection.sendall(encode(messages.Failed(error)))
        return EXIT_DEAD
    try:
        engine.run()
    except EngineDeadError:
        logger.exception("the engine has died")
        return EXIT_DEAD
    return 0


if __name__ == "__main__":
    sys.exit(main())
