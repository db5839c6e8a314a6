"""RemoteEngine: an engine in a separate process, which the API process starts and talks to over a socket.

``messages.py`` says what is sent. The socket pair is made by the API process and inherited by the engine process alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path

import rose_backend
from rose_backend.config import EngineConfig
from rose_backend.engine.client import EngineClient, OutputStream
from rose_backend.engine.messages import (
    HEADER,
    Abort,
    Ack,
    AdapterAnswer,
    Add,
    Answer,
    Counted,
    Error,
    GetCounters,
    LoadAdapter,
    Message,
    OutputBatch,
    PromptPiece,
    Ready,
    Refused,
    StartUp,
    Stop,
    TokenizerLoaded,
    Unload,
    Update,
    decode_answer,
    encode,
    read_message,
)
from rose_backend.engine.outputs import Counters
from rose_backend.engine.process_settings import begin_serving, end_serving
from rose_backend.engine.request import LoRARequest, ProcessedInput
from rose_backend.engine.structured_outputs import MAX_GRAMMAR_LENGTH
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.engine.tokenizer_loading import load_tokenizer
from rose_backend.errors import EngineDeadError
from rose_backend.models.weights import resolve_model_path

logger = logging.getLogger(__name__)

_PACKAGE_ROOT = Path(rose_backend.__file__).resolve().parent.parent
_SOCKET_BUFFER_BYTES = 4 << 20
"""Room for some batches of outputs, so that the engine's output thread does not wait for this process."""
_ENGINE_PROGRAM = (
    "import sys; sys.path.append(sys.argv[2]); "
    "from rose_backend.engine.engine_process import main; sys.exit(main())"
)
"""The end of the path is where this process imported the package from, which may not be installed."""
_END_TIMEOUT_S = 10.0
"""How long an engine process that was told to stop may take until it is killed."""
_HEARTBEAT_INTERVAL_S = 5.0
"""How often the engine process is pinged; a separate thread answers, however long a step takes."""
_HEARTBEAT_TIMEOUT_S = 10.0
"""After so long without any message the engine counts as stalled, until the next one."""
_COUNTERS_TIMEOUT_S = 1.0
"""How long metrics wait for the engine's present counters."""
_MAX_COUNTER_WAITERS = 64
MAX_UNREAD_BYTES = 256 << 20
"""Memory of requests that the engine process has not read; others wait until it has."""
_BYTES_PER_REQUEST, _BYTES_PER_TOKEN, _BYTES_PER_GRAMMAR = 8 << 10, 48, 4 * MAX_GRAMMAR_LENGTH
"""Memory that a request takes in this process: tasks and outputs; its token ids as an array, a list, a message; and its
grammar's text, which each message holds."""


def num_waiting_bytes(prompt: ProcessedInput) -> int:
    """Return about how much memory a request takes until an engine process has read it."""
    num_bytes = _BYTES_PER_REQUEST + _BYTES_PER_TOKEN * len(prompt.token_ids)
    return num_bytes + (_BYTES_PER_GRAMMAR if prompt.params.structured_outputs is not None else 0)


class RemoteEngine(EngineClient):
    """An engine in a separate process, for one event loop.

    The constructor blocks until the model is loaded. ``start`` has to be awaited on the event loop that will serve.

    Args:
        use_tokenizer: called with the tokenizer while the model is loading; its errors end the start.

    Raises:
        ConfigError: the options do not fit the model or the machine.
        ModelError: the model cannot be loaded.
        EngineDeadError: the process ended while it was loading.
    """

    def __init__(self, config: EngineConfig, use_tokenizer: Callable[[Tokenizer], None]) -> None:
        # Before the process is started, so that a wrong path is reported at once.
        directory = resolve_model_path(config.model)
        self._process, self._socket = _start_process(config)
        self._end_process = weakref.finalize(self, _kill, self._process)
        try:
            parts = load_tokenizer(directory)
            _send_at_start(self._socket, TokenizerLoaded(parts))
            tokenizer = Tokenizer(parts)
            use_tokenizer(tokenizer)
            ready = self._wait_until_ready()
        except BaseException:
            self._end_process()
            raise
        super().__init__(threading.Condition())
        self.config = EngineConfig(**ready.options)
        self.num_blocks = ready.num_blocks
        self.input_processor = ready.input_processor(tokenizer)
        self._counters = ready.counters
        # Each with what had been sent when it asked.
        self._counter_waiters: deque[tuple[asyncio.Future[None], int]] = deque()
        self._room_waiter: asyncio.Future[None] | None = None
        # Of adapters that are being loaded, by id.
        self._adapter_waiters: dict[int, asyncio.Future[None]] = {}
        # Memory of the requests that were sent to the engine process, and of those that it has read for certain.
        self._num_sent_bytes = 0
        self._num_read_bytes = 0
        self._num_messages = 0
        self._unsent: list[bytes] = []
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._heartbeats: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve requests of the running event loop."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=_SOCKET_BUFFER_BYTES)
        self._reading = asyncio.create_task(self._read(reader))
        self._heartbeats = asyncio.create_task(self._watch_heartbeats())
        begin_serving()

    async def wait_for_room(self) -> None:
        """Do what ``EngineClient.wait_for_room`` does."""
        self._check_running()
        while self._num_sent_bytes - self._num_read_bytes > MAX_UNREAD_BYTES:
            # One question for all that wait.
            if self._room_waiter is None or self._room_waiter.done():
                self._room_waiter = self._ask()
            await asyncio.wait([self._room_waiter], timeout=_COUNTERS_TIMEOUT_S)
            self._check_running()

    async def counters(self) -> Counters:
        """Do what ``EngineClient.counters`` does."""
        if self.is_running and not self.is_stalled and len(self._counter_waiters) < _MAX_COUNTER_WAITERS:
            await asyncio.wait([self._ask()], timeout=_COUNTERS_TIMEOUT_S)
        return self._counters

    async def load_adapter(self, lora: LoRARequest) -> None:
        """Do what ``EngineClient.load_adapter`` does."""
        self._check_running()
        command = encode(LoadAdapter(lora))
        waiter = self._adapter_waiters[lora.lora_int_id] = asyncio.get_running_loop().create_future()
        self._send_encoded(command)
        await waiter

    def unload_adapter(self, lora_id: int) -> None:
        """Do what ``EngineClient.unload_adapter`` does."""
        self._send(Unload(lora_id))

    async def shutdown(self) -> None:
        """Do what ``EngineClient.shutdown`` does."""
        if self.is_running:
            self._is_stopping = True
            self._send(Stop())
            end_serving()
            self._fail_all(EngineDeadError("the engine was shut down"))
        try:
            await asyncio.to_thread(self._process.wait, _END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("the engine process does not end after %g s; killing it", _END_TIMEOUT_S)
        self._end_process()
        if self._reading is not None:
            await self._reading

    def _submit(self, prompt: ProcessedInput, stream: OutputStream) -> None:
        # What cannot be sent is refused before anything waits for its answer.
        command = encode(Add.of(stream.request_id, prompt))
        self._register(stream)
        self._num_sent_bytes += num_waiting_bytes(prompt)
        stream.prompt, stream.prompt_token_ids = prompt.prompt, prompt.token_ids.tolist()
        stream.prompt_logprobs = self.input_processor.make_prompt_logprobs(prompt)
        self._send_encoded(command)

    def _end(self, stream: OutputStream) -> None:
        self._send(Abort(stream.request_id))

    def _ask(self) -> asyncio.Future[None]:
        """Ask for counters; the result is done when they have come, and cancelled at the end."""
        waiter = asyncio.get_running_loop().create_future()
        self._counter_waiters.append((waiter, self._num_sent_bytes))
        self._send(GetCounters())
        return waiter

    async def _watch_heartbeats(self) -> None:
        """Keep ``is_stalled`` up to date while the engine runs."""
        while self.is_running:
            num_messages, waiter = self._num_messages, self._ask()
            await asyncio.wait([waiter], timeout=_HEARTBEAT_TIMEOUT_S)
            if waiter.done():
                await asyncio.sleep(_HEARTBEAT_INTERVAL_S)
            elif self._num_messages == num_messages:
                self.is_stalled = True
                logger.error(
                    "the engine process has not answered for %g s; new requests are refused until it does",
                    _HEARTBEAT_TIMEOUT_S,
                )
                await asyncio.wait([waiter])

    def _send(self, command: Message) -> None:
        self._send_encoded(encode(command))

    def _send_encoded(self, command: bytes) -> None:
        """Send all commands of one turn of the event loop at once: each read in the engine process takes the
        interpreter lock from the step loop."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(command)

    def _flush(self) -> None:
        assert self._writer is not None, "start() comes first"
        if self._death is None:
            self._writer.write(b"".join(self._unsent))
        self._unsent.clear()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Handle messages of the engine process until it ends."""
        try:
            while True:
                (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                self._handle(decode_answer(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # it has ended
        except Exception:
            logger.exception("the engine process sent a message that cannot be handled")
            self._process.kill()
        status = await asyncio.to_thread(self._process.wait)
        if self.is_running:
            self._note_death(f"the engine process ended with {_describe_status(status)}")

    def _handle(self, message: Answer) -> None:
        self._num_messages += 1
        if self.is_stalled:
            self.is_stalled = False
            logger.warning("the engine process answers again")
        if isinstance(message, OutputBatch):
            for update in message.updates:
                self._hand_over(update)
            # Runs after the tasks of these requests, which have just become ready.
            asyncio.get_running_loop().call_soon(self._send, Ack())
        elif isinstance(message, PromptPiece):
            stream = self._streams.get(message.request_id)
            if stream is not None and stream.prompt_logprobs is not None:
                stream.prompt_logprobs.write(message.first, message.words())
        elif isinstance(message, Refused):
            stream = self._streams.pop(message.request_id, None)
            if stream is not None:
                stream.put(message.error.refusal())
        elif isinstance(message, AdapterAnswer):
            loaded = self._adapter_waiters.pop(message.lora_id, None)
            if loaded is not None and not loaded.done():
                if message.error is None:
                    loaded.set_result(None)
                else:
                    loaded.set_exception(message.error.refusal())
        elif isinstance(message, Counted):
            self._counters = message.counters
            waiter, self._num_read_bytes = self._counter_waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
        elif isinstance(message, Error):
            self._note_death(message.text)

    def _hand_over(self, update: Update) -> None:
        # None: all have failed, and the engine has not heard that it should stop.
        take = self._streams.pop if update.finished else self._streams.get
        stream = take(update.request_id, None)
        if stream is not None:
            stream.put(update.output(stream.prompt, stream.prompt_token_ids, stream.prompt_logprobs))

    def _note_death(self, message: str) -> None:
        logger.error("%s", message)
        if self.is_running:
            self._death = EngineDeadError(message)
            end_serving()
            self._fail_all(self._death)

    def _fail_all(self, error: EngineDeadError) -> None:
        for stream in self._take_all():
            stream.put(error)
        for loading in self._adapter_waiters.values():
            if not loading.done():
                loading.set_exception(error)
        # Waiters stay queued: an engine process that was told to stop may still answer earlier requests for counters.
        for waiter, _ in self._counter_waiters:
            waiter.cancel()
        if self._heartbeats is not None:
            self._heartbeats.cancel()

    def _wait_until_ready(self) -> Ready:
        with self._socket.makefile("rb") as stream:
            try:
                message = read_message(stream, decode_answer)
            except ValueError as error:
                raise EngineDeadError(f"the engine process sent what cannot be read ({error})") from error
        if isinstance(message, Error):
            raise message.restored()
        if not isinstance(message, Ready):
            status = _describe_status(self._process.wait())
            raise EngineDeadError(f"the engine process ended with {status} while it was loading the model")
        return message


def _start_process(config: EngineConfig) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Return the process and this end of the connection to it."""
    ours, its = socket.socketpair()
    with its:
        for end in (ours, its):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        process = subprocess.Popen(
            [sys.executable, "-c", _ENGINE_PROGRAM, str(its.fileno()), str(_PACKAGE_ROOT)],
            # No module is imported from the current directory, here or in processes that the engine starts.
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
            # Ctrl-C is for this process, which lets running requests finish.
            process_group=0,
        )
    _send_at_start(ours, StartUp.of(config, logging.getLogger("rose_backend").getEffectiveLevel()))
    return process, ours


def _send_at_start(connection: socket.socket, message: Message) -> None:
    # If the process has ended already, reading its first message reports that.
    with contextlib.suppress(ConnectionError):
        connection.sendall(encode(message))


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def _describe_status(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    # Real-time signals have no names.
    names = {each.value: each.name for each in signal.Signals}
    return f"signal {names.get(-status, -status)}"
