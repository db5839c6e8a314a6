"""The process that runs the engine, so that HTTP and JSON never hold the interpreter lock that its step loop needs.

The main thread runs the steps, one thread reads commands, and the output thread sends new outputs.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import BinaryIO

from rose_backend.config import EngineConfig
from rose_backend.engine.async_engine import StepLoop
from rose_backend.engine.messages import (
    Abort,
    Ack,
    AdapterAnswer,
    Add,
    Command,
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
    decode_command,
    encode,
    read_message,
)
from rose_backend.engine.output_thread import OutputHandler
from rose_backend.engine.outputs import RequestOutput
from rose_backend.engine.process_settings import LOG_FORMAT, begin_serving, note_imports
from rose_backend.engine.request import LoRARequest, UnloadAdapter
from rose_backend.engine.tokenizer_loading import TokenizerParts
from rose_backend.errors import EngineDeadError, RequestError, RoseError

logger = logging.getLogger(__name__)

EXIT_DEAD = 1
_MAX_UNACKED_BATCHES = 2
"""One that the API process handles, one in transit. Outputs made meanwhile are merged per request."""
_PIECE_BYTES = 1 << 18
"""Of a prompt's log-probabilities: a message that is read in less than a millisecond."""


class EngineProcess:
    """An engine that takes commands from one connection and sends its outputs there.

    Args:
        connection: to the API process.
        commands: messages from there, after the first one. At their end this process exits at once.

    Raises:
        ConfigError: the options do not fit the model or the machine.
        ModelError: the model cannot be loaded.
    """

    def __init__(self, config: EngineConfig, connection: socket.socket, commands: BinaryIO) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()
        # Each is changed by one thread alone: the output thread, the reader.
        self._num_batches = 0
        self._num_acks = 0
        # Requests whose prompts' log-probabilities were sent, until their last output. For the output thread.
        self._with_prompt: set[str] = set()
        self._tokenizer: Future[TokenizerParts] = Future()
        threading.Thread(target=self._read, args=(commands,), name="rose-commands", daemon=True).start()
        self._steps = StepLoop(config, OutputHandler(self._deliver, self._is_ready), self._tokenizer)
        self._core = self._steps.core

    def run(self) -> None:
        """Serve until ``Stop`` comes.

        Raises:
            EngineDeadError: a step failed; the API process has been sent one, too.
        """
        core = self._core
        begin_serving()
        self._send(
            Ready(
                options=asdict(core.config),
                vocab_size=core.input_processor.vocab_size,
                max_model_len=core.input_processor.max_model_len,
                num_blocks=core.num_blocks,
                counters=core.counters,
                eos_token_ids=core.input_processor.eos_token_ids,
            )
        )
        try:
            self._steps.run(self._refuse)
        except EngineDeadError as death:
            self._send(Error.of(death))
            raise

    def _refuse(self, request_id: str, error: RequestError) -> None:
        self._send(Refused(request_id, Error.of(error)))

    def _send(self, message: Message) -> None:
        content = encode(message)
        with self._send_lock:
            self._connection.sendall(content)

    # In the output thread.

    def _is_ready(self, request_id: str) -> bool:
        return self._num_batches - self._num_acks < _MAX_UNACKED_BATCHES

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        if outputs:
            self._send_prompt_logprobs(outputs)
            self._num_batches += 1
            self._send(OutputBatch([Update.of(output) for output in outputs]))

    def _send_prompt_logprobs(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            request_id, logprobs = output.request_id, output.prompt_logprobs
            if logprobs is not None and request_id not in self._with_prompt:
                self._with_prompt.add(request_id)
                for first, words in logprobs.pieces(_PIECE_BYTES):
                    self._send(PromptPiece.of(request_id, first, words))
            if output.finished:
                self._with_prompt.discard(request_id)

    # In the reader's thread.

    def _read(self, commands: BinaryIO) -> None:
        try:
            while (command := read_message(commands, decode_command)) is not None:
                self._handle(command)
        except BaseException:
            logger.exception("the engine process cannot read its commands")
        # The API process has ended, or sent what cannot be read and would wait forever. No state is worth saving.
        os._exit(EXIT_DEAD)

    def _handle(self, command: Command) -> None:
        if isinstance(command, Ack):
            self._num_acks += 1
        elif isinstance(command, Add):
            processor = self._core.input_processor
            request = processor.build(command.processed(), request_id=command.request_id, is_streaming=True)
            self._steps.put(request)
        elif isinstance(command, Abort):
            self._steps.put(command.request_id)
        elif isinstance(command, Unload):
            self._steps.put(UnloadAdapter(command.lora_id))
        elif isinstance(command, LoadAdapter):
            # Beside commands for requests.
            load = partial(self._load_adapter, command.lora)
            threading.Thread(target=load, name="rose-adapter", daemon=True).start()
        elif isinstance(command, TokenizerLoaded):
            self._tokenizer.set_result(command.parts)
        elif isinstance(command, GetCounters):
            self._send(Counted(self._core.counters))
        elif isinstance(command, Stop):
            self._steps.stop()

    # In a thread for each.

    def _load_adapter(self, lora: LoRARequest) -> None:
        error: Error | None = None
        try:
            self._core.adapter_table().load(lora)
        except RequestError as refusal:
            error = Error.of(refusal)
        self._send(AdapterAnswer(lora.lora_int_id, error))


def main() -> int:
    """Run the engine on the socket whose number is the first argument; return the exit code."""
    # A service manager may signal all processes of a server; this one ends with the API process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    commands = connection.makefile("rb")
    start_up = read_message(commands, decode_command)
    if not isinstance(start_up, StartUp):
        return EXIT_DEAD
    logging.basicConfig(format=LOG_FORMAT, stream=sys.stderr)
    logging.getLogger("rose_backend").setLevel(start_up.log_level)
    note_imports()
    try:
        engine = EngineProcess(EngineConfig(**start_up.options), connection, commands)
    except RoseError as error:
        connection.sendall(encode(Error.of(error)))
        return EXIT_DEAD
    try:
        engine.run()
    except EngineDeadError:
        logger.exception("the engine has died")
        return EXIT_DEAD
    return 0


if __name__ == "__main__":
    sys.exit(main())
